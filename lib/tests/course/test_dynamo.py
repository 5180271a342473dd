"""What torch.compile's first stages made of a function, found with every version of torch that is supported."""

from lib.course import dynamo

import pytest
import torch


def gated(x, gate):
    return torch.sigmoid(x) * gate


LOG = """\
V1122 14:03:11.5 4107 torch/guards.py:53] [0/1] [__recompiles] Recompiling function f in /a/script.py:5
V1122 14:03:11.5 4107 torch/guards.py:53] [0/1] [__recompiles]     - 0/0: mode == 'quiet'   # if mode
V1122 14:03:11.5 4107 torch/guards.py:57] [0/1] [__guards] | +- DEFAULT_DEVICE: utils_device == None
"""


def test_the_graphs_of_both_passes_are_of_aten_ops():
    graphs = dynamo.aten_graphs(gated, torch.ones(4, requires_grad=True), torch.ones(4))
    assert list(graphs) == ["forward", "backward"]
    assert all("torch.ops.aten.sigmoid" in graph.code for graph in graphs.values())


def test_guards_are_read_and_a_broken_one_is_named():
    torch.compiler.reset()
    compiled = torch.compile(gated, backend="eager")
    compiled(torch.ones(4), torch.ones(4))
    (guards,) = dynamo.guards_of(gated)
    (x,) = [what for kind, what in guards if kind == "TENSOR_MATCH" and what.startswith("x,")]
    assert "torch.float32" in x and x.endswith("size=[4], stride=[1]")
    assert any(kind == "GLOBAL_STATE" and "grad_mode" in what for kind, what in guards)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError) as failed,
    ):
        compiled(torch.ones(5), torch.ones(4))
    assert dynamo.broken_guard(failed.value).startswith("tensor 'x' size mismatch at index 0")


def test_the_essentials_of_a_log_are_what_happened():
    assert list(dynamo.essentials(LOG)) == [
        ("0/1", "recompiles", "Recompiling function f"),
        ("0/1", "recompiles", "- 0/0: mode == 'quiet'"),
    ]
