"""For notebook 23: one question to the interpreter, to compiled code and to torch, and its plots."""

import time

from lib import machine
from lib.course.show import show_figure, style_table
from lib.measure import bench
from lib.nogpu.interpreter import interpreted_launches
from lib.recorded.results import NOT_RECORDED, measured_or_recorded

import matplotlib.pyplot as plt
import pandas as pd

NOTEBOOK = "23_interpreter_is_not_a_gpu"
BLUE = "#1f4e79"


def _answer(question, where):
    """What `question(where)` returns, as text. An error is an answer too."""
    try:
        return str(question(where))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def ask(key, text, question, in_torch):
    """A table with the three answers. question(where) launches kernels on 'cpu' or 'cuda'."""
    device = machine.device()
    with interpreted_launches():  # the interpreter, even where there is a GPU
        here = _answer(question, "cpu")
    compiled = measured_or_recorded(f"{NOTEBOOK}.{key}", lambda: _answer(question, "cuda"))
    answers = {
        "interpreter, here": here,
        f"compiled, {compiled.where}": compiled.value or NOT_RECORDED,
        f"torch, here on {device.type}": _answer(in_torch, device),
    }
    return style_table(pd.DataFrame({"asked": answers.keys(), text: answers.values()}))


def timed_us(run, where):
    """Microseconds of one run: by the GPU's clock on 'cuda', else by this machine's."""
    if str(where) == "cuda":
        return bench.time_us(run).median_us
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start)


def show_tf32(sizes, model, interpreted, by_k):
    """The error of a float32 product over K; by_k: measured errors by default and with 'ieee'."""
    fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    ax.loglog(sizes, model, "--", color="black", label="model: inputs cut to TF32")
    ax.loglog(sizes, interpreted, "s-", color="grey", label="interpreter")
    for errors, label, marker in zip(by_k.value or [], ("default", "ieee"), "ox"):
        look = {"color": BLUE, "ms": 9, "mfc": "none", "label": f"compiled, {label}"}
        ax.loglog(sizes, errors, marker, **look)
    ax.set(xlabel="K", ylabel="largest error / largest element", title=f"compiled: {by_k.where}")
    ax.set_xscale("log", base=2)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    show_figure(
        fig,
        "Error of a float32 product over K: the model of TF32 lies some orders of magnitude above the"
        f" interpreter; compiled: {by_k.where}.",
    )


def show_counter(grids, counted, lost):
    """The counter over the number of programs; lost: measured without atomics and with them."""
    fig, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    here = grids[: len(counted)]
    ax.loglog(here, counted, "s-", color="grey", label="interpreter, no atomics")
    for counts, label, marker in zip(lost.value or [], ("no atomics", "atomic_add"), "ox"):
        look = {"color": BLUE, "ms": 8, "mfc": "none", "label": f"compiled, {label}"}
        ax.loglog(grids, counts, marker, **look)
    ax.set(xlabel="programs", ylabel="the counter", title=f"compiled: {lost.where}")
    ax.set_xlim(0.7, 1.5 * grids[-1])
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    show_figure(
        fig,
        "The counter over the number of programs: in the interpreter it equals that number;"
        f" compiled: {lost.where}.",
    )
