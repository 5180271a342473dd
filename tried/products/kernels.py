"""Kernels to be timed beside the ops': a product by roles in Gluon, linear_glu's with h, one pass over dz."""

import functools

from lib.ops import _device as device
from lib.ops import _gluon as shared
from lib.ops import _host as host
from lib.ops import _linear_glu_gluon as glu
from lib.ops import lora_linear

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor


# --- a: the persistent kernel of lib/ops/matmul.py, bare, with what tl.range takes ---------------------------


@triton.jit
def persistent(
    a_desc, b_desc, y_desc, n_rows, n_cols, n_inner,
    A_T: tl.constexpr, B_T: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr, ROLES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_cols, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), n_tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=ROLES
    ):
        pid_m, pid_n = device.place_of(tile, n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
        row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            a = a_desc.load([k, row]).T if A_T else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_T else b_desc.load([k, col])
            total = tl.dot(a, b, total)
        if PARTS == 1:
            y_desc.store([row, col], total.to(y_desc.dtype))
        elif PARTS == 2:
            left, right = device.left_and_right(total)
            y_desc.store([row, col], left.to(y_desc.dtype))
            y_desc.store([row, col + BLOCK_N // 2], right.to(y_desc.dtype))
        else:
            left, right = device.left_and_right(total)
            a1, a2 = device.left_and_right(left)
            b1, b2 = device.left_and_right(right)
            y_desc.store([row, col], a1.to(y_desc.dtype))
            y_desc.store([row, col + BLOCK_N // 4], a2.to(y_desc.dtype))
            y_desc.store([row, col + BLOCK_N // 2], b1.to(y_desc.dtype))
            y_desc.store([row, col + 3 * BLOCK_N // 4], b2.to(y_desc.dtype))


def _rows_first(t):
    return t if t.stride(1) == 1 else t.t()


def run_persistent(
    a, b, y, flatten=False, roles=False, group=8, tile=(128, 256, 64), parts=2,
    num_warps=8, num_stages=3, num_ctas=1,
):  # fmt: skip
    (m, k), n = a.shape, b.shape[1]
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    bm, bn, bk = tile
    how = {"num_ctas": num_ctas} if num_ctas > 1 else {}
    grid = min(host.cdiv(m, bm) * host.cdiv(n, bn), host.n_multiprocessors(y.device) // num_ctas)
    return persistent[(grid,)](
        TensorDescriptor.from_tensor(_rows_first(a), [bk, bm] if a_t else [bm, bk]),
        TensorDescriptor.from_tensor(_rows_first(b), [bn, bk] if b_t else [bk, bn]),
        TensorDescriptor.from_tensor(y, [bm, bn // parts]),
        m, n, k, A_T=a_t, B_T=b_t, GROUP=group, FLATTEN=flatten, ROLES=roles, PARTS=parts,
        BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_warps=num_warps, num_stages=num_stages, **how,
    )  # fmt: skip


# --- a, b, c: a product by roles, as linear_glu's kernel in Gluon ---------------------------------------------


@gluon.jit
def _fetch(
    a_desc, b_desc, a2_desc, b2_desc, a_bufs, b_bufs, full, empty, n_rows, n_cols, steps,
    A_T: gl.constexpr, B_T: gl.constexpr, LOW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # One warp asks for pieces; with LOW the last step's are those of a second, short product.
    M: gl.constexpr = 64
    N: gl.constexpr = b_bufs.shape[1] if B_T else b_bufs.shape[2]
    K: gl.constexpr = b_bufs.shape[2] if B_T else b_bufs.shape[1]
    n_tiles = gl.cdiv(n_rows, 2 * M) * gl.cdiv(n_cols, N)
    count = 0
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        pid_m, pid_n = device.place_of(tile, n_rows, n_cols, GROUP, 2 * M, N)
        row, col = pid_m * 2 * M, pid_n * N
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            at = [col, step * K] if B_T else [step * K, col]
            shared.async_load(b_desc, at, bar, b_bufs.index(slot))
            for who in gl.static_range(2):
                at_a = [step * K, row + who * M] if A_T else [row + who * M, step * K]
                shared.async_load(a_desc, at_a, bar, a_bufs.index(2 * slot + who))
            count += 1
        if LOW:
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            shared.async_load(b2_desc, [col, 0] if B_T else [0, col], bar, b_bufs.index(slot))
            for who in gl.static_range(2):
                shared.async_load(a2_desc, [row + who * M, 0], bar, a_bufs.index(2 * slot + who))
            count += 1


@gluon.jit
def _finish(z, bias_ptr, y_desc, z_desc, buf, row, col, n_cols, ACTIVATION: gl.constexpr):
    layout: gl.constexpr = shared.sums_layout(y_desc.block_type.shape[1])
    z = gl.convert_layout(z, layout, assert_trivial=True)
    if bias_ptr is not None:
        cols = col + gl.arange(0, y_desc.block_type.shape[1], layout=gl.SliceLayout(0, layout))
        z = z + gl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(gl.float32)[None, :]
    if z_desc is not None:
        tma.store_wait(0)
        buf.store(z.to(y_desc.dtype))
        hopper.fence_async_shared()
        shared.async_store(z_desc, [row, col], buf)
    y = lora_linear._act(z, ACTIVATION).to(y_desc.dtype)
    tma.store_wait(0)
    buf.store(y)
    hopper.fence_async_shared()
    shared.async_store(y_desc, [row, col], buf)


@gluon.jit
def _multiply(
    bias_ptr, y_desc, z_desc, a_bufs, b_bufs, full, empty, buf, go, n_rows, n_cols, steps,
    WHO: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, LOW: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    # 64 rows of each tile; the second group starts LAG steps later, so that epilogues fall apart.
    M: gl.constexpr = 64
    N: gl.constexpr = b_bufs.shape[1] if B_T else b_bufs.shape[2]
    if WHO == 1:
        mbarrier.wait(go, 0)
    count = 0
    n_tiles = gl.cdiv(n_rows, 2 * M) * gl.cdiv(n_cols, N)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        pid_m, pid_n = device.place_of(tile, n_rows, n_cols, GROUP, 2 * M, N)
        row, col = pid_m * 2 * M + WHO * M, pid_n * N
        total = gl.zeros((M, N), gl.float32, shared.sums_layout(N))
        for step in range(steps + LOW):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            b = b_bufs.index(slot)
            a = a_bufs.index(2 * slot + WHO)
            if B_T:
                b = b.permute((1, 0))
            if A_T:
                a = a.permute((1, 0))
            total = hopper.warpgroup_mma(a, b, total, use_acc=step > 0, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            if step > 0:  # the product before this one is over: its slot is free
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
            count += 1
            if WHO == 0 and count == LAG:
                mbarrier.arrive(go, count=1)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        left, right = total.reshape((M, 2, N // 2)).permute((0, 2, 1)).split()
        _finish(left, bias_ptr, y_desc, z_desc, buf, row, col, n_cols, ACTIVATION)
        _finish(right, bias_ptr, y_desc, z_desc, buf, row, col + N // 2, n_cols, ACTIVATION)
    tma.store_wait(0)


@gluon.jit
def product_by_roles(
    a_desc, b_desc, a2_desc, b2_desc, bias_ptr, y_desc, z_desc, n_rows, n_cols, n_inner,
    A_T: gl.constexpr, B_T: gl.constexpr, LOW: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    LAG: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = a_desc.dtype
    K: gl.constexpr = b_desc.block_type.shape[1] if B_T else b_desc.block_type.shape[0]
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(
        dtype, [2 * STAGES, a_desc.block_type.shape[0], a_desc.block_type.shape[1]], a_desc.layout
    )
    b_bufs = gl.allocate_shared_memory(
        dtype, [STAGES, b_desc.block_type.shape[0], b_desc.block_type.shape[1]], b_desc.layout
    )
    y_bufs = gl.allocate_shared_memory(
        dtype, [2, y_desc.block_type.shape[0], y_desc.block_type.shape[1]], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    go = gl.allocate_shared_memory(gl.int64, [1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(go, count=1)
    steps = gl.cdiv(n_inner, K)
    gl.warp_specialize(
        [
            (_multiply, (
                bias_ptr, y_desc, z_desc, a_bufs, b_bufs, full, empty, y_bufs.index(0), go,
                n_rows, n_cols, steps, 0, A_T, B_T, LOW, GROUP, STAGES, LAG, ACTIVATION,
            )),
            (_multiply, (
                bias_ptr, y_desc, z_desc, a_bufs, b_bufs, full, empty, y_bufs.index(1), go,
                n_rows, n_cols, steps, 1, A_T, B_T, LOW, GROUP, STAGES, LAG, ACTIVATION,
            )),
            (_fetch, (
                a_desc, b_desc, a2_desc, b2_desc, a_bufs, b_bufs, full, empty,
                n_rows, n_cols, steps, A_T, B_T, LOW, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@functools.cache
def _swizzled(width):
    return gl.NVMMASharedLayout(min(128, 2 * width), element_bitwidth=16, rank=2)


def described(t, *block):
    return GluonDescriptor(t, t.shape, t.stride(), [*block], _swizzled(block[-1]))


def run_roles(
    a, b, y, low=None, bias=None, z=None, activation="identity", group=16, stages=4, lag=None,
    n=256, k=64, n_programs=None, call=None,
):  # fmt: skip
    """y = act(a b + u v + bias), low: (u, v), u (M, R) with rows, v (R, N) in the layout of b."""
    n_rows, n_cols = y.shape
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    n_tiles = host.cdiv(n_rows, 128) * host.cdiv(n_cols, n)
    m = 64
    of_a, of_b = [k, m] if a_t else [m, k], [n, k] if b_t else [k, n]
    u, v = low or (None, None)
    if host.cdiv(a.shape[1], k) + (low is not None) < (lag or stages - 1):
        raise ValueError("K is shorter than the lag: the second group would wait for ever")
    grid = (min(n_tiles, n_programs or host.n_multiprocessors(y.device)),)
    arguments = (
        described(_rows_first(a), *of_a), described(_rows_first(b), *of_b),
        u if u is None else described(u, m, k), v if v is None else described(v.t() if b_t else v, *of_b),
        bias, described(y, m, n // 2), z if z is None else described(z, m, n // 2),
        n_rows, n_cols, a.shape[1],
    )  # fmt: skip
    how = {
        "A_T": a_t, "B_T": b_t, "LOW": int(low is not None), "GROUP": group, "STAGES": stages,
        "LAG": lag or stages - 1, "ACTIVATION": activation, "num_warps": 4,
    }  # fmt: skip
    return (call or (lambda k, g, *a, **h: k[g](*a, **h)))(product_by_roles, grid, *arguments, **how)


# --- b: linear_glu's kernel in Gluon, which writes h, too -----------------------------------------------------


@gluon.jit
def _consume_h(
    w_desc, y_desc, h_desc, bias_ptr, x_bufs, w_bufs, full, empty, y_buf, go, count, first, n_parts, sizes,
    WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = y_desc.block_type.shape[2]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[2]
    layout: gl.constexpr = shared.sums_layout(BLOCK_N)
    PIECES: gl.constexpr = w_bufs.shape[2] // BLOCK_N
    out = shared.reinterpret(
        y_buf, y_desc.dtype, [PIECES, 1, BLOCK_M, BLOCK_N], y_desc.layout
    ).index(0)
    rows = out.reshape([BLOCK_M, BLOCK_N])
    _, n_hidden, steps = sizes
    for part in range(gl.program_id(0), n_parts, gl.num_programs(0)):
        row, col = glu._place_of_part(part, first, sizes, GROUP, PARTS, 2 * BLOCK_M, BLOCK_N)
        total = gl.zeros((BLOCK_M, 2 * BLOCK_N), gl.float32, shared.sums_layout(2 * BLOCK_N))
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            w = w_bufs.index(slot)
            w = shared.reinterpret(
                w, w_bufs.dtype, [PIECES, 2, BLOCK_N, BLOCK_K], w_desc.layout
            ).index(0)
            w = w.reshape([2 * BLOCK_N, BLOCK_K]).permute((1, 0))
            x = x_bufs.index(2 * slot + WHO)
            total = hopper.warpgroup_mma(x, w, total, use_acc=step > 0, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            if step > 0:
                mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
            count += 1
            if WHO == 0 and count == LAG:
                mbarrier.arrive(go, count=1)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)
        x1, x2 = total.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
        x1 = gl.convert_layout(x1, layout, assert_trivial=True)
        x2 = gl.convert_layout(x2, layout, assert_trivial=True)
        if bias_ptr is not None:
            cols = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias1 = gl.load(bias_ptr + cols, mask=cols < n_hidden, other=0.0)
            bias2 = gl.load(bias_ptr + n_hidden + cols, mask=cols < n_hidden, other=0.0)
            x1 = x1 + bias1.to(gl.float32)[None, :]
            x2 = x2 + bias2.to(gl.float32)[None, :]
        # one place for the three, one after the other: the other group multiplies meanwhile
        tma.store_wait(0)
        rows.store(x1.to(y_desc.dtype))
        hopper.fence_async_shared()
        shared.async_store(h_desc, [0, row + WHO * BLOCK_M, col], out)
        tma.store_wait(0)
        rows.store(x2.to(y_desc.dtype))
        hopper.fence_async_shared()
        shared.async_store(h_desc, [1, row + WHO * BLOCK_M, col], out)
        if GATE_FIRST:
            x1, x2 = x2, x1
        y = device.gated(x1, x2, ACTIVATION).to(y_desc.dtype)
        tma.store_wait(0)
        rows.store(y)
        hopper.fence_async_shared()
        shared.async_store(y_desc, [0, row + WHO * BLOCK_M, col], out)
    return count


@gluon.jit
def _consumer_h(
    w_whole, y_whole, h_whole, w_narrow, y_narrow, h_narrow, bias_ptr, ring, y_buf, go, sizes, n_whole, n_narrow,
    WHO: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    PARTS: gl.constexpr, ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
):  # fmt: skip
    if WHO == 1:
        mbarrier.wait(go, 0)
    count = 0
    count = _consume_h(
        w_whole, y_whole, h_whole, bias_ptr, *ring, y_buf, go, count, 0, n_whole, sizes,
        WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, 1,
    )  # fmt: skip
    _consume_h(
        w_narrow, y_narrow, h_narrow, bias_ptr, *ring, y_buf, go, count, n_whole, n_narrow, sizes,
        WHO, GROUP, STAGES, LAG, ACTIVATION, GATE_FIRST, PARTS,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_rows", "n_whole"])
def glu_with_h(
    x_desc, w_whole, y_whole, h_whole, w_narrow, y_narrow, h_narrow, bias_ptr, n_rows, n_hidden, n_in, n_whole,
    GROUP: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr, PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATE_FIRST: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = y_whole.block_type.shape[2]
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    x_bufs = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, 2, BLOCK_N, BLOCK_K], w_whole.layout)
    y_bufs = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, BLOCK_N], y_whole.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    go = gl.allocate_shared_memory(gl.int64, [1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(go, count=1)
    n_tiles = gl.cdiv(n_rows, 2 * BLOCK_M) * gl.cdiv(n_hidden, BLOCK_N)
    n_narrow = (n_tiles - n_whole) * PARTS
    sizes, ring = (n_rows, n_hidden, gl.cdiv(n_in, BLOCK_K)), (x_bufs, w_bufs, full, empty)
    gl.warp_specialize(
        [
            (_consumer_h, (
                w_whole, y_whole, h_whole, w_narrow, y_narrow, h_narrow, bias_ptr, ring, y_bufs.index(0), go,
                sizes, n_whole, n_narrow, 0, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
            )),
            (_consumer_h, (
                w_whole, y_whole, h_whole, w_narrow, y_narrow, h_narrow, bias_ptr, ring, y_bufs.index(1), go,
                sizes, n_whole, n_narrow, 1, GROUP, STAGES, LAG, PARTS, ACTIVATION, GATE_FIRST,
            )),
            (glu._producer, (
                x_desc, w_whole, w_narrow, ring, sizes, n_whole, n_narrow, GROUP, STAGES, PARTS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def run_glu_with_h(x, weight, bias, y, h, activation, gate_first, tile=(128, 128, 64), stages=4, group=32,
                   n_programs=None, call=None):  # fmt: skip
    (n_rows, n_in), n_hidden, parts = x.shape, weight.shape[0] // 2, glu._PARTS
    m, n, k = tile
    if host.cdiv(n_in, k) < stages - 1:
        raise ValueError("K is shorter than the lag: the second group would wait for ever")
    n_programs = n_programs or host.n_multiprocessors(x.device)
    n_tiles = host.cdiv(n_rows, m) * host.cdiv(n_hidden, n)
    left_over = n_tiles % n_programs if n_tiles > n_programs else 0
    if left_over * parts > n_programs:
        left_over = 0
    half, narrow, pitch = m // 2, n // parts, weight.stride(0)
    halves = weight, [2, n_hidden, n_in], [n_hidden * pitch, pitch, 1]
    of_y = y, [1, n_rows, n_hidden], [n_rows * n_hidden, n_hidden, 1]
    of_h = h, [2, n_rows, n_hidden], [n_hidden, 2 * n_hidden, 1]

    def block(tensor, shape, strides, *sizes):
        return GluonDescriptor(tensor, shape, strides, [*sizes], glu._swizzled(sizes[-1], len(sizes)))

    arguments = (
        block(x, x.shape, x.stride(), half, k), block(*halves, 2, n, k), block(*of_y, 1, half, n),
        block(*of_h, 1, half, n), block(*halves, 2, narrow, k), block(*of_y, 1, half, narrow),
        block(*of_h, 1, half, narrow), bias, n_rows, n_hidden, n_in, n_tiles - left_over,
    )  # fmt: skip
    how = {
        "GROUP": group, "STAGES": stages, "LAG": stages - 1, "PARTS": parts, "ACTIVATION": activation,
        "GATE_FIRST": gate_first, "num_warps": 4,
    }  # fmt: skip
    return (call or (lambda k, g, *a, **h: k[g](*a, **h)))(
        glu_with_h, (min(n_tiles, n_programs),), *arguments, **how
    )


# --- c: dz, s dz B, and what each strip of rows adds to s dzᵀ u and to dbias, in one pass --------------------


@triton.jit
def _dy_and_z(dy_ptr, z_ptr, offsets, mask):
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0) if z_ptr is not None else 0.0
    return tl.load(dy_ptr + offsets, mask=mask, other=0.0), z


@triton.jit
def dz_and_narrow(
    dy_ptr, z_ptr, dz_ptr, u_ptr, lora_b_ptr, du_ptr, db_ptr, dbias_ptr, n_rows, n_cols, rank, scale,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows, BLOCK_N columns at a time. z_ptr None: dz is dy, and is not written.
    # db_ptr: (programs, n_cols, rank), dbias_ptr: (programs, n_cols) or None, in float32.
    pid = tl.program_id(0)
    rows, ranks = pid * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    there = (rows < n_rows)[:, None]
    u_offsets = rows.to(tl.int64)[:, None] * rank + ranks[None, :]
    u = tl.load(u_ptr + u_offsets, mask=there & (ranks < rank)[None, :], other=0.0)
    du = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    cols = tl.arange(0, BLOCK_N)
    row_offsets = rows.to(tl.int64)[:, None] * n_cols
    mask = there & (cols < n_cols)[None, :]
    dy, z = _dy_and_z(dy_ptr, z_ptr, row_offsets + cols[None, :], mask)
    for start in tl.range(0, n_cols, BLOCK_N, num_stages=1):
        # beside a tl.dot Triton brings no load forward that it does not feed: by hand, the next tile's
        next_cols = start + BLOCK_N + tl.arange(0, BLOCK_N)
        next_mask = there & (next_cols < n_cols)[None, :]
        next_dy, next_z = _dy_and_z(dy_ptr, z_ptr, row_offsets + next_cols[None, :], next_mask)
        b_mask = (cols < n_cols)[:, None] & (ranks < rank)[None, :]
        b_offsets = cols[:, None] * rank + ranks[None, :]
        b = tl.load(lora_b_ptr + b_offsets, mask=b_mask, other=0.0)
        dz = dy
        if z_ptr is not None:
            wide = device.slope_times(dy.to(tl.float32), z.to(tl.float32), ACTIVATION)
            dz = wide.to(dy.dtype)
            tl.store(dz_ptr + row_offsets + cols[None, :], dz, mask=there & (cols < n_cols)[None, :])
        du = device.dot(dz, b, du)
        db = device.dot(dz.T, u, tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32))
        tl.store(db_ptr + pid.to(tl.int64) * n_cols * rank + b_offsets, db, mask=b_mask)
        if dbias_ptr is not None:
            sums = tl.sum(wide if z_ptr is not None else dz.to(tl.float32), axis=0)
            tl.store(dbias_ptr + pid.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)
        dy, z, cols = next_dy, next_z, next_cols
    tl.store(du_ptr + u_offsets, du * scale, mask=there & (ranks < rank)[None, :])


def run_dz_and_narrow(dy, z, u, lora_b, scale, activation, has_dbias, block_m=64, block_n=64, num_warps=4,
                      stages=3):  # fmt: skip
    """dz, du, db, dbias."""
    (n_rows, n_cols), rank = dy.shape, u.shape[1]
    strips = host.cdiv(n_rows, block_m)
    dz = dy if z is None else dy.new_empty(dy.shape)
    du = dy.new_empty(u.shape)
    db = dy.new_empty((strips, n_cols * rank), dtype=lora_linear.torch.float32)
    dbias = dy.new_empty((strips, n_cols), dtype=db.dtype) if has_dbias else None
    host.run(
        dz_and_narrow, (strips,), (dy, z, dz, u, lora_b, du, db, dbias), n_rows, n_cols, rank, float(scale),
        ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_R=max(16, host.power_of_2(rank)), NUM_STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
    # s dzᵀ u: scaled by the host's sum here, in the op by the kernel that sums
    total = host.sum_rows(db, db.dtype) if strips > 1 else db[0]
    dbias = None if dbias is None else host.sum_rows(dbias, dy.dtype)
    return dz, du, (total.view(n_cols, rank) * scale).to(dy.dtype), dbias
