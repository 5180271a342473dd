"""Check every load and store of an interpreted Triton kernel against its tensor, and count the bytes.

Stands in for   compute-sanitizer memcheck (an access outside the tensor becomes a Python error that names the
                kernel, the argument and the index; without this the process would die of a segfault) and for
                the byte counters of Nsight Compute.
Differs in      what counts as traffic: a GPU's L2 serves repeated reads, so both numbers are given, bytes
                requested by the programs and distinct bytes touched; and in what it misses: an index past the
                end of a view, in the memory behind it.
Knows           from which argument an address was computed, and for a table of pointers (addresses in a tensor
                of int64) to which living tensor each leads.
"""

import contextlib
import dataclasses
import functools
import gc
import inspect
import threading

from lib.nogpu import launches, turns
from lib.nogpu.interpreter import interpreted_launches

import numpy as np
import torch
import triton.language as tl
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


class _Tensor:
    """A tensor that a running launch may touch: where its memory is, and which elements were touched."""

    def __init__(self, name, tensor):
        storage = tensor.untyped_storage()
        self.name, self.id = name, id(tensor)  # no reference: a traceback would keep it alive
        self.base = tensor.data_ptr()
        self.itemsize = tensor.element_size()
        self.numel = tensor.numel()
        self.low, self.high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.touched = {"loaded": [], "stored": []}

    def holds(self, first, last, width=1):
        """Whether elements of `width` bytes at these addresses and between them lie in its memory."""
        return self.low <= first and last + width <= self.high

    def element(self, address):
        address = int(address)
        if address >= 2**63:  # before address 0, where memory may begin that is not far from it
            address -= 2**64
        return (address - self.base) // self.itemsize

    def size(self):
        """Its number of elements, in words. An expanded tensor has fewer in memory."""
        n = min(self.numel, self.element(self.high))
        elements = "1 element" if n == 1 else f"{n} elements"
        return (
            elements if n == self.numel else f"{elements} in memory, for {self.numel} by stride 0"
        )


class _Launch:
    def __init__(self, kernel):
        self.kernel, self.arguments = kernel.__name__, []
        self.turns = turns.Turns(kernel, self.kernel)
        self.overflow = None  # (program, line) of the last int32 product that overflowed

    @functools.cached_property
    def living(self):
        """The tensors that Python code holds, for the addresses in a table of pointers."""
        return list(_living_tensors())

    def access(self, verb, pointers, mask):
        """Check the addresses `pointers[mask]`, and remember them when traffic is being counted."""
        data = pointers.data
        addresses = data[mask] if not mask.all() else data.ravel()
        if addresses.size == 0:
            return
        origin, width = _origin(pointers), _width(pointers)
        first, last = int(addresses.min()), int(addresses.max())
        owner = self.owner(first, last, width, origin)
        if owner is None:
            self._access_several(verb, addresses, width, origin)
        elif _counting:
            owner.touched[verb].append(np.array(addresses))

    def owner(self, first, last, width=1, origin=None):
        """The tensor that holds these addresses, or None."""
        if origin is not None:
            return origin if origin.holds(first, last, width) else None
        return _nearest_below(first, [a for a in self.arguments if a.holds(first, last, width)])

    def lead(self, addresses):
        """The tensor, argument or not, to which numbers from a table lead, if it is one."""
        first, last = int(addresses.min()), int(addresses.max())
        for tensors in (self.arguments, self.living):
            if owner := _nearest_below(first, [t for t in tensors if t.holds(first, last)]):
                return owner
        return None

    def _access_several(self, verb, addresses, width, origin):
        """One tile that reaches into several tensors (a table of pointers), or out of its own."""
        rest = addresses
        for tensor in () if origin else (*self.arguments, *self.living):
            inside = (rest >= tensor.low) & (rest + width <= tensor.high)
            if _counting and inside.any():
                tensor.touched[verb].append(rest[inside])
            rest = rest[~inside]
            if not rest.size:
                return
        if origin:
            rest = rest[(rest < origin.low) | (rest + width > origin.high)]
        raise OutOfBounds(self._message(verb, int(rest[0]), origin))

    def _nearby(self, address):
        """A sentence about the tensor that is less than a megabyte away."""
        tensors = [*self.arguments, *self.living]
        near = min(tensors, key=lambda t: max(t.low - address, address - t.high), default=None)
        if near is None or max(near.low - address, address - near.high) > 2**20:
            return ""
        return f" In {near.name}, the nearest, it would be element {near.element(address)} of {near.size()}."

    def _message(self, verb, address, origin):
        program = upstream.interpreter_builder.grid_idx
        what = f"{self.kernel}: {'load from' if verb == 'loaded' else 'store to'}"
        if origin is None:
            where = (
                f"address {address:#x}, where no living tensor is" if address else "a null pointer"
            )
            return (
                f"{what} {where}; in program {program}.{self._nearby(address)} The address was computed from no"
                " argument. If it is from a table of pointers, keep the tensors: a temporary such as"
                " x.contiguous() lives to the end of its statement."
            )
        lands_in = self.owner(address, address)
        lands_in = f" (the address lies in {lands_in.name})" if lands_in else ""
        advice = "Check the mask and the offsets."
        if self.overflow and self.overflow[0] == program:
            advice = (
                f"In {self.overflow[1]} an int32 product passed 2**31 and wrapped around:"
                " convert one factor with .to(tl.int64)."
            )
        return (
            f"{what} {origin.name} at element {origin.element(address)}, but that tensor has"
            f" {origin.size()}{lands_in}; in program {program}. {advice}"
        )


