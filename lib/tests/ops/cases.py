"""Inputs that hurt: what the battery gives to every version of every op, and to every mutant."""

import contextlib
import functools

from lib import machine
from lib.measure.bench import outputs

import torch


def release(package):
    """(major, minor) of a package, as torch or triton: (3, 7)."""
    return tuple(map(int, package.__version__.split(".")[:2]))


def copies_of_16_bytes(mix):
    """Asynchronous copies to shared memory in an instruction_mix; on Ampere Triton 3.9 names L2 too."""
    return mix["LDGSTS.E.BYPASS.128"] + mix["LDGSTS.E.BYPASS.LTC128B.128"]


def layouts(t):
    """{name: the same numbers as t in a layout that users really pass}; expanded, a part of them repeated.

    Between them stand numbers to notice: NaN, or the smallest integer.
    """
    if t.dim() < 2:
        return {"every second": torch.stack([t, t], dim=-1)[..., 0]}
    *leading, m, n = t.shape
    gap = float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min
    wide = torch.full((*leading, m, 2 * n + 3), gap, dtype=t.dtype, device=t.device)
    wide[..., 3 : n + 3] = t
    gaps = torch.full((*leading, 2 * m, n), gap, dtype=t.dtype, device=t.device)
    gaps[..., ::2, :] = t
    columns = torch.full((*leading, m, 2 * n), gap, dtype=t.dtype, device=t.device)
    columns[..., ::2] = t
    return {
        "transposed": t.transpose(-1, -2).contiguous().transpose(-1, -2),
        "every second row": gaps[..., ::2, :],
        "every second column": columns[..., ::2],
        "chunk of a wider tensor, unaligned": wide[..., 3 : n + 3],
        "expanded row": t[..., :1, :].expand_as(t),
        "first dimension last": t.movedim(0, -1).contiguous().movedim(-1, 0),
    }


def spread(t):
    """The same numbers with a gap behind each: a parameter that is a column of something."""
    return torch.stack([t, t], dim=-1)[..., 0].detach().requires_grad_()


@functools.cache
def products_leak():
    """Does the NaN of one row get into others in this CPU's own bfloat16 products, as it does with AMX?"""
    if machine.HAS_GPU:
        return False
    for m, k, n in ((6, 16, 24), (17, 33, 21), (20, 33, 24)):
        a, b = torch.ones(m, k).bfloat16(), torch.ones(k, n).bfloat16()
        a[1] = float("nan")
        if (a @ b)[[row for row in range(m) if row != 1]].isnan().any():
            return True
    return False


def with_specials(inputs, eager, elementwise=True, k=0):
    """NaN, infinities, zeros of both signs and large numbers written into input k, six rows or more, in place.

    elementwise: rows of them, but not where eager itself gives a NaN, or an infinity, for a number that the
    dtype has: such are F.gelu(inf) and F.gelu(3e38) on a CPU, as one of seven elements or more. Else one NaN
    and one infinity, as sums of large numbers depend on their order.
    """
    nan, inf = float("nan"), float("inf")
    special = [nan, inf, -inf, 0.0, -0.0, 1e4, -1e4, 11.0, -11.0, 90.0, -90.0]
    x = inputs[k].detach().reshape(-1, inputs[k].shape[-1]).clone()
    if not elementwise:
        x[1, 2], x[3, -1] = nan, inf
    else:
        x[1, : len(special)] = torch.tensor(special).to(x)
        x[3] = nan
        x[4] = -inf
        x[5] = torch.finfo(x.dtype).max
    with torch.no_grad():
        inputs[k].copy_(x.view(inputs[k].shape))
        if elementwise:
            exact = outputs(eager(*(t.double() for t in inputs)))
            for own, want in zip(outputs(eager(*inputs)), exact):
                overflow = own.isinf() & (want.abs() <= torch.finfo(x.dtype).max)
                inputs[k][(own.isnan() & ~want.isnan()) | overflow] = 1.0
    return inputs


def spaced(t):
    """The numbers of t with 2**30 elements between those of one dimension of 2 or 3; None where there is none.

    4 GiB of address space in float16, of which a few pages are touched.
    """
    thin = [k for k, size in enumerate(t.shape) if size in (2, 3)]
    if not thin:
        return None
    strides = list(torch.empty(t.shape, device="meta").stride())
    strides[thin[0]] = 2**30
    storage = torch.empty(2**31 + t.numel(), dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, strides).copy_(t)


@contextlib.contextmanager
def empty_is_nan():
    """Memory that nobody has written holds NaN, and never, by chance, an earlier right answer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def near(eager):
    """The definition on contiguous copies: cuBLAS reads past the end of rows that begin 2 GiB apart."""

    def on_copies(*inputs, **options):
        copies = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in inputs]
        return eager(*copies, **options)

    return on_copies
