"""What is particular to interaction: the order of the pairs, traffic, DLRM's layer, the shape of its code."""

from lib import machine
from lib.dlrm.model import InteractionArch
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.interaction import interaction_triton

import pytest
import torch
import triton.language as tl

OP = registry.find("interaction")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


@pytest.mark.parametrize("n_tables", [1, 2, 15, 26, 31, 62, 63])
def test_the_order_of_the_pairs(module, n_tables):
    """Vectors of one number: each pair's product says which two it was."""
    primes = [n for n in range(2, 400) if all(n % k for k in range(2, n))][: n_tables + 1]
    numbers = torch.tensor(primes, dtype=torch.float64, device=machine.device())
    y = module.interaction_triton(numbers[None, :1], numbers[None, 1:, None])
    first, second = torch.triu_indices(n_tables + 1, n_tables + 1, 1, device=numbers.device)
    assert torch.equal(y[0], torch.cat([numbers[:1], numbers[first] * numbers[second]]))


def test_it_is_dlrms_layer():
    dense, embeddings = inputs((33, 26, 16))
    layer = InteractionArch(27, 16).to(machine.device())
    torch.testing.assert_close(interaction_triton(dense, embeddings), layer(dense, embeddings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", [None, (5, 1, True), (5, 1, False)])
def test_forward_reads_each_vector_once_and_writes_y_once(module, dtype, plan):
    dense, embeddings = (t.detach() for t in inputs((24, 26, 16), dtype))
    plan = plan and module.Plan(*plan)
    traffic = count_traffic(lambda: module.interaction_triton(dense, embeddings, plan=plan))
    assert traffic.launches == 1
    assert traffic.bytes_moved == OP.bytes_moved((24, 26, 16), dtype.itemsize, gradients=False)
    assert traffic.by_argument["_interaction_fwd_kernel.embeddings_ptr"].loaded == embeddings.nbytes


def test_backward_is_one_launch():
    dense, embeddings = inputs((24, 26, 16))
    y = interaction_triton(dense, embeddings)
    traffic = count_traffic(lambda: y.backward(torch.randn_like(y)))
    assert traffic.launches == 1
    by = traffic.by_argument
    assert by["_interaction_bwd_kernel.ddense_ptr"].stored == dense.nbytes
    assert by["_interaction_bwd_kernel.dembeddings_ptr"].stored == embeddings.nbytes


@pytest.mark.parametrize("narrow", [0, 1])
def test_the_layer_before_in_16_bits_and_tables_in_32(module, narrow):
    """As autocast leaves them; and the other way round."""
    mixed = [
        t.detach().to(torch.bfloat16) if k == narrow else t for k, t in enumerate(inputs((9, 5, 7)))
    ]
    mixed = [t.detach().requires_grad_() for t in mixed]
    check_against_float64(module.interaction_triton, OP.eager, *mixed)


def test_too_many_tables_are_refused(module):
    dense, embeddings = (t.detach() for t in inputs((2, 64, 3)))
    with pytest.raises(ValueError, match="at most 63 tables .* got 64 of 3; use interaction_eager"):
        module.interaction_triton(dense, embeddings)
    dense, embeddings = (t.detach() for t in inputs((2, 3, 129)))
    with pytest.raises(ValueError, match="at most 128 columns, got 3 of 129"):
        module.interaction_triton(dense, embeddings)


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [
        (torch.bfloat16, ("HMMA.16816.F32.BF16", 8), ("HMMA.16816.F32.BF16", 8)),
        (torch.float32, ("HMMA.1688.F32.TF32", 3 * 16), ("FFMA", 32 * 32 * 16 // 64)),
    ],
    ids=str,
)
def test_products_on_the_units_meant_and_nothing_in_local_memory(module, dtype, forward, backward):
    """At DLRM's 27 vectors of 16: so many products a thread at least, and by TF32 three times as many."""
    dense, embeddings = torch.empty(8, 16, dtype=dtype), torch.empty(8, 26, 16, dtype=dtype)
    y, sizes, strides = torch.empty(8, 367, dtype=dtype), (8, 26, 16), (16, 1, 416, 16, 1)
    operand = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    how = {"OPERAND": operand, "COMPUTE": tl.float32, "BLOCK_F": 32, "BLOCK_D": 16}
    both = (
        (module._interaction_fwd_kernel, module._plan, forward,
         (dense, embeddings, y, *sizes, 351, 4, *strides), {"AHEAD": 1}),
        (module._interaction_bwd_kernel, module._plan_backward, backward,
         (y, dense, embeddings, dense, embeddings, *sizes, 4, 367, 1, *strides), {}),
    )  # fmt: skip
    for kernel, choose, (products, at_least), arguments, more in both:
        plan = choose(32, 16, dtype.itemsize)
        signature = signature_of(kernel, *arguments, PRECISION=plan.precision, **how, **more)
        compiled = compile_for(kernel, signature, arch=90, num_warps=plan.num_warps)
        mix = instruction_mix(compiled)
        assert compiled.spills == 0
        assert sum(n for name, n in mix.items() if name.startswith(products)) >= at_least, mix
