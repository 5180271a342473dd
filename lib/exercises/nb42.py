"""Exercises of notebook 42, lora_linear."""

from functools import partial

from lib import machine, profiling
from lib.exercises import Wrong, attempted, case, exercise, expect, expect_launches, expect_op
from lib.exercises.watch import (
    Results,
    expect_float32_products,
    expect_kernels_alone_calculate,
    expect_no_pass,
    expect_no_race,
)
from lib.measure import registry
from lib.nogpu.memory import count_traffic
from lib.ops.lora_linear import lora_linear_eager

import torch
import torch.nn.functional as F

K, N = 24, 40
# M, K, N, r: from small to large, so that the first failure is the smallest one
SIZES = (
    (1, 1, 1, 1),
    (1, 3, 2, 2),
    (5, 7, 3, 4),
    (17, 33, 21, 5),
    (32, 24, 40, 16),
    (65, 70, 96, 9),
)


@exercise("42.1", "Mend the module", minutes=10, level=1)
def check_add_lora(answer):
    for place in ({}, {"dtype": torch.float64}, {"device": "meta"}, {"device": machine.device()}):
        for rank, alpha in ((4, 8), (16, 8)):
            at = ", ".join(str(v).removeprefix("torch.") for v in place.values()) or "float32"
            with case(f"{at}, rank {rank}"):
                _expect_module(answer, f"{at}, rank {rank}", rank, alpha, place)


def _expect_module(answer, at, rank, alpha, place):
    linear = torch.nn.Linear(K, N, **place)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    layer = attempted(answer(linear, rank, alpha))
    expect(
        isinstance(layer, torch.nn.Module), f"should return a torch.nn.Module, got {type(layer)}"
    )
    by_shape = {tuple(p.shape): p for p in layer.parameters() if p.requires_grad}
    names = [n for n, p in layer.named_parameters() if p.requires_grad]
    expect(
        set(by_shape) == {(rank, K), (N, rank)} and len(names) == 2,
        f"{at}: trained are {', '.join(names) or 'no parameters'}; it should be A ({rank}, {K}) and B "
        f"({N}, {rank}) alone",
    )
    a, b = by_shape[rank, K], by_shape[N, rank]
    for label, p in (("A", a), ("B", b)):
        expect(
            p.dtype == weight.dtype and p.device == weight.device,
            f"{at}: {label} is {p.dtype} on {p.device}, linear {weight.dtype} on {weight.device}",
        )
    shapes = {tuple(t.shape) for t in layer.state_dict().values()}
    missing = {(rank, K), (N, rank), (N, K), (N,)} - shapes
    expect(not missing, f"{at}: no tensor of shape {missing} in the state_dict")
    if weight.device.type != "meta":
        _expect_values(layer, at, a, b, weight, bias, alpha / rank)


def _expect_values(layer, at, a, b, weight, bias, scale):
    atol = 1e-5 if weight.dtype == torch.float32 else 1e-12
    x = torch.randn(9, K, dtype=weight.dtype, device=weight.device, requires_grad=True)
    start = torch.relu(F.linear(x, weight, bias))
    expect(torch.allclose(layer(x), start, atol=atol), f"{at}: it should begin as relu(linear(x))")
    expect(
        bool(a.detach().any()) or bool(b.detach().any()),
        f"{at}: with A and B both 0 each keeps the other's gradient at 0, for good",
    )
    label, first, parts = ("A", a, "rows") if a.detach().any() else ("B", b, "columns")
    rank = int(torch.linalg.matrix_rank(first.detach().cpu()))  # by its own dtype's rounding
    expect(
        rank == min(first.shape),
        f"{at}: at first {label} has rank {rank}, so its {min(first.shape)} {parts} do not learn different "
        "things; draw them at random",
    )
    with torch.no_grad():
        for t in (a, b):
            t.copy_(torch.randn_like(t) / 4)
    with Results() as results:
        layer(x)
    made = max(result.shape.numel() for result in results.seen if not result.is_view)
    expect(
        made < weight.numel(),
        f"{at}: forward makes a tensor of {made} numbers, W's size: multiply x by A, and that by B",
    )
    want = lora_linear_eager(x, weight, a, b, bias, scale, "relu")
    expect(
        torch.allclose(layer(x), want, rtol=atol, atol=atol),
        f"{at}: y is wrong; s is {scale:g} there",
    )
    with_nan = torch.where(torch.arange(9, device=x.device)[:, None] == 4, float("nan"), x.detach())
    expect(layer(with_nan)[4].isnan().all(), f"{at}: where x is NaN y should be, as relu leaves it")
    wrt = (a, b, x)
    grads = torch.autograd.grad(layer(x).sum(), wrt, allow_unused=True)
    for label, got, to in zip("ABx", grads, torch.autograd.grad(want.sum(), wrt)):
        expect(
            got is not None and torch.allclose(got, to, atol=1e-4),
            f"{at}: the gradient of {label} is wrong, or there is none",
        )


