"""Exercises of notebook 34, bias_gelu_dropout_add."""

import contextlib
import itertools
from unittest import mock

from lib import machine
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    hinting,
    left_alone,
)
from lib.exercises.watch import expect_kernels_alone_calculate
from lib.nogpu.interpreter import philox_rounds
from lib.nogpu.memory import count_traffic
from lib.ops.bias_gelu_dropout_add import keep_mask

import torch

# with seed 26 the 16 bits of element 825 are 0, which is not below the threshold of p = 0
_SEEDS = (26, 2**40 + 7)
# (p, seed) where 65536 p is no whole number and an element below 8 has the whole number below it as its bits:
# 6553 at p = 0.1, which rounds up to 6554, and 13107 at p = 0.2, which rounds down to 13107
_ROUNDED = ((0.1, 1113), (0.2, 3176))
_NOT_FINITE = (
    ("dy", float("nan")),
    ("x", float("nan")),
    ("gate", float("nan")),
    ("dy", float("inf")),
)


@exercise("34.1", "The smallest size that shows it", minutes=7, level=1)
def check_rows_that_overflow(rows):
    expect(
        isinstance(rows, int) and not isinstance(rows, bool) and rows > 0,
        "give a number of rows, an int above 0",
    )
    last, largest = rows * 4096 - 1, 2**31 - 1
    expect(last > largest, f"with {rows} rows the last index is {last}, which int32 can hold")
    expect(
        last - 4096 <= largest,
        f"with {rows} rows it goes wrong, but with one row fewer it does too: the last index is {last - 4096}, "
        "more than int32 can hold",
    )


@exercise("34.2", "A mask in an eighth of the bytes", minutes=8, level=1)
def check_keep_bits(answer):
    sizes = [(n, b) for n, b in itertools.product((1, 8, 100, 3001), (8, 64, 1024)) if n < 100 * b]
    cases = list(itertools.product(sizes, itertools.product((0.0, 0.25, 0.5, 1.0), _SEEDS)))
    cases += [((8, 64), rounded) for rounded in _ROUNDED]
    for (n, block_size), (p, seed) in cases:
        at = f"at n_elements = {n}, p = {p}, seed {seed}, block_size {block_size}"
        given = _tensor(seed)
        with case(at), left_alone(at, seed=given):
            got = attempted(answer(n, p, given, block_size))
        n_bytes = -(-n // 8)
        expect(isinstance(got, torch.Tensor), f"{at}: should be a tensor, got {type(got).__name__}")
        expect(
            got.shape == (n_bytes,), f"{at}: shape is {tuple(got.shape)}, should be ({n_bytes},)"
        )
        expect(got.dtype == torch.uint8, f"{at}: dtype is {got.dtype}, should be torch.uint8")
        flags, beyond = _flags_of(got).split((n, 8 * n_bytes - n))
        differ = (flags != keep_mask((n,), p, seed)).nonzero().flatten().tolist()
        if differ:
            raise Wrong(
                f"{at}: {len(differ)} of {n} bits are not keep_mask's; the first is element {differ[0]}"
                + (_cause(answer) or _place(differ[0], p, seed, block_size))
            )
        expect(not beyond.any(), f"{at}: a bit beyond element {n - 1} is 1, and should be 0")
    expect_launches(lambda: answer(100, 0.5, _tensor(7), 64), exactly=1)
    programs = count_traffic(lambda: answer(100, 0.5, _tensor(7), 64)).programs
    expect(programs == 2, f"100 elements, block_size 64: should be 2 programs, got {programs}")
    seed = _tensor(7)
    with _stays_on_the_gpu(seed):
        answer(100, 0.5, seed, 64)


def _flags_of(packed):
    """The bits of a uint8 tensor on the CPU, the lowest of each byte first."""
    return (packed.cpu()[:, None] >> torch.arange(8) & 1).bool().flatten()


@contextlib.contextmanager
def _stays_on_the_gpu(seed):
    """Wrong if Python reads the value of the tensor `seed`, or of a view of it, meanwhile."""
    memory = seed.untyped_storage().data_ptr()

    def watched(name, read):
        def method(tensor, *args):
            if tensor.untyped_storage().data_ptr() == memory:
                raise Wrong(f"seed.{name}() waits for the GPU: hand the tensor to the kernel")
            return read(tensor, *args)

        return mock.patch.object(torch.Tensor, name, method)

    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "__int__"):
            stack.enter_context(watched(name, getattr(torch.Tensor, name)))
        yield


