# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/quantized_linear.py
"""quantized_linear: y = act(x Wᵀ + b), W stored in 8 or 4 bits that become numbers on the way.

Shapes    x: (..., K), any strides; b: (N,) or None; y: (..., N), contiguous; W: (N, K), frozen, stored as
          int8: packed (N, K) of int8, and scales (1, N), one for each row of W;
          fp8: the same, but packed has the bits of float8_e4m3fn as uint8; or as
          int4: packed (N, K/8) of int32, eight numbers in each, and scales (K/G, N), one for G = 64 or 128
          numbers of a row. zeros: int8 of the same shape, 0 to 15; None: 8 for all.
Act       identity, relu, gelu (erf), gelu_tanh, silu or sigmoid, of the sum before it is rounded.
Dtypes    x and b: float16, bfloat16 (summed in float32), float32 (by 3xTF32, see matmul.py) or float64.
          Scales may have another one, but float64 goes with float64 alone.
Traffic   Few rows are bound by reading W: NK/2 bytes and scales for int4, 2NK for 16 bits. Many rows are
          bound by 2MNK FLOPs, and by the instructions that make numbers of integers.
Ways      A program holds a tile of y and goes along K by groups. With few rows programs share K, and a second
          kernel sums their parts in order. For 16 rows a group's sum is multiplied by its scale; larger tiles
          multiply the group's numbers, which takes fewer registers. In 16 bits, from 129 rows on (257 for
          int8 and fp8), a kernel makes W once, 2NK bytes for the time of the call, and the product is cuBLAS's.
Backward  dz = dy·act'(z), summed to db; dx = dz W by cuBLAS, of W made once, in dy's dtype. There is no dW.
          Saves W as it is stored, and y (relu, sigmoid) or z (gelu, silu).
Tuned     not yet: the tiles are read off machine code for an H200.
Copy it   by `make copy OP=quantized_linear TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _device as device
    from . import _host as host
else:  # the same, in a plain folder
    import _device as device
    import _host as host


class Tile(NamedTuple):
    """A piece of the result, m x n; its warps and stages. Steps along K are groups."""

    m: int
    n: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one forward call is launched."""

    tile: Tile | None  # None: W is made whole, and cuBLAS multiplies by it
    n_parts: int = 1  # programs that share K
    scales_sums: bool = False  # whether scales multiply a group's sum, and not its numbers


_KINDS = {torch.int8: "int8", torch.uint8: "fp8", torch.int32: "int4"}  # by packed's dtype


