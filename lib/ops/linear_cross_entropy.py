# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/ops/linear_cross_entropy.py
"""linear_cross_entropy: cross_entropy(x Wᵀ + b, labels); of logits only a chunk of rows is ever in memory.

Shapes    x: (..., K); weight: (V, K); labels: (...), int64, in [0, V) or ignore_index; bias and class_weight:
          (V,), or None. The loss is a scalar, or (...) with reduction="none": minus the log-probability of each
          label.
Dtypes    float16, bfloat16, float32 and float64. Logits are rounded to x's dtype, as F.linear rounds them; all
          that follows, and the loss, is float32 (float64 for float64).
Loss      of a row of logits l, capped to softcap·tanh(l / softcap) before: with lse = log Σ exp(l),
          lse - (1 - e)·l[label] - e·mean(l) + z_loss·lse², e = label_smoothing; 0 for a label of ignore_index.
          "mean" divides by the number of other labels, and is NaN without any, as F.cross_entropy's.
          With class_weight a row's loss is times the weight of its label, z_loss with it, and "mean" divides by
          the sum of these weights: they are numbers of rows, which the kernel scales gradients by.
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
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    logits = F.linear(x, weight, bias).reshape(labels.numel(), len(weight))  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = labels.reshape(-1)
    ignored, weights = flat == ignore_index, logits.new_ones(labels.numel())
    if class_weight is not None:
        class_weight = class_weight.to(logits.dtype)
        weights = class_weight[flat.clamp(0, len(weight) - 1)]
    losses = F.cross_entropy(
        logits, flat, class_weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )  # fmt: skip
    if z_loss != 0.0:
        squares = logits.logsumexp(dim=1).square()
        losses = losses + z_loss * (weights * squares).masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / weights.masked_fill(ignored, 0.0).sum()


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


def _launch(plan, x, weight, labels, bias, options, losses, dx, dweight, dbias, scales):
    """Chunk after chunk: logits by cuBLAS, their losses, their gradient in their place, its two products."""
    n_rows, n_cols = len(x), len(weight)
    pitch = host.cdiv(n_cols, 16) * 16  # rows on 16-byte boundaries, also of 50257 logits
    memory, columns = x.new_empty(min(plan.rows, n_rows), pitch), _columns(n_cols, plan.split)
    for start in range(0, n_rows, plan.rows):
        rows = slice(start, min(start + plan.rows, n_rows))
        part, logits = x[rows], memory[: rows.stop - start, :n_cols]
        for cols in columns:
            if bias is None:
                torch.mm(part, weight[cols].t(), out=logits[:, cols])
            else:
                torch.addmm(bias[cols], part, weight[cols].t(), out=logits[:, cols])
        host.run(
            _cross_entropy_kernel, (len(part),),
            (logits, labels[rows], *(t if t is None else t[rows] for t in (losses, scales))),
            n_cols, pitch, options.ignore_index, GRADS=any([g is not None for g in (dx, dweight, dbias)]),
            SMOOTHING=options.label_smoothing, Z_LOSS=options.z_loss, SOFTCAP=options.softcap,
            COMPUTE=host.compute_dtype(x.dtype), BLOCK_N=plan.block_n, NUM_STAGES=plan.num_stages,
            num_warps=plan.num_warps,
        )  # fmt: skip
        for cols in columns:
            if dx is not None:
                _add_product(dx[rows], logits[:, cols], weight[cols], beta=int(cols.start > 0))
            if dweight is not None:
                _add_product(dweight[cols], logits[:, cols].t(), part, beta=int(start > 0))
        if dbias is not None:
            dbias += logits.sum(0, dtype=dbias.dtype)


# --- forward and backward ------------------------------------------------------------------------------------


def _pass(
    x, weight, labels, bias, options, has_losses, has_dx, has_dweight, has_dbias, scales=None, plan=None
):  # fmt: skip
    """The losses of all rows; the gradients of their sum, each row times its scale; None unless asked for."""
    n_rows, n_inner = labels.numel(), x.shape[-1]
    plan = plan or _plan(n_rows, weight.shape[0], n_inner, x.dtype)
    losses = x.new_empty(n_rows, dtype=host.sum_dtype(x.dtype)) if has_losses else None
    dx = x.new_empty(x.shape) if has_dx else None
    summed_in = host.sum_dtype(x.dtype) if plan.wide else _dweight_dtype(x.dtype)
    dweight = weight.new_empty(weight.shape, dtype=summed_in) if has_dweight else None
    dbias = weight.new_zeros(len(weight), dtype=host.sum_dtype(x.dtype)) if has_dbias else None
    if n_rows > 0:
        flat, flat_dx = (t if t is None else t.reshape(n_rows, n_inner) for t in (x, dx))
        inputs = host.for_cublas(flat), host.for_cublas(weight), labels.reshape(-1).contiguous()
        bias = bias if bias is None else bias.contiguous()
        _launch(plan, *inputs, bias, options, losses, flat_dx, dweight, dbias, scales)
    elif has_dweight:
        dweight.zero_()
    return losses, dx, dweight.to(_dweight_dtype(x.dtype)) if has_dweight else None, dbias


def _n_counted(labels, options):
    return (labels != options.ignore_index).sum()


def _weights_of(labels, class_weight, options):
    """That of each row's label, (N,); of an ignored one 0. None without class_weight."""
    if class_weight is None:
        return None
    labels = labels.reshape(-1)
    weights = class_weight.to(host.sum_dtype(class_weight.dtype))
    weights = weights[labels.clamp(0, len(weights) - 1)]  # out of range the kernel makes NaN
    return weights.masked_fill(labels == options.ignore_index, 0.0)


