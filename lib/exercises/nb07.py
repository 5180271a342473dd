"""Exercises of notebook 07, softmax."""

import contextlib
import re
from unittest import mock

from lib import machine
from lib.exercises import (
    SHAPES,
    NotAttempted,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_kernel,
    expect_launches,
    expect_op,
    hinting,
    plain,
)
from lib.exercises.watch import expect_no_pass
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import count_traffic
from lib.ops import softmax

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

INF, NAN = float("inf"), float("nan")
_tell, _hear = softmax._tell, softmax._hear


def _rows(shape, dtype, scale=40.0):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(shape, generator=generator)
    return (x.to(machine.device(), dtype),)


def _masked_rows(shape, dtype):
    """Three rows: nine tenths of -inf, then numbers; a NaN at the end; nothing but -inf."""
    (x,) = _rows(shape, dtype)
    x[0, : 9 * shape[1] // 10] = -INF
    x[1, -1] = NAN
    x[2] = -INF
    return (x,)


def _far_below_zero(shape, dtype):
    """Rows in which any 0 that joins the maximum makes all exponentials 0."""
    (x,) = _rows(shape, dtype)
    return (x - 200,)


def _expect_no_zero_joins(answer, eager, make, shape):
    with hinting("; all scores are far below 0: what else joins the maximum?"):
        expect_op(answer, eager, make, shapes=(shape,), dtypes=(torch.float32,))


def _expect_maximum_first(answer, eager, shape):
    """Near 10⁴ max + log Σ has lost the digits of log Σ, which max subtracted first leaves alone."""

    def far_above_zero(shape, dtype):
        (x,) = _rows(shape, dtype, scale=1.0)
        return (x + 1e4,)

    with hinting("; all scores are near 10000: subtract the maximum first, then log Σ"):
        expect_op(answer, eager, far_above_zero, shapes=(shape,), dtypes=(torch.float32,))


# --- 07.1 ----------------------------------------------------------------------------------------------


@exercise("07.1", "A sibling: log_softmax", minutes=8, level=1)
def check_log_softmax(answer):
    def masked(shape, dtype):
        (x,) = _rows(shape, dtype)
        x[0, 0] = -INF
        x[-1, :] = -INF
        return (x,)

    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows)
    expect_op(answer, eager, masked, shapes=((3, 5),))
    _expect_no_zero_joins(answer, eager, _far_below_zero, (5, 7))
    _expect_maximum_first(answer, eager, (5, 7))
    (x,) = _rows((5, 7), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (5, 7)")


# --- 07.2 ----------------------------------------------------------------------------------------------

# Six softmaxes as one meets them, each with one mistake; x: (M, N). In the kernels they stand for, the rows
# of a matrix share a program, and columns come in tiles.


def unshifted(x):
    numerator = x.exp()
    return numerator / numerator.sum(-1, keepdim=True)


def padded_with_zeros(x):
    """A tile is a power of two wide; 0 stands where there is no column."""
    n_cols = x.shape[1]
    tile = F.pad(x, (0, triton.next_power_of_2(n_cols) - n_cols))
    return softmax.softmax_eager(tile)[:, :n_cols]


def one_maximum(x):
    """The largest number of the whole tile, which has several rows."""
    numerator = (x - x.max()).exp()
    return numerator / numerator.sum(-1, keepdim=True)


def not_rescaled(x):
    """Column by column, with the maximum so far."""
    top, total = torch.full_like(x[:, 0], -INF), torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        top = torch.maximum(top, column)
        total = total + (column - top).exp()
    return (x - top[:, None]).exp() / total[:, None]


def own_maxima(x):
    """Tiles of two columns, each relative to its own maximum."""
    tiles = [(t - t.amax(-1, keepdim=True)).exp() for t in x.split(2, dim=1)]
    numerator = torch.cat(tiles, dim=1)
    return numerator / numerator.sum(-1, keepdim=True)


def without_guard(x):
    """Column by column, and rescaled."""
    top, total = torch.full_like(x[:, 0], -INF), torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        new_top = torch.maximum(top, column)
        total = total * (top - new_top).exp() + (column - new_top).exp()
        top = new_top
    return (x - top[:, None]).exp() / total[:, None]


# How many numbers a matrix has to have to show it.
_NUMBERS = {
    unshifted: 1, padded_with_zeros: 3, one_maximum: 2, not_rescaled: 2, own_maxima: 3, without_guard: 2
}  # fmt: skip
WRONG_SOFTMAXES = tuple(_NUMBERS)


def _shows(function, x):
    """Whether float32 numbers tell it from softmax; a NaN where softmax has one tells nothing."""
    right, got = torch.softmax(x.double(), dim=-1), function(x).double()
    return not torch.allclose(got, right, rtol=0, atol=1e-3, equal_nan=True)


@exercise("07.2", "Six softmaxes that are wrong", minutes=12, level=2)
def check_matrices_that_show_it(answer):
    names = [f.__name__ for f in WRONG_SOFTMAXES]
    expect(
        isinstance(answer, dict) and set(answer) == set(names),
        f"give a dictionary with the names {', '.join(names)}",
    )
    if all(value is None for value in answer.values()):
        raise NotAttempted
    for function, least in _NUMBERS.items():
        name, rows = function.__name__, answer[function.__name__]
        with case(f"{name}: give a list of rows of equal length, as [[1.0, 2.0], [3.0, 4.0]]"):
            x = torch.as_tensor(rows, dtype=torch.float32).cpu()
        expect(
            x.dim() == 2 and x.numel() > 0,
            f"{name}: give a list of rows, as [[1.0, 2.0]] for one row, got {rows}",
        )
        expect(_shows(function, x), f"{name}: it is right for {rows}")
        expect(
            x.numel() <= least,
            f"{name}: {rows} shows it, and so does a matrix of fewer numbers",
        )


# --- 07.3 ----------------------------------------------------------------------------------------------


@exercise("07.3", "Softmax of the beginning of a row", minutes=12, level=2)
def check_prefix_softmax(answer):
    def inputs(shape, dtype):
        (x,) = _rows(shape, dtype, scale=3.0)
        m, n = shape
        lengths = torch.arange(m, device=x.device) * 7 % (n + 1)
        lengths[-1] = 0
        lengths[0] = (n + 1) // 2
        x[_behind(x, lengths)] = NAN  # shows in the result if it is used
        return x, lengths

    def special(shape, dtype):
        """Four rows: half is used, with a NaN, with +inf, of -inf alone; nothing is used."""
        (x,) = _rows(shape, dtype, scale=3.0)
        lengths = torch.tensor([(shape[1] + 1) // 2] * 3 + [0], device=x.device)
        x[0, 0], x[1, 0], x[2] = NAN, INF, -INF
        x[_behind(x, lengths)] = NAN
        return x, lengths

    def far_below_zero(shape, dtype):
        (x,) = _far_below_zero(shape, dtype)
        return x, torch.arange(1, shape[0] + 1, device=x.device)

    def eager(x, lengths):
        y = torch.softmax(x.masked_fill(_behind(x, lengths), -INF), dim=-1)
        return y.masked_fill(_behind(x, lengths), 0.0)

    cases = [(shape, inputs) for shape in (*SHAPES, (3, 5000))]
    for shape, make in (*cases, ((4, 4), special), ((4, 33), special)):
        try:
            expect_op(answer, eager, make, shapes=(shape,))
        except Wrong as difference:
            at = re.search(r"at \((\d+), \d+\)", str(difference))
            x, lengths = make(shape, torch.float32)
            row = int(at[1]) if at else len(x)
            hint = f"; lengths[{row}] is {lengths[row]}" if row < len(x) else ""
            if hint and make is special:
                hint += f", and the row begins with {x[row, 0]:g}"
            raise Wrong(f"{difference}{hint}") from None
    _expect_no_zero_joins(answer, eager, far_below_zero, (5, 7))
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)), exactly=1)
    x, lengths = inputs((9, 200), torch.float32)
    expect_no_pass(lambda: answer(x, lengths), x.nbytes, "at shape (9, 200)")
    traffic = count_traffic(lambda: answer(x, lengths))
    loaded = sum(a.loaded_distinct for a in traffic.by_argument.values())
    least = int(lengths.sum()) * x.element_size() + lengths.nbytes
    expect(
        loaded <= least,
        f"at shape (9, 200) it loads {loaded} bytes; up to the lengths there are {least}, lengths included",
    )


