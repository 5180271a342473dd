"""Exercises of notebook 11, with the code they start from: functions that wait, a module that copies."""

import copy

from lib import machine
from lib.exercises import Wrong, attempted, case, exercise, expect, expect_module_class, left_alone
from lib.profiling import events_of, profiled, traffic_table
from lib.profiling.cost import syncs

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def _expect_no_sync(fn, *tensors):
    """Wrong, with the ops by name, when fn(*tensors) waits for a GPU, or would wait if there were one."""
    waits = syncs(events_of(profiled(lambda: fn(*tensors))))
    names = ", ".join(f"{row['op'] or row['call']} ×{row['times']}" for row in waits)
    expect(not waits, f"the values are right, but the host waits for the device: {names}")
    # On a CPU, .tolist() is not an op. A tensor on 'meta' has no data, so code that reads its numbers fails.
    empty = copy.deepcopy(fn).to("meta") if isinstance(fn, nn.Module) else fn
    _without_data(lambda: empty(*(tensor.to("meta") for tensor in tensors)))


def _without_data(call):
    try:
        return call()
    except (RuntimeError, NotImplementedError) as error:
        raise Wrong(
            "the values are right, but on tensors that have a shape and no data (device 'meta') it fails: "
            f"does it look at the numbers? {str(error).splitlines()[0][:200]}"
        ) from None


def _expect_same(got, want, what, rtol=0.0):
    expect(isinstance(got, torch.Tensor), f"{what}: should be a tensor, got {type(got).__name__}")
    expect(got.dtype == want.dtype, f"{what}: should be {want.dtype}, got {got.dtype}")
    same = got.shape == want.shape and torch.allclose(got, want, rtol=rtol, atol=0, equal_nan=True)
    expect(same, f"{what}: should be {_summary(want)}, got {_summary(got)}")


def _summary(tensor):
    values = [round(v, 4) for v in tensor.flatten()[:6].tolist()]
    return f"{values}{' …' if tensor.numel() > 6 else ''} of shape {tuple(tensor.shape)}"


# --- 11.1 ----------------------------------------------------------------------------------------------


def suspect(x, weight):
    n_rows = x.shape[0]  # line 1
    y = torch.relu(x @ weight)  # line 2
    large = y[y > 1.0]  # line 3
    sign = torch.where(y.sum() > 0, 1.0, -1.0)  # line 4
    y = y * sign / n_rows  # line 5
    if y.max() > 0.5:  # line 6
        y = y.clamp(max=0.5)  # line 7
    return y, large.sum()  # line 8


_WHY = {
    1: "a shape is known to the host",
    2: "it queues two kernels and returns",
    4: "torch.where chooses on the device",
    5: "a Python number and a tensor on the device: one more kernel",
    7: "it queues a kernel and returns",
    8: "the sum stays on the device until somebody reads it",
}


@exercise("11.1", "Name the lines that wait", minutes=6, level=1)
def check_waiting_lines(lines):
    expect(
        isinstance(lines, (tuple, list, set)) and all(type(n) is int for n in lines),
        "give the numbers of the lines, as (1, 2)",
    )
    for n in sorted(lines):
        expect(1 <= n <= 8, f"there is no line {n}")
        expect(n not in _WHY, f"line {n} does not wait: {_WHY.get(n)}")
    missing = {3, 6} - set(lines)
    expect(len(missing) < 2, "no line at all? The profile shows that the host waits")
    hint = "of the ops in the profile one needs a tensor's truth value, the other the size of its result"
    expect(not missing, f"one more line waits: {hint}")


# --- 11.2 ----------------------------------------------------------------------------------------------


def step_and_wait(parameters, gradients, lr):
    """The parameters after a step of SGD, or as they are where a gradient is not finite."""
    if all(g.isfinite().all() for g in gradients):
        return [p - lr * g for p, g in zip(parameters, gradients)]
    return parameters


