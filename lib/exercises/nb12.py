"""Exercises of notebook 12: the compiled DLRM."""

import contextlib
import copy

from lib import machine
from lib.dlrm import model as dlrm
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_module_class,
    first_numbers,
    left_alone,
    plain,
    plural,
)
from lib.nogpu import inductor
from lib.profiling import traffic_table

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

_DIM = 16


# --- 12.1 ----------------------------------------------------------------------------------------------


class Mending(torch.nn.Module):
    """A DLRM that takes a missing dense number, NaN, for 0, and counts missing tokens, -1."""

    def __init__(self, model):
        super().__init__()
        self.model, self.n_missing = model, 0

    def forward(self, dense, sparse):
        if dense.isnan().any():
            dense = torch.where(dense.isnan(), 0.0, dense)
        self.n_missing += (sparse < 0).sum().item()
        return self.model(dense, sparse)


def _mending_batches():
    """{what is special: (dense, sparse)} of one size."""
    batches, inf = {}, torch.inf
    values = (("nothing", None, 0), ("a NaN", torch.nan, 1), ("an inf", inf, 3), ("-inf", -inf, 2))
    for what, value, k in values:
        dense, sparse, _ = _batch(6)
        if value is not None:
            dense[2, 5] = value
        # 3 stand in 2 rows, for tokens are counted, and not -1 alone
        sparse.flatten()[:k] = torch.arange(-k, 0)
        batches[f"dense with {what} and {plural(k, 'missing token')}"] = dense, sparse
    return batches


@exercise("12.1", "Mend the breaks", minutes=15, level=2)
def _(answer):
    expect_module_class(answer)
    model = _small_model()
    right = Mending(model)
    eager, compiled, again = (answer(model).to(machine.device()) for _ in range(3))
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    version = torch.compile(compiled, backend=counting, dynamic=False)
    for at, (dense, sparse) in _mending_batches().items():
        for how, call in (("", eager), (", compiled", version)):
            with case(at + how), left_alone(at + how, dense=dense, sparse=sparse):
                got = attempted(call(dense, sparse))
                _check_mended(at + how, model, got, dense, sparse)
        right(dense, sparse)
        for how, module in (("", eager), (", compiled", compiled)):
            n = plain(getattr(module, "n_missing", None))
            message = f"{at}{how}: n_missing is {n} so far, should be {right.n_missing}"
            expect(n == right.n_missing, message)
    lines = _lines_that_break(again, dense, sparse)
    expect(not lines, f"the results are right, but a graph ends at: {', '.join(lines)}")
    expect(
        len(graphs) == 1,
        f"no line breaks the graph, but four batches of one size take {len(graphs)} graphs; what is "
        "guarded that changes with each call?",
    )


def _check_mended(at, model, got, dense, sparse):
    parameters = list(model.parameters())
    want = model(torch.where(dense.isnan(), 0.0, dense), sparse)
    expect(isinstance(got, torch.Tensor) and got.shape == want.shape, f"{at}: give the logits")
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    expect(torch.allclose(got, want, **close), f"{at}: the logits differ from those of Mending")
    expect(got.requires_grad, f"{at}: no gradient comes back to the model")
    pairs = [torch.autograd.grad(t.sum(), parameters, allow_unused=True) for t in (got, want)]
    for a, b in zip(*pairs):
        same = (a is None) == (b is None) and (a is None or torch.allclose(a, b, **close))
        expect(same, f"{at}: gradients differ from those of Mending")


def _lines_that_break(module, dense, sparse):
    torch.compiler.reset()
    report = torch._dynamo.explain(module)(dense, sparse)
    lines = [b.user_stack[-1].line.strip() for b in report.break_reasons]
    return list(dict.fromkeys(lines)) or ["a line"] * (report.graph_count > 1)


# --- 12.2 ----------------------------------------------------------------------------------------------


