"""Exercises of notebook 22, PTX and SASS; and the SASS of a CUDA source, for the notebook and its checker."""

import re
import subprocess
import tempfile
from pathlib import Path

from lib.exercises import (
    NotAttempted,
    Skip,
    a_number,
    case,
    exercise,
    expect,
    expect_kernel,
    expect_op,
    too_many_or_few,
)
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import (
    Compiled,
    compile_for,
    instruction_mix,
    programs_on_sm,
    signature_of,
)
from lib.nogpu.cuda_toolkit import find_nvcc, nvcc_check
from lib.nogpu.interpreter import interpreted_launches

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def cuda_sass(source, arch="sm_90"):
    """The SASS of a CUDA source. Raises ToolMissing with no nvcc, RuntimeError if it does not compile."""
    nvcc_check(source, arch)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cu").write_text(source)
        for command in (
            [find_nvcc(), "-cubin", f"-arch={arch}", "kernels.cu", "-o", "kernels.cubin"],
            [triton.knobs.nvidia.nvdisasm.path, "-c", "kernels.cubin"],
        ):
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return result.stdout


def double_instructions(sass):
    """{opcode: count} of the SASS instructions that compute with doubles or convert to or from them."""
    is_double = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)\b|.*(\.F64|64H)")
    return {o: n for o, n in sorted(instruction_mix(sass).items()) if is_double.match(o)}


# --- 22.1 ----------------------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


_DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _loads(block_size, num_warps, itemsize):
    x = torch.empty(4096, dtype=_DTYPES[itemsize])
    signature = signature_of(_copy_kernel, x, x, 4096, BLOCK_SIZE=block_size)
    mix = instruction_mix(compile_for(_copy_kernel, signature, num_warps=num_warps))
    return sum(n for opcode, n in mix.items() if opcode.startswith("LDG"))


@exercise("22.1", "Count before you compile", minutes=8, level=1)
def check_loads_per_thread(answer):
    for block_size, num_warps, itemsize in [
        (1024, 4, 4),
        (1024, 4, 2),
        (256, 4, 4),
        (2048, 8, 8),
        (64, 4, 4),
        (4096, 4, 1),
    ]:
        at = f"for {block_size} elements of {itemsize} bytes and {num_warps} warps"
        with case(at):
            got = a_number(answer(block_size, num_warps, itemsize), at)
        want = _loads(block_size, num_warps, itemsize)
        hint = "how many bytes has a thread, and how many a load at most?"
        expect(
            got == want, f"{at}: {got} load instructions are {too_many_or_few(got, want)}; {hint}"
        )


# --- 22.3 and 22.2: kernels ----------------------------------------------------------------------------


def _compiled(kernel, x, y):
    """The kernel for sm_90, with everything divisible by 16; NotAttempted while it stores nothing."""
    expect_kernel(kernel)
    compiled = compile_for(kernel, signature_of(kernel, x, y, 4096, BLOCK_SIZE=1024))
    if "tt.store" not in compiled.ttir:
        raise NotAttempted
    return compiled


def _expect_values(kernel, eager, make_inputs, per_output=1):
    """Wrong unless kernel(x, y, n, BLOCK_SIZE) gives eager(x), in the interpreter, with a GPU too."""

    def answer(x):
        n = x.numel() // per_output
        y = torch.empty(n, dtype=x.dtype)
        kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK_SIZE=1024)
        return y

    shapes = [(per_output * n,) for n in (1, 2, 16, 1000, 1024, 2500)]
    with interpreted_launches():
        expect_op(answer, eager, make_inputs, shapes=shapes)


@triton.jit
def _two_wheres_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.where(x < 0, 0.0, x)
    tl.store(y_ptr + offsets, tl.where(y > 6, 6.0, y), mask=mask)


def _special(shape, dtype):
    x = 8 * torch.randn(shape, dtype=dtype)
    values = [float("nan"), -1.0, 7.0, float("inf"), -float("inf"), 0.0, 6.0]
    x[: len(values)] = torch.tensor(values, dtype=dtype)[: x.numel()]
    return (x,)


@exercise("22.3", "One instruction fewer, NaN kept", minutes=8, level=2)
def check_short_relu6(kernel):
    x = torch.empty(4096)
    compiled = _compiled(kernel, x, x)
    _expect_values(kernel, lambda x: torch.clamp(x, 0, 6), _special)
    n_answer = sum(instruction_mix(compiled).values())
    n_wheres = sum(instruction_mix(_compiled(_two_wheres_kernel, x, x)).values())
    expect(
        n_answer <= n_wheres - 8,
        f"the values are right, in {n_answer} instructions; two wheres take {n_wheres}, and one fewer for "
        f"each of a thread's 8 elements is at most {n_wheres - 8}",
    )


