"""The copy promise: a file of lib/ops, alone in an empty folder, imports and works."""

import ast
import os
import shutil
import subprocess
import sys

from lib import machine
from lib.results import ROOT

import numpy as np
import pytest
import triton

FILES = sorted(p for p in (ROOT / "lib/ops").glob("*.py") if p.stem != "__init__")
files = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
ALLOWED = {"torch", "triton", *sys.stdlib_module_names}


@files
def test_imports_only_torch_triton_and_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in ALLOWED, f"line {node.lineno}: {name}"


SCRIPT = """
import torch
from {name} import {name}_eager, {name}_triton
x = torch.randn(5, 40, device="{device}", requires_grad=True)
bias = torch.randn(40, device="{device}", requires_grad=True)
y = {name}_triton(x, bias)
torch.testing.assert_close(y, {name}_eager(x, bias))
y.sum().backward()
torch.testing.assert_close(bias.grad, (y > 0).sum(0).float())
import sys
assert "lib" not in sys.modules
print("ran")
"""


def _run(folder, script, **extra):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment | extra,
        capture_output=True,
        text=True,
    )


# Without lib's repairs: int() of a one-element array, which NumPy no longer takes
LOOPS_FAIL = (
    not machine.HAS_GPU
    and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)
)


@files
@pytest.mark.skipif(LOOPS_FAIL, reason="triton 3.6's own interpreter cannot loop with NumPy 2.4")
def test_copied_alone_it_runs_forward_and_backward(path, tmp_path):
    shutil.copy(path, tmp_path)
    extra = {} if machine.HAS_GPU else {"TRITON_INTERPRET": "1"}
    script = SCRIPT.format(name=path.stem, device=machine.device())
    done = _run(tmp_path, script, **extra)
    assert done.stdout.strip() == "ran", done.stderr[-2000:]


@files
def test_copied_alone_with_no_gpu_it_says_what_to_do(path, tmp_path):
    """No interpreter, no GPU: a ValueError in a sentence, not a segfault."""
    shutil.copy(path, tmp_path)
    done = _run(tmp_path, SCRIPT.format(name=path.stem, device="cpu"), CUDA_VISIBLE_DEVICES="")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "must be on a GPU" in last, done.stderr[-2000:]