def _relative(scales):
    """Scales of rows divided by the largest, and that one: 1/N times a gradient of 16 bits might underflow."""
    largest = scales.abs().nan_to_num(0.0, 0.0, 0.0).amax() if scales.numel() > 0 else scales.sum()
    scale = torch.where(largest > 0, largest, 1.0)
    return scales / scale, scale


def _forward(
    x, weight, labels, bias, class_weight, options, plan=None, has_dx=False, has_dweight=False, has_dbias=False
):  # fmt: skip
    """The loss; gradients of the sum of all losses by the largest class_weight; None unless asked for."""
    weights = _weights_of(labels, class_weight, options)
    scales = None if weights is None else _relative(weights)[0]
    losses, *grads = _pass(
        x, weight, labels, bias, options, True, has_dx, has_dweight, has_dbias, scales, plan
    )
    losses = losses if weights is None else losses * weights
    if options.reduction == "none":
        return losses.view(labels.shape), *grads
    total = losses.sum()
    if options.reduction == "mean":
        total = total / (_n_counted(labels, options) if weights is None else weights.sum())
    return total, *grads


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


def _save(ctx, tensors, grads, options, plan=None):
    """(x, weight, labels, bias, class_weight), to compute the gradients again; and those that there are."""
    ctx.options, ctx.plan, ctx.gave_away = options, plan, False
    ctx.save_for_backward(*tensors, *grads)


def _backward(
    dloss, x, weight, labels, bias, class_weight, dx, dweight, dbias, options, needs_grad, plan=None,
    in_place=False,
):  # fmt: skip
    """dx, dweight and dbias, each None unless needed; from those of the forward pass, if there are any.

    in_place: whether those may be overwritten.
    """
    grads, weights = (dx, dweight, dbias), _weights_of(labels, class_weight, options)
    scales, scale = None, dloss
    if options.reduction == "none":
        dlosses = dloss.reshape(-1) if weights is None else dloss.reshape(-1) * weights
        scales, scale = _relative(dlosses)
    elif weights is not None:
        scales, largest = _relative(weights)
        scale = dloss * largest
        if options.reduction == "mean":
            total = weights.sum()
            scale = scale / torch.where(total == 0, 1.0, total)
    elif options.reduction == "mean":
        scale = dloss / _n_counted(labels, options).clamp(min=1)
    if any([needed and g is None for g, needed in zip(grads, needs_grad)]):
        _, *grads = _pass(x, weight, labels, bias, options, False, *needs_grad, scales, plan)
        in_place = True
    return tuple(
        _scaled(g, scale, x.dtype, in_place) if needed else None
        for g, needed in zip(grads, needs_grad)
    )


