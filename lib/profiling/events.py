"""A profile as a plain list of events that survives JSON: the input of tables, bills and plots.

lib.profiling.trace makes these lists; `trimmed` shortens them, for a record that draws the same timeline.

An event is a dictionary with `kind`, `name`, `start_us`, `end_us` (µs from the start of the step), and by kind:

    step     the profiled call itself, once
    region   code named with lib.profiling.region: thread, depth
    op       a call of an operator: thread, self_us, outer (the op around all of it, '' if none), where
    engine   a node of the backward pass: thread
    runtime  a call of the CUDA runtime: thread, op, outer, where; a copy also has copies and bytes
    kernel, copy, set   work on the device: stream, op; a copy also has bytes
    memory   an allocation, or a release when bytes < 0: device ('cpu', 'cuda'), bytes, total_bytes

`where` is the line of Python when the profile was made with stack=True and the event can make the host wait,
else ''. Thread 0 runs the step.
"""

import re

STEP = "one call"  # the name under which lib.profiling.profiled records the call
DEVICE = ("kernel", "copy", "set")
WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")
# Ops that need a number from the device: for the host, or for the size of their result.
NEEDS_A_NUMBER = {
    f"aten::{name}"
    for name in "_local_scalar_dense nonzero masked_select _unique2 unique_dim equal".split()
}


def checked(events, whole=False):
    """`events` as they are. TypeError for what is no list of events, ValueError for one without its step.

    whole: ValueError also for a list that was trimmed for a plot.
    """
    if not isinstance(events, list) or not all(isinstance(e, dict) and "kind" in e for e in events):
        kind = type(events).__name__
        raise TypeError(
            f"events must be a list of dictionaries, got {kind}; call events_of(profiled(fn)) first"
        )
    steps = [e for e in events if e["kind"] == "step"]
    if len(steps) != 1:
        raise ValueError(f"events must hold one event of kind 'step', got {len(steps)}")
    if whole and "busy_us" in steps[0]:
        raise ValueError(
            "these events were trimmed for a plot; count the list that events_of returned"
        )
    return events


def step_of(events):
    """The event of the step."""
    return next(e for e in events if e["kind"] == "step")


def on_device(events):
    """The device's work, by start."""
    return sorted((e for e in events if e["kind"] in DEVICE), key=lambda e: e["start_us"])


def has_device(events):
    """Whether the step used a GPU at all."""
    had_device = "busy_us" in step_of(events)
    return had_device or any(e["kind"] in (*DEVICE, "runtime") for e in events)


def wall_us(events):
    """µs from the call to the return, or to the end of the device's last work where that is later."""
    step = step_of(events)
    return max([step["end_us"], *(e["end_us"] for e in on_device(events))]) - step["start_us"]


def merged(intervals):
    """Intervals (start, end) joined where they overlap or touch, in order: [(0, 3), (2, 5)] -> [(0, 5)]."""
    joined = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def busy_us(events):
    """µs in which the device does something; two kernels at once count once."""
    recorded_us = step_of(events).get("busy_us")  # kept when the list was trimmed
    if recorded_us is not None:
        return recorded_us
    return sum(end - start for start, end in merged(_times(on_device(events))))


def gaps(events):
    """(start, end) of each stretch of the step in which the device has nothing to do."""
    edge = step_of(events)["start_us"]
    end_of_step, idle = edge + wall_us(events), []
    for start, end in [*merged(_times(on_device(events))), (end_of_step, end_of_step)]:
        if start > edge:
            idle.append((edge, start))
        edge = max(edge, end)
    return idle


def _times(events):
    return [(e["start_us"], e["end_us"]) for e in events]


def waits(events):
    """Calls within the step in which the host waits for the device."""
    end = step_of(events)["end_us"]  # the wait after it is the profiler's own
    during = [e for e in events if e["start_us"] < end]
    return [e for e in during if e["kind"] == "runtime" and WAIT.match(e["name"])]


