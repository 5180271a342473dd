"""The two capstones without a solution: `check("gated_rms_norm", my_op)` shows a verdict, as for an exercise.

Statements are in notebooks/capstones.md. What is checked: values and gradients against eager in float64, what
hurts kernels, and the launches. `make grade` gives a point for each of three PARTS. In the shell:

    TRITON_INTERPRET=1 python -m lib.exercises.capstones gated_rms_norm my_file.py

The file defines a function of that name. It runs as you, behind no fence.
"""

import argparse
import functools
import importlib.util
import sys
import zlib

from lib import machine
from lib.exercises import (
    Exercise,
    attempted,
    case,
    expect,
    expect_rounded_once,
    expect_second_derivative,
    judge,
    shown,
)
from lib.exercises.undefined import compare
from lib.exercises.watch import (
    expect_fixed_order,
    expect_float32_products,
    expect_kernels_alone_calculate,
)
from lib.exercises.whole_op import (
    expect_float32_sums,
    expect_frozen,
    expect_refusals,
    expect_saved,
    expect_sums,
)
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F

_f32, _f16, _bf16 = torch.float32, torch.float16, torch.bfloat16


def gated_rms_norm_eager(x, gate, weight, eps=1e-6):
    u = x * F.silu(gate)
    return F.rms_norm(u, u.shape[-1:], weight, eps)


def scaled_linear_eager(x, weight, bias, gamma, residual):
    return residual + gamma * F.linear(x, weight, bias)


# --- inputs ----------------------------------------------------------------------------------------------


def _numbers(at):
    """draw(*shape): normal numbers, always the same for the same case `at`."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(at).encode()))
    return lambda *shape: torch.randn(shape, generator=generator)


def _leaves(tensors, dtype):
    return [t.to(machine.device(), dtype).requires_grad_() for t in tensors]


def _strided(t):
    """The same numbers, every second of another tensor's."""
    return t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()


def _gated_inputs(shape, dtype, special=None):
    draw = _numbers((shape, dtype))
    x, gate, weight = draw(*shape), draw(*shape), draw(shape[-1])
    if x.numel() == 1:  # its gradient is 0 by cancellation: keep the root small
        x, gate = torch.ones_like(x), torch.ones_like(x)
    if special == "tiny":
        x *= 0.001
    if special == "large":
        x *= 3000
    if special == "gates of size 200":
        gate *= 200
    if special == "a row of zeros":
        x[0] = 0
    if special == "NaN":
        x.view(-1)[0] = float("nan")
    inputs = _leaves((x, gate, weight), dtype)
    return [*map(_strided, inputs)] if special == "strided" else inputs


def _scaled_inputs(shape, dtype, special=None):
    *rows, k, n = shape
    draw = _numbers((shape, dtype))
    tensors = [draw(*rows, k), draw(n, k) / max(k, 1) ** 0.5, draw(n), draw(n), draw(*rows, n)]
    if special == "gamma of zeros":
        tensors[3] = torch.zeros(n)
    if special == "NaN":
        tensors[0].view(-1)[0] = float("nan")
    if special == "a large bias":
        tensors[2] += 100
    inputs = _leaves(tensors, dtype)
    return [*map(_strided, inputs)] if special == "strided" else inputs


# --- the cases, from small to large, so that the first failure is the smallest one -----------------------

