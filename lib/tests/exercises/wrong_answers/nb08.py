"""Plausible wrong answers to the exercises of notebook 08, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution

import torch

_right = solution("08_custom_ops")


def pool_fake__floor(x, k):
    return x.new_empty((x.shape[0], x.shape[1] // k), dtype=torch.float32)


def pool_fake__dtype_of_x(x, k):
    return x.new_empty((x.shape[0], (x.shape[1] + k - 1) // k))


def pool_fake__sizes_as_numbers(x, k):
    n_windows = -(-int(x.shape[1].__index__()) // k)
    return torch.empty(int(x.shape[0]), n_windows)


def pool_fake__does_the_work(x, k):
    return x.float().unfold(1, k, k).amax(2)


def _op(name, forward=_right.silu_mul_forward, fake=lambda gate, up: gate.new_empty(gate.shape)):
    op = torch.library.custom_op(f"wrong::{name}", forward, mutates_args=())
    op.register_fake(fake)
    return op


silu_mul__no_formula = _op("no_formula")


def silu_mul__a_function(gate, up):
    return torch.nn.functional.silu(gate) * up


silu_mul__no_fake = torch.library.custom_op(
    "wrong::no_fake", _right.silu_mul_forward, mutates_args=()
)
silu_mul__no_fake.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

silu_mul__gradients_exchanged = _op("exchanged")
silu_mul__gradients_exchanged.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, *ctx.saved_tensors)[::-1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _as_it_comes(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


silu_mul__strides_of_a_view = _op("strides", _as_it_comes)
silu_mul__strides_of_a_view.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# right where both inputs have one layout; otherwise the result follows gate
silu_mul__layout_of_up = _op("up", _as_it_comes, lambda gate, up: torch.empty_like(up))
silu_mul__layout_of_up.register_autograd(
    lambda ctx, dy: _right._backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

silu_mul__gate_alone_saved = _op("gate_saved")
silu_mul__gate_alone_saved.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, *ctx.saved_tensors, ctx.up),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "up", inputs[1]),
    )[0],
)

silu_mul__no_history = _op("no_history")
silu_mul__no_history.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(*(t.detach() for t in (dy, *ctx.saved_tensors))),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

clip___nothing_declared = torch.library.custom_op("wrong::hidden", _right._clip, mutates_args=())
clip___nothing_declared.register_fake(lambda x, limit: None)


silu_mul__not_saved = _op("not_saved")
silu_mul__not_saved.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, ctx.gate, ctx.up),
    setup_context=lambda ctx, inputs, output: (
        setattr(ctx, "gate", inputs[0]),
        setattr(ctx, "up", inputs[1]),
    )[0],
)


def _limit_of_one(x: torch.Tensor, limit: float) -> None:
    x.div_(torch.clamp(x.norm(), min=1.0))


clip___limit_ignored = torch.library.custom_op("wrong::one", _limit_of_one, mutates_args={"x"})
clip___limit_ignored.register_fake(lambda x, limit: None)


def _always(x: torch.Tensor, limit: float) -> None:
    x.mul_(limit / x.norm())


clip___small_ones_too = torch.library.custom_op("wrong::always", _always, mutates_args={"x"})
clip___small_ones_too.register_fake(lambda x, limit: None)


def pool_fake__other_dtypes_stay(x, k):
    dtype = torch.float32 if x.is_floating_point() else x.dtype
    return x.new_empty(x.shape[0], -(-x.shape[1] // k), dtype=dtype)


@torch.library.custom_op("wrong::divides_by_a_norm_of_0", mutates_args=("x",))
def clip___divides_by_a_norm_of_0(x: torch.Tensor, limit: float) -> None:
    x.copy_(x / x.norm() * x.norm().clamp(max=limit))


def pool_fake__windows_of_rows(x, k):
    return x.new_empty((-(-x.shape[0] // k), x.shape[1]), dtype=torch.float32)


silu_mul__fake_in_float32 = _op(
    "float32", fake=lambda gate, up: gate.new_empty(gate.shape, dtype=torch.float32)
)
silu_mul__fake_in_float32.register_autograd(
    lambda ctx, dy: _right.silu_mul_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# The inputs are made contiguous, and dy is not: only a transposed dy shows that the fake is wrong.
def _gradients_like_dy(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    like_dy = torch.empty_like(dy), torch.empty_like(dy)
    for out, gradient in zip(like_dy, _right.silu_mul_backward(dy, gate, up)):
        out.copy_(gradient)
    return like_dy


_backward_like_dy = torch.library.custom_op(
    "wrong::gradients_like_dy", _gradients_like_dy, mutates_args=()
)
_backward_like_dy.register_fake(
    lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
silu_mul__transposed_dy = _op("transposed_dy")
silu_mul__transposed_dy.register_autograd(
    lambda ctx, dy: _backward_like_dy(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def pool_fake__k_as_a_number(x, k):
    return x.new_empty((x.shape[0], -(-x.shape[1] // int(k))), dtype=torch.float32)


# Right on the CPU, for matrices, or for one size: what a fake may not lean on.
def _op_with_fakes(name, fake=None, backward_fake=None):
    op = _op(name, fake=fake or (lambda gate, up: gate.new_empty(gate.shape)))
    backward = torch.library.custom_op(
        f"wrong::{name}_backward", _right.silu_mul_backward, mutates_args=()
    )
    both = lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape))  # noqa: E731
    backward.register_fake(backward_fake or both)
    op.register_autograd(
        lambda ctx, dy: backward(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


silu_mul__fake_always_on_the_cpu = _op_with_fakes(
    "on_the_cpu", lambda gate, up: torch.empty(gate.shape, dtype=gate.dtype)
)
silu_mul__gradients_always_on_the_cpu = _op_with_fakes(
    "gradients_on_the_cpu",
    backward_fake=lambda dy, gate, up: (
        torch.empty(gate.shape, dtype=gate.dtype),
        torch.empty(up.shape, dtype=up.dtype),
    ),
)
silu_mul__fake_of_a_matrix = _op_with_fakes(
    "matrix", lambda gate, up: gate.new_empty(gate.shape[0], gate.shape[1])
)
silu_mul__sizes_as_numbers = _op_with_fakes(
    "numbers", lambda gate, up: gate.new_empty([int(size) for size in gate.shape])
)
silu_mul__gradients_with_sizes_as_numbers = _op_with_fakes(
    "gradient_numbers",
    backward_fake=lambda dy, gate, up: (
        gate.new_empty([int(size) for size in gate.shape]),
        up.new_empty([int(size) for size in up.shape]),
    ),
)
