"""Exercises of notebook 24, threads of CUDA that work together."""

import re

from lib.exercises import attempted, case, exercise, expect
from lib.exercises.nb04 import NAN, built_for_cpu, expect_cuda_kernel, expect_equal
from lib.measure.check import check_against_float64
from lib.nogpu import cuda

import torch

# --- 24.1 ----------------------------------------------------------------------------------------------------

_WIDE_HOST = """
void add(torch::Tensor x, torch::Tensor residual, torch::Tensor y) {
  const int64_t n = x.numel(), blocks = (n / 4 + 127) / 128;
  add_kernel<<<blocks > 0 ? blocks : 1, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), residual.data_ptr<float>(), y.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""


@exercise("24.1", "Sixteen bytes, and a tail", minutes=20, level=2)
def check_wide_kernel(kernel):
    code = expect_cuda_kernel(kernel, "wide_kernel", "add_kernel")
    yours = built_for_cpu(kernel + _WIDE_HOST, ["add"])
    for n in (1, 3, 4, 7, 128, 511, 512, 513, 514, 515, 516, 1031):
        at = f"at n = {n}"
        x, residual = torch.randn(n), torch.randn(n)
        x[n // 2] = NAN
        with case(at):
            cuda.memory_traffic(yours)
            y = torch.full((n,), -1.0)
            yours.add(x, residual, y)
        expect_equal(y, torch.relu(x + residual), at, "y")
        read = cuda.memory_traffic(yours).bytes_read
        most = x.nbytes + residual.nbytes
        expect(read <= most, f"{at}: {read} bytes are read, and x and residual have {most}")
    wide = re.search(r"\b(float4|int4|uint4|double2|longlong2|ulonglong2|alignas\s*\(16\))", code)
    for what in ("x", "residual", "y"):
        expect(
            wide and _is_wide(yours, code, what),
            f"the numbers are right, but {what} does not move 16 bytes at a time; use a float4 pointer for it",
        )


def _is_wide(yours, code, what):
    """Whether this tensor moves 16 bytes at a time: 4 bytes off, such an access is an error of its own."""
    tensors = {"x": torch.randn(64), "residual": torch.randn(64), "y": torch.empty(64)}
    tensors[what] = torch.cat([tensors[what], torch.zeros(1)])[1:]
    x, residual, y = tensors.values()
    try:
        yours.add(x, residual, y)
    except RuntimeError as error:
        return "misaligned" in str(error)
    looks = re.search(
        r"[%&]\s*(16|15|0x0*f|sizeof|alignof)\b", code
    )  # at addresses, as a host would
    return looks and torch.equal(y, torch.relu(x + residual))


# --- 24.2 ----------------------------------------------------------------------------------------------------

_DBIAS_HOST = """
torch::Tensor dbias(torch::Tensor dy, torch::Tensor y) {
  auto dbias = torch::empty({y.size(1)}, y.options());
  dbias_kernel<<<(y.size(1) + 31) / 32, dim3(32, 8), 0, c10::cuda::getCurrentCUDAStream()>>>(
      dy.data_ptr<float>(), y.data_ptr<float>(), dbias.data_ptr<float>(), y.size(0), y.size(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return dbias;
}
"""


@exercise("24.2", "Eight threads, one sum", minutes=25, level=2)
def check_dbias_kernel(kernel):
    code = expect_cuda_kernel(kernel, "dbias_kernel", "dbias_kernel")
    expect("atomic" not in code, "atomic additions come in any order; add in a fixed one")
    yours = built_for_cpu(kernel + _DBIAS_HOST, ["dbias"])
    for shape in [(1, 1), (2, 3), (8, 32), (5, 7), (17, 33), (130, 70)]:
        at = f"at {shape[0]}×{shape[1]}"
        y = torch.randn(shape).relu()
        y[0, 0] = 0.0
        dy = torch.randn(shape).mul(8).round() + 1  # sums of whole numbers are exact in any order
        with case(at):
            cuda.memory_traffic(yours)
            got = attempted(yours.dbias(dy, y))
        expect_equal(got, torch.where(y > 0, dy, 0.0).sum(0), at, "dbias")
        read = cuda.memory_traffic(yours).bytes_read
        expect(
            read <= 2 * y.nbytes, f"{at}: {read} bytes are read, and dy and y have {2 * y.nbytes}"
        )
    _expect_rows_shared(yours)
    dy, y = torch.tensor([[torch.inf], [1.0]]), torch.tensor([[0.0], [1.0]])
    with case("with an inf in dy where y is 0"):
        got = yours.dbias(dy, y)
    expect_equal(got, torch.tensor([1.0]), "with an inf in dy where y is 0", "dbias")
    expect(
        "__shared__" in code and "threadIdx.y" in code,
        "the sums are right; let the eight threads of a column share the rows, and add up in shared memory",
    )


def _expect_rows_shared(yours):
    dy, y = torch.ones(2, 128, 32)
    cuda.memory_traffic(yours)
    yours.dbias(dy, y)
    most = cuda.memory_traffic(yours).most_read_by_a_thread // 8  # bytes of dy and y for a row
    expect(
        most <= 16,
        f"the sums are right, but a thread has {most} of 128 rows; let a column's eight share them",
    )


# --- 24.3 ----------------------------------------------------------------------------------------------------

_PLACE_HOST = """
torch::Tensor place(torch::Tensor x) {
  auto place = torch::empty({x.size(0)}, x.options().dtype(torch::kInt));
  place_kernel<<<(x.size(0) + 3) / 4, dim3(32, 4), 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), place.data_ptr<int>(), x.size(0), int(x.size(1)));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return place;
}
"""


@exercise("24.3", "A maximum and its place", minutes=15, level=2)
def check_place_kernel(kernel):
    code = expect_cuda_kernel(kernel, "place_kernel", "place_kernel")
    expect("__shared__" not in code, "no shared memory; let the threads of a warp shuffle")
    yours = built_for_cpu(kernel + _PLACE_HOST, ["place"])

    def right(x, at):
        first = (x == x.amax(1, keepdim=True)).int().argmax(1).int()
        with case(at):
            cuda.memory_traffic(yours)
            place = attempted(yours.place(x))
        expect_equal(place, first, at, "place")
        read = cuda.memory_traffic(yours).bytes_read
        expect(read <= x.nbytes, f"{at}: {read} bytes are read, and x has {x.nbytes}")

    for shape in [(1, 1), (1, 2), (2, 3), (4, 32), (5, 7), (7, 33), (17, 100), (3, 781)]:
        right(torch.randn(shape), f"at {shape[0]}×{shape[1]}")
        right(torch.randn(shape).round(), f"at {shape[0]}×{shape[1]}, with equal numbers")
        right(torch.ones(shape), f"at {shape[0]}×{shape[1]}, with all numbers equal")
    right(torch.full((3, 5), -torch.inf), "with a row of -inf")
    right(torch.full((3, 50), -torch.inf), "with a long row of -inf")
    right(torch.tensor([[-3e38, -torch.inf, -2e38, -2.5e38]]), "with large negative numbers")
    expect("_sync(" in code, "the places are right; let the threads of a warp shuffle")


# --- 24.4 ----------------------------------------------------------------------------------------------------

_NORMALIZE_HOST = """
torch::Tensor normalize(torch::Tensor x, int64_t threads) {
  auto y = torch::empty_like(x);
  normalize_kernel<<<x.size(0), threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), x.size(1), 1e-5f);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