class QuantizedWeight(NamedTuple):
    """A weight, (N, K), as `quantize` makes it and calls take it: quantized_linear_triton(x, *weight)."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    kind = property(lambda self: _KINDS.get(self.packed.dtype, "fp8"))
    per_word = property(lambda self: 8 if self.kind == "int4" else 1)
    shape = property(lambda self: (self.packed.shape[0], self.packed.shape[1] * self.per_word))
    group = property(lambda self: self.shape[1] // max(1, self.scales.shape[0]))


def quantized_linear_eager(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, activation: str = "identity",
) -> torch.Tensor:  # fmt: skip
    weight = dequantize(QuantizedWeight(packed, scales, zeros)).to(x.dtype)
    return host.ACTIVATIONS[activation](F.linear(x, weight, bias))


@triton.jit
def _quarter(words, i: tl.constexpr, zero, DTYPE: tl.constexpr):
    # Quarter i of a group's numbers, less their zero points. In 16 bits without a conversion, whose unit is
    # slow: 0x4300 are the bits of 128 in bfloat16, 0x6400 those of 1024 in float16, and n | them those of
    # 128 + n. With zero points n - zero, of either sign, is added to the bits of 192 and 1536.
    pair = (words >> (4 * i)) & 0x000F000F
    if DTYPE.primitive_bitwidth == 16:
        is_half: tl.constexpr = tl.float16 == DTYPE
        if zero is None:
            pair |= 0x64006400 if is_half else 0x43004300
            centre: tl.constexpr = 1032.0 if is_half else 136.0
        else:
            pair += ((0x66006600 if is_half else 0x43404340) - zero * 0x00010001)[:, None]
            centre: tl.constexpr = 1536.0 if is_half else 192.0
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        numbers = tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)) - centre
    else:
        numbers = tl.join(pair & 15, pair >> 16).to(DTYPE)
        numbers -= 8 if zero is None else zero[:, None, None].to(DTYPE)
    return tl.reshape(numbers.to(DTYPE), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _numbers(words, zeros_ptr, at, mask, DTYPE: tl.constexpr):
    # The numbers of a tile of packed, in DTYPE, which holds them exactly; not yet scaled.
    if words.dtype == tl.uint8:
        # to bfloat16 by float32: the unit that would take it there at once is slow
        words = words.to(tl.float8e4nv, bitcast=True)
        words = words.to(tl.float16 if tl.float16 == DTYPE else tl.float32)
    if words.dtype != tl.int32:
        # Triton's interpreter makes of an int8 the bfloat16 that has its bits
        numbers = (words.to(tl.float32) if device.INTERPRETED else words).to(DTYPE)
    else:
        zero = None
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + at, mask=mask, other=0).to(tl.int32)
        q = ()
        for i in tl.static_range(4):
            q = q + (_quarter(words, i, zero, DTYPE),)
        # (rows, in a quarter, quarter // 2, quarter % 2), then quarter after quarter
        numbers = tl.permute(tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3])), (0, 2, 3, 1))
        numbers = tl.reshape(numbers, (words.shape[0], 8 * words.shape[1]))
    return numbers


@triton.jit
def _finish(z, bias_ptr, y_ptr, z_ptr, offsets, cols, mask, n_cols, ACTIVATION: tl.constexpr):
    # The epilogue: bias, activation and rounding while the sums are in registers.
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)
    tl.store(y_ptr + offsets, device.activate(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask)
    if z_ptr is not None:
        tl.store(z_ptr + offsets, z.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _quantized_linear_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, z_ptr, n_rows, n_cols, n_inner,
    stride_xm, stride_pn, steps_per_part,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    PER_WORD: tl.constexpr, SCALES_SUMS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), in steps of BLOCK_K, for int4 a group. With
    # split-K it takes only steps_per_part of the steps, and y is (parts, n_rows, n_cols).
    pid_m, pid_n = device.place_of(tl.program_id(0), n_rows, n_cols, GROUP, BLOCK_M, BLOCK_N)
    start = tl.program_id(1) * steps_per_part
    # int64: row * stride passes 2**31 from 4 GiB of bfloat16 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # each from the start of its step, so that the compiler knows 16 bytes to be whole
    inner = start * BLOCK_K + tl.arange(0, BLOCK_K)
    words = start * (BLOCK_K // PER_WORD) + tl.arange(0, BLOCK_K // PER_WORD)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + inner[None, :]
    packed_ptrs = packed_ptr + cols[:, None] * stride_pn + words[None, :]
    row_mask, col_mask = (rows < n_rows)[:, None], cols < n_cols
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    for step in range(start, tl.minimum(start + steps_per_part, tl.cdiv(n_inner, BLOCK_K))):
        if WHOLE:
            x = tl.load(x_ptrs, mask=row_mask, other=0.0)
            packed = tl.load(packed_ptrs, mask=col_mask[:, None], other=0)
        else:  # masked-off columns must contribute 0
            inside = (tl.arange(0, BLOCK_K) < n_inner - step * BLOCK_K)[None, :]
            x = tl.load(x_ptrs, mask=row_mask & inside, other=0.0)
            packed = tl.load(packed_ptrs, mask=col_mask[:, None] & inside, other=0)
        at = step * n_cols + cols  # of int8 nothing is read there
        w = _numbers(packed, zeros_ptr, at, col_mask, DTYPE)
        if PER_WORD == 1:
            total = device.dot(x, w.T, total, PRECISION, COMPUTE)
        else:
            scale = tl.load(scales_ptr + at, mask=col_mask, other=0.0)
            if SCALES_SUMS:
                part = device.dot(x, w.T, tl.zeros_like(total), PRECISION, COMPUTE)
                total += part * scale.to(COMPUTE)[None, :]
            else:
                w = (w * scale.to(DTYPE)[:, None]).to(DTYPE)
                total = device.dot(x, w.T, total, PRECISION, COMPUTE)
        x_ptrs += BLOCK_K
        packed_ptrs += BLOCK_K // PER_WORD
    if PER_WORD == 1:
        total *= tl.load(scales_ptr + cols, mask=col_mask, other=0.0).to(COMPUTE)[None, :]
    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
    offsets, mask = rows[:, None] * n_cols + cols[None, :], row_mask & col_mask[None, :]
    _finish(total, bias_ptr, y_ptr, z_ptr, offsets, cols[None, :], mask, n_cols, ACTIVATION)


@triton.jit(do_not_specialize=["n_elements", "n_parts"])
def _sum_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, z_ptr, n_elements, n_cols, n_parts,
    ACTIVATION: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr = tl.float32,
):  # fmt: skip
    # One program handles BLOCK_SIZE elements of y, of all parts, in one order: the same bits in every run.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    total = tl.load(parts_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    for part in range(1, n_parts):
        from_part = parts_ptr + tl.cast(part, tl.int64) * n_elements
        total += tl.load(from_part + offsets, mask=mask, other=0.0)
    _finish(total, bias_ptr, y_ptr, z_ptr, offsets, offsets % n_cols, mask, n_cols, ACTIVATION)


@triton.jit
def _weight_kernel(
    packed_ptr, scales_ptr, zeros_ptr, w_ptr, n_cols, n_inner, stride_pn, n_steps,
    COMPUTE: tl.constexpr, PER_WORD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program makes the numbers of BLOCK_N rows of W, for int4 those of one group, and writes them scaled.
    step = tl.program_id(0) % n_steps
    cols = (tl.program_id(0) // n_steps).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = step * BLOCK_K + tl.arange(0, BLOCK_K)
    words = step * (BLOCK_K // PER_WORD) + tl.arange(0, BLOCK_K // PER_WORD)
    col_mask = cols < n_cols
    mask = col_mask[:, None] & (words < n_inner // PER_WORD)[None, :]
    packed = tl.load(packed_ptr + cols[:, None] * stride_pn + words[None, :], mask=mask, other=0)
    at = cols if PER_WORD == 1 else step * n_cols + cols
    scale = tl.load(scales_ptr + at, mask=col_mask, other=0.0).to(COMPUTE)
    w = _numbers(packed, zeros_ptr, at, col_mask, COMPUTE) * scale[:, None]
    mask = col_mask[:, None] & (inner < n_inner)[None, :]
    tl.store(
        w_ptr + cols[:, None] * n_inner + inner[None, :], w.to(w_ptr.dtype.element_ty), mask=mask
    )


# --- quantizing ----------------------------------------------------------------------------------------------


_MOST = {"int4": 7, "int8": 127, "fp8": 448}  # what a group's largest number becomes
_E4M3 = torch.float8_e4m3fn


def _shifts(device):
    """Where in a word its eight numbers begin: (quarter, 1, which of two)."""
    quarters = 4 * torch.arange(4, dtype=torch.int32, device=device)
    return quarters[:, None, None] + torch.tensor([0, 16], dtype=torch.int32, device=device)


def _pack(numbers):
    """Integers 0 to 15 by groups, (N, K/G, G), as words of 32 bits, (N, K/8).

    Word j of a group has two neighbours of each of its quarters, which begin G/4 apart; k = 2j:

        bits   31..28     27..24     23..20     19..16 | 15..12     11..8      7..4       3..0
               k+3G/4+1   k+2G/4+1   k+G/4+1    k+1    | k+3G/4     k+2G/4     k+G/4      k

    (word >> 4i) & 0x000F000F leaves the two of quarter i, each in its half: one shift and one AND give a
    register that, with the bits of an exponent, is two floats of 16 bits, side by side in the order of K. Words
    read as tensor cores take a matrix make four such matrices: no number changes threads.
    """
    words = numbers.to(torch.int32).unflatten(2, (4, -1, 2)) << _shifts(numbers.device)
    return words.sum((2, 4), dtype=torch.int32).flatten(1)


def quantize(
    weight: torch.Tensor, kind: str = "int4", group: int = 128, zero_points: bool = False
) -> QuantizedWeight:
    """The weight of a linear layer, (N, K), as integers and scales: of each row, or of each group of a row.

    kind: "int4", in groups of 64 or 128 along K, or "int8" or "fp8", by row, where `group` counts for nothing.
    fp8 has float8_e4m3fn in the integers' place: 3 bits after the point of any number, and 448 for the largest.
    zero_points: whether the 16 integers lie from the smallest to the largest number of a group (0 among them)
    and not evenly around 0; for int4 alone. Numbers go to the nearest integer; scales have weight's dtype.
    Raises ValueError for NaN and infinities, and for a K that groups do not divide.
    """
    _check_kind("quantize", weight, kind, group, zero_points)
    wide = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not torch.isfinite(wide).all():
        what = "weight has NaN or infinities, for which there is no scale"
        raise ValueError(f"quantize: {what}; look for what made them before you quantize")
    n_rows, n_inner = weight.shape
    group = group if kind == "int4" else n_inner
    wide = wide.reshape(n_rows, n_inner // group, group)
    low, high = wide.amin(-1, True).clamp(max=0), wide.amax(-1, True).clamp(min=0)
    most = 15 if zero_points else _MOST[kind]
    # as it is stored; a group of zeros has none, and neither has one too small for the dtype
    scales = ((high - low if zero_points else torch.maximum(high, -low)) / most).to(weight.dtype)
    steps = torch.where(scales == 0, 1, scales).to(wide.dtype)
    zeros = torch.round(-low / steps) if zero_points else None
    numbers = wide / steps if kind == "fp8" else torch.round(wide / steps)
    # also for fp8, of which torch 2.11 makes NaN where a number is past the largest
    numbers = (numbers + (zeros if zero_points else 0)).clamp(0 if zero_points else -most, most)
    scales = scales[..., 0].t().contiguous()
    if kind != "int4":
        numbers = numbers.view(n_rows, n_inner)
        is_int8 = kind == "int8"
        packed = numbers.to(torch.int8) if is_int8 else numbers.to(_E4M3).view(torch.uint8)
        return QuantizedWeight(packed, scales)
    zeros = zeros[..., 0].t().to(torch.int8).contiguous() if zero_points else None
    return QuantizedWeight(_pack(numbers if zero_points else numbers + 8), scales, zeros)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """(N, K): each integer less its zero point, times its scale, in the dtype of scales."""
    packed, scales, zeros = weight
    if weight.kind != "int4":
        packed = packed if weight.kind == "int8" else packed.view(_E4M3)
        return packed.to(scales.dtype) * scales.t()
    words = packed.reshape(*scales.t().shape, 1, weight.group // 8, 1)  # (N, groups, 1, words, 1)
    numbers = ((words >> _shifts(packed.device)) & 15).flatten(2)  # (N, groups, group)
    numbers = numbers - (8 if zeros is None else zeros.t()[..., None])
    return (numbers.to(scales.dtype) * scales.t()[..., None]).flatten(1)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

# Tiles of y from large to small, by what multiplies, as in matmul.py
_TILES = {
    "half": (Tile(128, 128, 8, 3), Tile(64, 128, 4, 3), Tile(16, 128, 4, 4)),
    "tf32x3": (Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)),
    "double": (Tile(16, 32, 4, 1),),
    # correct, and not tuned
    "elsewhere": (Tile(64, 64, 4, 2), Tile(16, 64, 4, 2)),
    "turing": (Tile(64, 32, 4, 1), Tile(16, 32, 4, 1)),
}
_STEP = 64  # along K, of 8 bits: a row of W has one scale, and any K
_ROWS_WRITTEN, _WRITTEN = 32, 256  # by a program that makes W; of 8 bits, numbers of each
_GROUP = 8  # rows of tiles that programs go down together
_FEW_ROWS = 64  # up to which reading W takes the time, and programs share K
_MOST_ROWS = {"int4": 128, "int8": 256, "fp8": 256}  # of more rows, W is made once
_RESIDENT = 4  # programs on an SM that keep its memory busy
_MOST_PARTS, _LEAST_STEPS = 16, 4  # parts of K at most, and steps in each at least


@functools.lru_cache(4096)
def _plan(n_rows, n_cols, n_steps, dtype, gpu, kind_of_weight):
    kind, major = host.kind_of(dtype, False), host.generation(gpu)
    if kind == "half" and n_rows > _MOST_ROWS[kind_of_weight]:
        return Plan(None)
    # desktops' Blackwell, 12, has no more shared memory than Ampere
    if kind != "double" and not 9 <= major < 12:
        kind = "turing" if major < 8 else "elsewhere"
    largest = _TILES[kind][0]
    tile = next((tile for tile in reversed(_TILES[kind]) if tile.m >= n_rows), largest)
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n)
    n_parts = _RESIDENT * host.n_multiprocessors(gpu) // n_tiles if n_rows <= _FEW_ROWS else 1
    n_parts = max(1, min(_MOST_PARTS, n_steps // _LEAST_STEPS, n_parts))
    return Plan(tile, n_parts, tile.m == 16)


def _step(weight):
    """Numbers along K in one step of the kernel."""
    return _STEP if weight.per_word == 1 else weight.group


def _to_calculate(t):
    """t, in whose dtype kernels make numbers and multiply: wider where they cannot."""
    return t.float() if t.dtype == torch.bfloat16 and not device.has_bfloat16() else t


def _whole(packed, scales, zeros, dtype):
    """W, (N, K), in dtype, as dequantize makes it; by one kernel, but for float64."""
    if dtype == torch.float64:
        return dequantize(QuantizedWeight(packed, scales, zeros)).to(dtype)
    weight = _stored(packed, scales, zeros, dtype)
    (n_cols, n_inner), w = weight.shape, scales.new_empty(weight.shape, dtype=dtype)
    block_k = _WRITTEN if weight.per_word == 1 else weight.group
    n_steps = host.cdiv(n_inner, block_k)
    host.run(
        _weight_kernel, (host.cdiv(n_cols, _ROWS_WRITTEN) * n_steps,), (*weight, w),
        n_cols, n_inner, weight.packed.stride(0), n_steps, COMPUTE=tl.float32, PER_WORD=weight.per_word,
        BLOCK_N=_ROWS_WRITTEN, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return w


def _finish_parts(parts, n_parts, bias, y, z, activation):
    host.run(
        _sum_parts_kernel, (host.cdiv(y.numel(), 512),), (parts, bias, y, z),
        y.numel(), y.shape[1], n_parts, ACTIVATION=activation, COMPUTE=host.compute_dtype(y.dtype),
        BLOCK_SIZE=512, num_warps=4,
    )  # fmt: skip


def _launch_whole(y, z, x, weight, bias, activation):
    """As _launch, by a W that is made whole."""
    x, w, product = host.for_cublas(x), _whole(*weight, x.dtype).t(), y if z is None else z
    if bias is None:
        torch.mm(x, w, out=product)
    else:
        torch.addmm(bias, x, w, out=product)
    if activation != "identity":
        _finish_parts(product, 1, None, y, None, activation)


def _launch(plan, y, z, x, weight, bias, activation):
    """Write y, and z = x Wᵀ + bias unless it is None."""
    x, (n_rows, n_cols), n_inner = _to_calculate(x), y.shape, x.shape[1]
    n_steps = host.cdiv(n_inner, _step(weight))
    plan = plan or _plan(n_rows, n_cols, n_steps, x.dtype, x.device, weight.kind)
    if plan.tile is None:
        _launch_whole(y, z, x, weight, bias, activation)
        return
    weight = _stored(*weight, x.dtype)
    block_k = _step(weight)
    n_steps = host.cdiv(n_inner, block_k)
    tile, outs, how = plan.tile, (bias, y, z), activation
    steps_per_part = host.cdiv(n_steps, plan.n_parts)
    n_parts = host.cdiv(n_steps, steps_per_part or 1)
    if n_parts > 1:
        parts = torch.empty((n_parts, *y.shape), dtype=host.sum_dtype(y.dtype), device=y.device)
        outs, how = (None, parts, None), "identity"
    n_tiles = host.cdiv(n_rows, tile.m) * host.cdiv(n_cols, tile.n)
    host.run(
        _quantized_linear_kernel, (n_tiles, max(1, n_parts)), (x, *weight, *outs),
        n_rows, n_cols, n_inner, x.stride(0), weight.packed.stride(0), steps_per_part, ACTIVATION=how,
        PRECISION="ieee" if host.generation(x.device) < 8 else "tf32x3", COMPUTE=host.compute_dtype(x.dtype),
        PER_WORD=weight.per_word, SCALES_SUMS=plan.scales_sums, WHOLE=n_inner % block_k == 0, GROUP=_GROUP,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if n_parts > 1:
        _finish_parts(parts, n_parts, bias, y, z, activation)


# --- forward and backward ------------------------------------------------------------------------------------


def _empty(x, scales, save_z):
    """y, (..., N), and z, (M, N), if it is to be saved, else None; before they are written."""
    n_cols = scales.shape[1]
    z = x.new_empty(math.prod(x.shape[:-1]), n_cols) if save_z else None
    return x.new_empty(*x.shape[:-1], n_cols), z


def _in_rows(t):
    """t, or a copy, whose numbers of a row lie side by side."""
    return t if t.stride(1) == 1 else t.contiguous()


@functools.cache
def _has_fp8(gpu):
    return host.ON_CPU or torch.cuda.get_device_capability(gpu) >= (8, 9)


# Triton 3.6's compiler fails on float64 that is made of anything narrower
_MAKES_DOUBLES = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def _stored(packed, scales, zeros, dtype):
    """The weight as kernels read it: float64 may have to be made before, and fp8 on GPUs older than Ada."""
    if dtype == torch.float64 and not _MAKES_DOUBLES:
        packed = dequantize(QuantizedWeight(packed, scales, zeros))
        scales, zeros = scales.new_ones(1, len(packed)), None
    elif packed.dtype == torch.uint8 and not _has_fp8(packed.device):
        packed = packed.view(_E4M3).to(torch.float16)
    scales, zeros = (t if t is None else t.contiguous() for t in (scales, zeros))
    return QuantizedWeight(_in_rows(packed), scales, zeros)


def _forward(x, packed, scales, zeros, bias, activation, plan=None, save_z=False):
    y, z = _empty(x, scales, save_z)
    if y.numel() > 0:
        rows = _in_rows(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
        out, bias = y.view(-1, y.shape[-1]), None if bias is None else bias.contiguous()
        _launch(plan, out, z, rows, QuantizedWeight(packed, scales, zeros), bias, activation)
    return y, z


def _save(ctx, tensors, y, z, activation, all_inputs=False):
    """packed, scales and zeros for dx; y or z for dz.

    all_inputs: save all, to compute z again, and so that a second derivative reaches them and is refused.
    """
    x, *weight, bias = tensors
    if ctx.needs_input_grad[2]:
        frozen = "scales.requires_grad_(False); trained beside this layer are low-rank matrices"
        raise ValueError(f"quantized_linear: scales require grad, and have none here; use {frozen}")
    ctx.activation = activation
    # of the registered op, torch leaves out what is left at its default
    ctx.needs_grad = [ctx.needs_input_grad[0], bias is not None and ctx.needs_input_grad[4]]
    weight = weight if ctx.needs_grad[0] or all_inputs else (None, None, None)
    x, bias = (x, bias) if all_inputs else (None, None)
    ctx.save_for_backward(x, *weight, bias, host.saved_of(activation, y, z))


def _backward(dy, packed, scales, zeros, saved, activation, needs_grad):
    """dx and dbias, each None unless needed; saved is y or z, None for identity."""
    has_dx, has_dbias = needs_grad
    dy_rows, dx = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1]), None
    saved = None if saved is None else saved.reshape(dy_rows.shape)
    dz, dbias = host.dz_of(dy_rows, saved, activation, has_dx, has_dbias)
    if has_dx:
        rows = host.for_cublas(_to_calculate(dz))
        w = _whole(packed, scales, zeros, rows.dtype)
        dx = rows.new_empty(rows.shape[0], w.shape[1])
        torch.mm(rows, w, out=dx)
        dx = dx.to(dz.dtype).view(*dy.shape[:-1], w.shape[1])
    return dx, dbias


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, scales, zeros, bias, activation, plan):
        tensors = x, packed, scales, zeros, bias
        y, z = _forward(*tensors, activation, plan, activation in host.OF_Z)
        _save(ctx, tensors, y, z, activation)
        ctx.set_materialize_grads(False)  # no zeros for z's gradient
        return y, z  # z too: by it a second derivative finds its way to the inputs

    @staticmethod
    @host.once
    def backward(ctx, dy, _):
        if dy is None:  # y is used, and has no gradient all the same
            return (None,) * 7
        _, *weight, _, saved = ctx.saved_tensors
        dx, dbias = _backward(dy, *weight, saved, ctx.activation, ctx.needs_grad)
        return dx, None, None, None, dbias, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _check_kind(name, weight, kind, group, zero_points):
    if kind not in _MOST:
        raise ValueError(f"{name}: kind must be int4, int8 or fp8, got {kind!r}")
    if not isinstance(weight, torch.Tensor) or weight.dtype not in host.DTYPES:
        got = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"{name}: weight must be a floating-point tensor, got {got}")
    if weight.dim() != 2:
        got = tuple(weight.shape)
        raise ValueError(f"{name}: weight must be (N, K), got {got}; use weight.flatten(1)")
    if kind != "int4" and zero_points:
        instead = "take them with int4, or leave them out"
        raise ValueError(f"{name}: {kind} has no zero points; {instead}")
    if kind == "int4" and group not in (64, 128):
        raise ValueError(f"{name}: group must be 64 or 128, got {group!r}")
    if weight.shape[1] == 0 or kind == "int4" and weight.shape[1] % group:
        wrong = f"K = {weight.shape[1]} is no multiple of the group, {group}"
        smaller = "a group of 64, or " if group == 128 and weight.shape[1] % 64 == 0 else ""
        raise ValueError(f"{name}: {wrong}; take {smaller}int8 or fp8, which take any K but 0")


@host.remembered
def _check(name, x, packed, scales, zeros, bias, activation):
    host.check_activation(name, activation)
    if zeros is not None and scales is None:
        raise TypeError(f"{name}: zeros without scales; pass both, as quantize(weight) makes them")
    tensors = {"x": (x, "... K")} | ({} if bias is None else {"bias": (bias, "N")})
    host.check_tensors(name, "quantized_linear_eager", **tensors)
    tensors |= {"scales": (scales, "G N")}
    host.check_tensors(name, "quantized_linear_eager", host.MIXED, **tensors)
    made = "pass what quantize(weight) makes"
    of_packed = "int8, uint8 of fp8, or int32 of int4"
    integers = (("packed", packed, of_packed), ("zeros", zeros, "int8"))
    for label, t, kinds in integers[: 1 if zeros is None else 2]:
        dtype = getattr(t, "dtype", type(t).__name__)
        if dtype not in (_KINDS if label == "packed" else (torch.int8,)):
            raise TypeError(f"{name}: {label} must be a tensor of {kinds}, got {dtype}; {made}")
        if t.device != x.device:
            where = f"x is on {x.device} and {label} on {t.device}"
            raise ValueError(f"{name}: {where}; move both to one device")
    (n_scales, n_cols), n_inner, of = scales.shape, x.shape[-1], (packed, scales, zeros)
    if packed.dtype != torch.int32:
        fits = packed.shape == (n_cols, n_inner) and n_scales == 1 and zeros is None
        want = "int8 or fp8 is (N, K), its scales (1, N), and zeros None"
    else:
        fits = n_inner in (64 * n_scales, 128 * n_scales) and packed.shape == (n_cols, n_inner // 8)
        fits = fits and n_inner > 0 and (zeros is None or zeros.shape == scales.shape)
        want = (
            "int32 is (N, K/8), its scales (K/128, N) or (K/64, N), and zeros like scales or None"
        )
    if not fits:
        got = ", ".join("None" if t is None else str(tuple(t.shape)) for t in of)
        wrong = f"packed, scales and zeros of {got} are no weight for x {tuple(x.shape)}"
        raise ValueError(f"{name}: {wrong}; packed of {want}: {made}")


def _call(name, x, packed, scales, zeros, bias, activation, plan):
    x, bias = host.autocast(x, bias)
    tensors = x, packed, scales, zeros, bias
    goes_by_op = _check(name, *tensors, activation)
    if goes_by_op:
        save_z = activation in host.OF_Z and host.needs_autograd(x, bias)
        return quantized_linear_op(*tensors, activation, save_z)[0]
    how = activation, plan
    return host.call(name, "quantized_linear_eager", _QuantizedLinear, _forward, tensors, *how)[0]


def quantized_linear_triton(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, activation: str = "identity", *, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """act(x Wᵀ + b) of a weight that `quantize` made, with gradients for x and bias; W is frozen.

    x: (..., K), any strides; packed, scales and zeros: a QuantizedWeight's, passed as *weight; bias: (N,) or
    None, of x's dtype; activation: identity, relu, gelu, gelu_tanh, silu or sigmoid. Scales may have another
    dtype of 16 or 32 bits. Returns y, (..., N), contiguous, of x's dtype. The same bits in every run.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::quantized_linear), autocast (in its dtype, as torch's
    products) and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor twice
    differentiable: these raise.
    Raises TypeError for a wrong dtype; ValueError for a wrong shape, kind, device or activation.
    """
    tensors = x, packed, scales, zeros, bias
    return _call("quantized_linear_triton", *tensors, activation, plan)


@host.custom_op(
    "fused_kernels::quantized_linear", flops=lambda x, p, s, *_: 2 * math.prod(x) * s[1]
)
def quantized_linear_op(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, activation: str = "identity", save_z: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """quantized_linear for torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns y, and z = x Wᵀ + bias for the backward pass of gelu, gelu_tanh and silu. Without save_z that is
    empty, and the backward pass multiplies once more.
    """
    tensors = x, packed, scales, zeros, bias
    _check("quantized_linear_op", *tensors, activation)
    return host.none_as_empty(x, _forward(*tensors, activation, save_z=save_z))


@host.custom_op(
    "fused_kernels::quantized_linear_backward",
    flops=lambda dy, p, s, z, y, act, needs, n_inner: 2 * math.prod(dy) * needs[0] * n_inner,
)
def _quantized_linear_backward_op(
    dy: torch.Tensor, packed: torch.Tensor | None, scales: torch.Tensor | None, zeros: torch.Tensor | None,
    saved: torch.Tensor | None, activation: str, needs_grad: list[bool], n_inner: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = _backward(dy, packed, scales, zeros, saved, activation, needs_grad)
    return host.none_as_empty(dy, grads)


@quantized_linear_op.register_fake
def _(x, packed, scales, zeros=None, bias=None, activation="identity", save_z=False):
    return host.none_as_empty(x, _empty(x, scales, save_z))


@_quantized_linear_backward_op.register_fake
def _(dy, packed, scales, zeros, saved, activation, needs_grad, n_inner):
    has_dx, has_dbias = needs_grad
    dx = dy.new_empty((*dy.shape[:-1], n_inner) if has_dx else 0)
    return dx, dy.new_empty(dy.shape[-1] if has_dbias else 0)


def _setup_context(ctx, inputs, output):
    (*tensors, activation, save_z), (y, z) = inputs, output
    ctx.mark_non_differentiable(z)
    _save(ctx, tensors, y, z if save_z else None, activation, all_inputs=True)


@host.once
def _op_backward(ctx, dy, _):
    x, *weight, bias, saved = ctx.saved_tensors
    if saved is None and ctx.activation != "identity":
        saved = quantized_linear_op(x, *weight, bias)[0]
    how = ctx.activation, ctx.needs_grad, x.shape[-1]
    grads = _quantized_linear_backward_op(dy, *weight, saved, *how)
    dx, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))
    return dx, None, None, None, dbias, None, None


quantized_linear_op.register_autograd(_op_backward, setup_context=_setup_context)


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weight is quantized, and the activation after it: act(x Wᵀ + b), all of it frozen.

    weight: a QuantizedWeight; bias: (N,) or None. The buffers are packed, scales, zeros and bias. For QLoRA
    train low-rank matrices beside this layer, which hands gradients on to x.
    """

    def __init__(self, weight, bias=None, activation="identity"):
        super().__init__()
        host.check_activation("QuantizedLinear", activation)
        if not isinstance(weight, QuantizedWeight):
            wrong = f"weight must be a QuantizedWeight, got {type(weight).__name__}"
            raise TypeError(f"QuantizedLinear: {wrong}; use QuantizedLinear.from_linear(linear)")
        self.activation = activation
        self.out_features, self.in_features = weight.shape
        for name, t in (*weight._asdict().items(), ("bias", bias)):
            self.register_buffer(name, t)

    @classmethod
    def from_linear(cls, linear, kind="int4", group=128, zero_points=False, activation="identity"):
        """`linear` with its weight quantized and a copy of its bias; `linear` itself stays as it was."""
        if not isinstance(linear, torch.nn.Linear):
            wrong = f"linear must be a torch.nn.Linear, got {type(linear).__name__}"
            raise TypeError(
                f"QuantizedLinear: {wrong}; for a weight alone, (N, K), there is quantize"
            )
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(quantize(linear.weight, kind, group, zero_points), bias, activation)

    # a property of torch.nn.Linear, too
    weight = property(lambda self: QuantizedWeight(self.packed, self.scales, self.zeros))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear_triton(x, *self.weight, self.bias, self.activation)

    def extra_repr(self):
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        how = f"kind={self.weight.kind!r}, group={self.weight.group}, zero_points={self.zeros is not None}"
        return f"{sizes}, {how}, bias={self.bias is not None}, activation={self.activation!r}"
