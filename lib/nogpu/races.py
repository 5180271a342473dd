"""What the interpreter hides by running one program after another: races, and sums in no fixed order."""

import collections
import contextlib
import functools
from typing import NamedTuple
from unittest import mock

from lib.nogpu import memory
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.turns import WaitsForever

import numpy as np
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream

# A method of the interpreter's builder -> what it does to memory, and where pointers, mask and ordering stand
# among its arguments. The last three are Triton 3.9's.
_ACCESSES = {
    "create_masked_load": ("load", 0, 1, None),
    "create_masked_store": ("store", 0, 2, None),
    "create_atomic_rmw": ("atomic", 1, 3, 4),
    "create_atomic_cas": ("atomic", 0, None, 3),
    "create_atomic_load": ("atomic", 0, 1, 2),
    "create_atomic_store": ("atomic", 0, 2, 3),
    "create_atomic_poll": ("atomic", 0, None, 3),
}
_VERBS = {
    "load": "loads",
    "poll": "loads",
    "store": "stores",
    "atomic": "updates atomically",
}
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


def races(launch):
    """Run `launch()` in the interpreter and list the races between its programs, one sentence each.

    Two programs of one launch race when they touch one element, at least one of them writing, not all of them
    atomically, and nothing puts them in order. An atomic operation that releases puts what its program did
    before it ahead of what another does after acquiring the same element: a lock, a flag, a counter. A launch
    with such an order runs again in reverse, so that an order which only chance gave is not taken for one.
    There is one sentence per pointer argument, about its first such element; an empty list means no race for
    these inputs. Races between the warps of one program are not detected. Works with and without a GPU; use
    small inputs.
    """
    sentences = []
    with interpreted_launches(), contextlib.ExitStack() as stack:
        log = _Log()
        for name, access in _ACCESSES.items():
            if method := getattr(upstream.InterpreterBuilder, name, None):
                logged = log.logged(method, *access)
                stack.enter_context(mock.patch.object(upstream.InterpreterBuilder, name, logged))
        judged = _judged(upstream.GridExecutor.__call__, log, sentences)
        stack.enter_context(mock.patch.object(upstream.GridExecutor, "__call__", judged))
        launch()
    return sentences


