"""Output code of 35 more functions of models, losses and optimizers: it runs, or says where it ends."""

from lib.nogpu.inductor import kernels, output_code
from lib.tests.nogpu.test_output_code import HAS_GPU, _expect_its_result, _ids, _of

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan


def moe_counts(x, router):
    expert = (x @ router).argmax(-1)
    return torch.bincount(expert, minlength=4)


def top_two(x, router):
    weight, expert = torch.softmax(x @ router, -1).topk(2)
    return weight / weight.sum(-1, keepdim=True), expert


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


def gated(x, w):
    a, g = (x @ w).chunk(2, -1)
    return a * torch.sigmoid(g)


def focal(x, y):
    p = torch.sigmoid(x)
    t = torch.where(y > 0, p, 1 - p)
    return -((1 - t) ** 2 * t.clamp_min(1e-6).log()).mean()


def clip(gs):
    n = torch.stack([g.square().sum() for g in gs]).sum().sqrt()
    s = (1.0 / (n + 1e-6)).clamp_max(1.0)
    return [g * s for g in gs]


def sgd_(ps, gs):
    torch._foreach_add_(ps, gs, alpha=-0.1)
    return ps


def ema(ps, qs):
    return torch._foreach_lerp(ps, qs, 0.1)


def kl(p, q):
    return F.kl_div(
        F.log_softmax(p, -1), F.log_softmax(q, -1), log_target=True, reduction="batchmean"
    )


def chosen(x):
    return x[x > 0] * 2


def first_positive(x):
    return torch.nonzero(x.relu())[:1]


def uniques(i):
    return torch.unique(i * 2)


def scaled_int8(x):
    s = x.abs().amax(-1, keepdim=True) / 127
    q = torch.round(x / s).clamp(-128, 127).to(torch.int8)
    return q.float() * s


def fp8(x):
    return x.to(torch.float8_e4m3fn).float() * 2


def dequant(q, s, x):
    return x @ (q.float() * s).T


def windowed(x):
    return x.unfold(1, 5, 1).mean(-1)


def rotary_complex(x, f):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * f).flatten(-2)


def alibi(q, k):
    d = (
        torch.arange(k.shape[1], device=q.device)[None]
        - torch.arange(q.shape[1], device=q.device)[:, None]
    )
    return torch.softmax(q @ k.mT + d * 0.1, -1)


def cosine(a, b):
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def stats(x):
    return x.amax(1), x.amin(1), x.std(1), x.median(1).values


def cumulative(x):
    return torch.cumprod(x.sigmoid(), 1).flip(1)


def triangle(x):
    return torch.tril(x) - torch.triu(x, 1)


def padded(x):
    return F.conv1d(
        F.pad(x[:, None], (2, 2), mode="reflect"), torch.ones(1, 1, 5, device=x.device) / 5
    )


def pixel(x):
    return F.pixel_shuffle(x, 2).sigmoid()


def embedding_bag(t, i):
    return F.embedding(i, t).sum(1) / i.shape[1] ** 0.5


def huber(x, y):
    return F.huber_loss(x, y) + F.l1_loss(x, y)


def loop(x):
    for k in range(3):
        x = x * 0.5 + x.roll(k, -1)
    return x


def one_hot(i):
    return F.one_hot(i % 7, 7).float().cumsum(0)


def branch(x):
    if x.sum() > 0:
        return x * 2
    return x - 1


def item(x):
    return x * x.max().item()


def train_step(x, w):
    loss = (x @ w).square().mean()
    loss.backward()
    return loss


def searched(x, edges):
    return torch.bucketize(x, edges) * 2


def decayed(x):
    return scan(lambda c, x: (c * 0.9 + x, c.clone()), torch.zeros_like(x[0]), x)[1]


def maps(x):
    return torch.vmap(lambda r: r / r.norm())(x)


def grad_of(x):
    return torch.func.grad(lambda t: t.tanh().sum())(x)


x = _of(32, 128)
TABLE = {
    "counts of experts": (moe_counts, [x, _of(128, 4)]),
    "top two": (top_two, [x, _of(128, 4)]),
    "layer norm": (layer_norm, [x, _of(128), _of(128)]),
    "gated": (gated, [x, _of(128, 64)]),
    "focal": (focal, [x, _of(32, 128) * 2]),
    "clip": (clip, [[x, x + 1]]),
    "sgd in place": (sgd_, [[x.clone(), x + 1], [x, x]]),
    "ema": (ema, [[x, x + 1], [x * 2, x]]),
    "kl": (kl, [x, x * 2]),
    "chosen": (chosen, [x]),
    "nonzero": (first_positive, [x]),
    "unique": (uniques, [_ids(64)]),
    "int8": (scaled_int8, [x]),
    "fp8": (fp8, [x]),
    "dequantized": (dequant, [torch.randint(-8, 8, (16, 128), dtype=torch.int8), _of(16, 1), x]),
    "windows": (windowed, [x]),
    "complex rotary": (rotary_complex, [_of(2, 8, 64), torch.polar(torch.ones(8, 32), _of(8, 32))]),
    "alibi": (alibi, [_of(2, 16, 32), _of(2, 24, 32)]),
    "cosine": (cosine, [x, _of(16, 128)]),
    "statistics": (stats, [x]),
    "cumprod": (cumulative, [x]),
    "triangles": (triangle, [_of(16, 16)]),
    "reflected": (padded, [x]),
    "pixel shuffle": (pixel, [_of(1, 8, 4, 4)]),
    "bag": (embedding_bag, [_of(50, 64), _ids(8, 5)]),
    "huber": (huber, [x, x * 1.5]),
    "unrolled loop": (loop, [x]),
    "one hot": (one_hot, [_ids(64)]),
    "branch on a value": (branch, [x]),
    "item": (item, [x]),
    "backward inside": (train_step, [x, _of(128, 4).requires_grad_()]),
    "buckets": (searched, [x, torch.tensor([-1.0, 0.0, 1.0])]),
    "scan": (decayed, [_of(6, 8)]),
    "vmap": (maps, [x]),
    "func.grad": (grad_of, [x]),
}
ENDS = "# The text ends here: "
# What follows in the function is not written, or nothing is, and a sentence says why.
VALUES = f"{ENDS}what follows depends on a tensor's value"
ENDING = {
    **dict.fromkeys(
        ["counts of experts", "chosen", "nonzero", "unique", "branch on a value", "item"], VALUES
    ),
    "sgd in place": f"{ENDS}if another graph follows in the function",
}
REFUSED = {
    "scan": "the first op asks for a tensor's value, as nonzero, bincount and scan do",
    "backward inside": "the function calls backward",
}


@pytest.mark.skipif(HAS_GPU, reason="about the stand-in for a GPU")
@pytest.mark.parametrize("name", TABLE)
def test_the_text_runs_or_says_where_it_ends(name):
    function, inputs = TABLE[name]
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            output_code(function, *inputs)
        return
    code = output_code(function, *inputs)
    # complex numbers go by calls of PyTorch
    assert name == "complex rotary" or any(k.kind != "extern" for k in kernels(code))
    assert (ENDS in code) == (name in ENDING) and ENDING.get(name, "") in code
    if name not in ENDING:
        _expect_its_result(function, inputs, code)
