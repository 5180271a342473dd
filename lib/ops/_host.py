# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_host.py
"""What stands around the kernels of several ops: launches, checks, autograd, sums of rows, builds of CUDA.

What is private to PyTorch or Triton is used in this file alone, and each use is marked `private:`.
"""

import contextlib
import functools
import inspect
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd import forward_ad

if __package__:
    from . import _device as device
else:  # beside this file in a plain folder
    import _device as device

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
ON_CPU = device.interpreted()
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# These may be mixed: under autocast x has 16 bits, and a bias that is a parameter 32.
MIXED = DTYPES[:3]
is_compiling = torch.compiler.is_compiling  # looked up once: each call asks several times
# Numbers of a call, which torch.export may know by a symbol alone
INTS = (int, torch.SymInt)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


# --- numbers -------------------------------------------------------------------------------------------------


def cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


def compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def sum_dtype(dtype):
    """That of partial sums in memory."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def dtype_of_sum(*dtypes):
    return functools.reduce(torch.promote_types, dtypes)


@functools.cache
def n_multiprocessors(gpu):
    return 4 if ON_CPU else torch.cuda.get_device_properties(gpu).multi_processor_count


@functools.cache
def shared_memory(gpu):
    """Bytes that a thread block can have: 227 KB on Hopper, 99 KB on Ada."""
    properties = None if ON_CPU else torch.cuda.get_device_properties(gpu)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


@functools.cache
def generation(gpu):
    """The major number of the compute capability: 7 is Turing, 8 Ampere and Ada, 9 Hopper, 10 Blackwell."""
    return 9 if ON_CPU else torch.cuda.get_device_capability(gpu)[0]


# --- launches ------------------------------------------------------------------------------------------------

launched = {}  # of each kind of launch, what runs its compiled kernel, and the arguments around the tensors
# private: what runs a compiled kernel takes these; in Triton 3.6 the last five go by the name of args
LAUNCHER = """gridX gridY gridZ stream function kernel_metadata launch_metadata launch_enter_hook
launch_exit_hook args""".split()


def run(kernel, grid, tensors, *sizes, **options):
    """kernel[grid](*tensors, *sizes, **options) on the tensors' GPU; the second time, without Triton's look-up.

    Triton looks at every argument of every launch to find the kernel compiled for its like. A launch that
    differs from an earlier one in nothing but memory finds it here, if pointers are aligned to 16 bytes.
    """
    # private: what runs a compiled kernel, the hooks, the stream. So a launch costs the host 13 µs, beside an
    # H200, and by kernel[grid] 23; test_host.py times both.
    first, hooks = getattr(tensors[0], "base", tensors[0]), triton.knobs.runtime
    gpu, addresses, kinds = first.get_device(), 0, []
    for t in tensors:
        is_tensor = isinstance(t, torch.Tensor)  # else None or a TMA descriptor, which is aligned
        addresses |= t.data_ptr() if is_tensor else 0
        kinds.append(t.dtype if is_tensor else t and (t.base.dtype, *t.block_shape))
    how = kernel.fn, type(kernel).run  # tools that watch launches put another `run` in its place
    key = (*how, gpu, grid, sizes, *options.items(), *kinds)
    hooked = hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls  # as profilers do
    launch = None if hooked or addresses % 16 else launched.get(key)
    if launch and torch.cuda.current_device() == gpu:
        again, blocks, stream_of, handles, given = launch
        again(*blocks, stream_of(gpu), *handles, *tensors, *given)
        return
    with torch.cuda.device_of(first):  # else the launch goes to the current GPU, not to theirs
        # Fused multiply-adds are Triton's default before 3.10
        compiled = kernel[grid](*tensors, *sizes, enable_fp_fusion=True, **options)
    # Other launchers go the ordinary way each time, and so does the interpreter, which compiles nothing.
    if (
        compiled
        and addresses % 16 == 0
        and takes(compiled.run) in (LAUNCHER, LAUNCHER[:5] + ["args"])
    ):
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        given = kernel.signature.bind(*tensors, *sizes, **named)
        given.apply_defaults()
        if len(launched) >= 4096:
            launched.clear()  # sizes that never come again
        handles = compiled.function, compiled.packed_metadata, None, None, None  # no hooks
        around = (*grid, 1, 1)[:3], triton.runtime.driver.active.get_current_stream, handles
        launched[key] = compiled.run, *around, given.args[len(tensors) :]


def takes(function):
    """The names of its parameters."""
    return [*inspect.signature(function).parameters]


def strips_of(matrix, fold, block_m, strips, dtype, apart=1):
    """How an (M, N) matrix, `fold` rows of it taken as one, is cut into at most so many strips to sum.

    Rows of a strip lie `apart` from each other. Returns how many they are, a multiple of block_m; the number
    of strips; and memory for what each of them adds to the sum, (strips · fold, N), or None without a dtype,
    the sum's: where there is one alone, it is the sum itself, in this dtype.
    """
    n_rows, n_cols = matrix.shape
    n_rows = cdiv(n_rows, fold * apart)
    rows_per_program = cdiv(cdiv(n_rows, max(1, strips // apart)), block_m) * block_m
    strips = cdiv(n_rows, rows_per_program) * apart
    wide = dtype if strips * fold == 1 else sum_dtype(matrix.dtype)
    partial = matrix.new_empty((strips * fold, n_cols), dtype=wide) if dtype else None
    return rows_per_program, strips, partial


def sum_rows(partial, dtype):
    """The sum over strips (row chunks), in one launch and in a fixed order: the same bits in every run."""
    n_strips, n_cols = partial.shape
    if n_strips == 1:
        return partial.view(n_cols)  # in this dtype already
    out = partial.new_empty(n_cols, dtype=dtype)
    # Few columns have many strips and few programs, so that each has many rows on their way at one time
    run(
        device.sum_rows_kernel, (cdiv(n_cols, 32),), (partial, out), n_strips, n_cols,
        BLOCK_M=64 if n_strips <= 256 else 512, BLOCK_N=32, num_warps=8,
    )  # fmt: skip
    return out


# --- rows ----------------------------------------------------------------------------------------------------


def rows_of(t):
    """t as (M, N): itself, a view, or a copy where strides allow none. None stays None."""
    return t if t is None or t.dim() == 2 else t.reshape(-1, t.shape[-1])


class RowTiles(NamedTuple):
    """How rows are held: block_m of them a program, in tiles of block_n columns, v elements to a load."""

    block_m: int
    block_n: int
    tiles: int
    num_warps: int
    v: int

    @property
    def per_thread(self):
        """How many elements of one matrix a thread holds."""
        return self.block_m * self.block_n * self.tiles // (32 * self.num_warps)


@functools.cache
def row_tiles(n_cols, itemsize, most=16):
    """The RowTiles of contiguous rows of any length.

    A load takes 16 bytes, from wherever rows begin: pieces at their ends are shared. Rows under 1 KB have ends
    too often: there it takes what all rows begin at a multiple of, if that is 4 bytes or more. The shortest,
    under 128 bytes, are moved element by element if they have to be.
    A row is cut into 5 to 8 tiles of a power of two, so that little is padding. Of each a thread takes 4
    elements, so that many threads load at once; of those over 1024 columns 8.
    Of rows of up to 1024 columns two share a program, of 32 bits one; of those of up to 512 eight, and of the
    shortest `most`, or as many as make a load for each of 128 threads, or 1024 elements: a GPU starts blocks at
    no more than a certain rate.
    """
    full = 16 // itemsize
    unit = math.gcd(n_cols, full)
    by_unit = unit * itemsize >= 4 and n_cols * itemsize < 1024 or n_cols * itemsize < 128
    v = unit if by_unit else full
    block_n = max(128, power_of_2(n_cols)) // 8
    tiles = cdiv(n_cols, block_n)
    if block_n >= 128:
        block_m = max(1, 512 // (block_n * itemsize))
        num_warps = min(16, max(block_m, block_n // (128 if block_n <= 1024 else 256)))
        return RowTiles(block_m, block_n, tiles, num_warps, v)
    block_m = min(most if block_n < 32 else 8, most * 8 * min(v, 4) // block_n)
    return RowTiles(
        max(block_m, power_of_2(1024 // (tiles * block_n) + 1) // 2, 1), block_n, tiles, 4, v
    )


def constants_of_rows(tiles, *matrices):
    """How kernels hold rows of these (M, N) matrices, and how far apart the rows of one program lie."""
    matrices = [m for m in matrices if m is not None]
    n_cols, v = matrices[0].shape[1], tiles.v
    if not all([m.is_contiguous() for m in matrices]):
        v = math.gcd(v, n_cols, *[m.stride(0) for m in matrices])  # no piece is shared
    return row_constants(tiles.block_m, tiles.block_n, n_cols, v)


@functools.cache
def row_constants(block_m, block_n, n_cols, v):
    """The same of a number of columns: once, as each call asks."""
    unit = math.gcd(v, n_cols)
    constants = {
        "UNIT": unit, "V": v, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "TILES": cdiv(n_cols + v - unit, block_n), "FULL": n_cols // block_n,
    }  # fmt: skip
    return constants, v if v > unit else 1


def grid_of_rows(tiles, *matrices):
    """The grid, and the constants, of a kernel whose programs hold tiles.block_m rows of these matrices."""
    constants, apart = constants_of_rows(tiles, *matrices)
    return (cdiv(matrices[0].shape[0], tiles.block_m * apart) * apart,), constants


@functools.cache
def rows_to_fold(n_cols):
    """How many rows of n_cols elements are taken together: at least, and where there are many.

    At least so many that they are a multiple of 16 elements long. 16 elements rather than 16 bytes: only of
    multiples of 16 does Triton know, for any size given at run time, that masks and offsets leave 16-byte loads
    whole. Where there are many, 8192 elements: of rows of 80 a tile of 128 columns would idle in 48.
    """
    least = 16 // math.gcd(n_cols, 16)
    fits = least == 1 and (n_cols >= 512 or n_cols == power_of_2(n_cols))
    return least, 1 if fits else least * power_of_2(cdiv(8192, n_cols * least))


def fold_of(*matrices):
    """How many rows of these (M, N) matrices are taken as one; None among them is left out.

    A width of 781, say, lets rows begin off any 16-byte boundary, and loads shrink to one element; 16 such rows
    on end are 12496 elements, a good width. The last wide row may be a part. Of 32 rows one program sums dbias.
    """
    n_rows, n_cols = matrices[0].shape
    least, most = rows_to_fold(n_cols)
    if most == 1 or n_rows < 64 or not all([m is None or m.is_contiguous() for m in matrices]):
        return 1
    return most if n_rows >= 64 * most else least


def folded_tile(n_cols, dtype, fold):
    """BLOCK_M, BLOCK_N of a kernel with a bias; n_cols: of fold rows, taken as one."""
    # One 16-byte load in each of 128 threads; folded, four: a bias is looked up alone, and four rows share it
    block_n = min(power_of_2(n_cols), 2048 // dtype.itemsize)
    return (2048 if fold == 1 else 8192) // dtype.itemsize // block_n, block_n


def summed_tile(n_cols, fold=1, narrow=128):
    """(BLOCK_N, strips) of rows that are summed; n_cols: of fold rows, taken as one.

    So many columns that a tile is tall; of long rows that begin anywhere 512: at both ends a tile shares 32
    bytes of memory. 8192 programs fill any GPU; at most 4096 rows, fold a strip, keep the second sum short.
    """
    block_n = min(power_of_2(n_cols), 512 if fold > 1 and n_cols > 4096 * fold else narrow)
    return block_n, max(1, min(cdiv(8192, cdiv(n_cols, block_n)), 4096 // fold))


def folded_and_rest(fold, bias, *matrices):
    """(bias, matrices) of each launch: of folded rows, with the bias repeated, and of rows left over."""
    n_rows, n_cols = matrices[0].shape
    if fold == 1:
        return [(bias, matrices)]
    top, wide = n_rows // fold * fold, (n_rows // fold, n_cols * fold)
    folded = [(bias.repeat(fold), [m if m is None else m[:top].view(wide) for m in matrices])]
    rest = [(bias, [m if m is None else m[top:] for m in matrices])] if top < n_rows else []
    return folded + rest


# --- activations ---------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
OF_Z = ("gelu", "gelu_tanh", "silu")  # their slope is taken from z; relu's and sigmoid's from y


def check_activation(name, activation, known=ACTIVATIONS):
    if activation not in known:
        of = ", ".join(known)
        raise ValueError(f"{name}: activation must be one of {of}; got {activation!r}")


def saved_of(activation, y, z):
    """What the slope is taken from: y for relu and sigmoid, z for the others, None for identity."""
    return None if activation == "identity" else z if activation in OF_Z else y


# --- matrix products -----------------------------------------------------------------------------------------


def kind_of(dtype, allow_tf32):
    """What multiplies numbers of this dtype."""
    if dtype == torch.float32:
        return "tf32" if allow_tf32 else "tf32x3"
    return "double" if dtype == torch.float64 else "half"


def tma_reads(t):
    """Whether TMA can read this matrix: rows without gaps in them, which begin on 16-byte boundaries."""
    pitch, step = t.stride()
    return step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0


def for_cublas(t):
    """t; a copy where rows or columns begin 2 GiB apart, at which cuBLAS reads memory that is not t's."""
    return t.contiguous() if any(s * t.itemsize >= 2**31 for s in t.stride()) else t


