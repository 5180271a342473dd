"""Runs a warp-specialised Gluon kernel without a GPU: its roles are threads, one of which goes on at a time.

    run(kernel, words, grid, *arguments, seed=0, **constants)

Gluon has no interpreter. But its kernels are Python, and here their words mean something else: shared memory
is a torch tensor; a load by TMA lands some turns later, and leaves NaN until then; an asynchronous product
reads its operands some turns later, and a store by TMA its buffer. seed draws who goes on, and when. So a slot
that is freed too early, or a buffer that is written too early, gives wrong numbers, and a barrier that never
completes raises Deadlock. Not checked: layouts, registers, and all else that only the compiler sees.
"""

import functools
import random
import threading
import types
from types import SimpleNamespace

import torch


class Deadlock(Exception):
    """Nobody can go on."""


class _Scheduler:
    """Threads of which one runs at a time; events are what happens by itself in between."""

    def __init__(self, seed):
        self.draw, self.turn = random.Random(seed), threading.Condition()
        self.late = seed % 2 == 1  # events come as late as can be: when everybody waits for one
        self.waiting, self.events, self.running, self.error = {}, [], None, None
        self.role = threading.local()

    def run(self, functions):
        """Run all of these to their ends."""
        self.waiting = {role: lambda: True for role in range(len(functions))}
        threads = [
            threading.Thread(target=self._body, args=pair, daemon=True)
            for pair in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        with self.turn:
            self._next()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        for event in self.events:
            event()

    def pause(self, may_go=lambda: True):
        """Let others go on, until may_go."""
        with self.turn:
            self.waiting[self.role.number] = may_go
            self._next()
            self._wait()

    def _wait(self):
        number = self.role.number
        self.turn.wait_for(lambda: self.running == number or self.error)
        if self.error:
            raise self.error
        del self.waiting[number]

    def _next(self):
        self.running = None
        while self.running is None and self.waiting and not self.error:
            ready = [role for role, may_go in self.waiting.items() if may_go()]
            choices = ready if ready and self.late else ready + self.events
            if not choices:
                self.error = Deadlock(f"{len(self.waiting)} roles wait for ever")
                break
            choice = self.draw.choice(choices)
            if choice in ready:
                self.running = choice
            else:
                self.events.remove(choice)
                choice()
        self.turn.notify_all()

    def _body(self, number, function):
        self.role.number = number
        try:
            with self.turn:
                self._wait()
            function()
        except Exception as error:
            self.error = self.error or error
        with self.turn:
            self._next()


class _Values(torch.Tensor):
    """What a role holds in registers."""

    def split(self):
        return self.unbind(-1)


class _Memory:
    """A piece of shared memory: where it begins, and how it is seen."""

    def __init__(self, flat, view, dirty):
        self.flat, self.view, self.dirty = flat, view, dirty

    dtype = property(lambda self: self.view.dtype)
    shape = property(lambda self: list(self.view.shape))

    def index(self, i):
        inner = self.view[int(i)]
        flat = inner.reshape(-1) if inner.is_contiguous() else None
        return _Memory(flat, inner, self.dirty)

    def reshape(self, shape):
        return _Memory(self.flat, self.view.view(*shape), self.dirty)

    def permute(self, order):
        return _Memory(None, self.view.permute(order), self.dirty)

    def _reinterpret(self, dtype, shape, layout):
        size = torch.Size(shape).numel()
        return _Memory(self.flat[:size], self.flat[:size].view(*shape), self.dirty)

    def store(self, value):
        self.view.copy_(value)
        self.dirty.add(self.view.data_ptr())


class _Barrier:
    def __init__(self):
        self.count = self.arrived = self.bytes = self.completed = 0

    def step(self):
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.completed = 0, self.completed + 1


class _Barriers(list):
    def index(self, i):
        return self[int(i)]


class _Pointer:
    def __init__(self, tensor, offsets=0):
        self.tensor, self.offsets = tensor, offsets

    def __add__(self, more):
        return _Pointer(self.tensor, self.offsets + more)


class _Descriptor:
    """A TensorDescriptor as a kernel sees it."""

    def __init__(self, given):
        self.base = torch.as_strided(given.base, given.shape, given.strides)
        self.dtype, self.layout = given.base.dtype, given.layout
        size = torch.Size(given.block_shape).numel()
        self.block_type = SimpleNamespace(
            shape=list(given.block_shape), nbytes=size * given.base.itemsize
        )

    def piece(self, at):
        """Slices of what is inside, in memory and in a block."""
        ends = [min(a + n, size) for a, n, size in zip(at, self.block_type.shape, self.base.shape)]
        there = tuple(slice(a, max(a, e)) for a, e in zip(at, ends))
        return self.base[there], tuple(slice(0, max(0, e - a)) for a, e in zip(at, ends))


class _Language:
    """gl, mbarrier, tma and the rest, for one program of a grid."""

    int64, float32 = torch.int64, torch.float32
    constexpr = staticmethod(lambda value: value)
    static_range = range

    def __init__(self, scheduler, program, n_programs):
        self.scheduler, self.program, self.n_programs = scheduler, program, n_programs
        self.dirty, self.products, self.stores = set(), {}, {}

    # --- gl
    def MBarrierLayout(self):
        return None

    def program_id(self, axis):
        return self.program

    def num_programs(self, axis):
        return self.n_programs

    def cdiv(self, a, b):
        return -(-a // b)

    def minimum(self, a, b):
        return min(a, b)

    def exp2(self, values):
        return torch.exp2(values)

    def NVMMADistributedLayout(self, *version, **how):
        return None

    def SliceLayout(self, *how):
        return None

    def convert_layout(self, value, layout, assert_trivial=False):
        return value

    def arange(self, start, end, layout=None):
        return torch.arange(start, end).as_subclass(_Values)

    def zeros(self, shape, dtype, layout):
        return torch.zeros(shape, dtype=dtype).as_subclass(_Values)

    def load(self, pointer, mask, other):
        inside = torch.where(mask, pointer.offsets, 0)
        return torch.where(mask, pointer.tensor[inside], other).to(pointer.tensor.dtype)

    def allocate_shared_memory(self, dtype, shape, layout):
        if dtype == torch.int64:
            return _Barriers(_Barrier() for _ in range(shape[0])) if len(shape) > 1 else _Barrier()
        flat = torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype)
        return _Memory(flat, flat.view(*shape), self.dirty)

    def warp_specialize(self, functions, worker_warps, worker_registers):
        def role(function, args):
            function(*args)
            # shared memory is another program's, once this one has ended
            assert not self.stores.get(self.scheduler.role.number), "ended while TMA reads"

        self.scheduler.run([functools.partial(role, *pair) for pair in functions])

    # --- mbarrier
    def init(self, bar, count):
        bar.count = count

    def expect(self, bar, n_bytes, pred=True):
        if pred:
            bar.bytes += n_bytes
            bar.arrived += 1
            bar.step()

    def arrive(self, bar, count=1, pred=True):
        self.scheduler.pause()
        if pred:
            bar.arrived += count
            bar.step()

    def wait(self, bar, phase, pred=True):
        if pred:
            self.scheduler.pause(lambda: bar.completed % 2 != phase)

    # --- TMA
    def async_copy_global_to_shared(self, desc, at, bar, memory, pred=True):
        if not pred:
            return
        assert memory.shape == desc.block_type.shape
        memory.view.fill_(float("nan"))

        def land():
            piece, inside = desc.piece(at)
            memory.view.zero_()
            memory.view[inside] = piece
            bar.bytes -= desc.block_type.nbytes
            bar.step()

        self.scheduler.events.append(land)

    def fence_async_shared(self):
        self.dirty.clear()

    def async_copy_shared_to_global(self, desc, at, memory):
        assert memory.view.data_ptr() not in self.dirty, "no fence before TMA reads"
        assert memory.shape == desc.block_type.shape

        def store():
            piece, inside = desc.piece(at)
            piece.copy_(memory.view[inside])
            memory.view.fill_(float("nan"))  # to be written anew, not to be stored twice
            pending.remove(store)

        pending = self.stores.setdefault(self.scheduler.role.number, [])
        pending.append(store)
        self.scheduler.events.append(store)

    def store_wait(self, pendings):
        mine = self.stores.setdefault(self.scheduler.role.number, [])
        self.scheduler.pause(lambda: len(mine) <= pendings)

    # --- wgmma
    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        mine = self.products.setdefault(self.scheduler.role.number, [])

        def multiply():
            while mine[0] is not multiply:  # products of one role are over in order
                self.scheduler.events.remove(mine[0])
                mine[0]()
            mine.pop(0)
            product = a.view.float() @ b.view.float()
            acc.copy_(acc + product if use_acc else product)

        mine.append(multiply)
        self.scheduler.events.append(multiply)
        return acc

    def warpgroup_mma_wait(self, pendings, deps):
        mine = self.products.setdefault(self.scheduler.role.number, [])
        self.scheduler.pause(lambda: len(mine) <= pendings)
        return deps[0]


_IMPORTED_ALONE = ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")


def run(kernel, words, grid, *arguments, seed=0, **constants):
    """kernel[grid](*arguments, **constants), program after program; words: in place of some of its globals."""
    for program in range(grid[0]):
        language = _Language(_Scheduler(seed + program), program, grid[0])
        known = dict(kernel.fn.__globals__)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(getattr(value, "fn", None), types.FunctionType):
                defaults = value.fn.__defaults__
                known[name] = types.FunctionType(value.fn.__code__, known, name, defaults)
        known |= dict.fromkeys(("gl", "tl", "hopper", "mbarrier", "tma"), language)
        known |= {name: getattr(language, name) for name in _IMPORTED_ALONE} | words
        given = [_as_the_kernel_sees_it(a) for a in arguments]
        known[kernel.fn.__name__](*given, **constants)


def _as_the_kernel_sees_it(argument):
    if hasattr(argument, "block_shape"):
        return _Descriptor(argument)
    return _Pointer(argument) if isinstance(argument, torch.Tensor) else argument
