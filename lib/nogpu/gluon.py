"""A model of Gluon: runs a kernel for Hopper on the CPU, its roles as threads of which one goes on at a time.

    run(kernel, grid, *arguments, seed=0, **constants)

Gluon has no interpreter. But its kernels are Python, and here their words mean something else. What works on
blocks alone is Triton's, run by Triton's interpreter. Shared memory is an array; the model knows what each role
has waited for, and so what may still go on when a role touches a buffer. Misuse names what is read, written or
freed too early, in every order of events; Deadlock says who waits for what, and what is missing. seed draws who
goes on, and when loads land. Not modelled: layouts, registers, and all else that only the compiler sees.

Without a GPU, kernel[grid](…) of a kernel in Gluon comes here too.
"""

import contextlib
import functools
import inspect
import itertools
import sys
import types

from lib.nogpu import interpreter, memory
from lib.nogpu.gluon_memory import KERNEL, Memory, MissingWord, Misuse, Program
from lib.nogpu.gluon_roles import Deadlock, Scheduler
from lib.nogpu.gluon_words import Descriptor, place_of

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import ConstexprFunction, JITFunction

__all__ = ["Deadlock", "MissingWord", "Misuse", "run"]

_GLUON, _TRITON = "triton.experimental.gluon.language", "triton.language"


def run(kernel, grid, *arguments, seed=0, **constants):
    """kernel[grid](*arguments, **constants) on the CPU, program after program; it stores in its tensors.

    kernel: of @gluon.jit; of an autotuned one, the first config. grid: programs along up to three axes, or a
    function of the arguments by name. arguments: numbers, tensors on the CPU, and TensorDescriptors of such.
    seed: of the order in which things happen; with odd ones loads land as late as can be. Returns what was
    asked for, in order: ("load", place), ("multiply", products of that role under way), ("store", place).
    Raises Deadlock, Misuse, and MissingWord for a word of Gluon's that is not modelled.
    """
    while not isinstance(kernel, JITFunction):
        if hasattr(kernel, "configs"):
            constants = kernel.configs[0].all_kwargs() | constants
        if hasattr(kernel, "values"):  # of triton.heuristics
            given = dict(zip(kernel.arg_names, arguments)) | constants
            constants = constants | {name: f(given) for name, f in kernel.values.items()}
        kernel = kernel.fn
    names = inspect.signature(kernel.fn).parameters
    options = {name: constants.pop(name) for name in _OPTIONS & constants.keys() - names.keys()}
    given = inspect.signature(kernel.fn).bind(*arguments, **constants)
    given.apply_defaults()
    given, log = given.arguments, []
    for name, value in given.items():
        device = getattr(getattr(value, "base", value), "device", torch.device("cpu"))
        if device.type != "cpu":
            raise ValueError(
                f"the model of Gluon runs on the CPU: {name} is on {device}; call .cpu()"
            )
    grid = grid(given) if callable(grid) else grid
    grid = (*map(int, grid), *[1] * (3 - len(grid)))
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    with _interpreting(kernel.fn, given.items()):
        upstream.interpreter_builder.set_grid_dim(*grid)
        model = _Model(given.values(), options | given)
        for number, program in enumerate(itertools.product(*map(range, grid))):
            upstream.interpreter_builder.set_grid_idx(*program)
            scheduler = Scheduler(seed + number)
            model.program = Program(scheduler, log)
            body = functools.partial(model.whole, kernel.fn, given, constexprs)
            scheduler.run(body, kernel.fn.__name__)
    return log


# of a launch, not of its kernel
_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "debug"}


@contextlib.contextmanager
def _interpreting(function, named):
    """Inside, the words of triton.language are the interpreter's, and accesses of the arguments are checked."""
    interpreter.install()
    memory.install()
    with contextlib.ExitStack() as stack:
        if not triton.knobs.runtime.interpret:  # with a GPU
            swapped = interpreter.swapped(function, JITFunction, upstream.InterpretedFunction)
            stack.enter_context(swapped)
        stack.enter_context(memory.checked(function, named))
        scope = upstream._patch_lang(types.SimpleNamespace(__globals__={"tl": tl}))
        stack.callback(scope.restore)
        scope.set_attr(tl.block_type, "layout", gl.AutoLayout())  # of every value
        yield


