"""Run the text that Inductor wrote for a GPU, on CPU tensors.

    run_output_code(code, x, bias)              # inference: the outputs of the one graph
    forward, backward = graphs(code)            # training: one callable per graph
    run_training_code(code, x, bias)            # training: (outputs, gradients)
    kernel_functions(code)                      # its Triton kernels, for lib.nogpu.compile_only

A graph takes its inputs in the order of its line `arg0_1, arg1_1 = args` (`primals_1, ...` in training
code): the order in which the function first uses them, which need not be that of its parameters. The
sizes in get_args(), further down in the text, tell which is which.

The module is executed as it is; what it imports is replaced meanwhile:

    async_compile.triton      the kernel runs under Triton's interpreter instead of being compiled
    triton_heuristics.*       one configuration of tile lengths instead of a choice by timing
    empty_strided_cuda, ...   the CPU

Where it differs from a GPU: tiles have other lengths, so sums are added in another order; random numbers
of a dropout come from the CPU's seed. Kernels made from templates (max-autotune) do not run, nor does
text that refers to a constant tensor of the traced function, which is not in the text.

With a GPU, the text is imported and runs there; inputs are copied to it and outputs back.
"""

import contextlib
import inspect
import itertools
import linecache
import math
import re
from unittest import mock

from lib.nogpu.inductor_text import split_graphs

import torch

_numbers = itertools.count()


def run_output_code(code, *inputs):
    """The outputs of inference code for these inputs, in graph order; one tensor when there is one."""
    runners = graphs(code)
    if len(runners) != 1:
        raise ValueError(
            f"run_output_code runs one graph and this code has {len(runners)}. "
            "Use run_training_code for a forward with its backward, or graphs(code) for each graph."
        )
    outputs = runners[0](*inputs)
    return outputs[0] if len(outputs) == 1 else outputs


def run_training_code(code, *inputs, grad_outputs=None):
    """(outputs, gradients of the inputs) of code that has one forward and one backward graph.

    grad_outputs are the gradients of the outputs; ones when not given. A gradient is None where the
    input needs none.
    """
    runners = graphs(code)
    if [graph.name for graph in runners] != ["forward", "backward"]:
        names = ", ".join(graph.name for graph in runners)
        raise ValueError(
            f"run_training_code needs a forward and a backward graph, this has: {names}."
        )
    forward, backward = runners
    # backward takes what forward saved, then the gradients of the outputs, which it calls tangents
    n_tangents = sum(name.startswith("tangents") for name in backward.arg_names)
    n_saved = len(backward.arg_names) - n_tangents
    results = forward(*inputs)
    outputs, saved = results[: len(results) - n_saved], results[len(results) - n_saved :]
    if grad_outputs is None:
        grad_outputs = [torch.ones_like(y) for y in outputs[:n_tangents]]
    return outputs, backward(*saved, *grad_outputs)


def graphs(code):
    """One Graph per module in the text, forward graphs before backward ones."""
    return [Graph(name, text) for name, text in split_graphs(code)]


def kernel_functions(code):
    """{name: the @triton.jit function} of the Triton kernels in the text, in its order."""
    modules = [_module_of(text) for _, text in split_graphs(code)]
    loaded = {name: value for module in modules for name, value in module.items()}
    return {n: k.kernel for n, k in loaded.items() if isinstance(k, _InterpretedKernel)}


class Graph:
    """One module of the text: `graph(*tensors)` returns the tuple of its outputs."""

    def __init__(self, name, text):
        self.name = name  # inference, forward, backward
        self.text = text
        unpacked = re.search(r"(?m)^ +(\w.*?),? = args$", text)  # `arg0_1, arg1_1 = args`
        self.arg_names = unpacked[1].split(", ") if unpacked else []
        self._call = _load_on_gpu(text) if torch.cuda.is_available() else _load_on_cpu(text)

    def __call__(self, *inputs):
        if len(inputs) != len(self.arg_names):
            raise ValueError(
                f"The {self.name} graph takes {len(self.arg_names)} inputs "
                f"({', '.join(self.arg_names)}), got {len(inputs)}."
            )
        self._compare(inputs)
        inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        with torch.no_grad():  # the gradients are in the backward graph
            return tuple(self._call(inputs))

    def _compare(self, inputs):
        """Raise ValueError unless each tensor has the sizes and the dtype that the text was written for."""
        expected = {
            name: (tuple(map(int, re.findall(r"\d+", size))), getattr(torch, dtype))
            for name, size, dtype in _EXAMPLE.findall(self.text)
        }
        # sizes that are arguments themselves may differ
        fixed = all(isinstance(t, torch.Tensor) for t in inputs)
        for name, t in zip(self.arg_names, inputs):
            if not isinstance(t, torch.Tensor) or name not in expected:
                continue
            shape, dtype = expected[name]
            same = tuple(t.shape) == shape if fixed else t.dim() == len(shape)
            if not same or t.dtype != dtype:
                raise ValueError(
                    f"The {self.name} graph takes as {name} a tensor {shape} of {dtype}, got {tuple(t.shape)}"
                    f" of {t.dtype}. Inputs come in the order of its line {', '.join(self.arg_names)} = args,"
                    " in which the function first uses them."
                )


# arg0_1 = rand_strided((128, 512), (512, 1), device='cuda:0', dtype=torch.float32)
_EXAMPLE = re.compile(
    r"(\w+) = rand_strided\(\((.*?)\), \(.*?\), device='\w+(?::\d+)?', dtype=torch\.(\w+)\)"
)


