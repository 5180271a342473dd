"""rope: what test_ops asks of other ops, for q, k, cos and sin; other definitions; traffic; in place."""

import functools
import itertools

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import rope as op_file
from lib.ops.rope import rope_eager, rope_op, rope_op_, rope_tables, rope_triton, rope_triton_
from lib.tests.ops.test_ops import DTYPES, _count_compilations, assert_close

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# (B, S, Hq, Hk, D, R)
CASES = [
    (1, 1, 1, 1, 2, 2),
    (2, 7, 4, 2, 16, 16),
    (1, 5, 3, 1, 80, 80),
    (2, 3, 8, 8, 128, 64),
    (1, 9, 12, 5, 24, 10),
    (2, 33, 1, 1, 64, 64),
    (0, 3, 2, 2, 8, 8),
    (1, 0, 2, 2, 8, 8),
]
SMALL = (2, 7, 4, 2, 16, 12)
BIG = [(2, 4099, 32, 8, 128, 128), (1, 1000, 7, 3, 80, 80), (4, 513, 40, 10, 96, 48)]
LAYOUTS = [
    pytest.param(interleaved, layout, id=f"{'interleaved' if interleaved else 'halves'}-{layout}")
    for interleaved, layout in itertools.product((False, True), ("bshd", "bhsd"))
]


def in_place_on_copies(q, k, *args, **kwargs):
    """rope_triton_ on copies with the strides of q and k, so that it can be tested like the other versions."""
    return rope_triton_(_copy(q), _copy(k), *args, **kwargs)


def _copy(t):
    if not isinstance(t, torch.Tensor):
        return t
    if t.stride(-1) != 1 or any(step == 0 and n > 1 for step, n in zip(t.stride(), t.shape)):
        return t.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def registered(q, k, cos, sin, position_offset=0, interleaved=False, layout="bshd"):
    return rope_op(q, k, cos, sin, position_offset, interleaved, layout)


VERSIONS = [rope_triton, in_place_on_copies, registered]
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.__name__)
wrappers = pytest.mark.parametrize("version", VERSIONS[:2], ids=lambda v: v.__name__)
layouts = pytest.mark.parametrize(("interleaved", "layout"), LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tensors(case=SMALL, dtype=torch.float32, layout="bshd", positions=None, device=None):
    """q and k, leaves that require grad, and cos and sin in float32 (float64 with float64)."""
    b, s, hq, hk, d, r = case
    device = device or machine.device()
    q, k = (
        torch.randn((b, s, h, d) if layout == "bshd" else (b, h, s, d), device=device)
        for h in (hq, hk)
    )
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tables = rope_tables(positions or max(1, s), r, device=device, dtype=table_dtype)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), *tables


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


def bound(version, **kwargs):
    """`version` with keyword arguments, and its name kept for messages."""
    return functools.wraps(version)(functools.partial(version, **kwargs))


def assert_rounded_once(got, want):
    """`got` is the float64 `want`, computed in float32 and rounded once to its own dtype."""
    assert got.shape == want.shape
    if got.numel():
        allowed = 0.51 * torch.finfo(got.dtype).eps * want.abs() + 5e-7 * want.abs().max()
        error = (got.double() - want).abs()
        assert (error <= allowed).all(), f"worst: {(error - allowed).max():.2e} too much"


# --- values and gradients ------------------------------------------------------------------------------------


@versions
@dtypes
@layouts
def test_equals_float64(version, dtype, interleaved, layout):
    for case in CASES:
        kwargs = {"position_offset": 3, "interleaved": interleaved, "layout": layout}
        inputs = tensors(case, dtype, layout, positions=case[1] + 5)
        check_against_float64(
            bound(version, **kwargs), bound(rope_eager, **kwargs), *inputs, name=str(case)
        )


@versions
@pytest.mark.parametrize(
    "case", [(2, 3, 0, 2, 8, 4), (2, 3, 2, 0, 8, 4), (2, 3, 0, 0, 8, 4)], ids=str
)
def test_no_heads(version, case):
    """Also of the columns that only pass through."""
    check_against_float64(version, rope_eager, *tensors(case))


@wrappers
@dtypes
@layouts
def test_rounds_once(version, dtype, interleaved, layout):
    """Stricter than twice eager's error: eager itself rounds cos and sin to bfloat16."""
    kwargs = {"position_offset": 9_000, "interleaved": interleaved, "layout": layout}
    q, k, cos, sin = tensors((2, 7, 4, 2, 16, 12), dtype, layout, positions=10_000)
    dys = [torch.randn_like(t) for t in (q, k)]
    got = version(q, k, cos, sin, **kwargs)
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    want = rope_eager(*exact, cos.double(), sin.double(), **kwargs)
    for a, b in zip(got, want):
        assert_rounded_once(a.detach(), b.detach())
    gradients = torch.autograd.grad(got, (q, k), dys)
    for a, b in zip(gradients, torch.autograd.grad(want, exact, [dy.double() for dy in dys])):
        assert_rounded_once(a, b)


