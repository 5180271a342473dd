"""What is particular to layer_norm: rows far from 0 and of one number, what is left out, its compiled code."""

import functools
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import _host as host
from lib.ops import layer_norm
from lib.ops.layer_norm import layer_norm_eager, layer_norm_triton
from lib.tests.ops import battery, cases

import pytest
import torch
import triton

OP = registry.find("layer_norm")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


# --- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [1, 7, 33, 187, 259, 1000])
def test_rows_far_from_zero(module, n_cols):
    """Of numbers near 1e4 with a deviation of 0.5, mean(h²) - mean² has no digit, and what pads counts 1e8."""
    x, residual, weight, bias = inputs((40, n_cols))
    with torch.no_grad():
        x.mul_(0.5).add_(1e4)
        residual.mul_(0.01)
    check_against_float64(module.layer_norm_triton, layer_norm_eager, x, residual, weight, bias)
    y, h = module.layer_norm_triton(x, residual, weight, bias)
    exact = layer_norm_eager(h.double(), None, weight.double(), bias.double())
    # the mean is right to half a unit in the last place, 5e-4, and the least deviation of a row about 0.2
    assert (y - exact).abs().max() < 3e-3 * weight.abs().max() + 1e-5


@pytest.mark.parametrize("value", [0.0, -3.7, 1e4 / 3, 3e38])
@pytest.mark.parametrize("n_cols", [1, 33, 259])
def test_rows_of_one_number(module, value, n_cols):
    """Their variance is exactly 0, eps alone is what they are divided by, and their sum may overflow."""
    x, _, weight, bias = (t.detach() for t in inputs((5, n_cols)))
    x = torch.full_like(x, value) / torch.arange(1, 6, device=x.device)[:, None]
    for given in ((x, None), (0.25 * x, 0.75 * x)):
        x = given[0].requires_grad_()
        y = battery.outputs(module.layer_norm_triton(*given, weight, bias, 1e-4))[0]
        assert torch.equal(y, bias.expand_as(y))
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        g = (dy * weight).double()
        want = (100 * (g - g.mean(1, keepdim=True))).float()
        torch.testing.assert_close(dx, want, rtol=1e-5, atol=1e-4)


def test_the_norm_is_that_of_the_h_it_returns(module):
    """In bfloat16 1 + 1/256 + 1/256 rounds to 1: the h that everybody else sees, and no other, is normed."""
    x = torch.full((4, 64), 1 / 256, dtype=torch.bfloat16, device=machine.device())
    residual = torch.ones_like(x)
    residual[:, ::2] = 2
    x[:, 1::2] = 3 / 256  # 1 + 3/256 rounds up to 1 + 4/256
    y, h = module.layer_norm_triton(x, residual)
    assert h.unique().tolist() == [1 + 4 / 256, 2.0]
    assert torch.equal(y, layer_norm_eager(h.double()).bfloat16())


def test_rows_that_begin_elsewhere_in_their_pieces(module):
    """Rows of 259 share their pieces of 16 bytes; those of the residual, 262 apart, begin at other places."""
    x, residual, weight, bias = inputs((9, 259))
    apart = residual.new_zeros(9, 262)[:, :259].copy_(residual).detach().requires_grad_()
    check_against_float64(module.layer_norm_triton, OP.eager, x, apart, weight, bias)


@pytest.mark.parametrize("n_cols", [4096, 8193, 32768])
def test_wide_rows(n_cols):
    check_against_float64(layer_norm_triton, layer_norm_eager, *inputs((3, n_cols)))


@pytest.mark.parametrize("trained", ["residual, weight, bias", "weight", "bias", "x"])
@pytest.mark.parametrize("n_cols", [12292, 16388])
def test_sums_of_the_longest_rows(module, n_cols, trained):
    """dbias by a kernel of its own, or both by columns; with the gradient of x, and dweight or dbias alone."""
    given = inputs((35, n_cols))
    given = [t.requires_grad_(name in trained) for name, t in zip(OP.tensors, given)]
    check_against_float64(module.layer_norm_triton, OP.eager, *given)


