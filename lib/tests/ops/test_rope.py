"""What is particular to rope: other definitions, one rounding, in place, traffic, machine code, its errors."""

import functools
import itertools
import sys

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.rope import rope_eager, rope_tables
from lib.tests.ops.battery import assert_close, count_compilations

import pytest
import torch
import triton.language as tl

SMALL = (2, 7, 4, 2, 16, 12)  # B, S, Hq, Hk, D, R
FORMS = list(itertools.product((False, True), ("bshd", "bhsd")))
forms = pytest.mark.parametrize(("interleaved", "layout"), FORMS)


def tensors(case=SMALL, dtype=torch.float32, layout="bshd", positions=None):
    """q and k, leaves that require grad, and cos and sin."""
    b, s, hq, hk, d, r = case
    device = machine.device()
    shapes = [(b, s, h, d) if layout == "bshd" else (b, h, s, d) for h in (hq, hk)]
    q, k = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    return q, k, *rope_tables(positions or max(1, s), r, device=device)


def detached(*args, **kwargs):
    return [t.detach() for t in tensors(*args, **kwargs)]


def check(version, inputs, **how):
    bound = functools.wraps(version)(functools.partial(version, **how))
    check_against_float64(bound, functools.partial(rope_eager, **how), *inputs, name=str(how))


def packed(layout="bshd"):
    """q, k and v as views of one projection, (B, S, (Hq + 2 Hk) D): as attention gets them."""
    qkv = torch.randn(2, 6, 8, 16, device=machine.device())
    qkv = qkv if layout == "bshd" else qkv.transpose(1, 2)
    return qkv.split([4, 2, 2], dim=layout.index("h"))


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


