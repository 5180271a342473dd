"""Solutions to the exercises of notebook 31."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 31.1 only an exponent that is not positive: e lies in (0, 1], and neither sum nor quotient can overflow
@triton.jit
def safe_tanh_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    e = tl.exp(-2 * tl.abs(x))
    y = (1 - e) / (1 + e)
    tl.store(y_ptr + offsets, tl.where(x < 0, -y, y), mask=mask)


def safe_tanh(x):
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    safe_tanh_kernel[grid](x, y, x.numel(), BLOCK_SIZE=1024)
    return y


# %% 31.2 x² is more than float16 holds from 256 on; s·(1 - s) is 0 there, and 0 times infinity is NaN
smallest_number_that_shows_it = 256.0


# %% 31.3 s·(1 - s) as e/(1 + e)², with e = exp(-|x|): where s is nearly 1, 1 - s has lost its digits
@triton.jit
def silu_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(y_ptr + offsets, x / (1 + tl.exp(-x)), mask=mask)


@triton.jit
def silu_backward_kernel(dy_ptr, x_ptr, dx_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    e = tl.exp(-tl.abs(x))
    t = 1 / (1 + e)
    s = tl.where(x < 0, e * t, t)
    tl.store(dx_ptr + offsets, dy * (s + x * (e * t * t)), mask=mask)


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        silu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK_SIZE=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)  # y.sum().backward() sends strides of 0
        grid = (triton.cdiv(x.numel(), 1024),)
        silu_backward_kernel[grid](dy, x, dx, x.numel(), BLOCK_SIZE=1024)
        return dx


def silu(x):
    return SiLU.apply(x)


# %% 31.4 a program reads its rows and writes as many bytes
def rows_per_program(n_cols, itemsize, bandwidth_gbps, blocks_per_ns):
    least_bytes, rows = bandwidth_gbps / blocks_per_ns, 1
    while 2 * rows * n_cols * itemsize < least_bytes:
        rows *= 2
    return rows


# %% 31.5 whole vectors where both tensors begin on a boundary; the last thread takes the rest one by one
vector_source = """
#include <cstdint>
#include <torch/types.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

__device__ __forceinline__ float gelu_of(float x) {
  return x / (1.f + expf(-1.5957691f * x * (1.f + 0.044715f * x * x)));
}

__global__ void gelu_kernel(const float* x, float* y, int64_t n, bool vectors) {
  // One thread handles four adjacent elements.
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (vectors && i + 4 <= n) {
    float4 v = *reinterpret_cast<const float4*>(x + i);
    v.x = gelu_of(v.x);
    v.y = gelu_of(v.y);
    v.z = gelu_of(v.z);
    v.w = gelu_of(v.w);
    *reinterpret_cast<float4*>(y + i) = v;
  } else {
    for (int64_t k = i; k < i + 4 && k < n; ++k) y[k] = gelu_of(x[k]);
  }
}

torch::Tensor gelu(torch::Tensor x) {
  TORCH_CHECK_VALUE(x.is_cuda(), "gelu: x must be on a GPU, got ", x.device());
  TORCH_CHECK_VALUE(x.scalar_type() == torch::kFloat, "gelu: x must be float32, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), "gelu: x must be contiguous; call .contiguous()");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = torch::empty_like(x);
  const int64_t n = x.numel(), threads = 128, blocks = (n + 4 * threads - 1) / (4 * threads);
  if (n == 0) return y;
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  const bool vectors = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  gelu_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(from, to, n, vectors);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""
