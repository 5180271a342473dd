"""Timelines: what ran when, with one lane each for regions, host and device, and time in µs to the right.

Two sources: spans, from an example or a model of a GPU, and the events of a profile (see events.py).
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from lib.course.show import show_figure
from lib.profiling import events as ev
from lib.profiling.cost import utilisation

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

_ORDER = ("region", "host", "device")  # lanes with other names come below, in order of appearance
_BLUE = "#cfdcec"
_WAIT = {"facecolor": "white", "edgecolor": "black", "linestyle": ":", "linewidth": 1.0}
_IDLE = {"facecolor": "white", "edgecolor": "#8a8a8a", "hatch": "////", "linewidth": 0.0}
_COPY = {"facecolor": "#f0dcb4", "edgecolor": "black", "hatch": "....", "linewidth": 0.5}
_ROOM = 118  # characters in a lane
_HEIGHT = 0.62
_ENDING = re.compile("_kernel(_cuda|_impl)?$|(CUDA)?KernelImpl$")  # says only that it is a kernel


class Span(NamedTuple):
    """Something that ran from start_us to end_us in one lane of a timeline; a mark when both are equal."""

    lane: str
    name: str
    start_us: float
    end_us: float


def plot_timeline(source, title):
    """A figure of a list of spans, or of a list of events; see lib.profiling.trace and events_of.

    Waits are dotted. For events, copies are stippled, idle stretches of the device hatched, and the outermost
    regions named. Events too narrow to be seen are drawn as one block with their neighbours; its height is
    the share of time in which the device was busy. Raises TypeError for anything else.
    """
    if _are_events(source):
        return _plot_events(ev.checked(source), title)
    lanes = list(dict.fromkeys(span.lane for span in source))
    lanes.sort(key=lambda lane: _ORDER.index(lane) if lane in _ORDER else len(_ORDER))
    total = max((span.end_us for span in source), default=0) or 1.0
    figure, ax = _axes(lanes, total, title)
    for span in source:
        y, width = lanes.index(span.lane), span.end_us - span.start_us
        if width == 0:
            ax.plot(span.start_us, y - 0.47, "v", color="black", markersize=5, clip_on=False)
            continue
        _bar(ax, y, span, total)
    return figure


def _are_events(source):
    """False for spans; TypeError for what is neither spans nor dictionaries."""
    if isinstance(source, list):
        for kind in (Span, dict):
            if all(isinstance(item, kind) for item in source):
                return kind is dict
    raise TypeError(
        "a timeline is made of a list of spans, Span(lane, name, start_us, end_us), or of a list of events, "
        f"not both; got {type(source).__name__}"
    )


def _axes(lanes, total, title, below=0.0):
    size = 8.5, 0.9 + 0.6 * len(lanes) + below
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set(ylim=(len(lanes) - 0.45, -0.65), xlim=(0, total * 1.01), xlabel="time, µs")
    ax.set_title(title, fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_formatter("{x:,.0f}" if total >= 10 else "{x:,.1f}")
    return figure, ax


def _bar(ax, y, span, total, style=None, share=1.0):
    """Draw one span and its name, where it fits; returns the label."""
    width = span.end_us - span.start_us
    line = 0.7 if width >= ev.NARROW * total else 0.0
    plain = {"facecolor": _BLUE, "edgecolor": "black", "linewidth": line}
    style = style or (_WAIT if span.name == "wait" else plain)
    center = y + _HEIGHT * (1 - share) / 2  # the axis points down: a low block stands on the edge
    ax.barh(center, width, left=span.start_us, height=_HEIGHT * share, **style)
    label = _label(span.name, room=int(width / total * _ROOM - 0.5))
    place = {"ha": "center", "va": "center", "fontsize": 8}
    if label and ("hatch" in style or share < 0.5):
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    middle = span.start_us + width / 2
    ax.text(middle, center if share > 0.5 else y, label, **place)
    return label


def _label(name, room):
    """The name in lines of at most `room` characters, two at most; or a part that says as much; or nothing."""
    inner = name.partition("<")[2].rstrip(">")
    kernel = _ENDING.sub("", inner or name)
    texts = [name, inner, name.partition(":")[0], kernel]  # the third for 'wait: item'
    for text in texts:
        if text and len(text) <= room:
            return text
    for text in texts:
        for place in _breaks(text):
            first, second = text[:place].rstrip(), text[place:]
            if max(len(first), len(second)) <= room:
                return f"{first}\n{second}"
    return ""


def _breaks(text):
    """Where a name may go on in a second line, the most even place first."""
    places = [m.end() for m in re.finditer(r"[_ ,]+|(?<=[a-z])(?=[A-Z])|(?=<)", text)]
    inside = [place for place in places if 0 < place < len(text)]
    return sorted(inside, key=lambda place: abs(len(text) - 2 * place))


def show_timeline(source, title):
    """Display `plot_timeline` with an alt text that says what it shows."""
    figure = plot_timeline(source, title)
    if _are_events(source):
        text = summary(source)
    else:
        spans = source[:40]
        text = "; ".join(f"{s.lane}: {s.name} {s.start_us:.0f}–{s.end_us:.0f}" for s in spans) + "."
    show_figure(figure, f"Timeline in µs, {title}. {text}")


def save_spans(spans_of, path):
    """Write {title: spans} as JSON for ui.perfetto.dev: a process for each title, a thread for each lane."""
    records = []
    for pid, (title, spans) in enumerate(spans_of.items(), 1):
        lanes = dict.fromkeys(span.lane for span in spans)
        tids = {lane: 10 * pid + k for k, lane in enumerate(lanes)}  # of no other process's thread
        records.append(_name("process_name", title, pid, 10 * pid))
        records += [_name("thread_name", lane, pid, tid) for lane, tid in tids.items()]
        for lane, name, start, end in spans:
            times = {"ts": round(start, 3), "dur": round(end - start, 3)}  # µs
            records.append({"ph": "X", "name": name, "pid": pid, "tid": tids[lane], **times})
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    Path(path).write_text(f'{{"traceEvents": [\n{lines}\n]}}\n')


def _name(what, name, pid, tid):
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


# --- events -------------------------------------------------------------------------------------------------


def _plot_events(events, title):
    events = ev.trimmed(events, most=None)
    lanes, total = _lanes(events), ev.wall_us(events) or 1.0
    figure, ax = _axes(list(lanes), total, title, below=0.35)
    for y, bars in enumerate(lanes.values()):
        labels = [_bar(ax, y, span, total, *how) for span, *how in bars]
        if bars and bars[0][0].lane == "region":
            _name_above(ax, [span for (span, *_), label in zip(bars, labels) if not label])
    if not ev.has_device(events):
        y = list(lanes).index("device")
        ax.text(total / 2, y, _NO_DEVICE, ha="center", va="center", fontsize=8, style="italic")
    used = utilisation(events)
    busy = "" if used is None else f"; the device is busy {used:.0f} % of {total:,.0f} µs"
    ax.set_xlabel(f"time, µs{busy}")
    _legend(figure, lanes, ev.NARROW * total)
    return figure


def _name_above(ax, narrow):
    """Name regions that are too narrow for it above the lane, inside the plot and without overlaps."""
    total, end = ax.get_xlim()[1], -1.0
    for span in narrow:
        width, late = len(span.name) / _ROOM * total, span.start_us > total / 2
        left = span.end_us - width if late else span.start_us
        if left >= end:
            edge = span.end_us if late else span.start_us
            ax.text(edge, -0.34, span.name, ha="right" if late else "left", va="bottom", fontsize=8)
            end = left + width


_NO_DEVICE = "no GPU in this profile: nothing ran on a device"


def _legend(figure, lanes, narrow):
    """Explain the styles of the bars that are wide enough to be seen."""
    bars = [bar for lane in lanes.values() for bar in lane]
    used = [style for span, style, _ in bars if span.end_us - span.start_us >= narrow]
    styles = {"the host waits": _WAIT, "copy": _COPY, "the device is idle": _IDLE}
    patches = [Patch(label=text, **style) for text, style in styles.items() if style in used]
    if patches:
        plain = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": 8}
        figure.legend(handles=patches, **plain)


def _lanes(events):
    """{lane: [(Span, style or None, share of the height)]}: regions, host threads, device, more streams."""
    lanes = {"region": [], "host": [], "device": []}
    for name, start, end in ev.phases(events):
        lanes["region"].append((Span("region", name, start, end), None, 1.0))
    waits = ev.waits(events)
    for e in (e for e in events if e["kind"] == "op" and not e["outer"]):
        covered = any(w["start_us"] < e["end_us"] and e["start_us"] < w["end_us"] for w in waits)
        _add(lanes, _host(e), {**e, "name": ""} if covered else e)
    for e in waits:
        inside = f": {e['outer']}".replace("aten::", "") if e.get("outer") else ""
        _add(lanes, _host(e), {**e, "name": f"wait{inside}"}, _WAIT)
    if ev.has_device(events):
        for start, end in ev.gaps(events):
            idle = {"name": f"idle {end - start:,.0f}", "start_us": start, "end_us": end}
            _add(lanes, "device", idle, _IDLE)
    _add_device(lanes, ev.on_device(events))
    if not lanes["region"]:
        del lanes["region"]
    order = ["region", "host", "host, backward", "device"]
    return dict(sorted(lanes.items(), key=lambda lane: (order + [lane[0]]).index(lane[0])))


def _host(event):
    return "host, backward" if event["thread"] else "host"


def _add_device(lanes, work):
    streams = [e["stream"] for e in work]
    main = max(set(streams), key=streams.count) if streams else None
    for e in work:
        lane = "device" if e["stream"] == main else f"stream {e['stream']}"
        us = e["end_us"] - e["start_us"]
        share = e.get("busy_us", us) / us if us else 1.0
        if share < 1:
            _add(lanes, lane, {**e, "name": ""}, _IDLE)
            e = {**e, "name": f"{e['name']}, {100 * share:.0f} % busy"}
        _add(lanes, lane, e, None if e["kind"] == "kernel" else _COPY, share)


def _add(lanes, lane, e, style=None, share=1.0):
    name = e["name"].removeprefix("aten::").removeprefix("Memcpy ").split(" (")[0]
    lanes.setdefault(lane, []).append((Span(lane, name, e["start_us"], e["end_us"]), style, share))


def summary(events):
    """What a timeline of events shows, in sentences: regions, how much ran where, idle stretches, waits."""
    ev.checked(events)
    wall, host = ev.wall_us(events), [e for e in events if e["kind"] == "op" and not e["outer"]]
    regions = [f"{name} {start:,.0f}–{end:,.0f}" for name, start, end in ev.phases(events)]
    sentences = [f"Regions: {'; '.join(regions)}"] if regions else []
    waits = _n(ev.waits(events))
    sentences.append(f"Host: {_n(host)} ops in {wall:,.0f} µs, {waits} waits for the device")
    if not ev.has_device(events):
        return ". ".join([*sentences, f"Device: {_NO_DEVICE}."])
    idle = sorted(ev.gaps(events), key=lambda gap: gap[0] - gap[1])[:3]
    stretches = "; ".join(f"{start:,.0f}–{end:,.0f}" for start, end in sorted(idle)) or "none"
    work = f"{_n(ev.on_device(events))} kernels and copies, busy {utilisation(events):.0f} % of the time"
    return ". ".join([*sentences, f"Device: {work}", f"Longest idle stretches: {stretches}."])


def _n(events):
    return sum(e.get("n", 1) for e in events)
