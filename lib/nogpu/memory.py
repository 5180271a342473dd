"""Check every load and store of an interpreted Triton kernel against its tensor, and count the bytes.

Stands in for   compute-sanitizer memcheck (an access outside the tensor becomes a Python error that names the
                kernel, the argument and the index; without this the process would die of a segfault) and for
                the byte counters of Nsight Compute.
Differs in      what counts as traffic: a GPU's L2 serves repeated reads, so both numbers are given, bytes
                requested by the programs and distinct bytes touched; and in what it misses: an index past the
                end of a view, in the memory behind it, and one that lands in another argument of the launch.
"""

import contextlib
import dataclasses
import functools
import threading

from lib.nogpu.interpreter import interpreted_launches

import numpy as np
import torch
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError


class OutOfBounds(IndexError):
    """A kernel loaded from or stored to an address outside the tensor it was given."""


@dataclasses.dataclass
class ArgumentTraffic:
    """Bytes that all programs of the counted launches moved through one pointer argument."""

    loaded: int = 0
    stored: int = 0
    loaded_distinct: int = 0
    stored_distinct: int = 0


@dataclasses.dataclass
class Traffic:
    """What `count_traffic` saw. `by_argument` maps 'kernel.argument' to its ArgumentTraffic."""

    launches: int = 0
    programs: int = 0
    by_argument: dict = dataclasses.field(default_factory=dict)

    def _total(self, field):
        return sum(getattr(a, field) for a in self.by_argument.values())

    @property
    def bytes_requested(self):
        """Bytes loaded plus bytes stored, each time a program asked for them."""
        return self._total("loaded") + self._total("stored")

    @property
    def bytes_moved(self):
        """Bytes loaded plus bytes stored, each byte of an argument once per launch: what must cross HBM."""
        return self._total("loaded_distinct") + self._total("stored_distinct")

    def table(self):
        """One row per pointer argument, in bytes, with a total."""
        import pandas as pd  # here, because every import of lib would take a quarter of a second longer

        rows = {name: dataclasses.asdict(a) for name, a in self.by_argument.items()}
        table = pd.DataFrame.from_dict(rows, orient="index", dtype="int64")
        table.loc["total"] = table.sum()
        return table.rename_axis("argument")


class _Argument:
    """One tensor argument of a running launch: where its memory is, and which elements were touched."""

    def __init__(self, name, tensor):
        storage = tensor.untyped_storage()
        self.name = name
        self.base = tensor.data_ptr()
        self.itemsize = tensor.element_size()
        self.numel = tensor.numel()
        self.low, self.high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.touched = {"loaded": [], "stored": []}

    def holds(self, first, last):
        return self.low <= first and last + self.itemsize <= self.high

    def element(self, address):
        return (int(address) - self.base) // self.itemsize

    def size(self):
        """Its number of elements, in words. An expanded tensor has fewer in memory."""
        n = min(self.numel, self.element(self.high))
        elements = "1 element" if n == 1 else f"{n} elements"
        return (
            elements if n == self.numel else f"{elements} in memory, for {self.numel} by stride 0"
        )


class _Launch:
    def __init__(self, kernel, arguments):
        self.kernel, self.arguments = kernel, arguments

    def access(self, verb, pointers, mask):
        """Check the addresses `pointers[mask]`, and remember them when traffic is being counted."""
        addresses = pointers[mask] if not mask.all() else pointers.ravel()
        if addresses.size == 0:
            return
        first, last = int(addresses.min()), int(addresses.max())
        owner = self.owner(first, last)
        if owner is None:
            self._access_several(verb, addresses)
        elif _counting:
            owner.touched[verb].append(np.array(addresses))

    def owner(self, first, last):
        """The argument that holds these addresses, or None."""
        inside = [a for a in self.arguments if a.holds(first, last)]
        # Two arguments may share a storage (in place): take the one that starts nearest below.
        return min(inside, key=lambda a: (first < a.base, abs(first - a.base)), default=None)

    def _access_several(self, verb, addresses):
        """One tile that reaches into several tensors (a table of pointers), or out of all of them."""
        rest = addresses
        for argument in self.arguments:
            inside = (rest >= argument.low) & (rest + argument.itemsize <= argument.high)
            if _counting and inside.any():
                argument.touched[verb].append(rest[inside])
            rest = rest[~inside]
        if rest.size:
            raise OutOfBounds(self._message(verb, int(rest[0])))

    def _message(self, verb, address):
        index = upstream.interpreter_builder.grid_idx
        what = {"loaded": "load from", "stored": "store to"}[verb]
        nearest = min(
            self.arguments,
            key=lambda a: min(abs(address - a.low), abs(address - a.high)),
            default=None,
        )
        if nearest is None:
            return f"{self.kernel}: {what} an address, but the launch has no tensor argument."
        return (
            f"{self.kernel}: {what} {nearest.name} at element {nearest.element(address)}, but that tensor"
            f" has {nearest.size()}; in program {index}. Check the mask and the offsets."
        )


