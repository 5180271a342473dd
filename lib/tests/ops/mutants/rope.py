"""Mutants of lib/ops/rope.py. Its inputs are no matrices: all checks that run on them are here."""

import functools
import itertools

from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.rope import rope_eager, rope_tables
from lib.tests.ops.mutants import Mutant

import torch

SMALL = (2, 7, 4, 2, 16, 12)  # B, S, Hq, Hk, D, R
FORMS = [
    {"interleaved": interleaved, "layout": layout}
    for interleaved, layout in itertools.product((False, True), ("bshd", "bhsd"))
]


def _tensors(case=SMALL, dtype=torch.float32, layout="bshd", positions=None):
    """q and k, leaves that require grad, and cos and sin."""
    b, s, hq, hk, d, r = case
    shapes = [(b, s, h, d) if layout == "bshd" else (b, h, s, d) for h in (hq, hk)]
    q, k = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, *rope_tables(positions or max(1, s), r, dtype=table_dtype)


def _detached(*args, **kwargs):
    return [t.detach() for t in _tensors(*args, **kwargs)]


def _check(version, inputs, slack=1e-6, **form):
    bound = functools.wraps(version)(functools.partial(version, **form))
    eager = functools.partial(rope_eager, **form)
    check_against_float64(bound, eager, *inputs, slack=slack, name=str(form))


def _gradients(version, inputs, dys, **form):
    return torch.autograd.grad(version(*inputs, **form), inputs[:2], dys)


def _packed(layout):
    """q, k and v as views of one projection: (B, S, (Hq + 2 Hk) D) or its like."""
    qkv = torch.randn(2, 6, 8, 16)
    qkv = qkv if layout == "bshd" else qkv.transpose(1, 2)
    return qkv.split([4, 2, 2], dim=layout.index("h"))


def check_values(op, module):
    """Both ways to pair, both layouts, columns that pass through, heads and sizes that fill no tile."""
    for form in FORMS:
        for case, dtype in [(SMALL, torch.float32), ((1, 9, 12, 5, 24, 10), torch.bfloat16)]:
            inputs = _tensors(case, dtype, form["layout"], positions=case[1] * case[0] + 5)
            _check(module.rope_triton, inputs, position_offset=3, **form)


def check_tokens(op, module):
    """More of them than a program has, and one left over; of several sequences."""
    for form in FORMS:
        _check(module.rope_triton, _tensors((3, 43, 2, 1, 8, 8), layout=form["layout"]), **form)


def check_float64(op, module):
    for form in FORMS[::2]:
        _check(module.rope_triton, _tensors(dtype=torch.float64), slack=1e-13, **form)


def check_rounded_once(op, module):
    """Far out, from bfloat16 to bfloat16 by way of float32: eager rounds cos and sin as well."""
    for form in FORMS[::2]:
        q, k, cos, sin = _tensors(dtype=torch.bfloat16, positions=9999)
        exact = [t.detach().double().requires_grad_() for t in (q, k)]
        inputs, exact = (q, k, cos, sin, 9000), (*exact, cos.double(), sin.double(), 9000)
        dys = [torch.randn_like(t) for t in (q, k)]
        got = (
            *module.rope_triton(*inputs, **form),
            *_gradients(module.rope_triton, inputs, dys, **form),
        )
        dys = [dy.double() for dy in dys]
        want = *rope_eager(*exact, **form), *_gradients(rope_eager, exact, dys, **form)
        for a, b in zip(got, want):
            error = (a.double() - b).abs() - 0.51 * 2**-7 * b.abs()
            assert error.max() < 5e-7 * b.abs().max(), "rounded on the way"


