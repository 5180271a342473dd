"""The copy promise: what `make copy` writes, and the files as they are, work in an empty folder."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib

from lib import machine
from lib.measure import registry
from lib.ops import _host
from lib.recorded.results import ROOT
from lib.standalone import TOOLS, files_of, main, standalone, write
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
@pytest.mark.parametrize("lean", [False, True], ids=["full", "lean"])
def test_imports_only_torch_triton_and_the_standard_library(path, lean):
    for node in ast.walk(ast.parse(standalone(path.stem, lean=lean))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [node.module]
        for name in names:
            assert name.split(".")[0] in ALLOWED, f"line {node.lineno}: {name}"


@pytest.mark.parametrize("lean", [False, True], ids=["full", "lean"])
def test_a_copy_is_linted_as_the_project_is(lean, tmp_path):
    """With the imports that it uses and no others, and no name that is not there."""
    for name in registry.OPS:
        write(files_of([name], lean), tmp_path)
    (tmp_path / "several").mkdir()
    write(files_of(list(registry.OPS), lean), tmp_path / "several")
    command = [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_copy_says_whose_it_is_and_which():
    """MIT asks for the notice; a version tells what has changed since."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    shared = (ROOT / "lib/ops").glob("_[a-z]*.py")
    for path in [*FILES, *shared, *(ROOT / "lib/ops").glob("*.cu"), *TOOLS.values()]:
        mark = "#" if path.suffix == ".py" else "//"
        licence, copyright_, *_ = path.read_text().splitlines()
        assert licence == f"{mark} SPDX-License-Identifier: MIT"
        authors = "Copyright (c) 2026 The Fused Kernels authors"
        assert copyright_ == f"{mark} {authors}; Fused Kernels {version}, {path.relative_to(ROOT)}"
        assert authors in (ROOT / "LICENSE").read_text()


SCRIPT = """
import torch
from {package}{name} import {name}_eager, {name}_triton
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
from {package}rope import rope_eager, rope_tables, rope_triton
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


def _script(path, device, package=""):
    op = registry.find(path.stem).configured()
    if op.name == "rope":
        return ROPE_SCRIPT.format(device=device, package=package)
    inputs = op.inputs(op.odd_shapes[2], torch.float32, machine.device())
    inputs = ", ".join(_source(t, device) for t in inputs)
    how = {"device": device, "inputs": inputs, "arguments": op.arguments, "package": package}
    return SCRIPT.format(name=op.name, **how)


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
LOOPS_FAIL = release(triton) < (3, 7) and release(np) >= (2, 4)
WHY = "triton 3.6's own interpreter cannot loop with NumPy 2.4"
always_interpreted = pytest.mark.skipif(LOOPS_FAIL, reason=WHY)
interpreter_loops = pytest.mark.skipif(LOOPS_FAIL and not machine.HAS_GPU, reason=WHY)
INTERPRETED = {} if machine.HAS_GPU else {"TRITON_INTERPRET": "1"}

ALL_IN_ONE = """
import sys
sys.modules["lib"] = None  # to import it is an error, wherever Python would have found it
scripts = {scripts}
for name, script in scripts.items():
    print(name, end=" ", flush=True)
    exec(script, {{"__name__": "__main__"}})
