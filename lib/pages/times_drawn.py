"""Plots of notebook 02: calls in a row, single runs, warm and flushed, and three stopwatches.

Each takes a results.Measurement, and says so where nothing is recorded.
"""

import statistics

from lib.course.show import show_plot
from lib.measure import bench, roofline

import torch


def show_calls(measured):
    """The times of the first calls of a kernel, in µs."""

    def draw(ax, times):
        ax.semilogy(range(1, len(times) + 1), times, "o-", color="black")
        ax.set(xlabel="call", ylabel="time, µs")

    alt = "Time of ten calls in a row, log axis; the first is far slower."
    show_plot(measured, draw, alt, "Ten calls")


def show_runs(measured, title):
    """The times of single runs in µs, with mean, median and the band from p20 to p80."""

    def draw(ax, times):
        fifths = statistics.quantiles(times, n=5)
        ax.plot(times, ".", color="grey", label="one run")
        ax.axhline(statistics.median(times), color="black", label="median")
        ax.axhline(statistics.mean(times), color="black", linestyle=":", label="mean")
        ax.axhspan(fifths[0], fifths[3], alpha=0.2, label="p20–p80")
        ax.set(xlabel="run", ylabel="time, µs")
        ax.margins(y=0.3)  # room for the legend
        ax.legend(ncols=4, loc="lower center")

    show_plot(measured, draw, "Times of single runs with their median, mean and p20 to p80.", title)


def show_l2(measured):
    """Rows of "mib" and two rates in GB/s: effective bandwidth with L2 flushed, and without."""

    def draw(ax, rows):
        for what, style in (("do_bench", "o-"), ("do_bench_cudagraph", "^--")):
            rates = [row[what] for row in rows]
            ax.semilogx([row["mib"] for row in rows], rates, style, base=2, label=what)
        ax.axhline(roofline.ceilings().bandwidth_gbps, color="black", label="ceiling")
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.set(xlabel="size of x, MiB", ylabel="effective bandwidth, GB/s", ylim=(0, None))
        ax.legend()

    alt = "Effective bandwidth by input size, with and without L2 flushed."
    show_plot(measured, draw, alt, "Warm or flushed")


def three_stopwatches(fn, n):
    """What three stopwatches say, in µs, of fn on n numbers: the host's call, call and wait, events."""
    data = torch.randn(n, device="cuda")

    def call_and_wait():
        fn(data)
        torch.cuda.synchronize()

    return {
        "n": n,
        "host": bench.host_us(lambda: fn(data), 50),  # does not wait for the GPU
        "host and wait": bench.host_us(call_and_wait, 50),
        "events": bench.time_us(lambda: fn(data), rep_ms=20).median_us,  # with L2 flushed
    }


def show_stopwatches(measured):
    """The rows of `three_stopwatches` for growing n."""

    def draw(ax, rows):
        for what, style in (("host", "s:"), ("host and wait", "o--"), ("events", "^-")):
            ax.loglog([row["n"] for row in rows], [row[what] for row in rows], style, label=what)
        ax.set(xlabel="elements", ylabel="time, µs")
        ax.legend()

    alt = "Time of GELU by input size for three stopwatches."
    show_plot(measured, draw, alt, "Three stopwatches")
