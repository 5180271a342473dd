"""Mutants of lib/ops/lora_linear.py; those of what products share are in matmul.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# relu(NaN) = 0
- z = tl.where(z < 0, 0.0, z)  # tl.maximum
+ z = tl.maximum(z, 0.0)  # tl.maximum
# gelu: 2√(2/π) forgotten in the cubic term
- z = _times_sigmoid(z, z * (1.5957691216057308 + 0.07135481627260025 * z * z))
+ z = _times_sigmoid(z, z * (1.5957691216057308 + 0.044715 * z * z))
# sigmoid that overflows
- return device.fast_divide(z, 1.0 + device.fast_exp(-v))
+ return z * tl.exp(v) / (tl.exp(v) + 1.0)
# rounded before the activation
-     y = _act(z, ACTIVATION)
-     if TMA:
+     z = z.to(tl.bfloat16).to(z.dtype)
+     y = _act(z, ACTIVATION)
+     if TMA:
# the bias of the first tile for all
- z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0)
+ z += tl.load(bias_ptr + cols - col, mask=cols < n_cols, other=0.0)
# both halves written to the left one's place
-         col += z.shape[1] // 2
-
+
# even and odd columns for left and right ones
- tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
+ tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
# groups overlap
- tile = tile % (GROUP * tiles_n)
+ tile = tile % (tiles_m * tiles_n)
# u read past its rank
- u_mask = (rows < n_rows)[:, None] & (ranks < rank)[None, :]
+ u_mask = (rows < n_rows)[:, None]
# B read past its rows
- b_mask = (ranks < rank)[:, None] & (cols < n_cols)[None, :]
+ b_mask = (ranks < rank)[:, None]
# the first piece of the rank for all
- ranks = piece * BLOCK_R
+ ranks = 0 * BLOCK_R
# u read with padding
- rows[:, None] * rank + ranks[None, :]
+ rows[:, None] * BLOCK_R + ranks[None, :]
# the last ranks forgotten
- "PIECES": host.cdiv(rank, block_r)
+ "PIECES": max(1, rank // block_r)
# columns past K added
- x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)
-         w = tl.load(w_ptrs, mask=inside[:, None] & col_mask, other=0.0)
+ x = tl.load(x_ptrs, mask=row_mask, other=0.0)
+         w = tl.load(w_ptrs, mask=col_mask, other=0.0)
# x stepped through as if contiguous
- x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
+ x_ptrs += BLOCK_K
# W stepped through as if contiguous
- w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
+ w_ptrs += BLOCK_K
# only the last step over K kept
- total = device.dot(x, w, total, PRECISION, COMPUTE)
+ total = device.dot(x, w, total * 0.0, PRECISION, COMPUTE)
# int32 rows and columns
- rows, cols = row.to(tl.int64) + tl.arange(0, BLOCK_M), col.to(tl.int64) + tl.arange(0, BLOCK_N)
+ rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
# int32 steps over K
- inner = tl.arange(0, BLOCK_K).to(tl.int64)
+ inner = tl.arange(0, BLOCK_K)
# tf32 though nobody asked
- < 8 else "tf32" if allow_tf32 else "tf32x3"
+ < 8 else "tf32"
# TMA: no low-rank part
-             total = device.dot(u, b, total)
-         _finish
+         _finish
# TMA: the last piece of the rank alone
-             total = device.dot(u, b, total)
-         _finish
+         total = device.dot(u, b, total)
+         _finish
# TMA: each program's first tile again and again
- row, col, rows, cols = _place(tile, n_rows
+ row, col, rows, cols = _place(tl.program_id(0), n_rows
# TMA: unaligned rows
-  and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0
+
# TMA: every second column of x
- return step == 1 and pitch >= t.shape[1]
+ return pitch >= t.shape[1]
# TMA: rows that are one
- step == 1 and pitch >= t.shape[1] and
+ step == 1 and
# TMA: float32 planned
- large and has_tma and dtype.itemsize == 2
+ large and has_tma
# TMA: float32, by a plan
- "tma" and x.itemsize == 2 and
+ "tma" and
# TMA: small products
- large = n_rows * n_cols * n_inner >= _TMA_FROM and
+ large =
# scaled twice
- _product(rows, lora_a.t(), out=u)
+ _product(rows, lora_a.t(), scale, out=u)
# no scale
- u = (u.to(tl.float32) * scale).to(u.dtype)
+ pass
# no scale in float64
- u = u * scale if u.dtype == torch.float64 else u
+ pass
# a strided bias read side by side
- bias, out = None if bias is None else bias.contiguous(), y
+ out = y
# cuBLAS: z without bias
- torch.mm(x, weight.t(), out=total)
+ torch.mm(x, weight.t(), out=y)
# cuBLAS: z without its low-rank part
- total.addmm_(u, host.for_cublas(lora_b)
+ y.addmm_(u, host.for_cublas(lora_b)
# cuBLAS: not activated
- if activation != "identity":
-         _ACT
+ if False:
+         _ACT
# z saved for relu
- *how, plan, activation in host.OF_Z)
+ *how, plan, True)
# the plan that is given ignored
- plan = plan or _plan(
+ plan = _plan(
# gelu: a wrong slope
- e = tl.exp2(a
+ e = tl.exp2(z
# dB without the scale
- db = _product(dz.t(), u, scale)
+ db = _product(dz.t(), u)
# dA and dx without the scale
- du = _product(dz, lora_b, scale)
+ du = _product(dz, lora_b)
# dx without its low-rank part
- dx = _product(du, lora_a).addmm_(host.for_cublas(dz), host.for_cublas(weight))
+ dx = _product(dz, weight)
# dy of three dimensions
- dz, dbias = host.dz_of(dy_rows, saved
+ dz, dbias = host.dz_of(dy, saved
# dy read as if contiguous
- dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
+ dy_offsets = rows[:, None] * n_cols + cols[None, :]
# one strip's sums for all
- tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)
+ tl.store(partial_ptr + cols, sums, mask=cols < n_cols)
# B saved for nothing
- lora_b if has_dx or has_da or all_inputs else None
+ lora_b
# x and W saved for nothing
- x if has_da or all_inputs else None, weight if has_dx or all_inputs else None
+ x, weight
# a second derivative wrong in silence
-     @host.once
+     @staticmethod
# a trained weight taken
-     if trains_weight:
+     if False:
# refused under no_grad
- return getattr(weight, "requires_grad", False) and torch.is_grad_enabled()
+ return getattr(weight, "requires_grad", False)
# two ranks taken
- "lora_b": (lora_b, "N R")
+ "lora_b": (lora_b, "N Q")
# rank 0 taken
-         _check_rank(name, lora_a.shape[0])
+         pass
# rank 0 not named
- if not 1 <= rank <= _MAX_RANK:
+ if not rank <= _MAX_RANK:
# a short bias taken
- "bias": (bias, "N")
+ "bias": (bias, "P")
# two dtypes taken
-         if t.dtype != x.dtype and not
+         if False and not
# op: a trained weight without a gradient
- if ctx.needs_input_grad[1]:
+ if False:
# op: gelu's slope without z
- if saved is None and activation != "identity":
+ if False:
# op: gelu's slope of a z that is empty
- z if save_z else None, how
+ z, how
# op: what makes z again not saved
- bias if all_inputs else None
+ None
# op: no gradient where the bias is left out
- u, saved, scale, activation, ctx.needs_grad)
+ u, saved, scale, activation, [ctx.needs_input_grad[k] for k in (0, 2, 3, 4)])
# op: dA and dB mixed up
- dx, da, db, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))
+ dx, db, da, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))
# the base is trained
- self.base = base.requires_grad_(False)
+ self.base = base
# an attribute set, and nothing frozen
- self.base = base.requires_grad_(False)
+ self.base = base
+         base.requires_grad = False
# a parameter moved, and no parameter any more
- self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank, **like_weight))
+ self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank)).to(**like_weight)
# alpha not divided by rank
- alpha, alpha / rank, activation
+ alpha, alpha, activation
# A is 0
- torch.nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
+ torch.nn.init.zeros_(self.lora_a)
# B is not 0
- torch.nn.init.zeros_(self.lora_b)
+ torch.nn.init.normal_(self.lora_b)
# merged twice
-         if not self.merged:
-             a, b = (
+         if True:
+             a, b = (
# unmerged twice
-         if self.merged:
-             self._add
+         if True:
+             self._add
# unmerged by what A and B are now
- self._add_to_weight(self._merged_a, self._merged_b, -self.scale)
+ self._add_to_weight(self.lora_a, self.lora_b, -self.scale)
# merged with s B A rounded before
- total = torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)
+ total = weight + scale * (b @ a)
# merged what is not finite
- if not torch.isfinite(total).all():
+ if False:
# trained while merged, without effect
- if self.training and torch.is_grad_enabled():
+ if False:
# merged from the start
- self.register_buffer("_merged_a", None, persistent=False)
+ self.register_buffer("_merged_a", torch.zeros(0))
# s B A saved twice
-     def _save_to_state_dict(self, destination, prefix, keep_vars):
-         if self.merged:
+     def _save_to_state_dict(self, destination, prefix, keep_vars):
+         if False:
# loaded while merged
-     def _load_from_state_dict(self, *args, **kwargs):
-         if self.merged:
+     def _load_from_state_dict(self, *args, **kwargs):
+         if False:
# gelu: another form
- z = device.gelu(z)
+ z = _times_sigmoid(z, 1.702 * z)
""")
