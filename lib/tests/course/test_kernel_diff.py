"""The lines that only one of two kernels has."""

from lib.course import kernel_diff
from lib.ops import add_relu

import triton
import triton.language as tl


@triton.jit
def _kernel(
    x_ptr, FOLD: tl.constexpr
):  # fmt: skip
    # a comment
    x = tl.load(x_ptr)
    if FOLD > 1:
        x = 2 * x
        x = 3 * x
    tl.store(x_ptr, x)


def test_comments_and_folds_are_left_out():
    lines = [line.strip() for line in kernel_diff.lines_of(_kernel)]
    assert lines == [
        "x_ptr, FOLD: tl.constexpr",
        "):  # fmt: skip",
        "x = tl.load(x_ptr)",
        "tl.store(x_ptr, x)",
    ]


def test_a_kernel_does_not_differ_from_itself(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(kernel_diff, "show_source", lambda *of: shown.append(of))
    kernel_diff.show_difference(add_relu._add_relu_fwd_kernel, add_relu._add_relu_fwd_kernel)
    assert shown == [("", "diff")] and "lines, and 0 others" in capsys.readouterr().out
    kernel_diff.show_difference(_kernel, add_relu._add_relu_fwd_kernel)
    assert "-     x = tl.load(x_ptr)" in shown[1][0].splitlines()
