"""lora_epilogue: y = act(x + scale·delta + bias), what follows the products of a LoRA layer, in one pass.

Shapes    x, delta, y: (..., N), with any strides, y contiguous; bias: (N,); scale: a Python float.
          x is what the frozen linear layer gives without its bias, delta the low-rank product (h A) B.
Act       identity, relu, gelu (tanh form), silu or sigmoid.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64; x, delta and bias alike.
Traffic   M rows of N elements of s bytes. Forward: eager moves 2 + 3 + 2 + 2 = 9MNs (identity 7MNs), fused
          3MNs, in place too. Backward: dy in, dx and ddelta out are 3MNs, and on top comes what tells act'(z),
          z = x + scale·delta + bias:
            identity        nothing, and dx is dy itself             backward 2MNs
            relu, sigmoid   y                                        backward 4MNs
            gelu, silu      x and delta, to compute z again          backward 5MNs
            in place        z, as x is gone: forward 4MNs            backward 4MNs
Backward  dx = dy·act'(z), ddelta = scale·dx, dbias = dx summed over rows: one kernel, and one for the sums.
Copy it   this file for Triton; lora_epilogue.cu beside it for CUDA. MIT licence.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# The eager activations, in the order of the numbers that lora_epilogue.cu knows them by.
_ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def lora_epilogue_eager(x, delta, bias, scale=1.0, activation="identity"):
    return _ACTIVATIONS[activation](x + scale * delta + bias)


@triton.jit
def _gelu(z):
    # gelu(z) = z·sigmoid(2u), u = √(2/π)·(z + 0.044715 z³): no overflow, where tanh as (e²ᵘ-1)/(e²ᵘ+1) has one
    return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))


@triton.jit
def _gelu_grad(z):
    # s = sigmoid(2u); gelu'(z) = s + z·s·(1 - s)·2u'. By e = exp(-|2u|), which cannot overflow, and with
    # s·(1 - s) = e/(1 + e)²: where s is nearly 1, 1 - s has lost its digits, and z·2u' multiplies what is left.
    e = tl.exp(-1.5957691216057308 * tl.abs(z) * (1.0 + 0.044715 * z * z))
    t = 1.0 / (1.0 + e)
    s = tl.where(z < 0, e * t, t)
    return s + z * (e * t * t) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # tl.maximum(z, 0) would turn NaN into 0
    elif ACTIVATION == "gelu":
        z = _gelu(z)
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "sigmoid":
        z = 1.0 / (1.0 + tl.exp(-z))
    return z


@triton.jit
def _slope_times(dy, saved, ACTIVATION: tl.constexpr):
    # dy·act'(z); saved is y for relu and sigmoid, z for gelu and silu
    if ACTIVATION == "relu":
        dy = tl.where(saved <= 0, 0.0, dy)  # a NaN in y lets dy through, as in torch.relu
    elif ACTIVATION == "gelu":
        dy = dy * _gelu_grad(saved)
    elif ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-saved))
        dy = dy * (s * (1.0 + saved * (1.0 - s)))
    elif ACTIVATION == "sigmoid":
        dy = dy * (saved * (1.0 - saved))
    return dy


@triton.jit
def _sum_of(x, delta, bias, scale, COMPUTE: tl.constexpr):
    # z = x + scale·delta + bias, the same in the forward and in the backward pass, rounding included.
    # scale is no Python number but float64 in the kernel: every product with it would be float64 too.
    z = x.to(COMPUTE) + tl.cast(scale, COMPUTE) * delta.to(COMPUTE)
    return z + bias.to(COMPUTE)[None, :]


@triton.jit(do_not_specialize=["n_rows"])
def _lora_epilogue_fwd_kernel(
    x_ptr, delta_ptr, bias_ptr, y_ptr, z_ptr, scale: tl.float64, n_rows, n_cols,
    stride_xm, stride_xn, stride_dm, stride_dn, stride_ym, stride_yn,
    ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles a tile of x, (BLOCK_M, BLOCK_N). Neighbours take neighbouring columns. In place, y_ptr
    # is x_ptr: no program, and no thread, reads an element that another one writes.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    # int64: row * stride passes 2**31 from 8 GiB of float32 on
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]

    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn, mask=mask)
    delta = tl.load(delta_ptr + rows[:, None] * stride_dm + cols[None, :] * stride_dn, mask=mask)
    bias = tl.load(bias_ptr + cols, mask=cols < n_cols)
    z = _sum_of(x, delta, bias, scale, COMPUTE)
    y = _activate(z, ACTIVATION)

    tl.store(y_ptr + rows[:, None] * stride_ym + cols[None, :] * stride_yn, y, mask=mask)
    if z_ptr is not None:
        tl.store(z_ptr + rows[:, None] * n_cols + cols[None, :], z, mask=mask)


@triton.jit(do_not_specialize=["n_rows", "rows_per_program"])
def _lora_epilogue_bwd_kernel(
    dy_ptr, saved_ptr, delta_ptr, bias_ptr, dx_ptr, ddelta_ptr, partial_ptr, scale: tl.float64,
    n_rows, n_cols, stride_dym, stride_dyn, stride_sm, stride_sn, stride_dm, stride_dn, rows_per_program,
    ACTIVATION: tl.constexpr, NUM_STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles rows_per_program rows of BLOCK_N columns, BLOCK_M rows at a time, and adds
    # them up on the way: its row of partial, (programs down, n_cols), is its share of dbias.
    # saved is y or z; with a delta_ptr it is x, and z is computed again. Pointers may be None.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=COMPUTE)
    if delta_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < n_cols)

    for start in tl.range(0, rows_per_program, BLOCK_M, num_stages=NUM_STAGES):
        rows = pid_m.to(tl.int64) * rows_per_program + start + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dx = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0).to(COMPUTE)
        if saved_ptr is not None:
            saved_offsets = rows[:, None] * stride_sm + cols[None, :] * stride_sn
            saved = tl.load(saved_ptr + saved_offsets, mask=mask, other=0.0).to(COMPUTE)
            if delta_ptr is not None:
                delta_offsets = rows[:, None] * stride_dm + cols[None, :] * stride_dn
                delta = tl.load(delta_ptr + delta_offsets, mask=mask, other=0.0)
                saved = _sum_of(saved, delta, bias, scale, COMPUTE)
            # a row that is not there has z = bias: its 0·act'(bias) is no 0 for a bias of 1e30, say
            dx = tl.where(mask, _slope_times(dx, saved, ACTIVATION), 0.0)
        offsets = rows[:, None] * n_cols + cols[None, :]
        if dx_ptr is not None:
            tl.store(dx_ptr + offsets, dx, mask=mask)
        if ddelta_ptr is not None:
            tl.store(ddelta_ptr + offsets, tl.cast(scale, COMPUTE) * dx, mask=mask)
        total += dx

    if partial_ptr is not None:
        sums = tl.sum(total, axis=0)
        tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows"])
def _sum_rows_kernel(
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


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


@functools.cache
def _tile(n_cols, tile_bytes, row_bytes, dtype):
    """BLOCK_M, BLOCK_N: a tile of tile_bytes, its rows row_bytes long unless x has fewer columns."""
    block_n = min(triton.next_power_of_2(n_cols), row_bytes // dtype.itemsize)
    return tile_bytes // dtype.itemsize // block_n, block_n


@functools.cache
def _rows_to_fold(n_cols):
    """How many rows of n_cols elements, taken together, are a multiple of 16 elements long.

    16 elements rather than 16 bytes: only of multiples of 16 does Triton know, for any size given at run time,
    that masks and offsets leave 16-byte loads whole.
    """
    return 16 // math.gcd(n_cols, 16)


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def _aligned(*matrices):
    """(fold, matrices) pairs that cover all rows of these (M, N) matrices; a None among them stays None.

    A width of 781, say, lets rows begin off any 16-byte boundary, and loads shrink to one element; 16 such rows
    on end are 12496 elements, a good width. So many contiguous rows are folded, and at most 15 left over.
    """
    n_rows, n_cols = matrices[0].shape
    fold = _rows_to_fold(n_cols)
    if fold == 1 or n_rows < 1024 or not all(m is None or m.is_contiguous() for m in matrices):
        return [(1, matrices)]
    top = n_rows // fold * fold
    wide = (top // fold, fold * n_cols)
    folded = [(fold, [None if m is None else m[:top].view(wide) for m in matrices])]
    rest = [(1, [None if m is None else m[top:] for m in matrices])] if top < n_rows else []
    return folded + rest


def _forward(x, delta, bias, scale, activation, launch=None):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    n_cols = x.shape[-1]
    x, delta, out = x.reshape(-1, n_cols), delta.reshape(-1, n_cols), y.view(-1, n_cols)
    _write(out, None, x, delta, bias, scale, activation, launch or _launch_forward)
    return y


def _forward_in_place(x, delta, bias, scale, activation, save_z):
    """Write y into x. Returns z = x + scale·delta + bias, contiguous, or None."""
    z = torch.empty_like(x, memory_format=torch.contiguous_format) if save_z else None
    if x.numel() == 0:
        return z
    n_cols = x.shape[-1]
    rows = x.reshape(-1, n_cols)  # (M, N): a view of x, or a copy where strides allow none
    out = None if z is None else z.view(-1, n_cols)
    _write(rows, out, rows, delta.reshape(-1, n_cols), bias, scale, activation, _launch_forward)
    if rows.data_ptr() != x.data_ptr():
        x.copy_(rows.view_as(x))
    return z


def _write(y, z, x, delta, bias, scale, activation, launch):
    """Write y, and z unless it is None; all are (M, N), and y may be x."""
    bias = bias.contiguous()
    for fold, (y_piece, z_piece, x_piece, delta_piece) in _aligned(y, z, x, delta):
        wide = bias if fold == 1 else bias.repeat(fold)
        launch(y_piece, z_piece, x_piece, delta_piece, wide, scale, activation)


def _launch_forward(y, z, x, delta, bias, scale, activation):
    n_rows, n_cols = x.shape
    block_m, block_n = _tile(n_cols, 2048, 2048, x.dtype)  # 128 threads of one 16-byte load each
    with torch.cuda.device_of(x):  # else the launch goes to the current GPU, not to x's
        _lora_epilogue_fwd_kernel[(_cdiv(n_rows, block_m) * _cdiv(n_cols, block_n),)](
            x, delta, bias, y, z, float(scale), n_rows, n_cols,
            x.stride(0), x.stride(1), delta.stride(0), delta.stride(1), y.stride(0), y.stride(1),
            ACTIVATION=activation, COMPUTE=_compute_dtype(x.dtype),
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip


def _to_save(activation, x, delta, bias, y):
    """What the backward pass of the op out of place needs: see the table at the top."""
    if activation == "identity":
        return ()
    return (y,) if activation in ("relu", "sigmoid") else (x, delta, bias)


def _backward(dy, saved, scale, activation, wanted=(True, True, True)):
    """dx, ddelta, dbias, each None unless wanted; saved is (), (y,), (z,) or (x, delta, bias)."""
    n_cols, (has_dx, has_ddelta, has_dbias) = dy.shape[-1], wanted
    if activation == "identity":
        dx = dy if has_dx else None
    else:
        dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if has_dx else None
    ddelta = torch.empty_like(dy, memory_format=torch.contiguous_format) if has_ddelta else None
    if dy.numel() == 0:
        return dx, ddelta, dy.new_zeros(n_cols) if has_dbias else None
    saved, delta, bias = (*saved, None, None, None)[:3]
    bias = None if bias is None else bias.contiguous()
    out = None if dx is dy else dx
    if out is None and ddelta is None and not has_dbias:
        return dx, None, None
    # y.sum().backward() sends a dy of strides 0, which is read as it is
    matrices = [
        None if m is None else m.reshape(-1, n_cols) for m in (dy, saved, delta, out, ddelta)
    ]
    sums = []
    for fold, pieces in _aligned(*matrices):
        wide = bias if fold == 1 or bias is None else bias.repeat(fold)
        sums.append(_launch_backward(*pieces, wide, scale, activation, has_dbias))
    if not has_dbias:
        return dx, ddelta, None
    sums = [s.view(-1, n_cols) for s in sums]
    dbias = _sum_rows(sums[0] if len(sums) == 1 else torch.cat(sums), dy.dtype)
    return dx, ddelta, dbias


def _launch_backward(dy, saved, delta, dx, ddelta, bias, scale, activation, has_dbias):
    """Write dx and ddelta. Returns what each strip of rows adds to dbias, (strips, N), or None."""
    n_rows, n_cols = dy.shape
    read = [m for m in (dy, saved, delta) if m is not None]
    # Tall tiles, rows of 128 elements: two 16-byte loads of each tensor in flight in each of 256 threads; twice
    # as many do not fit in registers. Loads of one element are too many to keep in flight through shared
    # memory: no pipeline for them.
    aligned = _rows_to_fold(n_cols) == 1 and all(m.stride(1) == 1 for m in read)
    block_m, block_n = _tile(n_cols, 8192, 128 * dy.dtype.itemsize, dy.dtype)
    n_tiles = _cdiv(n_cols, block_n)
    # About 8192 programs fill any GPU; each sums as many rows as that leaves it, and at most 1024 strips
    # keep the second sum short.
    strips = max(1, min(_cdiv(8192, n_tiles), 1024))
    rows_per_program = _cdiv(_cdiv(n_rows, strips), block_m) * block_m
    strips = _cdiv(n_rows, rows_per_program)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    partial = torch.empty((strips, n_cols), dtype=wide, device=dy.device) if has_dbias else None
    strides = [m.stride() if m is not None else (0, 0) for m in (dy, saved, delta)]
    with torch.cuda.device_of(dy):
        _lora_epilogue_bwd_kernel[(strips * n_tiles,)](
            dy, saved, delta, bias, dx, ddelta, partial, float(scale), n_rows, n_cols,
            *strides[0], *strides[1], *strides[2], rows_per_program,
            ACTIVATION=activation, NUM_STAGES=3 if aligned else 1,
            COMPUTE=_compute_dtype(dy.dtype), BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
        )  # fmt: skip
    return partial


def _sum_rows(partial, dtype):
    """partial summed over its rows, in one launch and in a fixed order: the same bits in every run."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    with torch.cuda.device_of(partial):
        _sum_rows_kernel[(_cdiv(partial.shape[1], 32),)](
            partial, out, *partial.shape, BLOCK_M=64, BLOCK_N=32, num_warps=8
        )
    return out