class _Model:
    """What a kernel's names mean, for the program that runs."""

    def __init__(self, arguments, options):
        self.program, self.num_warps = None, options.get("num_warps", 4)
        self.tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        self.functions, self.places = {}, {}
        self.gl = self.known(gl)

    def whole(self, function, given, constexprs):
        seen = {
            name: self.known(value) if name in constexprs else self._argument(value)
            for name, value in given.items()
        }
        self.remade(function)(**seen)
        self.program.end()

    def _argument(self, value):
        if isinstance(value, tuple):
            return tuple(map(self._argument, value))
        if hasattr(value, "block_shape"):
            base = torch.as_strided(value.base, tuple(value.shape), tuple(value.strides))
            padding = getattr(value, "padding", "zero")
            dtype = upstream._implicit_cvt(base).dtype.element_ty
            return Descriptor(_bits(base), dtype, value.block_shape, value.layout, padding)
        if isinstance(value, torch.Tensor) or type(value) is int:
            return upstream._implicit_cvt(value)
        return self.known(value)

    def memory_at(self, address, shape, strides):
        """The array of this shape that begins at an address inside of an argument."""
        for tensor in self.tensors:
            skipped, rest = divmod(address - tensor.data_ptr(), tensor.itemsize)
            if 0 <= skipped < tensor.numel() and not rest:
                return _bits(
                    torch.as_strided(tensor, shape, strides, tensor.storage_offset() + skipped)
                )
        raise Misuse("make_tensor_descriptor begins outside of the kernel's arguments")

    def fork(self, functions_and_args):
        """Run roles to their ends: what each does begins after this, and what follows after all of them."""
        program, first = self.program, len(self.program.scheduler.threads)
        before, frames = program.release(), program.frames()
        roles = range(first, first + len(functions_and_args) - 1)
        for role in roles:
            program.start_role(role, before, frames)
        calls = [functools.partial(function, *args) for function, args in functions_and_args]
        names = [function.__name__ for function, _ in functions_and_args]
        result = program.scheduler.fork(calls, names)
        for role in roles:
            program.learn(program.known[role])
        return result

    # --- names
    def known(self, value):
        """What the kernel finds under a name that means `value` in Python."""
        if isinstance(value, tl.constexpr):
            return self.known(value.value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if value is gl.shared_memory_descriptor:
            return Memory
        if getattr(value, "__triton_aggregate__", False):
            return self._aggregate(value)
        function = value
        while hasattr(function, "fn"):
            function = function.fn
        if not isinstance(function, types.FunctionType) or isinstance(value, ConstexprFunction):
            return value
        home, name = function.__module__, function.__name__
        if function.__qualname__.startswith("shared_memory_descriptor."):
            return getattr(Memory, name)
        if home.startswith(_GLUON):
            return self._word(home, name)
        if value is function and not hasattr(value, "__triton_builtin__"):
            return value
        if home.startswith(_TRITON) and hasattr(tl, name):
            return lambda *args, **more: getattr(tl, name)(*args, **more)
        return self.remade(function)

    def _module(self, module):
        if module.__name__.startswith(_GLUON):
            return self._words(module.__name__, module)
        own = module.__name__.split(".")[0] in ("triton", "torch", "numpy")
        return module if own else _Names(self, module)

    def _word(self, home, name):
        try:
            return getattr(self._words(home), name)
        except MissingWord as error:
            return functools.partial(_refuse, error)  # the kernel may not come to it

    def _words(self, name, module=None):
        place = place_of(name)
        key = place if module is None else (place, name)
        if key not in self.places:
            self.places[key] = place(self, module or sys.modules[name])
        return self.places[key]

    def remade(self, function):
        """The function, with names as the model knows them."""
        if function not in self.functions:
            code, names = function.__code__, dict(function.__globals__)
            cells = function.__closure__ or ()
            closure = tuple(types.CellType() for _ in cells)
            made = types.FunctionType(
                code, names, function.__name__, function.__defaults__, closure
            )
            made.__kwdefaults__, made.fn = function.__kwdefaults__, made
            self.functions[function] = made  # before what follows: it may call itself
            for new, old in zip(closure, cells):
                new.cell_contents = self.known(old.cell_contents)
            names |= {n: self.known(names[n]) for n in _names_in(code) if n in names}
            names[KERNEL] = True
        return self.functions[function]

    def _aggregate(self, cls):
        """A plain class with the methods of an aggregate of Gluon's."""
        if cls not in self.functions:
            fields = {KERNEL: True, "__setattr__": _set_plain}
            self.functions[cls] = type(cls.__name__, (), fields)
            init, *methods = (getattr(member, "fn", member) for member in cls.hash_attrs)
            for name, method in (("__init__", init), *((m.__name__, m) for m in methods)):
                setattr(self.functions[cls], name, self.remade(method))
        return self.functions[cls]


def _set_plain(self, name, value):
    object.__setattr__(self, name, value.value if isinstance(value, tl.constexpr) else value)


def _refuse(error, *args, **more):
    raise error


class _Names:
    """A module as a kernel sees it: what it holds is as the model knows it."""

    def __init__(self, model, module):
        self._model, self._module = model, module

    def __getattr__(self, name):
        return self._model.known(getattr(self._module, name))


def _names_in(code):
    """The names in a function's code and in what it defines, such as a generator."""
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _bits(tensor):
    """The memory of a tensor, as an array that Triton's interpreter would hold of it."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16 or tensor.dtype.itemsize == 1 and tensor.is_floating_point():
        bits = torch.int16 if tensor.itemsize == 2 else torch.uint8
        return tensor.view(bits).numpy().view(f"uint{8 * tensor.itemsize}")
    return tensor.numpy()
