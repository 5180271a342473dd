"""A profile as a plain list of events, which survives JSON: what tables, bills and plots are made from.

An event is a dictionary with `kind`, `name`, `start_us`, `end_us` (µs from the start of the step), and by kind:

    step     the profiled call itself, once
    region   code named with lib.profiling.region: thread, depth
    op       a call of an operator: thread, self_us, outer (the op around all of it, '' if none), where
    engine   a node of the backward pass: thread
    runtime  a call of the CUDA runtime: thread, op, outer, where; a copy also has copies and bytes
    kernel, copy, set   work on the device: stream, op; a copy also has bytes
    memory   an allocation, or a release when bytes < 0: device ('cpu', 'cuda'), bytes, total_bytes

`where` is the line of Python when the profile was made with stack=True and the event can make the host wait,
else ''. Thread 0 is the one of the step. lib.profiling.trace makes these lists.
"""

import re

STEP = "one call"  # the name under which lib.profiling.profiled records the call
DEVICE = ("kernel", "copy", "set")
KEYS = {
    "step": (),
    "region": (),
    "op": ("thread", "self_us", "outer", "where"),
    "engine": (),
    "runtime": ("thread", "op", "outer", "where"),
    "kernel": ("stream",),
    "copy": ("stream", "bytes"),
    "set": ("stream",),
    "memory": ("device", "bytes", "total_bytes"),
}
WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")
# Ops that need a number from the device: for the host, or for the size of their result.
NEEDS_A_NUMBER = {
    f"aten::{name}"
    for name in "_local_scalar_dense nonzero masked_select _unique2 unique_dim equal".split()
}


def checked(events, whole=False):
    """`events` as they are, after a look at their form; whole: refuse a list that was trimmed for a plot.

    Raises TypeError for what is no list of dictionaries, ValueError for a list with something wrong in it.
    """
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        told = "call events_of(profiled(fn)) first"
        raise TypeError(
            f"events must be a list of dictionaries, got {type(events).__name__}; {told}"
        )
    for e in events:
        _check_event(e)
    steps = [e for e in events if e["kind"] == "step"]
    if len(steps) != 1:
        raise ValueError(f"events must hold one event of kind 'step', got {len(steps)}")
    if whole and "busy_us" in steps[0]:
        raise ValueError(
            "these events were trimmed for a plot; count on the list that events_of gave"
        )
    return events


def _check_event(event):
    kind = event.get("kind")
    if kind not in KEYS:
        raise ValueError(f"kind {kind!r} of an event is none of {', '.join(KEYS)}")
    for key in ("name", "start_us", "end_us", *KEYS[kind]):
        if key not in event:
            raise ValueError(f"an event of kind {kind} needs {key}: {event}")
    start, end = event["start_us"], event["end_us"]
    if not all(isinstance(us, int | float) for us in (start, end)):
        raise TypeError(f"start_us and end_us are numbers, in µs: {event}")
    if not start <= end:
        raise ValueError(f"an event ends before it starts: {event}")


def step_of(events):
    """The event of the step."""
    return next(e for e in events if e["kind"] == "step")


def on_device(events):
    """The device's work, by start."""
    return sorted((e for e in events if e["kind"] in DEVICE), key=lambda e: e["start_us"])


def has_device(events):
    """Whether the step had to do with a GPU at all."""
    known = "busy_us" in step_of(events)
    return known or any(e["kind"] in (*DEVICE, "runtime") for e in events)


def wall_us(events):
    """From the call to the return, or to the end of the device's last piece of work where that is later."""
    step = step_of(events)
    return max([step["end_us"], *(e["end_us"] for e in on_device(events))]) - step["start_us"]


def merged(intervals):
    """Intervals (start, end) joined where they overlap or touch, in order: [(0, 3), (2, 5)] -> [(0, 5)]."""
    joined = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError(f"an interval ends before it starts: ({start}, {end})")
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def busy_us(events):
    """µs in which the device does something; two kernels at once count once."""
    known = step_of(events).get("busy_us")  # kept when the list was trimmed
    if known is not None:
        return known
    return sum(end - start for start, end in merged(_times(on_device(events))))


def gaps(events):
    """(start, end) of each stretch of the step in which the device has nothing to do."""
    edge = step_of(events)["start_us"]
    found = []
    for start, end in merged(_times(on_device(events))):
        if start > edge:
            found.append((edge, start))
        edge = max(edge, end)
    end = step_of(events)["start_us"] + wall_us(events)
    return found + [(edge, end)] * (edge < end)


def _times(events):
    return [(e["start_us"], e["end_us"]) for e in events]


def waits(events):
    """Calls within the step in which the host waits for the device."""
    return [e for e in _during(events) if e["kind"] == "runtime" and WAIT.match(e["name"])]


def _during(events):
    # After the step comes the wait of the profiler itself.
    end = step_of(events)["end_us"]
    return [e for e in events if e["start_us"] < end]


def phases(events):
    """(name, start, end) of the outermost regions; with none, of forward, backward and optimizer.

    One region around several others, as a step around its parts, makes way for them.
    """
    regions = [e for e in events if e["kind"] == "region" and not e.get("thread")]
    named = [e for e in regions if not e["name"].startswith("Optimizer.")]  # not torch's own
    levels = [[e for e in named if e.get("depth", 0) == depth] for depth in (0, 1)]
    shown = levels[1] if len(levels[0]) == 1 and len(levels[1]) > 1 else levels[0]
    if shown:
        return [(e["name"], e["start_us"], e["end_us"]) for e in shown]
    nodes, found = [e for e in events if e["kind"] == "engine"], []
    if nodes:
        first, last = min(e["start_us"] for e in nodes), max(e["end_us"] for e in nodes)
        found = [("forward", step_of(events)["start_us"], first), ("backward", first, last)]
    steps = [e for e in regions if e["name"].startswith("Optimizer.step")]
    return found + [("optimizer", e["start_us"], e["end_us"]) for e in steps]