@pytest.mark.gpu
@wrappers
@dtypes
@layouts
def test_equals_float64_at_real_sizes(version, dtype, interleaved, layout):
    for case in BIG:
        kwargs = {"interleaved": interleaved, "layout": layout}
        inputs = tensors(case, dtype, layout)
        check_against_float64(
            bound(version, **kwargs), bound(rope_eager, **kwargs), *inputs, name=str(case)
        )


@wrappers
@layouts
def test_the_way_back_gives_the_input(version, interleaved, layout):
    """A rotation by -angle undoes one by angle: gradients of outputs are the inputs, columns from R on too."""
    q, k, cos, sin = tensors(layout=layout)
    rotated = version(q, k, cos, sin, interleaved=interleaved, layout=layout)
    back = torch.autograd.grad(rotated, (q, k), [t.detach() for t in rotated])
    for a, b in zip(back, (q, k)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    again = version(
        *(t.detach() for t in rotated), cos, -sin, interleaved=interleaved, layout=layout
    )
    assert all(torch.equal(a, b) for a, b in zip(back, again)), "backward is forward with -sin"


def test_lengths_stay_and_scores_depend_on_the_difference_of_positions():
    q, k, cos, sin = detached((1, 1, 1, 1, 64, 64), positions=512)
    for version, interleaved in itertools.product((rope_eager, rope_triton), (False, True)):

        def turned(m, version=version, interleaved=interleaved):
            return version(q, k, cos, sin, m, interleaved)

        torch.testing.assert_close(turned(400)[0].norm(), q.norm())
        scores = [(turned(m + 7)[0] * turned(m)[1]).sum() for m in (0, 1, 100, 500)]
        torch.testing.assert_close(torch.stack(scores), scores[0].expand(4), rtol=1e-4, atol=1e-4)
        other = (turned(8)[0] * turned(0)[1]).sum()
        assert (other - scores[0]).abs() > 1e-2, "it depends on nothing"


# --- definitions of others -----------------------------------------------------------------------------------


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    """As in the models of Hugging Face: q, k (B, H, S, D); cos, sin (B, S, D), each half the same."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def hugging_face_tables(n_positions, dim, base=10000.0):
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] * inverse
    both = torch.cat((angles, angles), dim=-1)[None].to(machine.device())
    return both.cos().float(), both.sin().float()  # (1, S, D)


@wrappers
def test_equals_apply_rotary_pos_emb(version):
    for b, s, hq, hk, d in [(2, 9, 4, 2, 16), (1, 33, 3, 3, 80)]:
        q, k, cos, sin = tensors((b, s, hq, hk, d, d), layout="bhsd")
        got = version(q, k, cos, sin, layout="bhsd")
        want = apply_rotary_pos_emb(q, k, *hugging_face_tables(s, d))
        dys = [torch.randn_like(t) for t in got]
        for a, c in zip(got, want):
            assert_close(a, c)
        for a, c in zip(
            torch.autograd.grad(got, (q, k), dys), torch.autograd.grad(want, (q, k), dys)
        ):
            assert_close(a, c)


@versions
def test_takes_a_slice_of_the_tables_of_hugging_face(version):
    """cos[0, :, : D / 2] of a (1, S, D) table: rows with a gap behind them."""
    q, k, *_ = tensors((2, 9, 4, 2, 16, 16))
    cos, sin = (t[0, :, :8] for t in hugging_face_tables(9, 16))
    assert not cos.is_contiguous()
    check_against_float64(version, rope_eager, q, k, cos, sin)
    cos, sin = (t.t().contiguous().t() for t in (cos, sin))
    check_against_float64(version, rope_eager, q, k, cos, sin, name="columns")


@wrappers
def test_interleaved_is_a_product_of_complex_numbers(version):
    """As in the code that Llama came with: pairs are complex numbers, multiplied by e^(i·m·theta)."""
    for d in (2, 16, 80):
        q, k, cos, sin = detached((2, 9, 4, 2, d, d))
        turn = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos))[:, None]
        got = version(q, k, cos, sin, interleaved=True)
        for a, x in zip(got, (q, k)):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            assert_close(a, torch.view_as_real(pairs * turn).flatten(-2))


def test_tables():
    cos, sin = rope_tables(20_000, 64)
    m, i = 19_999, 3
    angle = torch.tensor(m * 10000.0 ** (-2 * i / 64), dtype=torch.float64)
    assert cos.shape == sin.shape == (20_000, 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[m, i] == angle.cos().float()
    assert sin[m, i] == angle.sin().float()


# --- layouts in memory ---------------------------------------------------------------------------------------


def packed(layout="bshd", dtype=torch.float32):
    """q and k as views of one (B, S, (Hq + 2 Hk) D) projection: as attention gets them."""
    qkv = torch.randn(2, 6, (4 + 2 + 2) * 16, dtype=dtype, device=machine.device())
    q, k, _ = qkv.split([4 * 16, 2 * 16, 2 * 16], dim=-1)
    q, k = q.view(2, 6, 4, 16), k.view(2, 6, 2, 16)
    return qkv, *(t if layout == "bshd" else t.transpose(1, 2) for t in (q, k))


@wrappers
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_qkv(version, interleaved, layout, dtype):
    _, q, k = packed(layout, dtype)
    tables = rope_tables(6, 12, device=q.device)
    kwargs = {"interleaved": interleaved, "layout": layout}
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    check_against_float64(
        bound(version, **kwargs), bound(rope_eager, **kwargs), *leaves, *tables, name="packed"
    )


@layouts
def test_in_place_in_a_packed_qkv_leaves_the_rest(interleaved, layout):
    qkv, q, k = packed(layout)
    tables = rope_tables(6, 12, device=q.device)
    want = rope_eager(q, k, *tables, interleaved=interleaved, layout=layout)
    before = qkv.clone()
    got = rope_triton_(q, k, *tables, interleaved=interleaved, layout=layout)
    for a, b, view in zip(got, want, (q, k)):
        assert a.data_ptr() == view.data_ptr()
        assert_close(view, b)
    assert torch.equal(qkv[..., 6 * 16 :], before[..., 6 * 16 :]), "v was written"
    assert not torch.equal(qkv[..., : 6 * 16], before[..., : 6 * 16])


def test_gradient_through_a_packed_projection():
    """Two views of one tensor with a gradient of its own: they meet again in it."""
    qkv, *_ = packed()
    tables = rope_tables(6, 16, device=qkv.device)
    found = []
    for version in (rope_triton, rope_eager):
        leaf = qkv.clone().requires_grad_()
        q, k, v = leaf.split([64, 32, 32], dim=-1)
        q, k = version(q.unflatten(-1, (4, 16)), k.unflatten(-1, (2, 16)), *tables)
        (q.square().sum() * 0.5 + (k * 3).sum() + v.sum()).backward()
        found.append(leaf.grad)
    assert_close(*found)


@wrappers
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    case=st.tuples(
        st.integers(1, 2),
        st.integers(0, 9),
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(2, 20),
    ),
    order=st.permutations(range(4)),
    steps=st.tuples(*[st.integers(1, 2)] * 4),
    interleaved=st.booleans(),
    rotary=st.integers(1, 10),
)
def test_any_strides(version, case, order, steps, interleaved, rotary):
    """Any permuted and sliced view gives the values of its contiguous copy."""
    b, s, hq, hk, d = case
    q, k, cos, sin = detached((b, s, hq, hk, d, 2 * min(rotary, d // 2)))
    got = version(*(_spread(t, order, steps) for t in (q, k)), cos, sin, interleaved=interleaved)
    for a, c in zip(got, version(q, k, cos, sin, interleaved=interleaved)):
        assert torch.equal(a, c)


def _spread(t, order, steps):
    """The numbers of t in memory of another order, with NaN between them."""
    shape = [t.shape[i] * steps[i] for i in order]
    wide = torch.full(shape, float("nan"), device=t.device)
    view = wide.permute(*(order.index(i) for i in range(4)))[
        tuple(slice(None, None, step) for step in steps)
    ]
    return view.copy_(t)


@versions
def test_expanded(version):
    """One head shared by all, by strides of 0."""
    q, k, cos, sin = detached((2, 7, 1, 1, 16, 16))
    q, k = (t.expand(2, 7, 4, 16).requires_grad_() for t in (q, k))
    check_against_float64(version, rope_eager, q, k, cos, sin)


# --- gradients -----------------------------------------------------------------------------------------------


@versions
@layouts
def test_gradient_of_a_sum_has_stride_zero(version, interleaved, layout):
    inputs, again = tensors(layout=layout), tensors(layout=layout)
    kwargs = {"interleaved": interleaved, "layout": layout}
    sum(t.sum() for t in version(*inputs, **kwargs)).backward()
    sum(t.sum() for t in rope_eager(*again, **kwargs)).backward()
    for got, want in zip(inputs[:2], again[:2]):
        assert_close(got.grad, want.grad)


@versions
def test_gradients_of_any_strides(version):
    q, k, cos, sin = tensors()
    dys = [torch.randn_like(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in (q, k)]
    got = torch.autograd.grad(version(q, k, cos, sin), (q, k), dys)
    want = torch.autograd.grad(rope_eager(q, k, cos, sin), (q, k), dys)
    for a, b in zip(got, want):
        assert_close(a, b)


@versions
def test_second_backward_gives_the_same(version):
    q, k, cos, sin = tensors()
    ys = version(q, k, cos, sin)
    dys = [torch.randn_like(y) for y in ys]
    before = [dy.clone() for dy in dys]
    first = torch.autograd.grad(ys, (q, k), dys, retain_graph=True)
    second = torch.autograd.grad(ys, (q, k), dys)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(before, dys)), "dq or dk was changed"


@versions
def test_only_the_gradients_asked_for(version):
    q, k, cos, sin = tensors()
    loss = sum(t.square().sum() for t in rope_eager(q, k, cos, sin))
    wanted = torch.autograd.grad(loss, (q, k))
    for n, leaf in enumerate((q, k)):
        others = [t if t is leaf else t.detach() for t in (q, k)]
        loss = sum(t.square().sum() for t in version(*others, cos, sin))
        assert_close(torch.autograd.grad(loss, [leaf])[0], wanted[n])


@versions
def test_one_result_unused(version):
    q, k, cos, sin = tensors()
    for n in (0, 1):
        got = torch.autograd.grad(version(q, k, cos, sin)[n].square().sum(), (q, k))
        assert_close(got[n], 2 * (q, k)[n].detach())
        assert not got[1 - n].any()


@wrappers
def test_second_derivative_raises(version):
    q, k, cos, sin = tensors()
    dys = [torch.randn_like(t).requires_grad_() for t in (q, k)]
    dq, _ = torch.autograd.grad(version(q, k, cos, sin), (q, k), dys, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_tables_changed_before_the_backward_pass_are_noticed():
    q, k, cos, sin = tensors()
    q, k = rope_triton(q, k, cos, sin)
    cos.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


@wrappers
def test_checkpoint(version):
    from torch.utils.checkpoint import checkpoint

    inputs = tensors()
    again = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    sum(t.square().sum() for t in checkpoint(version, *inputs, use_reentrant=False)).backward()
    sum(t.square().sum() for t in version(*again)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs[:2], again[:2]))


@wrappers
def test_autocast(version):
    inputs = tensors()
    with torch.autocast(machine.device().type, dtype=torch.bfloat16):
        for got, want in zip(version(*inputs), rope_eager(*inputs)):
            assert got.dtype == want.dtype


@wrappers
def test_vmap_raises(version):
    q, k, cos, sin = detached()
    with pytest.raises(RuntimeError, match="functorch|vmap|BatchedTensor"):
        torch.vmap(version, in_dims=(0, 0, None, None))(q[None], k[None], cos, sin)


@versions
def test_same_bits_every_time(version):
    q, k, cos, sin = tensors((2, 17, 8, 2, 32, 32))
    dys = [torch.randn_like(t) for t in (q, k)]
    runs = [torch.autograd.grad(version(q, k, cos, sin), (q, k), dys) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@versions
def test_nan_and_infinities_stay_in_their_pair(version):
    inputs = tensors((1, 6, 2, 1, 16, 12))
    with torch.no_grad():
        inputs[0][0, 1, 0, 3], inputs[0][0, 2, 1, 14] = float("nan"), float("inf")
        inputs[1][0, 3, 0, 8], inputs[1][0, 4, 0, 2] = -float("inf"), 1e30
    for interleaved in (False, True):
        kwargs = {"interleaved": interleaved}
        check_against_float64(bound(version, **kwargs), bound(rope_eager, **kwargs), *inputs)


# --- in place ------------------------------------------------------------------------------------------------


@layouts
@dtypes
def test_in_place_has_the_bits_of_out_of_place(dtype, interleaved, layout):
    for case in CASES:
        q, k, cos, sin = detached(case, dtype, layout)
        args = (cos, sin, 0, interleaved, layout)
        want, before = rope_triton(q, k, *args), (q._version, k._version)
        got = rope_triton_(q, k, *args)
        for a, b, t in zip(got, want, (q, k)):
            assert a.data_ptr() == t.data_ptr(), case
            assert torch.equal(t, b), case
        assert (q._version, k._version) == tuple(v + 1 for v in before), case


def test_in_place_autograd_goes_through_what_is_no_leaf():
    q, k, cos, sin = tensors()
    again = [t.detach().requires_grad_() for t in (q, k)]
    doubled = [q * 2, k.square()]
    result = rope_triton_(*doubled, cos, sin)
    sum((t**3).sum() for t in doubled).backward()  # doubled now *are* the results
    assert all(a is b for a, b in zip(result, doubled))
    rotated = rope_eager(again[0] * 2, again[1].square(), cos, sin)
    sum((t**3).sum() for t in rotated).backward()
    for a, b in zip((q, k), again):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_in_place_a_tensor_saved_before_is_noticed():
    """exp saves its result for its backward pass: written over, autograd has to say so."""
    q, k, cos, sin = tensors()
    q, k = rope_triton_(q.exp(), k * 1, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


def test_in_place_a_result_changed_afterwards_is_no_mistake():
    """The backward pass needs cos and sin alone: what happens to q and k is nothing to it."""
    q, k, cos, sin = tensors()
    a, b = rope_triton_(q * 1, k * 1, cos, sin)
    a.mul_(2)
    (a.sum() + b.sum()).backward()
    again = [t.detach().requires_grad_() for t in (q, k)]
    a, b = rope_eager(*again, cos, sin)
    (2 * a.sum() + b.sum()).backward()
    assert_close(q.grad, again[0].grad)
    assert_close(k.grad, again[1].grad)


def test_in_place_refuses_what_must_not_be_written():
    q, k, cos, sin = detached()
    leaf = q.clone().requires_grad_()
    view = (leaf * 1)[:]
    gaps = torch.randn(2, 7, 4, 32, device=q.device)[..., ::2]
    overlapping = torch.randn(2 * 7 * 64, device=q.device).as_strided(q.shape, (448, 64, 8, 1))
    refused = [
        (q[:, :, :1].expand(q.shape), k, "stride|memory"),
        (gaps, k, "side in the last dimension"),
        (leaf, k, "leaf"),
        (view, k, "view"),
        (q, q, "memory"),
        (overlapping, k, "memory"),
    ]
    for bad_q, bad_k, message in refused:
        before = bad_q.detach().clone()
        with pytest.raises(ValueError, match=f"rope_triton_: .*({message})"):
            rope_triton_(bad_q, bad_k, cos, sin)
        assert torch.equal(before, bad_q), "refused, and written all the same"
    with torch.no_grad():
        want = rope_eager(leaf, k, cos, sin)[0]
        rope_triton_(leaf, k, cos, sin)  # as torch: under no_grad a leaf may be written
    assert_close(leaf.detach(), want)


def test_in_place_a_view_beside_what_needs_a_gradient_raises_or_is_right():
    """q is a view without a gradient, k has one: q's values get one too, through the op."""
    q, k, cos, sin = tensors()
    view = torch.cat([q, q]).detach()[:2]
    with pytest.raises((RuntimeError, ValueError), match="view"):
        rope_triton_(view, k * 1, cos, sin)


# --- torch.library and torch.compile --------------------------------------------------------------------------


def op_cases():
    return [
        (*tensors(), 0, False, "bshd"),
        (*tensors((1, 5, 1, 1, 8, 4), layout="bhsd", positions=9), 4, True, "bhsd"),
        (*tensors((0, 3, 2, 2, 8, 8)), 0, False, "bshd"),
        (*(t.requires_grad_() for t in packed()[1:]), *tensors()[2:], 1, False, "bshd"),
    ]


@pytest.mark.parametrize("n", range(4))
def test_opcheck(n):
    args = op_cases()[n]
    torch.library.opcheck(rope_op, args)
    detached_args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(op_file._rope_backward_op, detached_args)


@pytest.mark.parametrize("n", range(4))
def test_opcheck_in_place(n):
    """That it changes q and k is declared."""
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in op_cases()[n]]
    torch.library.opcheck(rope_op_, args)
    want = rope_eager(*args)
    assert rope_op_(*args) is None
    for a, b in zip(args, want):
        assert_close(a, b)


