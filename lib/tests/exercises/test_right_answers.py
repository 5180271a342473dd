"""Right answers that differ from the solution in what the text leaves open."""

import functools
import itertools

from lib import machine
from lib.exercises import check
from lib.exercises.undefined import compare
from lib.measure import cheats
from lib.ops import add_relu
from lib.tests.exercises.wrong_answers import solution
from lib.tests.exercises.wrong_answers.nb04 import changed

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import nn


class _FrozenParameters(nn.Module):
    def __init__(self, mean, deviation):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(mean), requires_grad=False)
        self.deviation = nn.Parameter(torch.tensor(deviation), requires_grad=False)

    def forward(self, dense):
        return ((dense - self.mean) / self.deviation).clamp(-5.0, 5.0)


@triton.jit
def _silu_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # no `other`: what it leaves undefined is stored nowhere
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements).to(tl.float32)
    tl.store(y_ptr + offsets, x / (1 + tl.exp(-x)), mask=offsets < n_elements)


def _silu_into_zeros(x):
    y = torch.zeros_like(x)
    _silu_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK_SIZE=128)
    return y


@triton.jit
def _silu_one_by_one_kernel(x_ptr, y_ptr, n_elements, EACH: tl.constexpr):
    total = 0.0
    for k in range(EACH):
        i = tl.program_id(0) * EACH + k
        x = tl.load(x_ptr + i, mask=i < n_elements, other=0.0).to(tl.float32)
        total += x * 0  # what an `other` of 0 is for
        tl.store(y_ptr + i, x / (1 + tl.exp(-x)) + total, mask=i < n_elements)


def _silu_one_by_one(x):
    y = torch.empty_like(x)
    _silu_one_by_one_kernel[(triton.cdiv(x.numel(), 4),)](x, y, x.numel(), EACH=4)
    return y


def _clip_by_where(x, limit):
    norm = torch.linalg.vector_norm(x.detach())
    return torch.where(norm > limit, x * (limit / norm.clamp_min(1e-30)), x)


def _step_by_the_largest(parameters, gradients, lr):
    ok = torch.stack([g.abs().amax() for g in gradients]).amax() < torch.inf
    return [torch.where(ok, p - lr * g, p) for p, g in zip(parameters, gradients)]


def _faster_by_numpy(a_us, b_us):
    enough = min(len(a_us), len(b_us)) >= 10
    return bool(enough and np.percentile(b_us, 80) < np.percentile(a_us, 20))


def _bytes_by_one_unique(rows, dim):
    return len((rows + 2**32 * torch.arange(rows.shape[1])).unique()) * dim * 4


def _backward_pair_by_pair(dpairs, vectors):
    dvectors, n = torch.zeros_like(vectors), vectors.shape[1]
    for k, (a, b) in enumerate(itertools.combinations(range(n), 2)):
        dvectors[:, a] += dpairs[:, k, None] * vectors[:, b]
        dvectors[:, b] += dpairs[:, k, None] * vectors[:, a]
    return dvectors


