"""A small GPT, Llama and DLRM, of PyTorch's own parts or of the ops': the same parameters, the same losses.

    python small_models.py        in a folder with copies of the op files: both, a few steps each

Imports nothing of lib, so that it shows what a reader who copies the files gets.
"""

import contextlib
import functools
import importlib
import types

import torch
import torch.distributed
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH, N_HEADS, N_TOKENS, N_WORDS = 16, 2, 8, 24
COPIED = (
    "matmul", "softmax", "rope", "linear_glu", "lora_linear", "bias_gelu_dropout_add", "gelu",
    "attention", "linear_cross_entropy", "embedding_hash", "interaction", "fused_mlp",
)  # fmt: skip


class _Linear(torch.nn.Linear):
    def __init__(self, in_features, out_features, bias=True, activation=None):
        super().__init__(in_features, out_features, bias)
        self.activation = activation

    def forward(self, x):
        y = super().forward(x)
        return F.gelu(y, approximate="tanh") if self.activation == "gelu_tanh" else y


class _SwiGLU(torch.nn.Linear):
    def __init__(self, in_features, hidden_features):
        super().__init__(in_features, 2 * hidden_features, bias=False)

    def forward(self, x):
        gate, value = super().forward(x).chunk(2, dim=-1)
        return F.silu(gate) * value


class _LoRA(torch.nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.lora_a = torch.nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


class _Tail(torch.nn.Module):
    def __init__(self, features, p):
        super().__init__()
        self.p, self.bias = p, torch.nn.Parameter(torch.zeros(features))

    def forward(self, x, residual):
        z = F.gelu(x + self.bias, approximate="tanh")
        return F.dropout(z, self.p, self.training) + residual


def _rotate(q, k, cos, sin):
    """Hugging Face's apply_rotary_pos_emb: q, k (B, H, S, D), cos, sin (1, S, D)."""

    def turned(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([-x2, x1], dim=-1)

    cos, sin = cos[:, None].to(q.dtype), sin[:, None].to(q.dtype)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _attention(q, k, v, softmax):
    """(B, H, S, D), each token sees itself and those before."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return softmax(scores.masked_fill(later, -float("inf"))) @ v


class _Tables(torch.nn.Module):
    """DLRM's hash and its tables, one below the other."""

    def __init__(self, num_rows, dim):
        super().__init__()
        self.num_rows = num_rows
        self.weight = torch.nn.Parameter(torch.randn(sum(num_rows), dim) / 4)

    def forward(self, ids):
        rows = [(ids[:, t] + 1) % n + sum(self.num_rows[:t]) for t, n in enumerate(self.num_rows)]
        return F.embedding(torch.stack(rows, 1), self.weight)


def _interaction(dense, embeddings):
    """TorchRec's order of pairs."""
    vectors = torch.cat([dense[:, None], embeddings], dim=1)
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1, device=dense.device)
    return torch.cat([dense, (vectors @ vectors.mT)[:, first, second]], dim=1)


def _mlp(n_in, n_hidden, n_out):
    return torch.nn.Sequential(
        torch.nn.Linear(n_in, n_hidden), torch.nn.ReLU(), torch.nn.Linear(n_hidden, n_out), torch.nn.Sigmoid()
    )  # fmt: skip


def _loss(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), labels.flatten())


EAGER = types.SimpleNamespace(
    linear=_Linear, glu=_SwiGLU, lora=_LoRA, tail=_Tail, rope=_rotate, gelu=F.gelu, loss=_loss,
    softmax=(softmax := functools.partial(torch.softmax, dim=-1)),
    attention=functools.partial(_attention, softmax=softmax),
    tables=_Tables, interaction=_interaction, mlp=_mlp,
)  # fmt: skip


def of_ops(package=""):
    """The same parts, of the op files of a package, or of those beside this one."""
    op = types.SimpleNamespace(**{name: importlib.import_module(package + name) for name in COPIED})
    swiglu = functools.partial(op.linear_glu.FusedGLU, bias=False, activation="silu", gate="first")
    return types.SimpleNamespace(
        linear=op.matmul.FusedLinear, glu=swiglu, lora=op.lora_linear.LoRALinear,
        tail=op.bias_gelu_dropout_add.BiasGELUDropoutAdd, gelu=op.gelu.gelu_triton,
        rope=functools.partial(op.rope.rope_triton, layout="bhsd"), softmax=op.softmax.softmax_triton,
        attention=functools.partial(op.attention.attention_triton, is_causal=True),
        loss=op.linear_cross_entropy.linear_cross_entropy_triton,
        tables=op.embedding_hash.EmbeddingHash, interaction=op.interaction.interaction_triton,
        mlp=op.fused_mlp.FusedMLP,
    )  # fmt: skip


def _heads(x, n):
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def _together(x):
    return x.transpose(1, 2).flatten(2)


