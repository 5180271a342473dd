"""What the words of Gluon do in the model: a class for each module of words. A part of `gluon`.

What works on blocks alone, such as gl.exp or gl.load, is not here: it is Triton's word of that name, run by
Triton's interpreter, without its layout.
"""

import copy
import inspect
import types

from lib.nogpu.gluon_memory import Described, Memory, MissingWord, Misuse, Shape, block, ones

import numpy as np
import triton.language as tl
from triton import __version__ as version
from triton.experimental.gluon import language as gl
from triton.runtime import interpreter as upstream


class Descriptor:
    """A TensorDescriptor as a kernel sees it."""

    def __init__(self, data, dtype, block_shape, layout, padding="zero"):
        self.data, self.dtype, self.layout = data, dtype, layout
        self.shape, self.strides = Shape(data.shape), [s // data.itemsize for s in data.strides]
        self.block_shape = Shape(int(n) for n in block_shape)
        self.block_type = self.type = Described(self.block_shape, dtype, layout)
        self.nbytes_per_cta, self.padding = self.block_type.nbytes, padding

    def piece(self, at):
        """What is inside of the block at this place: of the tensor, and where in the block."""
        at = [int(a) for a in at]
        ends = [min(a + n, size) for a, n, size in zip(at, self.block_shape, self.shape)]
        there = [slice(max(a, 0), max(a, e, 0)) for a, e in zip(at, ends)]
        here = [slice(s.start - a, max(s.stop - a, 0)) for a, s in zip(at, there)]
        return self.data[tuple(there)], tuple(here)


class Sums(tl.tensor):
    """The sums of an asynchronous product: registers that may not be read before warpgroup_mma_wait."""

    def __init__(self, value, program, number):
        self.program, self.number, self.role = program, number, program.role
        super().__init__(value.handle, value.type)

    @property
    def handle(self):
        line = self.program.line()
        if self.program.known[self.role]["product", self.role] < self.number:
            why = "while a product may still write them; warpgroup_mma_wait(0, …) must come first"
        else:
            why = "but did not go through deps=(…) of warpgroup_mma_wait; use what that returns"
        raise Misuse(f"sums are read ({line}) {why}")

    @handle.setter
    def handle(self, handle):
        self.numbers = handle


def _numbers(value):
    """The array behind a value, as float32 or whole numbers that a product takes."""
    if isinstance(value, Memory):
        value = block(value.data, value.dtype)
    return value.handle.data if value.dtype.is_int() else value.to(tl.float32).handle.data


def _multiplied(a, b, acc, use_acc=True):
    before = acc.numbers if isinstance(acc, Sums) else acc.handle
    shapes = [[int(n) for n in value.shape] for value in (a, b, acc)]
    if (shapes[0][0], shapes[1][-1], shapes[0][1]) != (*shapes[2], shapes[1][0]):
        raise Misuse(f"a product of {shapes[0]} and {shapes[1]} cannot be added to {shapes[2]}")
    a, b = _numbers(a), _numbers(b)
    with np.errstate(all="ignore"):
        product = (a.astype(np.int32) if a.dtype.kind in "iu" else a) @ b
    total = block(product, tl.int32 if product.dtype.kind in "iu" else tl.float32)
    if use_acc:
        total = block(before.data, acc.dtype) + total
    return total.to(acc.dtype)


class Words:
    """A module of words: the methods here, and of what it merely passes on, what the model makes of that."""

    def __init__(self, model, module):
        self._model, self._module = model, module

    _program = property(lambda self: self._model.program)

    def __getattr__(self, name):
        value = getattr(self._module, name, None)
        if value is None:
            raise AttributeError(f"{self._module.__name__} of Triton {version} has no {name}")
        function = getattr(value, "fn", value)
        if getattr(function, "__module__", None) != self._module.__name__:
            return self._model.known(value)
        if value is not function:  # in Gluon itself, of other words
            return self._model.remade(function)
        if not isinstance(function, types.FunctionType):
            return value
        raise MissingWord(name)


class Gluon(Words):
    """gl, whose words on blocks alone are Triton's."""

    constexpr = staticmethod(lambda value: value)
    shared_memory_descriptor = Memory

    def __getattr__(self, name):
        word, here = getattr(tl, name, None), getattr(gl, name, None)
        if word is None or here is None:
            return super().__getattr__(name)
        if isinstance(here, type) and isinstance(word, type):
            return word
        return _on_blocks(word, here) if callable(word) else word

    def num_warps(self):
        return self._model.num_warps

    def num_ctas(self):
        return 1

    def barrier(self, cluster=False):
        pass  # threads of one role see in order what they do

    thread_barrier = barrier  # its name before Triton 3.7

    def convert_layout(self, value, layout, assert_trivial=False):
        return value

    def set_auto_layout(self, value, layout):
        return value

    def allocate_shared_memory(self, element_ty, shape, layout, value=None):
        dtype = upstream._get_np_dtype(element_ty)
        data = np.full([int(n) for n in shape], ones(dtype))
        memory = Memory(self._program, data, element_ty, layout)
        if value is not None:
            memory.store(value)
        return memory

    def warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs=None):
        return self._model.fork(functions_and_args)

    def full_like(self, input, value, shape=None, dtype=None, layout=None):
        return tl.full(shape or input.shape, value, dtype or input.dtype)

    def zeros_like(self, input, shape=None, dtype=None, layout=None):
        return self.full_like(input, 0, shape, dtype)

    def aggregate_replace(self, instance, **changes):
        instance = copy.copy(instance)
        vars(instance).update(changes)
        return instance

    def dot_fma(self, a, b, acc):
        return _multiplied(a, b, acc)


