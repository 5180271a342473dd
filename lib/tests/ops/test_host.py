"""The functions that ops share: launches made before, copies, names in torch.library.

`module` is add_relu, or a mutant of it: what the shared files do is tried once, through this op.
"""

import contextlib
import importlib
import inspect
import sys
import warnings
from types import ModuleType, SimpleNamespace
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.bench import host_us
from lib.measure.check import check_against_float64
from lib.ops import _gluon, add_relu
from lib.tests.ops.battery import host_of

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor


@pytest.fixture
def module():
    return add_relu


FUSION = {"enable_fp_fusion": True}  # every launch asks for fused multiply-adds


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

    def again(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata,
        launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        hooks = launch_metadata, launch_enter_hook, launch_exit_hook
        how = gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, *args
        self.log.append(("again", how))


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
            host_of(module).run(kernel, (4,), (t, y), 64, BLOCK=16, num_warps=2)
    (_, grid, args, options), (way, again) = kernel.log
    assert (grid, args[2:], options) == ((4,), (64,), {"BLOCK": 16, "num_warps": 2} | FUSION)
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
            host_of(module).run(
                kernel, how["grid"], (torch.zeros(64), y), how["n"], **how["options"]
            )
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_sizes_that_never_come_again_do_not_fill_the_memory(module):
    x = torch.zeros(64)
    with on_gpu(-1):
        for n in range(5000):
            host_of(module).run(StandIn(), (4,), (x, x), n, BLOCK=16)
    assert len(host_of(module).run.__globals__["launched"]) <= 4096


def test_what_watches_launches_sees_those_made_before(module):
    kernel, x = StandIn(), torch.zeros(64)
    with on_gpu(-1):
        host_of(module).run(kernel, (4,), (x, x), 64, BLOCK=16)
        with mock.patch.object(StandIn, "run"):
            host_of(module).run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


@pytest.mark.parametrize("hooks", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_hear_of_launches_made_before(module, hooks):
    kernel, x, chain = StandIn(), torch.zeros(64), getattr(triton.knobs.runtime, hooks)
    with on_gpu(-1):
        host_of(module).run(kernel, (4,), (x, x), 64, BLOCK=16)
        with mock.patch.object(chain, "calls", [print]):
            host_of(module).run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def test_a_launcher_that_takes_something_else_is_given_nothing(module):
    kernel, x = StandIn(), torch.zeros(64)
    kernel.again = lambda gridX, gridY, gridZ, cluster, stream, *args: None
    with on_gpu(-1):
        for _ in range(2):
            host_of(module).run(kernel, (4,), (x, x), 64, BLOCK=16)
    assert [entry[0] for entry in kernel.log] == ["looked up", "looked up"]


def launched_twice(module, first, second):
    """What the kernel's log says of two launches."""
    kernel = StandIn()
    for how in (first, first | second):
        x = torch.zeros(64, 64, dtype=how["dtype"])
        bias = how["bias"] and torch.zeros(65, dtype=how["bias"])[how["offset"] :]
        described = TensorDescriptor(x, x.shape, x.stride(), how["block"])
        with on_gpu(how["gpu"]):
            host_of(module).run(kernel, (4,), (described, bias), how["n"], BLOCK=16, num_warps=2)
    return kernel.log


# -1 is what a CPU tensor says of its GPU
FIRST = {
    "dtype": torch.float16,
    "block": [16, 16],
    "bias": torch.float16,
    "offset": 0,
    "n": 64,
    "gpu": -1,
}


def test_a_launch_by_tma_made_before_is_not_looked_up_again(module):
    (_, grid, first, options), (way, again) = launched_twice(module, FIRST, {})
    assert (grid, first[2:], options) == ((4,), (64,), {"BLOCK": 16, "num_warps": 2} | FUSION)
    (described, bias), rest = again[9:11], again[11:]
    assert way == "again" and rest == (64, 16, 1.0)
    assert described.block_shape == [16, 16] and described is not first[0] and bias is not first[1]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.bfloat16}, {"block": [16, 32]}, {"bias": None}, {"bias": torch.float32}, {"offset": 1},
        {"n": 65}, {"gpu": 1},
    ],
    ids=str,
)  # fmt: skip
def test_another_launch_by_tma_is_looked_up(module, changed):
    assert [entry[0] for entry in launched_twice(module, FIRST, changed)] == ["looked up"] * 2