@versions
@layouts
def test_gradcheck(version, interleaved, layout):
    q, k, cos, sin = tensors((1, 2, 2, 1, 6, 4), torch.float64, layout)
    kwargs = {"interleaved": interleaved, "layout": layout}
    assert torch.autograd.gradcheck(lambda q, k: version(q, k, cos, sin, **kwargs), (q, k))


@wrappers
def test_compile_fullgraph(version):
    def definition(q, k, cos, sin):
        return tuple(t.square() for t in rope_eager(q * 2, k + 1, cos, sin))

    def model(q, k, cos, sin):
        return tuple(t.square() for t in version(q * 2, k + 1, cos, sin))

    compiled = torch.compile(model, fullgraph=True)
    for case in [SMALL, (1, 5, 3, 1, 16, 16)]:
        inputs = tensors(case)
        check_against_float64(compiled, definition, *inputs)
        with torch.no_grad():
            for a, b in zip(compiled(*inputs), definition(*inputs)):
                assert_close(a, b)


@layouts
def test_compile_every_layout_and_offset(interleaved, layout):
    torch._dynamo.reset()
    compiled = torch.compile(rope_triton, fullgraph=True, backend="aot_eager")
    for offset in (0, 1, 2, 7):  # as decoding does, a token at a time
        inputs = tensors((2, 1, 4, 2, 16, 12), layout=layout, positions=9)
        kwargs = {"position_offset": offset, "interleaved": interleaved, "layout": layout}
        check_against_float64(
            bound(compiled, **kwargs), bound(rope_eager, **kwargs), *inputs, name=f"at {offset}"
        )