GATED_CASES = (
    ((1, 1), _f32, None),
    ((2, 3), _bf16, None),
    ((7,), _f32, None),
    ((5, 7), _f32, "tiny"),
    ((5, 7), _f32, "a row of zeros"),
    ((5, 7), _f32, "gates of size 200"),
    ((5, 7), _f16, "large"),
    ((5, 7), _f32, "NaN"),
    ((0, 5), _f32, None),
    ((2, 3, 5), _f16, None),
    ((17, 33), _f32, "strided"),
    ((70, 9), _bf16, None),
    ((600, 9), _bf16, None),
    ((3, 1100), _f32, None),
    ((2, 5000), _bf16, None),
)
SCALED_CASES = (
    ((1, 1, 1), _f32, None),
    ((2, 3, 5), _bf16, None),
    ((7, 5), _f32, None),  # x: (7,), no rows
    ((5, 7, 3), _f32, "gamma of zeros"),
    ((5, 7, 3), _f32, "NaN"),
    ((0, 5, 4), _f32, None),
    ((2, 3, 5, 7), _f16, None),  # x: (2, 3, 5)
    ((33, 17, 19), _f32, "strided"),
    ((66, 40, 70), _bf16, "a large bias"),
    ((70, 130, 33), _f32, None),
    ((40, 300, 20), _bf16, None),
)


def _size_of_terms(eager, inputs):
    """How large what `eager` adds up is; 0 where it adds up nothing that could cancel."""
    return eager(*(t.double().abs() for t in inputs)) if eager is scaled_linear_eager else 0.0


def _without_gradients(make):
    return lambda *case: [t.detach() for t in make(*case)]


def _expect_cases(answer, eager, make, cases):
    for shape, dtype, special in cases:
        what = f", {special}" if special else ""
        at = f"at shape {shape}, {str(dtype).removeprefix('torch.')}{what}"
        with case(at):
            attempted(answer(*make(shape, dtype, special)))
            compare(answer, eager, *make(shape, dtype, special), name=at)
            if dtype.itemsize == 2:
                inputs = [t.detach() for t in make(shape, dtype, special)]
                exact = eager(*(t.double() for t in inputs))
                expect_rounded_once(answer(*inputs), exact, at, terms=_size_of_terms(eager, inputs))


def _expect_any_layout(answer, eager, inputs, at):
    """Wrong where the layout of dy in memory makes a difference beyond rounding."""
    for what, view in (
        ("transposed in memory", lambda y: y.mT),
        ("every second number of another tensor", lambda y: torch.stack([y, 7 * y.detach()], -1)),
    ):
        both = [lambda *args, f=f, view=view: view(f(*args)) for f in (answer, eager)]
        compare(*both, *inputs, name=f"{at}, dy {what}")


def _expect_one_launch(launch, least, most, at):
    """Wrong unless one kernel does the forward pass's arithmetic and moves `least` to `most` bytes."""
    expect_kernels_alone_calculate(lambda: attempted(launch()))
    traffic = count_traffic(launch)
    expect(traffic.launches == 1, f"{at}: the forward pass is {traffic.launches} launches, not one")
    expect(
        least <= traffic.bytes_moved <= most,
        f"{at}: the forward pass moves {traffic.bytes_moved:,} bytes; each tensor once is {least:,}",
    )


def _backward_of(answer, inputs):
    y = answer(*inputs)
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def _in_one_thread(function):
    """A call whose backward pass stays in this thread, where programs can be run in another order."""

    def call(*inputs):
        with torch.autograd.set_multithreading_enabled(False):
            return function(*inputs)

    return call


# --- the checks ------------------------------------------------------------------------------------------


def _gated_values(answer, make=_gated_inputs):
    eager = gated_rms_norm_eager
    _expect_cases(answer, eager, make, GATED_CASES)
    half = [lambda *args, f=f: f(*args, 0.5) for f in (answer, eager)]
    compare(*half, *make((5, 7), _f32), name="at shape (5, 7), float32, eps = 0.5")


def _gated_sums(answer):
    eager = gated_rms_norm_eager
    wide = functools.partial(_gated_inputs, (6, 33), _f32)
    expect_sums(answer, eager, wide, "at shape (6, 33), float32")
    _expect_any_layout(answer, eager, wide(), "at shape (6, 33), float32")

    def dweight(*inputs):
        y = answer(*inputs)
        return torch.autograd.grad(y, inputs[2], torch.sin(y))[0]

    tall = _gated_inputs((70, 9), _f32)
    expect_fixed_order(_in_one_thread(dweight), tall, "dweight at shape (70, 9):")

    def summed(dy):
        x = torch.ones_like(dy)
        weight = x[0].clone().requires_grad_()
        return torch.autograd.grad(answer(x, x, weight, 0.0), weight, dy)[0]  # the norm is 1

    expect_float32_sums(summed, "dweight")