_STEPS = (  # what is put into the gradients, and in which of the three tensors
    ("all gradients finite", None, ()),
    ("a NaN in the last gradient", float("nan"), (2,)),
    ("inf in the first gradient", float("inf"), (0,)),
    ("-inf in the second gradient", -float("inf"), (1,)),
    ("1e30, which is finite, in a gradient", 1e30, (1,)),
    ("3e38, which is finite, all over a gradient, whose sum is not", 3e38, (1,)),
    ("3e38, which is finite, all over two gradients", 3e38, (0, 2)),
)


def _tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 5), (4, 4)]
    return [torch.randn(shape, generator=generator).to(machine.device()) for shape in shapes]


@exercise("11.2", "Skip a bad step without looking", minutes=10, level=2)
def check_sgd_step(answer):
    for what, value, which in _STEPS:
        gradients = _tensors(1)
        for k in which:
            gradients[k].flatten()[slice(None) if value == 3e38 else -1] = value
        parameters = _tensors(0)
        want = step_and_wait(_tensors(0), gradients, 0.5)
        with case(what), left_alone(what, parameters=parameters, gradients=gradients):
            got = attempted(answer(list(parameters), list(gradients), 0.5))
        expect(isinstance(got, (list, tuple)), "return a list of parameters")
        expect(len(got) == len(want), f"should return {len(want)} parameters, got {len(got)}")
        for k in range(len(want)):
            _expect_same(got[k], want[k], f"{what}: parameter {k}", rtol=1e-6)
    _expect_no_sync(lambda *t: answer(list(t[:3]), list(t[3:]), 0.5), *_tensors(0), *_tensors(1))


# --- 11.3 ----------------------------------------------------------------------------------------------

_HIGH = 2**32 - 1  # the largest token
_SEARCHES = (
    ("one table, its tokens and neighbours", [[2, 5]], [[2], [5], [1], [3], [6]]),
    ("a token that only another table has", [[2, 5], [3]], [[3, 2], [5, 3]]),
    ("places counted in each table", [[2, 5, 9], [5, 7], [0, 7]], [[9, 7, 7], [2, 5, 0]]),
    ("a missing token beside the largest one", [[_HIGH], [-1, 4]], [[-1, -1], [_HIGH, _HIGH]]),
    ("above all tokens of the last table", [[1], [2]], [[_HIGH, _HIGH]]),
    ("an empty table", [[7], [], [7]], [[7, 7, 7], [-1, -1, -1]]),
    ("an empty batch", [[7], [8]], torch.empty(0, 2).tolist()),
)


def _places(vocabularies, ids):
    """The rows by dictionaries: 1 + the token's place in its own table, 0 for a token that is not there."""
    tables = [{token: k + 1 for k, token in enumerate(v)} for v in vocabularies]
    rows = [[table.get(token, 0) for table, token in zip(tables, row)] for row in ids]
    return torch.tensor(rows, dtype=torch.int64).view(len(ids), len(vocabularies))


def _searched(hashing, vocabularies, ids):
    """The module of these lists, and (B, T) ids."""
    tensors = [torch.tensor(v, dtype=torch.int64) for v in vocabularies]
    return hashing(tensors), torch.tensor(ids, dtype=torch.int64).view(-1, len(vocabularies))