def _nearest_below(address, tensors):
    """Two tensors may share a storage (in place, views): take the one that starts nearest below."""
    return min(tensors, key=lambda t: (address < t.base, abs(address - t.base)), default=None)


def _living_tensors():
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(Exception):  # fake, sparse and other tensors without memory
                storage = thing.untyped_storage()  # of zeros without memory it begins at address 0
                if thing.device.type == "cpu" and storage.nbytes() and storage.data_ptr():
                    yield _Tensor(f"a tensor of shape {tuple(thing.shape)}", thing)


# --- where an address comes from: each pointer argument has a type of its own, which travels with it ------


def _origin(pointers):
    return getattr(pointers.dtype, "origin", None)


def _from(origin, pointers):
    """The same pointers, marked as computed from the tensor `origin`."""
    kind = pointers.dtype.scalar
    pointers.dtype = tl.pointer_type(kind.element_ty, kind.address_space)
    pointers.dtype.origin = origin
    return pointers


def _width(pointers):
    """Bytes of an element that these pointers lead to."""
    return upstream._get_np_dtype(pointers.get_element_ty()).itemsize


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
    _hook_pointers(upstream.InterpreterBuilder)
    _hook_launches(upstream.GridExecutor)


def _hook_accesses(builder):
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

    def check(verb, pointers, mask):
        # a bool combined with a scalar arrives as integers, which would be taken for indices
        mask = np.broadcast_to(getattr(mask, "data", mask), pointers.data.shape).astype(bool)
        running[-1].access(verb, pointers, mask)
        return mask

    def create_masked_load(self, pointers, mask, *rest, **options):
        check("loaded", pointers, mask)
        result = load(self, pointers, mask, *rest, **options)
        _read(pointers, result)
        return result

    def create_masked_store(self, pointers, value, mask, *rest, **options):
        active = check("stored", pointers, mask)
        if pointers.data.size > 1 or not _holds(pointers, value, active):
            running[-1].turns.wrote()
        return store(self, pointers, value, mask, *rest, **options)

    def updating(method, pointers_at, mask_at):
        def atomic(self, *args):
            pointers = args[pointers_at]
            mask = np.ones(pointers.data.shape, bool) if mask_at is None else args[mask_at]
            check("loaded", pointers, mask)
            active = check("stored", pointers, mask)
            before = method(self, *args)
            if _holds(pointers, before, active):
                _read(pointers, before)  # a lock that another program holds
            else:
                running[-1].turns.wrote()
            return before

        return atomic

    builder.create_masked_load, builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )
    builder.create_atomic_cas = updating(cas, 0, None)
    builder.create_atomic_rmw = updating(rmw, 1, 3)


