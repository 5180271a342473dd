"""What is particular to add_relu: traffic, launches, the shape of its CUDA code."""

import contextlib
import inspect
import re
from types import SimpleNamespace
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import add_relu
from lib.recorded.results import ROOT
from lib.tests.ops import cases

import pytest
import torch
import triton
import triton.language as tl

OP = registry.find("add_relu")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_reads_x_once_and_writes_y_once(dtype):
    x, bias = (t.detach() for t in inputs((96, 640), dtype))
    traffic = count_traffic(lambda: add_relu.add_relu_triton(x, bias))
    least = OP.bytes_moved(x.shape, dtype.itemsize, gradients=False)
    assert traffic.launches == 1
    assert traffic.bytes_moved == least + bias.nbytes


def test_backward_reads_two_tensors_and_writes_one():
    x, bias = inputs((96, 640))
    y = add_relu.add_relu_triton(x, bias)
    dy = torch.randn_like(y)
    traffic = count_traffic(lambda: y.backward(dy))
    by = traffic.by_argument
    assert traffic.launches == 2  # the second adds up the partial sums
    assert by["_add_relu_bwd_kernel.dy_ptr"].loaded == dy.nbytes
    assert by["_add_relu_bwd_kernel.y_ptr"].loaded == y.nbytes
    assert by["_add_relu_bwd_kernel.dx_ptr"].stored == y.nbytes
    assert by["_add_relu_bwd_kernel.partial_ptr"].stored < 0.1 * y.nbytes


def test_folded_rows_are_aligned_and_cost_no_traffic():
    x, bias = (t.detach() for t in inputs((1024, 97)))
    traffic = count_traffic(lambda: add_relu.add_relu_triton(x, bias))
    assert traffic.launches == 1
    assert traffic.bytes_moved == 2 * x.nbytes + bias.nbytes


def test_many_rows_are_summed_by_many_programs():
    """More rows than one program takes: the partial sums of dbias have to add up."""
    x, bias = inputs((300_000, 1))
    add_relu.add_relu_triton(x, bias).sum().backward()
    want = (x + bias > 0).double().sum()
    assert bias.grad.item() == want.item()


def test_loads_and_stores_are_sixteen_bytes_wide():
    x, bias = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    plan = add_relu._plan(4096, torch.bfloat16)
    signature = signature_of(
        add_relu._add_relu_fwd_kernel, x, bias, x, 64, 4096, 4096, 1,
        COMPUTE=tl.float32, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
    )  # fmt: skip
    compiled = compile_for(add_relu._add_relu_fwd_kernel, signature, arch=90)
    memory = {op for op in instruction_mix(compiled) if op.startswith(("LDG", "STG"))}
    assert memory == {"LDG.E.128", "STG.E.128"}
    assert compiled.spills == 0


def test_the_cuda_source_uses_no_double_by_accident():
    code = (ROOT / "lib/ops/add_relu.cu").read_text()
    kernel = code[code.index("__global__") : code.index("void launch")]
    assert not re.search(r"\d\.\d*(?!\d*f)", kernel), "a literal without f is a double"
    assert "cudaDeviceSynchronize" not in code
    assert "getCurrentCUDAStream" in code
    assert "CUDAGuard" in code


def test_the_cuda_kernel_is_clean_under_the_checker():
    from lib.nogpu import cuda

    if machine.HAS_GPU or cuda.why_no_cuda():
        pytest.skip("the checker belongs to the CPU build")
    source = (ROOT / "lib/ops/add_relu.cu").read_text()
    checked = cuda.load_cuda(source, ["add_relu_forward"], name="add_relu", checked=True)
    for shape in [(1, 1), (5, 7), (17, 33), (9, 640), (3, 4096)]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            x, bias = (t.detach() for t in inputs(shape, dtype))
            y = torch.empty_like(x)
            checked.add_relu_forward(x, bias, y)
            assert torch.equal(y, add_relu.add_relu_eager(x, bias))
    x, bias = (t.detach() for t in inputs((8, 640)))
    cuda.memory_traffic(checked)
    checked.add_relu_forward(x, bias, torch.empty_like(x))
    traffic = cuda.memory_traffic(checked)
    assert traffic.bytes_written == x.nbytes
    assert traffic.bytes_read == 2 * x.nbytes  # x, and a piece of the bias for each piece of x


@pytest.mark.parametrize("n_rows", [64, 70])
def test_cuda_is_given_wide_rows_and_those_left_over(module, n_rows):
    """Rows of an odd width; all contiguous, of one dtype, and between them all of y."""
    x, bias = OP.inputs((n_rows, 3), torch.float32, machine.device())
    half, spread = x.detach().half(), torch.stack([bias.detach()] * 2, dim=1)[:, 0]
    across = torch.stack([half.float()] * 2, dim=2)[..., 0]
    shapes = []

    def forward(x, bias, y):
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, bias, y))
        shapes.append(tuple(x.shape))
        y.copy_(add_relu.add_relu_eager(x, bias))

    cuda_stand_in = mock.patch.object(
        module, "_cuda", return_value=SimpleNamespace(forward=forward)
    )
    with cuda_stand_in, cases.empty_is_nan():
        y = module._forward_cuda(half, spread)
        same = module._forward_cuda(across, spread)
    assert torch.equal(y, add_relu.add_relu_eager(half, bias)) and torch.equal(same, y)
    left_over = [(n_rows - 64, 3)] * (n_rows > 64)
    assert shapes == [(4, 48), *left_over, (n_rows, 3)]  # where there are gaps, none are folded


