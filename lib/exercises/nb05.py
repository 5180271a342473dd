"""Exercises of notebook 05: torch.compile. The functions with public names are shown in the notebook."""

import contextlib
import io
import re

from lib import machine
from lib.exercises import (
    attempted,
    case,
    exercise,
    expect,
    expect_module_class,
    first_numbers,
    too_many_or_few,
)
from lib.measure.bench import dtype_name

import torch

# --- shown in the notebook -----------------------------------------------------------------------------


def branch_on_a_size(x):
    y = torch.relu(x)
    if x.shape[0] > 2:
        y = 2 * y
    return y + 1


def print_in_the_middle(x):
    y = torch.relu(x)
    print("half way")
    return 2 * y


def print_in_a_helper(x):
    def shift(y):
        z = y + 1
        print("in the helper")
        return torch.relu(z)

    return 3 * shift(2 * x)


def print_in_a_loop(x):
    for k in range(3):
        x = torch.relu(x) + k
        print("round", k)
    return x


QUIZ = (branch_on_a_size, print_in_the_middle, print_in_a_helper, print_in_a_loop)


def clip_to_norm(x, limit):
    norm = x.norm().item()
    if norm > limit:
        x = x * (limit / norm)
    print("norm", norm)
    return x


class Noisy(torch.nn.Module):
    """Adds to each row a wave that moves on with every call."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)
        return x + wave[:, None]


# --- what Dynamo makes of a function -------------------------------------------------------------------


class _Counter:
    """A backend that keeps the graphs it is given and runs them as recorded."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward

    def sizes(self):
        return [sum(n.op.startswith("call") for n in g.graph.nodes) for g in self.graphs]


def _graph_sizes(fn, *calls):
    """The number of ops in each graph compiled over the calls; what fn prints is dropped."""
    torch.compiler.reset()
    counter = _Counter()
    version = torch.compile(fn, backend=counter)
    with contextlib.redirect_stdout(io.StringIO()):
        for args in calls:
            version(*args)
    return counter.sizes()


def _ones(*shape):
    return torch.ones(shape, device=machine.device())


def _expect_dtype(got, want, what):
    names = dtype_name(want.dtype), dtype_name(got.dtype)
    expect(got.dtype == want.dtype, f"{what}: should be {names[0]}, as x is, got {names[1]}")


def _expect_one_graph(fn, *args):
    """For what neither `explain` nor the number of graphs shows, as a helper that the compiler leaves out."""
    torch.compiler.reset()
    try:
        torch.compile(fn, backend="eager", fullgraph=True)(*args)
    except torch._dynamo.exc.Unsupported as error:
        expect(False, f"should be one graph; with fullgraph=True: {str(error).splitlines()[0]}")


# --- 05.1 ----------------------------------------------------------------------------------------------


def _three_ops(x):
    return torch.relu(x + 1) * 2


def _value_decides(x):
    y = 2 * x
    if y.sum() > 0:
        return torch.relu(y)
    return torch.sin(torch.cos(y)) + 1


def _word_decides(x, word):
    return x + 1 if word == "short" else torch.sin(x + 1) * 2


def _size_cases():
    x = _ones(4, 8)
    yield "three ops, one call", _three_ops, [(x,)]
    yield "three ops, the same call twice", _three_ops, [(x,), (x,)]
    yield "a print in the middle", print_in_the_middle, [(x,)]
    yield "two words, two versions", _word_decides, [(x, "short"), (x, "long")]
    yield "an `if` on a positive value", _value_decides, [(x,)]
    yield "an `if` on a negative value", _value_decides, [(-x,)]
    for k in range(3, torch._dynamo.config.recompile_limit + 3):
        again = f"three ops, asked {k} times in all (what was compiled before is still there)"
        yield again, _three_ops, [(x,)]
    yield "three shapes", _three_ops, [(_ones(n, 8),) for n in (4, 5, 6)]
    yield "a print in a loop", print_in_a_loop, [(x,)]


