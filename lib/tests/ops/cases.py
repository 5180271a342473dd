"""Inputs that hurt: what test_ops runs on every version of every op, and `mutants` on every wrong one."""

import torch


def release(package):
    """(major, minor) of a package, as torch or triton: (3, 7)."""
    return tuple(map(int, package.__version__.split(".")[:2]))


def way_of_fused_mlp(module, way):
    """{name: value} in lib/ops/fused_mlp.py, or a mutant of it, with which every call goes this way."""

    def for_all_kinds(name, value):
        return {name: dict.fromkeys(getattr(module, name), value)}

    return {
        "_n_multiprocessors": lambda device: 132,
        "_MOST_HIDDEN": 0 if way == "cublas" else 2**62,
        **for_all_kinds("_MOST_OF_A_ROW", 2**62),
        "_MOST_OF_WIDE": 2**62,
        **for_all_kinds("_ALONE", 0 if way == "split" else 2**62),
        "_LEAST_OF_A_PART": 1,
        "_MOST_SPLITS": 3,  # parts of several tiles
    }


def matrix_like(inputs):
    """Which of an op's inputs have the shape of the first: they take every layout that it takes."""
    return [t.shape == inputs[0].shape for t in inputs]


def layouts(x):
    """{name: the same numbers as x, (M, N), in a layout that users really pass}."""
    m, n = x.shape
    wide = torch.randn(m, 2 * n + 3, dtype=x.dtype, device=x.device)
    wide[:, 3 : n + 3] = x
    gaps = torch.randn(2 * m, n, dtype=x.dtype, device=x.device)
    gaps[::2] = x
    columns = torch.randn(m, 2 * n, dtype=x.dtype, device=x.device)
    columns[:, ::2] = x
    return {
        "transposed": x.t().contiguous().t(),
        "every second row": gaps[::2],
        "every second column": columns[:, ::2],
        "chunk of a wider tensor, unaligned": wide[:, 3 : n + 3],
        "four dimensions, permuted": x.view(1, m, 1, n).permute(0, 2, 1, 3),
        "expanded row": x[:1].expand(m, n),
    }


def laid_out(inputs):
    """{layout: inputs}, with the first, and then each other of its shape, in that layout; all are leaves."""
    inputs = [t.detach() for t in inputs]
    found = {}
    for k, like_x in enumerate(matrix_like(inputs)):
        if like_x:
            for layout, strided in layouts(inputs[k]).items():
                values = [
                    t.view(strided.shape) if t.shape == inputs[k].shape else t for t in inputs
                ]
                values[k] = strided
                found[f"input {k} {layout}"] = [v.detach().requires_grad_() for v in values]
    return found


def spread(t):
    """The same numbers with a gap behind each: a parameter that is a column of something."""
    return torch.stack([t, t], dim=-1)[..., 0].detach().requires_grad_()


def in_float32(eager):
    """The definition in float32, then rounded: some CPUs' own bfloat16 products let NaN into other rows."""

    def rounded(*tensors, **how):
        wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        return eager(*wide, **how).to(tensors[0].dtype)

    return rounded


def with_specials(inputs, eager):
    """NaN, infinities, zeros of both signs and large numbers written into x, (6, 24) or larger, in place.

    Not where eager itself gives a NaN, or an infinity, for a number that the dtype has: such are F.gelu(inf)
    and F.gelu(3e38) on a CPU, as one of seven elements or more.
    """
    x = inputs[0]
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        1e4,
        -1e4,
        11.0,
        -11.0,
        90.0,
        -90.0,
    ]
    with torch.no_grad():
        x[1, : len(special)] = torch.tensor(special).to(x)
        x[3] = float("nan")
        x[4] = -float("inf")
        x[5] = torch.finfo(x.dtype).max
        own, want = eager(*inputs), eager(*(t.double() for t in inputs))
        overflow = own.isinf() & (want.abs() <= torch.finfo(x.dtype).max)
        faults = (own.isnan() & ~want.isnan()) | overflow
        if faults.shape == x.shape:
            x[faults] = 1.0
    return inputs


def far_apart(dtype, device):
    """(3, 16) numbers, rows 2**30 elements apart: 4 GiB of address space, of which three pages are touched."""
    storage = torch.empty(2**31 + 64, dtype=dtype, device=device)
    t = storage.as_strided((3, 16), (2**30, 1))
    t.copy_(torch.arange(-24, 24).view(3, 16) / 8)
    return t


def near(eager):
    """The definition on contiguous copies: cuBLAS reads past the end of rows that begin 2 GiB apart."""

    def on_copies(*inputs, **options):
        copies = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in inputs]
        return eager(*copies, **options)

    return on_copies
