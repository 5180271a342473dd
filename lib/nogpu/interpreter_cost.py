"""The interpreter's cost: the same results with half the calls of Python functions.

Upstream makes the tensor of each operation with the classes of its compiler. A shape is unwrapped, wrapped,
checked and spelled out every time, though a kernel has only a handful of them. Operands of one shape are
compared number by number and widened to it. Nine more operations compute whether an int32 sum overflows, and
nothing reads the result. By comparison, a tile of a few thousand numbers is added in a microsecond.

A scan or reduction with a function of its own calls it once for each number upstream. Here it is called on
whole tiles, log2 of the length times, in the order of a tree: the same, as the function is associative.
"""

import dataclasses
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream


def shorten():
    """Skip work without effect, in the interpreter's operations only."""
    semantic, builder = upstream.interpreter_semantic, upstream.interpreter_builder
    broadcast = type(semantic).broadcast_impl_value.__get__(semantic)

    def broadcast_impl_value(a, b):
        blocks = a.type.is_block() and b.type.is_block()
        if blocks and a.type.shape.values == b.type.shape.values:
            return a, b
        return broadcast(a, b)

    semantic.broadcast_impl_value = broadcast_impl_value
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    upstream.ScanOps.generic_scan = _or_one_by_one(_scan, upstream.ScanOps.generic_scan)
    upstream.ReduceOps.generic_reduce = _or_one_by_one(_reduce, upstream.ReduceOps.generic_reduce)


def reuse_shapes(scope):
    """Until `scope` is restored, at the end of a launch, each shape is made once."""
    make_type, type_cache, shape_cache = tl.block_type.__init__, {}, {}

    def init_type(self, element_ty, shape):
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in type_cache:
            make_type(self, element_ty, shape)
            type_cache[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = type_cache[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shape_cache:
            wrapped = tl.tuple([tl.constexpr(size) for size in key])
            shape_cache[key] = wrapped, tl.constexpr(math.prod(key))
        self.shape, self.numel = shape_cache[key]

    scope.set_attr(tl.block_type, "__init__", init_type)
    scope.set_attr(tl.tensor, "__init__", init_tensor)


# --- scans and reductions with a function of their own ---------------------------------------------------


class _AsksForOneNumber(Exception):
    """The function has a Python `if` on its numbers, which a tile cannot answer."""


def _or_one_by_one(on_tiles, one_by_one):
    def wrapped(self, tensors):
        truth = tl.tensor.__bool__

        def no_truth(x):
            if x.handle.data.size == 1:
                return truth(x)
            raise _AsksForOneNumber

        tl.tensor.__bool__ = no_truth
        try:
            return on_tiles(self, tensors)
        except _AsksForOneNumber:
            tl.tensor.__bool__ = truth
            return one_by_one(self, tensors)
        finally:
            tl.tensor.__bool__ = truth

    return wrapped


def _combine(self, tensors, left, right):
    """combine_fn of two lists of arrays, as arrays of the types of `tensors`."""
    semantic, shape = upstream.interpreter_semantic, left[0].shape
    operands = [
        self.to_tensor(data, t.dtype) for side in (left, right) for data, t in zip(side, tensors)
    ]
    results = self.combine_fn.fn(*operands)
    results = results if isinstance(results, (tuple, tl.tuple)) else [results]
    cast = [semantic.cast(semantic.to_tensor(r), t.dtype) for r, t in zip(results, tensors)]
    return [np.broadcast_to(c.handle.data, shape) for c in cast]


def _scan(self, tensors):
    data = [t.handle.data for t in tensors]
    length, at = data[0].shape[self.axis], _axis_of(data[0], self.axis)
    distance = 1
    while distance < length:
        earlier = [np.roll(d, distance, self.axis) for d in data]  # the first ones are not used
        combined = _combine(self, tensors, earlier, data)
        data = [np.where(at < distance, d, c) for d, c in zip(data, combined)]
        distance *= 2
    return [self.to_tensor(d, t.dtype) for d, t in zip(data, tensors)]


def _axis_of(array, axis):
    """The index along the axis, in the shape that broadcasts."""
    return np.arange(array.shape[axis]).reshape(
        [-1 if i == axis % array.ndim else 1 for i in range(array.ndim)]
    )


def _reduce(self, tensors):
    n_dims = len(tensors[0].shape)
    axis = 0 if self.axis is None else self.axis % n_dims
    data = [t.handle.data if self.axis is not None else t.handle.data.ravel() for t in tensors]
    while data[0].shape[axis] > 1:
        halves = [
            [np.moveaxis(np.moveaxis(d, axis, 0)[k::2], 0, axis) for d in data] for k in (0, 1)
        ]
        data = _combine(self, tensors, *halves)
    result = [np.squeeze(d, axis) for d in data]
    if self.keep_dims:
        result = data if self.axis is not None else [d.reshape([1] * n_dims) for d in data]
    return [self.to_tensor(d if d.ndim else d.item(), t.dtype) for d, t in zip(result, tensors)]
