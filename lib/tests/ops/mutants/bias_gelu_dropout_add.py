"""Mutants of lib/ops/bias_gelu_dropout_add.py."""

import functools
import math

from lib.measure.check import check_against_float64
from lib.ops import bias_gelu_dropout_add as op_file
from lib.tests.ops.mutants import Mutant

import torch
import torch.nn.functional as F
import triton.language as tl

SEED = 2**62 + 12345  # uses both words of the key


def _inputs(op, shape=(17, 33), dtype=torch.float32):
    return op.inputs(shape, dtype, "cpu")


def _masks(module, shape, p=0.5, seed=SEED):
    """Which elements were kept: as seen in y, and as seen in dx."""
    x = torch.ones(shape, requires_grad=True)
    y = module.bias_gelu_dropout_add_triton(x, x[0].detach() * 0, x.detach() * 0, p, seed)
    return y.detach() != 0, torch.autograd.grad(y, x, torch.ones_like(y))[0] != 0


@functools.cache
def _philox(group):
    """Philox4x32-7 of counter `group` and key SEED, in Python's integers: 8 numbers of 16 bits."""
    low = 2**32 - 1
    c, k0, k1 = [group & low, group >> 32, 0, 0], SEED & low, SEED >> 32
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & low, (a >> 32) ^ c[3] ^ k1, a & low]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [half for word in c for half in (word & 0xFFFF, word >> 16)]


