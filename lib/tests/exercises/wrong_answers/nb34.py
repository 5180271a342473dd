"""Plausible wrong answers to the exercises of notebook 34, named <answer>__<why>: each must be rejected."""

import math

from lib.ops.bias_gelu_dropout_add import keep_mask
from lib.tests.exercises.wrong_answers import solution

import torch
import triton
import triton.language as tl

rows_that_overflow__still_fits = 2**31 // 4096
rows_that_overflow__unsigned = 2**32 // 4096 + 1
rows_that_overflow__not_rows = 2**31
rows_that_overflow__float = 524289.0


@triton.jit
def _flags_kernel(
    seed_ptr, out_ptr, n_elements, threshold, LOCAL: tl.constexpr, SWAPPED: tl.constexpr,
    ABOVE: tl.constexpr, N_ROUNDS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_SIZE
    seed, calls = tl.load(seed_ptr), tl.arange(0, BLOCK_SIZE // 8)
    if LOCAL:
        seed += tl.program_id(0)
    else:
        calls += first // 8
    a, b, c, d = tl.randint4x(seed, calls, N_ROUNDS)
    words = (
        tl.join(tl.join(a, b), tl.join(c, d)) if SWAPPED else tl.join(tl.join(a, c), tl.join(b, d))
    )
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK_SIZE,))
    offsets = first + tl.arange(0, BLOCK_SIZE)
    keep = bits > threshold if ABOVE else bits >= threshold
    tl.store(out_ptr + offsets, keep, mask=offsets < n_elements)


def _flags(
    n_elements, p, seed, block_size, local=False, swapped=False, n_rounds=7, above=False, whole=round,
):  # fmt: skip
    out = torch.empty(n_elements, dtype=torch.bool, device=seed.device)
    _flags_kernel[(triton.cdiv(n_elements, block_size),)](
        seed, out, n_elements, whole(65536 * p),
        LOCAL=local, SWAPPED=swapped, ABOVE=above, N_ROUNDS=n_rounds, BLOCK_SIZE=block_size,
    )  # fmt: skip
    return out


def _packed(flags):
    """Eight flags a byte, the lowest bit first, zeros beyond the end."""
    rows = torch.nn.functional.pad(flags.int(), (0, -len(flags) % 8)).view(-1, 8)
    return (rows << torch.arange(8, device=flags.device)).sum(1).to(torch.uint8)


def keep_bits__by_place_in_the_tile(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, local=True))


def keep_bits__lanes_in_another_order(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, swapped=True))


def keep_bits__ten_rounds(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, n_rounds=10))


def keep_bits__dropped_rather_than_kept(n_elements, p, seed, block_size):
    return _packed(~_flags(n_elements, p, seed, block_size))


def keep_bits__equal_to_the_threshold_dropped(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, above=True))


def keep_bits__threshold_rounded_down(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, whole=int))


def keep_bits__threshold_rounded_up(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, whole=math.ceil))


def keep_bits__ten_rounds_in_another_order(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size, swapped=True, n_rounds=10))


@triton.jit
def _rand_kernel(seed_ptr, out_ptr, n_elements, p, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    keep = tl.rand(tl.load(seed_ptr), offsets) >= p
    tl.store(out_ptr + offsets, keep, mask=offsets < n_elements)


def keep_bits__a_call_for_each_element(n_elements, p, seed, block_size):
    out = torch.empty(n_elements, dtype=torch.bool, device=seed.device)
    grid = (triton.cdiv(n_elements, block_size),)
    _rand_kernel[grid](seed, out, n_elements, p, BLOCK_SIZE=block_size)
    return _packed(out)


def keep_bits__integers(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, block_size)).to(torch.int8)


def keep_bits__seed_read_by_python(n_elements, p, seed, block_size):
    again = torch.tensor([seed.item()], device=seed.device)
    return _packed(_flags(n_elements, p, again, block_size))


def keep_bits__seed_read_as_an_int(n_elements, p, seed, block_size):
    again = torch.tensor([int(seed)], device=seed.device)
    return _packed(_flags(n_elements, p, again, block_size))


def keep_bits__seed_read_by_its_element(n_elements, p, seed, block_size):
    again = torch.tensor([seed[0].item()], device=seed.device)
    return solution("34_bias_gelu_dropout_add").keep_bits(n_elements, p, again, block_size)


def keep_bits__no_kernel(n_elements, p, seed, block_size):
    return _packed(keep_mask((n_elements,), p, seed, seed.device))


keep_bits__highest_bit_first = solution(
    "34_bias_gelu_dropout_add", "<< lanes[None, :]", "<< (7 - lanes[None, :])"
).keep_bits
keep_bits__bits_beyond_the_end = solution(
    "34_bias_gelu_dropout_add",
    " & (8 * calls[:, None] + lanes[None, :] < n_elements)",
    "",
).keep_bits


