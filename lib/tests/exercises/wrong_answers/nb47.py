"""Plausible wrong answers to the exercises of notebook 47, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import (
    beside_an_empty_kernel,
    solution,
    transposed_taken_as_contiguous,
    without_other,
)

import torch
import torch.nn.functional as F

NOTEBOOK = "47_quantized_linear"


def weight_bytes__scales_forgotten(n_out, n_in, group, zero_points):
    return n_out * n_in / 2


def weight_bytes__a_byte_a_number(n_out, n_in, group, zero_points):
    return n_out * n_in + n_out * n_in // group * (3 if zero_points else 2)


def weight_bytes__a_scale_for_each_row(n_out, n_in, group, zero_points):
    return n_out * n_in / 2 + n_out * (3 if zero_points else 2)


def weight_bytes__zero_points_of_four_bits(n_out, n_in, group, zero_points):
    return n_out * n_in / 2 + n_out * n_in / group * (2.5 if zero_points else 2)


def weight_bytes__bits(n_out, n_in, group, zero_points):
    return 8 * (n_out * n_in // 2 + n_out * n_in // group * (3 if zero_points else 2))


# --- 47.2 ----------------------------------------------------------------------------------------------------


def _group(*changes):
    return solution(NOTEBOOK, *changes).any_group


_AT = "inner // GROUP * n_cols"
any_group__boundary_one_too_early = _group(
    _AT, "tl.minimum((inner + 1) // GROUP, n_inner // GROUP - 1) * n_cols"
)
any_group__boundary_one_too_late = _group(_AT, "tl.maximum(inner - 1, 0) // GROUP * n_cols")
any_group__the_scale_of_the_steps_first_number = _group(_AT, "(inner * 0 + k) // GROUP * n_cols")
any_group__a_group_is_a_step = _group(
    _AT, "tl.minimum(inner * 0 + k // BLOCK_K, n_inner // GROUP - 1) * n_cols"
)
any_group__groups_from_the_step_s_start = _group(_AT, "(inner - k) // GROUP * n_cols")
any_group__scales_transposed = _group(
    "inner // GROUP * n_cols + cols", "cols * (n_inner // GROUP) + inner // GROUP"
)
any_group__eight_forgotten = _group("(q - 8) * scale", "q * scale")
any_group__scale_forgotten = _group("(q - 8) * scale.to(tl.float32)", "(q - 8)")
any_group__eight_after_the_scale = _group(
    "(q - 8) * scale.to(tl.float32)", "q * scale.to(tl.float32) - 8"
)
any_group__no_mask_along_k = _group("(rows < n_rows) & (inner < n_inner)", "(rows < n_rows)")
any_group__tf32 = _group('input_precision="ieee"', 'input_precision="tf32"')
any_group__last_step_left_out = _group(
    "range(0, n_inner, BLOCK_K)", "range(0, n_inner // BLOCK_K * BLOCK_K, BLOCK_K)"
)
any_group__sums_in_the_dtype_of_y = _group(
    "total = tl.dot(x, w.T, total, input_precision=\"ieee\")",
    "total = tl.dot(x, w.T, total, input_precision=\"ieee\").to(x.dtype).to(tl.float32)",
)  # fmt: skip


def _eager(x, numbers, scales, group):
    steps = scales.t().repeat_interleave(group, 1)
    return F.linear(x, (numbers.to(x.dtype) - 8) * steps)


any_group__eager = _eager
any_group__eager_beside_a_kernel = beside_an_empty_kernel(_eager)


# --- 47.3 ----------------------------------------------------------------------------------------------------


def _zeros(*changes):
    return solution(NOTEBOOK, *changes).to_int4_with_zeros


to_int4_with_zeros__range_without_zero = _zeros(
    "grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)", "grouped.amin(2), grouped.amax(2)"
)
to_int4_with_zeros__zero_is_not_kept = _zeros(
    "grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)",
    "grouped.amin(2), grouped.amax(2)",
    "zeros = torch.round(-low / steps)",
    "zeros = torch.round(-low / steps).clamp(0, 15)",
)
to_int4_with_zeros__no_step_below_a_constant = _zeros(
    "(high - low) / 15", "((high - low) / 15).clamp(min=1e-5)"
)
to_int4_with_zeros__sixteen_steps = _zeros("(high - low) / 15", "(high - low) / 16")
to_int4_with_zeros__even_around_zero = _zeros(
    "(high - low) / 15", "torch.maximum(high, -low) / 7", "torch.round(-low / steps)", "torch.full_like(low, 8)"
)  # fmt: skip
to_int4_with_zeros__cut_and_not_rounded = _zeros(
    "torch.round(grouped / steps[..., None])", "torch.floor(grouped / steps[..., None])"
)
to_int4_with_zeros__zero_point_cut = _zeros("torch.round(-low / steps)", "(-low / steps).floor()")
to_int4_with_zeros__zero_is_between_two = _zeros(
    "torch.round(grouped / steps[..., None]) + zeros[..., None]",
    "torch.round((grouped - low[..., None]) / steps[..., None])",
)
to_int4_with_zeros__nan_of_zeros = _zeros("torch.where(scales == 0, 1, scales)", "scales")
to_int4_with_zeros__sixteen_overflows = _zeros("numbers.clamp(0, 15)", "numbers")
to_int4_with_zeros__sign_of_the_zero_point = _zeros("+ zeros[..., None]", "- zeros[..., None]")
to_int4_with_zeros__transposed = _zeros("scales.t().contiguous(), zeros.t()", "scales, zeros")
to_int4_with_zeros__of_the_row = _zeros(
    "grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)",
    "(t(1, True).values.expand(grouped.shape[:2]) for t in (weight.min, weight.max))",
    "scales = (high", "low, high = low.clamp(max=0), high.clamp(min=0)\n    scales = (high",
)  # fmt: skip


# --- 47.4 ----------------------------------------------------------------------------------------------------


def _qlora(*changes):
    return solution(NOTEBOOK, *changes).qlora


_W = "w = (q.to(tl.float32) * scale.to(tl.float32)[:, None]).to(dy.dtype)"
qlora__scale_forgotten_in_dx = _qlora(_W, "w = q.to(tl.float32).to(dy.dtype)")
qlora__scale_of_the_first_row_after_the_loop = _qlora(
    _W, "w = q.to(tl.float32).to(dy.dtype)",
    "    tl.store(dx_ptr", "    total *= tl.load(scales_ptr).to(tl.float32)\n    tl.store(dx_ptr",
)  # fmt: skip
qlora__scales_along_k = _qlora(
    "scale = tl.load(scales_ptr + cols, mask=cols < n_cols, other=0.0)\n        w",
    "scale = tl.load(scales_ptr + inner % n_cols)\n        w",
    "scale.to(tl.float32)[:, None]", "scale.to(tl.float32)",
)  # fmt: skip
qlora__dy_as_if_contiguous = _qlora("*dy.stride()", "dy.shape[1], 1")
qlora__transposed_dy_as_contiguous = transposed_taken_as_contiguous(solution(NOTEBOOK).qlora)
qlora__without_alpha_forward = _qlora("y + alpha * (x", "y + (x")
qlora__without_alpha_in_du = _qlora("du = ctx.alpha * (dy @ lora_b)", "du = dy @ lora_b")
qlora__without_alpha_in_b = _qlora("dlora_b = ctx.alpha * (", "dlora_b = (")
qlora__dx_of_w_alone = _qlora("return dx + du @ lora_a", "return dx")
qlora__dx_of_lora_alone = _qlora("return dx + du @ lora_a", "return du @ lora_a")
qlora__tf32 = _qlora('input_precision="ieee"', 'input_precision="tf32"')
qlora__a_load_without_other = without_other(NOTEBOOK).qlora
qlora__scale_in_bfloat16_twice = _qlora(
    "q.to(tl.float32) * scale.to(tl.float32)[:, None]",
    "q.to(tl.float32) * scale.to(tl.float32).to(tl.float16).to(tl.float32)[:, None]",
)


def qlora__eager(x, numbers, scales, lora_a, lora_b, alpha):
    weight = numbers.to(x.dtype) * scales[:, None]
    return F.linear(x, weight) + alpha * (x @ lora_a.t()) @ lora_b.t()


qlora__dx_by_a_weight_of_floats = _qlora(
    "dx_kernel[grid](dy, numbers, scales, dx, *sizes, **TILE)",
    "dx = dy @ (numbers.to(dy.dtype) * scales[:, None])",
)
qlora__keeps_a_weight_of_floats = _qlora(
    "ctx.alpha = alpha", "ctx.alpha, ctx.weight = alpha, numbers.to(x.dtype) * scales[:, None]"
)
_DX_DOT = 'total = tl.dot(dy, w, total, input_precision="ieee")'
qlora__dx_rounded_after_each_block = _qlora(_DX_DOT, f"{_DX_DOT}.to(dy.dtype).to(tl.float32)")
_Y_DOT = 'total = tl.dot(x, q.to(tl.float32).to(x.dtype).T, total, input_precision="ieee")'
qlora__y_rounded_after_each_block = _qlora(_Y_DOT, f"{_Y_DOT}.to(x.dtype).to(tl.float32)")
# in float32 like the kernels, so that only the floats of W give them away
_Y_BY_HALVES = """
        for rows in torch.arange(len(numbers)).chunk(2):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            w = (numbers[part].to(x.dtype) * scales[part, None]).float()
            y[:, part] = (x.float() @ w.t()).to(x.dtype)