def _gated_promises(answer):
    eager, at = gated_rms_norm_eager, "at shape (5, 7), float32"
    small, names = functools.partial(_gated_inputs, (5, 7), _f32), ("x", "gate", "weight")
    expect_frozen(answer, eager, small, names, at)
    expect_saved(answer, small, (*names, "y"))
    leaf, *fixed = small()
    fixed = [t.detach() for t in fixed]
    expect_second_derivative(lambda x: answer(x, *fixed), lambda x: eager(x, *fixed), leaf)


def _gated_refusals(answer):
    x = torch.ones(5, 7, device=machine.device())
    bad = {
        "gate (5, 1) beside x (5, 7)": (x, x[:, :1], x[0]),
        "weight (1,) beside x (5, 7)": (x, x, x[0, :1]),
        "x and gate of int64": (x.long(), x.long(), x[0]),
    }
    expect_refusals(answer, bad)


def _gated_launch(answer):
    free = _without_gradients(_gated_inputs)((512, 96), _f32)
    n_bytes, at = free[0].nbytes, "at shape (512, 96), float32"
    _expect_one_launch(lambda: answer(*free), 3 * n_bytes, 3.6 * n_bytes, at)


def _gated_bytes(answer):
    inputs = _gated_inputs((512, 96), _f32)
    n_bytes, at = inputs[0].nbytes, "at shape (512, 96), float32"
    moved = count_traffic(_in_one_thread(_backward_of(answer, inputs))).bytes_moved
    expect(
        5 * n_bytes <= moved <= 5.6 * n_bytes,
        f"{at}: kernels of the backward pass move {moved:,} bytes; x, gate and dy read once, dx and dgate"
        f" written once are {5 * n_bytes:,}, and dweight needs little more",
    )


def _scaled_values(answer, make=_scaled_inputs):
    _expect_cases(answer, scaled_linear_eager, make, SCALED_CASES)


def _scaled_sums(answer):
    eager = scaled_linear_eager
    wide = functools.partial(_scaled_inputs, (33, 6, 17), _f32)
    expect_sums(answer, eager, wide, "at M, K, N = 33, 6, 17, float32")
    _expect_any_layout(answer, eager, wide(), "at M, K, N = 33, 6, 17, float32")

    def sums(*inputs):
        y = answer(*inputs)
        return torch.cat(torch.autograd.grad(y, inputs[2:4], torch.sin(y)))

    tall = _scaled_inputs((140, 9, 40), _f32)
    expect_fixed_order(_in_one_thread(sums), tall, "dbias and dgamma at M, K, N = 140, 9, 40:")

    def summed(dy, k):
        ones = torch.ones_like(dy)
        rows = [ones[0].clone().requires_grad_() for _ in range(2)]
        y = answer(ones, torch.zeros_like(ones[:6]), *rows, ones)  # the product and its bias are 1
        return torch.autograd.grad(y, rows[k], dy)[0]

    for k, name in enumerate(("dbias", "dgamma")):
        expect_float32_sums(functools.partial(summed, k=k), name)


def _scaled_promises(answer):
    eager, at = scaled_linear_eager, "at M, K, N = 5, 7, 3, float32"
    names = ("x", "weight", "bias", "gamma", "residual")
    small = functools.partial(_scaled_inputs, (5, 7, 3), _f32)
    expect_frozen(answer, eager, small, names, at)
    expect_saved(answer, small, (*names, "y"))
    leaf, *fixed = _scaled_inputs((5, 7, 7), _f32)
    fixed = [t.detach() for t in fixed]
    expect_second_derivative(lambda x: answer(x, *fixed), lambda x: eager(x, *fixed), leaf)


