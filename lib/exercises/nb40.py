"""Exercises of notebook 40, matmul."""

import contextlib
import itertools
from unittest import mock

from lib import machine
from lib.exercises import (
    Wrong,
    case,
    exercise,
    expect,
    expect_any_dy,
    expect_launches,
    expect_number,
    expect_op,
    expect_rounded_once,
    far_apart,
    hinting,
    plural,
    too_many_or_few,
)
from lib.exercises.undefined import SHOWN, undefined_is_infinite
from lib.exercises.watch import (
    expect_float32_products,
    expect_kernels_alone_calculate,
    expect_no_pass,
    expect_no_race,
)
from lib.nogpu.compile_only import compile_for, programs_on_sm, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import OutOfBounds, count_traffic
from lib.ops import matmul

import torch
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError


@exercise("40.1", "What tiles ask for", minutes=8, level=1)
def check_bytes_requested(answer):
    cases = [
        (16, 16, 16, 16, 16, 4),
        (64, 128, 32, 16, 32, 4),
        (64, 128, 32, 16, 32, 2),
        (65, 128, 40, 16, 32, 2),
        (64, 129, 40, 16, 32, 2),
        (8192, 8192, 8192, 128, 256, 2),
    ]
    for m, n, k, block_m, block_n, s in cases:
        of_a, of_b = m * k * -(-n // block_n), k * n * -(-m // block_m)
        what = f"M = {m}, N = {n}, K = {k}, tiles of {block_m}×{block_n}, {s} bytes an element"
        what += " (how many programs load one element of a, how many one of b, and how many store one of y?)"
        with case(what):
            got = answer(m, n, k, block_m, block_n, s)
        expect_number(got, (of_a + of_b + m * n) * s, what, rel=1e-12)


def _missing_tiles(tiles_m, tiles_n, group=8):
    """Tiles of y that the fixed GROUP leaves out."""
    computed = set()
    for tile in range(tiles_m * tiles_n):
        first, rest = tile // (group * tiles_n) * group, tile % (group * tiles_n)
        computed.add((first + rest % group, rest // group))
    return sorted(set(itertools.product(range(tiles_m), range(tiles_n))) - computed)


@exercise("40.2", "The smallest grid that shows it", minutes=5, level=1)
def check_smallest_grid(grid):
    expect(
        isinstance(grid, (tuple, list))
        and len(grid) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in grid),
        "give a tuple of two positive whole numbers, (tiles_m, tiles_n)",
    )
    tiles_m, tiles_n = grid
    expect(tiles_m * tiles_n <= 10**6, "give a grid of fewer tiles, at most a million")
    missing = _missing_tiles(tiles_m, tiles_n)
    expect(missing, f"with {tiles_m}×{tiles_n} tiles every tile is computed, so nothing shows")
    expect(
        tiles_m * tiles_n <= 2,
        f"of {tiles_m}×{tiles_n} tiles {missing[0]} is never computed, but a grid of fewer tiles shows it too",
    )


_FEWEST, _LARGEST, _MOST_STAGES = 3, 64 * 128, 3  # programs; sums of the largest tile; its stages


@exercise("40.3", "Three programs on an SM", minutes=10, level=2)
def check_residents(answer):
    expect(
        isinstance(answer, (tuple, list))
        and len(answer) == 4
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in answer),
        "give a tuple of four positive whole numbers, (BLOCK_M, BLOCK_N, stages, programs on an SM)",
    )
    block_m, block_n, stages, programs = answer
    tiles = (16, 32, 64, 128, 256)
    expect(block_m in tiles and block_n in tiles, "sides of tiles here are powers of 2, 16 to 256")
    expect(stages <= 6, "give at most 6 stages")
    plan = f"{block_m}×{block_n} with {plural(stages, 'stage')}"
    shared = stages * (block_m + block_n) * 64 * 2
    expect(shared <= 227 * 1024, f"{plan} takes {shared} bytes of shared memory, too many to start")
    c = _compiled(block_m, block_n, stages)
    fit = min(programs_on_sm(c))
    why = (
        f"a thread has {c.registers} registers, and a program {c.shared_bytes} bytes of shared memory and "
        "1 KB more"
    )
    size = too_many_or_few(programs, fit)
    expect(programs == fit, f"{plural(programs, 'program')} of {plan} are {size}: {why}")
    expect(c.spills == 0, f"{plan} spills {c.spills} words a thread")
    expect(fit >= _FEWEST, f"of {plan} only {plural(fit, 'program')} fit on an SM: {why}")
    expect(
        block_m * block_n == _LARGEST and block_m + block_n == 192,
        f"three programs of {plan} fit, but so do three with a tile that asks for fewer bytes",
    )
    expect(stages == _MOST_STAGES, f"{plan}: three programs fit with one stage more, too")


def _compiled(block_m, block_n, stages):
    """The op's kernel for bfloat16 and a Hopper GPU, with four warps."""
    t, kernel = torch.empty(1024, 1024, dtype=torch.bfloat16), matmul._matmul_kernel
    signature = signature_of(
        kernel, t, t, None, t, None, 1024, 1024, 1024, 1024, 1, 1024, 1, 1024,
        ACTIVATION="identity", DOT=True, PRECISION="ieee", COMPUTE=tl.float32, GROUP=8, HALVES=False,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=64,
    )  # fmt: skip
    return compile_for(kernel, signature, arch=90, num_warps=4, num_stages=stages)


def _normal(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(machine.device(), dtype)


@exercise("40.4", "A sibling: many small products", minutes=30, level=2)
def check_batched(answer):
    def inputs(shape, dtype):
        n_batches, m, n, k = shape
        a, b = _normal((n_batches, m, k), dtype), _normal((n_batches, k, n), dtype, seed=1)
        return a.requires_grad_(), b.requires_grad_()

    def strided(shape, dtype):
        n_batches, m, n, k = shape
        a = _normal((k, m, n_batches), dtype).permute(2, 1, 0)
        b = _normal((k, n), dtype, seed=1).expand(n_batches, k, n)
        return a.requires_grad_(), b.requires_grad_()

    shapes = ((1, 1, 1, 1), (2, 3, 5, 4), (3, 17, 33, 20), (2, 64, 32, 64), (3, 40, 70, 50))
    expect_op(answer, torch.bmm, inputs, shapes=shapes)
    expect_op(answer, torch.bmm, strided, shapes=((2, 3, 5, 4), (3, 17, 33, 20)))
    expect_op(answer, torch.bmm, inputs, shapes=((1, 16, 64, 4000),), dtypes=(torch.bfloat16,))
    y = answer(*strided((2, 3, 5, 4), torch.float32))
    expect(y.is_contiguous(), f"y should be contiguous, its strides are {y.stride()}")
    dy = y.new_ones(()).expand(y.shape)  # as y.sum().backward() sends it
    turned = strided((2, 3, 5, 4), torch.float32)
    got = torch.autograd.grad(answer(*turned), turned, dy)
    for name, g, want in zip("ab", got, torch.autograd.grad(torch.bmm(*turned), turned, dy)):
        same = torch.allclose(g, want, atol=1e-5)
        expect(same, f"at (2, 3, 5, 4): d{name} is wrong for a dy of strides 0")
    expect_any_dy(answer, turned, "at (2, 3, 5, 4)")
    both = _both_passes(answer, inputs((3, 17, 33, 20), torch.float32))
    expect_launches(lambda: answer(*inputs((3, 17, 33, 20), torch.float32)), exactly=1)
    launches = count_traffic(both).launches
    expect(
        launches == 3,
        f"both passes should be three launches, one for y, da and db each; there are {launches}",
    )
    square = _both_passes(answer, inputs((2, 16, 16, 16), torch.float32))
    expect_kernels_alone_calculate(square)
    expect_float32_products(square)
    long = _both_passes(answer, inputs((1, 17, 33, 300), torch.float32))
    expect_no_race(long, "at (B, M, N, K) = (1, 17, 33, 300)")
    turned = strided((3, 17, 33, 20), torch.float32)
    _expect_nothing_undefined(answer, torch.bmm, inputs((3, 17, 33, 20), torch.float32))
    smallest = 3 * 17 * 20 * 4
    expect_no_pass(_both_passes(answer, turned), smallest, "a permuted, b expanded, both passes")
    _expect_a_grid_for_many(answer, inputs((2**16, 1, 1, 1), torch.bfloat16))
    with contextlib.suppress(MemoryError):  # where a system counts pages that nobody touches
        for axis, what in enumerate(("products", "rows", "columns")):
            _expect_offsets_of_64_bits(answer, axis, what)
        _expect_a_large_y(answer)


def _expect_nothing_undefined(answer, reference, inputs):
    """Wrong if y depends on what a masked load without `other` gives."""
    with undefined_is_infinite():
        y = answer(*inputs)
    expect(torch.allclose(y, reference(*inputs), atol=1e-4), SHOWN)


def _expect_a_grid_for_many(answer, inputs):
    """Wrong if a launch has more programs in its second or third direction than a GPU takes."""
    with _launches_not_run() as grids:
        _both_passes(answer, inputs)()
    for grid in grids:
        expect(
            max(grid[1:]) < 2**16,
            f"with {len(inputs[0]):,} products a grid is {'×'.join(map(str, grid))}; "
            "only its first direction takes more than 65,535 programs on a GPU",
        )


class _NotRun(Exception):
    """Leaves a launch before its first program."""


@contextlib.contextmanager
def _launches_not_run():
    """A list that receives the grid of each launch inside; no program runs."""
    grids, launch = [], upstream.GridExecutor.__call__

    def set_grid_dim(self, *grid):
        grids.append(grid)
        raise _NotRun

    def launch_until_grid(self, *args, **kwargs):
        with contextlib.suppress(_NotRun):
            launch(self, *args, **kwargs)

    with (
        interpreted_launches(),
        mock.patch.object(upstream.InterpreterBuilder, "set_grid_dim", set_grid_dim),
        mock.patch.object(upstream.GridExecutor, "__call__", launch_until_grid),
    ):
        yield grids


def _expect_offsets_of_64_bits(answer, axis, what):
    """Wrong if offsets overflow where 2**30 elements lie between the products, rows or columns of a and b."""
    near, other = (_normal((3, 3, 3), torch.bfloat16, seed=seed).cpu() for seed in (2, 0))
    far = far_apart(near).movedim(0, axis)
    for name, pair in (("a", (far, other)), ("b", (other, far))):
        pair = [t.detach().requires_grad_() for t in pair]
        at = f"with 2**30 elements between two {what} of {name}"
        got, want = [], _results(torch.bmm, pair)
        _expect_inside(lambda pair=pair, got=got: got.extend(_results(answer, pair)), at)
        alike = all(torch.allclose(g.cpu(), w, rtol=0.02, atol=0.02) for g, w in zip(got, want))
        expect(alike, f"{at} y or a gradient is wrong; cast offsets to tl.int64")


def _expect_inside(launch, at):
    """Wrong if a kernel in `launch()` reads or writes outside its tensors: where is named."""
    try:
        count_traffic(launch)
    except (OutOfBounds, InterpreterError) as error:
        says = str(error.__cause__ or error).partition(";")[0]
        raise Wrong(f"{at}: {says}; cast offsets to tl.int64") from None


def _expect_a_large_y(answer):
    """Wrong if offsets overflow in a y of more than 2**31 elements, of which only the last program runs."""
    a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((65, 2**10, 1), (65, 1, 2**15)))
    try:
        torch.empty(65, 2**10, 2**15, dtype=torch.bfloat16)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error

    def last(*numbers):
        return range(*numbers)[-1:] if len(numbers) == 1 and numbers[0] > 64 else range(*numbers)

    with mock.patch.object(upstream, "range", last, create=True):
        _expect_inside(lambda: answer(a, b), "where y has 65 · 2**25 elements")


def _results(function, inputs):
    """y and the gradients of its sum."""
    y = function(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))


