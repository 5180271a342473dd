"""Plausible wrong answers to the capstones, named <answer>__<why>: each must be rejected.

None of them comes from a right kernel, because there is none in the repository.
"""

from lib.exercises.capstones import gated_rms_norm_eager, scaled_linear_eager
from lib.tests.exercises.wrong_answers import beside_an_empty_kernel

import torch
import torch.nn.functional as F


def _gated(norm, gated=lambda x, gate: x * F.silu(gate)):
    """In float32, rounded at the end; norm(u, eps) is what is made of the gated rows u."""

    def answer(x, gate, weight, eps=1e-6):
        if x.shape != gate.shape or weight.shape != x.shape[-1:]:
            raise ValueError("gate needs the shape of x, and weight its last size")
        if not x.is_floating_point():
            raise TypeError("x has to be of floating point")
        wide = torch.promote_types(x.dtype, torch.float32)
        u = gated(x.to(wide), gate.to(wide))
        return (norm(u, eps) * weight).to(x.dtype)

    return answer


def _root(u, eps):
    return u * (u.square().mean(-1, keepdim=True) + eps).rsqrt()


def _width_of_tile(u):
    return 1 << (u.shape[-1] - 1).bit_length()


right_but_in_pytorch = _gated(_root)  # all is right but the launch

gated_rms_norm__eps_outside = _gated(
    lambda u, eps: u / (u.square().mean(-1, keepdim=True).sqrt() + eps)
)
gated_rms_norm__padded_mean = _gated(
    lambda u, eps: u * (u.square().sum(-1, keepdim=True) / _width_of_tile(u) + eps).rsqrt()
)
gated_rms_norm__eps_fixed = _gated(lambda u, eps: _root(u, 1e-6))
gated_rms_norm__with_a_mean = _gated(lambda u, eps: _root(u - u.mean(-1, keepdim=True), eps))
gated_rms_norm__1024_columns = _gated(
    lambda u, eps: _root(u, eps) * (torch.arange(u.shape[-1], device=u.device) < 1024)
)
gated_rms_norm__gate_after = _gated(_root, lambda x, gate: x * gate)
gated_rms_norm__sigmoid = _gated(_root, lambda x, gate: x * gate.sigmoid())
gated_rms_norm__exp_overflows = _gated(
    _root, lambda x, gate: x * gate * (gate.exp() / (1 + gate.exp()))
)
gated_rms_norm__gate_frozen = _gated(_root, lambda x, gate: x * F.silu(gate.detach()))
gated_rms_norm__nan_lost = _gated(lambda u, eps: _root(u.nan_to_num(), eps))
gated_rms_norm__in_pytorch = right_but_in_pytorch
gated_rms_norm__beside_an_empty_kernel = beside_an_empty_kernel(right_but_in_pytorch)
gated_rms_norm__eager = gated_rms_norm_eager
gated_rms_norm__a_tuple = lambda *args: (right_but_in_pytorch(*args),)  # noqa: E731


def gated_rms_norm__norm_first(x, gate, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps) * F.silu(gate)


def gated_rms_norm__takes_any_shape(x, gate, weight, eps=1e-6):
    u = x.float() * F.silu(gate.float())
    return (_root(u, eps) * weight).to(x.dtype)


def gated_rms_norm__into_x(x, gate, weight, eps=1e-6):
    y = right_but_in_pytorch(x, gate, weight, eps)
    x.data.copy_(y)
    return y


def _scaled(tail=lambda z, gamma, residual: residual + gamma * z, linear=F.linear):
    """In float32, rounded at the end; tail: what is made of the product and its bias."""

    def answer(x, weight, bias, gamma, residual):
        if residual.shape != (*x.shape[:-1], len(weight)) or not len(weight) == len(gamma) == len(
            bias
        ):
            raise ValueError("residual and gamma need the shape of the product")
        if x.shape[-1:] != weight.shape[1:]:
            raise ValueError("weight needs as many columns as x")
        if not x.is_floating_point():
            raise TypeError("all have to be of floating point")
        wide = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, weight, bias))
        return tail(linear(*wide), gamma, residual).to(x.dtype)

    return answer


scaled_linear__in_pytorch = _scaled()
scaled_linear__beside_an_empty_kernel = beside_an_empty_kernel(_scaled())
scaled_linear__eager = scaled_linear_eager
scaled_linear__no_bias = _scaled(linear=lambda x, weight, bias: F.linear(x, weight))
scaled_linear__residual_scaled = _scaled(lambda z, gamma, residual: gamma * (residual + z))
scaled_linear__gamma_frozen = _scaled(lambda z, gamma, residual: residual + gamma.detach() * z)
scaled_linear__residual_frozen = _scaled(lambda z, gamma, residual: residual.detach() + gamma * z)
scaled_linear__nan_lost = _scaled(lambda z, gamma, residual: residual + gamma * z.nan_to_num())
scaled_linear__gamma_by_row = _scaled(
    lambda z, gamma, residual: residual + (gamma[: len(z), None] if len(gamma) >= len(z) else 1) * z
)
scaled_linear__128_of_k = _scaled(
    linear=lambda x, weight, bias: F.linear(x[..., :128], weight[:, :128], bias)
)


class _DivideByGamma(torch.autograd.Function):
    """dgamma from y, which has the product in it only where gamma is not 0."""

    @staticmethod
    def forward(ctx, z, gamma, residual):
        y = residual + gamma * z
        ctx.save_for_backward(gamma, residual, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        gamma, residual, y = ctx.saved_tensors
        dgamma = (dy * (y - residual) / gamma).reshape(-1, len(gamma)).sum(0)
        return dy * gamma, dgamma.to(gamma.dtype), dy.to(residual.dtype)


scaled_linear__dgamma_from_y = _scaled(_DivideByGamma.apply)


class _TF32(torch.autograd.Function):
    """Inputs of a product lose 13 of 23 bits, as in a tensor core that is asked for TF32."""

    @staticmethod
    def forward(ctx, t):
        return (
            (t.view(torch.int32) & ~0x1FFF).view(torch.float32) if t.dtype == torch.float32 else t
        )

    @staticmethod
    def backward(ctx, dt):
        return dt


scaled_linear__tf32 = _scaled(
    linear=lambda x, weight, bias: F.linear(_TF32.apply(x), _TF32.apply(weight), bias)
)


def scaled_linear__two_dimensions(x, weight, bias, gamma, residual):
    _, _ = x.shape
    return _scaled()(x, weight, bias, gamma, residual)


def scaled_linear__bias_unscaled(x, weight, bias, gamma, residual):
    return residual + gamma * F.linear(x, weight) + bias


def scaled_linear__product_rounded(x, weight, bias, gamma, residual):
    z = F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)
    return (residual.float() + gamma.float() * z.float()).to(x.dtype)