def check_the_mask_is_that_of_the_docstring(op, module):
    """Of y, of dx and of keep_mask: several tiles, both ways to draw, folded rows and those left over."""
    for shape in [(5, 8), (2, 1104), (2, 1025), (1037, 13), (1025, 24)]:
        n = math.prod(shape)
        bits = [half for group in range(-(-n // 8)) for half in _philox(group)]
        want = (torch.tensor(bits[:n]) >= 32768).view(shape)
        kept = module.keep_mask(shape, 0.5, SEED)
        for what, got in zip(("y", "dx", "keep_mask"), (*_masks(module, shape), kept)):
            assert torch.equal(got, want), f"{what} of {shape} has other elements dropped"


def check_the_mask_far_down_a_large_tensor(op, module):
    """An index of 32 bits is wrong from 2**31 on, a counter of 32 bits from 2**35 on."""
    seed = torch.tensor([SEED])
    for first in (2**31 - 16, 2**35 - 16):
        for shape in [(4, 16), (4, 5)]:
            x, zeros = torch.ones(shape), torch.zeros(shape)
            n, y, dx = x.numel(), torch.empty_like(x), torch.empty_like(x)
            bits = [half for k in range(-(-n // 8)) for half in _philox(first // 8 + k)]
            want = [b >= 32768 for b in bits[:n]]
            module._launch_forward(x, zeros[0], zeros, y, 0.5, seed, first)
            assert (y != 0).flatten().tolist() == want, f"y from {first} on"
            module._launch_backward(x, x, zeros[0], dx, 0.5, seed, first, False)
            assert (dx != 0).flatten().tolist() == want, f"dx from {first} on"


def check_the_bits_at_the_threshold(op, module):
    """An element whose bits are the threshold stays; one step of p further it is dropped."""
    for shape in [(1, 8), (1, 9)]:  # both ways to draw
        for i in (0, 3, 6):
            bits = _philox(0)[i]
            for step, want in ((bits, True), (bits + 1, False)):
                masks = _masks(module, shape, step / 65536)
                assert [m[0, i].item() for m in masks] == [want, want], f"element {i} at {step}"


def check_p_zero_and_one(op, module):
    """p = 0 is no dropout, p = 1 the residual, also where gelu is NaN; in the module's eager too."""
    x, bias, residual = (t.detach() for t in _inputs(op))
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    plain = F.gelu(x + bias, approximate="tanh") + residual
    for f in (module.bias_gelu_dropout_add_triton, module.bias_gelu_dropout_add_eager):
        got = f(x, bias, residual, 0.0, SEED)
        torch.testing.assert_close(got[1:], plain[1:], rtol=1e-5, atol=1e-5)
        assert torch.equal(f(x, bias, residual, 1.0, SEED), residual), "p = 1 is not the residual"
    inputs = [t.requires_grad_() for t in (x, bias, residual)]
    y = module.bias_gelu_dropout_add_triton(*inputs, 1.0, SEED)
    dx, _, dresidual = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert not dx[1:].any(), "a gradient through what was dropped"
    assert (dresidual == 1).all(), "the residual has no dropout"


def check_eager_with_no_seed_drops_p(op, module):
    """4096 equal elements: within five standard deviations of 1/4."""
    x = torch.ones(64, 64)
    y = module.bias_gelu_dropout_add_eager(x, x[0] * 0, x * 0, 0.25)
    assert abs((y == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / 4096) ** 0.5
    torch.testing.assert_close(y.max(), F.gelu(x[0, 0], approximate="tanh") / 0.75)


def check_seeds(op, module):
    """None draws a new one, from torch's generator, the same for y and dx; a tensor is the number in it."""
    torch.manual_seed(3)
    drawn = [_masks(module, (16, 16), seed=None) for _ in range(2)]
    assert all(torch.equal(y, dx) for y, dx in drawn), "the gradient has another mask than y"
    assert not torch.equal(drawn[0][0], drawn[1][0]), "two calls drop the same elements"
    torch.manual_seed(3)
    assert torch.equal(_masks(module, (16, 16), seed=None)[0], drawn[0][0]), "not by manual_seed"
    want = _masks(module, (16, 16), seed=SEED)[0]
    assert torch.equal(_masks(module, (16, 16), seed=torch.tensor([SEED]))[0], want)
    for bad in (7.0, True, torch.zeros(1), torch.zeros(2, dtype=torch.int64)):
        try:
            _masks(module, (2, 2), seed=bad)
        except ValueError:
            continue
        raise AssertionError(f"taken for a seed: {bad!r}")


def check_rounded_once(op, module):
    """From bfloat16 to bfloat16 by way of float32 all along: not where eager rounds three times more."""
    inputs = _inputs(op, (40, 64), torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = op.eager(*exact)
    got = op.versions["triton"](*inputs)
    dy = torch.randn_like(got)
    got, want = (
        (y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))[:2])
        for y, leaves in ((got, inputs), (want, exact))
    )
    for a, b, what in zip(got, want, ("y", "dx", "dbias")):
        error = (a.double() - b).abs() - 0.51 * 2**-7 * b.abs()
        assert error.max() < 2e-6 * max(1.0, b.abs().max()), f"{what} was rounded on the way"


def check_float64(op, module):
    inputs = _inputs(op, (5, 8), torch.float64)
    check_against_float64(op.versions["triton"], op.eager, *inputs, slack=1e-10)


def check_the_second_sum(op, module):
    """More strips than it adds up at a time, more columns than a program has."""
    partial = torch.randn(130, 40)
    got = module._sum_rows(partial, torch.float32)
    torch.testing.assert_close(got, partial.sum(0), rtol=1e-5, atol=1e-5)


def check_one_program_of_several_tiles(op, module):
    """Its loop over rows: with 4096 programs it takes a second tile only from 8 million elements on."""
    dy, x = torch.randn(2, 40, 8)
    bias, seed = torch.randn(8), torch.tensor([SEED])
    dx, partial = torch.empty_like(x), torch.empty(2, 8)
    module._bias_gelu_dropout_add_bwd_kernel[(2,)](
        dy, x, bias, dx, partial, seed, 40, 8, 0, 32768, 8, 1, 8, 1, 32, HAS_DX=True, HAS_DBIAS=True,
        SOME_DROPPED=True, ALL_DROPPED=False, EIGHTS=True, NUM_STAGES=1, COMPUTE=tl.float32,
        BLOCK_M=16, BLOCK_N=8,
    )  # fmt: skip
    leaf = x.clone().requires_grad_()
    y = op_file.bias_gelu_dropout_add_eager(leaf, bias, 0 * x, 0.5, SEED)
    (want,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(dx, want, rtol=1e-5, atol=1e-5)
    sums = torch.stack([want[:32].sum(0), want[32:].sum(0)])
    torch.testing.assert_close(partial, sums, rtol=1e-5, atol=1e-5)


def check_the_registered_op(op, module):
    """The node of torch.compile, with its own way to the gradient."""
    seed = torch.tensor([op.arguments["seed"]])

    def registered(x, bias, residual):
        return module.bias_gelu_dropout_add_op(x, bias, residual, op.arguments["p"], seed)

    check_against_float64(registered, op.eager, *_inputs(op))


CHECKS = [
    check_p_zero_and_one,
    check_the_registered_op,
    check_float64,
    check_rounded_once,
    check_the_mask_is_that_of_the_docstring,
    check_the_mask_far_down_a_large_tensor,
    check_one_program_of_several_tiles,
    check_the_second_sum,
    check_seeds,
    check_eager_with_no_seed_drops_p,
    check_the_bits_at_the_threshold,
]

_KEPT = "y = tl.where(kept, y * scale, 0.0)"
_DY_KEPT = "dy *= tl.where(kept, scale, 0.0)"

MUTANTS = [
    # --- scale and choice
    Mutant(_KEPT, "y = tl.where(kept, y, 0.0)", "1/(1 - p) forgotten"),
    Mutant(
        _KEPT,
        "y = tl.where(kept, y / scale, 0.0)",
        "multiplied by 1 - p where it is divided",
    ),
    Mutant(_KEPT, "y = tl.where(kept, 0.0, y * scale)", "the kept ones dropped"),
    Mutant(
        _KEPT,
        "y = tl.where(kept, y * scale, -residual.to(COMPUTE))",
        "the residual dropped too",
    ),
    Mutant(_KEPT, "y *= tl.where(kept, scale, 0.0)", "a dropped NaN that stays"),
    Mutant("y = tl.zeros_like(z)", "y *= 0.0", "p = 1: NaN times zero"),
    Mutant(
        "SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536,",
        "SOME_DROPPED=threshold > 0, ALL_DROPPED=False,",
        "p = 1 as any other: divided by zero, and 65536 << 16 is 0",
    ),
    Mutant("return round(65536 * p)", "return int(65536 * p)", "p rounded down"),
    Mutant(
        "return tl.reshape(bits, (rows.shape[0], BLOCK_N)) >= least",
        "return tl.reshape(bits, (rows.shape[0], BLOCK_N)) > least",
        "the threshold itself dropped: one in 65536 too many",
    ),
    # --- the backward pass
    Mutant(_DY_KEPT, "dy *= tl.where(kept, 1.0, 0.0)", "1/(1 - p) forgotten in the gradient"),
    Mutant(_DY_KEPT, "dy *= scale", "no mask in the gradient"),
    Mutant("ctx.p, seed, *wanted[:2])", "ctx.p, seed + 1, *wanted[:2])", "other bits backward"),
    Mutant(
        "dx = dy * _gelu_slope(x + bias[None, :])",
        "dx = tl.where(dy == 0.0, 0.0, dy * _gelu_slope(x + bias[None, :]))",
        "a NaN slope dropped with its element",
    ),
    Mutant(
        "return dx, dbias, dy if wanted[2] else None, None, None",
        "return dx, dbias, dx if wanted[2] else None, None, None",
        "the gradient of x given to residual",
    ),
    Mutant("total += dx  # 0", "total = dx  # 0", "only the last rows of a program summed"),
    Mutant(
        "total += tl.load(partial_ptr", "total = tl.load(partial_ptr", "only the last strips summed"
    ),
    Mutant(
        "strips = _cdiv(n_rows, rows_per_program)",
        "strips = max(1, n_rows // rows_per_program)",
        "floor where ceil was meant: the last strip of rows forgotten",
    ),
    Mutant(
        "return dx, x.new_zeros(n_cols) if has_dbias else None",
        "return dx, None",
        "no gradient of the bias where x is empty",
    ),
    Mutant(
        "if not _needs_gradient(x, bias, residual):",
        "if not _needs_gradient(x):",
        "no gradient for bias alone",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "_backward_op(dy, x, bias, ctx.p, seed)",
        "_backward_op(dy, x, bias, 0.0, seed)",
        "compiled: no mask in the gradient",
    ),
    # --- which bits
    Mutant("n_rounds=7", "n_rounds=10", "ten rounds: other bits than keep_mask has"),
    Mutant("(counter >> 32).to(tl.uint32)", "0", "a Philox counter of 32 bits"),
    Mutant(
        "tl.load(seed_ptr), threshold",
        "tl.load(seed_ptr) & 0xFFFFFFFF, threshold",
        "half of the seed",
    ),
    Mutant(
        "columns = (first + first_col) // 8",
        "columns = first // 8",
        "every tile with the same mask",
    ),
    Mutant(
        "index = (first + rows * n_cols)[:, None] + (first_col + tl.arange(0, BLOCK_N))",
        "index = (first + rows * n_cols)[:, None] + (tl.arange(0, BLOCK_N))",
        "every tile with the same mask, at odd widths",
    ),
    Mutant(
        "columns = (first + first_col) // 8",
        "columns = (first + first_col).to(tl.int32) // 8",
        "an int32 index in the mask",
    ),
    Mutant(
        "group, lane = index // 8, index % 8",
        "group, lane = index.to(tl.int32) // 8, index % 8",
        "an int32 index in the mask, at odd widths",
    ),
    Mutant(
        "words = tl.join(tl.join(a, c), tl.join(b, d))",
        "words = tl.join(tl.join(a, b), tl.join(c, d))",
        "the words of a Philox call in another order",
    ),
    Mutant(
        "bits = tl.join(words << 16, words)",
        "bits = tl.join(words, words << 16)",
        "the halves of a word swapped",
    ),
    Mutant("tl.where(lane < 2, a, b)", "tl.where(lane < 3, a, b)", "a lane from another word"),
    Mutant(
        "return tl.where(lane % 2 == 0, word << 16, word)",
        "return tl.where(lane % 2 == 1, word << 16, word)",
        "the halves of a word swapped, at odd widths",
    ),
    Mutant(
        "threshold == 65536, EIGHTS=n_cols % 8 == 0,\n            COMPUTE",
        "threshold == 65536, EIGHTS=True,\n            COMPUTE",
        "eight neighbours where rows begin anywhere",
    ),
    Mutant(
        "_launch_forward(x_piece, wide_bias, residual_piece, y_piece, p, seed, first)",
        "_launch_forward(x_piece, wide_bias, residual_piece, y_piece, p, seed, 0)",
        "the rows left over by folding with the mask of the first",
    ),
    Mutant(
        "_launch_backward(*piece, p, seed, first, has_dbias)",
        "_launch_backward(*piece, p, seed, 0, has_dbias)",
        "the rows left over by folding with another mask backward",
    ),
    Mutant("return carry + (low >> 32), low", "return carry, low", "keep_mask: a carry forgotten"),
    Mutant(
        "return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)",
        "return torch.zeros(1, dtype=torch.int64, device=device)",
        "no seed: always the same mask",
    ),
    Mutant(
        "return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)",
        "return torch.full((1,), torch.Generator().seed() // 2, device=device)",
        "no seed: one that torch.manual_seed knows nothing of",
    ),
    Mutant(
        "return F.dropout(z, p) + residual",
        "return F.dropout(z, 1 - p) + residual",
        "eager: p kept",
    ),
    Mutant(
        "/ 65536, 1 / 65536)  # all", "/ 65536, 0)  # all", "eager at p = 1: zero divided by zero"
    ),
    # --- gelu
    Mutant("- 0.10294323957952347 *", "- 0.1029 *", "a constant cut off"),
    Mutant("0.21406444881780076", "0.07135481627260025", "x³ without its factor 3 in the gradient"),
    Mutant(
        "return s + z * (s * s) * e *",
        "return s - z * (s * s) * e *",
        "a wrong sign in the gradient",
    ),
    Mutant("tl.minimum(_exponent(z), 100.0)", "_exponent(z)", "0 · inf far out in the gradient"),
    # --- memory and rounding
    Mutant(
        "z = x.to(COMPUTE) + bias.to(COMPUTE)[None, :]",
        "z = (x.to(COMPUTE) + bias.to(COMPUTE)[None, :]).to(x.dtype).to(COMPUTE)",
        "x + bias rounded to the dtype in between",
    ),
    Mutant(
        "y += residual.to(COMPUTE)", "y = y.to(x.dtype) + residual", "rounded before the residual"
    ),
    Mutant(
        "return tl.float64 if dtype == torch.float64 else tl.float32",
        "return tl.float32",
        "float64 computed in float32",
    ),
    Mutant(
        "n_cols, bias, first = x.shape[-1], bias.contiguous(), 0",
        "n_cols, first = x.shape[-1], 0",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "x.reshape(-1, n_cols), bias.contiguous()",
        "x.reshape(-1, n_cols), bias",
        "a strided bias read as if contiguous, backward",
    ),
    Mutant(
        "_launch_forward(x_piece, wide_bias,",
        "_launch_forward(x_piece, bias,",
        "folded rows, narrow bias",
    ),
    Mutant(
        "piece = (dy_piece, x_piece, wide_bias, dx_piece)",
        "piece = (dy_piece, x_piece, bias, dx_piece)",
        "folded rows, narrow bias, backward",
    ),
    Mutant(
        "residual_ptr + rows[:, None] * stride_rm + cols[None, :] * stride_rn",
        "residual_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn",
        "residual read by the strides of x",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = rows[:, None] * n_cols + cols[None, :]",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * BLOCK_M +",
        "rows = pid_m * BLOCK_M +",
        "int32 rows of x and residual",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program +",
        "rows = pid_m * rows_per_program +",
        "int32 rows of dy",
    ),
    Mutant(
        "tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)",
        "tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=(rows < n_rows)[:, None])",
        "the mask of the columns dropped from the store",
    ),
    Mutant(
        "dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0)",
        "dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=1.0)",
        "rows that are not there counted in dbias",
    ),
]
