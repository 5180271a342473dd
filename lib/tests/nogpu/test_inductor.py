"""The GPU code of torch.compile without a GPU: its text, that it is right, and that nothing stays patched."""

import os
import subprocess
import sys
from collections import Counter

import lib
from lib.course.reading import shell
from lib.nogpu import inductor, recorded_code
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.fake_gpu import fake_gpu, grad
from lib.nogpu.inductor import (
    graphs,
    kernel_functions,
    kernel_source,
    kernels,
    normalize,
    output_code,
    run_output_code,
    run_training_code,
    without_log_prefixes,
)
from lib.tests import yardstick
from lib.tests.ops import cases

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

HAS_GPU = torch.cuda.is_available()
no_gpu = pytest.mark.skipif(HAS_GPU, reason="about the stand-in for a GPU")


def bias_relu(x, bias):
    return torch.relu(x + bias)


def bias_gelu_dropout_residual(x, bias, residual):
    return F.dropout(F.gelu(x + bias), 0.1, training=True) + residual


def softmax(x):
    return torch.softmax(x, dim=-1)


def mm_bias_relu(x, w, bias):
    return torch.relu(x @ w + bias)


def lora(x, w, a, b):
    return x @ w.T + 2.0 * ((x @ a.T) @ b.T)


def layer_norm_gelu(x, w, bias):
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, bias))


def mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


# name: (function, shapes of its inputs, requires grad, kinds of the kernels of all graphs in order).
# The kinds were read off the code: one Triton kernel per fused group, an extern call per matmul, and one
# for the seed of a dropout.
CASES = {
    "bias_relu": (bias_relu, [(128, 512), (512,)], False, ["pointwise"]),
    "dropout": (
        bias_gelu_dropout_residual,
        [(128, 512), (512,), (128, 512)],
        False,
        ["extern", "pointwise"],
    ),
    "softmax_1024": (softmax, [(64, 1024)], False, ["persistent_reduction"]),
    "softmax_8192": (softmax, [(8, 8192)], False, ["reduction"]),
    "mm_bias_relu": (
        mm_bias_relu,
        [(128, 512), (512, 256), (256,)],
        False,
        ["extern", "pointwise"],
    ),
    "lora": (
        lora,
        [(128, 512), (256, 512), (8, 512), (256, 8)],
        False,
        ["extern", "extern", "pointwise", "extern"],
    ),
    "bias_relu_training": (bias_relu, [(128, 512), (512,)], True, ["pointwise", "reduction"]),
    "layer_norm_gelu_training": (
        layer_norm_gelu,
        [(128, 512), (512,), (512,)],
        True,
        ["persistent_reduction", "persistent_reduction", "reduction"],
    ),
    "mlp_training": (
        mlp,
        [(128, 512), (64, 512), (64,), (16, 64), (16,)],
        True,
        ["extern", "pointwise", "extern"]  # forward
        + ["extern", "extern", "extern", "extern", "reduction", "reduction"],
    ),
}
# Graph inputs come in the order of first use by an op: in x @ w.T the transpose of w comes first.
ORDER_OF_USE = {"lora": [1, 0, 2, 3]}