def _behind(x, lengths):
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]


# --- 07.4 ----------------------------------------------------------------------------------------------


@exercise("07.4", "What a row shares", minutes=8, level=2)
def check_elements_stored_one_by_one(answer):
    shapes = [(4, 3, 781), (4, 5, 8), (4, 4, 4), (8, 9, 6), (8, 20, 9), (8, 17, 3), (4, 8, 1)]
    for v, n_rows, n_cols in (*shapes, (8, 8, 781), (8, 8, 1030)):
        for row in range(n_rows):
            pieces = [k // v for k in range(row * n_cols, (row + 1) * n_cols)]
            want = sum(pieces.count(p) < v for p in pieces)
            at = f"row {row}, {n_cols} columns, pieces of {v}"
            with case(at):
                got = plain(attempted(answer(row, n_cols, v)))
            expect(
                got == want, f"{at}: {want} elements lie in pieces that are not whole, got {got}"
            )


# --- 07.5 ----------------------------------------------------------------------------------------------


@exercise("07.5", "log_softmax of long rows", minutes=15, level=2)
def check_log_softmax_long(answer):
    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows, shapes=(*SHAPES, (3, 20000)))
    expect_op(answer, eager, _masked_rows, shapes=((3, 5), (3, 20000)))
    try:
        _expect_no_zero_joins(answer, eager, _far_below_zero, (3, 50))
    except Wrong as difference:
        if "NaN in the wrong place" not in str(difference):
            raise
        raise Wrong(
            str(difference).partition("; all scores")[0]
            + "; all scores are far below 0, and an empty column has the sum 0: mind 0 · inf"
        ) from None
    _expect_maximum_first(answer, eager, (3, 5000))
    (x,) = _rows((2, 20000), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (2, 20000)")
    with _counted_reductions() as reductions, _loaded_tiles() as tiles:
        traffic = count_traffic(lambda: answer(x))
    widest = max(tiles, default=0)
    expect(widest <= 4096, f"at 20000 columns its tiles have {widest}; 4096 are the most")
    loaded = sum(a.loaded for a in traffic.by_argument.values()) / x.nbytes
    expect(
        loaded == 2, f"at shape (2, 20000) it loads x {loaded:.1f} times; two walks load it twice"
    )
    each = len(reductions) / traffic.programs
    expect(
        each <= 4,
        f"at 20000 columns a program reduces {each:.0f} times; keep a maximum and a sum for each column of "
        "the tile, and reduce behind the loop",
    )


@contextlib.contextmanager
def _counted_reductions():
    """A list with an entry for each tl.max and tl.sum that the interpreter runs meanwhile."""
    apply, seen = upstream.ReduceOps.apply_impl, []

    def counted(self, *args):
        seen.append(self)
        return apply(self, *args)

    with mock.patch.object(upstream.ReduceOps, "apply_impl", counted):
        yield seen


@contextlib.contextmanager
def _loaded_tiles():
    """A list of the longest side of each tile that the interpreter loads meanwhile."""
    load, seen = upstream.InterpreterBuilder.create_masked_load, []

    def counted(self, pointers, *args, **options):
        seen.append(max(pointers.data.shape, default=1))
        return load(self, pointers, *args, **options)

    with mock.patch.object(upstream.InterpreterBuilder, "create_masked_load", counted):
        yield seen


# --- 07.6 ----------------------------------------------------------------------------------------------


@exercise("07.6", "The way back from log_softmax", minutes=10, level=2)
def check_log_softmax_backward(answer):
    def inputs(shape, dtype):
        (x,) = _rows(shape, dtype, scale=3.0)
        generator = torch.Generator().manual_seed(1)
        dy = 1 + torch.randn(shape, generator=generator)
        return dy.to(machine.device(), dtype), torch.log_softmax(x, dim=-1)

    def eager(dy, y):
        return dy - y.exp() * dy.sum(-1, keepdim=True)

    expect_op(answer, eager, inputs)
    dy, y = inputs((5, 7), torch.float32)
    expect_launches(lambda: answer(dy, y), exactly=1)
    dy, y = inputs((9, 200), torch.float32)
    expect_no_pass(lambda: answer(dy, y), y.nbytes, "at shape (9, 200)")
    passes = count_traffic(lambda: answer(dy, y)).bytes_moved / y.nbytes
    expect(passes <= 3, f"it moves {passes:.1f} passes over MN; three are enough")


# --- 07.7 ----------------------------------------------------------------------------------------------


@triton.jit
def walk(row_ptr, n_cols, GUARD: tl.constexpr, BLOCK_N: tl.constexpr):
    # What to subtract in a row, and its sum relative to that, BLOCK_N columns at a time, as in the notebook.
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    zero = top
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        zero = new_top
        if GUARD:  # nothing but -inf so far: -inf - -inf would be NaN, and stay
            zero = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - zero) + tl.sum(tl.exp(x - zero), axis=0)
        top = new_top
    return zero, total


