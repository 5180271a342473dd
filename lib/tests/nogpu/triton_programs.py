"""Triton programs in the style of public ones: some with a planted mistake, others right.

`PLANTED` and `RIGHT` map names to functions. Each makes fresh inputs, launches, and returns (result, truth). A
planted mistake stands in the line with the comment HERE.
"""

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

PLANTED, RIGHT = {}, {}


def planted(case):
    PLANTED[case.__name__] = case
    return case


def right(case):
    RIGHT[case.__name__] = case
    return case


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


# --- grouped GEMM: matrices by tables of pointers --------------------------------------------------------


@triton.jit
def grouped_gemm(
    a_ptrs, b_ptrs, c_ptrs, sizes_ptr, n_groups, SWAPPED: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # Each program walks over the tiles of all products and takes every n-th.
    tile, first = tl.program_id(0), 0
    i = tl.arange(0, BLOCK_SIZE)
    for group in range(n_groups):
        M = tl.load(sizes_ptr + 3 * group)
        N = tl.load(sizes_ptr + 3 * group + 1)
        K = tl.load(sizes_ptr + 3 * group + 2)
        n_tiles_n = tl.cdiv(N, BLOCK_SIZE)
        n_tiles = tl.cdiv(M, BLOCK_SIZE) * n_tiles_n
        while tile >= first and tile < first + n_tiles:
            a_ptr = tl.load(a_ptrs + group).to(tl.pointer_type(tl.float32))
            b_ptr = tl.load(b_ptrs + group).to(tl.pointer_type(tl.float32))
            c_ptr = tl.load(c_ptrs + group).to(tl.pointer_type(tl.float32))
            rows = (tile - first) // n_tiles_n * BLOCK_SIZE + i
            cols = (tile - first) % n_tiles_n * BLOCK_SIZE + i
            total = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
            for k in range(0, K, BLOCK_SIZE):
                stride = M if SWAPPED else K
                a_mask = (rows[:, None] < M) & (k + i[None, :] < K)
                a_ptr_k = a_ptr + rows[:, None] * stride + k + i[None, :]
                a = tl.load(a_ptr_k, mask=a_mask, other=0.0)  # HERE
                b_mask = (k + i[:, None] < K) & (cols[None, :] < N)
                b = tl.load(b_ptr + (k + i[:, None]) * N + cols[None, :], mask=b_mask, other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
            mask = (rows[:, None] < M) & (cols[None, :] < N)
            tl.store(c_ptr + rows[:, None] * N + cols[None, :], total, mask=mask)
            tile += tl.num_programs(0)
        first += n_tiles


def _grouped(swapped=False, temporary=False):
    sizes = [(33, 20, 17), (40, 16, 16), (20, 50, 18)]
    a = [torch.randn(m, k) for m, n, k in sizes]
    b = [torch.randn(k, n) for m, n, k in sizes]
    c = [torch.zeros(m, n) for m, n, k in sizes]
    tables = [torch.tensor([x.data_ptr() for x in xs]) for xs in (a, b, c)]
    if temporary:
        tables[0] = torch.tensor([x.t().contiguous().t().clone().data_ptr() for x in a])
    grouped_gemm[(4,)](*tables, torch.tensor(sizes, dtype=torch.int32), 3, swapped, BLOCK_SIZE=16)
    return torch.cat([x.flatten() for x in c]), torch.cat([(x @ y).flatten() for x, y in zip(a, b)])


@right
def grouped_gemm_with_tables_of_pointers():
    return _grouped()


@planted
def wrong_row_length_of_a_matrix_in_a_table():
    return _grouped(swapped=True)


@planted
def table_of_temporaries():
    return _grouped(temporary=True)


# --- layer norm: the gradient of the weight under locks ---------------------------------------------------


@triton.jit
def weight_gradient(
    x_ptr, lock_ptr, dw_ptr, n_cols, MISTAKE: tl.constexpr, N_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    group = pid % N_GROUPS
    lock_ptr += group
    count_ptr = lock_ptr + N_GROUPS
    dw_ptrs = dw_ptr + group * n_cols + cols
    dw = tl.load(x_ptr + pid * n_cols + cols, mask=mask)
    if MISTAKE == "count":
        count = tl.load(count_ptr)  # HERE
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # HERE
        pass
    if MISTAKE != "count":
        count = tl.load(count_ptr)
    if count == 0:
        tl.atomic_xchg(count_ptr, 1)
    else:
        dw += tl.load(dw_ptrs, mask=mask)
    tl.store(dw_ptrs, dw, mask=mask)
    tl.debug_barrier()
    if MISTAKE == "release":
        if count == 1:
            tl.atomic_xchg(lock_ptr, 0)
    elif MISTAKE == "slot":
        tl.atomic_xchg(count_ptr, 0)
    else:
        tl.atomic_xchg(lock_ptr, 0)


def _weight_gradient(mistake=""):
    x, dw = torch.randn(8, 20), torch.zeros(2, 20)
    weight_gradient[(8,)](x, ints(4), dw, 20, mistake, N_GROUPS=2, BLOCK_SIZE=32)
    return dw.sum(0), x.sum(0)


@right
def layer_norm_with_locks():
    return _weight_gradient()


@planted
def lock_released_on_one_path():
    return _weight_gradient("release")


@planted
def wrong_lock_released():
    return _weight_gradient("slot")


@planted
def count_read_before_the_lock():
    return _weight_gradient("count")


# --- matmul: persistent, split-K, stream-K, block pointers, descriptors -----------------------------------


@triton.jit
def persistent_matmul(a_ptr, b_ptr, c_ptr, M, N, K, STEP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    n_tiles_n = tl.cdiv(N, BLOCK_SIZE)
    n_tiles = tl.cdiv(M, BLOCK_SIZE) * n_tiles_n
    for tile in tl.range(tl.program_id(0), n_tiles, STEP):
        rows, cols = tile // n_tiles_n * BLOCK_SIZE + i, tile % n_tiles_n * BLOCK_SIZE + i
        total = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
        for k in range(0, K, BLOCK_SIZE):
            a = tl.load(
                a_ptr + rows[:, None] * K + k + i[None, :], mask=k + i[None, :] < K, other=0.0
            )
            b = tl.load(
                b_ptr + (k + i[:, None]) * N + cols[None, :], mask=k + i[:, None] < K, other=0.0
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(c_ptr + rows[:, None] * N + cols[None, :], total)  # HERE


def _persistent(step):
    a, b, c = torch.randn(32, 40), torch.randn(40, 48), torch.zeros(32, 48)
    persistent_matmul[(4,)](a, b, c, 32, 48, 40, STEP=step, BLOCK_SIZE=16)
    return c, a @ b


@right
def matmul_persistent():
    return _persistent(4)


@planted
def persistent_programs_share_tiles():
    return _persistent(3)


@triton.jit
def split_k_matmul(a_ptr, b_ptr, c_ptr, N, K, ATOMIC: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    rows, cols = tl.program_id(0) * BLOCK_SIZE + i, i
    k = tl.program_id(1) * BLOCK_SIZE + i
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + cols[None, :], mask=k[:, None] < K, other=0.0)
    c_ptrs = c_ptr + rows[:, None] * N + cols[None, :]
    part = tl.dot(a, b, input_precision="ieee")
    if ATOMIC:
        tl.atomic_add(c_ptrs, part)
    else:
        tl.store(c_ptrs, tl.load(c_ptrs) + part)  # HERE


def _split_k(atomic):
    a, b, c = torch.randn(32, 40), torch.randn(40, 16), torch.zeros(32, 16)
    split_k_matmul[(2, 3)](a, b, c, 16, 40, ATOMIC=atomic, BLOCK_SIZE=16)
    return c, a @ b


@right
def matmul_split_k():
    return _split_k(True)


@planted
def split_k_without_atomics():
    return _split_k(False)


@triton.jit
def stream_k_dot(
    a_ptr, b_ptr, y_ptr, part_ptr, flag_ptr, K, MISTAKE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # Program p has an equal part of all elements of all rows; a row's first program adds up the other parts.
    pid, n = tl.program_id(0), tl.num_programs(0)
    at, end = pid * (3 * K // n), (pid + 1) * (3 * K // n)
    while at < end:
        row = at // K
        last = tl.minimum(end, (row + 1) * K)
        offsets = at + tl.arange(0, BLOCK_SIZE)
        mask = offsets < last
        total = tl.sum(
            tl.load(a_ptr + offsets, mask=mask, other=0.0)
            * tl.load(b_ptr + offsets % K, mask=mask, other=0.0)
        )
        if at == row * K:  # the row begins here
            following = pid + 1
            covered = last
            while covered < (row + 1) * K:
                while tl.atomic_cas(flag_ptr + following, 1, 1) != 1:  # HERE
                    pass
                total += tl.load(part_ptr + following)
                covered += 3 * K // n
                following += 1
            tl.store(y_ptr + row, total)
        else:
            tl.store(part_ptr + pid, total)
            tl.debug_barrier()
            if MISTAKE != "flag":
                tl.atomic_xchg(flag_ptr + pid, 1)
        at = last


def _stream_k(mistake=""):
    a, b, y = torch.randn(3, 40), torch.randn(40), torch.zeros(3)
    stream_k_dot[(6,)](a, b, y, torch.zeros(6), ints(6), 40, mistake, BLOCK_SIZE=32)
    return y, a @ b


@right
def stream_k_waits_for_later_programs():
    return _stream_k()


@planted
def stream_k_flag_that_nobody_sets():
    return _stream_k("flag")


@triton.jit
def block_pointer_matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, CHECK: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    row, col = tl.program_id(0) * BLOCK_SIZE, tl.program_id(1) * BLOCK_SIZE
    a = tl.make_block_ptr(a_ptr, (M, K), (K, 1), (row, 0), (BLOCK_SIZE, BLOCK_SIZE), (1, 0))
    b = tl.make_block_ptr(b_ptr, (K, N), (N, 1), (0, col), (BLOCK_SIZE, BLOCK_SIZE), (1, 0))
    total = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
    for _ in range(0, K, BLOCK_SIZE):
        a_tile = tl.load(a, boundary_check=(0, 1), padding_option="zero")
        sides: tl.constexpr = (0, 1) if CHECK else (1,)
        b_tile = tl.load(b, boundary_check=sides, padding_option="zero")  # HERE
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a, b = tl.advance(a, (0, BLOCK_SIZE)), tl.advance(b, (BLOCK_SIZE, 0))
    c = tl.make_block_ptr(c_ptr, (M, N), (N, 1), (row, col), (BLOCK_SIZE, BLOCK_SIZE), (1, 0))
    tl.store(c, total, boundary_check=(0, 1))


def _block_pointers(check):
    a, b, c = torch.randn(20, 30), torch.randn(30, 40), torch.zeros(20, 40)
    block_pointer_matmul[lambda meta: [2, 3]](a, b, c, 20, 40, 30, CHECK=check, BLOCK_SIZE=16)
    return c, a @ b


if hasattr(upstream, "BlockPointerHandle"):  # Triton 3.9 has none

    @right
    def matmul_with_block_pointers():
        return _block_pointers(True)

    @planted
    def block_pointer_without_boundary_check():
        return _block_pointers(False)


@triton.jit
def descriptor_matmul(a_ptr, b_ptr, c_ptr, M, N, K, ROWS_OF_B, BLOCK_SIZE: tl.constexpr):
    block: tl.constexpr = [BLOCK_SIZE, BLOCK_SIZE]
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], block)
    b = tl.make_tensor_descriptor(b_ptr, [ROWS_OF_B, K], [K, 1], block)
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], block)
    row, col = tl.program_id(0) * BLOCK_SIZE, tl.program_id(1) * BLOCK_SIZE
    total = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE):
        b_tile = b.load([col, k])  # HERE
        total = tl.dot(a.load([row, k]), b_tile.T, total, input_precision="ieee")
    c.store([row, col], total)


def _descriptors(rows_of_b):
    a, b, c = torch.randn(20, 32), torch.randn(24, 32), torch.zeros(20, 24)
    descriptor_matmul[(2, 2)](a, b, c, 20, 24, 32, rows_of_b, BLOCK_SIZE=16)
    return c, a @ b.T


@right
def matmul_with_descriptors():
    return _descriptors(24)


@planted
def descriptor_of_too_many_rows():
    return _descriptors(32)


# --- reductions, scans, histograms -----------------------------------------------------------------------


@triton.jit
def total_of_all(x_ptr, y_ptr, part_ptr, count_ptr, n, HOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    total = tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))
    if HOW == "plain":
        tl.store(y_ptr, tl.load(y_ptr) + total)  # HERE
    else:
        tl.store(part_ptr + pid, total)
        if HOW == "relaxed":
            n_before = tl.atomic_add(count_ptr, 1, sem="relaxed")  # HERE
        else:
            n_before = tl.atomic_add(count_ptr, 1)
        if n_before == tl.num_programs(0) - 1:  # the last one to arrive
            parts = tl.arange(0, 16)
            parts = tl.load(part_ptr + parts, mask=parts < tl.num_programs(0), other=0.0)
            tl.store(y_ptr, tl.sum(parts))


def _total(how):
    x, y = torch.randn(100), torch.zeros(1)
    total_of_all[(7,)](x, y, torch.zeros(7), ints(1), 100, HOW=how, BLOCK_SIZE=16)
    return y, x.sum()[None]


@right
def the_last_program_adds_up():
    return _total("last")


@planted
def sum_without_atomics():
    return _total("plain")


@planted
def last_program_by_a_relaxed_counter():
    return _total("relaxed")


@triton.jit
def running_sum(x_ptr, y_ptr, flag_ptr, n, WAIT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    y = tl.cumsum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))
    if pid > 0:
        if WAIT:
            while tl.atomic_add(flag_ptr + pid - 1, 0) == 0:
                pass
        y += tl.load(y_ptr + pid * BLOCK_SIZE - 1)  # HERE
    tl.store(y_ptr + offsets, y, mask=offsets < n)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1)