def test_compiled_in_place_writes_into_its_arguments():
    torch._dynamo.reset()
    q, k, cos, sin = detached()
    want = rope_eager(q, k, cos, sin)
    got = torch.compile(rope_triton_, fullgraph=True, backend="aot_eager")(q, k, cos, sin)
    for a, b, t in zip(got, want, (q, k)):
        assert a.data_ptr() == t.data_ptr()
        assert_close(t, b)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_place_has_gradients(backend):
    """An op that changes its arguments cannot tell the compiler its gradient: silently, it would have none."""
    torch._dynamo.reset()

    def model(rotate):
        def run(q, k, cos, sin):
            a, b = q * 2, k.square()
            returned = rotate(a, b, cos, sin)
            return (a**3).sum() + b.sin().sum() + (returned[0] * returned[1][:, :, :1]).sum()

        return run

    def definition(q, k, cos, sin):
        a, b = rope_eager(q * 2, k.square(), cos, sin)
        return (a**3).sum() + b.sin().sum() + (a * b[:, :, :1]).sum()

    got = tensors()
    want = [t.detach().requires_grad_(t.requires_grad) for t in got]
    torch.compile(model(rope_triton_), fullgraph=True, backend=backend)(*got).backward()
    definition(*want).backward()
    for a, b in zip(got[:2], want[:2]):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_in_place_within_one_packed_tensor(layout):
    """q and k side by side in each token, as a fused projection leaves them, share no element."""
    qkv = torch.randn(2, 7, 8, 16, device=machine.device())
    qkv = qkv if layout == "bshd" else qkv.transpose(1, 2).contiguous()
    q, k, v = qkv.split([4, 2, 2], dim=layout.index("h"))
    cos, sin = rope_tables(7, 16, device=machine.device())
    want, untouched = rope_eager(q, k, cos, sin, layout=layout), v.clone()
    rope_triton_(q, k, cos, sin, layout=layout)
    assert_close(q, want[0])
    assert_close(k, want[1])
    assert torch.equal(v, untouched)


