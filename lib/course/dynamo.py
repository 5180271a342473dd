"""What torch.compile's first two stages make of a function, read where PyTorch keeps it for itself.

aten_graphs(fn, *inputs)          # {"forward": ..., "backward": ...}: what AOTAutograd hands to Inductor
broken_guards(compiled, changes)  # for each change of the arguments, the guard that it breaks
keep_warnings()                   # the compiler's warnings go into a text from now on
broken_guard(error)               # what failed, from the error of the stance fail_on_recompile
essentials(log)                   # the lines to read first of TORCH_LOGS=recompiles,graph_breaks,guards
"""

import io
import json
import logging
import re

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table


def aten_graphs(fn, *inputs):
    """The FX graphs of fn(*inputs) and of its backward pass, in ATen ops; they run as they are."""
    graphs = {}

    def keep_as(name):
        def compiler(graph, example_inputs):
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep_as("forward"),
        bw_compiler=keep_as("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(fn, backend=backend)(*inputs).sum().backward()
    return graphs


def _shortened(what):
    if " against {" in what:  # PyTorch's global settings
        return ", ".join(json.loads(what.split(" against ")[1]))
    what = re.sub(r"DispatchKeySet\(.*?\), ", "", what)
    what = re.sub(r"^(check_tensor|___check_obj_id)\((.*?)(, \d{6,}.*)?\)?$", r"\2", what)
    return re.sub(r"\['(\w+)'\]", r".\1", what).replace("L.", "").replace("G.", "global ")


def keep_warnings():
    """From now on the compiler's warnings go into the io.StringIO that this returns, not to stderr."""
    says = io.StringIO()
    for name in ("torch", "torch._dynamo"):
        logging.getLogger(name).handlers = [logging.StreamHandler(says)]
    return says


def broken_guard(error):
    """What the first compiled version had against a call that may not recompile."""
    return re.search(r"(?m)- \d+/\d+: (.*?)(?:  +#.*)?$", str(error))[1].strip()


def broken_guards(compiled, changes):
    """For each entry of changes, name: arguments, the guard that a call of `compiled` breaks, or "none".

    The change "under no_grad" is made so, and "another number of CPU threads" too.
    """
    n_threads = torch.get_num_threads()
    broken = {}
    for what, args in changes.items():
        torch.set_num_threads(n_threads + ("CPU threads" in what))
        try:
            with (
                torch.set_grad_enabled("no_grad" not in what),
                torch.compiler.set_stance("fail_on_recompile"),
            ):
                compiled(*args)
            broken[what] = "none"
        except RuntimeError as error:
            broken[what] = broken_guard(error)
        finally:
            torch.set_num_threads(n_threads)
    return broken


_ESSENTIAL = r"TENSOR_MATCH|EQUALS_|LAMBDA.*size|Recompiling|^ +- \d|Graph break in|Explanation:"
_NOISE = r"  +#.*|  # .*|.*\+- [A-Z_]+: |^ +|Explanation: | with argument.*| in /.*script.py:\d+"


def essentials(log):
    """(where, kind, text) of the lines of a log that say what happened; where is "frame/version"."""
    lines = re.findall(r"(?m)^V\d{4} .*?\] \[(\d+/\d+)\w*\] \[__(\w+)\] ?(.*)$", log)
    for where, kind, text in lines:
        if re.search(_ESSENTIAL, text):
            text = re.sub(r" at /.*script", " at script", re.sub(_NOISE, "", text))
            yield where, kind, _shortened(text.strip())