def _judged(call, log, sentences):
    """A launch that adds its races to `sentences`."""

    def wrapped(self, *args, **kwargs):
        tensors = [t for value in (*args, *kwargs.values()) for t in memory.tensors_in(value)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        before = {key: storage.clone() for key, storage in storages.items()}
        log.start()
        call(self, *args, **kwargs)
        by_argument, ordered = _conflicts(log)
        if ordered:
            after = {key: storage.clone() for key, storage in storages.items()}
            _copy(before, storages)
            log.start()
            with in_order("reverse"), contextlib.suppress(WaitsForever):
                call(self, *args, **kwargs)
            _copy(after, storages)
            by_argument = _conflicts(log)[0] | by_argument
        sentences.extend(by_argument.values())

    return wrapped


def _copy(copies, storages):
    for key, storage in storages.items():
        storage.copy_(copies[key])


class _Access(NamedTuple):
    what: str
    program: int
    epoch: int  # how often its program had released something
    seen: dict  # program -> the epoch of it that this access surely comes after


class _Log:
    """What the programs of the running launch did to memory, in order."""

    def start(self):
        self.running = None
        self.accesses = []  # [(_Access, addresses)]
        self.clocks = collections.defaultdict(dict)  # program -> program -> epoch
        self.released = {}  # address -> the clock of the programs that released it
        self.inside = set()  # programs in an atomic load, which calls the plain one

    def logged(self, method, what, pointers_at, mask_at, order_at):
        def wrapped(self_, *args, **options):
            program = int(np.ravel_multi_index(self_.grid_idx, self_.grid_dim))
            if program in self.inside:
                return method(self_, *args, **options)
            pointers = args[pointers_at].data
            mask = True if mask_at is None else getattr(args[mask_at], "data", args[mask_at])
            addresses = np.unique(pointers[np.broadcast_to(mask, pointers.shape).astype(bool)])
            is_volatile = what == "load" and options.get("is_volatile", args[-1]) is True
            flag = int(addresses[0]) if order_at is not None and addresses.size == 1 else None
            if flag is not None and args[order_at] in _ACQUIRES:
                self._acquire(program, flag)
            self.running = memory.running[-1]
            self._add("poll" if is_volatile else what, program, addresses)
            self.inside.add(program)
            result = method(self_, *args, **options)
            self.inside.remove(program)
            if flag is not None and args[order_at] in _RELEASES and _wrote(method, args, result):
                self._release(program, flag)
            return result

        return functools.wraps(method)(wrapped)

    def _add(self, what, program, addresses):
        clock = self.clocks[program]
        access = _Access(what, program, clock.setdefault(program, 1), clock)
        self.accesses.append((access, addresses))

    def _acquire(self, program, flag):
        clock, released = self.clocks[program], self.released.get(flag, {})
        if any(clock.get(other, 0) < epoch for other, epoch in released.items()):
            self.clocks[program] = _later(clock, released)

    def _release(self, program, flag):
        clock = self.clocks[program]
        self.released[flag] = _later(self.released.get(flag, {}), clock)
        self.clocks[program] = clock | {program: clock[program] + 1}


def _later(one, other):
    return {p: max(one.get(p, 0), other.get(p, 0)) for p in one | other}


def _wrote(method, args, before):
    """Whether an atomic operation wrote: a compare-and-swap that fails does not, and releases nothing."""
    if method.__name__ == "create_atomic_cas":
        return np.array_equal(before.data, np.broadcast_to(args[1].data, before.data.shape))
    return method.__name__ not in ("create_atomic_load", "create_atomic_poll")


def _conflicts(log):
    """({argument: a sentence about its first race}, whether some accesses would race but for their order)."""
    by_address = collections.defaultdict(dict)  # address -> key -> _Access
    for access, addresses in log.accesses:
        key = access.what, access.program, access.epoch, id(access.seen)
        for address in addresses.tolist():
            by_address[address].setdefault(key, access)
    sentences, ordered = {}, False
    for address in sorted(by_address):
        pair, is_ordered = _racing_pair(list(by_address[address].values()))
        ordered |= is_ordered
        if pair is None:
            continue
        argument = log.running.owner(address, address) or log.running.lead(np.array([address]))
        one, other = sorted(pair, key=lambda access: (access.program, access.what))
        sentences.setdefault(
            argument.name,
            f"{log.running.kernel}: program {one.program} {_VERBS[one.what]} element"
            f" {argument.element(address)} of {argument.name}, program {other.program}"
            f" {_VERBS[other.what]} it",
        )
    return sentences, ordered


def _racing_pair(accesses):
    """(Two accesses of one element that race, or None; whether two would but for their order)."""
    ordered = False
    if {access.what for access in accesses} in ({"load"}, {"atomic"}):
        return None, False
    for k, one in enumerate(accesses):
        for other in accesses[k + 1 :]:
            kinds = {one.what, other.what}
            if (
                one.program == other.program
                or kinds <= {"load", "poll"}
                or kinds <= {"atomic", "poll"}
            ):
                continue
            if other.seen.get(one.program, 0) < one.epoch:
                return (one, other), ordered
            ordered = True
    return None, ordered


@contextlib.contextmanager
def in_order(order):
    """Inside, the interpreter runs the programs of a launch in this order: 'forward', 'reverse' or a seed.

    Use it inside `interpreted_launches()` where there is a GPU. ValueError for any other order.
    """
    if order not in ("forward", "reverse") and not isinstance(order, int):
        raise ValueError(f"in_order: give 'forward', 'reverse' or a whole number, not {order!r}")
    builder = upstream.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    @functools.cache
    def permutation(n):
        numbers = np.arange(n)
        if order == "reverse":
            return numbers[::-1]
        return numbers if order == "forward" else np.random.default_rng(order).permutation(n)

    def set_permuted(*index):
        grid = builder.grid_dim
        place = np.ravel_multi_index(index, grid)
        chosen = permutation(int(np.prod(grid)))[place]
        set_grid_idx(*(int(i) for i in np.unravel_index(chosen, grid)))

    with mock.patch.object(builder, "set_grid_idx", set_permuted):
        yield
