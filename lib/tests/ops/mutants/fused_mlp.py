"""Mutants of lib/ops/fused_mlp.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# two gradients in one storage
- db2 = db2.clone()
+ db2 = db2
# a tile of the hidden layer taken for all of it
- for start in range(first, tl.minimum(first + units_per_program, n_hidden), BLOCK_H):
+ for start in range(first, tl.minimum(first + 1, n_hidden), BLOCK_H):
# each tile forgets the ones before it
- z = device.dot(hidden, w2, z, PRECISION
+ z = device.dot(hidden, w2, z * 0.0, PRECISION
# one column: each tile forgets the ones before it
- z += tl.sum(hidden.to(COMPUTE) * w2
+ z = tl.sum(hidden.to(COMPUTE) * w2
# split: parts that overlap
- first = tl.program_id(1) * units_per_program
+ first = tl.program_id(1) * BLOCK_H
# split: each part up to the end
- tl.minimum(first + units_per_program, n_hidden)
+ n_hidden
# split: all parts in one place
- y_ptrs = y_ptr + tl.program_id(1).to(tl.int64) * n_rows * n_cols
+ y_ptrs = y_ptr + 0 * n_rows
# split: the last function of each part, and of their sum
- FINAL="identity" if split else final
+ FINAL=final
# split: b2 in each part
- w2, None if split else b2, out
+ w2, b2, out
# split: the first part again and again
- parts_ptr += n_elements
+ parts_ptr += 0
# split: parts rounded to the dtype of x
- out = x.new_empty((plan.n_splits, *y.shape), dtype=wide) if split else y
+ out = x.new_empty((plan.n_splits, *y.shape)) if split else y
# split: one bias for all columns
- b2_ptr + offsets % n_cols
+ b2_ptr + offsets * 0
# split: without the second kernel
- split, wide = plan.n_splits > 1,
+ split, wide = False,
# never split
- of_a_row // _LEAST_OF_A_PART)
+ 0)
# the mask of the last piece of K dropped
- inside = inner < n_inner - k
+ inside = inner < n_inner
# units that are not there: 0 times infinity
- tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)
+ tl.where(z < 0, 0.0, z)
# relu turns NaN into 0
- tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)
+ tl.where((z > 0) & (units < n_hidden)[None, :], z, 0.0)
# no relu
- tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)
+ tl.where((units >= n_hidden)[None, :], 0.0, z)
# sigmoid as e/(1 + e): NaN for z > 88
- z = 1.0 / (1.0 + tl.exp(-z))
+ z = tl.exp(z) / (1.0 + tl.exp(z))
# b1 forgotten
-     z += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0).to(COMPUTE)[None, :]
-
+
# b2 forgotten
- z += tl.load(b2_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
+ z += 0.0
# the hidden layer rounded to bfloat16
- 0.0, z).to(x_ptr.dtype.element_ty)
+ 0.0, z).to(tl.bfloat16).to(x_ptr.dtype.element_ty)
# columns that are not there are written
- tl.store(y_ptrs, device.activate(z, FINAL), mask=mask)
+ tl.store(y_ptrs, device.activate(z, FINAL), mask=(rows < n_rows)[:, None])
# the rest of K forgotten
- "ONE_STEP": k <= block_k and not backward
+ "ONE_STEP": not backward
# int32 rows
- rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
+ rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
# int32 units
- units = (start + tl.arange(0, BLOCK_H)).to(tl.int64)
+ units = start + tl.arange(0, BLOCK_H)
# int32 columns of x
- x_ptr + rows[:, None] * stride_xm + inner.to(tl.int64)[None, :] * stride_xk
+ x_ptr + rows[:, None] * stride_xm + inner[None, :] * stride_xk
# backward: int32 columns
- cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
+ cols = start + tl.arange(0, BLOCK_N)
# dy taken for contiguous
- dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn
+ dy_ptr + rows[:, None] * n_cols + cols[None, :]
# backward: W2 taken for contiguous
- w2_ptr + cols[:, None] * stride_2n + units[None, :] * stride_2h
+ w2_ptr + cols[:, None] * n_hidden + units[None, :]
# biases with gaps
- _launch(chosen, out, x, w1, b1.contiguous(), w2, b2.contiguous(), final)
+ _launch(chosen, out, x, w1, b1, w2, b2, final)
# backward: b1 with gaps
- w1, b1.contiguous(), w2, hidden
+ w1, b1, w2, hidden
# the gradient of relu forgotten
- dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)
+ dz1 = tl.where((rows >= n_rows)[:, None], 0.0, dh)
# NaN lets no gradient through
- dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)
+ dz1 = tl.where((hidden > 0) & (rows < n_rows)[:, None], dh, 0.0)
# rows that are not there: 0 times infinity
- dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)
+ dz1 = tl.where(hidden <= 0, 0.0, dh)
# a wrong gradient of sigmoid
- dy = dy * (saved * (1.0 - saved))
+ dy = dy * saved
# dz2 of the first rows only
-         if pid_h == 0:
+         if pid_m == 0:
# db2 from rounded numbers
- tl.store(partial + n_hidden + cols, tl.sum(dz2, axis=0)
+ tl.store(partial + n_hidden + cols, dz2.to(COMPUTE).to(tl.bfloat16).to(COMPUTE).sum(axis=0)
# the sums of the last rows alone
- partial += pid_m.to(tl.int64) * (n_hidden + n_cols)
+ partial += 0 * n_cols
# dh of the last columns alone
- dh = device.dot(dz2, w2, dh, PRECISION
+ dh = device.dot(dz2, w2, dh * 0.0, PRECISION
# no hidden layer for dW2 alone
- hidden = x.new_empty(n_rows, n_hidden) if has_dw2 else None
+ hidden = x.new_empty(n_rows, n_hidden) if has_dx else None
# no dz1 for dW1 alone
- if has_dx or has_dw1 else None
+ if has_dx else None
# no sums for db2 alone
- if has_db1 or has_db2:
+ if has_db1:
# cublas: computed again without relu
- hidden = _hidden_by_cublas(x, w1, b1) if hidden is None else hidden
+ hidden = torch.mm(x, w1.t()) + b1 if hidden is None else hidden
# cublas: relu's gradient forgotten
- dz2 = aten.threshold_backward(dy, y, 0)
+ dz2 = dy
# autocast rounds the products of the backward pass
- torch.mm(dz1, host.for_cublas(w1), out=x.new_empty(x.shape))
+ torch.mm(dz1, w1)
# autocast ignored
- tensors = host.autocast(x, weight1, bias1, weight2, bias2)
+ tensors = (x, weight1, bias1, weight2, bias2)
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# a bias unchecked
- weight2=(weight2, "N H"), bias2=(bias2, "N"),
+ weight2=(weight2, "N H"), bias2=(bias2, "B"),
# eager: no relu
- hidden = torch.relu(F.linear(x, weight1, bias1))
+ hidden = F.linear(x, weight1, bias1)
# one strip's sums in float32
- wide = x.dtype if plan.n_tiles == 1 else host
+ wide = host
# partial sums rounded to 16 bits
- wide = x.dtype if plan.n_tiles == 1 else host.sum_dtype(x.dtype)
+ wide = x.dtype
""")
