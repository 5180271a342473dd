"""Plausible wrong answers to the exercises of notebook 33, named <answer>__<why>: each must be rejected."""

import re

from lib.recorded.results import ROOT
from lib.tests.exercises.wrong_answers import solution, transposed_taken_as_contiguous

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_right = solution("33_lora_epilogue")


def lora_leaky_relu__eager(x, delta, bias, scale, slope):
    return F.leaky_relu(x + scale * delta + bias, slope)


def lora_leaky_relu__plain_relu(x, delta, bias, scale, slope):
    return _right.lora_leaky_relu(x, delta, bias, scale, 0.0)


def lora_leaky_relu__scale_left_out(x, delta, bias, scale, slope):
    return _right.lora_leaky_relu(x, delta, bias, 1.0, slope)


_CAST = "tl.cast(scale, tl.float32)"
lora_leaky_relu__no_cast = solution(
    "33_lora_epilogue", _CAST, "scale", "tl.cast(slope, tl.float32)", "slope"
).lora_leaky_relu
lora_leaky_relu__scale_alone_is_cast = solution(
    "33_lora_epilogue", "tl.cast(slope, tl.float32)", "slope"
).lora_leaky_relu
lora_leaky_relu__cast_behind_the_product = solution(
    "33_lora_epilogue", f"x + {_CAST} * delta", "x + (scale * delta).to(tl.float32)"
).lora_leaky_relu
_ROUND = ".to(y_ptr.dtype.element_ty).to(tl.float32)"
lora_leaky_relu__scale_in_x_s_dtype = solution(
    "33_lora_epilogue", _CAST, f"{_CAST}{_ROUND}"
).lora_leaky_relu
_rounds_each_step = solution(
    "33_lora_epilogue",
    f"x + {_CAST} * delta + bias",
    f"((x + ({_CAST} * delta){_ROUND}){_ROUND} + bias){_ROUND}",
)
lora_leaky_relu__each_step_in_x_s_dtype = _rounds_each_step.lora_leaky_relu
lora_squared_relu__each_step_in_x_s_dtype = _rounds_each_step.lora_squared_relu
lora_squared_relu__no_cast = solution("33_lora_epilogue", _CAST, "scale").lora_squared_relu
lora_squared_relu__no_cast_backward = solution(
    "33_lora_epilogue", f"{_CAST} * dx", "scale * dx"
).lora_squared_relu


