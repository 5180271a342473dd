"""CUDA C++ on the CPU: right answers, every planted mistake reported, no false alarms, cached builds."""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

from lib.machine import HAS_GPU
from lib.nogpu import cuda, cuda_build, cuda_toolkit
from lib.nogpu.cuda_translate import namespaces_of, translate, without_pybind11
from lib.recorded.results import ROOT
from lib.tests import yardstick

import pytest
import torch

SOURCES = Path(__file__).parent / "cuda"
BROKEN = (SOURCES / "broken.cu").read_text()
CORRECT = (SOURCES / "correct.cu").read_text()
FUNCTIONS = [
    *("add_relu", "softmax", "matmul", "histogram", "gelu_half", "axpy_bf16_", "scale"),
    *("weighted_sum", "grid_sum", "relay", "transpose", "read_first", "forever"),
]

pytestmark = pytest.mark.skipif(
    cuda_build.why_no_compiler() is not None, reason=str(cuda_build.why_no_compiler())
)


@pytest.fixture(scope="module")
def plain():
    return cuda.load_cuda_on_cpu(CORRECT, FUNCTIONS, name="correct", checked=False)


@pytest.fixture(scope="module")
def checked():
    return cuda.load_cuda_on_cpu(CORRECT, FUNCTIONS, name="correct", checked=True)


@pytest.fixture(scope="module", params=["plain", "checked"])
def kernels(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def broken():
    return cuda.load_cuda_on_cpu(BROKEN, ["run"], name="broken", checked=True)


@pytest.fixture
def rand():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


# ---- Right answers, plain and checked --------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 4, 1027, 4096])
def test_vectorized_pointwise(kernels, rand, n):
    x, y = rand(n), rand(n)
    assert torch.equal(kernels.add_relu(x, y), torch.relu(x + y))


@pytest.mark.parametrize("shape", [(1, 1), (5, 1000), (17, 33)])
def test_softmax_with_block_reductions(kernels, rand, shape):
    x = rand(*shape)
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, dim=1))


def test_tiled_matmul(kernels, rand):
    a, b = rand(50, 70), rand(70, 33)
    torch.testing.assert_close(kernels.matmul(a, b), a @ b, atol=1e-4, rtol=1e-4)


def test_histogram_with_atomics_in_dynamic_shared_memory(kernels):
    x = torch.arange(3000, dtype=torch.int32) ** 2 % 50
    assert torch.equal(kernels.histogram(x, 50).long(), torch.bincount(x, minlength=50))


def test_more_than_48_kb_of_shared_memory_once_asked_for(kernels):
    bins = 15_000  # 60 000 bytes
    x = torch.arange(100, dtype=torch.int32) * 149
    assert torch.equal(kernels.histogram(x, bins).long(), torch.bincount(x, minlength=bins))


def test_half_pairs(kernels, rand):
    x = rand(1001).half()
    torch.testing.assert_close(kernels.gelu_half(x), torch.nn.functional.gelu(x.float()).half())


def test_bfloat16_pairs(kernels, rand):
    x, y = rand(1000).bfloat16(), rand(1000).bfloat16()
    expected = (0.5 * x.float() + y.float()).bfloat16()
    kernels.axpy_bf16_(x, y, 0.5)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dispatch_and_aligned_vectors_in_every_dtype(kernels, rand, dtype):
    x = rand(1001).to(dtype)
    assert torch.equal(kernels.scale(x, 2.0), x * 2)


def test_early_exit_votes_and_constant_memory(kernels, rand):
    x = rand(100)
    total = (x * torch.tensor([1.0, 2, 3, 4]).repeat(25)).sum()
    torch.testing.assert_close(kernels.weighted_sum(x), total.expand(100), atol=1e-4, rtol=1e-4)


def test_the_last_thread_block_reads_what_the_others_published(kernels, rand):
    x = rand(3000)
    torch.testing.assert_close(kernels.grid_sum(x), x.sum()[None], atol=1e-3, rtol=1e-4)


def test_accessor_of_a_tensor_with_strides(kernels, rand):
    x = rand(6, 10)[::2, 1::3]
    assert torch.equal(kernels.transpose(x), x.t())


@pytest.mark.parametrize("order", ["forward", "reverse", "1", "12345"])
def test_the_order_of_threads_does_not_matter(plain, checked, rand, monkeypatch, order):
    x, a, b = rand(4, 300), rand(20, 30), rand(30, 40)
    results = [plain.softmax(x), plain.matmul(a, b), plain.grid_sum(x), plain.scale(x, 3.0)]
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    for kernels in (plain, checked):
        again = [
            kernels.softmax(x),
            kernels.matmul(a, b),
            kernels.grid_sum(x),
            kernels.scale(x, 3.0),
        ]
        assert all(map(torch.equal, results, again))


def test_host_checks_raise_their_python_exceptions(checked, rand):
    with pytest.raises(ValueError, match="the same shape"):
        checked.add_relu(rand(3), rand(4))
    with pytest.raises(TypeError, match="must be float32"):
        checked.add_relu(rand(3).double(), rand(3).double())


# ---- Mistakes --------------------------------------------------------------------------------

