"""Solutions to the exercises of notebook 32."""

# %%
from lib.ops import softmax  # before triton: with no GPU, lib switches the interpreter on

import triton
import triton.language as tl


# %% 32.1 the whole pieces go from the first that begins in the row to the last that ends in it; a short row may
# have none
def elements_stored_one_by_one(row, n_cols, v):
    start, end = row * n_cols, (row + 1) * n_cols
    whole = end // v - (start + v - 1) // v
    return n_cols - max(0, whole) * v


# %% 32.2 whole pieces have a mask that is the same for all V numbers of a piece, the numbers at the ends one of
# their own. `// V * V` says that addresses are multiples of V, which the width does not.
@triton.jit
def negate_kernel(x_ptr, y_ptr, n_cols, V: tl.constexpr, BLOCK_N: tl.constexpr):
    # One program handles one row of x, from the piece of V numbers on in which it begins.
    begin = tl.program_id(0).to(tl.int64) * n_cols
    shift, first = begin % V, begin // V * V
    cols = tl.arange(0, BLOCK_N)
    whole = (cols // V >= (shift + V - 1) // V) & (cols // V < (shift + n_cols) // V)
    ends = (cols >= shift) & (cols < shift + n_cols) & ~whole
    x = tl.load(x_ptr + first + cols, mask=whole)
    tl.store(y_ptr + first + cols, -x, mask=whole)
    x = tl.load(x_ptr + first + cols, mask=ends)
    tl.store(y_ptr + first + cols, -x, mask=ends)


# %% 32.3 a maximum for each column of the tile, then one tl.max behind all loads; the sums likewise. From
# _tell on it is parts_kernel.
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
def loads_first_kernel(
    x_ptr, y_ptr, words_ptr, n_cols, n_parts, patience,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # One program holds one part of a row: TILES tiles of BLOCK_N columns, n_parts apart.
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    x_row, words_ptr = x_ptr + row * n_cols, words_ptr + 2 * row * n_parts
    held, tops = (), tl.full((BLOCK_N,), -float("inf"), tl.float32)
    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        x = tl.load(x_row + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        held, tops = held + (x,), tl.maximum(tops, x)
    top, sums = tl.max(tops), tl.zeros((BLOCK_N,), tl.float32)
    zero = tl.where(top == -float("inf"), 0.0, top)
    for t in tl.static_range(TILES):
        sums += tl.exp(held[t] - zero)

    softmax._tell(words_ptr + 2 * part, top)
    softmax._tell(words_ptr + 2 * part + 1, tl.sum(sums))
    pairs, all_arrived = softmax._hear(words_ptr, n_parts, patience, 2, PARTS, tl.float32)
    tops, totals = tl.split(pairs)
    tops = tl.where(tl.arange(0, PARTS) < n_parts, tops, -float("inf"))
    zero = tl.max(tops)
    total = tl.sum(totals * tl.exp(tops - zero))
    if not all_arrived:
        zero, total = walk(x_row, n_cols, True, BLOCK_N)

    for t in tl.static_range(TILES):
        cols = (t * n_parts + part) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(y_ptr + row * n_cols + cols, tl.exp(held[t] - zero) / total, mask=cols < n_cols)
