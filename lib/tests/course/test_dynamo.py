"""What torch.compile's first stages made of a function, found with every version of torch that is supported."""

import logging

from lib.course import dynamo

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


def test_a_guard_that_a_change_breaks_is_named():
    torch.compiler.reset()
    compiled = torch.compile(gated, backend="eager")
    compiled(torch.ones(4), torch.ones(4))
    n_threads = torch.get_num_threads()
    changes = {
        "nothing": (torch.ones(4), torch.ones(4)),
        "a length": (torch.ones(5), torch.ones(4)),
        "under no_grad": (torch.ones(4), torch.ones(4)),
        "another number of CPU threads": (torch.ones(4), torch.ones(4)),
    }
    broken = dynamo.broken_guards(compiled, changes)
    assert broken.pop("a length").startswith("tensor 'x' size mismatch at index 0")
    assert broken.pop("nothing") == "none"
    assert all(guard.startswith("GLOBAL_STATE changed") for guard in broken.values()), broken
    assert torch.get_num_threads() == n_threads and torch.is_grad_enabled()


def test_warnings_are_kept():
    loggers = [logging.getLogger(name) for name in ("torch", "torch._dynamo")]
    before = [logger.handlers for logger in loggers]
    says = dynamo.keep_warnings()
    try:
        loggers[1].warning("limit")
        assert "limit" in says.getvalue()
    finally:
        for logger, handlers in zip(loggers, before):
            logger.handlers = handlers


def test_the_essentials_of_a_log_are_what_happened():
    assert list(dynamo.essentials(LOG)) == [
        ("0/1", "recompiles", "Recompiling function f"),
        ("0/1", "recompiles", "- 0/0: mode == 'quiet'"),
    ]