def autocast(*tensors):
    """Under autocast the tensors in its dtype, as torch's own products take them."""
    where = "cpu" if ON_CPU else "cuda"
    if not torch.is_autocast_enabled(where):
        return tensors
    dtype = torch.get_autocast_dtype(where)
    return [t.to(dtype) if getattr(t, "dtype", None) in MIXED else t for t in tensors]


@functools.cache
def plan_dz(n_cols, dtype):
    """(BLOCK_M, BLOCK_N, strips): tiles of 8 KB, and as many strips as fill any GPU."""
    block_n, strips = summed_tile(n_cols)
    return 8192 // dtype.itemsize // block_n, block_n, strips


def launch_dz(plan, dy, saved, dz, has_dbias, activation):
    """Write dz unless it is None. Returns what each strip of rows adds to dbias, (strips, N), or None."""
    n_rows, n_cols = dy.shape
    block_m, block_n, strips = plan or plan_dz(n_cols, dy.dtype)
    dtype, n_tiles = dy.dtype if has_dbias else None, cdiv(n_cols, block_n)
    rows_per_program, strips, partial = strips_of(dy, 1, block_m, strips, dtype)
    # Unaligned rows load one element per instruction; cp.async cannot pipeline that, so num_stages=1.
    aligned = n_cols % 16 == 0 and dy.stride(1) == 1
    run(
        device.dz_kernel, (strips * n_tiles,), (dy, saved, dz, partial),
        n_rows, n_cols, *dy.stride(), rows_per_program,
        ACTIVATION=activation, NUM_STAGES=3 if aligned else 1, COMPUTE=compute_dtype(dy.dtype),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
    )  # fmt: skip
    return partial


