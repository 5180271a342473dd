"""Where the time goes: torch.profiler as a short table, spans for a timeline, NVTX ranges, bytes of each op.

With a GPU it reports kernels and their GPU time, without one ops and their CPU time. For more see what
lib.profiling.cost, lib.profiling.timeline and lib.profiling.memory make of events_of(profiled(fn)).
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from lib import machine
from lib.profiling import events as ev
from lib.profiling.events import STEP
from lib.profiling.timeline import Span
from lib.profiling.trace import Lines, events_of

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Without this the profiler writes two lines to stderr for each profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextlib.contextmanager
def region(name):
    """Name a piece of code for torch.profiler and, with a GPU, as an NVTX range for Nsight."""
    nvtx = torch.cuda.nvtx.range(name) if machine.HAS_GPU else contextlib.nullcontext()
    with record_function(name), nvtx:
        yield


def profiled(fn, stack=False, memory=False):
    """The torch.profiler profile of one call of `fn`, after one call to warm up `fn` and one the profiler.

    stack: record lines of Python, for lib.profiling.cost.syncs. memory: record allocations, for
    lib.profiling.memory. Both slow the host down, so take times from a profile without them. Raises TypeError
    when fn cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"profiled takes a function to call, got {type(fn).__name__}; use a lambda")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.HAS_GPU
    options = {"with_stack": stack, "profile_memory": memory}
    plan = schedule(wait=0, warmup=1, active=1)
    fn()
    _wait()
    with contextlib.ExitStack() as around:
        if memory:
            around.enter_context(_without_size_warning())
        recorded = around.enter_context(profile(activities=activities, schedule=plan, **options))
        if stack:
            around.enter_context(Lines())
        fn()
        _wait()
        recorded.step()  # from warming up to recording
        with record_function(STEP):
            fn()
        _wait()
    return recorded


@contextlib.contextmanager
def _without_size_warning():
    """Drop the profiler's warning on memory allocated before it started; pass on all else."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if b"Memory block of unknown size" not in line:
                    os.write(2, line)


def _wait():
    if machine.HAS_GPU:
        torch.cuda.synchronize()


def save_trace(fn, path):
    """Write the trace of one call of `fn` as JSON, for ui.perfetto.dev; returns its name and size."""
    profiled(fn).export_chrome_trace(str(path))
    return f"{Path(path).name}, {Path(path).stat().st_size / 1e3:.0f} kB"


def op_table(source):
    """One row per kernel (with no GPU: per op) of one call: its calls and self µs, longest first.

    source: the function to call, or the events of a call.
    """
    events = ev.checked(
        source if isinstance(source, list) else events_of(profiled(source)), whole=True
    )
    device, rows = ev.has_device(events), {}
    for e in events:
        is_counted = e["kind"] in ev.DEVICE if device else _is_work(e)
        if is_counted:
            name = e["name"].removeprefix("aten::").split(" (")[0]
            us = e["end_us"] - e["start_us"] if device else e["self_us"]
            calls, total = rows.get(name, (0, 0.0))
            rows[name] = calls + 1, total + us
    table = pd.DataFrame(
        [(name, calls, round(us, 1)) for name, (calls, us) in rows.items()],
        columns=["kernel" if device else "op", "calls", "self_us"],
    )
    return table.sort_values("self_us", ascending=False, ignore_index=True)


# Ops that others call to prepare their arguments: Python numbers made into tensors, allocations, casts.
_HELPERS = {f"aten::{n}" for n in "_to_copy copy_ empty_strided empty to result_type item".split()}


def _is_work(event):
    named = event["kind"] == "op" and event["name"].startswith("aten::")
    return named and not (event["name"] in _HELPERS and event["outer"])


def spans_of(fn):
    """Spans of one call of `fn` in the lanes region, host (outermost ops, waiting) and device (kernels)."""
    spans = []
    for e in events_of(profiled(fn)):
        lane, name = None, e["name"]
        if e["kind"] in ev.DEVICE:
            lane, name = "device", name.split(" (")[0]
        elif e["kind"] == "region":
            lane = "region"
        elif e["kind"] == "runtime" and ev.WAIT.match(name):
            lane, name = "host", "wait"
        elif e["kind"] == "op" and not e["outer"]:
            lane, name = "host", name.removeprefix("aten::")
        if lane:
            spans.append(Span(lane, name, e["start_us"], e["end_us"]))
    zero = min((span.start_us for span in spans), default=0)
    shifted = [Span(s.lane, s.name, s.start_us - zero, s.end_us - zero) for s in spans]
    return sorted(shifted, key=lambda span: span.start_us)


class _Traffic(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            read, written = _n_bytes((args, kwargs)), _n_bytes(result)
            self.rows.append((func._schema.name.removeprefix("aten::"), read, written))
        return result


def _n_bytes(tree):
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def traffic_table(fn):
    """One row per op that `fn` runs eagerly: bytes of its tensor arguments, bytes of its results."""
    with _Traffic() as counted:
        fn()
    return pd.DataFrame(counted.rows, columns=["op", "bytes_read", "bytes_written"])