# case of run(), kernel, mark of the line (the kernel's name if None), message
MISTAKES = [
    (
        1,
        "no_guard",
        None,
        "out-of-bounds read of 4 bytes at element 1000 of .* a tensor with 1000 elements",
    ),
    (2, "guard_one_too_far", None, "out-of-bounds write of 4 bytes at element 1000"),
    (3, "before_the_start", None, "out-of-bounds read of 4 bytes at element -1 "),
    (
        4,
        "misaligned_float4",
        None,
        r"float4' needs an address that is a multiple of 16.* 4 past one",
    ),
    (
        5,
        "tree_sum<NO_FIRST_BARRIER>",
        "tree_sum",
        "uninitialised element 128 of shared memory `part`",
    ),
    (
        6,
        "tree_sum<NO_BARRIER_IN_LOOP>",
        "tree_sum",
        "race: no barrier separates this write of element 1",
    ),
    (
        7,
        "tree_sum<PAST_THE_ARRAY>",
        "past_the_array",
        r"index 256 is out of bounds for 'float \[256\]'",
    ),
    (8, "warp_sum_without_syncwarp", None, "uninitialised element 16 of shared memory `part`"),
    (9, "tiles_overwritten", None, "race: .*shared memory `a_tile` from the write by thread"),
    (10, "neighbour_without_barrier", None, "race: .* from the write by thread \\(0,0,0\\)"),
    (11, "inner_index", None, r"index 16 is out of bounds for 'float \[16\]'"),
    (12, "barrier_in_both_branches", None, r"__syncthreads\(\) in divergent code"),
    (13, "shuffle_in_branch", None, "different warp intrinsics"),
    (
        14,
        "sum_without_atomic",
        None,
        "race: no barrier separates this read of element 0 of .* a tensor",
    ),
    (
        15,
        "histogram_zeroed_late",
        None,
        "race: .*atomic update of element 0 of shared memory `bins`",
    ),
    (16, "histogram_zeroed_late", "no_shared_bytes", "`bins` with 0 elements .* gives 0 bytes"),
    (17, "reads_another_block", None, "race between thread blocks"),
    (20, "waits_for_a_later_block", None, "waits for ever"),
    (
        21,
        "asserts",
        None,
        r"assertion `x\[threadIdx.x\] < 100.f' failed, thread \(37,0,0\)".replace("'", "`"),
    ),
]


def run_broken(broken, case):
    n = 1000 if case in (1, 2) else 1024
    x = torch.linspace(0, 1, n)
    x[37] = 1000.0
    return broken.run(x, torch.zeros(n), case)


def line_marked(mark):
    return next(
        i for i, text in enumerate(BROKEN.splitlines(), 1) if re.search(rf"BUG {mark}\b", text)
    )


@pytest.mark.parametrize(("case", "kernel", "mark", "message"), MISTAKES)
def test_a_mistake_is_named_with_kernel_and_line(broken, case, kernel, mark, message):
    with pytest.raises(cuda.KernelError) as error:
        run_broken(broken, case)
    text = str(error.value)
    assert text.startswith(f"CUDA kernel {kernel}: ")
    assert re.search(message, text)
    assert text.endswith(f"\n  at broken.cu:{line_marked(mark or kernel)}")


def test_messages_name_the_thread(broken):
    with pytest.raises(cuda.KernelError, match=r"thread \(232,0,0\) of block \(3,0,0\)"):
        run_broken(broken, 1)


@pytest.mark.parametrize(
    ("case", "mark", "message"),
    [
        (18, "too_many_threads", "2048 threads; a block has 1 to 1024"),
        (19, "empty_grid", "a grid of"),
    ],
)
def test_a_launch_that_a_gpu_refuses(broken, case, mark, message):
    with pytest.raises(cuda.KernelError, match="invalid configuration argument: no_guard") as error:
        run_broken(broken, case)
    assert message in str(error.value)
    assert str(error.value).endswith(f"at broken.cu:{line_marked(mark)}")


def test_after_an_error_the_next_launch_is_right(broken, rand):
    with pytest.raises(cuda.KernelError):
        run_broken(broken, 5)
    x = rand(1024)
    sums = broken.run(x, torch.zeros(1024), 0)[:4]
    torch.testing.assert_close(sums, x.view(4, 256).sum(1), atol=1e-4, rtol=1e-4)


def test_kernel_errors_are_runtime_errors():
    assert issubclass(cuda.KernelError, RuntimeError)


def test_a_slice_ends_where_it_ends(checked, rand):
    """The elements after a slice lie in valid memory, and in a tensor that an earlier launch used."""
    whole, y = rand(200), torch.zeros(1)
    checked.read_first(whole, y, 200)
    checked.read_first(whole[:100], y, 100)
    with pytest.raises(cuda.KernelError, match="element 100 of .* a tensor with 100 elements"):
        checked.read_first(whole[:100], y, 101)
    with pytest.raises(cuda.KernelError, match="element 50 of .* a tensor with 50 elements"):
        checked.read_first(whole[50:100], y, 51)


def test_a_tensor_and_its_first_elements_in_one_launch(checked, rand):
    y = torch.zeros(100)
    checked.read_first(y, y[:1], 100)
    checked.read_first(y[:1], y, 1)


def test_several_cpu_threads_may_launch(checked, rand):
    x = rand(8, 100)
    results = [None] * 4

    def launch(i):
        results[i] = checked.softmax(x * i)

    threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        torch.testing.assert_close(result, torch.softmax(x * i, dim=1))


