"""What is particular to attention: PyTorch's samples, padding, what is read, far rows, its own sentences."""

import fractions
import functools
import re
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import gluon
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.attention import (
    attention_eager,
    attention_op,
    attention_triton,
    attention_varlen_eager,
    attention_varlen_triton,
)
from lib.tests.ops import cases
from lib.tests.ops.battery import host_of

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.flop_counter import FlopCounterMode
from triton.tools.tensor_descriptor import TensorDescriptor

OP = registry.find("attention")
SMALL = registry._SMALL


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


def gradients(o, tensors, do=None):
    return torch.autograd.grad(o, tensors, torch.ones_like(o) if do is None else do)


# --- what PyTorch's is ---------------------------------------------------------------------------------------


def _samples():
    """PyTorch's samples of scaled_dot_product_attention that ask for no mask tensor and no dropout."""
    (info,) = (i for i in op_db if i.name == "nn.functional.scaled_dot_product_attention")
    for sample in info.sample_inputs(machine.device(), torch.float32, requires_grad=True):
        q, (k, v), how = sample.input, sample.args, dict(sample.kwargs)
        plain = how.pop("attn_mask", None) is None and not how.pop("dropout_p", 0.0)
        if plain and q.dim() == 4 and k.shape == v.shape and k.shape[-1] == q.shape[-1]:
            yield q, k, v, how


def test_samples_of_pytorch():
    samples = [*_samples()]
    assert len(samples) >= 4 and any(how.get("is_causal") for *_, how in samples)
    for q, k, v, how in samples:
        theirs = functools.partial(F.scaled_dot_product_attention, **how)
        how.pop("enable_gqa", None)
        ours = functools.partial(attention_triton, **how)
        # inputs of up to 9: a score of 100 that is rounded moves its weight by 1e-5
        check_against_float64(ours, theirs, q, k, v, slack=5e-6, name=f"ours {how}")


@pytest.mark.parametrize("sizes", [(19, 19), (7, 21), (21, 7)])
def test_causal_is_pytorchs_where_lengths_differ(sizes):
    q, k, v = inputs((2, 4, 2, *sizes, 16))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for function in (attention_eager, attention_triton):
        torch.testing.assert_close(function(q, k, v, is_causal=True), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(7, 21), (1, 21), (21, 7), (5, 5)])
def test_causal_from_the_bottom_right_is_pytorchs_mask(sizes):
    """The last query sees the last key, and where there are fewer keys the first queries see none."""
    q, k, v = inputs((2, 4, 2, *sizes, 16))
    seen = torch.ones(sizes, dtype=torch.bool, device=q.device).tril(sizes[1] - sizes[0])
    blind = ~seen.any(-1)
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen | blind[:, None], enable_gqa=True
    ).masked_fill(blind[:, None], 0.0)
    for function in (attention_eager, attention_triton):
        o = function(q, k, v, is_causal=True, align="bottom_right")
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
        assert not o[:, :, blind].any()