def dz_of(dy, saved, activation, has_dz, has_dbias, plan=None):
    """dz = dy·act'(z), dy itself for identity, and its sum over rows; each None unless asked for.

    saved: of saved_of.
    """
    dz = torch.empty_like(saved) if has_dz and saved is not None else None
    result = dy if has_dz and saved is None else dz
    if dy.numel() == 0 or not (has_dbias or dz is not None):
        return result, dy.new_zeros(dy.shape[1]) if has_dbias else None
    partial = launch_dz(plan, dy, saved, dz, has_dbias, activation)
    return result, sum_rows(partial, dy.dtype) if has_dbias else None


# --- memory --------------------------------------------------------------------------------------------------


def steps_of(t):
    """(step in bytes, size) of each dimension of several elements, the shortest step first."""
    return sorted((step * t.itemsize, size) for step, size in zip(t.stride(), t.shape) if size > 1)


def overlaps_itself(steps):
    """Whether elements of these steps may be one: where a step is no longer than all shorter ones together."""
    reach = 0
    for step, size in steps:
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def shares_memory(a, b):
    """Whether an element of a may be one of b; where that cannot be seen, the answer is yes.

    Parts of one packed tensor are apart: in each of its rows the one ends before the other begins, and the
    steps from row to row, which both have alike, are longer than both parts together.
    """
    a, b = sorted((a, b), key=lambda t: t.data_ptr())
    gap, steps_a, steps_b, rows = b.data_ptr() - a.data_ptr(), steps_of(a), steps_of(b), []
    while steps_a and steps_a[-1][0] > gap and steps_a[-1:] == steps_b[-1:]:
        rows.insert(0, steps_a.pop())
        steps_b.pop()
    end_a, end_b = (
        t.itemsize + sum(step * (size - 1) for step, size in steps)
        for t, steps in ((a, steps_a), (b, steps_b))
    )
    return end_a > gap or overlaps_itself([(1, gap + end_b), *rows])


