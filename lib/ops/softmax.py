"""softmax: y = exp(x - max) / sum over the last dimension, one pass over memory instead of five.

Shapes    x, y: (..., N) of any rank, any strides; y contiguous.
Dtypes    float32, float16, bfloat16 (computed in float32) and float64.
Traffic   M rows of N elements of s bytes. Forward 2MNs, written by hand in PyTorch 8MNs; backward 3MNs.
Design    A row that fits on the chip stays in registers between its sum and its quotients: it is read once.
          Longer rows are cut into parts, each held by a program of its own; the parts of a row exchange maximum
          and sum through memory and wait for each other, so they too are read once.
          Rows that do not begin on a 16-byte boundary are read in whole 16-byte pieces, and at their two ends
          element by element.
Backward  dx = y · (dy - sum(y · dy)). Saves y only.
Copy it   this file for Triton; softmax.cu beside it for CUDA. MIT licence.
"""

import functools
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# With TRITON_INTERPRET=1 kernels run on CPU tensors; otherwise they need a GPU.
_ON_CPU = triton.knobs.runtime.interpret
_INTERPRETED = tl.constexpr(_ON_CPU)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LONGEST_TILE = 32768


def softmax_eager(x):
    return torch.softmax(x, dim=-1)


@triton.jit
def _exp(x):
    # One approximate instruction, which makes 0 of results below 1e-38: tl.exp keeps those, at the price of
    # three instructions an element more. Triton's interpreter has no libdevice.
    return tl.exp(x) if x.dtype == tl.float64 or _INTERPRETED else libdevice.fast_expf(x)


@triton.jit
def _row_max(x):
    # Of one row a scalar: so its ends need not be laid out as its middle is, where 8 threads would hold each.
    return tl.max(x) if x.shape[0] == 1 else tl.max(x, axis=1)[:, None]


@triton.jit
def _row_sum(x):
    return tl.sum(x) if x.shape[0] == 1 else tl.sum(x, axis=1)[:, None]


@triton.jit
def _pieces(starts, cols, inside, n_cols, V: tl.constexpr):
    # For rows that begin anywhere: which of `cols`, counted from the last 16-byte boundary before a row, lie
    # in 16-byte pieces of V elements that are the row's own, so that their mask is the same for all V and
    # one load takes them; and which columns are left at the row's two ends, (BLOCK_M, 32), to be loaded alone.
    shift = (starts % V).to(tl.int32)
    end = tl.where(inside, shift + n_cols, 0)
    piece = cols // V * V
    whole = (piece >= shift) & (piece + V <= end)
    lane, last = tl.arange(0, 32)[None, :], end // V * V
    end_cols = tl.where(lane < V, lane, last + lane - V)
    end_piece = end_cols // V * V
    at_ends = (lane < tl.where(last != 0, 2 * V, V)) & (end_cols >= shift) & (end_cols < end)
    return whole, at_ends & ((end_piece < shift) | (end_piece + V > end)), end_cols


