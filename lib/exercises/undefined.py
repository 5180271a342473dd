"""What nobody defines: what a masked load without `other` gives, infinities here, and what torch.empty holds.

Triton promises nothing of the first; so far it is 0.
"""

import contextlib
from unittest import mock

from lib.measure.check import Changed, CheckError, check_against_float64
from lib.nogpu.interpreter import interpreted_launches

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

SHOWN = (
    "what tl.load(..., mask=...) gives for masked elements without an `other`, Triton does not promise, though "
    "it is 0 so far: pass an `other`, 0.0 where it enters a sum"
)


@contextlib.contextmanager
def undefined_is_infinite():
    """Masked loads of floats without `other` give inf and -inf in turn.

    NaN would show less: a maximum leaves it out, and no comparison with it is true.
    """
    load = upstream.InterpreterBuilder.create_masked_load

    def poisoned(self, pointers, mask, other, *rest):
        dtype = pointers.get_element_ty()
        # of one element Triton's `if other` takes an `other` of 0 for none
        missing = other is None and pointers.data.size > 1
        if missing and dtype.is_floating() and dtype.primitive_bitwidth >= 16:
            positive, negative = np.inf, -np.inf
            if dtype == tl.bfloat16:  # kept as uint16
                positive, negative = 0x7F80, 0xFF80
            other = np.full(pointers.data.shape, positive, upstream._get_np_dtype(dtype))
            if other.ndim:
                other[..., 1::2] = negative
            other = upstream.TensorHandle(other, dtype)
        return load(self, pointers, mask, other, *rest)

    patch = mock.patch.object(upstream.InterpreterBuilder, "create_masked_load", poisoned)
    with patch, interpreted_launches(), np.errstate(all="ignore"):
        yield


@contextlib.contextmanager
def empty_is_nan():
    """Inside, torch.empty and its like are full of NaN, so that what a kernel never writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def compare(answer, eager, *inputs, name, **options):
    """check_against_float64, and CheckError where the answer depends on what a masked load leaves undefined.

    With a GPU the kernels run there, and what is undefined is what the compiler makes of it.
    """
    if not triton.knobs.runtime.interpret:
        return check_against_float64(answer, eager, *inputs, name=name, **options)
    try:
        with undefined_is_infinite():
            return check_against_float64(answer, eager, *inputs, name=name, **options)
    except Changed:  # it would be right in a second run, with what it left
        raise
    except CheckError:
        check_against_float64(answer, eager, *inputs, name=name, **options)
        raise CheckError(f"{name}: {SHOWN}") from None