# --- checks of arguments -------------------------------------------------------------------------------------


def remembered(check):
    """`check`, run for the first call of its kind: of these dtypes, devices, shapes and options.

    It returns whether the call goes by the registered op, as by_op would, which looks at each tensor again.
    """
    passed, labels = set(), [*inspect.signature(check).parameters][1:]

    @functools.wraps(check)
    def run_once(name, *arguments):
        if is_compiling():
            check(name, *arguments)
            return True
        kind, is_watched = (), modes() or traced()
        try:
            for a in arguments:
                if type(a) in PLAIN:
                    kind += (a.dtype, a.device, a.layout, a.shape)
                    is_watched = is_watched or a.is_neg()
                else:
                    kind += (type(a), a)
                    if type(a) is tuple:
                        kind += (*map(type, a),)  # (5.0, 4) equals (5, 4)
            if kind in passed:
                return is_watched
        except (TypeError, RuntimeError):
            kind = None  # a list, a nested tensor: an error, and check has the words
        check_memory(name, zip(labels, arguments))
        check(name, *arguments)
        if len(passed) >= 4096:
            passed.clear()  # sizes that never come again
        is_plain = {type(a) for a in arguments if isinstance(a, torch.Tensor)} <= PLAIN
        if kind and is_plain:  # a set would keep a tensor of another type alive
            passed.add(kind)
        return is_watched or not is_plain

    return run_once


