"""Plausible wrong answers to the exercises of notebook 06, named <answer>__<why>: each must be rejected."""

from lib.exercises import nb06
from lib.tests.exercises.wrong_answers import solution

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_right = solution("06_read_output_code")

facts__rows_and_length_swapped = {**_right.facts, "rows": 3000, "row_length": 48}
facts__size_rounded_up = {**_right.facts, "row_length": 4096}
facts__x_read_once = {**_right.facts, "loads_of_x": 1}
facts__temporaries_counted = {**_right.facts, "running_tiles": 4}
facts__policy_of_the_first_loop = {**_right.facts, "last_policy": "evict_last"}
facts__one_left_open = {**_right.facts, "last_policy": None}

launches__one_per_op = {**_right.launches, "softmax_of_relu": 3}
launches__one_per_function = dict.fromkeys(_right.launches, 1)
launches__a_copy_is_a_boundary = {**_right.launches, "through_a_copy": 2}
launches__matmul_absorbs_relu = {**_right.launches, "two_layers": 2}
launches__neighbours_stay_apart = {**_right.launches, "side_by_side": 2}
launches__one_per_result = {**_right.launches, "side_by_side": 3}
launches__two_steps_for_few_rows = {**_right.launches, "both_sums": 3}
launches__words = {**_right.launches, "both_sums": "two"}


def unknown__row_and_column_swapped(in0, in1, in2):
    return in0 * torch.sigmoid(1.5 * in0 + in1) - in2[:, None]


def unknown__both_by_column(in0, in1, in2):
    return in0 * torch.sigmoid(1.5 * in0 + in1.expand_as(in2)) - in2


def unknown__the_number_is_lost(in0, in1, in2):
    return in0 * torch.sigmoid(in0 + in1[:, None]) - in2


def unknown__x_is_not_multiplied(in0, in1, in2):
    return torch.sigmoid(1.5 * in0 + in1[:, None]) - in2


@triton.jit
def _compilers_kernel(
    in_ptr0, in_ptr1, out_ptr0, xnumel, n_cols,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, XBLOCK: tl.constexpr,
):  # fmt: skip
    if SIZE:
        xnumel = 65536
    x2 = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x2 < xnumel
    x0 = x2 % 512 if COLUMNS else x2 % n_cols
    tmp0 = tl.load(in_ptr0 + x2, xmask)
    tmp2 = tmp0 + tl.load(in_ptr1 + x0, xmask)
    tl.store(out_ptr0 + x2, tl.where(tmp2 < 0, 0.0, tmp2), xmask)


def _any_size(x, bias, columns=False, size=False, grid=None):
    y = torch.empty_like(x)
    grid = grid or triton.cdiv(x.numel(), 1024)
    flags = {"COLUMNS": columns, "SIZE": size}
    _compilers_kernel[(grid,)](x, bias, y, x.numel(), x.shape[1], **flags, XBLOCK=1024)
    return y


def any_size__512_left_in_the_code(x, bias):
    return _any_size(x, bias, columns=True)


def any_size__65536_left_in_the_code(x, bias):
    return _any_size(x, bias, size=True)


def any_size__one_program(x, bias):
    return _any_size(x, bias, grid=1)


@triton.jit
def _forgets_nan_kernel(x_ptr, bias_ptr, y_ptr, n_elements, n_cols, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    z = tl.load(x_ptr + offsets, mask) + tl.load(bias_ptr + offsets % n_cols, mask)
    tl.store(y_ptr + offsets, tl.maximum(z, 0.0), mask)


def any_size__nan_is_lost(x, bias):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    _forgets_nan_kernel[grid](x, bias, y, x.numel(), x.shape[1], BLOCK_SIZE=1024)
    return y


def any_size__eager(x, bias):
    return torch.relu(x + bias)


def any_size__relu_in_a_second_pass(x, bias):
    return torch.relu(_right.any_size(x, bias))


one_kernel__unchanged = nb06.two_kernels


def one_kernel__one_bias_for_both(x, y, x_bias, y_bias):
    return F.gelu(torch.stack([x, y]) + x_bias).unbind()


def one_kernel__results_swapped(x, y, x_bias, y_bias):
    return _right.one_kernel(x, y, x_bias, y_bias)[::-1]


def one_kernel__left_stacked(x, y, x_bias, y_bias):
    return torch.stack(_right.one_kernel(x, y, x_bias, y_bias))


def one_kernel__tanh_gelu(x, y, x_bias, y_bias):
    biases = torch.stack([x_bias, y_bias])[:, None]
    return F.gelu(torch.stack([x, y]) + biases, approximate="tanh").unbind()


def one_kernel__joined_by_zero(x, y, x_bias, y_bias):
    return F.gelu(x + x_bias + 0 * y), F.gelu(y + y_bias + 0 * x)


def one_kernel__stacked_after_the_break(x, y, x_bias, y_bias):
    x = F.gelu(x + x_bias)
    torch._dynamo.graph_break()
    return torch.stack([x, F.gelu(y + y_bias)]).unbind()
