"""What a step costs, in one row: kernels, host ops, time on both sides, waits of the host, copies.

Every function takes the events of lib.profiling.events, from a profile made here or recorded on another
machine. Profiling slows a step down, so compare bills only with bills; lib.measure.bench gives the times to
quote.
"""

import collections

from lib.profiling import events as ev

_READS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense")


def bill(events, version):
    """One row, a dictionary: put those of several versions into one pandas.DataFrame.

    version         the name of the row
    kernels         kernels that ran on the device, by launch or as part of a CUDA graph
    host_ops        ops that Python or the backward pass called, without the ops that these call
    device_us       sum of the times of the device's work, copies included
    host_us         from the call to the return, without the time in which the host waited
    wall_us         from the call until host and device are both done
    busy_pct        see utilisation
    syncs           how often the host waited for the device, see syncs; sync_names: in which op
    to_device, to_device_bytes   copies from the host to the device

    With no GPU in the profile the device's columns are None, and syncs are ops that would wait on one.
    """
    ev.checked(events, whole=True)
    step, waiting = ev.step_of(events), syncs(events)
    waited = sum(e["end_us"] - e["start_us"] for e in ev.waits(events))
    row = {
        "version": version,
        "kernels": sum(e["kind"] == "kernel" for e in events),
        "host_ops": len(_ops(events)),
        "device_us": round(sum(e["end_us"] - e["start_us"] for e in ev.on_device(events)), 1),
        "host_us": round(step["end_us"] - step["start_us"] - waited, 1),
        "wall_us": round(ev.wall_us(events), 1),
        "busy_pct": utilisation(events),
        "syncs": sum(row["times"] for row in waiting),
        "sync_names": _count(waiting),
        **_copies(events),
    }
    if not ev.has_device(events):
        row |= dict.fromkeys(["kernels", "device_us", "to_device", "to_device_bytes"])
    return row


def utilisation(events):
    """Per cent of the step's wall time in which the device is busy, None when the profile has no GPU.

    Overlapping kernels count once. The profiler makes the host slower, so this is a lower bound for a step
    that waits for its host.
    """
    ev.checked(events)
    if not ev.has_device(events):
        return None
    return round(100 * ev.busy_us(events) / (ev.wall_us(events) or 1), 1)


def _ops(events):
    end = ev.step_of(events)["end_us"]
    return [e for e in events if e["kind"] == "op" and not e["outer"] and e["start_us"] < end]


def _count(rows):
    times = collections.Counter()
    for row in rows:
        times[row["op"] or row["call"]] += row["times"]
    return ", ".join(f"{name} ×{n}" for name, n in times.items()) or "none"


def _copies(events):
    copies = [e for e in events if e["kind"] == "copy" and "HtoD" in e["name"]]
    return {"to_device": len(copies), "to_device_bytes": sum(e["bytes"] or 0 for e in copies)}


def syncs(events):
    """One row for each place at which the host waits for the device, longest wait first.

    op, inside   what Python called, and the op in it that waits: aten::item, aten::_local_scalar_dense
    call         the CUDA calls that wait: a ...Synchronize, or a copy from or to pageable memory
    times        how often
    waited_us    how long, in total
    where        the line of Python, in a profile made with stack=True

    With no GPU in the profile nothing waits. The rows are then ops that would, if their tensor were on a GPU;
    copies to it cannot be seen.
    """
    ev.checked(events, whole=True)
    rows = {}
    for wait in _on_gpu(events) if ev.has_device(events) else _would_wait(events):
        key = tuple(wait[name] for name in ("op", "inside", "call", "where"))
        row = rows.setdefault(key, {**wait, "times": 0, "waited_us": 0.0})
        row["times"] += 1
        row["waited_us"] += wait["waited_us"]
    for row in rows.values():
        row["waited_us"] = round(row["waited_us"], 1)
    order = ("op", "inside", "call", "times", "waited_us", "where")
    rows = sorted(rows.values(), key=lambda row: -row["waited_us"])
    return [{name: row[name] for name in order} for row in rows]


def _on_gpu(events):
    """Waits, each with the copy just before it that it waits for; and copies that block the host themselves."""
    waits, end = {id(e) for e in ev.waits(events)}, ev.step_of(events)["end_us"]
    last = {}  # thread -> a copy that may yet be followed by its wait
    for e in sorted(events, key=lambda e: e["start_us"]):
        if e["kind"] != "runtime" or e["start_us"] >= end:
            continue
        copy, waited = last.get(e["thread"]), id(e) in waits
        same_op = copy is not None and (copy["op"], copy["outer"]) == (e["op"], e["outer"])
        if copy is not None and ("Memcpy" in e["name"] or not same_op):
            yield from _alone(copy)
        if waited:
            yield _wait_of([copy, e] if same_op else [e])
        if "Memcpy" in e["name"]:
            last[e["thread"]] = e
        elif waited or not same_op:
            last.pop(e["thread"], None)
    for copy in last.values():
        yield from _alone(copy)


def _alone(copy):
    # From or to pageable memory the driver needs the host; cudaMemcpy with no Async always waits.
    if "Pageable" in copy.get("copies", "") or copy["name"] == "cudaMemcpy":
        yield _wait_of([copy])


def _wait_of(calls):
    """A wait as it goes into a row, from the one or two calls of the runtime that make it up."""
    last = calls[-1]
    names = [f"{e['name']} ({_direction(e)})" if "copies" in e else e["name"] for e in calls]
    us = sum(e["end_us"] - e["start_us"] for e in calls)
    where = last.get("where") or calls[0].get("where", "")
    op, inside = last["outer"], last["op"] if last["op"] != last["outer"] else ""
    return {"op": op, "inside": inside, "call": " + ".join(names), "waited_us": us, "where": where}


def _direction(copy):
    return copy["copies"].partition("(")[2].rstrip(")") or copy["copies"]


def _would_wait(events):
    """Ops that read a number of their tensor. They would wait if the tensor were on a GPU."""
    # An optimizer keeps its step counters on the host even with a GPU.
    optimizer = [e for e in events if e["kind"] == "region" and e["name"].startswith("Optimizer.")]
    reads_so_far = []
    for e in events:
        if e["kind"] != "op" or e["name"] not in ev.NEEDS_A_NUMBER:
            continue
        outer = e["outer"] or e["name"]
        # Elsewhere the scalar is one that PyTorch made from a Python number, as the 2 in x * 2.
        reads = e["name"] != "aten::_local_scalar_dense" or outer in _READS
        if not reads or any(_within(e, around) for around in optimizer + reads_so_far):
            continue
        reads_so_far.append(e)
        inside = e["name"] if e["name"] != outer else ""
        call = "none here; waits on a GPU"
        yield {"op": outer, "inside": inside, "call": call, "waited_us": 0.0, "where": e["where"]}


def _within(event, around):
    same = event["thread"] == around["thread"]
    return same and around["start_us"] <= event["start_us"] and event["end_us"] <= around["end_us"]
