"""Mutants of lib/ops/bias_gelu_dropout_add.py."""

from lib.measure.mutants import Mutant

_DROP_Y = "y = tl.where(keep, y, y * 0.0) * scale"
_DROP_DY = "dy *= tl.where(keep, scale, 0.0)"

MUTANTS = [
    Mutant("squared = tl.minimum(z * z, 1e6)", "squared = z * z", "0·inf in the gradient, far out"),
    Mutant(_DROP_Y, "y = tl.where(keep, y * scale, 0.0)", "a NaN dropped is 0"),
    Mutant(
        "    dtype = host.dtype_of_sum(x.dtype, bias.dtype, residual.dtype)\n",
        "    dtype = x.dtype\n",
        "mixed dtypes: y in that of x",
    ),
    # --- scale and choice
    Mutant(_DROP_Y, "y = tl.where(keep, y, 0.0)", "1/(1 - p) forgotten"),
    Mutant(
        _DROP_Y, "y = tl.where(keep, y / scale, 0.0)", "multiplied by 1 - p where it is divided"
    ),
    Mutant(_DROP_Y, "y = tl.where(keep, 0.0, y * scale)", "the kept ones dropped"),
    Mutant(
        _DROP_Y, "y = tl.where(keep, y * scale, -residual.to(COMPUTE))", "the residual dropped too"
    ),
    Mutant(" y *= 0.0", " y = tl.zeros_like(z)", "p = 1: a NaN dropped is 0"),
    Mutant(
        "SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0,\n",
        "SOME_DROPPED=threshold > 0, ALL_DROPPED=False, EIGHTS=n_cols % 8 == 0,\n",
        "p = 1 as any other: divided by zero, and 65536 << 16 is 0",
    ),
    Mutant("return round(65536 * p)", "return int(65536 * p)", "p rounded down"),
    Mutant(
        "return tl.reshape(bits, (rows.shape[0], BLOCK_N)) >= least",
        "return tl.reshape(bits, (rows.shape[0], BLOCK_N)) > least",
        "the threshold itself dropped: one in 65536 too many",
    ),
    # --- the backward pass
    Mutant(_DROP_DY, "dy *= tl.where(keep, 1.0, 0.0)", "1/(1 - p) forgotten in the gradient"),
    Mutant(_DROP_DY, "dy *= scale", "no mask in the gradient"),
    Mutant("ctx.p, seed, needs_grad,", "ctx.p, seed + 1, needs_grad,", "other bits backward"),
    Mutant(
        "dx = dy * _gelu_slope(x + bias[None, :])",
        "dx = tl.where(dy == 0.0, 0.0, dy * _gelu_slope(x + bias[None, :]))",
        "a NaN slope dropped with its element",
    ),
    Mutant(
        "dresidual = dy.to(ctx.residual_dtype) if",
        "dresidual = dx.to(ctx.residual_dtype) if",
        "the gradient of x given to residual",
    ),
    Mutant(
        "total += _bias_gelu_dropout_add_bwd_tile(",
        "total = _bias_gelu_dropout_add_bwd_tile(",
        "only the last rows of a program summed",
    ),
    Mutant(
        "total += tl.load(partial_ptr", "total = tl.load(partial_ptr", "only the last strips summed"
    ),
    Mutant(
        "return dx, torch.zeros_like(bias) if has_dbias else None",
        "return dx, None",
        "no gradient of the bias where x is empty",
    ),
    Mutant(
        "if needs_autograd(*tensors) else",
        "if needs_autograd(tensors[0]) else",
        "no gradient for bias alone",
    ),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    Mutant(
        "_backward_op(dy, x, bias, ctx.p, seed), dy",
        "_backward_op(dy, x, bias, 0.0, seed), dy",
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
        "threshold == 65536, EIGHTS=n_cols % 8 == 0,\n        COMPUTE",
        "threshold == 65536, EIGHTS=True,\n        COMPUTE",
        "eight neighbours where rows begin anywhere",
    ),
    Mutant(
        "y_ptr + row, behind[None, :], seed_ptr, left, first_col,",
        "y_ptr + row, behind[None, :], seed_ptr, left * 0, first_col,",
        "the last elements of folded rows with the mask of the first",
    ),
    Mutant(
        "dx_ptr, row, behind[None, :], seed_ptr, left, first_col,",
        "dx_ptr, row, behind[None, :], seed_ptr, left * 0, first_col,",
        "the last elements of folded rows with another mask backward",
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
        "return F.dropout(z, p, training) + residual",
        "return F.dropout(z, 1 - p, training) + residual",
        "eager: p kept",
    ),
    Mutant("p = p if training else 0.0", "pass", "dropped in eval, too"),
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
        "fold, bias.contiguous(), *matrices, p,",
        "fold, bias, *matrices, p,",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "*matrices, bias.contiguous(), p, seed, dtype)",
        "*matrices, bias, p, seed, dtype)",
        "a strided bias read as if contiguous, backward",
    ),
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n\n    x_ptrs",
        "bias_cols = cols.to(tl.int32) // FOLD\n\n    x_ptrs",
        "folded rows with the bias in the wrong order",
    ),
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n    bias = ",
        "bias_cols = cols.to(tl.int32) % n_cols\n    bias = ",
        "folded rows: a bias of the first row alone in the backward pass",
    ),
    Mutant(
        "residual_ptr + rows[:, None] * stride_rm + cols[None, :] * stride_rn",
        "residual_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn",
        "residual read by the strides of x",
    ),
    Mutant(
        "dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_ptrs = dy_ptr + offsets",
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
        "bias, residual_ptrs, y_ptr + offsets, mask,",
        "bias, residual_ptrs, y_ptr + offsets, (rows < n_rows)[:, None],",
        "the mask of the columns dropped from the store",
    ),
    Mutant(
        "dy = tl.load(dy_ptrs, mask=mask, other=0.0)",
        "dy = tl.load(dy_ptrs, mask=mask, other=1.0)",
        "rows that are not there counted in dbias",
    ),
    Mutant(
        "sums += tl.sum(last_dx, axis=0)",
        "sums = sums",
        "folded rows: dbias without the last elements",
    ),
]