def _check(name, x, delta, bias, scale, activation):
    """Raise TypeError or ValueError, saying what to do, unless x, delta are (..., N) and bias (N,) on a GPU."""
    for label, t in (("x", x), ("delta", delta), ("bias", bias)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(t).__name__}")
        if t.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: {label} must be a floating-point tensor, got {t.dtype}; use .float()"
            )
        if t.dtype != x.dtype:
            raise TypeError(
                f"{name}: x is {x.dtype} and {label} {t.dtype}; cast one of them, as {label}.to(x.dtype)"
            )
        if t.device != x.device:
            raise ValueError(
                f"{name}: x is on {x.device} and {label} on {t.device}; move both to one device"
            )
    if delta.shape != x.shape:
        raise ValueError(
            f"{name}: delta must have the shape of x, got x {tuple(x.shape)} and delta {tuple(delta.shape)}"
        )
    if x.dim() == 0 or bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: bias must have one element for each column of x (..., N), "
            f"got x {tuple(x.shape)} and bias {tuple(bias.shape)}"
        )
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale must be a Python number, got {type(scale).__name__}")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}"
        )
    if x.device.type != ("cpu" if _ON_CPU else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if _ON_CPU else "a GPU"
        raise ValueError(
            f"{name}: x must be on {where}, got {x.device}; use lora_epilogue_eager there"
        )


def _check_in_place(name, x, delta, bias):
    """Raise ValueError, saying what to do, unless x may be written while delta and bias are read."""
    if _overlaps_itself(x):
        raise ValueError(
            f"{name}: several elements of x are one in memory (strides {x.stride()}, as after expand); "
            "use lora_epilogue_triton or x.clone()"
        )
    for label, t in (("delta", delta), ("bias", bias)):
        if _may_share_memory(x, t):
            raise ValueError(f"{name}: {label} shares memory with x; pass {label}.clone()")
    base = x._base if x._is_view() else x
    if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
        raise ValueError(
            f"{name}: x is a leaf that requires grad, or a view of one, and its value would be lost; "
            "use lora_epilogue_triton, or write under torch.no_grad()"
        )


def _overlaps_itself(t):
    """Whether elements of t may be one in memory: where a step is no longer than all shorter ones together."""
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _may_share_memory(x, t):
    """Whether an element of t may be one of x. The halves of x.chunk(2, -1) are known to be apart."""
    if x.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or 0 in (
        x.numel(),
        t.numel(),
    ):
        return False
    (x_first, x_last), (t_first, t_last) = _span(x), _span(t)
    if x_last < t_first or t_last < x_first:
        return False
    if x.shape != t.shape or x.stride() != t.stride():
        return True
    # The same steps: between two rows of x there is room for the rows of t, or there is not.
    pitch, size = max(zip(x.stride(), x.shape))
    length = x_last - x_first - pitch * (size - 1)
    gap = (t_first - x_first) % pitch
    return min(gap, pitch - gap) <= length


def _span(t):
    """The places of t's first and last element in its storage."""
    first = t.storage_offset()
    return first, first + sum(s * (n - 1) for s, n in zip(t.stride(), t.shape))


def _needs_gradient(*tensors):
    """Whether autograd has to hear of this call; where not, leaving it out saves a third of the host's time."""
    # torch.func, vmap among it: autograd.Function says what of it does not work
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _LoRAEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, bias, scale, activation, forward):
        y = forward(x, delta, bias, scale, activation)
        ctx.save_for_backward(*_to_save(activation, x, delta, bias, y))
        ctx.scale, ctx.activation = scale, activation
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative raises instead of being wrong
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        return *_backward(dy, ctx.saved_tensors, ctx.scale, ctx.activation, wanted), *[None] * 3


