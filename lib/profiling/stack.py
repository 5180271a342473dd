"""Which line of Python an event of a profile comes from, told without the folders of this machine."""

import collections
import linecache
import re
import sys
import sysconfig
from pathlib import Path

from torch._C._profiler import _EventType

_ROOT = str(Path(__file__).resolve().parents[2])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Names without a folder are relative to Python's search path: threading.py, torch/optim/adam.py.
_NOT_THE_READERS = {*sys.stdlib_module_names, "torch", "triton", "numpy", "IPython", "ipykernel"}
_OURS = ("lib/profiling/capture.py", "lib/profiling/cost.py")


def lines_of(profile):
    """A function (start_ns, name of a Python event) -> its line, '' where the profile has no stacks.

    The profiler's tree knows from which line a call was made; the trace it exports does not.
    """
    with_stack = getattr(profile, "with_stack", False)
    found = _python_nodes(profile) if with_stack else []
    nodes = collections.defaultdict(list)
    for node in found:
        nodes[node.name].append(node)

    def line_of(start_ns, name):
        # the trace rounds its times, to a microsecond at worst
        near = [n for n in nodes[name] if abs(n.start_time_ns - start_ns) <= 1000]
        return _told(min(near, key=lambda n: abs(n.start_time_ns - start_ns), default=None))

    return line_of


def _python_nodes(profile):
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if node.tag in (_EventType.PyCall, _EventType.PyCCall):
            yield node


def _told(node):
    places = list(_places(node))
    if not places:
        return ""
    return told(*next((p for p in places if is_readers(p[0])), places[0]))


def _places(node):
    """(file, line, function, exact) from the innermost: where the call was made, and what called that."""
    if node is not None and node.tag == _EventType.PyCall:
        # No call of Python's, as in `if tensor:`; of the line, only the function around it is known.
        inside = node.extra_fields.callsite
        yield inside.file_name, inside.line_number, inside.function_name, False
    while node is not None:
        if node.tag in (_EventType.PyCall, _EventType.PyCCall):
            made = node.extra_fields.caller
            yield made.file_name, made.line_number, made.function_name, True
        node = node.parent


def is_readers(file):
    """True for a file that is no library: a notebook's cell, the project's own code, a script."""
    # installed files first: an environment may lie inside the project
    if file.startswith("<frozen") or file.startswith(_INSTALLED) or "torchinductor" in file:
        return False
    if file.startswith((_ROOT + "/", *_OURS)):
        return not file.removeprefix(_ROOT + "/").startswith(_OURS)
    return file.split("/")[0].removesuffix(".py") not in _NOT_THE_READERS


def told(file, line, function, exact=True):
    """'lib/model.py:12 forward: n = y.item()', for a cell 'cell:12 …'; exact: is it more than the function?"""
    shown = file.removeprefix(_ROOT + "/")
    if re.search(r"ipykernel_\d+/|<ipython-input", file):
        shown = "cell"
    elif shown.startswith("/"):
        shown = Path(file).name
    if not exact:
        return f"{shown}:{line} {function}, somewhere below"
    source = linecache.getline(file, line).strip()
    source = source if len(source) <= 60 else source[:59] + "…"
    return f"{shown}:{line} {function}: {source}" if source else f"{shown}:{line} {function}"
