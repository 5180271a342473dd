"""Versions of a DLRM against each other, forward and in training, each alone and as a CUDA graph; and pictures.

Rule    before a version is timed, its logits, in training its loss, are compared with float64.
Pass    forward and training in float32; forward again with TF32.

    rows = measure(versions, step_of, alone={"eager"})     a dictionary for each pass and number of rows
"""

import copy

from lib import machine
from lib.dlrm.bench import BATCHES, forward_call
from lib.dlrm.train import batch_of
from lib.measure import bench

import torch
import torch.nn.functional as F

ALLOWED = {"highest": 1e-5, "high": 1e-2}  # error, of the largest value
PASSES = {"forward": "highest", "forward, TF32": "high", "training": "highest"}


def as_graph(call):
    """`call` recorded once: a closure that replays all its launches as one."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # compiles, allocates
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()

    def replay():
        graph.replay()
        return y

    return replay


@torch.no_grad()
def in_float64(model, data, what):
    """Logits, in training the loss, of a model of bottom, lookup, interaction and top.

    Lookups only copy, so their vectors are exact.
    """
    bottom, top = (copy.deepcopy(part).double() for part in (model.bottom, model.top))
    vectors = model.lookup(data.sparse).double()
    logits = top(model.interaction(bottom(data.dense.double()), vectors))
    labels = data.labels.double()
    return F.binary_cross_entropy_with_logits(logits, labels) if what == "training" else logits


def row_of(what, data, made, step_of, alone=()):
    """{version: µs} of one pass; AssertionError for a version that is further from float64 than ALLOWED.

    made      {version: (model with its loss, update)}, the first one plain PyTorch
    step_of   step_of(model with its loss, data, update, learning_rate): a closure, a step that returns the loss
    alone     versions that are not timed as a CUDA graph
    """
    row = {"pass": what, "rows": len(data.labels)}
    want = in_float64(next(iter(made.values()))[0].model, data, what)
    for name, (module, update) in made.items():
        call = forward_call(module.model, data)
        if what == "training":
            # at a learning rate of 0 the weights stay, and so does the loss
            call = step_of(module, data, update, learning_rate=0.0)
        for label in [name] if name in alone else [name, f"{name} + graph"]:
            timed = call if label == name else as_graph(call)
            error = ((timed() - want).abs().max() / want.abs().max()).item()
            assert error <= ALLOWED[PASSES[what]], (
                f"{what}, {row['rows']} rows, {label}: {error:.0e}"
            )
            row[label] = bench.time_us(timed, rep_ms=100).median_us
    return row


def measure(versions, step_of, alone=(), in_training=()):
    """The rows of all passes and BATCHES; versions() makes them; `in_training` are timed in training alone."""
    made, rows, before = versions(), [], torch.get_float32_matmul_precision()
    try:
        for what, precision in PASSES.items():
            torch.compiler.reset()  # each pass compiles its own code
            torch.set_float32_matmul_precision(precision)
            mine = {k: v for k, v in made.items() if what == "training" or k not in in_training}
            for n in BATCHES:
                rows.append(row_of(what, batch_of(n, machine.device()), mine, step_of, alone))
    finally:
        torch.set_float32_matmul_precision(before)
    return rows


# --- pictures ------------------------------------------------------------------------------------------------


def draw_steps(ax, rows):
    """Bars of one pass, a pair for each step: the GPU's time filled, the host's hatched."""
    for shift, column, colour, hatch in (
        (-0.2, "GPU", "#1f4e79", ""),
        (0.2, "host", "white", "////"),
    ):
        us = [row[f"{column} µs"] for row in rows]
        places = [k + shift for k in range(len(rows))]
        bars = ax.barh(places, us, 0.38, color=colour, hatch=hatch, edgecolor="black", label=column)
        ax.bar_label(bars, [f" {x:,.0f}" for x in us], fontsize=8)
    ax.set(yticks=range(len(rows)), yticklabels=[row["step"] for row in rows], xlabel="µs")
    ax.margins(x=0.2)
    ax.invert_yaxis()


def steps_text(rows):
    """The same in words, for the alt text."""
    return "; ".join(
        f"{r['pass']}, {r['step']}: GPU {r['GPU µs']:,.0f}, host {r['host µs']:,.0f}" for r in rows
    )
