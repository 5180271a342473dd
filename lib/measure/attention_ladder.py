"""Attention of everybody who has one, timed beside the op, and a backward pass with atomics: for 45 and 48.

versions   eager, compiled, PyTorch's scaled_dot_product_attention, three of its back ends, flex_attention and
           the op; fused: without the first two
refusals   which calls each back end takes; ladder, peers, turns, memory: times and peaks here, as rows
atomic_gradients   dq, dk and dv by one kernel: five products where two kernels have seven, and dq by atomic
           additions, in any order, so that it differs from run to run. Nobody tuned its tiles.
"""

import contextlib
import functools
import math
import warnings
from unittest import mock

from lib import machine
from lib.measure import bench, registry
from lib.ops import _attention_gluon as roles
from lib.ops import _host as host
from lib.ops import attention

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def flops(b, h, s, d, gradients=False, is_causal=True):
    """4·B·H·S²·D forward, half of that if causal; two and a half times as many backward."""
    op = registry.find("attention").configured("causal" if is_causal else "")
    return op.flops((b, h, h, s, s, d), gradients)


def draw(b, h, g, s, d, gradients=False):
    """q, k and v in bfloat16, leaves."""
    options = {"device": machine.device(), "dtype": torch.bfloat16, "requires_grad": gradients}
    return [torch.randn(b, heads, s, d, **options) for heads in (h, g, g)]


def eager(q, k, v):
    """The definition, causal."""
    return attention.attention_eager(q, k, v, is_causal=True)


def op(q, k, v):
    """attention_triton, causal."""
    return attention.attention_triton(q, k, v, is_causal=True)


def op_by_atomics(q, k, v):
    """attention_triton, causal, dq by atomics where the op has a kernel for it."""
    return attention.attention_triton(q, k, v, is_causal=True, deterministic=False)


def _sdpa(backend, is_causal=True):
    """Of one back end; of all: the one that PyTorch chooses."""

    def run(q, k, v):
        how = {"is_causal": is_causal, "enable_gqa": q.shape[1] != k.shape[1]}
        with sdpa_kernel(BACKENDS[backend] if backend else [*BACKENDS.values()]):
            return F.scaled_dot_product_attention(q, k, v, **how)

    return run


def _flex(s, is_causal=True):
    def sees(b, h, i, j):
        return i >= j

    mask = None
    if is_causal:
        mask = create_block_mask(sees, None, None, s, s, device=machine.device(), BLOCK_SIZE=128)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def fused(s, is_causal=True):
    """{name: function of q, k and v} that write no S x S scores; s: what flex_attention's mask is made for."""
    return {
        "SDPA": _sdpa(None, is_causal),
        **{f"SDPA {name}": _sdpa(name, is_causal) for name in ("flash", "efficient", "cudnn")},
        "flex_attention": _flex(s, is_causal),
        "the op": functools.partial(attention.attention_triton, is_causal=is_causal),
    }


def versions(s):
    """{name: function of q, k and v}, all causal, eager and compiled among them."""
    return {"eager": eager, "compiled": torch.compile(eager, dynamic=False), **fused(s)}


