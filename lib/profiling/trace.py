"""Convert a profile, or a trace file of a profiler, to the plain events of lib.profiling.events."""

import collections
import json
import linecache
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from lib.profiling.events import NEEDS_A_NUMBER, STEP, WAIT

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

_ENGINE = "autograd::engine::evaluate_function: "
_ON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "set"}
_RUNTIME = ("cuda_runtime", "cuda_driver")
_ON_HOST = ("cpu_op", "user_annotation", "python_function", *_RUNTIME)
_LINE = "line of Python "  # prefix of the names of the records that Lines makes

_ROOT = str(Path(__file__).resolve().parents[2]) + "/"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# The profiler names files relative to Python's search path: threading.py, torch/optim/adam.py.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "triton", "numpy", "IPython", "ipykernel"}


def events_of(profile):
    """The events of what `lib.profiling.profiled` returned, by start. TypeError for anything else."""
    if not hasattr(profile, "export_chrome_trace"):
        kind = type(profile).__name__
        raise TypeError(f"events_of takes the profile that profiled(fn) returns, got {kind}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(errors="replace"), strict=False)
    return from_trace(trace)


def from_trace(trace):
    """The events of a trace in Chrome's format."""
    records = [r for r in trace["traceEvents"] if r.get("ph") == "X" or _is_memory(r)]
    host = [r for r in records if r.get("cat") in _ON_HOST]
    step = next((r for r in host if r["name"] == STEP), None) or _extent(records)
    _adopt(host, step)
    _nest(host)
    reader = _Reader(host, step)
    events = [reader.event("step", step, name=STEP)]
    for record in host:
        events += reader.host_event(record)
    for record in records:
        events += reader.other_event(record)
    events = [e for e in events if e["end_us"] >= 0]  # what precedes the step is the profiler's own
    return sorted(events, key=lambda e: (e["start_us"], -e["end_us"]))


def _is_memory(record):
    return record.get("name") == "[memory]"


def _extent(records):
    timed = [r for r in records if r.get("cat") in (*_ON_HOST, *_ON_DEVICE)]
    if not timed:
        raise ValueError("the profile holds no events; did the profiler record a call at all?")
    start = min(r["ts"] for r in timed)
    return {"ts": start, "dur": max(r["ts"] + r["dur"] for r in timed) - start, "tid": None}


def _adopt(host, step):
    """Assign runtime calls of a thread that has no other records to the step's thread."""
    threads = {r["tid"] for r in host if r["cat"] not in _RUNTIME}
    for record in host:
        if record["tid"] not in threads:
            record["tid"] = step["tid"]


def _nest(host):
    """Give each record its `parent`, the innermost record of its thread around it, and the µs `inside` it."""
    by_thread = collections.defaultdict(list)
    for record in host:
        by_thread[record["tid"]].append(record)
    for records in by_thread.values():
        around = []
        for record in sorted(records, key=lambda r: (r["ts"], -r["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= record["ts"]:
                around.pop()
            record["parent"], record["inside"] = (around[-1] if around else None), 0.0
            around.append(record)
    for record in host:
        outer = next((r for r in _parents(record) if r["cat"] != "python_function"), None)
        if outer and record["cat"] != "python_function":
            outer["inside"] += record["dur"]


def _parents(record):
    while record := record["parent"]:
        yield record


def _is_op(record):
    # 'aten::mul', 'mylib::my_op'; not 'autograd::engine::…', nor what torch.compile names for itself
    named = re.match(r"(?!autograd::|torch::|profiler::)\w+::\w", record["name"])
    return record["cat"] == "cpu_op" and named is not None


def _is_region(record):
    ours = record["name"] == STEP or record["name"].startswith(("ProfilerStep", _LINE))
    return record["cat"] == "user_annotation" and not ours


class _Reader:
    """Converts records of a trace to events; maps threads to numbers and ids to ops."""

    def __init__(self, host, step):
        self.zero_us = step["ts"]
        threads = dict.fromkeys([step["tid"], *(r["tid"] for r in host if r["cat"] == "cpu_op")])
        self.threads = {tid: k for k, tid in enumerate(t for t in threads if t is not None)}
        ids = ((r.get("args", {}).get("External id"), r) for r in host if r["cat"] == "cpu_op")
        self.by_id = {number: r for number, r in ids if number is not None}
        self.call_of = {}  # correlation -> the runtime call that queued this work of the device

    def event(self, kind, record, **more):
        start_us = record["ts"] - self.zero_us
        end_us = start_us + record.get("dur", 0)
        times = {"start_us": round(start_us, 3), "end_us": round(end_us, 3)}
        return {"kind": kind, "name": more.pop("name", record.get("name")), **times, **more}

    def host_event(self, record):
        thread = self.threads.get(record["tid"], 0)
        if record["cat"] in _RUNTIME:
            return [self._runtime(record)]
        if _is_region(record):
            depth = sum(map(_is_region, _parents(record)))
            return [self.event("region", record, thread=thread, depth=depth)]
        if record["name"].startswith(_ENGINE):
            name = record["name"].removeprefix(_ENGINE).split("::")[-1]
            return [self.event("engine", record, name=name, thread=thread)]
        if not _is_op(record):
            return []
        outer = [r["name"] for r in _parents(record) if _is_op(r)][-1:]
        where = _where(record) if record["name"] in NEEDS_A_NUMBER else ""
        us = {"self_us": round(record["dur"] - record["inside"], 3)}
        return [self.event("op", record, thread=thread, **us, outer="".join(outer), where=where)]

    def _runtime(self, record):
        args = record.get("args", {})
        from_op = self.by_id.get(args.get("External id"), record)
        ops = [r["name"] for r in (from_op, *_parents(from_op)) if _is_op(r)] or [""]
        interesting = WAIT.match(record["name"]) or "Memcpy" in record["name"]
        where = _where(from_op) if interesting else ""
        thread = self.threads.get(from_op["tid"], 0)
        event = self.event("runtime", record, thread=thread, op=ops[0], outer=ops[-1], where=where)
        self.call_of[args.get("correlation")] = event
        return event

    def other_event(self, record):
        """Work on the device, linked to the call that queued it, or a change of the memory in use."""
        args = record.get("args", {})
        if _is_memory(record):
            device = "cuda" if args["Device Type"] == 1 else "cpu"
            sizes = {"bytes": args["Bytes"], "total_bytes": args["Total Allocated"]}
            return [self.event("memory", record, device=device, **sizes)]
        kind = _ON_DEVICE.get(record.get("cat"))
        if kind is None:
            return []
        call = self.call_of.get(args.get("correlation"), {})
        more = {"bytes": args.get("bytes")} if kind == "copy" else {}
        if kind == "copy" and call:
            call.update(copies=record["name"], **more)
        name = short_name(record["name"]) if kind == "kernel" else record["name"]
        stream, op = args.get("stream", 0), call.get("outer", "")
        return [self.event(kind, record, name=name, stream=stream, op=op, **more)]


# --- the line of Python ---------------------------------------------------------------------------------------


class Lines(TorchFunctionMode):
    """While active, each call of a torch function is a record of the trace, named by its line of Python.

    The profiler's own records of Python (with_stack=True) give a function's first line, not the line of a call.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        while frame and not is_readers(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return func(*args, **kwargs)
        code = frame.f_code
        with record_function(f"{_LINE}{code.co_filename}:{frame.f_lineno} {code.co_name}"):
            return func(*args, **kwargs)


def is_readers(file):
    """True for a file that is not of a library: a notebook's cell, the project's own code, a script."""
    # installed files first: an environment may lie inside the project
    if file.startswith(("<frozen", "<eval_with_key", *_INSTALLED)) or "torchinductor" in file:
        return False
    file = file.removeprefix(_ROOT)
    library = file.split("/")[0].removesuffix(".py") in _LIBRARIES
    return not library and not file.startswith("lib/profiling/")


def _where(record):
    """The line of Python around a record, and in the backward pass the node that ran it."""
    around = [record, *_parents(record)]
    lines = [line for r in around if (line := line_of(r))]
    nodes = [r["name"].removeprefix(_ENGINE) for r in around if r["name"].startswith(_ENGINE)]
    backward = [f"backward, {node.split('::')[-1]}" for node in nodes]
    return " · ".join(lines[:1] + backward[:1])


def line_of(record):
    """'lib/model.py:12 forward: n = y.item()' for a record of Lines, 'cell:12 …' in a notebook; else mostly ''.

    For the profiler's own record of a reader's function: its first line, as 'cell:9 step, somewhere below'.
    """
    if record["name"].startswith(_LINE):
        place = re.fullmatch(r"(.+):(\d+) (.+)", record["name"].removeprefix(_LINE))
        source = linecache.getline(place[1], int(place[2])).strip()
        source = source if len(source) <= 60 else source[:59] + "…"
        after = f": {source}" if source else ""
    else:
        place = re.fullmatch(r"(.+)\((\d+)\): (.+)", record["name"])
        after = ", somewhere below"
        if record["cat"] != "python_function" or not place or not is_readers(place[1]):
            return ""
    file, line, function = place.groups()
    path = file.removeprefix(_ROOT)
    if re.search(r"ipykernel_\d+/|<ipython-input", file):
        path = "cell"
    elif path.startswith("/"):
        path = Path(file).name
    return f"{path}:{line} {function}{after}"


# --- names ----------------------------------------------------------------------------------------------------


def short_name(kernel):
    """A kernel's name without namespaces and most template arguments: 'elementwise_kernel<MulFunctor>'."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    outer, _, arguments = plain.partition("<")
    inner = re.findall(r"\w*Functor\w*|\w+_kernel_?\w*|\w+KernelImpl", arguments.split("std::")[0])
    name = outer.split("(")[0].split("::")[-1].strip()
    return f"{name}<{inner[-1]}>" if inner else name
