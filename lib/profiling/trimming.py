"""Fewer events that draw the same timeline, for a record that a reader without a GPU can draw again."""

from lib.profiling import events as ev

NARROW = 1 / 300  # of the width of a timeline: two pixels, below which neighbours are drawn as one


def trimmed(events, most=300):
    """At most `most` events, which draw the same timeline: to be recorded, and drawn where there is no GPU.

    Neighbours in a lane become one event where each is too narrow to be seen, two pixels wide; wider ones too
    until `most` are left, or not when it is None. What no timeline shows is left out. The share of time in
    which the device is busy stays that of the whole list. Raises ValueError when `most` cannot be reached.
    """
    ev.checked(events)
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"most is how many events to keep, 1 or more; got {most!r}")
    step, wall = ev.step_of(events), ev.wall_us(events)
    if ev.has_device(events):
        step = {**step, "busy_us": round(ev.busy_us(events), 3)}
    region = {"kind": "region", "thread": 0, "depth": 0}
    phases = [{**region, "name": n, "start_us": s, "end_us": e} for n, s, e in ev.phases(events)]
    narrow = NARROW * wall
    while True:
        found = [step, *phases]
        found += [e for group in _groups(events) for e in _joined(group, narrow)]
        if most is None or len(found) <= most:
            return sorted(found, key=lambda e: e["start_us"])
        if narrow > wall:
            raise ValueError(f"most={most} is too few: lanes and regions alone are {len(found)}")
        narrow *= 1.5


def _groups(events):
    """Lists of events that lie in one lane and do not overlap there, each in order."""
    outermost = [e for e in events if e["kind"] == "op" and not e["outer"]]
    groups = {}
    for e in outermost + ev.waits(events):
        groups.setdefault((e["kind"], e["thread"]), []).append(e)
    for e in ev.on_device(events):
        groups.setdefault(("device", e["stream"]), []).append(e)
    return [sorted(group, key=lambda e: e["start_us"]) for group in groups.values()]


def _joined(group, narrow):
    joined, last_us = [], 0.0
    for e in group:
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
        name = a["name"]  # by its name it is known as a wait
    elif same:
        name = f"{b['name']} ×{n}"
    else:
        name = f"{n} kernels, copies" if mixed else f"{n} {_PLURAL[a['kind']]}"
    kind = "kernel" if mixed else a["kind"]
    busy_us, end_us = round(_busy(a) + _busy(b), 3), max(a["end_us"], b["end_us"])
    known = {"n": n, "same": b["name"] if same else None, "mixed": mixed, "busy_us": busy_us}
    return {**a, "kind": kind, "name": name, "end_us": end_us, **known}


def _busy(event):
    return event.get("busy_us", event["end_us"] - event["start_us"])