@exercise("05.1", "A counting backend", minutes=10, level=2)
def _(graph_sizes):
    with case("three ops, one call"):
        attempted(graph_sizes(_three_ops, (_ones(4, 8),)))
    cases = [(what, fn, calls, _graph_sizes(fn, *calls)) for what, fn, calls in _size_cases()]
    torch.compiler.reset()
    for what, fn, calls, want in cases:
        with case(what), contextlib.redirect_stdout(io.StringIO()):
            got = graph_sizes(fn, *calls)
        expect(
            isinstance(got, (list, tuple)),
            f"{what}: should be a list of numbers, got {type(got).__name__}",
        )
        expect(list(got) == want, f"{what}: should be {want}, got {list(got)}")


# --- 05.2 ----------------------------------------------------------------------------------------------

_WHY = {
    branch_on_a_size: "a size is a Python number when the function is compiled, so the `if` is decided then",
    print_in_the_middle: "which ops can be recorded before the print, which behind it?",
    print_in_a_helper: "draw both functions: which pieces lie before, inside and behind the call?",
    print_in_a_loop: "can Dynamo go on in the middle of a loop?",
}


@exercise("05.2", "How many graphs?", minutes=6, level=1)
def _(numbers):
    expect(
        isinstance(numbers, (tuple, list))
        and len(numbers) == len(QUIZ)
        and all(isinstance(n, int) for n in numbers),
        f"give a tuple of {len(QUIZ)} numbers, one for each function",
    )
    for fn, got in zip(QUIZ, numbers):
        want = len(_graph_sizes(fn, (_ones(4, 8),)))
        expect(got == want, f"{fn.__name__}: {got} is {too_many_or_few(got, want)}; {_WHY[fn]}")


# --- 05.3 ----------------------------------------------------------------------------------------------


def _value_and_gradient(fn, x, limit):
    x = x.clone().requires_grad_()
    with contextlib.redirect_stdout(io.StringIO()):
        y = attempted(fn(x, limit))
    expect(isinstance(y, torch.Tensor), f"should return a tensor, got {type(y).__name__}")
    expect(y.requires_grad, "no gradient comes back to x")
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    return {"value": y.detach(), "gradient": dx}


def _on_a_nan(t):
    return (
        ": 0 * inf is NaN; backward runs through both branches of a `where`, so neither may have an "
        "infinite slope"
        if t.isnan().any()
        else ""
    )


def _tiny(t):
    return 1e-6 * t.abs().max().item()


def _clip_cases():
    for shape in ((1,), (2, 3), (17, 33)):
        x = torch.linspace(-1, 2, torch.Size(shape).numel(), device=machine.device()).view(shape)
        yield "norm above the limit", x, x.norm().item() / 2
        yield "norm below the limit", x, x.norm().item() * 2
        yield "zeros", torch.zeros_like(x), 1.0
        yield "small numbers", x * 1e-5, x.norm().item() * 0.5e-5


@exercise("05.3", "One graph, the same gradients", minutes=12, level=2)
def _(clip):
    for what, x, limit in _clip_cases():
        with case(f"{what}, shape {tuple(x.shape)}"):
            got, want = (_value_and_gradient(fn, x, limit) for fn in (clip, clip_to_norm))
        _expect_dtype(got["value"], want["value"], f"{what}, shape {tuple(x.shape)}")
        for part in want:
            expect(
                got[part].shape == want[part].shape
                and torch.allclose(got[part], want[part], rtol=1e-4, atol=_tiny(want[part])),
                f"{what}, shape {tuple(x.shape)}: {part} should be {first_numbers(want[part])}, "
                f"got {first_numbers(got[part])}{_on_a_nan(got[part]) if part == 'gradient' else ''}",
            )
    torch.compiler.reset()
    with contextlib.redirect_stdout(io.StringIO()):
        explanation = torch._dynamo.explain(clip)(_ones(2, 3), 1.0)
    lines = "; ".join(f"`{b.user_stack[-1].line}`" for b in explanation.break_reasons)
    expect(not lines, f"should not break, breaks at {lines}")
    expect(explanation.graph_count == 1, f"should be 1 graph, got {explanation.graph_count}")
    _expect_one_graph(clip, _ones(2, 3), 1.0)


