"""Solutions to the exercises of notebook 22."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on
from lib.nogpu.compile_only import compile_for, signature_of

import torch
import triton
import triton.language as tl


# %% 22.1 a thread has its share of the tile, one element at least, and a load brings 16 bytes at most
def loads_per_thread(block_size, num_warps, itemsize):
    elements = max(1, block_size // (32 * num_warps))
    return -(-elements * itemsize // 16)


# %% 22.2 neighbours in memory are loaded together, as one tile twice as long, and parted in registers
@triton.jit
def wide_pairs_kernel(x_ptr, y_ptr, n_pairs, BLOCK_SIZE: tl.constexpr):
    start = tl.program_id(0) * BLOCK_SIZE
    in_offsets = 2 * start + tl.arange(0, 2 * BLOCK_SIZE)
    x = tl.load(x_ptr + in_offsets, mask=in_offsets < 2 * n_pairs)
    first, second = tl.split(tl.reshape(x, (BLOCK_SIZE, 2)))
    offsets = start + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, first * second, mask=offsets < n_pairs)


# %% 22.3 a maximum and a minimum that both let NaN through: one FMNMX.NAN each
@triton.jit
def short_relu6_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.clamp(x, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + offsets, y, mask=mask)


# %% 22.4 literals with f, functions for floats, beta a float; log1pf also keeps what logf(1 + …) rounds away
float_kernel = """
__global__ void softplus_kernel(const float* x, float* y, int64_t n, float beta) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fmaxf(x[i], 0.f) + log1pf(expf(-beta * fabsf(x[i]))) / beta;
}
"""


# %% 22.5 sixteen warps: 64 sums a thread, which leaves registers for a quarter of the SM's warps
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of c, (BLOCK_M, BLOCK_N); a descriptor is a matrix cut into tiles.
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        sums = tl.dot(a.load([row, k]), b.load([k, col]), sums)
    c.store([row, col], sums.to(tl.float16))


matrix = torch.empty(512, 512, dtype=torch.float16)
matmul = signature_of(
    matmul_kernel, matrix, matrix, matrix, 512, 512, 512, BLOCK_M=128, BLOCK_N=256, BLOCK_K=32
)
fitting = compile_for(matmul_kernel, matmul, arch=90, num_warps=16)
