# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/_device.py
"""What the kernels of several ops call: sums over rows, tiles of a product, functions of one number."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


def interpreted():
    """Whether TRITON_INTERPRET=1 was set when Triton was imported: kernels then run on CPU tensors."""
    if not hasattr(triton, "knobs"):
        old = f"Triton {triton.__version__} is too old for these kernels"
        raise ImportError(f"{old}, which need 3.6 or newer; upgrade PyTorch")
    return triton.knobs.runtime.interpret


def has_bfloat16():
    """Whether kernels can calculate in bfloat16: Triton's own interpreter adds and multiplies its bits."""
    if not interpreted():
        return True
    from triton.runtime.interpreter import InterpreterBuilder

    # lib/nogpu/interpreter.py mends it, and says so
    return hasattr(InterpreterBuilder, "has_bfloat16")


INTERPRETED = tl.constexpr(interpreted())


# --- rows ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_rows"])
def sum_rows_kernel(
    partial_ptr, out_ptr, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # One program handles BLOCK_N columns of partial, (n_rows, n_cols), from top to bottom.
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=partial_ptr.dtype.element_ty)
    for start in range(0, n_rows, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n_cols)


@triton.jit
def add_both(a, b, c, d):
    # For tl.reduce of two sums in one go
    return a + c, b + d