class _LoRAEpilogueInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, bias, scale, activation, has_gradient):
        save_z = has_gradient and activation in ("gelu", "silu")
        z = _forward_in_place(x, delta, bias, scale, activation, save_z)
        ctx.mark_dirty(x)  # autograd: x has a new version, and what saved the old one raises
        y = x if activation in ("relu", "sigmoid") else z
        ctx.save_for_backward(*([] if y is None else [y]))
        ctx.scale, ctx.activation = scale, activation
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        wanted = ctx.needs_input_grad[:3]
        return *_backward(dy, ctx.saved_tensors, ctx.scale, ctx.activation, wanted), *[None] * 3


def lora_epilogue_triton(x, delta, bias, scale=1.0, activation="identity"):
    """act(x + scale·delta + bias) in one Triton kernel, with gradients for x, delta and bias.

    x, delta: (..., N), any strides; bias: (N,), all of one dtype and device; scale: a Python number;
    activation: identity, relu, gelu (tanh form), silu or sigmoid. Returns y of x's shape, contiguous.
    Works under torch.compile (as the op fused_kernels::lora_epilogue), autocast and CUDA graphs; not
    under torch.vmap, and not twice differentiable: both raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or activation.
    """
    _check("lora_epilogue_triton", x, delta, bias, scale, activation)
    if torch.compiler.is_compiling():
        return lora_epilogue_op(x, delta, bias, scale, activation)
    if not _needs_gradient(x, delta, bias):
        return _forward(x, delta, bias, scale, activation)
    return _LoRAEpilogue.apply(x, delta, bias, scale, activation, _forward)