# A launch patches triton.language while it runs, so only one thread at a time may launch.
_ONE_AT_A_TIME = threading.RLock()
running: list[_Launch] = []  # the launch in progress; a helper's launch nests
_counting: list[Traffic] = []  # the Traffic objects of active count_traffic calls


def count_traffic(launch):
    """Run `launch()` and count the bytes that its Triton kernels load and store.

    Works with and without a GPU: kernels run in the interpreter either way, so use small inputs.
    Returns a `Traffic`.
    """
    traffic = Traffic()
    with interpreted_launches():
        _counting.append(traffic)
        try:
            launch()
        finally:
            _counting.remove(traffic)
    return traffic


@functools.cache
def install():
    """Hook the interpreter's loads, stores and launches, for this process."""
    _hook_accesses(upstream.InterpreterBuilder)
    _hook_launches(upstream.GridExecutor)


def _hook_accesses(builder):
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

    def check(verb, pointers, mask):
        if running:
            # a bool combined with a scalar arrives as integers, which would be taken for indices
            mask = np.broadcast_to(getattr(mask, "data", mask), pointers.data.shape).astype(bool)
            running[-1].access(verb, pointers.data, mask)

    def create_masked_load(self, pointers, mask, *rest, **options):
        check("loaded", pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        check("stored", pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    def create_atomic_cas(self, pointers, *rest):
        everywhere = np.ones(pointers.data.shape, bool)
        check("loaded", pointers, everywhere)
        check("stored", pointers, everywhere)
        return cas(self, pointers, *rest)

    def create_atomic_rmw(self, op, pointers, value, mask, *rest):
        check("loaded", pointers, mask)
        check("stored", pointers, mask)
        return rmw(self, op, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )
    builder.create_atomic_cas, builder.create_atomic_rmw = create_atomic_cas, create_atomic_rmw


def _hook_launches(executor):
    init_args, call = executor._init_args_hst, executor.__call__

    def init_args_host(self, args, kwargs):
        host_args, host_kwargs = init_args(self, args, kwargs)
        named = [*zip(self.arg_names, host_args), *host_kwargs.items()]
        running[-1].arguments = [
            _Argument(name, tensor) for name, value in named for tensor in _tensors(value)
        ]
        return host_args, host_kwargs

    def launch(self, *args, **kwargs):
        with _ONE_AT_A_TIME:
            return watched(self, *args, **kwargs)

    def watched(self, *args, **kwargs):
        running.append(_Launch(self.fn.__name__, []))
        try:
            call(self, *args, **kwargs)
        except InterpreterError as error:
            raise _root_cause(error) from None
        finally:
            _record(running.pop())

    executor._init_args_hst, executor.__call__ = init_args_host, launch


def _tensors(value):
    """The tensors in a kernel argument: a tensor, a tensor descriptor, or a tuple of these."""
    if isinstance(value, tuple):
        return [t for v in value for t in _tensors(v)]
    value = getattr(value, "base", value)
    return [value] if isinstance(value, torch.Tensor) else []


@contextlib.contextmanager
def checked(kernel, named):
    """Inside, the accesses of an interpreted kernel are checked against these arguments, as in a launch."""
    arguments = [_Argument(name, t) for name, value in named for t in _tensors(value)]
    with _ONE_AT_A_TIME:
        running.append(_Launch(kernel, arguments))
        try:
            yield
        except InterpreterError as error:
            raise _root_cause(error) from None
        finally:
            _record(running.pop())


def _root_cause(error):
    """Upstream wraps an error once per call level; a reader wants the innermost one."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _record(launch):
    for traffic in _counting:
        traffic.launches += 1
        with contextlib.suppress(AttributeError):
            traffic.programs += int(np.prod(upstream.interpreter_builder.grid_dim))
        for argument in launch.arguments:
            entry = traffic.by_argument.setdefault(
                f"{launch.kernel}.{argument.name}", ArgumentTraffic()
            )
            for verb, chunks in argument.touched.items():
                if not chunks:
                    continue
                addresses = np.concatenate(chunks)
                distinct = f"{verb}_distinct"
                setattr(entry, verb, getattr(entry, verb) + int(addresses.size) * argument.itemsize)
                n_distinct = int(np.unique(addresses).size)
                setattr(entry, distinct, getattr(entry, distinct) + n_distinct * argument.itemsize)