def make_inputs(name):
    _, shapes, requires_grad, _ = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return [t / t.shape[-1] ** 0.5 if t.ndim == 2 else t for t in inputs], requires_grad


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def code_of():
    """name -> the text, written once for all tests."""
    written = {}

    def get(name):
        if name not in written:
            inputs, requires_grad = make_inputs(name)
            inputs = [t.requires_grad_(requires_grad) for t in inputs]
            written[name] = output_code(CASES[name][0], *inputs)
        return written[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_code_has_the_expected_kernels(code_of, name):
    code, kinds = code_of(name), CASES[name][3]
    infos = kernels(code)
    forward = [k.kind for k in infos if k.graph != "backward"]
    backward = [k.kind for k in infos if k.graph == "backward"]
    if (
        name == "mlp_training"
    ):  # where the backward's matmuls stand among its sums is the scheduler's choice
        assert forward == kinds[:3]
        assert Counter(backward) == Counter(kinds[3:])
    else:
        assert forward + backward == kinds
    assert code.count("@triton.jit") == sum(kind != "extern" for kind in kinds)
    requires_grad = CASES[name][2]
    expected_graphs = ["forward", "backward"] if requires_grad else ["inference"]
    assert list(dict.fromkeys(k.graph for k in infos)) == expected_graphs


@pytest.mark.parametrize("name", [n for n in CASES if "training" not in n and n != "dropout"])
def test_inference_code_matches_eager(code_of, name):
    inputs, _ = make_inputs(name)
    order = ORDER_OF_USE.get(name, range(len(inputs)))
    y = run_output_code(code_of(name), *[inputs[i] for i in order])
    expected = CASES[name][0](*inputs)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [n for n in CASES if "training" in n])
def test_training_code_matches_eager(code_of, name):
    inputs, _ = make_inputs(name)
    inputs = [t.requires_grad_() for t in inputs]
    order = ORDER_OF_USE.get(name, range(len(inputs)))
    expected = CASES[name][0](*inputs)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(dy)

    in_graph_order = [inputs[i] for i in order]
    (y,), grads = run_training_code(code_of(name), *in_graph_order, grad_outputs=[dy])
    torch.testing.assert_close(y, expected.detach(), atol=1e-5, rtol=0)
    assert len(grads) == len(inputs)
    for dx, x in zip(grads, in_graph_order):
        torch.testing.assert_close(dx, x.grad, atol=1e-4, rtol=0)


def test_dropout_code_drops_at_its_rate(code_of):
    (x, bias, residual), _ = make_inputs("dropout")
    y = run_output_code(code_of("dropout"), x, bias, torch.zeros_like(residual))
    keep = y != 0
    torch.testing.assert_close(y[keep], (F.gelu(x + bias) / 0.9)[keep], atol=1e-5, rtol=0)
    # 65536 draws at p = 0.1: the standard deviation of the rate is 0.0012
    assert abs((~keep).float().mean() - 0.1) < 0.006


def test_a_kernel_of_the_text_compiles_for_a_gpu_that_is_not_here(code_of):
    functions = kernel_functions(code_of("dropout"))
    assert [*functions] == [k.name for k in kernels(code_of("dropout")) if k.kind != "extern"]
    (kernel,) = functions.values()
    seed, x = torch.empty(1, dtype=torch.int64), torch.empty(64)
    tensors = {n: seed if n == "in_ptr0" else x for n in kernel.arg_names if "ptr" in n}
    sizes = {"load_seed_offset": 0, "xnumel": 65536, "XBLOCK": 1024}
    mix = instruction_mix(compile_for(kernel, signature_of(kernel, **tensors, **sizes), arch=90))
    assert mix["LDG.E.128"] and mix["STG.E.128"]
    assert len(kernel_functions(code_of("layer_norm_gelu_training"))) == 3  # of both graphs


def test_layer_norm_of_many_rows_sums_in_a_workspace():
    """One kernel makes dx and partial sums of dw and dbias, which ATen then adds up."""

    def layer_norm(x, w, bias):
        return F.layer_norm(x, (768,), w, bias)

    inputs = [torch.randn(8192, 768), torch.randn(768), torch.randn(768)]
    inputs = [t.requires_grad_() for t in inputs]
    code = output_code(layer_norm, *inputs)
    backward = [k.name for k in kernels(code) if k.graph == "backward"]
    assert backward[1:] == ["aten.sum", "aten.sum"]
    layer_norm(*inputs).sum().backward()
    _, grads = run_training_code(code, *inputs)
    for dx, x in zip(grads, inputs):  # sums of 8192 numbers: relative to the largest
        assert (dx - x.grad).abs().max() <= 1e-5 * x.grad.abs().max()


