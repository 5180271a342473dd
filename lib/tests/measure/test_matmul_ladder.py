"""The rungs of matmul's ladder: several tiles of each, their traffic, their machine code."""

import functools
import itertools

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.measure.matmul_ladder import RUNGS, plan_of
from lib.nogpu.compile_only import instruction_mix
from lib.nogpu.memory import count_traffic
from lib.ops import _host as host
from lib.ops import matmul
from lib.tests.ops import cases
from lib.tests.ops.test_matmul import ORIENTATIONS, code_of, detached, tensors

import pytest
import torch
import triton

HALF, DEVICE = torch.bfloat16, machine.device()
rungs = pytest.mark.parametrize("rung", RUNGS)
on_hopper = pytest.mark.skipif(host.generation(DEVICE) not in (9, 10), reason="the tiles of Hopper")


def test_the_ladder_of_the_registry_ends_with_the_finished_op():
    assert list(registry.find("matmul").versions) == [*RUNGS, "triton", "cuda"]
    assert [v.__name__ for v in RUNGS.values()] == [f"matmul_{rung}" for rung in RUNGS]


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)
def test_several_tiles_of_every_rung(transposed):
    """Two or three in each direction, several steps of each, more tiles than SMs; with gradients."""
    for rung, shape in [
        ("naive", (40, 20, 50)),
        ("tiled", (300, 70, 150)),
        ("grouped", (300, 70, 150)),
        ("pipelined", (150, 130, 530)),
        ("persistent", (304, 136, 536)),  # as TMA reads and writes it
        ("persistent", (300, 130, 530)),  # not so
    ]:
        if rung != "persistent" and transposed in ((True, False), (False, True)):
            continue  # the others read through strides, whatever they are
        a, b, bias = detached(shape, HALF)
        a, b = (t.t().contiguous().t() if turn else t for t, turn in zip((a, b), transposed))
        version = registry.bind(RUNGS[rung], {"activation": "silu"})
        eager = functools.partial(matmul.matmul_eager, activation="silu")
        check_against_float64(version, eager, a, b, bias)


@rungs
def test_z_is_stored_for_a_gradient_alone(rung):
    inputs = tensors((16, 40, 24), HALF)

    def stored(*inputs):
        traffic = count_traffic(lambda: RUNGS[rung](*inputs, "gelu"))
        return sum(t.stored for t in traffic.by_argument.values())

    assert stored(*(t.detach() for t in inputs)) == 16 * 24 * 2
    assert stored(*inputs) == 2 * 16 * 24 * 2


@on_hopper
@rungs
def test_traffic(rung):
    """Each piece of a is loaded once per column of tiles, each of b once per row; y is written once."""
    m, k, n = (64, 32, 48) if rung == "naive" else (256, 128, 512)
    a, b, _ = detached((m, k, n), HALF)
    traffic = count_traffic(lambda: RUNGS[rung](a, b))
    by = {name.split(".")[1][0]: t for name, t in traffic.by_argument.items()}
    wide = {"naive": (16, 16), "tiled": (128, 128), "grouped": (128, 128)}
    tile_m, tile_n = wide.get(rung, (128, 256))
    assert traffic.launches == 1
    assert traffic.bytes_moved == a.nbytes + b.nbytes + m * n * 2
    assert by["a"].loaded == a.nbytes * n // tile_n
    assert by["b"].loaded == b.nbytes * m // tile_m
    assert by["y"].stored == by["y"].stored_distinct == m * n * 2
    n_programs = m // tile_m * n // tile_n
    if rung == "persistent":
        n_programs = min(n_programs, host.n_multiprocessors(a.device))
    assert traffic.programs == n_programs


def test_grouped_differs_from_tiled_in_the_order_alone():
    tiled, grouped = (plan_of(rung, "half", DEVICE) for rung in ("tiled", "grouped"))
    assert tiled == grouped._replace(group=1) != grouped


@on_hopper
@pytest.mark.parametrize("transposed", ORIENTATIONS[::3], ids=["a b", "aᵀ bᵀ"])
def test_pipelined_kernel_is_wgmma_and_wide_asynchronous_copies(transposed):
    kernel = code_of(plan_of("pipelined", "half", DEVICE), HALF, "half", transposed)
    mix = instruction_mix(kernel)
    assert mix.get("HGMMA.64x256x16.F32.BF16") == 4, mix
    assert mix["LDGSTS.E.BYPASS.128"]
    # the bias apart, nothing narrow: it is in L1
    assert not [op for op in mix if op.startswith(("STG", "LDGSTS")) and "128" not in op]
    assert kernel.spills <= (2 if cases.release(triton) >= (3, 9) else 0)


@on_hopper
@pytest.mark.parametrize("rung", ["tiled", "grouped"])
def test_tiled_kernels_have_nothing_in_flight(rung):
    kernel = code_of(plan_of(rung, "half", DEVICE), HALF, "half")
    mix = instruction_mix(kernel)
    assert [op for op in mix if op.startswith("HGMMA")]
    assert mix["LDG.E.128"] and not [op for op in mix if op.startswith("LDGSTS")]
    assert kernel.spills == 0


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "tf32x3"), (HALF, "half")], ids=str)
def test_naive_kernel_has_no_tensor_cores(dtype, kind):
    """Triton recognises one form of a sum of products as tl.dot, and then rounds float32 to tf32."""
    mix = instruction_mix(code_of(plan_of("naive", kind, DEVICE), dtype, kind))
    assert not [op for op in mix if op.startswith(("HGMMA", "HMMA"))]
    assert mix["FFMA"] and not mix.get("SHFL.BFLY"), "a sum over threads instead of in each"
