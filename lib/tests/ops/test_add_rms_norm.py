"""What is particular to add_rms_norm: traffic, wide rows, the h whose norm is taken, the shape of its code."""

import functools
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import _host as host
from lib.ops import add_rms_norm
from lib.ops.add_rms_norm import add_rms_norm_eager, add_rms_norm_triton
from lib.tests.ops import battery

import pytest
import torch

OP = registry.find("add_rms_norm")


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


@pytest.mark.parametrize(
    ("n_rows", "several"), [(4, False), (40, True)], ids=["one strip", "strips"]
)
def test_sums_over_rows_are_rounded_once(module, n_rows, several):
    given = inputs((n_rows, 64), torch.bfloat16)
    battery.check_strips(
        module, lambda: module.add_rms_norm_triton(*given)[0].sum().backward(), several
    )


def test_without_a_gradient_of_h_nothing_is_read_for_it():
    x, residual, weight = inputs((8, 64))
    y, _ = add_rms_norm_triton(x, residual, weight)
    traffic = count_traffic(lambda: y.backward(torch.ones_like(y)))
    assert "_add_rms_norm_bwd_kernel.dh_ptr" not in traffic.by_argument


def test_rows_that_begin_elsewhere_in_their_pieces(module):
    """Rows of 259 share their pieces of 16 bytes; those of the residual, 262 apart, begin at other places."""
    x, residual, weight = inputs((9, 259))
    apart = residual.new_zeros(9, 262)[:, :259].copy_(residual).detach().requires_grad_()
    check_against_float64(module.add_rms_norm_triton, OP.eager, x, apart, weight)


def test_only_one_of_the_two_results_used(module):
    """The gradient of the other is none, eager's and ours."""
    for k in range(2):
        eager, ours = inputs((9, 33)), inputs((9, 33))
        grads = []
        for run, given in ((add_rms_norm_eager, eager), (module.add_rms_norm_triton, ours)):
            result = run(*given)[k]
            grads.append(torch.autograd.grad(result.square().sum(), given[:2]))
        torch.testing.assert_close(*grads)


