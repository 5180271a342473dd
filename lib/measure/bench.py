"""Time the versions of an op, after checking them, and show them as a ladder.

Method    the versions of a case in turns: one run of each, in an order drawn anew, so that all meet the same
          clock. L2 is flushed before every run, GPU events stand around it; median, p20 and p80 of the runs, in
          µs. Where p80 is above 1.1 times p20 all are timed again, and marked if it stays so. NVML tells clock
          and power meanwhile, torch.profiler the launches. Of calls under 300 µs the GPU's own time, as a CUDA
          graph, and the host's stand apart.
Rule      a version that fails the float64 check is not timed: its row says why.
No GPU    the check runs here, on a small shape; the times are the recorded ones, and say so.

    python -m lib.measure.bench [--op add_relu] [--quick]      measure on this GPU and save to data/results
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import time
from unittest import mock

from lib import machine
from lib.measure import registry, roofline
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu import cuda
from lib.recorded import results

import pandas as pd
import torch
import triton
from tqdm import tqdm

COLUMNS = [
    "version",
    "where",
    "time_us",
    "p20_us",
    "p80_us",
    "gpu_us",
    "host_us",
    "launches",
    "bytes_moved",
    "bandwidth_gbps",
    "tflops",
    "ceiling_pct",
    "peak_mib",
    "error_vs_float64",
    "note",
]


@dataclasses.dataclass(frozen=True)
class Timing:
    """µs: the median of many runs, and the 20th and 80th percentile.

    sm_mhz, watts: the clock and the power meanwhile; None where nobody asked, or NVML is not there.
    """

    median_us: float
    p20_us: float
    p80_us: float
    sm_mhz: int | None = None
    watts: int | None = None

    @property
    def spread(self):
        """p80 over p20: 1 where every run took as long."""
        return self.p80_us / self.p20_us

    def __repr__(self):
        return f"{self.median_us:.1f} µs (p20–p80 {self.p20_us:.1f}–{self.p80_us:.1f})"


def _require_gpu(function):
    if not machine.HAS_GPU:
        raise ValueError(
            f"{function} needs a GPU: the interpreter's times say nothing about one. Use the recorded "
            "ladder, or time CPU code with torch.utils.benchmark"
        )


def time_us(fn, rep_ms=200):
    """Timing of `fn()` on this GPU, L2 flushed before each run. ValueError with no GPU."""
    _require_gpu("time_us")
    quantiles = triton.testing.do_bench(fn, warmup=25, rep=rep_ms, quantiles=(0.5, 0.2, 0.8))
    return Timing(*(1e3 * ms for ms in quantiles))


def in_turns(calls, rep_ms=200, seed=0):
    """{name: Timing} of `calls`, {name: closure}: one run of each, in an order drawn anew, then the next round.

    A GPU that multiplies for long lowers its clock: timed one after the other, later ones would look slower.
    As many rounds as give each rep_ms, five at least. ValueError with no GPU.
    """
    _require_gpu("in_turns")
    order, gpu = random.Random(seed), triton.runtime.driver.active
    memory, gauges = gpu.get_empty_cache_for_benchmark(), []

    def run_each():
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in "ab"] for name in calls}
        for name in order.sample(list(calls), len(calls)):
            gpu.clear_cache(memory)
            events[name][0].record()
            calls[name]()
            events[name][1].record()
        return events

    run_each()  # compiles here, so that no round has a pause in which the GPU cools
    torch.cuda.synchronize()
    start = time.perf_counter()
    run_each()
    torch.cuda.synchronize()
    n_rounds = int(rep_ms * len(calls) / (1e3 * (time.perf_counter() - start)))
    n_rounds, rounds = max(5, min(n_rounds, 1000)), []
    for i in range(n_rounds):
        rounds.append(run_each())
        if i % max(1, n_rounds // 8) == 0:
            gauges.append(_clock_and_power())
            run_each()  # meanwhile the GPU ran dry: without this the next times would be the host's
    torch.cuda.synchronize()
    sm_mhz, watts = (statistics.median(g) if None not in g else None for g in zip(*gauges))
    timings = {}
    for name in calls:
        times = torch.tensor([1e3 * a.elapsed_time(b) for a, b in (r[name] for r in rounds)])
        timings[name] = Timing(
            *times.quantile(torch.tensor([0.5, 0.2, 0.8])).tolist(), sm_mhz, watts
        )
    return timings


def _clock_and_power():
    """MHz of the SMs and watts, by NVML; (None, None) without the package nvidia-ml-py."""
    try:
        return torch.cuda.clock_rate(), torch.cuda.power_draw() // 1000
    except (ImportError, RuntimeError):
        return None, None


def steadily(calls, n_tries=3):
    """in_turns(calls), again while the runs of one differ by more than STEADY; of each the steadiest try."""
    steadiest = {}
    for _ in range(n_tries):
        for name, timing in in_turns(calls).items():
            steadiest[name] = min(
                steadiest.get(name, timing), timing, key=lambda timing: timing.spread
            )
        if max(timing.spread for timing in steadiest.values()) <= results.STEADY:
            break
    return steadiest


def in_turns_us(calls, n_rounds=5, rep_ms=100):
    """{name: median µs} of in_turns(calls), n_rounds · rep_ms for each."""
    timings = in_turns(calls, n_rounds * rep_ms)
    return {name: timing.median_us for name, timing in timings.items()}


def host_us(fn, n_calls=100, n_repeats=7):
    """Host time of one call in µs, launches included and not waited for: what a small op costs.

    The median of n_repeats means: a host has other things to do now and then. ValueError with no GPU.
    """
    _require_gpu("host_us")
    fn()
    means = []
    for _ in range(n_repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n_calls):
            fn()
        means.append((time.perf_counter() - start) / n_calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(means)


def gpu_us(fn):
    """µs of the GPU alone for one call of `fn`: replayed as a CUDA graph, L2 flushed before each replay.

    None where the call cannot be captured: it waits for the GPU. ValueError with no GPU.
    """
    _require_gpu("gpu_us")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()  # what a first call on a stream allocates is no part of the graph
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with torch.cuda.graph(graph):
            fn()
    except RuntimeError:
        return None
    return time_us(graph.replay).median_us


def kernels_launched(fn):
    """The names of the GPU kernels that one call of `fn` launches, in order, from torch.profiler.

    ValueError with no GPU; there, count_traffic of lib.nogpu.memory counts launches of Triton kernels.
    RuntimeError when the profiler sees nothing, as where the GPU's counters are another tool's.
    """
    _require_gpu("kernels_launched")
    # Otherwise CUPTI stays attached after the first profile, and slows every launch.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    fn()
    for _ in range(5):
        torch.cuda.synchronize()
        names = _profiled(fn)
        first, *between, last = names if len(names) > 1 else ("", "")
        if _MARK in first and _MARK in last:
            return [name for name in between if not name.startswith(("Memset", "Memcpy"))]
    raise RuntimeError("kernels_launched: torch.profiler saw none of this program's kernels")


_MARK = "spin_kernel"  # of torch.cuda._sleep


def _profiled(fn):
    """What the GPU did for one call of `fn`, in order, between two marks.

    The listener is taken out a while after a profile ends: one that begins by then sees a part, or nothing.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        torch.cuda._sleep(1)
        fn()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def peak_mib(fn):
    """MiB that one call of `fn` allocates on top of what is there, at its highest. ValueError with no GPU."""
    _require_gpu("peak_mib")
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def versions_of(op):
    """{'eager': …, 'compiled': …, then the op's own versions}: the rungs of its ladder, in order.

    In-place versions are not timed: each run would need a fresh copy of x.
    """
    return {"eager": op.eager, "compiled": _compiled(op.eager), **op.versions}


