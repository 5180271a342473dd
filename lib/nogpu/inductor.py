"""The Triton code that torch.compile writes for a GPU, on a machine with no GPU.

    code = output_code(softmax, torch.randn(64, 1024))    # the text, also logged by TORCH_LOGS=output_code
    kernels(code)                                          # its kernels, in the order of their launches
    run_output_code(code, x)                               # run it (lib/nogpu/run_output_code.py)

With a GPU, `output_code` compiles and runs the function there and returns what Inductor wrote. Without
one, Inductor is given fake tensors of the same shapes on a fake H200 (lib/nogpu/fake_gpu.py) and writes
the same text line by line, but for what `normalize` removes.

Where it differs from a GPU:
    Nothing is computed, so a branch on a tensor's value (`if x.sum() > 0`) ends the text there, and so does a
    size that depends on values (`x[x > 0]`, nonzero). The text says so.
    Nothing is timed, so mode="max-autotune" cannot choose, CUDA graphs cannot record, and a matmul of odd
    sizes is never padded (on a GPU Inductor times it both ways): the text says where that could matter.
    scaled_dot_product_attention becomes products and a softmax; on a GPU it is one call. The text says so.

From a shell the documented way is the same with and without a GPU; the script has to ask for the code
of a function, because a plain torch.compile on CPU tensors writes C++:

    TORCH_LOGS=output_code python my_script.py      # and in it: import lib, then output_code(fn, x)

`without_log_prefixes` leaves of such a log the text alone.
"""

import contextlib
import copy
import inspect
import re
import warnings
from types import SimpleNamespace
from unittest import mock

from lib.nogpu import recorded_code
from lib.nogpu.inductor_text import KernelInfo, kernel_source, kernels, normalize
from lib.nogpu.run_output_code import (
    graphs,
    kernel_functions,
    run_output_code,
    run_training_code,
)

import numpy as np
import torch

__all__ = [
    "KernelInfo",
    "UnsupportedVersion",
    "graphs",
    "kernel_functions",
    "kernel_source",
    "kernels",
    "normalize",
    "output_code",
    "without_log_prefixes",
    "run_output_code",
    "run_training_code",
]

SUPPORTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}


class UnsupportedVersion(RuntimeError):
    """The fake-GPU tracer does not support this version of torch or triton."""


def _versions():
    """Those of torch and triton, as (2, 13)."""
    import triton

    return [tuple(int(n) for n in p.__version__.split(".")[:2]) for p in (torch, triton)]


def check_versions():
    for (name, (oldest, newest)), version in zip(SUPPORTED.items(), _versions()):
        if not oldest <= version <= newest:
            supported = " and ".join(
                f"{package} {a[0]}.{a[1]} to {b[0]}.{b[1]}" for package, (a, b) in SUPPORTED.items()
            )
            raise UnsupportedVersion(
                f"Output code without a GPU is known to work with {supported}; here is {name} "
                "{}.{}. ".format(*version)
                + "Install the versions pinned in pyproject.toml, or use a GPU."
            )


# ---------------------------------------------------------------------------------------------------
# Getting the text


def output_code(fn, *inputs, options=None, dynamic=False):
    """The code Inductor writes for fn(*inputs) on a GPU: a Python module per graph, in one text.

    fn is a function or a torch.nn.Module; inputs are tensors on any device, and anything else fn takes.
    Where an input or a parameter requires grad, the text holds the forward graphs and then the backward
    graphs. `options` and `dynamic` go to torch.compile; an input may be marked by torch._dynamo.mark_dynamic.

    Raises ValueError where nothing was compiled or an option needs a GPU. Without a GPU, and with a torch or
    triton outside SUPPORTED, it returns the text recorded for this function and these shapes, with a warning
    and a first line that say so. Where there is none, a newer version is tried, with a warning; if that fails,
    and with an older version, UnsupportedVersion.
    """
    if any(isinstance(leaf, np.ndarray) for leaf in torch.utils._pytree.tree_leaves(inputs)):
        raise TypeError("output_code: pass torch tensors, not NumPy arrays")
    settings = {"dynamic": dynamic, **(options or {})}
    if not torch.cuda.is_available():
        _check_options(options or {})
        try:
            check_versions()
        except UnsupportedVersion as unsupported:
            if code := recorded_code.find(fn, inputs, settings):
                return code
            return _tried(unsupported, fn, inputs, options, dynamic)
    code = _compiled_text(fn, inputs, options, dynamic)
    recorded_code.remember(fn, inputs, settings, code)
    return code


