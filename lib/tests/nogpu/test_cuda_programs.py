"""CUDA programs of others: each planted mistake is found with its line, correct programs pass."""

import math
import re
from pathlib import Path

from lib import machine
from lib.nogpu import cuda, cuda_build, cuda_toolkit

import pytest
import torch
import torch.nn.functional as F

SOURCES = Path(__file__).parent / "cuda"
PLANTED = (SOURCES / "planted.cu").read_text()
IDIOMS = (SOURCES / "idioms.cu").read_text()

pytestmark = [
    pytest.mark.skipif(
        cuda_build.why_no_compiler() is not None, reason=str(cuda_build.why_no_compiler())
    ),
    pytest.mark.skipif(machine.HAS_GPU, reason="about CUDA on a CPU: make test runs it"),
]

# In the order of run()'s cases: the mark of the line, and what the message says.
MISTAKES = [
    ("shuffle_after_return", "shuffle reads lane 16 of its warp, which has returned"),
    ("barrier_after_return", "14 of 64 threads of the block never reach"),
    ("barrier_of_one_warp", "32 of 64 threads of the block never reach"),
    ("barrier_in_uneven_loop", "28 of 64 threads of the block never reach"),
    ("mask_without_the_lane", "0x0000000f of a warp intrinsic lacks the calling lane"),
    ("two_masks", "with different masks"),
    ("add_all", "read of element 0 of .* a tensor .* nobody has written"),
    ("add_one", "read of element 100 of .* a tensor .* nobody has written"),
    ("copy", "a tensor of 1024 elements that has been freed: a temporary"),
    ("pointer_to_a_local", "local variables of another thread"),
    ("into_the_next_array", "element 64 of shared memory `a` with 64 elements"),
    ("partials_of_warps_that_are_not", "uninitialised element 2 of shared memory `part`"),
    ("workspace_unread", "nobody has written since it was allocated"),
    ("vectors_past_the_end", "read of 16 bytes at element 100 of .* a tensor with 102 elements"),
    ("narrow_index", "element -128 of .* a tensor"),
    ("last_bin", "element 8 of shared memory `bins` with 8 elements"),
    ("tile_past_the_edge", "element 400 of .* a tensor with 400 elements"),
    ("halo", "element -1 of .* a tensor with 1024 elements"),
    ("local_array", r"index 4 is out of bounds for 'float \[4\]'"),
    ("odd_pair", "needs an address that is a multiple of 4, this one is 2 past one"),
    ("shift_in_place", "race: .* write of element 1 of .* a tensor"),
    ("bins_without_atomics", "race: .* shared memory `bins`"),
    ("scan_in_place", "race: .* shared memory `row`"),
    ("one_after_the_other", "race: .* write of element 0 of shared memory `part` from the read"),
    ("total_without_barrier", "race: .* shared memory `total`"),
    ("blocks_share_rows", "race between thread blocks: .* write of element 0"),
    ("half_warp_meets_the_wrong_half", "uninitialised element 16 of shared memory `row`"),
    ("registers_forever", "still running after the time limit"),
    ("lock_of_a_warp", "still running after the time limit|waits for ever"),
    ("divides_by_zero", "an integer is divided by zero"),
    ("traps", r"__trap\(\), thread \(37,0,0\)"),
    ("too_much_shared", "60000 bytes of dynamic shared memory; the limit is 49152"),
    ("too_many_rows", r"a grid of \(1,70000,1\) thread blocks"),
    ("null", "read of 4 bytes through a null pointer"),
]


@pytest.fixture(scope="module")
def planted():
    return cuda.load_cuda_on_cpu(PLANTED, ["run"], name="planted", checked=True)


@pytest.mark.parametrize("case", range(len(MISTAKES)), ids=[name for name, _ in MISTAKES])
def test_a_planted_mistake_is_found_in_its_line(planted, monkeypatch, case):
    monkeypatch.setenv("CUDA_ON_CPU_TIMEOUT", "1")
    mark, message = MISTAKES[case]
    x = torch.linspace(0, 0.5, 1024)
    x[37] = 1.0 if mark == "last_bin" else 1000.0
    with pytest.raises(cuda.KernelError, match=message) as error:
        planted.run(x, case)
    lines = PLANTED.splitlines()
    (line,) = [k for k, text in enumerate(lines, 1) if re.search(rf"BUG {mark}\b", text)]
    assert str(error.value).endswith(f"\n  at planted.cu:{line}")