_OF_GLUON_ALONE = ("layout", "cache_policy")  # parameters that change no value


def _on_blocks(word, here):
    """Triton's word, without what only Gluon's word of that name takes."""
    names = list(inspect.signature(getattr(here, "fn", here)).parameters)
    at = [names.index(name) for name in _OF_GLUON_ALONE if name in names]

    def on_blocks(*given, **more):
        given = [value for i, value in enumerate(given) if i not in at]
        return word(*given, **{k: v for k, v in more.items() if k not in _OF_GLUON_ALONE})

    return on_blocks if at else word


class MBarrier(Words):
    def allocate_mbarrier(self, batch=None, two_ctas=False):
        shape = [1] if batch is None else [batch, 1]
        return self._model.gl.allocate_shared_memory(tl.int64, shape, self._module.MBarrierLayout())

    def init(self, mbarrier, count):
        self._program.init(mbarrier, int(count))

    def invalidate(self, mbarrier):
        self._program.invalidate(mbarrier)

    def expect(self, mbarrier, bytes_per_cta=None, pred=True, from_cta=None, bytes=None):
        if pred:  # bytes is bytes_per_cta's name before Triton 3.7
            self._program.arrive(mbarrier, 1, int(bytes_per_cta if bytes is None else bytes))

    def arrive(self, mbarrier, count=1, pred=True, from_cta=None):
        self._program.scheduler.pause()
        if pred:
            self._program.arrive(mbarrier, int(count))

    def wait(self, mbarrier, phase, pred=True, deps=()):
        if pred:
            self._program.wait(mbarrier, phase)


