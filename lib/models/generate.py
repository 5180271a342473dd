"""Generation with quantized weights: tokens per second, and what the bytes of a step promise.

Step      one more token for each text: every weight is read once, and each text's keys and values. As a CUDA
          graph: a step of few rows is a hundred launches, each shorter than the host takes to make it.
Kinds     bfloat16; int8 and fp8 by row; int4 in groups of 128. Embedding, norms and the cache keep 16 bits.
Promise   those bytes at the rate of a copy, half of which is reading; reading alone may be a little faster.

    python -m lib.models.generate       on a GPU; saves data/results/<gpu>/generation.json
"""

import copy

from lib import machine
from lib.measure import bench, roofline
from lib.models import llama
from lib.ops.quantized_linear import QuantizedLinear
from lib.profiling.bill import n_bytes
from lib.recorded import results

import torch
from torch import nn
from tqdm import tqdm

SOURCES = tuple(f"lib/models/{name}.py" for name in ("llama", "generate"))
KINDS = ("bfloat16", "int8", "fp8", "int4")
BATCHES = (1, 16)
LENGTH = 1024  # of each text, in the cache


def quantized(model, kind, group=128):
    """A copy of a Llama whose linear layers are quantized, the head too."""
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        for name, layer in [*module.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(module, name, QuantizedLinear.from_linear(layer, kind, group))
    return model


def bytes_of_step(model, n_texts, length):
    """Bytes that one step reads: weights, keys and values, without the few rows of the embedding."""
    weights = n_bytes(model.layers.state_dict(), model.head.state_dict(), model.norm)
    s, itemsize = model.sizes, model.norm.element_size()
    return weights + 2 * s.n_layers * n_texts * length * s.n_kv_heads * s.head_dim * itemsize


@torch.no_grad()
def greedy(model, text, n_words):
    """(B, n_words): the likeliest words after a text, (B, S), one by one."""
    n_texts, length = text.shape
    cache = model.new_cache(n_texts, length + n_words)
    at, words = torch.zeros(n_texts, dtype=torch.int64, device=text.device), []
    for i in range(length + n_words - 1):
        ids = text[:, i] if i < length else words[-1]
        logits = model.next_logits(ids, cache, at)
        at = at + 1
        if i >= length - 1:
            words.append(logits.argmax(1))
    return torch.stack(words, 1)


@torch.no_grad()
def measure(sizes=llama.Sizes(), length=LENGTH):  # noqa: B008 - Sizes is frozen
    """Rows of {"weights", "texts", "step, µs", "tokens/s", "promised, µs", "GB read"}. Needs a GPU."""
    device, rows = machine.device(), []
    with torch.device(device):
        whole = llama.Llama(sizes, llama.OURS).bfloat16()
    for kind in tqdm(KINDS, desc="generation"):
        model = whole if kind == "bfloat16" else quantized(whole, kind)
        for n_texts in BATCHES:
            ids = torch.randint(sizes.n_words, (n_texts,), device=device)
            at, cache = torch.full_like(ids, length - 1), model.new_cache(n_texts, length)
            us = bench.gpu_us(lambda m=model, i=ids, c=cache, a=at: m.next_logits(i, c, a))
            moved = bytes_of_step(model, n_texts, length)
            row = {"weights": kind, "texts": n_texts, "step, µs": us, "GB read": moved / 1e9}
            row |= {"tokens/s": 1e6 * n_texts / us}
            rows.append(row | {"promised, µs": roofline.ceilings().attainable_us(moved)})
        del model, cache
        torch.cuda.empty_cache()
    return rows


def main():
    """Measure and save; prints one line per row."""
    if not machine.HAS_GPU:
        where = "what was recorded is in data/results"
        raise SystemExit(f"generation needs a GPU, and torch sees none; {where}")
    rows = measure()
    for row in rows:
        print(row)
    print("saved", results.save("generation", rows, SOURCES).relative_to(results.ROOT))


if __name__ == "__main__":
    main()
