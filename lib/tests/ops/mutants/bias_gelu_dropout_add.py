"""Mutants of lib/ops/bias_gelu_dropout_add.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# 0·inf in the gradient, far out
- squared = tl.minimum(z * z, 1e6)
+ squared = z * z
# a NaN dropped is 0
- y = tl.where(keep, y, y * 0.0) * scale
+ y = tl.where(keep, y * scale, 0.0)
# mixed dtypes: y in that of x
-     dtype = host.dtype_of_sum(x.dtype, (x if bias is None else bias).dtype, residual.dtype)
+     dtype = x.dtype
# 1/(1 - p) forgotten
- y = tl.where(keep, y, y * 0.0) * scale
+ y = tl.where(keep, y, 0.0)
# multiplied by 1 - p where it is divided
- y = tl.where(keep, y, y * 0.0) * scale
+ y = tl.where(keep, y / scale, 0.0)
# the kept ones dropped
- y = tl.where(keep, y, y * 0.0) * scale
+ y = tl.where(keep, 0.0, y * scale)
# the residual dropped too
- y = tl.where(keep, y, y * 0.0) * scale
+ y = tl.where(keep, y * scale, -residual.to(COMPUTE))
# p = 1: a NaN dropped is 0
-  y *= 0.0
+  y = tl.zeros_like(z)
# p = 1 as any other: divided by zero, and 65536 << 16 is 0
- SOME_DROPPED=threshold > 0, ALL_DROPPED=threshold == 65536, EIGHTS=n_cols % 8 == 0,
-
+ SOME_DROPPED=threshold > 0, ALL_DROPPED=False, EIGHTS=n_cols % 8 == 0,
+
# p rounded down
- return round(65536 * p)
+ return int(65536 * p)
# the threshold itself dropped: one in 65536 too many
- return tl.reshape(bits, (rows.shape[0], BLOCK_N)) >= least
+ return tl.reshape(bits, (rows.shape[0], BLOCK_N)) > least
# 1/(1 - p) forgotten in the gradient
- dy *= tl.where(keep, scale, 0.0)
+ dy *= tl.where(keep, 1.0, 0.0)
# no mask in the gradient
- dy *= tl.where(keep, scale, 0.0)
+ dy *= scale
# other bits backward
- ctx.p, seed, needs_grad,
+ ctx.p, seed + 1, needs_grad,
# a NaN slope dropped with its element
- dx = dy * _gelu_slope(x)
+ dx = tl.where(dy == 0.0, 0.0, dy * _gelu_slope(x))
# the gradient of x given to residual
- dresidual = dy.to(ctx.residual_dtype) if
+ dresidual = dx.to(ctx.residual_dtype) if
# only the last rows of a program summed
- total += _bias_gelu_dropout_add_bwd_tile(
+ total = _bias_gelu_dropout_add_bwd_tile(
# only the last strips summed
- total += tl.load(partial_ptr
+ total = tl.load(partial_ptr
# no gradient of the bias where x is empty
- return dx, torch.zeros_like(bias) if has_dbias else None
+ return dx, None
# no gradient for bias alone
- not (wants_gradients(*tensors) or is_transformed())
+ not (wants_gradients(tensors[0]) or is_transformed())
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# compiled: no mask in the gradient
- _backward_op(dy, x, bias, ctx.p, seed)
+ _backward_op(dy, x, bias, 0.0, seed)
# ten rounds: other bits than keep_mask has
- n_rounds=7
+ n_rounds=10
# a Philox counter of 32 bits
- (counter >> 32).to(tl.uint32)
+ 0
# half of the seed
- tl.philox(seed, counter
+ tl.philox(seed & 0xFFFFFFFF, counter
# every tile with the same mask
- columns = (first + first_col) // 8
+ columns = first // 8
# every tile with the same mask, at odd widths
- index = (first + rows * n_cols)[:, None] + (first_col + tl.arange(0, BLOCK_N))
+ index = (first + rows * n_cols)[:, None] + (tl.arange(0, BLOCK_N))
# an int32 index in the mask
- columns = (first + first_col) // 8
+ columns = (first + first_col).to(tl.int32) // 8
# an int32 index in the mask, at odd widths
- group, lane = index // 8, index % 8
+ group, lane = index.to(tl.int32) // 8, index % 8
# the words of a Philox call in another order
- words = tl.join(tl.join(a, c), tl.join(b, d))
+ words = tl.join(tl.join(a, b), tl.join(c, d))
# the halves of a word swapped
- bits = tl.join(words << 16, words)
+ bits = tl.join(words, words << 16)
# a lane from another word
- tl.where(lane < 2, a, b)
+ tl.where(lane < 3, a, b)
# the halves of a word swapped, at odd widths
- return tl.where(lane % 2 == 0, word << 16, word)
+ return tl.where(lane % 2 == 1, word << 16, word)
# eight neighbours where rows begin anywhere
- threshold == 65536, EIGHTS=n_cols % 8 == 0,
-         COMPUTE
+ threshold == 65536, EIGHTS=True,
+         COMPUTE
# the last elements of folded rows with the mask of the first
- y_ptr + row, behind[None, :], seed, left, first_col,
+ y_ptr + row, behind[None, :], seed, left * 0, first_col,
# the last elements of folded rows with another mask backward
- dx_ptr, row, behind[None, :], seed, left, first_col,
+ dx_ptr, row, behind[None, :], seed, left * 0, first_col,
# keep_mask: a carry forgotten
- return carry + (low >> 32), low
+ return carry, low
# no seed: always the same mask
- return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
+ return torch.zeros(1, dtype=torch.int64, device=device)
# no seed: one that torch.manual_seed knows nothing of
- return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
+ return torch.full((1,), torch.Generator().seed() // 2, device=device)
# eager: p kept
- return F.dropout(z, p, training) + residual
+ return F.dropout(z, 1 - p, training) + residual
# dropped in eval, too
- p = p if training else 0.0
+ pass
# eager at p = 1: zero divided by zero
- / 65536, 1 / 65536)  # all
+ / 65536, 0)  # all
# a constant cut off
- - 0.10294323957952347 *
+ - 0.1029 *
# x³ without its factor 3 in the gradient
- 0.21406444881780076
+ 0.07135481627260025
# a wrong sign in the gradient
- return s + z * (s * s) * e *
+ return s - z * (s * s) * e *
# 0 · inf far out in the gradient
- tl.minimum(_exponent(z), 100.0)
+ _exponent(z)
# x + bias rounded to the dtype in between
- z += bias.to(COMPUTE)[None, :]
+ z = (z + bias.to(COMPUTE)[None, :]).to(x.dtype).to(COMPUTE)
# rounded before the residual
- y += residual.to(COMPUTE)
+ y = y.to(x.dtype) + residual
# a strided bias read as if contiguous
- bias = bias if bias is None else bias.contiguous()
+ bias = bias
# a strided bias read as if contiguous, backward
- bias = None if bias is None else bias.contiguous()
+ bias = bias
# folded rows with the bias in the wrong order
- bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
-
-     x_ptrs
+ bias_cols = cols.to(tl.int32) // FOLD
+
+     x_ptrs
# folded rows: a bias of the first row alone in the backward pass
- bias_cols = cols.to(tl.int32) % (n_cols // FOLD)
-     bias = 
+ bias_cols = cols.to(tl.int32) % n_cols
+     bias = 
# residual read by the strides of x
- residual_ptr + rows[:, None] * stride_rm + cols[None, :] * stride_rn
+ residual_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn
# dy read as if contiguous: a gradient of strides 0
- dy_ptrs = dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
+ dy_ptrs = dy_ptr + offsets
# int32 rows of x and residual
- rows = pid_m.to(tl.int64) * BLOCK_M +
+ rows = pid_m * BLOCK_M +
# int32 rows of dy
- rows = pid_m.to(tl.int64) * rows_per_program +
+ rows = pid_m * rows_per_program +
# the mask of the columns dropped from the store
- bias, residual_ptrs, y_ptr + offsets, mask,
+ bias, residual_ptrs, y_ptr + offsets, (rows < n_rows)[:, None],
# rows that are not there counted in dbias
- dy = tl.load(dy_ptrs, mask=mask, other=0.0)
+ dy = tl.load(dy_ptrs, mask=mask, other=1.0)
# folded rows: dbias without the last elements
- sums += tl.sum(last_dx, axis=0)
+ sums = sums
""")