def _load_on_gpu(text):
    from torch._inductor.codecache import PyCodeCache

    module = PyCodeCache.load(text)

    def call(args):
        devices = [t.device for t in args if isinstance(t, torch.Tensor)]
        outputs = module.call([t.cuda() if isinstance(t, torch.Tensor) else t for t in args])
        return [t.to(devices[0]) if isinstance(t, torch.Tensor) and devices else t for t in outputs]

    return call


def _load_on_cpu(text):
    from lib.nogpu.fake_gpu import OnCPU

    module = _module_of(text)

    def call(args):
        # `with torch.cuda._DeviceGuard(0): torch.cuda.set_device(0)` surrounds the launches
        with (
            mock.patch.object(torch.cuda, "_DeviceGuard", contextlib.nullcontext),
            mock.patch.object(torch.cuda, "set_device"),
            OnCPU(),
        ):
            return module["call"](args)

    return call


def _module_of(text):
    """The names of a module of the text. Its kernels are _InterpretedKernels."""
    module = {"__name__": "output_code"}
    with _imports_replaced():
        exec(compile(text, "<output code>", "exec"), module)
    return module


@contextlib.contextmanager
def _imports_replaced():
    """What the text imports from torch, replaced by what runs on the CPU."""
    import torch._inductor.async_compile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def raw_stream(device):
        return 0

    def empty_strided(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    kinds = (
        "pointwise",
        "reduction",
        "persistent_reduction",
        "cooperative_reduction",
        "split_scan",
        "user_autotune",
    )
    guards = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (
            (torch._inductor.async_compile, "AsyncCompile", _InterpretedKernels),
            (torch._C, "_cuda_getCurrentRawStream", raw_stream),
            (guards, "_empty_strided_cuda", empty_strided),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            *((triton_heuristics, kind, _interpreted) for kind in kinds),
        ):
            # create: a torch without CUDA has no _cuda_getCurrentRawStream
            stack.enter_context(mock.patch.object(target, name, stand_in, create=True))
        yield


class _InterpretedKernels:
    """Stands in for AsyncCompile, which compiles kernels in worker processes."""

    def triton(self, name, source, device_str=None):
        if "@triton_heuristics.template" in source:
            raise ValueError(f"{name} was made from a template; it runs on a GPU only.")
        # Triton's interpreter reads a kernel's source again, by file name: linecache holds it.
        file = f"<{name} {next(_numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        module = {"__name__": "kernel", "__file__": file}
        exec(compile(source, file, "exec"), module)
        return module[name]

    def wait(self, scope):
        pass


def _interpreted(size_hints=None, inductor_meta=None, triton_meta=None, custom_kernel=False, **_):
    """Stands in for @triton_heuristics.pointwise(size_hints=..., inductor_meta=..., ...) and its kin."""
    # constexprs of the reader's own kernel
    given = triton_meta["constants"] if custom_kernel else {}
    return lambda kernel: _InterpretedKernel(kernel, size_hints or {}, inductor_meta, given)


class _InterpretedKernel:
    """Stands in for Inductor's launcher, which times several tile lengths and keeps the fastest."""

    def __init__(self, kernel, size_hints, inductor_meta, given):
        self.kernel = kernel
        self.inductor_meta = inductor_meta
        parameters = inspect.signature(kernel.fn).parameters
        tile = _tile(size_hints, inductor_meta.get("RSPLIT_SIZE"))
        self.tile = {k: n for k, n in tile.items() if k in parameters} | given

    def run(self, *args, stream=None, **constants):
        from torch._inductor.runtime.triton_heuristics import GridExpr

        # `constants` are tile lengths that Inductor itself has fixed at the launch
        tile = {**self.tile, **constants}
        # the grid of the reader's own kernel
        extra = self.inductor_meta.get("extra_launcher_args", [])
        names = [*(name for name in self.kernel.arg_names if name not in tile), *extra]
        sizes = dict(zip(names, args, strict=True))
        grid = GridExpr.from_meta(self.inductor_meta, tile).eval_slow({**sizes, **tile})
        self.kernel[grid](**{n: v for n, v in sizes.items() if n not in extra}, **tile)


def _tile(size_hints, rows_of_a_program=None, n_elements=1 << 14):
    """Tile lengths for the interpreter, to which a few large tiles cost less than many small ones.

    The last dimension is filled first. Inductor leaves out masks on the ground that no tile is longer
    than TRITON_MAX_BLOCK, so that limit holds here too. rows_of_a_program is given for a kernel that
    reduces along rows and columns at once: each program loops over so many rows, a tile of x at a time.
    """
    from torch._inductor.runtime.hints import TRITON_MAX_BLOCK

    tile = {}
    for dimension in ("r1_", "r0_", "x", "y", "z"):
        longest = TRITON_MAX_BLOCK[dimension.upper()]
        budget = n_elements // math.prod(tile.values())
        length = max(1, min(size_hints.get(dimension, 1), longest, budget))
        tile[f"{dimension.upper()}BLOCK"] = 1 << (length - 1).bit_length()
    if rows_of_a_program:
        largest_power_of_2 = rows_of_a_program & -rows_of_a_program
        tile["XBLOCK"] = min(tile["XBLOCK"], largest_power_of_2)
        tile |= {"RSPLIT_SIZE": rows_of_a_program, "NUM_STAGES": 1}
    return tile