def test_a_freed_tensor_is_forgotten(checked, rand):
    y = torch.zeros(1)
    for n in (1000, 10, 500, 20):  # the allocator hands out the same memory again
        checked.read_first(rand(n), y, n)
        with pytest.raises(cuda.KernelError, match=f"element {n} of .* a tensor with {n} elements"):
            checked.read_first(rand(n), y, n + 1)


# ---- Kernels that wait -----------------------------------------------------------------------


def test_threads_may_wait_for_others_of_their_block(checked, monkeypatch):
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", "reverse")  # the last thread comes first, and waits
    order = checked.relay(torch.zeros(1, dtype=torch.int32), 4)
    assert order.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_a_launch_has_a_time_limit(request, monkeypatch, mode):
    kernels = request.getfixturevalue(mode)
    monkeypatch.setenv("CUDA_ON_CPU_TIMEOUT", "0.2")
    started = time.perf_counter()
    with pytest.raises(
        cuda.KernelError, match="forever_kernel: still running after the time limit"
    ):
        kernels.forever(torch.tensor([1, 0], dtype=torch.int32))
    assert time.perf_counter() - started < 5
    monkeypatch.delenv("CUDA_ON_CPU_TIMEOUT")
    kernels.forever(torch.ones(2, dtype=torch.int32))


def test_memory_that_is_not_there_ends_the_kernel_and_not_the_process(plain, rand):
    """Without the checker too, because the process may run somebody's notebook."""
    x, y = rand(100), torch.zeros(1)
    with pytest.raises(
        cuda.KernelError, match="touches memory that is not there; with checked=True"
    ) as error:
        plain.read_first(x, y, 10**9)
    assert re.search(r"\n  at correct.cu:\d+$", str(error.value))
    plain.read_first(x, y, 100)
    assert y == x[99]


@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_ctrl_c_ends_a_kernel(request, monkeypatch, mode):
    kernels = request.getfixturevalue(mode)
    monkeypatch.setenv("CUDA_ON_CPU_TIMEOUT", "20")
    handler = signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)  # a job in the background is born ignoring it
    try:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(cuda.KernelError, match="forever_kernel: interrupted"):
            kernels.forever(torch.tensor([1, 0], dtype=torch.int32))
        timer.join()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


# ---- Traffic ---------------------------------------------------------------------------------


def test_traffic_is_counted_to_the_byte(checked, rand):
    x, y = rand(1003), rand(1003)
    cuda.memory_traffic(checked)
    checked.add_relu(x, y)
    n_bytes = 1003 * 4
    of_a_thread = 4 * (4 + 1) * 2  # a float4 and one number behind the last, of x and of y
    assert cuda.memory_traffic(checked) == (1, 1, 256, 2 * n_bytes, n_bytes, of_a_thread, 0)
    assert cuda.memory_traffic(checked) == (0,) * 7
    checked.softmax(rand(4, 256))  # reads its row three times
    read, sums = 3 * 4 * 256 * 4, 2 * 32 * 4  # of maxima and of sums, one for each warp
    assert cuda.memory_traffic(checked)[3:] == (read, 4 * 256 * 4, 3 * 2 * 4, sums)


def test_traffic_of_something_else_is_refused():
    with pytest.raises(ValueError, match="pass what load_cuda returned"):
        cuda.memory_traffic(torch.ops.aten)


# ---- load_inline -----------------------------------------------------------------------------

OP_FILE = """
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>
#include <torch/types.h>

struct Sum {};  // names that correct.cu has too, for other things
template <typename Op>
__device__ float reduce_block(float v, Op op, float identity) {
  __shared__ float part[32];
  part[threadIdx.x] = -v;
  return part[threadIdx.x];
}
__global__ void add_relu_kernel(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * reduce_block(x[i], Sum(), 0.f);
}
torch::Tensor add_relu(const torch::Tensor& x, float a, int times) {
  auto y = torch::empty_like(x);
  int n = x.numel();
  for (int i = 0; i < times; ++i) {
    add_relu_kernel<<<(n + 31) / 32, 32, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), y.data_ptr<float>(), a, n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return y;
}
torch::Tensor negate(torch::Tensor x) { return add_relu(x, 1.f, 1); }
TORCH_LIBRARY(cuda_on_cpu_test, m) { m.def("negate(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(cuda_on_cpu_test, CUDA, m) { m.impl("negate", &negate); }
"""


@pytest.mark.skipif(HAS_GPU, reason="load_inline is PyTorch's own where there is a GPU")
def test_load_inline_builds_for_the_cpu(plain, rand, monkeypatch):
    """An op file with its own TORCH_LIBRARY, and the pybind11 way of `functions`, in one."""
    cuda.install()
    cuda.install()  # twice is once
    from torch.utils.cpp_extension import load_inline

    monkeypatch.setenv("CUDA_ON_CPU_CHECKED", "1")
    module = load_inline(
        name="op_file",
        cpp_sources="torch::Tensor add_relu(const torch::Tensor& x, float a, int times);",
        cuda_sources=OP_FILE,
        functions=["add_relu"],
        extra_cuda_cflags=["-O3", "--use_fast_math", "-DUNUSED=1"],
        no_implicit_headers=True,
    )
    x = rand(100)
    assert torch.equal(torch.ops.cuda_on_cpu_test.negate(x), -x)
    traffic = cuda.memory_traffic(torch.ops.cuda_on_cpu_test)
    assert (traffic.launches, traffic.bytes_read, traffic.bytes_written) == (1, 400, 400)
    assert torch.equal(module.add_relu(x, 2.0, 3), -2 * x)
    assert cuda.memory_traffic(module).launches == 3
    assert torch.equal(plain.add_relu(x, x), torch.relu(x + x))  # the other library kept its own