def _trained(ctx):
    """Which of x, weight and bias need a gradient."""
    return [ctx.needs_input_grad[k] for k in (0, 1, 3)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, bias, class_weight, options, plan):
        tensors, needs_grad = (x, weight, labels, bias, class_weight), _trained(ctx)
        has_grads = [needed and options.reduction != "none" for needed in needs_grad]
        loss, *grads = _forward(*tensors, options, plan, *has_grads)
        _save(ctx, tensors, grads, options, plan)
        return loss

    @staticmethod
    @host.once
    def backward(ctx, dloss):
        *tensors, dx, dweight, dbias = ctx.saved_tensors
        if ctx.gave_away:  # what was saved is somebody's gradient by now
            dx = dweight = dbias = None
        ctx.gave_away = True
        how = ctx.options, _trained(ctx), ctx.plan
        dx, dweight, dbias = _backward(dloss, *tensors, dx, dweight, dbias, *how, in_place=True)
        return dx, dweight, None, dbias, None, None, None


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


@host.remembered
def _check_columns(name, x, weight, bias, class_weight, label_smoothing):
    eager, rows = "linear_cross_entropy_eager", {"x": (x, "... K"), "weight": (weight, "V K")}
    if bias is not None:
        host.check_tensors(name, eager, **rows, bias=(bias, "V"))
    if class_weight is None:
        return
    host.check_tensors(name, eager, host.MIXED, **rows, class_weight=(class_weight, "V"))
    if label_smoothing != 0.0:
        parts = (
            "label_smoothing takes a part of each class, and class_weight is known of labels alone"
        )
        raise ValueError(f"{name}: {parts}; use one of them, or {eager}")


def _check_frozen(name, class_weight):
    """Raise ValueError where it is trained: F.cross_entropy has no gradient of it either."""
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: class_weight has no gradient; pass class_weight.detach()")


def _call(name, x, weight, labels, bias, class_weight, options, plan):
    x, weight, bias = host.autocast(x, weight, bias)
    plain = tuple(options)  # in which 5.0 and 5 are told apart
    goes_by_op = _check(name, x, weight, labels, plain)
    if bias is not None or class_weight is not None:
        columns = bias, class_weight, options.label_smoothing
        goes_by_op = _check_columns(name, x, weight, *columns) or goes_by_op
        _check_frozen(name, class_weight)
    if goes_by_op:
        computes = torch.is_grad_enabled() and options.reduction != "none"
        has_grads = [t is not None and computes and t.requires_grad for t in (x, weight, bias)]
        how = *options, *has_grads[:2], bias, class_weight, has_grads[2]
        return linear_cross_entropy_op(x, weight, labels, *how)[0]
    return host.call(
        name, "linear_cross_entropy_eager", _LinearCrossEntropy, lambda *how: _forward(*how)[0],
        (x, weight, labels, bias, class_weight), options, plan,
    )  # fmt: skip


