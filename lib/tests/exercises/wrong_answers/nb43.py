"""Plausible wrong answers to the exercises of notebook 43, named <answer>__<why>: each must be rejected."""

import math

from lib.tests.exercises.wrong_answers import solution, without_other

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_right = solution("43_whole_mlp")


def tiles_that_lose__counts_the_extra_ones(*case):
    return _right.tiles_that_lose(*case) - 1


def tiles_that_lose__or_as_long(m, k, h, itemsize, tflops, gbps, launch_us):
    again_us = 2 * m * k * h / tflops / 1e6
    return 1 + math.ceil((launch_us + 2 * m * h * itemsize / gbps / 1e3) / again_us)


def tiles_that_lose__no_launch(m, k, h, itemsize, tflops, gbps, launch_us):
    return _right.tiles_that_lose(m, k, h, itemsize, tflops, gbps, 0.0)


def tiles_that_lose__one_pass(m, k, h, itemsize, tflops, gbps, launch_us):
    return _right.tiles_that_lose(m, k, h, itemsize / 2, tflops, gbps, launch_us)


def tiles_that_lose__half_the_flops(m, k, h, itemsize, tflops, gbps, launch_us):
    return _right.tiles_that_lose(m, k, h, itemsize, 2 * tflops, gbps, launch_us)


def inputs_that_show_it__ones():
    return tuple(torch.ones(s) for s in ((1, 1), (17, 1), (17,), (1, 17), (1,)))


def inputs_that_show_it__one_tile():
    x, w1, b1, w2, b2 = _right.inputs_that_show_it()
    return x, w1[:16], b1[:16], w2[:, :16], b2


def inputs_that_show_it__no_second_bias():
    *others, b2 = _right.inputs_that_show_it()
    return *others, torch.zeros_like(b2)


def inputs_that_show_it__equal_biases():
    x, w1, b1, w2, b2 = _right.inputs_that_show_it()
    return x, w1, torch.full_like(b1, 0.25), w2, b2


def inputs_that_show_it__all_units_on():
    x, w1, b1, w2, b2 = _right.inputs_that_show_it()
    return x, w1.abs(), b1, w2, b2


def inputs_that_show_it__too_many():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4), (20, 4), (20,), (3, 20), (3,))
    return tuple(torch.randn(s, generator=generator) for s in shapes)


def inputs_that_show_it__not_a_number():
    x, *others = _right.inputs_that_show_it()
    return x * float("nan"), *others


def inputs_that_show_it__a_shape():
    return (1, 1, 17, 1)


_tf32 = solution("43_whole_mlp", 'input_precision="ieee"', 'input_precision="tf32"')
dw2_parts__tf32, residual_mlp__tf32 = _tf32.dw2_parts, _tf32.residual_mlp
_no_nan = solution(
    "43_whole_mlp", "tl.where(hidden < 0, 0.0, hidden)", "tl.where(hidden > 0, hidden, 0.0)"
)
dw2_parts__drops_nan, residual_mlp__drops_nan = _no_nan.dw2_parts, _no_nan.residual_mlp


def dw2_parts__no_kernel(dz2, x, w1, b1):
    hidden = torch.relu(F.linear(x, w1, b1))
    return torch.stack([a.t() @ b for a, b in zip(dz2.split(16), hidden.split(16))])


def dw2_parts__the_sum_alone(dz2, x, w1, b1):
    return _right.dw2_parts(dz2, x, w1, b1).sum(0)


def _dw2(*changes):
    return solution("43_whole_mlp", *changes).dw2_parts


dw2_parts__rows_that_are_not_there = _dw2("& (rows < n_rows)[None, :]", "& (rows >= 0)[None, :]")
dw2_parts__0_times_infinity = _dw2("tl.where((rows < n_rows)[:, None], hidden, 0.0)", "hidden")
dw2_parts__guards_the_bias_alone = _dw2(
    "hidden += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]\n    hidden = tl.where(h",
    "b1 = tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]\n"
    "    hidden += tl.where((rows < n_rows)[:, None], b1, 0.0)\n    hidden = tl.where(h",
    "    hidden = tl.where((rows < n_rows)[:, None], hidden, 0.0)\n", "",
)  # fmt: skip
dw2_parts__hidden_of_0_counts = _dw2("hidden < 0, 0.0, hidden", "hidden <= 0, -1.0, hidden")
dw2_parts__bias_by_row = _dw2(
    "b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]",
    "b1_ptr + rows, mask=rows < n_hidden, other=0.0)[:, None]",
)
dw2_parts__transposed = _dw2("return parts\n\n\n# %% 43.4", "return parts.mT\n\n\n# %% 43.4")


