"""Solutions to the exercises of notebook 08."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch


# %% 08.1 ceil without a float: sizes may be symbols, and k too
def pool_fake(x, k):
    return x.new_empty((x.shape[0], (x.shape[1] + k - 1) // k), dtype=torch.float32)


# %% 08.2 two ops, two fakes, one formula
def silu_mul_forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate) * up).contiguous()


def silu_mul_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(gate)
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    return dgate.contiguous(), dup.contiguous()


silu_mul = torch.library.custom_op("solution::silu_mul", silu_mul_forward, mutates_args=())
_backward = torch.library.custom_op(
    "solution::silu_mul_backward", silu_mul_backward, mutates_args=()
)
silu_mul.register_fake(lambda gate, up: gate.new_empty(gate.shape))
_backward.register_fake(lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
silu_mul.register_autograd(
    lambda ctx, dy: _backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# %% 08.3 the schema says what is written
def _clip(x: torch.Tensor, limit: float) -> None:
    x.div_(torch.clamp(x.norm() / limit, min=1.0))


clip_ = torch.library.custom_op("solution::clip_", _clip, mutates_args={"x"})
clip_.register_fake(lambda x, limit: None)
