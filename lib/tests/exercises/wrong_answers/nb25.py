"""Plausible wrong answers to the exercises of notebook 25, named <answer>__<why>: each must be rejected."""

import math

from lib.tests.exercises.wrong_answers import solution

import torch
from torch.autograd.function import once_differentiable

_right = solution("25_the_finished_op")


def _changed(name, *changes):
    return getattr(solution("25_the_finished_op", *changes), name)


def check_arguments__lets_all_pass(x, bias):
    x + bias  # broadcasts more than the kernel does


def check_arguments__asserts(x, bias):
    assert isinstance(bias, torch.Tensor), "bias"
    assert bias.shape == x.shape[-1:], "bias"


check_arguments__no_mixed_dtypes = _changed(
    "check_arguments", " and not (x.dtype in mixed and bias.dtype in mixed)", ""
)
check_arguments__float64_with_others = _changed(
    "check_arguments", "x.dtype != bias.dtype and not", "False and not"
)
check_arguments__float8_with_others = _changed(
    "check_arguments",
    "not (x.dtype in mixed and bias.dtype in mixed)",
    "torch.float64 in (x.dtype, bias.dtype)",
)
check_arguments__any_device = _changed("check_arguments", "bias.device != x.device", "False")
check_arguments__only_matrices = _changed("check_arguments", "x.dim() == 0", "x.dim() != 2")
check_arguments__says_no_shape = _changed("check_arguments", ", got {tuple(bias.shape)}", "")
check_arguments__counts_numbers_alone = _changed(
    "check_arguments", "bias.shape != x.shape[-1:]", "bias.numel() != x.shape[-1]"
)
check_arguments__integers = _changed("check_arguments", "not t.is_floating_point()", "False")


def check_arguments__returns_true(x, bias):
    _right.check_arguments(x, bias)
    return True


def check_arguments__complex(x, bias):
    if not all(isinstance(t, torch.Tensor) and t.is_complex() for t in (x, bias)):
        _right.check_arguments(x, bias)


def check_arguments__one_message_for_all(x, bias):
    try:
        _right.check_arguments(x, bias)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"x or bias is wrong; bias has shape {tuple(getattr(bias, 'shape', ()))}"
        ) from None


def rows_to_fold__always_sixteen(n_cols):
    return 1 if n_cols % 16 == 0 else 16


def rows_to_fold__of_eight(n_cols):
    return 8 // math.gcd(n_cols, 8)


def rows_to_fold__the_divisor(n_cols):
    return math.gcd(n_cols, 16)


def _fold(*changes):
    return solution("25_the_finished_op", *changes).fold_kernel


fold_kernel__one_by_one = _fold("n_elements // 16 * 16", "n_elements")
fold_kernel__of_four = _fold("n_elements // 16 * 16", "n_elements // 4 * 4")
fold_kernel__past_the_end = _fold(
    "whole = n_elements // 16 * 16", "whole = (n_elements + 15) // 16 * 16"
)
fold_kernel__the_rest_forgotten = _fold("tl.program_id(0) == 0", "tl.program_id(0) < 0")
fold_kernel__the_rest_by_all = _fold("tl.program_id(0) == 0", "tl.program_id(0) >= 0")
fold_kernel__the_rest_by_the_second = _fold("tl.program_id(0) == 0", "tl.program_id(0) == 1")
fold_kernel__a_number_for_each_column = _fold("offsets // n_cols", "offsets % n_cols")
fold_kernel__a_row_too_early = _fold("last // n_cols", "whole // n_cols + 0 * last")
fold_kernel__narrow_stores = _fold(
    "x * scale, mask=mask", "x * scale, mask=offsets < n_elements - n_elements % 16"
)
fold_kernel__all_of_it_by_the_first = _fold(
    "whole + tl.arange(0, 16)",
    "tl.arange(0, 65536)",
    "rest = last < n_elements",
    "rest = last < n_elements + 0 * whole",
)


Mine__twice = _changed("Mine", "    @host.once\n", "")
Mine__keeps_y_on_ctx = _changed(
    "Mine", "ctx.save_for_backward(y)", "ctx.y = y.detach()", "(y,) = ctx.saved_tensors", "y = ctx.y"
)  # fmt: skip
Mine__writes_both = _changed("Mine", ", ctx.needs_input_grad)", ")")
Mine__dtype_of_x = _changed(
    "Mine", "ctx.dtypes = x.dtype, bias.dtype", "ctx.dtypes = x.dtype, x.dtype"
)
Mine__dtype_of_y = _changed(
    "Mine", "add_relu._backward(dy, y, ctx.dtypes,", "add_relu._backward(dy, y, (y.dtype, y.dtype),"
)
Mine__saves_x_too = _changed(
    "Mine", "ctx.save_for_backward(y)", "ctx.save_for_backward(y, x)", "(y,) = ctx", "y, _ = ctx"
)
Mine__swapped = _changed("Mine", "return add_relu._backward(dy, y, ctx.dtypes, ctx.needs_input_grad)",
    "return add_relu._backward(dy, y, ctx.dtypes, ctx.needs_input_grad)[::-1]",
)  # fmt: skip
Mine__saves_dy_mask = _changed("Mine", "add_relu._backward(dy, y,", "add_relu._backward(dy, dy,")


class Mine__once_differentiable(torch.autograd.Function):
    forward = _right.Mine.forward

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return _right.add_relu._backward(dy, y, ctx.dtypes, ctx.needs_input_grad)


def Mine__a_function(x, bias):
    return _right.Mine.apply(x, bias)
