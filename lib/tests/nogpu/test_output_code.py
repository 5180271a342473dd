"""Output code of functions as users write them: it runs, and equals a GPU's or says where it differs."""

import itertools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import lib
from lib.nogpu.inductor import kernels, normalize, output_code, run_output_code

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

HAS_GPU = torch.cuda.is_available()


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rms_norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def branches(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


def total(tensors):
    return sum(t * k for k, t in enumerate(tensors))


def of_a_dictionary(batch):
    return batch["x"] * batch["mask"] + batch["bias"]


def adam(p, g, m, v):
    m = torch.lerp(m, g, 0.1)
    v = v * 0.999 + g * g * 0.001
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def masked_mean(x, mask):
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def slope_of(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(F.gelu(leaf).sum(), leaf)[0]


def rolled(x):
    return torch.roll(x, 3, 1) + F.pad(x, (1, 2))[:, :-3].flip(1)


class Block(nn.Module):
    """A transformer block with attention written out, as before it was one call."""

    def __init__(self, d=64, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.norms[1](x))


def _of(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def _half(*shape):
    return _of(*shape, dtype=torch.float16)


def _ids(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


def _frozen(module):
    torch.manual_seed(0)
    return module.eval().requires_grad_(False)


def _table():
    """{name: (function, inputs)}; modules with parameters and without gradients."""
    q, x = _half(2, 4, 128, 64), _of(32, 128)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return {
        "attention, half": (attention, [q, q, q]),
        "attention, float": (attention, [_of(2, 4, 64, 32)] * 3),
        "multi-head attention": (_Itself(_frozen(nn.MultiheadAttention(64, 4))), [_of(16, 2, 64)]),
        "flex attention": (lambda q, k, v: flex_attention(q, k, v), [q, q, q]),
        "transformer block": (_frozen(Block()), [_of(2, 16, 64)]),
        "convolution": (_frozen(conv), [_of(2, 3, 16, 16)]),
        "convolution of rows": (_frozen(nn.Conv1d(4, 8, 5)), [_of(2, 4, 64)]),
        "odd product": (torch.mm, [_half(1000, 1001), _half(1001, 999)]),
        "odd layer": (_frozen(nn.Linear(1023, 1025)), [_of(2048, 1023)]),
        "odd batch": (torch.bmm, [_half(8, 501, 333), _half(8, 333, 255)]),
        "branches": (branches, [x]),
        "list": (total, [[x, x + 1, x + 2]]),
        "dictionary": (of_a_dictionary, [{"x": x, "mask": x > 0, "bias": _of(128)}]),
        "rms_norm": (rms_norm, [x, _of(128)]),
        "swiglu": (swiglu, [x, _of(128, 256), _of(128, 256), _of(256, 128)]),
        "rope": (rotate, [_of(2, 8, 16, 64), _of(16, 32), _of(16, 32)]),
        "embedding": (lambda table, ids: F.embedding(ids, table).mean(1), [_of(50, 64), _ids(8, 5)]),
        "cross entropy": (F.cross_entropy, [_of(64, 50), _ids(64)]),
        "logsumexp": (lambda x: torch.logsumexp(x, 1), [x]),
        "cumsum": (lambda x: torch.cumsum(x, 1) / 3, [x]),
        "topk": (lambda x: torch.topk(x.relu(), 5), [x]),
        "sort": (lambda x: torch.sort(x, 1)[0] * 2, [x]),
        "scatter": (lambda x, i: torch.zeros(50, device=x.device).index_add(0, i, x), [_of(64), _ids(64)]),
        "gather": (lambda x, i: x.gather(1, i) * 2, [x, _ids(32, 7)]),
        "var_mean": (lambda x: torch.var_mean(x, 1), [x]),
        "group_norm": (lambda x: F.group_norm(x, 4), [_of(2, 16, 8, 8)]),
        "pooling": (lambda x: F.max_pool2d(x.relu(), 2), [_of(2, 4, 16, 16)]),
        "upsampling": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), [_of(1, 4, 8, 8)]),
        "argmax": (lambda x: (x * 2).argmax(1), [x]),
        "integers": (lambda i: torch.where(i % 3 == 0, i // 2, -i).clamp(-20, 20), [_ids(64)]),
        "einsum": (lambda a, b: torch.einsum("bij,kj->bki", a, b).tanh(), [_of(4, 8, 16), _of(32, 16)]),
        "adam": (adam, [x, x + 1, x * 0, x * x]),
        "masked mean": (masked_mean, [_of(4, 16, 32), _of(4, 16) > 0]),
        "gradient inside": (slope_of, [x]),
        "rolled": (rolled, [x]),
        "complex": (lambda x: torch.fft.rfft(x).abs() + 1, [x]),
    }  # fmt: skip


class _Itself(nn.Module):
    """Self-attention of one input."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


TABLE = _table()
# The remarks where the text without a GPU differs.
REMARKS = {
    "attention, half": "this attention is one call",
    "attention, float": "this attention is one call",
    "multi-head attention": "this attention is one call",
    "odd product": "(1000 × 1001) @ (1001 × 999)",
    "odd layer": "(2048 × 1023) @ (1023 × 1025)",
    "odd batch": "(501 × 333) @ (333 × 255)",
}
NO_TRITON = {"odd product", "odd layer", "odd batch", "convolution of rows"}
# What is not run: a template, several graphs, and modules, whose parameters come in the graph's own order.
NOT_RUN = {"flex attention", "gradient inside"} | {
    name for name, (f, _) in TABLE.items() if isinstance(f, nn.Module)
}


@pytest.mark.skipif(HAS_GPU, reason="about the stand-in for a GPU")
@pytest.mark.parametrize("name", TABLE)
def test_the_text_is_written_and_says_where_a_gpus_differs(name):
    function, inputs = TABLE[name]
    code = output_code(function, *inputs)
    assert ("# On a GPU" in code) == (name in REMARKS)
    assert REMARKS.get(name, "") in code
    assert name in NO_TRITON or any(k.kind != "extern" for k in kernels(code))
    if name not in NOT_RUN:
        _expect_its_result(function, inputs, code)


def _expect_its_result(function, inputs, code):
    """On the CPU the text returns what the function returns, with the inputs in the graph's order."""
    tensors = torch.utils._pytree.tree_leaves(inputs)
    want = torch.utils._pytree.tree_leaves(function(*inputs))
    for order in itertools.permutations(tensors):
        try:
            got = run_output_code(code, *order)
        except ValueError:  # sizes of other inputs
            continue
        got = [got] if isinstance(got, torch.Tensor) else list(got)
        if _close(got, want):
            return
    raise AssertionError("no order of the inputs gives the function's result")


def _close(got, want):
    return len(got) == len(want) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=2e-2, atol=2e-2)
        for a, b in zip(got, want)
    )


@pytest.mark.skipif(HAS_GPU, reason="about the stand-in for a GPU")
def test_what_stands_in_for_autograds_engine_is_not_compiled():
    function, inputs = TABLE["gradient inside"]
    graphs = re.findall(r"(?m)^# AOT ID: .*\d_(\w+)", output_code(function, *inputs))
    assert graphs == ["forward", "backward"]


WRITE_ALL = """
import pickle, sys
import lib
from lib.nogpu.inductor import output_code
from lib.tests.nogpu.test_output_code import TABLE
pickle.dump({name: output_code(f, *xs) for name, (f, xs) in TABLE.items()}, open(sys.argv[1], "wb"))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_the_text_is_that_of_a_gpu_or_says_so(tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fake GPU is an H200")
    root = Path(lib.__file__).parents[1]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    file = tmp_path / "texts"
    subprocess.run([sys.executable, "-c", WRITE_ALL, file], env=environment, check=True)
    without = pickle.loads(file.read_bytes())
    written = {name: output_code(f, *xs) for name, (f, xs) in TABLE.items() if name not in REMARKS}
    assert [n for n, code in written.items() if normalize(code) != normalize(without[n])] == []
