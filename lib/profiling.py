"""Where the time goes: torch.profiler as a short table, a timeline in lanes, NVTX ranges, traffic counted.

Works with what there is: with a GPU the kernels and their time on it, without one the ops and their CPU time.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from lib import machine
from lib.show import show_figure

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The profiler's library otherwise writes two lines to stderr for each profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Span(NamedTuple):
    """Something that ran from start_us to end_us in one lane of a timeline; a mark when both are equal."""

    lane: str
    name: str
    start_us: float
    end_us: float


@contextlib.contextmanager
def region(name):
    """Name a piece of code: for torch.profiler everywhere, and as an NVTX range for Nsight with a GPU."""
    nvtx = torch.cuda.nvtx.range(name) if machine.HAS_GPU else contextlib.nullcontext()
    with record_function(name), nvtx:
        yield


def profiled(fn):
    """The torch.profiler profile of one call of `fn`, after a call to warm up `fn` and one the profiler."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.HAS_GPU
    fn()
    _wait()
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1)) as recorded:
        fn()
        _wait()
        recorded.step()  # from warming up to recording
        fn()
        _wait()
    return recorded


def _wait():
    if machine.HAS_GPU:
        torch.cuda.synchronize()


def save_trace(fn, path):
    """Write the trace of one call of `fn` as JSON, for ui.perfetto.dev; returns its name and size."""
    profiled(fn).export_chrome_trace(str(path))
    return f"{Path(path).name}, {Path(path).stat().st_size / 1e3:.0f} kB"


def op_table(fn):
    """One row per kernel (with no GPU: per op) of one call of `fn`: its calls and self µs, longest first."""
    rows = {}
    for event in profiled(fn).events():
        if machine.HAS_GPU:
            mine = event.device_type == DeviceType.CUDA and not _is_range(event)
            name, us = short_name(event.name), event.time_range.elapsed_us()
        else:
            mine = event.name.startswith("aten::") and not _is_helper(event)
            name, us = event.name.removeprefix("aten::"), event.self_cpu_time_total
        if mine:
            calls, total = rows.get(name, (0, 0.0))
            rows[name] = calls + 1, total + us
    table = pd.DataFrame(
        [(name, calls, round(us, 1)) for name, (calls, us) in rows.items()],
        columns=["kernel" if machine.HAS_GPU else "op", "calls", "self_us"],
    )
    return table.sort_values("self_us", ascending=False, ignore_index=True)


# What an op calls to prepare its arguments: Python numbers made into tensors, memory, types.
_HELPERS = {f"aten::{n}" for n in "_to_copy copy_ empty_strided empty to result_type item".split()}


def _is_helper(event):
    return event.name in _HELPERS and not _is_outermost(event)


def _is_range(event):
    # A region: the profiler shows it on the device too, where it is no kernel.
    return getattr(event, "is_user_annotation", False)


def short_name(kernel):
    """A kernel's name without namespaces and most template arguments: 'elementwise_kernel<MulFunctor>'."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    outer, _, arguments = plain.partition("<")
    inner = re.findall(r"\w*Functor\w*|\w+_kernel_?\w*|\w+KernelImpl", arguments.split("std::")[0])
    name = outer.split("(")[0].split("::")[-1].strip()
    return f"{name}<{inner[-1]}>" if inner else name


def trace(fn):
    """Spans of one call of `fn` in the lanes region, host (outermost ops, waiting) and device (kernels)."""
    spans = []
    for event in profiled(fn).events():
        if event.name.startswith("ProfilerStep"):
            continue
        start, end = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CUDA:
            if not _is_range(event):
                spans.append(Span("device", short_name(event.name), start, end))
        elif _is_range(event):
            spans.append(Span("region", event.name, start, end))
        elif event.name.endswith("Synchronize"):
            spans.append(Span("host", "wait", start, end))
        elif _is_outermost(event):
            spans.append(Span("host", event.name.removeprefix("aten::"), start, end))
    zero = min((span.start_us for span in spans), default=0)
    shifted = [Span(s.lane, s.name, s.start_us - zero, s.end_us - zero) for s in spans]
    return sorted(shifted, key=lambda span: span.start_us)


def _is_outermost(event):
    parent = event.cpu_parent
    return event.name.startswith("aten::") and (
        parent is None or not parent.name.startswith("aten::")
    )


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


_ORDER = ("region", "host", "device")  # lanes with other names come below, in order of appearance


def plot_timeline(spans, title):
    """A figure with one lane for each `lane` of `spans`, time in µs to the right; waiting is dotted."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    lanes.sort(key=lambda lane: _ORDER.index(lane) if lane in _ORDER else len(_ORDER))
    figure, ax = plt.subplots(figsize=(8.5, 0.9 + 0.6 * len(lanes)), layout="constrained")
    total = max((span.end_us for span in spans), default=0) or 1.0
    for k, span in enumerate(spans):
        y, width = lanes.index(span.lane), span.end_us - span.start_us
        if width == 0:
            ax.plot(span.start_us, y - 0.47, "v", color="black", markersize=5, clip_on=False)
            continue
        style = {"color": ("#cfdcec", "#a9c1dd")[k % 2], "linewidth": 0.7}
        if span.name == "wait":
            style = {"color": "white", "linestyle": ":"}
        ax.barh(y, width, left=span.start_us, height=0.62, edgecolor="black", **style)
        label = _label(span.name, room=int(width / total * 118))
        ax.text(span.start_us + width / 2, y, label, ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(ylim=(len(lanes) - 0.45, -0.65), xlim=(0, total * 1.01), xlabel="time, µs")
    ax.set_title(title, fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _label(name, room):
    """As much of a name as `room` characters hold: all, what stands in <>, the beginning, or nothing."""
    inner = name.partition("<")[2].rstrip(">")
    for text in (name, inner):
        if text and len(text) <= room:
            return text
    return "" if room < 8 or name.startswith("launch ") else (inner or name)[: room - 1] + "…"


def show_timeline(spans, title):
    """Display `plot_timeline` with the spans listed in the alt text."""
    told = "; ".join(f"{s.lane}: {s.name} {s.start_us:.0f}–{s.end_us:.0f}" for s in spans[:40])
    show_figure(plot_timeline(spans, title), f"Timeline in µs, {title}. {told}.")