def lora_epilogue_triton_(x, delta, bias, scale=1.0, activation="identity"):
    """lora_epilogue_triton written into x, which is returned: no memory for y, the same traffic.

    With gradients, gelu and silu save z = x + scale·delta + bias, one more tensor of x's size.
    Raises as lora_epilogue_triton, and ValueError where x must not be written: it overlaps itself, delta or
    bias in memory, or is a leaf that requires grad.
    """
    _check("lora_epilogue_triton_", x, delta, bias, scale, activation)
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (x, delta, bias))
    if torch.compiler.is_compiling():
        if (
            has_gradient
        ):  # only ops that change nothing have gradients there; the compiler drops the copies
            saves_x = activation in ("gelu", "silu")
            before = x.clone() if saves_x else x
            return x.copy_(lora_epilogue_op(before, delta, bias, scale, activation))
        lora_epilogue_op_(x, delta, bias, scale, activation)
        return x
    _check_in_place("lora_epilogue_triton_", x, delta, bias)
    return _LoRAEpilogueInPlace.apply(x, delta, bias, scale, activation, has_gradient)


@torch.library.custom_op("fused_kernels::lora_epilogue", mutates_args=())
def lora_epilogue_op(
    x: torch.Tensor,
    delta: torch.Tensor,
    bias: torch.Tensor,
    scale: float = 1.0,
    activation: str = "identity",
) -> torch.Tensor:
    """lora_epilogue for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("lora_epilogue_op", x, delta, bias, scale, activation)
    return _forward(x, delta, bias, scale, activation)


@torch.library.custom_op("fused_kernels::lora_epilogue_", mutates_args=("x",))
def lora_epilogue_op_(
    x: torch.Tensor,
    delta: torch.Tensor,
    bias: torch.Tensor,
    scale: float = 1.0,
    activation: str = "identity",
) -> None:
    """The same written into x, without a gradient."""
    _check("lora_epilogue_op_", x, delta, bias, scale, activation)
    _check_in_place("lora_epilogue_op_", x, delta, bias)
    _forward_in_place(x, delta, bias, scale, activation, save_z=False)


@torch.library.custom_op("fused_kernels::lora_epilogue_backward", mutates_args=())
def _lora_epilogue_backward_op(
    dy: torch.Tensor, saved: Sequence[torch.Tensor], scale: float, activation: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, ddelta, dbias = _backward(dy, saved, scale, activation)
    return (dx.clone() if dx is dy else dx), ddelta, dbias  # an op's result may not be its argument


@lora_epilogue_op.register_fake
def _(x, delta, bias, scale=1.0, activation="identity"):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_lora_epilogue_backward_op.register_fake
def _(dy, saved, scale, activation):
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    return dx, torch.empty_like(dx), dy.new_empty(dy.shape[-1])


def _setup_context(ctx, inputs, output):
    x, delta, bias, ctx.scale, ctx.activation = inputs
    ctx.save_for_backward(*_to_save(ctx.activation, x, delta, bias, output))


def _backward_of_op(ctx, dy):
    saved = list(ctx.saved_tensors)
    return *_lora_epilogue_backward_op(dy, saved, ctx.scale, ctx.activation), None, None


lora_epilogue_op.register_autograd(_backward_of_op, setup_context=_setup_context)


@functools.cache
def _cuda():
    """The functions of lora_epilogue.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(lora_epilogue_cuda, m) { m.def("forward", &lora_epilogue_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    load_inline(
        "lora_epilogue_cuda", cpp_sources="", cuda_sources=source, extra_cuda_cflags=["-O3"],
        is_python_module=False, no_implicit_headers=True,
    )  # fmt: skip
    return torch.ops.lora_epilogue_cuda


def _launch_cuda(y, z, x, delta, bias, scale, activation):
    x, delta = (m if m.stride(1) == 1 else m.contiguous() for m in (x, delta))  # 16 adjacent bytes
    _cuda().forward(x, delta, bias, y, scale, list(_ACTIVATIONS).index(activation))


def lora_epilogue_cuda(x, delta, bias, scale=1.0, activation="identity"):
    """act(x + scale·delta + bias) in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for lora_epilogue_triton. Needs nvcc and a C++ compiler at the first call.
    """
    _check("lora_epilogue_cuda", x, delta, bias, scale, activation)
    forward = functools.partial(_forward, launch=_launch_cuda)
    return _LoRAEpilogue.apply(x, delta, bias, scale, activation, forward)
