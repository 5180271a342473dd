"""Exercises of notebook 32, softmax."""

import contextlib
import re
from unittest import mock

from lib import machine
from lib.exercises import (
    SHAPES,
    Wrong,
    exercise,
    expect,
    expect_kernel,
    expect_launches,
    expect_op,
    hinting,
)
from lib.exercises.watch import expect_no_pass
from lib.nogpu.compile_only import compile_for, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import count_traffic
from lib.ops import softmax

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

INF, NAN = float("inf"), float("nan")


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


@exercise("32.1", "A sibling: log_softmax", minutes=8, level=1)
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


@exercise("32.2", "log_softmax of long rows", minutes=15, level=2)
def check_log_softmax_long(answer):
    def eager(x):
        return torch.log_softmax(x, dim=-1)

    expect_op(answer, eager, _rows, shapes=(*SHAPES, (3, 20000)))
    expect_op(answer, eager, _masked_rows, shapes=((3, 5), (3, 20000)))
    _expect_no_zero_joins(answer, eager, _far_below_zero, (3, 50))
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


@exercise("32.3", "The way back from log_softmax", minutes=10, level=2)
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


@exercise("32.4", "Softmax of the beginning of a row", minutes=12, level=2)
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


@exercise("32.5", "All loads first", minutes=10, level=2)
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
