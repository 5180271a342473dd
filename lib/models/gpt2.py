"""A whole GPT-2: embeddings of words and places, layers, last norm, and the words' embedding as the head.

Parts     norm(x, residual, weight, bias) → (y, h), attention(q, k, v), up(x, weight, bias),
          loss(x, weight, labels). EAGER has PyTorch's, OURS the ops. A model takes any mixture; its parameters
          are the same.
Layers    as OpenAI's code has them: LayerNorm before each half, GELU in its tanh form, biases everywhere; no
          dropout.
"""

import dataclasses

from lib.models import llama
from lib.ops.layer_norm import layer_norm_eager, layer_norm_triton
from lib.ops.matmul import matmul_triton

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those of GPT-2 small, 124 million parameters."""

    n_words: int = 50257
    width: int = 768
    n_heads: int = 12
    n_layers: int = 12
    longest: int = 1024


SMALL = Sizes(n_words=64, width=32, n_heads=2, n_layers=2, longest=32)


EAGER = {
    "norm": llama.norm_of(layer_norm_eager),
    "attention": llama.EAGER["attention"],
    "up": lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
    "loss": llama.EAGER["loss"],
}
OURS = {
    "norm": llama.norm_of(layer_norm_triton),
    "attention": llama.OURS["attention"],
    "up": lambda x, weight, bias: matmul_triton(x, weight.t(), bias, "gelu_tanh"),
    "loss": llama.OURS["loss"],
}


class Layer(nn.Module):
    """One layer: (branch, stream) → (branch, stream), whose sum is what a GPT-2's layer returns."""

    def __init__(self, sizes):
        super().__init__()
        self.n_heads, width = sizes.n_heads, sizes.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, part, x, h):
        y, h = part["norm"](x, h, self.norm1.weight, self.norm1.bias)
        q, k, v = self.qkv(y).unflatten(-1, (3 * self.n_heads, -1)).transpose(1, 2).chunk(3, dim=1)
        x = self.out(part["attention"](q, k, v).transpose(1, 2).flatten(2))
        y, h = part["norm"](x, h, self.norm2.weight, self.norm2.bias)
        return self.down(part["up"](y, self.up.weight, self.up.bias)), h


class GPT2(nn.Module):
    """ids, labels → the mean loss. parts: of EAGER, OURS, or a mixture; may be exchanged at any time."""

    def __init__(self, sizes=Sizes(), parts=EAGER):  # noqa: B008 - Sizes is frozen
        super().__init__()
        self.sizes, self.parts = sizes, parts
        self.words = nn.Embedding(sizes.n_words, sizes.width)
        self.places = nn.Embedding(sizes.longest, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.n_layers))
        self.norm = nn.LayerNorm(sizes.width)
        llama.draw_weights(self)

    def forward(self, ids, labels):
        places = torch.arange(ids.shape[1], device=ids.device)
        x, h = self.words(ids) + self.places(places), None
        for layer in self.layers:
            x, h = layer(self.parts, x, h)
        y, _ = self.parts["norm"](x, h, self.norm.weight, self.norm.bias)
        return self.parts["loss"](y.flatten(0, 1), self.words.weight, labels.flatten())
