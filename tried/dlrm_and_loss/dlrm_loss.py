"""embedding_hash with an update, the loss, interaction: PYTHONPATH=. python .gpu/dlrm_loss.py, from the root.

A line as soon as it is known. Options: names of parts (update, loss, interaction), default all; --seconds: after
so many no further case is begun. Without a GPU small shapes are checked, and nothing is timed.
"""

import argparse
import contextlib
import functools
import itertools
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import ahead
import loss_candidates

from lib import machine
from lib.dlrm import criteo
from lib.dlrm.train import batch_of
from lib.measure import bench
from lib.ops import _host as host
from lib.ops import embedding_hash as eh
from lib.ops import interaction as ia
from lib.ops import linear_cross_entropy as lce

import torch

BEGIN = time.perf_counter()
GPU = machine.HAS_GPU
DEVICE = machine.device()
SMALL = not GPU


LIMIT = [70.0]


def late(what):
    """Whether the time is up: then it says what is left out."""
    if is_late := time.perf_counter() - BEGIN > LIMIT[0]:
        say(f"left out, no time: {what}")
    return is_late


def say(*words):
    print(f"[{time.perf_counter() - BEGIN:5.1f}]", *words, flush=True)


@contextlib.contextmanager
def tried(what):
    try:
        yield
    except Exception as error:  # each part on its own
        say(f"FAILED {what}: {type(error).__name__}: {str(error)[:300]}")
        if not isinstance(error, torch.OutOfMemoryError):
            print("".join(traceback.format_exc().splitlines(True)[-6:]), flush=True)
    if GPU:
        torch.cuda.empty_cache()


def timed(calls, rep_ms=60):
    """{name: (µs, peak MiB)}; calls run once without a GPU."""
    good = {}
    for name, call in calls.items():
        with tried(name):
            call()
            good[name] = call
    if not GPU:
        return {name: (float("nan"), float("nan")) for name in good}
    times = bench.in_turns(good, rep_ms=rep_ms)
    return {name: (times[name].median_us, bench.peak_mib(call)) for name, call in good.items()}


def kernels_of(call, most=9):
    """One line each: the GPU's time of a call by kernel."""
    if not GPU:
        return
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for e in rows[:most]:
        if e.self_device_time_total > 0:
            say(f"      {e.self_device_time_total:9.1f} µs  {e.count:3d} x  {e.key[:110]}")


