"""Exercises of notebook 00, Start here."""

import contextlib

from lib import machine
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_number,
    expect_op,
    expect_rounded_once,
)
from lib.exercises.undefined import empty_is_nan
from lib.exercises.watch import FILLS, expect_no_pass

import torch


@exercise("00.1", "Bytes", minutes=5, level=1)
def check_bytes(answer):
    for m, n, itemsize in [(1, 1, 4), (3, 5, 4), (128, 512, 2)]:
        what = f"bytes for ({m}, {n}), {itemsize} bytes an element (count trips to memory, not operands)"
        with case(what):
            expect_number(answer(m, n, itemsize), 3 * m * n * itemsize, what)


@exercise("00.2", "What fusing saves", minutes=5, level=1)
def check_ratio(answer):
    for k in (1, 2, 3, 10):
        what = f"for a chain of {k} (count what all of eager's kernels read and write)"
        with case(what):
            expect_number(answer(k), k, what)


@contextlib.contextmanager
def _hinting_at_silu():
    """Wrong says more where tl.sigmoid gets 16 bits, and where elements keep what torch.empty gave them."""
    try:
        yield
    except Wrong as difference:
        more = ""
        if "Expected dtype" in str(difference):
            more = "; tl.sigmoid takes float32: tl.load(…).to(tl.float32) converts"
        elif "NaN in the wrong place" in str(difference):
            more = "; was it ever written? Count the programs, and look at the mask of the store"
        raise Wrong(f"{difference}{more}") from None


@exercise("00.3", "A kernel of your own", minutes=12, level=2)
def check_silu(answer):
    def inputs(shape, dtype):
        return (4 * torch.randn(shape, device=machine.device(), dtype=dtype),)

    shapes = ((1,), (2, 3), (1024,), (1025,), (17, 333), (2, 3, 5))
    with _hinting_at_silu(), empty_is_nan():
        expect_op(answer, torch.nn.functional.silu, inputs, shapes=shapes)
    expect_launches(lambda: answer(*inputs((5, 7), torch.float32)), exactly=1)
    (x,) = inputs((1025,), torch.bfloat16)
    expect_no_pass(lambda: answer(x), x.nbytes, "at shape (1025,)", but=FILLS)
    exact = torch.nn.functional.silu(x.double())
    expect_rounded_once(answer(x), exact, "at shape (1025,), bfloat16")


@exercise("00.4", "The least time", minutes=8, level=2)
def check_least_time(answer):
    for bytes_moved, flops, bandwidth_gbps, tflops in [
        (4_000_000, 1_000_000, 4000, 50),
        (4_000_000, 10**12, 4000, 800),
        (2**31, 2**28, 900, 14),
        (1_000_000, 5_000_000, 4000, 50),  # more FLOPs than bytes, and still below the ridge
    ]:
        memory_us, compute_us = bytes_moved / bandwidth_gbps / 1e3, flops / tflops / 1e6
        at = f"for {bytes_moved:,} bytes, {flops:,} FLOPs, {bandwidth_gbps} GB/s, {tflops} TFLOP/s"
        with case(at):
            got = attempted(answer(bytes_moved, flops, bandwidth_gbps, tflops))
        expect(
            isinstance(got, tuple) and len(got) == 2,
            "return a tuple: (time in µs, 'memory' or 'compute')",
        )
        what = f"{at}: the time in µs (moving bytes and arithmetic overlap)"
        expect_number(got[0], max(memory_us, compute_us), what)
        limit = "memory" if memory_us >= compute_us else "compute"
        what = f"{at}: the limit is not {got[1]!r} (which of the two would have to be faster?)"
        expect(got[1] == limit, what)