def _scaled_refusals(answer):
    x = torch.ones(5, 7, device=machine.device())
    weight, row = x.new_ones(3, 7), x.new_ones(3)
    residual = x.new_ones(5, 3)
    bad = {
        "residual (1, 3) beside 5 rows": (x, weight, row, row, residual[:1]),
        "gamma (1,) beside 3 columns": (x, weight, row, row[:1], residual),
        "weight (3, 6) beside x (5, 7)": (x, weight[:, 1:], row, row, residual),
        "all of int64": tuple(t.long() for t in (x, weight, row, row, residual)),
    }
    expect_refusals(answer, bad)


def _scaled_launch(answer):
    free, at = (
        _without_gradients(_scaled_inputs)((70, 48, 40), _f32),
        "at M, K, N = 70, 48, 40, float32",
    )
    expect_float32_products(lambda: answer(*free))
    least = sum(t.nbytes for t in (free[0], free[1], free[4], free[4]))
    # tiles of 32 read x and the weight a few times
    _expect_one_launch(lambda: answer(*free), least, 8 * least, at)


def _in_turn(*checkers):
    """A checker that asks all of them, with the same random numbers each time; the reader's are not touched."""

    def check(answer):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for checker in checkers:
                checker(answer)

    return check


def _forward(values, make):
    return lambda answer: values(answer, _without_gradients(make))


_GATED = (_gated_values, _gated_sums, _gated_promises, _gated_refusals, _gated_launch, _gated_bytes)
_SCALED = (_scaled_values, _scaled_sums, _scaled_promises, _scaled_refusals, _scaled_launch)
CAPSTONES = {
    "gated_rms_norm": Exercise(
        "gated_rms_norm", "Gate and norm in one pass", 240, 3, _in_turn(*_GATED)
    ),
    "scaled_linear": Exercise(
        "scaled_linear", "A product, its scale and the residual", 360, 3, _in_turn(*_SCALED)
    ),
}
# For each a point. All ask for the launch, which is what eager code lacks.
_PARTS = {
    "gated_rms_norm": {
        "forward": (_forward(_gated_values, _gated_inputs), _gated_refusals, _gated_launch),
        "gradients": (_gated_launch, _gated_values, _gated_sums, _gated_bytes),
        "promises": (_gated_launch, _gated_promises),
    },
    "scaled_linear": {
        "forward": (_forward(_scaled_values, _scaled_inputs), _scaled_refusals, _scaled_launch),
        "gradients": (_scaled_launch, _scaled_values, _scaled_sums),
        "promises": (_scaled_launch, _scaled_promises),
    },
}
PARTS = {
    f"{name}.{part}": Exercise(f"{name}.{part}", CAPSTONES[name].title, 0, 1, _in_turn(*checkers))
    for name, parts in _PARTS.items()
    for part, checkers in parts.items()
}


def check(name, answer):
    """The Verdict on `answer` to a capstone. ValueError: unknown name. NotSolved: see FUSED_KERNELS_STRICT."""
    if name not in CAPSTONES:
        raise ValueError(f"there is no capstone {name!r}; there are: {', '.join(CAPSTONES)}")
    return shown(judge(CAPSTONES[name], answer))


def main(arguments=None):
    """Print the verdict on the function of a file; the exit status says whether it is right."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.exercises.capstones", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", choices=CAPSTONES)
    parser.add_argument("file", help="a Python file that defines a function of that name")
    given = parser.parse_args(arguments)
    spec = importlib.util.spec_from_file_location("answer", given.file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    verdict = judge(CAPSTONES[given.name], getattr(module, given.name, None))
    print(verdict)
    return verdict.status != "right"


if __name__ == "__main__":
    sys.exit(main())
