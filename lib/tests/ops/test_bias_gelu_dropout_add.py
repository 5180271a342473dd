"""What is particular to bias_gelu_dropout_add: whose mask it is, p, the seed, statistics, traffic.

The statistical tests use fixed seeds, so they pass always or never. Each refuses what a perfect generator
would give for less than one seed in a million (five standard deviations, or a p-value of 1e-6).
"""

import functools
import itertools

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.bias_gelu_dropout_add import (
    BiasGELUDropoutAdd,
    _philox,
    bias_gelu_dropout_add_eager,
    bias_gelu_dropout_add_triton,
    keep_mask,
)
from lib.tests.ops import cases

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

SIGMAS = 5
P_VALUE = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SEED = 2**62 + 12345  # uses both words of the key


def mask_of(x, residual=None, p=0.5, seed=SEED, version=bias_gelu_dropout_add_triton):
    """True where the op kept its element, as seen in y, and as seen in dx. x must hold ones."""
    x = x.detach().requires_grad_()
    bias = torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)
    residual = torch.zeros_like(x) if residual is None else residual
    y = version(x, bias, residual, p, seed)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return (y - residual != 0).detach(), dx != 0


def assert_mask(masks, want, case=""):
    for what, got in zip(("y", "dx"), masks, strict=True):
        assert torch.equal(got, want), f"{what} has other elements dropped {case}"


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=machine.device())


def inputs(shape, dtype=torch.float32):
    x, residual = (torch.randn(shape, dtype=dtype, device=machine.device()) for _ in range(2))
    bias = torch.randn(shape[-1], dtype=dtype, device=machine.device())
    return x.requires_grad_(), bias.requires_grad_(), residual.requires_grad_()


# --- Philox ------------------------------------------------------------------------------------------------


def philox(counter, key, n_rounds):
    """Philox4x32 in Python's integers, from the paper: 4 words of 32 bits."""
    c, (k0, k1), low = list(counter), key, 2**32 - 1
    for _ in range(n_rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & low, (a >> 32) ^ c[3] ^ k1, a & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c


def words(text):
    return [int(word, 16) for word in text.split()]


# From Random123's kat_vectors: counter, key, rounds, result.
KNOWN = [
    ("0 0 0 0", "0 0", 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ("0 0 0 0", "0 0", 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "n_rounds", "result"), KNOWN)
def test_known_answers(counter, key, n_rounds, result):
    assert philox(words(counter), words(key), n_rounds) == words(result)


@triton.jit
def _philox_kernel(seed_ptr, counter_ptr, out_ptr, BLOCK_SIZE: tl.constexpr):
    # One program handles BLOCK_SIZE counters: the op's own function, its four words beside each other.
    offsets = tl.arange(0, BLOCK_SIZE)
    a, b, c, d = _philox(tl.load(seed_ptr), tl.load(counter_ptr + offsets))
    tl.store(out_ptr + 4 * offsets, a.to(tl.int64))
    tl.store(out_ptr + 4 * offsets + 1, b.to(tl.int64))
    tl.store(out_ptr + 4 * offsets + 2, c.to(tl.int64))
    tl.store(out_ptr + 4 * offsets + 3, d.to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, SEED, 2**63 - 1, -1])
def test_the_kernel_draws_philox_of_seven_rounds(seed):
    counters = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 5, 2**60]
    counter = torch.tensor(counters, device=machine.device())
    out = torch.empty(len(counters), 4, dtype=torch.int64, device=machine.device())
    _philox_kernel[(1,)](
        torch.tensor([seed], device=machine.device()), counter, out, BLOCK_SIZE=len(counters)
    )
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    want = [philox((n & 0xFFFFFFFF, n >> 32, 0, 0), key, 7) for n in counters]
    assert out.tolist() == want


