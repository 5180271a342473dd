"""Exercises of notebook 31, gelu; with the kernel of 31.2 and the counts that the notebook shows."""

import math
import re

from lib import machine
from lib.exercises import (
    Skip,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_any_dy,
    expect_launches,
    expect_number,
    expect_op,
)
from lib.exercises.watch import FILLS, expect_no_pass
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import count_traffic
from lib.ops.gelu import gelu_eager

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

INF, NAN = float("inf"), float("nan")


def finite_float16(device=None):
    """Every finite float16, in order."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    return every[every.isfinite()].sort().values.to(device or machine.device())


# Opcodes of integer instructions, which a GPU issues at half of float32's rate
INTEGER = ("IMAD", "IADD", "LOP3", "SHF", "ISETP", "LEA", "PRMT", "SEL", "IMNMX", "VIADD")
FITS = (
    4 * 33.5e12 / 4222e9
)  # instructions beside the four bytes of a bfloat16 number, read and written


def per_element(kernel, form, dtype):
    """Instructions for a number, for one form of the notebook's forms_kernel: Hopper, 8 numbers a thread."""
    a = torch.empty(4096, dtype=dtype)
    sizes = {"FORM": form, "COMPUTE": tl.float32, "BLOCK_SIZE": 1024}
    mix = instruction_mix(compile_for(kernel, signature_of(kernel, a, a, 4096, **sizes)))
    counts = {
        "instructions": sum(mix.values()),
        "of them integer": sum(n for opcode, n in mix.items() if opcode.startswith(INTEGER)),
        "MUFU": sum(n for opcode, n in mix.items() if opcode.startswith("MUFU")),
    }
    counts["needs"] = counts["instructions"] + counts["of them integer"]
    return {name: n / 8 for name, n in counts.items()}


def small_blocks(cuda_rows):
    """(what, bytes that a thread block moves, % of a copy's rate) of this notebook's measurement of gelu.cu."""
    points = []
    for row in cuda_rows.value or ():
        if row["kernel"].startswith("gelu.cu"):  # 128 threads of one number, or of 16 bytes
            itemsize = 4 if "float32" in row["dtype"] else 2
            n_bytes = 2 * 128 * (itemsize if "scalar" in row["kernel"] else 16)
            points.append(("GELU in CUDA", n_bytes, row["% of ceiling"]))
    return points


# --- 31.1 ----------------------------------------------------------------------------------------------

_ARGUMENTS = (3.0, 11.0, -11.0, 40.0, 50.0, -50.0, 0.01, -0.01, 1e30, -1e30, INF, -INF, NAN, 0.0)


def _arguments(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=generator)
    special = torch.tensor(_ARGUMENTS)[: x.numel()]
    x.view(-1)[: len(special)] = special
    return (x.to(machine.device(), dtype),)


@exercise("31.1", "A tanh for every number", minutes=8, level=1)
def check_safe_tanh(answer):
    expect_op(answer, torch.tanh, _arguments)
    (x,) = _arguments((5, 7), torch.float32)
    expect_launches(lambda: answer(x), exactly=1)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (5, 7)", but=FILLS)


# --- 31.2 ----------------------------------------------------------------------------------------------


