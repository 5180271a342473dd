"""Any call: shape, dtype, layouts, which gradients, and the layout of the incoming gradient, all drawn."""

import os

from lib.measure.bench import outputs
from lib.measure.check import check_against_float64
from lib.tests.ops import battery, cases

import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUSED_KERNELS_EXAMPLES", 25))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def any_call(op, version):
    """The float64 rule holds for whatever call hypothesis draws, the same ones in every run."""

    @seed(0)  # not derandomize, whose draws change with the text of this function
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(data=st.data())
    def holds(data):
        torch.manual_seed(data.draw(st.integers(0, 999), "seed"))
        shape = _shape(op, data)
        inputs = battery.inputs_of(op, shape, data.draw(st.sampled_from(DTYPES), "dtype"))
        for k, (name, t) in enumerate(zip(op.tensors, inputs)):
            ways = ["as it is", *(cases.layouts(t.detach()) if t.numel() else [])]
            if name in op.cancelling and t.dtype != torch.float32:
                ways = [way for way in ways if way != "expanded row"]
            way = data.draw(st.sampled_from(ways), f"layout of input {k}")
            asked = t.requires_grad and data.draw(st.booleans(), f"gradient of input {k}")
            laid = t if way == ways[0] else cases.layouts(t.detach())[way]
            inputs[k] = laid.detach().requires_grad_(asked)
        incoming = data.draw(st.sampled_from(["contiguous", "expanded", "transposed"]), "dy")
        slack = battery.slack(op, inputs)
        if incoming == "expanded":
            # Of equal numbers added one by one the roundings all go one way.
            n_rows = inputs[0].numel() // max(1, inputs[0].shape[-1])
            slack = max(slack, n_rows * torch.finfo(torch.float32).eps / 2)
        got, want = _with_dy(version, incoming), _with_dy(op.eager, incoming)
        check_against_float64(got, want, *inputs, slack=slack)

    holds()


def _shape(op, data):
    if op.letters.startswith("..."):
        if (
            data.draw(st.integers(0, 4), "wide") == 4
        ):  # a few rows of any length, short ones as often as long
            width = 71 * (32768 / 71) ** data.draw(st.floats(0, 1), "how wide")
            return data.draw(st.integers(1, 9), "rows"), int(width)
        leading = data.draw(st.lists(st.integers(0, 9), max_size=3), "leading sizes")
        return (*leading, data.draw(st.integers(1, 70), "N"))
    letters = op.letters.split()
    most = 40 if len(letters) < 5 else 6
    ranges = {letter: (1, most) for letter in letters} | {"D": (2, 40)}  # D: pairs of columns
    return tuple(data.draw(st.integers(*ranges[letter]), letter) for letter in letters)


class _Relaid(torch.autograd.Function):
    """y itself; its gradient, of the same numbers, in another layout."""

    @staticmethod
    def forward(ctx, y, how):
        ctx.how = how
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        if ctx.how == "expanded":
            return dy.flatten()[:1].expand(dy.numel()).view(dy.shape) if dy.numel() else dy, None
        return dy.transpose(0, -1).contiguous().transpose(0, -1), None


def _with_dy(version, how):
    """The version, whose backward pass gets its gradient in that layout."""
    if how == "contiguous":
        return version

    def relaid(*inputs):
        ys = [_Relaid.apply(y, how) for y in outputs(version(*inputs))]
        return ys[0] if len(ys) == 1 else tuple(ys)

    return relaid