def _inside_is_wrong(m, k, n, r):
    """The short product once for each step of 32: right where there is one step."""
    return k > 32


def _flat_is_wrong(m, k, n, r):
    """Ranks beyond r read the next row of u and of B, where both have one; BLOCK_R is 16, 32, …"""
    return m > 1 and n > 1 and r != max(16, 1 << (r - 1).bit_length())


@exercise("42.2", "The smallest shapes that show it", minutes=10, level=2)
def check_smallest_shapes(shapes):
    expect(
        isinstance(shapes, (tuple, list)) and len(shapes) == 2 and all(map(_is_shape, shapes)),
        "give two tuples of four positive whole numbers, ((M, K, N, r), (M, K, N, r))",
    )
    wrong_where = {"inside": (_inside_is_wrong, 33), "flat": (_flat_is_wrong, 4)}
    for shape, (name, (is_wrong, fewest)) in zip(shapes, wrong_where.items()):
        expect(is_wrong(*shape), f"{name}: at {tuple(shape)} its numbers are right")
        product = torch.Size(shape).numel()
        expect(
            product == fewest,
            f"{name}: {tuple(shape)} shows it, but so does a shape whose product is below {product}",
        )


def _is_shape(shape):
    return (
        isinstance(shape, (tuple, list))
        and len(shape) == 4
        and all(type(n) is int and n > 0 for n in shape)
    )


def _tensors(sizes, dtype):
    """x, W, A, B and b, detached: u and z are about 1."""
    tensors = registry.find("lora_linear").inputs(sizes, dtype, machine.device())
    return tuple(t.detach() for t in tensors)