def _tried(unsupported, fn, inputs, options, dynamic):
    """The text in spite of `unsupported`, by versions that are newer than those known to work."""
    if any(version < oldest for version, (oldest, _) in zip(_versions(), SUPPORTED.values())):
        raise unsupported
    warnings.warn(f"{unsupported} It is tried all the same.", stacklevel=3)
    try:
        return _compiled_text(fn, inputs, options, dynamic)
    except (TypeError, ValueError):
        raise  # what fn and its inputs are wrong in
    except Exception as error:
        raise unsupported from error


def _compiled_text(fn, inputs, options, dynamic):
    if not callable(fn):
        raise TypeError(
            f"output_code: fn must be a function or a torch.nn.Module, not {type(fn).__name__}"
        )
    if isinstance(fn, torch.nn.Module):
        fn = copy.deepcopy(fn)  # its parameters will be moved
    write = _write_on_gpu if torch.cuda.is_available() else _write_on_fake_gpu
    codes = write(fn, inputs, options, dynamic)
    if not codes:
        raise ValueError(
            "output_code: Inductor compiled nothing. The function has no tensor ops, or Dynamo left them to "
            "eager, as it does nn.LSTM (TORCH_LOGS=graph_breaks says why)."
        )
    codes = [_with_remarks(code) for code in codes]
    if all(_ON_THE_CPU in code and "async_compile.triton(" not in code for code in codes):
        raise ValueError(
            "output_code: this is code for the CPU, because the function makes all its tensors itself; make "
            "them on an input's device, as torch.ones(3, device=x.device)"
        )
    return "\n".join(sorted(codes, key=_is_backward))  # stable: forward graphs first


_ON_THE_CPU = "# Part of this is C++ for the CPU"


_ATTENTION = """\
# On a GPU this attention is one call of aten._scaled_dot_product_{flash, efficient or cudnn}_attention. Without
# one, PyTorch takes the other route: products and a softmax."""


def _with_remarks(code):
    """The text, with remarks for the reader below its first line."""
    remarks = []
    if "async_compile.cpp" in code:
        why = "the function makes a tensor there; with device=x.device it is on the GPU."
        remarks.append(f"{_ON_THE_CPU}: {why}")
    if "aten._safe_softmax" in code:  # only that route has it
        remarks.append(_ATTENTION)
    first, _, rest = code.partition("\n")
    return "\n".join([first, *remarks, rest])


def _note_padding(odd):
    """Stands in for timing a product with padded operands: adds its sizes to `odd` and pads nothing."""
    from torch._inductor.fx_passes import pad_mm

    def should_pad(match, a, b, op, input=None):
        sizes = [int(n) for n in (a.shape[-2], a.shape[-1], b.shape[-1])]
        if pad_mm.is_mm_compute_bound(*sizes, a.dtype):
            odd.append("({0} × {1}) @ ({1} × {2})".format(*sizes))
        return False

    return mock.patch.object(pad_mm, "_should_pad", should_pad)


def _on_padding(odd):
    """The remark on the products that Inductor would time on a GPU."""
    products = ", ".join(dict.fromkeys(odd))
    return (
        "\n# On a GPU Inductor times padded operands as well, of sizes that tensor cores like, and may write"
        f"\n# kernels that pad, for {products}.\n"
    )


