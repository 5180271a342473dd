"""A model of Gluon: runs a kernel for Hopper on the CPU, its roles as threads of which one goes on at a time.

    run(kernel, grid, *arguments, seed=0, **constants)

Gluon has no interpreter. But its kernels are Python, and here their words mean something else: shared memory
is a torch tensor; a load by TMA lands some turns later, and leaves NaN until then; an asynchronous product
reads its operands some turns later, and a store by TMA its buffer. seed draws who goes on, and when. So a slot
that is freed too early, or a buffer that is written too early, gives wrong numbers, and a barrier that never
completes raises Deadlock. Not modelled: layouts, registers, and all else that only the compiler sees.
"""

import functools
import itertools
import random
import threading
import types
from types import SimpleNamespace

import torch


class Deadlock(Exception):
    """Nobody can go on; the message says which role waits for what."""


class Misuse(Exception):
    """The kernel does what goes wrong on a GPU without a word."""


class _Scheduler:
    """Threads of which one runs at a time; events are what happens by itself in between."""

    def __init__(self, seed):
        self.draw, self.turn = random.Random(seed), threading.Condition()
        self.late = seed % 2 == 1  # events come as late as can be: when everybody waits for one
        self.waiting, self.events, self.running, self.error = {}, [], None, None
        self.role, self.threads, self.ended = threading.local(), [], set()

    def run(self, function):
        """Run this to its end, as role 0, and what it starts by `fork`."""
        self._start([function])
        with self.turn:
            self._next()
        for thread in self.threads:  # it grows
            thread.join()
        if self.error:
            raise self.error
        for event in list(self.events):
            event()

    def fork(self, functions):
        """Run these to their ends: the first as the role that calls, the others as new ones."""
        with self.turn:
            self._start(functions[1:])
        functions[0]()
        self.pause(lambda: len(self.ended) == len(self.threads) - 1, "the others to end")

    def _start(self, functions):
        for function in functions:
            number = len(self.threads)
            self.waiting[number] = lambda: True, "its start"
            self.threads.append(
                threading.Thread(target=self._body, args=(number, function), daemon=True)
            )
            self.threads[-1].start()

    def pause(self, may_go=lambda: True, what="its turn"):
        """Let others go on, until may_go; what: is waited for."""
        with self.turn:
            self.waiting[self.role.number] = may_go, what
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
            ready = [role for role, (may_go, _) in self.waiting.items() if may_go()]
            choices = ready if ready and self.late else ready + self.events
            if not choices:
                roles = [
                    f"role {role} waits for {what}" for role, (_, what) in self.waiting.items()
                ]
                self.error = Deadlock(f"nobody can go on: {'; '.join(roles)}")
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
            self.ended.add(number)
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

    def reinterpret(self, dtype, shape, layout):
        if torch.Size(shape).numel() != self.flat.numel():
            sizes = f"{self.shape} has {self.flat.numel()} elements, and {list(shape)} others"
            raise Misuse(f"reinterpret gives all of a buffer another shape: {sizes}")
        return _Memory(self.flat, self.flat.view(*shape), self.dirty)

    _reinterpret = reinterpret  # its name before Triton 3.9

    def store(self, value):
        self.view.copy_(value)
        self.dirty.add(self.view.data_ptr())