def check_definitions(op, module):
    """rope_eager and rope_tables of the module itself, by formulas from elsewhere."""
    cos, sin = module.rope_tables(20_000, 64)
    angle = torch.tensor(19_999 * 10000.0 ** (-6 / 64), dtype=torch.float64)
    assert cos[19_999, 3] == angle.cos().float(), "a wrong angle"
    assert sin[19_999, 3] == angle.sin().float(), "a wrong angle"
    q, k, cos, sin = _detached((2, 7, 4, 2, 16, 16))
    turn = torch.complex(cos, sin)[:, None]
    for x, halves, pairs in zip(
        (q, k), module.rope_eager(q, k, cos, sin), module.rope_eager(q, k, cos, sin, 0, True)
    ):
        turned = torch.view_as_real(torch.complex(*x.chunk(2, dim=-1)) * turn)
        torch.testing.assert_close(halves, turned.movedim(-1, -2).flatten(-2))
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn)
        torch.testing.assert_close(pairs, turned.flatten(-2))


def check_strides(op, module):
    """Views of a packed projection, gaps between columns, expanded heads, tables with a gap behind each row."""
    tables = rope_tables(6, 12)
    for form in FORMS:
        leaves = [t.detach().requires_grad_() for t in _packed(form["layout"])[:2]]
        _check(module.rope_triton, [*leaves, *tables], **form)
    q, k, cos, sin = _detached()
    gaps = [torch.stack([t, t], dim=-1)[..., 0].requires_grad_() for t in (q, k)]
    _check(module.rope_triton, [*gaps, cos, sin])
    shared = [t[:, :, :1].expand(t.shape).requires_grad_() for t in (q, k)]
    _check(module.rope_triton, [*shared, cos, sin])
    cos, sin = (torch.cat([t, t], dim=1)[:, :6] for t in (cos, sin))
    _check(module.rope_triton, [q.requires_grad_(), k.requires_grad_(), cos, sin])


def check_gradients(op, module):
    """Incoming gradients of stride 0 and of another layout; one unused; twice the same, and left alone."""
    inputs = _tensors()
    for dys in [
        [torch.ones(()).expand(t.shape) for t in inputs[:2]],
        [torch.randn_like(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in inputs[:2]],
    ]:
        before = [dy.clone() for dy in dys]
        ys = module.rope_triton(*inputs, interleaved=True)
        first = torch.autograd.grad(ys, inputs[:2], dys, retain_graph=True)
        second = torch.autograd.grad(ys, inputs[:2], dys)
        want = _gradients(rope_eager, inputs, dys, interleaved=True)
        for a, b, c in zip(first, second, want):
            assert torch.equal(a, b), "a second backward differs"
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(dys, before)), "dq or dk was changed"
    dq, dk = torch.autograd.grad(module.rope_triton(*inputs)[1].square().sum(), inputs[:2])
    assert not dq.any(), "a gradient from nowhere"
    torch.testing.assert_close(dk, 2 * inputs[1].detach(), rtol=1e-5, atol=1e-5)
    for n in (
        0,
        1,
    ):  # the length of a head stays, so the gradient of its square is that of the input
        alone = [t if i == n else t.detach() for i, t in enumerate(inputs)]
        loss = sum(t.square().sum() for t in module.rope_triton(*alone))
        (got,) = torch.autograd.grad(loss, inputs[n])
        torch.testing.assert_close(got, 2 * inputs[n].detach(), rtol=1e-5, atol=1e-5)


def check_second_derivative(op, module):
    q, k, cos, sin = _tensors()
    dys = [torch.randn_like(t).requires_grad_() for t in (q, k)]
    ys = module.rope_triton(q, k, cos, sin)
    dq, _ = torch.autograd.grad(ys, (q, k), dys, create_graph=True)
    try:
        (dq * q).sum().backward()  # without the error: the part of it that goes through q
    except RuntimeError:
        return
    raise AssertionError("a second derivative does not raise")


def check_specials(op, module):
    """NaN, infinities and large numbers stay within their pair."""
    for form in FORMS[::2]:
        inputs = _tensors((1, 6, 2, 1, 16, 12))
        with torch.no_grad():
            inputs[0][0, 1, 0, 3], inputs[0][0, 2, 1, 14] = float("nan"), float("inf")
            inputs[1][0, 3, 0, 8], inputs[1][0, 4, 0, 2] = -float("inf"), 1e30
        _check(module.rope_triton, inputs, **form)


