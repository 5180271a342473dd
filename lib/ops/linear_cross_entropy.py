# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/linear_cross_entropy.py
"""linear_cross_entropy: cross_entropy(x Wᵀ, labels), of whose logits only a chunk of rows is ever in memory.

Shapes    x: (..., K); weight: (V, K); labels: (...), int64, in [0, V) or ignore_index. The loss is a scalar, or
          (...) with reduction="none".
Dtypes    float16, bfloat16, float32 and float64. Logits are rounded to x's dtype, as F.linear rounds them; all
          that follows, and the loss, is float32 (float64 for float64).
Loss      of a row of logits l, capped to softcap·tanh(l / softcap) before: with lse = log Σ exp(l),
          lse - (1 - e)·l[label] - e·mean(l) + z_loss·lse², e = label_smoothing; 0 for a label of ignore_index.
          "mean" divides by the number of other labels, and is NaN without any, as F.cross_entropy's.
          A label out of range would end the process, or be read outside: here its row's loss is NaN, and so are
          its row of dx and all of dweight.
Memory    The logits of one chunk of rows: a quarter of them in 16 bits, an eighth in float32, but 1024 rows at
          least. PyTorch has three tensors of (N, V) in float32 at its peak, 24 times as much.
Work      6NKV FLOPs for loss and gradients, all of them cuBLAS's: the kernel between the products reads logits
          twice, and writes their gradient over them. Without logits in memory at all they would be computed
          again for dx and again for dweight: 10NKV.
Backward  For "mean" and "sum" dx and dweight are computed with the loss, and backward only multiplies them by
          the upstream gradient: in place at first; a second time (retain_graph) the logits are computed again.
          So they are for "none": 8NKV.
Rounding  A gradient in 16 bits is rounded before and after that factor: with 1/N in it it would underflow in
          float16. Rows are summed in float32, but dweight in bfloat16 chunk after chunk: four roundings at
          most, which make 1.4 times the error of one. From N = 8·K rows on it is summed in float32, whose
          memory is small beside the logits' there; in float16 always, which it might overflow. The same bits
          in every run.
Float32   products are cuBLAS's, by TF32 if torch.backends allows it, as in PyTorch.
Copy it   by `make copy OP=linear_cross_entropy TO=folder`, or take _host.py and _device.py along. MIT licence.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

if __package__:  # shared by the ops: `device` in kernels, `host` around them
    from . import _host as host
else:  # the same, in a plain folder
    import _host as host


class Plan(NamedTuple):
    """How one call is launched: rows of a chunk; the kernel's tile of a row, its warps and stages.

    wide: whether dweight is summed over the chunks in float32 where it is bfloat16. split: whether the last
    V mod 8 columns are multiplied apart.
    """

    rows: int
    wide: bool
    block_n: int
    num_warps: int
    num_stages: int = 1
    split: bool = True


class Options(NamedTuple):
    """What is computed: the arguments of linear_cross_entropy_eager."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"


