"""What is particular to lora_epilogue: traffic of each activation, writing in place, its CUDA code."""

import functools
import re

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import lora_epilogue as op_file
from lib.ops.lora_epilogue import lora_epilogue_eager, lora_epilogue_triton, lora_epilogue_triton_
from lib.recorded.results import ROOT
from lib.tests.ops import battery, cases

import pytest
import torch
import triton.language as tl

OP = registry.find("lora_epilogue")
ACTIVATIONS = ["identity", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
SHAPE = (96, 640)


def inputs(shape=SHAPE, dtype=torch.float32, activation="relu"):
    return OP.all_configured()[activation].inputs(shape, dtype, machine.device())


def detached(*args, **kwargs):
    return [t.detach() for t in inputs(*args, **kwargs)]


# --- traffic -------------------------------------------------------------------------------------------------


@activations
def test_in_place_with_gradients_saves_z_where_it_has_to(activation):
    x, delta, bias = inputs()
    copy = x.clone()
    forward = count_traffic(lambda: lora_epilogue_triton_(copy, delta, bias, 0.5, activation))
    saves_z = activation in ("gelu", "gelu_tanh", "silu")
    assert forward.bytes_moved == (4 if saves_z else 3) * x.nbytes + bias.nbytes
    backward = count_traffic(lambda: copy.backward(torch.randn_like(x)))
    by = {name.rpartition(".")[2]: a for name, a in backward.by_argument.items()}
    assert by["dy_ptr"].loaded == x.nbytes
    assert "delta_ptr" not in by
    assert ("saved_ptr" in by) == (activation != "identity")


# --- values --------------------------------------------------------------------------------------------------


def test_rounded_once(module):
    """From bfloat16 to bfloat16 by way of float32 all along: not where eager rounds twice more."""
    x, delta, bias = detached((9, 40), torch.bfloat16)
    want = lora_epilogue_eager(x.float(), delta.float(), bias.float(), 0.5).bfloat16()
    assert torch.equal(module.lora_epilogue_triton(x, delta, bias, 0.5), want)


@pytest.mark.parametrize("scale", [0, 1, -2, 0.1, 1e30, float("inf"), float("nan")])
def test_any_scale(scale):
    for version in (lora_epilogue_triton, lora_epilogue_triton_):
        x, delta, bias = detached((5, 7))
        want = lora_epilogue_eager(x, delta, bias, scale, "relu")
        torch.testing.assert_close(version(x, delta, bias, scale, "relu"), want, equal_nan=True)


def test_a_large_bias_does_not_leak_out_of_rows_that_are_not_there(module):
    """Three rows in a tile of 64: for the other 61 z would be the bias alone, and its gradient NaN."""
    x, delta, bias = inputs((3, 40), activation="gelu")
    with torch.no_grad():
        bias[3], x[:, 3] = 3e38, -3e38
    how = {"scale": 0.5, "activation": "gelu"}
    version = functools.partial(module.lora_epilogue_triton, **how)
    check_against_float64(version, functools.partial(lora_epilogue_eager, **how), x, delta, bias)


def test_z_is_computed_again_from_any_layout(module):
    how = {"scale": 0.5, "activation": "silu"}
    version = functools.partial(module.lora_epilogue_triton, **how)
    eager = functools.partial(lora_epilogue_eager, **how)
    x, delta, bias = (t.detach() for t in inputs((9, 40)))
    for layout, strided in cases.layouts(x).items():
        for given in ((strided, delta), (delta, strided)):
            leaves = [t.detach().requires_grad_() for t in given]
            check_against_float64(version, eager, *leaves, cases.spread(bias), name=layout)


def test_many_rows_are_summed_by_many_programs():
    x, delta, bias = inputs((300_000, 1))
    y = lora_epilogue_triton(x, delta, bias, 0.5, "relu")
    y.sum().backward()
    assert bias.grad.item() == (y > 0).sum().item()


def test_the_definition_is_what_a_lora_layer_computes():
    """The names: x is the frozen layer without its bias, delta the low-rank product."""
    h, weight = torch.randn(5, 16), torch.randn(40, 16)
    a, b, bias = torch.randn(16, 4), torch.randn(4, 40), torch.randn(40)
    want = torch.relu(torch.nn.functional.linear(h, weight + 0.5 * (a @ b).t(), bias))
    got = lora_epilogue_eager(h @ weight.t(), h @ a @ b, bias, 0.5, "relu")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_compiled_with_a_scale_that_changes():
    """torch.compile takes a float that changes for a variable, and in some versions for a float64 tensor."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, delta, bias, scale: lora_epilogue_triton(x, delta, bias, scale, "silu"),
        fullgraph=True,
        backend="aot_eager",
    )
    for scale in (0.5, 0.7, 2, -1.25):
        tensors = inputs((5, 8))
        want = lora_epilogue_eager(*tensors, scale, "silu")
        got = compiled(*tensors, scale)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(y.sum(), tensors) for y in (got, want))):
            torch.testing.assert_close(a, b)


# --- in place ------------------------------------------------------------------------------------------------


@activations
def test_in_place_writes_into_x_and_returns_it(module, activation):
    for layout, x in cases.layouts(inputs((34, 40))[0].detach()).items():
        if layout == "expanded row":
            continue
        _, delta, bias = detached(x.shape)
        want = lora_epilogue_eager(x, delta, bias, 0.5, activation)
        version = x._version
        y = module.lora_epilogue_triton_(x, delta, bias, 0.5, activation)
        assert y.data_ptr() == x.data_ptr(), layout
        assert x._version == version + 1, layout
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5, msg=layout)


def test_in_place_leaves_what_lies_between_the_rows():
    wide = torch.full((8, 100), 7.0, device=machine.device())
    x = wide[::2, 3:43]
    _, delta, bias = detached((4, 40))
    lora_epilogue_triton_(x, delta, bias)
    untouched = torch.ones_like(wide, dtype=torch.bool)
    untouched[::2, 3:43] = False
    assert (wide[untouched] == 7).all()
    assert not (wide[~untouched] == 7).any()


def test_in_place_where_no_view_has_rows(module):
    """(B, S, H, D) permuted has no (M, N) view: computed in a copy, then written back."""
    base = torch.randn(8, 4, 3, 2, device=machine.device())
    x = base.permute(3, 1, 2, 0)
    delta, bias = torch.randn_like(x), torch.randn(8, device=machine.device())
    want = lora_epilogue_eager(x, delta, bias, 0.5, "silu")
    y = module.lora_epilogue_triton_(x, delta, bias, 0.5, "silu")
    torch.testing.assert_close(base.permute(3, 1, 2, 0), want)
    assert y.data_ptr() == base.data_ptr()


def test_in_place_a_tensor_saved_before_is_noticed():
    """exp saves its result for its backward pass: written over, autograd has to say so."""
    x, delta, bias = inputs((5, 7))
    y = lora_epilogue_triton_(x.exp(), delta, bias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_a_result_changed_afterwards_is_noticed():
    x, delta, bias = inputs((5, 7))
    y = lora_epilogue_triton_(x.clone(), delta, bias, 0.5, "relu")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_on_a_slice_of_what_has_gradients():
    x, delta, bias = inputs((6, 8))
    again = x.detach().clone().requires_grad_()
    whole = x * 1
    lora_epilogue_triton_(whole[2:4], delta[2:4], bias, 0.5, "gelu")
    want = torch.cat(
        [again[:2], lora_epilogue_eager(again[2:4], delta[2:4], bias, 0.5, "gelu"), again[4:]]
    )
    torch.testing.assert_close(whole, want)
    whole.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


def test_in_place_refuses_what_must_not_be_written(module):
    x, delta, bias = detached((4, 6))
    leaf = x.clone().requires_grad_()
    wide = torch.randn(4, 9, device=machine.device())
    storage = torch.randn(30, device=machine.device())
    for bad, message in [
        ((x[:1].expand(4, 6), delta, bias), "are one in memory"),
        ((storage.as_strided((4, 6), (3, 1)), delta, bias), "are one in memory"),
        ((leaf, delta, bias), "leaf that requires grad"),
        ((leaf[:], delta, bias), "leaf that requires grad"),
        ((x, x, bias), "delta shares memory"),
        ((wide[:, :6], wide[:, 3:], bias), "delta shares memory"),
        ((wide[:, :6], delta, wide[0, :6]), "bias shares memory"),
        ((storage.as_strided((3, 4), (8, 1)), *_behind(storage, 5)), "delta shares memory"),
    ]:
        before = bad[0].detach().clone()
        with pytest.raises(ValueError, match=f"lora_epilogue_triton_: .*{message}"):
            module.lora_epilogue_triton_(*bad)
        assert torch.equal(before, bad[0]), "refused, and written all the same"
    with torch.no_grad():
        module.lora_epilogue_triton_(
            leaf, delta, bias
        )  # as torch: under no_grad a leaf may be written


def _behind(storage, offset):
    """A delta of the strides that x has in the same storage, which begins `offset` elements behind it; bias."""
    return storage.as_strided((3, 4), (8, 1), offset), torch.zeros(4, device=storage.device)


def test_in_place_takes_parts_of_one_tensor(module):
    """Both halves, by any dimension: they lie in one storage and share no element."""
    for shape in [(4, 12), (3, 4, 2, 8)]:
        for dim in range(len(shape)):
            if shape[dim] % 2 == 0:
                halves = torch.randn(shape, device=machine.device()).chunk(2, dim)
                for x, delta in (halves, halves[::-1]):
                    bias = torch.randn(x.shape[-1], device=machine.device())
                    want, before = lora_epilogue_eager(x, delta, bias), delta.clone()
                    module.lora_epilogue_triton_(x, delta, bias)
                    torch.testing.assert_close(x, want)
                    assert torch.equal(delta, before)
    x, delta = torch.randn(3, 8, device=machine.device()).chunk(2, -1)
    module.lora_epilogue_triton_(x[:0], delta[:0], delta[0])  # of no elements


def test_bad_arguments_are_refused():
    x, delta, bias = detached((4, 6))
    with pytest.raises(
        ValueError, match="one of identity, relu, gelu, gelu_tanh, silu, sigmoid; got 'tanh'"
    ):
        lora_epilogue_triton(x, delta, bias, 1.0, "tanh")
    with pytest.raises(TypeError, match="scale must be a Python number, got Tensor"):
        lora_epilogue_triton(x, delta, bias, torch.tensor(1.0))
    with pytest.raises(ValueError, match="delta must have the shape of x"):
        lora_epilogue_triton(x, delta[0], bias)


# --- machine code --------------------------------------------------------------------------------------------


def _compiled(kernel, args, block_m, block_n, warps, **constexprs):
    signature = signature_of(
        kernel, *args, COMPUTE=tl.float32, BLOCK_M=block_m, BLOCK_N=block_n, **constexprs
    )
    signature.types["scale"] = "fp64"  # as the kernel's annotation says; a launch goes by that
    return compile_for(kernel, signature, arch=90, num_warps=warps)


@activations
def test_sixteen_byte_accesses_no_spills_and_one_double(activation):
    x, bias = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    partial = torch.empty(8, 4096)
    forward = _compiled(
        op_file._lora_epilogue_fwd_kernel,
        (x, x, bias, x, None, 0.5, 64, 4096, 4096, 1, 4096, 1, 4096, 1),
        *op_file._plan(4096, torch.bfloat16)[:2], 4, ACTIVATION=activation,
    )  # fmt: skip
    recomputes = activation in ("gelu", "gelu_tanh", "silu")
    saved = None if activation == "identity" else x
    backward = _compiled(
        op_file._lora_epilogue_bwd_kernel,
        (x, saved, *((x, bias) if recomputes else (None, None)), x, x, partial, 0.5, 64, 4096)
        + (4096, 1) * 3 + (64,),
        *op_file._plan_backward(4096, torch.bfloat16)[:2], 8, ACTIVATION=activation, NUM_STAGES=3,
    )  # fmt: skip
    for compiled in (forward, backward):
        mix = instruction_mix(compiled)
        memory = {op for op in mix if op.startswith(("LDG.E", "STG.E"))}
        assert not {op for op in memory if op.startswith("LDG.E.U16") or op == "STG.E.U16"}, memory
        assert compiled.spills == 0
        # scale comes as a double, and is one float32 from then on
        assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA)", op)]
        assert sum(n for op, n in mix.items() if op.startswith("F2F.F32.F64")) in (1, 2)
    assert {op for op in instruction_mix(forward) if op.startswith(("LDG.E", "STG.E"))} == {
        "LDG.E.128",
        "STG.E.128",
    }


@pytest.mark.parametrize("n_rows", [64, 70])
def test_cuda_is_given_wide_rows_and_those_left_over(module, n_rows):
    """Rows of an odd width; all contiguous, of one dtype, and between them all of y."""
    x, delta, bias = detached((n_rows, 3))
    half, spread = x.half(), torch.stack([bias] * 2, dim=1)[:, 0]
    across = torch.stack([delta] * 2, dim=2)[..., 0]
    shapes = []

    def forward(x, delta, bias, y, scale, activation):
        assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (x, delta, bias, y))
        shapes.append(tuple(x.shape))
        y.copy_(
            lora_epilogue_eager(
                x, delta, bias, scale, list(battery.host_of(module).ACTIVATIONS)[activation]
            )
        )

    with battery.cuda_calls(module, forward), cases.empty_is_nan():
        y = module.lora_epilogue_cuda(half, delta, spread, 0.5, "silu")
        same = module.lora_epilogue_cuda(half, across, spread, 0.5, "silu")
    torch.testing.assert_close(y, lora_epilogue_eager(half, delta, bias, 0.5, "silu"))
    torch.testing.assert_close(same, y)
    left_over = [(n_rows - 64, 3)] * (n_rows > 64)
    assert shapes == [(4, 48), *left_over, (n_rows, 3)]  # where there are gaps, none are folded


def test_the_broken_kernel_is_broken():
    """The exercise's kernel: right on the shape it was tested on, wrong on others, silent about both."""

    if cuda.cuda_build.why_no_compiler():
        pytest.skip(cuda.cuda_build.why_no_compiler())
    source = (ROOT / "lib/exercises/broken_lora.cu").read_text()
    broken = cuda.load_cuda_on_cpu(source, ["lora_epilogue"], name="broken_lora")
    for (m, n), right in [((8, 8), True), ((8, 64), True), ((64, 8), False), ((2, 2000), False)]:
        x, delta, bias = torch.randn(m, n), torch.randn(m, n), torch.randn(n)
        y = broken.lora_epilogue(x, delta, bias, 0.5)
        want = lora_epilogue_eager(x, delta, bias, 0.5, "relu")
        assert torch.allclose(y, want, atol=1e-5) == right, (m, n)


def test_sums_of_folded_rows_are_rounded_once(module):
    """One strip of wide rows has a sum for each row in it, which is not dbias yet."""
    t = torch.ones(64, 3, dtype=torch.bfloat16, device=machine.device())
    how = None, None, t, None, None, 1.0, "identity", t.dtype
    partial = module._launch_backward(None, t, *how)
    assert partial.dtype == torch.float32 and len(partial) == 16