def test_a_kernel_that_never_ends_has_its_line_wherever_it_is_stopped(planted, monkeypatch):
    """In its own code, in an atomic operation, between two threads: where the alarm finds it."""
    case = [mark for mark, _ in MISTAKES].index("lock_of_a_warp")
    for k in range(25):
        monkeypatch.setenv("CUDA_ON_CPU_TIMEOUT", str(0.01 + k * 1e-5))
        with pytest.raises(cuda.KernelError, match=r"\n  at planted.cu:\d+$"):
            planted.run(torch.zeros(1024), case)


def half_warps(x):
    rows = x[:64].view(4, 16)
    return (rows.roll(-1, 1) + rows).flip(1)


def special_functions(x):
    periodic = torch.sin(torch.pi * x) + torch.cos(torch.pi * x) + x.sin() / 3
    return periodic + (1 + x * x) ** (-1 / 3) + (9 + x.cos() ** 2).rsqrt() + (1 + x * x).sqrt()


# In the order of run()'s cases: what is right.
PROGRAMS = {
    "memory_of_its_own": lambda x: 2 * x,
    "launched_by_occupancy": lambda x: 3 * x,
    "accessors": lambda x: x.view(10, 100)[:, :50] * x.view(10, 100)[:, 50:].sigmoid(),
    "compare_and_swap": lambda x: torch.stack([x.max(), x.sum()]),
    "max_in_shared_memory": lambda x: x.view(4, 250).amax(1, keepdim=True).expand(4, 250),
    "one_value_from_many": lambda x: torch.ones(1),
    "compact": lambda x: x.clamp_min(0).sort().values,
    "spin_lock": lambda x: x[:100].sum()[None],
    "privatised_histogram": lambda x: torch.bincount((8 + 4 * x).clamp(0, 15).int(), minlength=16),
    "sum_of_blocks": lambda x: x.sum()[None],
    "two_half_warps": half_warps,
    "groups_of_eight": lambda x: x[:64].view(8, 8).sum(1, keepdim=True).expand(8, 8),
    "lanes_that_vote_themselves_in": lambda x: x[:20].cumsum(0),
    "arg_max": lambda x: x.view(10, 100).argmax(1),
    "matrix_times_vector": lambda x: x.view(8, 125) @ x[:125],
    "scan_two_buffers": lambda x: x[:128].cumsum(0) - x[:128],
    "scan_up_and_down": lambda x: x[:128].cumsum(0) - x[:128],
    "transpose": lambda x: x[:900].view(30, 30).t(),
    "convolution": lambda x: F.conv1d(x[None], torch.tensor([[[1.0, -2, 3, -2, 1]]]), padding=2),
    "bitonic_sort": lambda x: x[:128].sort().values,
    "tiles_in_turns": lambda x: x[:640].view(10, 64).flip(1).sum(0),
    "memory_used_twice": lambda x: x[:64].sort().values,
    "welford": lambda x: F.layer_norm(x.view(4, 250), (250,)),
    "online_softmax": lambda x: x.view(4, 250).softmax(1),
    "half_functions": lambda x: F.silu(x.half()),
    "dot_of_bytes": lambda x: ((x * 40).char().int() ** 2).sum()[None],
    "special_functions": special_functions,
    "many_tensors": lambda x: x + 1,
    "gather": lambda x: x.view(10, 100)[[3, 0, 9, 3]],
    "copy_of_columns": lambda x: x.view(10, 100)[:, :20],
}


@pytest.fixture(scope="module", params=["plain", "checked"])
def idioms(request):
    checked = request.param == "checked"
    return cuda.load_cuda_on_cpu(IDIOMS, ["run"], name="idioms", checked=checked)


@pytest.mark.parametrize("case", range(len(PROGRAMS)), ids=list(PROGRAMS))
def test_a_correct_program_is_right_and_let_alone(idioms, case):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    want = list(PROGRAMS.values())[case](x)
    got = idioms.run(x, case)
    torch.testing.assert_close(got.float().flatten(), want.float().flatten(), rtol=1e-3, atol=2e-4)


