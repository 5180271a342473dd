"""Programs in Gluon, in the shape of Triton's tutorials: test_gluon_programs.py runs them, and breaks them."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

# words that have changed their names, by those of this Triton
meet = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


# --- blocks and pointers -----------------------------------------------------------------------------


@gluon.jit
def scalar_kernel(x_ptr, y_ptr):
    gl.store(y_ptr, gl.load(x_ptr))


@triton.autotune([triton.Config({"BLOCK": 2**i}, num_warps=1) for i in (3, 5)], key=["n"])
@gluon.jit
def loop_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    start = gl.program_id(0) * BLOCK
    end = min(start + BLOCK, n)
    for i in range(start, end):
        gl.store(y_ptr + i, gl.load(x_ptr + i))


@gluon.jit
def line_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr, layout: gl.constexpr):
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    gl.store(y_ptr + offsets, gl.load(x_ptr + offsets, mask=mask), mask=mask)


@gluon.jit
def any_layout_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr, layout: gl.constexpr):
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK)  # in gl.AutoLayout()
    offsets = gl.set_auto_layout(offsets, layout)
    x = gl.load(x_ptr + offsets, offsets < n)
    gl.store(y_ptr + offsets, x, offsets < n)


@gluon.constexpr_function
def layout_of(stride_m, stride_n, num_warps):
    order = [1, 0] if stride_n == 1 else [0, 1]
    return gl.BlockedLayout([1, 1], [1, 32], [1, num_warps], order)


@gluon.jit
def plane_kernel(
    x_ptr, y_ptr, n_rows, n_cols, x_stride_m, x_stride_n, y_stride_m, y_stride_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_M * BLOCK_N % 32 == 0, "whole warps")
    L_IN: gl.constexpr = layout_of(64, 1, num_warps)
    L_OUT: gl.constexpr = layout_of(1, 64, num_warps)
    row, col = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    i = row.to(gl.int64) + gl.arange(0, BLOCK_M, gl.SliceLayout(dim=1, parent=L_IN))
    j = col + gl.arange(0, BLOCK_N, gl.SliceLayout(dim=0, parent=L_IN))
    mask = (i[:, None] < n_rows) & (j[None, :] < n_cols)
    x = gl.load(x_ptr + i[:, None] * x_stride_m + j[None, :] * x_stride_n, mask, other=0.0)
    x = gl.convert_layout(x, L_OUT)
    i = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, L_OUT))
    j = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, L_OUT))
    mask = (i[:, None] < n_rows) & (j[None, :] < n_cols)
    gl.store(y_ptr + i[:, None] * y_stride_m + j[None, :] * y_stride_n, x, mask)


@gluon.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    cols = gl.arange(0, BLOCK, layout)
    at = gl.program_id(0) * n_cols + cols
    x = gl.load(x_ptr + at, cols < n_cols, -float("inf")).to(gl.float32)
    x = gl.where(cols < n_cols, x, gl.full([BLOCK], -float("inf"), gl.float32, layout))
    power = gl.exp2((x - gl.max(x, axis=0)) * 1.4426950408889634)
    y = gl.maximum(power / gl.sum(power, axis=0), gl.zeros([BLOCK], gl.float32, layout=layout))
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@gluon.jit
def times(a, b):
    return a * b


@gluon.jit
def words_kernel(x_ptr, y_ptr, sums_ptr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    # y = gelu(x) less its least of a row, columns in turn from both halves; sums and products of rows
    L: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, BLOCK_M, gl.SliceLayout(1, L))
    j = gl.arange(0, BLOCK_N, gl.SliceLayout(0, L))
    at = gl.expand_dims(i, 1) * BLOCK_N + gl.expand_dims(j, 0)
    x = gelu(gl.load(x_ptr + at))
    y = x - gl.min(x, axis=1, keep_dims=True) + gl.rsqrt(gl.full_like(x, 4.0)) * gl.zeros_like(x)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_N], flat, y)
    meet()
    left = smem.slice(0, BLOCK_N // 2, dim=1).load(L)
    right = smem.slice(BLOCK_N // 2, BLOCK_N // 2, dim=1).load(L)
    y = gl.reshape(gl.join(left, right), [BLOCK_M, BLOCK_N])
    gl.store(y_ptr + at, gl.convert_layout(y, L))
    gl.atomic_add(sums_ptr + i, gl.sum(x, 1) + gl.reduce(x, 1, times))
    gl.device_assert(gl.num_warps() == 4)


@gluon.jit
def copies_kernel(x_ptr, y_ptr, z_ptr, n, STEPS: gl.constexpr, BLOCK: gl.constexpr):
    # z = x + y, its loads two steps ahead by cp.async
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    x_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK], layout=flat)
    y_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK], layout=flat)
    first = gl.program_id(0) * STEPS * BLOCK
    for step in gl.static_range(STEPS + 1):
        if step < STEPS:
            offsets = first + step * BLOCK + gl.arange(0, BLOCK, layout)
            cp_async(x_smem.index(step % 2), x_ptr + offsets, mask=offsets < n)
            cp_async(y_smem.index(step % 2), y_ptr + offsets, mask=offsets < n)
        async_copy.commit_group()
        if step > 0:
            async_copy.wait_group(num_outstanding=1)
            slot = (step - 1) % 2
            z = x_smem.index(slot).load(layout) + y_smem.index(slot).load(layout)
            offsets = first + (step - 1) * BLOCK + gl.arange(0, BLOCK, layout)
            gl.store(z_ptr + offsets, z, mask=offsets < n)


# --- TMA ---------------------------------------------------------------------------------------------


@gluon.jit
def by_tma_kernel(x_desc, y_desc, BLOCK: gl.constexpr):
    smem_layout: gl.constexpr = x_desc.layout
    smem = gl.allocate_shared_memory(x_desc.dtype, [BLOCK], smem_layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma_load(x_desc, [gl.program_id(0) * BLOCK], ready, smem)
    mbarrier.wait(ready, phase=0)
    mbarrier.invalidate(ready)
    tma_store(y_desc, [gl.program_id(0) * BLOCK], smem)
    tma.store_wait(pendings=0)


@gluon.jit
def own_descriptors_kernel(
    x_ptr, y_ptr, n_rows, n_cols, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], gl.float32)
    x_desc = tma.make_tensor_descriptor(
        x_ptr, [n_rows, n_cols], [n_cols, 1], block_shape=[BLOCK_M, BLOCK_N], layout=layout
    )
    y_desc = tma.make_tensor_descriptor(
        y_ptr, [n_rows, n_cols], [n_cols, 1], block_shape=[BLOCK_M, BLOCK_N], layout=layout
    )
    smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_N], layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    tma_load(x_desc, [gl.program_id(0) * BLOCK_M, 0], ready, smem)
    mbarrier.wait(ready, 0)
    tma_store(y_desc, [gl.program_id(0) * BLOCK_M, 0], smem)
    tma.store_wait(0)


@gluon.jit
def ask(copy, x_desc, y_desc, x_smem, y_smem, ready, row, n_slots: gl.constexpr):
    bar = ready.index(copy % n_slots)
    mbarrier.expect(bar, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
    col = copy * x_desc.block_shape[1]
    tma_load(x_desc, [row, col], bar, x_smem.index(copy % n_slots))
    tma_load(y_desc, [row, col], bar, y_smem.index(copy % n_slots))
    return copy + 1


@gluon.jit
def add(
    read, x_smem, y_smem, z_smem, z_desc, ready, row, layout: gl.constexpr, n_slots: gl.constexpr
):
    slot = read % n_slots
    mbarrier.wait(ready.index(slot), read // n_slots & 1)
    z = x_smem.index(slot).load(layout) + y_smem.index(slot).load(layout)
    tma.store_wait(pendings=0)  # of the step before
    z_smem.store(z)
    fence_async_shared()
    tma_store(z_desc, [row, read * z_desc.block_shape[1]], z_smem)
    return read + 1


@gluon.jit
def add_kernel(x_desc, y_desc, z_desc, n_cols, n_slots: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    block: gl.constexpr = x_desc.block_type.shape
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [n_slots] + block, x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [n_slots] + block, y_desc.layout)
    z_smem = gl.allocate_shared_memory(z_desc.dtype, block, z_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [n_slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n_slots):
        mbarrier.init(ready.index(i), count=1)
    row, copy, read = gl.program_id(0) * block[0], 0, 0
    for _ in gl.static_range(n_slots - 1):
        copy = ask(copy, x_desc, y_desc, x_smem, y_smem, ready, row, n_slots)
    for _ in range(gl.cdiv(n_cols, block[1]) - (n_slots - 1)):
        copy = ask(copy, x_desc, y_desc, x_smem, y_smem, ready, row, n_slots)
        read = add(read, x_smem, y_smem, z_smem, z_desc, ready, row, layout, n_slots)
    for _ in gl.static_range(n_slots - 1):
        read = add(read, x_smem, y_smem, z_smem, z_desc, ready, row, layout, n_slots)
    for i in gl.static_range(n_slots):
        mbarrier.invalidate(ready.index(i))
    tma.store_wait(pendings=0)


# --- wgmma -------------------------------------------------------------------------------------------


@gluon.constexpr_function
def sums_layout(dtype, n, num_warps):
    k = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, n, k]
    )


@gluon.jit
def one_product_kernel(
    a_desc, b_desc, c_desc, d_desc, IN_REGISTERS: gl.constexpr, num_warps: gl.constexpr
):
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    nbytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    mbarrier.expect(ready, nbytes + c_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], ready, a_smem)
    tma_load(b_desc, [0, 0], ready, b_smem)
    tma_load(c_desc, [0, 0], ready, c_smem)
    mbarrier.wait(ready, phase=0)
    mbarrier.invalidate(ready)
    c_layout: gl.constexpr = sums_layout(a_desc.dtype, d_desc.block_type.shape[1], num_warps)
    a_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=c_layout, k_width=32 // a_desc.dtype.primitive_bitwidth
    )
    gl.static_assert(isinstance(b_smem.type.layout, gl.NVMMASharedLayout))
    a = a_smem.load(a_layout) if IN_REGISTERS else a_smem
    d = warpgroup_mma(a, b_smem, c_smem.load(c_layout), is_async=True, use_acc=True)
    d = warpgroup_mma_wait(num_outstanding=0, deps=(d,))
    d_smem = gl.allocate_shared_memory(d_desc.dtype, d_desc.block_type.shape, d_desc.layout)
    d_smem.store(d)
    fence_async_shared()
    tma_store(d_desc, [0, 0], d_smem)
    tma.store_wait(pendings=0)


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, num_warps: gl.constexpr):
    # Two buffers for each operand: the loads of a step go on beside the product of the step before.
    BLOCK_M: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    K = a_desc.shape[1]
    dtype: gl.constexpr = a_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [2] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [2] + b_desc.block_type.shape, b_desc.layout)
    row, col = gl.program_id(axis=0) * BLOCK_M, gl.program_id(axis=1) * BLOCK_N
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    layout: gl.constexpr = sums_layout(dtype, BLOCK_N, num_warps)
    acc = warpgroup_mma_init(gl.zeros((BLOCK_M, BLOCK_N), dtype=gl.float32, layout=layout))
    phase = 0
    slot = 0
    for k in range(0, K, BLOCK_K):
        mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], ready, a_smem.index(slot))
        tma_load(b_desc, [k, col], ready, b_smem.index(slot))
        mbarrier.wait(ready, phase=phase)
        phase ^= 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        acc = warpgroup_mma(a_smem.index(slot), b_smem.index(slot), acc, is_async=True)
        slot ^= 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.invalidate(ready)
    c_smem = gl.allocate_shared_memory(dtype, c_desc.block_type.shape, c_desc.layout)
    c_smem.store(acc.to(dtype))
    fence_async_shared()
    tma_store(c_desc, [row, col], c_smem)
    tma.store_wait(pendings=0)


@aggregate
class Tiles:
    """The tiles of a program that stays."""

    first: gl.tensor
    end: gl.tensor
    tiles_m: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, end, tiles_m):
        self.first = first
        self.end = end
        self.tiles_m = tiles_m

    @gluon.jit
    def of_program(m, n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
        tiles_m = gl.cdiv(m, BLOCK_M)
        tiles = tiles_m * gl.cdiv(n, BLOCK_N)
        each = gl.cdiv(tiles, gl.num_programs(axis=0))
        first = gl.program_id(axis=0) * each
        return Tiles(first, gl.minimum(first + each, tiles), tiles_m)

    @gluon.jit
    def place(self, i):
        return (self.first + i) % self.tiles_m, (self.first + i) // self.tiles_m


@gluon.jit
def stays_kernel(a_desc, b_desc, c_desc, Scheduler: gl.constexpr, num_warps: gl.constexpr):
    M: gl.constexpr = c_desc.block_type.shape[0]
    N: gl.constexpr = c_desc.block_type.shape[1]
    a_smem = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    phase = 0
    tiles = Scheduler.of_program(c_desc.shape[0], c_desc.shape[1], M, N)
    for i in range(tiles.end - tiles.first):
        m, n = tiles.place(i)
        acc = gl.zeros((M, N), gl.float32, sums_layout(a_desc.dtype, N, num_warps))
        for k in range(0, a_desc.shape[1], a_desc.block_type.shape[1]):
            mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [m * M, k], ready, a_smem)
            tma_load(b_desc, [k, n * N], ready, b_smem)
            mbarrier.wait(ready, phase)
            phase ^= 1
            acc = warpgroup_mma(a_smem, b_smem, acc)
        tma.store_wait(pendings=0)
        c_smem.store(acc.to(c_desc.dtype))
        fence_async_shared()
        tma_store(c_desc, [m * M, n * N], c_smem)
    tma.store_wait(pendings=0)


# --- roles -------------------------------------------------------------------------------------------


@gluon.jit
def fetch(a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps):
    n_slots: gl.constexpr = a_smem.shape[0]
    for step in range(steps):
        slot = step % n_slots
        mbarrier.wait(empty.index(slot), (step // n_slots & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        k = step * a_desc.block_type.shape[1]
        tma_load(a_desc, [row, k], full.index(slot), a_smem.index(slot))
        tma_load(b_desc, [k, col], full.index(slot), b_smem.index(slot))


@gluon.jit
def multiply(a_smem, b_smem, c_smem, full, empty, c_desc, row, col, steps):
    n_slots: gl.constexpr = a_smem.shape[0]
    M: gl.constexpr = c_desc.block_type.shape[0]
    N: gl.constexpr = c_desc.block_type.shape[1]
    acc = gl.zeros((M, N), gl.float32, sums_layout(a_smem.dtype, N, 4))
    for step in range(steps):
        slot = step % n_slots
        mbarrier.wait(full.index(slot), step // n_slots & 1)
        acc = warpgroup_mma(a_smem.index(slot), b_smem.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(slot), count=1)
    c_smem.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, col], c_smem)
    tma.store_wait(pendings=0)


@gluon.jit
def roles_kernel(a_desc, b_desc, c_desc, n_slots: gl.constexpr):
    a_block: gl.constexpr = a_desc.block_type.shape
    b_block: gl.constexpr = b_desc.block_type.shape
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [n_slots] + a_block, a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [n_slots] + b_block, b_desc.layout)
    c_smem = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [n_slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [n_slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n_slots):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    row = gl.program_id(0) * c_desc.block_type.shape[0]
    col = gl.program_id(1) * c_desc.block_type.shape[1]
    steps = gl.cdiv(a_desc.shape[1], a_desc.block_type.shape[1])
    gl.warp_specialize(
        [
            (multiply, (a_smem, b_smem, c_smem, full, empty, c_desc, row, col, steps)),
            (fetch, (a_desc, b_desc, a_smem, b_smem, full, empty, row, col, steps)),
        ],
        [1],
        [24],
    )
    for i in gl.static_range(n_slots):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(empty.index(i))