@functools.cache
def _compiled(eager):
    # dynamic=False: each shape gets its own code, the fastest that torch.compile can write for it
    return torch.compile(eager, dynamic=False)


@contextlib.contextmanager
def really_compiled(not_compiled=()):
    """Inside, torch.compile raises where it would fall back to eager, as it does after 8 shapes.

    Around the measuring and not in the version: entering it costs as much host time as a launch.
    not_compiled: functions that run as they are all the same.
    """
    torch.compiler.reset()  # forget other shapes' code
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(fail_on_recompile_limit_hit=True))
        for function in not_compiled:
            module, uncompiled = sys.modules[function.__module__], torch.compiler.disable(function)
            stack.enter_context(mock.patch.object(module, function.__name__, uncompiled))
        yield


def call_of(version, inputs, gradients):
    """A closure to time: the forward pass alone, or forward and backward with fresh gradients."""
    if not gradients:
        values = detached(inputs)
        return lambda: version(*values)
    trained = leaves(inputs)
    dys = [torch.randn_like(y) for y in outputs(version(*inputs))]

    def forward_and_backward():
        # In this thread: autograd's own takes hundreds of µs to be woken on some hosts, whatever it runs then.
        # grad and not backward: that would copy a gradient which is dy itself into .grad
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(outputs(version(*inputs)), trained, dys)

    return forward_and_backward