def test_the_norm_is_that_of_the_h_it_returns(module):
    """In bfloat16 1 + 1/256 + 1/256 rounds to 1: the h that everybody else sees, and no other, is normed."""
    x = torch.full((4, 64), 1 / 256, dtype=torch.bfloat16, device=machine.device())
    residual, weight = torch.ones_like(x), torch.ones_like(x[0])
    residual[:, ::2] = 2
    x[:, 1::2] = 3 / 256  # 1 + 3/256 rounds up to 1 + 4/256
    y, h = module.add_rms_norm_triton(x, residual, weight)
    assert h.unique().tolist() == [1 + 4 / 256, 2.0]
    exact = h.double() / (h.double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(y, exact.bfloat16())


def test_rows_of_zeros(module):
    """eps alone is what they are divided by: no 0 / 0."""
    x, residual, weight = inputs((4, 40))
    zeros = [torch.zeros_like(t).requires_grad_() for t in (x, residual)]
    y, h = module.add_rms_norm_triton(*zeros, weight, 1e-4)
    y.sum().backward()
    assert not y.any() and not h.any()
    torch.testing.assert_close(zeros[0].grad, (100 * weight).expand_as(x).detach())


@pytest.mark.parametrize("n_cols", [4096, 8193, 32768])
def test_wide_rows(n_cols):
    check_against_float64(add_rms_norm_triton, add_rms_norm_eager, *inputs((3, n_cols)))


def test_the_module_takes_the_state_of_rms_norm():
    replaced = torch.nn.RMSNorm(24, eps=1e-3).to(machine.device())
    torch.nn.init.normal_(replaced.weight)
    fused = add_rms_norm.AddRMSNorm(24, eps=1e-3).to(machine.device())
    fused.load_state_dict(replaced.state_dict())
    x, residual = (t.detach() for t in inputs((2, 3, 24))[:2])
    y, h = fused(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, replaced(x + residual))
    assert repr(fused).startswith("AddRMSNorm((24,), eps=0.001")


def test_alone_it_is_rms_norm_and_no_module_has_other_parameters():
    replaced = torch.nn.RMSNorm(24, eps=1e-3).to(machine.device())
    torch.nn.init.normal_(replaced.weight)
    fused = add_rms_norm.AddRMSNorm(24, eps=1e-3).to(machine.device())
    replaced.load_state_dict(fused.state_dict())
    fused.load_state_dict(replaced.state_dict())
    x = inputs((7, 24))[0]
    y, want = fused(x), replaced(x)
    torch.testing.assert_close(y, want)
    grads = (torch.autograd.grad(t.square().sum(), x) for t in (y, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("n_cols", [24, 8200])
def test_1_is_added_in_float32(module, n_cols):
    """In bfloat16 1 + 1/512 is 1; forward and backward, also of a row that is read twice."""
    x, dy = (inputs((3, n_cols), torch.bfloat16)[k].detach() for k in (0, 1))
    x *= 1.37  # times a root near 1 they would all be rounded back to what they are
    norm = module.AddRMSNorm(n_cols, dtype=torch.bfloat16, device=x.device, plus_one=True)
    assert not norm.weight.any() and "plus_one=True" in repr(norm)
    torch.nn.init.constant_(norm.weight, 1 / 512)
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    y, want = norm(x.requires_grad_()), add_rms_norm_eager(exact[0], None, exact[1], 1e-6, True)
    grads = *torch.autograd.grad(y, x, dy), *torch.autograd.grad(want, exact[0], dy.double())
    for got, number in ((y, want), grads):
        torch.testing.assert_close(got.double(), number, rtol=2**-8, atol=2**-8)
        # each is rounded up or down, and all together are not off by 1/512
        assert ((got / number).nanmean() - 1).abs() < 5e-4  # 0 / 0 where x is 0


def test_what_is_no_bool_is_refused(module):
    with pytest.raises(TypeError, match="plus_one must be True or False, got 1"):
        module.add_rms_norm_triton(*inputs((2, 8)), plus_one=1)


def test_rows_that_do_not_fit_are_refused(module):
    x = torch.zeros(1, 32769, device=machine.device())
    with pytest.raises(ValueError, match="at most 32768 .* use add_rms_norm_eager"):
        module.add_rms_norm_triton(x, x, x[0])


def compiled_kernels(n_cols, dtype):
    """The kernels of both passes on rows of so many columns, compiled for an H100: {name: kernel}."""
    x, weight = torch.empty(64, n_cols, dtype=dtype), torch.empty(n_cols, dtype=dtype)
    plan = add_rms_norm._plan(n_cols, dtype.itemsize)
    launches = []
    with (
        mock.patch.object(host, "run", lambda *a, **k: launches.append((a, k))),
        mock.patch.object(host, "shared_memory", return_value=99 * 1024),  # as on Ada
        mock.patch.object(host, "n_multiprocessors", return_value=132),
    ):
        add_rms_norm._launch(plan, x, x, weight, x, x, 1e-6, False)
        add_rms_norm._launch_backward(None, x, x, x, weight, x, 1e-6, False, dtype)
    return {
        kernel.__name__: _compiled(kernel, *rest, **how) for (kernel, _, *rest), how in launches
    }


def _compiled(kernel, tensors, *sizes, num_warps, **constants):
    signature = signature_of(kernel, *tensors, *sizes, **constants)
    return compile_for(kernel, signature, arch=90, num_warps=num_warps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_cols", [1024, 4096, 8191, 16384, 20000])
def test_wide_accesses_and_little_in_local_memory(n_cols, dtype):
    for name, compiled in compiled_kernels(n_cols, dtype).items():
        memory = {op for op in instruction_mix(compiled) if op.startswith(("LDG", "STG"))}
        assert any(op.startswith("LDG") and "E.U16" not in op for op in memory), (name, memory)
        assert n_cols == 8191 or not any("U16" in op for op in memory), (name, memory)
        # three rows and a sum take all the registers of a thread, and at times some more
        assert compiled.spills <= (64 if "bwd" in name and n_cols > 4096 else 0), name
        assert compiled.shared_bytes <= 99 * 1024, name


def test_dweight_of_the_longest_rows_is_summed_in_strips(module):
    """By a kernel of its own: in strips of 8 rows, four at a time, and in 33 tiles, the last of 4 columns."""
    check_against_float64(module.add_rms_norm_triton, OP.eager, *inputs((150, 16388)))


def test_gradients_of_strides_0_where_rows_are_read_twice(module):
    """y.sum() + h.sum() sends one number each for all elements."""
    eager, ours = inputs((3, 16388)), inputs((3, 16388))
    grads = []
    for run, given in ((add_rms_norm_eager, eager), (module.add_rms_norm_triton, ours)):
        y, h = run(*given)
        grads.append(torch.autograd.grad(y.sum() + h.sum(), given))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_a_strip_of_wide_rows_ends_with_the_last_row(module):
    tiles = host.RowTiles(4, 2048, 5, 16, 4)  # four rows in the strip, of which three are there
    version = functools.partial(
        module.add_rms_norm_triton,
        plan=module.Plan(host.row_tiles(8193, 4), module.Backward(tiles, 1)),
    )
    check_against_float64(version, OP.eager, *inputs((3, 8193)))
