"""Attention and rms_norm as one call each way: shapes, gradients, and nothing left behind."""

from lib.nogpu.one_call import as_on_gpu

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def attention():
    q, k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v)


def norm():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    return F.rms_norm(x, (8,), weight, 1e-6), (x, weight)


@pytest.mark.parametrize(("call", "name"), [(attention, "attention"), (norm, "rms_norm")])
def test_a_call_is_one_op_each_way_with_eagers_shapes(call, name):
    want, leaves = call()
    with as_on_gpu(), Ops() as forward:
        y, leaves = call()
    with Ops() as backward:
        gradients = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == want.shape
    assert [g.shape for g in gradients] == [leaf.shape for leaf in leaves]
    assert forward.names.count(f"one_call::{name}") == 1
    assert backward.names.count(f"one_call::{name}_backward") == 1


def test_only_what_is_asked_for_is_replaced_and_all_comes_back():
    before = F.rms_norm, F.scaled_dot_product_attention
    with as_on_gpu("rms_norm"):
        assert F.rms_norm is not before[0] and F.scaled_dot_product_attention is before[1]
    assert (F.rms_norm, F.scaled_dot_product_attention) == before
