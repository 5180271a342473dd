"""Which ops fit a module, and what the compiler leaves unfused: the patterns as people write them."""

from lib.models import fits, gpt2, llama

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Written(nn.Module):
    """A module whose forward pass is a function of its layers and of x."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def linear(rows=8):
    return nn.Linear(8, rows)


def ops_of(module, *inputs):
    return {row["op"]: row["times"] for row in fits.ops_that_fit(module, *inputs)}


X = torch.randn(2, 4, 8)


def _scores(m, x):
    q, k, v = m.a(x), m.b(x), m.c(x)
    weights = torch.softmax(
        (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(4, 4) == 0, -1), -1
    )
    return F.dropout(weights, 0.1) @ v


def _by_hand(m, x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * m.w


def _rotate_half(m, x):
    a, b = x.chunk(2, dim=-1)
    return x * 0.5 + torch.cat((-b, a), dim=-1) * 0.5


def _adapted(m, x):
    return m.a(x) + 0.5 * m.c(m.b(x))


CASES = {
    "attention": (_scores, dict(a=linear(), b=linear(), c=linear())),
    "add_rms_norm": (_by_hand, dict(w=nn.Parameter(torch.ones(8)))),
    "rope": (_rotate_half, {}),
    "lora_linear": (_adapted, dict(a=linear(), b=linear(2), c=nn.Linear(2, 8))),
    "linear_glu": (lambda m, x: F.silu(m.a(x)) * m.b(x), dict(a=linear(), b=linear())),
    "matmul": (lambda m, x: F.gelu(m.a(x)), dict(a=linear())),
    "add_relu": (lambda m, x: (x + m.b).relu(), dict(b=nn.Parameter(torch.ones(8)))),
    "layer_norm": (lambda m, x: m.n(x), dict(n=nn.LayerNorm(8))),
    "softmax": (lambda m, x: x.softmax(-1), {}),
    "gelu": (lambda m, x: nn.functional.gelu(x), {}),
    "bias_gelu_dropout_add": (
        lambda m, x: x + F.dropout(F.gelu(x + m.b), 0.1),
        dict(b=nn.Parameter(X[0, 0])),
    ),
    "linear_cross_entropy": (
        lambda m, x: F.cross_entropy(m.a(x).view(-1, 8), torch.zeros(8, dtype=torch.int64)),
        dict(a=linear()),
    ),
}


@pytest.mark.parametrize("op", CASES)
def test_a_pattern_is_seen_and_no_other(op):
    forward, layers = CASES[op]
    assert ops_of(Written(forward, **layers), X) == {op: 1}


def test_every_pattern_has_a_case():
    assert {op for op, _, _ in fits.PATTERNS} == set(CASES)


def test_what_fits_nothing_has_no_row():
    assert ops_of(Written(lambda m, x: m.a(x) + x * 2, a=linear()), X) == {}


def test_whole_models_have_the_ops_that_they_are_made_of():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    got = ops_of(llama.Llama(llama.SMALL), ids, ids)
    assert got.keys() == {"linear_cross_entropy", "attention", "linear_glu", "add_rms_norm", "rope"}
    assert got["add_rms_norm"] == 5  # two a layer, and the last
    got = ops_of(gpt2.GPT2(gpt2.SMALL), ids, ids)
    assert got.keys() == {"linear_cross_entropy", "attention", "matmul", "layer_norm"}


def test_the_module_is_as_it_was():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    assert "layer_norm" in ops_of(layer, X)
    assert all(p.device.type == "cpu" for p in layer.parameters()) and not layer._forward_hooks


def test_an_activation_goes_through_memory_behind_a_product():
    module = Written(lambda m, x: m.b(F.gelu(m.a(x))), a=linear(32), b=nn.Linear(32, 8))
    (row,) = fits.left_by_the_compiler(module, X)
    assert row == {"library call": "addmm", "through memory to": "gelu", "times": 1}
    fused = Written(lambda m, x: F.gelu(x * 2) + 1)
    assert fits.left_by_the_compiler(fused, X) == []