def check_memory(name, labelled):
    """Raise TypeError for a tensor whose numbers do not lie in memory by strides."""
    for label, t in labelled:
        if not isinstance(t, torch.Tensor):
            continue
        if type(t).__name__ == "DTensor":
            use = f"pass {label}.to_local(), which local_map of torch.distributed.tensor does around a call"
            raise TypeError(
                f"{name}: {label} is a DTensor, which this op does not know how to share; {use}"
            )
        if t.is_nested:
            raise TypeError(
                f"{name}: {label} is a nested tensor; pass {label}.to_padded_tensor(0.0)"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"{name}: {label} has the layout {t.layout}; pass {label}.to_dense()")


def check_tensors(name, eager, mixed=(), **expected):
    """Raise an error that says what is wrong with the tensors of a call of `name`, and what to do.

    expected: label=(tensor, its sizes in letters), as x=(x, "... N"); the first one sets device and
    dtype, but for dtypes that may be mixed.
    """
    (first, (x, _)), sizes = next(iter(expected.items())), {}
    for label, (t, letters) in expected.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in DTYPES:
            wrong = f"{label} must be a floating-point tensor, got {t.dtype}"
            raise TypeError(f"{name}: {wrong}; use .float()")
        if t.dtype != x.dtype and not {t.dtype, x.dtype} <= {*mixed}:
            cast = f"cast one of them, as {label}.to({first}.dtype)"
            raise TypeError(f"{name}: {first} is {x.dtype} and {label} {t.dtype}; {cast}")
        if t.device != x.device:
            where = f"{first} is on {x.device} and {label} on {t.device}"
            raise ValueError(f"{name}: {where}; move both to one device")
        names, known = letters.removeprefix("... ").split(), {**sizes}
        shape = t.shape[max(0, t.dim() - len(names)) :] if letters[0] == "." else t.shape
        same = [sizes.setdefault(n, size) == size for n, size in zip(names, shape)]
        if len(shape) != len(names) or not all(same):
            known = " and ".join(f"{n} = {known[n]}" for n in names if n in known)
            want = f"{label} must be ({letters.replace(' ', ', ')}){known and ' with ' + known}"
            beside = f" beside {first} {tuple(x.shape)}" if t is not x else ""
            scalar = letters[0] == "." and t.dim() == 0
            got = f"a scalar; use {label}.view(1)" if scalar else f"shape {tuple(t.shape)}{beside}"
            raise ValueError(f"{name}: {want}, got {got}")
    if x.device.type != ("cpu" if ON_CPU else "cuda"):
        on = "the CPU: TRITON_INTERPRET=1 is set" if ON_CPU else "a GPU, or TRITON_INTERPRET=1 set"
        raise ValueError(f"{name}: {first} must be on {on}, got {x.device}; use {eager} there")