def test_a_kernel_in_gluon_that_triton_does_not_compile_is_named_once():
    launch = mock.Mock(side_effect=TritonError("no such word"), __name__="launch", __module__="m")
    with pytest.warns(
        UserWarning, match=r"does not compile m\.launch; a slower kernel in Triton runs"
    ):
        assert not _gluon.ran(launch, 1)
    with warnings.catch_warnings(action="error"):
        assert not _gluon.ran(launch, 2)
    launch.assert_called_once_with(1)
    assert _gluon.ran(mock.Mock(), 1, way=2)


@pytest.mark.parametrize(
    ("words", "falls_back"), [("PassManager::run failed", True), ("out of memory", False)]
)
def test_an_error_of_the_gpu_is_no_reason_for_another_kernel(words, falls_back):
    launch = mock.Mock(side_effect=RuntimeError(words), __name__="launch", __module__="m")
    with (
        pytest.warns(UserWarning, match="does not compile")
        if falls_back
        else pytest.raises(RuntimeError, match=words)
    ):
        assert not _gluon.ran(launch)


def test_an_op_that_others_have_imported_is_loaded_again():
    """As notebooks do after an edit; a copy under another name is told from it in test_copyable.py."""
    importer = ModuleType("an_importer")
    importer.add_relu_op = add_relu.add_relu_op
    with mock.patch.dict(sys.modules, {"an_importer": importer}):
        importlib.reload(add_relu)


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.overloadpacket.__name__)
        return op(*args, **kwargs or {})


def test_gradients_on_paper_are_not_copied():
    """A bill counts calls of fake tensors: none that a real step does not make."""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4, 8, device=machine.device(), requires_grad=True)
        bias = torch.empty(8, device=machine.device(), requires_grad=True)
        y = add_relu.add_relu_triton(x, bias)
        with _Ops() as ops:
            torch.autograd.backward(y, torch.empty_like(y))
    assert "add_relu_backward" in ops.names and "clone" not in ops.names, ops.names


@pytest.mark.gpu
@pytest.mark.alone
def test_a_launch_made_before_costs_the_host_less():
    """Than Triton's look-up of the same kernel: this is what private API buys."""
    partial, out = torch.ones(4, 64, device="cuda"), torch.empty(64, device="cuda")
    kernel, how = add_relu.device.sum_rows_kernel, {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8}
    ways = {
        "kernel[grid]": lambda: kernel[(2,)](partial, out, 4, 64, **how),
        "run": lambda: add_relu.host.run(kernel, (2,), (partial, out), 4, 64, **how),
    }
    costs = {name: host_us(way) for name, way in ways.items()}
    print(costs)
    assert costs["run"] < 0.8 * costs["kernel[grid]"]


@pytest.mark.parametrize("n_cols", [80, 37])
@pytest.mark.parametrize("name", ["add_relu", "lora_epilogue", "bias_gelu_dropout_add"])
def test_many_short_rows_are_taken_together(name, n_cols):
    """Far more than make a load whole: as many as hold 8192 numbers, and three rows are left over."""
    least, most = add_relu.host.rows_to_fold(n_cols)
    assert n_cols * most >= 8192 and most > least
    op = registry.find(name).configured()
    inputs = op.checked_inputs((64 * most + 3, n_cols), torch.float32, machine.device())
    check_against_float64(op.versions["triton"], op.eager, *inputs, slack=op.slack, name=name)


def test_inductor_takes_an_op_without_describing_its_arguments(module):
    """A description holds those of all that came before: behind a deep model it takes for ever."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice = module.host.custom_op(f"fused_kernels_test::twice_{id(module)}")(twice)
    twice.register_fake(torch.empty_like)
    described = AssertionError("described")
    with mock.patch("torch._inductor.exc.OperatorIssue.operator_str", side_effect=described):
        compiled = torch.compile(lambda x: twice(twice(x)), fullgraph=True)
        assert compiled(torch.ones(3)).tolist() == [4, 4, 4]