def _running_sum(wait):
    x, y = torch.randn(60), torch.zeros(60)
    running_sum[(4,)](x, y, ints(4), 60, WAIT=wait, BLOCK_SIZE=16)
    return y, x.cumsum(0)


@right
def scan_with_flags():
    return _running_sum(True)


@planted
def scan_without_flags():
    return _running_sum(False)


@triton.jit
def decayed(a1, x1, a2, x2):
    return a1 * a2, x1 * a2 + x2


@triton.jit
def selective_scan(a_ptr, x_ptr, y_ptr, N: tl.constexpr, D: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    _, y = tl.associative_scan((tl.load(a_ptr + offsets), tl.load(x_ptr + offsets)), 0, decayed)
    tl.store(y_ptr + offsets, y)


@right
def scan_of_pairs():
    a, x, y = torch.rand(64, 8), torch.randn(64, 8), torch.zeros(64, 8)
    selective_scan[(1,)](a, x, y, N=64, D=8)
    want = [x[0]]
    for k in range(1, 64):
        want.append(want[-1] * a[k] + x[k])
    return y, torch.stack(want)


@triton.jit
def histogram(x_ptr, y_ptr, n, ATOMIC: tl.constexpr, BINS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    counts = tl.histogram(tl.load(x_ptr + offsets, mask=offsets < n, other=BINS - 1), BINS)
    bins = tl.arange(0, BINS)
    if ATOMIC:
        tl.atomic_add(y_ptr + bins, counts)
    else:
        tl.store(y_ptr + bins, tl.load(y_ptr + bins) + counts)  # HERE


def _histogram(atomic):
    x, y = torch.randint(0, 8, (96,), dtype=torch.int32), ints(8)
    histogram[(3,)](x, y, 96, ATOMIC=atomic, BINS=8, BLOCK_SIZE=32)
    return y, x.bincount(minlength=8).int()


@right
def histogram_with_atomics():
    return _histogram(True)


@planted
def histogram_without_atomics():
    return _histogram(False)


# --- one row or tile after another -----------------------------------------------------------------------


@triton.jit
def scaled_copy(x_ptr, bias_ptr, y_ptr, n, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=(offsets < n) | (not MASKED), other=0.0)  # HERE
    y = 2 * x + tl.load(bias_ptr + offsets, mask=offsets < n, other=0.0)  # HERE
    tl.store(y_ptr + offsets, y, mask=offsets < n)


@planted
def no_mask_at_the_end():
    x, y = torch.randn(100), torch.zeros(100)
    scaled_copy[(4,)](x, x, y, 100, MASKED=False, BLOCK_SIZE=32)
    return y, 3 * x


@planted
def bias_that_is_none():
    x, y = torch.randn(100), torch.zeros(100)
    scaled_copy[(4,)](x, None, y, 100, MASKED=True, BLOCK_SIZE=32)
    return y, 2 * x


@planted
def row_times_stride_wraps():
    @triton.jit
    def copy_row(x_ptr, y_ptr, row, row_stride, BLOCK_SIZE: tl.constexpr):
        cols = tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + (row + tl.program_id(0)) * row_stride + cols)  # HERE
        tl.store(y_ptr + cols, x)

    x, y = torch.randn(64), torch.zeros(16)
    copy_row[(1,)](x, y, 4, 2**29, BLOCK_SIZE=16)
    return y, x[:16]


@planted
def shift_in_place():
    @triton.jit
    def shift(x_ptr, n, BLOCK_SIZE: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_ptr + offsets + 1, mask=offsets + 1 < n, other=0.0)  # HERE
        tl.store(x_ptr + offsets, x, mask=offsets < n)

    x = torch.randn(64)
    want = torch.cat([x[1:], torch.zeros(1)])
    shift[(4,)](x, 64, BLOCK_SIZE=16)
    return x, want


@triton.jit
def dropout(x_ptr, y_ptr, n, p, seed, SAME: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i = tl.arange(0, BLOCK_SIZE)
    offsets = tl.program_id(0) * BLOCK_SIZE + i
    chosen = tl.rand(seed, i if SAME else offsets) > p  # HERE
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(y_ptr + offsets, tl.where(chosen, x / (1 - p), 0.0), mask=offsets < n)


def _dropout(same):
    """(Whether gradient and output drop the same, and two programs do), as wanted."""
    x, y, dx = torch.rand(256) + 1, torch.zeros(256), torch.zeros(256)
    for source, result in ((x, y), (torch.ones(256), dx)):
        dropout[(2,)](source, result, 256, 0.5, 7, SAME=same, BLOCK_SIZE=128)
    facts = torch.equal(y == 0, dx == 0), torch.equal(y[:128] == 0, y[128:] == 0)
    return torch.tensor(facts), torch.tensor([True, False])


@right
def dropout_seeded():
    return _dropout(False)


@planted
def dropout_the_same_in_every_program():
    return _dropout(True)


@triton.jit
def int4_gemv(
    w_ptr, scale_ptr, x_ptr, y_ptr, K, SHIFT, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # Two weights in a byte, the first in the lower bits; a scale for each group of a row.
    row, i = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    packed = tl.load(w_ptr + row * (K // 2) + i // 2, mask=i < K, other=0)
    w = ((packed >> (i % 2 * 4).to(tl.uint8)) & 15).to(tl.float32) - 8
    scale_ptrs = scale_ptr + row * (K // GROUP) + i // GROUP + SHIFT
    scale = tl.load(scale_ptrs, mask=i < K, other=0.0)  # HERE
    x = tl.load(x_ptr + i, mask=i < K, other=0.0)
    tl.store(y_ptr + row, tl.sum(w * scale * x))


def _int4(shift):
    w = torch.randint(0, 16, (6, 48), dtype=torch.uint8)
    scale, x, y = torch.rand(6, 3), torch.randn(48), torch.zeros(6)
    int4_gemv[(6,)](w[:, ::2] | w[:, 1::2] << 4, scale, x, y, 48, shift, GROUP=16, BLOCK_SIZE=64)
    return y, ((w.float() - 8) * scale.repeat_interleave(16, 1)) @ x


@right
def quantised_gemv():
    return _int4(0)


@planted
def scale_of_the_next_group():
    return _int4(1)


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, S, D: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i, d = tl.arange(0, BLOCK_SIZE), tl.arange(0, D)
    rows = tl.program_id(0) * BLOCK_SIZE + i
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < S, other=0.0)
    largest = tl.full((BLOCK_SIZE,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    o = tl.zeros((BLOCK_SIZE, D), tl.float32)
    for start in range(0, S, BLOCK_SIZE):
        cols = start + i
        k = tl.load(k_ptr + cols[None, :] * D + d[:, None], mask=cols[None, :] < S, other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * D**-0.5
        s = tl.where(cols[None, :] < S, s, -float("inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + cols[:, None] * D + d[None, :], mask=cols[:, None] < S, other=0.0)
        o = tl.dot(p, v, o * shrink[:, None], input_precision="ieee")
        largest = new
    tl.store(o_ptr + rows[:, None] * D + d[None, :], o / total[:, None], mask=rows[:, None] < S)


@right
def attention_online():
    q, k, v = torch.randn(3, 40, 16)
    o = torch.zeros(40, 16)
    attention[(3,)](q, k, v, o, 40, D=16, BLOCK_SIZE=16)
    return o, torch.softmax(q @ k.T / 4, 1) @ v


@triton.autotune([triton.Config({"BLOCK_SIZE": size}) for size in (16, 64)], key=["n"])
@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK_SIZE: "tl.constexpr"):
    tl.static_assert(BLOCK_SIZE >= 32)
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


@right
def a_tutorials_host_code():
    device = triton.runtime.driver.active.get_active_torch_device()
    x = torch.randn(100, device=device)
    y = torch.empty_like(x)
    with torch.cuda.device(x.device.index):
        add_one[lambda meta: [triton.cdiv(x.numel(), meta["BLOCK_SIZE"])]](x, y, 100)
    return y, x + 1