def outputs(result):
    """The tensors that a version returns, as a list: one, or those of a tuple."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def detached(inputs):
    """An op's inputs without gradients; those that are no tensors as they are."""
    return [i.detach() if isinstance(i, torch.Tensor) else i for i in inputs]


def leaves(inputs):
    """The tensors among an op's inputs whose gradients are asked for."""
    return [i for i in inputs if isinstance(i, torch.Tensor) and i.requires_grad]


def _why_skipped(name):
    return cuda.why_no_cuda() if name == "cuda" else None


def _checked(name, version, op, inputs, gradients):
    """(error, note): the error against float64, or why there is none."""
    if skip := _why_skipped(name):
        return None, f"skipped: {skip}"
    if name == "compiled" and not machine.HAS_GPU:
        return None, ""
    try:
        check = check_against_float64(
            version, op.eager, *inputs, gradients=gradients, slack=op.slack, name=name
        )
    except CheckError as error:
        return None, f"✘ not timed: {error}"
    return check.version_error, ""


def measure(op, shape, dtype, gradients, versions=None, progress=None, timed=None):
    """One row (a dictionary with COLUMNS) per version, each checked and then timed on this GPU.

    timed: the versions to time, where checks had to fix what is random in them.
    """
    rows, calls = [], {}
    least = {
        "bytes_moved": op.bytes_moved(shape, dtype.itemsize, gradients),
        "flops": op.flops(shape, gradients),
    }
    checked = op.checked_inputs(op.checked_shape(shape), dtype, machine.device())
    with really_compiled(op.not_compiled):
        for name, version in (versions or versions_of(op)).items():
            if progress is not None:
                progress.set_postfix_str(f"{op.name} {name} {tuple(shape)}")
            error, note = _checked(name, version, op, checked, gradients)
            where = {"version": name, "where": "measured here"}
            rows.append({**where, "error_vs_float64": error, "note": note})
            calls |= {} if note else {name: (timed or {}).get(name, version)}
        del checked
        inputs = op.inputs(shape, dtype, machine.device())
        calls = {name: call_of(version, inputs, gradients) for name, version in calls.items()}
        timings = steadily(calls) if calls else {}
        for row in rows:
            if (name := row["version"]) in calls:
                row |= _timed(calls[name], timings[name], least, dtype)
                row["note"] = _note_on(row)
    del inputs, calls
    torch.cuda.empty_cache()
    return rows


def _note_on(row):
    """The row's own note; where it has none, that its p80 passes STEADY times its p20, or ''."""
    spread = results.spread_of(row)
    unsteady = f"unsteady: p80 is {spread:.2f} times p20" if spread > results.STEADY else ""
    return row.get("note") or unsteady


def _timed(call, timing, least, dtype):
    """least: the fewest bytes_moved and flops; ceiling_pct says how near their time the call comes.

    Below 300 µs the host may take longer than the GPU: there the GPU's own time and the host's stand apart.
    """
    apart = {}
    if timing.median_us < 300:
        gpu = gpu_us(call)
        apart = {"gpu_us": gpu and round(gpu, 2), "host_us": round(host_us(call), 1)}
    limit_us = roofline.ceilings().attainable_us(**least, dtype=dtype_name(dtype))
    return {
        "time_us": round(timing.median_us, 2),
        "p20_us": round(timing.p20_us, 2),
        "p80_us": round(timing.p80_us, 2),
        **apart,
        "launches": len(kernels_launched(call)),
        "bytes_moved": least["bytes_moved"],
        "bandwidth_gbps": round(least["bytes_moved"] / timing.median_us / 1e3, 1),
        "tflops": round(least["flops"] / timing.median_us / 1e6, 2),
        "ceiling_pct": round(100 * limit_us / timing.median_us, 1),
        "peak_mib": round(peak_mib(call), 1),
        **_at_its_clock(timing, least["flops"]),
    }


def _at_its_clock(timing, flops):
    """Clock and power, and what each SM did in a cycle; nothing without NVML."""
    if timing.sm_mhz is None:
        return {}
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    each = flops / (timing.median_us * timing.sm_mhz * n_sms)
    return {"sm_mhz": timing.sm_mhz, "watts": timing.watts, "flops_per_clock_and_sm": round(each)}


