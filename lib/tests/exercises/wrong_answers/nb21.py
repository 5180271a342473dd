"""Plausible wrong answers to the exercises of notebook 21, named <answer>__<why>: each must be rejected."""

from lib.exercises import nb21
from lib.tests.exercises.wrong_answers import solution

import torch
import torch.nn.functional as F

_right = solution("21_read_output_code")

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


def _softmax(x):
    return torch.softmax(x, dim=1)


function_and_shape__few_rows = (_softmax, (64, 1024))
function_and_shape__row_is_no_power_of_two = (_softmax, (4096, 1000))
function_and_shape__row_too_long_for_one_tile = (_softmax, (4096, 2048))
function_and_shape__no_reduction = (torch.relu, (4096, 1024))
function_and_shape__written_out = (_softmax, (4096, 4))
function_and_shape__two_reductions = (lambda x: (x.sum(0), x.sum(1)), (4096, 1024))
function_and_shape__one_row = (_softmax, (1, 1024))
function_and_shape__one_number_kept = (torch.sum, (2, 512))
function_and_shape__no_shape = (_softmax, 4096)

one_kernel__unchanged = nb21.two_kernels


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