def _check_options(options):
    for option in ("max_autotune", "max_autotune_gemm", "triton.cudagraphs"):
        if options.get(option):
            raise ValueError(f"output_code: the option {option!r} runs kernels, and needs a GPU.")


def _is_backward(code):
    return bool(re.search(r"(?m)^# AOT ID: \['\d+_backward", code))


@contextlib.contextmanager
def _codes_collected():
    """A list that receives the text of every graph Inductor compiles inside."""
    from torch._inductor.graph import GraphLowering

    codes = []
    torch.compiler.reset()
    # The hook that torch's own run_and_get_code uses.
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        try:
            yield codes
        finally:
            torch.compiler.reset()


def _write_on_gpu(fn, inputs, options, dynamic):
    import torch._functorch.config as aot_config
    import torch._inductor.config as inductor_config

    inputs = _moved(fn, inputs, _to_gpu)
    with (
        inductor_config.patch(fx_graph_cache=False),  # with a cache hit nothing is written
        aot_config.patch(enable_autograd_cache=False),
        _codes_collected() as codes,
    ):
        outputs = torch.compile(fn, dynamic=dynamic, options=options)(*inputs)
        outputs = [t for t in torch.utils._pytree.tree_leaves(outputs) if _needs_grad(t)]
        if outputs:  # the backward graph is compiled when it first runs
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return codes


def _write_on_fake_gpu(fn, inputs, options, dynamic):
    from lib.nogpu.fake_gpu import fake_gpu

    from torch._inductor.codecache import PyCodeCache
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    odd = []
    with (
        _kernels_to_compile(fn),
        fake_gpu(),
        _codes_collected() as codes,
        _note_padding(odd),
    ):
        inputs = _moved(fn, inputs, _to_fake_gpu)
        # Inductor collects, logs and saves the text itself; only loading it is replaced.
        with (
            mock.patch.object(PyCodeCache, "load_by_key_path", _load_nothing),
            warnings.catch_warnings(),
        ):
            # torch checks the alignment of an input; the address of a fake one is 0
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            try:
                torch.compile(fn, dynamic=dynamic, options=options)(*inputs)
            except (DataDependentOutputException, DynamicOutputShapeException, _NotRun) as end:
                if not codes:
                    raise ValueError(f"output_code: {_VALUES}") from end
                codes[-1] += _NOT_RUN if isinstance(end, _NotRun) else _ENDS_HERE
            except Exception as error:
                if why := [text for words, text in _WHY.items() if words in str(error)]:
                    raise ValueError(f"output_code: {why[0]}") from error
                raise
    if codes and odd:
        codes[-1] += _on_padding(odd)
    # Each backward graph was written with its forward; on a GPU they come in the order in which they run.
    backward = [code for code in codes if _is_backward(code)]
    return [code for code in codes if not _is_backward(code)] + backward[::-1]


@contextlib.contextmanager
def _kernels_to_compile(fn):
    """Inside, the @triton.jit kernels that fn launches are compiled, as its graph needs them."""
    from lib.nogpu.interpreter import swapped

    # the helpers of generated kernels: imported inside, they could not be interpreted later
    import torch._inductor.runtime.triton_helpers  # noqa: F401
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    with contextlib.ExitStack() as stack:
        for function in _functions_of(fn, InterpretedFunction):
            stack.enter_context(swapped(function, InterpretedFunction, JITFunction))
        yield


def _functions_of(fn, kind):
    """fn as a function, and one of each other file with kernels of this kind that it can name."""
    fn = inspect.unwrap(type(fn).forward if isinstance(fn, torch.nn.Module) else fn)
    fn = getattr(fn, "__func__", fn)
    if not inspect.isfunction(fn):
        return []
    named = [*fn.__globals__.values(), *inspect.getclosurevars(fn).nonlocals.values()]
    # private: the function of an op of torch.library; where it is gone, the op's kernels cannot be written
    named = [getattr(value, "_init_fn", value) for value in named]
    files = {fn.__module__: fn}
    for value in filter(inspect.isfunction, named):
        if any(isinstance(v, kind) for v in value.__globals__.values()):
            files.setdefault(value.__module__, value)
    return list(files.values())


