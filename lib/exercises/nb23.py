"""Exercises of notebook 23: what is right in the interpreter and wrong on a GPU, and how one can tell.

`SUSPECTS` are the kernels of exercise 23.1.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

from lib import machine
from lib.exercises import (
    Skip,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
)
from lib.exercises.watch import expect_no_pass
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.races import races

import torch
import triton
import triton.language as tl

# --- 23.1 ------------------------------------------------------------------------------------------------


@triton.jit
def count_kernel(x_ptr, count_ptr, BLOCK_SIZE: tl.constexpr):
    # One program counts the positive numbers among BLOCK_SIZE and adds them to one counter.
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    n_positive = tl.sum((x > 0).to(tl.int32), axis=0)
    tl.store(count_ptr, tl.load(count_ptr) + n_positive)


@triton.jit
def count_atomic_kernel(x_ptr, count_ptr, BLOCK_SIZE: tl.constexpr):
    # The same with an addition that cannot be interrupted.
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    tl.atomic_add(count_ptr, tl.sum((x > 0).to(tl.int32), axis=0))


@triton.jit
def running_total_kernel(x_ptr, y_ptr, BLOCK_SIZE: tl.constexpr):
    # y[k] is the sum of the tiles 0 to k; program k adds its tile to what program k - 1 has found.
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    before = tl.load(y_ptr + pid - 1, mask=pid > 0, other=0.0)
    tl.store(y_ptr + pid, before + tl.sum(x, axis=0))


@triton.jit
def shift_kernel(x_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # x[i] = x[i + 1], in place; the last element becomes 0.
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    right = tl.load(x_ptr + offsets + 1, mask=offsets + 1 < n_elements, other=0.0)
    tl.store(x_ptr + offsets, right, mask=offsets < n_elements)


@triton.jit
def scale_kernel(x_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # x[i] = 2 x[i], in place.
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(x_ptr + offsets, 2 * x, mask=offsets < n_elements)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, K, PRECISION: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    # One program handles one (BLOCK_SIZE, BLOCK_SIZE) tile of c = a @ b, float32; a has as many rows.
    rows, cols = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE):
        a = tl.load(a_ptr + rows[:, None] * K + k + cols[None, :])
        b = tl.load(b_ptr + (k + rows[:, None]) * BLOCK_SIZE + cols[None, :])
        total += tl.dot(a, b, input_precision=PRECISION)
    tl.store(c_ptr + rows[:, None] * BLOCK_SIZE + cols[None, :], total)


@triton.jit
def relu_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    # y = relu(x), NaN kept.
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=offsets < n_elements)


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A kernel of exercise 23.1. make() -> (arguments, constexprs, number of the result among them, truth)."""

    kernel: object
    grid: int
    make: Callable

    def run(self):
        """(result, truth) of one launch on fresh CPU tensors: inside `interpreted_launches()` or `races`."""
        args, constexprs, out, want = self.make()
        self.kernel[(self.grid,)](*args, **constexprs)
        return args[out], want

    def ptx(self):
        """The kernel compiled for an H200, as PTX."""
        args, constexprs, *_ = self.make()
        return compile_for(self.kernel, signature_of(self.kernel, *args, **constexprs)).ptx


def _numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _count():
    x = _numbers(512)
    return (x, torch.zeros(1, dtype=torch.int32)), {"BLOCK_SIZE": 64}, 1, (x > 0).sum()[None]


def _running_total():
    x = _numbers(512)
    return (x, torch.zeros(8)), {"BLOCK_SIZE": 64}, 1, x.view(8, 64).sum(1).cumsum(0)


def _shift():
    x = _numbers(500)
    want = torch.cat([x[1:], torch.zeros(1)])
    return (x, 500), {"BLOCK_SIZE": 64}, 0, want


def _scale():
    x = _numbers(500)
    return (x, 500), {"BLOCK_SIZE": 64}, 0, 2 * x


def _relu():
    x = _numbers(500)
    x[100] = torch.nan
    return (x, torch.empty(500), 500), {"BLOCK_SIZE": 64}, 1, torch.relu(x)


def _matmul(precision=None):
    a, b = _numbers(32, 256), _numbers(256, 32)
    constexprs = {"PRECISION": precision, "BLOCK_SIZE": 32}
    return (a, b, torch.empty(32, 32), 256), constexprs, 2, (a.double() @ b.double()).float()