class _MaskedFill(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("n_missing", torch.zeros(1, dtype=torch.int64))

    def forward(self, dense, sparse):
        self.n_missing = self.n_missing + sparse.lt(0).sum()
        return self.model(dense.masked_fill(dense.isnan(), 0.0), sparse)


_ENDS = """    x = tl.load(x_ptr + first + cols, mask=ends)
    tl.store(y_ptr + first + cols, -x, mask=ends)
"""
_one_end_and_the_other = solution(
    "32_softmax_any_width",
    _ENDS,
    _ENDS.replace("=ends", "=ends & (cols < V)") + _ENDS.replace("=ends", "=ends & (cols >= V)"),
).negate_kernel

_gate_by_a_product_of_the_mask = solution(
    "34_bias_gelu_dropout_add",
    "dz = dy * tl.where(bits >= threshold, scale, 0.0)",
    "dz = dy * (bits >= threshold).to(tl.float32) * scale",
).dropped_gate_backward


def _place_in_bools(step, n_slots):
    turn, slot = divmod(2 * step + 1, n_slots)
    return slot, turn % 2 == 1, turn % 2 == 0


def _capped_dq_one_key_at_a_time(q, k, v, o, lse, do, cap):
    scale = q.shape[-1] ** -0.5
    dq = torch.zeros_like(q)
    for key, value in zip(k, v):
        t = torch.tanh(scale * (q @ key) / cap)
        slope = torch.exp(cap * t - lse[:, 0]) * (1 - t * t)
        dq += scale * (slope * (do * (value - o)).sum(1))[:, None] * key
    return dq


class _DtypesOfEmpty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        y = add_relu._forward(x, bias)
        ctx.save_for_backward(y)
        ctx.empty = x.new_empty(0), bias.new_empty(0)
        return y

    @staticmethod
    @add_relu.host.once
    def backward(ctx, dy):
        dtypes = [t.dtype for t in ctx.empty]
        flags = ctx.needs_input_grad
        return add_relu._backward(dy, *ctx.saved_tensors, needs_grad=flags, dtypes=dtypes)


def _bias_first(x, bias):
    for name, t in (("bias", bias), ("x", x)):
        if not (isinstance(t, torch.Tensor) and t.is_floating_point()):
            raise TypeError(f"{name}: a floating-point tensor, please")
    if x.dtype != bias.dtype and not {x.itemsize, bias.itemsize} <= {2, 4}:
        raise TypeError(f"bias: {bias.dtype} beside {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x: no dimension")
    if bias.shape != x.shape[-1:] or bias.device != x.device:
        raise ValueError(f"bias: {tuple(bias.shape)} on {bias.device}")


_RIGHT = {
    # an optimizer skips what has no gradient
    "parameters that need no gradient": ("11.4", _FrozenParameters),
    "into zeros": ("00.3", _silu_into_zeros),
    "quantiles of NumPy": ("02.1", _faster_by_numpy),
    "one wait, behind all runs": ("02.3", functools.partial(cheats.honest, n=50)),
    "tables told apart by 2³²": ("10.3", _bytes_by_one_unique),
    "pair by pair": ("10.4", _backward_pair_by_pair),
    "a bias gradient rounded by PyTorch": (
        "03.4",
        solution(
            "03_add_relu",
            "torch.empty(n_cols, dtype=y.dtype",
            "torch.empty(n_cols, dtype=torch.float32",
            "return dx, dbias",
            "return dx, dbias.to(y.dtype)",
        ).leaky_gradients,
    ),
    "rounds of the grid, counted": (
        "04.1",
        changed(
            solution("04_cuda_by_load_inline").stride_kernel,
            "for (int64_t i = first; i < n; i += n_threads) {",
            "for (size_t k = 0; k * n_threads + first < n; ++k) {\n    const auto i = k * n_threads + first;",
        ),
    ),
    "devices by their numbers": (
        "04.3",
        changed(
            solution("04_cuda_by_load_inline").safe_source,
            "scale.device() == x.device()",
            "scale.is_cuda() && x.get_device() == scale.get_device()",
        ),
    ),
    "the largest gradient": ("11.2", _step_by_the_largest),
    "where, with a norm above 0": ("05.3", _clip_by_where),
    "a new tensor in each call": ("12.1", _MaskedFill),
    "one end of a row, then the other": ("32.2", _one_end_and_the_other),
    "key after key": ("48.1", _capped_dq_one_key_at_a_time),
    "a page's number by a masked load": (
        "48.3",
        solution(
            "48_attention_backward",
            "tl.cdiv(length, PAGE)",
            "length // PAGE + 1",
            "tl.load(table_ptr + text * n_slots + slot)",
            "tl.load(table_ptr + text * n_slots + slot, mask=slot * PAGE < length, other=0)",
        ).attend_pages,
    ),
    "a row of 32 bits, which the grid bounds": (
        "33.3",
        changed(solution("33_lora_epilogue").mended_source, "const int64_t row", "const int row"),
    ),
    "a loop that asks each for its device": (
        "33.3",
        changed(
            solution("33_lora_epilogue").mended_source,
            "TORCH_CHECK_VALUE(x.is_cuda() && delta.device() == x.device() && bias.device() == x.device(),",
            "for (const torch::Tensor& t : {x, delta, bias})\n"
            "    TORCH_CHECK_VALUE(t.is_cuda() && t.device() == x.device(),",
        ),
    ),
    "a product with the mask, step by step": ("34.3", _gate_by_a_product_of_the_mask),
    "phases as bools": ("44.1", _place_in_bools),
    "rows in eight pieces": (
        "24.2",
        changed(
            solution("24_cuda_blocks_and_clusters").dbias_kernel,
            "row = threadIdx.y; row < n_rows; row += 8",
            "row = (n_rows + 7) / 8 * threadIdx.y; "
            "row < min(n_rows, (n_rows + 7) / 8 * (threadIdx.y + 1)); ++row",
        ),
    ),
    "a loop over the warps' sums": (
        "24.4",
        changed(
            solution("24_cuda_blocks_and_clusters").normalize_kernel,
            "total = sum_of_warp(lane < n_warps ? sums[lane] : 0.f);",
            "total = 0.f;\n  for (int k = 0; k < n_warps; ++k) total += sums[k];",
        ),
    ),
    "a look at addresses, and scalars where they are odd": (
        "24.1",
        changed(
            solution("24_cuda_blocks_and_clusters").wide_kernel,
            "const int64_t n_wide = n / 4,",
            "const bool aligned = (uintptr_t(x) | uintptr_t(residual) | uintptr_t(y)) % 16 == 0;\n"
            "  for (int64_t i = 4 * t; !aligned && i < n && i < 4 * t + 4; ++i)\n"
            "    y[i] = x[i] + residual[i] < 0.f ? 0.f : x[i] + residual[i];\n"
            "  const int64_t n_wide = aligned ? n / 4 : 0,",
            "if (last < n) {",
            "if (aligned && last < n) {",
        ),
    ),
    "bias looked at first": ("25.1", _bias_first),
    "dtypes kept by an empty tensor of each": ("25.4", _DtypesOfEmpty),
    "a float4 by its number": (
        "31.5",
        changed(
            solution("31_gelu").vector_source,
            "*reinterpret_cast<const float4*>(x + i)",
            "reinterpret_cast<const float4*>(x)[i / 4]",
            "*reinterpret_cast<float4*>(y + i) = v",
            "reinterpret_cast<float4*>(y)[i / 4] = make_float4(v.x, v.y, v.z, v.w)",
        ),
    ),
}


@pytest.mark.parametrize("what", _RIGHT)
def test_a_right_answer_is_right(what):
    verdict = check(*_RIGHT[what])
    assert verdict.status == "right", verdict


def test_a_masked_load_of_one_number_keeps_its_other():
    compare(
        _silu_one_by_one,
        torch.nn.functional.silu,
        torch.randn(6, device=machine.device()),
        name="6 numbers by 4",
    )
