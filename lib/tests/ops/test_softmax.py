"""What is particular to softmax: traffic, rows of every length and kind, 16-byte accesses, its CUDA code."""

import re

from lib import machine
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import softmax
from lib.recorded.results import ROOT

import pytest
import torch

VERSIONS = [softmax.softmax_triton, softmax.softmax_cuda][: 1 if cuda.why_no_cuda() else 2]
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda v: v.__name__)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INF, NAN = float("inf"), float("nan")

# Short rows, several to a program; whole tiles; widths that put rows off 16-byte boundaries; one row a program.
IN_ONE_TILE = [(1000, 3), (33, 16), (96, 640), (99, 781), (17, 2049), (4, 8192), (3, 20001)]
IN_PARTS = [(2, 40000), (3, 70001)]
LENGTHS = [
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    1023,
    1024,
    1025,
    8191,
    16385,
    32767,
    32768,
    32769,
    65537,
    262144,
]


def rows(shape, dtype=torch.float32, scale=3):
    generator = torch.Generator(machine.device()).manual_seed(0)
    x = scale * torch.randn(shape, device=machine.device(), generator=generator)
    return x.to(dtype).requires_grad_()


# --- traffic and launches ----------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("shape", IN_ONE_TILE, ids=str)
def test_forward_reads_x_once_and_writes_y_once(shape, dtype):
    x = rows(shape, dtype).detach()
    traffic = count_traffic(lambda: softmax.softmax_triton(x))
    assert traffic.launches == 1
    assert traffic.bytes_moved == traffic.bytes_requested == 2 * x.nbytes


@both_dtypes
@pytest.mark.parametrize("shape", IN_ONE_TILE[:-1], ids=str)
def test_backward_reads_two_tensors_and_writes_one(shape, dtype):
    y = softmax.softmax_triton(rows(shape, dtype))
    dy = torch.randn_like(y)
    traffic = count_traffic(lambda: y.backward(dy))
    assert traffic.launches == 1
    assert traffic.bytes_moved == traffic.bytes_requested == 3 * y.nbytes


@both_dtypes
@pytest.mark.parametrize("shape", IN_PARTS, ids=str)
def test_parts_of_a_row_read_it_once(shape, dtype):
    """Rows too long for one program. The interpreter, where programs cannot wait for each other, launches the
    kernel twice, once for each side of the waiting, and each of them reads the row. On a GPU the second of
    them does not exist, as the tile stays in registers; so what is read once here is once a launch."""
    if machine.HAS_GPU:
        pytest.skip("compiled for waiting, this kernel would wait for ever in the interpreter")
    x = rows(shape, dtype)
    forward = count_traffic(lambda: softmax.softmax_triton(x.detach()))
    y = softmax.softmax_triton(x)
    dy = torch.randn_like(y)
    backward = count_traffic(lambda: y.backward(dy))
    assert (forward.launches, backward.launches) == (2, 2)
    _expect_one_pass(forward, {"x_ptr": 2}, {"y_ptr": 1}, x.nbytes)
    _expect_one_pass(backward, {"dy_ptr": 2, "y_ptr": 2}, {"dx_ptr": 1}, x.nbytes)


def _expect_one_pass(traffic, loaded, stored, nbytes):
    """Times nbytes that each argument was loaded and stored; what parts tell each other is next to nothing."""
    for name, seen in traffic.by_argument.items():
        argument = name.split(".")[1]
        if argument in loaded or argument in stored:
            assert seen.loaded == seen.loaded_distinct == loaded.get(argument, 0) * nbytes, name
            assert seen.stored == seen.stored_distinct == stored.get(argument, 0) * nbytes, name
        else:
            assert seen.loaded_distinct + seen.stored_distinct < 0.01 * nbytes, name


def test_short_rows_share_a_program():
    x = rows((1024, 16)).detach()
    assert count_traffic(lambda: softmax.softmax_triton(x)).programs <= 1024 / 16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*IN_ONE_TILE, *IN_PARTS], ids=str)
def test_one_kernel_on_a_gpu(shape):
    from lib.measure import bench

    x = rows(shape).detach()
    for version in VERSIONS:
        names = bench.kernels_launched(lambda version=version: version(x))
        ours = [n for n in names if "softmax" in n or "per_row" in n]
        assert len(ours) == 1, names
        # parts of a row need a counter, which something has to set to zero
        assert len(names) <= 2, names


