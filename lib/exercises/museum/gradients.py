"""Room 4: the gradient, the test and the stopwatch, where nobody looks."""

from lib.exercises.museum.exhibit import Exhibit, numbers, position, whole_numbers

import torch
import triton
import triton.language as tl

# --- 22 ------------------------------------------------------------------------------------------------------


class Rotate(torch.autograd.Function):
    """Turns the pair x = (x1, x2) by an angle: RoPE for one head of two."""

    @staticmethod
    def forward(ctx, x, angle):
        ctx.angle = angle
        return turned(x, angle)

    @staticmethod
    def backward(ctx, dy):
        return turned(dy, ctx.angle), None


class RotateFixed(torch.autograd.Function):
    """Turns the pair x = (x1, x2) by an angle: RoPE for one head of two."""

    @staticmethod
    def forward(ctx, x, angle):
        ctx.angle = angle
        return turned(x, angle)

    @staticmethod
    def backward(ctx, dy):
        return turned(dy, -ctx.angle), None


def turned(x, angle):
    cos, sin = torch.cos(torch.tensor(float(angle))), torch.sin(torch.tensor(float(angle)))
    return torch.stack([x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin])


def _gradient_at(function, position):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = function.apply(x, position)
    return torch.autograd.grad(y, x, torch.tensor([1.0, 0.5]))[0]


# --- 23 ------------------------------------------------------------------------------------------------------


@triton.jit
def cube_slope_kernel(dy_ptr, x_ptr, dx_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    dy, x = tl.load(dy_ptr + offsets, mask=mask), tl.load(x_ptr + offsets, mask=mask)
    tl.store(dx_ptr + offsets, dy * 3 * x * x, mask=mask)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx, size = torch.empty_like(x), triton.next_power_of_2(x.numel())
        cube_slope_kernel[(1,)](dy, x, dx, x.numel(), BLOCK_SIZE=size)
        return dx


class CubeFixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * 3 * x * x  # PyTorch knows the derivative of this; or raise an error


def _slope_of_a_penalty(function, x):
    # a gradient penalty: the square of a first derivative, derived
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((function.apply(x) * x).sum(), x, create_graph=True)
    return torch.autograd.grad((slope**2).sum(), x)[0]


# --- 24 ------------------------------------------------------------------------------------------------------


def accepts(got, exact, eager):
    """The check: no error of `got` above twice eager's own largest error."""
    allowed = 2 * (eager - exact).abs().max() + 1e-6
    return bool((got - exact).abs().max() <= allowed)


def accepts_fixed(got, exact, eager):
    """The check: no error of `got` above twice eager's own largest error."""
    allowed = 2 * (eager - exact).abs().max() + 1e-6
    typical = 2 * (eager - exact).abs().median() + 1e-6  # one outlier does not move it
    return bool((got - exact).abs().max() <= allowed and (got - exact).abs().median() <= typical)


def _accepts_zeros(check, x):
    # The gradient of relu((x + 0.5) - 256), in bfloat16 by eager; the answer to be judged is zero everywhere.
    x = x.bfloat16()
    exact = ((x.double() + 0.5) - 256 > 0).double()
    eager = ((x + 0.5) - 256 > 0).double()
    return check(torch.zeros_like(exact), exact, eager)


# --- 25 ------------------------------------------------------------------------------------------------------


def is_faster(host_us):
    # Is the fused op faster than eager? Times of the GPU are those of a CUDA graph.
    eager_gpu_us, fused_gpu_us = 7, 3
    return fused_gpu_us < eager_gpu_us


def is_faster_fixed(host_us):
    # Is the fused op faster than eager? A call takes the longer of the GPU's time and the host's.
    eager_us, fused_us = max(7, 25), max(3, host_us)
    return fused_us < eager_us


EXHIBITS = (
    Exhibit(
        "The wheel that turns one way", (turned, Rotate), (turned, RotateFixed), position, 0, 1,
        run=_gradient_at,
    ),
    Exhibit(
        "The second derivative", (cube_slope_kernel, Cube), (cube_slope_kernel, CubeFixed), numbers,
        [0.0, 0.0], [1],
        run=_slope_of_a_penalty,
    ),
    Exhibit(
        "The check that passes zeros", accepts, accepts_fixed, numbers, [300, 400], [256, 300],
        run=_accepts_zeros,
    ),
    Exhibit(
        "The gain that the host ate", is_faster, is_faster_fixed,
        whole_numbers(1, 1000, unit="µs"), 10, 25,
        run=lambda verdict, host_us: verdict(host_us),
    ),
)  # fmt: skip
