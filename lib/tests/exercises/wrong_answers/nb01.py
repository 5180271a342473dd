"""Plausible wrong answers to the exercises of notebook 01, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel, solution

import torch
import triton
import triton.language as tl


def _changed(answer, old, new):
    """An answer of the solutions with this change."""
    return getattr(solution("01_six_small_kernels", old, new), answer)


NEGATIVE_INFINITY = 'other=-float("inf")'

bias_by_column__in_pytorch = beside_an_empty_kernel(lambda x, b: x + b)
bias_by_row__in_pytorch = beside_an_empty_kernel(lambda x, b: x + b[:, None])
row_sum__in_pytorch = beside_an_empty_kernel(lambda x: x.sum(1))
row_max__in_pytorch = beside_an_empty_kernel(lambda x: x.amax(1))
transpose__in_pytorch = beside_an_empty_kernel(lambda x: x.t().contiguous())
softmax_rows__in_pytorch = beside_an_empty_kernel(lambda x: torch.softmax(x, 1))


def bias_by_column__by_row(x, b):
    return _changed(
        "bias_by_column", "b_ptr + cols, mask=cols < n_cols", "b_ptr + rows, mask=rows < n_rows"
    )(x, b)


def bias_by_column__first_columns_alone(x, b):
    return _changed("bias_by_column", "b_ptr + cols, mask", "b_ptr + cols % BLOCK_N, mask")(x, b)


def bias_by_column__rows_as_far_apart_as_rows_are_many(x, b):
    return _changed("bias_by_column", "rows * n_cols + cols, (rows", "rows * n_rows + cols, (rows")(
        x, b
    )


def bias_by_row__by_column(x, b):
    return _changed(
        "bias_by_row", "b_ptr + rows, mask=rows < n_rows", "b_ptr + cols, mask=cols < n_cols"
    )(x, b)


def bias_by_row__rows_not_masked(x, b):
    return _changed(
        "bias_by_row", "(rows < n_rows) & (cols < n_cols)", "(rows >= 0) & (cols < n_cols)"
    )(x, b)


def row_sum__in_the_dtype_of_x(x):
    return _changed("row_sum", "BLOCK_N), tl.float32)", "BLOCK_N), x_ptr.dtype.element_ty)")(x)


def row_sum__one_tile(x):
    return _changed("row_sum", "range(0, n_cols, BLOCK_N)", "range(0, 1)")(x)


def row_sum__of_columns(x):
    return _changed("row_sum", "axis=1), mask", "axis=0), mask")(x)


def row_max__zero_where_there_is_nothing(x):
    return _changed("row_max", NEGATIVE_INFINITY, "other=0.0")(x)


def row_max__begins_with_zero(x):
    return _changed("row_max", 'BLOCK_N), -float("inf"), tl.float32', "BLOCK_N), 0.0, tl.float32")(
        x
    )


def row_max__one_tile(x):
    return _changed("row_max", "range(0, n_cols, BLOCK_N)", "range(0, 1)")(x)


def row_max__any_small_number(x):
    return _changed("row_max", '-float("inf")', "-1e30")(x)


def row_sum__programs_add_to_one_number(x):
    y = x.new_zeros(len(x))
    grid = triton.cdiv(len(x), 16), triton.cdiv(x.shape[1], 128)
    _adds_up_kernel[grid](x, y, *x.shape, BLOCK_M=16, BLOCK_N=128)
    return y


@triton.jit
def _adds_up_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    so_far = tl.load(y_ptr + rows, mask=rows < n_rows)
    tl.store(y_ptr + rows, so_far + tl.sum(x.to(tl.float32), axis=1), mask=rows < n_rows)


def transpose__a_view(x):
    return _changed("transpose", "return y", "return x.t() if y.dim() == 2 else y")(x)


def transpose__as_wide_as_x(x):
    return _changed("transpose", "cols * n_rows + rows, x", "cols * n_cols + rows, x")(x)


def transpose__a_copy(x):
    return _changed("transpose", "y_ptr + cols * n_rows + rows", "y_ptr + rows * n_cols + cols")(x)


def softmax_rows__overflows(x):
    return _changed("softmax_rows", "x.to(tl.float32) - tl.max(x, axis=0)", "x.to(tl.float32)")(x)


def softmax_rows__counts_places_that_are_not_there(x):
    return _changed("softmax_rows", NEGATIVE_INFINITY, "other=0.0")(x)


def softmax_rows__some_small_number(x):
    return _changed("softmax_rows", NEGATIVE_INFINITY, "other=-1e4")(x)


def softmax_rows__zero_for_the_maximum(x):
    old = 'other=-float("inf"))\n\n    e = tl.exp(x.to(tl.float32) - tl.max(x, axis=0))'
    new = "other=0.0)\n\n    e = tl.where(cols < n_cols, tl.exp(x.to(tl.float32) - tl.max(x, axis=0)), 0.0)"
    return _changed("softmax_rows", old, new)(x)


def softmax_rows__reads_twice(x):
    again = 'tl.max(tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf")), axis=0)'
    return _changed("softmax_rows", "tl.max(x, axis=0)", again)(x)
