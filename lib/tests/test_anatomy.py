"""The page on the anatomy of an op: put together, its blocks are an op, and its check finds mistakes."""

import re

from lib import machine
from lib.measure.mutants import Mutant, load, mutated
from lib.recorded.results import ROOT

import pytest
import torch

PAGE = (ROOT / "notebooks/anatomy.md").read_text()
OP = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
MISTAKES = {
    "negated": (
        "lambda ctx, dy: _gated_backward_op(dy, *ctx.saved_tensors)",
        "lambda ctx, dy: tuple(-t for t in _gated_backward_op(dy, *ctx.saved_tensors))",
    ),
    "no_abs": ("e = tl.exp(-tl.abs(z))", "e = tl.exp(-z)"),
    "one_minus_s": ("dz = dy * x * (e * t * t)", "dz = dy * x * (s * (1.0 - s))"),
    "any_strides": ("(dy, rows, bias.contiguous(), dx, partial)", "(dy, rows, bias, dx, partial)"),
    "twice": ("    @host.once\n", ""),
    "fake": ("torch.empty_like(bias)))", "torch.empty_like(bias).double()))"),
    "fake_strides": (
        "gated_op.register_fake(_empty)",
        "gated_op.register_fake(lambda x, bias: torch.empty_like(x))",
    ),
    "one_strip": ("partial_ptr + strip * n_cols + cols, tl.sum", "partial_ptr + cols, tl.sum"),
}


def op(name, text=OP):
    """The page's op as a module; each has a namespace of its own in torch.library."""
    return load(f"anatomy_{name}", text.replace("my_kernels::", f"my_{name}_kernels::"))


def test_the_blocks_are_an_op_that_passes_its_own_check():
    forward, backward = op("right").check_it(machine.device())
    n_bytes, bias = 512 * 781 * 4, 781 * 4
    assert forward == 2 * n_bytes + bias, "2MNs, and the bias"
    assert 3 * n_bytes < backward < 3.4 * n_bytes, "3MNs, and sums of strips"


@pytest.mark.parametrize("name", MISTAKES)
def test_its_check_finds(name):
    broken = op(name, mutated(OP, Mutant(*MISTAKES[name], name)))
    with pytest.raises(Exception):  # noqa: B017, PT011 - what finds it says so in its own way
        broken.check_it(machine.device())


def test_it_is_one_node_of_a_graph():
    module = op("compiled")
    x, bias = (torch.randn(s, device=machine.device(), requires_grad=True) for s in ((5, 7), (7,)))
    compiled = torch.compile(module.gated_triton, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias), module.gated_eager(x, bias))


def test_names_of_the_page_are_in_the_files():
    shared = (ROOT / "lib/ops/_host.py").read_text() + (ROOT / "lib/ops/_device.py").read_text()
    for name in re.findall(r"(?:host|device)\.(\w+)", OP):
        assert re.search(rf"def {name}\(|^{name}\b", shared, re.MULTILINE), name
