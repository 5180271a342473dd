"""What is particular to interaction: the order of the pairs, traffic, DLRM's layer, the shape of its code."""

from unittest import mock

from lib import machine
from lib.dlrm.model import InteractionArch
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.interaction import interaction_triton
from lib.tests.ops import battery, cases

import pytest
import torch

OP = registry.find("interaction")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


def test_the_order_of_dlrms_own_code(module):
    """As its interact_features lists them: row after row of the lower triangle."""
    n_tables, dim = 5, 3
    dense, embeddings = torch.randn(4, dim), torch.randn(4, n_tables, dim)
    vectors = torch.cat([dense[:, None], embeddings], 1)
    pairs = [(i, j) for i in range(n_tables + 1) for j in range(i)]
    products = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in pairs]
    want = torch.cat([dense, torch.stack(products, 1)], 1)
    result = module.interaction_triton(*(t.to(machine.device()) for t in (dense, embeddings)))
    columns = module.dlrm_columns(n_tables, dim, result.device)
    torch.testing.assert_close(result[:, columns].cpu(), want)
    layer = torch.randn(2, result.shape[1])
    turned = layer.clone()
    turned[:, columns.cpu()] = layer
    torch.testing.assert_close(result.cpu() @ turned.mT, want @ layer.mT, rtol=1e-4, atol=1e-5)


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
@pytest.mark.parametrize("plan", [None, (1, 2, 2), (1, 8, 8, False)])
def test_forward_reads_each_vector_once_and_writes_y_once(module, dtype, plan):
    """But dense twice: its part of y is stored over what was stored there before."""
    dense, embeddings = (t.detach() for t in inputs((24, 26, 16), dtype))
    plan = plan and module.Plan(*plan)
    traffic = count_traffic(lambda: module.interaction_triton(dense, embeddings, plan=plan))
    assert traffic.launches == 1
    by = {name.partition(".")[2]: argument for name, argument in traffic.by_argument.items()}
    assert by["embeddings_ptr"].loaded == embeddings.nbytes
    assert by["dense_ptr"].loaded == 2 * dense.nbytes
    assert by["y_ptr"].stored == 24 * 367 * dtype.itemsize + dense.nbytes


@pytest.mark.parametrize("plan", [None, (1, 2, 2), (1, 8, 8, False)])
def test_backward_is_one_launch_that_reads_all_once(module, plan):
    dense, embeddings = inputs((24, 26, 16))
    y = module.interaction_triton(dense, embeddings, plan=plan and module.Plan(*plan))
    traffic = count_traffic(lambda: y.backward(torch.randn_like(y)))
    assert traffic.launches == 1
    by = {name.partition(".")[2]: argument for name, argument in traffic.by_argument.items()}
    assert by["dy_ptr"].loaded == y.nbytes + dense.nbytes  # the part of dense twice
    assert by["dense_ptr"].loaded == by["ddense_ptr"].stored == dense.nbytes
    assert by["embeddings_ptr"].loaded == by["dembeddings_ptr"].stored == embeddings.nbytes


def test_sources_are_made_once(module):
    """Each time is a copy to the GPU, for which the host waits."""
    dense, embeddings = (t.detach() for t in inputs((3, 4, 5)))
    module._sources.cache_clear()
    first = module.interaction_triton(dense, embeddings)
    assert torch.equal(first, module.interaction_triton(dense, embeddings))
    assert module._sources.cache_info().misses == 1


@pytest.mark.parametrize("shape", [(3, 5, 16), (5, 3, 16)])
def test_samples_and_tables_far_apart_one_sample_at_a_time(module, shape):
    """Offsets past 2**31 of a program's first sample, and of a table."""
    dense, embeddings = (t.detach() for t in inputs(shape, torch.float16))
    far, dy = cases.spaced(embeddings), None
    results = []
    for e in (embeddings, far):
        e.requires_grad_()
        y = module.interaction_triton(dense, e, plan=module.Plan(1, 1, 2))
        dy = torch.randn_like(y) if dy is None else dy
        results.append((y, *torch.autograd.grad(y, e, dy)))
    assert all(map(torch.equal, *results))


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
    ("dtype", "products"),
    [
        (torch.bfloat16, ("HMMA.16816.F32.BF16", 8)),
        (torch.float32, ("HMMA.1688.F32.TF32", 3 * 16)),
    ],
    ids=str,
)
def test_numbers_go_from_memory_to_tensor_cores_in_registers(module, dtype, products):
    """At DLRM's 27 vectors of 16: only what is gathered lies in shared memory, and nothing in local memory.

    So many products a thread, and by TF32 three times as many; and the most of y at once.
    """
    sizes, launched = ((8, 16), (8, 26, 16), (8, 367)), []
    dense, embeddings, y = [torch.empty(s, dtype=dtype, device=machine.device()) for s in sizes]

    def launch(kernel, grid, tensors, *sizes, **options):
        n_warps, _ = options.pop("num_warps"), options.pop("num_stages")
        signature = signature_of(kernel, *tensors, *sizes, **options)
        launched.append(compile_for(kernel, signature, arch=90, num_warps=n_warps, num_stages=1))

    with mock.patch.object(battery.host_of(module), "run", launch):
        module._launch(None, dense, embeddings, y)
        module._launch_backward(None, y, dense, embeddings, dense, embeddings)
    # of one sample, by a warp: products stored as pairs and gathered one by one; dy stored, slopes gathered
    for compiled, stored, gathered in zip(launched, (16, 4), (12, 32), strict=True):
        mix = instruction_mix(compiled)
        assert compiled.spills == 0
        assert mix[products[0]] == products[1]
        assert sum(n for name, n in mix.items() if name.startswith("STS")) == stored, mix
        assert sum(n for name, n in mix.items() if name.startswith("LDS")) == gathered, mix
    stores = [name for name in instruction_mix(launched[0]) if name.startswith("STG")]
    assert f"STG.E.{32 * dtype.itemsize}" in stores