def fit(op, shape, dtype):
    """`shape` with its rows halved until the float64 check of it fits into the memory that is free."""
    shape = tuple(shape)
    free, _ = torch.cuda.mem_get_info()
    # what goes in and out, with elements of 8 bytes; autograd and checks keep ten times as much
    while 10 * op.bytes_moved(shape, 8, False) > free and shape[0] > 1:
        shape = (shape[0] // 2, *shape[1:])
    return shape


def ladder(op, shape=None, dtype=torch.float32, gradients=False, versions=None, configuration=None):
    """The ladder of one op: a DataFrame with COLUMNS, one row per version and place of measurement.

    op: an entry of the registry or its name; configuration: a label of it, the first by default. With a GPU,
    `shape` (default: the op's first bench shape, made to fit) is checked and timed here, and the recorded rows
    stand beside it, but for a page that `make record` writes on the GPU they come from. With no GPU, versions
    are checked on the op's small shape and the times are the recorded ones for `shape`.
    """
    op = registry.find(op) if isinstance(op, str) else op
    shape = tuple(shape or op.bench_shapes[0])
    recorded = _recorded_rows(op, shape, dtype, gradients, configuration)
    timed = _to_time(op, configuration)
    op = op.configured(configuration)
    if versions is not None:
        recorded = [row for row in recorded if row["version"] in versions]
    if machine.HAS_GPU:
        shape = fit(op, shape, dtype)
        rows = measure(op, shape, dtype, gradients, versions, timed=timed)
        # On a page that is being recorded they would be a second measurement of one and the same GPU.
        rows += [] if results.recording_the_reference() else recorded
    else:
        rows = _checked_here(op, dtype, gradients, versions, recorded)
    table = pd.DataFrame(rows).reindex(columns=COLUMNS)
    what = "forward and backward" if gradients else "forward"
    table.attrs["caption"] = f"{op.title}, {what}, {_shape(shape)}, {dtype_name(dtype)}"
    if _compute_bound(op, shape, dtype, gradients):
        table.attrs["flops"] = op.flops(shape, gradients)
    return table


def _to_time(op, configuration):
    """The versions to time where checks fix what is random in them, else None: those that are checked."""
    return versions_of(op.unfixed().configured(configuration)) if op.random else None


def _compute_bound(op, shape, dtype, gradients):
    """Whether arithmetic and not traffic sets the least time."""
    top, bytes_moved = roofline.ceilings(), op.bytes_moved(shape, dtype.itemsize, gradients)
    return op.flops(shape, gradients) > bytes_moved * top.ridge(dtype_name(dtype))


def _checked_here(op, dtype, gradients, versions, recorded):
    """With no GPU: errors computed here on the small shape, put into the recorded rows."""
    by_version = {row["version"]: row for row in recorded}
    rows = []
    for name, version in (versions or versions_of(op)).items():
        inputs = op.inputs(op.small_shape, dtype, machine.device())
        error, note = _checked(name, version, op, inputs, gradients)
        row = by_version.get(name, {"version": name, "where": results.NOT_RECORDED})
        here = f"checked here at {_shape(op.small_shape)}" if error is not None else ""
        note = note or "; ".join(part for part in (row.get("note"), here) if part)
        rows.append({**row, "error_vs_float64": error, "note": note})
    return rows


def _recorded_rows(op, shape, dtype, gradients, configuration=None):
    record = results.load(op.name)
    if record is None:
        return []
    # Rows of the first configuration, the op's own, carry no label.
    label = None if configuration == next(iter(op.configurations)) else configuration
    case = {"shape": list(shape), "dtype": dtype_name(dtype), "gradients": gradients}
    case |= {"configuration": label}
    rows = [r for r in record["rows"] if all(r.get(k) == v for k, v in case.items())]
    old = ", before the code last changed" if results.is_stale(record) else ""
    where = results.where(record) + old
    # a record may be older than the note
    return [{**r, "where": where, "note": _note_on(r)} for r in rows]


def _shape(shape):
    return "×".join(map(str, shape))


def dtype_name(dtype):
    """'float32' of torch.float32, as records have it."""
    return str(dtype).removeprefix("torch.")


def run(op, quick=False):
    """Every shape, dtype and pass of one op on this GPU, as rows for data/results, with a progress bar.

    Configurations after the first are measured on the first shape, and their rows carry their label.
    """
    cases = _cases(op, quick)
    compile_ahead(_compile, [(op.name, *case) for case in cases])
    # first: later the process has more to do than launches
    rows = _host_rows(op.unfixed().configured())
    with tqdm(cases, unit="case", desc=op.name) as progress:
        for label, shape, dtype, gradients in progress:
            chosen = op.configured(label)
            fitted = fit(chosen, shape, dtype)
            case = {"shape": list(fitted), "dtype": dtype_name(dtype), "gradients": gradients}
            if label is not None:
                case["configuration"] = label
            timed = _to_time(op, label)
            measured = measure(chosen, fitted, dtype, gradients, progress=progress, timed=timed)
            rows += [{**case, **row} for row in measured]
    return rows


def _cases(op, quick):
    """(label, shape, dtype, gradients) of everything that `run` measures; the label of the first is None."""
    others = [] if quick else list(op.configurations)[1:]
    shapes = op.bench_shapes[:1] if quick else op.bench_shapes
    passes = (False, True)
    # float16 moves and multiplies as bfloat16 does: one case shows it
    dtypes = [dtype for dtype in op.dtypes if dtype != torch.float16]
    half = [(None, shapes[0], torch.float16, False)] if torch.float16 in op.dtypes else []
    # The first configuration last: whoever reads the rows without their labels ends with its figures.
    cases = [*itertools.product(others, op.bench_shapes[:1], dtypes, passes)]
    return cases + [*itertools.product([None], shapes, dtypes, passes)] + half


def compile_ahead(function, cases):
    """function(*case) of each case, in as many processes as there are cores: compiling takes most of the time.

    What they compile stays in the caches of Triton and of torch.compile.
    """
    workers, context = min(os.cpu_count(), 16), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(function, *case) for case in cases]
        done = concurrent.futures.as_completed(futures)
        for future in tqdm(done, total=len(futures), unit="case", desc="compile"):
            future.result()