class _Watched(torch.nn.Module):
    """A DLRM that notes how many rows it is called with."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def forward(self, dense, sparse):
        self.seen.append(len(dense))
        return self.model(dense, sparse)


def _small_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = dlrm.DLRM(dlrm.ModulusHash((5, 3)), dlrm.Architecture("tiny", (8, 4), (8, 1)))
    return model.to(machine.device())


def _batch(n_rows):
    generator = torch.Generator().manual_seed(n_rows)
    dense = torch.rand(n_rows, 13, generator=generator)
    sparse = torch.randint(0, 1000, (n_rows, 2), generator=generator)
    labels = (torch.arange(n_rows) % 3 == 0).float()
    return [t.to(machine.device()) for t in (dense, sparse, labels)]


def _loss(model, dense, sparse, labels, size):
    return F.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def _loss_and_gradients(fn, model, batch, size):
    model.zero_grad(set_to_none=True)
    loss = attempted(fn(model, *batch, size))
    expect(
        isinstance(loss, torch.Tensor) and loss.numel() == 1,
        f"should return the loss, a tensor with one number, got {type(loss).__name__}",
    )
    expect(loss.requires_grad, "no gradient comes back to the model")
    loss.backward()
    results = {"the loss": loss.detach().reshape(())}
    return results | {f"the gradient of {n}": p.grad for n, p in model.model.named_parameters()}


@exercise("12.2", "Pad the last batch", minutes=15, level=2)
def _(padded_loss):
    for n_rows, size in ((8, 8), (1, 8), (3, 8), (7, 8), (3, 5)):
        at = f"real rows: {n_rows}, size: {size}"
        model, batch = _Watched(_small_model()), _batch(n_rows)
        before = [t.clone() for t in batch]
        want = _loss_and_gradients(_loss, model, batch, size)
        model.seen.clear()
        with case(at), _nan_in_new_memory():
            got = _loss_and_gradients(padded_loss, model, batch, size)
        expect(
            model.seen == [size],
            f"{at}: the model should be called once, with {size} rows; "
            f"it was called with {model.seen or 'none'}",
        )
        for name in want:
            _expect_same(f"{at}: {name}", got[name], want[name])
        same = all(torch.equal(a, b) for a, b in zip(batch, before))
        expect(same, f"{at}: the batch itself should be left as it was")


@contextlib.contextmanager
def _nan_in_new_memory():
    """torch.empty and its kin give NaN: padding that nobody wrote is finite by luck."""
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _expect_same(what, got, want):
    expect(got is not None, f"{what}: there is none")
    shapes = f"{what}: shape should be {tuple(want.shape)}, is {tuple(got.shape)}"
    expect(got.shape == want.shape, shapes)
    wrong = (~torch.isclose(got, want, rtol=1e-4, atol=1e-6)).nonzero().tolist()
    if wrong:
        at = tuple(wrong[0])
        where = f"{what} at {at}" if at else what
        raise Wrong(f"{where} should be {want[at]:.4g}, is {got[at]:.4g}")


# --- 12.3 ----------------------------------------------------------------------------------------------


def _lookup_kernels(n_tables, options):
    arch = dlrm.SparseArch((50,) * n_tables, _DIM).requires_grad_(False)
    rows = torch.zeros(64, n_tables, dtype=torch.int64)
    return inductor.kernels(inductor.output_code(arch, rows, options=options))


@exercise("12.3", "Move the limit", minutes=8, level=1)
def _(options):
    expect(
        isinstance(options, dict) and options,
        f"give a dictionary, {{'name of the option': value}}, got {options!r}",
    )
    for name in options:
        expect(name in torch._inductor.list_options(), f"Inductor has no option {name!r}")
    for n_tables in (9, 26):
        with case(f"{n_tables} tables"):
            n_kernels = len(_lookup_kernels(n_tables, options))
        expect(n_kernels == 1, f"{n_tables} tables: should be 1 kernel, is {n_kernels}")


# --- 12.4 ----------------------------------------------------------------------------------------------


# On the CPU: on a GPU a row out of range would end the reader's session.
def _arch(num_rows, dim=_DIM):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(num_rows))
        return dlrm.SparseArch(num_rows, dim)


def _last_rows(num_rows):
    """(2, T) rows: the last of each table, and the first."""
    return torch.tensor([[n - 1 for n in num_rows], [0 for _ in num_rows]])


def _all_tables(parts):
    return torch.cat(list(parts))


@exercise("12.4", "One table", minutes=20, level=3)
def _(answer):
    expect_module_class(answer)
    for num_rows, dim in (((3,), 16), ((3, 2), 16), ((1, 5, 1, 4), 6), ((7,) * 26, 16)):
        _check_one_table(answer, num_rows, dim)
    # A loop over the tables may compile to one kernel too, one of 26 masked loads.
    few, many = (_n_ops(answer, (7,) * n_tables) for n_tables in (2, 26))
    expect(
        few == many,
        f"the values are right, but {few} ops for 2 tables become {many} for 26; one lookup serves all",
    )
    arch = _arch((7,) * 26)
    module = answer(copy.deepcopy(arch))
    _check_copies_nothing(module)
    _check_moves(module)  # last: it stays there
    module = answer(arch).requires_grad_(False)
    rows = torch.zeros(64, 26, dtype=torch.int64)
    kernels = inductor.kernels(inductor.output_code(module, rows))
    expect(len(kernels) == 1, f"26 tables: should be 1 kernel, is {len(kernels)}")


def _n_ops(answer, num_rows):
    module, rows = answer(_arch(num_rows)), _last_rows(num_rows)
    return len(traffic_table(lambda: module(rows)))


def _check_one_table(answer, num_rows, dim):
    at, arch, rows = f"tables of {num_rows} rows", _arch(num_rows, dim), _last_rows(num_rows)
    if len(num_rows) > 5:
        at = f"{len(num_rows)} tables of {num_rows[0]} rows"
    at = f"{at}, D = {dim}" if dim != _DIM else at
    with case(at):
        module = answer(copy.deepcopy(arch))
        got, want = attempted(module(rows)), arch(rows)
    expect(isinstance(got, torch.Tensor), f"{at}: should return a tensor, got {type(got).__name__}")
    expect(
        got.shape == want.shape,
        f"{at}: shape should be {tuple(want.shape)}, is {tuple(got.shape)}",
    )
    for b, k in [(b, k) for b in range(2) for k in range(len(num_rows))]:
        expect(
            torch.equal(got[b, k], want[b, k]),
            f"{at}, row {rows[b, k].item()} of table {k}: should be {first_numbers(want[b, k], digits=4)}, "
            f"is {first_numbers(got[b, k], digits=4)}",
        )
    _check_parameter(at, module, arch, got, want)


def _check_parameter(at, module, arch, got, want):
    shapes = [tuple(p.shape) for p in module.parameters()]
    whole = (sum(t.num_embeddings for t in arch.tables), arch.tables[0].embedding_dim)
    expect(shapes == [whole], f"{at}: should have one parameter, {whole}; has {shapes}")
    weights = torch.linspace(-1, 2, want.numel(), device=want.device).view(want.shape)
    expect(got.requires_grad, f"{at}: no gradient comes back to the parameter")
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    (parameter,) = module.parameters()
    _expect_same(
        f"{at}: the gradient", parameter.grad, _all_tables(t.weight.grad for t in arch.tables)
    )


def _check_moves(module):
    """On the device 'meta' nothing is computed, but devices have to agree."""
    tensors = [n for n, v in _attributes(module) if isinstance(v, torch.Tensor)]
    expect(
        not tensors,
        f"the tensor {', '.join(tensors)} stays behind when the module moves: make it a buffer",
    )
    moved = module.to("meta")
    try:
        moved(torch.zeros(2, 26, dtype=torch.int64, device="meta"))
    except Exception as error:
        message = next(iter(str(error).splitlines()), "")[:200]
        expect(False, f"moved to another device it fails: {type(error).__name__}: {message}")


class _HostData(TorchDispatchMode):
    """Notes whether a tensor is made of Python's numbers."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= func is torch.ops.aten.lift_fresh.default
        return func(*args, **kwargs or {})


def _check_copies_nothing(module):
    rows = torch.zeros(2, 26, dtype=torch.int64)
    with torch.no_grad(), _HostData() as mode:
        module(rows)
    expect(
        not mode.seen,
        "forward makes a tensor of Python's numbers: on a GPU that is a copy from the host in each call",
    )


def _attributes(module):
    """(name, value) of all that a module and its parts hold outside parameters and buffers."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            yield f"{name}.{key}".lstrip("."), value