def _normalize_eager(x):
    return torch.nn.functional.layer_norm(x, x.shape[1:], eps=1e-5)


@exercise("24.4", "Two sums through one array", minutes=25, level=3)
def check_normalize_kernel(kernel):
    code = expect_cuda_kernel(kernel, "normalize_kernel", "normalize_kernel")
    yours = built_for_cpu(kernel + _NORMALIZE_HOST, ["normalize"])
    for rows, cols, threads in [
        (1, 1, 32),
        (2, 3, 32),
        (3, 7, 64),
        (2, 96, 96),
        (5, 33, 256),
        (3, 781, 128),
        (2, 1031, 1024),
    ]:
        at = f"at {rows}×{cols} with blocks of {threads} threads"
        near, far = torch.randn(rows, cols), torch.randn(rows, cols)
        far[:, 0] += 1000
        for what, x in {
            "0": near,
            "30": near + 30,
            "0, but for a first number of 1000": far,
        }.items():
            with case(at):
                y = attempted(yours.normalize(x, threads))
            what = f"{at}, rows around {what}"
            # the order of a sum moves the mean by its last bits, which near 30 count beside a small deviation
            moved = 2e-7 * x.mean(1).abs() / (x.var(1, correction=0) + 1e-5).sqrt()
            slack = 1e-6 + moved.max().item()
            check_against_float64(lambda x, y=y: y, _normalize_eager, x, slack=slack, name=what)
    expect("atomic" not in code, "atomic additions come in any order; add in a fixed one")
    expect(
        "__shfl" in code and "__shared__" in code,
        "the numbers are right; let the warps shuffle first, and then go through shared memory",
    )
    n_shared = cuda.memory_traffic(yours).shared_bytes // 4
    expect(
        n_shared < 1024,  # 32 warps, and room for two sums and what is sent back
        f"the numbers are right, with {n_shared} in shared memory; a warp that shuffles first leaves one there",
    )
