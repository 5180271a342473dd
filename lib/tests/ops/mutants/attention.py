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
""")
