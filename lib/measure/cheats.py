"""Seven ways to fake a speed-up of GELU, and the detectors that catch them.

A cheat is a version that does not do the work, or a stopwatch that does not see it. A detector returns None,
or one sentence on what it found. Stopwatches take `run` (launches the work) and `gpu`: a VirtualGPU, or
ThisDevice, which has the same calls.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable

from lib import machine
from lib.measure import roofline
from lib.measure.check import CheckError, check_against_float64
from lib.measure.virtual_gpu import VirtualGPU

import torch
import torch.nn.functional as F


def gelu(x):
    """The honest version."""
    return F.gelu(x, approximate="tanh")


def gelu_by_hand(x):
    """The definition: eight ops, each of them a launch."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# --- versions that do not do the work ------------------------------------------------------------------

_cache = {}


def gelu_cached(x):
    key = (x.data_ptr(), x.shape)
    if key not in _cache:
        _cache[key] = gelu(x)
    return _cache[key]


def gelu_half(x):
    y = torch.empty_like(x)
    half = len(x) // 2
    torch.ops.aten.gelu.out(x[:half], approximate="tanh", out=y[:half])
    return y


def gelu_elsewhere(x):
    if not machine.HAS_GPU:
        return gelu(x)
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return gelu(x)  # and nobody waits for it


def gelu_in_place(x):
    return torch.ops.aten.gelu_(x, approximate="tanh")


def gelu_failed_launch(x):
    # A launch with too many threads, say: the error is never asked for, and y is never written.
    return torch.empty_like(x)


@functools.cache
def _side_stream():
    return torch.cuda.Stream()


# --- the device of this machine, with the calls of VirtualGPU ------------------------------------------


class ThisDevice:
    """The GPU of this machine or, with none, its CPU, where a call is done when it returns."""

    def clock_us(self):
        """The host's clock."""
        return time.perf_counter() * 1e6

    def synchronize(self):
        """Wait for every stream."""
        if machine.HAS_GPU:
            torch.cuda.synchronize()

    def event(self):
        """An event with record() and elapsed_us(later)."""
        return _Event()

    def busy(self, us):
        """Keep the device busy for about `us`; exactly twice as long for twice the number."""
        if machine.HAS_GPU:
            torch.cuda._sleep(int(us * 1500))  # cycles
        else:
            time.sleep(us / 1e6)

    def flush_l2(self):
        """Overwrite 256 MiB, more than any L2 holds."""
        if machine.HAS_GPU:
            _flush_buffer().zero_()


class _Event:
    def record(self):
        if machine.HAS_GPU:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.at_us = time.perf_counter() * 1e6

    def elapsed_us(self, later):
        if machine.HAS_GPU:
            return self.event.elapsed_time(later.event) * 1e3
        return later.at_us - self.at_us


@functools.cache
def _flush_buffer():
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


RESOLUTION_US = 0.5  # of a CUDA event: no claim is below it

# --- stopwatches: (run, gpu) -> µs ---------------------------------------------------------------------


def honest(run, gpu, n=25):
    """Warm-up, L2 flushed before each run, events, the whole device waited for, the median."""
    run()
    pairs = []
    for _ in range(n):
        gpu.flush_l2()
        start, end = gpu.event(), gpu.event()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    gpu.synchronize()
    return statistics.median(start.elapsed_us(end) for start, end in pairs)


def no_sync(run, gpu, n=25):
    """The host's clock, stopped when the launches have returned."""
    run()
    gpu.synchronize()
    begin = gpu.clock_us()
    for _ in range(n):
        run()
    return (gpu.clock_us() - begin) / n


def warm_l2(run, gpu, n=25):
    """Runs back to back on the same data. busy() goes first so that the host gets ahead of the device."""
    run()
    gpu.busy(1000)
    start, end = gpu.event(), gpu.event()
    start.record()
    for _ in range(n):
        run()
    end.record()
    gpu.synchronize()
    return start.elapsed_us(end) / n


# --- detectors of stopwatches that lie -----------------------------------------------------------------


