"""The line of Python that an event comes from: found in real profiles, told without a machine's folders."""

import os
import subprocess
import sys

from lib import machine, profiling
from lib.profiling import cost as bill
from lib.profiling import stack
from lib.profiling import trace as kineto
from lib.recorded.results import ROOT

import pytest
import torch


@pytest.mark.parametrize(
    ("file", "readers"),
    [
        ("/tmp/ipykernel_12/345.py", True),
        ("train.py", True),
        (f"{ROOT}/lib/dlrm/model.py", True),
        ("lib/dlrm/model.py", True),
        (f"{ROOT}/lib/profiling/capture.py", False),
        ("torch/optim/adam.py", False),
        (torch.__file__, False),
        ("threading.py", False),
        ("<frozen importlib>", False),
        ("/tmp/torchinductor_me/ab/cab.py", False),
    ],
)
def test_whose_code_a_file_is(file, readers):
    assert stack.is_readers(file) == readers


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (("/tmp/ipykernel_12/345.py", 3, "step"), "cell:3 step"),
        (("/code/of/a/reader/train.py", 3, "step"), "train.py:3 step"),
        (
            (f"{ROOT}/lib/profiling/stack.py", 1, "f"),
            f"lib/profiling/stack.py:1 f: {stack.__doc__[:30]}",
        ),
        (("train.py", 3, "step", False), "train.py:3 step, somewhere below"),
    ],
)
def test_places_are_told_without_folders(place, told):
    assert stack.told(*place).replace('"""', "").startswith(told)


def test_a_long_line_is_cut():
    place = f"{ROOT}/lib/profiling/stack.py", 1, "f"
    assert len(stack.told(*place)) <= len("lib/profiling/stack.py:1 f: ") + 60
    assert stack.told(*place).endswith("…")


def places_of(fn):
    profile = profiling.profiled(fn, stack=True)
    return [row["where"] for row in bill.syncs(kineto.events_of(profile))]


def test_the_line_of_item():
    x = torch.ones(3, device=machine.device())

    def step():
        y = x + 1
        return y.sum().item()  # this one

    (where,) = places_of(step)
    assert where.startswith("lib/tests/profiling/test_stack.py:")
    assert where.endswith("step: return y.sum().item()  # this one")


def test_a_call_deep_in_torch_is_told_by_the_line_of_ours():
    x = torch.ones(3, device=machine.device())
    assert "torch.unique(x)" in places_of(lambda: torch.unique(x))[0]


def test_where_python_makes_no_call_the_function_is_known():
    x = torch.ones(3, device=machine.device())

    def branches():
        if x[0] > 0:
            return 1
        return 2

    (where,) = places_of(branches)
    assert where.endswith("branches, somewhere below")


def test_without_stacks_there_is_no_line():
    x = torch.ones(3, device=machine.device())
    profile = profiling.profiled(lambda: x.sum().item())
    assert [row["where"] for row in bill.syncs(kineto.events_of(profile))] == [""]


CODE = """from lib import machine, profiling
from lib.profiling import cost as bill
import torch
def step():
    return torch.ones(3, device=machine.device()).sum().item()
[row["where"] for row in bill.syncs(profiling.events_of(profiling.profiled(step, stack=True)))]
"""


def test_in_a_notebook_the_cell_is_named():
    from lib.recorded import notebooks

    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    notebooks.execute(notebook, ROOT)
    (output,) = [o for o in notebook.cells[0].outputs if o.output_type == "execute_result"]
    told = "['cell:5 step: return torch.ones(3, device=machine.device()).sum().item()']"
    assert output.data["text/plain"] == told


def test_a_script_elsewhere_is_named_by_its_file_alone(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(CODE.replace("\n[", "\nprint([").rstrip() + ")\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, script]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    told = "['mine.py:5 step: return torch.ones(3, device=machine.device()).sum().item()']"
    assert done.stdout.strip() == told, done.stderr