def keep_bits__tiles_of_its_own_choice(n_elements, p, seed, block_size):
    return _packed(_flags(n_elements, p, seed, 1024))


def keep_bits__a_byte_each(n_elements, p, seed, block_size):
    return _flags(n_elements, p, seed, block_size).to(torch.uint8)


def _dropped_gate(old, new):
    return solution("34_bias_gelu_dropout_add", old, new).dropped_gate_backward


dropped_gate_backward__no_scale = _dropped_gate(
    "round(65536 * p), 1 / (1 - p))", "round(65536 * p), 1.0)"
)
dropped_gate_backward__threshold_rounded_down = _dropped_gate(
    "seed, n, round(65536 * p), 1 / (1 - p))", "seed, n, int(65536 * p), 1 / (1 - p))"
)
dropped_gate_backward__strides_of_dy_ignored = _dropped_gate("(dy.contiguous(), x", "(dy, x")
dropped_gate_backward__gradients_in_dy_s_layout = _dropped_gate(
    "dx, dgate, n = torch.empty_like(x), torch.empty_like(gate),",
    "dx, dgate, n = torch.empty_like(dy), torch.empty_like(dy),",
)
dropped_gate_backward__gradients_swapped = _dropped_gate("return dx, dgate", "return dgate, dx")
dropped_gate_backward__dgate_not_dropped = _dropped_gate("dz * x, mask", "dy * scale * x, mask")
dropped_gate_backward__mask_turned_round = _dropped_gate(
    "dz = dy * tl.where(bits >= threshold", "dz = dy * tl.where(bits < threshold"
)
dropped_gate_backward__nan_of_a_dropped_dy_is_lost = _dropped_gate(
    "dz = dy * tl.where(bits >= threshold, scale, 0.0)",
    "dz = tl.where(bits >= threshold, dy * scale, 0.0)",
)
_OF_A_DROPPED_DY = "tl.where(bits >= threshold, dz * {}, tl.where(dy != dy, dy, 0.0)), mask"
dropped_gate_backward__nan_of_dy_alone_is_kept = solution(
    "34_bias_gelu_dropout_add",
    "dz * gate, mask", _OF_A_DROPPED_DY.format("gate"),
    "dz * x, mask", _OF_A_DROPPED_DY.format("x"),
).dropped_gate_backward  # fmt: skip
dropped_gate_backward__infinity_of_a_dropped_dy_is_lost = _dropped_gate(
    "dz = dy * tl.where(bits >= threshold, scale, 0.0)",
    "dz = tl.where(bits >= threshold, dy * scale, tl.where(dy != dy, dy, 0.0))",
)
dropped_gate_backward__swapped_and_no_scale = _dropped_gate(
    "dx_ptr + offsets, dz * gate, mask=mask)\n    tl.store(dgate_ptr + offsets, dz * x",
    "dx_ptr + offsets, dz / scale * x, mask=mask)\n    tl.store(dgate_ptr + offsets, dz / scale * gate",
)
dropped_gate_backward__by_place_in_the_tile = _dropped_gate(
    "tl.load(seed_ptr), first // 8 + tl.arange(0, BLOCK_SIZE // 8), 7",
    "tl.load(seed_ptr) + tl.program_id(0), tl.arange(0, BLOCK_SIZE // 8), 7",
)


def dropped_gate_backward__seed_read_by_python(dy, x, gate, p, seed):
    again = torch.tensor([seed.item()], device=seed.device)
    return solution("34_bias_gelu_dropout_add").dropped_gate_backward(dy, x, gate, p, again)


def dropped_gate_backward__eager(dy, x, gate, p, seed):
    dz = torch.where(keep_mask(x.shape, p, seed, x.device), dy, 0) / (1 - p)
    return dz * gate, dz * x


