# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/measure/check.py
"""Check a version of an op against the eager definition computed in float64.

Every output and every gradient must pass two rules. Both take their tolerance from the error that the eager
definition makes in the same dtype.

Largest error: at most twice eager's, plus 1e-6 of the largest value (or of 1, if that is more), because a
float32 sum in another order changes that much. Eager's error counts as at least one unit in the last place of
the largest value, because eager may be exact by luck where there are few elements.

Typical error: the median of a row or of a column is at most four times eager's there (or in eager's median row,
if that is more), plus 1e-6 of the largest value. Eager's error counts as at least half a unit in the last place
of the element. The rule leaves out zeros that should be zeros, rows of fewer than 32 other elements, and
tensors whose largest value is below eager's largest error, where everything is rounding. A sign that flips
before a product spoils a whole row, and each version flips other signs. So where eager has such rows, a version
may have three times as many, plus three.

The largest error alone is not enough. Where eager's rounding flips the sign of one sum before a relu, its error
is a whole gradient, and a version that returns zeros is no worse. A median ignores one element, whereas a
forgotten bias, a missing scale or small entries cut off change every element by more than rounding does.

NaN and infinities must be where eager has them, in the same dtype or in float64.
"""

import dataclasses
import math

import torch

# Rows and columns with fewer elements have no typical error: eager's may be 0 by luck.
_FEWEST = 32
_ENOUGH = 256  # the median of a longer one is that of some 256 to 512 elements, evenly spread
# From this many units in the last place of the largest value, the report explains eager's largest error.
_MANY_UNITS = 16


class CheckError(AssertionError):
    """A version differs from the float64 definition by more than the rules allow."""


class Changed(CheckError):
    """A version wrote into a tensor that it was given."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What was compared: the largest errors against float64, of the version and of eager.

    eager_units: eager's error in units in the last place of the largest value, at most over what was compared.
    """

    name: str
    version_error: float
    eager_error: float
    eager_units: float = 0.0

    def __str__(self):
        own = f"eager's own {self.eager_error:.1e}"
        if self.eager_units >= _MANY_UNITS:
            own += f", {self.eager_units:.0f} units in the last place: a sign flipped, or digits cancelled"
        return f"{self.name}: error {self.version_error:.1e} against float64, {own}"


def check_against_float64(version, eager, *inputs, gradients=True, slack=1e-6, name=None):
    """Compare `version(*inputs)` with `eager` in float64: outputs, and gradients of all inputs that need one.

    inputs: tensors (any float dtype) and other arguments; tensors with requires_grad get their gradient
    compared under the same random incoming gradient. Inputs must come back unchanged. slack: the 1e-6 above.
    Returns a Check; raises CheckError with the place and the size of the first difference.
    """
    name = name or getattr(version, "__name__", "version")
    before = [i.detach().clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    incoming = {}  # one random gradient per output, in the dtype of eager's output, for all three runs
    own = _run("eager", eager, [_fresh(i) for i in inputs], gradients, incoming)
    want = _run("eager", eager, [_to_float64(i) for i in inputs], gradients, incoming)
    got = _run(name, version, [_fresh(i) for i in inputs], gradients, incoming)
    for k, (old, new) in enumerate(zip(before, inputs)):
        if isinstance(old, torch.Tensor) and not _same(old, new):
            raise Changed(f"{name} changed its input {k}")
    n_outputs, n_eager = (sum(label.startswith("output") for label in r) for r in (got, want))
    if n_outputs != n_eager:
        raise CheckError(f"{name}: number of outputs is {n_outputs}, should be {n_eager}")
    if got.keys() & {"output"} != want.keys() & {"output"}:
        one, several = "a tensor", "a tuple"
        should, does = (one, several) if "output" in want else (several, one)
        raise CheckError(f"{name}: should return {should}, returns {does}")
    errors = []
    for label in [*want, *(extra for extra in got if extra not in want)]:
        if label not in got or label not in want:
            there = "is missing" if label in want else "is one too many"
            raise CheckError(f"{name}: {label} {there}; eager gives {', '.join(want)}")
        errors.append(_compare(f"{name}, {label}", got[label], own[label], want[label], slack))
    return Check(name, *map(max, zip(*errors)))


def _same(a, b):
    return torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0)) and torch.equal(a.isnan(), b.isnan())


