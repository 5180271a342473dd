"""The backward pass of attention in roles: values, order and waits in the model of Gluon, and its code."""

import contextlib
import functools
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.nogpu import gluon
from lib.nogpu.compile_only import compile_for, instruction_mix, loop_mix, signature_of
from lib.ops import attention
from lib.tests.ops import cases
from lib.tests.ops.battery import host_of

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634


@pytest.fixture
def module():
    """The op; mutants take its place."""
    return attention


def roles_of(module):
    """What holds launch_backward: a file of its own, or the op where it is a copy."""
    return getattr(module, "gluon_backward", module)


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


def gradients(module, q, k, v, do, saved, causal, scale, seed=0, **how):
    """dq, dk and dv by launch_backward in the model, and how many have added to each tile of dq."""
    grads, turns = [torch.full_like(t, float("nan")) for t in (q, k, v)], []
    roles = roles_of(module)

    def run(kernel, grid, tensors, *rest, **options):
        if kernel is roles._attention_bwd_gluon_kernel:
            turns.append(tensors[1])
            for t in tensors[2:]:
                t.__post_init__()  # Triton's own checks, which no call makes
            gluon.run(kernel, grid, *tensors, *rest, seed=seed, **options)
            return
        there = [t.to(machine.device()) for t in tensors]
        kernel[grid](*there, *rest, **options)
        tensors[1].copy_(there[1])

    with cases.empty_is_nan(), mock.patch.object(host_of(module), "run", run):
        roles.launch_backward(do, q, k, v, *saved, *grads, causal, scale, **how)
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
def test_gradients_are_right_in_the_model(module, sizes, causal, dtype, m):
    """In each mode, in two orders of events; the model finds races and waits that do not end."""
    tensors, scale = inputs(sizes, dtype), 0.2
    want, saved = by_definition(*tensors, causal, scale)
    for seed, deterministic in ((0, False), (1, True)):
        how = {"deterministic": deterministic, "m": m}
        got, _ = gradients(module, *tensors, saved, causal, scale, seed, **how)
        for ours, exact in zip(got, want):
            most = 2 * torch.finfo(dtype).eps * exact.abs().max()
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=most.item())


@pytest.mark.parametrize(("n_wide", "stages"), [(1, 3), (2, 2), (5, 2)])
def test_every_block_of_keys_has_its_turn(module, n_wide, stages):
    """Three places, two blocks of keys: bits are equal, and the second block adds after the first."""
    tensors = inputs((3, 1, 1, 140, 140, 64), torch.bfloat16)
    want, saved = by_definition(*tensors, True, 0.125)
    how = {"deterministic": True, "m": 64, "n_wide": n_wide, "stages": stages}
    runs = [gradients(module, *tensors, saved, True, 0.125, seed, **how) for seed in range(2)]
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    torch.testing.assert_close(runs[0][0][0].double(), want[0], rtol=0.02, atol=0.02)
    started, *turns = runs[0][1].tolist()
    assert started == 6 and turns == [1, 1, 2] * 3  # the last 12 queries see both


def test_hidden_keys_pass_no_nan(module):
    """A NaN in v at key 100 reaches dq of queries that see it alone, as in the kernels in Triton."""
    q, k, v, do = inputs((1, 1, 1, 128, 128, 64), torch.bfloat16)
    _, saved = by_definition(q, k, v, do, True, 0.125)
    v[:, :, 100] = float("nan")
    (dq, _, _), _ = gradients(module, q, k, v, do, saved, True, 0.125)
    assert dq[:, :, :100].isfinite().all() and dq[:, :, 100:].isnan().all()


@contextlib.contextmanager
def calls(module):
    """Inside, as on Hopper: the list of (is_causal, scale, deterministic) of all calls of launch_backward."""
    called, kernels = [], getattr(module, "gluon_kernels", module)
    stub = mock.patch.object(
        roles_of(module), "launch_backward", lambda *a: called.append((*a[9:],))
    )
    there = mock.patch.object(kernels, "run_on", return_value=True)
    with stub, there:
        yield called


def small_inputs():
    tensors = inputs((1, 1, 1, 16, 16, 64), torch.bfloat16)[:3]
    return [t.to(machine.device()).requires_grad_() for t in tensors]


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_calls_it_where_it_fits(module, deterministic):
    """All gradients, causal or no mask, D of 64 or 128, 16 bits."""
    q, k, v = small_inputs()
    call = functools.partial(module.attention_triton, deterministic=deterministic)
    with calls(module) as called:
        call(q, k, v.detach(), is_causal=True).sum().backward()
        call(q, k, v, window=(3, 3)).sum().backward()
        call(q, k, v, scale=-0.5).sum().backward()
        call(q[..., :32], k[..., :32], v[..., :32]).sum().backward()
        call(*(t.float() for t in (q, k, v))).sum().backward()
        call(q, k, v, torch.tensor([9], device=q.device)).sum().backward()
        assert called == []
        call(q, k, v, is_causal=True).sum().backward()
        call(q, k, v, scale=0.5).sum().backward()
        assert called == [(True, 0.125, deterministic), (False, 0.5, deterministic)]