def _products(fn):
    """[(op, elements of the result, elements read)] of the matrix products that `fn` runs in PyTorch."""
    table = profiling.traffic_table(fn)
    names = "mm mm_ addmv mv dot matmul linear bilinear einsum addmm_activation"
    ends, itemsize = tuple(names.split()), torch.float32.itemsize
    rows = zip(table.op, table.bytes_written, table.bytes_read)
    return [(op, n // itemsize, read // itemsize) for op, n, read in rows if op.endswith(ends)]


def _dz_and_du(dy, y, lora_b, scale):
    dz = torch.where(y <= 0, 0, dy)
    return dz, scale * (dz @ lora_b)


@exercise("42.3", "dz and du in one pass", minutes=20, level=2)
def check_dz_and_du(answer):
    def inputs(shape, dtype):
        m, n, r = shape
        generator = torch.Generator().manual_seed(0)
        dy, y, b = (torch.randn(s, generator=generator) for s in ((m, n), (m, n), (n, r)))
        return tuple(t.to(machine.device(), dtype) for t in (dy, torch.relu(y), b / n**0.5))

    def of_a_sum(shape, dtype):  # y.sum().backward() sends a dy of strides 0
        dy, *rest = inputs(shape, dtype)
        return dy[:1, :1].expand(dy.shape), *rest

    def transposed(shape, dtype):
        dy, *rest = inputs(shape, dtype)
        return dy.t().contiguous().t(), *rest

    def nan_in_y(shape, dtype):  # not ≤ 0, so dy passes, as in eager
        dy, y, b = inputs(shape, dtype)
        y[0, 0] = float("nan")
        return dy, y, b

    def inf_in_dy(shape, dtype):  # where y is 0 it is left out, and inf times 0 would be NaN
        dy, y, b = inputs(shape, dtype)
        y[0, 0], dy[0, 0] = 0, float("inf")
        return dy, y, b

    shapes = ((1, 1, 1), (2, 3, 1), (5, 16, 4), (17, 33, 5), (40, 100, 64), (130, 300, 17))
    shapes += ((1, 16384, 4),)  # long sums, where rounding on the way shows
    for scale in (0.3, -2.0):  # bfloat16 does not hold 0.3
        # Not by name: a reader may rename an argument.
        eager, version = (lambda *t, f=f, s=scale: f(*t, s) for f in (_dz_and_du, answer))
        expect_op(version, eager, inputs, shapes=shapes)
        layouts = {"dy expanded": of_a_sum, "dy transposed": transposed, "y[0, 0] NaN": nan_in_y}
        layouts["dy[0, 0] inf where y is 0"] = inf_in_dy
        for what, layout in layouts.items():
            expect_op(version, eager, layout, shapes[1:4], (torch.float32,), what=f", {what}")
    small = transposed((40, 100, 5), torch.float32)
    call = partial(answer, *small, 0.5)
    expect_launches(call, exactly=1)
    expect_kernels_alone_calculate(call)
    expect_float32_products(call)
    expect_no_pass(call, small[0].nbytes, "at (M, N, r) = (40, 100, 5)")
    many = inputs((40, 300, 17), torch.float32)
    expect_no_race(lambda: answer(*many, 0.5), "at (M, N, r) = (40, 300, 17)")
    traffic = count_traffic(call)
    whole = [a.loaded for a in traffic.by_argument.values() if a.loaded_distinct == small[0].nbytes]
    expect(
        sum(whole) == 2 * small[0].nbytes,
        f"at (40, 100, 5) dy and y have {2 * small[0].nbytes} bytes, and of tensors of their size "
        f"{sum(whole)} are loaded: load each once, and do not read dz back",
    )


def _many(sizes, dtype):
    """Three adapters, in an order in which neighbours differ, and one entry for each 16 rows."""
    x, weight, _, _, bias = _tensors(sizes, dtype)
    m, k, n, r = sizes
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, *s, generator=generator).to(x.device) for s in ((r, k), (n, r)))
    adapter = torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32, device=x.device)
    adapter = adapter.repeat(m // 80 + 1)[: -(-m // 16)]
    return x, weight, (a / k**0.5).to(dtype), (b / r**0.5).to(dtype), bias, adapter.contiguous()


def _many_eager(x, weight, lora_a, lora_b, bias, adapter, scale):
    of_row = adapter.long().repeat_interleave(16)[: x.shape[0]]
    u = torch.einsum("mk,mrk->mr", x, lora_a[of_row])
    delta = torch.einsum("mr,mnr->mn", u, lora_b[of_row])
    return torch.relu(F.linear(x, weight, bias) + scale * delta)


@exercise("42.4", "A sibling: an adapter for each group of rows", minutes=25, level=3)
def check_many(answer):
    def nan_in_x(sizes, dtype):  # its row of y is NaN, as in eager: relu is no maximum with 0
        x, *rest = _many(sizes, dtype)
        x[0, 0] = float("nan")
        return x, *rest

    for scale in (0.3, -2):
        eager, version = (lambda *t, f=f, s=scale: f(*t, s) for f in (_many_eager, answer))
        expect_op(version, eager, _many, shapes=SIZES)
        expect_op(version, eager, nan_in_x, SIZES[:3], (torch.float32,), what=", x[0, 0] NaN")
    inputs = _many((40, 33, 21, 5), torch.float32)
    call = partial(answer, *inputs, 0.5)
    expect_launches(call, exactly=1)
    expect_float32_products(call)
    products = _products(call)
    if products:
        raise Wrong(f"all products belong in the kernel; PyTorch ran {products[0][0]}")
    expect_kernels_alone_calculate(call)
    smallest = min(t.nbytes for t in inputs[:4])  # of x, W, A and B
    expect_no_pass(call, smallest, "at (M, K, N, r) = (40, 33, 21, 5)")