DEFAULT = """#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
__global__ void twice(const float* x, float* y, int from) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = 2 * x[from + i];
}
__global__ void add_all(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) *y += x[i];
}
__global__ void sums_of_eight(const float* x, float* y, int n) {
  auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  float sum = x[threadIdx.x];
  if (threadIdx.x < n) sum = cg::reduce(tile, sum, cg::plus<float>());
  y[threadIdx.x] = sum;
}
torch::Tensor eights(torch::Tensor x, int n) {
  auto y = torch::zeros_like(x);
  sums_of_eight<<<1, x.numel()>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
}
torch::Tensor run(torch::Tensor x, int blocks, int from) {
  auto y = torch::zeros_like(x);
  twice<<<blocks, 64>>>(x.data_ptr<float>(), y.data_ptr<float>(), from);
  return y;
}
torch::Tensor through_memory_of_its_own(torch::Tensor x, int blocks, int more) {
  auto y = torch::empty_like(x);
  float *d_x, *d_y;
  cudaMalloc((void**)&d_x, x.nbytes());
  cudaMalloc(&d_y, x.nbytes());
  cudaMemcpy(d_x, x.data_ptr<float>(), x.nbytes() + more, cudaMemcpyHostToDevice);
  twice<<<blocks, 64>>>(d_x, d_y, 0);
  cudaMemcpy(y.data_ptr<float>(), d_y, x.nbytes(), cudaMemcpyDeviceToHost);
  cudaFree(d_x);
  cudaFree(d_y);
  return y;
}
torch::Tensor rounded_down(torch::Tensor x, int blocks) {
  auto y = torch::empty_like(x);
  if (blocks) twice<<<blocks, 32>>>(x.data_ptr<float>(), y.data_ptr<float>(), 0);
  return y;
}
torch::Tensor sum(torch::Tensor x) {
  auto y = torch::zeros({1}, x.options());
  add_all<<<2, 64>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}
"""


