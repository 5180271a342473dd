"""What the interpreter hides by running one program after another: races, and sums in no fixed order."""

import collections
import contextlib
import functools
from unittest import mock

from lib.nogpu import memory
from lib.nogpu.interpreter import interpreted_launches

import numpy as np
from triton.runtime import interpreter as upstream

# A method of the interpreter's builder -> what it does to memory, and where its mask stands after the pointers.
_ACCESSES = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3),
    "create_atomic_cas": ("atomic", 0, None),
}
_VERBS = {"load": "loads", "store": "stores", "atomic": "updates atomically"}


def races(launch):
    """Run `launch()` in the interpreter and list the races between its programs, one sentence each.

    Two programs of one launch race when they touch one element, at least one of them writing, and not all of
    them atomically. The result does not depend on the order in which the programs happened to run. There is one
    sentence per pointer argument, about its first such element; an empty list means no race for these inputs.
    Races between the warps of one program are not detected. Works with and without a GPU; use small inputs.
    """
    log = collections.defaultdict(list)  # the running launch -> [(what, program, addresses)]
    with interpreted_launches(), contextlib.ExitStack() as stack:
        for name, access in _ACCESSES.items():
            logged = _logged(getattr(upstream.InterpreterBuilder, name), log, *access)
            stack.enter_context(mock.patch.object(upstream.InterpreterBuilder, name, logged))
        launch()
    return [
        sentence for running, accesses in log.items() for sentence in _conflicts(running, accesses)
    ]


def _logged(method, log, what, pointers_at, mask_at):
    def wrapped(self, *args):
        pointers = args[pointers_at].data
        mask = True if mask_at is None else getattr(args[mask_at], "data", args[mask_at])
        addresses = pointers[np.broadcast_to(mask, pointers.shape)]
        program = np.ravel_multi_index(self.grid_idx, self.grid_dim)
        log[memory.running[-1]].append((what, int(program), addresses.ravel()))
        return method(self, *args)

    return wrapped


def _conflicts(running, accesses):
    by_address = collections.defaultdict(set)  # address -> {(what, program)}
    for what, program, addresses in accesses:
        for address in np.unique(addresses).tolist():
            by_address[address].add((what, program))
    sentences = {}
    for address in sorted(by_address):
        pair = _racing_pair(by_address[address])
        argument = running.owner(address, address)
        if pair and argument.name not in sentences:
            (what, one), (what_else, other) = pair
            sentences[argument.name] = (
                f"{running.kernel}: program {one} {_VERBS[what]} element {argument.element(address)} of"
                f" {argument.name}, program {other} {_VERBS[what_else]} it"
            )
    return list(sentences.values())


def _racing_pair(touched):
    """Two accesses of one element that race, or None. touched: {(what, program)}."""
    order = sorted(touched, key=lambda access: (access[1], access[0]))
    for k, (what, program) in enumerate(order):
        for what_else, other in order[k + 1 :]:
            kinds = {what, what_else}
            if program != other and kinds != {"load"} and kinds != {"atomic"}:
                return (what, program), (what_else, other)
    return None


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