@triton.jit
def fold_ends(n_rows, n_cols, cols, FOLD: tl.constexpr):
    # FOLD consecutive rows count as one of n_cols. A mask that ends at a multiple of 16 leaves 16-byte loads
    # whole. Returns where it ends, and offsets and mask of the fewer than 16 elements after it.
    end = n_rows.to(tl.int64) * (n_cols // FOLD)
    whole = end // 16 * 16
    last = (n_rows // FOLD).to(tl.int64) * n_cols + cols
    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)


# Rows of any length, held in tiles: BLOCK_M rows a program, TILES tiles of BLOCK_N columns; in the first FULL
# of them no row ends. A load takes V elements. UNIT is what rows are known to begin at a multiple of. Where
# that is less than V, a row shares its first and last piece of V elements with its neighbours: a shared piece
# is read whole, and written element by element. Columns then count from where the first piece begins.


@triton.jit
def first_row(rows_per_program, n_cols, UNIT: tl.constexpr, V: tl.constexpr):
    # The first row of a program, and where in its first piece it begins: so do all rows of the program, as they
    # lie V apart. int64: row * stride passes 2**31 from 4 GiB of 16 bits on.
    APART: tl.constexpr = V if V > UNIT else 1
    group, lane = tl.program_id(0) // APART, tl.program_id(0) % APART
    shift = (lane * n_cols) % V if V > UNIT else 0
    return group.to(tl.int64) * (APART * rows_per_program) + lane, shift


@triton.jit
def held_rows(
    first, shift, n_rows, n_cols, UNIT: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr
):
    # BLOCK_M rows from `first` on, (BLOCK_M, 1), and their place: which are there, where columns begin and end,
    # how many pieces of each are whole in the matrix, and whether the matrix may end here.
    APART: tl.constexpr = V if V > UNIT else 1
    rows = (first + APART * tl.arange(0, BLOCK_M))[:, None]
    end = shift + n_cols
    there = tl.minimum(end + V - 1, (n_rows - rows) * n_cols + shift) // V
    return rows, (rows < n_rows, shift, end, there.to(tl.int32), first + APART * BLOCK_M >= n_rows)


@triton.jit
def begin(rows, stride, shift, V: tl.constexpr):
    # Where the first piece of each row begins: a multiple of V, which the compiler sees
    return (rows * stride - shift) // V * V


@triton.jit
def tile_cols(t: tl.constexpr, BLOCK_N: tl.constexpr):
    return t * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def in_row(t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr):
    # Which columns of tile t are the row's own
    mask = cols >= 0
    if V > UNIT and t == 0:
        mask = mask & (cols >= place[1])
    if t >= FULL:
        mask = mask & (cols < place[2])
    return mask


@triton.jit
def own(
    x, other, t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr
):
    # x where it is the row's own, else `other`
    if (V > UNIT and t == 0) or t >= FULL:
        x = tl.where(in_row(t, cols, place, UNIT, V, FULL), x, other)
    return x


@triton.jit
def load_tile(
    ptrs, t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr
):
    # Tile t: 0 where there is nothing, and what the neighbours have where a piece is shared
    inside, end, there = place[0], place[2], place[3]
    if t < FULL:
        x = tl.load(ptrs, mask=inside, other=0.0)
    elif V == UNIT:
        x = tl.load(ptrs, mask=inside & (cols < end), other=0.0)
    else:
        x = tl.load(ptrs, mask=inside & (cols // V < there), other=0.0)
        if place[4]:  # of the last piece of the matrix as much as there is
            x = tl.load(ptrs, mask=inside & (cols // V >= there) & (cols < end), other=x)
    return x


@triton.jit
def tile_at(
    ptrs, stride_n, t: tl.constexpr, place, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    # Tile t of the rows that begin at ptrs
    cols = tile_cols(t, BLOCK_N)
    return load_tile(ptrs + cols * stride_n, t, cols, place, UNIT, V, FULL)


@triton.jit
def load_tiles(
    ptrs, stride_n, place, UNIT: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    tiles = ()
    for t in tl.static_range(TILES):
        tiles = tiles + (tile_at(ptrs, stride_n, t, place, UNIT, V, BLOCK_N, FULL),)
    return tiles


@triton.jit
def store_tile(
    ptrs, x, t: tl.constexpr, cols, place, UNIT: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr
):
    inside, shift, end = place[0], place[1], place[2]
    if V > UNIT and (t == 0 or t >= FULL):
        whole = (cols // V >= (shift + V - 1) // V) & (cols // V < end // V)
        tl.store(ptrs, x, mask=inside & whole)
        tl.store(ptrs, x, mask=inside & (cols >= shift) & (cols < end) & ~whole)
    else:
        tl.store(ptrs, x, mask=inside & (cols < end) if t >= FULL else inside)


# --- matrix products -----------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr = None, COMPUTE: tl.constexpr = tl.float32):
    # total + a b. Triton's interpreter multiplies bfloat16 as the integers that hold its bits: there wider.
    if INTERPRETED:
        a, b = a.to(COMPUTE), b.to(COMPUTE)
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def place_of(
    tile, n_rows, n_cols, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    # Row and column, in tiles, of number `tile`: down GROUP rows, then a column on. So the tiles at work at one
    # time are nearly a square of y, which needs the fewest rows of a and columns of b. GROUP 1: along the rows.
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile = tile % (GROUP * tiles_n)
    return first + tile % height, tile // height


@triton.jit
def left_and_right(x):
    # The halves of the columns, each with all the threads at work.
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


# --- functions of one number ---------------------------------------------------------------------------------


@triton.jit
def fast_exp(x):
    # One approximate instruction, which makes 0 of results below 1e-38: tl.exp keeps those, at the price of
    # three instructions an element more. Triton's interpreter has no libdevice.
    return tl.exp(x) if x.dtype == tl.float64 or INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def fast_exp2(x):
    # The same, two to the power of x: the factor log2(e) can go into the constants of x.
    return tl.exp2(x) if x.dtype == tl.float64 or INTERPRETED else libdevice.exp2(x)


@triton.jit
def fast_divide(a, b):
    # a times an approximate reciprocal, 2 instructions where a / b takes 7 to scale b that are very large, or
    # very small. Here b is at least 1; for b past 2**126 the quotient is 0.
    return a / b if a.dtype == tl.float64 or INTERPRETED else libdevice.fast_dividef(a, b)


@triton.jit
def normal(z, FAST: tl.constexpr = False, ROUGH: tl.constexpr = False):
    # Φ(z) and exp(-z²/2). (1 + erf(z/√2))/2 has lost its digits where Φ is near 0: in float32 it is a twentieth
    # off at z = -5. Φ(-|z|) = exp(-z²/2)·p(t), t = 1/(1 + c|z|), keeps them. p, of degree 8, fits by least
    # squares with weights that even out the error, to 1.5e-7 of Φ for |z| up to 14; further out Φ is 0.
    # FAST: no numbers below 1e-38. ROUGH: p of degree 5, to 3.1e-5 of Φ, a sixteenth of float16's last digit.
    e = fast_exp2(-0.7213475204444817 * z * z) if FAST else tl.exp2(-0.7213475204444817 * z * z)
    if z.dtype == tl.float64:
        cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))  # float64 has digits to lose
    else:
        b = 1.0 + (0.375 if ROUGH else 0.3) * tl.abs(z)
        t = fast_divide(tl.full(b.shape, 1.0, b.dtype), b) if FAST else 1.0 / b
        if ROUGH:
            p = 0.08356428145807278 + t * (0.2002813387075429 - t * 0.09064265813592055)
            tail = e * (t * (0.14906103327408915 + t * (0.15773391974193013 + t * p)))
        else:
            p = 0.2063466079825968 + t * (-0.1571989730676126 + t * 0.035673758297739465)
            p = 0.09991445642353258 + t * (0.1285584005903845 + t * (-0.053677435119704076 + t * p))
            tail = e * (t * (0.11962930875828147 + t * (0.12075380295863522 + t * p)))
        cdf = tl.where(z < 0, tail, 1.0 - tail)
    return cdf, e


@triton.jit
def gelu(z, NARROW: tl.constexpr = False):
    # gelu(z) = z·Φ(z). NARROW: it is rounded to 16 bits
    cdf, _ = normal(z, NARROW, NARROW)
    return z * cdf


@triton.jit
def gelu_grad(z, NARROW: tl.constexpr = False):
    # gelu'(z) = Φ(z) + z·Φ'(z), Φ'(z) = exp(-z²/2)/√(2π). Near its root -0.75 all digits of Φ count.
    cdf, e = normal(z, NARROW)
    return cdf + z * (0.3989422804014327 * e)


@triton.jit
def gelu_tanh(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def gelu_tanh_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    # Far out e is 0, and 2u' must not be infinite: 0·inf is NaN.
    a = tl.minimum(tl.abs(z), 1e3)
    e = tl.exp2(a * (-2.302208198144325 - 0.1029432395800235 * a * a))  # log₂ e is in the constants
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 + 0.2140644488178008 * a * a)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    elif ACTIVATION == "gelu":
        z = gelu(z)
    elif ACTIVATION == "gelu_tanh":
        z = gelu_tanh(z)
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    return z


@triton.jit
def gated(x1, x2, ACTIVATION: tl.constexpr):
    # x1·act(x2)
    if ACTIVATION == "gelu":
        y = x1 * gelu(x2)
    elif ACTIVATION == "gelu_tanh":
        # z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
        e = fast_exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)
        y = x1 * fast_divide(x2, 1.0 + e)
    elif ACTIVATION == "silu":
        y = x1 * fast_divide(x2, 1.0 + fast_exp(-x2))
    elif ACTIVATION == "relu":
        y = x1 * tl.where(x2 < 0, 0.0, x2)  # tl.maximum(z, 0) would turn NaN into 0
    else:  # sigmoid
        y = fast_divide(x1, 1.0 + fast_exp(-x2))
    return y


@triton.jit
def slope_times(dy, saved, ACTIVATION: tl.constexpr):
    # dy·act'(z); saved is y for relu and sigmoid, z for the others
    if ACTIVATION == "relu":
        dy = tl.where(saved <= 0, 0.0, dy)  # a NaN in y lets dy through, as in torch.relu
    elif ACTIVATION == "gelu":
        dy = dy * gelu_grad(saved)
    elif ACTIVATION == "gelu_tanh":
        dy = dy * gelu_tanh_grad(saved)
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(saved))  # as in gelu_tanh_grad: s·(1 - s) = e/(1 + e)²
        t = 1.0 / (1.0 + e)
        dy = dy * (tl.where(saved < 0, e * t, t) + saved * (e * t * t))
    elif ACTIVATION == "sigmoid":
        dy = dy * (saved * (1.0 - saved))
    return dy


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def dz_kernel(
    dy_ptr, saved_ptr, dz_ptr, partial_ptr, n_rows, n_cols, stride_dym, stride_dyn, rows_per_program,
    ACTIVATION: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dz = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0).to(COMPUTE)
        offsets = rows[:, None] * n_cols + cols[None, :]
        if saved_ptr is not None:
            saved = tl.load(saved_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
            dz = slope_times(dz, saved, ACTIVATION)  # 0·act'(0) is 0 in a row that is not there
        if dz_ptr is not None:
            tl.store(dz_ptr + offsets, dz, mask=mask)
        total += dz
    if partial_ptr is not None:
        sums = tl.sum(total, axis=0)
        tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)
