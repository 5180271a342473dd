"""Triton kernels with no GPU: the interpreter that triton ships, and the repairs it needs.

Stands in for   a GPU running a Triton kernel. Programs run one after another, each operation as NumPy on a
                whole tile; pointers are addresses of CPU memory.
Differs in      order (a race between programs never shows), speed (about a thousand programs a second),
                and rounding of fused multiply-adds.
Repairs         bfloat16 arithmetic, sums, atomic additions and casts of integers (upstream works on the raw
                16 bits) · casts to and from float8 (upstream rounds wrongly) · libdevice (upstream has none;
                `libdevice.py`) · autotuning (upstream needs a GPU to time on; here the first config wins) ·
                the cost of helper calls (upstream patches `triton.language` at each, and never undoes it) ·
                `tl.reduce` with Inductor's maximum and minimum (upstream loops over elements in Python) ·
                loop bounds computed in the kernel (triton 3.6 with NumPy from 2.4 on) ·
                comparisons of two scalars in a mask (upstream widens them to integers, which 3.9 refuses) ·
                pointers to pointers · `tl.atomic_poll` without a timeout ·
                NaN in `tl.maximum`, `tl.minimum` and `tl.clamp` (compiled they drop it, upstream keeps it) ·
                the time that random numbers take (two hundred operations for each four) and every operation
                (`interpreter_cost.py`).
Refuses         arithmetic on float8 itself, float8 types that PyTorch lacks, and products smaller than a
                compiler takes.
Not repaired    inline assembly, `triton.testing.do_bench`.
"""

import contextlib
import ctypes
import functools
import sys
import types
import warnings

from lib.nogpu import interpreter_cost, launches, libdevice

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import autotuner
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction


@functools.cache
def install():
    """Repair triton's interpreter for this process. Needs TRITON_INTERPRET=1 set before triton's import."""
    _repair_bfloat16()
    _repair_float8()
    _repair_dot_scaled()
    _repair_atomic_add()
    _refuse_small_dot()
    libdevice.install()
    _repair_maximum()
    _repair_autotune()
    _repair_helper_calls()
    _repair_reduce()
    _repair_loop_bounds()
    _repair_splat()
    _repair_pointers_to_pointers()
    _repair_poll()
    _shorten_philox()
    _remember_dtypes()
    _skip_copy_back()
    launches.install()
    interpreter_cost.shorten()
    # inf - inf is NaN on a GPU without a word. NumPy warns of it, in the name of a file of triton's.
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )
    # The compiler lists triton.language's functions when it is imported. An interpreted launch replaces some,
    # tl.static_assert among them, so a first import during a launch would miss these.
    import triton.compiler.code_generator  # noqa: F401


# --- bfloat16: held as uint16; compute in float32 and round back, as the hardware does -------------------


def bfloat16_to_float32(bits):
    """uint16 bits of bfloat16 -> the same numbers as float32 (exact)."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(x):
    """float32 -> uint16 bits of bfloat16, to nearest, ties to even, NaN kept."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _is_bfloat16(handle):
    return handle.data.itemsize == 2 and handle.dtype.scalar == tl.bfloat16


def _widen(handle):
    if not _is_bfloat16(handle):
        return handle
    return upstream.TensorHandle(bfloat16_to_float32(handle.data), tl.float32)


def _narrow(handle):
    if handle.data.dtype == np.bool_:
        return upstream.TensorHandle(handle.data, tl.int1)
    return upstream.TensorHandle(float32_to_bfloat16(handle.data), tl.bfloat16)


