"""The capstones that have no solution: wrong answers are rejected, and what is right but the launch says so."""

import re
import subprocess

from lib.exercises import NotSolved
from lib.exercises.capstones import CAPSTONES, check, main
from lib.recorded.results import ROOT
from lib.tests.exercises.wrong_answers import capstones as wrong

import pytest
import torch

PAGE = (ROOT / "notebooks/capstones.md").read_text()
NAMES = [name for name in vars(wrong) if name.split("__")[0] in CAPSTONES]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_capstone_is_rejected(name):
    verdict = check(name.split("__")[0], getattr(wrong, name))
    assert verdict.status == "wrong", verdict
    assert len(verdict.message) > 15, verdict


def test_each_has_ten_wrong_answers_or_more():
    assert all(sum(n.startswith(f"{name}__") for n in NAMES) >= 10 for name in CAPSTONES)


@pytest.mark.parametrize("name", CAPSTONES)
@pytest.mark.parametrize("stub", [None, ..., lambda *_: None, lambda *_: ...])
def test_a_stub_is_open(name, stub):
    assert check(name, stub).status == "open"


@pytest.mark.parametrize("name", CAPSTONES)
def test_what_is_right_in_pytorch_lacks_a_launch_alone(name):
    """So all that is asked of values, gradients, errors and saved tensors is what eager code does by itself."""
    verdict = check(name, getattr(wrong, f"{name}__in_pytorch"))
    assert re.search("PyTorch runs|no product by tl.dot", verdict.message), verdict


def test_the_readers_random_numbers_are_not_touched():
    state = torch.random.get_rng_state()
    check("gated_rms_norm", wrong.gated_rms_norm__sigmoid)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_strict_check_raises(monkeypatch):
    monkeypatch.setenv("FUSED_KERNELS_STRICT", "1")
    with pytest.raises(NotSolved, match="✘ scaled_linear"):
        check("scaled_linear", wrong.scaled_linear__no_bias)
    with pytest.raises(NotSolved, match="○ scaled_linear"):
        check("scaled_linear", None)


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match="gated_rms_norm, scaled_linear"):
        check("softmax", None)


def test_in_the_shell_a_file_is_checked(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def gated_rms_norm(x, gate, weight, eps=1e-6):\n    return x * gate\n")
    assert main(["gated_rms_norm", str(file)])
    assert capsys.readouterr().out.startswith("✘ gated_rms_norm at shape")
    file.write_text("x = 1\n")
    assert main(["gated_rms_norm", str(file)])
    assert capsys.readouterr().out.startswith("○")


def test_the_page_states_each_and_defines_it_as_the_check_does():
    names = {"torch": torch, "F": torch.nn.functional}
    for piece in re.findall(r"```python\n(def .*?)```", PAGE, re.DOTALL):
        exec(piece, names)
    x, gate, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    want = wrong.gated_rms_norm_eager(x, gate, weight, 0.1)
    assert torch.equal(names["gated_rms_norm"](x, gate, weight, 0.1), want)
    inputs = [torch.randn(shape) for shape in ((3, 5), (4, 5), (4,), (4,), (3, 4))]
    assert torch.equal(names["scaled_linear"](*inputs), wrong.scaled_linear_eager(*inputs))
    for name, capstone in CAPSTONES.items():
        assert f"## {capstone.title}" in PAGE and f'check("{name}"' in PAGE


def test_no_file_of_the_repository_solves_them():
    """A kernel for one would have its name."""
    command = ["git", "grep", "-lE", "gated_rms_norm|scaled_linear"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode > 1:
        pytest.skip("not a git checkout")
    may = {
        "lib/exercises/capstones.py",
        "notebooks/capstones.md",
        "notebooks/teaching.md",
        "CHANGELOG.md",
    }
    others = {n for n in listed.stdout.split() if not n.startswith("lib/tests/")} - may
    assert not others
