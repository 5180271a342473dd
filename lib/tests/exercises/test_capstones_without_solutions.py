"""The capstones that have no solution: wrong answers are rejected, and what is right but the launch says so."""

import re
import subprocess
from types import SimpleNamespace

from lib.exercises import NotSolved, Wrong, capstones, expect_second_derivative, judge
from lib.exercises.capstones import CAPSTONES, PARTS, check, main
from lib.recorded.results import ROOT
from lib.tests.exercises.wrong_answers import capstones as wrong

import pytest
import torch
from torch.autograd.function import once_differentiable

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


@pytest.mark.parametrize("part", PARTS)
def test_no_part_gives_a_point_to_pytorch(part):
    verdict = judge(PARTS[part], getattr(wrong, f"{part.split('.')[0]}__in_pytorch"))
    assert verdict.status == "wrong" and re.search("PyTorch runs|no product", verdict.message)


def test_the_parts_together_ask_all_that_the_check_asks():
    for name, checkers in (
        ("gated_rms_norm", capstones._GATED),
        ("scaled_linear", capstones._SCALED),
    ):
        parts = capstones._PARTS[name]
        assert set(checkers) <= {checker for part in parts.values() for checker in part}
        assert sum(PARTS[f"{name}.{p}"].level for p in parts) == CAPSTONES[name].level


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("in_pytorch", "forward gradients promises"),
        ("gate_frozen", "forward"),
        ("takes_any_shape", "gradients promises"),
        ("sigmoid", ""),
    ],
)
def test_each_part_has_a_point_of_its_own(answer, passed, monkeypatch):
    """As if the launch were right, which nothing in the repository has."""
    monkeypatch.setattr(capstones, "_expect_one_launch", lambda *_: None)
    traffic = SimpleNamespace(launches=1, bytes_moved=5 * 512 * 96 * 4)
    monkeypatch.setattr(capstones, "count_traffic", lambda _: traffic)
    answer = getattr(wrong, f"gated_rms_norm__{answer}")
    verdicts = {p: judge(e, answer) for p, e in PARTS.items() if p.startswith("gated")}
    right = [part.split(".")[1] for part, v in verdicts.items() if v.status == "right"]
    assert right == passed.split(), verdicts


def test_a_second_derivative_lost_by_pytorchs_once_differentiable_says_why():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            return 3 * ctx.saved_tensors[0] ** 2 * dy

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(Wrong, match="once_differentiable lies in a node that .* in notebook 60"):
        expect_second_derivative(Cube.apply, lambda x: x**3, x)
    museum = (ROOT / "notebooks/60_bug_museum.ipynb").read_text()
    assert "### 23 · The second derivative" in museum


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
        assert f"{capstone.minutes // 60} hours" in PAGE


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
