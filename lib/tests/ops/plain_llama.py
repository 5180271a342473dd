"""A Llama of PyTorch's own parts, with the names of Hugging Face's: what lib/ops/README.md's has to equal.

    python plain_llama.py        in a folder with copies of the ops, and the page's code as pieces.py

Imports nothing of lib, so that it shows what a reader of the page gets.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {"n_words": 40, "width": 16, "hidden": 24, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
EPS, BASE = 1e-5, 500000.0


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class PlainAttention(nn.Module):
    def __init__(self, width, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, d = n_heads, n_kv_heads, width // n_heads
        self.q_proj, self.o_proj = linear(width, width), linear(width, width)
        self.k_proj, self.v_proj = linear(width, n_kv_heads * d), linear(width, n_kv_heads * d)

    def forward(self, x):
        n_texts, n_tokens, width = x.shape
        d = width // self.n_heads
        angles = torch.outer(
            torch.arange(n_tokens).double(), BASE ** (-torch.arange(0, d, 2).double() / d)
        ).to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def rotated(y):
            first, second = y.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        def heads(y, n):
            return y.view(n_texts, n_tokens, n, d).transpose(1, 2)

        q = rotated(heads(self.q_proj(x), self.n_heads))
        k = rotated(heads(self.k_proj(x), self.n_kv_heads))
        v = heads(self.v_proj(x), self.n_kv_heads)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for t in (k, v))
        scores = q @ k.mT / d**0.5
        later = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=x.device).triu(1)
        o = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ v
        return self.o_proj(o.transpose(1, 2).reshape(n_texts, n_tokens, width))


class PlainMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
        self.down_proj = linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainBlock(nn.Module):
    def __init__(self, width, hidden, n_heads, n_kv_heads):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, EPS)
        self.self_attn = PlainAttention(width, n_heads, n_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(width, EPS)
        self.mlp = PlainMLP(width, hidden)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    def __init__(self, n_words, width, hidden, n_heads, n_kv_heads, n_layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(n_words, width)
        sizes = width, hidden, n_heads, n_kv_heads
        self.layers = nn.ModuleList(PlainBlock(*sizes) for _ in range(n_layers))
        self.norm = nn.RMSNorm(width, EPS)

    def forward(self, ids, labels):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embed_tokens.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def compare(fused_class, device="cpu"):
    """The page's model loads the plain one's checkpoint, and has its loss and its gradients."""
    torch.manual_seed(0)
    plain, fused = PlainLlama(**SIZES).to(device), fused_class(**SIZES).to(device)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:  # ones would hide which norm has which weight
                parameter.add_(0.3 * torch.randn_like(parameter))
    fused.load_state_dict(plain.state_dict())
    ids = torch.randint(SIZES["n_words"], (2, 9), device=device)
    labels = ids.clone()
    labels[1, 6:] = -100
    want, got = plain(ids, labels), fused(ids, labels)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    want.backward()
    got.backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in fused.named_parameters():
        if "gate_up" in name:
            parts = [grads.pop(name.replace("gate_up", part)) for part in ("gate_proj", "up_proj")]
            grads[name] = torch.cat(parts)
        torch.testing.assert_close(p.grad, grads.pop(name), rtol=1e-4, atol=1e-6, msg=name)
    assert not grads, [*grads]
    again = fused_class(**SIZES).to(device)
    again.load_state_dict(fused.state_dict())  # its own checkpoint, one matrix, loads as well
    torch.testing.assert_close(again(ids, labels), want)


def compare_conv1d(matmul_triton, fused_linear, device="cpu"):
    """GPT-2's Conv1D: x @ weight + bias."""
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((5, 8), (8, 12), (12,)))
    want = F.gelu(x @ weight + bias, approximate="tanh")
    torch.testing.assert_close(matmul_triton(x, weight, bias, "gelu_tanh"), want)
    layer = fused_linear(8, 12, activation="gelu_tanh").to(device)
    layer.load_state_dict({"weight": weight.t(), "bias": bias})
    torch.testing.assert_close(layer(x), want)


if __name__ == "__main__":
    sys.modules["lib"] = None  # to import it is an error, wherever Python would have found it
    import matmul
    import pieces

    device = "cuda" if torch.cuda.is_available() else "cpu"
    compare(pieces.Llama, device)
    compare_conv1d(matmul.matmul_triton, matmul.FusedLinear, device)
    if device == "cuda":
        model = PlainLlama(**SIZES).cuda()
        ids = torch.randint(SIZES["n_words"], (2, 9), device=device)
        ms, peak_gb = pieces.measure(lambda: model(ids, ids).backward())
        assert ms > 0 and peak_gb > 0
    print("ran")
