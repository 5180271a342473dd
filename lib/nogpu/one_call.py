"""Functions of PyTorch that are one call on a GPU and many ops on a CPU, as one call everywhere.

    with as_on_gpu():                                    # or as_on_gpu("rms_norm")
        count_or_compile(model)

Stands in for   F.scaled_dot_product_attention and F.rms_norm: a call is one op forward and one backward.
Differs in      nothing is computed: results and gradients have their shapes and dtypes, and no numbers. So use
                it to count ops on fake tensors and to read output code. Attention saves no log-sum-exp, and
                masks and dropout are left out.
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F


def _one_call(name, n):
    """An op of n tensors whose result is like the first and whose gradients are like the tensors."""
    tensors = ", ".join(f"Tensor t{i}" for i in range(n))
    gradients = ", ".join(["Tensor"] * n)
    forward = torch.library.custom_op(
        f"one_call::{name}",
        lambda *ts: torch.empty_like(ts[0]),
        mutates_args=(),
        schema=f"({tensors}) -> Tensor",
    )
    backward = torch.library.custom_op(
        f"one_call::{name}_backward",
        lambda dy, *ts: tuple(torch.empty_like(t) for t in ts),
        mutates_args=(),
        schema=f"(Tensor dy, {tensors}) -> ({gradients})",
    )
    forward.register_fake(lambda *ts: torch.empty_like(ts[0]))
    backward.register_fake(lambda dy, *ts: tuple(torch.empty_like(t) for t in ts))
    forward.register_autograd(
        lambda ctx, dy: backward(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return forward


_attention, _rms_norm = _one_call("attention", 3), _one_call("rms_norm", 2)
_STAND_INS = {
    "scaled_dot_product_attention": lambda q, k, v, *_, **__: _attention(q, k, v),
    "rms_norm": lambda x, shape, weight, eps=None: _rms_norm(x, weight),
}


@contextlib.contextmanager
def as_on_gpu(*names):
    """Inside, the functions of torch.nn.functional with these names, all by default, are one call each.

    In output code they are the ops one_call::attention and one_call::rms_norm, and the same with _backward.
    """
    chosen = {name: _STAND_INS[name] for name in names or _STAND_INS}
    with mock.patch.multiple(F, **chosen):
        yield
