"""Memory in use over the time of a step, with the bounds of its phases: one panel per version.

Input: the events of lib.profiling.profiled(fn, memory=True), or the curve that memory_of makes of them.
"""

import math

from lib.course.show import show_figure
from lib.profiling import events as ev

import matplotlib.pyplot as plt

_MIB = 2**20
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def memory_of(events, most=400):
    """The memory curve of a step as a dictionary that survives JSON, for plot_memory.

    device     'cuda', or 'cpu' when nothing was allocated on a GPU
    start_bytes   in use when the step began; on a CPU 0, as its allocator is only watched from then on
    points     [[µs, bytes], ...], at most `most`: bytes in use, less start_bytes; the peak is among them
    phases     [[name, start µs, end µs], ...]: the outermost regions, else forward, backward, optimizer
    wall_us    how long the step took, under the profiler

    Raises ValueError when the events hold no memory, or most is below 4.
    """
    ev.checked(events, whole=True)
    if most < 4:
        raise ValueError(f"most is how many points to keep, 4 or more; got {most}")
    device, changes = _changes(events)
    wall = ev.wall_us(events)
    start = changes[0]["total_bytes"] - changes[0]["bytes"]
    points = [[e["start_us"], e["total_bytes"] - start] for e in changes if e["start_us"] <= wall]
    return {
        "device": device,
        "start_bytes": start if device == "cuda" else 0,
        "points": _thinned([[0.0, 0], *points], most),
        "phases": [list(phase) for phase in ev.phases(events)],
        "wall_us": wall,
    }


def _changes(events):
    changes = [e for e in events if e["kind"] == "memory" and e["start_us"] >= 0]
    if not changes:
        raise ValueError("no memory in these events; profile with profiled(fn, memory=True)")
    device = "cuda" if any(e["device"] == "cuda" for e in changes) else "cpu"
    changes = [e for e in changes if e["device"] == device]
    return device, sorted(changes, key=lambda e: e["start_us"])


def _thinned(points, most):
    """Of each stretch of points the lowest and the highest, and the first and last of all."""
    if len(points) <= most:
        return points
    size = math.ceil((len(points) - 2) / ((most - 2) // 2))
    fewer = [points[0]]
    for k in range(1, len(points) - 1, size):
        stretch = points[k : min(k + size, len(points) - 1)]
        ends = {stretch.index(choose(stretch, key=lambda p: p[1])) for choose in (min, max)}
        fewer += [stretch[i] for i in sorted(ends)]
    return [*fewer, points[-1]]


def peak(memory):
    """(µs, bytes) of the highest point of a curve of memory_of, bytes above the start of the step."""
    at_us, n_bytes = max(memory["points"], key=lambda point: point[1])
    return at_us, n_bytes


def plot_memory(versions, title):
    """A figure with one panel for each of `versions`, {name: events or curve of memory_of}; same bytes axis.

    Raises TypeError for anything else.
    """
    curves = _curves(versions)
    size = 8.5, 0.7 + 1.9 * len(curves)
    # Each panel has its own time axis: the plot compares bytes, and when they are allocated and freed.
    figure, axes = plt.subplots(len(curves), figsize=size, sharey=True, squeeze=False)
    figure.set_layout_engine("constrained")
    for ax, (name, curve) in zip(axes[:, 0], curves.items()):
        _panel(ax, name, curve)
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high + 0.55 * (high - low))  # room for the names of phases
    axes[-1, 0].set_xlabel("time, µs")
    figure.supylabel("MiB above the start of the step", fontsize=9)
    axes[0, 0].set_title(title, fontsize="medium")
    return figure


def _curves(versions):
    if not isinstance(versions, dict) or not versions:
        raise TypeError(
            "plot_memory takes {name: events or curve of memory_of}, at least one of them"
        )
    return {name: v if isinstance(v, dict) else memory_of(v) for name, v in versions.items()}


def _panel(ax, name, curve):
    times, sizes = zip(*[*curve["points"], [curve["wall_us"], curve["points"][-1][1]]])
    mib = [size / _MIB for size in sizes]
    ax.fill_between(times, mib, step="post", color="#cfdcec")
    ax.step(times, mib, where="post", color="black", linewidth=1)
    bounds = [start for _, start, _ in curve["phases"]] + [end for *_, end in curve["phases"][-1:]]
    for bound in bounds:
        ax.axvline(bound, color="black", linestyle="--", linewidth=0.8)
    _names(ax, curve["phases"], curve["wall_us"])
    at_us, n_bytes = peak(curve)
    ax.plot(at_us, n_bytes / _MIB, "o", color="black", markersize=4)
    right = at_us > 0.75 * curve["wall_us"]
    place = {"xytext": (-5 if right else 5, 3), "ha": "right" if right else "left", "va": "bottom"}
    text = f"peak {_mib(n_bytes)} MiB"
    at = at_us, n_bytes / _MIB
    ax.annotate(text, at, textcoords="offset points", fontsize=8, bbox=_BOX, **place)
    ax.set_xlim(0, curve["wall_us"])
    ax.set_ylabel(name, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def _mib(n_bytes):
    """Three digits, and never 2.1e+03: `0.125`, `16.5`, `2,100`."""
    mib = n_bytes / _MIB
    return f"{mib:,.0f}" if abs(mib) >= 100 else f"{mib:.3g}"


def _names(ax, phases, wall_us):
    """Names of phases over their middles, inside the panel; one line lower where two would overlap."""
    ends = [0.0, 0.0]  # where the text of each of two lines ends, as a share of the width
    for name, start, end in phases:
        half = 0.006 * len(name) + 0.005
        middle = min(max((start + end) / 2 / wall_us, half), 1 - half)
        line = 0 if middle - half >= ends[0] else 1
        ends[line] = middle + half
        ax.text(middle, (0.98, 0.85)[line], name, transform=ax.transAxes, **_PHASE)


_PHASE = {"ha": "center", "va": "top", "fontsize": 8, "bbox": _BOX}


def show_memory(versions, title):
    """Display `plot_memory`, with peaks and phases in the alt text."""
    curves = _curves(versions)
    sentences = " ".join(_sentence(name, curve) for name, curve in curves.items())
    alt = f"Memory in use over the time of a step, {title}. {sentences}"
    show_figure(plot_memory(curves, title), alt)


def _sentence(name, curve):
    at_us, n_bytes = peak(curve)
    here = "on the GPU" if curve["device"] == "cuda" else "on the CPU, from what the step allocates"
    high, end = _mib(n_bytes), _mib(curve["points"][-1][1])
    sizes = f"peak {high} MiB above the start at {at_us:,.0f} µs, {end} at the end"
    phases = [f"{phase} {start:,.0f}–{end:,.0f} µs" for phase, start, end in curve["phases"]]
    return f"{name}, {here}: {'; '.join([sizes, *phases])}."
