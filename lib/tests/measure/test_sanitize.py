"""lib.measure.sanitize: products without cuBLAS are the same products."""

from lib import machine
from lib.measure.sanitize import ProductsOnTheCpu, main

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture
def operands(device):
    x, weight, bias = (torch.randn(*s, device=device) for s in ((5, 7), (3, 7), (3,)))
    return x, weight, bias


def products(x, weight, bias):
    """Each way in which ops call a product, also in place and with out=."""
    total = torch.empty(5, 3, device=x.device)
    return [
        x @ weight.t(),
        F.linear(x, weight, bias),
        torch.mm(x, weight.t(), out=total).clone(),
        torch.addmm(bias, x, weight.t(), out=total).clone(),
        total.addmm_(x, weight.t(), alpha=0.5),
        torch.full_like(total, 2.0).addmm_(x, weight.t(), beta=0, alpha=3.0),
    ]


def test_products_are_the_same(operands, monkeypatch):
    want, multiplied = products(*operands), []
    for name in ("mm", "addmm"):
        product = getattr(torch, name)

        def logged(*args, product=product, **kwargs):
            multiplied.append({a.device.type for a in args})
            return product(*args, **kwargs)

        monkeypatch.setattr(torch, name, logged)
    with ProductsOnTheCpu():
        got = products(*operands)
    # two products come from torch.mm and torch.addmm themselves, and so are logged twice
    extra, on_the_cpu = 2, multiplied.count({"cpu"})
    assert len(multiplied) == len(want) + extra
    assert on_the_cpu == len(want) + (0 if machine.HAS_GPU else extra)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_gradients_too(operands):
    x, weight, bias = (t.requires_grad_() for t in operands)
    want = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    with ProductsOnTheCpu(), torch.autograd.set_multithreading_enabled(False):
        got = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_sums_in_another_dtype(operands):
    """PyTorch's own CPU has no such product; a GPU has."""
    x, weight, _ = (t.bfloat16() for t in operands)
    total, want = torch.ones(len(x), len(weight), device=x.device), x.float() @ weight.float().t()
    with ProductsOnTheCpu():
        got = torch.mm(x, weight.t(), out_dtype=torch.float32)
        torch.addmm(total, x, weight.t(), out_dtype=torch.float32, out=total)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(total, want + 1)


@pytest.mark.skipif(machine.HAS_GPU, reason="there is a GPU")
def test_no_gpu_is_a_sentence():
    with pytest.raises(SystemExit, match="needs a GPU"):
        main([])