@triton.jit
def _forward_rows(
    x_ptr, y_ptr, first_row, n_rows, n_cols, stride_xm, WHOLE_PIECES: tl.constexpr,
    COMPUTE: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # BLOCK_M whole rows, padded to BLOCK_N.
    rows = (first_row + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    inside = rows < n_rows
    cols = tl.arange(0, BLOCK_N)[None, :]
    if WHOLE_PIECES:
        base = rows * n_cols // V * V
        mask, at_ends, end_cols = _pieces(rows * n_cols, cols, inside, n_cols, V)
        x_offsets, y_offsets = base + cols, base + cols
        ends = tl.load(x_ptr + base + end_cols, mask=at_ends, other=-float("inf")).to(COMPUTE)
    else:
        mask = inside & (cols < n_cols)
        x_offsets, y_offsets = rows * stride_xm + cols, rows * n_cols + cols
    x = tl.load(x_ptr + x_offsets, mask=mask, other=-float("inf")).to(COMPUTE)
    top = _row_max(x)
    if WHOLE_PIECES:
        top = tl.maximum(top, _row_max(ends))
    # NaN, +inf, a row of -inf: x - top is NaN somewhere, so the sum is, so the whole row is, as in torch
    numerator = _exp(x - top)
    total = _row_sum(numerator)
    if WHOLE_PIECES:
        end_numerator = _exp(ends - top)
        total += _row_sum(end_numerator)
        tl.store(y_ptr + base + end_cols, end_numerator * (1.0 / total), mask=at_ends)
    tl.store(y_ptr + y_offsets, numerator * (1.0 / total), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_programs"])
def _softmax_fwd_kernel(
    x_ptr, y_ptr, n_rows, n_cols, stride_xm, n_programs, NUM_STAGES: tl.constexpr,
    WHOLE_PIECES: tl.constexpr, COMPUTE: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows; with stages it takes rows n_programs apart, the next ones under way.
    if NUM_STAGES == 0:
        first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
        _forward_rows(x_ptr, y_ptr, first_row, n_rows, n_cols, stride_xm, WHOLE_PIECES, COMPUTE, V,
                      BLOCK_M, BLOCK_N)  # fmt: skip
    else:
        for row in tl.range(tl.program_id(0), n_rows, n_programs, num_stages=NUM_STAGES):
            _forward_rows(x_ptr, y_ptr, tl.cast(row, tl.int64), n_rows, n_cols, stride_xm,
                          WHOLE_PIECES, COMPUTE, V, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, n_cols, stride_dym, WHOLE_PIECES: tl.constexpr,
    COMPUTE: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M whole rows, padded to BLOCK_N.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = (first_row + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    inside = rows < n_rows
    cols = tl.arange(0, BLOCK_N)[None, :]
    if WHOLE_PIECES:
        base = rows * n_cols // V * V
        mask, at_ends, end_cols = _pieces(rows * n_cols, cols, inside, n_cols, V)
        dy_offsets, y_offsets = base + cols, base + cols
        end_dy = tl.load(dy_ptr + base + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
        end_y = tl.load(y_ptr + base + end_cols, mask=at_ends, other=0.0).to(COMPUTE)
    else:
        mask = inside & (cols < n_cols)
        dy_offsets, y_offsets = rows * stride_dym + cols, rows * n_cols + cols
    dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(y_ptr + y_offsets, mask=mask, other=0.0).to(COMPUTE)
    total = _row_sum(y * dy)
    if WHOLE_PIECES:
        total += _row_sum(end_y * end_dy)
        tl.store(dx_ptr + base + end_cols, end_y * (end_dy - total), mask=at_ends)
    tl.store(dx_ptr + y_offsets, y * (dy - total), mask=mask)


@triton.jit
def _ticket(counters_ptr, n_parts, PHASE: tl.constexpr):
    # Row and part of this program. Not by program_id: tickets go out in the order in which programs start, so
    # those that a program waits for have started too, or will once the programs before them have ended.
    ticket = tl.program_id(0)
    if PHASE == 0:
        ticket = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    return (ticket // n_parts).to(tl.int64), ticket % n_parts


@triton.jit
def _wait_for_all(counter_ptr, n_parts):
    # acq_rel: what the others have stored before they arrived is seen after
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while arrived < n_parts:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire")


@triton.jit
def _put(stats, part, top, total, COMPUTE: tl.constexpr):
    # Maximum and sum of a part: two float32 in one word of 64 bits, two float64 in two.
    if COMPUTE == tl.float32:  # noqa: SIM300
        high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(stats + 2 * part, high | total.to(tl.uint32, bitcast=True).to(tl.int64))
    else:
        tl.store(stats + 2 * part, top.to(tl.int64, bitcast=True))
        tl.store(stats + 2 * part + 1, total.to(tl.int64, bitcast=True))


@triton.jit
def _get(stats, parts, mask, COMPUTE: tl.constexpr):
    # .cg: from L2, where the other programs have put them
    word = tl.load(stats + 2 * parts, mask=mask, other=0, cache_modifier=".cg")
    if COMPUTE == tl.float32:  # noqa: SIM300
        top = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        total = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        top = word.to(tl.float64, bitcast=True)
        word = tl.load(stats + 2 * parts + 1, mask=mask, other=0, cache_modifier=".cg")
        total = word.to(tl.float64, bitcast=True)
    return tl.where(mask, top, -float("inf")), total


@triton.jit(do_not_specialize=["n_parts"])
def _softmax_parts_fwd_kernel(
    x_ptr, y_ptr, counters_ptr, stats_ptr, n_cols, stride_xm, n_parts, PHASE: tl.constexpr,
    COMPUTE: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles one part of a row, (1, BLOCK_N). Phase 0 is all of it; the interpreter, where programs
    # run in turn and cannot wait for each other, runs phase 1 up to the waiting and then phase 2.
    row, part = _ticket(counters_ptr, n_parts, PHASE)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * stride_xm + cols, mask=mask, other=-float("inf")).to(COMPUTE)
    top = tl.max(x, axis=0)
    # a part of -inf alone adds nothing, and exp(-inf - -inf) would be NaN
    numerator = _exp(x - tl.where(top == -float("inf"), 0.0, top))
    stats = stats_ptr + 2 * row * n_parts
    if PHASE != 2:
        _put(stats, part, top, tl.sum(numerator, axis=0), COMPUTE)
    if PHASE == 0:
        _wait_for_all(counters_ptr + 1 + row, n_parts)
    if PHASE != 1:
        ids = tl.arange(0, PARTS)
        tops, sums = _get(stats, ids, ids < n_parts, COMPUTE)
        row_top = tl.max(tops, axis=0)
        total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(tops - row_top)), axis=0)
        # 0 / 0 for a row of -inf: NaN, as in torch. A part of -inf in another row has zeros, not 0 · NaN
        scale = tl.where(top == -float("inf"), 1.0, tl.exp(top - row_top)) / total
        tl.store(y_ptr + row * n_cols + cols, numerator * scale, mask=mask)


@triton.jit(do_not_specialize=["n_parts"])
def _softmax_parts_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, counters_ptr, stats_ptr, n_cols, stride_dym, n_parts,
    PHASE: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # One program handles one part of a row, (1, BLOCK_N), in phases as forward.
    row, part = _ticket(counters_ptr, n_parts, PHASE)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * stride_dym + cols, mask=mask, other=0.0).to(COMPUTE)
    y = tl.load(y_ptr + row * n_cols + cols, mask=mask, other=0.0).to(COMPUTE)
    stats = stats_ptr + row * n_parts
    if PHASE != 2:
        tl.store(stats + part, tl.sum(y * dy, axis=0))
    if PHASE == 0:
        _wait_for_all(counters_ptr + 1 + row, n_parts)
    if PHASE != 1:
        ids = tl.arange(0, PARTS)
        sums = tl.load(stats + ids, mask=ids < n_parts, other=0.0, cache_modifier=".cg")
        dx = y * (dy - tl.sum(sums, axis=0))
        tl.store(dx_ptr + row * n_cols + cols, dx, mask=mask)


def _cdiv(a, b):
    return -(-a // b)  # triton.cdiv is the same, and costs 2 µs a call on the host


def _power_of_2(n):
    return 1 << max(0, n - 1).bit_length()  # so is triton.next_power_of_2


def _compute_dtype(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


@functools.cache
def _multiprocessors(device):
    """How many the GPU has, and the bytes of shared memory that a program can have in one."""
    if _ON_CPU:
        return 4, 2**18
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


@functools.cache
def _row_tile(n_cols, itemsize, contiguous):
    """(constexprs of a tile of whole rows, num_warps) for rows of n_cols elements."""
    v = 16 // itemsize
    # 16 elements rather than 16 bytes: only of multiples of 16 does Triton know that masks leave loads whole
    whole_pieces = n_cols % 16 != 0 and contiguous and n_cols > 2 * v
    width = _power_of_2(n_cols + (v - 1 if whole_pieces else 0))
    if width <= 512:
        block_m, num_warps = max(1, 1024 // width), 4
    elif width <= 2048:  # few warps: then a row's sum needs no shared memory, or little
        block_m, num_warps = 1, 4 if itemsize >= 4 else 1 if whole_pieces else 2
    else:
        block_m, num_warps = 1, min(32, max(4, width * itemsize // 1024))  # two loads a thread
    tile = {"WHOLE_PIECES": whole_pieces, "V": v, "BLOCK_M": block_m, "BLOCK_N": width}
    return tile, num_warps


def _forward(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    n_cols = x.shape[-1]
    out = y.view(-1, n_cols)
    _launch_forward(_rows_side_by_side(x.reshape(-1, n_cols)), out)
    return y


def _rows_side_by_side(x):
    """x, (M, N), itself where the elements of a row follow each other; else a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _launch_forward(x, y):
    n_rows, n_cols = x.shape
    compute = _compute_dtype(x.dtype)
    with torch.cuda.device_of(x):  # else the launch goes to the current GPU, not to x's
        tile, num_warps = _row_tile(n_cols, x.itemsize, x.is_contiguous())
        if tile["BLOCK_N"] > _LONGEST_TILE:
            grid, memory, tile = _parts(n_rows, n_cols, x.device, 2, torch.int64)
            for phase in _phases():
                _softmax_parts_fwd_kernel[grid](
                    x, y, *memory, n_cols, x.stride(0), PHASE=phase, COMPUTE=compute, **tile, num_warps=8,
                )  # fmt: skip
            return
        programs, stages = _cdiv(n_rows, tile["BLOCK_M"]), 0
        count, shared_bytes = _multiprocessors(x.device)
        if n_cols > 16384 and x.itemsize == 2 and shared_bytes >= 2 * 65536 + 1024:
            # One program fills a multiprocessor: two more rows, which it waits for, have to be on their way.
            programs, stages, num_warps = min(n_rows, count), 3, 16
        _softmax_fwd_kernel[(programs,)](
            x, y, n_rows, n_cols, x.stride(0), programs, NUM_STAGES=stages, COMPUTE=compute, **tile,
            num_warps=num_warps,
        )  # fmt: skip


def _backward(dy, y):
    n_cols = y.shape[-1]
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return dx
    # y.sum().backward() sends a dy of strides 0: copied, as rows are read side by side
    dy = _rows_side_by_side(dy.reshape(-1, n_cols))
    _launch_backward(dy, y.view(-1, n_cols), dx.view(-1, n_cols))
    return dx


def _launch_backward(dy, y, dx):
    n_rows, n_cols = y.shape
    compute = _compute_dtype(y.dtype)
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    with torch.cuda.device_of(y):
        tile, num_warps = _row_tile(n_cols, y.itemsize, dy.is_contiguous())
        if tile["BLOCK_N"] * y.itemsize > 65536:  # two tensors to hold, not one
            grid, memory, tile = _parts(n_rows, n_cols, y.device, 1, wide)
            for phase in _phases():
                _softmax_parts_bwd_kernel[grid](
                    dy, y, dx, *memory, n_cols, dy.stride(0), PHASE=phase, COMPUTE=compute,
                    **tile, num_warps=8,
                )  # fmt: skip
            return
        _softmax_bwd_kernel[(_cdiv(n_rows, tile["BLOCK_M"]),)](
            dy, y, dx, n_rows, n_cols, dy.stride(0), COMPUTE=compute, **tile, num_warps=num_warps
        )


def _phases():
    return (1, 2) if triton.knobs.runtime.interpret else (0,)


def _parts(n_rows, n_cols, device, n_stats, stats_dtype):
    """Grid, scratch memory (n_stats words for each part) and sizes for rows cut into parts.

    All parts of a row have to be on the GPU at the same time: at most 64, of 256 threads each, always are.
    """
    block_n = max(8192, _power_of_2(_cdiv(n_cols, 64)))
    n_parts = _cdiv(n_cols, block_n)
    counters = torch.zeros(n_rows + 1, dtype=torch.int32, device=device)
    memory = counters, torch.empty(n_rows * n_parts * n_stats, dtype=stats_dtype, device=device)
    sizes = {"n_parts": n_parts, "PARTS": _power_of_2(n_parts), "BLOCK_N": block_n}
    return (n_rows * n_parts,), memory, sizes


def _check(name, x):
    """Raise TypeError or ValueError, saying what to do, unless x is (..., N) on a GPU."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: x must be a floating-point tensor, got {x.dtype}; use .float()")
    if x.dim() == 0:
        raise ValueError(f"{name}: x must have at least one dimension, got a scalar; use x.view(1)")
    if x.device.type != ("cpu" if _ON_CPU else "cuda"):
        where = "the CPU (TRITON_INTERPRET=1 is set)" if _ON_CPU else "a GPU"
        raise ValueError(f"{name}: x must be on {where}, got {x.device}; use softmax_eager there")


def _needs_gradient(*tensors):
    """Whether autograd has to hear of this call; where not, leaving it out saves a third of the host's time."""
    # torch.func, vmap among it: autograd.Function says what of it does not work
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward):
        y = forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable  # a second derivative raises instead of being wrong
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return _backward(dy, y), None


def softmax_triton(x):
    """softmax over the last dimension in one Triton kernel, with its gradient.

    x: (..., N), any strides. Returns y of x's shape, contiguous. Rows with NaN or +inf, and rows of -inf alone,
    are NaN, as in torch. Works under torch.compile (as the op fused_kernels::softmax), autocast (in x's dtype)
    and CUDA graphs; not under torch.vmap, and not twice differentiable: both raise.
    Raises TypeError for a wrong dtype, ValueError for a scalar or a wrong device.
    """
    _check("softmax_triton", x)
    if torch.compiler.is_compiling():
        return softmax_op(x)
    if not _needs_gradient(x):
        return _forward(x)
    return _Softmax.apply(x, _forward)


@torch.library.custom_op("fused_kernels::softmax", mutates_args=())
def softmax_op(x: torch.Tensor) -> torch.Tensor:
    """softmax for torch.compile and torch.export: one node of the graph, which nothing looks into."""
    _check("softmax_op", x)
    return _forward(x)


@torch.library.custom_op("fused_kernels::softmax_backward", mutates_args=())
def _softmax_backward_op(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _backward(dy, y)


@softmax_op.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_softmax_backward_op.register_fake
def _(dy, y):
    return torch.empty_like(y)


softmax_op.register_autograd(
    lambda ctx, dy: _softmax_backward_op(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@functools.cache
def _cuda():
    """The functions of softmax.cu, compiled at the first call (half a minute, then cached on disk)."""
    from torch.utils.cpp_extension import load_inline

    binding = 'TORCH_LIBRARY(softmax_cuda, m) { m.def("forward", &softmax_forward); }'
    source = Path(__file__).with_suffix(".cu").read_text() + binding
    load_inline(
        "softmax_cuda", cpp_sources="", cuda_sources=source, is_python_module=False,
        extra_cuda_cflags=["-O3", "-ftz=true"],  # results below 1e-38 are 0, and exp is one instruction
        no_implicit_headers=True,
    )  # fmt: skip
    return torch.ops.softmax_cuda


def _cuda_forward(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        n_cols = x.shape[-1]
        _cuda().forward(_rows_side_by_side(x.reshape(-1, n_cols)), y.view(-1, n_cols))
    return y


def softmax_cuda(x):
    """softmax over the last dimension in one CUDA kernel; the gradient comes from the Triton kernel.

    Shapes, dtypes and errors as for softmax_triton. Needs nvcc and a C++ compiler at the first call.
    """
    _check("softmax_cuda", x)
    return _Softmax.apply(x, _cuda_forward)