def test_the_cuda_code_says_what_is_wrong():
    if cuda.why_no_cuda():
        pytest.skip(cuda.why_no_cuda())
    forward = add_relu._cuda().forward
    x, bias = (t.detach() for t in inputs((4, 8)))
    for bad, message in [
        ((x, bias[:3], x), "must be"),
        ((x, bias, x[:3]), "must be"),
        ((x[:, ::2], bias[:4], x[:, :4].contiguous()), "contiguous"),
        ((x, bias.half(), x), "one dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            forward(*bad)


class StandIn:
    """A kernel that notes how it is launched, and what was compiled."""

    def __init__(self):
        self.fn, self.signature = object(), inspect.signature(self.compute)
        self.arg_names, self.log = list(self.signature.parameters), []

    def run(self):
        """Never called."""

    @staticmethod
    def compute(x_ptr, y_ptr, n, BLOCK, SCALE=1.0):
        """Never called."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.log.append(("looked up", grid, args, options))
            return SimpleNamespace(run=self.again, function="code", packed_metadata="how")

        return launch

    def again(self, *args):
        self.log.append(("again", args))


@contextlib.contextmanager
def on_gpu(index):
    """Inside, the current GPU is `index`; -1 is what a CPU tensor says of its own."""
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda gpu: f"of {gpu}"))
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=index),
        mock.patch.object(triton.runtime, "driver", driver),
    ):
        yield


def test_a_launch_made_before_is_not_looked_up_again(module):
    kernel, x, y = StandIn(), torch.zeros(64), torch.zeros(64)
    with on_gpu(-1):
        for t in (x, torch.zeros(64)):
            module._run(kernel, (4,), (t, y), 64, BLOCK=16, num_warps=2)
    (_, grid, args, options), (way, again) = kernel.log
    assert (grid, args[2:], options) == ((4,), (64,), {"BLOCK": 16, "num_warps": 2})
    assert way == "again"
    assert again[:8] == (4, 1, 1, "of -1", "code", "how", None, None)
    tensors, rest = again[9:11], again[11:]
    assert rest == (64, 16, 1.0)  # in the kernel's order, defaults too
    assert tensors[0] is not x and tensors[1] is y


@pytest.mark.parametrize(
    "changed",
    [
        {"grid": (5,)}, {"n": 65}, {"options": {"BLOCK": 32}}, {"options": {"BLOCK": 16, "SCALE": 2.0}},
        {"dtype": torch.float16}, {"dtype": None}, {"offset": 1}, {"gpu": 1},
    ],
    ids=["grid", "size", "constant", "default", "dtype", "no tensor", "misaligned", "another GPU"],
)  # fmt: skip
def test_another_launch_is_looked_up(module, changed):
    kernel = StandIn()
    first = {
        "grid": (4,), "n": 64, "options": {"BLOCK": 16}, "dtype": torch.float32, "offset": 0, "gpu": -1
    }  # fmt: skip
    for how in (first, first | changed):
        y = how["dtype"] and torch.zeros(65, dtype=how["dtype"])[how["offset"] :]
        with on_gpu(how["gpu"]):
            module._run(kernel, how["grid"], (torch.zeros(64), y), how["n"], **how["options"])
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_sizes_that_never_come_again_do_not_fill_the_memory(module):
    x = torch.zeros(64)
    with on_gpu(-1):
        for n in range(5000):
            module._run(StandIn(), (4,), (x, x), n, BLOCK=16)
    assert len(module._launched) <= 4096


def test_what_watches_launches_sees_those_made_before(module):
    kernel, x = StandIn(), torch.zeros(64)
    with on_gpu(-1):
        module._run(kernel, (4,), (x, x), 64, BLOCK=16)
        with mock.patch.object(StandIn, "run"):
            module._run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


@pytest.mark.parametrize("hooks", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_hear_of_launches_made_before(module, hooks):
    kernel, x, chain = StandIn(), torch.zeros(64), getattr(triton.knobs.runtime, hooks)
    with on_gpu(-1):
        module._run(kernel, (4,), (x, x), 64, BLOCK=16)
        with mock.patch.object(chain, "calls", [print]):
            module._run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_other_versions_of_triton_are_given_nothing_of_their_own(module):
    kernel, x = StandIn(), torch.zeros(64)
    with on_gpu(-1), mock.patch.object(triton, "__version__", "9.6.0"):
        for _ in range(2):
            module._run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_sums_of_folded_rows_are_rounded_once(module):
    """One strip of wide rows has a sum for each row in it, which is not dbias yet."""
    t = torch.ones(64, 3, dtype=torch.bfloat16, device=machine.device())
    partial = module._launch_backward(None, t, t, None, t.dtype)
    assert partial.dtype == torch.float32 and len(partial) == 16