def _takes(backend, q_shape, kv_shape, dtype=torch.bfloat16, mask=False, **options):
    q, *kv = (
        torch.randn(size, device=machine.device(), dtype=dtype)
        for size in (q_shape, kv_shape, kv_shape)
    )
    bias = q.new_zeros(q_shape[-2], kv_shape[-2]) if mask else None
    with sdpa_kernel(BACKENDS[backend]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why each of the others, which are switched off, refuses
        try:
            F.scaled_dot_product_attention(q, *kv, attn_mask=bias, **options)
        except RuntimeError:
            return "refuses"
    return "runs"


def refusals():
    """Rows of {"call": …, back end: "runs" or "refuses"}."""
    square, few, wide = (2, 8, 256, 64), (2, 8, 64, 64), (2, 8, 256, 320)
    calls = {
        "bfloat16, causal": {"q_shape": square, "kv_shape": square, "is_causal": True},
        "float32": {"q_shape": square, "kv_shape": square, "dtype": torch.float32},
        "a mask tensor": {"q_shape": square, "kv_shape": square, "mask": True},
        "causal, fewer queries than keys": {
            "q_shape": few, "kv_shape": square, "is_causal": True
        },
        "2 heads of k and v for 8": {
            "q_shape": square, "kv_shape": (2, 2, 256, 64), "enable_gqa": True
        },
        "D = 320": {"q_shape": wide, "kv_shape": wide},
    }  # fmt: skip
    return [{"call": n} | {b: _takes(b, **call) for b in BACKENDS} for n, call in calls.items()]


def _calls(runs, tensors, gradients):
    """Closures to time, of those `runs`, {name: function}, that neither refuse nor run out of memory."""
    calls = {}
    for name, run in runs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call = bench.call_of(run, tensors, gradients)
                call()
                calls[name] = call
            except RuntimeError:  # torch.OutOfMemoryError is one
                torch.cuda.empty_cache()
    return calls


def ladder(b, h, g, s, d, more=()):
    """Rows of {"version", and for forward and both passes µs, TFLOP/s and peak MiB}; none where it refuses.

    more: {name: function of q, k and v}, causal, timed beside `versions`.
    """
    runs = versions(s) | dict(more)
    rows = {name: {"version": name} for name in runs}
    for what in ("forward", "both"):
        gradients = what == "both"
        tensors = draw(b, h, g, s, d, gradients)
        calls = _calls(runs, tensors, gradients)
        for name, us in bench.in_turns_us(calls, n_rounds=3).items():
            rows[name][f"{what}, µs"] = us
            rows[name][f"{what}, TFLOP/s"] = flops(b, h, s, d, gradients) / us / 1e6
            rows[name][f"{what}, peak MiB"] = bench.peak_mib(calls[name])
    return list(rows.values())


def peers():
    """Rows of {"S", "D", "mask", "pass", and µs by version}: `fused` where `ladder` has not timed it."""
    shapes = [((1, 32, 8, 16384, 128), True), ((4, 32, 8, 4096, 128), False)]
    rows = []
    for (b, h, g, s, d), is_causal in shapes:
        runs = fused(s, is_causal)
        for what in ("forward", "both"):
            gradients = what == "both"
            calls = _calls(runs, draw(b, h, g, s, d, gradients), gradients)
            times = bench.in_turns_us(calls, n_rounds=3, rep_ms=50)
            mask = "causal" if is_causal else "none"
            rows.append({"S": s, "D": d, "mask": mask, "pass": what} | times)
    return rows


def turns(lengths=(1024, 2048, 3072, 4096), h=16, d=128):
    """Rows of {"S", and µs} of four samples, causal: jobs in fixed turns and from a counter, beside cuDNN.

    The blocks of so many heads come together: 8, or as many as have their k and v in the L2 cache.
    """
    ways = {"fixed turns, 8": (False, 8), "counter, 8": (True, 8), "counter, n_wide": (True, None)}
    rows = []
    for s in lengths:
        q, k, v = draw(4, h, h, s, d)
        where, calls = attention._empty(q), {}
        for name, way in ways.items():
            if roles.run_on(q.device):
                how = q, k, v, *where, True, d**-0.5, *way
                calls[name] = functools.partial(roles.launch_roles, *how)
        calls["SDPA cudnn"] = functools.partial(_sdpa("cudnn"), q, k, v)
        rows.append({"S": s} | bench.in_turns_us(calls, n_rounds=3, rep_ms=30))
    return rows


def plot_ladder(ax, rows):
    """Bars of TFLOP/s, forward and both passes, of the rows of `ladder`."""
    for shift, what, hatch in ((0.2, "forward", ""), (-0.2, "both", "//")):
        rates = [row.get(f"{what}, TFLOP/s") or 0 for row in rows]
        places = [shift - i for i in range(len(rows))]
        style = {"hatch": hatch, "color": "#b9c9dd", "edgecolor": "black"}
        bars = ax.barh(places, rates, 0.38, label=f"{what} pass{'es' * (shift < 0)}", **style)
        ax.bar_label(bars, [f" {rate:.0f}" if rate else " –" for rate in rates], fontsize=8)
    ax.set_yticks([-i for i in range(len(rows))], labels=[row["version"] for row in rows])
    ax.set(xlabel="TFLOP/s", xlim=(0, 1.4 * max(r.get("forward, TFLOP/s") or 0 for r in rows)))
    ax.legend(fontsize="small")


def memory(h=32, g=8, d=128, lengths=(1024, 4096, 16384, 32768, 65536, 131072)):
    """Rows of {"S", and peak MiB of a forward pass of one sequence by version}; None: out of memory."""
    rows, runs = [], {"eager": eager, "SDPA flash": _sdpa("flash"), "the op": op}
    for s in lengths:
        tensors, row = draw(1, h, g, s, d), {"S": s}
        for name, run in runs.items():
            try:
                row[name] = bench.peak_mib(lambda run=run, t=tensors: run(*t))
            except torch.OutOfMemoryError:
                row[name] = None
            torch.cuda.empty_cache()
        rows.append(row)
    return rows


def plot_memory(ax, rows):
    """The rows of `memory` on log axes."""
    names = [key for key in rows[0] if key != "S"]
    for name, marker, size, line in zip(names, "osD", (6, 10, 5), ("-", "--", ":")):
        points = [(row["S"], row[name]) for row in rows if row[name]]
        ax.plot(*zip(*points), marker, markersize=size, linestyle=line, label=name)
    ax.axhline(141e9 / 2**20, color="black", linestyle="--", linewidth=1, label="141 GB")
    ax.set(xscale="log", yscale="log", xlabel="S", ylabel="peak, MiB")
    ax.set_xticks([row["S"] for row in rows], labels=[str(row["S"]) for row in rows])
    ax.minorticks_off()
    ax.legend(fontsize="small")


# --- a backward pass with atomics ----------------------------------------------------------------------------


@triton.jit
def _load_rows(x_ptr, rows, n_rows, D: tl.constexpr):
    offsets = rows[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x_ptr + offsets, mask=(rows < n_rows)[:, None], other=0.0)


@triton.jit
def atomic_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_rows, scale, factor,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_N rows of dk and dv, and walks over the queries that see them, of all heads of
    # the group. To dq it adds what these keys contribute, as others do.
    first, kv_head = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    cols, kv_start = first + tl.arange(0, BLOCK_N), kv_head * n_rows * D
    k = _load_rows(k_ptr + kv_start, cols, n_rows, D)
    v = _load_rows(v_ptr + kv_start, cols, n_rows, D)
    dk, dv = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        at, start = head * n_rows, head * n_rows * D
        for row in range(first // BLOCK_M * BLOCK_M, n_rows, BLOCK_M):
            rows = row + tl.arange(0, BLOCK_M)
            q = _load_rows(q_ptr + start, rows, n_rows, D)
            do = _load_rows(do_ptr + start, rows, n_rows, D)
            # lse = inf makes the weights of a row that does not exist 0
            lse = tl.load(lse_ptr + at + rows, mask=rows < n_rows, other=float("inf"))
            delta = tl.load(delta_ptr + at + rows, mask=rows < n_rows, other=0.0)
            s = factor * tl.dot(k, q.T, input_precision="ieee")  # keys down, queries across
            p = tl.where(cols[:, None] <= rows[None, :], tl.exp2(s - lse[None, :]), 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
            ds = ds.to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            dq = scale * tl.dot(ds.T, k, input_precision="ieee")
            offsets = start + rows[:, None] * D + tl.arange(0, D)[None, :]
            tl.atomic_add(dq_ptr + offsets, dq, mask=(rows < n_rows)[:, None], sem="relaxed")
    offsets, mask = (
        kv_start + cols[:, None] * D + tl.arange(0, D)[None, :],
        (cols < n_rows)[:, None],
    )
    tl.store(dk_ptr + offsets, scale * dk, mask=mask)
    tl.store(dv_ptr + offsets, dv, mask=mask)


def atomic_gradients(q, k, v, o, lse, do, block_m=None, block_n=None):
    """dq, dk and dv of a causal call, all contiguous, D a power of two from 16 on; lse in base 2, as saved."""
    if block_m is None:
        hopper = machine.HAS_GPU and torch.cuda.get_device_capability()[0] in (9, 10)
        block_m, block_n = (64, 128) if hopper else (32, 32)
    (b, h, s, d), g, scale = q.shape, k.shape[1], q.shape[-1] ** -0.5
    delta, rows = torch.empty_like(lse), max(16, 8192 // d)
    host.run(  # the op's kernel, so that the ways differ behind it alone
        attention._delta_kernel, (b * h * triton.cdiv(s, rows),), (do, o, delta),
        h, s, *do.stride()[:3], *o.stride()[:3], DIM=d, BLOCK_M=rows, BLOCK_D=d, num_warps=4,
    )  # fmt: skip
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    atomic_bwd_kernel[(triton.cdiv(s, block_n), b * g)](
        q, k, v, do, lse, delta, dq, dk, dv, s, scale, scale / math.log(2),
        GROUP=h // g, D=d, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


def backward(b, h, g, s, d):
    """Rows of {"way", "time, µs", "same dq twice"} of backward passes: by two kernels, atomics, the op, cuDNN.

    The op of a Hopper GPU runs its kernel in roles; here the two in Triton are timed as well.
    """
    q, k, v = draw(b, h, g, s, d, gradients=True)
    o, lse = attention.attention_op(q, k, v, None, True)
    plan = attention._plan(q.dtype, b, h, g, s, s, d, q.device)
    *_, dkdv = attention._tiles_for(q.dtype, d, host.generation(q.device))
    no_tma = plan._replace(dkdv=dkdv, tma=False)  # as the op does for shorter sequences
    o_no_tma = attention.attention_triton(q, k, v, is_causal=True, plan=no_tma)
    do, saved = torch.randn_like(o), [t.detach() for t in (q, k, v, o, lse)]

    def gradients_of(output):
        return torch.autograd.grad(output, (q, k, v), do, retain_graph=True)

    def in_triton(output):
        with mock.patch.object(attention, "_roles_fit", return_value=False):
            return gradients_of(output)

    calls = {
        "two kernels, one with TMA": lambda: in_triton(o),
        "the same without TMA": lambda: in_triton(o_no_tma),
        "one kernel, atomics": lambda: atomic_gradients(*saved, do),
        "the op": lambda: gradients_of(o),
    }
    rivals = {"the op, deterministic=False": op_by_atomics, "cuDNN": _sdpa("cudnn")}
    for name, run in rivals.items():
        with contextlib.suppress(RuntimeError):  # a GPU that cuDNN does not take
            output = run(q, k, v)
            calls[name] = functools.partial(gradients_of, output)
    same = {name: str(torch.equal(call()[0], call()[0])) for name, call in calls.items()}
    timed = bench.in_turns_us(calls, n_rounds=3)
    return [{"way": n, "time, µs": us, "same dq twice": same[n]} for n, us in timed.items()]
