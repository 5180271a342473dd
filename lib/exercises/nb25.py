"""Exercises of notebook 25, the finished op: what stands around a kernel."""

import inspect
import math
import re
from unittest import mock

from lib import machine
from lib.exercises import (
    Wrong,
    case,
    exercise,
    expect,
    expect_kernel,
    expect_number,
    expect_op,
    expect_second_derivative,
)
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import count_traffic

import torch
import triton


def _empty(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device or machine.device())


@exercise("25.1", "A check that says what to do", minutes=12, level=2)
def check_arguments(answer):
    """Right calls pass in silence; others raise an error of the right kind, which names what is wrong."""
    right = {
        "(5, 7) and (7,)": (_empty(5, 7), _empty(7)),
        "(2, 3, 7) and (7,)": (_empty(2, 3, 7), _empty(7)),
        "(7,) and (7,)": (_empty(7), _empty(7)),
        "(0, 7) and (7,)": (_empty(0, 7), _empty(7)),
        "a transposed x": (_empty(7, 5).t(), _empty(7)),
        "x in bfloat16, bias in float32": (_empty(5, 7, dtype=torch.bfloat16), _empty(7)),
        "two times float64": (_empty(5, 7, dtype=torch.float64), _empty(7, dtype=torch.float64)),
    }
    for what, (x, bias) in right.items():
        with case(what):
            got = answer(x, bias)
        expect(got is None, f"{what}: a right call returns nothing, this returned {got!r:.80}")
    x = _empty(5, 7)
    wrong = [
        ("a list for bias", TypeError, "bias", x, [0.0] * 7),
        ("a list for x", TypeError, "x", [[0.0] * 7], _empty(7)),
        ("x of int64", TypeError, "x", x.long(), _empty(7)),
        ("bias of int64", TypeError, "bias", x, _empty(7).long()),
        ("two times complex64", TypeError, "", x + 0j, _empty(7) + 0j),
        ("x in float64, bias in float32", TypeError, "bias", x.double(), _empty(7)),
        ("x in float8, bias in float32", TypeError, "", x.to(torch.float8_e4m3fn), _empty(7)),
        ("x in float32, bias in float8", TypeError, "", x, _empty(7).to(torch.float8_e5m2)),
        ("bias of 8 numbers", ValueError, "(8,)", x, _empty(8)),
        ("bias of 1 number", ValueError, "(1,)", x, _empty(1)),
        ("bias of shape (1, 7)", ValueError, "(1, 7)", x, _empty(1, 7)),
        ("bias a scalar", ValueError, "bias", x, _empty()),
        ("x a scalar", ValueError, "x", _empty(), _empty(1)),
        ("bias on another device", ValueError, "bias", x, _empty(7, device="meta")),
    ]
    for what, kind, word, *arguments in wrong:
        _expect_error(answer, what, kind, word, arguments)


def _expect_error(answer, what, kind, word, arguments):
    try:
        answer(*arguments)
    except kind as error:
        said = str(error)
        named = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said) or not word
        expect(named, f"{what}: the {kind.__name__} should say {word}: {said}")
        expect(
            word != "x" or "bias" not in said, f"{what}: x is at fault, so leave bias out: {said}"
        )
    except NotImplementedError:
        raise
    except Exception as error:
        other = f"raised {type(error).__name__}: {str(error)[:200]}"
        raise Wrong(f"{what}: should raise a {kind.__name__}, {other}") from None
    else:
        raise Wrong(f"{what}: should raise a {kind.__name__}, raised nothing")


