"""Mutants of lib/ops/linear_glu.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# 0·inf in the gradient, far out
- a = tl.minimum(tl.abs(z), 1e3)
+ a = tl.abs(z)
# dh written over an h that was saved
- over_h=not save_h
+ over_h=True
# eager: deaf to the gate
-         x1, x2 = x2, x1
-     return
+         pass
+     return
# the gate is the first half
- x1, x2 = tl.split
+ x2, x1 = tl.split
# halves taken for neighbours
- (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
+ (BLOCK_M, BLOCK_N, 2)), (0, 1, 2))
# sigmoid as e/(e + 1): NaN where e overflows
- e = fast_exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)
-         y = x1 * fast_divide(x2, 1.0 + e)
+ e = fast_exp2(x2 * (2.302208198144325 + 0.1029432395800235 * x2 * x2))
+         y = x1 * x2 * fast_divide(e, 1.0 + e)
# no x1: gelu alone
- y = x1 * fast_divide(x2, 1.0 + e)
+ y = fast_divide(x2, 1.0 + e)
# gelu's other approximation, forward
- fast_exp2(x2 * (-2.302208198
+ fast_exp2(x2 * (-2.4554669595
# the gradient of -x2 as that of x2
- s = tl.where(z < 0, e * t, t)
+ s = t
# 1 - s, which has lost its digits
- z * (e * t * t) *
+ z * (s * (1.0 - s)) *
# x³ without its factor 3 in the gradient
- 0.2140644488178008
+ 0.07135481627260025
# the gradients of both halves mixed up
- return dy * y, dy * x1 * slope
+ return dy * x1 * slope, dy * y
# the gradient of the gate without x1
- dy * x1 * slope
+ dy * slope
# deaf to the gate, forward
- x1, x2 = x2, x1
-     y
+ x1, x2 = x1, x2
+     y
# deaf to the gate, backward
- dx2, dx1 = _gated_grad(dy, x2, x1, ACTIVATION)
+ dx1, dx2 = _gated_grad(dy, x1, x2, ACTIVATION)
# gelu: another
- y = x1 * gelu(x2)
+ y = x1 * fast_divide(x2, 1.0 + fast_exp(-1.702 * x2))
# gelu: the other form's slope
- y, slope = device.gelu(x2), device.gelu_grad(x2)
+ y, slope = device.gelu(x2), _gelu_tanh_slope(x2)[1]
# silu: a slope without x2
- slope = y + x2 * slope
+ slope = y + slope
# silu: the gradient of x1 by sigmoid
-             y = x2 * y
-
+
# relu: a slope below 0
- tl.where(x2 <= 0, 0.0, 1.0)
+ tl.where(x2 < -1, 0.0, 1.0)
# sigmoid: of |x2|, backward
- y, slope = tl.where(x2 < 0, e * t, t), e * t * t
+ y, slope = t, e * t * t
# sigmoid of -x2
- y = fast_divide(x1, 1.0 + fast_exp(-x2))
+ y = fast_divide(x1, 1.0 + fast_exp(x2))
# what lies past K read from x
- mask=inside[None, :], other=0.0
+ mask=None
# what lies past K read from W
- mask=inside[:, None] & (cols < n_hidden)[None, :]
+ mask=(cols < n_hidden)[None, :]
# rows that are not there read
- rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)
+ rows = rows.to(tl.int64)
# rows of W that are not there read
- mask=inside[:, None] & (cols < n_hidden)[None, :], other=0.0
+ mask=inside[:, None], other=0.0
# the gate from the next rows of W
- w_rows = (cols + pair // BLOCK_N * n_hidden)
+ w_rows = (cols + pair // BLOCK_N * BLOCK_N)
# W by the strides of x
- w_rows[None, :] * stride_wn
+ w_rows[None, :] * stride_xm
# tf32 unasked
- 8 else "tf32" if allow_tf32
+ 8 else "tf32" if not allow_tf32
# the bias of the gate for both halves
- x1 += bias1.to(total
+ x1 += bias2.to(total
# the gate's bias beside x1's
- tl.load(bias_ptr + n_hidden + cols
+ tl.load(bias_ptr + cols + 1
# a spread bias read as if contiguous
- else bias.contiguous()
+ else bias
# floor where ceil was meant: the last rows forgotten
- (host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n),)
+ (max(1, n_rows // tile.m) * host.cdiv(n_hidden, tile.n),)
# columns past H written
- mask = (rows < n_rows - row) & (cols < n_hidden - col)
+ mask = (rows < n_rows - row) & (cols < 2 * n_hidden - col)
# rows past M written
- mask = (rows < n_rows - row) & (cols < n_hidden - col)
+ mask = (rows < n_rows) & (cols < n_hidden - col)
# h with x1 twice
- tl.store(h_ptrs + n_hidden, x2
+ tl.store(h_ptrs + n_hidden, x1
# h rounded on the way to y
-     y = device.gated(x1, x2, ACTIVATION)
+     half: tl.constexpr = y_out.dtype if BY_TMA else y_out.dtype.element_ty
+     y = device.gated(x1.to(half).to(x1.dtype), x2.to(half).to(x1.dtype), ACTIVATION)
# K = 0: nothing written
- if y.numel() > 0:
+ if n_in > 0:
# int32 rows of x
- rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)
+ rows = tl.where(rows < n_rows, rows, 0)
# int32 rows of W
- pair // BLOCK_N * n_hidden).to(tl.int64)
+ pair // BLOCK_N * n_hidden)
# int32 columns
- inner = tl.arange(0, BLOCK_K).to(tl.int64)
+ inner = tl.arange(0, BLOCK_K)
# int32 steps along x
- x_ptrs += tl.cast(stride_xk, tl.int64)
+ x_ptrs += stride_xk
# int32 steps along W
- w_ptrs += tl.cast(stride_wk, tl.int64)
+ w_ptrs += stride_wk
# int32 rows of dy
- rows = pid_m.to(tl.int64) * rows_per_program
+ rows = pid_m * rows_per_program
# int32 columns of dy
- cols = pid_n.to(tl.int64) * BLOCK_N
+ cols = pid_n * BLOCK_N
# H too large for int32 offsets
- weight.shape[0] > 2**24
+ weight.shape[0] > 2**30
# TMA: rows of x for rows of W
- w_desc.load([0, col, k])
+ w_desc.load([0, row, k])
# TMA: the gate right behind a tile
- [n_rows // 2 * pitch, pitch, 1]
+ [128 * pitch, pitch, 1]
# TMA: the first half runs into the second
- weight, [2, n_rows // 2, n_in]
+ weight, [2, n_rows, n_in]
# TMA: each program does one tile and stops
- tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)
+ tl.range(tl.program_id(0), n_tiles, n_tiles
# TMA: rows that are one in memory
- step == 1 and pitch >= t.shape[1]
+ step == 1
# TMA: float32 too
- can_tma = x.itemsize == 2
+ can_tma = x.itemsize <= 4
# TMA: descriptors of no columns
- == 2 and n_in > 0 and
+ == 2 and
# TMA: a W that it cannot read
- can_tma and host.tma_reads(weight)
+ can_tma
# Gluon: a slot free when one consumer is done
- mbarrier.init(empty.index(i), count=2)
+ mbarrier.init(empty.index(i), count=1)
# Gluon: a slot free while a product reads it
- warpgroup_mma_wait(1, deps=(total,))
+ warpgroup_mma_wait(2, deps=(total,))
# Gluon: the last slot of a tile freed twice
- if step > 0:  # the product
+ if step >= 0:  # the product
# Gluon: the last slot of a tile never freed
-         mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
-
-
+
+
# Gluon: the producer waits for a slot that nobody has used
- ((count // STAGES) & 1) ^ 1)
+ (count // STAGES) & 1)
# Gluon: a slot taken for full in every second round
- mbarrier.wait(full.index(slot), (count // STAGES) & 1)
+ mbarrier.wait(full.index(slot), 0)
# Gluon: one consumer's x not waited for
- 2 * x_desc.block_type.nbytes + w
+ x_desc.block_type.nbytes + w
# Gluon: both consumers multiply the same rows
- x_bufs.index(2 * slot + WHO)
+ x_bufs.index(2 * slot)
# Gluon: TMA reads y before it is there
-         hopper.fence_async_shared()
-
+
# Gluon: y_buf written while TMA reads it
-         tma.store_wait(0)  # of the tile before: y_buf is free
-
+
# Gluon: a program that ends while TMA reads its memory
-     )  # fmt: skip
-     tma.store_wait(0)
+     )  # fmt: skip
# Gluon: nobody lets the second consumer go
- WHO == 0 and count == LAG
+ WHO == 0 and count == 0
# Gluon: a quarter of the last wave
- (n_tiles - n_whole) * PARTS
+ n_tiles - n_whole
# Gluon: the last wave never cut up
- n_in, n_tiles - left_over, GROUP
+ n_in, n_tiles, GROUP
# Gluon: a wave cut up that takes two then
-     if left_over * _PARTS > n_programs:
+     if left_over > n_programs:
# Gluon: the first 64 rows of x twice
- at, x = [row + who * BLOCK_M,
+ at, x = [row,
# Gluon: h never written
- can_tma and h is None and _can_gluon
+ can_tma and _can_gluon
# Gluon: rows of y that TMA cannot write
- return hopper and n_hidden % 8 == 0 and
+ return hopper and
# Gluon: wgmma on Blackwell, which has none
- host.generation(gpu) == 9
+ host.generation(gpu) >= 9
# Gluon: a K with no lag in it
- (_FEWEST_STEPS - 1) * _GLUON_TILE.k
+ 0
# Gluon: the gate's bias for both
- x1 = x1 + bias1.to(gl
+ x1 = x1 + bias2.to(gl
# Gluon: the first part of a tile again and again
- (pid_n * PARTS + part % PARTS) * BLOCK_N
+ pid_n * PARTS * BLOCK_N
# Gluon: the first tiles cut up again
- tile = first + part // PARTS
+ tile = part // PARTS
# backward: the gate beside x1
- x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask
+ x2 = tl.load(h_ptr + offsets + 1, mask=mask
# h as wide as y
- offsets = rows[:, None] * (2 * n_hidden)
+ offsets = rows[:, None] * n_hidden
# dy taken for contiguous rows
- rows[:, None] * stride_dym
+ rows[:, None] * n_hidden
# dy taken for columns without gaps
- cols[None, :] * stride_dyn
+ cols[None, :]
# db of the gate from dx1
- total2 += dx2
+ total2 += dx1
# db of the last rows only
- total1 += dx1
+ total1 = dx1
# all programs' sums in one row
- partial_ptr + pid_m.to(tl.int64) * (2 * n_hidden)
+ partial_ptr + pid_m.to(tl.int64) * 0
# h overwritten by dh: a second backward is wrong
- torch.empty_like(h)
-
+ h
+
# autocast in the backward pass
- enabled=False):
+ enabled=torch.is_autocast_enabled(dy.device.type)):
# computed again without its bias
- h = F.linear(host.for_cublas(x), host.for_cublas(weight), bias)
+ h = F.linear(x, weight)
# dx from W upside down
- rows @ host.for_cublas(weight)
+ rows @ weight.flip(0)
# recompute: h written and kept
- save_h = not recompute and host
+ save_h = host
# the op: an h that is not there kept
- _save(ctx, *tensors, h if save_h else None,
+ _save(ctx, *tensors, h,
# x and W kept for gradients that nobody needs
- x, weight, bias = x if has_dw else None, weight if has_dx else None, None
+ bias = None
# a second derivative that is wrong in silence
- @host.once
-
+
# the op: a second derivative wrong in silence
- autograd(_backward, setup_context
+ autograd(lambda *of: _backward.__closure__[0].cell_contents(*of), setup_context
# the op without a bias
- (*ctx.needs_input_grad, False)[:3]
+ ctx.needs_input_grad[:3]
# the op: h with a gradient, which is ignored
-     ctx.mark_non_differentiable(h)
-
+
# deaf to autocast
- tensors = host.autocast(x, weight, bias)
+ tensors = (x, weight, bias)
# an odd number of rows
- weight.shape[0] % 2 or weight
+ weight
# a bias of another size
- {"bias": (bias, "2H")}
+ {"bias": (bias, "B")}
# one strip's sums in float32
- dtype, n_tiles = h.dtype if has_db
+ dtype, n_tiles = torch.float32 if has_db
""")
