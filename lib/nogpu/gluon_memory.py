"""Shared memory and mbarriers of a kernel in Gluon, and what each role knows to be over. A part of `gluon`.

A role knows what it has done, what it has waited for, and what those knew who arrived at an mbarrier for whose
phase it has waited. Whoever touches shared memory must know that what was asked for there before is over. That
holds or fails in any order of events, so a slot that is freed too early is found in each.
"""

import collections
import dataclasses
import math
import sys

import numpy as np
import triton.language as tl
from triton import __version__ as version
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

KERNEL = "__model_of_gluon__"  # a name in the globals of kernels that the model runs


class Misuse(Exception):
    """The kernel does what goes wrong on a GPU without a word."""


class MissingWord(AttributeError):
    """The kernel uses a word of Gluon's that the model lacks."""

    def __init__(self, word):
        super().__init__(f"the model of Gluon in lib/nogpu/gluon.py has no {word}")


def block(data, dtype):
    """A value of Triton's interpreter that holds this array."""
    kind = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    return tl.tensor(TensorHandle(data if data.ndim else data.reshape(1), dtype), kind)


def ones(dtype):
    """A number of a dtype of NumPy's, all of whose bits are 1: NaN, for those that have it."""
    return np.full(dtype.itemsize, 255, np.uint8).view(dtype)[0]


class Shape(list):
    """A shape, which a kernel may add to a list or to a tuple."""

    def __add__(self, more):
        return Shape([*self, *more])

    def __radd__(self, before):
        return Shape([*before, *self])


class Memory:
    """A piece of shared memory: bits as NumPy holds them, and where they are in what was allocated."""

    def __init__(self, program, data, dtype, layout, whole=None, path=()):
        self.program, self.data, self.dtype, self.layout = program, data, dtype, layout
        self.whole, self.path = whole or self, path
        self.shape, self.rank, self.numel = Shape(data.shape), data.ndim, data.size
        reach = sum((n - 1) * step for n, step in zip(data.shape, data.strides))
        self.first = data.__array_interface__["data"][0]
        self.end = self.first + reach + data.itemsize

    @property
    def type(self):
        return Described(self.shape, self.dtype, self.layout)

    def _view(self, data, *path, dtype=None, layout=None):
        place = dtype or self.dtype, layout or self.layout, self.whole, self.path + path
        return Memory(self.program, data, *place)

    def index(self, index):
        i = int(index)
        if not 0 <= i < self.shape[0]:
            name = self.program.name(self)
            at = f"{name}.index({i}) ({self.program.line()}) is not there"
            raise Misuse(f"{at}: {name} has the shape {self.shape}")
        return self._view(self.data[i], i)

    def slice(self, start, length, dim=0):
        piece = [slice(None)] * self.rank
        piece[int(dim)] = slice(int(start), int(start) + int(length))
        return self._view(self.data[tuple(piece)])

    def permute(self, order):
        return self._view(self.data.transpose([int(i) for i in order]))

    def reshape(self, shape):
        return self._view(self.data.reshape([int(n) for n in shape]))

    def reinterpret(self, dtype, shape, layout):
        shape, bits = [int(n) for n in shape], np.ascontiguousarray(self.data).view(np.uint8)
        if math.prod(shape) * dtype.primitive_bitwidth != 8 * bits.size:
            sizes = (
                f"{self.shape} of {self.dtype} has {bits.size} bytes, and {shape} of {dtype} others"
            )
            raise Misuse(f"reinterpret gives all of a buffer another shape: {sizes}")
        data = self.data.reshape(-1).view(_get_np_dtype(dtype)).reshape(shape)
        return self._view(data, dtype=dtype, layout=layout)

    _reinterpret = reinterpret  # its name before Triton 3.9

    def load(self, layout=None):
        self.program.touch(self, "thread")
        return block(self.data.copy(), self.dtype)

    def store(self, value):
        if (list(value.type.shape), value.dtype) != (self.shape, self.dtype):
            given = f"{[int(n) for n in value.type.shape]} of {value.dtype}"
            raise Misuse(f"{self.program.name(self)} is {self.shape} of {self.dtype}, not {given}")
        self.program.touch(self, "thread", writes=True)
        self.data[...] = value.handle.data

    def gather(self, indices, axis):
        self.program.touch(self, "thread")
        return block(np.take_along_axis(self.data, indices.handle.data, int(axis)), self.dtype)

    def scatter(self, values, indices, axis):
        self.program.touch(self, "thread", writes=True)
        np.put_along_axis(self.data, indices.handle.data, values.handle.data, int(axis))

    def _keep_alive(self):
        pass

    def __getattr__(self, name):
        if hasattr(gl.shared_memory_descriptor, name):
            raise MissingWord(name)
        raise AttributeError(f"shared memory of Triton {version} has no {name}")

    def overlaps(self, other):
        return (
            self.first < other.end
            and other.first < self.end
            and np.shares_memory(self.data, other.data)
        )