@exercise("22.2", "Let the loads be wide", minutes=12, level=2)
def check_wide_loads(kernel):
    x = torch.empty(8192)
    compiled = _compiled(kernel, x, x)
    _expect_values(
        kernel,
        lambda x: x[::2] * x[1::2],
        lambda shape, dtype: (torch.randn(shape, dtype=dtype),),
        per_output=2,
    )
    # The interpreter keeps the order that compiled code may change
    expect(
        not re.search(r"allow_reorder|tt\.cat\b", compiled.ttir),
        "can_reorder lets the compiler pair what it likes, and on a GPU it does; leave it out",
    )
    loads = {o: n for o, n in instruction_mix(compiled).items() if o.startswith("LDG")}
    expect(
        set(loads) == {"LDG.E.128"},
        f"the values are right, and for sm_90 in float32 the loads are {loads}; all should be LDG.E.128",
    )


# --- 22.4 ----------------------------------------------------------------------------------------------

_BEFORE = """
#include <torch/types.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
"""
_BEHIND = """
torch::Tensor softplus(torch::Tensor x, double beta) {
  auto y = torch::empty_like(x);
  const int64_t n = x.numel(), blocks = (n + 127) / 128;
  softplus_kernel<<<blocks, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), n, beta);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


def _expect_softplus(source):
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    built = cuda.load_cuda_on_cpu(
        _BEFORE + source + _BEHIND, ["softplus"], name="softplus", checked=True
    )
    x = torch.tensor([0.0, 1.0, -1.0, 0.5, 20.0, -20.0, 200.0, -200.0, torch.inf, torch.nan])
    for beta in (1.0, 0.1, 3.0):
        at = f"beta {beta}, x in {x.tolist()}"
        with case(at):
            check_against_float64(
                lambda x, b=beta: built.softplus(x, b),
                lambda x, b=beta: x.clamp_min(0) + torch.log1p(torch.exp(-b * x.abs())) / b,
                x,
                name=at,
            )
    x, at = torch.randn(300), "at 300 elements, three thread blocks"
    with case(at):
        y = built.softplus(x, 1.0)
        check_against_float64(lambda _: y, F.softplus, x, name=at)


@exercise("22.4", "No double left", minutes=12, level=2)
def check_no_doubles(source):
    expect(
        isinstance(source, str) and "softplus_kernel" in source,
        "the answer has to be the source of softplus_kernel, a string",
    )
    no_nvcc = None
    try:
        doubles = double_instructions(cuda_sass("#include <cstdint>\n" + source))
        expect(
            not doubles,
            f"instructions with doubles are left, {doubles}: look for literals without f, functions that "
            "take or return double, and the type of beta",
        )
    except cuda.ToolMissing as missing:
        no_nvcc = str(missing)
    _expect_softplus(source)
    if no_nvcc:
        raise Skip(f"the values are right; only nvcc can tell whether doubles are left. {no_nvcc}")


# --- 22.5 ----------------------------------------------------------------------------------------------


def _occupancy(compiled):
    """The share of 64 warps that registers and shared memory of a Hopper SM hold."""
    return min(*programs_on_sm(compiled), 64 // compiled.num_warps) * compiled.num_warps / 64


@exercise("22.5", "A large tile that fits", minutes=12, level=3)
def check_fitting_tile(compiled):
    expect(
        isinstance(compiled, Compiled),
        f"the answer has to be what compile_for returns, got {type(compiled).__name__}",
    )
    expect(compiled.arch == 90, f"compile for arch=90, this is for {compiled.arch}")
    sums = re.search(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32>", compiled.ttir)
    expect(sums, "this kernel has no tl.dot with float32 sums; compile matmul_kernel")
    rows, cols = int(sums[1]), int(sums[2])
    what = f"a tile of {rows}×{cols} with {compiled.num_warps} warps"
    expect(rows * cols >= 32768, f"{what} has {rows * cols} elements, at least 32768 are asked for")
    expect(
        compiled.spills == 0,
        f"{what} spills {compiled.spills} values of each thread: it has {compiled.registers} registers",
    )
    occupancy = _occupancy(compiled)
    expect(
        occupancy >= 0.25,
        f"{what} takes {compiled.registers} registers a thread: {100 * occupancy:g} % of the SM's warps",
    )