# --- masks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(37, 40), (40, 17), (5, 70)])
@pytest.mark.parametrize(
    "how",
    [
        {"window": (0, 0)},
        {"window": (20, -1)},
        {"window": (-1, 3)},
        {"window": (33, 18)},
        {"window": (18, 33), "is_causal": True},
        {"window": (18, 3), "align": "bottom_right"},
        {"window": (9, -1), "is_causal": True, "align": "bottom_right"},
    ],
    ids=str,
)
def test_windows_over_several_tiles(module, how, sizes):
    """Tiles before, inside and behind the window; with parts of which some see nothing."""
    q, k, v = (t.double().detach().requires_grad_() for t in inputs((1, 2, 1, *sizes, 16)))
    want = attention_eager(q, k, v, **how)
    do = torch.randn_like(want)
    expected = [want, *gradients(want, (q, k, v), do)]
    for plan in (module.Plan(*SMALL), module.Plan(*SMALL)._replace(packed=True, n_parts=3)):
        o = module.attention_triton(q, k, v, plan=plan, **how)
        torch.testing.assert_close([o, *gradients(o, (q, k, v), do)], expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("changes", [{}, {"n_parts": 3}, {"tma": True}], ids=str)
def test_padding_is_not_read(module, changes, dtype):
    """NaN behind `lengths` changes nothing, and has gradients of 0. Lengths may lie apart in memory."""
    q, k, v = inputs((4, 2, 2, 21, 40, 16), torch.bfloat16)
    below = 3 - 2**32 if dtype == torch.int64 else -5  # in 32 bits it would be 3
    pairs = [[40, 0], [17, 0], [0, 0], [below, 0]]
    lengths = torch.tensor(pairs, dtype=dtype, device=machine.device())[:, 0]
    padding = torch.arange(40, device=q.device)[:, None] >= lengths[:, None, None, None]
    dirty = [t.detach().masked_fill(padding, float("nan")).requires_grad_() for t in (k, v)]
    plan = module.Plan(*SMALL)._replace(**changes)
    runs = []
    for tensors in ((q, k, v), (q, *dirty)):
        o = module.attention_triton(*tensors, lengths, plan=plan)
        runs.append([o, *gradients(o, tensors)])
    for clean, got in zip(*runs):
        assert torch.equal(clean, got)
    o, dq, dk, dv = runs[1]
    assert not o[2:].any() and not dq[2:].any()
    assert not dk.masked_select(padding).any() and not dv.masked_select(padding).any()


def test_padding_is_not_loaded(module):
    """Of 40 and 17 keys, in no kernel."""
    q, k, v = inputs((4, 2, 2, 21, 40, 16), torch.bfloat16)
    lengths = torch.tensor([40, 17, 0, -5], device=q.device)
    results = []

    def both():
        results.append(module.attention_triton(q, k, v, lengths, plan=module.Plan(*SMALL)))
        results[0].sum().backward()

    loaded = count_traffic(both).by_argument
    for kernel in ("fwd", "dq", "dkdv"):
        for name in ("k_ptr", "v_ptr"):
            assert loaded[f"_attention_{kernel}_kernel.{name}"].loaded_distinct == 57 * 2 * 16 * 2


@pytest.mark.parametrize("changes", [{}, {"n_parts": 2}], ids=str)
def test_a_query_that_sees_nothing_takes_no_part(module, changes):
    """Nor has its incoming gradient, be it inf. A row of scores -inf is NaN all the same, as in softmax."""
    q, k, v = inputs((1, 1, 1, 40, 17, 16))
    how = {"window": (3, -1), "plan": module.Plan(*SMALL)._replace(**changes)}
    o = module.attention_triton(q, k, v, **how)
    assert not o[:, :, 20:].any() and o[:, :, :20].all()
    do = torch.ones_like(o)
    do[:, :, 20:] = float("inf")
    dq, dk, _ = gradients(o, (q, k, v), do)  # dv: 0·inf, as in the definition
    assert dk.isfinite().all() and dq.isfinite().all() and not dq[:, :, 20:].any()
    with torch.no_grad():
        k.zero_()
        k[..., 0], q[..., 0] = 1.0, -float("inf")
        o = module.attention_triton(q, k, v, **how)
        assert o[:, :, :20].isnan().all() and not o[:, :, 20:].any()


@pytest.mark.parametrize(
    ("changes", "how"),
    [({}, {"is_causal": True}), ({"n_parts": 2}, {"window": (9, 2), "align": "bottom_right"})],
    ids=str,
)
def test_padding_on_the_left_is_not_read(module, changes, how):
    """lengths (B, 2): from the first real key to the end; NaN outside changes nothing, its gradients are 0."""
    q, k, v = inputs((4, 2, 1, 33, 40, 16), torch.bfloat16)
    pairs = torch.tensor([[0, 40], [17, 40], [35, 33], [-3, 99]], device=q.device)
    places = torch.arange(40, device=q.device)
    real = (places >= pairs[:, :1]) & (places < pairs[:, 1:])
    padding = ~real[:, None, :, None]
    dirty = [t.detach().masked_fill(padding, float("nan")).requires_grad_() for t in (k, v)]
    plan, runs = module.Plan(*SMALL)._replace(**changes), []
    for tensors in ((q, k, v), (q, *dirty)):
        o = module.attention_triton(*tensors, pairs, plan=plan, **how)
        runs.append([o, *gradients(o, tensors)])
    assert all(map(torch.equal, *runs))
    assert not any(g.masked_select(padding).any() for g in runs[1][2:])
    assert not runs[1][0][2].any()  # no real key
    ours = functools.partial(module.attention_triton, plan=plan, **how)
    check_against_float64(ours, functools.partial(OP.eager, **how), q, k, v, pairs, slack=OP.slack)


# --- packed sequences ----------------------------------------------------------------------------------------


def packed_inputs(of_q, of_k=None, dtype=torch.float32, extra=0, heads=(4, 2), dim=20):
    """q (T, H, D), k and v, and cu_seqlens of queries and keys; `extra` rows behind the last sequence."""
    generator = torch.Generator(machine.device()).manual_seed(0)
    cu = [
        F.pad(torch.tensor(n, device=machine.device(), dtype=torch.int32).cumsum(0), (1, 0)).int()
        for n in (of_q, of_k or of_q)
    ]
    totals = [sum(n) + extra for n in (of_q, of_k or of_q)]
    sizes = (totals[0], heads[0], dim), (totals[1], heads[1], dim), (totals[1], heads[1], dim)
    how = {"dtype": dtype, "device": machine.device(), "generator": generator}
    tensors = [torch.randn(size, **how).requires_grad_() for size in sizes]
    return tensors, (cu[0], cu[1] if of_k else None)


SEQUENCES = [([0, 37, 0, 3, 18, 0], None), ([5, 0, 33, 20], [40, 7, 0, 21])]
MASKS = [  # in Triton's interpreter a scale has 24 bits
    {"scale": 0.25},
    {"scale": 0.25, "is_causal": True},
    {"scale": -0.5, "window": (9, 3)},
    {"scale": 0.25, "window": (7, -1), "is_causal": True, "align": "top_left"},
]


@pytest.mark.parametrize("lengths", SEQUENCES, ids=str)
@pytest.mark.parametrize("how", MASKS, ids=str)
def test_packed_sequences_are_those_one_by_one(module, how, lengths):
    """Empty ones too, in tiles of one head and of all heads of a group."""
    (q, k, v), cu = packed_inputs(*lengths, dtype=torch.float64, extra=3)
    want = attention_varlen_eager(q, k, v, *cu, **how)
    do = torch.randn_like(want)
    expected = [want, *gradients(want, (q, k, v), do)]
    for changes in ({}, {"packed": True, "n_parts": 3}):
        plan = module.Plan(*SMALL)._replace(**changes)
        o = module.attention_varlen_triton(q, k, v, *cu, plan=plan, **how)
        torch.testing.assert_close([o, *gradients(o, (q, k, v), do)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_against_float64(module, dtype):
    plan = module.Plan(*SMALL)._replace(tma=True)  # in bfloat16 of 60 rows
    for lengths, dim, extra in ((SEQUENCES[0], 24, 2), (SEQUENCES[1], 3, 0)):
        tensors, cu = packed_inputs(*lengths, dtype=dtype, dim=dim, extra=extra)
        ours = functools.partial(module.attention_varlen_triton, is_causal=True, plan=plan)
        eager = functools.partial(attention_varlen_eager, is_causal=True)
        granted = 4 * torch.finfo(dtype).eps  # eager's largest error of so few numbers is luck
        check_against_float64(ours, eager, *tensors, *cu, slack=granted)


@pytest.mark.parametrize("changes", [{}, {"tma": True}], ids=str)
def test_packed_sequences_do_not_see_each_other(module, changes):
    """NaN and inf of one reach no other, forward or backward, nor what lies behind the last."""
    (q, k, v), (cu, _) = packed_inputs([21, 5, 16, 30], dtype=torch.bfloat16, extra=8, dim=16)
    plan, results = module.Plan(*SMALL)._replace(**changes), []
    spoilt = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    spoilt[21:26] = spoilt[72:] = True
    do = torch.ones_like(q)
    for value in (1.0, float("nan")):
        made = [
            t.detach().masked_fill(spoilt[:, None, None], value).requires_grad_() for t in (q, k, v)
        ]
        o = module.attention_varlen_triton(*made, cu, is_causal=True, plan=plan)
        results.append([o, *gradients(o, made, do.masked_fill(spoilt[:, None, None], value))])
    for clean, got in zip(*results):
        assert torch.equal(clean[~spoilt], got[~spoilt])
        assert not got[72:].any()


def test_packed_layouts(module):
    """(T, H, D) in one projection, (1, H, T, D), cu_seqlens of both in one tensor, of int64, with gaps."""
    (q, k, v), cu = packed_inputs([5, 0, 30], [9, 4, 8], heads=(2, 2), dim=16)
    plan, how = module.Plan(*SMALL), {"is_causal": True}
    want = module.attention_varlen_triton(q, k, v, *cu, plan=plan, **how)
    both = torch.stack([torch.stack(cu), torch.stack(cu)], -1).long()[..., 0]
    wide = [torch.cat([t, t], -1)[..., :16] for t in (q, k, v)]
    assert torch.equal(module.attention_varlen_triton(*wide, both, plan=plan, **how), want)
    whole = [t.transpose(0, 1)[None] for t in (q, k, v)]
    o = module.attention_varlen_triton(*whole, *cu, plan=plan, **how)
    assert o.shape == whole[0].shape and torch.equal(o[0].transpose(0, 1), want)
    # the longest of all tell how, and not what
    for longest in ((1, 1), (30, 9)):
        o = module.attention_varlen_triton(q, k, v, *cu, *longest, **how)
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [[0, 50, 20, 99, -7], [9, 9, 3, 40, 41], [0, 2**31 + 3]], ids=str)
def test_wrong_cu_seqlens_stay_in_memory(module, ends):
    """They cannot be refused without waiting for the GPU. The interpreter sees each address."""
    (q, k, v), _ = packed_inputs([41])
    o = module.attention_varlen_triton(
        q, k, v, torch.tensor(ends, device=q.device), plan=module.Plan(*SMALL)
    )
    o.sum().backward()


def test_a_long_sequence_beside_empty_ones_is_one_launch(module):
    """Of few programs: tiles of 64 queries or keys, and at most one more a sequence and head."""
    grids = {}
    n, dim = 16384, 16
    (q, k, v), (cu, _) = packed_inputs([0] * 99 + [n] + [0] * 100, heads=(2, 1), dim=dim)
    with mock.patch.object(
        host_of(module), "run", lambda kernel, grid, *_, **__: grids.update({kernel: grid})
    ):
        module.attention_varlen_triton(q, k, v, cu, max_seqlen_q=n).sum().backward()
    programs = {kernel.fn.__name__: grid[0] for kernel, grid in grids.items()}
    plan = module._plan(q.dtype, 1, 2, 1, n, n, dim, q.device, True)
    assert programs["_attention_fwd_kernel"] == 2 * (n // plan.forward.m + 201)
    assert programs["_attention_dq_kernel"] == 2 * (n // plan.dq.m + 201)
    assert programs["_attention_dkdv_kernel"] == n // plan.dkdv.n + 201
    assert len(grids) == 4 and all(grid[1:] in ((), (1,)) for grid in grids.values())


def test_packed_tiles_that_nothing_sees_are_not_read(module):
    """Causal sequences of 2 and 3 tiles: 1 + 2 and 1 + 2 + 3 tiles of keys, though they begin in mid-tile."""
    (q, k, v), (cu, _) = packed_inputs([5, 32, 0, 48], heads=(1, 1), dim=16)
    plan = module.Plan(*SMALL)
    o = module.attention_varlen_triton(q, k, v, cu, is_causal=True, plan=plan)
    forward = count_traffic(
        lambda: module.attention_varlen_triton(q, k, v, cu, is_causal=True, plan=plan)
    )
    backward = count_traffic(lambda: o.sum().backward())
    assert forward.launches == 1 and backward.launches == 3
    seen = (5 + (1 + 2 + 1 + 2 + 3) * 16) * 16 * 4
    assert forward.by_argument["_attention_fwd_kernel.k_ptr"].loaded == seen
    assert backward.by_argument["_attention_dq_kernel.v_ptr"].loaded == seen
    assert backward.by_argument["_attention_dkdv_kernel.q_ptr"].loaded == seen


def test_packed_in_a_graph_is_the_op():
    """torch.compile, opcheck, autocast's dtype, and the counter of FLOPs, to which no lengths are known."""
    tensors, cu = packed_inputs([5, 0, 12], [9, 4, 8], dim=16)

    def call(*given):
        return attention_varlen_triton(*given, 12, 9, is_causal=True) * 2

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = functools.partial(attention_varlen_eager, is_causal=True)
    check_against_float64(graph, lambda *t: eager(*t) * 2, *tensors, *cu, slack=1e-5)
    four = [t.detach().transpose(0, 1)[None].requires_grad_() for t in tensors]
    how = {"is_causal": True, "align": "bottom_right", "longest": [12, 9]}
    torch.library.opcheck(attention_op, (*four, torch.stack(cu)), how)
    with FlopCounterMode(display=False) as forward:
        o = call(*tensors, *cu)
    with FlopCounterMode(display=False) as backward:
        o.sum().backward()
    assert forward.get_total_flops() == 4 * tensors[0].numel() * 9
    assert backward.get_total_flops() == 10 * tensors[0].numel() * 9
    with torch.autocast(machine.device().type, torch.bfloat16):
        assert call(*tensors, *cu).dtype == torch.bfloat16


@triton.jit
def _shift_kernel(top_ptr, shift_ptr, factor_ptr, factor: tl.float64, n, SCALED: tl.constexpr):
    i = tl.arange(0, 1024)
    top = tl.load(top_ptr + i, mask=i < n)
    shift, factor = SCALED(top, tl.cast(factor, top.dtype))
    tl.store(shift_ptr + i, shift, mask=i < n)
    tl.store(factor_ptr + i, factor, mask=i < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_of_huge_scores(module, dtype):
    """x·factor - top·factor in one rounding, as a GPU has it: 2 to the power of it is no larger than 2**8."""
    top = 10.0 ** torch.arange(-5, 30, 0.05, dtype=torch.float64)
    top = torch.cat([top, -top])[:1024].to(machine.device(), dtype)
    shift, factor, want = torch.empty_like(top), torch.empty_like(top), 0.1803368777036667
    _shift_kernel[(1,)](top, shift, factor, want, len(top), SCALED=module._shift_of)
    for x, s, f in zip(top.tolist(), shift.tolist(), factor.tolist()):
        assert abs(fractions.Fraction(x) * fractions.Fraction(f) - fractions.Fraction(s)) <= 8
        digits = 24 if dtype == torch.float32 else 53
        if abs(x) < 2.0 ** (digits + 2):  # scores of which neighbours still differ in weight
            assert f == want


# --- what is read, and where it lies -------------------------------------------------------------------------


def test_decoding_reads_keys_and_values_once(module):
    """The queries of all heads of a group lie in one tile, and the keys are cut in parts."""
    q, k, v = (t.detach() for t in inputs((1, 8, 1, 2, 70, 16), torch.bfloat16))
    plan = module._plan(q.dtype, 1, 8, 1, 2, 8192, 16, q.device)
    assert plan.packed and plan.n_parts > 1 and plan.forward.m == 16
    plan = plan._replace(n_parts=3, forward=plan.forward._replace(n=16))
    traffic = count_traffic(lambda: module.attention_triton(q, k, v, plan=plan))
    assert traffic.launches == 2
    for name, t in (("q_ptr", q.nbytes * 3), ("k_ptr", k.nbytes), ("v_ptr", v.nbytes)):
        assert traffic.by_argument[f"_attention_fwd_kernel.{name}"].loaded == t


def test_tiles_that_nothing_sees_are_not_read(module):
    """Causal, with 5 tiles of keys to a tile of queries: 1 + 2 + 3 + 4 + 5 of 25."""
    q, k, v = inputs((1, 1, 1, 80, 80, 16))
    plan = module.Plan(*SMALL)
    o = module.attention_triton(q, k, v, is_causal=True, plan=plan)
    forward = count_traffic(lambda: module.attention_triton(q, k, v, is_causal=True, plan=plan))
    assert forward.by_argument["_attention_fwd_kernel.k_ptr"].loaded == k.nbytes * 15 // 5
    backward = count_traffic(lambda: o.sum().backward())
    assert backward.by_argument["_attention_dq_kernel.v_ptr"].loaded == v.nbytes * 15 // 5
    assert backward.by_argument["_attention_dkdv_kernel.q_ptr"].loaded == q.nbytes * 15 // 5
    assert backward.launches == 3


def test_tma_where_it_can_read(module):
    """Rows on 16-byte boundaries that lie apart, 16 bits; the rest by pointers. The battery has the values."""
    k = inputs((2, 2, 2, 16, 40, 16), torch.bfloat16)[1].detach()
    lse = torch.zeros(2, 2, 40, device=k.device)
    assert module._tma_fits(k, k.transpose(1, 2), lse)
    odd = torch.zeros(2, 2, 40, 17, dtype=k.dtype, device=k.device)[..., :16]
    for other in (odd, k[:, :1].expand_as(k), k.float(), k[:0], lse[..., :39].clone()):
        assert not module._tma_fits(k, other) and not module._tma_fits(other, k)


def test_the_memory_layout_is_that_of_q(module):
    """(B, S, H, D), as layers have it, goes in and comes out by .transpose(1, 2), gradients too."""
    made = inputs((2, 4, 2, 19, 21, 16))
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in made)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    o = module.attention_triton(q, k, v)
    assert o.stride() == q.stride()
    for t, g in zip((q, k, v), gradients(o, (q, k, v))):
        assert g.stride() == t.stride()
    check_against_float64(module.attention_triton, OP.eager, q, k, v)


@pytest.mark.parametrize("changes", [{}, {"packed": True, "n_parts": 2}], ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 3, 1, 1, 16), (1, 1, 1, 3, 3, 16)], ids=["heads", "rows"])
def test_heads_and_rows_may_lie_2_gib_apart(module, shape, changes):
    """The battery moves samples apart."""
    made, plan = inputs(shape, torch.float16), module.Plan(*SMALL)._replace(**changes)
    for k in range(3):
        given = [*made[:k], cases.spaced(made[k].detach()).requires_grad_(), *made[k + 1 :]]
        o, want = module.attention_triton(*given, plan=plan), OP.eager(*made)
        torch.testing.assert_close(o, want, rtol=1e-2, atol=1e-2)
        do = torch.randn_like(want)
        got = gradients(o, given, cases.spaced(do))
        for ours, theirs in zip(got, gradients(want, made, do)):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_saved_is_one_number_for_each_query():
    """Memory grows with S: o and (B, H, Sq) numbers beside the inputs."""
    q, k, v = inputs((2, 4, 2, 19, 40, 16))
    o, lse = attention_op(q, k, v)
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    o = attention_triton(q, k, v)  # it keeps what is saved
    saved = [t for t in o.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() for t in saved) == 2 * q.numel() + 2 * k.numel() + lse.numel()


# --- sentences, and what the compiler makes of it ------------------------------------------------------------


WRONG = {
    "H must be a multiple of G, .* got 4 heads of q beside 3": ({"heads": 3}, ValueError),
    "D must be from 1 to 256, got q of shape .*; use attention_eager": ({"dim": 257}, ValueError),
    r"v must be \(B, G, Sk, D\) with B = 2 and G = 2 and Sk = 5": ({"keys": 6}, ValueError),
    "q is torch.float32 and k torch.bfloat16; cast one": ({"dtype": torch.bfloat16}, TypeError),
    r"window must be None or two ints \(left, right\).*got 3": ({"window": 3}, ValueError),
    r"window must be .*got \(1.5, 2\)": ({"window": (1.5, 2)}, ValueError),
    r"window must be .*got \(-2, 0\)": ({"window": (-2, 0)}, ValueError),
    "align must be 'top_left' or 'bottom_right', got 'right'": ({"align": "right"}, ValueError),
    "scale must be None or a finite Python number, got inf": ({"scale": float("inf")}, ValueError),
    "lengths must be a torch.Tensor, got list": ({"lengths": [3, 3]}, TypeError),
    "lengths must be an int64 or an int32 tensor, got torch.float32": (
        {"lengths": torch.ones(2)},
        TypeError,
    ),
    r"lengths must be \(B,\), .* beside q \(2, 4, 5, 8\), got shape \(3,\)": (
        {"lengths": torch.ones(3, dtype=torch.int64)},
        ValueError,
    ),
    "q is on .* and lengths on meta; move both to one device": (
        {"lengths": torch.ones(2, dtype=torch.int64, device="meta")},
        ValueError,
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_is_wrong_is_said(module, sentence):
    how, kind = dict(WRONG[sentence][0]), WRONG[sentence][1]
    heads, dim, dtype = how.pop("heads", 2), how.pop("dim", 8), how.pop("dtype", torch.float32)
    shapes = (2, 4, 5, dim), (2, heads, 5, dim), (2, heads, how.pop("keys", 5), dim)
    q, k, v = (torch.zeros(shape, device=machine.device()) for shape in shapes)
    with pytest.raises(kind, match=f"attention_triton: {sentence}"):
        module.attention_triton(q, k.to(dtype), v.to(dtype), **how)


def test_a_window_of_floats_is_refused_after_one_of_equal_ints(module):
    q, k, v = inputs((1, 1, 1, 5, 5, 8))
    module.attention_triton(q, k, v, window=(1, 2))
    with pytest.raises(ValueError, match=r"window must be .*got \(1.0, 2\)"):
        module.attention_triton(q, k, v, window=(1.0, 2))


_CU = torch.tensor([0, 2, 5], dtype=torch.int32)
WRONG_PACKED = {
    r"q must be \(T, H, D\), got shape \(5,\)": ({"shape": (5,)}, ValueError),
    r"q must be \(T, H, D\) or \(1, H, T, D\); for \(B, H, S, D\) use attention_triton": (
        {"shape": (2, 4, 5, 8)},
        ValueError,
    ),
    "cu_seqlens_q must be a torch.Tensor, got list": ({"cu_seqlens_q": [0, 5]}, TypeError),
    "cu_seqlens_q must be an int64 or an int32 tensor": (
        {"cu_seqlens_q": _CU.float()},
        TypeError,
    ),
    r"cu_seqlens_q must be \(n \+ 1,\), .* got shape \(0,\)": (
        {"cu_seqlens_q": _CU[:0]},
        ValueError,
    ),
    r"cu_seqlens_k must be \(n \+ 1,\), .* got shape \(2,\)": (
        {"cu_seqlens_k": _CU[:2]},
        ValueError,
    ),
    "max_seqlen_k must be None or an int, 0 or more .*; got tensor": (
        {"max_seqlen_k": _CU[2]},
        ValueError,
    ),
    "align must be 'top_left' or 'bottom_right', got None": ({"align": None}, ValueError),
}


@pytest.mark.parametrize("sentence", WRONG_PACKED)
def test_what_is_wrong_with_packed_ones_is_said(module, sentence):
    how, kind = dict(WRONG_PACKED[sentence][0]), WRONG_PACKED[sentence][1]
    q = torch.zeros(how.pop("shape", (5, 4, 8)), device=machine.device())
    how = {
        n: v.to(q.device) if isinstance(v, torch.Tensor) else v
        for n, v in ({"cu_seqlens_q": _CU} | how).items()
    }
    with pytest.raises(kind, match=f"attention_varlen_triton: {sentence}"):
        module.attention_varlen_triton(q, q, q, **how)


def _compiled(module, which, dtype, dim, tma=False):
    """One kernel for Hopper as a call launches it: D = dim, 4096 queries, heads in groups of 4."""
    launches = {}

    def keep(kernel, grid, tensors, *sizes, **options):
        launches[kernel.fn.__name__] = kernel, (*tensors, *sizes), options

    q, k, v = inputs((1, 4, 1, 4096, 4096, dim), dtype)
    plan = module._plan(dtype, 1, 4, 1, 4096, 4096, dim, q.device)._replace(tma=tma)
    in_triton = mock.patch.object(module, "_roles_fit", return_value=False)
    with in_triton, mock.patch.object(host_of(module), "run", keep):
        module.attention_triton(q, k, v, plan=plan).sum().backward()
    kernel, arguments, how = launches[f"_attention_{which}_kernel"]
    launch = {name: how.pop(name) for name in ("num_warps", "num_stages")}
    return compile_for(kernel, _signature(kernel, arguments, how), arch=90, **launch)


def _signature(kernel, arguments, how):
    """signature_of, which knows the descriptors of Gluon alone."""
    names = {}
    for i, value in enumerate(arguments):
        if isinstance(value, TensorDescriptor):
            dtype = {2: "bf16", 4: "fp32"}[value.base.itemsize]
            names[kernel.arg_names[i]] = f"tensordesc<{dtype}{list(value.block_shape)}>"
    plain = [t.base if isinstance(t, TensorDescriptor) else t for t in arguments]
    signature = signature_of(kernel, *plain, **how)
    rest = [name for name in signature.divisible_by_16 if name not in names]
    return signature._replace(types=signature.types | names, divisible_by_16=rest)


@pytest.mark.parametrize(
    ("which", "tma"), [("fwd", False), ("dq", False), ("dkdv", False), ("dkdv", True)]
)
def test_products_by_wgmma_and_nothing_in_local_memory(module, which, tma):
    """bfloat16, D = 64: all by Hopper's tensor cores, with copies that run ahead."""
    compiled = _compiled(module, which, torch.bfloat16, 64, tma)
    mix = instruction_mix(compiled)
    assert compiled.spills == 0
    assert sum(n for name, n in mix.items() if name.startswith("HGMMA")) >= 16, mix
    assert any(name.startswith("UTMALDG" if tma else "LDGSTS") for name in mix), mix
    assert not any(name.startswith("ATOM") or name.startswith("RED") for name in mix)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_in_roles(module, causal):
    """bfloat16, D = 128: a group waits for p v after its softmax, not before; nothing is read but by TMA."""
    launches, (q, *_) = [], inputs((1, 4, 1, 512, 512, 128), torch.bfloat16)
    q = q.detach()
    roles = getattr(module, "gluon_kernels", module)  # a file of its own, or part of a copy
    run, few = lambda *a, **how: launches.append((a, how)), mock.Mock(return_value=4)
    with mock.patch.multiple(host_of(module), run=run, n_multiprocessors=few):
        roles.launch_roles(q, q[:, :1], q[:, :1], q, q.new_empty(1, 4, 512).float(), causal, 0.1)
    ((kernel, _, tensors, *sizes), how), num_warps = launches[0], launches[0][1].pop("num_warps")
    signature = signature_of(kernel, *tensors, *sizes, **how)
    compiled = compile_for(kernel, signature, arch=90, num_warps=num_warps)
    mix = instruction_mix(compiled)
    assert compiled.spills <= 8 and mix["UTMASTG.4D"] == 2
    counted = [name for name in mix if name.startswith("ATOM")]  # which job is next
    assert len(counted) == causal and not any(name.startswith("LDG") for name in mix), mix
    waits = re.findall(r"DEPBAR.LE gsb0, 0x(\d)|(MUFU.EX2)", compiled.sass)
    order = "".join(wait or "e" for wait, _ in waits)
    assert len(re.findall("1e{60,}0", order)) == 2, order


@pytest.mark.parametrize(
    ("sizes", "causal", "dtype", "n_programs"),
    [
        (
            (1, 2, 1, 200, 200, 64),
            True,
            torch.bfloat16,
            2,
        ),  # two heads share k and v; two jobs a program
        ((1, 2, 2, 130, 300, 64), False, torch.float16, 1),
        ((1, 1, 1, 300, 300, 96), True, torch.bfloat16, 3),  # columns that are not there
    ],
    ids=str,
)
def test_roles_are_right_in_the_model(module, sizes, causal, dtype, n_programs):
    q, k, v = (t.detach().cpu() for t in inputs(sizes, dtype))
    batch, n_heads, _, n_queries, _, dim = sizes
    wide = (t.double() for t in (q, *(t.repeat_interleave(n_heads // sizes[2], 1) for t in (k, v))))
    want = F.scaled_dot_product_attention(*wide, is_causal=causal)
    roles, host = getattr(module, "gluon_kernels", module), host_of(module)
    for seed in range(3):
        o, lse = torch.full_like(q, float("nan")), torch.empty(batch, n_heads, n_queries)

        stored = []

        def run(kernel, grid, tensors, *rest, seed=seed, stored=stored, **how):
            log = gluon.run(kernel, grid, *tensors, *rest, seed=seed, **how)
            stored += [what for what, _ in log if what == "store"]

        few = mock.Mock(return_value=n_programs)
        with mock.patch.multiple(host, run=run, n_multiprocessors=few):
            roles.launch_roles(q, k, v, o, lse, causal, dim**-0.5)
        assert len(stored) == 2 * batch * n_heads * -(
            -n_queries // 128
        )  # each job once, by two groups
        torch.testing.assert_close(o.double(), want, rtol=0.01, atol=0.01)


def test_how_many_heads_come_together(module):
    """As many as have k and v in 24 MiB, in groups of about one size; 8 at least."""
    n_wide = getattr(module, "gluon_kernels", module)._n_wide
    assert [n_wide(64, n << 19) for n in (0, 1, 2, 4)] == [64, 32, 22, 11]
    assert (n_wide(64, 1 << 30), n_wide(3, 1 << 30)) == (8, 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("n_keys", "dim", "taken"),
    [(128, 128, 1), (127, 128, 0), (128, 72, 1), (767, 64, 0), (768, 64, 1)],
)
def test_roles_where_they_pay(module, n_keys, dim, taken, causal):
    """As measured: with rows of 128 numbers nearly always, with 64 where there are many keys."""
    q = k = torch.zeros(1, 1, n_keys, dim, dtype=torch.bfloat16)
    launched, plan = [], module.Plan(*SMALL)._replace(roles=True)
    limits = module._limits(q, k, causal, None, "top_left")
    roles = getattr(module, "gluon_kernels", module)
    with (
        mock.patch.object(module, "_roles_fit", return_value=True),
        mock.patch.object(roles, "launch_roles", lambda *a: launched.append(a)),
        mock.patch.object(host_of(module), "run"),
    ):
        module._launch(q, k, k, q, q[..., 0].float(), plan, None, limits, 0.1, {})
    assert len(launched) == taken
    assert not module._plan(torch.float32, 1, 1, 1, 2048, 2048, 64, machine.device()).roles


def test_float32_takes_three_products_of_tf32(module):
    """D = 64, 64 x 32 scores: 8 products of 8 columns for q kᵀ and 4 for p v, three times, in both loops."""
    mix = instruction_mix(_compiled(module, "fwd", torch.float32, 64))
    assert sum(n for name, n in mix.items() if "TF32" in name) == 3 * (8 + 4) * 2, mix
