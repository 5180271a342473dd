"""What is particular to gelu: its tails, traffic, 16-byte accesses at odd sizes, the shape of its CUDA code."""

import re
import subprocess

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.ops import gelu
from lib.recorded.results import ROOT

import pytest
import torch
import triton.language as tl

OP = registry.find("gelu")
forms = pytest.mark.parametrize("approximate", ["tanh", "none"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
versions = pytest.mark.parametrize("version", ["triton", "cuda"])


def of(module, version):
    """gelu_triton or gelu_cuda of a module; a mutant has no CUDA code beside it."""
    if version == "cuda" and (module is not gelu or cuda.why_no_cuda()):
        pytest.skip("there is no CUDA code, or nothing that builds it")
    return getattr(module, f"gelu_{version}")


@forms
@dtypes
@versions
def test_no_finite_x_gives_a_nan(module, version, dtype, approximate):
    """tanh by way of e²ᵘ/e²ᵘ is NaN from x = 10 on, and x³ overflows in float16 from 41 on."""
    run, top = of(module, version), torch.finfo(dtype).max
    x = torch.tensor([0.0, 5.0, 10.06, 11.0, 41.0, 100.0, 1e4, top], device=machine.device())
    x = torch.cat([x, -x]).to(dtype)
    y = run(x, approximate)
    assert torch.equal(y[2:8], x[2:8])
    assert (y[10:].abs() < 1e-6).all()
    x.requires_grad_()
    run(x, approximate).sum().backward()
    assert torch.isfinite(x.grad).all()


@forms
@dtypes
@versions
def test_infinities_and_nan(module, version, dtype, approximate):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan], dtype=dtype, device=machine.device())
    y = of(module, version)(x, approximate).tolist()
    assert y[0] == inf
    assert y[1] != y[1] and y[2] != y[2]  # torch's own limit at -inf is NaN too: -inf times 0


@forms
def test_tails_of_the_gradient_keep_their_digits(module, approximate):
    """Between 3 and 12 sigmoid(2u) is nearly 1, and 1 - sigmoid(2u) has few digits."""
    x = torch.linspace(-12, 12, 4801, device=machine.device(), requires_grad=True)
    check_against_float64(module.gelu_triton, OP.eager, x, approximate)
    (dx,) = torch.autograd.grad(module.gelu_triton(x, approximate).sum(), x)
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(OP.eager(exact, approximate).sum(), exact)
    assert (dx - want).abs().max() < machine.pick(gpu=1.2e-6, cpu=8e-7)


@forms
@versions
def test_negative_tails_keep_their_digits(module, version, approximate):
    """Where Φ is near 0, (1 + erf(x/√2))/2 has few digits: at -5 it is a twentieth off, and at -6 it is 0."""
    # further out the definition's own 1 + tanh, 1 + erf, has few
    far = 5 if approximate == "tanh" else 6
    x = -torch.linspace(1.5, far, 2000, device=machine.device())
    exact = x.double().requires_grad_()
    want = OP.eager(exact, approximate)
    (want_dx,) = torch.autograd.grad(want.sum(), exact)
    x.requires_grad_()
    y = of(module, version)(x, approximate)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=0)
    torch.testing.assert_close(dx.double(), want_dx, rtol=2e-5, atol=0)


@forms
def test_every_bfloat16_has_a_finite_gradient(module, approximate):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = every[torch.isfinite(every)].to(machine.device()).requires_grad_()
    (dx,) = torch.autograd.grad(module.gelu_triton(x, approximate).sum(), x)
    assert torch.isfinite(dx).all()
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(OP.eager(exact, approximate).sum(), exact)
    torch.testing.assert_close(dx.double(), want, rtol=2**-8, atol=1e-6)


@forms
@versions
@pytest.mark.parametrize("shape", [(), (1023,), (3, 0, 5)], ids=str)
def test_any_number_of_dimensions(module, version, shape, approximate):
    x = torch.randn(shape, device=machine.device(), requires_grad=True)
    check_against_float64(of(module, version), OP.eager, x, approximate)


@forms
@versions
def test_float64_is_exact(module, version, approximate):
    x = torch.linspace(-9, 9, 1003, dtype=torch.float64, device=machine.device())
    y = of(module, version)(x, approximate)
    assert (y - OP.eager(x, approximate)).abs().max() < 1e-13


def test_an_unknown_form_is_refused(module):
    x = torch.randn(3, device=machine.device())
    for function in (module.gelu_triton, module.gelu_op):
        with pytest.raises(ValueError, match="'none' .erf. or 'tanh', got 'erf'"):
            function(x, "erf")


def _compiled(kernel, n_tensors, dtype, n, tanh, gradient=False):
    x = torch.empty(1, dtype=dtype)
    strides = (0, 1, 0, 1, 0) if gradient else (0, 1, 0)
    plan = gelu._plan(1, n, dtype)
    signature = signature_of(
        kernel, *[x] * n_tensors, 1, n, *strides,
        ONE_ROW=True, TANH=tanh, COMPUTE=tl.float32, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
    )  # fmt: skip
    return compile_for(kernel, signature, arch=90)


@pytest.mark.parametrize("n", [524288 * 781, 2**31 + 7], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_tiles_move_sixteen_bytes_whatever_the_size(dtype, n):
    """One 16-byte load a tensor and thread where nothing is masked; the last tile has loads of its own."""
    for tanh in (True, False):
        forward = _compiled(gelu._gelu_fwd_kernel, 2, dtype, n, tanh)
        backward = _compiled(gelu._gelu_bwd_kernel, 3, dtype, n, tanh, gradient=True)
        for compiled, loads in ((forward, 1), (backward, 2)):
            mix, per_thread = instruction_mix(compiled), 16 // dtype.itemsize
            narrow = "E" if dtype == torch.float32 else "E.U16"
            assert mix["LDG.E.128"] == loads
            assert mix["STG.E.128"] == 1
            assert mix[f"LDG.{narrow}"] == loads * per_thread
            assert mix[f"STG.{narrow}"] == per_thread
            assert compiled.spills == 0


def test_the_tanh_form_computes_in_float32_only():
    for gradient, kernel in enumerate((gelu._gelu_fwd_kernel, gelu._gelu_bwd_kernel)):
        mix = instruction_mix(_compiled(kernel, 2 + gradient, torch.bfloat16, 4096, True, gradient))
        assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA|SETP)|F2F.*F64", op)]


def test_the_cuda_kernel_takes_what_starts_off_a_boundary():
    if cuda.why_no_cuda():
        pytest.skip(cuda.why_no_cuda())
    x = torch.randn(1000, device=machine.device())[1:]
    check_against_float64(gelu.gelu_cuda, OP.eager, x.requires_grad_())


def test_the_program_of_its_own_compiles(tmp_path):
    """nvcc -DSTANDALONE: no PyTorch. With a GPU it also runs, and says itself whether it is right."""
    from lib.nogpu.cuda_toolkit import find_nvcc

    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc")
    arch = "native" if machine.HAS_GPU else "sm_90"
    source, program = ROOT / "lib/ops/gelu.cu", tmp_path / "gelu"
    command = [nvcc, "-O3", f"-arch={arch}", "-DSTANDALONE", source, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warning" not in done.stderr, done.stderr[-2000:]
    if machine.HAS_GPU:
        done = subprocess.run([program, "1000003"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(" ok ") == 12