def check_empty(op, module):
    for case in [(0, 3, 2, 2, 8, 8), (1, 0, 2, 2, 8, 8), (2, 3, 0, 2, 8, 4), (2, 3, 2, 0, 8, 4)]:
        _check(module.rope_triton, _tensors(case))


def check_in_place(op, module):
    """The bits of out of place, in the same memory; v beside them untouched; autograd is told, and goes on."""
    tables = rope_tables(6, 12)
    for form in FORMS:
        q, k, v = _packed(form["layout"])
        want, rest = module.rope_triton(q, k, *tables, **form), v.clone()
        versions = q._version, k._version
        got = module.rope_triton_(q, k, *tables, **form)
        for a, b, t in zip(got, want, (q, k)):
            assert a.data_ptr() == t.data_ptr(), "written elsewhere"
            assert torch.equal(t, b), "not what out of place gives"
        assert torch.equal(v, rest), "v was written"
        assert q._version > versions[0], "autograd was not told that q has changed"
        assert k._version > versions[1], "autograd was not told that k has changed"
    q, k, cos, sin = _tensors()
    ys = q * 2, k * 3
    module.rope_triton_(*ys, cos, sin)
    got = torch.autograd.grad(sum((y**3).sum() for y in ys), (q, k))
    want = rope_eager(q * 2, k * 3, cos, sin)
    want = torch.autograd.grad(sum((y**3).sum() for y in want), (q, k))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def check_in_place_refuses(op, module):
    q, k, cos, sin = _detached()
    leaf = q.clone().requires_grad_()
    packed, flat = torch.randn(2, 7, 8, 16), torch.randn(2 * 7 * 64)
    refused = [
        (q[:, :, :1].expand(q.shape), k),
        (torch.randn(2, 7, 4, 32)[..., ::2], k),
        (leaf, k),
        ((leaf * 1)[:], k),
        (flat.as_strided(q.shape, (448, 64, 15, 1)), k),
        (q, q),
        (packed[:, :, :4], packed[:, :, 3:5]),
    ]
    for n, (a, b) in enumerate(refused):
        try:
            module.rope_triton_(a, b, cos, sin)
        except ValueError:
            continue
        raise AssertionError(f"written where it must not be: {n}")
    tables = rope_tables(9, 12)
    for offset in (-1, 3, 0.0, True):
        try:
            module.rope_triton(q, k, *tables, offset)
        except (TypeError, ValueError) as error:
            if "position" in str(error):
                continue
            raise AssertionError(f"{offset} came as far as the kernel") from error
        raise AssertionError(f"taken for a position: {offset}")


