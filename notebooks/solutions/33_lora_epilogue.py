"""Solutions to the exercises of notebook 33."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 33.1 one `where`: a NaN fails z < 0 and stays. maximum(z, slope * z) would be wrong for slopes above 1, too
@triton.jit
def leaky_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, scale, slope, n_elements, n_cols, BLOCK_SIZE: tl.constexpr
):
    # One program handles BLOCK_SIZE consecutive elements of x.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    delta = tl.load(delta_ptr + offsets, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    z = x + tl.cast(scale, tl.float32) * delta + bias
    tl.store(y_ptr + offsets, tl.where(z < 0, tl.cast(slope, tl.float32) * z, z), mask=mask)


def lora_leaky_relu(x, delta, bias, scale, slope):
    y, n = torch.empty_like(x), x.numel()
    leaky_kernel[(triton.cdiv(n, 1024),)](
        x, delta, bias, y, float(scale), float(slope), n, x.shape[1], BLOCK_SIZE=1024
    )
    return y


# %% 33.2 N² threads for MN elements are too few as soon as M > N; and a thread block has 1024 threads at most
shapes_that_show_it = ((2, 1), (1, 1025))


# %% 33.3 rows and columns come from the grid, and all that can go wrong is asked before the launch or behind it
mended_source = """
// y = relu(x + scale * delta + bias). x, delta: (M, N); bias: (N,); float, contiguous.
#include <climits>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

__global__ void lora_epilogue_kernel(const float* x, const float* delta, const float* bias, float* y,
                                     float scale, int64_t n_cols, unsigned n_col_tiles) {
  // One thread block handles blockDim.x columns of one row.
  const int64_t row = blockIdx.x / n_col_tiles;
  const int64_t col = int64_t(blockIdx.x % n_col_tiles) * blockDim.x + threadIdx.x;
  if (col >= n_cols) return;
  const int64_t i = row * n_cols + col;
  const float z = x[i] + scale * delta[i] + bias[col];
  y[i] = z < 0.f ? 0.f : z;  // a NaN stays
}

torch::Tensor lora_epilogue(const torch::Tensor& x, const torch::Tensor& delta, const torch::Tensor& bias,
                            double scale) {
  TORCH_CHECK_VALUE(x.is_cuda() && delta.device() == x.device() && bias.device() == x.device(),
                    "lora_epilogue: all tensors must be on one GPU");
  TORCH_CHECK_VALUE(x.scalar_type() == torch::kFloat && delta.scalar_type() == torch::kFloat &&
                        bias.scalar_type() == torch::kFloat,
                    "lora_epilogue: all tensors must be float32; call .float()");
  TORCH_CHECK_VALUE(x.dim() == 2 && delta.sizes() == x.sizes() && bias.dim() == 1 && bias.size(0) == x.size(1),
                    "lora_epilogue: x and delta must be (M, N), bias (N,)");
  TORCH_CHECK_VALUE(x.is_contiguous() && delta.is_contiguous() && bias.is_contiguous(),
                    "lora_epilogue: all tensors must be contiguous; call .contiguous()");
  torch::Tensor y = torch::empty_like(x);
  if (y.numel() == 0) return y;  // a grid of no thread blocks is a launch error
  constexpr int64_t threads = 256;
  const int64_t n_col_tiles = (x.size(1) + threads - 1) / threads, blocks = x.size(0) * n_col_tiles;
  TORCH_CHECK_VALUE(blocks <= INT_MAX, "lora_epilogue: x is too large for one launch");
  const c10::cuda::CUDAGuard guard(x.device());  // the GPU of x, which need not be the current one
  lora_epilogue_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.const_data_ptr<float>(), delta.const_data_ptr<float>(), bias.const_data_ptr<float>(),
      y.mutable_data_ptr<float>(), static_cast<float>(scale), x.size(1), static_cast<unsigned>(n_col_tiles));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


# %% 33.4 the slope is 2·relu(z), and relu(z) is the root of y: y alone tells it. (In float16 y overflows for z
# above 255, where 2·relu(z) would not; a version for float16 has to keep z.)
@triton.jit
def squared_relu_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, scale, n_elements, n_cols, BLOCK_SIZE: tl.constexpr
):
    # One program handles BLOCK_SIZE consecutive elements of x.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    delta = tl.load(delta_ptr + offsets, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    z = x + tl.cast(scale, tl.float32) * delta + bias
    z = tl.where(z < 0, 0.0, z)
    tl.store(y_ptr + offsets, z * z, mask=mask)


@triton.jit
def squared_relu_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, ddelta_ptr, scale, n_elements, BLOCK_SIZE: tl.constexpr
):
    # One program handles BLOCK_SIZE consecutive elements of y.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask).to(tl.float32)
    dx = dy * 2.0 * tl.sqrt(y)  # a NaN in y gives NaN, as 2·relu(z) does
    tl.store(dx_ptr + offsets, dx, mask=mask)
    tl.store(ddelta_ptr + offsets, tl.cast(scale, tl.float32) * dx, mask=mask)


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, bias, scale):
        y, n = torch.empty_like(x), x.numel()
        squared_relu_kernel[(triton.cdiv(n, 1024),)](
            x, delta, bias, y, float(scale), n, x.shape[1], BLOCK_SIZE=1024
        )
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, ddelta, n = torch.empty_like(y), torch.empty_like(y), y.numel()
        squared_relu_backward_kernel[(triton.cdiv(n, 1024),)](
            dy.contiguous(), y, dx, ddelta, float(ctx.scale), n, BLOCK_SIZE=1024
        )
        return dx, ddelta, dx.sum(0), None


def lora_squared_relu(x, delta, bias, scale):
    return SquaredReLU.apply(x, delta, bias, scale)
