"""Is a version of an op right? Compare it with the eager definition computed in float64.

The rule: in every output and every gradient the error against float64 is at most twice the error that the
eager definition makes in the same dtype, plus 1e-6 of the largest value (or of 1, if that is more): a float32
sum in another order moves that much. Eager's error counts as half a unit in the last place of the largest
value where it is less: among few elements eager may be exact by luck. NaN and infinities have to be where eager
has them. So the tolerance is never a guess: it is what the dtype itself costs.
"""

import dataclasses
import math

import torch


class CheckError(AssertionError):
    """A version differs from the float64 definition by more than the rule allows."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What was compared: the largest errors against float64, of the version and of eager."""

    name: str
    version_error: float
    eager_error: float

    def __str__(self):
        own = f"eager's own {self.eager_error:.1e}"
        return f"{self.name}: error {self.version_error:.1e} against float64, {own}"


def check_against_float64(version, eager, *inputs, gradients=True, slack=1e-6, name=None):
    """Compare `version(*inputs)` with `eager` in float64: outputs, and gradients of all inputs that need one.

    inputs: tensors (any float dtype) and other arguments; tensors with requires_grad get their gradient
    compared under the same random incoming gradient. Inputs must come back unchanged.
    Returns a Check; raises CheckError with the place and the size of the first difference.
    """
    name = name or getattr(version, "__name__", "version")
    before = [i.detach().clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    incoming = {}  # one random gradient per output, in the dtype of eager's output, for all three runs
    own = _run(eager, [_fresh(i) for i in inputs], gradients, incoming)
    want = _run(eager, [_to_float64(i) for i in inputs], gradients, incoming)
    got = _run(version, [_fresh(i) for i in inputs], gradients, incoming)
    for k, (old, new) in enumerate(zip(before, inputs)):
        if isinstance(old, torch.Tensor) and not _same(old, new):
            raise CheckError(f"{name} changed its input {k}")
    errors = [
        _compare(f"{name}, {label}", got[label], own[label], want[label], slack) for label in want
    ]
    return Check(name, max(e for e, _ in errors), max(e for _, e in errors))


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


def _run(fn, inputs, gradients, incoming):
    """{'output': …, 'gradient of input 0': …} of fn(*inputs)."""
    result = fn(*inputs)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    found = {f"output {k}" if len(outputs) > 1 else "output": o for k, o in enumerate(outputs)}
    leaves = {
        f"gradient of input {k}": i
        for k, i in enumerate(inputs)
        if isinstance(i, torch.Tensor) and i.requires_grad
    }
    if gradients and leaves:
        for k, o in enumerate(outputs):
            incoming.setdefault(
                k, torch.randn_like(o, memory_format=torch.contiguous_format).detach()
            )
        dys = [incoming[k].to(o.device, o.dtype) for k, o in enumerate(outputs)]
        if any(dy.shape != o.shape for dy, o in zip(dys, outputs)):
            return {
                label: t.detach() for label, t in found.items()
            }  # the shapes are compared first
        # where only one of two inputs needs a gradient, eager's other output has none
        attached = [k for k, o in enumerate(outputs) if o.requires_grad] or [0]
        some, their_dys = [outputs[k] for k in attached], [dys[k] for k in attached]
        found |= zip(leaves, torch.autograd.grad(some, list(leaves.values()), their_dys))
    return {label: t.detach() for label, t in found.items()}


def _compare(label, got, own, want, slack):
    """(error of the version, error of eager) against float64, or CheckError."""
    if got.shape != want.shape:
        raise CheckError(f"{label}: shape is {tuple(got.shape)}, should be {tuple(want.shape)}")
    if got.dtype != own.dtype:
        raise CheckError(f"{label}: dtype is {got.dtype}, should be {own.dtype}")
    if want.numel() == 0:
        return 0.0, 0.0
    epsilon = torch.finfo(own.dtype).eps
    got, own = got.to(want.device, torch.float64), own.to(want.device, torch.float64)
    _compare_special(label, got, own)
    finite = torch.isfinite(own) & torch.isfinite(want)
    version_error = torch.where(finite, (got - want).abs(), 0.0)
    eager_error = torch.where(finite, (own - want).abs(), 0.0)
    largest = float(torch.where(finite, want.abs(), 0.0).max())
    # half a unit in the last place of largest
    rounding = epsilon * 2.0 ** (math.frexp(largest)[1] - 2)
    allowed = 2 * max(float(eager_error.max()), rounding) + slack * max(1.0, largest)
    worst = int(version_error.argmax())
    if float(version_error.flatten()[worst]) > allowed:
        raise CheckError(
            f"{label}: {_differing(version_error > allowed)} differ by more than {allowed:.1e}; worst at"
            f" {_index(worst, want.shape)}: {got.flatten()[worst]:.6g}, should be {want.flatten()[worst]:.6g}"
        )
    return float(version_error.max()), float(eager_error.max())


def _compare_special(label, got, own):
    """NaN and ±inf have to stand where eager has them in the same dtype (float16 overflows, float64 not)."""
    for what, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(own)
        if wrong.any():
            at = int(wrong.flatten().int().argmax())
            raise CheckError(
                f"{label}: {what} in the wrong place, at {_index(at, got.shape)}: "
                f"{got.flatten()[at]:.6g}, should be {own.flatten()[at]:.6g}"
            )


def _differing(wrong):
    return f"{int(wrong.sum())} of {wrong.numel()} elements"


def _index(flat, shape):
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
