"""An interpreted launch takes the arguments and grids that one on a GPU takes, and refuses others in words."""

import dataclasses
import functools
import inspect
import operator

from lib.nogpu.turns import line_of_error

import numpy as np
import torch
from triton.backends import backends
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import _normalize_ty, mangle_type

_LARGEST_GRID = (2**31 - 1, 65535, 65535)
running = []  # the names of the kernels that run: a helper may be called


class StaticAssertFailed(CompileTimeAssertionFailure, AssertionError):
    """tl.static_assert found its condition false. As on a GPU, an autotuner drops such a config."""

    def _format_message(self):
        return f"static_assert: {self.error_message or 'false'}"


def static_assert(condition, message=""):
    """tl.static_assert in the interpreter."""
    if not condition:
        raise StaticAssertFailed(None, None, getattr(message, "value", message))


def install():
    """Hook the interpreter's launches, for this process."""
    executor = upstream.GridExecutor
    init, call = executor.__init__, executor.__call__
    call_helper = upstream.InterpretedFunction.__call__

    def init_with_quoted_annotations(self, fn, arg_names, *rest, **options):
        init(self, fn, arg_names, *rest, **options)
        self.constexprs = [name for name in arg_names if _is_constexpr(fn, name)]

    def launch(self, *args, **kwargs):
        name = self.fn.__name__
        values = _bound(self.fn, name, args, kwargs)
        for parameter, value in values.items():
            if parameter not in self.constexprs:
                _check_argument(f"{name}: {parameter}", value)
        self.grid = _checked_grid(name, self.grid(values) if callable(self.grid) else self.grid)
        running.append(name)
        try:
            call(self, *args, **kwargs)
        except InterpreterError as error:
            raise _explained(root_cause(error), name, values, self.constexprs) from None
        finally:
            running.pop()

    def helper(self, *args, **kwargs):
        if not running:
            raise RuntimeError(
                f"{self.__name__} is a kernel: launch it on a grid of programs, {self.__name__}[(n,)](...)."
            )
        return call_helper(self, *args, **kwargs)

    upstream.InterpretedFunction.__call__ = helper
    executor.__init__, executor.__call__ = init_with_quoted_annotations, launch


def _is_constexpr(fn, name):
    # Code that the interpreter has rewritten has quoted annotations, and so a quoted one is quoted twice.
    return "constexpr" in _normalize_ty(fn.__annotations__.get(name, ""))


@functools.cache
def _options():
    """What a launch takes beside the kernel's parameters: num_warps and its like, for NVIDIA and AMD."""
    names = {"debug", "device", "stream", "ir_override", "launch_metadata", "num_buffers_warp_spec"}
    for backend in backends.values():
        kinds = [
            c for c in vars(inspect.getmodule(backend.compiler)).values() if inspect.isclass(c)
        ]
        options = [c for c in kinds if c.__name__ in ("CUDAOptions", "HIPOptions")]
        names |= {field.name for c in options for field in dataclasses.fields(c)}
    return names


def _bound(fn, name, args, kwargs):
    """The value of each parameter, as a grid that is a function gets them."""
    signature = inspect.signature(fn)
    unknown = [k for k in kwargs if k not in signature.parameters and k not in _options()]
    if unknown:
        raise TypeError(
            f"{name} has no parameter {unknown[0]!r}; it has {', '.join(signature.parameters)}."
        )
    try:
        own = {k: v for k, v in kwargs.items() if k in signature.parameters}
        bound = signature.bind(*args, **own)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _check_argument(what, value):
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            kind = str(value.dtype).removeprefix("torch.")
            raise TypeError(
                f"{what} is {kind}, a type that Triton lacks: pass torch.view_as_real(x)."
            )
        if value.layout != torch.strided or value.device.type == "meta":
            kind = "on the device meta" if value.layout == torch.strided else str(value.layout)
            raise TypeError(
                f"{what} is a tensor without memory of its own ({kind}): pass a dense one."
            )
        try:
            mangle_type(value)
        except (KeyError, TypeError):
            raise TypeError(f"{what} is {value.dtype}, a type that Triton lacks.") from None
    elif isinstance(value, np.ndarray):
        raise TypeError(f"{what} is a NumPy array: pass torch.from_numpy(x).")
    elif isinstance(value, np.generic) and not isinstance(value, float):
        raise TypeError(f"{what} is of NumPy's {value.dtype}: pass int(x) or float(x).")
    elif isinstance(value, (list, dict, set, str, complex)):
        raise TypeError(
            f"{what} is a {type(value).__name__}: a kernel takes tensors, numbers, tuples of them and None;"
            " declare what is known when it is compiled as tl.constexpr."
        )


def _checked_grid(name, grid):
    """The grid as a tuple of three ints."""
    try:
        sizes = tuple(operator.index(size) for size in grid)
    except TypeError:
        raise TypeError(f"{name}: the grid {grid!r} is not a tuple of one to three ints.") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(
            f"{name}: the grid {grid!r} has {len(sizes)} dimensions, not one to three."
        )
    sizes += (1,) * (3 - len(sizes))
    if any(size > largest for size, largest in zip(sizes, _LARGEST_GRID, strict=True)):
        raise ValueError(f"{name}: the grid {sizes} is larger than a GPU takes, {_LARGEST_GRID}.")
    return sizes


def root_cause(error):
    """Upstream wraps an error once per call level; a reader wants the innermost one."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _explained(error, name, values, constexprs):
    """The error, or a sentence in its place where it speaks of what is inside Triton."""
    nones = [p for p, value in values.items() if value is None and p not in constexprs]
    bare = f"({type(error).__name__}: {error})"
    if nones and type(error) in (AttributeError, KeyError, TypeError, ValueError, AssertionError):
        verb = "is None" if len(nones) == 1 else "are None"
        return TypeError(
            f"{name}: {' and '.join(nones)} {verb}, and the kernel computes with it in {line_of_error(error)}:"
            f" pass a tensor, or guard the use with `if {nones[0]} is not None:`. {bare}"
        )
    if type(error) in (AttributeError, KeyError):
        return TypeError(
            f"{name}: {line_of_error(error)} uses something that Triton does not take there. {bare}"
        )
    return error