# --- rows of every length and kind -------------------------------------------------------------------------


@versions
@both_dtypes
@pytest.mark.parametrize("n_cols", LENGTHS)
def test_every_length(version, dtype, n_cols):
    check_against_float64(version, softmax.softmax_eager, rows((2, n_cols), dtype))


@versions
@pytest.mark.parametrize("n_cols", [1, 3, 40, 781, 1300])
def test_kinds_of_rows(version, n_cols):
    """NaN, +inf and rows of -inf are NaN all over; -inf beside numbers is 0; equal numbers share."""
    x = rows((9, n_cols)).detach()
    x[0] = -INF
    x[1, n_cols // 2] = NAN
    x[2, -1] = INF
    x[3, : n_cols - 1] = -INF
    x[4] = torch.finfo(torch.float32).max
    x[5] = torch.finfo(torch.float32).min
    x[6, : n_cols // 2] = -INF
    x[7] = -INF
    x[7, 0] = NAN
    y = version(x)
    assert y[[0, 1, 2, 7]].isnan().all()
    assert torch.equal(y[3], torch.eye(n_cols, device=x.device)[-1])
    torch.testing.assert_close(y[[4, 5]], torch.full_like(y[[4, 5]], 1 / n_cols))
    assert not y[6, : n_cols // 2].any()
    check_against_float64(version, softmax.softmax_eager, x)


def test_kinds_of_rows_in_parts():
    """Parts that are all -inf beside others, before and behind them; and rows of nothing else."""
    x = rows((4, 40000)).detach()
    x[0] = -INF
    x[1, :20000] = -INF
    x[2, 20000:] = -INF
    x[3, :-1] = -INF
    check_against_float64(softmax.softmax_triton, softmax.softmax_eager, x)
    x[1, -1], x[2, 0] = NAN, INF
    assert softmax.softmax_triton(x)[:3].isnan().all()


@versions
@pytest.mark.parametrize("offset", [-1e4, 90.0, 1e4])
def test_large_numbers_do_not_overflow(version, offset):
    """exp(90) is more than float32 has; only differences to the maximum may reach exp."""
    x = rows((5, 100)).detach().round()  # so that nothing is rounded when the offset is added
    torch.testing.assert_close(version(x + offset), version(x))


@versions
def test_rows_sum_to_one_and_their_gradients_to_zero(version):
    x = rows((33, 781))
    y = version(x)
    torch.testing.assert_close(y.sum(-1), torch.ones_like(y[:, 0]))
    y.backward(torch.randn_like(y))
    assert x.grad.sum(-1).abs().max() < 1e-5


@versions
def test_the_gradient_of_a_constant_is_zero(version):
    """A constant added to a row changes nothing: so a constant dy gives no gradient."""
    x = rows((5, 100))
    version(x).sum().backward()
    assert x.grad.abs().max() < 1e-6


@versions
@pytest.mark.parametrize("n_cols", [40, 41, 1300, 1301])
def test_rows_that_begin_anywhere(version, n_cols):
    """Sliced out of a wider tensor: x and y stand differently on 16-byte boundaries, row by row."""
    wide = rows((7, n_cols + 9), torch.bfloat16).detach()
    for start in range(9):
        x = wide[:, start : start + n_cols]
        check_against_float64(version, softmax.softmax_eager, x, name=f"from column {start}")
        check_against_float64(version, softmax.softmax_eager, x[:1].expand(3, n_cols))


# --- machine code ------------------------------------------------------------------------------------------


class _Recorder:
    """Stands in for a kernel: takes note of the arguments of its launches, and launches nothing."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((args, options))


def _compiled(n_cols, dtype, gradient, monkeypatch):
    """The kernel compiled as the op launches it for rows of n_cols."""
    name = "_softmax_bwd_kernel" if gradient else "_softmax_fwd_kernel"
    kernel, recorder = getattr(softmax, name), _Recorder()
    monkeypatch.setattr(softmax, name, recorder)
    x = torch.zeros(4096, n_cols, dtype=dtype, device=machine.device())
    softmax._backward(x, x) if gradient else softmax._forward(x)
    ((args, options),) = recorder.launches
    settings = {k: options.pop(k) for k in ("num_warps", "num_stages") if k in options}
    return compile_for(kernel, signature_of(kernel, *args, **options), arch=90, **settings)


@both_dtypes
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("n_cols", [1024, 781, 8192])
def test_loads_and_stores_are_sixteen_bytes_wide(n_cols, gradient, dtype, monkeypatch):
    """At an odd width too: there only the ends of rows are moved element by element."""
    compiled = _compiled(n_cols, dtype, gradient, monkeypatch)
    mix = instruction_mix(compiled)
    moves = {op: n for op, n in mix.items() if op.startswith(("LDG", "STG"))}
    wide_bytes = 16 * sum(n for op, n in moves.items() if op.endswith("128"))
    narrow = sum(n for op, n in moves.items() if not op.endswith("128"))
    assert {"LDG.E.128", "STG.E.128"} <= set(moves)
    # 6 % of a row of 781 bfloat16; whoever has none of its elements skips them
    assert narrow * dtype.itemsize <= (0 if n_cols % 16 == 0 else wide_bytes / 2), moves
    assert compiled.spills == 0


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_the_kernels_compute_in_float32(gradient, monkeypatch):
    mix = instruction_mix(_compiled(1024, torch.bfloat16, gradient, monkeypatch))
    assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA|SETP)|F2F.*F64", op)]


# --- CUDA --------------------------------------------------------------------------------------------------


def source():
    return (ROOT / "lib/ops/softmax.cu").read_text()


def test_the_cuda_source_uses_no_double_by_accident():
    code = re.sub(r"//[^\n]*", "", source())
    kernels = code[code.index("__global__") : code.index("void launch")]
    assert not re.search(r"\d\.\d*(?!\d*f)", kernels), "a literal without f is a double"
    assert "cudaDeviceSynchronize" not in code
    assert "getCurrentCUDAStream" in code
    assert "CUDAGuard" in code


def test_nvcc_compiles_it_without_spills():
    if not cuda.find_nvcc() or cuda.why_no_cuda():
        pytest.skip("there is no nvcc")
    kernels = cuda.nvcc_check(source())
    assert (
        len(kernels) == 19
    )  # two kernels, four dtypes, wide and single loads; clusters for three dtypes
    spilling = [k.kernel for k in kernels if k.spill_store_bytes and "double" not in k.kernel]
    assert not spilling


def test_the_cuda_kernel_is_clean_under_the_checker():
    if machine.HAS_GPU or cuda.why_no_cuda():
        pytest.skip("the checker belongs to the CPU build")
    checked = cuda.load_cuda(source(), ["softmax_forward"], name="softmax", checked=True)
    for shape in [(1, 1), (5, 7), (9, 33), (3, 781), (2, 1024), (2, 1025), (1, 4099)]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            x = rows(shape, dtype).detach()
            y = torch.empty_like(x)
            checked.softmax_forward(x, y)
            check_against_float64(lambda _, y=y: y, softmax.softmax_eager, x)
    for shape, reads in [((8, 640), 1), ((7, 781), 1), ((3, 2049), 2)]:
        x = rows(shape).detach()
        cuda.memory_traffic(checked)
        checked.softmax_forward(x, torch.empty_like(x))
        traffic = cuda.memory_traffic(checked)
        assert traffic.bytes_written == x.nbytes
        assert (
            reads * x.nbytes - 64 * len(x) <= traffic.bytes_read <= reads * x.nbytes
        )  # ends: once


def test_the_cuda_code_says_what_is_wrong():
    if cuda.why_no_cuda():
        pytest.skip(cuda.why_no_cuda())
    forward = softmax._cuda().forward
    x = rows((4, 8)).detach()
    for bad, message in [
        ((x, x[:3]), "one shape"),
        ((x[0], x[0]), r"\(M, N\)"),
        ((x[:, ::2], x[:, :4].contiguous()), "contiguous"),
        ((x, torch.empty(8, 4, device=x.device).t()), "contiguous"),
        ((x, x.half()), "one dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            forward(*bad)
