"""Whole models: the same losses with the ops as with PyTorch's own parts, whatever is around them."""

import re
import subprocess
import sys

from lib import machine
from lib.measure import registry
from lib.ops.bias_gelu_dropout_add import BiasGELUDropoutAdd
from lib.ops.fused_mlp import FusedMLP
from lib.ops.linear_glu import FusedGLU
from lib.ops.matmul import FusedLinear
from lib.recorded import results
from lib.recorded.results import ROOT
from lib.standalone import files_of, write
from lib.tests.ops import small_models
from lib.tests.ops.small_models import (
    DLRM,
    GPTBlock,
    LlamaBlock,
    batch,
    both,
    half_of_each_batch,
    losses,
)
from lib.tests.ops.test_copyable import INTERPRETED, _run, interpreter_loops

import pytest
import torch
import torch.nn.functional as F
from torch import nn

blocks = pytest.mark.parametrize("block", [GPTBlock, LlamaBlock, DLRM], ids=lambda b: b.__name__)
PARTS = small_models.of_ops("lib.ops.")
PAGE = (ROOT / "lib/ops/README.md").read_text()


def assert_alike(got, want, rtol=1e-5):
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=0)


@blocks
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("n_steps", [5, 50])
def test_the_same_losses(block, autocast, n_steps):
    """From the same state_dict. In bfloat16 each model rounds in its own places."""
    eager, fused = both(block, PARTS, machine.device())
    words = batch(device=machine.device())
    want, got = (losses(model, words, n_steps, autocast) for model in (eager, fused))
    assert_alike(got, want, 0.04 if autocast else 1e-5)
    assert n_steps < 50 or got[-1] < 0.1 * got[0], "it learns"


@blocks
@pytest.mark.parametrize("how", ["compiled", "dynamic", "checkpointed", "selective"])
def test_the_same_losses_under(block, how):
    torch.compiler.reset()
    checkpointed = {"checkpointed": {}, "selective": small_models.SELECTIVE}.get(how)
    eager, fused = both(block, PARTS, machine.device(), checkpointed=checkpointed)
    backend = "inductor" if machine.HAS_GPU else "aot_eager"
    call = None
    if how in ("compiled", "dynamic"):
        dynamic = True if how == "dynamic" else None
        call = torch.compile(fused, fullgraph=True, backend=backend, dynamic=dynamic)
    words = batch(device=machine.device())
    assert_alike(losses(fused, words, 4, call=call), losses(eager, words, 4))


@blocks
def test_exported_it_gives_the_same_loss(block):
    """With any number of sequences."""
    eager, fused = both(block, PARTS, machine.device())
    words = batch(device=machine.device())
    shapes = ({0: torch.export.Dim("sequences", min=2, max=64)},)
    program = torch.export.export(fused.eval(), (words,), dynamic_shapes=shapes).module()
    for n in (2, 4, 9):
        words = batch(n, machine.device())
        torch.testing.assert_close(program(words), eager.eval()(words), rtol=1e-4, atol=1e-5)


@blocks
@pytest.mark.skipif(machine.HAS_GPU, reason="its two processes are for CPUs")
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_the_same_losses_in_two_processes(block, sharded, tmp_path):
    """DistributedDataParallel, fully_shard: each has half of the batch, and both together train as one."""
    arguments = (block, str(tmp_path), "lib.ops.", sharded)
    torch.multiprocessing.spawn(half_of_each_batch, arguments, nprocs=2)
    halves = [torch.tensor(torch.load(tmp_path / f"losses_{rank}.pt")) for rank in (0, 1)]
    eager, _ = both(block, PARTS)
    assert_alike(torch.stack(halves).mean(0).tolist(), losses(eager, batch(), 6))


def _gated(x):
    value, gate = x.chunk(2, dim=-1)
    return value * F.gelu(gate)


# The module, what it takes the place of, and what follows that.
REPLACED = {
    "FusedLinear": (FusedLinear(6, 5, activation="gelu"), nn.Linear(6, 5), F.gelu),
    "FusedLinear, no bias": (FusedLinear(6, 5, bias=False), nn.Linear(6, 5, bias=False), nn.Identity()),
    "FusedGLU": (FusedGLU(6, 5, activation="gelu"), nn.Linear(6, 10), _gated),
    "FusedMLP": (FusedMLP(6, 9, 5), nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)), torch.sigmoid),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_a_module_takes_the_state_of_what_it_replaces(name):
    fused, replaced, then = (part.to(machine.device()) if isinstance(part, nn.Module) else part
                             for part in REPLACED[name])  # fmt: skip
    assert fused.load_state_dict(replaced.state_dict()) and repr(fused).startswith("Fused")
    assert fused.state_dict().keys() == replaced.state_dict().keys()
    x = torch.randn(2, 3, 6, device=machine.device())
    want = then(replaced(x))
    torch.testing.assert_close(fused(x), want, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(fused(x).sum(), fused.parameters())
    want = torch.autograd.grad(want.sum(), replaced.parameters())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_dropout_in_a_module_ends_with_training():
    module = BiasGELUDropoutAdd(6, p=1.0).to(machine.device())
    x, residual = torch.randn(2, 3, 5, 6, device=machine.device())
    assert torch.equal(module(x, residual), residual)
    want = F.gelu(x, approximate="tanh") + residual
    torch.testing.assert_close(module.eval()(x, residual), want, rtol=1e-4, atol=1e-5)
    assert repr(module) == "BiasGELUDropoutAdd(6, p=1.0)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedLinear(6, 5, activation="tanh"), "FusedLinear: activation must be one of"),
        (lambda: FusedGLU(6, 5, activation="identity"), "FusedGLU: activation must be one of"),
        (lambda: FusedGLU(6, 5, gate="third"), "FusedGLU: gate must be 'first' or 'second'"),
        (lambda: FusedMLP(6, 5, 4, "tanh"), "FusedMLP: final must be one of sigmoid, relu, id"),
    ],
)
def test_a_module_refuses_what_its_op_does_not_know(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@interpreter_loops
def test_copied_into_an_empty_folder_they_do_it_too(tmp_path):
    write(files_of(small_models.COPIED), tmp_path)
    done = _run(tmp_path, (ROOT / "lib/tests/ops/small_models.py").read_text(), **INTERPRETED)
    assert done.stdout.strip() == "ran", done.stderr[-2000:]


def test_the_page_runs(tmp_path):
    """Every piece of Python in lib/ops/README.md, each on its own, with the files beside it."""
    pieces = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(pieces) >= 5
    before = 'import lib, sys, torch; sys.path.insert(0, "lib/ops")\n'
    before += f'torch.set_default_device("{machine.device()}")\n'
    done = subprocess.run(
        [sys.executable, "-c", f"{before}for piece in {pieces!r}:\n    exec(piece, {{}})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_names_every_op():
    for path in (ROOT / "lib/ops").glob("[a-z]*.py"):
        assert f"[{path.stem}]({path.name})" in PAGE


def test_the_page_says_what_a_call_costs():
    bandwidth = results.load("ceilings")["rows"][0]["bandwidth_gbps"] / 1000  # MB a µs
    recorded = filter(None, map(results.load, registry.OPS))
    rows = [row for result in recorded for row in result["rows"]]
    host = [row["host_us"] for row in rows if row["version"] == "triton" and "host_us" in row]
    least, most = min(host), max(host)
    moved = (round(us * bandwidth, -1) for us in (least, most))
    words = " ".join(PAGE.split())
    assert f"{least:.0f} to {most:.0f} µs" in words
    assert "{:.0f} to {:.0f} MB".format(*moved) in words
