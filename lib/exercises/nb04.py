"""Exercises of notebook 04, CUDA by load_inline."""

import re

from lib.exercises import Skip, Wrong, attempted, case, exercise, expect
from lib.measure.check import check_against_float64
from lib.nogpu import cuda

import torch

NAN = float("nan")
HEADERS = """
#include <torch/types.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
"""


def built_for_cpu(source, functions, name="yours"):
    """The source built for the CPU, every access checked; with a GPU too, so that verdicts are the same."""
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    source = f'{HEADERS}#line 1 "{name}.cu"\n{source}'  # load_inline puts headers in front as well
    return cuda.load_cuda_on_cpu(source, functions, name=name, checked=True)


def _code(source, what):
    """The source without comments; Wrong if it is no string."""
    expect(isinstance(source, str), f"{what} has to be CUDA C++, a string")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)


def expect_cuda_kernel(source, what, name):
    """The source without comments; Wrong if it does not define a kernel of this name."""
    code = " ".join(_code(source, what).split())
    expect(f"__global__ void {name}(" in code, f"{what} should define `__global__ void {name}(…)`")
    return code


def expect_equal(got, want, at, what):
    """Wrong, with the first element that differs, unless the bits are those wanted; NaN equals NaN."""
    shape = tuple(want.shape)
    expect(tuple(got.shape) == shape, f"{at}: {what} has shape {tuple(got.shape)}, not {shape}")
    differs = ~torch.isclose(got, want, rtol=0, atol=0, equal_nan=True)
    if differs.any():
        index = differs.nonzero()[0].tolist()
        at_index = f"{what}[{', '.join(map(str, index))}]"
        raise Wrong(f"{at}: {at_index} should be {want[tuple(index)]:g}, got {got[tuple(index)]:g}")


# --- 04.1 ----------------------------------------------------------------------------------------------------