SUSPECTS = {
    "count": Suspect(count_kernel, 8, _count),
    "count_atomic": Suspect(count_atomic_kernel, 8, _count),
    "running_total": Suspect(running_total_kernel, 8, _running_total),
    "shift": Suspect(shift_kernel, 8, _shift),
    "scale": Suspect(scale_kernel, 8, _scale),
    "relu": Suspect(relu_kernel, 8, _relu),
    "matmul": Suspect(matmul_kernel, 1, _matmul),
    "matmul_ieee": Suspect(matmul_kernel, 1, functools.partial(_matmul, "ieee")),
}
TOLERANCE = 1e-4


def is_close(got, want):
    """Within TOLERANCE everywhere, NaN where the truth has NaN."""
    return torch.allclose(got.double(), want.double(), rtol=0, atol=TOLERANCE, equal_nan=True)


def right_here(name):
    """Is suspect `name` right in the interpreter? It runs there even with a GPU."""
    with interpreted_launches():
        return is_close(*SUSPECTS[name].run())


@functools.cache
def _evidence(name):
    """Sentences that show, without a GPU, that compiled code goes wrong; none when it does not."""
    suspect = SUSPECTS[name]
    evidence = races(suspect.run)
    if tf32 := re.search(r"mma[.\w]*tf32[.\w]*", suspect.ptx()):
        a, b, *_ = suspect.make()[0]
        error = (cut_to_tf32(a) @ cut_to_tf32(b) - a.double() @ b.double()).abs().max()
        if error > TOLERANCE:
            evidence.append(
                f"its PTX has {tf32[0]}: with inputs cut to TF32 the error is {error:.0e}, and"
                f" {TOLERANCE:.0e} is allowed"
            )
    return evidence