@pytest.mark.parametrize(
    ("q_heads", "k_heads", "shared"),
    [
        ((0, 4), (4, 6), False),
        ((0, 4), (3, 5), True),
        ((4, 8), (2, 4), False),
        ((2, 6), (0, 3), True),
    ],
)
def test_in_place_sees_which_heads_are_shared(q_heads, k_heads, shared):
    x = torch.randn(2, 7, 8, 16, device=machine.device())
    q, k = x[:, :, slice(*q_heads)], x[:, :, slice(*k_heads)]
    tables = rope_tables(7, 16, device=machine.device())
    before = x.clone()
    if not shared:
        want = rope_eager(q, k, *tables)
        rope_triton_(q, k, *tables)
        assert_close(q, want[0])
        assert_close(k, want[1])
        return
    with pytest.raises(ValueError, match="share memory"):
        rope_triton_(q, k, *tables)
    assert torch.equal(x, before), "refused, and written all the same"


# --- traffic -------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_traffic_in_place_and_out_of_place(dtype, interleaved, layout):
    q, k, cos, sin = detached((2, 64, 8, 2, 64, 64), dtype, layout)
    args = (cos, sin, 0, interleaved, layout)
    for version in (rope_triton, rope_triton_):
        traffic = count_traffic(lambda version=version: version(q, k, *args))
        assert traffic.launches == 1
        assert traffic.bytes_moved == 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
        by = {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}
        large = sum(
            a.loaded + a.stored for name, a in by.items() if name not in ("cos_ptr", "sin_ptr")
        )
        assert large == 2 * (q.nbytes + k.nbytes), "something was read or written twice"
        heads = 8 + 2  # never more often than once a head
        assert by["cos_ptr"].loaded <= 2 * heads * cos.nbytes