@pytest.fixture(scope="module")
def by_default():
    """Built with no wish for or against the checker, no #include and no headers precompiled."""
    if HAS_GPU:
        pytest.skip("about CUDA on a CPU: make test runs it")
    cuda.install()
    from torch.utils.cpp_extension import load_inline

    names = ["run", "through_memory_of_its_own", "sum", "eights", "rounded_down"]
    declared = [line for line in DEFAULT.splitlines() if line.startswith("torch::Tensor ")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_ON_CPU_CHECKED")
        patch.setattr(cuda_build, "_precompiled_header", lambda flags: [])
        declarations = "".join(line.replace(" {", ";\n") for line in declared)
        return load_inline("bare", declarations, DEFAULT, functions=names)


def test_by_default_a_small_overrun_is_an_error_and_not_a_crash(by_default, rand):
    x = rand(100)
    for run in (
        lambda: by_default.run(x, 2, 0),
        lambda: by_default.through_memory_of_its_own(x, 2, 0),
    ):
        for _ in range(20):
            with pytest.raises(cuda.KernelError) as error:
                run()
            message = str(error.value)
            assert "at element 100 of" in message and "with 100 elements" in message
            assert "thread (36,0,0) of block (1,0,0)\n  at bare.cu:5" in message
    # far before x the nearest tensor may be another one
    for start, place in (
        (-1, "element -1 of `x`"),
        (-(2**20), "out-of-bounds read .*\n  at bare.cu:5"),
    ):
        with pytest.raises(cuda.KernelError, match=place):
            by_default.run(x, 1, start)
    with pytest.raises(cuda.KernelError, match="race: .* of `y`"):
        by_default.sum(x)
    assert (
        by_default.run(x, 0, 0).tolist() == [0] * 100
    )  # a launch that fails is silent, as on a GPU
    with pytest.raises(cuda.KernelError, match="cudaMemcpy to memory that has 400 bytes .*: 404"):
        by_default.through_memory_of_its_own(x, 2, 4)


def test_by_default_a_result_that_is_written_in_part_is_an_error(by_default, rand):
    x = rand(96)
    assert torch.equal(by_default.rounded_down(x, 3), 2 * x)
    assert by_default.rounded_down(x, 0).shape == x.shape  # a workspace, as it seems
    with pytest.raises(
        cuda.KernelError, match="has 96 elements, and 32 of them nobody .* element 64"
    ):
        by_default.rounded_down(x, 2)


def test_by_default_groups_of_threads_cooperate(by_default, rand):
    x = rand(64)
    want = x.view(8, 8).sum(1, keepdim=True).expand(8, 8)
    torch.testing.assert_close(by_default.eights(x, 64).view(8, 8), want)
    with pytest.raises(
        cuda.KernelError, match="a shuffle reads lane 28 of its warp.*\n  at bare.cu:14"
    ):
        by_default.eights(x, 28)


def test_by_default_a_large_launch_is_checked_for_bounds_to_its_end(by_default, rand):
    x = rand(1 << 19)  # 2**20 accesses: half of them come after the full checks
    seconds, y = yardstick.cpu_seconds(lambda: by_default.run(x, 1 << 13, 0))
    assert torch.equal(y, 2 * x)
    assert seconds < yardstick.for_python(1.5)
    cuda.memory_traffic(by_default)
    assert torch.equal(by_default.through_memory_of_its_own(x, 1 << 13, 0), 2 * x)
    assert cuda.memory_traffic(by_default)[3:5] == (x.nbytes, x.nbytes)
    with pytest.raises(cuda.KernelError, match=f"element {len(x)} of .*\n  at bare.cu:5"):
        by_default.run(x, (1 << 13) + 1, 0)
    with pytest.raises(cuda.KernelError, match=f"element {len(x)} of .*\n  at bare.cu:5"):
        by_default.through_memory_of_its_own(x, (1 << 13) + 1, 0)


def test_without_cuda_sources_they_are_pytorchs(monkeypatch):
    def load_inline(*args, **kwargs):
        return "inline", args, kwargs

    def load(name, sources, verbose=False, *, more=None):
        return "files", name, sources, verbose, more

    extension = types.SimpleNamespace(load_inline=load_inline, load=load)
    monkeypatch.setattr(cuda, "HAS_GPU", False)
    monkeypatch.setattr(cuda, "_import_cpp_extension", lambda: extension)
    cuda.install()
    assert extension.load is load  # whoever imported it before has the new one too
    plain = load_inline("name", "int f() { return 1; }", functions=["f"])
    assert plain == ("inline", ("name", "int f() { return 1; }", None), {"functions": ["f"]})
    assert load("name", ["a.cpp"], True, more=1) == ("files", "name", ["a.cpp"], True, 1)
    assert load("name", "a.cpp") == ("files", "name", "a.cpp", False, None)


IMPORTED_FIRST = """
from torch.utils.cpp_extension import load, load_inline
import lib, pathlib, torch
folder = pathlib.Path(__file__).parent
module = load(name="lltm_cuda", sources=[str(folder / "lltm.cpp"), str(folder / "lltm_kernel.cu")])
y = module.forward(torch.ones(100))[0]
assert torch.equal(y, torch.full((100,), 2.0)), y
try:
    module.forward(torch.ones(100)[:50])
except RuntimeError as error:
    print(error)
"""
LLTM_CPP = """
#include <torch/extension.h>
#include <vector>
std::vector<torch::Tensor> lltm_cuda_forward(torch::Tensor x);
#define CHECK_INPUT(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
std::vector<torch::Tensor> lltm_forward(torch::Tensor x) {
  CHECK_INPUT(x);
  return lltm_cuda_forward(x);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &lltm_forward, "LLTM forward (CUDA); in one kernel");  // "backward" is missing
}
"""
LLTM_CU = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include "factor.h"
__global__ void twice(const float* __restrict__ gates, float* __restrict__ out) {
  out[threadIdx.x] = FACTOR * gates[threadIdx.x];
}
std::vector<torch::Tensor> lltm_cuda_forward(torch::Tensor x) {
  auto y = torch::zeros_like(x);
  twice<<<1, 100>>>(x.data_ptr<float>(), y.data_ptr<float>());
  return {y};
}
"""


@pytest.mark.skipif(HAS_GPU, reason="load is PyTorch's own where there is a GPU")
def test_files_are_built_also_where_load_was_imported_before_lib(tmp_path):
    """PyTorch's tutorial on extensions: a .cpp that binds with pybind11, and a .cu."""
    for name, text in [
        ("main.py", IMPORTED_FIRST),
        ("lltm.cpp", LLTM_CPP),
        ("lltm_kernel.cu", LLTM_CU),
        ("factor.h", "#define FACTOR 2.f"),
    ]:
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "main.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "element 50 of `gates`, a tensor with 50 elements" in result.stdout
    assert result.stdout.splitlines()[1] == "  at lltm_kernel.cu:6"


# ---- Builds ----------------------------------------------------------------------------------


def test_the_same_source_is_built_once(checked):
    build = functools.partial(
        cuda.load_cuda_on_cpu, CORRECT, FUNCTIONS, name="correct", checked=True
    )
    seconds, again = yardstick.cpu_seconds(build)
    assert seconds < yardstick.for_python(0.05)
    assert again is checked


def test_another_process_loads_what_is_built(plain):
    script = (
        "import pathlib, sys, time, lib\n"
        "from lib.nogpu import cuda\n"
        "source = pathlib.Path(sys.argv[1]).read_text()\n"
        "started = time.process_time()\n"
        "kernels = cuda.load_cuda_on_cpu(source, sys.argv[2].split(), 'correct', checked=False)\n"
        "kernels.add_relu\n"
        "print(time.process_time() - started)\n"
    )
    command = [sys.executable, "-c", script, str(SOURCES / "correct.cu"), " ".join(FUNCTIONS)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout.split()[-1]) for run in runs) <= yardstick.for_python(0.1)