@dataclasses.dataclass
class Described:
    """What a descriptor of TMA and a buffer say of their blocks."""

    shape: list
    element_ty: tl.dtype
    layout: object

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.element_ty.primitive_bitwidth // 8


@dataclasses.dataclass(eq=False)
class Access:
    """A touch of shared memory, which is over for those who know its agent up to its time."""

    memory: Memory
    kind: str  # thread; or what goes on by itself: load, copy, product, store
    writes: bool
    agent: tuple
    time: float
    role: str
    frames: list  # of the kernel's functions; a role's end leaves their variables as they were
    line: str
    barrier: object = None  # of a load
    phase: int = 0  # of that barrier, when the load was asked for
    counted: bool = True  # by an mbarrier.expect before
    fenced: bool = False

    def is_over(self, known):
        return known.get(self.agent, 0) >= self.time


class Barrier:
    """An mbarrier: a phase is complete when all arrivals have come and all bytes have landed."""

    def __init__(self, memory, count):
        self.memory, self.count = memory, count
        self.arrived = self.bytes = self.completed = 0
        self.gathered, self.passed = {}, {}  # what those know who arrived, in this phase and before
        self.waits, self.lines = {}, []  # (phase, completed) of each role's last wait; of arrivals

    def gather(self, known):
        _join(self.gathered, known)
        if self.arrived == self.count and self.bytes == 0:
            self.arrived, self.completed = 0, self.completed + 1
            _join(self.passed, self.gathered)
            self.gathered = {}

    def what_is_missing(self, role, phase):
        """Why a wait of this role does not end, and whether another role may be to blame for it."""
        waited, lines = self.waits.get(role), ", ".join(dict.fromkeys(self.lines[-3:]))
        if self.bytes < 0 and not self.lines:
            return "its loads landed, but there was no mbarrier.expect", False
        if self.bytes:
            more = "more" if self.bytes > 0 else "fewer"
            counted = f"mbarrier.expect says {abs(self.bytes)} bytes {more} than its loads bring"
            return f"{counted} ({lines})", False
        if self.arrived:
            return f"only {self.arrived} of {self.count} arrivals came ({lines})", False
        if self.completed - (waited[1] if waited else 0) > 1:
            often = f"more arrivals came than it has waits ({lines})"
            return f"{often}; let one phase answer one wait", False
        if waited and waited[0] == phase:
            again = f"this role has waited for phase {phase} before"
            return f"{again}; change phase after each wait", False
        passes = f"a wait for phase {1 - phase} would pass"
        if not self.completed:
            return f"nobody arrived, and it needs {self.count} a phase; {passes}", True
        return f"none of {self.count} arrivals has come since ({lines}); {passes}", True


_DOES = {  # who touches now, and what may still go on
    ("thread", False): ("{role} reads {name}", "{role} may still read it"),
    ("thread", True): ("{role} writes {name}", "{role} may still write it"),
    ("product", False): ("{role} starts a product of {name}", "a product of {role} may still read it"),
    ("store", False): ("{role} has TMA store {name}", "TMA may still read it for a store of {role}"),
    ("load", True): ("{role} has TMA load into {name}", "a load into it by TMA may still go on"),
    ("copy", True): ("{role} copies into {name}", "a copy into it may still go on"),
}  # fmt: skip
_FIRST = {  # what must come in between
    "thread": "that role must arrive at an mbarrier after it, and this one wait there",
    "product": "wait for the product (warpgroup_mma_wait), and free the slot only then",
    "store": "tma.store_wait must come first",
    "copy": "async_copy.commit_group and wait_group must come first",
}