@triton.jit
def half_slope_kernel(x_ptr, slope_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # One program writes gelu'(x) for BLOCK_SIZE elements; x is float16, and stays it.
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    x2 = x * x
    s = tl.sigmoid((1.5957691216057308 * (x + 0.044715 * x2 * x)).to(tl.float32))
    slope = s + x * (s * (1 - s)) * (1.5957691216057308 * (1 + 0.134145 * x2))
    tl.store(slope_ptr + offsets, slope, mask=mask)


def half_slope(x):
    """What half_slope_kernel makes of float16 numbers, in the interpreter."""
    x = x.cpu()
    slope = torch.empty_like(x)
    with interpreted_launches(), np.errstate(over="ignore", invalid="ignore"):
        half_slope_kernel[(triton.cdiv(x.numel(), 4096),)](x, slope, x.numel(), BLOCK_SIZE=4096)
    return slope


@exercise("31.2", "The smallest number that shows it", minutes=10, level=2)
def check_smallest_number(x):
    if getattr(x, "ndim", None) == 0:  # torch.tensor(1.0), np.float16(1)
        x = x.item()
    expect(
        isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < INF,
        "give a positive number",
    )
    exact = torch.tensor([x], dtype=torch.float64)
    expect(
        exact.half().double() == exact,
        f"{x} is no float16: the answer is one, so round it to a number that float16 has",
    )
    slope = half_slope(exact.half()).item()
    expect(not math.isfinite(slope), f"at {x} the kernel gives {slope:.6g}, which is right")
    smaller = finite_float16("cpu")
    smaller = smaller[(smaller > 0) & (smaller < x)]
    n_bad = int((~half_slope(smaller).isfinite()).sum())
    expect(n_bad == 0, f"{x} shows it, and so do {n_bad} smaller numbers")


# --- 31.3 ----------------------------------------------------------------------------------------------


def _rows(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(shape, generator=generator)
    return (x.to(machine.device(), dtype).requires_grad_(),)


def _gradient(function, x):
    leaf = x.detach().requires_grad_()
    y = attempted(function(leaf))
    return torch.autograd.grad(y.sum(), leaf)[0]


@exercise("31.3", "A sibling with its backward pass", minutes=20, level=2)
def check_silu(answer):
    expect_op(answer, F.silu, _rows)
    _expect_sum(answer)
    _expect_finite(answer)
    _expect_digits(answer)
    _expect_traffic(answer)
    expect_any_dy(answer, _rows((5, 7), torch.float32), "at shape (5, 7)")


def _expect_sum(answer):
    """y.sum().backward() sends a gradient of strides 0."""
    (x,) = _rows((5, 7), torch.float32)
    difference = (_gradient(answer, x) - _gradient(F.silu, x)).abs().max().item()
    expect(difference < 1e-5, f"the gradient of silu(x).sum() is off by {difference:.2g}")


def _expect_finite(answer):
    x = finite_float16()
    for what, values in (("silu(x)", answer(x)), ("its gradient", _gradient(answer, x))):
        bad = x[~values.isfinite()]
        if len(bad):
            first = bad[bad.abs().argmin()].item()
            raise Wrong(f"float16, x = {first}: {what} is not finite; so for {len(bad)} numbers")


def _expect_digits(answer):
    x = torch.linspace(-30, 30, 6001, device=machine.device())
    error = (_gradient(answer, x).double() - _gradient(F.silu, x.double())).abs()
    worst = int(error.argmax())
    expect(
        error[worst].item() < 6e-7,
        f"x = {x[worst].item():.2f}, float32: the gradient is off by {error[worst].item():.1e}; it must be"
        " less than 6e-07, so mind 1 - s",
    )


def _expect_traffic(answer):
    (x,) = _rows((96, 640), torch.float32)
    saved = {}

    def save(t):
        saved[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = answer(x)
    expect(
        sum(saved.values()) <= x.nbytes, f"it saves {sum(saved.values())} bytes, x has {x.nbytes}"
    )
    dy = torch.ones_like(y)
    expect_no_pass(lambda: answer(x.detach()), x.nbytes, "forward")
    (again,) = _rows((96, 640), torch.float32)
    y_again = answer(again)
    expect_no_pass(lambda: torch.autograd.grad(y_again, again, dy), x.nbytes, "backward")
    passes = {
        "forward": (count_traffic(lambda: answer(x.detach())), 2),
        "backward": (count_traffic(lambda: torch.autograd.grad(y, x, dy)), 3),
    }
    for name, (traffic, least) in passes.items():
        expect(
            traffic.launches == 1,
            f"{name} should launch 1 Triton kernel, launched {traffic.launches}",
        )
        moved = traffic.bytes_moved / x.nbytes
        expect(moved <= least, f"{name} moves {moved:.2f} times the bytes of x; {least} will do")


# --- 31.4 ----------------------------------------------------------------------------------------------


@exercise("31.4", "Enough bytes for a thread block", minutes=10, level=2)
def check_rows_per_program(answer):
    for n_cols, itemsize, bandwidth, rate in (
        (4096, 4, 4245.0, 1.65),
        (64, 2, 4245.0, 1.65),
        (64, 4, 4245.0, 1.65),
        (32, 4, 4096.0, 2.0),
        (300, 2, 4245.0, 1.65),
        (1, 2, 4245.0, 1.65),
        (64, 2, 1500.0, 0.9),
    ):
        least, rows = bandwidth / rate, 1
        while 2 * rows * n_cols * itemsize < least:
            rows *= 2
        at = f"{n_cols} columns of {itemsize} bytes, {bandwidth:g} GB/s, {rate} blocks a nanosecond"
        with case(at):
            got = answer(n_cols, itemsize, bandwidth, rate)
        expect_number(got, rows, at)


# --- 31.5 ----------------------------------------------------------------------------------------------


_DOUBLE_LITERAL = r"(?<![\w.])(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?(?![\w.])"


@exercise("31.5", "Sixteen bytes a thread", minutes=20, level=3)
def check_vector_source(source):
    expect(isinstance(source, str), "vector_source has to be the source, a string")
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    double = re.search(_DOUBLE_LITERAL, re.sub(r'"[^"\n]*"', "", code))
    expect(not double, f"{double and double[0]} is a double; put an f behind each literal")
    built = cuda.load_cuda_on_cpu(source, ["gelu"], name="vector", checked=True)
    for n in (1, 3, 4, 5, 512, 515, 4096, 4099):
        _expect_gelu(built.gelu, torch.randn(n), f"{n} elements")
    _expect_gelu(built.gelu, torch.randn(17, 33), "17×33")
    for first in (1, 2):
        x = torch.randn(1000 + first)[first:]
        _expect_gelu(built.gelu, x, f"1000 elements that begin {4 * first} bytes off a boundary")
    x = torch.randn(65536)
    cuda.memory_traffic(built)
    built.gelu(x)
    n_threads = cuda.memory_traffic(built).threads
    expect(
        n_threads <= x.numel() // 4 + 1024,
        f"65536 elements take {n_threads} threads; at four to a thread 16384 will do",
    )
    expect(
        _loads_are_wide(source),
        "the numbers are right, but no load of an aligned x has 16 bytes; read it through a float4 pointer",
    )


def _loads_are_wide(source):
    """Does an aligned x take 16-byte loads? If so it fails once they want multiples of 32 bytes."""
    strict = "".join(
        f"typedef {name} strict_{name} __attribute__((aligned(32)));\n#define {name} strict_{name}\n"
        for name in ("float4", "int4", "uint4", "ulonglong2")
    )
    end = max((match.end() for match in re.finditer(r"#include[^\n]*\n", source)), default=0)
    code = re.sub(r"alignas\s*\(\s*16\s*\)", "alignas(32)", source[end:])
    x = torch.randn(4096)
    try:
        built = cuda.load_cuda_on_cpu(
            source[:end] + strict + code, ["gelu"], name="strict", checked=True
        )
        return not torch.allclose(built.gelu(x), gelu_eager(x, "tanh"), atol=1e-5)
    except RuntimeError:
        return True


def _expect_gelu(function, x, at):
    with case(at):
        y = attempted(function(x))
        check_against_float64(lambda x, y=y: y, lambda x: gelu_eager(x, "tanh"), x, name=at)