def find_missing_sync(stopwatch, run, gpu):
    """Test the stopwatch on work of known length: twice the work takes twice the time, and all of it."""
    once = stopwatch(lambda: gpu.busy(2000), gpu)
    twice = stopwatch(lambda: gpu.busy(4000), gpu)
    gpu.synchronize()
    if twice < 1.5 * once:
        return f"twice the work took {twice / once:.2f}× the time"
    known = honest(lambda: gpu.busy(4000), gpu, n=3)
    if twice < 0.8 * known:
        return f"work of {known:.0f} µs took {twice:.0f} µs"
    return None


def find_other_stream(stopwatch, run, gpu, n=25):
    """Compare with the host's clock around a wait for the whole device."""
    claimed = max(stopwatch(run, gpu), RESOLUTION_US)
    gpu.synchronize()
    begin = gpu.clock_us()
    for _ in range(n):
        run()
    gpu.synchronize()
    wall = (gpu.clock_us() - begin) / n
    if wall > 3 * claimed and wall > 50:
        return f"the device was at work for {wall:.0f} µs a run, the claim is {claimed:.1f} µs"
    return None


def find_warm_l2(stopwatch, run, gpu):
    """Compare with runs that find L2 full of other data."""
    claimed, cold = stopwatch(run, gpu), honest(run, gpu)
    if claimed < 0.8 * cold and cold - claimed > 1.5:
        return f"with L2 flushed a run takes {cold / claimed:.1f}× as long"
    return None


def find_above_ceiling(claimed_us, bytes_moved, ceiling_gbps):
    """No memory is faster than its ceiling; the bytes are the fewest the op needs."""
    gbps = bytes_moved / claimed_us / 1e3
    if gbps > 1.05 * ceiling_gbps:
        return f"{gbps:,.0f} GB/s is {gbps / ceiling_gbps:.1f}× the ceiling"
    return None


# --- detectors of versions that do not do the work -----------------------------------------------------

SHAPES = ((1, 1), (2, 3), (5, 7), (17, 33), (129, 781), (2050, 1030))


