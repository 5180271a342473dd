"""Plausible wrong answers to the exercises of notebook 90, named <answer>__<why>: each must be rejected."""

import inspect

from lib.measure.mutants import load
from lib.ops.add_rms_norm import add_rms_norm_eager
from lib.tests.exercises.wrong_answers import solution, without_other

import torch

_right = solution("90_capstone")
_f32, _bf16 = torch.float32, torch.bfloat16

cases__powers_of_two = [((64, 64), _f32, None), ((128, 256), _bf16, None), ((8, 1024), _f32, None)]
cases__odd_shapes_alone = [
    ((5, 7), _f32, None),
    ((17, 33), _bf16, None),
    ((300, 300), _bf16, None),
]
cases__too_many = [*_right.cases, ((1, 1), _f32, None), ((5, 7), _f32, None)]
cases__unknown_special = [*_right.cases[:-1], ((600, 9), _bf16, "-inf")]
cases__float64 = [(shape, torch.float64, special) for shape, _, special in _right.cases]
cases__a_number_as_shape = [(64, _f32, None)]
cases__huge = [((16384, 4096), _bf16, None)]
cases__nothing = []


def limits__of_eager(m, n, itemsize, gbps):
    forward, backward = 5 * m * n * itemsize, 6 * m * n * itemsize
    return forward, backward, forward / gbps / 1e3, backward / gbps / 1e3


def limits__dx_twice(m, n, itemsize, gbps):
    forward, backward = 4 * m * n * itemsize, 5 * m * n * itemsize
    return forward, backward, forward / gbps / 1e3, backward / gbps / 1e3


def limits__dh_forgotten(m, n, itemsize, gbps):
    forward, backward = 4 * m * n * itemsize, 3 * m * n * itemsize
    return forward, backward, forward / gbps / 1e3, backward / gbps / 1e3


def limits__elements(m, n, itemsize, gbps):
    least = 4 * m * n
    return least, least, least / gbps / 1e3, least / gbps / 1e3


def limits__gib(m, n, itemsize, gbps):
    least = 4 * m * n * itemsize
    return least, least, least / (gbps * 2**30) * 1e6, least / (gbps * 2**30) * 1e6


def limits__milliseconds(m, n, itemsize, gbps):
    least = 4 * m * n * itemsize
    return least, least, least / gbps / 1e6, least / gbps / 1e6


def _forward(old, new):
    return solution("90_capstone", old, new).my_forward


my_forward__eps_outside = _forward(
    "root = tl.rsqrt(tl.sum(h * h, axis=0) / n_cols + eps)\n    tl",
    "root = 1 / (tl.sqrt(tl.sum(h * h, axis=0) / n_cols) + eps)\n    tl",
)
my_forward__padded_mean = _forward(
    "/ n_cols + eps)\n    tl.store", "/ BLOCK_SIZE + eps)\n    tl.store"
)
my_forward__norm_of_the_exact_sum = _forward(
    "h = rounded.to(tl.float32)\n    root", "h = x + residual\n    root"
)
my_forward__views_as_contiguous = _forward(
    "    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()\n    y, h",
    "    y, h",
)
my_forward__a_tile_of_1024 = _forward(
    "block_size = triton.next_power_of_2(n_cols)",
    "block_size = min(1024, triton.next_power_of_2(n_cols))",
)
my_forward__empty = _forward(
    "    if x.numel() > 0:\n        n_cols", "    if True:\n        n_cols"
)
my_forward__two_dimensions = _forward(
    "n_cols = x.shape[-1]\n        grid", "_, n_cols = x.shape\n        grid"
)
my_forward__no_sentence = _forward("    expect_good(x, residual, weight)\n", "")
my_forward__into_residual = _forward(
    "y, h = torch.empty_like(x), torch.empty_like(x)", "y, h = torch.empty_like(x), residual"
)


def my_forward__eps_ignored(x, residual, weight, eps=1e-6):
    return _right.my_forward(x, residual, weight)


def my_forward__the_sum_by_pytorch(x, residual, weight, eps=1e-6):
    _right.expect_good(x, residual, weight)
    h = x + residual
    y, _ = _right.my_forward(h, torch.zeros_like(h), weight, eps)
    return y, h


def my_forward__eager(x, residual, weight, eps=1e-6):
    _right.expect_good(x, residual, weight)
    return add_rms_norm_eager(x, residual, weight, eps)


def my_forward__y_alone(x, residual, weight, eps=1e-6):
    return _right.my_forward(x, residual, weight, eps)[0]