def _cause(answer, n=512, p=0.5, seed=2**40 + 7):
    """The mistakes that give the flags of `answer` in a single tile, for a message; "" if none is known."""
    got = _flags_of(answer(n, p, _tensor(seed), n)).tolist()
    # tl.rand makes a call for each element, and of its first word 31 bits: the word, or all its bits turned
    words = (_philox(i, seed, 10)[0] for i in range(n))
    if got == [min(word, 2**32 - 1 - word) / 2**31 >= p for word in words]:
        return ". They are tl.rand's, a call for each element: a call of tl.randint4x serves eight"
    mistakes = (
        (1, -1, "The highest bit of a byte stands for its first element: begin with the lowest"),
        (7, 10, "Philox runs ten rounds, Triton's default: give tl.randint4x a 7"),
        ("abcd", "acbd", "Your words stand in the order a, c, b, d: join (a, c) with (b, d)"),
        (1, -1, "The upper half of a word comes before the lower one"),
        (True, False, "True stands for dropped, and should for kept"),
    )
    for made in itertools.product((False, True), repeat=len(mistakes)):
        bit, rounds, order, step, keep_flag = (m[wrong] for m, wrong in zip(mistakes, made))
        calls = (_philox(i, seed, rounds) for i in range(n // 8))
        words = (call["abcd".index(letter)] for call in calls for letter in order)
        lanes = (half for word in words for half in (word & 0xFFFF, word >> 16)[::step])
        flags = [(bits >= 65536 * p) == keep_flag for bits in lanes]
        if got == [flag for i in range(0, n, 8) for flag in flags[i : i + 8][::bit]]:
            return "".join(f". {m[2]}" for m, wrong in zip(mistakes, made) if wrong)
    return ""


def _place(element, p, seed, block_size):
    """What to look at where `element` is the first wrong one, and a single tile is right at p = ½."""
    bits, threshold = _bits(element, seed), round(65536 * p)
    if element >= block_size and abs(bits - threshold) > 1:
        return ". The first tile is right: number the calls over the whole tensor, with one seed"
    return f". Its 16 bits are {bits}: what is below round(65536 * p) = {threshold} is dropped"


def _bits(element, seed):
    """The 16 bits that keep_mask draws for an element."""
    call, lane = divmod(element, 8)
    return _philox(call, seed, 7)[lane // 2] >> 16 * (lane % 2) & 0xFFFF


def _philox(call, seed, rounds):
    """The four words of a Philox4x32 call."""
    return [
        int(word) for word in philox_rounds(call, 0, 0, 0, seed & 0xFFFFFFFF, seed >> 32, rounds)
    ]


def _tensor(seed):
    return torch.tensor([seed], dtype=torch.int64, device=machine.device())


@exercise("34.3", "Draw the mask again", minutes=15, level=2)
def check_dropped_gate_backward(answer):
    try:
        _expect_gradients(answer)
    except Wrong as difference:
        raise Wrong(f"{difference}{_cause_of_gradients(answer)}") from None
    for p, seed in _ROUNDED:
        tensors = _three((1, 8), torch.float32)
        mask = answer(*tensors, p, _tensor(seed))[0] != 0
        expect(
            torch.equal(mask.cpu(), keep_mask((1, 8), p, seed)),
            f"at shape (1, 8), p = {p}, seed {seed}: another is kept; the threshold is round(65536 * p)",
        )
    small = _three((17, 33), torch.float32)
    expect_launches(lambda: answer(*small, 0.5, _tensor(7)), exactly=1)
    seed = _tensor(7)
    with _stays_on_the_gpu(seed):
        expect_kernels_alone_calculate(lambda: answer(*small, 0.5, seed))


def _expect_gradients(answer):
    shapes = ((1, 1), (2, 3), (8, 8), (17, 33), (64, 128), (129, 100))
    for p, seed in itertools.product((0.5, 0.25, 0.0), _SEEDS):

        def eager(dy, x, gate, p=p, seed=seed):
            dz = dy * keep_mask(x.shape, p, seed, x.device) / (1 - p)  # as autograd: 0 · NaN is NaN
            return dz * gate, dz * x

        def version(dy, x, gate, p=p, seed=seed):
            return answer(dy, x, gate, p, _tensor(seed))

        def of_a_sum(shape, dtype):
            dy, x, gate = _three(shape, dtype)
            return dy[:1, :1].expand(shape), x, gate

        def transposed(shape, dtype):
            dy, x, gate = _three(shape, dtype)
            return dy.t().contiguous().t(), x, gate

        expect_op(version, eager, _three, shapes=shapes if p else shapes[:3])
        small = {"shapes": ((2, 3), (17, 33)), "dtypes": (torch.float32,)}
        expect_op(version, eager, transposed, **small, what=", dy transposed in memory")
        with hinting("; dy has strides (0, 0) here, as y.sum().backward() sends it"):
            expect_op(version, eager, of_a_sum, shapes=((2, 3), (17, 33)))
        with hinting("; autograd multiplies by keep, and 0 · NaN is NaN: a choice loses it"):
            for name, number in _NOT_FINITE:

                def spoilt(shape, dtype, name=name, number=number):
                    tensors = _three(shape, dtype)
                    tensors[("dy", "x", "gate").index(name)][0] = number
                    return tensors

                what = f", the first row of {name} {number}"
                expect_op(version, eager, spoilt, **small, what=what)


def _cause_of_gradients(answer, shape=(8, 8), p=0.25, seed=2**40 + 7):
    """The mistakes that give the gradients of `answer` in a single tile, for a message; "" if none is known."""
    dy, x, gate = _three(shape, torch.float32)
    try:
        got = torch.stack(answer(dy, x, gate, p, _tensor(seed))).view(2, *shape).to(dy)
    except Exception:  # it was wrong in another way, which the message says
        return ""
    keep = keep_mask(shape, p, seed, dy.device)
    every = torch.ones_like(keep)
    factors = (
        (gate, x, ""),
        (x, gate, "The two are swapped: dx has gate as a factor, dgate has x"),
    )
    scales = (
        (1 / (1 - p), ""),
        (1, "1 / (1 - p) is missing: what is kept is scaled, as in the forward pass"),
        (1 - p, "They are multiplied by 1 - p, and should be divided by it"),
    )
    masks = (
        (keep, keep, ""),
        (keep, every, "dgate is not dropped"),
        (every, keep, "dx is not dropped"),
        (every, every, "Nothing is dropped"),
        (~keep, ~keep, "The mask is turned round: what forward kept is dropped"),
    )
    for (a, b, swapped), (scale, scaled), (k, m, dropped) in itertools.product(
        factors, scales, masks
    ):
        if torch.allclose(got, scale * dy * torch.stack((k * a, m * b)), rtol=1e-4, atol=1e-5):
            return "".join(f". {said}" for said in (swapped, scaled, dropped) if said)
    return ""


@exercise("34.4", "Drop whole rows", minutes=20, level=3)
def check_drop_path(answer):
    for p, seed in ((0.5, 0), (0.25, 2**40 + 7), (0.0, 3)):

        def eager(x, branch, p=p, seed=seed):
            keep = keep_mask((x.shape[0], 1), p, seed, x.device)
            return x + torch.where(keep, branch, 0) / (1 - p)

        def version(x, branch, p=p, seed=seed):
            return answer(x, branch, p, _tensor(seed))

        with case(f"at shape (1, 1), p = {p}"):
            attempted(version(*_two((1, 1), torch.float32)))
        expect_launches(lambda version=version: version(*_two((5, 7), torch.float32)), exactly=1)
        _expect_rows(version, p, seed)
        shapes = ((1, 1), (2, 3), (8, 8), (17, 33), (129, 100))
        expect_op(version, eager, _two, shapes=shapes if p else shapes[:3])
        if p == 0.25:
            long = {"shapes": ((700, 3), (3, 3000)), "dtypes": (torch.float32,)}
            expect_op(version, eager, _two, **long)
            x, branch = _two((8, 8), torch.float32)
            branch[:, 0] = float("nan")
            got, keep = attempted(version(x, branch)).isnan(), keep_mask((8,), p, seed, x.device)
            expect(
                not got[~keep].any(),
                "a dropped row whose branch holds NaN should be x: 0 · NaN is NaN, so choose",
            )
            expect(
                torch.equal(got, eager(x, branch).isnan()),
                "a kept row should be NaN where its branch is NaN, and nowhere else",
            )
            _expect_one_kernel(answer, p, _tensor(seed))
    p, seed = 13107 / 65536, 3176  # row 7 draws the threshold itself
    _expect_rows(lambda x, branch: answer(x, branch, p, _tensor(seed)), p, seed)


def _expect_one_kernel(answer, p, seed):
    """Wrong if PyTorch calculates besides, or if Python reads the seed."""
    x, branch = _two((5, 7), torch.float32)
    with _stays_on_the_gpu(seed):
        expect_kernels_alone_calculate(lambda: answer(x, branch, p, seed))


def _expect_rows(version, p, seed):
    """Wrong unless version(zeros, ones) keeps the rows that keep_mask keeps."""
    at = f"at shape (17, 3), p = {p}, seed {seed}"
    branch = torch.ones(17, 3, device=machine.device())
    with case(at):
        y = version(torch.zeros_like(branch), branch)
    expect(isinstance(y, torch.Tensor), f"{at}: should be a tensor, got {type(y).__name__}")
    expect(y.shape == branch.shape, f"{at}: shape is {tuple(y.shape)}, should be (17, 3)")
    got, want = (y != 0).cpu(), keep_mask((17,), p, seed)
    for row in range(17):
        expect(
            got[row].all() or not got[row].any(),
            f"{at}: row {row} is kept in some columns and dropped in others: draw one number for a whole row",
        )
    wrong = [row for row in range(17) if got[row, 0] != want[row]]
    if wrong:
        rows = got[:, 0].nonzero().flatten().tolist()
        bits, threshold = _bits(wrong[0], seed), round(65536 * p)
        why = (
            f"its 16 bits are {bits}, and what is below {threshold} is dropped"
            if bits == threshold
            else "row i takes lane i % 8 of Philox call i // 8"
        )
        raise Wrong(f"{at}: rows {rows} are kept, and row {wrong[0]} is wrong: {why}")
    added = float(y.cpu()[want].mean())
    expect(
        abs(added - 1 / (1 - p)) < 1e-4,
        f"{at}: a kept row adds {added:.4g} where branch is 1, should be 1 / (1 - p) = {1 / (1 - p):.4g}",
    )


def _two(shape, dtype, n=2):
    generator = torch.Generator(device=machine.device()).manual_seed(0)
    return tuple(
        torch.randn(shape, dtype=dtype, device=machine.device(), generator=generator)
        for _ in range(n)
    )


def _three(shape, dtype):
    return _two(shape, dtype, 3)