def check_far_apart(op, module):
    """Elements 2**30 apart along batch, sequence or heads, of q or of k, in and out of place; far tables."""
    storage = torch.empty(2**31 + 64, dtype=torch.float16)
    for dim, which in itertools.product(range(3), range(2)):
        shape, strides = [1, 1, 1, 16], [16, 16, 16, 1]
        shape[dim], strides[dim] = 3, 2**30
        far = storage.as_strided(shape, strides).copy_(torch.arange(-24, 24).view(shape) / 8)
        shape[2] = 2
        pair = [far, torch.randn(shape).half()][:: 1 - 2 * which]
        inputs = *(t.requires_grad_() for t in (p.detach() for p in pair)), *rope_tables(3, 16)
        _check(module.rope_triton, inputs, interleaved=bool(dim % 2))
        want = rope_eager(*inputs)
        with torch.no_grad():
            module.rope_triton_(*inputs)
        for a, b in zip(inputs, want):
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    q, k, cos, _ = _detached((1, 3, 2, 1, 16, 16))
    table = torch.empty(2**28 + 4, 8)
    table[2**28 : 2**28 + 3] = cos
    got = module.rope_triton(q, k, table, table, 2**28)
    for a, b in zip(got, rope_eager(q, k, cos, cos)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def check_traffic(op, module):
    """q and k once in and once out; in place the columns from R on are not touched."""
    q, k, cos, sin = _detached((1, 16, 4, 2, 16, 8))
    for version, share in ((module.rope_triton, 2), (module.rope_triton_, 1)):
        traffic = count_traffic(functools.partial(version, q, k, cos, sin))
        moved = share * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
        assert traffic.bytes_moved == moved, f"{traffic.bytes_moved} bytes moved, not {moved}"


def check_registered_ops(op, module):
    """The nodes of torch.compile: one with its own way to the gradient, one in place."""
    for form in FORMS:
        inputs = _tensors(layout=form["layout"], positions=9)
        _check(module.rope_op, inputs, position_offset=2, **form)
        q, k, cos, sin = _detached(layout=form["layout"], positions=9)
        want = rope_eager(q, k, cos, sin, 2, **form)
        module.rope_op_(q, k, cos, sin, 2, *form.values())
        for a, b in zip((q, k), want):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


CHECKS = [
    check_definitions,
    check_in_place_refuses,
    check_traffic,
    check_second_derivative,
    check_empty,
    check_specials,
    check_rounded_once,
    check_gradients,
    check_float64,
    check_in_place,
    check_registered_ops,
    check_strides,
    check_tokens,
    check_values,
    check_far_apart,
]

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
    Mutant("*ctx.how, back=True), *[None] * 6", "*ctx.how), *[None] * 6", "rotated on, not back"),
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
        "ctx.how = (position_offset, interleaved, layout)",
        "ctx.how = (0, interleaved, layout)",
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
        "(_cdiv(n_tokens, block_t) * n_groups,)",
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
    # --- rounding
    Mutant(
        "c = tl.load(cos_ptr + table, mask=table_mask, other=0.0).to(COMPUTE)",
        "c = tl.load(cos_ptr + table, mask=table_mask, other=0.0).to(q_ptr.dtype.element_ty).to(COMPUTE)",
        "cos rounded to the dtype of q",
    ),
    Mutant(
        "COMPUTE=tl.float64 if q.dtype == torch.float64 else tl.float32",
        "COMPUTE=tl.float32",
        "float64 computed in float32",
    ),
    # --- in place, autograd, torch.library
    Mutant("            ctx.mark_dirty(q, k)\n", "", "in place: autograd not told"),
    Mutant(
        "_launch(q, k, q, k, cos, sin, *ctx.how, back=False)",
        "_launch(q, k, q, k.clone(), cos, sin, *ctx.how, back=False)",
        "in place: k left as it was",
    ),
    Mutant("if step <= reach:", "if step < reach:", "in place: an expanded q written"),
    Mutant(
        "if q.numel() and k.numel() and _share_memory(q, k):",
        "if False:",
        "in place: q and k the same",
    ),
    Mutant(
        "if reach_a <= apart and apart + reach_b <= room:",
        "if apart > 0:",
        "in place: q and k that share some heads",
    ),
    Mutant(
        "if t.stride(-1) != 1 or _overlaps_itself(t):",
        "if _overlaps_itself(t):",
        "in place: columns with gaps",
    ),
    Mutant(
        "(t.is_leaf or t._is_view()):",
        "t._is_view():",
        "in place: a leaf that requires grad written",
    ),
    Mutant(
        "if not _needs_gradient(q, k):", "if not _needs_gradient(q):", "no gradient for k alone"
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "_, _, cos, sin, *ctx.how = inputs",
        "_, _, sin, cos, *ctx.how = inputs",
        "compiled: cos and sin mixed up for the gradient",
    ),
    Mutant(
        "interleaved, layout, back=True)\n",
        "interleaved, layout)\n",
        "compiled: rotated on, not back",
    ),
    Mutant(
        "_launch(q, k, q, k, cos, sin, position_offset, interleaved, layout, back=False)",
        "_launch(q, k, q, k, cos, sin, 0, interleaved, layout, back=False)",
        "compiled in place: position_offset ignored",
    ),
    # --- eager
    Mutant("dim=-1).flatten(-2)", "dim=-2).flatten(-2)", "eager: neighbours in, halves out"),
]
