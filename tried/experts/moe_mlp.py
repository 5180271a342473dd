"""moe_mlp: the experts of a mixture-of-experts layer, forward and backward, in Triton. A prototype.

    y[t] = sum over j of weights[t, j] · (silu(g) · u) W2[e]ᵀ,  [g, u] = x[t] W1[e]ᵀ,  e = ids[t, j]

Shapes    x: (T, H); ids: (T, top), of 0 to E - 1, which may repeat; weights: (T, top), of any float dtype;
          w_gate_up, W1: (E, 2I, H), the gate first; w_down, W2: (E, H, I). y: (T, H).
Rows      A pair is a token and one of its experts. Pairs lie sorted by expert, each expert's filled up with
          zeros to a multiple of ROWS, so that a tile belongs to one expert, TMA reads and writes it whole, and
          no product has a mask. How many tiles there are stays on the GPU: programs are persistent and read it
          there. Memory is for the most there can be: T·top + E·ROWS rows.
Kernels   (1) table, gather, product + SwiGLU, product, sum over a token's experts in the order of j. Backward:
          (2) dy and x gathered; dy W2 + SwiGLU's gradient + weights' gradient; dW2; dW1; the product dh W1; the
          sum. No atomics: the same bits in every run.
Saves     x, h = x W1ᵀ by row, the table, ids' weights. dweights[t, j] = dy[t] W2 · (silu(g) · u), so that the
          experts' results need not be kept.
Asks for  rows of H and I numbers that are multiples of 16 bytes (TMA).

    python .gpu/moe_mlp.py                                on a GPU: checks, then times
    TRITON_INTERPRET=1 python .gpu/moe_mlp.py             on the CPU: checks of small sizes
    python .gpu/compile_moe.py                            registers and spills on sm_90, without a GPU
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.ops import _device as device  # before triton: without a GPU, lib chooses the interpreter

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = triton.knobs.runtime.interpret
ROWS = 128  # of a tile, of one expert
GROUP = 8  # rows of tiles that programs go down together
# (columns of a tile, step of the sum, warps, stages) by kernel; float32 goes by 3xTF32 on smaller ones
TILES = {
    "gate_up": (128, 64, 8, 3), "down": (256, 64, 8, 3), "d_act": (128, 64, 8, 3), "dx": (256, 64, 8, 3),
    "dw": (256, 64, 8, 3),
}  # fmt: skip
TILES_32 = {
    "gate_up": (32, 32, 8, 2), "down": (64, 32, 8, 2), "d_act": (64, 32, 8, 2), "dx": (64, 32, 8, 2),
    "dw": (64, 32, 8, 2),
}  # fmt: skip


# --- rows of experts -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_experts"])
def _table_kernel(
    bounds_ptr, order_ptr, source_ptr, place_ptr, expert_ptr, first_ptr, n_experts,
    ROWS: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    # One program handles one tile: whose it is, which pair each of its rows is of (-1: of none), and, the other
    # way, which row each pair has. first[e]: the first tile of expert e; first[E]: how many tiles there are.
    tile = tl.program_id(0)
    e = tl.arange(0, E_BLOCK)
    start = tl.load(bounds_ptr + e, mask=e < n_experts, other=0)
    end = tl.load(bounds_ptr + e + 1, mask=e < n_experts, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(tiles, 0)  # one past the last tile of each
    if tile == 0:
        tl.store(first_ptr + e + 1, last, mask=e < n_experts)
        tl.store(first_ptr, 0)
    mine = (last > tile) & (last - tiles <= tile)  # of one expert, or of none past the end
    is_there = tl.sum(mine.to(tl.int32), 0) > 0
    tl.store(expert_ptr + tile, tl.where(is_there, tl.sum(tl.where(mine, e, 0), 0), -1))
    at = tl.sum(tl.where(mine, start + (tile - last + tiles) * ROWS, 0), 0) + tl.arange(0, ROWS)
    inside = at < tl.sum(tl.where(mine, end, 0), 0)
    pair = tl.load(order_ptr + at, mask=inside, other=-1).to(tl.int32)
    rows = tile * ROWS + tl.arange(0, ROWS)
    tl.store(source_ptr + rows, pair)
    tl.store(place_ptr + pair, rows, mask=inside)


@triton.jit(do_not_specialize=["n_experts"])
def _gather_kernel(
    x_ptr, source_ptr, first_ptr, out_ptr, n_experts, n_cols, top, stride_x,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # out[row] = x[its token], zeros where the row is of no pair
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    if row < tl.load(first_ptr + n_experts) * ROWS:
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)[None, :]
        pair = tl.load(source_ptr + rows)
        token = (tl.maximum(pair, 0) // top).to(tl.int64)[:, None]
        mask = (pair >= 0)[:, None] & (cols < n_cols)
        x = tl.load(x_ptr + token * stride_x + cols, mask=mask, other=0.0)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * n_cols + cols, x, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_tokens"])
def _combine_kernel(
    rows_ptr, place_ptr, weights_ptr, y_ptr, n_tokens, n_cols,
    TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # y[token] = sum over j, in order, of weights · rows[place[token, j]]; without weights the bare sum
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_token = tokens < n_tokens
    mask = is_token[:, None] & (cols < n_cols)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for j in tl.static_range(TOP):
        place = tl.load(place_ptr + tokens * TOP + j, mask=is_token, other=0).to(tl.int64)
        part = tl.load(rows_ptr + place[:, None] * n_cols + cols, mask=mask, other=0.0)
        part = part.to(tl.float32)
        if weights_ptr is not None:
            w = tl.load(weights_ptr + tokens * TOP + j, mask=is_token, other=0.0).to(tl.float32)
            part *= w[:, None]
        total += part
    tl.store(y_ptr + tokens[:, None] * n_cols + cols, total.to(y_ptr.dtype.element_ty), mask=mask)


class Table:
    """Which rows are of which expert and which pair; all of it on the GPU, where no count is asked for."""

    def __init__(self, ids, n_experts):
        pairs, at = ids.flatten(), ids.device
        by_expert, order = torch.sort(pairs, stable=True)
        bounds = torch.searchsorted(
            by_expert, torch.arange(n_experts + 1, dtype=by_expert.dtype, device=at), out_int32=True
        )
        # an expert has at most one tile that is not full
        self.n_tiles = pairs.numel() // ROWS + min(n_experts, pairs.numel())
        self.n_rows, self.n_experts, self.top = self.n_tiles * ROWS, n_experts, ids.shape[1]
        self.source = torch.empty(self.n_rows, dtype=torch.int32, device=at)
        self.place = torch.empty(pairs.numel(), dtype=torch.int32, device=at)
        self.expert = torch.empty(self.n_tiles, dtype=torch.int32, device=at)
        self.first = torch.empty(n_experts + 1, dtype=torch.int32, device=at)
        _table_kernel[(self.n_tiles,)](
            bounds, order, self.source, self.place, self.expert, self.first, n_experts,
            ROWS=ROWS, E_BLOCK=triton.next_power_of_2(n_experts), num_warps=4,
        )  # fmt: skip

    def gather(self, x):
        x = x if x.stride(1) == 1 else x.contiguous()
        out, block_n = x.new_empty(self.n_rows, x.shape[1]), 1024
        _gather_kernel[(self.n_rows // 8, triton.cdiv(x.shape[1], block_n))](
            x, self.source, self.first, out, self.n_experts, x.shape[1], self.top, x.stride(0),
            ROWS=ROWS, BLOCK_M=8, BLOCK_N=block_n, num_warps=8,
        )  # fmt: skip
        return out

    def combine(self, rows, weights):
        n_tokens, n_cols = self.place.numel() // self.top, rows.shape[1]
        y, block_n = rows.new_empty(n_tokens, n_cols), 1024
        _combine_kernel[(triton.cdiv(n_tokens, 4), triton.cdiv(n_cols, block_n))](
            rows, self.place, weights, y, n_tokens, n_cols,
            TOP=self.top, BLOCK_M=4, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
        return y


# --- products ------------------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(z):
    # far left exp(-z) is infinite and this 0, which is right
    return device.fast_divide(tl.full(z.shape, 1.0, z.dtype), 1.0 + device.fast_exp(-z))


@triton.jit(do_not_specialize=["n_experts"])
def _gate_up_kernel(
    x_desc, w_desc, h_desc, act_desc, expert_ptr, first_ptr, n_experts, n_cols, n_inner,
    PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # act = silu(g) · u of one tile, (BLOCK_M, BLOCK_N): a program multiplies with both halves of W1[e], which
    # is (E, 2, I, H) to TMA, as h is (rows, 2, I): no piece of the one half runs into the other.
    n_tiles = tl.load(first_ptr + n_experts)
    for tile in tl.range(tl.program_id(0), n_tiles * tl.cdiv(n_cols, BLOCK_N), tl.num_programs(0)):
        pid_m, pid_n = device.place_of(tile, n_tiles, n_cols, GROUP, 1, BLOCK_N)
        e, row, col = tl.load(expert_ptr + pid_m), pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            w = tl.reshape(w_desc.load([e, 0, col, k]), (2 * BLOCK_N, BLOCK_K))
            total = device.dot(x_desc.load([row, k]), w.T, total, PRECISION)
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        if h_desc is not None:
            h_desc.store([row, 0, col], tl.reshape(gate.to(h_desc.dtype), (BLOCK_M, 1, BLOCK_N)))
            h_desc.store([row, 1, col], tl.reshape(up.to(h_desc.dtype), (BLOCK_M, 1, BLOCK_N)))
        act = gate * up * _sigmoid(gate)
        act_desc.store([row, col], act.to(act_desc.dtype))


@triton.jit(do_not_specialize=["n_experts"])
def _product_kernel(
    a_desc, w_desc, out_desc, expert_ptr, first_ptr, n_experts, n_cols, n_inner,
    W_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # out = a W[e]ᵀ, W (E, N, K), for W_TRANSPOSED; else out = a W[e], W (E, K, N)
    n_tiles = tl.load(first_ptr + n_experts)
    for tile in tl.range(tl.program_id(0), n_tiles * tl.cdiv(n_cols, BLOCK_N), tl.num_programs(0)):
        pid_m, pid_n = device.place_of(tile, n_tiles, n_cols, GROUP, 1, BLOCK_N)
        e, row, col = tl.load(expert_ptr + pid_m), pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            if W_TRANSPOSED:
                w = tl.reshape(w_desc.load([e, col, k]), (BLOCK_N, BLOCK_K)).T
            else:
                w = tl.reshape(w_desc.load([e, k, col]), (BLOCK_K, BLOCK_N))
            total = device.dot(a_desc.load([row, k]), w, total, PRECISION)
        # halves, each with all threads at work: half the shared memory for the way out
        left, right = device.left_and_right(total)
        out_desc.store([row, col], left.to(out_desc.dtype))
        out_desc.store([row, col + BLOCK_N // 2], right.to(out_desc.dtype))


@triton.jit
def _d_act_of(d, weight, h_desc, dh_desc, scaled_desc, row, col):
    # The epilogue of _d_act_kernel; past I, where h is read as 0, it adds 0 to dots
    shape: tl.constexpr = (d.shape[0], 1, d.shape[1])
    gate = tl.reshape(h_desc.load([row, 0, col]), d.shape).to(tl.float32)
    up = tl.reshape(h_desc.load([row, 1, col]), d.shape).to(tl.float32)
    s = _sigmoid(gate)
    silu = gate * s
    act = silu * up
    dots = tl.sum(d * act, 1)
    scaled_desc.store([row, col], (act * weight).to(scaled_desc.dtype))
    d *= weight
    dh_desc.store([row, 1, col], tl.reshape((d * silu).to(dh_desc.dtype), shape))
    d_gate = d * up * (s + silu * (1 - s))
    dh_desc.store([row, 0, col], tl.reshape(d_gate.to(dh_desc.dtype), shape))
    return dots


@triton.jit(do_not_specialize=["n_experts", "n_rows"])
def _d_act_kernel(
    dy_desc, w_desc, h_desc, dh_desc, scaled_desc, dots_ptr, weights_ptr, source_ptr, expert_ptr, first_ptr,
    n_experts, n_cols, n_inner, n_rows, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # d = dy W2[e], W2 (E, H, I), and from it and h, by row and its weight w: dh, w · act, which dW2 multiplies,
    # and a tile's share of d · act, w's gradient: dots, (tiles of columns, rows).
    n_tiles = tl.load(first_ptr + n_experts)
    for tile in tl.range(tl.program_id(0), n_tiles * tl.cdiv(n_cols, BLOCK_N), tl.num_programs(0)):
        pid_m, pid_n = device.place_of(tile, n_tiles, n_cols, GROUP, 1, BLOCK_N)
        e, row, col = tl.load(expert_ptr + pid_m), pid_m * BLOCK_M, pid_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, n_inner, BLOCK_K):
            w = tl.reshape(w_desc.load([e, k, col]), (BLOCK_K, BLOCK_N))
            total = device.dot(dy_desc.load([row, k]), w, total, PRECISION)
        rows = row + tl.arange(0, BLOCK_M)
        pair = tl.load(source_ptr + rows)
        weight = tl.load(weights_ptr + pair, mask=pair >= 0, other=0.0).to(tl.float32)[:, None]
        # in halves, whose numbers fit into registers
        left, right = device.left_and_right(total)
        dots = _d_act_of(left, weight, h_desc, dh_desc, scaled_desc, row, col)
        dots += _d_act_of(right, weight, h_desc, dh_desc, scaled_desc, row, col + BLOCK_N // 2)
        tl.store(dots_ptr + pid_n.to(tl.int64) * n_rows + rows, dots)


@triton.jit(do_not_specialize=["n_experts"])
def _dw_kernel(
    a_desc, b_desc, dw_desc, first_ptr, n_experts, n_left, n_right,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # dW[e] = aᵀ b over the rows of e, (n_left, n_right); zeros for an expert without rows
    per_expert = tl.cdiv(n_left, BLOCK_M) * tl.cdiv(n_right, BLOCK_N)
    for tile in tl.range(tl.program_id(0), n_experts * per_expert, tl.num_programs(0)):
        e = tile // per_expert
        pid_m, pid_n = device.place_of(tile % per_expert, n_left, n_right, GROUP, BLOCK_M, BLOCK_N)
        first, last = tl.load(first_ptr + e) * ROWS, tl.load(first_ptr + e + 1) * ROWS
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for row in range(first, last, BLOCK_K):
            a = a_desc.load([row, pid_m * BLOCK_M]).T
            total = device.dot(a, b_desc.load([row, pid_n * BLOCK_N]), total, PRECISION)
        left, right = device.left_and_right(total)
        shape: tl.constexpr = (1, BLOCK_M, BLOCK_N // 2)
        at = pid_n * BLOCK_N
        dw_desc.store([e, pid_m * BLOCK_M, at], tl.reshape(left.to(dw_desc.dtype), shape))
        at += BLOCK_N // 2
        dw_desc.store([e, pid_m * BLOCK_M, at], tl.reshape(right.to(dw_desc.dtype), shape))


def _describe(t, *block):
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))


def _launch(kernel, name, dtype, tensors, sizes, n_down, n_cols, **constants):
    """The kernel on as many programs as the GPU has SMs, or as there can be tiles, n_down of each column."""
    block_n, block_k, num_warps, num_stages = _tile(name, dtype)
    n_programs = n_down * triton.cdiv(n_cols, block_n)
    if tensors[-1].is_cuda:
        # more than one program fits on an SM where tiles are small
        n_sms = torch.cuda.get_device_properties(tensors[-1].device).multi_processor_count
        n_programs = min(n_programs, n_sms * (1 if block_n * num_warps > 512 else 2))
    kernel[(n_programs,)](
        *tensors, *sizes, PRECISION="tf32x3" if dtype == torch.float32 else None, GROUP=GROUP,
        BLOCK_M=ROWS, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages, **constants,
    )  # fmt: skip


def _tile(name, dtype):
    block_n, *rest = (TILES_32 if dtype == torch.float32 else TILES)[name]
    return (32 if INTERPRETED else block_n, *rest)  # small matrices shall have several tiles, too


def _gate_up(table, rows, w1, save_h):
    """h, (rows, 2, I), or None, and act, (rows, I)."""
    n_experts, n_both, n_inner = w1.shape
    n_cols, (block_n, block_k, *_) = n_both // 2, _tile("gate_up", rows.dtype)
    h = rows.new_empty(table.n_rows, 2, n_cols) if save_h else None
    act = rows.new_empty(table.n_rows, n_cols)
    tensors = (
        _describe(rows, ROWS, block_k),
        _describe(w1.view(n_experts, 2, n_cols, n_inner), 1, 2, block_n, block_k),
        None if h is None else _describe(h, ROWS, 1, block_n), _describe(act, ROWS, block_n),
        table.expert, table.first,
    )  # fmt: skip
    sizes = n_experts, n_cols, n_inner
    _launch(_gate_up_kernel, "gate_up", rows.dtype, tensors, sizes, table.n_tiles, n_cols)
    return h, act


def _product(table, name, rows, w, transposed):
    """rows W[e]ᵀ for W (E, N, K) transposed, else rows W[e]."""
    n_experts, n_cols, n_inner = w.shape if transposed else (w.shape[0], w.shape[2], w.shape[1])
    block_n, block_k, *_ = _tile(name, rows.dtype)
    out, of_w = rows.new_empty(table.n_rows, n_cols), (block_n, block_k)
    tensors = (
        _describe(rows, ROWS, block_k), _describe(w, 1, *(of_w if transposed else of_w[::-1])),
        _describe(out, ROWS, block_n // 2), table.expert, table.first,
    )  # fmt: skip
    how = (n_experts, n_cols, n_inner), table.n_tiles, n_cols
    _launch(_product_kernel, name, rows.dtype, tensors, *how, W_TRANSPOSED=transposed)
    return out


def _d_act(table, dy_rows, w2, h, weights):
    """dh, (rows, 2, I), weight · act, (rows, I), and the gradient of weights, (T, top)."""
    n_experts, n_inner, n_cols = w2.shape
    block_n, block_k, *_ = _tile("d_act", dy_rows.dtype)
    dh, scaled = torch.empty_like(h), h.new_empty(table.n_rows, n_cols)
    shape = triton.cdiv(n_cols, block_n), table.n_rows
    dots = torch.empty(shape, dtype=torch.float32, device=h.device)
    tensors = (
        _describe(dy_rows, ROWS, block_k), _describe(w2, 1, block_k, block_n),
        _describe(h, ROWS, 1, block_n // 2), _describe(dh, ROWS, 1, block_n // 2),
        _describe(scaled, ROWS, block_n // 2), dots, weights, table.source, table.expert, table.first,
    )  # fmt: skip
    sizes = n_experts, n_cols, n_inner, table.n_rows
    _launch(_d_act_kernel, "d_act", h.dtype, tensors, sizes, table.n_tiles, n_cols)
    return dh, scaled, dots.sum(0)[table.place.long()].view(weights.shape).to(weights.dtype)


def _dw(table, a, b):
    """aᵀ b by expert, (E, columns of a, columns of b)."""
    block_n, block_k, *_ = _tile("dw", a.dtype)
    dw = a.new_empty(table.n_experts, a.shape[1], b.shape[1])
    tensors = (
        _describe(a, block_k, ROWS), _describe(b, block_k, block_n), _describe(dw, 1, ROWS, block_n // 2),
        table.first,
    )  # fmt: skip
    n_down = table.n_experts * triton.cdiv(a.shape[1], ROWS)
    _launch(_dw_kernel, "dw", a.dtype, tensors, dw.shape, n_down, b.shape[1], ROWS=ROWS)
    return dw


class _MoEMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w1, w2):
        table = Table(ids, w1.shape[0])
        save_h = any(ctx.needs_input_grad)
        h, act = _gate_up(table, table.gather(x), w1, save_h)
        y = table.combine(_product(table, "down", act, w2, True), weights)
        ctx.table = table
        ctx.save_for_backward(x, h, weights, w1, w2)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, h, weights, w1, w2 = ctx.saved_tensors
        table, (has_dx, _, _, has_dw1, has_dw2) = ctx.table, ctx.needs_input_grad
        rows = table.gather(dy)
        dh, scaled, dweights = _d_act(table, rows, w2, h, weights)
        dw2 = _dw(table, rows, scaled) if has_dw2 else None
        del rows, scaled
        dh, dx = dh.flatten(1), None
        dw1 = _dw(table, dh, table.gather(x)) if has_dw1 else None
        dx = table.combine(_product(table, "dx", dh, w1, False), None) if has_dx else None
        return dx, None, dweights, dw1, dw2


def moe_mlp(x, ids, weights, w_gate_up, w_down):
    """sum of weights[t, j] · expert ids[t, j] of x[t]: see the head of this file. Gradients for all but ids."""
    for name, t, dim in ("x", x, 2), ("w_gate_up", w_gate_up, 3), ("w_down", w_down, 3):
        if t.dim() != dim or t.shape[-1] * t.itemsize % 16 or t.dtype != x.dtype:
            wrong = f"{name} must have {dim} dimensions, rows of 16 bytes and x's dtype"
            raise ValueError(f"moe_mlp: {wrong}; got {tuple(t.shape)} of {t.dtype}")
    if ids.numel() == 0:
        return x * 0
    tensors = weights.contiguous(), w_gate_up.contiguous(), w_down.contiguous()
    return _MoEMLP.apply(x, ids, *tensors)


# --- what it is compared with --------------------------------------------------------------------------------


def by_loop(x, ids, weights, w_gate_up, w_down):
    """A loop over experts, as models have it in eager mode."""
    y = torch.zeros_like(x)
    # unbind: the gradient of w[e] would be a tensor of all experts each time
    for e, (w1, w2) in enumerate(zip(w_gate_up.unbind(), w_down.unbind())):
        token, j = torch.where(ids == e)
        gate, up = F.linear(x[token], w1).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, w2)
        y = y.index_add(0, token, (out * weights[token, j, None]).to(x.dtype))
    return y


def by_grouped_mm(x, ids, weights, w_gate_up, w_down):
    """torch._grouped_mm: rows sorted by expert, without a loop and without waiting for the GPU."""
    n_experts, top = w_gate_up.shape[0], ids.shape[1]
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(n_experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    h = torch._grouped_mm(x[order // top], w_gate_up.transpose(1, 2), offs=ends)
    gate, up = h.chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    out = out[place].view(*ids.shape, -1) * weights[..., None]
    return out.sum(1).to(x.dtype)


def example(n_tokens, n_in, n_hidden, n_experts, top, dtype, device, empty=(), seed=0):
    """x, ids, weights, w_gate_up, w_down: tokens choose by random logits; no token goes to `empty` experts."""
    make = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=make, device=device)

    logits = randn(n_tokens, n_experts) + randn(n_experts)  # some experts are asked more
    logits[:, list(empty)] = -torch.inf
    weights, ids = logits.softmax(-1).topk(top, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    ids[0] = ids[0, 0]  # a token may ask one expert twice
    w_gate_up = randn(n_experts, 2 * n_hidden, n_in).mul_(n_in**-0.5).to(dtype)
    w_down = randn(n_experts, n_in, n_hidden).mul_(n_hidden**-0.5).to(dtype)
    return randn(n_tokens, n_in).to(dtype), ids, weights, w_gate_up, w_down


def results(function, tensors, dy, dtype=None):
    """y and all gradients, calculated in dtype."""
    x, ids, *rest = tensors
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, *rest)]
    y = function(leaves[0], ids, *leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(sizes, dtype, device, empty=()):
    """Print errors by name, of moe_mlp and of the loop in the same dtype; return whether all is well.

    An error is ||a - b|| / ||b||, b in float64: at most 4 roundings of 16 bits, or 16 of float32, where
    sums round. The same bits again, too.
    """
    tensors = example(*sizes, dtype, device, empty)
    dy = example(*sizes, dtype, device, seed=1)[0]
    right = results(by_loop, tensors, dy, torch.float64)
    got, again = results(moe_mlp, tensors, dy), results(moe_mlp, tensors, dy)
    same = all(torch.equal(a, b) for a, b in zip(got, again))
    bound = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 4)
    eager, is_well, text = results(by_loop, tensors, dy), same, []
    for name, a, b, other in zip(("y", "dx", "dweights", "dw1", "dw2"), got, right, eager):
        errors = [((t.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for t in (a, other)]
        is_well = is_well and a.shape == b.shape and errors[0] <= bound
        text.append(f"{name} " + " | ".join(f"{error:.1e}" for error in errors))
    counts = torch.bincount(tensors[1].flatten(), minlength=sizes[3])
    print(
        f"{'ok  ' if is_well else 'FAIL'} {str(dtype)[6:]:9} {sizes} pairs {counts.min()} to {counts.max()}; "
        f"bound {bound:.1e}; {'; '.join(text)}; {'same bits' if same else 'OTHER BITS'} again", flush=True,
    )  # fmt: skip
    return is_well


SMALL = [  # tokens, H, I, E, top; experts without tokens
    ((70, 64, 48, 4, 2), ()),
    ((33, 48, 80, 5, 3), (0, 4)),
    ((300, 32, 32, 3, 2), (1,)),  # several tiles for an expert
    ((1, 16, 16, 8, 1), ()),
]


def check_small(device):
    dtypes = torch.float32, torch.float16, torch.bfloat16
    return all([check(sizes, t, device, empty) for t in dtypes for sizes, empty in SMALL])


# --- on a GPU ------------------------------------------------------------------------------------------------

SHAPES = {  # tokens, H, I, E, top
    "E=64, top 6": (8192, 2048, 1408, 64, 6),
    "E=8, top 2": (8192, 4096, 14336 // 4, 8, 2),
}


def milliseconds(call, n_times=10):
    """Median by events. Calls are queued behind a pause: the host counts only where it waits."""
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n_times)]
    for begin, end in events:
        torch.cuda._sleep(4_000_000)  # 2 ms
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def measure(label, function, tensors, dy, n_flops):
    x, ids, *rest = tensors
    leaves = [t.detach().requires_grad_() for t in (x, *rest)]

    def forward():
        with torch.no_grad():
            return function(x, ids, *rest)

    def both():
        y = function(leaves[0], ids, *leaves[1:])
        return torch.autograd.grad(y, leaves, dy)

    row = f"  {label:28}"
    for call, times in (forward, 1), (both, 3):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        ms = milliseconds(call)
        row += f" | {ms:8.3f} {times * n_flops / ms / 1e9:6.0f} {peak:7.2f} {first:6.1f}"
    print(row, flush=True)


def where_time_goes(function, tensors, dy):
    from torch.profiler import ProfilerActivity, profile

    x, ids, *rest = tensors
    leaves = [t.detach().requires_grad_() for t in (x, *rest)]
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            torch.autograd.grad(function(leaves[0], ids, *leaves[1:]), leaves, dy)
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
    for e in events:
        print(f"    {e.self_device_time_total / 3e3:8.3f} ms {e.count // 3:4} x {e.key[:80]}")


def guarded(what, function, *arguments):
    try:  # whatever one part raises, the others run
        return function(*arguments)
    except Exception as error:
        print(f"  {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def bench():
    began = time.perf_counter()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, sizes in SHAPES.items():
        n_flops = 2 * sizes[0] * sizes[4] * 3 * sizes[1] * sizes[2]
        ok = guarded(f"check, {name}", check, sizes, torch.bfloat16, "cuda")
        torch.cuda.empty_cache()
        print(f"{name}: {sizes}, bfloat16, at {time.perf_counter() - began:.0f} s")
        print(f"  {'':28} | forward: ms TFLOP/s  GiB 1st s | with backward: ms TFLOP/s  GiB 1st s")
        tensors = example(*sizes, torch.bfloat16, "cuda")
        dy = torch.randn_like(tensors[0])
        if ok:
            guarded("moe_mlp", measure, "moe_mlp (Triton)", moe_mlp, tensors, dy, n_flops)
            guarded("where the time goes", where_time_goes, moe_mlp, tensors, dy)
        guarded("grouped_mm", measure, "_grouped_mm, eager", by_grouped_mm, tensors, dy, n_flops)
        guarded("loop", measure, "loop over experts, eager", by_loop, tensors, dy, n_flops)
        torch._dynamo.reset()
        compiled = torch.compile(by_grouped_mm)
        guarded("compiled", measure, "_grouped_mm, torch.compile", compiled, tensors, dy, n_flops)
        del tensors, dy
    guarded("check, small", check_small, "cuda")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    if INTERPRETED:
        from lib.nogpu import interpreter  # mends bfloat16 in Triton's

        interpreter.install()
        sys.exit(0 if check_small("cpu") else 1)
    bench()
