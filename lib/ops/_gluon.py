# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_gluon.py
"""What the kernels in Gluon share: names that Triton has changed, and what to do where one does not compile."""

import functools
import warnings

import triton
from triton.errors import TritonError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

# TMA's copies, by their names from Triton 3.8 on, and by those before.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the threads of one role
# reinterpret(buffer, dtype, shape, layout): all of a buffer in another shape; a method, private before 3.9.
_buffer = gl.shared_memory_descriptor
reinterpret = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret


@gluon.constexpr_function
def sums_layout(n):
    # how the 128 threads of a warp group hold what wgmma adds up, n columns
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@functools.cache
def layout_of_tiles(itemsize, rank):
    return gl.NVMMASharedLayout(128 if itemsize == 2 else 0, 8 * itemsize, rank=rank)


def descriptor_of(t, *block):
    """What TMA reads or writes of t: tiles, `block` long in the last dimensions, of one element in the others.

    GluonDescriptor.from_tensor, without the checks that callers have made: they cost as much as all the rest.
    """
    descriptor = object.__new__(GluonDescriptor)  # what is not set here has a default
    descriptor.base, descriptor.shape, descriptor.strides = t, t.shape, t.stride()
    descriptor.block_shape = [*[1] * (t.dim() - len(block)), *block]
    descriptor.layout = layout_of_tiles(t.itemsize, t.dim())
    return descriptor


uncompiled = set()  # launches of kernels in Gluon that this Triton does not compile


def ran(launch, *arguments, **options):
    """Whether launch(*arguments, **options) ran; one that Triton does not compile is named in a warning."""
    if launch in uncompiled:
        return False
    try:
        launch(*arguments, **options)
    except (TritonError, RuntimeError) as error:
        if not isinstance(error, TritonError) and "PassManager" not in str(error):
            raise  # an error of the GPU, say
        uncompiled.add(launch)
        which = (
            f"Triton {triton.__version__} does not compile {launch.__module__}.{launch.__name__}"
        )
        warnings.warn(f"{which}; a slower kernel in Triton runs in its place", stacklevel=2)
        return False
    return True