"""


def _side_by_side(names, folder):
    for file in [
        *(ROOT / "lib/ops").glob("_[a-z]*.py"),
        *(ROOT / f"lib/ops/{n}.py" for n in names),
    ]:
        shutil.copy(file, folder)


def _in_a_package(names, folder):
    (folder / "mine" / "kernels").mkdir(parents=True)
    _side_by_side(names, folder / "mine" / "kernels")


# how an op is taken along: what writes ops into a folder, and what its module is called there
WAYS = {
    "one file each": (lambda names, folder: [write(files_of([n]), folder) for n in names], ""),
    "several": (lambda names, folder: write(files_of(names), folder), ""),
    "lean": (lambda names, folder: [write(files_of([n], True), folder) for n in names], ""),
    "several, lean": (lambda names, folder: write(files_of(names, True), folder), ""),
    "the files as they are": (_side_by_side, ""),
    "in a package": (_in_a_package, "mine.kernels."),
}
ways = pytest.mark.parametrize("way", WAYS)
FEW = ("add_rms_norm", "gelu", "rope")


def _copies_run(way, names, folder):
    """One process, so that torch is imported once."""
    lay, package = WAYS[way]
    lay(names, folder)
    scripts = {n: _script(ROOT / f"lib/ops/{n}.py", machine.device(), package) for n in names}
    done = _run(folder, ALL_IN_ONE.format(scripts=scripts), **INTERPRETED)
    expected = "".join(f"{name} ran\n" for name in names)
    assert done.stdout == expected, f"after {done.stdout}: {done.stderr[-2000:]}"


@ways
@interpreter_loops
def test_copies_of_a_few_ops_run(way, tmp_path):
    _copies_run(way, FEW, tmp_path)


@ways
@interpreter_loops
def test_copies_of_all_ops_run(way, tmp_path):
    _copies_run(way, tuple(registry.OPS), tmp_path)


@pytest.mark.gpu
@files
@always_interpreted
def test_copied_to_a_machine_with_a_gpu_it_is_interpreted_on_request(path, tmp_path):
    (tmp_path / path.name).write_text(standalone(path.stem))
    done = _run(tmp_path, _script(path, "cpu"), TRITON_INTERPRET="1")
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
    lock = tmp_path / f"{path.stem}_cuda" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(_host, "ON_CPU", False)
    monkeypatch.setattr(cpp_extension, "load_inline", lambda *_, **__: seen.append(lock.exists()))
    seen = []
    _host.load_cuda.__wrapped__(path)
    assert seen == [False]


@files
def test_copied_alone_with_no_gpu_it_says_what_to_do(path, tmp_path):
    """No interpreter, no GPU: a ValueError in a sentence, not a segfault."""
    (tmp_path / path.name).write_text(standalone(path.stem))
    done = _run(tmp_path, _script(path, "cpu"), CUDA_VISIBLE_DEVICES="")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and "must be on a GPU" in last, done.stderr[-2000:]


def test_what_is_public_in_a_copy_is_the_ops_own(tmp_path):
    text = files_of(["gelu"])["gelu.py"]
    (names,) = (n.value for n in ast.parse(text).body if getattr(n, "targets", [None])[0] is not None
                and ast.unparse(n.targets[0]) == "__all__")  # fmt: skip
    assert set(ast.literal_eval(names)) == {
        "Plan",
        "gelu_cuda",
        "gelu_eager",
        "gelu_op",
        "gelu_triton",
    }


def test_a_copy_holds_what_it_uses_and_no_more():
    text = standalone("gelu")
    assert "def cdiv(" in text and "def sum_rows(" not in text and "host.cdiv" not in text
    shared = files_of(["gelu", "rope"])
    assert shared.keys() == {"gelu.py", "gelu.cu", "rope.py", "_host.py", "_device.py"}
    assert "def shares_memory(" in shared["_host.py"] and "def sum_rows(" not in shared["_host.py"]
    assert files_of(["check", "bill"]).keys() == {"check.py", "bill.py"}


def test_a_copy_needs_no_packages(tmp_path):
    """The tool runs where there is no torch."""
    command = [
        sys.executable,
        "-S",
        "-m",
        "lib.standalone",
        "gelu",
        "rope",
        "--to",
        tmp_path / "new",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "new").iterdir()} == files_of(["gelu", "rope"]).keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gelo --to {0}", "there is no op 'gelo' to copy; there are add_relu, "),
        ("gelu", "say what and where"),
        ("--to {0}", "say what and where"),
        ("gelu --to {0}/there", "there.gelu.py is there and differs; FORCE=1"),
        ("gelu --to {0}/file", "cannot write: .*file"),
    ],
)
def test_what_cannot_be_copied_is_said_in_a_sentence(words, message, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    for name in ("there/gelu.py", "file"):
        (tmp_path / name).write_text("mine")
    assert main(words.format(tmp_path).split()) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (tmp_path / "there/gelu.py").read_text() == "mine"
    assert not (tmp_path / "there/gelu.cu").exists()


def test_a_copy_is_overwritten_by_force_or_if_it_is_the_same(tmp_path):
    for words in (
        "gelu --to {0}",
        "gelu --to {0}",
        "gelu --lean --force --to {0}",
        "gelu --force --to {0}",
    ):
        assert main(words.format(tmp_path).split()) == 0
    assert (tmp_path / "gelu.py").read_text() == files_of(["gelu"])["gelu.py"]


def test_a_copy_beside_the_library_says_that_they_share_a_name(tmp_path):
    write(files_of(["rope"]), tmp_path)
    script = f"import sys; sys.path.append({str(tmp_path)!r})\nimport lib.ops.rope, rope"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(r"ImportError: lib.ops.rope and rope both define fused_kernels::rope", last)


def test_a_triton_that_is_too_old_is_named(tmp_path):
    write(files_of(["gelu"]), tmp_path)
    script = "import triton; del triton.knobs; triton.__version__ = '2.9.0'; import gelu"
    done = _run(tmp_path, script)
    assert "ImportError: Triton 2.9.0 is too old" in done.stderr.strip().splitlines()[-1]


def test_a_newer_torch_without_what_is_private_runs(tmp_path):
    """Without the private names that tell torch.func and kept launches: the op runs, and Triton launches."""
    write(files_of(["gelu"]), tmp_path)
    script = (
        "import torch, triton; triton.__version__ = '9.0.0'\n"
        "import torch._C._functorch as f; del f.peek_interpreter_stack\n"
        "del torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state\n"
        "del torch.autograd.forward_ad._current_level\n"
    )
    done = _run(
        tmp_path, script + _script(ROOT / "lib/ops/gelu.py", machine.device()), **INTERPRETED
    )
    assert done.stdout.strip() == "ran", done.stderr[-2000:]