def _compile(name, label, shape, dtype, gradients):
    op = registry.find(name)
    chosen = op.configured(label)
    with really_compiled(chosen.not_compiled):
        for version, run_version in (versions_of(chosen) | (_to_time(op, label) or {})).items():
            if not _why_skipped(version):
                run_once(run_version, chosen, shape, dtype, gradients)


def run_once(version, op, shape, dtype, gradients):
    """One call, for what it compiles. What fails here says so where it is timed."""
    with contextlib.suppress(RuntimeError):
        call_of(version, op.inputs(shape, dtype, machine.device()), gradients)()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _host_rows(op):
    """Host time per call, forward and of both passes, on a shape so small that nothing else counts."""
    rows, shape = [], op.host_shape
    for name, version in versions_of(op).items():
        if _why_skipped(name):
            continue
        inputs = op.inputs(shape, torch.float32, machine.device())
        row = {"shape": list(shape), "dtype": "host", "version": name}
        with really_compiled():
            row["host_us"] = round(host_us(call_of(version, inputs, False)), 1)
            row["host_both_us"] = round(host_us(call_of(version, inputs, True)), 1)
        rows.append(row)
    return rows


def main(argv=None):
    """Measure and save; prints one line per row."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.measure.bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--op", choices=[*registry.OPS], help="one op; default: all")
    parser.add_argument("--quick", action="store_true", help="the first shape only, nothing saved")
    options = parser.parse_args(argv)
    if not machine.HAS_GPU:
        raise SystemExit(
            "bench needs a GPU, and torch sees none; the recorded results are in data/results"
        )
    print(machine.stamp().line())
    for op in [registry.find(options.op)] if options.op else registry.OPS.values():
        rows = run(op, options.quick)
        _print(rows)
        if not options.quick:
            print("saved", results.save(op.name, rows, op.sources).relative_to(results.ROOT))
    if not options.quick:
        print("saved", roofline.save().relative_to(results.ROOT))
        from lib.measure import scoreboard  # chooses a backend without a screen, so not at the top

        print("saved", scoreboard.draw().relative_to(results.ROOT))


def _print(rows):
    table = pd.DataFrame(rows)
    columns = [
        "configuration",
        "shape",
        "dtype",
        "gradients",
        "version",
        "time_us",
        "p20_us",
        "p80_us",
        "gpu_us",
        "host_us",
    ]
    columns += [
        "launches",
        "ceiling_pct",
        "peak_mib",
        "error_vs_float64",
        "note",
    ]
    print(table.reindex(columns=columns).to_string(index=False, na_rep="–"))


if __name__ == "__main__":
    main()