@exercise("11.3", "Search all tables at once", minutes=20, level=2)
def check_one_search(hashing):
    expect_module_class(hashing)
    # Values on the CPU: on a GPU an index out of bounds would end the reader's session.
    for what, vocabularies, rows in _SEARCHES:
        at = f"{what}: vocabularies {vocabularies}, ids {rows}"
        with case(at):
            module, ids = _searched(hashing, vocabularies, rows)
            _expect_same(attempted(module(ids)), _places(vocabularies, rows), at)
    n_ops = {}
    for n_tables in (2, 26):
        vocabularies = [list(range(k, 4000 + k, 2)) for k in range(n_tables)]
        rows = [[b + k for k in range(n_tables)] for b in range(500)]
        at = f"{n_tables} tables of 2,000 tokens"
        with case(at):
            module, ids = _searched(hashing, vocabularies, rows)
            _expect_same(module(ids), _places(vocabularies, rows), at)
        traffic = traffic_table(lambda: module(ids))  # noqa: B023  called at once
        n_ops[n_tables] = len(traffic)
        largest, allowed = int(traffic["bytes_written"].max()), 8 * n_tables * 2000
        expect(
            largest <= allowed,
            f"{n_tables} tables: an op writes {largest:,} bytes for 500 ids; compared with all tokens?",
        )
    expect(
        n_ops[26] == n_ops[2],
        f"the values are right, but {n_ops[2]} ops for 2 tables become {n_ops[26]} for 26",
    )
    module, ids = module.to(machine.device()), ids.to(machine.device())
    _expect_no_sync(module, ids)


# --- 11.4 ----------------------------------------------------------------------------------------------


class Standardize(nn.Module):
    """Columns of dense (B, 13) with mean 0 and deviation 1, outliers cut off at 5."""

    def __init__(self, mean, deviation):
        super().__init__()
        self.mean = list(mean)
        self.deviation = torch.tensor(deviation)
        self.register_buffer("limit", torch.tensor(5.0))

    def forward(self, dense):
        mean = torch.tensor(self.mean, device=dense.device)
        z = (dense - mean) / self.deviation.to(dense.device)
        return z.clamp(-self.limit, self.limit)


_FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")


class _FromHost(TorchFunctionMode):
    """Records each call that would copy to a GPU; the device 'meta', of tensors without data, replaces it."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if isinstance(result, torch.Tensor) and result.is_meta:
            # A tensor with no dimension may stay on the host: its number is an argument of the kernel.
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            from_cpu = any(t.device.type == "cpu" and t.dim() for t in tensors)
            if from_cpu or (name in _FROM_DATA and all(t is not args[-1] for t in tensors)):
                self.rows.append({"call": name, "bytes": result.nbytes})
        return result


def copies_per_step(module, *inputs):
    """[{call, bytes}, …]: the copies from the host that a call of `module` makes once it is on a GPU.

    Needs none: a copy of the module and its inputs go to the device 'meta', and what still has to follow them
    in the second call is counted. Made for modules that do not look at their values.
    """
    module = copy.deepcopy(module).to("meta")
    inputs = [tensor.to("meta") for tensor in inputs]
    module(*inputs)
    with _FromHost() as copies:
        module(*inputs)
    return copies.rows


def _dense(n_rows=5):
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(n_rows, 13, generator=generator)).to(machine.device())


@exercise("11.4", "Find the copies of each step", minutes=15, level=3)
def check_on_device(make):
    expect_module_class(make)
    mean, deviation = [0.25 * k for k in range(13)], [0.1 + 0.2 * k for k in range(13)]
    module = make(mean, deviation).to(machine.device())
    dense = _dense()
    got = attempted(module(dense))
    want = Standardize(mean, deviation).to(machine.device())(dense)
    _expect_same(got, want, "5 rows", rtol=1e-5)
    special = dense.clone()
    special[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    right = Standardize(mean, deviation).to(machine.device())(special)
    _expect_same(module(special), right, "a row of NaN, inf and -inf", rtol=1e-5)
    parameters = [name for name, p in module.named_parameters() if p.requires_grad]
    expect(not parameters, f"an optimizer would change {parameters}; use buffers")
    rows = _without_data(lambda: copies_per_step(module, dense))
    copies = ", ".join(f"{row['call']} of {row['bytes']} bytes" for row in rows)
    expect(not rows, f"the values are right, but each call copies to the device: {copies}")
    other = make([1.0] * 13, [2.0] * 13).to(machine.device())
    other.load_state_dict(module.state_dict())
    _expect_same(other(dense), want, "another one after load_state_dict", rtol=1e-5)
