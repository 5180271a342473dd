"""Candidates for faster products, and short attention, beside what there is: a row as soon as it is measured.

    python .gpu/products.py            all parts, in 70 s
    python .gpu/products.py b c        some of them
    python .gpu/products.py f          products by pairs of thread blocks (num_ctas=2), apart: they may hang

From the root of a clone of main, on an H200. Other processes compile first, into Triton's and Inductor's caches.
Times are medians in turns in µs, L2 flushed, of GPU time alone (CUDA graphs) where it says so.
"""

import collections
import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

START = time.perf_counter()
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
os.environ.setdefault("TEARDOWN_CUPTI", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes below are enough of them
DRY = int(os.environ.get("PRODUCTS_DRY", 0))  # sizes divided by so much, on the CPU: whether it all runs
MARK = "--compile"
WORKER = sys.argv[sys.argv.index(MARK) + 1] if MARK in sys.argv else None
PARTS = [p for p in sys.argv[1:] if p in "abcdef"] or list("adebc")
BUDGET = 70 if len(PARTS) > 1 else 60
N_WORKERS = max(1, min(14, (os.cpu_count() or 2) - 1))


def compile_first():
    """Each process calls every n-th closure of the parts once, and so leaves its kernels in the caches."""
    how = [sys.executable, __file__, *PARTS, MARK]
    log = open("/tmp/products_compile.log", "w")  # noqa: SIM115
    children = [
        subprocess.Popen([*how, f"{i}/{N_WORKERS}"], stdout=log, stderr=log) for i in range(N_WORKERS)
    ]
    limit = START + 38
    for child in children:
        try:
            child.wait(max(0.1, limit - time.perf_counter()))
        except subprocess.TimeoutExpired:
            child.kill()
            print(f"# a compiling process was ended after {time.perf_counter() - START:.0f} s")


if WORKER is None and __name__ == "__main__" and not DRY:
    compile_first()
    print(f"# compiled after {time.perf_counter() - START:.0f} s", flush=True)

import kernels as k  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from lib.measure import bench  # noqa: E402
from lib.ops import _attention_gluon as attention_gluon  # noqa: E402
from lib.ops import _host as host  # noqa: E402
from lib.ops import attention, linear_glu, lora_linear, matmul  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

BF16 = torch.bfloat16
GPU = "cpu" if DRY else "cuda"
counter = 0  # of closures, in a compiling process


def draw(*shape, scale=1.0, dtype=BF16):
    return torch.randn(shape, device=GPU, dtype=torch.float32).mul_(scale).to(dtype)


def less(*sizes):
    return tuple(max(256, n // DRY) if DRY else n for n in sizes)


def sync():
    if not DRY:
        torch.cuda.synchronize()


def late():
    """Whether the time is up."""
    return not DRY and time.perf_counter() - START > BUDGET - 3


def row(*cells):
    print(" | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells), flush=True)


def warm(calls, only=None):
    """In a compiling process: call every n-th of them, and say that there is nothing to time.

    only: those whose name has it; the others were compiled for another shape.
    """
    global counter
    if WORKER is None:
        return False
    i, n = map(int, WORKER.split("/"))
    for name, call in calls.items():
        if only is not None and only not in name:
            continue
        counter += 1
        if counter % n == i:
            start = time.perf_counter()
            try:
                call()
                sync()
            except Exception as error:  # noqa: BLE001 - the parent meets it again, and says so
                print(name, error)
            print(f"{WORKER} {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return True


def error_of(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def near_today(totals, name):
    """A check of all gradients against today's, in the norm: of relu an element near 0 may be on either side."""

    def run():
        pairs = zip(totals[name](), totals["today"](), strict=True)
        errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]
        return max(errors), 0.005

    return run


def timed(label, calls, checks=None, flops=None, base=None, rep_ms=25, only=None):
    """One table row for each call that runs and is right. checks: {name: (error of it, of eager)} closures."""
    if warm(calls, only) or late():
        return {}
    good = {}
    for name, call in calls.items():
        try:
            call()
            sync()
            if checks and name in checks:
                error, allowed = checks[name]()
                if not error <= 2 * allowed + 1e-6:
                    row(label, name, f"WRONG: {error:.1e} of the largest, eager {allowed:.1e}")
                    continue
            good[name] = call
        except Exception as error:  # noqa: BLE001
            row(label, name, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    if not good:
        return {}
    times = dict.fromkeys(good, 1.0) if DRY else bench.in_turns_us(good, n_rounds=1, rep_ms=rep_ms)
    reference = times.get(base)
    for name, us in times.items():
        tflops = f"{flops / us / 1e6:.0f} TFLOP/s" if flops else ""
        row(label, name, us, tflops, f"{reference / us:.3f} of {base}'s rate" if reference else "")
    return times


def part(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001
        row(function.__name__, "failed:", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if not DRY:
        torch.cuda.empty_cache()


def profile(label, calls):
    """The kernels of each call, with their µs (L2 as the call leaves it), in order of time."""
    if WORKER is not None or late() or DRY:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
                for _ in range(4):
                    call()
                torch.cuda.synchronize()
            sums = collections.Counter()
            for event in recorded.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    sums[event.name] += event.time_range.elapsed_us() / 4
            row(f"profile, {label}", name, f"sum {sum(sums.values()):.0f} µs")
            for kernel, us in sums.most_common(14):
                row("    ", f"{us:8.1f}", kernel[:110])
        except Exception as error:  # noqa: BLE001
            row(f"profile, {label}", name, type(error).__name__, str(error)[:120])


# --- a: bare products -------------------------------------------------------------------------------------


def f_pairs():
    a_products(pairs=True)


def a_products(pairs=False):
    for sizes in ((8192,) * 3, (4096,) * 3, (16384, 4096, 4096), (16384, 8192, 1280), (2048, 8192, 1280)):
        m, kk, n = less(*sizes)
        for layout in ("NT", "NN"):
            if late() or (WORKER and (m, n) != (8192, 8192)):
                return
            a = draw(m, kk)
            b = draw(n, kk, scale=kk**-0.5).t() if layout == "NT" else draw(kk, n, scale=kk**-0.5)
            y, some = torch.empty(m, n, device=GPU, dtype=BF16), slice(0, None, max(1, m // 61))
            want = a[some].double() @ b.double()
            allowed = error_of(torch.mm(a, b)[some], want)
            tma = matmul.Plan(matmul._TILES["half"][0], "tma")

            def persistent(a=a, b=b, y=y, **how):
                return lambda: k.run_persistent(a, b, y, **how)

            def roles(a=a, b=b, y=y, **how):
                return lambda: k.run_roles(a, b, y, call=through_host, **how)

            calls = {
                "cuBLAS": lambda a=a, b=b, y=y: torch.mm(a, b, out=y),
                "op today": lambda a=a, b=b: matmul.matmul_triton(a, b),
                "op, tma": lambda a=a, b=b, p=tma: matmul.matmul_triton(a, b, plan=p),
                "flatten": persistent(flatten=True),
                "4 stages": persistent(num_stages=4),
                "flatten, 4 stages": persistent(flatten=True, num_stages=4),
                "flatten, 4 stages, quarters": persistent(flatten=True, num_stages=4, parts=4),
                "flatten, 4 stages, group 16": persistent(flatten=True, num_stages=4, group=16),
                "flatten, 4 stages, group 4": persistent(flatten=True, num_stages=4, group=4),
                "Gluon, roles, group 16": roles(),
                "Gluon, roles, group 8": roles(group=8),
                "Gluon, roles, group 32": roles(group=32),
            }
            if pairs:
                calls = {name: calls[name] for name in ("cuBLAS", "op, tma")}
                calls["2 ctas, 128 x 256"] = persistent(num_ctas=2, parts=1)
                if layout == "NN":  # bᵀ does not compile
                    calls["2 ctas, 256 x 256"] = persistent(num_ctas=2, parts=1, tile=(256, 256, 64))

            def check(name, y=y, some=some, want=want, allowed=allowed, calls=calls):
                def run():
                    y.fill_(float("nan"))
                    result = calls[name]()
                    out = result if isinstance(result, torch.Tensor) else y
                    return error_of(out[some], want), allowed

                return run

            timed(
                f"{'f' if pairs else 'a'} {layout} {m}x{kk}x{n}", calls, {name: check(name) for name in calls},
                2 * m * kk * n, "cuBLAS", 20,
            )  # fmt: skip


# --- b: linear_glu with gradients -------------------------------------------------------------------------


def b_linear_glu():
    for sizes in ((16384, 1024, 4096), (8192, 2048, 8192), (8192, 768, 3072)):
        (m, kk, hid), only = less(*sizes), "torch.compile" if sizes[1] != 1024 else None
        if late():
            return
        label, act = f"b {m}x{kk}->2x{hid}", "silu"
        gating = act, "first"
        x, w = draw(m, kk).requires_grad_(), draw(2 * hid, kk, scale=kk**-0.5).requires_grad_()
        dy = draw(m, hid)
        xd, wd = x.detach(), w.detach()
        y, h = torch.empty(m, hid, device=GPU, dtype=BF16), torch.empty(m, 2 * hid, device=GPU, dtype=BF16)
        compiled = torch.compile(linear_glu.linear_glu_eager, dynamic=False)

        def both(version, x=x, w=w, dy=dy):
            def run():
                with torch.autograd.set_multithreading_enabled(False):
                    return torch.autograd.grad(version(x, w, None, *gating), (x, w), dy)

            return run

        dh = linear_glu._dh_of(dy, F.linear(xd, wd), *gating, False)[0] if WORKER is None else h
        dxo, dwo = torch.empty_like(xd), torch.empty_like(wd)
        forward = {
            "F.linear alone": lambda x=xd, w=wd: F.linear(x, w),
            "today, h kept": lambda x=xd, w=wd, y=y, h=h: linear_glu._launch(None, x, w, None, y, h, gating, False),
            "today, h not kept (Gluon)": lambda x=xd, w=wd, y=y: linear_glu._launch(None, x, w, None, y, None, gating, False),
            "h kept, tma long": lambda x=xd, w=wd, y=y, h=h: linear_glu._launch_tma(
                linear_glu.Plan("tma", linear_glu._TMA_TILES["long"], 16, 132, True), x, w, None, y, h, gating),
            "candidate: Gluon, h kept": lambda x=xd, w=wd, y=y, h=h: k.run_glu_with_h(
                x, w, None, y, h, act, True, call=through_host),
            "candidate: Gluon, h kept, group 16": lambda x=xd, w=wd, y=y, h=h: k.run_glu_with_h(
                x, w, None, y, h, act, True, group=16, call=through_host),
        }  # fmt: skip
        some = slice(0, None, max(1, m // 61))

        def check(name, x=xd, w=wd, y=y, h=h, some=some, forward=forward):
            def run():
                want = F.linear(x[some].double(), w.double())
                x2, x1 = want.chunk(2, -1)
                y.fill_(float("nan"))
                h.fill_(float("nan"))
                forward[name]()
                eager = linear_glu.linear_glu_eager(x, w, None, *gating)[some]
                of_y, allowed = error_of(y[some], x1 * F.silu(x2)), error_of(eager, x1 * F.silu(x2))
                of_h = error_of(h[some], want) if "not kept" not in name else 0.0
                if of_h > 2 * error_of(F.linear(x, w)[some], want):
                    return of_h, 0.0
                return of_y, allowed

            return run

        checks = {name: check(name) for name in forward if "alone" not in name}
        timed(f"{label} forward", forward, checks, 4 * m * kk * hid, "F.linear alone", only=only)

        def cand(products, x=xd, w=wd, y=y, dy=dy, m=m, kk=kk, hid=hid):
            def run():
                y, h = torch.empty(m, hid, device=GPU, dtype=BF16), x.new_empty(m, 2 * hid)
                k.run_glu_with_h(x, w, None, y, h, act, True, call=through_host)
                dh = linear_glu._dh_of(dy, h, *gating, False)[0]
                if products == "cuBLAS":
                    return dh @ w, dh.t() @ x
                dx, dw = torch.empty_like(x), torch.empty_like(w)
                k.run_roles(dh, w, dx, call=through_host)
                k.run_roles(dh.t(), x, dw, call=through_host)
                return dx, dw

            return run

        totals = {
            "eager": both(linear_glu.linear_glu_eager), "torch.compile": both(compiled),
            "today": both(linear_glu.linear_glu_triton),
            "candidate, cuBLAS's products": cand("cuBLAS"), "candidate, products by roles": cand("roles"),
        }  # fmt: skip

        checks = {name: near_today(totals, name) for name in totals if "candidate" in name}

        timed(
            f"{label} both", totals, checks,
            12 * m * kk * hid, "torch.compile", 40, only,
        )  # fmt: skip
        pieces = {
            "gate backward": lambda dy=dy, h=h: linear_glu._dh_of(dy, h, *gating, False),
            "gate backward, 8 rows x 256": lambda dy=dy, h=h: linear_glu._dh_of(
                dy, h, *gating, False, plan=linear_glu.Plan("tma", None, 8, backward=(8, 256, 1024))),
            "a copy that moves its bytes": copy_of(5 * m * hid * 2),
            "dgrad, cuBLAS": lambda d=dh, w=wd, o=dxo: torch.mm(d, w, out=o),
            "dgrad, roles": lambda d=dh, w=wd, o=dxo: k.run_roles(d, w, o, call=through_host),
            "dgrad, roles, group 8": lambda d=dh, w=wd, o=dxo: k.run_roles(d, w, o, group=8, call=through_host),
            "wgrad, cuBLAS": lambda d=dh, x=xd, o=dwo: torch.mm(d.t(), x, out=o),
            "wgrad, roles": lambda d=dh, x=xd, o=dwo: k.run_roles(d.t(), x, o, call=through_host),
            "wgrad, roles, group 8": lambda d=dh, x=xd, o=dwo: k.run_roles(d.t(), x, o, group=8, call=through_host),
        }  # fmt: skip
        timed(f"{label} backward, parts", pieces, only=only)
        if kk != 2048:
            profile(label, {n: totals[n] for n in ("eager", "torch.compile", "today")})
        del compiled, totals, pieces, forward


def copy_of(n_bytes):
    """A copy that reads and writes so many bytes in all; its buffers are made at the first call."""
    made = []

    def run():
        if not made:
            made.extend(torch.empty(2, n_bytes // 2, device=GPU, dtype=torch.uint8))
        made[0].copy_(made[1])

    return run


def through_host(kernel, grid, *arguments, **options):
    """host.run, as the ops launch: tensors and descriptors first, then sizes."""
    if DRY:
        from lib.nogpu import gluon

        gluon.run(kernel, grid, *arguments, **options)
        return
    n = next(i for i, v in enumerate(arguments) if isinstance(v, int))
    host.run(kernel, grid, arguments[:n], *arguments[n:], **options)


# --- c: lora_linear with gradients ------------------------------------------------------------------------


def c_lora():
    for m, kk, n, rank, act, has_bias in (
        (16384, 4096, 4096, 16, "relu", True),
        (16384, 4096, 4096, 16, "identity", False),
        (4096, 4096, 14336, 32, "identity", False),
    ):
        m, kk, n = less(m, kk, n)
        if late():
            return
        label, scale = f"c {m}x{kk}->{n} r{rank} {act}", 2.0
        x, w = draw(m, kk).requires_grad_(), draw(n, kk, scale=kk**-0.5)
        la, lb = draw(rank, kk, scale=kk**-0.5).requires_grad_(), draw(n, rank, scale=0.1).requires_grad_()
        bias = draw(n).requires_grad_() if has_bias else None
        dy = draw(m, n)
        leaves = [t for t in (x, la, lb, bias) if t is not None]
        compiled = torch.compile(lora_linear.lora_linear_eager, dynamic=False)

        def both(version, x=x, w=w, la=la, lb=lb, bias=bias, dy=dy, leaves=leaves, act=act):
            def run():
                with torch.autograd.set_multithreading_enabled(False):
                    return torch.autograd.grad(version(x, w, la, lb, bias, scale, act), leaves, dy)

            return run

        xd, ad, bd = x.detach(), la.detach(), lb.detach()
        biasd = None if bias is None else bias.detach()

        def forward_by_roles(x=xd, w=w, a=ad, b=bd, bias=biasd, act=act, m=m, n=n):
            u = torch.mm(x, a.t())
            y = x.new_empty(m, n)
            k.run_roles(x, w.t(), y, low=(u * scale, b.t()), bias=bias, activation=act, call=through_host)
            return y, u

        def dx_by_roles(dz, du, w=w, a=ad, m=m, kk=kk):
            dx = dz.new_empty(m, kk)
            k.run_roles(dz, w, dx, low=(du, a), call=through_host)
            return dx

        def backward(u, y, dx, narrow, x=xd, w=w, a=ad, b=bd, dy=dy, act=act, has_bias=has_bias):
            saved = None if act == "identity" else y
            if narrow:
                dz, du, db, dbias = k.run_dz_and_narrow(dy, saved, u, b, scale, act, has_bias)
            else:
                dz, dbias = host.dz_of(dy, saved, act, True, has_bias)
                db, du = lora_linear._product(dz.t(), u, scale), lora_linear._product(dz, b, scale)
            da = lora_linear._product(du.t(), x)
            if dx == "roles":
                dx = dx_by_roles(dz, du)
            else:
                dx = lora_linear._product(du, a).addmm_(dz, w)
            return [g for g in (dx, da, db, dbias) if g is not None]

        def cand(fwd, dx, narrow, x=xd, w=w, a=ad, b=bd, bias=biasd, act=act):
            def run():
                if fwd == "roles":
                    y, u = forward_by_roles()
                else:
                    y, u, _ = lora_linear._forward(x, w, a, b, bias, scale, act, False)
                return backward(u, y, dx, narrow)

            return run

        totals = {
            "eager": both(lora_linear.lora_linear_eager), "torch.compile": both(compiled),
            "cuBLAS in place": both(lora_linear.lora_linear_cublas), "today": both(lora_linear.lora_linear_triton),
            "today, without autograd": cand("tma", "cuBLAS", False),
            "candidate: dx with du A in one": cand("tma", "roles", False),
            "candidate: dx, and forward by roles": cand("roles", "roles", False),
            "candidate: dx, narrow in one pass": cand("tma", "roles", True),
            "candidate: all three": cand("roles", "roles", True),
        }  # fmt: skip

        checks = {name: near_today(totals, name) for name in totals if "candidate" in name}

        flops = 2 * m * (2 * n * kk + 3 * kk * rank + 3 * rank * n)
        timed(f"{label} both", totals, checks, flops, "today", 40)
        u = torch.mm(xd, ad.t())
        du, dz = draw(m, rank, scale=0.1), dy
        saved = None if act == "identity" else draw(m, n)
        y = torch.empty(m, n, device=GPU, dtype=BF16)
        plan = lora_linear._plan(m, n, kk, BF16, False, xd.device)
        pieces = {
            "x W^T alone, cuBLAS": lambda x=xd, w=w: torch.mm(x, w.t()),
            "forward's second kernel, today": lambda x=xd, w=w, u=u, b=bd, y=y, bias=biasd, act=act, p=plan:
                lora_linear._launch(p, x, w, u, b, bias, y, None, scale, act, False),
            "the same by roles": lambda x=xd, w=w, u=u, b=bd, y=y, bias=biasd, act=act: k.run_roles(
                x, w.t(), y, low=(u, b.t()), bias=bias, activation=act, call=through_host),
            "dz W alone, cuBLAS": lambda d=dz, w=w: torch.mm(d, w),
            "dx today: du A, then addmm": lambda d=dz, w=w, du=du, a=ad: lora_linear._product(du, a).addmm_(d, w),
            "dx by roles": lambda d=dz, du=du, f=dx_by_roles: f(d, du),
            "u = x A^T": lambda x=xd, a=ad: torch.mm(x, a.t()),
            "db = dz^T u": lambda d=dz, u=u: lora_linear._product(d.t(), u, scale),
            "du = dz B": lambda d=dz, b=bd: lora_linear._product(d, b, scale),
            "da = du^T x": lambda du=du, x=xd: lora_linear._product(du.t(), x),
            "a copy that moves as many bytes as x has": copy_of(m * kk * 2),
            "dz, dbias today": lambda s=saved, dy=dy, act=act, hb=has_bias: host.dz_of(dy, s, act, True, hb),
        }  # fmt: skip
        for bm, warps in ((64, 4), (128, 8)):
            pieces[f"dz, du, db, dbias in one pass, {bm} rows"] = (
                lambda s=saved, dy=dy, act=act, hb=has_bias, u=u, b=bd, bm=bm, warps=warps:
                k.run_dz_and_narrow(dy, s, u, b, scale, act, hb, block_m=bm, num_warps=warps)
            )  # fmt: skip
        timed(f"{label} parts", pieces)
        if rank == 16 and has_bias:
            profile(label, {t: totals[t] for t in ("torch.compile", "today")})
        del compiled, totals, pieces


# --- d: float32 at odd rows -------------------------------------------------------------------------------


def d_float32():
    own = matmul._plan

    for m, kk, n in (
        (1823, 333, 781), (333, 1823, 781), (257, 333, 781), (17, 33, 21), (1, 4095, 4095), (64, 4095, 4097),
        (511, 16383, 511), (1023, 1023, 1023), (4095, 511, 2047), (1500, 1500, 1500), (2047, 2047, 1023),
    ):  # fmt: skip
        m, kk, n = ((x // DRY) | 1 for x in (m, kk, n)) if DRY else (m, kk, n)
        if late():
            return
        a, b, bias = (draw(*s, dtype=torch.float32) for s in ((m, kk), (kk, n), (n,)))
        try:  # m and K, N mixed up here would show
            tile, parts = matmul._choose(m, n, kk, "tf32x3", a.device, False)
            plan = matmul.Plan(tile, "tiles", parts)
        except Exception:  # noqa: BLE001
            plan = None
        calls = {
            "eager": lambda a=a, b=b: a @ b,
            f"op ({own(a, b, 'tf32x3').way})": lambda a=a, b=b: matmul.matmul_triton(a, b),
            "our tiles": lambda a=a, b=b, p=plan: matmul.matmul_triton(a, b, plan=p),
            "eager, bias": lambda a=a, b=b, c=bias: torch.addmm(c, a, b),
            "op, bias": lambda a=a, b=b, c=bias: matmul.matmul_triton(a, b, c),
        }  # fmt: skip
        want = a.double() @ b.double()

        def check(name, calls=calls, want=want, bias=bias, a=a, b=b):
            exact = want + bias.double() if "bias" in name else want
            return lambda: (error_of(calls[name](), exact), error_of(a @ b, want))

        checks = {name: check(name) for name in calls}
        timed(f"d float32 {m}x{kk}x{n}", calls, checks, 2 * m * kk * n, "eager", 15)


# --- e: attention, forward, short -------------------------------------------------------------------------


def captured(call):
    """A CUDA graph of call(), after two calls on a stream of its own."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def e_attention():
    Tile = attention.Tile
    more = {
        64: [Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 4, 3), Tile(128, 128, 8, 2)],
        128: [Tile(128, 64, 8, 3), Tile(128, 128, 8, 2)],
        256: [Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)],
    }
    for dim in (64, 128, 256):
        for s, batch in ((512, 8), (1024, 4), (2048, 4)):
            for causal in (True, False):
                if late():
                    return
                if DRY:
                    (batch, s), causal = (1, max(64, s // DRY)), causal
                heads = 16 if dim < 256 else 8
                q, kk, v = (draw(batch, heads, s, dim) for _ in range(3))
                o, lse = attention._empty(q)
                plan = attention._plan(BF16, batch, heads, heads, s, s, dim, q.device)
                plain = plan._replace(tma=False)
                arguments = attention._arguments(
                    q, kk, None, (causal, None, None, "top_left", None, True), plain
                )

                def ours(plan, q=q, kk=kk, v=v, o=o, lse=lse, rest=arguments[1:]):
                    return lambda: attention._launch(q, kk, v, o, lse, plan, *rest)

                def sdpa(backend, q=q, kk=kk, v=v, causal=causal):
                    def bare():
                        return F.scaled_dot_product_attention(q, kk, v, is_causal=causal)

                    def run():
                        with sdpa_kernel(backend):
                            return bare()

                    run.bare, run.around = bare, functools.partial(sdpa_kernel, backend)
                    return run

                calls = {
                    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION),
                    f"Triton {tuple(plain.forward)}": ours(plain),
                }  # fmt: skip
                if dim <= 128:
                    calls["Gluon, forced"] = lambda q=q, kk=kk, v=v, o=o, lse=lse, c=causal, d=dim: (
                        attention_gluon.launch_roles(q, kk, v, o, lse, c, d**-0.5)
                    )
                for tile in more[dim] if s == 1024 else ():
                    calls[f"Triton {tuple(tile)}"] = ours(plain._replace(forward=tile))
                calls_whole = {
                    "op as called": lambda q=q, kk=kk, v=v, c=causal: attention.attention_triton(
                        q, kk, v, is_causal=c
                    )
                }
                label = f"e S {s} D {dim} BH {batch * heads} {'causal' if causal else 'full'}"
                if warm(calls | calls_whole, None if s == 1024 or s == 512 and dim == 64 else "as called"):
                    continue
                want = sdpa(SDPBackend.MATH, *(t[:1].double() for t in (q, kk, v)))()
                allowed, graphs, host_us = None, {}, {}
                for name, call in (calls | calls_whole).items():
                    try:
                        o.fill_(float("nan"))
                        got = call()
                        error = error_of((o if got is None else got)[:1], want)
                        allowed = allowed or error
                        if not error <= 2 * allowed + 1e-6:
                            row(label, name, f"WRONG: {error:.1e}, cuDNN {allowed:.1e}")
                            continue
                        if DRY:
                            row(label, name, "right", error)
                            continue
                        graphs[name] = captured(call)
                        with getattr(call, "around", contextlib.nullcontext)():
                            host_us[name] = bench.host_us(getattr(call, "bare", call), 20, 3)
                    except Exception as error:  # noqa: BLE001
                        row(label, name, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
                times = bench.in_turns_us(graphs, n_rounds=1, rep_ms=10) if graphs else {}
                flops = 4 * batch * heads * s * s * dim / (2 if causal else 1)
                for name, us in times.items():
                    row(
                        label, name, us, f"host {host_us[name]:.0f}", f"{flops / us / 1e6:.0f} TFLOP/s",
                        f"{times.get('cuDNN', float('nan')) / us:.3f} of cuDNN's rate",
                    )  # fmt: skip


def watch():
    """A kernel that hangs does not keep the machine."""
    time.sleep(max(0, START + BUDGET + 15 - time.perf_counter()))
    print("# ended: something hangs", flush=True)
    os._exit(1)


def main():
    names = {"a": a_products, "b": b_linear_glu, "c": c_lora, "d": d_float32, "e": e_attention, "f": f_pairs}
    torch.manual_seed(0)
    if WORKER is None:
        if not DRY:
            threading.Thread(target=watch, daemon=True).start()
        row(
            "# torch",
            torch.__version__,
            "triton",
            k.triton.__version__,
            "" if DRY else torch.cuda.get_device_name(),
        )
        row("# case | version | µs | rate | beside")
    for letter in PARTS:
        if WORKER is None and not late():
            print(f"# part {letter} after {time.perf_counter() - START:.0f} s", flush=True)
        part(names[letter])
    print(f"# end after {time.perf_counter() - START:.0f} s{', time was up' if late() else ''}", flush=True)


if __name__ == "__main__":
    main()