def keeps(index, p, seed):
    """Whether element `index` stays, by the docstring's definition and in Python's integers."""
    group, lane = divmod(index, 8)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    word = philox((group & 0xFFFFFFFF, group >> 32, 0, 0), key, 7)[lane // 2]
    return (word >> 16 * (lane % 2)) & 0xFFFF >= round(65536 * p)


@pytest.mark.parametrize("seed", [0, SEED, -3])
def test_keep_mask_is_the_definition(module, seed):
    got = module.keep_mask((5, 41), 0.3, seed).flatten().tolist()
    assert got == [keeps(i, 0.3, seed) for i in range(5 * 41)]


@pytest.mark.parametrize("first", [1, 8, 13, 2**35 - 5])
def test_keep_mask_of_a_part(module, first):
    got = module.keep_mask((3, 7), 0.3, SEED, first=first).flatten().tolist()
    assert got == [keeps(first + i, 0.3, SEED) for i in range(21)]


# --- the mask is a function of seed and logical index ------------------------------------------------------


SHAPES = [
    (1,), (3,), (8,), (7, 1), (5, 8), (17, 33), (3, 5, 24), (2, 1104), (2, 1025),
    (1024, 13), (1037, 13), (1030, 3), (2053, 1), (1025, 24),  # folded rows, and those left over
]  # fmt: skip


def test_mask_of_every_width(module):
    for shape in SHAPES:
        x = ones(*shape)
        masks = mask_of(x, version=module.bias_gelu_dropout_add_triton)
        assert_mask(masks, keep_mask(shape, 0.5, SEED, x.device), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mask_of_every_dtype(dtype):
    for shape in [(5, 8), (17, 33)]:
        x = ones(*shape, dtype=dtype)
        assert_mask(mask_of(x), keep_mask(shape, 0.5, SEED, x.device))


@pytest.mark.parametrize("shape", [(34, 40), (1033, 5)], ids=str)
def test_mask_of_every_layout(shape):
    """Neither the strides of x nor those of residual move the mask, and nor does their folding."""
    for x in cases.layouts(ones(*shape)).values():
        want = keep_mask(x.shape, 0.5, SEED, x.device)
        assert_mask(mask_of(x), want)
        assert_mask(mask_of(x.contiguous(), residual=0 * x), want)


@pytest.mark.parametrize("n_cols", [40, 33])
@pytest.mark.parametrize("tile", [(1, 8), (1, 16), (4, 32), (2, 128), (32, 8)], ids=str)
def test_mask_of_every_tile(module, tile, n_cols):
    plan = module.Plan(*tile, backward=(*tile, 3))
    version = functools.partial(module.bias_gelu_dropout_add_triton, plan=plan)
    want = keep_mask((13, n_cols), 0.5, SEED, machine.device())
    assert_mask(mask_of(ones(13, n_cols), version=version), want)


@pytest.mark.parametrize("n_cols", [16, 5])
@pytest.mark.parametrize("first", [2**31 - 80, 2**31, 2**32 - 40, 2**35 - 40, 2**45], ids=str)
def test_mask_far_down_a_large_tensor(module, first, n_cols):
    """An index cast to int32 is wrong from 2**31 on, a Philox counter of 32 bits from 2**35 on."""
    x, zeros = ones(8, n_cols), torch.zeros(8, n_cols, device=machine.device())
    bias, seed = zeros[0].clone(), torch.tensor([SEED], device=machine.device())
    want = [keeps(first + i, 0.5, SEED) for i in range(8 * n_cols)]
    y, dx = torch.empty_like(x), torch.empty_like(x)
    module._launch(module._plan(n_cols), 1, bias, x, zeros, y, 0.5, seed, first=first)
    assert (y != 0).flatten().tolist() == want
    module._launch_backward(None, x, x, dx, bias, 0.5, seed, x.dtype, first)
    assert (dx != 0).flatten().tolist() == want


@pytest.mark.parametrize("n_cols", [8, 9])  # both ways to draw
def test_the_bits_at_the_threshold(module, n_cols):
    """An element whose bits are the threshold stays; one step of p further it is dropped."""
    for i in (0, 3, 6):
        word = philox((0, 0, 0, 0), (SEED & 0xFFFFFFFF, SEED >> 32), 7)[i // 2]
        bits = (word >> 16 * (i % 2)) & 0xFFFF
        for step, want in ((bits, True), (bits + 1, False)):
            masks = mask_of(
                ones(1, n_cols), p=step / 65536, version=module.bias_gelu_dropout_add_triton
            )
            assert [mask[0, i].item() for mask in masks] == [want, want], f"element {i} at {step}"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**19 + 1, 4096), (2**27 + 3, 17)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    x = torch.ones(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    bias = x.detach()[0] * 0
    y = bias_gelu_dropout_add_triton(x, bias, x.detach() * 0, 0.5, SEED)
    y.sum().backward()
    for rows in (slice(0, 2), slice(-2, None)):
        first = 0 if rows.start == 0 else (shape[0] - 2) * shape[1]
        want = keep_mask((2, shape[1]), 0.5, SEED, "cuda", first)
        assert torch.equal(y[rows] != 0, want)
        assert torch.equal(x.grad[rows] != 0, want)


# --- p -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_dropped_is_no_dropout(dtype):
    x, bias, residual = inputs((17, 33), dtype)

    def plain(x, bias, residual):
        return F.gelu(x + bias, approximate="tanh") + residual

    def none_dropped(x, bias, residual):
        return bias_gelu_dropout_add_triton(x, bias, residual, 0)

    check_against_float64(none_dropped, plain, x, bias, residual)
    traffic = count_traffic(lambda: none_dropped(x, bias, residual).sum().backward())
    assert not [a for a in traffic.by_argument if a.endswith("seed_ptr") and _moved(traffic, a)]


def _moved(traffic, argument):
    return traffic.by_argument[argument].loaded + traffic.by_argument[argument].stored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dropped_is_the_residual(module, dtype):
    """Exactly, but for 0 times NaN or infinity; and no gradient goes through."""
    x, bias, residual = inputs((17, 33), dtype)
    with torch.no_grad():
        x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    y = module.bias_gelu_dropout_add_triton(x, bias, residual, 1)
    for result in (y, module.bias_gelu_dropout_add_eager(x, bias, residual, 1, SEED)):
        assert result[0, :3].isnan().all()
        assert torch.equal(result[1:], residual[1:]) and torch.equal(result[:, 3:], residual[:, 3:])
    dy = torch.randn_like(y)
    dx, dbias, dresidual = torch.autograd.grad(y, (x, bias, residual), dy)
    assert not dx[1:].any()
    assert not dx[:, 3:].any() and not dbias[3:].any()
    assert torch.equal(dresidual, dy)


@pytest.mark.parametrize("seed", [SEED, None])
def test_a_dropped_nan_stays_one(module, seed):
    """As in torch, whose dropout multiplies: what went wrong before is not hidden in half of the places."""
    x = torch.full((4, 64), float("nan"), device=machine.device())
    x[1] = float("inf")
    zeros = torch.zeros_like(x)
    for version in (module.bias_gelu_dropout_add_triton, module.bias_gelu_dropout_add_eager):
        y = version(x, zeros[0], zeros, 0.5, seed)
        assert torch.equal(y.isfinite(), zeros.bool())


def test_nothing_is_dropped_unless_training(module):
    """As model.eval() means it: the same as p = 0, with a seed or without; p is checked all the same."""
    x, bias, residual = inputs((33, 40))
    for seed in (None, 7):
        for p in (0.3, 1.0):
            call, eager = (
                functools.partial(f, p=p, seed=seed, training=False)
                for f in (module.bias_gelu_dropout_add_triton, bias_gelu_dropout_add_eager)
            )
            check_against_float64(call, eager, x, bias, residual)
            nothing = module.bias_gelu_dropout_add_triton(x, bias, residual, 0.0)
            assert torch.equal(call(x, bias, residual), nothing)
    for wrong in (1, None, "eval"):
        with pytest.raises(TypeError, match="training must be True or False"):
            module.bias_gelu_dropout_add_triton(x, bias, residual, 0.3, training=wrong)
    with pytest.raises(ValueError, match="p must be a number"):
        module.bias_gelu_dropout_add_triton(x, bias, residual, 1.5, training=False)


def test_eager_with_no_seed_drops_p(module):
    """4096 equal elements: within SIGMAS standard deviations of 1/4."""
    x = torch.ones(64, 64)
    y = module.bias_gelu_dropout_add_eager(x, x[0] * 0, x * 0, 0.25)
    assert abs((y == 0).float().mean() - 0.25) < SIGMAS * (0.25 * 0.75 / 4096) ** 0.5
    torch.testing.assert_close(y.max(), F.gelu(x[0, 0], approximate="tanh") / 0.75)


@pytest.mark.parametrize(
    "p", [-0.1, -1e-9, 1.0000001, 2, float("nan"), float("inf"), True, "0.1", None, 0.1j], ids=str
)
def test_a_p_that_is_no_probability_is_refused(p):
    x, bias, residual = inputs((2, 3))
    with pytest.raises(ValueError, match="p must be a number from 0 to 1"):
        bias_gelu_dropout_add_triton(x, bias, residual, p)
    with pytest.raises(ValueError, match="BiasGELUDropoutAdd: p must be a number from 0 to 1"):
        BiasGELUDropoutAdd(3, p)


@pytest.mark.parametrize("step", [1, 2, 6554, 32768, 65534, 65535])
def test_p_counts_in_steps_of_one_in_65536(module, step):
    """Within half a step of step/65536, p means step/65536: mask and scale are those of that share."""
    x, bias, residual = (t.detach() for t in inputs((64, 64)))
    want = module.bias_gelu_dropout_add_triton(x, bias, residual, step / 65536, SEED)
    for offset in (-0.49, 0.49):
        p = (step + offset) / 65536
        assert torch.equal(module.bias_gelu_dropout_add_triton(x, bias, residual, p, SEED), want)
    keep = keep_mask(x.shape, step / 65536, SEED, x.device)
    exact = F.gelu((x + bias).double(), approximate="tanh") * (65536 / (65536 - step))
    error = ((want - residual).double() - exact)[keep].abs()
    assert not keep.any() or error.max() <= 1e-6 * max(1.0, exact.abs().max())


def test_less_than_half_a_step_drops_nothing_and_keeps_the_scale():
    x, bias, residual = inputs((64, 64))
    results = [bias_gelu_dropout_add_triton(x, bias, residual, p, SEED) for p in (0, 0.49 / 65536)]
    assert torch.equal(*results)
    almost_all = bias_gelu_dropout_add_triton(x, bias, residual, 1 - 0.49 / 65536, SEED)
    assert torch.equal(almost_all, residual)


def test_a_larger_p_drops_the_same_and_more():
    masks = [mask_of(ones(32, 64), p=p)[0] for p in (0.1, 0.3, 0.5, 0.9)]
    for more, fewer in itertools.pairwise(masks):
        assert not (fewer & ~more).any()
        assert more.sum() > fewer.sum()


# --- statistics --------------------------------------------------------------------------------------------


ROWS = machine.pick(gpu=8192, cpu=512)


@functools.cache
def big_mask(p, seed=SEED):
    """The kernel's mask of ROWS × 1024 elements."""
    return mask_of(ones(ROWS, 1024), p=p, seed=seed)[0].flatten()


def assert_share(hits, expected):
    """The share of True in `hits` is `expected`, within SIGMAS standard deviations."""
    n, share = hits.numel(), hits.double().mean().item()
    deviation = (expected * (1 - expected) / n) ** 0.5
    assert abs(share - expected) <= SIGMAS * deviation, (share, expected, deviation)


def assert_counts(counts, expected):
    """Pearson's chi-square of counts against expected ones has a p-value above P_VALUE."""
    chi_square = ((counts - expected) ** 2 / expected).sum().cpu()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(freedom, chi_square / 2).item()
    assert p_value > P_VALUE, (p_value, counts.tolist())


def assert_independent(a, b, p):
    """The four combinations of two masks come as often as those of independent ones that drop p."""
    counts = torch.bincount(2 * a.long() + b.long(), minlength=4).double()
    share = torch.tensor([p, 1 - p], dtype=torch.float64, device=a.device)
    assert_counts(counts, torch.outer(share, share).flatten() * a.numel())


@pytest.mark.parametrize("p", [1 / 1024, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped(p):
    assert_share(~big_mask(p), round(65536 * p) / 65536)


def test_every_lane_drops_the_same_share():
    dropped = (~big_mask(0.5)).view(-1, 8).sum(0).double()
    remaining = ROWS * 128 - dropped
    expected = torch.full_like(dropped, ROWS * 128 * 0.5)
    chi_square = ((dropped - expected) ** 2 / expected).sum()
    chi_square += ((remaining - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(4.0).double(), chi_square.cpu() / 2)  # 8 lanes
    assert p_value > P_VALUE


def test_the_eight_lanes_of_a_call_are_independent():
    """At p = 1/2 all 256 patterns of eight are equally likely."""
    patterns = (big_mask(0.5).view(-1, 8).long() << torch.arange(8, device=machine.device())).sum(1)
    counts = torch.bincount(patterns, minlength=256).double()
    assert_counts(counts, torch.full_like(counts, patterns.numel() / 256))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """Along a row, across Philox calls, and down a column."""
    mask, exact = big_mask(p), round(65536 * p) / 65536
    for distance in (1, 2, 3, 4, 7, 8, 16, 64, 512, 1024, 2048):
        pairs = mask[: mask.numel() // (2 * distance) * 2 * distance].view(-1, 2, distance)
        assert_independent(pairs[:, 0].flatten(), pairs[:, 1].flatten(), exact)  # no pair twice


@pytest.mark.parametrize("other", [SEED + 1, SEED ^ (1 << 32), SEED ^ (1 << 61), -SEED])
def test_seeds_next_to_each_other_are_independent(other):
    assert_independent(big_mask(0.5), big_mask(0.5, other), 0.5)


# --- the seed ----------------------------------------------------------------------------------------------


def draw(version=bias_gelu_dropout_add_triton):
    """A mask with no seed given, the same in y and in dx."""
    y, dx = mask_of(ones(64, 64), seed=None, version=version)
    assert torch.equal(y, dx)
    return y


def test_every_call_drops_other_elements(module):
    first, second = (draw(module.bias_gelu_dropout_add_triton) for _ in range(2))
    assert_independent(first.flatten(), second.flatten(), 0.5)


def test_manual_seed_brings_a_mask_back(module):
    version = module.bias_gelu_dropout_add_triton
    torch.manual_seed(3)
    first, second = draw(version), draw(version)
    torch.manual_seed(3)
    assert torch.equal(draw(version), first)
    assert torch.equal(draw(version), second)


def test_a_seed_is_an_int_or_a_tensor(module):
    x, bias, residual = inputs((8, 8))
    tensor = torch.tensor([7], device=machine.device())
    want = module.bias_gelu_dropout_add_triton(x, bias, residual, 0.5, 7)
    for seed in (tensor, tensor[0]):
        got = module.bias_gelu_dropout_add_triton(x, bias, residual, 0.5, seed)
        assert torch.equal(got, want)
    for seed in (7.0, True, "7", tensor.int(), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="seed must be None, an int, or an int64 tensor"):
            module.bias_gelu_dropout_add_triton(x, bias, residual, 0.5, seed)


def test_a_seed_tensor_may_change_between_calls():
    """As in a loop that counts its steps on the GPU: the value is read when the kernel runs."""
    seed = torch.tensor([7], device=machine.device())
    first, _ = mask_of(ones(8, 64), seed=seed)
    seed += 1
    second, _ = mask_of(ones(8, 64), seed=seed)
    assert torch.equal(second, keep_mask((8, 64), 0.5, 8, seed.device))
    assert not torch.equal(second, first)


def test_checkpointing_drops_the_same_again():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        x, zeros = ones(64, 64).requires_grad_(), torch.zeros(64, 64, device=machine.device())
        y = checkpoint(
            bias_gelu_dropout_add_triton, x, zeros[0], zeros, 0.5, use_reentrant=reentrant
        )
        draw()  # somebody else draws in between
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_drop_other_elements_and_agree_with_their_gradient(backend):
    @torch.compile(fullgraph=True, backend=backend)
    def step(x, bias, residual):
        return bias_gelu_dropout_add_triton(x * 2, bias, residual, 0.5)

    x, zeros = ones(64, 64).requires_grad_(), torch.zeros(64, 64, device=machine.device())
    masks = []
    for _ in range(2):
        x.grad = None
        y = step(x, zeros[0], zeros)
        y.sum().backward()
        masks.append(y.detach() != 0)
        assert torch.equal(x.grad != 0, masks[-1])
    assert_independent(masks[0].flatten(), masks[1].flatten(), 0.5)


def test_compiled_with_a_seed_is_the_same_op():
    x, bias, residual = inputs((17, 33))
    compiled = torch.compile(bias_gelu_dropout_add_triton, fullgraph=True, backend="aot_eager")
    seed = torch.tensor([SEED], device=machine.device())
    want = bias_gelu_dropout_add_triton(x, bias, residual, 0.3, SEED)
    for given in (seed, SEED):
        assert torch.equal(compiled(x, bias, residual, 0.3, given), want)


@pytest.mark.gpu
def test_the_seed_is_never_read_on_the_host():
    x, bias, residual = inputs((64, 64))
    seed = torch.tensor([7], device=machine.device())
    dy = torch.randn_like(x)
    for given in (None, seed, 7):  # once outside: compiling a kernel may wait
        bias_gelu_dropout_add_triton(x, bias, residual, 0.1, given).backward(dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in (None, seed, 7):
            bias_gelu_dropout_add_triton(x, bias, residual, 0.1, given).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_every_replay_of_a_cuda_graph_drops_other_elements():
    x, zeros = ones(256, 256).requires_grad_(), torch.zeros(256, 256, device=machine.device())

    def step():
        y = bias_gelu_dropout_add_triton(x, zeros[0], zeros, 0.5)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return y.detach(), dx

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels, which a capture must not do
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append((y != 0).clone())
        assert torch.equal(dx != 0, masks[-1])
    for first, second in itertools.combinations(masks, 2):
        assert_independent(first.flatten(), second.flatten(), 0.5)


# --- values, gradients, traffic ----------------------------------------------------------------------------


def test_rounded_once(module):
    """From bfloat16 to bfloat16 by way of float32 all along: not where eager rounds three times more."""
    leaves = inputs((40, 64), torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    got = module.bias_gelu_dropout_add_triton(*leaves, 0.1, SEED)
    want = bias_gelu_dropout_add_eager(*exact, 0.1, SEED)
    dy = torch.randn_like(got)
    got = got.detach(), *torch.autograd.grad(got, leaves[:2], dy)
    want = want.detach(), *torch.autograd.grad(want, exact[:2], dy.double())
    for a, b, what in zip(got, want, ("y", "dx", "dbias")):
        error = (a.double() - b).abs() - 0.51 * 2**-7 * b.abs()
        assert error.max() < 2e-6 * max(1.0, b.abs().max()), f"{what} was rounded on the way"


def test_more_strips_than_are_summed_at_a_time(module):
    tensors = inputs((130, 40))
    plan = module.Plan(4, 32, backward=(1, 64, 1024))
    y = module.bias_gelu_dropout_add_triton(*tensors, 0.1, SEED, plan=plan)
    want = bias_gelu_dropout_add_eager(*tensors, 0.1, SEED)
    got, want = (torch.autograd.grad(out.sum(), tensors[:2]) for out in (y, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_mean_over_seeds_is_the_value_without_dropout():
    """What the factor 1/(1-p) is for. 4096 equal elements: within SIGMAS standard deviations."""
    x, zeros = ones(64, 64), torch.zeros(64, 64, device=machine.device())
    y = bias_gelu_dropout_add_triton(x, zeros[0], zeros, 0.25, SEED).double()
    gelu = F.gelu(torch.ones((), dtype=torch.float64), approximate="tanh").item()
    deviation = gelu * (0.25 / 0.75 / y.numel()) ** 0.5
    assert abs(y.mean().item() - gelu) < SIGMAS * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_moves_three_tensors_and_no_mask(dtype):
    x, bias, residual = inputs((96, 640), dtype)
    y = bias_gelu_dropout_add_triton(x, bias, residual, 0.1, SEED)
    dy = torch.randn_like(y)
    traffic = count_traffic(lambda: y.backward(dy))
    by = traffic.by_argument
    assert traffic.launches == 2  # the second adds up the partial sums
    assert by["_bias_gelu_dropout_add_bwd_kernel.dy_ptr"].loaded == dy.nbytes
    assert by["_bias_gelu_dropout_add_bwd_kernel.x_ptr"].loaded == x.nbytes
    assert by["_bias_gelu_dropout_add_bwd_kernel.dx_ptr"].stored == x.nbytes
    assert by["_bias_gelu_dropout_add_bwd_kernel.seed_ptr"].loaded_distinct == 8
    rest = {"dy_ptr", "x_ptr", "dx_ptr", "seed_ptr", "bias_ptr", "partial_ptr"}
    assert {
        a.split(".")[1] for a in by if a.startswith("_bias_gelu_dropout_add_bwd_kernel.")
    } == rest


def test_no_mask_is_saved():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x, bias, residual = inputs((32, 48))
        bias_gelu_dropout_add_triton(x, bias, residual, 0.1)
    assert sorted(t.numel() for t in saved) == [1, 48, 32 * 48]


def test_sums_of_folded_rows_are_rounded_once(module):
    """One strip of wide rows has a sum for each row in it, which is not dbias yet."""
    t, seed = ones(64, 3).bfloat16(), torch.tensor([SEED], device=machine.device())
    partial = module._launch_backward(None, t, t, None, t[0], 0.0, seed, t.dtype)
    assert partial.dtype == torch.float32 and len(partial) == 16


def test_a_module_made_on_meta_begins_with_no_bias(module):
    made = module.BiasGELUDropoutAdd(8, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        made.bias.fill_(9.0)
    made.reset_parameters()
    assert not made.bias.any()