_STRIDE_HOST = """
torch::Tensor add_relu(torch::Tensor x, torch::Tensor bias, int64_t blocks, int64_t threads, int64_t n) {
  auto y = torch::empty_like(x);
  add_relu_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), bias.data_ptr<float>(), y.data_ptr<float>(), n, x.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


def _thread_of(add_relu, i, blocks, threads):
    """The number in the grid of the thread that takes element i; None if the checker does not name it."""
    x, bias = torch.randn(1, i), torch.randn(i)
    try:
        add_relu(x, bias, blocks, threads, i + 1)  # one too many: element i is out of bounds
    except RuntimeError as error:
        at = re.search(r"thread \((\d+),0,0\) of block \((\d+),0,0\)", str(error))
        return at and int(at[2]) * threads + int(at[1])


def _expect_neighbours(add_relu, blocks=2, threads=4):
    """Wrong unless neighbouring threads take neighbouring elements, as the drawing has them."""
    for i in range(24, 32):
        thread = _thread_of(add_relu, i, blocks, threads)
        expect(
            thread is None or thread == i % (blocks * threads),
            f"in a grid of {blocks} thread blocks of {threads}: element {i} should be thread "
            f"{i % (blocks * threads)}'s, and thread {thread} takes it; do neighbours take neighbours?",
        )


@exercise("04.1", "A grid that is too small", minutes=10, level=1)
def check_stride_kernel(kernel):
    expect_cuda_kernel(kernel, "stride_kernel", "add_relu_kernel")
    yours = built_for_cpu(kernel + _STRIDE_HOST, ["add_relu"])
    for shape, blocks, threads in [
        ((1, 1), 1, 1),
        ((5, 7), 1, 32),
        ((2, 3), 4, 32),
        ((17, 33), 3, 64),
        ((3, 200), 5, 96),
        ((9, 100), 1, 1),
    ]:
        at = f"at {shape[0]}×{shape[1]} in a grid of {blocks} thread blocks of {threads}"
        x, bias = torch.randn(shape), torch.randn(shape[1])
        x[-1, -1] = NAN
        with case(at):
            cuda.memory_traffic(yours)
            y = attempted(yours.add_relu(x, bias, blocks, threads, x.numel()))
        expect_equal(y, torch.relu(x + bias), at, "y")
        written = cuda.memory_traffic(yours).bytes_written
        expect(
            written == y.nbytes,
            f"{at}: {written // 4} numbers are written, and y has {y.numel()}; how far does a thread move on?",
        )
    _expect_neighbours(yours.add_relu)


# --- 04.2 ----------------------------------------------------------------------------------------------------


@exercise("04.2", "A launch that covers everything", minutes=15, level=2)
def check_fixed_source(source):
    from lib.ops.add_relu import add_relu_eager

    code = _code(source, "fixed_source")
    fixed = built_for_cpu(source, ["add_relu"], "fixed")
    # (65536, 1): one more row than the second and the third dimension of a grid can have
    for shape in [(1, 1), (8, 8), (5, 7), (17, 33), (64, 16), (3, 2000), (1500, 2), (65536, 1)]:
        x, bias = (torch.randn(shape), torch.randn(shape[1]))
        at = f"at {shape[0]}×{shape[1]}"
        with case(at):
            y = attempted(fixed.add_relu(x, bias))
            check_against_float64(lambda x, b, y=y: y, add_relu_eager, x, bias, name=at)
    _expect_check_and_stream(code)


def _expect_check_and_stream(code):
    before, _, behind = code.rpartition(">>>")
    expect(
        "LAUNCH_CHECK" in behind or "cudaGetLastError" in behind,
        "no launch check behind the launch",
    )
    given, n_removed = before.rpartition("<<<")[2], 1
    while n_removed:  # dim3(a, b) is one argument
        given, n_removed = re.subn(r"\([^()]*\)", "", given)
    expect(
        given.count(",") == 3 and "getCurrentCUDAStream" in before,
        "the launch does not name PyTorch's current stream, so it may overtake PyTorch's work",
    )


# --- 04.3 ----------------------------------------------------------------------------------------------------


# A variable: a guard that has no name is gone at the end of its line.
_GUARD = re.compile(r"(CUDA|Device)Guard\s+\w+\s*[({]|=\s*[\w:]*Guard\s*[({]|\bcudaSetDevice\s*\(")
# One device beside another, by whatever names; `x.device() == torch::kCUDA` is none.
_ONE_GPU = re.compile(
    r"device\(\)(\.index\(\))?\s*[!=]=\s*\w+\s*[.&|,;)]"
    r"|\w\s*[!=]=\s*\w+\.(get_)?device\(\)|Same(GPU|Device)"
)


@exercise("04.3", "A binding that trusts nobody", minutes=12, level=2)
def check_safe_source(source):
    code = _code(source, "safe_source")
    safe = built_for_cpu(source, ["scale_rows"], "safe").scale_rows
    x, scale = torch.randn(5, 7), torch.randn(5)

    def right(x, scale, at):
        with case(at):
            y = attempted(safe(x, scale))
        expect_equal(y, x * scale[:, None], at, "y")

    def right_or_refused(x, scale, at):
        try:
            y = attempted(safe(x, scale))
        except Exception as error:
            _expect_refusal(error, at)
        else:
            expect_equal(y, x * scale[:, None], at, "y")

    def refused(x, scale, at):
        try:
            safe(x, scale)
        except Exception as error:
            _expect_refusal(error, at)
        else:
            raise Wrong(f"{at}: the call returns, as if all were well")

    right(x, scale, "at 5×7")
    right(torch.randn(300, 3), torch.randn(300), "at 300×3")
    right(x[:0], scale[:0], "at 0×7, an empty matrix")
    right_or_refused(torch.randn(5, 5).t(), scale, "with a transposed x")
    right_or_refused(torch.randn(5, 14)[:, ::2], scale, "with every other column of x")
    right_or_refused(x, torch.randn(10)[::2], "with every other number of scale")
    refused(x, scale[:3], "with 3 numbers in scale for 5 rows")
    refused(x, torch.randn(7), "with 7 numbers in scale for 5 rows")
    refused(x, torch.randn(5, 2), "with a scale of two dimensions")
    refused(x[0], scale, "with an x of one dimension")
    refused(torch.randn(5, 7, 2), scale, "with an x of three dimensions")
    refused(x.double(), scale, "with an x in float64")
    refused(x, scale.long(), "with a scale of whole numbers")
    expect(
        re.search(r"is_cuda|device\(\)|CHECK_CUDA", code),
        "nothing asks on which device x and scale are: with a tensor of the CPU the kernel would read the "
        "GPU's memory at an address of the host",
    )
    expect(
        code.count("is_cuda") + code.count("device()") + code.count("CHECK_CUDA") > 1,
        "one tensor's device is asked for, and the other may be on the CPU",
    )
    expect(
        _ONE_GPU.search(code),
        "nothing compares the device of scale with that of x: each may be on a GPU of its own",
    )
    expect(
        _GUARD.search(code.rpartition("<<<")[0]),
        "x may be on a GPU that is not the current one, and the kernel is launched on the current one: let a "
        "CUDAGuard stand in front of the launch, as a variable, so that it lasts until the end",
    )
    _expect_check_and_stream(code)


def _expect_refusal(error, at):
    said = str(error).split("\n")[0]
    if "out-of-bounds" in said or "launched with" in said:
        raise Wrong(f"{at}: the kernel runs all the same: {said}") from None


# --- 04.4 ----------------------------------------------------------------------------------------------------


@exercise("04.4", "A kernel from an empty cell", minutes=20, level=3)
def check_build(build):
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    given = {}

    def load_inline(name, cpp_sources, cuda_sources=None, functions=None, **_):
        given.update(cpp=_text(cpp_sources), cuda=_text(cuda_sources))
        names = [functions] if isinstance(functions, str) else list(functions or [])
        expect("add_relu_dx" in names, "functions should name add_relu_dx")
        return built_for_cpu(given["cuda"], names)

    built = attempted(build(load_inline))
    expect(given, "build should call the load_inline that it is given")
    expect(
        re.search(r"Tensor\s+add_relu_dx\s*\([^)]*\)\s*;", given["cpp"]),
        "cpp_sources should declare add_relu_dx: nvcc's part and Python's are compiled apart",
    )
    for shape in [(1, 1), (8, 8), (5, 7), (17, 33), (3, 2000)]:
        y = torch.randn(shape).relu()
        y[0, 0] = 0.0
        _expect_dx(built, f"at {shape[0]}×{shape[1]}", torch.randn(shape), y)
    _expect_dx(built, "with a NaN in y", torch.ones(1, 3), torch.tensor([[NAN, 0.0, 1.0]]))
    dy = torch.tensor([[torch.inf, 1.0, 1.0]])
    _expect_dx(built, "with an inf in dy", dy, torch.tensor([[0.0, 0.0, 1.0]]))
    _expect_check_and_stream(_code(given["cuda"], "cuda_sources"))


def _text(sources):
    return sources if isinstance(sources, str) else "\n".join(sources or [])


def _expect_dx(built, at, dy, y):
    with case(at):
        dx = attempted(built.add_relu_dx(dy, y))
    want = torch.where(y <= 0, 0.0, dy)
    expect(dx.shape == want.shape, f"{at}: dx has shape {tuple(dx.shape)}")
    if not torch.equal(dx, want):
        row, col = (dx != want).nonzero()[0].tolist()
        got = f"dx[{row}, {col}] should be {want[row, col]:g}, got {dx[row, col]:g}"
        raise Wrong(f"{at}: {got}, where y is {y[row, col]:g}")
