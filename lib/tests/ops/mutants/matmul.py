"""Mutants of lib/ops/matmul.py, and of what products share with it: tiles, activations, dz and dbias."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# relu that drops NaN
- z = tl.where(z < 0, 0.0, z)
+ z = tl.maximum(z, 0.0)
# gelu: a constant cut off
- return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
+ return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.04 * z * z)))
# silu: s for 1 - s in the gradient
- + saved * (e * t * t))
+ + saved * (t * t))
# sigmoid: half of its gradient
- dy * (saved * (1.0 - saved))
+ dy * (1.0 - saved)
# relu: a gradient where y is 0
- tl.where(saved <= 0, 0.0, dy)
+ tl.where(saved < 0, 0.0, dy)
# silu: its slope from y
- OF_Z = ("gelu", "gelu_tanh", "silu")
+ OF_Z = ("gelu", "gelu_tanh")
# y saved for z
- tl.store(z_ptr + offsets, z.to(y_ptr.dtype.element_ty), mask=mask)
+ tl.store(z_ptr + offsets, y, mask=mask)
# persistent: y saved for z
- z_desc.store([row, col], z.to(z_desc.dtype))
+ z_desc.store([row, col], device.activate(z, ACTIVATION).to(z_desc.dtype))
# a bias for each row
- z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]
+ z += tl.load(bias_ptr + rows, mask=rows < n_rows, other=0.0).to(z.dtype)[:, None]
# TMA: the first bias again
- cols = col + tl.arange(0, z.shape[1])
+ cols = tl.arange(0, z.shape[1])
# the last group taken for a whole one
- height = tl.minimum(tiles_m - first, GROUP)
+ height = GROUP
# groups that overlap
- first = tile // (GROUP * tiles_n) * GROUP
+ first = tile // (GROUP * tiles_n)
# rows and columns of tiles mixed up
- return first + tile % height, tile // height
+ return first + tile // height, tile % height
# persistent: one tile for each program
- tl.program_id(0), n_tiles, tl.num_programs(0)):
+ tl.program_id(0), tl.num_programs(0), n_tiles):
# columns past K added
- inside = tl.arange(0, BLOCK_K) < n_inner - k
+ inside = tl.arange(0, BLOCK_K) < n_inner
# rows past M read
- mask=row_mask & inside[None, :], other=0.0)
+ mask=inside[None, :], other=0.0)
# a read as if contiguous
- a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
+ a_ptrs += BLOCK_K
# int32 steps in a
- a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
+ a_ptrs += stride_ak * BLOCK_K
# int32 steps in b
- b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
+ b_ptrs += stride_bk * BLOCK_K
# every part the first
- start = tl.program_id(1) * inner_per_part
+ start = 0
# parts that overlap
- tl.minimum(inner_per_part, n_inner - start)
+ (n_inner - start)
# parts written over each other
-     y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
-
+
# the first part added again and again
-         rows += n_rows
-
+
# y written where a part further on would be
-     rows -= n_parts * n_rows
-
+
# parts rounded to bfloat16
- wide = host.sum_dtype(y.dtype)
-     parts
+ wide = y.dtype
+     parts
# a part with nothing in it
-     n_parts = host.cdiv(n_inner, inner_per_part or 1)
+     n_parts = plan.n_parts
# split-K without the bias
- (parts, bias, y, z),
+ (parts, None, y, z),
# float64 summed in float32
- COMPUTE=host.compute_dtype(a.dtype), GROUP
+ COMPUTE=tl.float32, GROUP
# int32 rows of a
- of bfloat16 on
-     rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
+ of bfloat16 on
+     rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
# int32 columns of b
-     cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
-     inner = 
+     cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
+     inner = 
# int32 columns of a
- inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
+ inner = start + tl.arange(0, BLOCK_K)
# int32 rows of dy
- rows = pid_m.to(tl.int64) * rows_per_program
+ rows = pid_m * rows_per_program
# both halves in one place
-         cols += BLOCK_N // 2
-
+
# TMA: both halves in one place
-             col += BLOCK_N // 2
-
+
# TMA: a transposed twice
- a_desc.load([k, row]).T if
+ a_desc.load([row, k]).T if
# TMA: b not transposed
- b_desc.load([col, k]).T if
+ b_desc.load([col, k]) if
# TMA from any address
- pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0
+ pitch * t.itemsize % 16 == 0
# TMA of rows that begin anywhere
- step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 ==
+ step == 1 and pitch >= t.shape[1] and 0 ==
# TMA: the transpose taken for the matrix
- (t.t(), True) if host.tma_reads
+ (t.t(), False) if host.tma_reads
# what TMA has stored aside not brought home
-             t.copy_(out)
+             pass
# TMA with nothing to load
- "half" and n_inner > 0 and
+ "half" and
# a bias with gaps
- None if bias is None else bias.contiguous(),
+ bias,
# parts of one step
- k // (_LEAST_STEPS * tile.k)
+ k // tile.k
# more parts than run at once
- , n_programs // n_tiles)
+ )
# three programs for each multiprocessor
- _RESIDENT.get(kind, 1)
+ 3
# any pitch taken for aligned
- pitch % 16 == t.data_ptr()
+ 0 == t.data_ptr()
# the copy of a transpose
- else _to_aligned(t.t()).t()
+ else _to_aligned(t.t())
# a large product element by element
-         a, b = _to_aligned(a), _to_aligned(b)
+         pass
# the rows of b alone decide
- aligned = _is_aligned(a) and
+ aligned =
# tiles larger than y
- <= t <= max(16, size)
+ <= t
# always the smallest tile
-         if n_tiles * max(1, parts) >= _ENOUGH * n_sms:
-             break
-
+
# an epilogue handed to cuBLAS, which has none
- activation == "identity" and not host.ON_CPU
+ not host.ON_CPU
# large products handed to cuBLAS, too
- bare and aligned and m * n * k < _CUBLAS_UP_TO
+ bare and aligned
# float32 handed to cuBLAS: no 3xTF32
- bare = kind == "half" and activation
+ bare = activation
# the CPU's product in the interpreter
- activation == "identity" and not host.ON_CPU
+ activation == "identity"
# odd rows handed to cuBLAS, which is slow at them
- if bare and aligned and
+ if bare and
# cuBLAS without the bias
- torch.addmm(bias, a, b, out=total)
+ torch.mm(a, b, out=total)
# cuBLAS: z not written
-     total = y if z is None else z
-     a, b = host.for
+     total = y
+     a, b = host.for
# cuBLAS without the activation
- y.copy_(host.ACTIVATIONS[activation](total))
+ y.copy_(total)
# 16 bits: parts of K where a smaller tile would do
- for tile in fit if tiles is _TILES["half"] else []:
+ for tile in []:
# float32, too: a smaller tile than it is tuned for
- for tile in fit if tiles is _TILES["half"] else []:
+ for tile in fit:
# dbias of the last rows alone
-         total += dz
+         total = dz
# dbias of dy instead of dz
-             dz = slope_times(dz, saved, ACTIVATION)
+             total += dz - slope_times(dz, saved, ACTIVATION)
+             dz = slope_times(dz, saved, ACTIVATION)
# what was saved read by the strides of dy
- offsets = rows[:, None] * n_cols + cols[None, :]
-         if saved
+ offsets = dy_offsets
+         if saved
# no dz for db alone
- has_dz = plan and plan.backward, has_da or has_db
+ has_dz = plan and plan.backward, has_da
# a kept for da, b for db
- a if has_db else None, b if has_da else None
+ a if has_da else None, b if has_db else None
# gradients nobody wants
- ctx.needs_grad = [*ctx.needs_input_grad[:2],
+ ctx.needs_grad = [True, True,
# tf32 in silence, backward
- da = _forward(dz, b.t(), None, "identity", allow_tf32)
+ da = _forward(dz, b.t(), None, "identity", True)
# tf32 in silence
- return "tf32" if allow_tf32 else "tf32x3"
+ return "tf32"
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# z with a gradient of its own
-     ctx.mark_non_differentiable(z)
-
+
# z computed again without the bias
- matmul_op(a, b, bias, "identity", allow_tf32)
+ matmul_op(a, b, None, "identity", allow_tf32)
# tf32 in silence, both products of the backward pass
-     ctx.how = activation, allow_tf32
+     ctx.how = activation, True
# compiled: multiplied once more
- save_z = activation in host.OF_Z and host.needs_autograd(a, b, bias)
+ save_z = False
# z stored for inference
-     y, z = _empty(a, b, save_z)
+     y, z = _empty(a, b, save_z or activation in host.OF_Z)
# autocast: float64 too
- getattr(t, "dtype", None) in MIXED
+ getattr(t, "dtype", None) in DTYPES
# autocast passed over
-     if not torch.is_autocast_enabled(where):
+     if True:
# b with too few rows
- "b": (b, "K N")
+ "b": (b, "J N")
# a bias of one element
- "bias": (bias, "N")
+ "bias": (bias, "J")
# a batch
- "b": (b, "K N")
+ "b": (b, "... K N")
# two devices
-         if t.device != x.device:
+         if False:
# eager: the bias taken off
- z if bias is None else z + bias)
+ z if bias is None else z - bias)
# the op: a second derivative without what goes through z
- , all_inputs=True)
+ )
# a second derivative without what goes through z
-         return y, z  # z too
+         ctx.mark_non_differentiable(*filter(torch.is_tensor, [z]))
+         return y, z  # z too
# gelu: another form
- z = gelu(z)
+ z = gelu_tanh(z)
# gelu: the other form's slope
- dy * gelu_grad(saved)
+ dy * gelu_tanh_grad(saved)
# one strip's sums in float32
- dtype, n_tiles = dy.dtype if has_dbias
+ dtype, n_tiles = torch.float32 if has_dbias
""")