_VALUES = (
    "the first op asks for a tensor's value, as nonzero, bincount and scan do, and without a GPU nothing is "
    "computed; leave it out of the function"
)
_BACKWARD = (
    "the function calls backward(); return the loss in its place. Where an input requires grad, the text holds "
    "the backward graph too"
)
_FROM_OUTSIDE = (
    "the function uses a tensor from outside, as of a module or an optimizer, which is on the CPU; pass "
    "the module itself, as output_code(module, x), or its tensors as inputs"
)
# words of an error of PyTorch's: what to do
_WHY = {
    "DataDependentOutputException": _VALUES,
    "DynamicOutputShapeException": _VALUES,
    "Tensor device mismatch": _FROM_OUTSIDE,
    "found two different devices": _FROM_OUTSIDE,  # torch 2.11
    "Cannot access accelerator device": _BACKWARD,
    "hasPrimaryContext": _BACKWARD,
}


class _NotRun(Exception):
    """A graph was written and cannot be run on fake tensors, so what follows it is not written."""


_NOT_RUN = """
# The text ends here: if another graph follows in the function, it is not written without a GPU.
"""
_ENDS_HERE = """
# The text ends here: what follows depends on a tensor's value, and without a GPU nothing is computed.
"""


def _load_nothing(key, path, linemap=None, attrs=None, **_):
    """Stands in for importing the text just written: that would launch kernels.

    Calling it runs the graph's ops on the fake tensors instead, which gives the shapes of the outputs, so
    that a function with graph breaks goes on to its next graph.
    """
    from torch._inductor.virtualized import V

    ops = V.graph.orig_gm

    def call(args):
        try:
            return tuple(ops(*args))
        except TypeError as error:  # of an op in place on a list, which returns nothing
            raise _NotRun from error

    return SimpleNamespace(call=call, recursively_apply_fns=None, __file__=path, key=key)


def _needs_grad(t):
    return isinstance(t, torch.Tensor) and t.requires_grad


def _moved(fn, inputs, move):
    """The inputs with every tensor moved, in lists, tuples and dictionaries too.

    Moves a module's parameters and buffers in place. What mark_dynamic wrote on an input moves along.
    """

    def marked(t):
        new = move(t)
        vars(new).update(recorded_code.marks(t))
        return new

    if isinstance(fn, torch.nn.Module):
        for module in fn.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = torch.nn.Parameter(move(parameter), parameter.requires_grad)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else move(buffer)
    return torch.utils._pytree.tree_map_only(torch.Tensor, marked, inputs)


def _to_fake_gpu(t):
    return torch.empty_strided(
        t.shape, t.stride(), dtype=t.dtype, device="cuda", requires_grad=t.requires_grad
    )


def _to_gpu(t):
    """A leaf on the GPU with the same numbers and the same strides (`t.cuda()` makes some contiguous)."""
    storage = torch.empty(0, dtype=t.dtype).set_(t.detach().cpu().untyped_storage()).cuda()
    moved = storage.as_strided(t.shape, t.stride(), t.storage_offset())
    return moved.detach().requires_grad_(t.requires_grad)


# ---------------------------------------------------------------------------------------------------
# TORCH_LOGS=output_code


def without_log_prefixes(log):
    """The text in a log of TORCH_LOGS=output_code, with nothing in front of a line.

    V0101 10:00:00.000000 77 torch/_inductor/graph.py:7] [0/0] [__output_code] text  ->  text
    """
    texts = re.findall(r"(?m)^[VDIWE]\d{4} [^\]]*\](?: \[[^\]]*\])* \[__output_code\] ?(.*)$", log)
    lines = (t for t in texts if not t.startswith(("Output code:", "Output code written to:")))
    return "\n".join(lines)
