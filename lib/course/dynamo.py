"""What torch.compile's first two stages make of a function, read where PyTorch keeps it for itself.

aten_graphs(fn, *inputs)      # {"forward": ..., "backward": ...}: what AOTAutograd hands to Inductor
guards_of(fn)                 # for each compiled version of fn, its guards: (kind, what is checked)
broken_guard(error)           # what failed, from the error of the stance fail_on_recompile
essentials(log)               # the lines to read first of TORCH_LOGS=recompiles,graph_breaks,guards
"""

import json
import re

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
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


def guards_of(fn):
    """For each compiled version of fn, its guards: (kind, what is checked), without addresses."""
    texts = [str(entry.guard_manager) for entry in _debug_get_cache_entry_list(fn.__code__)]
    by_version = [re.findall(r"(?m)\+- ([A-Z_]+): (.*?)(?:  +#.*)?$", text) for text in texts]
    return [[(kind, _shortened(what)) for kind, what in guards] for guards in by_version]


def _shortened(what):
    if " against {" in what:  # PyTorch's global settings
        return ", ".join(json.loads(what.split(" against ")[1]))
    what = re.sub(r"DispatchKeySet\(.*?\), ", "", what)
    what = re.sub(r"^(check_tensor|___check_obj_id)\((.*?)(, \d{6,}.*)?\)?$", r"\2", what)
    return re.sub(r"\['(\w+)'\]", r".\1", what).replace("L.", "").replace("G.", "global ")


def broken_guard(error):
    """What the first compiled version had against a call that may not recompile."""
    return re.search(r"(?m)- \d+/\d+: (.*?)(?:  +#.*)?$", str(error))[1].strip()


_ESSENTIAL = r"TENSOR_MATCH|EQUALS_|LAMBDA.*size|Recompiling|^ +- \d|Graph break in|Explanation:"
_NOISE = r"  +#.*|  # .*|.*\+- [A-Z_]+: |^ +|Explanation: | with argument.*| in /.*script.py:\d+"


def essentials(log):
    """(where, kind, text) of the lines of a log that say what happened; where is "frame/version"."""
    lines = re.findall(r"(?m)^V\d{4} .*?\] \[(\d+/\d+)\w*\] \[__(\w+)\] ?(.*)$", log)
    for where, kind, text in lines:
        if re.search(_ESSENTIAL, text):
            text = re.sub(r" at /.*script", " at script", re.sub(_NOISE, "", text))
            yield where, kind, _shortened(text.strip())