def test_traffic_of_a_part_that_is_not_rotated():
    """In place the columns from R on are not touched."""
    q, k, cos, sin = detached((2, 64, 8, 2, 64, 32))
    tables = cos.nbytes + sin.nbytes
    out_of_place = count_traffic(lambda: rope_triton(q, k, cos, sin))
    in_place = count_traffic(lambda: rope_triton_(q, k, cos, sin))
    assert out_of_place.bytes_moved == 2 * (q.nbytes + k.nbytes) + tables
    assert in_place.bytes_moved == q.nbytes + k.nbytes + tables


def test_traffic_backward():
    q, k, cos, sin = tensors((2, 64, 8, 2, 64, 64))
    ys = rope_triton(q, k, cos, sin)
    dys = [torch.randn_like(y) for y in ys]
    traffic = count_traffic(lambda: torch.autograd.grad(ys, (q, k), dys))
    assert traffic.launches == 1
    assert traffic.bytes_moved == 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes


def test_the_suite_counts_these_bytes():
    op = registry.find("rope")
    shape = (2, 64, 8, 2, 64)
    q, k, cos, sin = (t.detach() for t in op.inputs(shape, torch.bfloat16, machine.device()))
    traffic = count_traffic(lambda: rope_triton(q, k, cos, sin))
    least = op.bytes_moved(shape, 2, gradients=False)
    assert traffic.bytes_moved == least + cos.nbytes + sin.nbytes
    assert op.bytes_moved(shape, 2, gradients=True) == 2 * least