@pytest.mark.skipif(cuda_toolkit.find_nvcc() is None, reason="there is no nvcc")
@pytest.mark.parametrize("source", [PLANTED, IDIOMS], ids=["planted", "idioms"])
def test_nvcc_compiles_them_too(source):
    assert len(cuda.nvcc_check(source)) >= 25


UNINITIALIZED = """
#include <torch/types.h>
__global__ void sum(const float* x, float* y) {
  float s;
  s += x[threadIdx.x];
  y[threadIdx.x] = s;
}
__global__ void scatter(const float* x, float* y, int n) {
  int k;
  if (n > 100) k = threadIdx.x;
  y[k] = x[threadIdx.x];
}
torch::Tensor run(torch::Tensor x, bool as_index) {
  auto y = torch::zeros_like(x);
  int n = x.numel();
  if (as_index) {
    scatter<<<1, n>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  } else {
    sum<<<1, n>>>(x.data_ptr<float>(), y.data_ptr<float>());
  }
  return y;
}
"""


def test_an_uninitialized_local_shows():
    if not cuda_build._takes("-ftrivial-auto-var-init=pattern", *cuda_build.find_compiler()):
        pytest.skip("the compiler is too old")
    kernels = cuda.load_cuda_on_cpu(UNINITIALIZED, ["run"], name="uninitialized", checked=True)
    y = kernels.run(torch.ones(8), False)
    assert not (y.abs() < 1e30).any()  # NaN with clang
    with pytest.raises(cuda.KernelError, match="scatter: out-of-bounds write of 4 bytes"):
        kernels.run(torch.ones(8), True)


def test_a_flag_that_the_compiler_lacks_is_left_out():
    assert not cuda_build._takes("-fno-such-flag", *cuda_build.find_compiler())


def test_a_name_that_only_a_gpu_has_gets_a_hint():
    source = "void f() { erfinvf(1); }"
    with pytest.raises(RuntimeError, match="If erfinvf is CUDA's, the CPU build does not"):
        cuda.load_cuda_on_cpu(source, ["f"], name="inverse")


@pytest.mark.parametrize(
    ("name", "gets_one"),
    [("cudaProfilerStart", True), ("cyl_bessel_i0f", True), ("erfcx", True), ("normcdfinvf", True),
     ("rnorm4df", True), ("ullmax", True), ("__vabs2", True), ("erfcinvg", False), ("minus", False)],
)  # fmt: skip
def test_only_names_of_cuda_get_a_hint(name, gets_one):
    error = f"k.cu:1:12: error: '{name}' was not declared in this scope; did you mean 'rintf'?"
    assert bool(cuda_build._missing_here(error)) == gets_one


@pytest.mark.parametrize(
    ("name", "hint"),
    [("__sinhf", "\nIf __sinhf is CUDA's, the CPU build does not"), ("of_mine", "$")],
)
def test_a_function_that_is_only_declared_is_named(name, hint):
    source = f'extern "C" float {name}(float); float f(float x) {{ return {name}(x); }}'
    source += "\nint64_t g() { return f(1); }"
    with pytest.raises(
        RuntimeError, match=rf"fancy.cu calls {name}, which is declared but not defined\.{hint}"
    ):
        cuda.load_cuda_on_cpu(source, ["g"], name="fancy", checked=True)


def test_tanh_has_an_intrinsic():
    """glibc declares a function of its name, so that it compiles without being here."""
    source = "#include <torch/extension.h>\ndouble f(double x) { return __tanhf(x); }"
    kernels = cuda.load_cuda_on_cpu(source, ["f"], checked=True)
    assert kernels.f(0.5) == pytest.approx(math.tanh(0.5))


REFUSED = [
    ("int v = __vadd4(a, b);", "packed bytes"),
    ("#include <cublas_v2.h>", "CUDA library"),
    ("cudaGraph_t graph;", "CUDA graph"),
]


@pytest.mark.parametrize(("line", "construct"), REFUSED)
def test_more_that_needs_a_gpu_is_refused_with_its_line(line, construct):
    with pytest.raises(cuda.NotOnCpu, match=rf"fancy.cu line 2: .*{construct}"):
        cuda.load_cuda_on_cpu(f"\n{line}\nvoid f() {{}}", ["f"], name="fancy")