def test_module_with_parameters_and_buffers():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU())
    model.eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    code = output_code(model, torch.randn(16, 64))
    assert [graph.name for graph in graphs(code)] == ["forward", "backward"]
    for name, t in model.state_dict().items():
        assert t.device.type == "cpu"
        assert torch.equal(t, before[name])


def test_bfloat16():
    x = torch.randn(64, 300).bfloat16()
    code = output_code(lambda x: F.gelu(x) * 2, x)
    assert ".to(tl.float32)" in code
    # both round to bfloat16 (8 bits) from float32, whose erf may differ in the last bits near -3
    torch.testing.assert_close(run_output_code(code, x), F.gelu(x) * 2, atol=1e-6, rtol=2**-7)


def test_dynamic_sizes_are_arguments():
    x, bias = torch.randn(64, 300), torch.randn(300)
    code = output_code(bias_relu, x, bias, dynamic=True)
    x, bias = torch.randn(5, 30), torch.randn(30)
    y = run_output_code(code, 5, 30, x, bias)
    torch.testing.assert_close(y, bias_relu(x, bias))


def test_a_marked_dimension_is_an_argument_and_the_other_stays_a_number():
    x, bias = torch.randn(128, 512), torch.randn(512)
    torch._dynamo.mark_dynamic(x, 0)
    code = output_code(bias_relu, x, bias)
    kernel = kernel_source(code, 0)
    assert "xindex % 512" in kernel and "ks0" not in kernel and "xnumel = " not in kernel
    for rows in (128, 3):
        x = torch.randn(rows, 512)
        torch.testing.assert_close(run_output_code(code, rows, x, bias), bias_relu(x, bias))


def test_marks_are_part_of_what_a_recorded_text_is_for():
    plain, marked, static = (torch.randn(128, 512) for _ in range(3))
    torch._dynamo.mark_dynamic(marked, 0)
    torch._dynamo.mark_static(static, 0)
    looks = {recorded_code._look(t) for t in (plain, marked, static)}
    assert len(looks) == 3
    assert recorded_code._look(plain) == "(128, 512) (512, 1) torch.float32 False"


def test_graph_break_gives_a_module_per_graph():
    def broken(x):
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y.sum(dim=-1)

    code = output_code(broken, torch.randn(8, 64))
    assert len(graphs(code)) == 2
    assert [k.kind for k in kernels(code)] == ["pointwise", "persistent_reduction"]


def test_backward_graphs_come_in_the_order_in_which_they_run():
    def broken(x):
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return torch.tanh(y)

    infos = kernels(output_code(broken, torch.randn(8, 64, requires_grad=True)))
    assert [info.graph for info in infos] == ["forward", "forward", "backward", "backward"]
    expected = ["aten.relu", "aten.tanh", "aten.tanh_backward", "aten.threshold_backward"]
    assert [op in info.fused_ops for op, info in zip(expected, infos)] == [True] * 4


@no_gpu
def test_graph_break_on_a_value_ends_the_text():
    def broken(x):
        y = torch.relu(x)
        return y * 2 if y.sum() > 0 else y

    code = output_code(broken, torch.randn(8, 64))
    assert len(graphs(code)) == 1
    assert "# The text ends here: what follows depends on a tensor's value" in code


def test_tensors_in_lists_and_dictionaries_are_on_the_gpu():
    def total(tensors, more):
        return sum(tensors) * more["scale"][0]

    x = torch.randn(64, 300)
    (info,) = kernels(output_code(total, [x, x + 1], {"scale": (x,)}))
    assert info.kind == "pointwise" and "aten.mul" in info.fused_ops


def test_code_for_the_cpu_is_refused():
    with pytest.raises(ValueError, match=r"this is code for the CPU.*device=x\.device"):
        output_code(lambda n: torch.ones(1000).cumsum(0) * n, 3)
    both = output_code(lambda x: (x + 1, torch.arange(1000).float().exp()), torch.randn(8, 64))
    assert "# Part of this is C++ for the CPU: the function makes a tensor there" in both
    assert [info.kind for info in kernels(both)] == ["pointwise"]
    here = output_code(lambda x: x + torch.ones(64, device=x.device), torch.randn(8, 64))
    assert "for the CPU" not in here