class GPTBlock(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.attention = part.attention
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = part.linear(WIDTH, 3 * WIDTH), part.linear(WIDTH, WIDTH)
        self.up = part.linear(WIDTH, 4 * WIDTH, activation="gelu_tanh")
        self.down, self.tail = part.linear(4 * WIDTH, WIDTH, bias=False), part.tail(WIDTH, 0.0)

    def forward(self, x):
        q, k, v = (_heads(t, N_HEADS) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(_together(self.attention(q, k, v)))
        return self.tail(self.down(self.up(self.norm2(x))), x)


class LlamaBlock(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.softmax, self.rope = part.softmax, part.rope
        self.norm1, self.norm2 = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.q = part.lora(torch.nn.Linear(WIDTH, WIDTH, bias=False), 2, 4.0)
        self.k, self.v = (part.linear(WIDTH, WIDTH // N_HEADS, bias=False) for _ in "kv")
        self.o, self.gated = part.linear(WIDTH, WIDTH, bias=False), part.glu(WIDTH, 2 * WIDTH)
        self.down = part.linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = _heads(self.q(h), N_HEADS), _heads(self.k(h), 1), _heads(self.v(h), 1)
        d = q.shape[-1]
        places = torch.arange(x.shape[1], device=x.device).float()
        angles = torch.outer(places, 1e4 ** -(torch.arange(0, d, 2, device=x.device) / d))
        angles = torch.cat([angles, angles], dim=-1)[None]
        q, k = self.rope(q, k, angles.cos(), angles.sin())
        x = x + self.o(_together(_attention(q, k, v.to(q.dtype), self.softmax)))
        return x + self.down(self.gated(self.norm2(x)))


def _save_our_ops(context, op, *args, **kwargs):
    ours = op.namespace == "fused_kernels"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {
    "context_fn": functools.partial(create_selective_checkpoint_contexts, _save_our_ops),
}


class DLRM(torch.nn.Module):
    """Numbers and words in, the loss of a click out: three words are looked up, four are numbers."""

    def __init__(self, part, checkpointed=None):
        super().__init__()
        self.checkpointed, self.interact = checkpointed, part.interaction
        self.bottom, self.tables = part.mlp(4, 12, WIDTH), part.tables((11, 7, 30), WIDTH)
        self.top = part.mlp(WIDTH + 6, 12, 1)

    def clicks(self, words):
        dense = self.bottom(words[:, 3:7].float() / N_WORDS)
        return self.top(self.interact(dense, self.tables(words[:, :3])))[:, 0]

    def forward(self, words):
        how, call = self.checkpointed, self.clicks
        clicks = call(words) if how is None else checkpoint(call, words, use_reentrant=False, **how)
        labels = (words[:, -1] % 2).float()
        with torch.autocast(words.device.type, enabled=False):
            return F.binary_cross_entropy(clicks.float(), labels)


class Model(torch.nn.Module):
    """Words in, the mean loss of the next word out. part: EAGER or of_ops(). checkpointed: how, or None."""

    def __init__(self, block, part, n_blocks=2, checkpointed=None):
        super().__init__()
        self.checkpointed, self.gelu, self.loss = checkpointed, part.gelu, part.loss
        self.words = torch.nn.Embedding(N_WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(block(part) for _ in range(n_blocks))
        self.head = torch.nn.Linear(WIDTH, N_WORDS, bias=False)

    def forward(self, words):
        x = self.words(words[:, :-1])
        for block in self.blocks:
            how = self.checkpointed
            x = block(x) if how is None else checkpoint(block, x, use_reentrant=False, **how)
        return self.loss(self.gelu(x), self.head.weight, words[:, 1:])


def batch(n_sequences=4, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(N_WORDS, (n_sequences, N_TOKENS + 1), generator=generator).to(device)


def losses(model, words, n_steps, autocast=False, call=None):
    """Those of n_steps of training on one batch. call: what to call in place of the model, compiled say."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, history = torch.optim.SGD(trained, lr=0.2, momentum=0.5), []
    how = (
        torch.autocast(words.device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
    )
    for _ in range(n_steps):
        optimizer.zero_grad()
        with how:
            loss = (model if call is None else call)(words)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def both(block, part, device="cpu", **how):
    """The model of eager parts and the one of `part`, with the same parameters."""
    torch.manual_seed(0)
    make = DLRM if block is DLRM else functools.partial(Model, block)
    eager, fused = make(EAGER).to(device), make(part, **how).to(device)
    fused.load_state_dict(eager.state_dict())
    return eager, fused


def half_of_each_batch(rank, block, folder, package, sharded=False):
    """One of two processes: trains on its half, and leaves its losses in `folder`."""
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    _, fused = both(block, of_ops(package))
    if sharded:  # FSDP2: parameters are DTensors, gathered before each part's forward pass
        from torch.distributed.fsdp import fully_shard

        for part in [*getattr(fused, "blocks", ()), fused]:
            fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        parallel = fused
    else:
        parallel = torch.nn.parallel.DistributedDataParallel(fused)
    history = losses(fused, batch().chunk(2)[rank], 6, call=parallel)
    torch.save(history, f"{folder}/losses_{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for block in (GPTBlock, LlamaBlock, DLRM):
        eager, fused = both(block, of_ops(), device)
        want, got = (losses(model, batch(2, device), 4) for model in (eager, fused))
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=0)
    print("ran")
