"""What is particular to add_relu: traffic, launches, the shape of its CUDA code."""

import re

from lib import machine
from lib.measure import registry
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import add_relu
from lib.tests.ops import battery, cases
from lib.tests.ops.test_kernels_on_pages import body_of, kernels_of, lines_on

import pytest
import torch
import triton.language as tl

OP = registry.find("add_relu")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


def test_the_notebook_teaches_the_kernels_that_ship():
    """But for folding, every line of the two kernels is typed in a cell of notebook 03."""
    typed = lines_on(3, shown=False)
    lines = [line for kernel in kernels_of("add_relu").values() for line in body_of(kernel)]
    other = [line for line in lines if line not in typed]
    assert len(other) <= 0.4 * len(lines)
    folding = re.compile("FOLD|bias_cols|last|whole|behind|HAS_DX|store")
    assert not [line for line in other if not folding.search(line)]


def test_folded_rows_are_aligned_and_cost_no_traffic():
    x, bias = (t.detach() for t in inputs((1024, 97)))
    traffic = count_traffic(lambda: add_relu.add_relu_triton(x, bias))
    assert traffic.launches == 1
    assert traffic.bytes_moved == 2 * x.nbytes + bias.nbytes


def test_many_rows_are_summed_by_many_programs():
    """More rows than one program takes: the partial sums of dbias have to add up."""
    x, bias = inputs((300_000, 1))
    add_relu.add_relu_triton(x, bias).sum().backward()
    want = (x + bias > 0).double().sum()
    assert bias.grad.item() == want.item()


def test_loads_and_stores_are_sixteen_bytes_wide():
    x, bias = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    plan = add_relu._plan(4096, torch.bfloat16)
    signature = signature_of(
        add_relu._add_relu_fwd_kernel, x, bias, x, 64, 4096, 4096, 1,
        COMPUTE=tl.float32, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
    )  # fmt: skip
    compiled = compile_for(add_relu._add_relu_fwd_kernel, signature, arch=90)
    memory = {op for op in instruction_mix(compiled) if op.startswith(("LDG", "STG"))}
    assert memory == {"LDG.E.128", "STG.E.128"}
    assert compiled.spills == 0


@pytest.mark.parametrize("n_rows", [64, 70])
def test_cuda_is_given_wide_rows_and_those_left_over(module, n_rows):
    """Rows of an odd width; all contiguous, of one dtype, and between them all of y."""
    x, bias = OP.inputs((n_rows, 3), torch.float32, machine.device())
    half, spread = x.detach().half(), torch.stack([bias.detach()] * 2, dim=1)[:, 0]
    across = torch.stack([half.float()] * 2, dim=2)[..., 0]
    shapes = []

    def forward(x, bias, y):
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, bias, y))
        shapes.append(tuple(x.shape))
        y.copy_(add_relu.add_relu_eager(x, bias))

    with battery.cuda_calls(module, forward), cases.empty_is_nan():
        y = module.add_relu_cuda(half, spread)
        same = module.add_relu_cuda(across, spread)
    assert torch.equal(y, add_relu.add_relu_eager(half, bias)) and torch.equal(same, y)
    left_over = [(n_rows - 64, 3)] * (n_rows > 64)
    assert shapes == [(4, 48), *left_over, (n_rows, 3)]  # where there are gaps, none are folded


def test_sums_of_folded_rows_are_rounded_once(module):
    """One strip of wide rows has a sum for each row in it, which is not dbias yet."""
    t = torch.ones(64, 3, dtype=torch.bfloat16, device=machine.device())
    partial = module._launch_backward(None, t, t, None, t.dtype)
    assert partial.dtype == torch.float32 and len(partial) == 16