@pytest.mark.parametrize("n_cols", [12292, 16388])
def test_gradients_of_strides_0_of_the_longest_rows(module, n_cols):
    """y.sum() + h.sum() sends one number each for all elements."""
    eager, ours = inputs((3, n_cols)), inputs((3, n_cols))
    grads = []
    for run, given in ((layer_norm_eager, eager), (module.layer_norm_triton, ours)):
        y, h = run(*given)
        grads.append(torch.autograd.grad(y.sum() + h.sum(), given))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_a_strip_of_wide_rows_ends_with_the_last_row(module):
    tiles = host.RowTiles(4, 2048, 5, 32, 4)  # four rows in the strip, of which three are there
    plan = module.Plan(host.row_tiles(8193, 4), module.Backward(tiles, 1))
    version = functools.partial(module.layer_norm_triton, plan=plan)
    check_against_float64(version, OP.eager, *inputs((3, 8193)))


# --- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_rows", "several"), [(4, False), (40, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = inputs((n_rows, 64), torch.bfloat16)
    battery.check_strips(
        module, lambda: module.layer_norm_triton(*given)[0].sum().backward(), several
    )


def test_both_sums_take_one_launch(module):
    given = inputs((40, 64))
    y, _ = module.layer_norm_triton(*given)
    assert count_traffic(lambda: y.sum().backward()).launches == 2


def test_weight_and_bias_of_other_dtypes_than_x_and_than_each_other(module):
    x, residual, weight, bias = (t.detach() for t in inputs((40, 33)))
    given = x.bfloat16(), residual.bfloat16(), weight, bias.half()
    given = [t.requires_grad_() for t in given]
    check_against_float64(module.layer_norm_triton, OP.eager, *given)
    y, h = module.layer_norm_triton(*given)
    assert y.dtype == h.dtype == torch.bfloat16


def test_only_one_of_the_two_results_used(module):
    """The gradient of the other is none, eager's and ours."""
    for k in range(2):
        eager, ours = inputs((9, 33)), inputs((9, 33))
        grads = []
        for run, given in ((layer_norm_eager, eager), (module.layer_norm_triton, ours)):
            result = run(*given)[k]
            grads.append(torch.autograd.grad(result.square().sum(), given[:2]))
        torch.testing.assert_close(*grads)


def test_without_a_gradient_of_h_nothing_is_read_for_it():
    given = inputs((8, 64))
    y, _ = layer_norm_triton(*given)
    traffic = count_traffic(lambda: y.backward(torch.ones_like(y)))
    assert "_layer_norm_bwd_kernel.dh_ptr" not in traffic.by_argument


def test_mean_and_root_are_written_for_the_backward_pass_alone():
    given = inputs((8, 64))
    for call, written in ((OP.eager, {}), (layer_norm_triton, {"stats_ptr"})):
        with torch.set_grad_enabled(bool(written)):
            seen = count_traffic(lambda: layer_norm_triton(*given)).by_argument
        assert {name.split(".")[1] for name in seen if "stats" in name} == {*written}, call


# --- the module ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"bias": False}, {"elementwise_affine": False}], ids=["affine", "no bias", "plain"]
)
def test_the_module_takes_the_place_of_layer_norm(module, how):
    replaced = torch.nn.LayerNorm(24, 1e-3, **how).to(machine.device())
    for parameter in replaced.parameters():
        torch.nn.init.normal_(parameter)
    fused = module.AddLayerNorm(24, 1e-3, **how).to(machine.device())
    fused.load_state_dict(replaced.state_dict())
    replaced.load_state_dict(fused.state_dict())
    x, residual = inputs((2, 3, 24))[:2]
    y, h = fused(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, replaced(x + residual))
    y, want = fused(x), replaced(x)
    torch.testing.assert_close(y, want)
    grads = (torch.autograd.grad(t.square().sum(), x) for t in (y, want))
    torch.testing.assert_close(*grads)
    assert repr(fused) == f"Add{replaced!r}"


