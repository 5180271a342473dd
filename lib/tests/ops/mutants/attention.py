"""Mutants of lib/ops/attention.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# one key too many
- s = tl.where((js >= lowest) & (js <= highest), s, -float(
+ s = tl.where((js >= lowest) & (js <= highest + 1), s, -float(
# the first of a window missing
- s = tl.where((js >= lowest) & (js <= highest), s, -float(
+ s = tl.where((js > lowest) & (js <= highest), s, -float(
# padding seen: zeros counted in the sum
- (i - left)[:, None], tl.minimum(i + right, end - 1)[:, None]
+ (i - left)[:, None], tl.minimum(i + right, n_keys - 1)[:, None]
# causal from the bottom right
- right = 0 if is_causal else right
+ right = k.shape[2] - q.shape[2] if is_causal else right
# from the bottom right: the left side of a window where it was
- left = q.shape[2] if left < 0 else min(left - shift, q.shape[2])
+ left = q.shape[2] if left < 0 else min(left, q.shape[2])
# from the bottom right of all keys, padding among them
- {"ALIGNED": True} if align == "bottom_right" else {}
+ {}
# -1 on the left as 0
- left = q.shape[2] if left < 0 else min(left - shift, q.shape[2])
+ left = max(left - shift, 0)
# a tile cut by the window taken as whole
- a = tl.minimum(tl.cdiv(tl.maximum(begin, last - before) - start, BLOCK), n)
+ a = tl.minimum(tl.cdiv(tl.maximum(begin, first - before) - start, BLOCK), n)
# a tile cut by the diagonal taken as whole
- b = tl.maximum(tl.minimum(end, first + after + 1) - start, 0) // BLOCK
+ b = tl.maximum(tl.minimum(end, last + after + 1) - start, 0) // BLOCK
# floor where ceil was meant: the last keys forgotten
- n = tl.cdiv(tl.maximum(tl.minimum(end, last + after + 1) - start, 0), BLOCK)
+ n = tl.maximum(tl.minimum(end, last + after + 1) - start, 0) // BLOCK
# begins before the first key
- start = tl.maximum(begin, first - before) // BLOCK * BLOCK
+ start = tl.minimum(begin, first - before) // BLOCK * BLOCK
# tiles that nothing sees are read
- n = tl.cdiv(tl.maximum(tl.minimum(end, last + after + 1) - start, 0), BLOCK)
+ n = tl.cdiv(tl.maximum(end - start, 0), BLOCK)
# tiles seen whole: from the first one on
- else t + a
-             j = start + tile * BLOCK_N
-             k = _load_rows(k_ptr, j, end
+ else t
+             j = start + tile * BLOCK_N
+             k = _load_rows(k_ptr, j, end
# lengths below 0 as they are
- return tl.minimum(tl.maximum(tl.load(ptr), 0), most).to(tl.int32)
+ return tl.minimum(tl.load(ptr), most).to(tl.int32)
# padding read in the backward pass
- k = _load_rows(k_ptr, first, length, stride_ks, True
+ k = _load_rows(k_ptr, first, n_keys, stride_ks, True
# dv of padding not written
- _store_rows(dv_ptr, dv, first, n_j
+ _store_rows(dv_ptr, dv, first, length
# padding has a gradient
- dv = tl.where(is_key, dv, 0.0)
+ dv = dv + 0.0
# the maximum of the last tile alone
- top = tl.maximum(top, tl.max(s, axis=1))
+ top = tl.max(s, axis=1)
# the sum not rescaled
- total = total * old + tl.sum(p, axis=1)
+ total = total + tl.sum(p, axis=1)
# o not rescaled
- v, o * old[:, None], PRECISION
+ v, o, PRECISION
# -inf - -inf: NaN where a tile shows a query nothing
- top = tl.full((BLOCK_M,), -(2.0**125), COMPUTE)
+ top = tl.full((BLOCK_M,), -float("inf"), COMPUTE)
# 0 for a row of scores -inf
-     o = tl.where(sees[:, None], o * (1.0 / total)[:, None], 0.0)
+     o = o * tl.where(total == 0, 0.0, 1.0 / total)[:, None]
# powers of 2 in place of e
- tl.cast(tl.maximum(tl.abs(scale), 1e-30) * 1.4426950408889634, COMPUTE)
+ tl.cast(tl.maximum(tl.abs(scale), 1e-30), COMPUTE)
# weights rounded to bfloat16
- o = device.dot(p.to(v.dtype), v, o * old
+ o = device.dot(p.to(tl.bfloat16).to(v.dtype), v, o * old
# what is saved is not scaled
-     top *= log2_scale
-
+
# of a negative scale the smallest score as the largest
- NEGATIVE=scale < 0
+ NEGATIVE=False
# weights far above 1 where scores are huge
- factor = tl.where(tl.abs(top * factor) < LIMIT, factor, 
+ factor = tl.where(top == top, factor, 
# float64 with a power of 2 where it makes a difference
- 2.0**56 if top.dtype == tl.float64 else 2.0**27
+ 2.0**27
# dk and dv of other heads' queries
- sample, first_head = place // n_kv_heads, place % n_kv_heads * n_repeats
+ sample, first_head = place // n_kv_heads, place % n_kv_heads
# rows that TMA cannot read
- aligned = t.data_ptr() % 16 == 0 and all([p > 0 and p % 16 == 0 for p in pitches])
+ aligned = t.data_ptr() % 16 == 0
# heads of q take those of k and v in turn
- kv_head = (first_head // n_repeats).to(tl.int64)
+ kv_head = (first_head % n_repeats).to(tl.int64)
# the first head of a tile for all
- i, head, d = row // PACKED, (first_head + row % PACKED)
+ i, head, d = row // PACKED, (first_head + row * 0)
# keys in several parts
- end = tl.minimum(length, (part + 1) * keys_per_part)
+ end = length
# more parts than were planned
- keys_per_part = host.cdiv(host.cdiv(n_keys, plan.n_parts), tile.n) * tile.n
+ keys_per_part = host.cdiv(n_keys, plan.n_parts) // tile.n * tile.n or tile.n
# parts added up as they are
-         total = total * old + part_total * new
+         total = total + part_total
# the first part again and again
-         rows += n_rows
-
+
# another query's mask
- place, i = row // n_queries, row % n_queries
+ place, i = row // n_queries, row
# int32 rows of q
- (head * stride_qh + i.to(tl.int64) * stride_qs)[:, None]
-     q = 
+ (head * stride_qh + i * stride_qs)[:, None]
+     q = 
# int32 heads of q
- first_head + row % PACKED).to(tl.int64), tl
+ first_head + row % PACKED), tl
# int32 rows of k and v
- (rows.to(tl.int64) * stride + d)
-     if desc
+ (rows * stride + d)
+     if desc
# all parts in one place
- stride = out.stride(0)
+ stride = 0
# delta forgotten in dq
- ds = p * (device.dot(do, v.T, None, PRECISION, COMPUTE) - delta[:, None])
+ ds = p * device.dot(do, v.T, None, PRECISION, COMPUTE)
# dq without the scale
-     dq *= tl.cast(scale, COMPUTE)
-
+
# log₂ e in dk
- dk * tl.cast(scale, COMPUTE), 0.0)
+ dk * log2_scale, 0.0)
# dq without the left side of the window
- ds = tl.where((js >= lowest) & (js <= highest), ds, 0.0)
+ ds = tl.where(js <= highest, ds, 0.0)
# left and right exchanged in dk and dv
- (j - right)[:, None], tl.minimum(j + left, n_i - 1)
+ (j - left)[:, None], tl.minimum(j + right, n_i - 1)
# dk and dv of one head of a group
- head, tile = t // n_tiles, t % n_tiles
+ head, tile = t // n_tiles * 0, t % n_tiles
# NaN lost in the gradients
- tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
+ tl.minimum(s - lse, 0.0)
# gradients of hidden scores
- ds = tl.where(seen, ds, 0.0)  # 0 times NaN is NaN
+ ds = ds  # 0 times NaN is NaN
# a gradient of strides 0 read as if dense
- do, q, k, v = _dense(do), _dense(q)
+ do, q, k, v = do, _dense(q)
# no queries: gradients never written
- grads = [None if g is None else g.zero_() for g in grads]
+ grads = [*grads]
# float32 rounded to TF32
- "tf32x3" if tensor_cores
+ "tf32" if tensor_cores
# a second derivative that is wrong in silence
-     @host.once
-
+
# padding on the left counted from the first column
- left, right = left + first_key, right - first_key
+ left, right = left, right
# dk of padding on the left in the wrong rows
- kv_head * stride_dh + (begin if CU else skip) * stride_ds
+ kv_head * stride_dh + (begin if CU else 0) * stride_ds
# padding on the left has a gradient that nobody wrote
- grads[1:] = [None if g is None else g.zero_() for g in grads[1:]]
+ grads[1:] = [g for g in grads[1:]]
# no tile for the end of a sequence that begins in mid-tile
- return n_rows // block + lengths.shape[-1] if "CU"
+ return host.cdiv(n_rows, block) if "CU"
# packed: from the bottom right of all tokens, not of each sequence
- shift = (n_j - n_keys) - (n_i - n_queries)
+ shift = n_i * 0
# packed: keys where the queries begin
- keys_ptr = cu_ptr + (CU - 1) * (n_sequences + 1)
+ keys_ptr = cu_ptr
# packed: what lies behind the last sequence is one more
- n_j = tl.where(low < n_sequences, n_j, 0)
+ n_j = n_j + 0
# packed: rows of the next sequence written
- is_row = i < n_i
+ is_row = i < n_queries
# packed: by TMA a tile beyond the sequence's end
- None if CU and MASKED else q_desc, sample
+ q_desc, sample
# packed: wrong cu_seqlens lead out of memory
- return tl.minimum(tl.maximum(tl.load(ptr), 0), most).to(tl.int32)
+ return tl.maximum(tl.load(ptr), 0).to(tl.int32)
# atomics for whoever does not ask
- align: str = "top_left", deterministic: bool = True, plan: Plan
+ align: str = "top_left", deterministic: bool = False, plan: Plan
# atomics in spite of torch.use_deterministic_algorithms(True)
- in_order = how[-1] or torch.are_deterministic_algorithms_enabled()
+ in_order = how[-1]
# the registered op does not pass deterministic on
- ctx.save_for_backward(q, k, v, lengths, o, lse)
+ ctx.how = (*how[:5], True)
+     ctx.save_for_backward(q, k, v, lengths, o, lse)
# deterministic=1 taken for True
- if not isinstance(deterministic, bool):
+ if deterministic not in (True, False):
# Gluon backward: of a window, too
- plain = lengths is None and limits[0] == q.shape[2] and limits[1] in (0, k.shape[2])
+ plain = lengths is None
# Gluon backward: of a negative scale, too
- return plain and scale > 0 and on_hopper
+ return plain and on_hopper
# Gluon backward: with D = 32
- dim in (64, 128) and all
+ dim <= 128 and all
# Gluon backward: dv into None
- all([g is not None for g in grads]):
+ any([g is not None for g in grads]):
# Gluon backward: a tile of queries too many above the diagonal
- n_tiles = gl.maximum(n_tiles - block * (_KEYS // M), 0)
+ n_tiles = gl.maximum(n_tiles - block, 0)
# Gluon backward: tiles on the diagonal taken for whole
- seen_in_part = _KEYS // M
+ seen_in_part = 0
# Gluon backward: the last places as high as the others
- height = gl.minimum(n_places - first_place, n_wide)
+ height = n_wide
# Gluon backward: half of k and v waited for
- mbarrier.expect(kv_full.index(0), 4 * k_desc.block_type.nbytes)
+ mbarrier.expect(kv_full.index(0), 2 * k_desc.block_type.nbytes)
# Gluon backward: the same 64 keys for both groups
- at = [batch, kv_head, block * _KEYS + who * 64, 0]
+ at = [batch, kv_head, block * _KEYS, 0]
# Gluon backward: the warp that fetches waits for a slot that nobody has used
-             mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
-             mbarrier.expect(q_full
+             mbarrier.wait(empty.index(slot), (count // STAGES) & 1)
+             mbarrier.expect(q_full
# Gluon backward: queries fetched before who reads the slot has done with it
-             mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
-             mbarrier.expect(q_full
+             mbarrier.expect(q_full
# Gluon backward: the first tile of queries first, beside the sums of the last
- row = n_rows - (t + 1) * M
+ row = t * M
# Gluon backward: delta of another head
- delta_desc, [batch, head, row], do_full
+ delta_desc, [batch, kv_head, row], do_full
# Gluon backward: dq over the second group's keys alone
- dq, use_acc=who > 0, is_async=True)
+ dq, use_acc=False, is_async=True)
# Gluon backward: dq over the first group's dsᵀ twice
- ds, k = ds_bufs.index(first + who), k_bufs
+ ds, k = ds_bufs.index(first), k_bufs
# Gluon backward: both groups make the first half of dq
- k = k.slice(WHO * COLUMNS, COLUMNS, dim=1)
+ k = k.slice(0, COLUMNS, dim=1)
# Gluon backward: two rows of dq exchanged
- permute((3, 0, 2, 4, 1, 5))
+ permute((3, 0, 2, 4, 5, 1))
# Gluon backward: the diagonal of the tile before
- first = j - half * (M // 2) if IS_CAUSAL else j * 0
+ first = j - half * M if IS_CAUSAL else j * 0
# Gluon backward: a query does not see its own key
- gl.where(i[None, :] >= first[:, None], shift
+ gl.where(i[None, :] > first[:, None], shift
# Gluon backward: no delta
- ds = p * (dp - _sums_of(delta_bufs.index(slot), S)[None, :])
+ ds = p * dp
# Gluon backward: hidden keys pass NaN
- ds = gl.where(p == 0.0, 0.0, ds)  # 0 times NaN is NaN
+ ds = ds  # 0 times NaN is NaN
# Gluon backward: one place for dsᵀ
- swap = count % 2
+ swap = 0
# Gluon backward: the other group's dsᵀ not waited for
-                 mbarrier.wait(ds_full.index(swap), (count // 2) & 1)
-
+
# Gluon backward: dsᵀ read before it is written
- ds_bufs.index(2 * swap + WHO).store(ds)
-                 hopper.fence_async_shared()
+ ds_bufs.index(2 * swap + WHO).store(ds)
# Gluon backward: queries freed while dk takes them
-                 dk, ds = hopper.warpgroup_mma_wait(0, deps=(dk, ds))
-
+
# Gluon backward: dk stored while the other group reads k
-     mbarrier.wait(dq_over.index(0), 0)  # the other group reads no k any more
-
+
# Gluon backward: dk without the scale
- .store((dk * scale).to(DTYPE))
+ .store(dk.to(DTYPE))
# Gluon backward: a program that ends while TMA reads its memory
- shared.async_store(dk_desc, at, k_bufs.index(WHO))
-     tma.store_wait(0)
+ shared.async_store(dk_desc, at, k_bufs.index(WHO))
# Gluon backward: dq of the second head added to the first's
-         dq_ptr += n_halves * (M * D // 2)
-
+
# Gluon backward: a slot free before a turn has been passed on
- gluon_kernels._barriers(STAGES, 3 if DETERMINISTIC else 2),
+ gluon_kernels._barriers(STAGES, 2),
# Gluon backward: a turn passed on when one group has added
- gluon_kernels._barriers(STAGES, 2),  # both groups have added
+ gluon_kernels._barriers(STAGES, 1),  # both groups have added
# Gluon backward: the turn of the head before
-             gl.atomic_add(turns_ptr - t, 1, sem="release")
-             count += 1
-         turns_ptr += gl.cdiv(n_queries, M)
+             gl.atomic_add(turns_ptr - t, 1, sem="release")
+             count += 1
# Gluon backward: the number of the program where its turns are
-         turns_ptr += 1
-
+
# Gluon backward: dq not scaled
- dq = (sums.reshape(M, D) * scale).to
+ dq = sums.reshape(M, D).to
# Gluon backward: powers of e in place of 2
- scale * 1.4426950408889634, scale,
-         n_kv_heads
+ scale, scale,
+         n_kv_heads
# Gluon backward: sums that begin as they are
- sums = lse.new_zeros(
+ sums = lse.new_empty(
# Gluon backward: turns on top of the last sums
- sums[n_sums:].view(torch.int32)
+ sums[-2 - n_tiles : -1].view(torch.int32)
# Gluon backward: rows of lse that TMA cannot read
- n = -t.shape[-1] % 4
+ n = 0
# Gluon forward: roles for a few keys, too
- (128 if dim > 64 else 768)
+ (128 if dim > 32 else 768)
# Gluon forward: jobs that a program has had already
- following = gl.num_programs(0) + gl.atomic_add(
+ following = gl.atomic_add(
# Gluon forward: every job by every program
- following = job + gl.num_programs(0)
+ following = job + 1
# Gluon forward: the next job said before the last one is read
-         mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
-         _say(job_buf, job)
+         _say(job_buf, job)
+         mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
# Gluon forward: queries overwritten before both groups have read them
-         mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
-         _say(job_buf, job)
+         _say(job_buf, job)
# Gluon forward: the end said too early
-     mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
-     _say(job_buf, n_places
+     _say(job_buf, n_places
# Gluon forward: nobody says that there is no job left
-     mbarrier.arrive(q_full.index(0), count=1)
+     pass
# Gluon forward: heads that are not there
- height = gl.minimum(n_places - first, n_wide)
+ height = n_wide
# Gluon forward: a counter without a mask
- by_counter = by_counter and is_causal and n_blocks
+ by_counter = by_counter and n_blocks
# Gluon forward: a group of heads a size too large
- return host.cdiv(n_places, max(1, n_groups))
+ return n_places // max(1, n_groups) + 1
# Gluon forward: one key too many
- end = gl.minimum(i + 1, n_keys) if IS_CAUSAL
+ end = gl.minimum(i + 2, n_keys) if IS_CAUSAL
# Gluon forward: the tile that is cut comes last
- (n_tiles - 1 - t) * N, 0]
+ t * N, 0]
""")
