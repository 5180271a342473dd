"""The copy promise: what `make copy` writes, and the files as they are, work in an empty folder."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib

from lib import machine
from lib.measure import registry
from lib.ops import _host
from lib.recorded.results import ROOT
from lib.standalone import standalone
from lib.tests.ops.cases import release

import numpy as np
import pytest
import torch
import triton
from torch.utils import cpp_extension

FILES = [ROOT / "lib/ops" / f"{name}.py" for name in registry.OPS]
files = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
ALLOWED = {"torch", "triton", *sys.stdlib_module_names}


@files
def test_imports_only_torch_triton_and_the_standard_library(path):
    for node in ast.walk(ast.parse(standalone(path.stem))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in ALLOWED, f"line {node.lineno}: {name}"


def test_a_copy_says_whose_it_is_and_which():
    """MIT asks for the notice; a version tells what has changed since."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for path in [*FILES, *(ROOT / "lib/ops").glob("*.cu")]:
        mark = "#" if path.suffix == ".py" else "//"
        licence, copyright_, *_ = path.read_text().splitlines()
        assert licence == f"{mark} SPDX-License-Identifier: MIT"
        authors = "Copyright (c) 2026 The Fused Kernels authors"
        assert copyright_ == f"{mark} {authors}; Fused Kernels {version}, lib/ops/{path.name}"
        assert authors in (ROOT / "LICENSE").read_text()


SCRIPT = """
import torch
from {name} import {name}_eager, {name}_triton
def assert_close(a, b, dtype):
    assert (a - b).norm() <= 16 * torch.finfo(dtype).eps * b.norm() + 1e-6, (dtype, a, b)
def draw(shape, dtype):
    # -1, 0 and 1: sums of products come out exactly, and no rounding flips a sign before a relu
    return torch.randint(-1, 2, shape).to("{device}", dtype)
def is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    ours = [{inputs}]
    exact = [t.detach().double().requires_grad_(t.requires_grad) if is_float(t) else t for t in ours]
    got, want = {name}_triton(*ours, **{arguments}), {name}_eager(*exact, **{arguments})
    got, want = ([t] if isinstance(t, torch.Tensor) else t for t in (got, want))
    for y, exact_y in zip(got, want, strict=True):
        assert_close(y, exact_y, dtype)
    dys = [torch.randn(y.shape).to(y) for y in got]
    torch.autograd.backward(got, dys)
    torch.autograd.backward(want, [dy.double() for dy in dys])
    for a, b in zip(ours, exact):
        if is_float(a) and a.requires_grad:
            assert_close(a.grad, b.grad, dtype)
import sys
assert sys.modules.get("lib") is None
print("ran")
"""


ROPE_SCRIPT = """
import torch
from rope import rope_eager, rope_tables, rope_triton
q, k = (torch.randn(2, 5, h, 8, device="{device}", requires_grad=True) for h in (4, 2))
cos, sin = rope_tables(5, 8, device="{device}")
ours, want = rope_triton(q, k, cos, sin), rope_eager(q, k, cos, sin)
torch.testing.assert_close(ours, want)
grads = [torch.autograd.grad([y.square().sum() for y in ys], [q, k]) for ys in (ours, want)]
torch.testing.assert_close(*grads)
import sys
assert sys.modules.get("lib") is None
print("ran")
"""


def _source(t, device):
    """What makes an input like this one, in SCRIPT: a tensor, or what is none."""
    if not isinstance(t, torch.Tensor):
        return repr(t)
    if not t.is_floating_point():
        return f"torch.tensor({t.tolist()}, device={str(device)!r}, dtype={t.dtype})"
    return f"draw({tuple(t.shape)}, dtype).requires_grad_({t.requires_grad})"


def _script(path, device):
    op = registry.find(path.stem).configured()
    if op.name == "rope":
        return ROPE_SCRIPT.format(device=device)
    inputs = op.inputs(op.odd_shapes[2], torch.float32, machine.device())
    inputs = ", ".join(_source(t, device) for t in inputs)
    return SCRIPT.format(name=op.name, device=device, inputs=inputs, arguments=op.arguments)


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
LOOPS_FAIL = not machine.HAS_GPU and release(triton) < (3, 7) and release(np) >= (2, 4)


