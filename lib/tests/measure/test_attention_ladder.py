"""Attention's ladder: all rungs compute the same, the atomic backward pass is right, and the plot."""

from lib import machine
from lib.measure import attention_ladder
from lib.measure.check import check_against_float64
from lib.ops import attention

import matplotlib.pyplot as plt
import pytest
import torch

DEVICE = machine.device()


class _Atomic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        o, lse = attention.attention_op(q, k, v, None, True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        tiles = {"block_m": 32, "block_n": 32}
        return attention_ladder.atomic_gradients(*ctx.saved_tensors, do.contiguous(), **tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("s", [1, 32, 77])
def test_gradients_by_atomics(s, dtype):
    options = {"device": DEVICE, "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.randn(2, heads, s, 16, **options) for heads in (4, 2, 2))
    check_against_float64(_Atomic.apply, attention_ladder.eager, q, k, v)


@pytest.mark.gpu
def test_everybody_computes_the_same():
    q, k, v = (t.detach() for t in attention_ladder.draw(2, 8, 2, 256, 64))
    calls = attention_ladder._calls(attention_ladder.versions(256), (q, k, v), gradients=False)
    for name, run in calls.items():
        check_against_float64(lambda *_, run=run: run(), attention_ladder.eager, q, k, v, name=name)


def test_plots_take_versions_that_refuse_and_lengths_out_of_memory():
    _, ax = plt.subplots()
    attention_ladder.plot_ladder(ax, [{"version": "a", "forward, TFLOP/s": 3.0}, {"version": "b"}])
    attention_ladder.plot_memory(ax, [{"S": 1024, "a": 3.0}, {"S": 2048, "a": None}])
    plt.close("all")


def test_times_on_the_gpu_alone_are_medians_of_rounds(monkeypatch):
    times = iter([3.0, None, 9.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(attention_ladder.bench, "gpu_us", lambda call: next(times))
    assert attention_ladder.alone_us({"a": print, "b": print}) == {"a": 5.0, "b": None}