def test_numpy_arrays_are_refused():
    with pytest.raises(TypeError, match="pass torch tensors, not NumPy arrays"):
        output_code(lambda x, more: x + more["y"], torch.ones(3), {"y": torch.ones(3).numpy()})


def test_kernels_of_both_branches_of_a_cond():
    def branches(x):
        return torch.cond(x.sum() > 0, lambda x: torch.relu(x), lambda x: torch.tanh(x), (x,))

    names = [info.name for info in kernels(output_code(branches, torch.randn(64, 300)))]
    relu, tanh = sorted(names[-2:])  # torch 2.15 writes the second branch first
    assert "relu" in relu and "tanh" in tanh


LINEAR = torch.nn.Linear(8, 8)


@triton.jit
def doubled_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, 2 * x, mask=offsets < n)


def doubled(x):
    y = torch.empty_like(x)
    doubled_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK_SIZE=256)
    return y


@torch.library.triton_op("output_code::doubled", mutates_args={})
def doubled_op(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(doubled_kernel)[(4,)](x, y, x.numel(), BLOCK_SIZE=256)
    return y


@pytest.mark.parametrize("inner", [doubled, doubled_op], ids=["launched", "triton_op"])
def test_a_kernel_of_ones_own(inner):
    x = torch.randn(1000)
    code = output_code(lambda x: inner(x).relu() + 1, x)
    own, generated = kernels(code)
    assert "doubled_kernel" in own.name and "relu" in generated.name
    torch.testing.assert_close(run_output_code(code, x), (2 * x).relu() + 1)


@pytest.mark.skipif(cases.release(torch) < (2, 12), reason="from torch 2.12 on")
def test_what_follows_a_kernel_of_ones_own_goes_into_it_if_asked():
    x, asked = torch.randn(1000), {"epilogue_fusion_user_defined_triton_kernel": True}
    code = output_code(lambda x: doubled_op(x).relu() + 1, x, options=asked)
    (own,) = kernels(code)
    assert "doubled_kernel" in own.name and "maximum" in own.source
    torch.testing.assert_close(run_output_code(code, x), (2 * x).relu() + 1)


@no_gpu
@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (
            lambda x: x.nonzero(),
            "asks for a tensor's value, as nonzero, bincount",
        ),
        (lambda x: LINEAR(x), "pass the module itself, as output_code"),
        (lambda x: (x * x).sum().backward(), r"calls backward\(\); return the loss"),
    ],
    ids=["nonzero", "a module from outside", "backward"],
)
def test_what_cannot_be_written_is_refused_by_a_sentence(fn, sentence):
    with pytest.raises(ValueError, match=sentence):
        output_code(fn, torch.randn(8, requires_grad=True))


@no_gpu
@pytest.mark.parametrize(
    ("fn", "end"),
    [
        (lambda x: x.relu()[x > 0], "depends on a tensor's value"),
        (lambda x: torch._foreach_add_([x], [x]), "if another graph follows"),
    ],
    ids=["sizes by values", "foreach in place"],
)
def test_a_text_that_ends_early_says_so(fn, end):
    code = output_code(fn, torch.randn(64))
    assert kernels(code) and end in code


# --- reading the text -------------------------------------------------------------------------------------


def test_kernel_info_of_a_fused_kernel(code_of):
    (info,) = kernels(code_of("bias_relu"))
    assert info.fused_ops == ["aten.add", "aten.relu"]
    assert info.source_nodes == ["add", "relu"]
    assert info.size_hints == {"x": 128 * 512}
    assert info.source.startswith("@triton.jit\ndef " + info.name)
    assert "tl.store" in info.source
    assert "triton_heuristics" not in info.source


def test_kernel_info_of_a_matmul(code_of):
    mm = kernels(code_of("mm_bias_relu"))[0]
    assert (mm.name, mm.kind, mm.fused_ops) == ("extern_kernels.mm", "extern", ["aten.mm"])
    assert "out=buf0" in mm.source