@triton.jit
def parts_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, n_parts, patience,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # One program holds one part of a row: TILES tiles of BLOCK_N columns, n_parts apart.
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    x_row, words_ptr = x_ptr + row * n_cols, words_ptr + 2 * row * n_parts
    held, top = (), tl.full((), -float("inf"), tl.float32)
    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_row + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        held, top = held + (x,), tl.maximum(top, tl.max(x))
    zero, total = tl.where(top == -float("inf"), 0.0, top), tl.full((), 0.0, tl.float32)
    for t in tl.static_range(TILES):
        total += tl.sum(tl.exp(held[t] - zero))

    _tell(words_ptr + 2 * part, top)
    _tell(words_ptr + 2 * part + 1, total)
    pairs, all_arrived = _hear(words_ptr, n_parts, patience, 2, PARTS, tl.float32)
    tops, totals = tl.split(pairs)
    tops = tl.where(tl.arange(0, PARTS) < n_parts, tops, -float("inf"))
    # No guard here, because PyTorch makes a row of nothing but -inf NaN.
    zero = tl.max(tops)
    total = tl.sum(totals * tl.exp(tops - zero))
    if not all_arrived:
        zero, total = walk(x_row, n_cols, True, BLOCK_N)

    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(y_ptr + row * n_cols + cols, tl.exp(held[t] - zero) / total, mask=cols < n_cols)


