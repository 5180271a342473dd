# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/rope.py
"""rope: rotary position embedding of q and k in one launch, in place or out of place.

Shapes    q: (B, S, Hq, D), k: (B, S, Hk, D), any strides; layout="bhsd" takes (B, H, S, D).
          cos, sin: (positions, R / 2) float32, R even and at most D: columns from R on pass through; or of two
          equal halves, (positions, D) or (B or 1, S, D), as Hugging Face and Liger hand them.
Dtypes    q and k float32, float16 or bfloat16 (rotated in float32) or float64; cos and sin float32 or float64.
Rotation  (x1, x2) -> (x1·cos - x2·sin, x2·cos + x1·sin), with x1, x2 = x[i], x[i + R/2] (halves, as in GPT-NeoX
          and Llama) or x[2i], x[2i + 1] (interleaved=True, as in the paper: Su et al., RoFormer, 2021).
Traffic   2(q + k) bytes each way, in place as out of place; cos and sin are read once for all heads.
Backward  the same kernel with sin negated: a rotation back. Saves cos and sin only.
Copy it   by `make copy OP=rope TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _host as host
else:  # the same, in a plain folder
    import _host as host


class Plan(NamedTuple):
    """How one call is launched: the tokens and the heads of one program, powers of 2."""

    block_t: int
    block_h: int


def rope_tables(
    n_positions: int, rotary_dim: int, base: float = 10000.0, device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cos and sin, (n_positions, rotary_dim / 2). Pair i at position m turns by m·base^(-2i / rotary_dim).

    Computed in float64: in float32 an angle of 16384 radians would be off by a thousandth.
    """
    i = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    m = torch.arange(n_positions, dtype=torch.float64, device=device)
    angles = torch.outer(m, base ** (-i / rotary_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_eager(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_offset: int = 0,
    interleaved: bool = False, layout: str = "bshd", positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    def rotate(x):
        heads_dim, seq = (2, x.shape[1]) if layout == "bshd" else (1, x.shape[2])
        rows = slice(position_offset, position_offset + seq) if positions is None else positions
        tables = [(t if t.dim() == 3 else t[rows]).to(x.dtype) for t in (cos, sin)]
        c, s = (t.unsqueeze(heads_dim - 4) for t in tables)  # (..., S, 1, R/2) or (..., 1, S, R/2)
        if c.shape[-1] == x.shape[-1]:  # two equal halves
            c, s = c[..., : c.shape[-1] // 2], s[..., : s.shape[-1] // 2]
        r = 2 * c.shape[-1]
        pairs, rest = x[..., :r], x[..., r:]
        if interleaved:
            x1, x2 = pairs[..., ::2], pairs[..., 1::2]
            y = torch.stack([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).flatten(-2)
        else:
            x1, x2 = pairs.chunk(2, dim=-1)
            y = torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)
        return torch.cat([y, rest], dim=-1)

    return rotate(q), None if k is None else rotate(k)


@triton.jit
def _rotate_tile(
    x_ptr, y_ptr, c, s, token_x, token_y, tokens_inside, heads, n_heads, stride_xh, stride_yh,
    R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr, COPY_REST: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # A tile of tokens by heads by columns; token_x, token_y: where a token begins; c, s: (tokens, 1, BLOCK_R).
    x_rows = x_ptr + token_x[:, None, None] + (heads * stride_xh)[None, :, None]
    y_rows = y_ptr + token_y[:, None, None] + (heads * stride_yh)[None, :, None]
    inside = tokens_inside[:, None, None] & (heads < n_heads)[None, :, None]
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        mask = inside & (cols < R)
        x = tl.load(x_rows + cols, mask=mask, other=0.0)
        pairs = tl.reshape(x, (token_x.shape[0], heads.shape[0], BLOCK_R, 2))
        x1, x2 = tl.split(pairs)
        x1, x2 = x1.to(COMPUTE), x2.to(COMPUTE)
        y = tl.join(x1 * c - x2 * s, x2 * c + x1 * s)
        tl.store(y_rows + cols, tl.reshape(y, x.shape), mask=mask)
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        mask = inside & (cols < R // 2)
        x1 = tl.load(x_rows + cols, mask=mask).to(COMPUTE)
        x2 = tl.load(x_rows + cols + R // 2, mask=mask).to(COMPUTE)
        tl.store(y_rows + cols, x1 * c - x2 * s, mask=mask)
        tl.store(y_rows + cols + R // 2, x2 * c + x1 * s, mask=mask)
    if COPY_REST:
        rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
        mask = inside & (rest < D)
        tl.store(y_rows + rest, tl.load(x_rows + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_seq", "position_offset", "n_positions"])
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, n_tokens, n_seq, position_offset,
    n_q_heads, n_k_heads, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_qob, stride_qos, stride_qoh, stride_kob, stride_kos, stride_koh,
    R: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr,
    COPY_REST: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    n_positions=None, stride_pb=None, stride_ps=None,
):  # fmt: skip
    # One program handles BLOCK_T tokens of BLOCK_H heads, of q or of k. Neighbours take the other heads of the
    # same tokens: in memory they follow, and their cos and sin are in the cache.
    q_groups, k_groups = tl.cdiv(n_q_heads, BLOCK_H), tl.cdiv(n_k_heads, BLOCK_H)
    group = tl.program_id(0) % (q_groups + k_groups)
    tokens = tl.program_id(0) // (q_groups + k_groups) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < n_tokens
    # int64: batch * stride passes 2**31 elements
    batch, seq = (tokens // n_seq).to(tl.int64), (tokens % n_seq).to(tl.int64)
    cols = tl.arange(0, BLOCK_R)[None, None, :]
    if positions_ptr is not None:
        positions_ptrs = positions_ptr + batch * stride_pb + seq * stride_ps
        position = tl.load(positions_ptrs, mask=inside, other=0)
        known, missing = inside & (position >= 0) & (position < n_positions), float("nan")
        table = (position.to(tl.int64) * (R // 2))[:, None, None] + cols
    else:
        known, missing = inside, 0.0
        table = ((position_offset + seq) * (R // 2))[:, None, None] + cols
    table_mask = known[:, None, None] & (cols < R // 2)
    c = tl.load(cos_ptr + table, mask=table_mask, other=missing).to(COMPUTE)
    s = tl.load(sin_ptr + table, mask=table_mask, other=missing).to(COMPUTE)
    if BACK:
        s = -s
    if group < q_groups:
        _rotate_tile(
            q_ptr, q_out_ptr, c, s, batch * stride_qb + seq * stride_qs,
            batch * stride_qob + seq * stride_qos, inside,
            group * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64), n_q_heads, stride_qh, stride_qoh,
            R, D, INTERLEAVED, COPY_REST, COMPUTE, BLOCK_R, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_tile(
            k_ptr, k_out_ptr, c, s, batch * stride_kb + seq * stride_ks,
            batch * stride_kob + seq * stride_kos, inside,
            (group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64), n_k_heads, stride_kh,
            stride_koh, R, D, INTERLEAVED, COPY_REST, COMPUTE, BLOCK_R, BLOCK_REST,
        )  # fmt: skip


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------


@functools.cache
def _plan(fewest_heads, rotary_dim, itemsize):
    """Tokens and heads whose first halves are one 16-byte load for each of 64 threads."""
    rows = max(1, 1024 // (itemsize * host.power_of_2(rotary_dim // 2)))
    block_h = min(rows, 4, host.power_of_2(fewest_heads))
    return Plan(rows // block_h, block_h)


def _launch(plan, q, k, q_out, k_out, cos, sin, how, positions, back):
    """Rotate q into q_out and k into k_out, which may be q and k; back: with sin negated."""
    (position_offset, interleaved, layout), in_place = how, q_out is q
    if layout == "bhsd":  # the kernel sees (B, S, H, D), by strides
        q, k, q_out, k_out = (t.transpose(1, 2) for t in (q, k, q_out, k_out))
    n_batch, n_seq, n_q_heads, head_dim = q.shape
    n_k_heads, rotary_dim, n_tokens = k.shape[2], 2 * cos.shape[1], n_batch * n_seq
    if n_tokens == 0 or n_q_heads + n_k_heads == 0:
        return
    given = {}
    if positions is not None:
        positions = positions.expand(n_batch, n_seq)
        given = dict(zip(("stride_pb", "stride_ps"), positions.stride()), n_positions=len(cos))
    fewest_heads = min(n_q_heads, n_k_heads) or max(n_q_heads, n_k_heads)  # q may be alone
    block_t, block_h = plan or _plan(fewest_heads, rotary_dim, q.itemsize)
    n_groups = host.cdiv(n_q_heads, block_h) + host.cdiv(n_k_heads, block_h)
    host.run(
        _rope_kernel, (host.cdiv(n_tokens, block_t) * n_groups,),
        (q, k, q_out, k_out, cos, sin, positions),
        n_tokens, n_seq, position_offset, n_q_heads, n_k_heads,
        *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
        R=rotary_dim, D=head_dim, BACK=back, INTERLEAVED=interleaved,
        COPY_REST=rotary_dim < head_dim and not in_place, COMPUTE=host.compute_dtype(q.dtype),
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_R=host.power_of_2(rotary_dim // 2),
        BLOCK_REST=host.power_of_2(head_dim - rotary_dim), num_warps=2, **given,
    )  # fmt: skip


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(q, k, *_):
    """Both results, before they are written."""
    dense = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k)]
    return torch.empty_like(dense[0]), torch.empty_like(dense[1])


def _forward(q, k, cos, sin, how, positions, plan=None, in_place=False, back=False):
    """q and k rotated, in place or as new tensors. how: position_offset, interleaved, layout."""
    out = q, k
    if not in_place:
        # the kernel reads a head's elements side by side; .sum().backward() sends strides of 0
        q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
        out = _empty(q, k)
    cos, sin = cos.contiguous(), sin.contiguous()  # slices of wider tables have gaps
    _launch(plan, q, k, *out, cos, sin, how, positions, back)
    return out


def _save(ctx, cos, sin, how, positions, plan=None):
    ctx.save_for_backward(cos, sin, positions)
    ctx.how, ctx.plan = how, plan


def _backward(dq, dk, cos, sin, how, positions, plan=None):
    """dq and dk rotated back, as new tensors: dq and dk may be in use elsewhere."""
    return _forward(dq, dk, cos, sin, how, positions, plan, back=True)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, how, positions, plan, in_place):
        _save(ctx, cos, sin, how, positions, plan)
        if in_place:
            ctx.mark_dirty(q, k)
        return _forward(q, k, cos, sin, how, positions, plan, in_place)

    @staticmethod
    @host.once
    def backward(ctx, dq, dk):
        cos, sin, positions = ctx.saved_tensors
        return *_backward(dq, dk, cos, sin, ctx.how, positions, ctx.plan), *[None] * 6


# --- the calls -----------------------------------------------------------------------------------------------

_LAYOUTS = ("bshd", "bhsd")


def _first_halves(q, cos, sin, positions, layout):
    """cos, sin and positions as the kernel takes them, of tables as wide as q, whose halves are equal."""
    if not isinstance(sin, torch.Tensor) or cos.shape != sin.shape or layout not in _LAYOUTS:
        return cos, sin, positions  # which is refused
    n_batch, n_seq = q.shape[0], q.shape[layout.index("s")]
    each_its_own = cos.shape[:-1] == (n_batch, n_seq) and n_batch > 1 and positions is None
    if cos.dim() == 2 or cos.dim() == 3 and (cos.shape[0] == 1 or each_its_own):
        if each_its_own:
            positions = torch.arange(n_batch * n_seq, device=q.device).view(n_batch, n_seq)
        cos, sin = (t[..., : q.shape[3] // 2].flatten(0, -2) for t in (cos, sin))
        if cos.itemsize == 2:  # in the dtype of q, rounded already
            cos, sin = cos.float(), sin.float()
    return cos, sin, positions


@host.remembered
def _check(name, q, k, cos, sin, layout):
    """All that dtypes, devices and shapes of the tensors tell."""
    if layout not in _LAYOUTS:
        raise ValueError(f"{name}: layout must be one of {_LAYOUTS}, got {layout!r}")
    q_sizes, k_sizes = (" ".join(layout.upper()).replace("H", h) for h in ("Hq", "Hk"))
    host.check_tensors(name, "rope_eager", q=(q, q_sizes), k=(k, k_sizes))
    for label, t in (("cos", cos), ("sin", sin)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.device != q.device:
            where = f"q is on {q.device} and {label} on {t.device}"
            raise ValueError(f"{name}: {where}; move both to one device")
    if cos.dtype not in (torch.float32, torch.float64) or sin.dtype != cos.dtype:
        why = "(bfloat16 has no digits left for positions past 256); rope_tables makes them"
        got = f"cos is {cos.dtype} and sin {sin.dtype}"
        raise TypeError(f"{name}: {got}; both must be float32 {why}")
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= q.shape[3]:
        want = f"(positions, R / 2) with R at most q's last size D = {q.shape[3]}, or (B, S, D)"
        got = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        use = "; of (1, S, R) pass cos[0, :, : R // 2], and sin alike" if cos.dim() == 3 else ""
        raise ValueError(f"{name}: cos and sin must be {want}, got {got}{use}")


def _check_positions(name, q, cos, sin, how, positions):
    """What _check leaves. Not remembered: in decoding position_offset is another one in each call."""
    position_offset, _, layout = how
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(f"{name}: there is no gradient for cos and sin; pass them detached")
    if isinstance(position_offset, bool) or not isinstance(position_offset, host.INTS):
        raise TypeError(f"{name}: position_offset must be an int, got {position_offset!r}")
    if positions is not None:
        _check_given_positions(name, q, how, positions)
        return
    n_seq, n_heads = q.shape[layout.index("s")], q.shape[layout.index("h")]
    # under torch.compile the question alone would fix the length
    asks = position_offset == 0 and not host.is_compiling()
    if asks and n_seq != n_heads == cos.shape[0]:
        other = next(known for known in _LAYOUTS if known != layout)
        seen = f"cos has {n_heads} rows, and in layout {layout!r} q has {n_seq} positions and {n_heads} heads"
        use = f"pass layout={other!r}, or if that is meant, cos[:{n_seq}]"
        raise ValueError(f"{name}: {seen}; {use}")
    last = position_offset + n_seq
    if position_offset < 0 or last > cos.shape[0]:
        asked = f"positions {position_offset} to {last - 1} are asked for"
        there = f"cos has rows 0 to {cos.shape[0] - 1}; make longer tables with rope_tables"
        raise ValueError(f"{name}: {asked}, and {there}")


def _check_given_positions(name, q, how, positions):
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"{name}: positions must be a torch.Tensor, got {type(positions).__name__}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: positions must be int64 or int32, got {positions.dtype}")
    if positions.device != q.device:
        where = f"q is on {q.device} and positions on {positions.device}"
        raise ValueError(f"{name}: {where}; move both to one device")
    n_batch, n_seq = q.shape[0], q.shape[how[2].index("s")]
    if tuple(positions.shape) not in ((n_seq,), (1, n_seq), (n_batch, n_seq)):
        want = f"(S,) or (B, S) with B = {n_batch} and S = {n_seq}"
        raise ValueError(f"{name}: positions must be {want}, got {tuple(positions.shape)}")
    if how[0] != 0:
        raise ValueError(f"{name}: pass positions or position_offset, not both; or add the offset")


def _check_writable(name, q, k):
    """Raise ValueError, saying what to do, unless q and k may be written."""
    use = "use rope_triton"
    for label, t in (("q", q), ("k", k)):
        if t.stride(-1) != 1 or host.overlaps_itself(host.steps_of(t)):
            want = "memory of its own for each element, side by side in the last dimension"
            got = f"{label} has strides {t.stride()}; in place it needs {want}"
            raise ValueError(f"{name}: {got}: pass a contiguous copy, or {use}")
        if torch.is_grad_enabled() and t.requires_grad and (t.is_leaf or t._is_view()):
            got = f"{label} requires grad and is a {'leaf' if t.is_leaf else 'view'}; autograd"
            raise ValueError(f"{name}: {got} cannot follow a change in place of it: {use}")
    if q.numel() and k.numel() and host.shares_memory(q, k):
        raise ValueError(f"{name}: q and k share memory; pass a copy of one of them, or {use}")


def _call(name, q, k, cos, sin, how, positions, plan, in_place):
    layout = how[2]
    if k is None and isinstance(q, torch.Tensor) and q.dim() == 4 and layout in _LAYOUTS:
        none = q.detach().narrow(layout.index("h"), 0, 0)
        return _call(name, q, none.clone(), cos, sin, how, positions, plan, in_place)[0], None
    are_tensors = isinstance(q, torch.Tensor) and isinstance(cos, torch.Tensor)
    if are_tensors and q.dim() == 4 and cos.dim() > 0 and cos.shape[-1] == q.shape[3]:
        cos, sin, positions = _first_halves(q, cos, sin, positions, layout)
    goes_by_op = _check(name, q, k, cos, sin, layout)
    _check_positions(name, q, cos, sin, how, positions)
    if goes_by_op or positions is not None and host.by_op(positions):
        if in_place and host.is_compiling() and not host.needs_autograd(q, k):
            rope_op_(q, k, cos, sin, *how, positions)  # which checks strides and memory
            return q, k
        q_out, k_out = rope_op(q, k, cos, sin, *how, positions)
        # copied back: of a copy the compiler knows the gradient, of a change within an op it does not
        return (q.copy_(q_out), k.copy_(k_out)) if in_place else (q_out, k_out)
    if in_place and not host.active_transforms():  # they are refused below
        _check_writable(name, q, k)
    # in place always through autograd, which counts the versions of q and k
    forward, given = (
        _Rope.apply if in_place else _forward,
        (cos, sin, how, positions, plan, in_place),
    )
    return host.call(name, "rope_eager", _Rope, forward, (q, k), *given)


def rope_triton(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_offset: int = 0,
    interleaved: bool = False, layout: str = "bshd", positions: torch.Tensor | None = None,
    *, plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """q and k rotated by their positions, as new tensors, in one Triton kernel; with gradients for both.

    q: (B, S, Hq, D), k: (B, S, Hk, D), or with layout="bhsd" (B, Hq, S, D) and (B, Hk, S, D), any strides; k
    may be None. cos, sin: float32 (positions, R / 2), from rope_tables, R at most D; or tables of two equal
    halves, as Hugging Face and Liger make them: (positions, D) or (B or 1, S, D), a row for each token. Of
    narrower ones (a partial rotary) pass the first half: cos[0, :, : R // 2] of (1, S, R); cos[:, : R // 2] of
    (S, R), which whole would count as the half of 2R. The token at place s has position position_offset + s, or
    positions[b, s] where integers (B, S) or (S,) are given; one outside of the tables gives NaN.
    interleaved: pairs are neighbours (2i, 2i + 1) instead of halves (i, i + R/2).
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::rope), autocast and CUDA graphs; not under
    torch.func, torch.vmap or forward-mode AD, nor twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or position.
    """
    how = (position_offset, interleaved, layout)
    return _call("rope_triton", q, k, cos, sin, how, positions, plan, in_place=False)


def rope_triton_(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_offset: int = 0,
    interleaved: bool = False, layout: str = "bshd", positions: torch.Tensor | None = None,
    *, plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """rope_triton that writes into q and k, and returns them: no memory of its own, the same traffic.

    Where gradients are needed, q and k must be neither leaves nor views (ValueError): there use rope_triton.
    """
    how = (position_offset, interleaved, layout)
    return _call("rope_triton_", q, k, cos, sin, how, positions, plan, in_place=True)


@host.custom_op("fused_kernels::rope")
def rope_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_offset: int, interleaved: bool, layout: str, positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """rope for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    how = (position_offset, interleaved, layout)
    _check("rope_op", q, k, cos, sin, layout)
    _check_positions("rope_op", q, cos, sin, how, positions)
    return _forward(q, k, cos, sin, how, positions)


@host.custom_op("fused_kernels::rope_", mutates=("q", "k"))
def rope_op_(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_offset: int, interleaved: bool, layout: str, positions: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """rope in place, for torch.compile in inference; it says that it changes q and k."""
    how = (position_offset, interleaved, layout)
    _check("rope_op_", q, k, cos, sin, layout)
    _check_positions("rope_op_", q, cos, sin, how, positions)
    _check_writable("rope_op_", q, k)
    _forward(q, k, cos, sin, how, positions, in_place=True)


@host.custom_op("fused_kernels::rope_backward")
def _rope_backward_op(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    position_offset: int, interleaved: bool, layout: str, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _backward(dq, dk, cos, sin, (position_offset, interleaved, layout), positions)


def _op_backward(ctx, dq, dk):
    cos, sin, positions = ctx.saved_tensors
    return *_rope_backward_op(dq, dk, cos, sin, *ctx.how, positions), *[None] * 6


rope_op.register_fake(_empty)
_rope_backward_op.register_fake(_empty)
rope_op.register_autograd(
    _op_backward,
    setup_context=lambda ctx, inputs, output: _save(ctx, *inputs[2:4], inputs[4:7], inputs[7]),
)
