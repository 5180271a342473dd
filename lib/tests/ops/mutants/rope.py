"""Mutants of lib/ops/rope.py, and of what it alone uses of lib/ops/_host.py: who shares memory."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# halves: the wrong sign of sin
- tl.store(y_rows + cols, x1 * c - x2 * s, mask=mask)
+ tl.store(y_rows + cols, x1 * c + x2 * s, mask=mask)
# interleaved: the wrong sign of sin
- y = tl.join(x1 * c - x2 * s, x2 * c + x1 * s)
+ y = tl.join(x1 * c - x2 * s, x2 * c - x1 * s)
# backward with the sin of forward
- s = -s
+ s = s
# rotated on, not back
- plan, back=True)
+ plan)
# halves where neighbours are pairs
- INTERLEAVED=interleaved
+ INTERLEAVED=False
# halves in, neighbours out
- pairs = tl.reshape(x, (token_x.shape[0], heads.shape[0], BLOCK_R, 2))
+ pairs = tl.permute(tl.reshape(x, (token_x.shape[0], heads.shape[0], 2, BLOCK_R)), (0, 1, 3, 2))
# halves of the head, where R is less
- x2 = tl.load(x_rows + cols + R // 2, mask=mask)
+ x2 = tl.load(x_rows + cols + D // 2, mask=mask)
# the columns from R on not copied
- COPY_REST=rotary_dim < head_dim and not in_place
+ COPY_REST=False
# in place: the columns from R on copied onto themselves
- COPY_REST=rotary_dim < head_dim and not in_place
+ COPY_REST=rotary_dim < head_dim
# columns behind the head written
- mask = inside & (rest < D)
+ mask = inside
# halves: the mask of the columns dropped
- mask = inside & (cols < R // 2)
+ mask = inside
# interleaved: the mask of the columns dropped
- mask = inside & (cols < R)
+ mask = inside
# position_offset ignored
- ((position_offset + seq) *
+ (seq *
# positions counted on from batch to batch
- ((position_offset + seq) *
+ ((position_offset + tokens) *
# int32 offsets in the tables
- ((position_offset + seq) *
+ ((position_offset + seq).to(tl.int32) *
# position_offset forgotten for the backward pass
-     ctx.how, ctx.plan = how, plan
+     ctx.how, ctx.plan = (0, *how[1:]), plan
# a slice of wider tables read as if contiguous
- cos, sin = cos.contiguous(), sin.contiguous()
+ pass
# a position behind the tables
- last > cos.shape[0]:
+ last > cos.shape[0] + 1:
# a position before the tables
- if position_offset < 0 or last
+ if last
# True taken for position 1
- if isinstance(position_offset, bool) or not
+ if not
# angles in float32
- angles = torch.outer(m, base ** (-i / rotary_dim))
+ angles = torch.outer(m, base ** (-i / rotary_dim)).float()
# i doubled twice in the angles
- base ** (-i / rotary_dim)
+ base ** (-2 * i / rotary_dim)
# cos and sin mixed up
- return angles.cos().to(dtype), angles.sin().to(dtype)
+ return angles.sin().to(dtype), angles.cos().to(dtype)
# heads of k counted on from those of q
- (group - q_groups) * BLOCK_H
+ group * BLOCK_H
# k with as many heads as q
- n_k_heads, rotary_dim, n_tokens = k.shape[2]
+ n_k_heads, rotary_dim, n_tokens = q.shape[2]
# the mask of the heads dropped
- inside = tokens_inside[:, None, None] & (heads < n_heads)[None, :, None]
+ inside = tokens_inside[:, None, None]
# the mask of the tokens dropped
- inside = tokens < n_tokens
+ inside = tokens >= 0
# floor where ceil was meant: the last tokens forgotten
- (host.cdiv(n_tokens, block_t) * n_groups,)
+ (max(1, n_tokens // block_t) * n_groups,)
# int32 heads
- group * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64), n_q_heads
+ group * BLOCK_H + tl.arange(0, BLOCK_H), n_q_heads
# int32 batches and positions
- batch, seq = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)
+ batch, seq = tokens // n_seq, tokens % n_seq
# batch and position mixed up
- batch, seq = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)
+ seq, batch = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)
# k read by the strides of q
- k_ptr, k_out_ptr, c, s, batch * stride_kb + seq * stride_ks,
+ k_ptr, k_out_ptr, c, s, batch * stride_qb + seq * stride_qs,
# written by the strides of q
- batch * stride_qob + seq * stride_qos, inside
+ batch * stride_qb + seq * stride_qs, inside
# bhsd taken for bshd
- if layout == "bhsd":  # the kernel
+ if False:  # the kernel
# columns with gaps, and gradients of strides 0, read side by side
- q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
+ pass
# a row past the tables
- position >= 0) & (position < n
+ position >= 0) & (position <= n
# a position below 0 read
- inside & (position >= 0) &
+ inside &
# positions of the first sequence
- batch * stride_pb + seq * stride_ps
+ seq * stride_ps
# positions with gaps
- batch * stride_pb + seq * stride_ps
+ batch * stride_pb + seq
# a position outside of the tables gives 0 in silence
- known, missing = inside & (position >= 0) & (position < n_positions), float("nan")
+ known, missing = inside & (position >= 0) & (position < n_positions), 0.0
# Hugging Face's tables: all by those of the first sequence
- torch.arange(n_batch * n_seq, device=q.device)
+ torch.arange(n_batch * n_seq, device=q.device) % n_seq
# compiled: the gradient deaf to positions
- cos, sin, positions = ctx.saved_tensors
-     return
+ cos, sin, _ = ctx.saved_tensors; positions = None
+     return
# cos rounded to the dtype of q
- c = tl.load(cos_ptr + table, mask=table_mask, other=missing).to(COMPUTE)
+ c = tl.load(cos_ptr + table, mask=table_mask, other=missing).to(q_ptr.dtype.element_ty).to(COMPUTE)
# float64 computed in float32
- COMPUTE=host.compute_dtype(q.dtype)
+ COMPUTE=tl.float32
# in place: autograd not told
-             ctx.mark_dirty(q, k)
+             pass
# in place: k left as it was
-     out = q, k
+     out = q, k.clone()
# in place: an expanded q written
- if step <= reach:
+ if step < reach:
# in place: q and k the same
- if q.numel() and k.numel() and host.shares_memory(q, k):
+ if False:
# in place: q and k that share some heads
- return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])
+ return gap == 0
# in place: columns with gaps
- if t.stride(-1) != 1 or host.overlaps_itself(host.steps_of(t)):
+ if host.overlaps_itself(host.steps_of(t)):
# in place: a leaf that requires grad written
- (t.is_leaf or t._is_view())
+ t._is_view()
# no gradient for k alone
- _Rope, forward, (q, k), *given)
+ _Rope, forward, (q,), k, *given)
# a second derivative that is wrong in silence
-     @host.once
+     @staticmethod
# compiled: cos and sin mixed up for the gradient
- _save(ctx, *inputs[2:4],
+ _save(ctx, inputs[3], inputs[2],
# compiled: rotated on, not back
- return _backward(dq, dk, cos, sin, (position_offset
+ return _forward(dq, dk, cos, sin, (position_offset
# compiled in place: position_offset ignored
- _forward(q, k, cos, sin, how, positions, in_place=True)
+ _forward(q, k, cos, sin, (0, *how[1:]), positions, in_place=True)
# in place: heads that reach into the next token or batch
- return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])
+ return end_a > gap
# in place: any longer step taken for one from row to row
-         rows.insert(0, steps_a.pop())
+         steps_a.pop()
# eager: neighbours in, halves out
- dim=-1).flatten(-2)
+ dim=-2).flatten(-2)
""")