def _both_passes(answer, inputs):
    dy = torch.ones_like(answer(*inputs)).mT.contiguous().mT  # of any strides
    return lambda: torch.autograd.grad(answer(*inputs), inputs, dy)


def _cosine(x, c):
    return (x @ c.t()) / (x.norm(dim=1)[:, None] * c.norm(dim=1)[None, :])


def _expect_squares_in_float32(answer, few, many):
    """Wrong where squares are rounded to bfloat16: in rows of one number each these errors do not cancel."""
    # the squares of 189/128, 191/128 and 193/128 round up by 0.34 %
    values = torch.tensor([189.0, 191.0, 193.0], device=few.device, dtype=few.dtype) / 128
    rows = values[:, None].expand_as(few).contiguous()
    for what, x, c in (("x", rows, many), ("c", many, rows)):
        at = f"{tuple(x.shape)} and {tuple(c.shape)}, bfloat16, one number in each row of {what}"
        expect_rounded_once(answer(x, c), _cosine(x.double(), c.double()), at, terms=1.0)


@exercise("40.5", "A norm on the way", minutes=20, level=3)
def check_cosine_similarity(answer):
    def inputs(shape, dtype):
        m, n, k = shape
        return _normal((m, k), dtype), 3 * _normal((n, k), dtype, seed=1)

    shapes = ((1, 1, 1), (3, 5, 4), (17, 33, 20), (64, 32, 64), (40, 70, 100))

    def with_zeros(shape, dtype):
        x, c = inputs(shape, dtype)
        return x.index_fill(0, torch.tensor([1], device=x.device), 0), c

    def large(shape, dtype):
        return tuple(1e12 * t for t in inputs(shape, dtype))

    # all cosines near 1, so that a sum rounded to 8 bits at each step shows
    def alike(shape, dtype):
        return tuple(1.2 + 0.1 * t for t in inputs(shape, dtype))

    expect_op(answer, _cosine, inputs, shapes=shapes)
    both = (torch.float32, torch.bfloat16)
    special = (
        (with_zeros, "row 1 of x is 0", ((3, 5, 4), (40, 70, 100)), both),
        (large, "numbers near 10¹²", ((3, 5, 4), (40, 70, 100)), both),
        (alike, "numbers near 1.2", ((3, 5, 8192),), both[1:]),
    )
    for make_inputs, what, sizes, dtypes in special:
        with hinting(before=f"{what} here: "):
            expect_op(answer, _cosine, make_inputs, shapes=sizes, dtypes=dtypes)
    _expect_squares_in_float32(answer, *alike((3, 33, 64), torch.bfloat16))
    _expect_nothing_undefined(answer, _cosine, inputs((17, 33, 20), torch.float32))
    x, c = inputs((16, 16, 100), torch.float32)
    expect_launches(lambda: answer(x, c), exactly=1)
    traffic = count_traffic(lambda: answer(x, c))
    loaded = sum(a.loaded for a in traffic.by_argument.values())
    expect(
        loaded <= x.nbytes + c.nbytes,
        f"at M = N = 16, K = 100 its loads request {loaded} bytes, the product alone {x.nbytes + c.nbytes}",
    )
    expect_float32_products(lambda: answer(x, c))
    expect_kernels_alone_calculate(lambda: answer(x, c))
