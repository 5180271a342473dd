"""Plausible wrong answers to the exercises of notebook 35, named <answer>__<why>: each must be rejected."""

from lib.ops.rope import rope_tables, rope_triton
from lib.tests.exercises.wrong_answers import solution, transposed_taken_as_contiguous

import torch

_right = solution("35_rope")


def stretched_tables__not_stretched(n_positions, rotary_dim, stretch, base=10000.0):
    return rope_tables(n_positions, rotary_dim, base)


def stretched_tables__base_times_stretch(n_positions, rotary_dim, stretch, base=10000.0):
    return rope_tables(n_positions, rotary_dim, base * stretch)


def stretched_tables__exponent_upside_down(n_positions, rotary_dim, stretch, base=10000.0):
    return rope_tables(n_positions, rotary_dim, base * stretch ** ((rotary_dim - 2) / rotary_dim))


def stretched_tables__all_pairs_slower(n_positions, rotary_dim, stretch, base=10000.0):
    i = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    positions = torch.arange(n_positions, dtype=torch.float64) / stretch
    angles = torch.outer(positions, base ** (-i / rotary_dim))
    return angles.cos().float(), angles.sin().float()


def stretched_tables__angles_of_float32(n_positions, rotary_dim, stretch, base=10000.0):
    new_base = base * stretch ** (rotary_dim / (rotary_dim - 2))
    frequencies = new_base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(n_positions).float(), frequencies)
    return angles.cos(), angles.sin()


def stretched_tables__as_wide_as_a_head(n_positions, rotary_dim, stretch, base=10000.0):
    tables = _right.stretched_tables(n_positions, rotary_dim, stretch, base)
    return [torch.cat((t, t), dim=-1) for t in tables]


def stretched_tables__cos_alone(n_positions, rotary_dim, stretch, base=10000.0):
    return _right.stretched_tables(n_positions, rotary_dim, stretch, base)[0]


def stretched_tables__sin_before_cos(n_positions, rotary_dim, stretch, base=10000.0):
    return _right.stretched_tables(n_positions, rotary_dim, stretch, base)[::-1]


smallest_shapes__one_token = ((1, 1, 1, 2), (1, 2, 1, 4))
smallest_shapes__two_sequences = ((2, 1, 1, 2), (1, 2, 1, 4))
smallest_shapes__one_pair_to_pair = ((1, 2, 1, 2), (1, 2, 1, 2))
smallest_shapes__one_token_to_pair = ((1, 2, 1, 2), (1, 1, 1, 4))
smallest_shapes__sign_not_the_smallest = ((1, 2, 1, 4), (1, 2, 1, 4))
smallest_shapes__pairing_not_the_smallest = ((1, 2, 1, 2), (1, 2, 1, 8))
smallest_shapes__large = ((4, 4096, 32, 128), (4, 4096, 32, 128))
smallest_shapes__half_a_pair = ((1, 2, 1, 1), (1, 2, 1, 4))
smallest_shapes__one_shape_alone = (1, 2, 1, 2)


def rope_2d__row_and_column_exchanged(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    y = _right.rope_2d(torch.cat([second, first], dim=-1), cos, sin)
    return torch.cat(y.chunk(2, dim=-1)[::-1], dim=-1)


def rope_2d__turned_back(x, cos, sin):
    return _right.rope_2d(x, cos, -sin)


def rope_2d__by_the_row_alone(x, cos, sin):
    y = torch.empty_like(x)
    for column in range(x.shape[2]):
        y[:, :, column] = _right.rope_2d(x[:, :, column : column + 1].contiguous(), cos, sin)[
            :, :, 0
        ]
    return y


def rope_2d__pairs_across_the_head(x, cos, sin):
    quarters = x.chunk(4, dim=-1)
    y = _right.rope_2d(torch.cat([quarters[i] for i in (0, 2, 1, 3)], dim=-1), cos, sin)
    return torch.cat([y.chunk(4, dim=-1)[i] for i in (0, 2, 1, 3)], dim=-1)


def _turned(x, c, s):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


def rope_2d__eager(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    rows, columns = ([t[:n] for t in (cos, sin)] for n in x.shape[1:3])
    first = _turned(first, *(t[:, None, None] for t in rows))
    second = _turned(second, *(t[:, None] for t in columns))
    return torch.cat([first, second], dim=-1).to(x.dtype)


def rope_2d__two_launches(x, cos, sin):
    b, n_rows, n_columns, h, d = x.shape
    quarter = d // 4
    by_row = x.reshape(b, n_rows, n_columns * h, d)[..., : 2 * quarter]
    by_column = x.reshape(b * n_rows, n_columns, h, d)[..., 2 * quarter :]
    first = rope_triton(by_row, by_row[:, :, :0], cos, sin)[0].view(b, n_rows, n_columns, h, d // 2)
    second = rope_triton(by_column, by_column[:, :, :0], cos, sin)[0].view_as(first)
    return torch.cat([first, second], dim=-1)


def rope_2d__copies_and_multiplies(x, cos, sin):
    return _right.rope_2d(x.clone(), cos, sin) * 1


class _Copies(_right.Rotate2D):
    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _right.launch_rope_2d(dy.clone(), cos, -sin), None, None


def rope_2d__copies_backward(x, cos, sin):
    return _Copies.apply(x, cos, sin)


def rope_2d__no_gradient(x, cos, sin):
    return _right.launch_rope_2d(x, cos, sin)


class _Forward(_right.Rotate2D):
    @staticmethod
    def backward(ctx, dy):
        return _right.launch_rope_2d(dy.contiguous(), *ctx.saved_tensors), None, None


def rope_2d__forward_twice(x, cos, sin):
    return _Forward.apply(x, cos, sin)


class _Strided(_right.Rotate2D):
    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _right.launch_rope_2d(dy, cos, -sin), None, None


def rope_2d__takes_strides_of_0_for_contiguous(x, cos, sin):
    return _Strided.apply(x, cos, sin)


class _Twice(_right.Rotate2D):
    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        half = _right.launch_rope_2d(dy.contiguous() / 2, cos, -sin)
        return half + _right.launch_rope_2d(dy.contiguous() / 2, cos, -sin), None, None


def rope_2d__two_launches_backward(x, cos, sin):
    return _Twice.apply(x, cos, sin)


rope_2d__transposed_dy_as_contiguous = transposed_taken_as_contiguous(solution("35_rope").rope_2d)
