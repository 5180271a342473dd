"""Drawings of what limits a kernel besides bytes: instructions, and the rate at which thread blocks start."""

from lib.course.show import show_figure

import matplotlib.pyplot as plt
import numpy as np

GREY, BLUE = "#777777", "#1f4e79"
# where the name of a form stands beside its point: offset in points, alignment
_BESIDE = {
    "1/(1 + 1/e)": ((-4, -14), "right"),
    "e/(e + 1)": ((0, 6), "center"),
    "(e - 1)/(e + 1)": ((2, -14), "left"),
    "libdevice.tanh": ((0, -16), "center"),
    "copy": ((0, 6), "center"),
}


def show_budget(table, fits, where):
    """% of the ceiling over the instructions that a number needs, beside what the budget allows.

    table: rows with form, needs and "bfloat16: measured, %", None where there is none.
    fits: how many instructions fit.
    """
    figure, ax = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    needs = np.linspace(0, 50, 200)
    ax.plot(needs, np.minimum(100, 100 * fits / np.maximum(needs, 1)), "--", color=GREY)
    ax.text(fits + 4, 93, "what the budget allows", color=GREY)
    ax.axvline(fits, color=GREY, linewidth=0.8)
    ax.text(fits + 0.4, 52, f"{fits:.0f} fit", color=GREY)
    alt = "% of the ceiling in bfloat16 over instructions needed for a number."
    for row in table.to_dict("records"):
        share = row["bfloat16: measured, %"]
        if share is None or share != share:
            continue
        ax.plot(row["needs"], share, "o", color=BLUE)
        offset, align = _BESIDE.get(row["form"], ((-7, -4), "right"))
        point = (row["needs"], share)
        small = {"textcoords": "offset points", "fontsize": "small"}
        ax.annotate(row["form"], point, offset, ha=align, **small)
        alt += f" {row['form']}: {row['needs']:.0f}, {share:.0f} %."
    ax.set(xlabel="instructions needed for a number", ylabel="% of the ceiling", ylim=(50, 110))
    ax.set_xlim(0, 50)
    ax.set_title(f"bfloat16, {where}", fontsize="medium")
    show_figure(figure, f"{alt} A dashed line falls from 100 % at {fits:.0f} instructions on.")


def show_block_rate(points, blocks_per_ns=1.65, copy_gbps=4222):
    """% of a copy's rate over the bytes that a thread block moves; points: (what, bytes, %)."""
    figure, ax = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    size = np.geomspace(256, 8192, 200)
    share = np.minimum(100, 100 * blocks_per_ns * size / copy_gbps)
    ax.plot(size, share, "--", color=GREY, label=f"{blocks_per_ns} blocks a nanosecond")
    alt = "% of a copy's rate over the bytes that a thread block moves."
    for k, what in enumerate(dict.fromkeys(what for what, _, _ in points)):
        of_it = [(n, percent) for name, n, percent in points if name == what]
        # open markers of several sizes: some lie on one another
        ax.plot(*zip(*of_it), "osd^v"[k % 5], mfc="none", ms=6 + 2.5 * k, color=BLUE, label=what)
        alt += f" {what}: " + ", ".join(f"{n} bytes {percent:.0f} %" for n, percent in of_it) + "."
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("bytes that a thread block moves at a time, read and written")
    ax.set_ylabel("% of a copy's rate")
    ticks = [10, 20, 40, 60, 80, 100]
    ax.set_yticks(ticks, [str(t) for t in ticks], minor=False)
    ax.set_yticks([], minor=True)
    sizes = [2**k for k in range(8, 14)]
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.legend(loc="lower right", fontsize="small")
    show_figure(
        figure,
        f"{alt} The dashed line is {blocks_per_ns} blocks a nanosecond, up to a copy's rate.",
    )