def test_autograd_saves_the_tables_alone():
    q, k, cos, sin = tensors()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope_triton(q, k, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_apart(dim, n=3):
    """(B, S, H, D) with sizes of 1 but for `dim`, along which elements are 2**30 apart: 4 GiB of addresses."""
    shape = [1, 1, 1, 16]
    shape[dim] = n
    strides = [16, 16, 16, 1]
    strides[dim] = 2**30
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    t = storage.as_strided(shape, strides)
    return t.copy_(torch.arange(-24, 24).view(shape) / 8)


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seq", "head"])
def test_offsets_past_two_to_the_31(dim, which):
    far = far_apart(dim)
    shape = list(far.shape)
    shape[2] = 2
    near = torch.randn(shape, dtype=torch.float16, device=far.device)
    q, k = (far, near) if which == "q" else (near, far)
    tables = rope_tables(far.shape[1], 16, device=far.device)
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    for interleaved in (False, True):
        kwargs = {"interleaved": interleaved}
        check_against_float64(
            bound(rope_triton, **kwargs), bound(rope_eager, **kwargs), *leaves, *tables
        )
    want = rope_eager(q, k, *tables)
    rope_triton_(q, k, *tables)
    for a, b in zip((q, k), want):
        assert_close(a, b, torch.float16)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "seq", "head"])
def test_gradient_offsets_past_two_to_the_31(dim):
    dq = far_apart(dim)
    q, k = (torch.randn(dq.shape, dtype=dq.dtype, device=dq.device) for _ in range(2))
    tables = rope_tables(dq.shape[1], 16, device=dq.device)
    found = []
    for version in (rope_triton, rope_eager):
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        found.append(torch.autograd.grad(version(*leaves, *tables)[0], leaves[0], dq)[0])
    assert_close(*found, torch.float16)


def test_tables_past_two_to_the_31():
    """Position 2**28 of tables with 8 columns; one tensor serves as both, and four pages of it are touched."""
    n = 2**28 + 4
    table = torch.empty(n, 8, dtype=torch.float32, device=machine.device())
    q, k, cos, sin = detached((1, 3, 2, 1, 16, 16))
    table[2**28 : 2**28 + 3] = cos
    got = rope_triton(q, k, table, table, 2**28)
    for a, b in zip(got, rope_eager(q, k, cos, cos)):
        assert_close(a, b)


@wrappers
def test_more_than_65535_tokens(version):
    """Of one head and one pair: a grid of (heads, tokens) would not start on a GPU."""
    inputs = tensors((1, 70_000, 1, 1, 2, 2))
    check_against_float64(version, rope_eager, *inputs)


@pytest.mark.gpu
@wrappers
def test_more_than_65535_programs(version):
    for case in [(1, 100_003, 8, 2, 128, 128), (70_001, 2, 2, 1, 16, 16)]:
        check_against_float64(version, rope_eager, *tensors(case), name=str(case))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    case = (3, 2**15, 192, 8, 128, 128)  # q alone: 2.4e9 elements
    q, k, cos, sin = detached(case, torch.bfloat16)
    last = slice(-2, None)
    want = rope_eager(q[-1:, last], k[-1:, last], cos, sin, 2**15 - 2)
    for a, b in zip(rope_triton(q, k, cos, sin), want):
        assert_close(a[-1:, last], b.to(a.dtype), torch.bfloat16)
    rope_triton_(q, k, cos, sin)
    for a, b in zip((q, k), want):
        assert_close(a[-1:, last], b.to(a.dtype), torch.bfloat16)


# --- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@wrappers
def test_cuda_graph(version):
    q, k, cos, sin = detached((2, 257, 8, 2, 64, 64))
    version(q, k, cos, sin)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = version(q, k, cos, sin)
    q.normal_(), k.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(ys, version(q, k, cos, sin)))