def dw2_parts__several_launches(dz2, x, w1, b1):
    return torch.cat([_right.dw2_parts(*t, w1, b1) for t in zip(dz2.split(16), x.split(16))])


@triton.jit
def _residual_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, y_ptr, n_rows, n_inner, n_hidden,
    RESIDUAL: tl.constexpr, TWICE: tl.constexpr, EVERY_TILE: tl.constexpr, ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows, inner = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
    offsets = rows[:, None] * n_inner + inner[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    b2 = tl.load(b2_ptr + inner, mask=inner < n_inner, other=0.0)[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for start in range(0, BLOCK_H if ONE_TILE else n_hidden, BLOCK_H):
        units = start + tl.arange(0, BLOCK_H)
        if TWICE:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        w_mask = (inner < n_inner)[:, None] & (units < n_hidden)[None, :]
        w1 = tl.load(w1_ptr + units[None, :] * n_inner + inner[:, None], mask=w_mask, other=0.0)
        hidden = tl.dot(x, w1, input_precision="ieee")
        hidden += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0)[None, :]
        hidden = tl.where(hidden < 0, 0.0, hidden)
        hidden = tl.where((units < n_hidden)[None, :], hidden, 0.0)
        w2 = tl.load(w2_ptr + inner[:, None] * n_hidden + units[None, :], mask=w_mask, other=0.0)
        y = tl.dot(hidden, tl.trans(w2), y, input_precision="ieee")
        if EVERY_TILE:
            y += b2
    if not EVERY_TILE:
        y += b2
    if RESIDUAL:
        y += x
    tl.store(y_ptr + offsets, y, mask=mask)


def _residual(inputs, residual=True, twice=False, every_tile=False, one_tile=False):
    x, h = inputs[0], inputs[1].shape[0]
    y, block_k = torch.empty_like(x), max(16, triton.next_power_of_2(x.shape[1]))
    _residual_kernel[(triton.cdiv(x.shape[0], 16),)](
        *inputs, y, *x.shape, h, RESIDUAL=residual, TWICE=twice, EVERY_TILE=every_tile,
        ONE_TILE=one_tile, BLOCK_M=16, BLOCK_H=32, BLOCK_K=block_k,
    )  # fmt: skip
    return y


def residual_mlp__eager(x, w1, b1, w2, b2):
    return x + F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2)


def _residual_mlp(*changes):
    return solution("43_whole_mlp", *changes).residual_mlp


residual_mlp__slices_of_h_race_for_y = _residual_mlp(
    "other=0.0)[None, :]\n    for start in range(0, n_hidden, BLOCK_H):",
    "other=0.0)[None, :]\n    if tl.program_id(1) > 0:\n        y = tl.load(y_ptr + offsets, mask=mask)\n"
    "    for start in [tl.program_id(1) * BLOCK_H]:",
    "residual_kernel[(triton.cdiv(m, 16),)]", "residual_kernel[(triton.cdiv(m, 16), triton.cdiv(h, 32))]",
)  # fmt: skip
residual_mlp__0_times_infinity = _residual_mlp(
    "tl.where((units < n_hidden)[None, :], hidden, 0.0)", "hidden"
)
residual_mlp__all_units_in_one_tile = _residual_mlp(
    "BLOCK_H=32", "BLOCK_H=max(16, triton.next_power_of_2(h))"
)


def residual_mlp__no_residual(*inputs):
    return _residual(inputs, residual=False)


def residual_mlp__loads_x_for_each_tile(*inputs):
    return _residual(inputs, twice=True)


def residual_mlp__bias_in_every_tile(*inputs):
    return _residual(inputs, every_tile=True)


def residual_mlp__one_tile(*inputs):
    return _residual(inputs, one_tile=True)


def residual_mlp__added_outside(x, *weights):
    return x + _residual((x, *weights), residual=False)


def residual_mlp__subtracted_outside(x, *weights):
    return _residual((x, *weights), residual=False).sub_(-x)


def residual_mlp__relu_at_the_end(*inputs):
    return torch.relu(_residual(inputs))


_undefined = without_other("43_whole_mlp")
dw2_parts__undefined_lanes = _undefined.dw2_parts
residual_mlp__undefined_lanes = _undefined.residual_mlp
