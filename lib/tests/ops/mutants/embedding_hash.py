"""Mutants of lib/ops/embedding_hash.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# C's remainder: rows before the table's first
-     row += tl.where(row < 0, n_rows, 0)
-
+
# the 1 forgotten in the kernel
- row = (ids + 1) % n_rows
+ row = ids % n_rows
# the 1 forgotten where rows are counted again
- (ids.long() + 1) % n_rows
+ ids.long() % n_rows
# the sign dropped in place of a floor
- (ids.long() + 1) % n_rows
+ torch.fmod(ids.long() + 1, n_rows).abs()
# the start of the next table
- tl.load(tables_ptr + TABLES + table)
+ tl.load(tables_ptr + TABLES + (table + 1) % TABLES)
# all tables as long as the first
- n_rows, start = tl.load(tables_ptr + table)
+ n_rows, start = tl.load(tables_ptr)
# starts counted from the second table on
- itertools.accumulate(num_rows[:-1], initial=0)
+ itertools.accumulate(num_rows[1:], initial=0)
# 1 added to an id in 32 bits
- other=0).to(tl.int64)
+ other=0)
# int32 lookups
- first = tl.program_id(0).to(tl.int64) *
+ first = tl.program_id(0) *
# int32 offsets of rows that are read
- row[:, None] * STRIDE_WR
+ row[:, None].to(tl.int32) * STRIDE_WR
# int32 offsets of rows that are added to
- dweight_ptr + row[:, None] * DIM
+ dweight_ptr + row[:, None].to(tl.int32) * DIM
# one lookup more than there are
- is_there = lookup < n_lookups
+ is_there = lookup <= n_lookups
# the mask of the columns dropped forward
- mask = is_there[:, None] & (cols < DIM)
-     weight
+ mask = is_there[:, None] & (cols < DIM + BLOCK_D)
+     weight
# the mask of the columns dropped backward
- mask = is_there[:, None] & (cols < DIM)
-     dy
+ mask = is_there[:, None] & (cols < DIM + BLOCK_D)
+     dy
# every program begins with the first table
- place = (first % TABLES).to(tl.int32) + tl.arange(0, BLOCK_L)
+ place = tl.arange(0, BLOCK_L)
# the column stride of ids forgotten
- sample * stride_ib + table * stride_it
+ sample * stride_ib + table
# the column stride of weight forgotten
- STRIDE_WR + cols * STRIDE_WD, mask
+ STRIDE_WR + cols, mask
# the column stride of weight forgotten in a step
- STRIDE_WR + cols * STRIDE_WD
-     weight
+ STRIDE_WR + cols
+     weight
# dy read as if contiguous: a gradient of strides 0
- sample * STRIDE_YB + table * STRIDE_YT
+ sample * TABLES * DIM + table * DIM
# the last lookup of a row wins
- tl.atomic_add(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask, sem="relaxed")
+ tl.store(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask)
# atomic additions to what was in memory
- dweight = dy.new_zeros(size, dtype
+ dweight = dy.new_empty(size, dtype
# sums of 16 bits in 16 bits
- new_zeros(size, dtype=host.sum_dtype(dy.dtype))
+ new_zeros(size, dtype=dy.dtype)
# floor where ceil was meant: the last columns forgotten
- grid = host.cdiv(n_lookups, plan.block_l), host.cdiv(dim, plan.block_d)
+ grid = host.cdiv(n_lookups, plan.block_l), dim // plan.block_d
# a sparse gradient that is dense
- -1, False, sparse)
+ -1, False, False)
# the registered op always sorts
- _backward(dy, ids, num_rows, deterministic=deterministic)
+ _backward(dy, ids, num_rows)
# what was made under torch.func is used after it
- host.is_compiling() or host.active_transforms()
+ host.is_compiling()
# a copy to the GPU in every call
- _tables_once = functools.cache(_tables_anew)
+ _tables_once = _tables_anew
# tables that begin too small
- -(len(table) ** -0.5), len(table) ** -0.5
+ -1 / len(table), 1 / len(table)
# a second derivative that is wrong in silence
-     @host.once
-
+
# a frozen table is trained
- torch.nn.Parameter(weight, requires_grad=trained.pop())
+ torch.nn.Parameter(weight)
# Adagrad's step by the gradient's square alone
-         state += tl.sum(grad * grad, axis=1, keep_dims=True) / DIM
+         state = tl.sum(grad * grad, axis=1, keep_dims=True) / DIM
# a mean over padded columns
- keep_dims=True) / DIM
+ keep_dims=True) / grad.shape[1]
# Adagrad's state never written
-         tl.store(state_ptr + row, state, mask=is_mine)
-
+
# eps under the root
- (tl.sqrt(state) + tl.cast(eps, grad.dtype))
+ tl.sqrt(state + tl.cast(eps, grad.dtype))
# int32 offsets of rows that take a step
- row = row.to(tl.int64)  # int64: row * stride passes 2**31 from 8 GiB of float32 on
+ row = row.to(tl.int32)
# a step for each lookup, with what there is of the sum
- cols, is_there & ends & began_here,
+ cols, is_there & began_here,
# a step of a row that began before the walk
- cols, is_there & ends & began_here,
+ cols, is_there & ends,
# a row that fills a walk from its first lookup on is taken for one that began before
- began_here = (row != first_row) | (before != first_row)
+ began_here = row != first_row
# the sum of one row goes on into the next
- grad = tl.where(ends, 0.0, grad)
+ grad = grad
# the sum is cleared by a product: NaN goes on into the next row
- grad = tl.where(ends, 0.0, grad)
+ grad *= 1.0 - ends.to(grad.dtype)
# the last lookup counts as going on
- next_row = tl.load(rows_ptr + place + 1, mask=place + 1 < n_lookups, other=-1)
+ next_row = tl.load(rows_ptr + place + 1, mask=place + 1 < n_lookups, other=0)
# what a walk has of a row that goes on is lost
- is_part = is_there & ((ends & ~began_here) | (~ends & is_last))
+ is_part = is_there & (ends & ~began_here)
# what a walk has of a row that ends in it is lost
- is_part = is_there & ((ends & ~began_here) | (~ends & is_last))
+ is_part = is_there & (~ends & is_last)
# both parts of a walk in one place
- part = tl.where(began_here, walk + n_walks, walk)
+ part = walk
# the part of the walk where a row began is forgotten
- grad += tl.sum(total, axis=0, keep_dims=True)
+ grad = tl.sum(total, axis=0, keep_dims=True)
# the parts of the first walks alone
- more = tl.min(there.to(tl.int32))
+ more = 0
# each walk that a row goes on from takes its step
- if goes_on & ((tl.load(rows_ptr + first, mask=goes_on, other=-1) != row) | (before != row)):
+ if goes_on:
# the ends of the first walk of each program alone
- walk = tl.program_id(0).to(tl.int64) * WALKS + k
+ walk = tl.program_id(0).to(tl.int64) * WALKS
# dy read as if contiguous in a step
- lookup // TABLES * STRIDE_YB + lookup % TABLES * STRIDE_YT
+ lookup * DIM
# lookups in the order of the sort that is not undone
- rows, order = rows.sort(stable=True)
+ rows, order = rows.sort(stable=True)[0], torch.arange(n_lookups, device=ids.device)
# parts of 16 bits
- parts = dy.new_empty((2, n_walks, dim), dtype=host.sum_dtype(dy.dtype))
+ parts = dy.new_empty((2, n_walks, dim))
# an update that autograd does not know of
-         torch.autograd.graph.increment_version(weight)
-
+
# a step with a weight that was computed is allowed
- if not weight.is_leaf or type
+ if type
# one state for all rows
- want = weight.shape[:1], host
+ want = (1,), host
# Adagrad's state outlives new tables
-             self.state.zero_()
+             pass
# a second lr begins a new state
-         elif self.state is None:
+         else:
""")