def linear_cross_entropy_eager(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    logits = F.linear(x, weight).reshape(labels.numel(), len(weight))  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = labels.reshape(-1)
    losses = F.cross_entropy(
        logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss != 0.0:
        squares = logits.logsumexp(dim=1).square()
        losses = losses + z_loss * squares.masked_fill(flat == ignore_index, 0.0)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


@triton.jit
def _tanh(a):
    # By e = exp(-2|a|), which cannot overflow. Near 0, where 1 - e has lost its digits, by its series.
    e = tl.exp(-2.0 * tl.abs(a))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(a < 0, -t, t)
    if a.dtype == tl.float32:  # float64 has digits to lose
        s = a * a
        series = -0.3333333333333333 + s * (0.13333333333333333 + s * -0.05396825396825397)
        t = tl.where(s < 0.03, a + a * s * series, t)
    return t


@triton.jit
def _capped(z, SOFTCAP: tl.constexpr):
    if SOFTCAP is not None:
        z = SOFTCAP * _tanh(z / SOFTCAP)
    return z


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, scales_ptr, n_cols, pitch, ignore_index, GRADS: tl.constexpr,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # One program handles one row of logits, in tiles of BLOCK_N: n_cols numbers and, up to the pitch, a
    # multiple of 16, what memory held. Masked by the pitch, loads and stores are whole pieces of 16 bytes.
    row = tl.program_id(0).to(tl.int64)  # int64: row * pitch passes 2**31 from 4 GiB of bfloat16 on
    logits_ptr += row * pitch
    label = tl.load(labels_ptr + row)
    in_range = (label >= 0) & (label < n_cols)
    # now: below, the gradient is written over it
    of_label = tl.load(logits_ptr + label, mask=in_range, other=0.0).to(COMPUTE)
    of_label = _capped(of_label, SOFTCAP)

    top = tl.full((), -float("inf"), COMPUTE)
    total, plain = tl.zeros((BLOCK_N,), COMPUTE), tl.zeros((BLOCK_N,), COMPUTE)
    for start in tl.range(0, pitch, BLOCK_N, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        z = tl.load(logits_ptr + cols, mask=cols < pitch, other=0.0).to(COMPUTE)
        z = tl.where(cols < n_cols, _capped(z, SOFTCAP), -float("inf"))
        if SMOOTHING != 0.0:
            plain += tl.where(cols < n_cols, z, 0.0)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        # -inf alone, so far, adds nothing: exp(-inf - -inf) would be NaN
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = new_top
    total = tl.sum(total, axis=0)  # NaN, and stays so, for a row with NaN or +inf
    log_total = tl.log(total)
    lse = top + log_total

    # Not lse - of_label: a loss near 0 is the difference of large numbers, and log_total has its digits.
    loss = log_total - (1.0 - SMOOTHING) * (of_label - top)
    if SMOOTHING != 0.0:
        loss -= SMOOTHING * (tl.sum(plain, axis=0) / tl.cast(n_cols, COMPUTE) - top)
    slope = tl.full((), 1.0, COMPUTE)  # of the loss by lse
    if Z_LOSS != 0.0:
        loss += Z_LOSS * lse * lse
        slope += 2.0 * Z_LOSS * lse
    ignored = label == ignore_index
    if losses_ptr is not None:
        loss = tl.where(in_range, loss, float("nan"))
        tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))

    if GRADS:
        scale = tl.where(in_range, tl.full((), 1.0, COMPUTE), float("nan"))
        if scales_ptr is not None:
            scale *= tl.load(scales_ptr + row)
        for start in tl.range(0, pitch, BLOCK_N, num_stages=NUM_STAGES):
            cols = start + tl.arange(0, BLOCK_N)
            z = tl.load(logits_ptr + cols, mask=cols < pitch, other=0.0).to(COMPUTE)
            z = _capped(z, SOFTCAP)
            # dloss/dl = slope·softmax(l) - (1 - e) at the label - e/V, by the logit 1 - tanh² as much
            dz = tl.exp(z - top) * (slope / total)
            dz = tl.where(cols == label, dz - (1.0 - SMOOTHING), dz)
            if SMOOTHING != 0.0:
                dz -= SMOOTHING / tl.cast(n_cols, COMPUTE)
            if SOFTCAP is not None:
                t = z / SOFTCAP
                dz *= 1.0 - t * t
            # of an ignored row 0, whatever its logits are; behind the last column too, for whoever reads on
            dz = tl.where(ignored | (cols >= n_cols), 0.0, dz * scale)
            tl.store(logits_ptr + cols, dz, mask=cols < pitch)


@triton.jit
def _scale_kernel(
    x_ptr, y_ptr, scale_ptr, n_elements, COMPUTE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # One program handles BLOCK_SIZE elements of x, a gradient; y may be x.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    tl.store(y_ptr + offsets, x * tl.load(scale_ptr).to(COMPUTE), mask=mask)


# --- plan (the dispatch heuristic) and launch ----------------------------------------------------------------

_FEWEST_ROWS = 1024  # of a chunk: with fewer, reading weight again for each chunk is what its products wait for
_SCALE_BLOCK = 4096


def _dweight_dtype(dtype):
    """Of dweight until it is multiplied by the upstream gradient: in float16 it might overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


@functools.cache
def _plan(n_rows, n_cols, n_inner, dtype):
    """Chunks as large as the docstring says, of equal length up to the tiles of a product."""
    n_chunks = max(1, min(2 * dtype.itemsize, n_rows // _FEWEST_ROWS))
    rows = host.cdiv(host.cdiv(n_rows, n_chunks), 128) * 128
    wide = n_chunks > 1 and n_rows >= 8 * n_inner
    block_n = min(2048, max(16, host.power_of_2(n_cols)))
    return Plan(rows, wide, block_n, num_warps=4, num_stages=3)


def _add_product(total, a, b, beta):
    """beta·total + a b, each sum in float32 before it is rounded; beta=0: what memory held is not read."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:  # of 16 bits into float32 PyTorch has a product on a GPU alone
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _columns(n_cols, split):
    """[up to a multiple of 8, the few after]: cuBLAS wants sizes, not pitches alone, of whole 16 bytes."""
    whole = n_cols // 8 * 8 if split else n_cols
    return [slice(a, b) for a, b in ((0, whole), (whole, n_cols)) if a < b]


def _launch(plan, x, weight, labels, options, losses, dx, dweight, scales):
    """Chunk after chunk: logits by cuBLAS, their losses, their gradient in their place, its two products."""
    n_rows, n_cols = len(x), len(weight)
    pitch = host.cdiv(n_cols, 16) * 16  # rows on 16-byte boundaries, also of 50257 logits
    memory, columns = x.new_empty(min(plan.rows, n_rows), pitch), _columns(n_cols, plan.split)
    for start in range(0, n_rows, plan.rows):
        rows = slice(start, min(start + plan.rows, n_rows))
        part, logits = x[rows], memory[: rows.stop - start, :n_cols]
        for cols in columns:
            torch.mm(part, weight[cols].t(), out=logits[:, cols])
        host.run(
            _cross_entropy_kernel, (len(part),),
            (logits, labels[rows], *(t if t is None else t[rows] for t in (losses, scales))),
            n_cols, pitch, options.ignore_index, GRADS=dx is not None or dweight is not None,
            SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
            COMPUTE=host.compute_dtype(x.dtype), BLOCK_N=plan.block_n, NUM_STAGES=plan.num_stages,
            num_warps=plan.num_warps,
        )  # fmt: skip
        for cols in columns:
            if dx is not None:
                _add_product(dx[rows], logits[:, cols], weight[cols], beta=int(cols.start > 0))
            if dweight is not None:
                _add_product(dweight[cols], logits[:, cols].t(), part, beta=int(start > 0))


# --- forward and backward ------------------------------------------------------------------------------------


def _pass(x, weight, labels, options, has_losses, has_dx, has_dweight, scales=None, plan=None):
    """The losses of all rows; dx and dweight of their sum, each times its scale; None unless asked for."""
    n_rows, n_inner = labels.numel(), x.shape[-1]
    plan = plan or _plan(n_rows, weight.shape[0], n_inner, x.dtype)
    losses = x.new_empty(n_rows, dtype=host.sum_dtype(x.dtype)) if has_losses else None
    dx = x.new_empty(x.shape) if has_dx else None
    summed_in = host.sum_dtype(x.dtype) if plan.wide else _dweight_dtype(x.dtype)
    dweight = weight.new_empty(weight.shape, dtype=summed_in) if has_dweight else None
    if n_rows > 0:
        flat, flat_dx = (t if t is None else t.reshape(n_rows, n_inner) for t in (x, dx))
        inputs = host.for_cublas(flat), host.for_cublas(weight), labels.reshape(-1).contiguous()
        _launch(plan, *inputs, options, losses, flat_dx, dweight, scales)
    elif has_dweight:
        dweight.zero_()
    return losses, dx, dweight.to(_dweight_dtype(x.dtype)) if has_dweight else None


def _n_counted(labels, options):
    return (labels != options.ignore_index).sum()


def _forward(x, weight, labels, options, plan=None, has_dx=False, has_dweight=False):
    """The loss; dx and dweight of the sum of all losses, each None unless asked for."""
    losses, dx, dweight = _pass(x, weight, labels, options, True, has_dx, has_dweight, None, plan)
    if options.reduction == "none":
        return losses.view(labels.shape), dx, dweight
    total = losses.sum()
    if options.reduction == "mean":
        total = total / _n_counted(labels, options)
    return total, dx, dweight


def _scaled(t, scale, dtype, in_place):
    """scale·t in this dtype, in t's own memory if that may be."""
    # .data: whoever gets it may change it, and what was saved counts no version of that
    y = t.data if in_place and t.dtype == dtype else torch.empty_like(t, dtype=dtype)
    if t.numel() > 0:
        host.run(
            _scale_kernel, (host.cdiv(t.numel(), _SCALE_BLOCK),), (t, y, scale), t.numel(),
            COMPUTE=host.compute_dtype(dtype), BLOCK_SIZE=_SCALE_BLOCK, num_warps=8,
        )  # fmt: skip
    return y


def _save(ctx, x, weight, labels, dx, dweight, options, plan=None):
    """The gradients, if there are any yet; and what it takes to compute them again."""
    ctx.options, ctx.plan, ctx.gave_away = options, plan, False
    ctx.save_for_backward(x, weight, labels, dx, dweight)


def _backward(
    dloss, x, weight, labels, dx, dweight, options, needs_grad, plan=None, in_place=False
):
    """dx and dweight, each None unless needed; from those of the forward pass, if there are any.

    in_place: whether those may be overwritten.
    """
    scales = None
    if options.reduction == "none":
        # relative to the largest, as 1/N times a gradient of 16 bits might underflow
        largest = dloss.abs().nan_to_num(0.0, 0.0, 0.0).amax() if dloss.numel() > 0 else dloss.sum()
        scale = torch.where(largest > 0, largest, 1.0)
        scales = (dloss / scale).reshape(-1)
    elif options.reduction == "sum":
        scale = dloss
    else:
        scale = dloss / _n_counted(labels, options).clamp(min=1)
    if any(needed and g is None for g, needed in zip((dx, dweight), needs_grad)):
        _, dx, dweight = _pass(x, weight, labels, options, False, *needs_grad, scales, plan)
        in_place = True
    return tuple(
        _scaled(g, scale, x.dtype, in_place) if needed else None
        for g, needed in zip((dx, dweight), needs_grad)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, options, plan):
        has_grads = [needed and options.reduction != "none" for needed in ctx.needs_input_grad[:2]]
        loss, dx, dweight = _forward(x, weight, labels, options, plan, *has_grads)
        _save(ctx, x, weight, labels, dx, dweight, options, plan)
        return loss

    @staticmethod
    @host.once
    def backward(ctx, dloss):
        *inputs, dx, dweight = ctx.saved_tensors
        if ctx.gave_away:  # what was saved is somebody's gradient by now
            dx = dweight = None
        ctx.gave_away = True
        how = ctx.options, ctx.needs_input_grad[:2], ctx.plan
        grads = _backward(dloss, *inputs, dx, dweight, *how, in_place=True)
        return *grads, None, None, None


# --- the calls -----------------------------------------------------------------------------------------------


def _check_options(name, options):
    reductions = "mean", "sum", "none"
    if options.reduction not in reductions:
        known = ", ".join(reductions)
        raise ValueError(f"{name}: reduction must be one of {known}; got {options.reduction!r}")
    if not isinstance(options.ignore_index, host.INTS):
        use = "one that is no label, as -100, ignores none"
        raise TypeError(f"{name}: ignore_index must be an int, got {options.ignore_index!r}; {use}")
    for label in ("label_smoothing", "z_loss", "softcap"):
        number = getattr(options, label)
        if not isinstance(number, host.NUMBERS) and (label, number) != ("softcap", None):
            none = "None is no cap" if label == "softcap" else "0.0 is none"
            raise TypeError(f"{name}: {label} must be a Python number, got {number!r}; {none}")
    if not 0 <= options.label_smoothing <= 1:
        wrong = f"label_smoothing must lie in [0, 1], got {options.label_smoothing}"
        raise ValueError(f"{name}: {wrong}; 0.0 is none")
    if options.softcap is not None and not options.softcap > 0:
        wrong = f"softcap must be positive or None, got {options.softcap}"
        raise ValueError(f"{name}: {wrong}; None is no cap")


@host.remembered
def _check(name, x, weight, labels, options):
    _check_options(name, Options(*options))
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] == 0:
        raise ValueError(f"{name}: weight must be (V, K) with V > 0, got {tuple(weight.shape)}")
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"{name}: labels must be a torch.Tensor, got {type(labels).__name__}")
    if labels.dtype != torch.int64:
        wrong = f"labels must be an int64 tensor of class indices, got {labels.dtype}"
        raise TypeError(f"{name}: {wrong}; use .long()")
    if isinstance(x, torch.Tensor) and x.dim() > 0 and labels.shape != x.shape[:-1]:
        want = f"labels must be {tuple(x.shape[:-1])}, one for each row of x"
        raise ValueError(f"{name}: {want}, got shape {tuple(labels.shape)}")
    if isinstance(x, torch.Tensor) and labels.device != x.device:
        where = f"x is on {x.device} and labels on {labels.device}"
        raise ValueError(f"{name}: {where}; move both to one device")
    tensors = {"x": (x, "... K"), "weight": (weight, "V K")}
    host.check_tensors(name, "linear_cross_entropy_eager", **tensors)