def test_sequences_on_end_take_the_kernels_in_triton(module):
    q, k, v = (t[0].transpose(0, 1) for t in small_inputs())
    cu = torch.tensor([0, 7, 16], device=q.device)
    with calls(module) as called:
        module.attention_varlen_triton(q, k, v, cu).sum().backward()
    assert called == []


@pytest.mark.parametrize("call", ["attention_triton", "attention_op"])
def test_atomics_are_for_who_asks_and_for_no_deterministic_mode(module, call):
    """The registered op passes it on; torch.use_deterministic_algorithms(True) counts in the backward pass."""

    def run(**how):
        o = getattr(module, call)(*small_inputs(), **how)
        return o if call == "attention_triton" else o[0]

    with calls(module) as called:
        run().sum().backward()
        run(deterministic=False).sum().backward()
        o = run(deterministic=False).sum()
        torch.use_deterministic_algorithms(True)
        try:
            o.backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert called == [(False, 0.125, deterministic) for deterministic in (True, False, True)]


def test_elsewhere_atomics_are_the_kernels_in_triton(module):
    """Without Hopper the bits are those of deterministic=True."""
    grads = []
    for deterministic in (True, False):
        tensors = small_inputs()
        o = module.attention_triton(*tensors, is_causal=True, deterministic=deterministic)
        grads.append(torch.autograd.grad(o.sum(), tensors))
    assert all(map(torch.equal, *grads))


def test_in_graphs_it_is_an_argument_of_the_op():
    q, k, v = small_inputs()
    call = functools.partial(attention.attention_triton, is_causal=True, deterministic=False)
    with calls(attention) as called:
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v).sum().backward()
        assert called == [(True, 0.125, False)]
    torch.library.opcheck(attention.attention_op, (q, k, v), {"deterministic": False})


def test_it_is_true_or_false(module):
    for wrong in (1, None, "no"):
        sentence = f"attention_triton: deterministic must be True or False, got {wrong!r}"
        with pytest.raises(TypeError, match=sentence):
            module.attention_triton(*small_inputs(), deterministic=wrong)


@pytest.mark.parametrize(
    ("causal", "dim", "n", "m"),
    [(True, 128, 300, 64), (False, 64, 1024, 64), (False, 64, 1025, 128)],
)
def test_how_it_is_launched(module, causal, dim, n, m):
    """What was fastest: in the order of keys of causal attention 32 places take turns, else 8."""
    q = torch.zeros(1, 1, n, dim, dtype=torch.bfloat16)
    saved, launches = [torch.zeros(1, 1, n)] * 2, []
    for deterministic in (True, False):
        with mock.patch.object(host_of(module), "run", lambda *a, **how: launches.append((a, how))):
            roles_of(module).launch_backward(
                q, q, q, q, *saved, q, q, q, causal, 0.1, deterministic
            )
    (ordered, how), _, (atomics, _), _ = launches
    n_tiles = -(-n // m)
    assert ordered[2][3].block_shape == [1, 1, m, dim] and how["STAGES"] == 2
    assert (ordered[-1], atomics[-1]) == (32 if causal else 8, 8)
    sums, turns = ordered[2][:2]
    assert turns.dtype == torch.int32 and turns.tolist() == [0] * (1 + n_tiles)
    assert turns.data_ptr() == sums.data_ptr() + n_tiles * m * dim * 4  # one piece of memory
    assert atomics[2][1] is None and atomics[2][0].numel() == n_tiles * m * dim


def test_descriptors_are_those_of_triton():
    """They are made without its checks; each has what from_tensor gives."""
    of_q, of_rows = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 3, 8)
    shared = attention.shared
    for t, *block in ((of_q, 32, 64), (of_rows, 128)):
        layout = shared.layout_of_tiles(t.itemsize, t.dim())
        sizes = [*[1] * (t.dim() - len(block)), *block]
        theirs = TensorDescriptor.from_tensor(t, sizes, layout)
        assert repr(shared.descriptor_of(t, *block)) == repr(theirs)


def _compiled(dim, causal, deterministic, **how):
    launches, q = [], torch.zeros(1, 4, 512, dim, dtype=torch.bfloat16)
    k, saved = q[:, :1], [torch.zeros(1, 4, 512)] * 2
    with mock.patch.object(attention.host, "run", lambda *a, **how: launches.append((a, how))):
        attention.gluon_backward.launch_backward(
            q, q, k, k, *saved, q, k, k, causal, 0.1, deterministic, **how
        )
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