class Program:
    """One program of a grid: what its roles know, and what they asked for."""

    def __init__(self, scheduler, log):
        self.scheduler, self.log = scheduler, log
        self.known = {0: collections.Counter({("role", 0): 1})}
        self.parents = {0: []}  # the frames that started a role
        self.accesses, self.barriers, self.issued = [], {}, collections.Counter()

    role = property(lambda self: self.scheduler.role)
    mine = property(lambda self: self.known[self.scheduler.role])

    # --- who knows what
    def release(self):
        """What this role knows, for others. What it does from here on they do not know."""
        known = dict(self.mine)
        self.mine["role", self.role] += 1
        return known

    def learn(self, known):
        _join(self.mine, known)

    def start_role(self, role, known, frames):
        """Begin a role, which knows this."""
        self.known[role] = collections.Counter(known)
        self.known[role]["role", role] = 1
        self.parents[role] = frames

    def start(self, memories, kind):
        """Begin what goes on by itself, reads these, and ends in order: product, store, group of copies."""
        self.issued[kind, self.role] += 1
        for memory in memories:
            self.touch(memory, kind, False, (kind, self.role), self.issued[kind, self.role])

    def pending(self, kind):
        agent = kind, self.role
        return self.issued[agent] - self.mine[agent]

    def finish(self, kind, pending=0):
        """This role has waited until at most so many go on."""
        agent = kind, self.role
        self.mine[agent] = max(self.mine[agent], self.issued[agent] - int(pending))

    def touch(self, memory, kind, writes=False, agent=None, time=math.inf, **load):
        """Misuse unless this role knows that what was done there before is over."""
        mine, agent = self.mine, agent or ("role", self.role)
        if kind == "thread":
            time = mine[agent]
        who = self.scheduler.names[self.role], self.frames(), self.line()
        new = Access(memory, kind, writes, agent, time, *who, **load)
        for old in self.accesses:
            if not old.memory.overlaps(memory):
                continue
            if (writes or old.writes) and not old.is_over(mine):
                raise Misuse(self._clash(new, old))
            if kind in ("product", "store") and old.writes and old.kind == "thread":
                self._expect_fence(new, old)
        self.accesses = [old for old in self.accesses if not self._replaces(new, old)]
        self.accesses.append(new)
        return new

    def _replaces(self, new, old):
        same = (old.memory.first, old.memory.end) == (new.memory.first, new.memory.end)
        again = new.writes or (not old.writes and new.agent == old.agent)
        return same and again and old.is_over(self.mine)

    def fence(self):
        for access in self.accesses:
            access.fenced = access.fenced or access.is_over(self.mine)

    def _expect_fence(self, new, old):
        # Triton's compiler puts it in within a role. Gluon asks for it all the same before a store by TMA.
        if not old.fenced and (new.kind == "store" or old.agent != ("role", self.role)):
            what = "TMA" if new.kind == "store" else "a product"
            raise Misuse(
                f"{what} may miss what the threads wrote to {self.name(new.memory)} ({old.line}); "
                f"fence_async_shared must come first"
            )

    def _clash(self, new, old):
        now, before = _DOES[new.kind, new.writes][0], _DOES[old.kind, old.writes][1]
        now = now.format(role=new.role, name=self.name(new.memory))
        advice = self._missing_wait(old) if old.kind == "load" else _FIRST[old.kind]
        return f"{now} ({new.line}) while {before.format(role=old.role)} ({old.line}): {advice}"

    def _missing_wait(self, load):
        bar, name = load.barrier, self.name(load.barrier.memory)
        waited = bar.waits.get(self.role)
        if not load.counted:
            return f"no mbarrier.expect of {name} came before it"
        if waited and waited[1] > load.phase:
            return f"{name} completed without it; mbarrier.expect must count the bytes of all loads"
        if waited and waited[0] != load.phase % 2:
            passed = f"the wait for phase {waited[0]} of {name} passed at once"
            return f"{passed}; this load needs phase {load.phase % 2}"
        return f"mbarrier.wait for phase {load.phase % 2} of {name} must come first"

    def end(self):
        """Misuse if anything goes on: the memory is another program's, once this one has ended."""
        for old in self.accesses:
            if old.is_over(self.mine) or old.kind == "thread":
                continue
            name, goes_on = self.name(old.memory, old.frames), _DOES[old.kind, old.writes][1]
            advice = {"store": "wait for the stores first (tma.store_wait)"}.get(
                old.kind, "nobody waited for it"
            )
            goes_on = goes_on.format(role=old.role).replace(" it", f" {name}", 1)
            raise Misuse(f"the kernel ends while {goes_on} ({old.line}): {advice}")

    # --- mbarriers
    def barrier(self, memory):
        bar = self.barriers.get(memory.first)
        if bar is None:
            how = "was invalidated" if memory.first in self.barriers else "has no mbarrier.init"
            raise Misuse(f"{self.name(memory)} {how} ({self.line()})")
        return bar

    def init(self, memory, count):
        if count < 1:
            raise Misuse(
                f"{self.name(memory)} counts {count} arrivals ({self.line()}); count 1 or more"
            )
        self.barriers[memory.first] = Barrier(memory, count)

    def invalidate(self, memory):
        self.barrier(memory)
        self.barriers[memory.first] = None

    def arrive(self, memory, count, n_bytes=0):
        bar = self.barrier(memory)
        bar.arrived += count
        bar.bytes += n_bytes
        bar.lines.append(self.line())
        if bar.arrived > bar.count:
            lines = ", ".join(bar.lines[-bar.arrived :])
            raise Misuse(
                f"{self.name(memory)} counts {bar.count} arrivals a phase, and {bar.arrived} came ({lines})"
            )
        bar.gather(self.release())

    def wait(self, memory, phase):
        bar, phase, role = self.barrier(memory), int(phase), self.role
        if phase not in (0, 1):
            raise Misuse(
                f"an mbarrier counts phases in one bit, so phase must be 0 or 1, not {phase} ({self.line()})"
            )
        line, frames = self.line(), self.frames()

        def what():
            after = f"after {bar.completed} complete ones, " if bar.completed else ""
            why, blames_others = bar.what_is_missing(role, phase)
            name = self.name(memory, frames)
            return blames_others, f"phase {phase} of {name} ({line}): {after}{why}"

        self.scheduler.pause(lambda: bar.completed % 2 != phase, what)
        bar.waits[role] = phase, bar.completed
        _join(self.mine, bar.passed)
        self.mine["load", bar] = bar.completed

    # --- the reader's own names
    def frames(self):
        """The frames of the kernel's functions that this role is in, the innermost first."""
        frame, frames = sys._getframe(1), []
        while frame:
            if KERNEL in frame.f_globals:
                frames.append(frame)
            frame = frame.f_back
        return frames + self.parents[self.role]

    def line(self):
        frame = sys._getframe(1)
        while frame and KERNEL not in frame.f_globals:
            frame = frame.f_back
        return f"line {frame.f_lineno}" if frame else "no line"

    def name(self, memory, frames=None):
        """What the kernel calls this memory: full[1], if it is a part of a variable `full`."""
        best = None
        for frame in frames or self.frames():
            for name, piece in _memories(frame.f_locals):
                n = len(piece.path)
                if piece.whole is memory.whole and piece.path == memory.path[:n]:
                    whole = name + "".join(f"[{i}]" for i in memory.path[n:])
                    best = min(best or (n, whole), (n, whole), key=lambda b: b[0])
            if best and best[0] == 0:
                break
        return best[1] if best else f"a buffer of {memory.shape}"


def _memories(variables):
    """The names of shared memory: first variables, then their parts."""
    parts = {}
    for name, value in variables.items():
        if isinstance(value, Memory):
            yield name, value
        elif isinstance(value, (tuple, list)):
            parts |= {f"{name}[{i}]": part for i, part in enumerate(value)}
        elif KERNEL in type(value).__dict__:  # an aggregate
            parts |= {f"{name}.{field}": part for field, part in vars(value).items()}
    for name, value in parts.items():
        if isinstance(value, Memory):
            yield name, value


def _join(known, more):
    for agent, time in more.items():
        known[agent] = max(known.get(agent, 0), time)
