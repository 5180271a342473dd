# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_lean.py
"""The lean form: plain launches and asserts, for reading, showing and pasting.

Values and gradients are those of the full form. What it lacks: launches that find their compiled kernel
themselves (by Triton's look-up each costs the host 9 µs more, beside an H200), calls past autograd where no
gradient is wanted, sentences that say what is wrong with an argument and what to do, errors under torch.func
and forward-mode AD, an error where a second copy takes the op's name, what torch.utils.flop_counter counts,
and gradients from above that are views with the negative bit or a collective's.
"""

import torch
from torch.autograd.function import once_differentiable

if __package__:
    from . import _host as host
else:
    import _host as host

once = once_differentiable


def run(kernel, grid, tensors, *sizes, **options):
    """kernel[grid](*tensors, *sizes, **options) on the tensors' GPU."""
    with torch.cuda.device_of(getattr(tensors[0], "base", tensors[0])):
        kernel[grid](*tensors, *sizes, enable_fp_fusion=True, **options)


def remembered(check):
    """`check`, run at every call; then whether the call goes by the registered op."""

    def run_always(name, *arguments):
        check(name, *arguments)
        return host.by_op(*[a for a in arguments if isinstance(a, torch.Tensor)])

    return run_always


def check_tensors(name, eager, mixed=(), **expected):
    """Assert that the tensors of a call fit: label=(tensor, its sizes in letters), as x=(x, "... N")."""
    (x, _), sizes = next(iter(expected.values())), {}
    for label, (t, letters) in expected.items():
        assert t.dtype in host.DTYPES and (t.dtype == x.dtype or {t.dtype, x.dtype} <= {*mixed})
        names = letters.removeprefix("... ").split()
        shape = t.shape[max(0, t.dim() - len(names)) :] if letters[0] == "." else t.shape
        fits = [sizes.setdefault(n, size) == size for n, size in zip(names, shape)]
        assert len(shape) == len(names) and all(fits), f"{name}: {label} must be ({letters})"
        assert t.device == x.device and t.device.type == ("cpu" if host.ON_CPU else "cuda")


def call(name, eager, function, forward, tensors, *how):
    """function.apply(*tensors, *how)."""
    return function.apply(*tensors, *how)


def custom_op(name, mutates=(), flops=None):
    """torch.library.custom_op(name, mutates_args=mutates)."""
    return torch.library.custom_op(name, mutates_args=mutates)
