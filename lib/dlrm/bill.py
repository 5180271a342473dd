"""The bill of a DLRM by stage: launches, bytes and the least time, counted with no GPU; or measured on one.

Counted   by lib.profiling.bill.Counter: also on the device meta, at any size.
Measured  the same stages under the profiler, and before that by a stopwatch.

    table(bill(model, dense, ids, labels))                 counted
    table(bill(model, dense, ids, labels, meter=timed))    measured, with a GPU; the host's side: meter=on_host
"""

from lib.measure import bench, roofline
from lib.profiling import events_of, profiled
from lib.profiling.bill import Counter, bytes_of, n_bytes  # noqa: F401  notebook 51 shows and calls them
from lib.profiling.cost import bill as cost_of

import pandas as pd
import torch

SIDES = ("forward", "backward")


def part(launches, moved, flops=0):
    """One side of a stage: launches, MB and the least µs at the ceilings of roofline."""
    least_us = roofline.ceilings().attainable_us(moved, flops)
    return {"launches": launches, "MB": moved / 1e6, "least µs": least_us}


def counted(call):
    """(result of the call, what it needs at least)."""
    with Counter() as count:
        result = call()
    return result, part(count.launches, count.bytes, count.flops)


def timed(call):
    """(result of the call, what it costs on this GPU)."""
    cost = cost_of(events_of(profiled(call)), "")
    row = {"launches": cost["kernels"], "GPU µs": cost["device_us"]}
    return call(), row | {"peak MiB": bench.peak_mib(call)}


def on_host(call):
    """(result of the call, what it costs the host): the median of 25 calls that each find the GPU idle."""
    return call(), {"host µs": bench.host_us(call, n_calls=1, n_repeats=25)}


def measured(rows_of):
    """rows_of(meter), a list of dictionaries, with timed and with on_host; the host's times stand last.

    They are taken first: after a profile each launch costs the host more for a while.
    """
    host = rows_of(on_host)
    return [row | {"host µs": h["host µs"]} for row, h in zip(rows_of(timed), host, strict=True)]


def sgd(parameters, gradients, learning_rate=0.01):
    """Plain SGD, as torch.optim.SGD with foreach=True: all parameters in few launches."""
    torch._foreach_add_([p.detach() for p in parameters], list(gradients), alpha=-learning_rate)


def bill(model, dense, ids, labels, meter=counted):
    """{stage: (forward, backward)} of a dlrm.DLRM; None where a stage has no such side.

    Each stage gets what the one before it gives, without its history: its backward pass ends at its edge.
    """
    rows = {}

    def stage(name, part, *inputs):
        y, forward = meter(lambda: part(*inputs))
        rows[name] = forward, None
        if not y.requires_grad:
            return y
        leaves = [t for t in (*inputs, *part.parameters()) if t.requires_grad]
        dy = torch.ones_like(y)
        call = lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)  # noqa: E731
        rows[name] = forward, meter(call)[1]
        return y.detach().requires_grad_()

    vectors = stage("lookups", model.sparse_arch, stage("hash", model.hashing, ids))
    first = stage("bottom MLP", model.dense_arch, dense)
    features = stage("interaction", model.interaction, first, vectors)
    logits = stage("top MLP", model.prediction, features)
    stage("loss", torch.nn.BCEWithLogitsLoss(), logits, labels)
    parameters = list(model.parameters())
    gradients = [torch.zeros_like(p) for p in parameters]  # not the parameters: read twice at once
    rows["update"] = None, meter(lambda: sgd(parameters, gradients, learning_rate=0.0))[1]
    return rows


def table(rows):
    """A bill as a DataFrame: a row for each stage, the columns of both sides."""
    sides = {side: {n: parts[k] or {} for n, parts in rows.items()} for k, side in enumerate(SIDES)}
    return pd.concat({s: pd.DataFrame(part).T for s, part in sides.items()}, axis=1).fillna(0)


def totals(rows):
    """{pass: its sums}; the loss belongs to training, as both sides do."""
    sums = table(rows)
    training = sums["forward"].sum() + sums["backward"].sum()
    return {"forward": sums["forward"].drop("loss").sum(), "training": training}


def show_table(rows, caption):
    """A bill as the notebook shows it, with its total."""
    sums = table(rows)
    sums = pd.concat([sums, sums.sum().to_frame("total").T])
    return sums.style.format("{:,.1f}").set_caption(caption)


def flat(rows):
    """A bill as a list of dictionaries, as results are kept."""
    return [
        {"stage": name, "side": side, **side_of}
        for name, parts in rows.items()
        for side, side_of in zip(SIDES, parts)
        if side_of
    ]