def as_graph(call):
    """`call` recorded once: a closure that replays all its launches."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # compiles, allocates
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@functools.cache
def copy_rate():
    """Bytes a second, read and written."""
    if not GPU:
        return 1e12
    a = torch.empty(2**28, device=DEVICE)
    b = torch.empty_like(a)
    us = bench.in_turns({"copy": lambda: b.copy_(a)}, rep_ms=30)["copy"].median_us
    return 2 * a.nbytes / (us * 1e-6)


# --- the update ----------------------------------------------------------------------------------------------


def steps_of(ids, weight, num_rows, dy, lr=1e-3):
    """{name: closure}: forward, backward and update."""
    state = torch.zeros(len(weight), device=DEVICE)

    def fused(update):
        def call():
            eh.embedding_hash_triton(ids, weight, num_rows, update=update).backward(dy)

        return call

    def optimized(kind, **how):
        made = []

        def call():
            if not made:  # its state is not there before
                made.append(kind([weight], lr=lr))
            weight.grad = None
            eh.embedding_hash_triton(ids, weight, num_rows, **how).backward(dy)
            made[0].step()
            weight.grad = None

        call.done = made.clear
        return call

    def rows_only():
        (grad,) = torch.autograd.grad(
            eh.embedding_hash_triton(ids, weight, num_rows, sparse=True), weight, dy
        )
        with torch.no_grad():
            weight.index_add_(0, grad._indices()[0], grad._values(), alpha=-lr)

    return {
        "fused SGD": fused(eh.Update(lr)),
        "fused row-wise Adagrad": fused(eh.Update(lr, state)),
        "sparse, index_add": rows_only,
        "sparse, optim.SGD": optimized(torch.optim.SGD, sparse=True),
        "sparse, optim.Adagrad": optimized(torch.optim.Adagrad, sparse=True),
        "sparse, optim.SparseAdam": optimized(torch.optim.SparseAdam, sparse=True),
        "atomics, optim.SGD": optimized(torch.optim.SGD, deterministic=False),
        "dense, optim.SGD": optimized(torch.optim.SGD),
    }


AHEAD = functools.cache(ahead.module)


def check_update(ids, weight, num_rows, dy, lr=0.05, eps=1e-3, module=eh):
    """Against float64, of the rows that were read; other rows keep their bits; twice the same bits."""
    rows = eh._rows(ids, num_rows).flatten()
    used, place = rows.unique(return_inverse=True)
    grad = torch.zeros(len(used), dy.shape[2], dtype=torch.float64, device=DEVICE)
    grad.index_add_(0, place, dy.flatten(0, 1).double())
    eager = torch.zeros_like(grad, dtype=torch.float32)
    eager.index_add_(0, place, dy.flatten(0, 1).float())
    for adagrad in (False, True):
        results = []
        for _ in range(2):
            w = weight.detach().clone().requires_grad_()
            state = torch.full((len(w),), 0.5, device=DEVICE) if adagrad else None
            update = module.Update(lr, state, eps)
            module.embedding_hash_triton(ids, w, num_rows, update=update).backward(dy)
            results.append((w.detach(), state))
        (w, state), (again, _) = results
        before = weight.detach()[used]

        def moved(g, kind):
            rate = lr
            if adagrad:
                rate = lr / ((0.5 + g.square().mean(1, keepdim=True)).sqrt() + eps)
            return before.to(kind) - rate * g

        want = moved(grad, torch.float64)
        ours = (w[used].double() - want).abs().max().item()
        theirs = (moved(eager, torch.float32).to(w.dtype).double() - want).abs().max().item()
        changed = (w != weight.detach()).any(1)
        changed[used] = False
        verdict = "ok" if ours <= 2 * theirs + 1e-6 and not changed.any() else "WRONG"
        same = torch.equal(w, again)
        say(
            f"   check {'adagrad' if adagrad else 'sgd'}: {verdict}, error {ours:.1e}, eager's {theirs:.1e},"
            f" {len(used)} of {len(w)} rows, same bits twice: {same}"
        )
        if verdict != "ok" or not same:
            raise AssertionError("the update is wrong: not timed")
        del w, again, results


def update_cases():
    """(label, ids, num_rows, dim, dtype)"""
    if SMALL:
        yield "small", torch.randint(0, 99, (40, 26), device=DEVICE), (50,) * 26, 16, torch.float32
        return
    for n in (65536, 2048):
        ids = batch_of(n, DEVICE).sparse
        yield f"page 51, {n} rows of Criteo", ids, tuple(criteo.CARDINALITIES), 16, torch.float32
    for dim, dtype in ((128, torch.float32), (128, torch.bfloat16), (16, torch.float32)):
        ids = torch.randint(0, 2**40, (65536, 26), device=DEVICE)
        yield f"65536 rows, uniform, D={dim}, {dtype}", ids, (100_000,) * 26, dim, dtype


PLANS = [(8, 1), (16, 1), (32, 1), (64, 1), (32, 2), (32, 0.5)]


def measure_update():
    for label, ids, num_rows, dim, dtype in update_cases():
        if late(label):
            continue
        with tried(label):
            say(label)
            weight = torch.nn.Parameter(
                torch.empty(sum(num_rows), dim, device=DEVICE, dtype=dtype).uniform_(-0.1, 0.1)
            )
            dy = torch.randn(*ids.shape, dim, device=DEVICE).to(dtype)
            check_update(ids, weight, num_rows, dy)
            for name, call in steps_of(ids, weight, num_rows, dy).items():
                with tried(name):
                    ((us, peak),) = timed({name: call}, rep_ms=40).values()
                    say(f"   {name:26s} {us:9.1f} µs  peak {peak:8.1f} MiB")
                getattr(call, "done", lambda: None)()
                weight.grad = None
            with tried("as CUDA graphs"):
                ways = steps_of(ids, weight, num_rows, dy)
                names = ["fused SGD", "fused row-wise Adagrad", "sparse, index_add"] if GPU else []
                graphs = {f"{name}, graph": as_graph(ways[name]) for name in names}
                for name, (us, peak) in timed(graphs, rep_ms=40).items():
                    say(f"   {name:30s} {us:9.1f} µs")
                del graphs, ways
            state = torch.zeros(len(weight), device=DEVICE)
            update = eh.Update(1e-3, state)
            w = weight.detach()
            base = eh._plan_update(ids.numel(), dim, dtype.itemsize)
            say(f"   row-wise Adagrad's backward by kernel, plan {tuple(base)}")
            kernels_of(lambda: eh._launch_update(base, dy, ids, num_rows, w, update))
            calls = {}
            for length, factor in PLANS if dtype == torch.float32 else []:
                plan = base._replace(length=length, walks=max(1, int(base.walks / factor)))
                calls[f"{tuple(plan)}"] = functools.partial(
                    eh._launch_update, plan, dy, ids, num_rows, w, update
                )
            for name, (us, _) in timed(calls, rep_ms=8).items():
                say(f"      plan (length, walks, warps) {name:16s} backward {us:8.1f} µs")
            with tried("ahead"):
                check_update(ids, weight, num_rows, dy, module=AHEAD())
                base = base._replace(length=32)
                calls = {
                    name: functools.partial(
                        m._launch_update, base, dy, ids, num_rows, w, m.Update(1e-3, with_state)
                    )
                    for name, m, with_state in (
                        ("adagrad", eh, state), ("adagrad, ahead", AHEAD(), state),
                        ("sgd", eh, None), ("sgd, ahead", AHEAD(), None),
                    )
                }  # fmt: skip
                for name, (us, _) in timed(calls, rep_ms=8).items():
                    say(f"      32 lookups a walk, {name:16s} backward {us:8.1f} µs")
            del weight, w, state, update, calls


# --- interaction ---------------------------------------------------------------------------------------------


def measure_interaction():
    shapes = ((65536, 26, 16), (16384, 26, 128), (8192, 26, 64)) if GPU else ((8, 5, 16),)
    say(f"copy rate {copy_rate() / 1e9:.0f} GB/s")
    for (b, t, d), dtype in itertools.product(shapes, (torch.bfloat16, torch.float32)):
        if late((b, t, d)):
            continue
        with tried(f"interaction {b, t, d}"):
            dense = torch.randn(b, d, device=DEVICE).to(dtype)
            embeddings = torch.randn(b, t, d, device=DEVICE).to(dtype)
            pairs = (t + 1) * t // 2
            y = ia._forward(dense, embeddings)
            want = ia.interaction_eager(dense.double()[:64], embeddings.double()[:64])
            error = ((y[:64].double() - want).abs().max() / want.abs().max()).item()
            assert error < 0.01, error
            dy = torch.randn_like(y)
            result = timed(
                {
                    "forward": lambda: ia._forward(dense, embeddings),
                    "backward": lambda: ia._backward(dy, dense, embeddings),
                },
                rep_ms=25,
            )
            n = {"forward": (t + 1) * d + d + pairs, "backward": 2 * (t + 1) * d + d + pairs}
            words = [
                f"{name} {us:8.1f} µs, share {b * n[name] * dtype.itemsize / copy_rate() / (us * 1e-6):.2f}"
                for name, (us, _) in result.items()
            ]
            say(f"   {b}x{t}x{d} {dtype}: {'; '.join(words)}; error {error:.0e}")


# --- the loss ------------------------------------------------------------------------------------------------


def step_of(f, x, weight, labels):
    def call():
        x.grad = weight.grad = None
        f(x, weight, labels).backward()

    return call


def errors(call, x, weight, labels, want):
    call()
    torch.cuda.synchronize() if GPU else None
    got = x.grad[:: max(1, len(x) // 64)], weight.grad[:: max(1, len(weight) // 256)]
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want)]


def measure_loss():
    shapes = ((4096, 3584, 152064), (8192, 2048, 32000)) if GPU else ((300, 32, 1024),)
    for n, k, v in shapes:
        if late((n, k, v)):
            continue
        with tried(f"loss {n, k, v}"):
            torch.manual_seed(0)
            x = (torch.randn(n, k, device=DEVICE)).bfloat16().requires_grad_()
            weight = (torch.randn(v, k, device=DEVICE) * k**-0.5).bfloat16().requires_grad_()
            labels = torch.randint(0, v, (n,), device=DEVICE)
            labels[::9] = -100
            say(f"loss {n}, {k} -> {v}; least {6 * n * k * v / 690e12 * 1e3:.2f} ms at 690 TFLOP/s")
            plan = lce._plan(n, v, k, x.dtype)
            rows = [r for r in (n // 8, n // 4, n // 2, n) if r % 128 == 0] if GPU else [128]
            triton_ = lce.linear_cross_entropy_triton
            calls = {"op": step_of(triton_, x, weight, labels)}
            for r in rows:
                f = functools.partial(triton_, plan=plan._replace(rows=r))
                calls[f"op, chunks of {r} rows"] = step_of(f, x, weight, labels)
            f = functools.partial(triton_, plan=plan._replace(wide=True))
            calls["op, dweight summed in float32"] = step_of(f, x, weight, labels)

            def within(names, r=None):
                f = triton_ if r is None else functools.partial(triton_, plan=plan._replace(rows=r))
                inner = step_of(f, x, weight, labels)

                def call():
                    with loss_candidates.candidate(names):
                        inner()

                return call

            for names in (
                ["folded"],
                ["beside"],
                ["parts8"],
                ["folded", "beside"],
                ["folded", "parts8"],
            ):
                calls[" + ".join(names)] = within(names)
            if GPU:
                for r in (n // 2, n):
                    calls[f"folded + beside, {r} rows"] = within(["folded", "beside"], r)
            eager = step_of(lce.linear_cross_entropy_eager, x, weight, labels)
            eager()
            want = x.grad[:: max(1, n // 64)].clone(), weight.grad[:: max(1, v // 256)].clone()
            x.grad = weight.grad = None
            good = {}
            for name, call in calls.items():
                with tried(name):
                    error = errors(call, x, weight, labels, want)
                    if max(error) > 0.02:
                        raise AssertionError(f"off by {error}")
                    good[name] = call
            if GPU:
                with tried("torch.compile"):
                    torch._dynamo.reset()
                    compiled = torch.compile(lce.linear_cross_entropy_eager, dynamic=False)
                    good["torch.compile"] = step_of(compiled, x, weight, labels)
                    good["torch.compile"]()
                    say("   compiled")
            x.grad = weight.grad = None
            for name, (us, peak) in timed(good, rep_ms=120).items():
                say(f"   {name:34s} {us / 1e3:8.3f} ms  peak {peak:8.1f} MiB")
            for name in ("op", "torch.compile", "folded + beside"):
                if name in good:
                    with tried(name):
                        say(f"   {name} by kernel")
                        kernels_of(good[name])
            x.grad = weight.grad = None
            measure_row_kernel(min(plan.rows, n), v, plan)
            del good, calls, x, weight, want, eager


def measure_row_kernel(n_rows, v, plan):
    """The kernel between the products alone: 2 reads and 1 write of the logits of one chunk."""
    pitch = host.cdiv(v, 16) * 16
    logits = torch.randn(n_rows, pitch, device=DEVICE).bfloat16()
    labels = torch.randint(0, v, (n_rows,), device=DEVICE)
    losses = torch.empty(n_rows, device=DEVICE)

    def call(block_n, num_warps, num_stages):
        host.run(
            lce._cross_entropy_kernel, (n_rows,), (logits, labels, losses, None), v, pitch, -100, GRADS=True,
            SMOOTHING=0.0, Z_LOSS=0.0, SOFTCAP=None, COMPUTE=host.compute_dtype(torch.bfloat16),
            BLOCK_N=block_n, NUM_STAGES=num_stages, num_warps=num_warps,
        )  # fmt: skip

    ways = [(plan.block_n, plan.num_warps, plan.num_stages)]
    if GPU:
        ways += [(2048, 8, 3), (4096, 8, 1), (4096, 8, 3), (4096, 16, 2), (8192, 16, 1), (8192, 16, 2),
                 (8192, 32, 1), (16384, 32, 1), (16384, 32, 2), (32768, 32, 1)]  # fmt: skip
    result = timed({f"{w}": functools.partial(call, *w) for w in ways}, rep_ms=5)
    least = [k * n_rows * pitch * 2 / copy_rate() * 1e6 for k in (3, 2)]
    say(
        f"   row kernel, {n_rows} rows; at the copy rate {least[0]:.0f} µs, {least[1]:.0f} if read once"
    )
    for name, (us, _) in result.items():
        say(f"      (block_n, warps, stages) {name:16s} {us:8.1f} µs")


def main():
    parser = argparse.ArgumentParser()
    known = {"update": measure_update, "loss": measure_loss, "interaction": measure_interaction}
    parser.add_argument("parts", nargs="*", default=list(known))
    parser.add_argument("--seconds", type=float, default=LIMIT[0])
    options = parser.parse_args()
    chosen, LIMIT[0] = options.parts, options.seconds
    say(torch.__version__, torch.cuda.get_device_name(0) if GPU else "no GPU")
    for name in chosen:
        with tried(name):
            known[name]()
    say("done")


if __name__ == "__main__":
    main()