"""
_DX_BY_PIECES = """
        dx = torch.zeros_like(x, dtype=torch.float32)
        for q, s, d in zip(numbers.split(16), scales.split(16), dy.split(16, 1)):
            dx += d.float() @ (q.to(d.dtype) * s[:, None]).float()
        dx = dx.to(x.dtype)
"""
_SAVE, _DU = "        ctx.save_for_backward", "        du = ctx.alpha"
qlora__w_in_pieces_beside_kernels = _qlora(_SAVE, _Y_BY_HALVES + _SAVE, _DU, _DX_BY_PIECES + _DU)
qlora__dx_by_pieces_beside_a_kernel = _qlora(_DU, _DX_BY_PIECES + _DU)
_HALF_KERNEL = """
@triton.jit
def half_kernel(numbers_ptr, scales_ptr, w_ptr, n, n_inner, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    q = tl.load(numbers_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + offsets // n_inner, mask=offsets < n, other=0.0)
    tl.store(w_ptr + offsets, q * scale.to(tl.float32), mask=offsets < n)


"""
_Y_BY_WRITTEN_HALVES = """
        for part in (slice(None, len(numbers) // 2), slice(len(numbers) // 2, None)):
            w = torch.empty(numbers[part].shape, dtype=x.dtype, device=x.device)
            if w.numel():
                sizes = w.numel(), x.shape[1]
                half_kernel[(triton.cdiv(w.numel(), 4096),)](numbers[part], scales[part], w, *sizes, 4096)
                y[:, part] = (x.float() @ w.t().float()).to(x.dtype)
"""
_CLASS = "class QLoRA"
qlora__halves_of_w_written_by_a_kernel = _qlora(
    _CLASS, _HALF_KERNEL + _CLASS, _SAVE, _Y_BY_WRITTEN_HALVES + _SAVE
)


def qlora__no_gradient_for_x(x, numbers, scales, lora_a, lora_b, alpha):
    return solution(NOTEBOOK).qlora(x.detach(), numbers, scales, lora_a, lora_b, alpha)


def qlora__w_is_cut_off(x, numbers, scales, lora_a, lora_b, alpha):
    with torch.no_grad():
        y = solution(NOTEBOOK).qlora(x, numbers, scales, lora_a, lora_b, 0.0)
    return y + alpha * (x @ lora_a.t()) @ lora_b.t()
