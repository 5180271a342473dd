"""A simulated GPU: a host with a clock in µs, and a device that works through queues of kernels.

It computes nothing. It models what a stopwatch meets: a launch that returns before the kernel is done, a first
launch that compiles, events, streams, a cache, noise. It does not model a full queue that makes the host wait,
kernels that share the device when streams overlap, or clocks that change.
"""

import contextlib
import random

from lib.profiling import Span

WARM = 0.4  # a kernel whose data is in L2 takes this share of its time
FLUSH_US = 60.0


class VirtualGPU:
    """Times in µs. noise: sigma of a log-normal factor on each kernel; outliers: share of kernels 4–8× slow.

    blocking: every launch waits for its kernel, as with CUDA_LAUNCH_BLOCKING=1.
    """

    def __init__(
        self, launch_us=5.0, compile_us=300.0, blocking=False, noise=0.0, outliers=0.0, seed=0
    ):
        self.launch_us, self.compile_us, self.blocking = launch_us, compile_us, blocking
        self.noise, self.outliers, self.random = noise, outliers, random.Random(seed)
        self.spans = []
        self.host_us = 0.0
        self.free_at = {0: 0.0}  # stream -> when its last kernel ends
        self.compiled, self.in_l2 = set(), set()

    def clock_us(self):
        """The host's clock, as time.perf_counter()."""
        return self.host_us

    def host(self, name, us):
        """The host does something for `us`."""
        self._span("host", name, self.host_us, self.host_us + us)
        self.host_us += us

    def launch(self, name, us, stream=0, data=None):
        """Queue a kernel that takes `us` and return. data: the buffer it reads, in L2 from then on."""
        if us < 0:
            raise ValueError(f"launch: a kernel takes {us} µs; give it 0 or more")
        if name not in self.compiled and self.compile_us:
            self.host(f"compile {name}", self.compile_us)
        self.compiled.add(name)
        self.host(f"launch {name}", self.launch_us)
        us *= WARM if data in self.in_l2 else 1.0
        us *= self.random.lognormvariate(0, self.noise) if self.noise else 1.0
        us *= self.random.uniform(4, 8) if self.random.random() < self.outliers else 1.0
        self.in_l2 |= {data} - {None}
        self._queue(name, us, stream)
        if self.blocking:
            self.synchronize()

    def _queue(self, name, us, stream):
        start = max(self.host_us, self.free_at.get(stream, 0.0))
        self.free_at[stream] = start + us
        self._span(_lane(stream), name, start, start + us)

    def busy(self, us):
        """Keep the device busy for `us`, a known time on which to test a stopwatch."""
        self.host("launch busy", self.launch_us)
        self._queue("busy", us, stream=0)

    def flush_l2(self):
        """Queue a kernel that fills L2 with something else."""
        self.compiled.add("flush L2")
        self.launch("flush L2", FLUSH_US)
        self.in_l2.clear()

    def synchronize(self):
        """Wait until every stream is done."""
        end_us = max(self.free_at.values())
        if end_us > self.host_us:
            self._span("host", "wait", self.host_us, end_us)
            self.host_us = end_us

    def event(self, stream=0):
        """As torch.cuda.Event(enable_timing=True), in µs."""
        return _Event(self, stream)

    @contextlib.contextmanager
    def region(self, name):
        """Name what the host does inside, as an NVTX range."""
        start = self.host_us
        yield
        self.spans.insert(0, Span("region", name, start, self.host_us))

    def _span(self, lane, name, start, end):
        self.spans.append(Span(lane, name, start, end))


def _lane(stream):
    return "device" if stream == 0 else f"stream {stream}"


class _Event:
    def __init__(self, gpu, stream):
        self.gpu, self.stream, self.at_us = gpu, stream, None

    def record(self):
        """Note the time at which everything queued so far in the stream is done."""
        self.at_us = max(self.gpu.host_us, self.gpu.free_at.get(self.stream, 0.0))
        self.gpu._span(_lane(self.stream), "event", self.at_us, self.at_us)

    def elapsed_us(self, later):
        """µs from this event to `later`; RuntimeError before both are recorded and done."""
        if None in (self.at_us, later.at_us):
            raise RuntimeError(
                "an event was never recorded: call its record() before and after the work"
            )
        if max(self.at_us, later.at_us) > self.gpu.host_us:
            raise RuntimeError("device not ready: synchronize before you read events")
        return later.at_us - self.at_us