@exercise("25.2", "How many rows to fold", minutes=6, level=1)
def check_rows_to_fold(answer):
    for n_cols in (16, 4096, 8, 24, 781, 1, 100, 30, 4100, 65):
        with case(f"{n_cols} columns"):
            got = answer(n_cols)
        expect_number(got, 16 // math.gcd(n_cols, 16), f"{n_cols} columns")


@exercise("25.3", "Fold all the way", minutes=15, level=2)
def check_fold_kernel(kernel):
    expect_kernel(kernel)

    def answer(x, scale):
        y = torch.full_like(x, -1.0)
        grid = (triton.cdiv(x.numel(), 1024),)
        kernel[grid](x, scale, y, x.numel(), x.shape[1], BLOCK_SIZE=1024)
        return y

    def eager(x, scale):
        return (x * scale[:, None]).to(x.dtype)

    shapes = ((1, 1), (5, 3), (16, 1), (4, 5), (77, 781), (2, 1024))
    with interpreted_launches():
        expect_op(answer, eager, _scaled_rows, shapes)
        for shape in ((5, 3), (77, 781)):
            _expect_stored_once(answer, *_scaled_rows(shape, torch.float32), f"at shape {shape}")
    for dtype in (torch.float32, torch.bfloat16):
        _expect_wide(kernel, *_scaled_rows((77, 781), dtype))


def _scaled_rows(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    return x.to(machine.device(), dtype), scale.to(machine.device())


def _expect_stored_once(answer, x, scale, at):
    traffic = count_traffic(lambda: answer(x, scale)).by_argument
    for name, moved in traffic.items():
        n_bytes = moved.loaded if name.endswith("x_ptr") else moved.stored
        expect(
            n_bytes == (0 if name.endswith("scale_ptr") else x.nbytes),
            f"{at}: {n_bytes} bytes by {name}, the tensor has {x.nbytes}; move each element once",
        )


def _expect_wide(kernel, x, scale):
    """Wrong unless the machine code has a load and a store of 16 bytes."""
    y, sizes = torch.empty_like(x), {"n_elements": x.numel(), "n_cols": x.shape[1]}
    compiled = compile_for(kernel, signature_of(kernel, x, scale, y, **sizes, BLOCK_SIZE=1024))
    for what, opcode in (("load", "LDG"), ("store", "STG")):
        expect(
            re.search(rf"\b{opcode}\.E\.128\b", compiled.sass),
            f"for sm_90, {x.dtype}, 77 rows of 781: no {what} of 16 bytes; does the compiler see that the mask "
            "ends at a multiple of 16?",
        )


@exercise("25.4", "The Function around two kernels", minutes=15, level=3)
def check_function(answer):
    from lib.ops.add_relu import add_relu_eager

    expect(
        isinstance(answer, type) and issubclass(answer, torch.autograd.Function),
        "give the class, a torch.autograd.Function",
    )
    for x, bias in _leaves():
        at = f"x {tuple(x.shape)} in {x.dtype}, bias in {bias.dtype}"
        with case(at):
            check_against_float64(answer.apply, add_relu_eager, x, bias, name=at)
            _expect_exact_gradients(answer, x.detach(), bias.detach(), at)
        _expect_dtypes_given(answer, x, bias, at)
    for which in ("x", "bias"):
        _expect_left_out(answer, which)
    _expect_saved(answer)
    with case("a second derivative"):
        x, bias = torch.randn(5, 7, device=machine.device(), requires_grad=True), _empty(7) + 0.5
        bias.requires_grad_()
        expect_second_derivative(lambda t: answer.apply(t, bias), lambda t: (t + bias).relu(), x)


def _leaves():
    for x_dtype, bias_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        x = torch.randn(33, 17, device=machine.device(), dtype=x_dtype, requires_grad=True)
        yield x, torch.randn(17, device=machine.device(), dtype=bias_dtype, requires_grad=True)


def _expect_exact_gradients(answer, x, bias, at):
    """Sums of whole numbers are exact in float32; in 16 bits 257 is 256."""
    x = x.new_ones(257, 3)
    bias = bias.new_zeros(3).requires_grad_()
    (dbias,) = torch.autograd.grad(answer.apply(x, bias).sum(), bias)
    want = 257.0 if bias.dtype == torch.float32 else 256.0
    expect(
        dbias.dtype == bias.dtype and (dbias == want).all(),
        f"{at}: 257 rows of ones have dbias {dbias[0].item():g}, should be {want:g} in {bias.dtype}",
    )


def _expect_dtypes_given(answer, x, bias, at):
    """Autograd casts a gradient of another dtype, so the call of `_backward` is watched, where there is one."""
    from lib.ops import add_relu

    given, saved, backward = [], [], add_relu._backward
    signature = inspect.signature(backward)

    def watched(*arguments, **named):
        given.append(tuple(signature.bind(*arguments, **named).arguments["dtypes"]))
        return backward(*arguments, **named)

    with mock.patch.object(add_relu, "_backward", watched):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = answer.apply(x, bias)
        torch.autograd.grad(y, (x, bias), torch.ones_like(y))
    n_bytes = sum(t.nbytes for t in saved)
    expect(n_bytes <= y.nbytes, f"{at}: {n_bytes} bytes are saved for backward; y has {y.nbytes}")
    for dtypes in given:
        expect(
            dtypes == (x.dtype, bias.dtype),
            f"{at}: `_backward` was told the dtypes {dtypes}, so autograd casts by a kernel more",
        )


def _expect_left_out(answer, which):
    x, bias = (torch.randn(s, device=machine.device()) for s in ((128, 64), (64,)))
    (x if which == "x" else bias).requires_grad_()
    at = f"where only {which} needs a gradient"
    with case(at):
        y = answer.apply(x, bias)
        dy = torch.randn_like(y)
        table = count_traffic(lambda: y.backward(dy)).table()
    stored = table.drop("total")["stored"]
    if which == "bias":
        expect(stored.max() < dy.nbytes, f"{at}: backward writes dx, which nobody asked for")
    else:
        least = stored[stored < dy.nbytes]
        expect(not least.sum(), f"{at}: backward writes sums for dbias, which nobody asked for")


def _expect_saved(answer):
    x, bias = (torch.randn(s, device=machine.device()) for s in ((5, 7), (7,)))
    x.requires_grad_()
    at = "y overwritten before backward"
    with case(at):
        y = answer.apply(x, bias)
        dy = torch.ones_like(y)
        with torch.no_grad():
            y.mul_(0)
        try:
            torch.autograd.grad(y, x, dy)
        except RuntimeError:
            return
    raise Wrong(f"{at}: should raise an error, gives a gradient of other numbers")