class _Barrier:
    def __init__(self, name):
        self.name = name
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

    def __init__(self, scheduler, program, grid, log):
        self.scheduler, self.program, self.grid, self.log = scheduler, program, grid, log
        self.dirty, self.loads, self.products, self.stores = set(), [], {}, {}
        self.n_rings = 0

    def __getattr__(self, name):
        raise AttributeError(f"the model of Gluon in lib/nogpu/gluon.py has no {name}")

    def end_role(self):
        """Shared memory is another program's, once this one has ended."""
        if self.stores.get(self.scheduler.role.number):
            raise Misuse("the kernel ends while TMA reads a buffer; wait for the stores first")

    def end_program(self):
        """The same, of what the whole program asked for."""
        self.end_role()
        if self.loads:
            raise Misuse(
                f"the kernel ends with loads under way that nobody waited for: {len(self.loads)}"
            )

    # --- gl
    def MBarrierLayout(self):
        return None

    def program_id(self, axis):
        return self.program[axis]

    def num_programs(self, axis):
        return self.grid[axis]

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
            self.n_rings += 1
            named = (
                _Barrier(f"mbarrier {i} of allocation {self.n_rings}") for i in range(shape[0])
            )
            return _Barriers(named) if len(shape) > 1 else next(named)
        flat = torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype)
        return _Memory(flat, flat.view(*shape), self.dirty)

    def warp_specialize(self, functions, worker_warps, worker_registers):
        def role(function, args):
            function(*args)
            self.end_role()

        self.scheduler.fork([functools.partial(role, *pair) for pair in functions])

    def reinterpret(self, memory, dtype, shape, layout):
        return memory.reinterpret(dtype, shape, layout)

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
        if phase not in (0, 1):
            raise Misuse(
                f"a barrier counts phases in one bit, so phase must be 0 or 1, not {phase}"
            )
        if pred:
            what = f"phase {phase} of {bar.name}, which has completed {bar.completed}"
            self.scheduler.pause(lambda: bar.completed % 2 != phase, what)

    # --- TMA
    def async_load(self, desc, at, bar, memory, pred=True):
        if not pred:
            return
        _expect_shape(memory, desc)
        self.log.append(("load", tuple(at)))
        memory.view.fill_(float("nan"))

        def land():
            piece, inside = desc.piece(at)
            memory.view.zero_()
            memory.view[inside] = piece
            bar.bytes -= desc.block_type.nbytes
            bar.step()
            self.loads.remove(land)

        self.loads.append(land)
        self.scheduler.events.append(land)

    def fence_async_shared(self):
        self.dirty.clear()

    def async_store(self, desc, at, memory):
        if memory.view.data_ptr() in self.dirty:
            raise Misuse(
                "TMA may miss what the threads wrote; fence_async_shared comes before a store by TMA"
            )
        _expect_shape(memory, desc)
        self.log.append(("store", tuple(at)))

        def store():
            piece, inside = desc.piece(at)
            piece.copy_(memory.view[inside])
            memory.view.fill_(float("nan"))  # to be written anew, not to be stored twice
            pending.remove(store)

        pending = self.stores.setdefault(self.scheduler.role.number, [])
        pending.append(store)
        self.scheduler.events.append(store)

    # their names before Triton 3.8
    async_copy_global_to_shared, async_copy_shared_to_global = async_load, async_store

    def store_wait(self, pendings):
        mine = self.stores.setdefault(self.scheduler.role.number, [])
        self.scheduler.pause(lambda: len(mine) <= pendings, "its stores")

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

        self.log.append(("multiply", len(mine)))
        mine.append(multiply)
        self.scheduler.events.append(multiply)
        return acc if is_async else self.warpgroup_mma_wait(0, (acc,))

    def warpgroup_mma_wait(self, pendings, deps):
        mine = self.products.setdefault(self.scheduler.role.number, [])
        self.scheduler.pause(lambda: len(mine) <= pendings, "its products")
        return deps[0]


_IMPORTED_ALONE = (
    *("async_load", "async_store", "reinterpret", "fence_async_shared"),
    *("warpgroup_mma", "warpgroup_mma_wait"),
)


def run(kernel, grid, *arguments, seed=0, words=None, **constants):
    """kernel[grid](*arguments, **constants) on the CPU, program after program; it stores in its tensors.

    kernel: of @gluon.jit. grid: programs along one axis or more. arguments: numbers, tensors on the CPU, and
    TensorDescriptors of such. seed: of the order in which things happen; with odd ones loads and products
    end as late as can be. words: in place of some of the names that it uses. Returns what was asked for, in
    order: ("load", place), ("multiply", products of that role under way), ("store", place).
    Raises Deadlock and Misuse.
    """
    log = []
    for number, program in enumerate(itertools.product(*map(range, grid))):
        scheduler = _Scheduler(seed + number)
        language = _Language(scheduler, program, grid, log)
        body = _known_here(kernel.fn.__globals__, language, words or {})[kernel.fn.__name__]
        given = [_as_the_kernel_sees_it(a) for a in arguments]

        def whole(body=body, given=given, language=language):
            body(*given, **constants)
            language.end_program()

        scheduler.run(whole)
    return log


def _known_here(names, language, words):
    """The globals of a kernel with Gluon's words replaced, for it and for the functions that it calls.

    So are those of modules beside the kernel's, whose functions it may call too.
    """
    known = dict(names)
    for name, value in names.items():
        if isinstance(getattr(value, "fn", None), types.FunctionType):
            defaults = value.fn.__defaults__
            known[name] = types.FunctionType(value.fn.__code__, known, name, defaults)
        elif isinstance(value, types.ModuleType) and _stands_beside(value, names):
            known[name] = SimpleNamespace(**_known_here(vars(value), language, words))
    # in place, because the functions above look names up here
    known |= dict.fromkeys(("gl", "tl", "hopper", "mbarrier", "tma"), language)
    known |= {name: getattr(language, name) for name in _IMPORTED_ALONE} | words
    return known


def _stands_beside(module, names):
    return bool(names.get("__package__")) and module.__package__ == names["__package__"]


def _expect_shape(memory, desc):
    if memory.shape != desc.block_type.shape:
        raise Misuse(
            f"a descriptor of blocks of {desc.block_type.shape} meets a buffer of {memory.shape}"
        )


def _as_the_kernel_sees_it(argument):
    if hasattr(argument, "block_shape"):
        return _Descriptor(argument)
    return _Pointer(argument) if isinstance(argument, torch.Tensor) else argument