def _call(name, x, weight, labels, options, plan):
    x, weight = host.autocast(x, weight)
    _check(name, x, weight, labels, tuple(options))  # a plain one: 5.0 and 5 are told apart
    if host.by_op(x, weight, labels):
        computes = torch.is_grad_enabled() and options.reduction != "none"
        has_grads = computes and x.requires_grad, computes and weight.requires_grad
        return linear_cross_entropy_op(x, weight, labels, *options, *has_grads)[0]
    return host.call(
        name, "linear_cross_entropy_eager", _LinearCrossEntropy, lambda *how: _forward(*how)[0],
        (x, weight, labels), options, plan,
    )  # fmt: skip


def linear_cross_entropy_triton(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """cross_entropy(x weightᵀ, labels), chunk of rows after chunk, with gradients for x and weight.

    x: (..., K); weight: (V, K), of x's dtype; labels: (...), int64, in [0, V) or ignore_index; any strides, on
    one device. Arguments as those of F.cross_entropy, and z_loss and softcap (None: none), numbers that are
    compiled into the kernel. Returns the loss, float32 (float64 for float64), a scalar or, of "none", (...).
    A label out of range makes its row's loss and gradients NaN.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::linear_cross_entropy), autocast (in its dtype, as
    torch's products), checkpointing and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor
    twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or argument.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _call("linear_cross_entropy_triton", x, weight, labels, options, plan)


def _flops(x, weight, labels, *options):
    has_grads = options[
        5:
    ]  # computed in the same pass; what torch leaves at its default is not among options
    return 2 * math.prod(x) * weight[0] * (1 + sum(has_grads))


def _flops_backward(dloss, x, weight, labels, dx, dweight, needs_grad, *_):
    missing = [has and grad is None for has, grad in zip(needs_grad, (dx, dweight))]
    return 2 * math.prod(x) * weight[0] * sum(missing)


@host.custom_op("fused_kernels::linear_cross_entropy", flops=_flops)
def linear_cross_entropy_op(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    has_dx: bool = False, has_dweight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """For torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns the loss and, for the backward pass, dx and dweight of the sum of all losses. Without has_dx and
    has_dweight they are empty, and the backward pass multiplies once more.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    _check("linear_cross_entropy_op", x, weight, labels, tuple(options))
    loss, *grads = _forward(x, weight, labels, options, None, has_dx, has_dweight)
    return loss, *(x.new_empty(0) if g is None else g for g in grads)


@host.custom_op("fused_kernels::linear_cross_entropy_backward", flops=_flops_backward)
def _linear_cross_entropy_backward_op(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    dx: torch.Tensor | None, dweight: torch.Tensor | None, needs_grad: list[bool], ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    grads = _backward(dloss, x, weight, labels, dx, dweight, options, needs_grad)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


@linear_cross_entropy_op.register_fake
def _(
    x, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None,
    reduction="mean", has_dx=False, has_dweight=False,
):  # fmt: skip
    # not what _pass allocates: that has losses of rows, and None in place of an empty tensor
    shape = labels.shape if reduction == "none" else ()
    dx = x.new_empty(x.shape if has_dx else 0)
    dtype = _dweight_dtype(x.dtype) if has_dweight else x.dtype
    dweight = x.new_empty(weight.shape if has_dweight else 0, dtype=dtype)
    return x.new_empty(shape, dtype=host.sum_dtype(x.dtype)), dx, dweight


@_linear_cross_entropy_backward_op.register_fake
def _(dloss, x, weight, labels, dx, dweight, needs_grad, *options):
    return tuple(
        t.new_empty(t.shape if needed else 0) for t, needed in zip((x, weight), needs_grad)
    )


def _setup_context(ctx, inputs, output):
    x, weight, labels, *options, has_dx, has_dweight = inputs
    _, dx, dweight = output
    ctx.mark_non_differentiable(dx, dweight)
    dx, dweight = dx if has_dx else None, dweight if has_dweight else None
    _save(ctx, x, weight, labels, dx, dweight, Options(*options))


@host.once
def _op_backward(ctx, dloss, *_):
    needs_grad = ctx.needs_input_grad[:2]
    grads = _linear_cross_entropy_backward_op(
        dloss, *ctx.saved_tensors, list(needs_grad), *ctx.options
    )
    return *(g if needed else None for g, needed in zip(grads, needs_grad)), *(None,) * 8


linear_cross_entropy_op.register_autograd(_op_backward, setup_context=_setup_context)