def _read(pointers, value):
    def what():
        address = int(pointers.data.flat[0])
        owner = running[-1].owner(address, address, origin=_origin(pointers))
        element = f"element {owner.element(address)} of {owner.name}" if owner else "memory"
        return element + (f", which is {value.data.item()}," if value.data.size == 1 else "")

    running[-1].turns.read(int(pointers.data.flat[0]), what)


def _holds(pointers, value, active):
    """Whether the memory at these pointers has this value."""
    data = np.broadcast_to(value.data, pointers.data.shape)
    return np.array_equal(upstream._interpreter.load(pointers.data, active, data, data.dtype), data)


def _hook_pointers(builder):
    to_pointer, bitcast, select = (
        builder.create_int_to_ptr,
        builder.create_bitcast,
        builder.create_select,
    )
    multiply, convert = builder.create_mul, upstream._implicit_cvt

    def argument_to_pointer(value):
        """Upstream's conversion of an argument of a launch."""
        result = convert(value)
        if isinstance(value, torch.Tensor) and running:
            owner = next((a for a in running[-1].arguments if a.id == id(value)), None)
            _from(owner, result.handle)
        return result

    def create_int_to_ptr(self, numbers, kind):
        return _from(running[-1].lead(numbers.data), to_pointer(self, numbers, kind))

    def create_bitcast(self, x, kind):
        result = bitcast(self, x, kind)
        if kind.scalar.is_ptr() and x.dtype.is_ptr():
            return _from(_origin(x), result)
        return result

    def create_select(self, condition, x, y):
        result = select(self, condition, x, y)
        if result.dtype.is_ptr() and _origin(x) is not _origin(y):
            return _from(None, result)
        return result

    def create_mul(self, x, y):
        result = multiply(self, x, y)
        if result.data.dtype == np.int32:
            wide = np.multiply(x.data, y.data, dtype=np.int64)
            if not np.array_equal(wide, result.data):
                line = turns.line_of(next(turns.kernel_frames()))
                running[-1].overflow = self.grid_idx, line
        return result

    upstream._implicit_cvt = argument_to_pointer
    builder.create_int_to_ptr, builder.create_bitcast = create_int_to_ptr, create_bitcast
    builder.create_select, builder.create_mul = create_select, create_mul


def _hook_launches(executor):
    init_args, call = executor._init_args_hst, executor.__call__

    def init_args_host(self, args, kwargs):
        host_args, host_kwargs = init_args(self, args, kwargs)
        named = [*zip(self.arg_names, host_args), *host_kwargs.items()]
        running[-1].arguments = [
            _Tensor(name, tensor) for name, value in named for tensor in tensors_in(value)
        ]
        return host_args, host_kwargs

    def launch(self, *args, **kwargs):
        with _ONE_AT_A_TIME:
            return watched(self, *args, **kwargs)

    def watched(self, *args, **kwargs):
        kernel = self.fn
        running.append(_Launch(kernel))
        self.fn = functools.wraps(kernel)(lambda **arguments: running[-1].turns.run(arguments))
        self.fn.__signature__ = inspect.signature(kernel)
        try:
            call(self, *args, **kwargs)
        finally:
            running[-1].turns.end()
            self.fn = kernel
            _record(running.pop())

    executor._init_args_hst, executor.__call__ = init_args_host, launch


def tensors_in(value):
    """The tensors in a kernel argument: a tensor, a tensor descriptor, or a tuple of these."""
    if isinstance(value, tuple):
        return [t for v in value for t in tensors_in(v)]
    value = getattr(value, "base", value)
    return [value] if isinstance(value, torch.Tensor) else []


@contextlib.contextmanager
def checked(kernel, named):
    """Inside, the accesses of an interpreted kernel are checked against these arguments, as in a launch."""
    with _ONE_AT_A_TIME:
        launch = _Launch(kernel)
        launch.arguments = [_Tensor(name, t) for name, value in named for t in tensors_in(value)]
        running.append(launch)
        launches.running.append(kernel.__name__)
        try:
            yield
        except InterpreterError as error:
            raise launches.root_cause(error) from None
        finally:
            launch.turns.end()
            launches.running.pop()
            _record(running.pop())


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