def test_several_dimensions_and_other_widths_are_refused(module):
    with pytest.raises(ValueError, match=r"over the last dimension, got \(3, 4\); flatten"):
        module.AddLayerNorm((3, 4))
    plain = module.AddLayerNorm([4], elementwise_affine=False)
    with pytest.raises(ValueError, match=r"x must be \(..., 4\), got shape \(2, 5\)"):
        plain(torch.zeros(2, 5, device=machine.device()))


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), "1e-5", True, None])
def test_a_wrong_eps_is_refused(module, eps):
    with pytest.raises(ValueError, match="eps must be a number, 0 or more, got"):
        module.layer_norm_triton(*inputs((2, 8)), eps)


def test_rows_that_do_not_fit_are_refused(module):
    x = torch.zeros(1, 32769, device=machine.device())
    with pytest.raises(ValueError, match="at most 32768 .* use layer_norm_eager"):
        module.layer_norm_triton(x)


# --- the compiled code ---------------------------------------------------------------------------------------


def compiled_kernels(n_cols, dtype):
    """The kernels of both passes on rows of so many columns, compiled for an H100: [(name, kernel)]."""
    x, weight = torch.empty(64, n_cols, dtype=dtype), torch.empty(n_cols, dtype=dtype)
    stats, launches = torch.empty(2, 64), []
    with (
        mock.patch.object(host, "run", lambda *a, **k: launches.append((a, k))),
        mock.patch.object(host, "shared_memory", return_value=99 * 1024),  # as on Ada
        mock.patch.object(host, "n_multiprocessors", return_value=132),
    ):
        plan = layer_norm._plan(n_cols, dtype.itemsize)
        layer_norm._launch(plan, x, x, weight, weight, x, x, stats, 1e-5)
        layer_norm._launch_backward(None, x, x, x, stats, weight, x, (weight, weight))
    return [
        (kernel.__name__, _compiled(kernel, *rest, **how))
        for (kernel, _, *rest), how in launches
        if kernel.__name__.startswith("_layer_norm")
    ]


def _compiled(kernel, tensors, *sizes, num_warps, **constants):
    signature = signature_of(kernel, *tensors, *sizes, **constants)
    return compile_for(kernel, signature, arch=90, num_warps=num_warps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_cols", [1024, 4096, 8191, 12288, 16384, 20000, 32768])
def test_wide_accesses_and_little_in_local_memory(n_cols, dtype):
    for name, compiled in compiled_kernels(n_cols, dtype):
        mix = instruction_mix(compiled)
        narrow = sum(n for op, n in mix.items() if op.startswith(("LDG", "STG")) and "U16" in op)
        assert any(op.startswith(("LDG", "LDGSTS")) and "U16" not in op for op in mix), name
        # the first numbers of a row of x and of residual are looked up alone: before Triton 3.9 twice each, at
        # one address
        times = 2 if cases.release(triton) < (3, 9) else 1
        assert n_cols == 8191 or narrow <= (2 * times if "fwd" in name else 0), (name, mix)
        # the longest held rows take all the registers of a thread, and of Triton 3.9 some more
        most = 8 if "fwd" in name else 16 if 10240 < n_cols <= 16384 else 0
        assert compiled.spills <= most, (name, compiled.spills)
        assert compiled.shared_bytes <= 99 * 1024, name


def test_without_weight_and_bias_it_compiles():
    """What is None may be an error of Triton's compiler alone."""
    x, stats, launches = torch.empty(64, 1024), torch.empty(2, 64), []
    with (
        mock.patch.object(host, "run", lambda *a, **k: launches.append((a, k))),
        mock.patch.object(host, "n_multiprocessors", return_value=132),
    ):
        plan = layer_norm._plan(1024, 4)
        layer_norm._launch(plan, x, None, None, None, None, x, None, 1e-5)
        layer_norm._launch_backward(None, x, None, x, stats, None, x, (None, None))
    for (kernel, _, *rest), how in launches:
        assert _compiled(kernel, *rest, **how).spills == 0
