"""A whole Llama: embedding, layers, last norm, head and loss, and generation with a cache.

Parts     norm(x, residual, weight) → (y, h), rope(q, k, cos, sin), attention(q, k, v), glu(x, layer),
          loss(x, weight, labels), read(q, k, v, lengths): attention of one new token to the cache. EAGER has
          PyTorch's, OURS the ops. A model takes any mixture; its parameters are the same.
Layers    as Meta's code has them: RMSNorm before each half, rotated halves, grouped heads, SwiGLU. q, k and v
          are one matrix, gate and up another. The sum of a layer goes on unadded, to the next norm.
"""

import dataclasses

from lib.ops.add_rms_norm import add_rms_norm_eager, add_rms_norm_triton
from lib.ops.attention import attention_triton
from lib.ops.linear_cross_entropy import linear_cross_entropy_eager, linear_cross_entropy_triton
from lib.ops.linear_glu import linear_glu_triton
from lib.ops.rope import rope_eager, rope_tables, rope_triton

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those of Llama 3 8B but for the number of its layers, which are 32."""

    n_words: int = 128256
    width: int = 4096
    hidden: int = 14336
    n_heads: int = 32
    n_kv_heads: int = 8
    n_layers: int = 4
    longest: int = 4096

    @property
    def head_dim(self):
        """Columns of a head."""
        return self.width // self.n_heads


SMALL = Sizes(n_words=64, width=32, hidden=48, n_heads=4, n_kv_heads=2, n_layers=2, longest=32)


def norm_of(add_norm):
    """An op of (x, residual, *parameters) as a part: y and the sum, also before the first layer."""

    def norm(x, residual, *parameters):
        y = add_norm(x, residual, *parameters)
        return (y, x) if residual is None else y

    return norm


def draw_weights(model):
    """As GPT-2's were drawn: matrices from a normal distribution of 0.02; the rest stays as it is."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)


def _sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _sdpa_of_cache(q, k, v, lengths):
    there = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=there[:, None, None, :], enable_gqa=True
    )


def _glu(x, layer):
    gate, up = layer(x).chunk(2, dim=-1)
    return F.silu(gate) * up


def _fused_glu(x, layer):
    if not isinstance(layer, nn.Linear):  # its weight is quantized
        return _glu(x, layer)
    return linear_glu_triton(x, layer.weight, None, "silu", "first")


EAGER = {
    "norm": norm_of(add_rms_norm_eager),
    "rope": lambda q, k, cos, sin, at=None: rope_eager(q, k, cos, sin, layout="bhsd", positions=at),
    "attention": _sdpa,
    "glu": _glu,
    "loss": linear_cross_entropy_eager,
    "read": _sdpa_of_cache,
}
OURS = {
    "norm": norm_of(add_rms_norm_triton),
    "rope": lambda q, k, cos, sin, at=None: rope_triton(q, k, cos, sin, layout="bhsd", positions=at),
    "attention": lambda q, k, v: attention_triton(q, k, v, is_causal=True),
    "glu": _fused_glu,
    "loss": linear_cross_entropy_triton,
    "read": attention_triton,
}  # fmt: skip


class Layer(nn.Module):
    """One layer: (branch, stream) → (branch, stream), whose sum is what a Llama's layer returns."""

    def __init__(self, sizes):
        super().__init__()
        s, d = sizes, sizes.head_dim
        self.heads = [s.n_heads, s.n_kv_heads, s.n_kv_heads]
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(s.width)) for _ in "12")
        self.qkv = nn.Linear(s.width, sum(self.heads) * d, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        self.gate_up = nn.Linear(s.width, 2 * s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def split(self, y):
        """q, k and v of y: (B, heads, S, D)."""
        qkv = self.qkv(y).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        return qkv.split(self.heads, dim=1)

    def forward(self, part, x, h, cos, sin):
        y, h = part["norm"](x, h, self.norm1)
        q, k, v = self.split(y)
        q, k = part["rope"](q, k, cos, sin)
        x = self.out(part["attention"](q, k, v).transpose(1, 2).flatten(2))
        return self.half(part, x, h)

    def half(self, part, x, h):
        """The layer's second half."""
        y, h = part["norm"](x, h, self.norm2)
        return self.down(part["glu"](y, self.gate_up)), h

    def next_token(self, part, x, h, tables, cache, at):
        """forward of one token more for each text; at: (B,), how many stand in the cache, which gets it too."""
        y, h = part["norm"](x, h, self.norm1)
        q, k, v = self.split(y)
        q, k = part["rope"](q, k, *tables, at[:, None])
        rows = torch.arange(len(at), device=at.device)
        for memory, new in zip(cache, (k, v)):
            memory[rows, :, at] = new[:, :, 0].to(memory.dtype)
        y = part["read"](q, *cache, at + 1)
        return self.half(part, self.out(y.transpose(1, 2).flatten(2)), h)


class Llama(nn.Module):
    """ids, labels → the mean loss. parts: of EAGER, OURS, or a mixture; may be exchanged at any time."""

    def __init__(self, sizes=Sizes(), parts=EAGER):  # noqa: B008 - Sizes is frozen
        super().__init__()
        self.sizes, self.parts = sizes, parts
        self.embedding = nn.Embedding(sizes.n_words, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.n_layers))
        self.norm = nn.Parameter(torch.ones(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.n_words, bias=False)
        draw_weights(self)
        tables = torch.stack(rope_tables(sizes.longest, sizes.head_dim, base=500000.0))
        # as integers: model.bfloat16() would round them
        self.register_buffer("bits_of_tables", tables.view(torch.int32), persistent=False)

    @property
    def tables(self):
        """rope's cos and sin, (longest, head_dim / 2), float32 whatever the model is."""
        return self.bits_of_tables.view(torch.float32).unbind()

    def forward(self, ids, labels):
        x, h, n = self.embedding(ids), None, ids.shape[1]
        cos, sin = (table[:n] for table in self.tables)
        for layer in self.layers:
            x, h = layer(self.parts, x, h, cos, sin)
        y, _ = self.parts["norm"](x, h, self.norm)
        return self.parts["loss"](y.flatten(0, 1), self.head.weight, labels.flatten())

    def new_cache(self, n_texts, length):
        """Zeros for keys and values of all layers: a list of (2, n_texts, heads, length, D)."""
        shape = 2, n_texts, self.sizes.n_kv_heads, length, self.sizes.head_dim
        return [self.norm.new_zeros(shape) for _ in self.layers]

    def next_logits(self, ids, cache, at):
        """(B, n_words) after one more token of each text. ids, at: (B,); the cache is written in place."""
        x, h = self.embedding(ids)[:, None], None
        for layer, of_layer in zip(self.layers, cache):
            x, h = layer.next_token(self.parts, x, h, self.tables, of_layer, at)
        y, _ = self.parts["norm"](x, h, self.norm)
        return self.head(y[:, 0])
