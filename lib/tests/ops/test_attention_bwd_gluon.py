"""The backward pass of attention in roles: values, order and waits in the model of Gluon, and its code."""

from unittest import mock

from lib import machine
from lib.measure import registry
from lib.nogpu import gluon
from lib.nogpu.compile_only import compile_for, instruction_mix, loop_mix, signature_of
from lib.ops import _attention_bwd_gluon as backward
from lib.ops import _host as host
from lib.ops import attention

import pytest
import torch

LOG2_E = 1.4426950408889634


def inputs(sizes, dtype):
    """q, k, v and do on the CPU. sizes: B, H, G, Sq, Sk, D."""
    q, k, v = (t.detach().cpu() for t in registry.find("attention").inputs(sizes, dtype, "cpu"))
    return q, k, v, torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_definition(q, k, v, do, causal, scale):
    """dq, dk and dv in float64, and what the forward pass and the kernel of delta have stored."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    o = attention.attention_eager(q, k, v, is_causal=causal, scale=scale)
    k_of_q = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores, ones = q @ k_of_q.mT * scale, torch.ones(q.shape[2], k.shape[2])
    scores = scores.masked_fill(ones.tril() == 0, -float("inf")) if causal else scores
    saved = torch.logsumexp(scores, -1) * LOG2_E, (o * do.double()).sum(-1)
    return torch.autograd.grad(o, (q, k, v), do.double()), [t.detach().float() for t in saved]


def gradients(q, k, v, do, saved, causal, scale, seed=0, **how):
    """dq, dk and dv by launch_backward in the model, and how many have added to each tile of dq."""
    grads, turns = [torch.full_like(t, float("nan")) for t in (q, k, v)], []

    def run(kernel, grid, tensors, *rest, **options):
        if kernel is backward._attention_bwd_gluon_kernel:
            turns.append(tensors[1])
            gluon.run(kernel, grid, *tensors, *rest, seed=seed, **options)
            return
        there = [t.to(machine.device()) for t in tensors]
        kernel[grid](*there, *rest, **options)
        tensors[1].copy_(there[1])

    with mock.patch.object(host, "run", run):
        backward.launch_backward(do, q, k, v, *saved, *grads, causal, scale, **how)
    return grads, turns[0]


CASES = [  # two heads share k and v; lengths that no tile divides, nor 4; more keys than queries and fewer
    ((1, 2, 1, 200, 200, 64), True, torch.bfloat16, 128),
    ((1, 2, 1, 101, 130, 64), False, torch.float16, 128),
    ((2, 1, 1, 130, 100, 64), True, torch.float16, 64),
    ((1, 2, 1, 150, 150, 128), True, torch.float16, 64),
    ((1, 1, 1, 70, 200, 128), False, torch.bfloat16, 64),
    ((1, 1, 1, 70, 300, 128), True, torch.bfloat16, 64),
]


@pytest.mark.parametrize(("sizes", "causal", "dtype", "m"), CASES, ids=str)
def test_gradients_are_right_in_the_model(sizes, causal, dtype, m):
    """In each mode, in two orders of events; the model finds races and waits that do not end."""
    tensors, scale = inputs(sizes, dtype), 0.2
    want, saved = by_definition(*tensors, causal, scale)
    for seed, deterministic in ((0, False), (1, True)):
        got, _ = gradients(*tensors, saved, causal, scale, seed, deterministic=deterministic, m=m)
        for ours, exact in zip(got, want):
            most = 2 * torch.finfo(dtype).eps * exact.abs().max()
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=most.item())


@pytest.mark.parametrize(("n_wide", "stages"), [(1, 3), (2, 2), (5, 2)])
def test_every_block_of_keys_has_its_turn(n_wide, stages):
    """Three places, two blocks of keys: bits are equal, and the second block adds after the first."""
    tensors = inputs((3, 1, 1, 140, 140, 64), torch.bfloat16)
    want, saved = by_definition(*tensors, True, 0.125)
    how = {"deterministic": True, "m": 64, "n_wide": n_wide, "stages": stages}
    runs = [gradients(*tensors, saved, True, 0.125, seed, **how) for seed in range(2)]
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    torch.testing.assert_close(runs[0][0][0].double(), want[0], rtol=0.02, atol=0.02)
    started, *turns = runs[0][1].tolist()
    assert started == 6 and turns == [1, 1, 2] * 3  # the last 12 queries see both


def test_hidden_keys_pass_no_nan():
    """A NaN in v at key 100 reaches dq of queries that see it alone, as in the kernels in Triton."""
    q, k, v, do = inputs((1, 1, 1, 128, 128, 64), torch.bfloat16)
    _, saved = by_definition(q, k, v, do, True, 0.125)
    v[:, :, 100] = float("nan")
    (dq, _, _), _ = gradients(q, k, v, do, saved, True, 0.125)
    assert dq[:, :, :100].isfinite().all() and dq[:, :, 100:].isnan().all()


@pytest.mark.parametrize("on", [False, True])
def test_attention_calls_it_where_it_fits(on):
    """All gradients, causal or no mask, D of 64 or 128, 16 bits: and only with GLUON_BACKWARD."""
    q, k, v, _ = (t.requires_grad_() for t in inputs((1, 1, 1, 16, 16, 64), torch.bfloat16))
    called = []
    stub = mock.patch.object(backward, "launch_backward", lambda *a: called.append(a[9:]))
    there = mock.patch.object(attention.gluon_kernels, "run_on", return_value=True)
    with stub, there, mock.patch.object(attention, "GLUON_BACKWARD", on):
        attention.attention_triton(q, k, v.detach(), is_causal=True).sum().backward()
        assert called == []
        attention.attention_triton(q, k, v, is_causal=True).sum().backward()
        assert called == ([(True, 0.125)] if on else [])
        attention.attention_triton(q, k, v, window=(3, 3)).sum().backward()
        attention.attention_triton(q[..., :32], k[..., :32], v[..., :32]).sum().backward()
        assert len(called) == on
        attention.attention_triton(q, k, v, scale=0.5).sum().backward()
        assert called[1:] == ([(False, 0.5)] if on else [])


def _compiled(dim, causal, deterministic, **how):
    launches, q = [], torch.zeros(1, 4, 512, dim, dtype=torch.bfloat16)
    k, saved = q[:, :1], [torch.zeros(1, 4, 512)] * 2
    with mock.patch.object(host, "run", lambda *a, **how: launches.append((a, how))):
        backward.launch_backward(q, q, k, k, *saved, q, k, k, causal, 0.1, deterministic, **how)
    (kernel, _, tensors, *sizes), options = launches[0]
    num_warps = options.pop("num_warps")
    signature = signature_of(kernel, *tensors, *sizes, **options)
    return compile_for(kernel, signature, arch=90, num_warps=num_warps)


def test_five_products_and_sums_of_four():
    """D = 128, no mask: a tile is five products; dq is added 16 bytes at a time, and nothing spills there."""
    dim, m = 128, 64
    compiled = _compiled(dim, False, True)
    mix, loop = instruction_mix(compiled), loop_mix(compiled, "MUFU.EX2")
    columns = {name: int(name.split(".")[1].split("x")[1]) for name in loop if "HGMMA" in name}
    # of 64 rows: s, dp, dv, dk, and half of dq over twice as many keys
    assert sum(loop[name] * n * 16 for name, n in columns.items()) == 5 * m * dim, loop
    assert loop["REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"] == m * dim // 2 // (128 * 4), loop
    assert loop["WARPGROUP.DEPBAR.LE"] == 4, loop  # ptxas makes no product wait for another
    assert not any(name.startswith("STL") for name in loop) and compiled.spills <= 32
    assert compiled.shared_bytes <= 227 * 1024
    assert not any(name.startswith(("ATOMG.E.ADD.F32", "LDGSTS")) for name in mix), mix