def random_input(shape, seed=0):
    """Normal numbers, and where there is room a large one of each sign, infinity and NaN."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.numel() >= 6:
        x.view(-1)[:4] = torch.tensor([20.0, -20.0, math.inf, math.nan])
    return x.to(machine.device())


def find_cached_result(version, reference=gelu):
    """New numbers in the same memory have to give a new result, and to leave the old one alone."""
    x = random_input((17, 33))
    first = version(x)
    old = first.clone()
    x.copy_(random_input((17, 33), seed=1))
    want = reference(x.clone())
    got = version(x)
    if _same(got, old) and not _same(got, want):
        return "new numbers in the same tensor gave the old result"
    if got.data_ptr() == first.data_ptr() != x.data_ptr():
        return "the second call wrote over the result of the first"
    return None


def find_changed_input(version):
    """The input has to be what it was."""
    x = random_input((17, 33))
    before = x.clone()
    version(x)
    unchanged = torch.equal(x.view(torch.int32), before.view(torch.int32))  # bit by bit, NaN too
    return None if unchanged else "the input is not what it was"


def find_wrong_output(version, reference=gelu):
    """Every element, at odd shapes and extreme values, against float64; the first failure is the smallest."""
    for shape in SHAPES:
        x = random_input(shape, seed=sum(shape))
        try:
            # A copy, so that a version that writes into its input is judged on its output alone.
            check_against_float64(lambda x: version(x.clone()), reference, x, name=f"at {shape}")
        except CheckError as difference:
            return str(difference)
    return None


def _same(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


# --- the workshop --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cheat:
    """A version of GELU and the stopwatch held to it. virtual(gpu): what it launches on a VirtualGPU."""

    name: str
    version: Callable
    stopwatch: Callable
    shape: tuple = (16384, 4096)
    virtual: Callable | None = None


CHEATS = (
    Cheat("no sync", gelu, no_sync, virtual=lambda gpu: gpu.launch("gelu", 100)),
    Cheat("warm L2", gelu, warm_l2, (4096, 1024), lambda gpu: gpu.launch("gelu", 100, data="x")),
    Cheat(
        "other stream",
        gelu_elsewhere,
        honest,
        virtual=lambda gpu: gpu.launch("gelu", 100, stream=1),
    ),
    Cheat("cached result", gelu_cached, honest),
    Cheat("wrong work", gelu_half, honest),
    Cheat("mutated input", gelu_in_place, honest),
    Cheat("unchecked output", gelu_failed_launch, honest),
)


def find(name):
    """The Cheat called `name`; ValueError where there is none."""
    for cheat in CHEATS:
        if cheat.name == name:
            return cheat
    raise ValueError(f"no cheat {name!r}; there are {', '.join(cheat.name for cheat in CHEATS)}")


def where(cheat):
    """Where a cheat runs: 'this GPU', 'virtual GPU' or 'this CPU'."""
    return "this GPU" if machine.HAS_GPU else "virtual GPU" if cheat.virtual else "this CPU"


def _runs(cheat):
    """(gpu, run of the cheat, run of the honest version)."""
    if cheat.virtual and not machine.HAS_GPU:
        gpu = VirtualGPU()
        return gpu, lambda: cheat.virtual(gpu), lambda: gpu.launch("gelu", 100, data="x")
    x = torch.randn(machine.pick(cheat.shape, (4096, 2048)), device=machine.device())
    return ThisDevice(), lambda: cheat.version(x), lambda: gelu(x)


def claim(cheat):
    """{'claimed_us', 'honest_us', 'speed_up'}: the cheat under its stopwatch, the honest version under ours."""
    gpu, run, honest_run = _runs(cheat)
    _cache.clear()
    honest_us = honest(honest_run, gpu)
    claimed_us = max(cheat.stopwatch(run, gpu), RESOLUTION_US)
    gpu.synchronize()
    _cache.clear()
    return {
        "claimed_us": round(claimed_us, 2),
        "honest_us": round(honest_us, 2),
        "speed_up": round(honest_us / claimed_us, 2),
    }


def catch(cheat):
    """{detector: what it found} for the detectors that found something."""
    gpu, run, _ = _runs(cheat)
    findings = {}
    if machine.HAS_GPU or cheat.virtual:  # on a CPU nothing runs behind the host's back
        for detector in (find_missing_sync, find_other_stream, find_warm_l2):
            findings[detector.__name__] = _each_time(detector, cheat.stopwatch, run, gpu)
    for detector in (find_cached_result, find_changed_input, find_wrong_output):
        _cache.clear()
        findings[detector.__name__] = detector(cheat.version)
    _cache.clear()
    return {name: finding for name, finding in findings.items() if finding}


def _each_time(detector, *arguments):
    """What the detector finds three times in a row, since a busy machine can mislead it once."""
    for _ in range(3):
        finding = detector(*arguments)
        if not finding:
            return None
    return finding


def claims(*names):
    """One row per cheat: what it claims, beside the honest time."""
    cheats = [find(name) for name in names]
    return [{"cheat": c.name, "on": where(c), **claim(c)} for c in cheats]


def findings(*names):
    """One row for each detector that found something."""
    return [
        {"cheat": name, "detector": detector, "finding": finding}
        for name in names
        for detector, finding in catch(find(name)).items()
    ]


def workshop():
    """One row per cheat: the speed-up it claims, and which detectors caught it."""
    rows = []
    for cheat in CHEATS:
        row, caught = claim(cheat), catch(cheat)
        if machine.HAS_GPU:
            bytes_moved = 2 * 4 * math.prod(cheat.shape)
            ceiling = roofline.ceilings().bandwidth_gbps
            if finding := find_above_ceiling(row["claimed_us"], bytes_moved, ceiling):
                caught["find_above_ceiling"] = finding
        detectors = ", ".join(name.removeprefix("find_") for name in caught)
        rows.append({"cheat": cheat.name, "on": where(cheat), **row, "caught_by": detectors})
    return rows