def test_speed_of_a_cold_build(monkeypatch, tmp_path):
    """At most 20 s of CPU time, headers not yet precompiled."""
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_build, "_start_precompiling", lambda *_: None)
    source = (ROOT / "lib/ops/add_relu.cu").read_text()
    functions = ["add_relu_forward"]
    build = functools.partial(cuda.load_cuda_on_cpu, source, functions, name="cold")
    seconds, _ = yardstick.cpu_seconds(build)
    assert seconds <= yardstick.for_compiler(20)


def test_two_at_a_time_build_once(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path))
    compiled = []

    def slow_compile(text, library, *_):
        compiled.append(library)
        time.sleep(0.2)
        library.touch()

    monkeypatch.setattr(cuda_build, "_compile", slow_compile)
    build = functools.partial(cuda_build.build_library, "// text", "twice", source="")
    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    build()
    assert len(compiled) == 1


def test_the_key_covers_text_mode_and_compiler_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_build, "_compile", lambda text, library, *_: library.touch())
    build = functools.partial(cuda_build.build_library, name="k", source="")
    libraries = [build("a"), build("b"), build("a", checked=True), build("a", flags=["-DA"])]
    monkeypatch.setattr(cuda_build, "_headers_hash", lambda: "edited")
    libraries.append(build("a"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    libraries.append(build("a"))
    assert len(set(libraries)) == len(libraries)


def test_headers_are_precompiled_once_in_the_background(monkeypatch, tmp_path):
    compiler = tmp_path / "slow-g++"
    compiler.write_text(
        "#!/bin/sh\necho run >> $(dirname $0)/runs\nsleep 0.3\n"
        "while [ $1 != -o ]; do shift; done\ntouch $2\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path / "cache"))
    assert [cuda_build._precompiled_header(["-O2"]) for _ in range(3)] == [[], [], []]
    deadline = time.perf_counter() + 20
    while not (flags := cuda_build._precompiled_header(["-O2"])) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert flags[0] == "-include"
    assert Path(flags[1] + ".gch").exists()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_compile_errors_are_the_compilers_lines():
    source = (
        "#include <torch/types.h>\n__global__ void f(float* x) {\n  x[0] = undefined_name;\n}\n"
    )
    source += "void g(torch::Tensor x) { f<<<1, 1>>>(x.data_ptr<float>()); }\n"
    with pytest.raises(RuntimeError) as error:
        cuda.load_cuda_on_cpu(source, ["g"], name="typo", checked=True)
    text = str(error.value)
    assert text.startswith("typo.cu does not compile:\ntypo.cu:3:")
    assert "undefined_name" in text
    assert len(text.splitlines()) < 10


def test_compiler_errors_of_nvcc_and_ninja():
    output = (
        "Error building extension 'k': [1/2] /usr/local/cuda/bin/nvcc -c cuda.cu -o cuda.cuda.o\n"
        "FAILED: [code=1] cuda.cuda.o \n"
        "/usr/local/cuda/bin/nvcc --generate-dependencies-with-compile\n"
        'k.cu(7): warning #177-D: variable "i" was declared but never referenced\n'
        "    int i;\n"
        'k.cu(12): error: identifier "y" is undefined\n'
        "    y[0] = 1;\n"
        "    ^\n"
        '1 error detected in the compilation of "cuda.cu".\n'
        "ninja: build stopped: subcommand failed.\n"
    )
    expected = 'k.cu(12): error: identifier "y" is undefined\n    y[0] = 1;\n    ^'
    assert cuda_build.compiler_errors(output) == expected


def test_a_function_that_is_not_there():
    with pytest.raises(ValueError, match="kernels.cu defines no function g"):
        cuda.load_cuda_on_cpu("void f() {}", ["g"])


# ---- What is missing -------------------------------------------------------------------------


def test_a_missing_compiler_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(cuda, "HAS_GPU", False)
    assert cuda.why_no_cuda() is None
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert re.fullmatch(
        r"There is no C\+\+ compiler; install one with .*g\+\+.*\.", cuda.why_no_cuda()
    )
    with pytest.raises(cuda.ToolMissing, match="There is no C"):
        cuda.load_cuda("void f() {}", ["f"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler is not a program" in cuda.why_no_cuda()


def test_a_missing_nvcc_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(cuda, "HAS_GPU", True)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(cuda_toolkit, "_USUAL_NVCC", "/nowhere/nvcc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert re.search(
        r"no nvcc .* `pip install \"cuda-toolkit\[nvcc,nvvm,cccl,crt\].*` *\.$", cuda.why_no_cuda()
    )
    with pytest.raises(cuda.ToolMissing, match="no nvcc"):
        cuda.nvcc_check("__global__ void f() {}")


def test_the_toolkit_from_pip_is_found_and_linked(monkeypatch, tmp_path):
    version = torch.version.cuda.split(".")[0] if torch.version.cuda else "13"
    home = tmp_path / f"cu{version}"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "bin/nvcc").touch()
    (home / f"lib/libcudart.so.{version}").touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_HOME", "")  # put back afterwards, whatever use_pip_cuda makes of it
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with monkeypatch.context() as with_system_nvcc:
        with_system_nvcc.setattr("shutil.which", lambda name: str(home / "lib"))
        assert cuda.use_pip_cuda() is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(cuda_toolkit, "_USUAL_NVCC", "/nowhere/nvcc")
    if extension := sys.modules.get("torch.utils.cpp_extension"):
        monkeypatch.setattr(extension, "CUDA_HOME", extension.CUDA_HOME)
    assert cuda.use_pip_cuda() == str(home)
    assert os.environ["CUDA_HOME"] == str(home)
    assert (home / "lib/libcudart.so").resolve().name == f"libcudart.so.{version}"


needs_nvcc = pytest.mark.skipif(cuda_toolkit.find_nvcc() is None, reason="there is no nvcc")


@needs_nvcc
def test_nvcc_says_what_a_kernel_takes():
    source = """
    template <int N> __global__ void gather(float* x) {
      __shared__ float s[256];
      float v[N];
      for (int i = 0; i < N; ++i) v[i] = x[i];
      for (int i = 0; i < N; ++i) x[i] = v[int(x[i])];  // an index that only the run knows
      s[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      x[threadIdx.x] = s[255 - threadIdx.x];
    }
    template __global__ void gather<64>(float*);
    """
    (kernel,) = cuda.nvcc_check(source)
    assert kernel.kernel == "gather<64>"
    assert kernel.shared_bytes == 1024
    assert kernel.stack_bytes == 256
    assert 8 <= kernel.registers <= 255
    with pytest.raises(RuntimeError, match=r'kernels.cu\(1\): error: identifier "y"'):
        cuda.nvcc_check("__global__ void f() { y = 1; }")


def test_kernel_names_are_those_of_the_source():
    short = cuda_toolkit.short_kernel_name
    assert short("axpy(float, const float *)") == "axpy"
    assert short("void gather<(int)64>(float *)") == "gather<64>"
    assert (
        short("void ops::k<c10::Half, (bool)1>(ops::Vec<float, (int)4> *)")
        == "ops::k<c10::Half, 1>"
    )
    assert short("(anonymous namespace)::k(int)") == "(anonymous namespace)::k"


@needs_nvcc
@pytest.mark.parametrize("source", [CORRECT, BROKEN], ids=["correct", "broken"])
def test_nvcc_compiles_the_same_sources(source):
    kernels = {kernel.kernel for kernel in cuda.nvcc_check(source)}
    assert len(kernels) >= 15


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
def test_the_same_source_on_a_gpu(rand):
    kernels = cuda.load_cuda(CORRECT, FUNCTIONS, name="correct")
    x, y = rand(1027).cuda(), rand(1027).cuda()
    assert torch.equal(kernels.add_relu(x, y), torch.relu(x + y))
    x = rand(17, 33).cuda()
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, dim=1))
    torch.testing.assert_close(kernels.grid_sum(x), x.sum()[None], atol=1e-3, rtol=1e-4)
    assert cuda.load_cuda(CORRECT, FUNCTIONS, name="correct") is kernels


# ---- Translation -----------------------------------------------------------------------------

TRANSLATIONS = [
    (
        "kernel<<<grid, block>>>(x, y);",
        '::cuda_on_cpu::Launch(grid, block).kernel("kernel", "", [&](auto... a_) { kernel(a_...); })(x, y);',
    ),
    (
        "ops::kernel<float, 4><<<1, 32, 0, stream>>>(x);",
        '::cuda_on_cpu::Launch(1, 32, 0, stream).kernel("ops::kernel<float, 4>", "", '
        "[&](auto... a_) { ops::kernel<float, 4>(a_...); })(x);",
    ),
    (
        "__shared__ float part[32];",
        "static ::cuda_on_cpu::SharedSlot part_slot_; "
        'auto& part = part_slot_.get<float[32]>("part");',
    ),
    (
        "__shared__ __align__(128) float a[T][T], b[T][T + 1];",
        'static ::cuda_on_cpu::SharedSlot a_slot_; auto& a = a_slot_.get<float[T][T], 128>("a"); '
        'static ::cuda_on_cpu::SharedSlot b_slot_; auto& b = b_slot_.get<float[T][T+1], 128>("b");',
    ),
    (
        "extern __shared__ float bins[];",
        'float* bins = ::cuda_on_cpu::dynamic_slot.get_dynamic<float>("bins");',
    ),
    (
        "template <int N> __global__ void k(const float* __restrict__ x_ptr, int (*f)(int), int n[]) {}\n"
        "k<3><<<1, 2>>>(x);",
        "template <int N> __global__ void k(const float* __restrict__ x_ptr, int (*f)(int), int n[]) {}\n"
        '::cuda_on_cpu::Launch(1, 2).kernel("k<3>", "x_ptr,,n", [&](auto... a_) { k<3>(a_...); })(x);',
    ),
    ("cudaMalloc((void**)&d, n);", "cudaMalloc(&d, n);"),
    ("cudaMallocHost(reinterpret_cast<void **>(&d), n);", "cudaMallocHost((&d), n);"),
    ("f(x.data_ptr<float>())", "f(::cuda_on_cpu::noted(x).data_ptr<float>())"),
    ("f(a(b)[0].grad().data_ptr())", "f(::cuda_on_cpu::noted(a(b)[0].grad()).data_ptr())"),
    ("p->x.const_data_ptr<at::Half>()", "::cuda_on_cpu::noted(p->x).const_data_ptr<at::Half>()"),
    ("x.packed_accessor32<float, 2>()", "::cuda_on_cpu::noted(x).packed_accessor32<float, 2>()"),
    (
        "k<<<1, 2, 0, s>>>(NULL);",
        '::cuda_on_cpu::Launch(1, 2, 0, s).kernel("k", "", [&](auto... a_) { k(a_...); })(nullptr);',
    ),
    (
        "__shared__ union { float f[2]; int i[2]; } u;",
        "union u_type_ { float f[2]; int i[2]; }; "
        'static ::cuda_on_cpu::SharedSlot u_slot_; auto& u = u_slot_.get<u_type_>("u");',
    ),
    (
        "auto y = torch::empty({n, f(m)}, options);",
        "auto y = ::cuda_on_cpu::made_empty(torch::empty({n, f(m)}, options));",
    ),
    (
        "auto y = f(x)[0].new_empty({3}).fill_(1);",
        "auto y = ::cuda_on_cpu::made_empty(f(x)[0].new_empty({3})).fill_(1);",
    ),
    ("TORCH_CHECK(x.is_cuda());", "TORCH_CHECK(x.is_cpu());"),
    ("x.device().type() == at::kCUDA", "x.device().type() == at::kCPU"),
    ("TORCH_LIBRARY_IMPL(ops, CUDA, m)", "TORCH_LIBRARY_IMPL(ops, CPU, m)"),
    ('// k<<<1, 1>>>(); __shared__ int x;\nputs("kCUDA");', None),
    ("/* x.data_ptr<float>() */ int n = 1'000'000;", None),
]


@pytest.mark.parametrize(("source", "expected"), TRANSLATIONS)
def test_translate(source, expected):
    assert translate(source) == (source if expected is None else expected)


@pytest.mark.parametrize("source", [CORRECT, BROKEN, OP_FILE])
def test_every_line_keeps_its_number(source):
    before, after = source.split("\n"), translate(source).split("\n")
    assert len(before) == len(after)
    untouched = r"#include|__global__|__syncthreads|torch::empty|return|for \(|C10_CUDA"
    for old, new in zip(before, after):
        if re.search(untouched, old) and not re.search(r"kCUDA|<<<|data_ptr|__shared__|empty", old):
            assert old == new


def test_a_launch_over_several_lines_keeps_them():
    source = "kernel<float,\n       4>\n    <<<dim3(1),\n       32>>>(\n        x);\nreturn;"
    result = translate(source)
    assert result.count("\n") == source.count("\n")
    assert result.split("\n")[4].strip() == "x);"
    assert '.kernel("kernel<float, 4>"' in result.split("\n")[1]


def test_the_functions_of_a_pybind11_module():
    module = 'PYBIND11_MODULE(NAME, m) {\n  m.def("f", &ns::f, "a; b");\n  m.def("g", g);\n}'
    assert without_pybind11(f"a;\n{module}\nb;") == ("a;\n\n\n\n\nb;", {"f": "ns::f", "g": "g"})
    more = module.replace("m.def(", "py::class_<A>(", 1)
    assert without_pybind11(more) == (more, {})
    with pytest.raises(cuda.NotOnCpu, match="PYBIND11_MODULE"):
        translate(more)


def test_namespaces_of_a_source():
    assert namespaces_of(OP_FILE) == ["cuda_on_cpu_test"]
    assert namespaces_of("// TORCH_LIBRARY(no, m)\nTORCH_LIBRARY_FRAGMENT(yes, m) {}") == ["yes"]


REFUSED = [
    ('asm volatile("mov.u32 %0, %laneid;" : "=r"(x));', "inline PTX"),
    ("#include <mma.h>", "wmma"),
    ("nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;", "wmma"),
    ("__pipeline_memcpy_async(a, b, 16);", "cp.async"),
    ("cudaLaunchCooperativeKernel(f, 2, 32, args);", "a cooperative launch"),
    ("#include <cub/cub.cuh>", "CUB"),
    ("__global__ void __cluster_dims__(2, 1, 1) k() {}", "cluster"),
    ("void f(cudaTextureObject_t t);", "texture"),
    ("cuda::barrier<cuda::thread_scope_block> b;", "libcu"),
    ("curandStatePhilox4_32_10_t state;", "cuRAND"),
]


@pytest.mark.parametrize(("line", "construct"), REFUSED)
def test_what_needs_a_gpu_is_refused_with_its_line(line, construct):
    with pytest.raises(cuda.NotOnCpu) as error:
        cuda.load_cuda_on_cpu(f"// first\n\n{line}\nvoid f() {{}}", ["f"], name="fancy")
    message = str(error.value)
    assert message.startswith("fancy.cu line 3: ")
    assert construct in message
    assert message.endswith("or use a machine with a GPU.")
    assert message.count("\n") == 0


def test_what_the_cpu_never_sees_is_not_refused():
    hidden = 'asm("exit;");'
    translate(f"// {hidden}")
    translate(f'const char* s = "cooperative_groups";\n#ifndef CUDA_ON_CPU\n{hidden}\n#endif')
    translate(f"#ifdef CUDA_ON_CPU\nx = 1;\n#else\n#if 1\n{hidden}\n#endif\n#endif")
    with pytest.raises(cuda.NotOnCpu, match="line 4"):
        translate(f"#ifdef CUDA_ON_CPU\nx = 1;\n#endif\n{hidden}")