@no_gpu
def test_a_matmul_of_odd_sizes_is_not_padded():
    """Inductor would time it padded and not, which takes a GPU."""
    code = output_code(torch.mm, torch.randn(2048, 367), torch.randn(367, 512))
    assert [k.kind for k in kernels(code)] == ["extern"]


def test_a_kernel_with_a_helper_above_it():
    code = output_code(lambda x: torch.relu(x.cumsum(1)), torch.randn(8, 64))
    (info,) = kernels(code)
    assert info.kind == "persistent_reduction", info.kind
    assert info.source.count("@triton.jit") == 2


def test_kernel_source_by_position_and_name(code_of):
    code = code_of("layer_norm_gelu_training")
    for i, info in enumerate(kernels(code)):
        assert kernel_source(code, i) == kernel_source(code, info.name) == info.source
    with pytest.raises(ValueError, match="launches 3"):
        kernel_source(code, 3)
    with pytest.raises(ValueError, match="No kernel named 'nothing'"):
        kernel_source(code, "nothing")
    with pytest.raises(ValueError, match="not the output code"):
        kernels("print('hello')")


def test_normalized_text_is_the_same_each_time(code_of):
    inputs, _ = make_inputs("lora")
    first, second = code_of("lora"), output_code(lora, *inputs)
    assert normalize(first) == normalize(second)
    assert "kernel path" not in normalize(first)
    assert normalize(first) != normalize(code_of("bias_relu"))


def test_running_the_wrong_number_of_inputs_or_graphs(code_of):
    with pytest.raises(ValueError, match="takes 2 inputs"):
        run_output_code(code_of("bias_relu"), torch.randn(128, 512))
    with pytest.raises(ValueError, match="run_training_code"):
        run_output_code(code_of("bias_relu_training"), torch.randn(128, 512), torch.randn(512))
    with pytest.raises(ValueError, match="has: inference"):
        run_training_code(code_of("bias_relu"), torch.randn(128, 512), torch.randn(512))
    x, bias = torch.randn(128, 512), torch.randn(512)
    for inputs in ((bias, x), (x.double(), bias.double()), (x, bias.bfloat16()), (x[:5], bias)):
        with pytest.raises(
            ValueError, match=r"takes as \w+ a tensor \(.*the order of its line arg0_1"
        ):
            run_output_code(code_of("bias_relu"), *inputs)


def test_a_function_without_ops():
    with pytest.raises(ValueError, match="compiled nothing"):
        output_code(lambda x: x, torch.randn(3))


@no_gpu
@pytest.mark.parametrize("option", ["max_autotune", "triton.cudagraphs"])
def test_options_that_need_a_gpu(option):
    with pytest.raises(ValueError, match=option):
        output_code(softmax, torch.randn(4, 4), options={option: True})


def test_what_dynamo_leaves_to_eager_gets_a_sentence():
    with pytest.raises(ValueError, match="left them to eager, as it does nn.LSTM"):
        output_code(torch.nn.LSTM(8, 8), torch.randn(3, 2, 8))


def test_a_convolution_returns_channels_last_as_cudnns_does():
    convolution = torch.nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
    code = output_code(convolution, torch.randn(2, 3, 16, 16))
    assert "(2, 8, 16, 16), (2048, 1, 128, 8)" in code


def test_a_graph_before_what_dynamo_leaves_to_eager():
    class ReluThenLstm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(8, 8)

        def forward(self, x):
            y = x.relu()
            torch._dynamo.graph_break()
            return self.lstm(y)

    code = output_code(ReluThenLstm(), torch.randn(3, 2, 8))
    assert [kernel.name for kernel in kernels(code)] == ["triton_poi_fused_relu_0"]