def _repair_bfloat16():
    builder = upstream.InterpreterBuilder
    builder.has_bfloat16 = True  # asked by lib/ops/_device.py
    for name, n_operands in (("unary_op", 1), ("binary_op", 2), ("ternary_op", 3)):
        setattr(builder, name, _in_float32(getattr(builder, name), n_operands))

    create_dot = builder.create_dot

    def dot(self, a, b, accumulator, *rest):
        return create_dot(self, _widen(a), _widen(b), accumulator, *rest)

    builder.create_dot = dot
    builder.get_bf16 = lambda self, value: _narrow(
        self.get_fp32(value)
    )  # 2 * x: triton 3.7 has none

    convert = upstream._convert_float

    def convert_float(data, from_type, to_type, rounding):
        if from_type == tl.bfloat16 and to_type == tl.float32:
            return bfloat16_to_float32(data)
        if from_type == tl.float32 and to_type == tl.bfloat16:
            return float32_to_bfloat16(data)  # upstream truncates; a GPU rounds to nearest even
        return convert(data, from_type, to_type, rounding)

    upstream._convert_float = convert_float
    cast_impl = builder.cast_impl

    def cast(self, source, to_type):
        if to_type.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            return _narrow(cast_impl(self, source, tl.float32))
        return cast_impl(self, source, to_type)

    builder.cast_impl = cast
    upstream.ReduceOps.sum = _reduced_in_float32(upstream.ReduceOps.sum)
    upstream.ScanOps.cumsum = _reduced_in_float32(upstream.ScanOps.cumsum)
    upstream.ScanOps.cumprod = _reduced_in_float32(upstream.ScanOps.cumprod)
    upstream.ReduceOps.min_max = _reduced_in_float32(upstream.ReduceOps.min_max)


def _in_float32(method, n_operands):
    def wrapped(self, *args):
        operands, rest = args[:n_operands], args[n_operands:]
        selects = rest and rest[0] is np.where  # moves bits, computes nothing
        if not selects and any(map(_is_float8, operands)):
            raise TypeError("arithmetic on float8: convert with .to(tl.float32) first")
        if selects or not any(map(_is_bfloat16, operands)):
            return method(self, *args)
        return _narrow(method(self, *map(_widen, operands), *rest))

    return wrapped


def _reduced_in_float32(method):
    """A reduction or scan of one tensor. Resulting values, but not indices, are rounded to bfloat16 again."""

    def again(y):
        if y.dtype.scalar != tl.float32:
            return y
        kind = tl.block_type(tl.bfloat16, list(y.shape)) if y.type.is_block() else tl.bfloat16
        return tl.tensor(_narrow(y.handle), kind)

    def wrapped(self, x, *rest, **options):
        if not _is_bfloat16(x.handle):
            return method(self, x, *rest, **options)
        wide = tl.tensor(_widen(x.handle), tl.block_type(tl.float32, list(x.shape)))
        result = method(self, wide, *rest, **options)
        return (
            type(result)(map(again, result)) if isinstance(result, (list, tuple)) else again(result)
        )

    return wrapped


def _repair_atomic_add():
    """Atomic additions to bfloat16, element by element in float32, as upstream has none."""
    builder = upstream.InterpreterBuilder
    atomic_rmw = builder.create_atomic_rmw

    def create_atomic_rmw(self, op, pointers, value, mask, *rest):
        if not _is_bfloat16(value) or op != upstream._ir.ATOMIC_OP.FADD:
            return atomic_rmw(self, op, pointers, value, mask, *rest)
        before, active = np.zeros_like(value.data), np.broadcast_to(mask.data, value.data.shape)
        added = bfloat16_to_float32(value.data)
        for at in zip(*np.nonzero(active), strict=True):
            memory = np.frombuffer(
                (ctypes.c_uint16 * 1).from_address(int(pointers.data[at])), np.uint16
            )
            before[at] = memory[0]
            memory[0] = float32_to_bfloat16(bfloat16_to_float32(memory) + added[at])[0]
        return upstream.TensorHandle(before, tl.bfloat16)

    builder.create_atomic_rmw = create_atomic_rmw


# --- float8: stored and cast, by PyTorch; a GPU since Ada saturates -------------------------------------

_FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def _repair_float8():
    convert = upstream._convert_float

    def convert_float(data, from_type, to_type, rounding):
        if not (from_type.is_fp8() or to_type.is_fp8()):
            return convert(data, from_type, to_type, rounding)
        if rounding not in (None, upstream._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(
                f"without a GPU a cast to {to_type} rounds to nearest; leave out fp_downcast_rounding"
            )
        return _from_float64(_to_float64(data, from_type), to_type)

    upstream._convert_float = convert_float


def _is_float8(handle):
    return handle.data.itemsize == 1 and handle.dtype.scalar.name.startswith("fp8")


def _float8(dtype):
    if dtype.name not in _FLOAT8:
        raise NotImplementedError(
            f"{dtype} is not supported without a GPU; use float8e4nv or float8e5"
        )
    return _FLOAT8[dtype.name]


def _to_float64(data, dtype):
    if dtype.is_fp8():
        bits = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        return bits.view(_float8(dtype)).double().numpy()
    return (bfloat16_to_float32(data) if dtype == tl.bfloat16 else data).astype(np.float64)


def _from_float64(x, dtype):
    if dtype.is_fp8():
        largest = torch.finfo(_float8(dtype)).max
        bounded = torch.from_numpy(np.ascontiguousarray(x)).clamp(-largest, largest)  # keeps NaN
        return bounded.to(_float8(dtype)).view(torch.uint8).numpy()
    if dtype == tl.bfloat16:
        return float32_to_bfloat16(x)
    return x.astype(upstream._get_np_dtype(dtype))


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # the 4 bits of a number without its sign


def _repair_dot_scaled():
    """tl.dot_scaled before Triton 3.9, which has it: numbers of 4 to 16 bits times a power of 2 per group."""
    # the class: Triton 3.6 has an instance for each kernel
    builder, semantic = upstream.InterpreterBuilder, type(upstream.interpreter_semantic)
    if hasattr(builder, "create_dot_scaled"):
        return
    dot_scaled, packed = semantic.dot_scaled, upstream._ir.ScaleDotElemTypeTY.E2M1

    def with_constexprs(self, a, a_scale, a_format, b, b_scale, b_format, *rest):
        names = [tl.constexpr(getattr(f, "value", f)) for f in (a_format, b_format)]
        return dot_scaled(self, a, a_scale, names[0], b, b_scale, names[1], *rest)

    def scaled(x, scale, kind, k_axis, packed_along_k):
        if kind == packed:  # two in a byte, the lower bits first
            axis = k_axis if packed_along_k else -3 - k_axis
            shape = list(x.data.shape)
            shape[axis] *= 2
            bits = np.stack([x.data & 15, x.data >> 4], axis=axis).reshape(shape)
            numbers = np.where(bits & 8, -1, 1) * _E2M1[bits & 7]
        else:
            numbers = _to_float64(x.data, x.dtype.scalar)
        if scale is None:
            return numbers
        exponents = scale.data.astype(np.float64) - 127
        factors = np.where(exponents == 128, np.nan, 2.0**exponents)
        if not scale.dtype.is_int():
            factors = _to_float64(scale.data, scale.dtype.scalar)
        factors = factors.repeat(numbers.shape[k_axis] // factors.shape[-1], axis=-1)
        return numbers * (factors if k_axis == -1 else np.swapaxes(factors, -1, -2))

    def create_dot_scaled(
        self, a, a_scale, a_kind, b, b_scale, b_kind, _, a_along_k, b_along_k, acc
    ):
        a = scaled(a, a_scale, a_kind, -1, a_along_k)
        b = scaled(b, b_scale, b_kind, -2, b_along_k)
        return upstream.TensorHandle((a @ b + acc.data).astype(np.float32), tl.float32)

    semantic.dot_scaled, builder.create_dot_scaled = with_constexprs, create_dot_scaled


def _refuse_small_dot():
    """Refuse tl.dot of tiles that the compiler for a GPU refuses, with its message."""

    def smallest(a, b):
        return (1, 1, 32 if a.scalar.primitive_bitwidth == 8 else 16)

    upstream.interpreter_builder.codegen_fns["min_dot_size"] = smallest


# --- maximum, minimum, clamp: without propagate_nan a GPU returns the operand that is not NaN -----------


def _repair_maximum():
    builder = upstream.InterpreterBuilder
    keeps_nan = upstream._ir.PROPAGATE_NAN.ALL
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    def clamp(self, x, low, high, propagate_nan):
        if propagate_nan == keeps_nan:
            return self.ternary_op(x, low, high, np.clip)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    builder.create_clampf = clamp


# --- autotuning ----------------------------------------------------------------------------------------


def _repair_autotune():
    def one_run(call, quantiles=None, **_):
        # The interpreter's time says nothing about a GPU's. Run each config once, so that errors show, and
        # give all the same time, so that the first one wins.
        call()
        return [0.0] * len(quantiles) if quantiles else 0.0

    measured = autotuner.Autotuner.do_bench.func

    def do_bench(self):
        return one_run if triton.knobs.runtime.interpret else measured(self)

    autotuner.Autotuner.do_bench = property(do_bench)


# --- helper calls --------------------------------------------------------------------------------------


def _repair_helper_calls():
    """Patch `triton.language` once per launch and restore it at the end.

    Upstream patches it again in each call of a @triton.jit helper (tl.sum is one) and drops the undo list, so
    every call gets slower than the one before.
    """
    patch, active = upstream._patch_lang, []

    def patch_lang(fn):
        if active:
            return types.SimpleNamespace(restore=lambda: None)
        scope = patch(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        active.append(scope)
        interpreter_cost.reuse_shapes(scope)
        for module in (tl, tl.core):
            scope.set_attr(module, "static_assert", launches.static_assert)
        restore = scope.restore

        def restore_all():
            active.clear()
            restore()

        scope.restore = restore_all
        return scope

    upstream._patch_lang = patch_lang


def _repair_reduce():
    apply = upstream.ReduceOps.apply_impl
    numpy_reductions = {"maximum": np.max, "minimum": np.min}

    def apply_impl(self, values):
        reduction = numpy_reductions.get(getattr(self.combine_fn, "__name__", ""))
        if reduction is None or len(values) != 1:
            return apply(self, values)
        return self.min_max(values[0], val_reduce_op=reduction)

    upstream.ReduceOps.apply_impl = apply_impl


def _repair_loop_bounds():
    """`range(n)` with a tensor n: int() of a one-element array, which NumPy 2.4 no longer takes."""
    patch = upstream._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    upstream._patch_lang_tensor = patch_tensor


def _repair_splat():
    """A comparison stays one when it is widened: `(row < n_rows) & (cols < n_cols)` is a mask of booleans."""
    splat = upstream.InterpreterBuilder.create_splat

    def create_splat(self, kind, arg):
        if arg.data.dtype == np.bool_:
            return upstream.TensorHandle(np.full(kind.shape, arg.data), tl.int1)
        return splat(self, kind, arg)

    upstream.InterpreterBuilder.create_splat = create_splat


def _repair_pointers_to_pointers():
    """What one leads to is a pointer; upstream goes on to the number at the end, and reads 4 bytes of 8."""

    def get_element_ty(self):
        kind = self.dtype.scalar
        return kind.element_ty if kind.is_ptr() else kind

    upstream.TensorHandle.get_element_ty = get_element_ty
    tl.pointer_type.primitive_bitwidth = 64


def _repair_poll():
    """tl.atomic_poll without a timeout (triton 3.9), which hands on an empty value of the compiler."""
    poll = getattr(upstream.InterpreterBuilder, "create_atomic_poll", None)
    if poll is None:
        return

    def create_atomic_poll(self, pointers, expected, timeout_ns, *rest):
        timeout_ns = timeout_ns if hasattr(timeout_ns, "data") else None
        return poll(self, pointers, expected, timeout_ns, *rest)

    upstream.InterpreterBuilder.create_atomic_poll = create_atomic_poll


# --- random numbers ------------------------------------------------------------------------------------


def _shorten_philox():
    """Philox on 32-bit counters as one operation; upstream interprets its 10 rounds of 20 operations."""
    original = triton.language.random.philox_impl.fn
    rewriter = upstream.InterpretedFunction(original).rewriter

    def philox_impl(c0, c1, c2, c3, k0, k1, n_rounds=10):
        if c0.dtype != tl.uint32:
            return rewriter.rewrite_ast()(c0, c1, c2, c3, k0, k1, n_rounds)
        words = [x.handle.data for x in (c0, c1, c2, c3, k0, k1)]
        words = philox_rounds(*words, getattr(n_rounds, "value", n_rounds))
        shape = np.broadcast_shapes(*(x.shape for x in (c0, c1, c2, c3, k0, k1)))
        kind = tl.block_type(tl.uint32, list(shape)) if shape else tl.uint32
        return tuple(tl.tensor(upstream.TensorHandle(word, tl.uint32), kind) for word in words)

    upstream.InterpretedFunction.rewritten_fn[original] = philox_impl


def philox_rounds(c0, c1, c2, c3, k0, k1, n_rounds=10):
    """Counters and keys, arrays of uint32 -> four random uint32 each (Salmon and others, 2011)."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3, k0, k1 = (np.asarray(word, np.uint64) for word in (c0, c1, c2, c3, k0, k1))
    for _ in range(n_rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return tuple(word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3))


# --- speed ---------------------------------------------------------------------------------------------


def _remember_dtypes():
    """Upstream rebuilds its table from Triton's dtypes to NumPy's at every operation."""
    look_up, dtypes = upstream._get_np_dtype, {}

    def get_np_dtype(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = look_up(scalar)
        return dtypes[scalar.name]

    upstream._get_np_dtype = get_np_dtype


def _skip_copy_back():
    """CPU tensors are used in place: copying each storage onto itself after a launch only costs time."""
    copy_back = upstream.GridExecutor._restore_args_dev

    def restore_args(self, args_dev, args_host, kwargs_dev, kwargs_host):
        tensors = [*args_dev, *kwargs_dev.values()]
        if all(getattr(t, "device", torch.device("cpu")).type == "cpu" for t in tensors):
            return
        copy_back(self, args_dev, args_host, kwargs_dev, kwargs_host)

    upstream.GridExecutor._restore_args_dev = restore_args


# --- both ways in one process --------------------------------------------------------------------------


def _namespaces(fn):
    """The module dictionaries in which a kernel may find helpers: triton's own, its file's, its imports'."""
    spaces = [
        vars(module)
        for name, module in list(sys.modules.items())
        if module is not None and name.startswith("triton.language")
    ]
    spaces.append(fn.__globals__)
    spaces += [vars(v) for v in list(fn.__globals__.values()) if isinstance(v, types.ModuleType)]
    return spaces


@contextlib.contextmanager
def swapped(fn, old_type, new_type):
    """Inside, every `old_type` function that the Python function `fn` can see is a `new_type` one.

    Triton decides at import whether @triton.jit gives a JITFunction (to compile) or an InterpretedFunction.
    Compiling with no GPU, or interpreting with one, needs the other kind for the kernel's helpers too. Kernels
    read a global named INTERPRETED to avoid what the interpreter lacks; inside, it has the value that holds.
    """
    undo, replacements, visited = [], {}, set()
    interpreted = tl.constexpr(new_type is upstream.InterpretedFunction)
    todo = _namespaces(fn)
    while todo:
        space = todo.pop()
        if id(space) in visited:
            continue
        visited.add(id(space))
        for name, value in list(space.items()):
            if name == "INTERPRETED":
                undo.append((space, name, value))
                space[name] = interpreted
            beside = getattr(value, "__package__", None) == (space.get("__package__") or "none")
            if isinstance(value, types.ModuleType) and beside:
                todo.append(vars(value))  # module.device.gelu, in a kernel of a notebook
            if type(value) is not old_type:
                continue
            if value.fn not in replacements:
                replacements[value.fn] = new_type(value.fn)
                todo.append(value.fn.__globals__)
            undo.append((space, name, value))
            space[name] = replacements[value.fn]
    interpret = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpreted.value
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = interpret
        for space, name, value in undo:
            space[name] = value


@contextlib.contextmanager
def interpreted_launches():
    """Inside, Triton kernels launched in this process run in the interpreter, with a GPU too.

    CUDA tensors are copied to the CPU before each launch and back after it, so use small inputs.
    """
    if triton.knobs.runtime.interpret:
        yield
        return
    install()
    run = JITFunction.run

    def interpret(self, *args, grid, warmup, **kwargs):
        if warmup:
            return None
        with swapped(self.fn, JITFunction, upstream.InterpretedFunction):
            return upstream.InterpretedFunction(self.fn).run(
                *args, grid=grid, warmup=False, **kwargs
            )

    JITFunction.run = interpret
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True  # for launchers that ask, as softmax's does
            yield
    finally:
        JITFunction.run = run