def phases(events):
    """(name, start, end) of the outermost regions; with none, of forward, backward and optimizer.

    Where one region encloses several others, as a step encloses its parts, these are returned instead.
    """
    regions = [e for e in events if e["kind"] == "region" and not e.get("thread")]
    named = [e for e in regions if not e["name"].startswith("Optimizer.")]  # not torch's own
    levels = [[e for e in named if e.get("depth", 0) == depth] for depth in (0, 1)]
    level = levels[1] if len(levels[0]) == 1 and len(levels[1]) > 1 else levels[0]
    if level:
        return [(e["name"], e["start_us"], e["end_us"]) for e in level]
    nodes, parts = [e for e in events if e["kind"] == "engine"], []
    if nodes:
        first, last = min(e["start_us"] for e in nodes), max(e["end_us"] for e in nodes)
        parts = [("forward", step_of(events)["start_us"], first), ("backward", first, last)]
    steps = [e for e in regions if e["name"].startswith("Optimizer.step")]
    return parts + [("optimizer", e["start_us"], e["end_us"]) for e in steps]


# --- fewer events, the same timeline ------------------------------------------------------------------------

NARROW = 1 / 300  # of the width of a timeline: two pixels, below which neighbours are drawn as one


def trimmed(events, most=300):
    """At most `most` events that draw the same timeline, for a record drawn again where there is no GPU.

    Neighbours in a lane that are each narrower than two pixels become one event. Unless `most` is None, wider
    ones are joined too until `most` are left. Events that no timeline shows are left out. The device's busy
    share stays that of the whole list. Raises ValueError when `most` cannot be reached.
    """
    step, wall = step_of(checked(events)), wall_us(events)
    if has_device(events):
        step = {**step, "busy_us": round(busy_us(events), 3)}
    region = {"kind": "region", "thread": 0, "depth": 0}
    regions = [{**region, "name": n, "start_us": s, "end_us": e} for n, s, e in phases(events)]
    narrow = NARROW * wall
    while True:
        blocks = [e for lane in _lanes(events) for e in _joined(lane, narrow)]
        fewer = [step, *regions, *blocks]
        if most is None or len(fewer) <= most:
            return sorted(fewer, key=lambda e: e["start_us"])
        if narrow > wall:
            raise ValueError(f"most={most} is too few: lanes and regions alone are {len(fewer)}")
        narrow *= 1.5


def _lanes(events):
    """Lists of events that lie in one lane and do not overlap there, each in order."""
    outermost = [e for e in events if e["kind"] == "op" and not e["outer"]]
    lanes = {}
    for e in outermost + waits(events):
        lanes.setdefault((e["kind"], e["thread"]), []).append(e)
    for e in on_device(events):
        lanes.setdefault(("device", e["stream"]), []).append(e)
    return [sorted(lane, key=lambda e: e["start_us"]) for lane in lanes.values()]


def _joined(lane, narrow):
    joined, last_us = [], 0.0
    for e in lane:
        us = e["end_us"] - e["start_us"]
        gap = e["start_us"] - joined[-1]["end_us"] if joined else 0.0
        if joined and max(us, last_us, gap) < narrow:
            joined[-1] = _join(joined[-1], e)
        else:
            joined.append(e)
        last_us = us
    return joined


_PLURAL = {"op": "ops", "kernel": "kernels", "copy": "copies", "set": "sets"}


def _join(a, b):
    n, same = a.get("n", 1) + b.get("n", 1), a.get("same", a["name"]) == b["name"]
    mixed = a.get("mixed", False) or a["kind"] != b["kind"]
    if a["kind"] == "runtime":
        name = a["name"]  # marks it as a wait
    elif same:
        name = f"{b['name']} ×{n}"
    else:
        name = f"{n} kernels, copies" if mixed else f"{n} {_PLURAL[a['kind']]}"
    return {
        **a,
        "kind": "kernel" if mixed else a["kind"],
        "name": name,
        "end_us": max(a["end_us"], b["end_us"]),
        "n": n,
        "same": b["name"] if same else None,
        "mixed": mixed,
        "busy_us": round(_busy(a) + _busy(b), 3),
    }


def _busy(event):
    return event.get("busy_us", event["end_us"] - event["start_us"])
