"""Candidates for linear_cross_entropy in bfloat16, as changes of lib/ops/linear_cross_entropy.py while they run.

folded   1/N of "mean" goes into the row kernel, by the scales of rows that it takes already; backward multiplies
         by the upstream gradient alone, and does not touch memory where that is 1. In float16 it would underflow.
beside   dx's product on a second stream beside dweight's: alone it has fewer tiles than the GPU has SMs.
parts    dx's product in parts of V, as a batch: more tiles; the parts are added up in float32.
"""

import contextlib
import functools
from unittest import mock

from lib.ops import _host as host
from lib.ops import linear_cross_entropy as lce

import torch
import triton
import triton.language as tl


@triton.jit
def scale_unless_one_kernel(
    x_ptr, scale_ptr, n_elements, COMPUTE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # One program handles every num_programs-th block of x, a gradient, in place; none where the factor is 1.
    scale = tl.load(scale_ptr).to(COMPUTE)
    if scale != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
        for start in range(first, n_elements, tl.num_programs(0) * BLOCK_SIZE):
            offsets = start + tl.arange(0, BLOCK_SIZE)
            mask = offsets < n_elements
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
            tl.store(x_ptr + offsets, x * scale, mask=mask)


def is_folded(x, options, class_weight):
    return options.reduction == "mean" and class_weight is None and x.dtype != torch.float16


def forward_folded(
    x, weight, labels, bias, class_weight, options, plan=None, has_dx=False, has_dweight=False, has_dbias=False
):  # fmt: skip
    if not is_folded(x, options, class_weight):
        return OLD_FORWARD(
            x, weight, labels, bias, class_weight, options, plan, has_dx, has_dweight, has_dbias
        )
    n_counted = lce._n_counted(labels, options)
    share = (1.0 / n_counted.clamp(min=1)).to(host.sum_dtype(x.dtype))
    scales = share.expand(labels.numel()).contiguous()
    losses, *grads = lce._pass(
        x, weight, labels, bias, options, True, has_dx, has_dweight, has_dbias, scales, plan
    )
    return losses.sum() / n_counted, *grads


def backward_folded(
    dloss, x, weight, labels, bias, class_weight, dx, dweight, dbias, options, needs_grad, plan=None,
    in_place=False,
):  # fmt: skip
    grads = dx, dweight, dbias
    computed = all(g is not None for g, needed in zip(grads, needs_grad) if needed)
    if not is_folded(x, options, class_weight) or not computed or not in_place:
        raise AssertionError("this candidate is for one backward pass of mean")
    return tuple(
        scaled(g, dloss, x.dtype) if needed else None for g, needed in zip(grads, needs_grad)
    )


def scaled(t, scale, dtype):
    if t.dtype != dtype:  # dbias, in float32 until here
        return lce._scaled(t, scale, dtype, False)
    y = t.data
    grid = (min(host.cdiv(t.numel(), 4096), 8 * host.n_multiprocessors(t.device)),)
    host.run(
        scale_unless_one_kernel, grid, (y, scale), t.numel(), COMPUTE=host.compute_dtype(dtype),
        BLOCK_SIZE=4096, num_warps=8,
    )  # fmt: skip
    return y


@functools.cache
def side_stream(gpu):
    return torch.cuda.Stream(gpu)


def product_beside(total, a, b, beta, fork):
    """_add_product of dx on the second stream; of dweight, which comes next, on this one, and both meet."""
    side = side_stream(total.device)
    if fork:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            OLD_PRODUCT(total, a, b, beta)
    else:
        OLD_PRODUCT(total, a, b, beta)
        torch.cuda.current_stream().wait_stream(side)


def product_in_parts(n_parts, total, a, b, beta):
    """dx = sum over parts of V of a's columns times b's rows."""
    n_rows, n_cols = a.shape
    if beta or n_cols % n_parts:
        return OLD_PRODUCT(total, a, b, beta)
    left = a.unflatten(1, (n_parts, n_cols // n_parts)).transpose(0, 1)  # (parts, rows, V / parts)
    right = b.unflatten(0, (n_parts, n_cols // n_parts))
    if a.is_cuda:
        both = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        both = torch.bmm(left.float(), right.float())
    total.copy_(both.sum(0))


OLD_FORWARD, OLD_BACKWARD, OLD_PRODUCT = lce._forward, lce._backward, lce._add_product


def is_dx(a, b):
    return a.stride(1) == 1  # logits as they are; of dweight they are turned


@contextlib.contextmanager
def candidate(names):
    """Within it linear_cross_entropy_triton is the candidate: any of "folded", "beside", "parts8"."""
    changes = {}
    if "folded" in names:
        changes |= {"_forward": forward_folded, "_backward": backward_folded}
    parts = next((int(n.removeprefix("parts")) for n in names if n.startswith("parts")), None)
    if "beside" in names and parts:
        raise ValueError("one of them")
    if "beside" in names:
        changes["_add_product"] = lambda t, a, b, beta: product_beside(t, a, b, beta, is_dx(a, b))
    if parts:
        changes["_add_product"] = lambda t, a, b, beta: (
            product_in_parts(parts, t, a, b, beta) if is_dx(a, b) else OLD_PRODUCT(t, a, b, beta)
        )
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(lce, name, value))
        yield