def test_equals_apply_rotary_pos_emb(module):
    for b, s, hq, hk, d in [(2, 9, 4, 2, 16), (1, 33, 3, 3, 80)]:
        q, k, cos, sin = tensors((b, s, hq, hk, d, d), layout="bhsd")
        want = apply_rotary_pos_emb(q, k, *hugging_face_tables(s, d))
        dys = [torch.randn_like(t) for t in want]
        want_grads = torch.autograd.grad(want, (q, k), dys)
        for version in (module.rope_triton, module.rope_eager):
            got = version(q, k, cos, sin, layout="bhsd")
            assert_close(got, want)
            assert_close(torch.autograd.grad(got, (q, k), dys), want_grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_takes_the_tables_of_hugging_face_whole(module, layout, dtype):
    """(1, S, D) for all sequences, (B, S, D) with rows of their own, and (S, D), Liger's without its batch."""
    q, k, *_ = tensors((3, 9, 4, 2, 16, 16), layout=layout)
    q, k = (t.detach().to(dtype).requires_grad_() for t in (q, k))
    cos, sin = (t.to(dtype) for t in hugging_face_tables(40, 16))
    places = torch.stack([torch.arange(9) + first for first in (0, 31, 7)]).to(q.device)
    for c, s in (
        (cos[:, :9], sin[:, :9]),
        (cos[0, places], sin[0, places]),
        (cos[0, 3:12], sin[0, 3:12]),
    ):
        check(module.rope_triton, (q, k, c, s), layout=layout)
        turned = (t.double() if layout == "bhsd" else t.double().transpose(1, 2) for t in (q, k))
        tables = (t.double() if t.dim() == 3 else t.double()[None] for t in (c, s))
        want = apply_rotary_pos_emb(*turned, *tables)
        want = [t if layout == "bhsd" else t.transpose(1, 2) for t in want]
        assert_close(module.rope_eager(*(t.double() for t in (q, k, c, s)), layout=layout), want)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions(module, layout, dtype):
    """Any position for any token, one row of them for all sequences, and steps of any kind between them."""
    q, k, cos, sin = tensors((3, 9, 4, 2, 16, 10), layout=layout, positions=50)
    each = torch.randint(50, (3, 9), dtype=dtype, device=q.device)
    for places in (each, each.t().contiguous().t(), each[:1], each[1]):
        check(module.rope_triton, (q, k, cos, sin), layout=layout, positions=places)
        copies = [t.detach().clone() for t in (q, k)]
        module.rope_triton_(*copies, cos, sin, layout=layout, positions=places)
        assert_close(copies, module.rope_triton(q, k, cos, sin, layout=layout, positions=places))
    shifted = module.rope_triton(q, k, cos, sin, 4, layout=layout)
    places = torch.arange(4, 13, device=q.device)
    assert_close(module.rope_triton(q, k, cos, sin, layout=layout, positions=places), shifted)


def test_a_position_outside_of_the_tables_gives_nan(module):
    q, k, cos, sin = detached((2, 5, 2, 2, 8, 6), positions=20)
    places = torch.tensor([[0, 19, 20, -1, 2**40], [3] * 5], device=q.device)
    for y in module.rope_triton(q, k, cos, sin, positions=places):
        assert y[0, 2:, :, :6].isnan().all()
        assert not y[0, :2].isnan().any() and not y[1].isnan().any()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_q_alone(module, layout):
    q, k, cos, sin = tensors((2, 9, 4, 2, 16, 16), layout=layout)
    for version in (module.rope_triton, rope_eager):
        y, none = version(q, None, cos, sin, 0, False, layout)
        assert none is None
        assert_close(y, rope_eager(q, k, cos, sin, 0, False, layout)[0])
        assert torch.autograd.grad(y.sum(), q)[0].isfinite().all()
    copy = q.detach().clone()
    assert module.rope_triton_(copy, None, cos, sin, 0, False, layout)[0] is copy
    assert_close(copy, y)


def test_compiled_with_positions(module):
    torch.compiler.reset()
    sys.modules.setdefault(module.__name__, module)  # where the compiler looks for it
    q, k, cos, sin = tensors((2, 9, 4, 2, 16, 16), positions=30)
    places = torch.randint(30, (2, 9), device=q.device)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def call(q, k, places):
        both = module.rope_triton(q * 1, k * 1, cos, sin, positions=places)
        return *both, module.rope_triton(q * 1, None, *hugging_face_tables(9, 16))[0]

    got, want = call(q, k, places), rope_eager(q, k, cos, sin, positions=places)
    assert_close(got[:2], want)
    assert_close(torch.autograd.grad(got[0].sum(), q), torch.autograd.grad(want[0].sum(), q))
    example = (q, k, cos, sin, 0, False, "bshd", places)
    torch.library.opcheck(module.rope_op, example)


def test_takes_a_slice_of_the_tables_of_hugging_face(module):
    """cos[0, :, : D / 2] of a (1, S, D) table: rows with a gap behind them; and tables that are transposed."""
    q, k, *_ = tensors((2, 9, 4, 2, 16, 16))
    cos, sin = (t[0, :, :8] for t in hugging_face_tables(9, 16))
    assert not cos.is_contiguous()
    check(module.rope_triton, (q, k, cos, sin))
    check(module.rope_triton, (q, k, *(t.t().contiguous().t() for t in (cos, sin))))


def test_the_tables_of_a_partial_rotary_are_sliced_as_the_error_says(module):
    """Hugging Face's are (1, S, R), of two equal halves, R < D."""
    q, k, *_ = detached((2, 9, 4, 2, 16, 16))
    cos, sin = hugging_face_tables(9, 8)
    with pytest.raises(ValueError, match=r"pass cos\[0, :, : R // 2\], and sin alike"):
        module.rope_triton(q, k, cos, sin)
    got = module.rope_triton(q, k, cos[0, :, : 8 // 2], sin[0, :, : 8 // 2])
    rotated = apply_rotary_pos_emb(*(t[..., :8].transpose(1, 2) for t in (q, k)), cos, sin)
    want = [torch.cat((r.transpose(1, 2), t[..., 8:]), -1) for r, t in zip(rotated, (q, k))]
    assert_close(got, want)


def test_interleaved_is_a_product_of_complex_numbers(module):
    """As in the code that Llama came with: pairs are complex numbers, multiplied by e^(i·m·theta)."""
    for d in (2, 16, 80):
        q, k, cos, sin = detached((2, 9, 4, 2, d, d))
        turn = torch.complex(cos, sin)[:, None]
        for version in (module.rope_triton, module.rope_eager):
            for got, x in zip(version(q, k, cos, sin, interleaved=True), (q, k)):
                pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
                assert_close(got, torch.view_as_real(pairs * turn).flatten(-2))


def test_tables(module):
    cos, sin = module.rope_tables(20_000, 64)
    m, i = 19_999, 3
    angle = torch.tensor(m * 10000.0 ** (-2 * i / 64), dtype=torch.float64)
    assert cos.shape == sin.shape == (20_000, 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[m, i] == angle.cos().float()
    assert sin[m, i] == angle.sin().float()


def test_lengths_stay_and_scores_depend_on_the_difference_of_positions(module):
    q, k, cos, sin = detached((1, 1, 1, 1, 64, 64), positions=512)
    for version, interleaved in itertools.product(
        (module.rope_eager, module.rope_triton), (False, True)
    ):

        def turned(m, version=version, interleaved=interleaved):
            return version(q, k, cos, sin, m, interleaved)

        torch.testing.assert_close(turned(400)[0].norm(), q.norm())
        scores = [(turned(m + 7)[0] * turned(m)[1]).sum() for m in (0, 1, 100, 500)]
        torch.testing.assert_close(torch.stack(scores), scores[0].expand(4), rtol=1e-4, atol=1e-4)
        other = (turned(8)[0] * turned(0)[1]).sum()
        assert (other - scores[0]).abs() > 1e-2, "it depends on nothing"


# --- numbers and gradients -----------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_once(module, dtype, interleaved, layout):
    """Stricter than twice eager's error: eager itself rounds cos and sin to bfloat16."""
    how = {"position_offset": 9_000, "interleaved": interleaved, "layout": layout}
    q, k, cos, sin = tensors(SMALL, dtype, layout, positions=10_000)
    dys = [torch.randn_like(t) for t in (q, k)]
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    want = rope_eager(*exact, cos.double(), sin.double(), **how)
    want_grads = torch.autograd.grad(want, exact, [dy.double() for dy in dys])
    for version in (module.rope_triton, registry.on_a_copy(module.rope_triton_, 2)):
        got = version(q, k, cos, sin, **how)
        for a, b in zip((*got, *torch.autograd.grad(got, (q, k), dys)), (*want, *want_grads)):
            allowed = 0.51 * torch.finfo(dtype).eps * b.abs() + 5e-7 * b.abs().max()
            assert ((a.double() - b).abs() <= allowed).all(), "rounded on the way"


@forms
def test_the_way_back_gives_the_input(module, interleaved, layout):
    """A rotation by -angle undoes one by angle: gradients of outputs are the inputs, columns from R on too."""
    how = {"interleaved": interleaved, "layout": layout}
    q, k, cos, sin = tensors(layout=layout)
    rotated = module.rope_triton(q, k, cos, sin, **how)
    back = torch.autograd.grad(rotated, (q, k), [t.detach() for t in rotated])
    torch.testing.assert_close(back, (q.detach(), k.detach()), rtol=1e-6, atol=1e-6)
    again = module.rope_triton(*(t.detach() for t in rotated), cos, -sin, **how)
    assert all(map(torch.equal, back, again)), "backward is forward with -sin"


@forms
def test_a_part_rotated_from_a_later_position(module, interleaved, layout):
    """Heads, columns and tokens that fill no tile; of several sequences."""
    how = {"interleaved": interleaved, "layout": layout}
    for case, dtype in [((1, 9, 12, 5, 24, 10), torch.bfloat16), (SMALL, torch.float32)]:
        inputs = tensors(case, dtype, layout, positions=14)
        check(module.rope_triton, inputs, position_offset=3, **how)


def test_no_heads_and_a_part_rotated(module):
    for n_q_heads, n_k_heads in ((0, 2), (2, 0), (0, 0)):
        check(module.rope_triton, tensors((2, 3, n_q_heads, n_k_heads, 8, 4)))


def test_one_result_unused(module):
    q, k, cos, sin = tensors()
    for n in (0, 1):
        y = module.rope_triton(q, k, cos, sin)[n]
        got = torch.autograd.grad(y.square().sum(), (q, k))
        assert_close(got[n], 2 * (q, k)[n].detach())
        assert not got[1 - n].any()


def test_tables_changed_before_the_backward_pass_are_noticed(module):
    q, k, cos, sin = tensors()
    q, k = module.rope_triton(q, k, cos, sin)
    cos.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


def test_gradient_through_a_packed_projection(module):
    """Two views of one tensor with a gradient of its own: they meet again in it."""
    qkv = torch.randn(2, 6, 8, 16, device=machine.device())
    tables = rope_tables(6, 16, device=qkv.device)
    grads = []
    for version in (module.rope_triton, rope_eager):
        leaf = qkv.clone().requires_grad_()
        q, k, v = leaf.split([4, 2, 2], dim=2)
        q, k = version(q, k, *tables)
        (q.square().sum() * 0.5 + (k * 3).sum() + v.sum()).backward()
        grads.append(leaf.grad)
    assert_close(*grads)


# --- in place ------------------------------------------------------------------------------------------------


@forms
def test_in_place_has_the_bits_of_out_of_place(module, interleaved, layout):
    """And leaves v alone in a packed projection; autograd hears of it."""
    how = {"interleaved": interleaved, "layout": layout}
    q, k, v = packed(layout)
    tables = rope_tables(6, 12, device=q.device)
    want, rest, versions = (
        module.rope_triton(q, k, *tables, **how),
        v.clone(),
        (q._version, k._version),
    )
    got = module.rope_triton_(q, k, *tables, **how)
    for a, b, t in zip(got, want, (q, k)):
        assert a.data_ptr() == t.data_ptr()
        assert torch.equal(t, b)
    assert torch.equal(v, rest), "v was written"
    assert q._version > versions[0]
    assert k._version > versions[1]


def test_in_place_autograd_goes_through_what_is_no_leaf(module):
    q, k, cos, sin = tensors()
    again = [t.detach().requires_grad_() for t in (q, k)]
    doubled = [q * 2, k.square()]
    result = module.rope_triton_(*doubled, cos, sin)
    sum((t**3).sum() for t in doubled).backward()  # doubled now *are* the results
    assert all(a is b for a, b in zip(result, doubled))
    rotated = rope_eager(again[0] * 2, again[1].square(), cos, sin)
    sum((t**3).sum() for t in rotated).backward()
    for a, b in zip((q, k), again):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_in_place_a_tensor_saved_before_is_noticed(module):
    """exp saves its result for its backward pass: written over, autograd has to say so."""
    for n in (0, 1):
        q, k, cos, sin = tensors()
        pair = [t.exp() if i == n else t * 1 for i, t in enumerate((q, k))]
        rotated = module.rope_triton_(*pair, cos, sin)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            rotated[n].sum().backward()


def test_in_place_a_result_changed_afterwards_is_no_mistake(module):
    """The backward pass needs cos and sin alone: what happens to q and k is nothing to it."""
    q, k, cos, sin = tensors()
    a, b = module.rope_triton_(q * 1, k * 1, cos, sin)
    a.mul_(2)
    (a.sum() + b.sum()).backward()
    again = [t.detach().requires_grad_() for t in (q, k)]
    a, b = rope_eager(*again, cos, sin)
    (2 * a.sum() + b.sum()).backward()
    assert_close((q.grad, k.grad), (again[0].grad, again[1].grad))


def test_in_place_refuses_what_must_not_be_written(module):
    q, k, cos, sin = detached()
    leaf = q.clone().requires_grad_()
    flat, gaps = torch.randn(10_000, device=q.device), torch.randn(2, 7, 4, 32, device=q.device)
    refused = [
        (q[:, :, :1].expand(q.shape), k, "memory of its own"),
        (gaps[..., ::2], k, "side in the last dimension"),
        (leaf, k, "is a leaf"),
        (k, leaf, "is a leaf"),
        ((leaf * 1)[:], k, "is a view"),
        (q, q, "share memory"),
        (flat.as_strided(q.shape, (448, 64, 8, 1)), k, "memory of its own"),
        (flat.as_strided(q.shape, (448, 64, 15, 1)), k, "memory of its own"),
    ]
    for bad_q, bad_k, message in refused:
        before = [t.detach().clone() for t in (bad_q, bad_k)]
        with pytest.raises(ValueError, match=f"rope_triton_: .*{message}"):
            module.rope_triton_(bad_q, bad_k, cos, sin)
        assert all(map(torch.equal, before, (bad_q, bad_k))), "refused, and written all the same"
    with torch.no_grad():
        want = rope_eager(leaf, k, cos, sin)[0]
        module.rope_triton_(leaf, k, cos, sin)  # as torch: under no_grad a leaf may be written
    assert_close(leaf.detach(), want)


@pytest.mark.parametrize(("layout", "other"), [("bshd", "bhsd"), ("bhsd", "bshd")])
def test_heads_taken_for_positions_are_noticed(module, layout, other):
    """Hugging Face's q is (B, H, S, D): with as many heads in k it fits the default layout."""
    q, k, cos, sin = tensors((2, 5, 8, 8, 16, 16), layout=other)
    for version in (module.rope_triton, module.rope_triton_):
        with pytest.raises(
            ValueError, match=rf"cos has 5 rows.*8 positions and 5 heads; pass layout='{other}'"
        ):
            version(q.detach(), k.detach(), cos, sin, layout=layout)
        version(q.detach(), k.detach(), cos, sin, layout=other)
    longer = tensors((2, 5, 8, 8, 16, 16), layout=other, positions=20)
    module.rope_triton(*longer, layout=layout)  # this may be meant


@pytest.mark.parametrize(
    ("q_heads", "k_heads", "shared"),
    [
        ((0, 4), (4, 6), False),
        ((0, 4), (3, 5), True),
        ((4, 8), (2, 4), False),
        ((2, 6), (0, 3), True),
        ((0, 8, 2), (1, 8, 2), False),
        ((0, 8, 2), (2, 3), True),
        ((0, 6), (6, 7), False),
    ],
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_in_place_sees_which_heads_are_shared(module, layout, q_heads, k_heads, shared):
    x = torch.randn(2, 7, 8, 16, device=machine.device())
    for wide in (x, torch.randn(2, 9, 8, 16, device=x.device)[:, :7]):  # a gap behind each sequence
        wide = wide if layout == "bshd" else wide.transpose(1, 2).contiguous().transpose(1, 2)
        q, k = wide[:, :, slice(*q_heads)], wide[:, :, slice(*k_heads)]
        q, k = (q, k) if layout == "bshd" else (q.transpose(1, 2), k.transpose(1, 2))
        tables = rope_tables(7, 16, device=x.device)
        want, before = rope_eager(q, k, *tables, layout=layout), wide.clone()
        if not shared:
            module.rope_triton_(q, k, *tables, layout=layout)
            assert_close((q, k), want)
            continue
        with pytest.raises(ValueError, match="share memory"):
            module.rope_triton_(q, k, *tables, layout=layout)
        assert torch.equal(wide, before), "refused, and written all the same"


def test_in_place_heads_that_reach_into_the_next_batch(module):
    """In each batch q ends before k begins, but q's second head is k's first one of the next batch."""
    storage = torch.randn(100, device=machine.device())
    k = storage.as_strided((3, 1, 2, 2), (16, 16, 12, 1), 0)
    q = storage.as_strided((3, 1, 2, 2), (16, 16, 12, 1), 4)
    assert q[0, 0, 1].data_ptr() == k[1, 0, 0].data_ptr()
    with pytest.raises(ValueError, match="share memory"):
        module.rope_triton_(q, k, *rope_tables(1, 2, device=q.device))


def test_in_place_a_view_beside_what_needs_a_gradient_raises(module):
    """q is a view without a gradient, k has one: q's values get one too, through the op."""
    q, k, cos, sin = tensors()
    view = torch.cat([q, q]).detach()[:2]
    with pytest.raises((RuntimeError, ValueError), match="view"):
        module.rope_triton_(view, k * 1, cos, sin)


# --- torch.compile and torch.library -------------------------------------------------------------------------


def test_compiled_at_every_offset(module):
    """As decoding does, a token at a time."""
    torch.compiler.reset()
    compiled = torch.compile(module.rope_triton, fullgraph=True, backend="aot_eager")
    for offset in (0, 1, 2, 7):
        inputs = tensors((2, 1, 4, 2, 16, 12), layout="bhsd", positions=9)
        check(compiled, inputs, position_offset=offset, interleaved=True, layout="bhsd")


def test_compiled_in_place_writes_into_its_arguments(module):
    torch.compiler.reset()
    compiled = torch.compile(module.rope_triton_, fullgraph=True, backend="aot_eager")
    q, k, cos, sin = detached(positions=9)
    want = rope_eager(q, k, cos, sin, 2, True)
    for a, b, t in zip(compiled(q, k, cos, sin, 2, True), want, (q, k)):
        assert a.data_ptr() == t.data_ptr()
        assert_close(t, b)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_place_has_gradients(module, backend):
    """An op that changes its arguments cannot tell the compiler its gradient: silently, it would have none."""
    torch.compiler.reset()

    def run(q, k, cos, sin):
        a, b = q * 2, k.square()
        returned = module.rope_triton_(a, b, cos, sin)
        return (a**3).sum() + b.sin().sum() + (returned[0] * returned[1][:, :, :1]).sum()

    def definition(q, k, cos, sin):
        a, b = rope_eager(q * 2, k.square(), cos, sin)
        return (a**3).sum() + b.sin().sum() + (a * b[:, :, :1]).sum()

    got = tensors()
    want = [t.detach().requires_grad_(t.requires_grad) for t in got]
    torch.compile(run, fullgraph=True, backend=backend)(*got).backward()
    definition(*want).backward()
    for a, b in zip(got[:2], want[:2]):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@forms
def test_registered_ops_in_every_form(module, interleaved, layout):
    how = {"position_offset": 2, "interleaved": interleaved, "layout": layout}
    inputs = tensors(layout=layout, positions=9)
    check(module.rope_op, inputs, **how)
    q, k, cos, sin = (t.detach() for t in inputs)
    want = rope_eager(q, k, cos, sin, **how)
    assert module.rope_op_(q, k, cos, sin, **how) is None
    assert_close((q, k), want)


# --- traffic and machine code --------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traffic_in_place_and_out_of_place(module, dtype, interleaved, layout):
    q, k, cos, sin = detached((2, 32, 8, 2, 64, 64), dtype, layout)
    for version in (module.rope_triton, module.rope_triton_):
        traffic = count_traffic(functools.partial(version, q, k, cos, sin, 0, interleaved, layout))
        assert traffic.launches == 1
        assert traffic.bytes_moved == 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
        by = {name.rpartition(".")[2]: a for name, a in traffic.by_argument.items()}
        tables = ("cos_ptr", "sin_ptr")
        large = sum(a.loaded + a.stored for name, a in by.items() if name not in tables)
        assert large == 2 * (q.nbytes + k.nbytes), "something was read or written twice"
        assert by["cos_ptr"].loaded <= 2 * (8 + 2) * cos.nbytes  # at most once for each head


def test_traffic_of_a_part_that_is_not_rotated(module):
    """In place the columns from R on are not touched."""
    q, k, cos, sin = detached((2, 16, 8, 2, 64, 32))
    tables = cos.nbytes + sin.nbytes
    for version, share in ((module.rope_triton, 2), (module.rope_triton_, 1)):
        traffic = count_traffic(functools.partial(version, q, k, cos, sin))
        assert traffic.bytes_moved == share * (q.nbytes + k.nbytes) + tables


def test_autograd_saves_the_tables_alone(module):
    q, k, cos, sin = tensors()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module.rope_triton(q, k, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_sixteen_byte_accesses_and_no_spills(module, interleaved, back):
    q, k = (torch.empty(1, 64, h, 128, dtype=torch.bfloat16) for h in (32, 8))
    kernel, plan = module._rope_kernel, module._plan(8, 128, 2)
    strides = [*q.stride()[:3], *k.stride()[:3]]
    signature = signature_of(
        kernel, q, k, q, k, *rope_tables(64, 128), None, 64, 64, 0, 32, 8, *strides, *strides,
        R=128, D=128, BACK=back, INTERLEAVED=interleaved, COPY_REST=False, COMPUTE=tl.float32,
        BLOCK_T=plan.block_t, BLOCK_H=plan.block_h, BLOCK_R=64, BLOCK_REST=1,
    )  # fmt: skip
    compiled = compile_for(kernel, signature, arch=90, num_warps=2)
    memory = {op for op in instruction_mix(compiled) if op.startswith(("LDG.E", "STG.E"))}
    # 8 bytes a thread: cos and sin, of which a tile has few
    assert memory - {"LDG.E.64"} == {"LDG.E.128", "STG.E.128"}, memory
    assert compiled.spills == 0


# --- sizes past what 32 bits hold -----------------------------------------------------------------------------


def far_apart(dim):
    """(B, S, H, D) with sizes of 1 but for `dim`, along which elements are 2**30 apart: 4 GiB of addresses."""
    shape, strides = [1, 1, 1, 16], [16, 16, 16, 1]
    shape[dim], strides[dim] = 3, 2**30
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=machine.device())
    return storage.as_strided(shape, strides).copy_(torch.arange(-24, 24).view(shape) / 8)


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_two_to_the_31(module, dim, which):
    """Along batch, sequence and heads, of q and of k, in and out of place, and of their gradients."""
    far = far_apart(dim)
    near = torch.randn(*far.shape[:2], 2, 16, dtype=torch.float16, device=far.device)
    pair = (far, near) if which == "q" else (near, far)
    tables = rope_tables(far.shape[1], 16, device=far.device)
    leaves = [t.detach().requires_grad_() for t in pair]
    check(module.rope_triton, (*leaves, *tables), interleaved=bool(dim % 2))
    grads = []
    for version in (module.rope_triton, rope_eager):
        close = [t.detach().clone().requires_grad_() for t in pair]
        grads.append(torch.autograd.grad(version(*close, *tables), close, pair))
    assert_close(*grads, torch.float16)
    want = rope_eager(*pair, *tables)
    module.rope_triton_(*pair, *tables)
    assert_close(pair, want, torch.float16)


def test_tables_past_two_to_the_31(module):
    """Position 2**28 of tables with 8 columns; one tensor serves as both, and four pages of it are touched."""
    table = torch.empty(2**28 + 4, 8, dtype=torch.float32, device=machine.device())
    q, k, cos, _ = detached((1, 3, 2, 1, 16, 16))
    table[2**28 : 2**28 + 3] = cos
    assert_close(module.rope_triton(q, k, table, table, 2**28), rope_eager(q, k, cos, cos))


def test_more_than_65535_tokens(module):
    """Of one head and one pair: a grid of (heads, tokens) would not start on a GPU."""
    check(module.rope_triton, tensors((1, 70_000, 1, 1, 2, 2)))


@pytest.mark.gpu
def test_more_than_65535_programs(module):
    for case in [(1, 100_003, 8, 2, 128, 128), (70_001, 2, 2, 1, 16, 16)]:
        for version in (module.rope_triton, registry.on_a_copy(module.rope_triton_, 2)):
            check(version, tensors(case))


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_sizes_in_every_form(module, dtype, interleaved, layout):
    for case in [(2, 4099, 32, 8, 128, 128), (1, 1000, 7, 3, 80, 80), (4, 513, 40, 10, 96, 48)]:
        for version in (module.rope_triton, registry.on_a_copy(module.rope_triton_, 2)):
            inputs = tensors(case, dtype, layout)
            check(version, inputs, interleaved=interleaved, layout=layout)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(module):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    case = (3, 2**15, 192, 8, 128, 128)  # q alone: 2.4e9 elements
    q, k, cos, sin = detached(case, torch.bfloat16)
    last = slice(-2, None)
    want = rope_eager(q[-1:, last], k[-1:, last], cos, sin, 2**15 - 2)
    for a, b in zip(module.rope_triton(q, k, cos, sin), want):
        assert_close(a[-1:, last], b.to(a.dtype), torch.bfloat16)
    module.rope_triton_(q, k, cos, sin)
    for a, b in zip((q, k), want):
        assert_close(a[-1:, last], b.to(a.dtype), torch.bfloat16)


@pytest.mark.gpu
@forms
def test_another_length_or_offset_does_not_compile_again(module, interleaved, layout):
    def call(batch, seq, offset):
        inputs = tensors((batch, seq, 8, 2, 64, 64), layout=layout, positions=2000)
        ys = module.rope_triton(*inputs, offset, interleaved, layout)
        sum(y.square().sum() for y in ys).backward()

    call(3, 1000, 5)
    with count_compilations() as names:
        for case in [(3, 1001, 0), (5, 16, 7), (1, 1, 16)]:
            call(*case)
    assert not names, names


# --- bad input -----------------------------------------------------------------------------------------------


def test_tables_and_positions_are_refused_in_a_sentence(module):
    q, k, cos, sin = detached()
    good, places = (q, k, cos, sin, 0, False, "bshd"), torch.arange(7, device=q.device)
    wrong = {
        "a list": ((q, k, cos.tolist(), sin), TypeError, "cos must be a torch.Tensor"),
        "bfloat16 tables": ((q, k, cos.bfloat16(), sin.bfloat16()), TypeError, "must be float32"),
        "tables of two dtypes": ((q, k, cos, sin.double()), TypeError, "must be float32"),
        "tables of integers": ((q, k, cos.int(), sin.int()), TypeError, "must be float32"),
        "tables elsewhere": ((q, k, cos, sin.to("meta")), ValueError, "one device"),
        "three dimensions": ((q[0], k[0], cos, sin), ValueError, "B, S, Hq, D"),
        "another batch": ((q, k[:1], cos, sin), ValueError, "B, S, Hk, D"),
        "another length": ((q, k[:, :3], cos, sin), ValueError, "B, S, Hk, D"),
        "another width": ((q, k[..., :8], cos, sin), ValueError, "B, S, Hk, D"),
        "another layout": ((q, k, cos, sin, 0, False, "bhsd"), ValueError, "B, Hk, S, D"),
        "tables wider than a head": (
            (q, k, *rope_tables(7, 18, device=q.device)),
            ValueError,
            "at most",
        ),
        "tables with a batch": ((q, k, cos[None], sin[None]), ValueError, "positions, R / 2"),
        "tables of two shapes": ((q, k, cos, sin[:, :3]), ValueError, "positions, R / 2"),
        "tables without columns": ((q, k, cos[:, :0], sin[:, :0]), ValueError, "positions, R / 2"),
        "short tables": ((q, k, cos[:5], sin[:5]), ValueError, "longer tables"),
        "too far": ((q, k, cos, sin, 1), ValueError, "positions 1 to 7 .*longer tables"),
        "before the start": ((q, k, cos, sin, -1), ValueError, "positions -1 to"),
        "an offset in a tensor": ((q, k, cos, sin, torch.tensor(0)), TypeError, "must be an int"),
        "a fraction": ((q, k, cos, sin, 0.0), TypeError, "must be an int"),
        "a bool": ((q[:, :6], k[:, :6], cos, sin, True), TypeError, "must be an int"),
        "no layout": ((q, k, cos, sin, 0, False, "sbhd"), ValueError, "'bshd', 'bhsd'"),
        "positions in a list": ((*good, [0] * 7), TypeError, "positions must be a torch.Tensor"),
        "positions of a fraction": ((*good, places.float()), TypeError, "int64 or int32"),
        "positions of another shape": ((*good, places[:5]), ValueError, r"\(S,\) or \(B, S\) with"),
        "positions elsewhere": ((*good, places.to("meta")), ValueError, "one device"),
        "positions and an offset": ((*good[:4], 1, *good[5:], places), ValueError, "not both"),
        "a table of another length": (
            (q, k, *(t[:1] for t in hugging_face_tables(6, 16))),
            ValueError,
            r"or \(B, S, D\)|longer tables",
        ),
        "trained tables": ((q, k, cos.clone().requires_grad_(), sin), ValueError, "no gradient"),
    }
    for version in (module.rope_triton, module.rope_triton_):
        for what, (bad, kind, message) in wrong.items():
            with pytest.raises(kind, match=f"{version.__name__}: .*{message}") as caught:
                version(*bad)
            assert len(str(caught.value)) > 40, what
    for op in (module.rope_op, module.rope_op_):
        with pytest.raises(ValueError, match="longer tables"):
            op(q, k, cos[:3], sin[:3], 0, False, "bshd")
