"""Plausible wrong answers to the exercises of notebook 35, named <answer>__<why>: each must be rejected."""

import importlib.util

from lib.ops.rope import rope_eager, rope_triton
from lib.results import ROOT

import torch
import triton
import triton.language as tl

_spec = importlib.util.spec_from_file_location("right35", ROOT / "notebooks/solutions/35_rope.py")
_right = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_right)


def rope_bytes__in_place_is_half(b, s, hq, hk, d, r, itemsize, in_place):
    return (1 if in_place else 2) * b * s * (hq + hk) * d * itemsize


def rope_bytes__all_columns_in_place(b, s, hq, hk, d, r, itemsize, in_place):
    return 2 * b * s * (hq + hk) * d * itemsize


def rope_bytes__rotated_columns_only(b, s, hq, hk, d, r, itemsize, in_place):
    return 2 * b * s * (hq + hk) * r * itemsize


def rope_bytes__elements(b, s, hq, hk, d, r, itemsize, in_place):
    return 2 * b * s * (hq + hk) * (r if in_place else d)


def rope_bytes__as_many_keys_as_queries(b, s, hq, hk, d, r, itemsize, in_place):
    return 4 * b * s * hq * (r if in_place else d) * itemsize


smallest_wrong_shape__two_tokens = (1, 2, 1, 2)
smallest_wrong_shape__one_token = (1, 1, 1, 2)
smallest_wrong_shape__two_each = (2, 2, 1, 2)
smallest_wrong_shape__two_heads = (2, 1, 2, 2)
smallest_wrong_shape__half_a_pair = (2, 1, 1, 1)
smallest_wrong_shape__no_heads_given = (2, 1, 2)


def rope_positions__ignores_them(q, k, cos, sin, positions):
    return rope_triton(q, k, cos, sin)


def rope_positions__an_offset_for_each_sequence(q, k, cos, sin, positions):
    rows = [
        rope_triton(q[i : i + 1], k[i : i + 1], cos, sin, int(positions[i, 0]))
        for i in range(len(q))
    ]
    return tuple(torch.cat(parts) for parts in zip(*rows))


def rope_positions__those_of_the_first_sequence(q, k, cos, sin, positions):
    return _right.rope_positions(q, k, cos, sin, positions[:1].expand_as(positions).contiguous())


def rope_positions__eager(q, k, cos, sin, positions):
    rows = [
        rope_eager(q[i : i + 1], k[i : i + 1], cos[at], sin[at]) for i, at in enumerate(positions)
    ]
    return tuple(torch.cat(parts) for parts in zip(*rows))


def rope_positions__turned_back(q, k, cos, sin, positions):
    return _right.rope_positions(q, k, cos, -sin, positions)


def rms_rope__two_launches(x, weight, cos, sin, eps=1e-6):
    n = _right.rms_rope(x, weight, torch.ones_like(cos), torch.zeros_like(sin), eps)
    return rope_triton(n, n, cos, sin)[0]


def rms_rope__no_eps(x, weight, cos, sin, eps=1e-6):
    return _right.rms_rope(x, weight, cos, sin, eps=0.0)


def rms_rope__no_weight(x, weight, cos, sin, eps=1e-6):
    return _right.rms_rope(x, torch.ones_like(weight), cos, sin, eps)


def rms_rope__weight_after_the_turn(x, weight, cos, sin, eps=1e-6):
    return _right.rms_rope(x, torch.ones_like(weight), cos, sin, eps) * weight


@triton.jit
def _half_mean_kernel(
    x_ptr, y_ptr, weight_ptr, cos_ptr, sin_ptr, n_seq, n_heads, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < HALF
    c = tl.load(cos_ptr + token % n_seq * HALF + cols, mask=mask)
    s = tl.load(sin_ptr + token % n_seq * HALF + cols, mask=mask)
    row = (token * n_heads + head) * 2 * HALF + cols
    x1 = tl.load(x_ptr + row, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + row + HALF, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, axis=0) / (2 * BLOCK) + eps)  # BLOCK for HALF
    n1 = x1 * scale * tl.load(weight_ptr + cols, mask=mask).to(tl.float32)
    n2 = x2 * scale * tl.load(weight_ptr + HALF + cols, mask=mask).to(tl.float32)
    tl.store(y_ptr + row, n1 * c - n2 * s, mask=mask)
    tl.store(y_ptr + row + HALF, n2 * c + n1 * s, mask=mask)


def rms_rope__mean_over_the_tile(x, weight, cos, sin, eps=1e-6):
    y, (b, s, h, d) = torch.empty_like(x), x.shape
    block = triton.next_power_of_2(d // 2)
    _half_mean_kernel[(b * s, h)](x, y, weight, cos, sin, s, h, eps, HALF=d // 2, BLOCK=block)
    return y