class Tma(Words):
    tensor_descriptor = Descriptor

    def make_tensor_descriptor(
        self, base, shape, strides, block_shape, layout, padding_option="zero"
    ):
        shape, strides = ([int(n) for n in numbers] for numbers in (shape, strides))
        data = self._model.memory_at(int(base.handle.data.item()), shape, strides)
        return Descriptor(data, base.dtype.element_ty, block_shape, layout, padding_option)

    def async_load(
        self, tensor_desc, coord, barrier, result, pred=True, multicast=False, cache_policy=None
    ):
        if not pred:
            return
        _expect_shape(result, tensor_desc)
        program, at = self._program, tuple(int(a) for a in coord)
        bar, known = program.barrier(barrier), program.release()
        program.log.append(("load", at))
        load = program.touch(
            result,
            "load",
            True,
            ("load", bar),
            barrier=bar,
            phase=bar.completed,
            counted=bar.bytes > 0,
        )
        piece, inside = tensor_desc.piece(at)
        result.data[...] = ones(piece.dtype) if tensor_desc.padding == "nan" else 0
        result.data[inside] = piece

        def land():
            load.time = bar.completed + 1
            bar.bytes -= tensor_desc.block_type.nbytes
            bar.gather(known)

        program.scheduler.events.append(land)

    def async_store(self, tensor_desc, coord, src, cache_policy=None):
        _expect_shape(src, tensor_desc)
        at = tuple(int(a) for a in coord)
        self._program.start([src], "store")
        self._program.log.append(("store", at))
        piece, inside = tensor_desc.piece(at)
        piece[...] = src.data[inside]

    # their names before Triton 3.8
    async_copy_global_to_shared, async_copy_shared_to_global = async_load, async_store

    def store_wait(self, pendings, read_only=True):
        self._program.scheduler.pause()
        self._program.finish("store", pendings)


def _expect_shape(memory, desc):
    if memory.shape != desc.block_shape:
        raise Misuse(
            f"a descriptor of blocks of {desc.block_shape} meets a buffer of {memory.shape}"
        )


class AsyncCopy(Words):
    """cp.async: copies by the threads, in groups that a commit ends."""

    def async_load(
        self, smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False
    ):
        agent = "copy", self._program.role
        group = self._program.issued[agent] + 1
        self._program.touch(smem, "copy", True, agent, group)
        other = None if mask is None else 0
        smem.data[...] = tl.load(pointer, mask=mask, other=other).handle.data

    async_copy_global_to_shared = async_load  # its name before Triton 3.9

    def commit_group(self):
        self._program.start([], "copy")

    def wait_group(self, num_outstanding=0):
        self._program.finish("copy", num_outstanding)

    def mbarrier_arrive(self, mbarrier, increment_count=True):
        bar, agent = self._program.barrier(mbarrier), ("copy", self._program.role)
        known = self._program.release() | {agent: self._program.issued[agent] + 1}
        n_threads = 32 * self._model.num_warps
        if increment_count:  # what these arrivals add to, they also expect
            bar.arrived -= n_threads

        def land():
            bar.arrived += n_threads
            bar.gather(known)

        self._program.scheduler.events.append(land)


class Hopper(Words):
    """wgmma and its fences; the words of Ampere too."""

    def fence_async_shared(self, cluster=False):
        self._program.fence()

    def warpgroup_mma_init(self, value):
        return value

    def warpgroup_mma(
        self, a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
    ):
        program = self._program
        program.log.append(("multiply", program.pending("product")))
        program.start([m for m in (a, b) if isinstance(m, Memory)], "product")
        sums = Sums(
            _multiplied(a, b, acc, use_acc), program, program.issued["product", program.role]
        )
        return sums if is_async else self.warpgroup_mma_wait(0, (sums,))

    def warpgroup_mma_wait(self, num_outstanding=0, deps=None):
        if deps is None:
            raise Misuse("warpgroup_mma_wait needs deps=(…), what must not be read before it")
        program = self._program
        program.scheduler.pause()
        program.finish("product", num_outstanding)
        over = program.mine["product", program.role]
        results = [
            tl.tensor(d.numbers, d.type) if isinstance(d, Sums) and d.number <= over else d
            for d in deps
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def mma_v2(self, a, b, acc, input_precision=None):
        return _multiplied(a, b, acc)


PLACES = {
    "mbarrier": MBarrier,
    "tma": Tma,
    "async_copy": AsyncCopy,
    "hopper": Hopper,
    "ampere": Hopper,
}


def place_of(name):
    """The class of the words of a module of Gluon's, by the module's name."""
    _, *inner = name.removeprefix("triton.experimental.gluon.language").split(".")
    return PLACES.get(inner[-1], Words) if len(inner) > 1 else Gluon