interpreter_loops = pytest.mark.skipif(
    LOOPS_FAIL, reason="triton 3.6's own interpreter cannot loop with NumPy 2.4"
)
INTERPRETED = {} if machine.HAS_GPU else {"TRITON_INTERPRET": "1"}

ALL_IN_ONE = """
import os, sys
sys.modules["lib"] = None  # to import it is an error, wherever Python would have found it
scripts = {scripts}
for folder, script in scripts.items():
    print(os.path.basename(folder), end=" ", flush=True)
    os.chdir(folder)
    exec(script, {{"__name__": "__main__"}})
"""


@interpreter_loops
def test_copies_run_alone_one_after_another(tmp_path):
    """One process, so that torch is imported once; each file in a folder of its own, found by its name."""
    scripts = {}
    for path in FILES:
        folder = tmp_path / path.stem
        folder.mkdir()
        (folder / path.name).write_text(standalone(path.stem))
        scripts[str(folder)] = _script(path, machine.device())
    done = _run(tmp_path, ALL_IN_ONE.format(scripts=scripts), **INTERPRETED)
    expected = "".join(f"{path.stem} ran\n" for path in FILES)
    assert done.stdout == expected, f"after {done.stdout}: {done.stderr[-2000:]}"


@files
@interpreter_loops
def test_copied_alone_it_runs_forward_and_backward(path, tmp_path):
    (tmp_path / path.name).write_text(standalone(path.stem))
    done = _run(tmp_path, _script(path, machine.device()), **INTERPRETED)
    assert done.stdout.strip() == "ran", done.stderr[-2000:]


CUDA_FILES = [path for path in FILES if path.with_suffix(".cu").exists()]
CUDA_SCRIPT = """
import torch, {name}
{name}.{name}_cuda(*[torch.randn(8, 8)] * {n_matrices}, *[torch.randn(8)] * {n_rows})
"""


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda p: p.stem)
@pytest.mark.skipif(machine.HAS_GPU, reason="there is a GPU")
def test_cuda_copied_alone_with_no_gpu_says_what_to_do(path, tmp_path):
    (tmp_path / path.name).write_text(standalone(path.stem))
    shutil.copy(path.with_suffix(".cu"), tmp_path)
    specs = list(registry.find(path.stem).tensors.values())[: 2 if path.stem == "matmul" else 3]
    n_rows = specs.count("N")
    script = CUDA_SCRIPT.format(name=path.stem, n_matrices=len(specs) - n_rows, n_rows=n_rows)
    done = _run(tmp_path, script, TRITON_INTERPRET="1")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "must be on a GPU" in last, done.stderr[-2000:]


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda p: p.stem)
def test_the_lock_of_a_build_that_was_killed_is_no_obstacle(path, tmp_path, monkeypatch):
    """PyTorch waits for that lock without end."""
    module = importlib.import_module(f"lib.ops.{path.stem}")
    lock = tmp_path / f"{path.stem}_cuda" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    moved = not hasattr(module, "_cuda")
    monkeypatch.setattr(*((_host, "ON_CPU") if moved else (module, "_ON_CPU")), False)
    monkeypatch.setattr(cpp_extension, "load_inline", lambda *_, **__: seen.append(lock.exists()))
    seen = []
    _host.load_cuda.__wrapped__(path) if moved else module._cuda.__wrapped__()
    assert seen == [False]


@files
def test_copied_alone_with_no_gpu_it_says_what_to_do(path, tmp_path):
    """No interpreter, no GPU: a ValueError in a sentence, not a segfault."""
    (tmp_path / path.name).write_text(standalone(path.stem))
    done = _run(tmp_path, _script(path, "cpu"), CUDA_VISIBLE_DEVICES="")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "must be on a GPU" in last, done.stderr[-2000:]
