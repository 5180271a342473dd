"""What a call of compiled code costs: notebook 05's fees, stage by stage, and its times against size.

fees(fn, small, time)                  # rows: the host's µs for one call, with one stage more each time
sweep(fn, inputs, row_counts, n_cols)  # rows: µs of eager and compiled for growing inputs, measured here
show_sizes(here, recorded)             # both as plots side by side
"""

from functools import partial

from lib import machine
from lib.course.show import show_figure
from lib.recorded.results import Measurement

import matplotlib.pyplot as plt
import torch
from torch.utils.benchmark import Timer

_BACKENDS = {
    "eager": "Dynamo, then three ops",
    "aot_eager": "and AOTAutograd, then three ops",
    "inductor": "and Inductor, then one kernel",
}


def call_us(call):
    """µs per call, of many in a row; on a GPU the end is waited for after the last one only."""
    call()  # compiles
    return 1e6 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.02).median


def fees(fn, small, time):
    """Rows of µs per call of fn on the inputs `small`: eager, then through one stage after another."""
    times = {"three ops, eager": time(partial(fn, *small))}
    for backend, name in _BACKENDS.items():
        torch.compiler.reset()
        times[name] = time(partial(torch.compile(fn, backend=backend), *small))
    return [{"what runs, 2×256 elements": name, "µs per call": us} for name, us in times.items()]


def sweep(fn, inputs, row_counts, n_cols):
    """Rows of µs by size, eager and compiled in turns; on a GPU also a version compiled for each size."""
    torch.compiler.reset()
    versions = {"eager": fn, "compiled": torch.compile(fn, dynamic=True)}  # one for all sizes
    if machine.HAS_GPU:  # in C++ a compile for each size takes minutes
        versions["for this size"] = torch.compile(fn, dynamic=False)
    rows = []
    for n_rows in row_counts:
        args = inputs(n_rows, n_cols)
        calls = [partial(version, *args) for version in versions.values()]
        with torch._dynamo.config.patch(recompile_limit=64):
            rounds = [[call_us(call) for call in calls] for _ in range(5)]
        us = map(min, zip(*rounds))  # other programs on this machine only ever add to a round
        rows.append({"elements": n_rows * n_cols, **dict(zip(versions, us))})
    return rows


def crossing(rows):
    """The size from which on compiled is faster at every size, or None."""
    slower = [row["elements"] for row in rows if row["compiled"] >= row["eager"]]
    return next((r["elements"] for r in rows if r["elements"] > max(slower, default=0)), None)


def show_sizes(here, recorded):
    """Time per call against size, log-log: rows of `sweep` from here, and a Measurement of such rows."""
    panels = {m.where: m.value for m in (Measurement(here, "measured here"), recorded) if m.value}
    width = 4.6 * len(panels) + 1
    figure, axes = plt.subplots(
        1, len(panels), figsize=(width, 3.4), layout="constrained", squeeze=False
    )
    for ax, (where, rows) in zip(axes[0], panels.items()):
        _draw(ax, rows, where)
    ends = "; ".join(
        f"{where}: at {row['elements']:,} elements "
        + ", ".join(f"{name} {us:.0f} µs" for name, us in row.items() if name != "elements")
        for where, rows in panels.items()
        for row in (rows[0], rows[-1])
    )
    show_figure(figure, f"Time per call against size, log-log, eager and compiled. {ends}.")


def _draw(ax, rows, title):
    sizes = [row["elements"] for row in rows]
    styles = {
        "eager": ("s:", "black"),
        "compiled": ("o-", "#1f4e79"),
        "for this size": ("^--", "#7a4d0f"),
    }
    for name, (style, color) in styles.items():
        if name in rows[0]:
            ax.loglog(sizes, [row[name] for row in rows], style, color=color, label=name)
    if crossing(rows):
        ax.axvline(crossing(rows), color="black", linestyle="--", linewidth=1)
    ax.set(xlabel="elements (dashed: compiled wins)", ylabel="µs per call")
    ax.set_title(title, fontsize="medium")
    ax.legend()