def _both(old, new):
    return solution("90_capstone", old, new).my_add_rms_norm


my_add_rms_norm__no_gradient = _right.my_forward
my_add_rms_norm__eps_ignored_in_backward = _both("        ctx.eps = eps", "        ctx.eps = 1e-6")
my_add_rms_norm__dh_ignored = _both("if dh_ptr is not None:", "if False:")
my_add_rms_norm__dh_alone = _both("            dx += tl.load", "            dx = tl.load")
my_add_rms_norm__mean_of_dy = _both("tl.sum(g * normal, axis=0)", "tl.sum(dy * normal, axis=0)")
my_add_rms_norm__no_dresidual = _both("return dx, dx, partial", "return dx, None, partial")
my_add_rms_norm__full_strips = _both(
    "programs = triton.cdiv(n_rows, rows_per_program)",
    "programs = max(1, n_rows // 64 * 64 // rows_per_program)",
)
my_add_rms_norm__dh_always = _both(
    "dh = None if dh is None else dh.contiguous()", "dh = dh.contiguous()"
)
my_add_rms_norm__stride_0 = _both("else dy.contiguous()", "else dy")
my_add_rms_norm__second_derivative = _both("if torch.is_grad_enabled():", "if False:")


def _edited(*edits):
    """my_add_rms_norm of the solution after several edits."""
    text = inspect.getsource(_right)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return load("capstone", text).my_add_rms_norm


my_add_rms_norm__not_saved = _edited(
    ("ctx.save_for_backward(h, weight)", "ctx.mine = h, weight"),
    ("h, weight = ctx.saved_tensors", "h, weight = ctx.mine"),
)
my_add_rms_norm__atomic = _edited(
    ("partial_offsets = tl.program_id(0).to(tl.int64) * n_cols + cols", "partial_offsets = cols"),
    ("tl.store(partial_ptr + partial_offsets", "tl.atomic_add(partial_ptr + partial_offsets"),
    ("torch.empty(programs, n_cols, dtype", "torch.zeros(1, n_cols, dtype"),
)
my_add_rms_norm__dweight_in_16_bits = _edited(
    ("rows_per_program = triton.cdiv(n_rows, 1024)", "rows_per_program = n_rows"),
    ("(BLOCK_SIZE,), dtype=tl.float32", "(BLOCK_SIZE,), dtype=h_ptr.dtype.element_ty"),
    ("total += dy * normal", "total = (total + dy * normal).to(h_ptr.dtype.element_ty)"),
)


my_add_rms_norm__parts_of_dweight_in_16_bits = _both(
    "partial = torch.empty(programs, n_cols, dtype=torch.float32",
    "partial = torch.empty(programs, n_cols, dtype=h.dtype",
)
my_add_rms_norm__overwrites_dy = _edited(
    (
        "        return dx, dx, partial.sum(0)",
        "        dy.zero_()\n        return dx, dx, partial.sum(0)",
    ),
)


def _explain(old, new):
    return solution("90_capstone", old, new).explain


explain__share_of_the_gpu_alone = _explain(
    'max(row["gpu_us"], row["host_us"]), (', 'row["gpu_us"], ('
)
explain__share_upside_down = _explain(
    '100 * least_us / max(row["gpu_us"], row["host_us"])',
    '100 * max(row["gpu_us"], row["host_us"]) / least_us',
)
explain__a_fraction = _explain("return 100 * least_us", "return least_us")
explain__all_bytes = _explain('"extra bytes": moved_us - least_us', '"extra bytes": moved_us')
explain__the_whole_host = _explain('max(0, row["host_us"] - row["gpu_us"])', 'row["host_us"]')
explain__the_other_way_round = _explain("(first, second)", "(second, first)")
explain__smallest = _explain("[:-3:-1]", "[:2]")
explain__memory_with_the_launches = _explain(
    'row["gpu_us"] - moved_us - launches_us', 'row["gpu_us"] - least_us'
)


def explain__names_alone(row, gbps, launch_us):
    return _right.explain(row, gbps, launch_us)[1]


_undefined = without_other("90_capstone")
my_forward__undefined_lanes = _undefined.my_forward
my_add_rms_norm__undefined_lanes = _undefined.my_add_rms_norm

_any_weight = solution("90_capstone", "weight.contiguous()", "weight")
my_forward__weight_taken_as_contiguous = _any_weight.my_forward
my_add_rms_norm__weight_taken_as_contiguous = _any_weight.my_add_rms_norm