@no_gpu
def test_unsupported_version(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(
        inductor.UnsupportedVersion, match="2.11 to 2.15 and triton 3.6 to 3.9; here is torch 2.10."
    ):
        output_code(softmax, torch.randn(4, 5))


@no_gpu
def test_a_newer_version_is_tried(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.20.0")
    with pytest.warns(UserWarning, match=r"here is torch 2.20. .* It is tried all the same"):
        assert "triton_" in output_code(softmax, torch.randn(4, 5))
    monkeypatch.setattr(inductor, "_codes_collected", lambda: torch.no_such_name)
    with (
        pytest.warns(UserWarning, match="tried"),
        pytest.raises(inductor.UnsupportedVersion, match="2.20") as raised,
    ):
        output_code(softmax, torch.randn(4, 5))
    assert isinstance(raised.value.__cause__, AttributeError)


@no_gpu
def test_unsupported_version_gets_the_recorded_text(code_of, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded_code, "FOLDER", tmp_path)
    inputs, _ = make_inputs("bias_relu")
    code, settings = code_of("bias_relu"), {"dynamic": False}
    recorded_code.remember(bias_relu, inputs, settings, code)
    assert not list(tmp_path.rglob("*.txt")), "kept only while a notebook is recorded"
    monkeypatch.setenv("FUSED_KERNELS_RECORD", "21_a_notebook")
    recorded_code.remember(bias_relu, inputs, settings, code)

    monkeypatch.setattr(torch, "__version__", "2.20.0")
    with pytest.warns(UserWarning, match="not written here: Recorded on"):
        recorded = output_code(bias_relu, *inputs)
    assert recorded.startswith(recorded_code.MARK)
    assert len(recorded) < len(code)
    assert kernels(recorded) == kernels(code)
    expected = bias_relu(*inputs)
    torch.testing.assert_close(run_output_code(recorded, *inputs), expected, atol=1e-5, rtol=0)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    for other in ([inputs[0][:64], inputs[1]], [inputs[0].bfloat16(), inputs[1].bfloat16()]):
        with pytest.raises(inductor.UnsupportedVersion):
            output_code(bias_relu, *other)
    with pytest.raises(inductor.UnsupportedVersion):
        output_code(lambda x, bias: torch.relu(x + 2 * bias), *inputs)
    recorded_code.forget("21_a_notebook")
    assert not list(tmp_path.rglob("*.txt"))


@no_gpu
def test_speed(code_of):
    """After the first function, which imports Inductor, another takes at most half a second when idle."""
    code_of("bias_relu")
    seconds = []
    for n_cols in (640, 768, 896):
        inputs = torch.randn(128, n_cols), torch.randn(n_cols)
        took, _ = yardstick.cpu_seconds(lambda inputs=inputs: output_code(bias_relu, *inputs))
        seconds.append(took)
    assert min(seconds) <= yardstick.for_python(0.5), seconds


FIRST = """
import time, lib, torch
from lib.nogpu.inductor import output_code
x, bias = torch.randn(128, 512), torch.randn(512)
start = time.process_time()
output_code(lambda x, bias: torch.relu(x + bias), x, bias)
print(time.process_time() - start)
"""


@no_gpu
def test_speed_of_the_first_call():
    result = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True
    )
    assert float(result.stdout) <= yardstick.for_python(5), result.stdout


# --- TORCH_LOGS -------------------------------------------------------------------------------------------

SCRIPT = """
import lib
from lib.nogpu.inductor import output_code
import torch
output_code(lambda x, bias: torch.relu(x + bias), torch.randn(128, 512), torch.randn(512))
"""


def test_torch_logs_shows_the_same_text_once(code_of):
    log = without_log_prefixes(shell("TORCH_LOGS=output_code python script.py", script=SCRIPT))
    assert log.count("@triton.jit") == 1
    assert normalize(log).strip() == normalize(code_of("bias_relu")).strip()


def test_a_script_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        shell("python script.py", script="1 / 0")


# --- the fake GPU -----------------------------------------------------------------------------------------


@no_gpu
def test_nothing_of_the_fake_gpu_stays():
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering
    from torch.utils._triton import has_triton

    def state():
        return [
            dict(vars(torch.cuda)),
            dict(vars(CudaInterface)),
            torch.autograd.grad,
            triton.runtime.driver._active,
            torch.utils._triton.triton_backend,
            GraphLowering.save_output_code,
            PyCodeCache.load_by_key_path,
            has_triton(),
        ]

    output_code(softmax, torch.randn(4, 4))  # whatever torch imports and caches by itself
    before = state()
    output_code(bias_relu, torch.randn(4, 4, requires_grad=True), torch.randn(4))
    with pytest.raises(ZeroDivisionError):
        output_code(lambda x: x / (1 // 0), torch.randn(4))
    assert state() == before
    assert not torch.cuda.is_available()
    assert not has_triton()

    x = torch.randn(8, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert type(x.grad) is torch.Tensor


@no_gpu
def test_torch_compile_on_the_cpu_still_works():
    output_code(softmax, torch.randn(4, 4))
    x = torch.randn(33, requires_grad=True)
    compiled = torch.compile(lambda x: torch.sin(x) + 1)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(x).detach())
    assert torch.empty(1, device="cuda").device.type == "cpu"  # lib.nogpu.driver answers again


@no_gpu
def test_inside_the_fake_gpu():
    with fake_gpu():
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_properties(0).multi_processor_count == 132
        y = torch.randn(3, 4, device="cuda") @ torch.randn(4, 5, device="cuda")
        assert (y.shape, y.device.type) == ((3, 5), "cuda")
    assert not torch.cuda.is_available()


def test_grad_in_python_agrees_with_the_engine():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    h = torch.tanh(x + bias)  # used twice; bias is broadcast
    y, z = (h * h).sum(dim=1), torch.cat([h, x]).float()
    grad_outputs = [torch.randn_like(y), torch.randn_like(z)]
    inputs = [x, bias, h, unused]
    expected = torch.autograd.grad(
        [y, z], inputs, grad_outputs, allow_unused=True, retain_graph=True
    )
    for dx, dx_expected in zip(grad([y, z], inputs, grad_outputs), expected):
        if dx_expected is None:
            assert dx is None
        else:
            torch.testing.assert_close(dx, dx_expected, rtol=0, atol=1e-15)


# --- against a GPU ----------------------------------------------------------------------------------------

WRITE_ALL = """
import sys
from lib.tests.nogpu.test_inductor import CASES, make_inputs, output_code
for name, (fn, *_) in CASES.items():
    inputs, requires_grad = make_inputs(name)
    code = output_code(fn, *[t.requires_grad_(requires_grad) for t in inputs])
    open(f"{sys.argv[1]}/{name}.py", "w").write(code)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_text_without_a_gpu_is_the_text_of_a_gpu(code_of, tmp_path):
    """The text equals a GPU's, line by line. Only on a Hopper GPU, whose limits the fake one has."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fake GPU is an H200")
    root = os.path.dirname(os.path.dirname(lib.__file__))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", WRITE_ALL, tmp_path], env=environment, check=True)
    for name in CASES:
        without = normalize((tmp_path / f"{name}.py").read_text())
        assert without.splitlines() == normalize(code_of(name)).splitlines(), name


def test_lora_of_notebook_21_is_what_its_table_says_of_this_version():
    def lora_silu(x, w, a, b):
        return F.silu(F.linear(x, w) + 2.0 * F.linear(F.linear(x, a), b))

    inputs = [torch.randn(shape) for shape in [(128, 512), (256, 512), (8, 512), (256, 8)]]
    names = [k.name for k in kernels(output_code(lora_silu, *inputs))]
    mm, addmm = "extern_kernels.mm", "extern_kernels.addmm"
    assert names in (
        [mm, mm, mm, "triton_poi_fused_add_mul_silu_0"],  # PyTorch 2.11
        [mm, mm, "triton_poi_fused_mul_0", addmm, "triton_poi_fused_silu_1"],  # 2.15
    )