def check_same_shape(name, label, t, x):
    """Raise an error unless t, called `label`, has the shape of x; lists and numbers are for check_tensors."""
    a, b = (tuple(getattr(of, "shape", ())) for of in (x, t))
    if a != b and () not in (a, b):
        raise ValueError(f"{name}: {label} must have the shape of x, got x {a} and {label} {b}")


# --- who has to see a call -----------------------------------------------------------------------------------

PLAIN = {torch.Tensor, torch.nn.Parameter}
# private: how many tensor modes are at work, and torch.jit.trace. Asking costs a call 0.1 µs.
modes = getattr(torch._C, "_len_torch_dispatch_stack", int)
traced = getattr(torch._C, "_get_tracing_state", int)


def by_op(*tensors):
    """Whether a call goes by its registered op, as PyTorch wants to see it, and not straight to the kernel.

    So it is under torch.compile, under modes, which look at operators or replace them (selective checkpointing,
    FLOP counting, make_fx, fake tensors), and under torch.jit.trace; and for tensors whose memory is not their
    numbers: subclasses, and views with the negative bit, as fft(x).conj().imag is.
    """
    if is_compiling() or modes() or traced():
        return True
    for t in tensors:  # noqa: SIM110 - any() of a generator costs as much again
        if type(t) not in PLAIN or t.is_neg():
            return True
    return False


def in_memory(t):
    """t itself, or a copy of its numbers where they are not what lies in memory; a fake tensor has none."""
    is_it = t is None or type(t) in PLAIN and not (t.is_neg() or t._is_zerotensor())
    return t if is_it or isinstance(t, torch._subclasses.FakeTensor) else t.clone()


# --- autograd ------------------------------------------------------------------------------------------------


# private: the innermost of torch.func's transforms, functionalize among them, whose tensors have no memory:
# a kernel would read address 0. Asking costs a call 0.1 µs.
active_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", tuple)


def is_transformed():
    """Whether torch.func or forward-mode AD is at work, neither of which reaches into a kernel."""
    # private: the level, which makes of a silent zero tangent an error. Asking costs 0.1 µs.
    return getattr(forward_ad, "_current_level", -1) >= 0 or bool(active_transforms())


def wants_gradients(*tensors):
    """Whether autograd records what is done with these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def needs_autograd(*tensors):
    """Whether to go through autograd: also under forward-mode AD and torch.func, so that it raises an error."""
    return wants_gradients(*tensors) or (not is_compiling() and is_transformed())


def call(name, eager, function, forward, tensors, *how):
    """function.apply(*tensors, *how), which autograd sees; forward(*tensors, *how), where it need not.

    A call that skips autograd costs the host a third less. forward: None where autograd has to see each call,
    because it writes into a tensor.
    """
    try:
        past_autograd = forward is not None and not (wants_gradients(*tensors) or is_transformed())
        return (forward if past_autograd else function.apply)(*tensors, *how)
    except RuntimeError as error:
        if not is_transformed():
            raise
        reach = "torch.func (grad, jvp, vmap) and forward-mode AD do not reach into a kernel"
        raise RuntimeError(f"{name}: {reach}; under them use {eager}") from error


class Undifferentiable(torch.autograd.Function):
    """Gradients as they are, and an error for whoever differentiates them."""

    @staticmethod
    def forward(ctx, backward, grads, *sources):
        ctx.op = backward.__module__.rpartition(".")[2]
        return grads

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.op} has no second derivative; for one, use {ctx.op}_eager")


def once(backward):
    """A Function's backward that runs once: differentiating what it returns raises instead of being wrong."""
    # The error lies on every path from the gradients to what they depend on. That of PyTorch's
    # once_differentiable lies beside, where autograd.grad(..., inputs) does not pass.

    def guarded(ctx, *dys):
        dys = [in_memory(dy) for dy in dys]
        if not torch.is_grad_enabled():  # the usual case: without create_graph=True
            return backward(ctx, *dys)
        with torch.no_grad():
            grads = backward(ctx, *dys)
        return Undifferentiable.apply(backward, grads, *dys, *ctx.saved_tensors)

    return guarded