def cut_to_tf32(x):
    """float32 -> float64 of what is left of it in TF32: 10 of its 23 bits of mantissa."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@exercise("23.1", "Right here, wrong there", minutes=12, level=2)
def check_right_here_wrong_there(names):
    choices = ", ".join(SUSPECTS)
    expect(
        isinstance(names, (set, frozenset, list, tuple)), f"give a set of names out of: {choices}"
    )
    unknown = [name for name in names if name not in SUSPECTS]
    expect(not unknown, f"there is no suspect {unknown[:1]}; there are: {choices}")
    for name in sorted(names):
        expect(
            right_here(name), f"{name!r} is wrong in the interpreter already: a test finds it here"
        )
        expect(
            _evidence(name),
            f"nothing in {name!r} goes wrong on a GPU: what several programs touch they only read or update"
            " atomically, and its PTX has no tf32",
        )
    missing = [n for n in SUSPECTS if n not in names and right_here(n) and _evidence(n)]
    if missing:
        raise Wrong(
            f"what you name is right, and {len(missing)} more can go wrong; ask races(SUSPECTS[name].run) and"
            " look for tf32 in SUSPECTS[name].ptx(), for each that you left out"
        )


# --- 23.2 ------------------------------------------------------------------------------------------------


def _shifted_rows(shape, dtype, by=1000.0):
    """Rows far above 0 and far below it in turn, so that padding with smaller numbers shows."""
    x = torch.randn(shape, dtype=dtype, device=machine.device())
    x[0::2] += by
    x[1::2] -= by
    return (x,)


@exercise("23.2", "What the masked lanes hold", minutes=8, level=1)
def check_row_range(answer):
    def eager(x):
        return x.amax(1) - x.amin(1)

    expect_op(answer, eager, _shifted_rows, dtypes=(torch.float32,))
    for by, what in ((1e30, "numbers near ±1e30"), (torch.inf, "rows of inf and of -inf")):
        far = functools.partial(_shifted_rows, by=by)
        expect_op(answer, eager, far, ((2, 3), (4, 33)), (torch.float32,), what=f", {what}")
    (x,) = _shifted_rows((5, 7), torch.float32)
    expect_launches(lambda: answer(x))
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (5, 7)")


# --- 23.3 ------------------------------------------------------------------------------------------------


def _smooth_eager(x):
    padded = torch.nn.functional.pad(x, (1, 1))
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


@exercise("23.3", "The barrier that is not there", minutes=12, level=2)
def check_smooth_source(source):
    expect(isinstance(source, str), "smooth_source has to be the source, a string")
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    expect(
        "__shared__" in code, "keep the tile in shared memory: its barriers are what this is about"
    )
    smooth = cuda.load_cuda_on_cpu(source, ["smooth"], name="smooth", checked=True)
    for n in (1, 5, 128, 129, 300, 1000):
        x, at = torch.randn(n), f"at {n} elements"
        with case(at):
            y = attempted(smooth.smooth(x))
            check_against_float64(lambda x, y=y: y, _smooth_eager, x, name=at)
    cuda.memory_traffic(smooth)
    smooth.smooth(x)
    n_read = cuda.memory_traffic(smooth).bytes_read
    expect(
        n_read < 1.5 * x.nbytes,
        f"{at} x has {x.nbytes} bytes, and {n_read} are loaded; y is to be made of the tile in shared memory",
    )


# --- 23.4 ------------------------------------------------------------------------------------------------


@triton.jit
def add_tiles_kernel(x_ptr, total_ptr, BLOCK_SIZE: tl.constexpr):
    # Every program adds the sum of its tile to one number.
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    tl.atomic_add(total_ptr, tl.sum(x, axis=0))


@triton.jit
def split_matmul_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK_SIZE: tl.constexpr):
    # As matmul_kernel, with a program for each BLOCK_SIZE of K; they add to c.
    rows, cols = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_SIZE)
    k = tl.program_id(0) * BLOCK_SIZE
    a = tl.load(a_ptr + rows[:, None] * K + k + cols[None, :])
    b = tl.load(b_ptr + (k + rows[:, None]) * BLOCK_SIZE + cols[None, :])
    tl.atomic_add(c_ptr + rows[:, None] * BLOCK_SIZE + cols[None, :], tl.dot(a, b))


def _total(tiles):
    return (tiles, torch.zeros(1)), {"BLOCK_SIZE": 64}, 1, tiles.sum()[None]


def _mirrored():
    """Eight tiles that are the same from behind."""
    half = _numbers(4, 64)
    return torch.cat([half, half.flip(0)])


def _split_matmul():
    (a, b, c, k), _, out, want = _matmul()
    return (a, b, c.zero_(), k), {"BLOCK_SIZE": 32}, out, want


_HIDING = {
    "matmul_kernel": (SUSPECTS["matmul"], {"tf32"}),
    "matmul_kernel in ieee": (SUSPECTS["matmul_ieee"], set()),
    "count_kernel": (SUSPECTS["count"], {"race"}),
    "count_atomic_kernel": (SUSPECTS["count_atomic"], set()),
    "shift_kernel": (SUSPECTS["shift"], {"race", "order"}),
    "relu_kernel, wrong in the interpreter already": (SUSPECTS["relu"], set()),
    "a sum by atomics": (
        Suspect(add_tiles_kernel, 8, lambda: _total(_numbers(8, 64))),
        {"order"},
    ),
    "a sum by atomics, of tiles that are the same from behind": (
        Suspect(add_tiles_kernel, 8, lambda: _total(_mirrored())),
        {"order"},
    ),
    "a sum by atomics, of whole numbers": (
        Suspect(add_tiles_kernel, 8, lambda: _total(_numbers(8, 64).round())),
        set(),
    ),
    "a product that cuts K up": (Suspect(split_matmul_kernel, 8, _split_matmul), {"order", "tf32"}),
}
_SHOWS = {
    "race": "two programs touch one element, and not atomically",
    "order": "in some order of the programs the result has other bits",
    "tf32": "its PTX multiplies in TF32",
}


@exercise("23.4", "Say what hides", minutes=15, level=3)
def check_what_hides(answer):
    for name, (suspect, want) in _HIDING.items():
        with case(name):
            got = attempted(answer(suspect))
        expect(
            isinstance(got, (set, frozenset)) and got <= {*_SHOWS},
            f"{name}: return a set out of {', '.join(_SHOWS)}, got {got!r}",
        )
        for what in sorted(got - want):
            raise Wrong(f"{name}: {what!r} does not apply; it would if {_SHOWS[what]}")
        for what in sorted(want - got):
            raise Wrong(f"{name}: {what!r} is missing; {_SHOWS[what]}")


# --- the five mistakes of the notebook ---------------------------------------------------------------


def checker_of(kernels):
    """A function that runs one of these CUDA kernels on the CPU, and prints what the checker reports."""
    names = [re.search(r"void (\w+)", kernel)[1] for kernel in kernels]
    cases = "\n".join(
        f"  if (which == {k}) {name}<<<blocks, 64, 0, c10::cuda::getCurrentCUDAStream()>>>"
        "(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());"
        for k, name in enumerate(names)
    )
    source = f"""
#include <torch/types.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
{"".join(kernels)}
void run(torch::Tensor x, torch::Tensor y, int64_t which, int64_t blocks) {{
{cases}
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}}
"""

    def checker_says(name, x, blocks=1):
        """Print what the checker reports on a kernel, and the line that it names."""
        try:
            planted = cuda.load_cuda_on_cpu(source, ["run"], name="planted", checked=True)
            planted.run(x, torch.zeros(64), names.index(name), blocks)
            print("nothing")
        except RuntimeError as error:
            print(error)
            line = re.search(r"planted\.cu:(\d+)", str(error))
            print("   ", source.splitlines()[int(line[1]) - 1].strip() if line else "")

    return checker_says
