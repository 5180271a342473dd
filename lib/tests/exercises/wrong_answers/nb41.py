"""Plausible wrong answers to the exercises of notebook 41, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution, without_other

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def rows_of_w__neighbours(tile, block_n, n_hidden):
    first = 2 * tile * block_n
    return [r for r in range(first, first + 2 * block_n) if r < 2 * n_hidden]


def rows_of_w__masked_by_row_of_w(tile, block_n, n_hidden):
    cols = range(tile * block_n, (tile + 1) * block_n)
    return [r for half in (0, n_hidden) for r in (c + half for c in cols) if r < 2 * n_hidden]


def rows_of_w__halves_rounded_up_to_tiles(tile, block_n, n_hidden):
    cols = [c for c in range(tile * block_n, (tile + 1) * block_n) if c < n_hidden]
    return cols + [c + -(-n_hidden // block_n) * block_n for c in cols]


def rows_of_w__in_pairs(tile, block_n, n_hidden):
    cols = [c for c in range(tile * block_n, (tile + 1) * block_n) if c < n_hidden]
    return [r for c in cols for r in (c, c + n_hidden)]


def rows_of_w__past_the_end_too(tile, block_n, n_hidden):
    cols = list(range(tile * block_n, (tile + 1) * block_n))
    return cols + [c + n_hidden for c in cols]


_NAN = float("nan")

x_that_shows_it__all_finite = [[1.0], [2.0]]
x_that_shows_it__its_own_nan = [[_NAN]]
x_that_shows_it__before_and_not_behind = [[_NAN], [1.0]]
x_that_shows_it__too_large = [[1.0, 2.0], [_NAN, 3.0]]
x_that_shows_it__fills_the_step = [[1.0] * 16, [_NAN] * 16]
x_that_shows_it__a_flat_list = [1.0, _NAN]


@triton.jit
def _swiglu_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, n_rows, n_hidden, n_in, SECOND_GATES: tl.constexpr,
    MASK_K: tl.constexpr, PRECISE: tl.constexpr, HAS_BIAS2: tl.constexpr, STORES_H: tl.constexpr,
    PRECISION: tl.constexpr, STABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < n_rows)[:, None] & (cols < n_hidden)[None, :]
    total1 = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    total2 = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, n_in if MASK_K else n_in // BLOCK * BLOCK, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        in_x = (rows < n_rows)[:, None] & (inner < n_in)[None, :]
        in_w = (cols < n_hidden)[None, :] & (inner < n_in)[:, None]
        x = tl.load(x_ptr + rows[:, None] * n_in + inner[None, :], mask=in_x, other=0.0)
        w_ptrs = w_ptr + cols[None, :] * n_in + inner[:, None]
        w1 = tl.load(w_ptrs, mask=in_w, other=0.0)
        w2 = tl.load(w_ptrs + n_hidden * n_in, mask=in_w, other=0.0)
        if not PRECISE:
            x, w1, w2 = x.to(tl.float16), w1.to(tl.float16), w2.to(tl.float16)
        total1 += tl.dot(x, w1, input_precision=PRECISION)
        total2 += tl.dot(x, w2, input_precision=PRECISION)
    total1 += tl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS2:
        bias2 = tl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)
        total2 += bias2.to(tl.float32)[None, :]
    if STABLE:
        y = total1 * total2 * tl.sigmoid(total2 if SECOND_GATES else total1)
    else:
        y = total1 * total2 * tl.exp(total1) / (1 + tl.exp(total1))
    places = rows[:, None] * n_hidden + cols[None, :]
    tl.store(y_ptr + places, y, mask=mask)
    if STORES_H:
        tl.store(h_ptr + places, total1, mask=mask)


def _swiglu(
    x, weight, bias, second_gates=False, mask_k=True, precise=True, bias2=True, stores_h=False,
    precision="ieee", stable=True,
):  # fmt: skip
    (n_rows, n_in), n_hidden = x.shape, weight.shape[0] // 2
    y, h = (x.new_empty(n_rows, n_hidden) for _ in range(2))
    _swiglu_kernel[(triton.cdiv(n_rows, 32), triton.cdiv(n_hidden, 32))](
        x, weight, bias, y, h, n_rows, n_hidden, n_in, SECOND_GATES=second_gates, MASK_K=mask_k,
        PRECISE=precise, HAS_BIAS2=bias2, STORES_H=stores_h, PRECISION=precision, STABLE=stable,
        BLOCK=32,
    )  # fmt: skip
    return y


def linear_swiglu__the_second_half_gates(x, weight, bias):
    return _swiglu(x, weight, bias, second_gates=True)


def linear_swiglu__whole_steps_of_k_only(x, weight, bias):
    return _swiglu(x, weight, bias, mask_k=False)


def linear_swiglu__fewer_bits(x, weight, bias):
    return _swiglu(x, weight, bias, precise=False)


def linear_swiglu__half_a_bias(x, weight, bias):
    return _swiglu(x, weight, bias, bias2=False)


def linear_swiglu__writes_half_of_h(x, weight, bias):
    return _swiglu(x, weight, bias, stores_h=True)


def linear_swiglu__tf32(x, weight, bias):
    return _swiglu(x, weight, bias, precision="tf32")


def linear_swiglu__exp_overflows(x, weight, bias):
    return _swiglu(x, weight, bias, stable=False)


def linear_swiglu__only_the_gate_in_a_kernel(x, weight, bias):
    h = F.linear(x, weight, bias)
    n_hidden = h.shape[1] // 2
    eye = torch.eye(2 * n_hidden, device=h.device, dtype=h.dtype)
    return _swiglu(h, eye, torch.zeros_like(bias))


def linear_swiglu__eager(x, weight, bias):
    x1, x2 = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(x1) * x2


@triton.jit
def _reglu_kernel(
    dy_ptr, h_ptr, dh_ptr, partial_ptr, n_rows, n_hidden, stride_dym, stride_dyn, PART: tl.constexpr,
    OTHER: tl.constexpr, NO_SLOPE: tl.constexpr, AT_ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (cols < n_hidden)
    offsets = rows * 2 * n_hidden + cols
    dy = tl.load(dy_ptr + rows * stride_dym + cols * stride_dyn, mask=mask, other=OTHER)
    x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask, other=OTHER).to(tl.float32)
    sums = partial_ptr + tl.program_id(0) * 2 * n_hidden + cols
    if PART != 2:
        dx1 = tl.where(x2 > 0, dy.to(tl.float32) * x2, 0.0)
        tl.store(dh_ptr + offsets, dx1, mask=mask)
        tl.store(sums, tl.sum(dx1, axis=0)[None, :], mask=cols < n_hidden)
    if PART != 1:
        x1 = tl.load(h_ptr + offsets, mask=mask, other=OTHER).to(tl.float32)
        dx2 = dy.to(tl.float32) * x1
        if not NO_SLOPE:
            dx2 = tl.where((x2 > 0) | (AT_ZERO & (x2 == 0)), dx2, 0.0)
        tl.store(dh_ptr + n_hidden + offsets, dx2, mask=mask)
        tl.store(sums + n_hidden, tl.sum(dx2, axis=0)[None, :], mask=cols < n_hidden)


def _reglu(dy, h, parts=(0,), other=0.0, no_slope=False, at_zero=False, rows_summed=None):
    (n_rows, n_hidden), dh = dy.shape, torch.empty_like(h)
    grid = (triton.cdiv(n_rows, 64), triton.cdiv(n_hidden, 64))
    partial = torch.empty(grid[0], 2 * n_hidden, device=h.device)
    for part in parts:
        _reglu_kernel[grid](
            dy, h, dh, partial, n_rows, n_hidden, *dy.stride(),
            PART=part, OTHER=other, NO_SLOPE=no_slope, AT_ZERO=at_zero, BLOCK=64,
        )  # fmt: skip
    return dh, partial[:rows_summed].sum(0)


def reglu_backward__in_series(dy, h):
    return _reglu(dy, h, parts=(1, 2))


def reglu_backward__reads_dh_again(dy, h):
    dh = _reglu(dy, h)[0]
    return dh, dh.float().sum(0)


def reglu_backward__padding_is_summed(dy, h):
    return _reglu(dy, h, other=1.0)


def reglu_backward__one_strip_only(dy, h):
    return _reglu(dy, h, rows_summed=1)


def reglu_backward__no_slope(dy, h):
    return _reglu(dy, h, no_slope=True)


def reglu_backward__a_slope_at_zero(dy, h):
    return _reglu(dy, h, at_zero=True)


def reglu_backward__makes_dy_contiguous_first(dy, h):
    return _reglu(dy.contiguous(), h)


def reglu_backward__taken_as_contiguous(dy, h):
    if dy.t().is_contiguous():  # its numbers in the order in which they lie in memory
        dy = dy.t().reshape(dy.shape)
    return _reglu(dy, h)


def reglu_backward__copies_dy_first(dy, h):
    return _reglu(dy.clone(), h)


def reglu_backward__halves_exchanged(dy, h):
    dh, db = _reglu(dy, h)
    return dh.roll(h.shape[1] // 2, 1), db.roll(h.shape[1] // 2)


_MASKED = "tl.where(x2 <= 0, 0.0, dy * x1)"
reglu_backward__a_mask_times_dy = solution(
    "41_linear_geglu", _MASKED, "dy * x1 * (x2 > 0).to(tl.float32)"
).reglu_backward
reglu_backward__nan_taken_for_a_slope_of_0 = solution(
    "41_linear_geglu", _MASKED, "tl.where(x2 > 0, dy * x1, 0.0)"
).reglu_backward
reglu_backward__relu_drops_nan = solution(
    "41_linear_geglu", "tl.where(x2 <= 0, 0.0, x2)", "tl.where(x2 > 0, x2, 0.0)"
).reglu_backward
linear_swiglu__rounds_the_sum_before_the_bias = solution(
    "41_linear_geglu",
    "x1, x2 = total1 + bias1[None, :], total2 + bias2[None, :]",
    "x1 = total1.to(x.dtype).to(tl.float32) + bias1[None, :]\n"
    "    x2 = total2.to(x.dtype).to(tl.float32) + bias2[None, :]",
).linear_swiglu
linear_swiglu__adds_the_bias_in_16_bits = solution(
    "41_linear_geglu",
    "x1, x2 = total1 + bias1[None, :], total2 + bias2[None, :]",
    "x1 = (total1.to(x.dtype) + bias1[None, :].to(x.dtype)).to(tl.float32)\n"
    "    x2 = (total2.to(x.dtype) + bias2[None, :].to(x.dtype)).to(tl.float32)",
).linear_swiglu


reglu_backward__tiles_race_for_db = solution(
    "41_linear_geglu",
    "partial_ptr + tl.program_id(0) * 2 * n_hidden + cols", "partial_ptr + cols",
    "tl.store(sums, tl.sum", "tl.store(sums, tl.load(sums, mask=cols < n_hidden) + tl.sum",
    "tl.store(sums + n_hidden, tl.sum",
    "tl.store(sums + n_hidden, tl.load(sums + n_hidden, mask=cols < n_hidden) + tl.sum",
    "torch.empty(grid[0], 2", "torch.zeros(1, 2",
).reglu_backward  # fmt: skip


reglu_backward__parts_rounded_to_the_dtype_of_h = solution(
    "41_linear_geglu",
    "partial = torch.empty(grid[0], 2 * n_hidden, device=h.device)",
    "partial = torch.empty(grid[0], 2 * n_hidden, dtype=h.dtype, device=h.device)",
).reglu_backward


def reglu_backward__eager(dy, h):
    x1, x2 = h.chunk(2, dim=-1)
    dh = torch.cat([dy * torch.relu(x2), torch.where(x2 > 0, dy * x1, 0)], dim=-1)
    return dh, dh.sum(0)


_undefined = without_other("41_linear_geglu")
linear_swiglu__undefined_lanes = _undefined.linear_swiglu
reglu_backward__undefined_lanes = _undefined.reglu_backward
