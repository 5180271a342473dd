"""The interpreter's cost: the same results with half the calls of Python functions.

Upstream makes the tensor of each operation with the classes of its compiler. A shape is unwrapped, wrapped,
checked and spelled out every time, though a kernel has only a handful of them. Operands of one shape are
compared number by number and widened to it. Nine more operations compute whether an int32 sum overflows, and
nothing reads the result. By comparison, a tile of a few thousand numbers is added in a microsecond.
"""

import dataclasses
import math

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