# --- 05.4 ----------------------------------------------------------------------------------------------

_NOT_INSIDE = (
    "mark_dynamic marks a tensor before a call; inside forward Dynamo would have to record it, and refuses. "
    "Lengths are dynamic from the second on without it: mind the step"
)
_LENGTHS = (4, 4, 5, 9, 2, 64, 33, 7, 8, 16, 3, 12, 50, 6, 21, 10, 40, 11, 13, 30)


@exercise("05.4", "Stop it recompiling", minutes=15, level=3)
def _(answer):
    expect_module_class(answer)
    attempted(answer()(_ones(2, 4)))
    counter = _Counter()
    torch.compiler.reset()
    eager, module = Noisy(), answer().to(machine.device())
    version = torch.compile(module, backend=counter)
    with torch.no_grad():
        for call, n in enumerate(_LENGTHS, start=1):
            x, at = _ones(n, 4), f"a new module, call {call}, {n} rows"
            with case(at):
                try:
                    got = version(x)
                except AssertionError as error:
                    expect("mark_dynamic" not in str(error), _NOT_INSIDE)
                    raise
            _expect_rows(got, eager(x), at)
    n_compiles = len(counter.graphs)
    expect(
        n_compiles <= 2,
        f"{len(_LENGTHS)} calls: should compile at most two graphs, compiled {n_compiles}; "
        f"{_why_compiled(answer) if n_compiles > 2 else ''}",
    )
    expect(n_compiles > 0, "nothing was compiled: forward has to be one graph, without breaks")
    _expect_one_graph(answer().to(machine.device()), _ones(2, 4))
    _expect_saved_step(module, answer().to(machine.device()), eager)


@torch.no_grad()
def _expect_saved_step(module, new, eager):
    """That the saved state of `module` lets the `new` one go on as `eager` does."""
    state, x = module.state_dict(), _ones(4, 4)
    how = 'make it a buffer: self.register_buffer("step", torch.zeros(()))'
    expect(state, f"state_dict() is empty, so a saved module forgets its step: {how}")
    at = f"a new module, with state_dict() of one that was called {len(_LENGTHS)} times"
    with case(at):
        new.load_state_dict(state)
        got = new(x)
    _expect_rows(got, eager(x), at)


@torch.no_grad()
def _why_compiled(answer):
    """Where the first three graphs came from: a break, or the guards that failed, call by call."""
    torch.compiler.reset()
    counter, failed = _Counter(), []
    version = torch.compile(answer().to(machine.device()), backend=counter)
    for call, n in enumerate(_LENGTHS, start=1):
        with contextlib.redirect_stdout(io.StringIO()):
            failed += _guards_failed(version, _ones(n, 4), f"call {call}, {n} rows", call > 1)
        if call == 1 and len(counter.graphs) > 1:
            return f"the first call alone compiled {len(counter.graphs)}, because forward breaks"
        if len(counter.graphs) > 2:
            break
    return f"guards that failed: {'; '.join(failed)}"


def _guards_failed(version, x, what, may_fail):
    try:
        with torch.compiler.set_stance("fail_on_recompile" if may_fail else "default"):
            version(x)
    except RuntimeError as error:
        version(x)
        guards = re.findall(r"(?m)- \d+/\d+: (.*?)(?:  +#.*)?$", str(error))
        return [f"{what}: {' and '.join(guards)}"]
    return []


def _expect_rows(got, want, what):
    expect(
        isinstance(got, torch.Tensor) and got.shape == want.shape,
        f"{what}: should be a tensor of shape {tuple(want.shape)}",
    )
    _expect_dtype(got, want, what)
    expect(
        torch.allclose(got, want, rtol=1e-4, atol=1e-4),
        f"{what}: first column should be {first_numbers(want[:, 0])}, got {first_numbers(got[:, 0])}",
    )
