"""Plausible wrong answers to the exercises of notebook 40, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution, transposed_taken_as_contiguous

import torch
import triton
import triton.language as tl


def bytes_requested__formula_of_whole_tiles(M, N, K, BLOCK_M, BLOCK_N, s):
    return (M * N * K // BLOCK_M + M * N * K // BLOCK_N + M * N) * s


def bytes_requested__distinct_bytes(M, N, K, BLOCK_M, BLOCK_N, s):
    return (M * K + K * N + M * N) * s


def bytes_requested__sides_swapped(M, N, K, BLOCK_M, BLOCK_N, s):
    return (M * K * -(-N // BLOCK_M) + K * N * -(-M // BLOCK_N) + M * N) * s


def bytes_requested__masked_elements_too(M, N, K, BLOCK_M, BLOCK_N, s):
    rows, cols = -(-M // BLOCK_M), -(-N // BLOCK_N)
    return (rows * BLOCK_M * K * cols + cols * BLOCK_N * K * rows + M * N) * s


def bytes_requested__elements(M, N, K, BLOCK_M, BLOCK_N, s):
    return M * K * -(-N // BLOCK_N) + K * N * -(-M // BLOCK_M) + M * N


def bytes_requested__y_forgotten(M, N, K, BLOCK_M, BLOCK_N, s):
    return (M * K * -(-N // BLOCK_N) + K * N * -(-M // BLOCK_M)) * s


smallest_grid__one_column = (9, 1)
smallest_grid__a_row_too_many = (9, 2)
smallest_grid__swapped = (2, 1)
smallest_grid__a_whole_group = (8, 2)
smallest_grid__not_the_smallest = (1, 3)
smallest_grid__a_number = 2


@triton.jit
def _batched_kernel(
    a_ptr, b_ptr, y_ptr, n_rows, n_cols, n_inner,
    stride_ai, stride_am, stride_ak, stride_bi, stride_bk, stride_bn,
    PRECISION: tl.constexpr, K_MASK: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    NUMBER: tl.constexpr, Y_NUMBER: tl.constexpr, PLACE: tl.constexpr, FILL: tl.constexpr,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK), tl.cdiv(n_cols, BLOCK)
    tile = tl.program_id(0)
    if FLAT:
        i = (tile // (tiles_m * tiles_n)).to(NUMBER)
        tile %= tiles_m * tiles_n
    else:
        i = tl.program_id(1).to(NUMBER)
    rows = (tile // tiles_n * BLOCK + tl.arange(0, BLOCK)).to(PLACE)[:, None]
    cols = (tile % tiles_n * BLOCK + tl.arange(0, BLOCK)).to(PLACE)[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32 if WIDE else y_ptr.dtype.element_ty)
    for k in range(0, n_inner, BLOCK):
        inner = (k + tl.arange(0, BLOCK)).to(PLACE)
        last = n_inner if K_MASK else k + BLOCK
        a_mask = (rows < n_rows) & (inner < last)[None, :]
        b_mask = (inner < last)[:, None] & (cols < n_cols)
        a_offsets = i * stride_ai + rows * stride_am + inner[None, :] * stride_ak
        b_offsets = i * stride_bi + inner[:, None] * stride_bk + cols * stride_bn
        if FILL:
            a = tl.load(a_ptr + a_offsets, mask=a_mask, other=0.0)
        else:
            a = tl.load(a_ptr + a_offsets, mask=a_mask)
        b = tl.load(b_ptr + b_offsets, mask=b_mask, other=0.0)
        if DOT:
            product = tl.dot(a, b, input_precision=PRECISION)
        else:
            a, b = a.to(tl.float32), b.to(tl.float32)
            product = tl.sum(a[:, :, None] * b[None, :, :], axis=1)
        total = (total + product).to(total.dtype)
    offsets = i.to(Y_NUMBER) * n_rows * n_cols + rows * n_cols + cols
    tl.store(y_ptr + offsets, total, mask=(rows < n_rows) & (cols < n_cols))


def _batched(
    a, b, y=None, strides=None, precision="ieee", k_mask=True, wide=True, dot=True,
    number=tl.int64, y_number=tl.int64, place=tl.int64, fill=True, flat=True,
):  # fmt: skip
    (n_batches, m, k), n = a.shape, b.shape[2]
    y = a.new_empty(n_batches, m, n) if y is None else y
    tiles = triton.cdiv(m, 32) * triton.cdiv(n, 32)
    grid = (n_batches * tiles,) if flat else (tiles, n_batches)
    _batched_kernel[grid](
        a, b, y, m, n, k, *(strides or (*a.stride(), *b.stride())),
        PRECISION=precision, K_MASK=k_mask, WIDE=wide, DOT=dot, NUMBER=number, Y_NUMBER=y_number, PLACE=place,
        FILL=fill, FLAT=flat, BLOCK=32,
    )  # fmt: skip
    return y


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, product, a, b):
        ctx.product = product
        ctx.save_for_backward(a, b)
        return product(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return None, ctx.product(dy, b.mT), ctx.product(a.mT, dy)


def _with_gradients(product):
    return lambda a, b: _Batched.apply(product, a, b)


def _one_launch_each(a, b):
    y = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for i in range(a.shape[0]):
        _batched(a[i : i + 1], b[i : i + 1], y[i : i + 1])
    return y


def _as_if_contiguous(a, b):
    (_, m, k), n = a.shape, b.shape[2]
    return _batched(a, b, strides=(m * k, k, 1, k * n, n, 1))


def _product_of_pytorch(a, b):
    eye = torch.eye(b.shape[2], device=b.device, dtype=b.dtype).expand(b.shape[0], -1, -1)
    return _batched(torch.bmm(a, b), eye)


batched__tf32 = _with_gradients(lambda a, b: _batched(a, b, precision="tf32"))
batched__copies_the_products_of_pytorch = _with_gradients(_product_of_pytorch)
batched__a_sum_of_products = _with_gradients(lambda a, b: _batched(a, b, dot=False))
batched__copies_a_first = _with_gradients(lambda a, b: _batched(a.contiguous(), b))
batched__no_mask_along_k = _with_gradients(lambda a, b: _batched(a, b, k_mask=False))
batched__sums_in_the_dtype_of_y = _with_gradients(lambda a, b: _batched(a, b, wide=False))
batched__offsets_of_products_in_32_bits = _with_gradients(
    lambda a, b: _batched(a, b, number=tl.int32)
)
batched__offset_of_y_in_32_bits = _with_gradients(lambda a, b: _batched(a, b, y_number=tl.int32))
batched__a_load_without_other = _with_gradients(lambda a, b: _batched(a, b, fill=False))
batched__offsets_of_rows_in_32_bits = _with_gradients(lambda a, b: _batched(a, b, place=tl.int32))
batched__more_products_than_a_second_direction_takes = _with_gradients(
    lambda a, b: _batched(a, b, flat=False)
)
batched__as_if_contiguous = _with_gradients(_as_if_contiguous)
batched__one_launch_each = _with_gradients(_one_launch_each)
batched__first_b_for_all = _with_gradients(
    lambda a, b: _batched(a, b, strides=(*a.stride(), 0, *b.stride()[1:]))
)

batched__halves_of_k_race_for_y = solution(
    "40_matmul",
    "for k in range(0, n_inner, BLOCK_K):\n        inner = k + tl.arange(0, BLOCK_K).to(tl.int64)",
    "for k in range(tl.program_id(1) * BLOCK_K, n_inner, 2 * BLOCK_K):\n"
    "        inner = k + tl.arange(0, BLOCK_K).to(tl.int64)",
    "    tl.store(y_ptr + rows * n_cols + cols, total, mask=(rows < n_rows) & (cols < n_cols))\n\n\ndef p",
    "    y_ptrs, mask = y_ptr + rows * n_cols + cols, (rows < n_rows) & (cols < n_cols)\n"
    "    if tl.program_id(1) > 0:\n        total += tl.load(y_ptrs, mask=mask)\n"
    "    tl.store(y_ptrs, total, mask=mask)\n\n\ndef p",
    "y = a.new_empty(n_batches, m, n)", "y = torch.empty(n_batches, m, n, device=a.device)",
    "* triton.cdiv(n, 64),)\n    batched", "* triton.cdiv(n, 64), 2)\n    batched",
    "return y\n\n\nclass Batched", "return y.to(a.dtype)\n\n\nclass Batched",
).batched  # fmt: skip


def batched__eager(a, b):
    return torch.bmm(a, b)


def batched__no_gradients(a, b):
    return _batched(a, b)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backward, a, b):
        ctx.save_for_backward(a, b)
        ctx.backward = backward
        return _batched(a, b)

    @staticmethod
    def backward(ctx, dy):
        return None, *ctx.backward(dy, *ctx.saved_tensors)


def batched__backward_by_pytorch(a, b):
    return _Backward.apply(lambda dy, a, b: (torch.bmm(dy, b.mT), torch.bmm(a.mT, dy)), a, b)


def batched__copies_dy(a, b):
    def backward(dy, a, b):
        dy = dy.contiguous()
        return _batched(dy, b.mT), _batched(a.mT, dy)

    return _Backward.apply(backward, a, b)


@triton.jit
def _cosine_kernel(
    x_ptr, c_ptr, y_ptr, n_rows, n_cols, n_inner,
    PRECISION: tl.constexpr, HOW: tl.constexpr, ONE_NORM: tl.constexpr, AGAIN: tl.constexpr,
    FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n_cols, BLOCK)
    rows = tl.program_id(0) // tiles_n * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(0) % tiles_n * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    x_squares, c_squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for k in range(0, n_inner, BLOCK):
        inner = k + tl.arange(0, BLOCK)
        x_offsets = rows[:, None] * n_inner + inner[None, :]
        c_offsets = cols[:, None] * n_inner + inner[None, :]
        x_mask = (rows < n_rows)[:, None] & (inner < n_inner)[None, :]
        c_mask = (cols < n_cols)[:, None] & (inner < n_inner)[None, :]
        if FILL:
            x = tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0)
        else:
            x = tl.load(x_ptr + x_offsets, mask=x_mask)
        c = tl.load(c_ptr + c_offsets, mask=c_mask, other=0.0)
        total = tl.dot(x, tl.trans(c), total, input_precision=PRECISION)
        if AGAIN:
            x = tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0)
        x, c = x.to(tl.float32), c.to(tl.float32)
        x_squares += tl.sum(x * x, axis=1)
        c_squares += tl.sum(c * c, axis=1)
    if ONE_NORM:
        c_squares = c_squares * 0 + 1
    squares = x_squares[:, None] * c_squares[None, :]
    if HOW == "squares":
        y = total / squares
    elif HOW == "one root":
        y = total * tl.rsqrt(squares)
    elif HOW == "never zero":
        lengths = tl.sqrt(x_squares)[:, None] * tl.sqrt(c_squares)[None, :]
        y = total / tl.maximum(lengths, 1e-8)
    else:
        y = total / (tl.sqrt(x_squares)[:, None] * tl.sqrt(c_squares)[None, :])
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


def _cosine(x, c, precision="ieee", how="two roots", one_norm=False, again=False, fill=True):
    (m, k), n = x.shape, c.shape[0]
    y = x.new_empty(m, n)
    _cosine_kernel[(triton.cdiv(m, 16) * triton.cdiv(n, 16),)](
        x, c, y, m, n, k, PRECISION=precision, HOW=how, ONE_NORM=one_norm, AGAIN=again, FILL=fill,
        BLOCK=16,
    )  # fmt: skip
    return y


def cosine_similarity__tf32(x, c):
    return _cosine(x, c, precision="tf32")


def cosine_similarity__no_root(x, c):
    return _cosine(x, c, how="squares")


def cosine_similarity__square_of_the_length_overflows(x, c):
    return _cosine(x, c, how="one root")


def cosine_similarity__zeros_give_zero(x, c):
    return _cosine(x, c, how="never zero")


def cosine_similarity__norm_of_c_forgotten(x, c):
    return _cosine(x, c, one_norm=True)


def cosine_similarity__loads_x_twice(x, c):
    return _cosine(x, c, again=True)


def cosine_similarity__a_load_without_other(x, c):
    return _cosine(x, c, fill=False)


def cosine_similarity__eager(x, c):
    return (x @ c.t()) / (x.norm(dim=1)[:, None] * c.norm(dim=1)[None, :])


def cosine_similarity__norms_by_pytorch(x, c):
    ones = torch.ones_like(x[:, 0])
    return _cosine(x, c, one_norm=True) / (ones[:, None] * c.norm(dim=1)[None, :])


residents__shared_memory_alone = (128, 128, 2, 3)
residents__too_few_programs = (128, 128, 2, 2)
residents__a_wide_tile_by_shared_memory_alone = (64, 256, 1, 5)
residents__registers_alone = (64, 128, 3, 4)
residents__a_tile_that_asks_for_more = (64, 64, 3, 4)
residents__a_narrow_tile = (32, 128, 3, 4)
residents__a_stage_too_few = (64, 128, 2, 4)
residents__a_stage_too_many = (128, 64, 4, 2)
residents__it_spills = (256, 128, 1, 2)
residents__more_than_shared_memory = (256, 256, 4, 1)
residents__the_programs_forgotten = (64, 128, 3)


cosine_similarity__lengths_summed_in_x_s_dtype = solution(
    "40_matmul",
    "x_squares += tl.sum(x_wide * x_wide, axis=1)",
    "x_squares = (x_squares + tl.sum(x_wide * x_wide, axis=1)).to(x.dtype).to(tl.float32)",
).cosine_similarity
cosine_similarity__squares_of_x_in_its_dtype = solution(
    "40_matmul", "tl.sum(x_wide * x_wide, axis=1)", "tl.sum((x * x).to(tl.float32), axis=1)"
).cosine_similarity
cosine_similarity__squares_of_c_in_its_dtype = solution(
    "40_matmul", "tl.sum(c_wide * c_wide, axis=1)", "tl.sum((c * c).to(tl.float32), axis=1)"
).cosine_similarity
batched__transposed_dy_as_contiguous = transposed_taken_as_contiguous(solution("40_matmul").batched)