# --- registration and CUDA -----------------------------------------------------------------------------------


def custom_op(name, mutates=(), flops=None):
    """torch.library.custom_op(name, mutates_args=mutates); an ImportError where another module has this op.

    PyTorch would let the later one answer for both. flops: what torch.utils.flop_counter counts for a call of
    these arguments, tensors by their shapes: the products that eager would compute.
    """

    def register(function):
        same_name, here = f"<CustomOpDef({name})>", function.__module__
        for module in list(sys.modules.values()):
            its = getattr(module, "__dict__", {}).get(function.__name__)
            # private: the function that an op is made of, which tells who defines it from who imports it
            other = getattr(getattr(its, "_init_fn", None), "__module__", here)
            if other != here and repr(its) == same_name:
                both = f"{other} and {here} both define {name} in torch.library"
                raise ImportError(f'{both}; import one of them, or change the word before the "::"')
        # PyTorch's default, which an op that _known_to_inductor names has to ask for
        how = {"mutates_args": mutates, "tags": (torch.Tag.needs_exact_strides,)}
        op, packet = torch.library.custom_op(name, **how)(function), torch.ops
        register_fake = op.register_fake
        op.register_fake = lambda fake: register_fake(_known_to_inductor(name, fake))
        for word in name.split("::"):
            packet = getattr(packet, word, None)
        if packet and flops:
            from torch.utils.flop_counter import flop_registry, shape_wrapper

            flop_registry[packet] = shape_wrapper(lambda *shapes, out_shape=None: flops(*shapes))
        return op

    return register


def _known_to_inductor(name, fake):
    """fake, which sees to it that Inductor takes the op as it is, without a word.

    Before torch 2.15 Inductor describes the arguments of each op that is new to it, for a log that nobody may
    read. A description holds that of what the argument was computed from, and so on: of the loss behind four
    layers it takes minutes, behind more it never ends. A fake runs before Inductor gets the graph.
    """

    @functools.wraps(fake)
    def known(*args, **kwargs):
        # private; imported by whoever compiles, and too slow to import for the others
        if lowering := sys.modules.get("torch._inductor.lowering"):
            lowering.FALLBACK_ALLOW_LIST.add(name)
        return fake(*args, **kwargs)

    return known


def none_as_empty(like, results):
    """What a registered op returns: tensors, and so an empty one for each None."""
    return tuple([like.new_empty(0) if t is None else t for t in results])


@functools.cache
def load_cuda(file, *flags):
    """torch.ops.<op>_cuda, whose `forward` is <op>_forward of the .cu beside the op's file.

    Compiled at the first call (half a minute, then cached on disk), with these flags for nvcc.
    """
    from torch.utils.cpp_extension import load_inline

    path = Path(file).with_suffix(".cu")
    name = f"{path.stem}_cuda"
    binding = f'TORCH_LIBRARY({name}, m) {{ m.def("forward", &{path.stem}_forward); }}'
    with one_build(name, load_inline):
        load_inline(
            name, cpp_sources="", cuda_sources=path.read_text() + binding,
            extra_cuda_cflags=["-O3", *flags], is_python_module=False, no_implicit_headers=True,
        )  # fmt: skip
    return getattr(torch.ops, name)


@contextlib.contextmanager
def one_build(name, load_inline):
    """Around load_inline: one process at a time, and none waits for a build that was killed."""
    if hasattr(load_inline, "builds_for_the_cpu"):  # replaced by what sees to that itself
        yield
        return
    if ON_CPU:
        why = "TRITON_INTERPRET=1 runs Triton's kernels on the CPU, and no others"
        raise ValueError(f"{name}: tensors must be on a GPU; {why}")
    import fcntl

    # private: the folder of a build, in which a build that was killed has left its lock. It costs nothing: once
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, verbose=False))
    with open(folder / "one_at_a_time", "w") as file:
        # ends with its process; PyTorch's own, the file named lock, does not
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