@triton.jit
def _maximum_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, scale, slope, n_elements, n_cols,
    CHOOSE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    delta = tl.load(delta_ptr + offsets, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    z = x + scale * delta + bias
    if CHOOSE == "maximum":
        y = tl.maximum(z, slope * z)
    elif CHOOSE == "parts":
        y = tl.maximum(z, 0.0) + slope * tl.minimum(z, 0.0)
    else:
        y = tl.where(z > 0, slope * z, z)
    tl.store(y_ptr + offsets, y, mask=mask)


def _leaky(x, delta, bias, scale, slope, choose):
    y, n = torch.empty_like(x), x.numel()
    _maximum_kernel[(triton.cdiv(n, 256),)](
        x, delta, bias, y, float(scale), float(slope), n, x.shape[1], CHOOSE=choose, BLOCK_SIZE=256
    )
    return y


def lora_leaky_relu__the_larger_one(x, delta, bias, scale, slope):
    return _leaky(x, delta, bias, scale, slope, "maximum")


def lora_leaky_relu__drops_nan(x, delta, bias, scale, slope):
    return _leaky(x, delta, bias, scale, slope, "parts")


def lora_leaky_relu__the_other_side(x, delta, bias, scale, slope):
    return _leaky(x, delta, bias, scale, slope, "other")


def lora_leaky_relu__torch_chooses(x, delta, bias, scale, slope):
    z = _right.lora_leaky_relu(x, delta, bias, scale, 1.0)
    return torch.where(z < 0, slope * z, z)


shapes_that_show_it__as_in_the_notebook = ((512, 128), (2, 2000))
shapes_that_show_it__not_the_smallest = ((3, 2), (1, 1025))
shapes_that_show_it__the_other_way_round = ((1, 1025), (2, 1))
shapes_that_show_it__1024_threads_run = ((2, 1), (1, 1024))
shapes_that_show_it__two_rows_too_wide = ((2, 1), (2, 1025))
shapes_that_show_it__one_shape = (2, 1)
shapes_that_show_it__not_numbers = (("2", "1"), ("1", "1025"))
shapes_that_show_it__none_at_all = ((2, 1), (0, 5))

_mended = _right.mended_source
mended_source__the_lectures = (ROOT / "lib/exercises/broken_lora.cu").read_text()
mended_source__blocks_only = mended_source__the_lectures.replace(
    "int blocks = (x.numel() + x.size(0) - 1) / x.size(0);", "int blocks = x.size(0);"
)
mended_source__keeps_waiting = _mended.replace(
    "C10_CUDA_KERNEL_LAUNCH_CHECK();", "C10_CUDA_KERNEL_LAUNCH_CHECK();\n  cudaDeviceSynchronize();"
)
mended_source__no_launch_check = _mended.replace("C10_CUDA_KERNEL_LAUNCH_CHECK();", "")
mended_source__no_guard = _mended.replace(
    "  const c10::cuda::CUDAGuard guard(x.device());", "  "
).replace("#include <c10/cuda/CUDAGuard.h>\n", "")
mended_source__no_guard_but_its_header = _mended.replace(
    "  const c10::cuda::CUDAGuard guard(x.device());", "  "
)
mended_source__default_stream = _mended.replace(", 0, c10::cuda::getCurrentCUDAStream()>>>", ">>>")
mended_source__double_scale = _mended.replace("float scale, int64_t", "double scale, int64_t")
mended_source__double_literal = _mended.replace("z < 0.f ?", "z < 0.0 ?")
mended_source__int_index = _mended.replace(
    "float scale, int64_t n_cols", "float scale, int n_cols"
).replace("const int64_t row", "const int row").replace(
    "const int64_t col = int64_t(blockIdx.x % n_col_tiles)", "const int col = blockIdx.x % n_col_tiles"
).replace("const int64_t i =", "const int i =")  # fmt: skip
mended_source__int_takes_an_index_of_64_bits = _mended.replace("const int64_t i =", "int i =")
mended_source__int_takes_it_later = _mended.replace("const int64_t i =", "int i;\n  i =")
mended_source__index_cast_to_int = _mended.replace("x[i]", "x[(int)(row * n_cols + col)]")
mended_source__int_takes_a_column = _mended.replace("const int64_t col =", "const int col =")
_flat_kernel = """__global__ void lora_epilogue_kernel(const float* x, const float* delta, const float* bias,
                                     float* y, float scale, int64_t n_elements, int64_t n_cols) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n_elements) return;
  const float z = x[i] + scale * delta[i] + bias[i % n_cols];
  y[i] = z < 0.f ? 0.f : z;
}

"""
_flat = re.sub("(?s)__global__.*?(?=torch::Tensor)", _flat_kernel, _mended).replace(
    "x.size(1), static_cast<unsigned>(n_col_tiles)", "x.numel(), x.size(1)"
)
mended_source__product_of_32_bits = _flat.replace("int64_t(blockIdx.x)", "blockIdx.x")
mended_source__product_cast_too_late = _flat.replace(
    "int64_t(blockIdx.x) * blockDim.x", "int64_t(blockIdx.x * blockDim.x)"
)
mended_source__int_keeps_the_product = _flat.replace("const int64_t i =", "const int i =")
mended_source__sizes_of_32_bits = _flat.replace(
    "int64_t n_elements, int64_t n_cols", "int n_elements, int n_cols"
)
mended_source__any_bias = _mended.replace(" && bias.is_contiguous()", "")
mended_source__drops_nan = _mended.replace("z < 0.f ? 0.f : z", "z > 0.f ? z : 0.f")
mended_source__no_empty_x = _mended.replace("if (y.numel() == 0) return y;", "")
mended_source__rounds_down = _mended.replace(
    "(x.size(1) + threads - 1) / threads", "x.size(1) / threads"
)
mended_source__no_bounds_check = _mended.replace("if (col >= n_cols) return;", "")
mended_source__any_strides = _mended.replace("x.is_contiguous() && delta.is_contiguous() && ", "")
mended_source__any_device = _mended.replace("x.is_cuda() && ", "")
mended_source__asks_x_alone = _mended.replace(
    "x.is_cuda() && delta.device() == x.device() && bias.device() == x.device()", "x.is_cuda()"
)
_DEVICES = "x.is_cuda() && delta.device() == x.device() && bias.device() == x.device()"
mended_source__any_gpus = _mended.replace(
    _DEVICES, "x.is_cuda() && delta.is_cuda() && bias.is_cuda()"
)
mended_source__devices_of_a_type = _mended.replace(
    _DEVICES, "x.device().is_cuda() && delta.device().is_cuda() && bias.device().is_cuda()"
)
mended_source__loop_over_any_gpus = _mended.replace(
    f"  TORCH_CHECK_VALUE({_DEVICES},",
    "  for (const torch::Tensor& t : {x, delta, bias}) TORCH_CHECK_VALUE(t.is_cuda(),",
)
mended_source__host_counts_in_an_int = _flat.replace(
    "constexpr int64_t threads", "const int n = x.numel();\n  constexpr int64_t threads"
).replace("x.numel(), x.size(1)", "n, x.size(1)")
mended_source__bias_of_two_dimensions = _mended.replace("bias.dim() == 1 && ", "")
mended_source__x_of_three_dimensions = _mended.replace("x.dim() == 2 && ", "")
mended_source__any_delta = _mended.replace("delta.sizes() == x.sizes() && ", "")
mended_source__no_kernel = "torch::Tensor lora_epilogue"


@triton.jit
def _squared_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, z_ptr, scale, n_elements, n_cols, BLOCK_SIZE: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    delta = tl.load(delta_ptr + offsets, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
    z = x + scale * delta + bias
    z = tl.where(z < 0, 0.0, z)
    tl.store(y_ptr + offsets, z * z, mask=mask)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, z, mask=mask)


@triton.jit
def _slope_kernel(
    dy_ptr, z_ptr, x_ptr, delta_ptr, bias_ptr, dx_ptr, ddelta_ptr, scale, factor, n_elements, n_cols,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    if z_ptr is not None:
        z = tl.load(z_ptr + offsets, mask=mask).to(tl.float32)
    else:
        z = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
        z += scale * tl.load(delta_ptr + offsets, mask=mask).to(tl.float32)
        z += tl.load(bias_ptr + offsets % n_cols, mask=mask).to(tl.float32)
        z = tl.where(z < 0, 0.0, z)
    dx = factor * z * tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(dx_ptr + offsets, dx, mask=mask)
    tl.store(ddelta_ptr + offsets, scale * dx, mask=mask)


class _Squared(torch.autograd.Function):
    """saved: 'z' (a fourth pass forward) or 'x' (a fifth backward); flaw: what is wrong in backward."""

    @staticmethod
    def forward(ctx, x, delta, bias, scale, saved, flaw):
        y, n = torch.empty_like(x), x.numel()
        z = torch.empty_like(x) if saved == "z" else None
        _squared_kernel[(triton.cdiv(n, 1024),)](
            x, delta, bias, y, z, float(scale), n, x.shape[1], BLOCK_SIZE=1024
        )
        ctx.save_for_backward(*((z,) if saved == "z" else (x, delta, bias)))
        ctx.scale, ctx.flaw = scale, flaw
        return y

    @staticmethod
    def backward(ctx, dy):
        n, n_cols = dy.numel(), dy.shape[1]
        z, x, delta, bias = (
            (*ctx.saved_tensors, None, None, None)
            if len(ctx.saved_tensors) == 1
            else (None, *ctx.saved_tensors)
        )
        dx, ddelta = (torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) for _ in range(2))
        dy = dy if ctx.flaw == "strides" else dy.contiguous()
        factor = 1.0 if ctx.flaw == "factor" else 2.0
        _slope_kernel[(triton.cdiv(n, 1024),)](
            dy, z, x, delta, bias, dx, ddelta, float(ctx.scale), factor, n, n_cols, BLOCK_SIZE=1024
        )
        if ctx.flaw == "ddelta":
            ddelta = dx.clone()
        dbias = dx.sum(1).sum().expand(n_cols) if ctx.flaw == "dbias" else dx.sum(0)
        return dx, ddelta, dbias, None, None, None


def lora_squared_relu__keeps_z(x, delta, bias, scale):
    return _Squared.apply(x, delta, bias, scale, "z", None)


def lora_squared_relu__keeps_x_and_delta(x, delta, bias, scale):
    return _Squared.apply(x, delta, bias, scale, "x", None)


def lora_squared_relu__slope_without_the_two(x, delta, bias, scale):
    return _Squared.apply(x, delta, bias, scale, "z", "factor")


def lora_squared_relu__ddelta_not_scaled(x, delta, bias, scale):
    return _Squared.apply(x, delta, bias, scale, "z", "ddelta")


def lora_squared_relu__dbias_of_everything(x, delta, bias, scale):
    return _Squared.apply(x, delta, bias, scale, "z", "dbias")


class _StridesOfDy(_right.SquaredReLU):
    """Takes dy for contiguous, whatever its strides are."""

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, ddelta, n = torch.empty_like(y), torch.empty_like(y), y.numel()
        storage = torch.zeros_like(y)  # what lies behind a dy of one element: anything
        dy = (
            dy
            if dy.is_contiguous()
            else storage.index_fill_(1, torch.tensor([0], device=y.device), 1)
        )
        _right.squared_relu_backward_kernel[(triton.cdiv(n, 1024),)](
            dy, y, dx, ddelta, float(ctx.scale), n, BLOCK_SIZE=1024
        )
        return dx, ddelta, dx.sum(0), None


def lora_squared_relu__strides_of_dy(x, delta, bias, scale):
    return _StridesOfDy.apply(x, delta, bias, scale)


lora_squared_relu__backward_in_float32_alone = solution(  # Triton has no root of 16 bits
    "33_lora_epilogue",
    "tl.load(y_ptr + offsets, mask=mask).to(tl.float32)",
    "tl.load(y_ptr + offsets, mask=mask)",
).lora_squared_relu


def lora_squared_relu__eager(x, delta, bias, scale):
    return torch.relu(x + scale * delta + bias).square()


class _EagerBackward(_right.SquaredReLU):
    @staticmethod
    def backward(ctx, dy):
        dx = dy * 2 * ctx.saved_tensors[0].sqrt()
        return dx, ctx.scale * dx, dx.sum(0), None


def lora_squared_relu__backward_without_a_kernel(x, delta, bias, scale):
    return _EagerBackward.apply(x, delta, bias, scale)


@triton.jit
def _racing_kernel(
    dy_ptr, y_ptr, dx_ptr, ddelta_ptr, dbias_ptr, scale, n_rows, n_cols, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, offsets = (rows < n_rows) & (cols < n_cols), rows * n_cols + cols
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    dx = tl.load(dy_ptr + offsets, mask=mask, other=0.0) * 2.0 * tl.sqrt(y)
    tl.store(dx_ptr + offsets, dx, mask=mask)
    tl.store(ddelta_ptr + offsets, scale * dx, mask=mask)
    dbias = tl.load(dbias_ptr + cols, mask=cols < n_cols) + tl.sum(dx, axis=0)[None, :]
    tl.store(dbias_ptr + cols, dbias, mask=cols < n_cols)


class _Racing(_right.SquaredReLU):
    """dbias in the same launch: each tile loads it, adds its rows and stores it."""

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, ddelta, dbias = torch.empty_like(y), torch.empty_like(y), y.new_zeros(y.shape[1])
        _racing_kernel[(triton.cdiv(len(y), 64), triton.cdiv(y.shape[1], 64))](
            dy.contiguous(), y, dx, ddelta, dbias, float(ctx.scale), *y.shape, BLOCK=64
        )
        return dx, ddelta, dbias, None


def lora_squared_relu__tiles_race_for_dbias(x, delta, bias, scale):
    return _Racing.apply(x, delta, bias, scale)


def lora_squared_relu__torch_copies(x, delta, bias, scale):
    return _right.lora_squared_relu(x.clone(), delta, bias, scale)


class _TorchScales(_right.SquaredReLU):
    @staticmethod
    def backward(ctx, dy):
        dx, _, dbias, _ = _right.SquaredReLU.backward(ctx, dy)
        return dx, ctx.scale * dx, dbias, None


def lora_squared_relu__torch_scales_the_gradient(x, delta, bias, scale):
    return _TorchScales.apply(x, delta, bias, scale)


def lora_squared_relu__not_squared(x, delta, bias, scale):
    return _right.lora_squared_relu(x, delta, bias, scale).sqrt()


lora_squared_relu__transposed_dy_as_contiguous = transposed_taken_as_contiguous(
    _right.lora_squared_relu
)