@triton.jit
def _drop_path_kernel(
    x_ptr, branch_ptr, y_ptr, keep_ptr, n_elements, n_cols, scale,
    PRODUCT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    branch = tl.load(branch_ptr + offsets, mask=mask).to(tl.float32)
    keep = tl.load(keep_ptr + offsets // n_cols, mask=mask)
    added = branch * scale * keep if PRODUCT else tl.where(keep != 0, branch * scale, 0.0)
    tl.store(y_ptr + offsets, x + added, mask=mask)


def _drop_path(x, branch, keep, scale, per_row=True, product=False):
    y, n = torch.empty_like(x), x.numel()
    _drop_path_kernel[(triton.cdiv(n, 1024),)](
        x, branch, y, keep.to(torch.int8), n, x.shape[1] if per_row else 1, scale, product, BLOCK_SIZE=1024
    )  # fmt: skip
    return y


def drop_path__no_scale(x, branch, p, seed):
    return _drop_path(x, branch, keep_mask(x.shape[:1], p, seed, x.device), 1.0)


def drop_path__element_by_element(x, branch, p, seed):
    keep = keep_mask(x.shape, p, seed, x.device).flatten()
    return _drop_path(x, branch, keep, 1 / (1 - p), per_row=False)


def drop_path__first_element_of_each_row(x, branch, p, seed):
    keep = keep_mask(x.shape, p, seed, x.device)[:, 0].contiguous()
    return _drop_path(x, branch, keep, 1 / (1 - p))


def drop_path__the_mask_by_pytorch(x, branch, p, seed):
    return _drop_path(x, branch, keep_mask(x.shape[:1], p, seed, x.device), 1 / (1 - p))


def drop_path__a_product_lets_nan_through(x, branch, p, seed):
    keep = keep_mask(x.shape[:1], p, seed, x.device)
    return _drop_path(x, branch, keep, 1 / (1 - p), product=True)


@triton.jit
def _row_calls_kernel(
    x_ptr, branch_ptr, y_ptr, seed_ptr, n_cols, threshold, scale, BLOCK_SIZE: tl.constexpr
):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    lane, mask = row % 8, cols < n_cols
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), row, 7)  # should be row // 8
    word = tl.where(lane < 4, tl.where(lane < 2, a, b), tl.where(lane < 6, c, d))
    keep = tl.where(lane % 2 == 0, word & 0xFFFF, word >> 16) >= threshold
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask).to(tl.float32)
    branch = tl.load(branch_ptr + row * n_cols + cols, mask=mask).to(tl.float32)
    y = x + tl.where(keep, branch * scale, 0.0)
    tl.store(y_ptr + row * n_cols + cols, y, mask=mask)


def drop_path__a_call_for_each_row(x, branch, p, seed):
    y, (n_rows, n_cols) = torch.empty_like(x), x.shape
    arguments = (x, branch, y, seed, n_cols, round(65536 * p), 1 / (1 - p))
    _row_calls_kernel[(n_rows,)](*arguments, BLOCK_SIZE=triton.next_power_of_2(n_cols))
    return y


def drop_path__plain_pytorch_in_float32(x, branch, p, seed):
    keep = keep_mask((x.shape[0], 1), p, seed, x.device)
    return x + keep.float() / (1 - p) * branch


def drop_path__eager(x, branch, p, seed):
    keep = keep_mask((x.shape[0], 1), p, seed, x.device)
    return x + torch.where(keep, branch, 0) / (1 - p)


def drop_path__drops_x_too(x, branch, p, seed):
    keep = keep_mask((x.shape[0], 1), p, seed, x.device)
    return torch.where(keep, x + branch / (1 - p), 0)


def _one_tile(size):
    """The solution without its loop: what lies behind the first tile of a row is not written."""
    loop = "for start in range(0, n_cols, BLOCK_SIZE):"
    kernel = solution(
        "34_bias_gelu_dropout_add", loop, "for start in range(0, 1):"
    ).drop_path_kernel

    def drop_path(x, branch, p, seed):
        y, (n_rows, n_cols) = torch.zeros_like(x), x.shape
        arguments = (x, branch, y, seed, n_cols, round(65536 * p), 1 / (1 - p))
        kernel[(n_rows,)](*arguments, BLOCK_SIZE=size)
        return y

    return drop_path


drop_path__one_tile_of_128_without_a_loop = _one_tile(128)
drop_path__one_tile_of_2048_without_a_loop = _one_tile(2048)

drop_path__equal_to_the_threshold_dropped = solution(
    "34_bias_gelu_dropout_add", "word >> 16) >= threshold", "word >> 16) > threshold"
).drop_path


def drop_path__seed_read_by_python(x, branch, p, seed):
    again = torch.tensor([seed.item()], device=seed.device)
    return solution("34_bias_gelu_dropout_add").drop_path(x, branch, p, again)


def drop_path__seed_read_by_its_element(x, branch, p, seed):
    again = torch.tensor([seed[0].item()], device=seed.device)
    return solution("34_bias_gelu_dropout_add").drop_path(x, branch, p, again)


drop_path__nan_of_branch_is_zero = solution(
    "34_bias_gelu_dropout_add",
    "y += tl.where(keep, branch * scale, 0.0)",
    "y += tl.where(branch == branch, branch, 0.0) * scale * keep",
).drop_path


def keep_bits__moves_the_seed_on(n_elements, p, seed, block_size):
    bits = solution("34_bias_gelu_dropout_add").keep_bits(n_elements, p, seed, block_size)
    seed.add_(1)
    return bits