def linear_cross_entropy_triton(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean", plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """cross_entropy(x weightᵀ + bias, labels), chunk after chunk, with gradients for x, weight and bias.

    x: (..., K); weight: (V, K) and bias: (V,), of x's dtype; labels: (...), int64, in [0, V) or ignore_index;
    class_weight: (V,), F.cross_entropy's weight, which has no gradient and excludes label_smoothing; any
    strides, on one device. Arguments as those of F.cross_entropy, and z_loss and softcap (None: none), numbers
    that are compiled into the kernel. Returns the loss, float32 (float64 for float64), a scalar or, of "none",
    (...): minus the log-probability of each label, without class_weight and z_loss, gradients included.
    A label out of range makes its row's loss and gradients NaN.
    plan: a Plan in place of the one chosen, for tuning; torch.compile leaves it out.
    Works under torch.compile (as the op fused_kernels::linear_cross_entropy), autocast (in its dtype, as
    torch's products), checkpointing and CUDA graphs; not under torch.func, torch.vmap or forward-mode AD, nor
    twice differentiable: these raise.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or argument.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _call(
        "linear_cross_entropy_triton", x, weight, labels, bias, class_weight, options, plan
    )


def _flops(x, weight, labels, *options):
    # gradients computed in the same pass; what torch leaves at its default is not among options
    return 2 * math.prod(x) * weight[0] * (1 + sum(options[5:7]))


def _flops_backward(dloss, x, weight, labels, dx, dweight, needs_grad, *_):
    missing = [has and grad is None for has, grad in zip(needs_grad, (dx, dweight))]
    return 2 * math.prod(x) * weight[0] * sum(missing)


@host.custom_op("fused_kernels::linear_cross_entropy", flops=_flops)
def linear_cross_entropy_op(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    has_dx: bool = False, has_dweight: bool = False, bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None, has_dbias: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """For torch.compile and torch.export: one node of the graph, which nothing looks into.

    Returns the loss and, for the backward pass, dx, dweight and dbias of the sum of all losses. Without has_dx,
    has_dweight and has_dbias they are empty, and the backward pass multiplies once more.
    """
    name, options = (
        "linear_cross_entropy_op",
        (ignore_index, label_smoothing, z_loss, softcap, reduction),
    )
    _check(name, x, weight, labels, options)
    _check_columns(name, x, weight, bias, class_weight, label_smoothing)
    _check_frozen(name, class_weight)
    has_grads = has_dx, has_dweight, has_dbias
    tensors = x, weight, labels, bias, class_weight
    loss, *grads = _forward(*tensors, Options(*options), None, *has_grads)
    return loss, *host.none_as_empty(x, grads)


@host.custom_op("fused_kernels::linear_cross_entropy_backward", flops=_flops_backward)
def _linear_cross_entropy_backward_op(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor,
    dx: torch.Tensor | None, dweight: torch.Tensor | None, needs_grad: list[bool], ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, reduction: str,
    bias: torch.Tensor | None, class_weight: torch.Tensor | None, dbias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    tensors, grads = (x, weight, labels, bias, class_weight), (dx, dweight, dbias)
    return host.none_as_empty(x, _backward(dloss, *tensors, *grads, options, needs_grad))


@linear_cross_entropy_op.register_fake
def _(
    x, weight, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None,
    reduction="mean", has_dx=False, has_dweight=False, bias=None, class_weight=None, has_dbias=False,
):  # fmt: skip
    # not what _pass allocates: that has losses of rows, and None in place of an empty tensor
    shape, wide = labels.shape if reduction == "none" else (), host.sum_dtype(x.dtype)
    dx = x.new_empty(x.shape if has_dx else 0)
    dtype = _dweight_dtype(x.dtype) if has_dweight else x.dtype
    dweight = x.new_empty(weight.shape if has_dweight else 0, dtype=dtype)
    dbias = x.new_empty(weight.shape[0], dtype=wide) if has_dbias else x.new_empty(0)
    return x.new_empty(shape, dtype=wide), dx, dweight, dbias


@_linear_cross_entropy_backward_op.register_fake
def _(
    dloss, x, weight, labels, dx, dweight, needs_grad, ignore_index, label_smoothing, z_loss, softcap,
    reduction, bias, class_weight, dbias,
):  # fmt: skip
    shapes = x.shape, weight.shape, weight.shape[:1]
    return tuple(x.new_empty(shape if needed else 0) for shape, needed in zip(shapes, needs_grad))


def _setup_context(ctx, inputs, output):
    x, weight, labels, *options, has_dx, has_dweight, bias, class_weight, has_dbias = inputs
    _, *grads = output
    ctx.mark_non_differentiable(*grads)
    grads = [g if has else None for g, has in zip(grads, (has_dx, has_dweight, has_dbias))]
    _save(ctx, (x, weight, labels, bias, class_weight), grads, Options(*options))


@host.once
def _op_backward(ctx, dloss, *_):
    x, weight, labels, bias, class_weight, dx, dweight, dbias = ctx.saved_tensors
    # torch leaves out the last arguments, if they have their defaults
    needs_grad = [*ctx.needs_input_grad[:2], any(ctx.needs_input_grad[10:11])]
    grads = _linear_cross_entropy_backward_op(
        dloss, x, weight, labels, dx, dweight, needs_grad, *ctx.options, bias, class_weight, dbias
    )
    dx, dweight, dbias = (g if needed else None for g, needed in zip(grads, needs_grad))
    return dx, dweight, *(None,) * 8, dbias, None, None


linear_cross_entropy_op.register_autograd(_op_backward, setup_context=_setup_context)
