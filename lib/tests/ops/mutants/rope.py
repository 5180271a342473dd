"""Mutants of lib/ops/rope.py, and of what it alone uses of lib/ops/_host.py: who shares memory."""

from lib.measure.mutants import Mutant

MUTANTS = [
    # --- the rotation
    Mutant(
        "tl.store(y_rows + cols, x1 * c - x2 * s, mask=mask)",
        "tl.store(y_rows + cols, x1 * c + x2 * s, mask=mask)",
        "halves: the wrong sign of sin",
    ),
    Mutant(
        "y = tl.join(x1 * c - x2 * s, x2 * c + x1 * s)",
        "y = tl.join(x1 * c - x2 * s, x2 * c - x1 * s)",
        "interleaved: the wrong sign of sin",
    ),
    Mutant("s = -s", "s = s", "backward with the sin of forward"),
    Mutant("plan, back=True)", "plan)", "rotated on, not back"),
    Mutant("INTERLEAVED=interleaved", "INTERLEAVED=False", "halves where neighbours are pairs"),
    Mutant(
        "pairs = tl.reshape(x, (token_x.shape[0], heads.shape[0], BLOCK_R, 2))",
        "pairs = tl.permute(tl.reshape(x, (token_x.shape[0], heads.shape[0], 2, BLOCK_R)), (0, 1, 3, 2))",
        "halves in, neighbours out",
    ),
    Mutant(
        "x2 = tl.load(x_rows + cols + R // 2, mask=mask)",
        "x2 = tl.load(x_rows + cols + D // 2, mask=mask)",
        "halves of the head, where R is less",
    ),
    Mutant(
        "COPY_REST=rotary_dim < head_dim and not in_place",
        "COPY_REST=False",
        "the columns from R on not copied",
    ),
    Mutant(
        "COPY_REST=rotary_dim < head_dim and not in_place",
        "COPY_REST=rotary_dim < head_dim",
        "in place: the columns from R on copied onto themselves",
    ),
    Mutant("mask = inside & (rest < D)", "mask = inside", "columns behind the head written"),
    Mutant(
        "mask = inside & (cols < R // 2)",
        "mask = inside",
        "halves: the mask of the columns dropped",
    ),
    Mutant(
        "mask = inside & (cols < R)\n",
        "mask = inside\n",
        "interleaved: the mask of the columns dropped",
    ),
    # --- positions
    Mutant("((position_offset + seq) *", "(seq *", "position_offset ignored"),
    Mutant(
        "((position_offset + seq) *",
        "((position_offset + tokens) *",
        "positions counted on from batch to batch",
    ),
    Mutant(
        "((position_offset + seq) *",
        "((position_offset + seq).to(tl.int32) *",
        "int32 offsets in the tables",
    ),
    Mutant(
        "    ctx.how, ctx.plan = how, plan\n",
        "    ctx.how, ctx.plan = (0, *how[1:]), plan\n",
        "position_offset forgotten for the backward pass",
    ),
    Mutant(
        "cos, sin = cos.contiguous(), sin.contiguous()",
        "pass",
        "a slice of wider tables read as if contiguous",
    ),
    Mutant("last > cos.shape[0]:", "last > cos.shape[0] + 1:", "a position behind the tables"),
    Mutant("if position_offset < 0 or last", "if last", "a position before the tables"),
    Mutant("if isinstance(position_offset, bool) or not", "if not", "True taken for position 1"),
    Mutant(
        "angles = torch.outer(m, base ** (-i / rotary_dim))",
        "angles = torch.outer(m, base ** (-i / rotary_dim)).float()",
        "angles in float32",
    ),
    Mutant(
        "base ** (-i / rotary_dim)",
        "base ** (-2 * i / rotary_dim)",
        "i doubled twice in the angles",
    ),
    Mutant(
        "return angles.cos().to(dtype), angles.sin().to(dtype)",
        "return angles.sin().to(dtype), angles.cos().to(dtype)",
        "cos and sin mixed up",
    ),
    # --- heads, layouts, strides
    Mutant(
        "(group - q_groups) * BLOCK_H", "group * BLOCK_H", "heads of k counted on from those of q"
    ),
    Mutant(
        "n_k_heads, rotary_dim, n_tokens = k.shape[2]",
        "n_k_heads, rotary_dim, n_tokens = q.shape[2]",
        "k with as many heads as q",
    ),
    Mutant(
        "inside = tokens_inside[:, None, None] & (heads < n_heads)[None, :, None]",
        "inside = tokens_inside[:, None, None]",
        "the mask of the heads dropped",
    ),
    Mutant("inside = tokens < n_tokens", "inside = tokens >= 0", "the mask of the tokens dropped"),
    Mutant(
        "(host.cdiv(n_tokens, block_t) * n_groups,)",
        "(max(1, n_tokens // block_t) * n_groups,)",
        "floor where ceil was meant: the last tokens forgotten",
    ),
    Mutant(
        "group * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64), n_q_heads",
        "group * BLOCK_H + tl.arange(0, BLOCK_H), n_q_heads",
        "int32 heads",
    ),
    Mutant(
        "batch, seq = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)",
        "batch, seq = tokens // n_seq, tokens % n_seq",
        "int32 batches and positions",
    ),
    Mutant(
        "batch, seq = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)",
        "seq, batch = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)",
        "batch and position mixed up",
    ),
    Mutant(
        "k_ptr, k_out_ptr, c, s, batch * stride_kb + seq * stride_ks,",
        "k_ptr, k_out_ptr, c, s, batch * stride_qb + seq * stride_qs,",
        "k read by the strides of q",
    ),
    Mutant(
        "batch * stride_qob + seq * stride_qos, inside",
        "batch * stride_qb + seq * stride_qs, inside",
        "written by the strides of q",
    ),
    Mutant('if layout == "bhsd":  # the kernel', "if False:  # the kernel", "bhsd taken for bshd"),
    Mutant(
        "q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))",
        "pass",
        "columns with gaps, and gradients of strides 0, read side by side",
    ),
    Mutant(
        "position >= 0) & (position < n", "position >= 0) & (position <= n", "a row past the tables"
    ),
    Mutant("inside & (position >= 0) &", "inside &", "a position below 0 read"),
    Mutant(
        "batch * stride_pb + seq * stride_ps", "seq * stride_ps", "positions of the first sequence"
    ),
    Mutant("batch * stride_pb + seq * stride_ps", "batch * stride_pb + seq", "positions with gaps"),
    Mutant(
        'known, missing = inside & (position >= 0) & (position < n_positions), float("nan")',
        "known, missing = inside & (position >= 0) & (position < n_positions), 0.0",
        "a position outside of the tables gives 0 in silence",
    ),
    Mutant(
        "torch.arange(n_batch * n_seq, device=q.device)",
        "torch.arange(n_batch * n_seq, device=q.device) % n_seq",
        "Hugging Face's tables: all by those of the first sequence",
    ),
    Mutant(
        "cos, sin, positions = ctx.saved_tensors\n    return",
        "cos, sin, _ = ctx.saved_tensors; positions = None\n    return",
        "compiled: the gradient deaf to positions",
    ),
    # --- rounding
    Mutant(
        "c = tl.load(cos_ptr + table, mask=table_mask, other=missing).to(COMPUTE)",
        "c = tl.load(cos_ptr + table, mask=table_mask, other=missing).to(q_ptr.dtype.element_ty).to(COMPUTE)",
        "cos rounded to the dtype of q",
    ),
    Mutant(
        "COMPUTE=host.compute_dtype(q.dtype)", "COMPUTE=tl.float32", "float64 computed in float32"
    ),
    # --- in place, autograd, torch.library
    Mutant("            ctx.mark_dirty(q, k)", "            pass", "in place: autograd not told"),
    Mutant("    out = q, k\n", "    out = q, k.clone()\n", "in place: k left as it was"),
    Mutant("if step <= reach:", "if step < reach:", "in place: an expanded q written"),
    Mutant(
        "if q.numel() and k.numel() and host.shares_memory(q, k):",
        "if False:",
        "in place: q and k the same",
    ),
    Mutant(
        "return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])",
        "return gap == 0",
        "in place: q and k that share some heads",
    ),
    Mutant(
        "if t.stride(-1) != 1 or host.overlaps_itself(host.steps_of(t)):",
        "if host.overlaps_itself(host.steps_of(t)):",
        "in place: columns with gaps",
    ),
    Mutant(
        "(t.is_leaf or t._is_view())", "t._is_view()", "in place: a leaf that requires grad written"
    ),
    Mutant(
        "_Rope, forward, (q, k), *given)",
        "_Rope, forward, (q,), k, *given)",
        "no gradient for k alone",
    ),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    Mutant(
        "_save(ctx, *inputs[2:4],",
        "_save(ctx, inputs[3], inputs[2],",
        "compiled: cos and sin mixed up for the gradient",
    ),
    Mutant(
        "return _backward(dq, dk, cos, sin, (position_offset",
        "return _forward(dq, dk, cos, sin, (position_offset",
        "compiled: rotated on, not back",
    ),
    Mutant(
        "_forward(q, k, cos, sin, how, positions, in_place=True)",
        "_forward(q, k, cos, sin, (0, *how[1:]), positions, in_place=True)",
        "compiled in place: position_offset ignored",
    ),
    Mutant(
        "return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])",
        "return end_a > gap",
        "in place: heads that reach into the next token or batch",
    ),
    Mutant(
        "        rows.insert(0, steps_a.pop())",
        "        steps_a.pop()",
        "in place: any longer step taken for one from row to row",
    ),
    # --- eager
    Mutant("dim=-1).flatten(-2)", "dim=-2).flatten(-2)", "eager: neighbours in, halves out"),
]
