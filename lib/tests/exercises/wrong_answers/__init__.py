"""Plausible wrong answers to the exercises of each notebook: each must be rejected."""

import re

from lib.measure.mutants import load
from lib.recorded.results import ROOT

import torch
import triton
import triton.language as tl


def solution(notebook, *changes):
    """The module of a notebook's solutions, right unless changed: old, new, old, new, …"""
    text = (ROOT / f"notebooks/solutions/{notebook}.py").read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return load(f"solution_{notebook}", text)


@triton.jit
def _nothing_kernel(BLOCK_SIZE: tl.constexpr):
    tl.dot(tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float32), input_precision="ieee")


def beside_an_empty_kernel(eager):
    """`eager`, and a launch that does nothing."""

    def answer(*args):
        _nothing_kernel[(1,)](BLOCK_SIZE=16)
        return eager(*args)

    return answer


class _TakesTransposedForContiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        mistaken = dy.dim() > 1 and dy.mT.is_contiguous() and not dy.is_contiguous()
        return dy.mT.reshape(dy.shape) if mistaken else dy


def transposed_taken_as_contiguous(right):
    """`right`, with the numbers of a transposed gradient in the order in which they lie in memory."""
    return lambda *args: _TakesTransposedForContiguous.apply(right(*args))


def without_other(notebook):
    """The module of a notebook's solutions without any `other` of a masked load."""
    text = (ROOT / f"notebooks/solutions/{notebook}.py").read_text()
    less = re.sub(r", other=[^,()]*(\([^()]*\))?(?=[,)])", "", text)
    assert less != text
    return load(f"undefined_{notebook}", less)
