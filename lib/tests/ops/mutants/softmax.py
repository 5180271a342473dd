"""Mutants of lib/ops/softmax.py."""

from lib.measure.check import check_against_float64
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch

INF, NAN = float("inf"), float("nan")
PARTS = 40000  # columns: five parts of 8192, the last of them cut, in the kernels' tile of eight


def _rows(shape, dtype=torch.float32):
    return (3 * torch.randn(shape)).to(dtype).requires_grad_()


def _check(op, x, name=None, **options):
    check_against_float64(op.versions["triton"], op.eager, x, name=name, **options)


def check_kinds_of_rows(op, module):
    """Rows of -inf, with NaN, +inf, -inf beside numbers, and the largest numbers; all sorts of tiles."""
    for n_cols in (3, 40, 781, PARTS):
        x = _rows((9, n_cols)).detach()
        x[0] = -INF
        x[1, n_cols // 2] = NAN
        x[2, -1] = INF
        x[3, : n_cols - 1] = -INF
        x[4] = torch.finfo(torch.float32).max
        x[5] = torch.finfo(torch.float32).min
        x[6, : n_cols // 2] = -INF
        x[7, n_cols // 2 + 1 :] = -INF
        x[8] = -INF
        x[8, 0] = NAN
        _check(op, x, f"{n_cols} columns")


def check_only_differences_reach_exp(op, module):
    """All rows far from 0, above and below; one number far above the rest of its row, at either end of it."""
    for n_cols in (40, 781, PARTS):
        x = _rows((4, n_cols)).detach()
        for offset in (-1e4, 1e4):
            _check(op, x + offset, f"{n_cols} columns, {offset:+}")
        x[0, -1], x[1, 0], x[2, n_cols // 2] = 200.0, 200.0, 200.0
        _check(op, x, f"{n_cols} columns, one large number")


def check_widths(op, module):
    """Whole tiles and cut ones, several rows to a program, and rows that begin on no 16-byte boundary."""
    for shape in [
        (9, 15),
        (9, 33),
        (5, 512),
        (9, 781),
        (9, 1023),
        (3, 1024),
        (3, 2049),
        (3, PARTS),
    ]:
        for dtype in (torch.float32, torch.bfloat16):
            _check(op, _rows(shape, dtype), f"{shape}, {dtype}")


def check_rows_taken_in_turn(op, module):
    """Long rows of 2-byte elements, several to a program: in the interpreter there are four programs."""
    x = _rows((7, 16500), torch.bfloat16)
    _check(op, x)
    _check(op, x.detach()[:, 3:16400].requires_grad_(), "sliced")


def check_rows_that_begin_anywhere(op, module):
    for n_cols in (41, 781, PARTS):
        wide = _rows((3, n_cols + 9), torch.bfloat16).detach()
        for start in (1, 4):
            _check(op, wide[:, start : start + n_cols].requires_grad_(), f"from column {start}")
    x, again = _rows((5, 781)), _rows((5, 781))
    dy = torch.randn(5, 790)[:, 3:784]
    with torch.no_grad():
        again.copy_(x)
    op.versions["triton"](x).backward(dy)
    op.eager(again).backward(dy)
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-5, atol=1e-6)


def check_float64(op, module):
    for n_cols in (50, 33000):
        _check(op, _rows((3, n_cols), torch.float64), slack=1e-13)


def check_rounded_once(op, module):
    """From bfloat16 to bfloat16 by way of float32 all along."""
    for n_cols in (100, PARTS):
        x = _rows((3, n_cols), torch.bfloat16).detach()
        want = op.eager(x.double())
        error = (op.versions["triton"](x).double() - want).abs() - 0.51 * 2**-7 * want
        assert error.max() < 1e-6 * want.max(), "rounded on the way"


def check_long_rows_far_apart(op, module):
    """Offsets past 2**31 of rows in parts, and of rows taken in turn; of x and of dy."""
    storage = torch.empty(2**31 + PARTS, dtype=torch.float16)
    for n_cols in (20000, PARTS):
        far = storage.as_strided((3, n_cols), (2**30, 1))
        far.copy_(torch.randn(3, n_cols))
        _check(op, far.detach(), f"x, {n_cols} columns")
        grads = []
        for version in (op.versions["triton"], op.eager):
            x = torch.randn(3, n_cols, generator=torch.Generator().manual_seed(0)).half()
            grads += torch.autograd.grad(version(x.requires_grad_()), x, far)
        torch.testing.assert_close(*grads, rtol=0.03, atol=1e-6)


def check_no_more_parts_than_run_at_once(op, module):
    """At most 64 programs wait for each other; more might wait for one that cannot start."""
    for n_cols in (PARTS, 2**20, 2**24 + 1):
        grid, *_ = module._parts(3, n_cols, torch.device("cpu"), 2, torch.int64)
        assert grid[0] <= 3 * 64, f"{grid[0] // 3} parts, of which some may never start"


def check_the_registered_op(op, module):
    """The node of torch.compile, with its own way to the gradient."""
    check_against_float64(module.softmax_op, op.eager, _rows((17, 33)))
    x = cases.with_specials([_rows((6, 24))], op.eager)
    check_against_float64(module.softmax_op, op.eager, *x)


CHECKS = [
    check_no_more_parts_than_run_at_once,
    check_the_registered_op,
    check_rounded_once,
    check_rows_taken_in_turn,
    check_float64,
    check_kinds_of_rows,
    check_long_rows_far_apart,
    check_only_differences_reach_exp,
    check_rows_that_begin_anywhere,
    check_widths,
]

_LOAD_X = 'x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)'
_LOAD_PART = (
    'x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=-float("inf")).to(COMPUTE)'
)

MUTANTS = [
    # --- rows in one tile
    Mutant(_LOAD_X, _LOAD_X.replace('-float("inf")', "0.0"), "the padding counted in the sum"),
    Mutant(_LOAD_X, _LOAD_X.replace("COMPUTE", "tl.bfloat16"), "computed in bfloat16"),
    Mutant("numerator = _exp(x - top)\n", "numerator = _exp(x)\n", "the maximum not taken off"),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, numerator, mask=mask)",
        "not divided by the sum",
    ),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, tl.where(total != total, 0.0, numerator / total), mask=mask)",
        "zeros for a row of -inf",
    ),
    Mutant(
        "x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols",
        "x_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols",
        "the row stride of x forgotten",
    ),
    Mutant(
        "x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols",
        "x_offsets, y_offsets = rows.to(tl.int32) * stride_xm + cols, rows * n_cols + cols",
        "int32 rows",
    ),
    Mutant("n_rows, n_programs, num_stages", "n_rows, n_programs + 1, num_stages", "rows left out"),
    Mutant(
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)",
        "tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=inside)",
        "the mask of the columns dropped from the store",
    ),
    # --- rows that begin on no 16-byte boundary
    Mutant("top = tl.maximum(top, _row_max(ends))", "top = top", "the maximum without the ends"),
    Mutant("total += _row_sum(end_numerator)", "total = total", "the sum without the ends"),
    Mutant("end_numerator * (1.0 / total)", "end_numerator", "the ends not divided by the sum"),
    Mutant(
        "end = tl.where(inside, shift + n_cols, 0)",
        "end = shift + n_cols",
        "rows behind the last one read and written",
    ),
    Mutant(
        "whole = (piece >= shift) & (piece + V <= end)",
        "whole = (cols >= shift) & (cols < end)",
        "the ends counted twice",
    ),
    Mutant(
        "whole = (piece >= shift) & (piece + V <= end)",
        "whole = (piece >= shift) & (piece < end)",
        "the first elements of the next row counted in",
    ),
    Mutant(
        "whole_pieces = n_cols % 16 != 0 and contiguous and n_cols > 2 * v",
        "whole_pieces = n_cols % 16 != 0 and n_cols > 2 * v",
        "sliced rows read as if contiguous",
    ),
    # --- the gradient
    Mutant("total = _row_sum(y * dy)", "total = _row_sum(dy)", "dy summed without y"),
    Mutant(
        "total += _row_sum(end_y * end_dy)", "total = total", "the gradient's sum without the ends"
    ),
    Mutant(
        "tl.store(dx_ptr + y_offsets, y * (dy - total), mask=mask)",
        "tl.store(dx_ptr + y_offsets, y * (dy + total), mask=mask)",
        "a wrong sign in the gradient",
    ),
    Mutant(
        "tl.store(dx_ptr + y_offsets, y * (dy - total), mask=mask)",
        "tl.store(dx_ptr + y_offsets, y * dy - total, mask=mask)",
        "the sum not multiplied by y",
    ),
    Mutant(
        "end_y * (end_dy - total)", "end_y * end_dy", "the gradient of the ends without the sum"
    ),
    Mutant(
        "dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols",
        "dy_offsets, y_offsets = rows * n_cols + cols, rows * n_cols + cols",
        "the row stride of dy forgotten",
    ),
    Mutant(
        "dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols",
        "dy_offsets, y_offsets = rows.to(tl.int32) * stride_dym + cols, rows * n_cols + cols",
        "int32 rows of dy",
    ),
    Mutant(
        "_row_tile(n_cols, y.itemsize, dy.is_contiguous())",
        "_row_tile(n_cols, y.itemsize, y.is_contiguous())",
        "a sliced dy read as if contiguous",
    ),
    Mutant(
        "dy = _rows_side_by_side(dy.reshape(-1, n_cols))",
        "dy = dy.reshape(-1, n_cols)",
        "a gradient of strides 0",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "inputs, output: ctx.save_for_backward(output)",
        "inputs, output: ctx.save_for_backward(*inputs)",
        "compiled: x saved where y is needed",
    ),
    # --- rows in parts
    Mutant(_LOAD_PART, _LOAD_PART.replace('-float("inf")', "0.0"), "in parts: the padding counted"),
    Mutant(
        'numerator = _exp(x - tl.where(top == -float("inf"), 0.0, top))',
        "numerator = _exp(x - top)",
        "in parts: a part of -inf alone makes the row NaN",
    ),
    Mutant(
        "sums * tl.exp(tops - row_top)", "sums", "in parts: sums added with each its own maximum"
    ),
    Mutant(
        "1.0, tl.exp(top - row_top)) / total",
        "1.0, 1.0) / total",
        "in parts: its own quotients not rescaled",
    ),
    Mutant(
        "total = tl.sum(tl.where(sums == 0.0",
        "total = tl.max(tl.where(sums == 0.0",
        "in parts: only the largest sum",
    ),
    Mutant(
        "row_top = tl.max(tops, axis=0)",
        "row_top = tl.sum(tl.where(ids == 0, tops, 0.0), axis=0)",
        "in parts: the maximum of the first",
    ),
    Mutant(
        'return tl.where(mask, top, -float("inf")), total',
        "return top, total",
        "in parts: 0 as the maximum of parts that do not exist",
    ),
    Mutant(
        "stats = stats_ptr + 2 * row * n_parts",
        "stats = stats_ptr + 2 * row",
        "in parts: rows that write over each other's sums",
    ),
    Mutant(
        "stats = stats_ptr + row * n_parts",
        "stats = stats_ptr",
        "in parts: all rows with the sum of the last, backward",
    ),
    Mutant(
        "dx = y * (dy - tl.sum(sums, axis=0))",
        "dx = y * (dy - tl.sum(y * dy, axis=0))",
        "in parts: only its own sum, backward",
    ),
    Mutant(
        "return (ticket // n_parts).to(tl.int64), ticket % n_parts",
        "return ticket // n_parts, ticket % n_parts",
        "in parts: int32 rows",
    ),
    Mutant(
        "return (ticket // n_parts).to(tl.int64), ticket % n_parts",
        "return (ticket % n_parts).to(tl.int64), ticket // n_parts",
        "in parts: row and part mixed up",
    ),
    Mutant(
        "word = tl.load(stats + 2 * parts + 1,",
        "word = tl.load(stats + 2 * parts,",
        "in parts, float64: the maximum taken for the sum",
    ),
    Mutant(
        "n_parts = _cdiv(n_cols, block_n)",
        "n_parts = n_cols // block_n",
        "in parts: floor where ceil was meant",
    ),
    Mutant(
        "block_n = max(8192, _power_of_2(_cdiv(n_cols, 64)))",
        "block_n = 8192",
        "more parts than may run at once",
    ),
    # --- the host
    Mutant(
        "return tl.float64 if dtype == torch.float64 else tl.float32",
        "return tl.float32",
        "float64 computed in float32",
    ),
    Mutant(
        "return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()",
        "return x",
        "columns with gaps read side by side",
    ),
]
