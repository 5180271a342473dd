"""Exercises of notebook 32, rows of any width; and its kernel for a part of a row."""

import contextlib
import re
from unittest import mock

from lib import machine
from lib.exercises import SHAPES, attempted, case, exercise, expect, expect_kernel, expect_op, plain
from lib.exercises.nb07 import (
    INF,
    counted_reductions,
    masked_rows,
    rows_far_below_zero,
    scaled_rows,
)
from lib.exercises.nb31 import INTEGER
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.interpreter import interpreted_launches
from lib.nogpu.memory import count_traffic
from lib.ops import softmax

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

_tell, _hear = softmax._tell, softmax._hear


# --- 32.1 ----------------------------------------------------------------------------------------------


@exercise("32.1", "What a row shares", minutes=8, level=2)
def check_elements_stored_one_by_one(answer):
    shapes = [(4, 3, 781), (4, 5, 8), (4, 4, 4), (8, 9, 6), (8, 20, 9), (8, 17, 3), (4, 8, 1)]
    for v, n_rows, n_cols in (*shapes, (8, 8, 781), (8, 8, 1030)):
        for row in range(n_rows):
            pieces = [k // v for k in range(row * n_cols, (row + 1) * n_cols)]
            want = sum(pieces.count(p) < v for p in pieces)
            at = f"row {row}, {n_cols} columns, pieces of {v}"
            with case(at):
                got = plain(attempted(answer(row, n_cols, v)))
            expect(
                got == want, f"{at}: {want} elements lie in pieces that are not whole, got {got}"
            )


# --- 32.2 ----------------------------------------------------------------------------------------------


@exercise("32.2", "Whole pieces, and ends", minutes=20, level=2)
def check_negate_rows(kernel):
    expect_kernel(kernel)
    compiled = {
        dtype: _compiled_for_odd_rows(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)
    }

    def answer(x):
        v = 16 // x.itemsize
        y = torch.full_like(x, -1.0)
        width = triton.next_power_of_2(x.shape[1] + v - 1)
        kernel[(x.shape[0],)](x, y, x.shape[1], V=v, BLOCK_N=width)
        return y

    shapes = ((1, 1), (5, 1), (3, 4), (5, 7), (17, 33), (9, 781))
    with interpreted_launches():
        expect_op(answer, torch.neg, scaled_rows, shapes=shapes)
    (x,) = scaled_rows((9, 781), torch.float32)
    with _one_by_one(x.itemsize) as moved:
        traffic = count_traffic(lambda: answer(x))
    (stored,) = (a.stored for name, a in traffic.by_argument.items() if name.endswith("y_ptr"))
    expect(
        stored == x.nbytes,
        f"at shape (9, 781) it stores {stored} bytes, y has {x.nbytes}; store what is the row's own, once",
    )
    for dtype, part in compiled.items():
        for what, opcode in (("load", "LDG"), ("store", "STG")):
            wide = len(re.findall(rf"\b{opcode}\.E\.128\b", part.sass))
            expect(
                wide > 0,
                f"for sm_90, {dtype}, 781 columns: no {what} of 16 bytes; may the compiler see that addresses "
                "are multiples of V, and that a mask is the same for all V numbers of a piece?",
            )
    at_ends = 2 * (16 // x.itemsize - 1) * len(x)
    for what, n in moved.items():
        expect(
            n <= at_ends,
            f"at shape (9, 781), {x.dtype}: {n} numbers are {what} under masks that cut a piece, and at the "
            f"ends of rows there are {at_ends} at most; every whole piece goes with the whole ones",
        )


@contextlib.contextmanager
def _one_by_one(itemsize):
    """Counts the numbers of all loads, and of all stores, that move a part of some piece of 16 bytes."""
    moved, builder = {"loaded": 0, "stored": 0}, upstream.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def note(what, pointers, mask):
        mask = np.broadcast_to(getattr(mask, "data", mask), pointers.data.shape).astype(bool)
        addresses = pointers.data[mask]
        _, in_piece = np.unique(addresses // 16, return_counts=True)
        if (in_piece < 16 // itemsize).any():
            moved[what] += addresses.size

    def loading(self, pointers, mask, *rest, **options):
        note("loaded", pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def storing(self, pointers, value, mask, *rest, **options):
        note("stored", pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    with (
        interpreted_launches(),
        mock.patch.object(builder, "create_masked_load", loading),
        mock.patch.object(builder, "create_masked_store", storing),
    ):
        yield moved


def _compiled_for_odd_rows(kernel, dtype):
    """A kernel with the parameters of 32.2's, compiled for sm_90 and rows of 781 numbers."""
    row = torch.empty(4, 781, dtype=dtype)
    sizes = {"V": 16 // row.itemsize, "BLOCK_N": 1024}
    return compile_for(kernel, signature_of(kernel, row, row, 781, **sizes), arch=90)


# --- 32.3 ----------------------------------------------------------------------------------------------


@triton.jit
def walk(row_ptr, n_cols, GUARD: tl.constexpr, BLOCK_N: tl.constexpr):
    # What to subtract in a row, and its sum relative to that, BLOCK_N columns at a time, as in notebook 07.
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    zero = top
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        zero = new_top
        if GUARD:  # nothing but -inf so far: -inf - -inf would be NaN, and stay
            zero = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - zero) + tl.sum(tl.exp(x - zero), axis=0)
        top = new_top
    return zero, total


@triton.jit
def parts_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, n_parts, patience,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # One program holds one part of a row: TILES tiles of BLOCK_N columns, n_parts apart.
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    x_row, words_ptr = x_ptr + row * n_cols, words_ptr + 2 * row * n_parts
    held, top = (), tl.full((), -float("inf"), tl.float32)
    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_row + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        held, top = held + (x,), tl.maximum(top, tl.max(x))
    zero, total = tl.where(top == -float("inf"), 0.0, top), tl.full((), 0.0, tl.float32)
    for t in tl.static_range(TILES):
        total += tl.sum(tl.exp(held[t] - zero))

    _tell(words_ptr + 2 * part, top)
    _tell(words_ptr + 2 * part + 1, total)
    pairs, all_arrived = _hear(words_ptr, n_parts, patience, 2, PARTS, tl.float32)
    tops, totals = tl.split(pairs)
    tops = tl.where(tl.arange(0, PARTS) < n_parts, tops, -float("inf"))
    # No guard here, because PyTorch makes a row of nothing but -inf NaN.
    zero = tl.max(tops)
    total = tl.sum(totals * tl.exp(tops - zero))
    if not all_arrived:
        zero, total = walk(x_row, n_cols, True, BLOCK_N)

    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(y_ptr + row * n_cols + cols, tl.exp(held[t] - zero) / total, mask=cols < n_cols)


def softmax_parts(x, patience=None, tiles=16):
    """softmax by parts_kernel. The interpreter has no patience: it would wait for programs that come later."""
    y, block_n = torch.empty_like(x), 2048 // x.itemsize  # 16 bytes for each of 128 threads
    n_rows, n_cols = x.shape
    n_parts = triton.cdiv(n_cols, tiles * block_n)
    words = torch.zeros(n_rows * n_parts * 2, dtype=torch.int32, device=x.device)
    if patience is None:
        patience = machine.pick(gpu=4096, cpu=0)
    parts_kernel[(n_rows * n_parts,)](
        x, y, words, n_cols, n_parts, patience, TILES=tiles, BLOCK_N=block_n,
        PARTS=max(128, triton.next_power_of_2(n_parts)),
    )  # fmt: skip
    return y


@exercise("32.3", "All loads first", minutes=15, level=3)
def check_loads_first(kernel):
    expect_kernel(kernel)
    compiled = {dtype: compiled_part(kernel, dtype) for dtype in (torch.float32, torch.bfloat16)}

    def answer(x, tiles=4, block_n=16):
        n_rows, n_cols = x.shape
        n_parts = triton.cdiv(n_cols, tiles * block_n)
        y, words = torch.full_like(x, -1.0), x.new_zeros(2 * n_rows * n_parts, dtype=torch.int32)
        sizes = {"TILES": tiles, "BLOCK_N": block_n, "PARTS": 128}
        kernel[(n_rows * n_parts,)](x, y, words, n_cols, n_parts, 0, **sizes)
        return y

    def eager(x):
        return torch.softmax(x, dim=-1)

    with interpreted_launches():
        expect_op(answer, eager, scaled_rows, shapes=(*SHAPES[:-1], (3, 500)))
        expect_op(answer, eager, masked_rows, shapes=((3, 5), (3, 300)))
        expect_op(answer, eager, rows_far_below_zero, shapes=((2, 50),))
    (x,) = scaled_rows((5, 64), torch.float32)
    with counted_reductions() as reductions:
        traffic = count_traffic(lambda: answer(x))
    named = traffic.by_argument.items()
    loaded = sum(a.loaded for name, a in named if name.endswith("x_ptr")) / x.nbytes
    expect(loaded == 1, f"a row that is one part is loaded {loaded:.0f} times; hold its numbers")
    each = len(reductions) / traffic.programs
    expect(
        each <= 7,  # two of the part, four in and behind _hear
        f"with 4 tiles a program reduces {each:.0f} times; combine tiles element by element, and reduce once",
    )
    for dtype, part in compiled.items():
        loads, barrier, _ = part.sass.partition("BAR.")
        expect(barrier, f"for sm_90, {dtype}: it has no barrier, so no tl.max of a part")
        n_first = len(re.findall(r"\bLDG\.", loads))
        expect(
            n_first >= 16,
            f"for sm_90, {dtype}: {n_first} of 16 loads stand before the first barrier",
        )


def compiled_part(kernel, dtype):
    """The kernel compiled for sm_90, for rows of 131072 columns in parts of 16 tiles.

    kernel: one with the parameters of the notebook's parts_kernel, or the one of lib/ops/softmax.py.
    """
    n_cols = 131072
    row, words = torch.empty(1, n_cols, dtype=dtype), torch.empty(32, dtype=torch.int32)
    block_n = 2048 // row.itemsize
    sizes = {"TILES": 16, "BLOCK_N": block_n, "PARTS": 128}
    more = (n_cols // (16 * block_n), 4096)  # n_parts, patience
    if kernel is softmax._softmax_parts_fwd_kernel:
        more = (n_cols, *more, 0)  # the stride before, zero behind
        sizes |= {"WHOLE_PIECES": False, "COMPUTE": tl.float32, "V": 16 // row.itemsize}
        sizes |= {
            "EMPTY": softmax._MINUS_INF.get(dtype, -INF),
            "MAX_OF_PAIRS": softmax._MAX.get(dtype),
        }
    return compile_for(kernel, signature_of(kernel, row, row, words, n_cols, *more, **sizes))


def counted_program(kernel, n_cols, num_warps, **constexprs):
    """What one program of the kernel has when compiled for an H200, for rows of n_cols bfloat16 numbers."""
    a, n_rows = torch.empty(64, n_cols, dtype=torch.bfloat16), constexprs.get("BLOCK_M", 1)
    sizes = (64, n_cols, n_cols) if "BLOCK_M" in constexprs else (n_cols, n_cols)
    signature = signature_of(kernel, a, a, *sizes, **constexprs)
    compiled = compile_for(kernel, signature, num_warps=num_warps)
    mix = instruction_mix(compiled)
    integers = sum(n for opcode, n in mix.items() if opcode.startswith(INTEGER))
    a_number = 32 * num_warps / (n_cols * n_rows)  # how many threads there are for each
    loads = (f"{n} {opcode}" for opcode, n in mix.items() if opcode.startswith("LDG"))
    return {
        "columns": n_cols,
        "threads": 32 * num_warps,
        "registers": compiled.registers,
        "loads of a thread": ", ".join(loads),
        "instructions a number": sum(mix.values()) * a_number,
        "integers twice": (sum(mix.values()) + integers) * a_number,
    }