def _fresh(value):
    """A leaf with the same memory layout, so that no version sees another's gradients."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _to_float64(value):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _run(name, fn, inputs, gradients, incoming):
    """{'output': …, 'gradient of input 0': …} of fn(*inputs)."""
    result = fn(*inputs)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    results = {f"output {k}": o for k, o in enumerate(outputs)}
    if not isinstance(result, (tuple, list)):
        results = {"output": result}
    for label, o in results.items():
        if not isinstance(o, torch.Tensor):
            raise CheckError(f"{name}: {label} must be a tensor, got {type(o).__name__}")
        if o.is_meta or o.layout != torch.strided:
            kind = "on the device meta, without numbers" if o.is_meta else f"of layout {o.layout}"
            raise CheckError(f"{name}: {label} is {kind}; it must be an ordinary tensor")
    leaves = {
        f"gradient of input {k}": i
        for k, i in enumerate(inputs)
        if isinstance(i, torch.Tensor) and i.requires_grad
    }
    if gradients and leaves:
        for k, o in enumerate(outputs):
            if o.is_floating_point():
                like = torch.randn_like(o, memory_format=torch.contiguous_format)
                incoming.setdefault(k, like.detach())
        dys = {
            k: dy.to(outputs[k].device, outputs[k].dtype, copy=True)
            for k, dy in incoming.items()
            if k < len(outputs)
        }
        # a wrong shape is reported when outputs are compared
        if all(dy.shape == outputs[k].shape for k, dy in dys.items()):
            results |= _gradients(name, outputs, leaves, dys)
    return {label: t.detach() for label, t in results.items()}


def _gradients(name, outputs, leaves, dys):
    """{label: gradient} of the leaves that have one."""
    # where only one of two inputs needs a gradient, eager's other output has none
    attached = [k for k in dys if outputs[k].requires_grad]
    if not attached:
        why = "it was computed under no_grad or detached, or its kernel has no backward pass"
        raise CheckError(f"{name}: the output has no gradient; {why}")
    before = {k: dys[k].clone() for k in attached}
    grads = torch.autograd.grad(
        [outputs[k] for k in attached],
        list(leaves.values()),
        [dys[k] for k in attached],
        allow_unused=True,
    )
    for k in attached:
        if not torch.equal(dys[k], before[k]):
            of = "the output" if len(outputs) == 1 else f"output {k}"
            raise Changed(
                f"{name}: the backward pass changed the gradient of {of} that it was given"
            )
    return {label: g for label, g in zip(leaves, grads) if g is not None}


def _compare(label, got, own, want, slack):
    """(error of the version, error of eager, the same in units) against float64, or CheckError."""
    if got.shape != want.shape:
        raise CheckError(f"{label}: shape is {tuple(got.shape)}, should be {tuple(want.shape)}")
    if got.dtype != own.dtype:
        raise CheckError(f"{label}: dtype is {got.dtype}, should be {own.dtype}")
    if want.numel() == 0:
        return 0.0, 0.0, 0.0
    info = torch.finfo(own.dtype if own.is_floating_point() else torch.float64)
    got, own, want = (t.to(want.device, torch.float64) for t in (got, own, want))
    _compare_special(label, got, own, want)
    finite = torch.isfinite(want)
    version_error = torch.where(finite & torch.isfinite(got), (got - want).abs(), 0.0)
    eager_error = torch.where(finite & torch.isfinite(own), (own - want).abs(), 0.0)
    sizes = torch.where(finite, want.abs(), 0.0)
    largest = float(sizes.max())
    unit = info.eps * 2.0 ** (math.frexp(largest)[1] - 1)  # in the last place of the largest
    largest_error = float(eager_error.max())
    allowed = 2 * max(largest_error, unit) + slack * max(1.0, largest)
    worst = int(version_error.argmax())
    if float(version_error.flatten()[worst]) > allowed:
        raise CheckError(
            f"{label}: {_differing(version_error > allowed)} differ by more than {allowed:.1e}; worst at"
            f" {_index(worst, want.shape)}: {got.flatten()[worst]:.6g}, should be {want.flatten()[worst]:.6g}"
        )
    rounding = torch.maximum(
        sizes * info.eps / 2, sizes.new_tensor(info.smallest_normal * info.eps)
    )
    taking_part = finite & ((want != 0) | (got != 0))
    eager_error = torch.maximum(eager_error, rounding)
    if largest <= largest_error:
        return float(version_error.max()), largest_error, largest_error / unit
    _compare_typical(label, version_error, eager_error, taking_part, slack * largest)
    return float(version_error.max()), largest_error, largest_error / unit


def _compare_typical(label, version_error, eager_error, taking_part, slack):
    """CheckError where the median of a row's or a column's errors is too large."""
    shape = (-1, taking_part.shape[-1]) if taking_part.dim() > 1 else (1, -1)
    matrices = [t.reshape(shape) for t in (version_error, eager_error, taking_part)]
    for what, dim in (("row", 1), ("column", 0)):
        if matrices[0].shape[dim] < _FEWEST:
            continue
        step = 1 | matrices[0].shape[dim] // _ENOUGH  # odd, to reach every position in a tile
        errors, own, part = (t[:, ::step] if dim else t[::step].T for t in matrices)
        errors, own = (torch.where(part, e, math.nan).nanmedian(1).values for e in (errors, own))
        # equal elements round alike, so eager's typical error counts as at least that of the median row
        most = own.nanmedian()
        judged = part.sum(1) >= _FEWEST
        allowed = 4 * torch.maximum(own, most) + slack
        wrong = judged & (errors > allowed)
        flipped = int((judged & (own > 4 * most + slack)).sum())
        if int(wrong.sum()) > (3 * flipped + 3 if flipped else 0):
            k = int(wrong.int().argmax())
            raise CheckError(
                f"{label}: the typical error of {int(wrong.sum())} of {wrong.numel()} {what}s is too large; in"
                f" {what} {k} the median is {errors[k]:.1e}, where {allowed[k]:.1e} is allowed, four times"
                " eager's own"
            )


def _compare_special(label, got, own, want):
    """NaN and ±inf have to stand where eager has them, in the same dtype (float16 overflows) or in float64."""
    for what, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(got) != test(own)) & (test(got) != test(want))
        if wrong.any():
            at = int(wrong.flatten().int().argmax())
            how = "in the wrong place" if test(got).flatten()[at] else "is missing"
            raise CheckError(
                f"{label}: {what} {how}, at {_index(at, got.shape)}: "
                f"{got.flatten()[at]:.6g}, should be {own.flatten()[at]:.6g}"
            )


def _differing(wrong):
    return f"{int(wrong.sum())} of {wrong.numel()} elements"


def _index(flat, shape):
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