def softmax_parts(x, patience=None, tiles=16):
    """softmax by parts_kernel. The interpreter has no patience: it would wait for programs that come later."""
    y, block_n = torch.empty_like(x), 2048 // x.itemsize  # 16 bytes for each of 128 threads
    n_rows, n_cols = x.shape
    n_parts = triton.cdiv(n_cols, tiles * block_n)
    words = torch.zeros(n_rows * n_parts * 2, dtype=torch.int32, device=x.device)
    if patience is None:
        patience = machine.pick(gpu=4096, cpu=0)
    parts_kernel[(n_rows * n_parts,)](
        x, y, words, n_cols, n_parts, patience, TILES=tiles, BLOCK_N=block_n,
        PARTS=max(128, triton.next_power_of_2(n_parts)),
    )  # fmt: skip
    return y


@exercise("07.7", "All loads first", minutes=15, level=3)
def check_loads_first(kernel):
    expect_kernel(kernel)
    compiled = {dtype: compiled_part(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)}

    def answer(x, tiles=4, block_n=16):
        n_rows, n_cols = x.shape
        n_parts = triton.cdiv(n_cols, tiles * block_n)
        y, words = torch.full_like(x, -1.0), x.new_zeros(2 * n_rows * n_parts, dtype=torch.int32)
        sizes = {"TILES": tiles, "BLOCK_N": block_n, "PARTS": 128}
        kernel[(n_rows * n_parts,)](x, y, words, n_cols, n_parts, 0, **sizes)
        return y

    def eager(x):
        return torch.softmax(x, dim=-1)

    with interpreted_launches():
        expect_op(answer, eager, _rows, shapes=(*SHAPES[:-1], (3, 500)))
        expect_op(answer, eager, _masked_rows, shapes=((3, 5), (3, 300)))
        expect_op(answer, eager, _far_below_zero, shapes=((2, 50),))
    (x,) = _rows((5, 64), torch.float32)
    with _counted_reductions() as reductions:
        traffic = count_traffic(lambda: answer(x))
    named = traffic.by_argument.items()
    loaded = sum(a.loaded for name, a in named if name.endswith("x_ptr")) / x.nbytes
    expect(loaded == 1, f"a row that is one part is loaded {loaded:.0f} times; hold its numbers")
    each = len(reductions) / traffic.programs
    expect(
        each <= 7,  # two of the part, four in and behind _hear
        f"with 4 tiles a program reduces {each:.0f} times; combine tiles element by element, and reduce once",
    )
    for dtype, part in compiled.items():
        loads, barrier, _ = part.sass.partition("BAR.")
        expect(barrier, f"for sm_90, {dtype}: it has no barrier, so no tl.max of a part")
        n_first = len(re.findall(r"\bLDG\.", loads))
        expect(
            n_first >= 16,
            f"for sm_90, {dtype}: {n_first} of 16 loads stand before the first barrier",
        )