@pytest.mark.gpu
@wrappers
def test_current_stream(version):
    """A launch on the default stream would read q before the long kernels of this stream have written it."""
    q, k, cos, sin = detached((1, 4096, 32, 8, 128, 128))
    version(q, k, cos, sin)
    want = rope_eager(q + 64, k, cos, sin)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = q
        for _ in range(64):
            x = x + 1
        got = version(x, k, cos, sin)[0]
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@wrappers
def test_second_gpu(version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_against_float64(version, rope_eager, *tensors(device=torch.device("cuda:1")))


@pytest.mark.gpu
@wrappers
def test_no_host_sync(version):
    inputs = detached((2, 64, 8, 2, 64, 64))
    version(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        version(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@layouts
def test_another_length_or_offset_does_not_compile_again(interleaved, layout):
    kwargs = {"interleaved": interleaved, "layout": layout}
    with _count_compilations() as compiled:
        for n, (batch, seq, offset) in enumerate(
            [(3, 1000, 5), (3, 1001, 0), (5, 16, 7), (1, 1, 16)]
        ):
            inputs = tensors((batch, seq, 8, 2, 64, 64), layout=layout, positions=2000)
            ys = rope_triton(*inputs, position_offset=offset, **kwargs)
            sum(y.square().sum() for y in ys).backward()
            if n == 0:
                compiled.clear()
    assert not compiled, compiled


# --- machine code --------------------------------------------------------------------------------------------


class _Noted:
    """Stands in for the kernel: notes what it is launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])
def test_sixteen_byte_accesses_and_no_spills(monkeypatch, interleaved, back):
    q, k = (torch.empty(1, 64, h, 128, dtype=torch.bfloat16) for h in (32, 8))
    kernel, launch = op_file._rope_kernel, _Noted()
    monkeypatch.setattr(op_file, "_rope_kernel", launch)
    op_file._launch(q, k, q.clone(), k.clone(), *rope_tables(64, 128), 0, interleaved, "bshd", back)
    options = {n: launch.kwargs.pop(n) for n in ("num_warps", "num_stages") if n in launch.kwargs}
    signature = signature_of(kernel, *launch.args, **launch.kwargs)
    compiled = compile_for(kernel, signature, arch=90, **options)
    memory = {op for op in instruction_mix(compiled) if op.startswith(("LDG.E", "STG.E"))}
    # 8 bytes a thread: cos and sin, of which a tile has few
    assert memory - {"LDG.E.64"} == {"LDG.E.128", "STG.E.128"}, memory
    assert compiled.spills == 0


# --- bad input -----------------------------------------------------------------------------------------------


@wrappers
def test_bad_input_is_refused_in_a_sentence(version):
    q, k, cos, sin = detached()
    name = "rope_triton"
    wrong = {
        "a list": ((q.tolist(), k, cos, sin), TypeError, "must be a torch.Tensor"),
        "integers": ((q.int(), k.int(), cos, sin), TypeError, "floating-point"),
        "complex": ((q.to(torch.complex64), k, cos, sin), TypeError, "floating-point"),
        "two dtypes": ((q, k.half(), cos, sin), TypeError, "cast one"),
        "bfloat16 tables": ((q, k, cos.bfloat16(), sin.bfloat16()), TypeError, "must be float32"),
        "tables of two dtypes": ((q, k, cos, sin.double()), TypeError, "must be float32"),
        "three dimensions": ((q[0], k[0], cos, sin), ValueError, "B, S, H, D"),
        "another batch": ((q, k[:1], cos, sin), ValueError, "B, S, H, D"),
        "another length": ((q, k[:, :3], cos, sin), ValueError, "B, S, H, D"),
        "another width": ((q, k[..., :8], cos, sin), ValueError, "B, S, H, D"),
        "tables wider than a head": ((q, k, *rope_tables(7, 18)), ValueError, "at most"),
        "tables with a batch": ((q, k, cos[None], sin[None]), ValueError, "positions, R / 2"),
        "tables of two shapes": ((q, k, cos, sin[:, :3]), ValueError, "positions, R / 2"),
        "tables without columns": ((q, k, cos[:, :0], sin[:, :0]), ValueError, "positions, R / 2"),
        "short tables": ((q, k, cos[:5], sin[:5]), ValueError, "longer tables"),
        "too far": ((q, k, cos, sin, 1), ValueError, "longer tables"),
        "before the start": ((q, k, cos, sin, -1), ValueError, "positions -1 to"),
        "an offset in a tensor": ((q, k, cos, sin, torch.tensor(0)), TypeError, "must be an int"),
        "a fraction": ((q, k, cos, sin, 0.0), TypeError, "must be an int"),
        "a layout": ((q, k, cos, sin, 0, False, "sbhd"), ValueError, "'bshd', 'bhsd'"),
        "another device": ((q, k.to("meta"), cos, sin), ValueError, "one device"),
        "no device": (tuple(t.to("meta") for t in (q, k, cos, sin)), ValueError, "rope_eager"),
        "trained tables": ((q, k, cos.clone().requires_grad_(), sin), ValueError, "no gradient"),
    }
    for what, (bad, kind, message) in wrong.items():
        with pytest.raises(kind, match=f"{name}.*{message}") as caught:
            version(*bad)
        assert len(str(caught.value)) > 40, what


def test_the_registered_ops_check_too():
    q, k, cos, sin = detached()
    for op in (rope_op, rope_op_):
        with pytest.raises(ValueError, match="longer tables"):
            op(q, k, cos[:3], sin[:3], 0, False, "bshd")


@pytest.mark.gpu
@wrappers
def test_cpu_input_on_a_gpu_machine(version):
    with pytest.raises(ValueError, match="rope_eager"):
        version(*tensors(device=torch.device("cpu")))
