// y = relu(x + scale * delta + bias). x, delta: (M, N); bias: (N,); float.
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

__global__ void lora_epilogue_kernel(const float* x, const float* delta, const float* bias, float* y,
                                     double scale, int n_elements, int n_cols) {
  int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < n_elements) {
    float value = x[index] + scale * delta[index] + bias[index % n_cols];
    y[index] = value > 0 ? value : 0;
  }
}

torch::Tensor lora_epilogue(const torch::Tensor& x, const torch::Tensor& delta, const torch::Tensor& bias,
                            double scale) {
  torch::Tensor y = x.clone();
  int threads = x.size(1);
  int blocks = (x.numel() + x.size(0) - 1) / x.size(0);
  lora_epilogue_kernel<<<blocks, threads>>>(x.data_ptr<float>(), delta.data_ptr<float>(), bias.data_ptr<float>(),
                                            y.data_ptr<float>(), scale, x.numel(), x.size(1));
  cudaDeviceSynchronize();
  return y;
}