def compiled_part(kernel, dtype):
    """The kernel compiled for sm_90, for rows of 131072 columns in parts of 16 tiles.

    kernel: one with the parameters of the notebook's parts_kernel, or the one of lib/ops/softmax.py.
    """
    n_cols = 131072
    row, words = torch.empty(1, n_cols, dtype=dtype), torch.empty(32, dtype=torch.int32)
    block_n = 2048 // row.itemsize
    sizes = {"TILES": 16, "BLOCK_N": block_n, "PARTS": 128}
    more = (n_cols // (16 * block_n), 4096)  # n_parts, patience
    if kernel is softmax._softmax_parts_fwd_kernel:
        more = (n_cols, *more, 0)  # the stride before, zero behind
        sizes |= {"WHOLE_PIECES": False, "COMPUTE": tl.float32, "V": 16 // row.itemsize}
        sizes |= {
            "EMPTY": softmax._MINUS_INF.get(dtype, -INF),
            "MAX_OF_PAIRS": softmax._MAX.get(dtype),
        }
    return compile_for(kernel, signature_of(kernel, row, row, words, n_cols, *more, **sizes))


def counted_program(kernel, n_cols, num_warps, **constexprs):
    """What one program of the kernel has when compiled for an H200, for rows of n_cols bfloat16 numbers."""
    a, n_rows = torch.empty(64, n_cols, dtype=torch.bfloat16), constexprs.get("BLOCK_M", 1)
    sizes = (64, n_cols, n_cols) if "BLOCK_M" in constexprs else (n_cols, n_cols)
    signature = signature_of(kernel, a, a, *sizes, **constexprs)
    compiled = compile_for(kernel, signature, num_warps=num_warps)
    mix = instruction_mix(compiled)
    loads = (f"{n} {opcode}" for opcode, n in mix.items() if opcode.startswith("LDG"))
    return {
        "columns": n_cols,
        "threads": 32 * num_warps,
        "registers": compiled.registers,
        "loads of a thread": ", ".join(loads),
        "instructions a number": sum(mix.values()) * 32 * num_warps / (n_cols * n_rows),
    }
