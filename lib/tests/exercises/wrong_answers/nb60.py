"""Plausible wrong answers to the exercises of notebook 60, named <answer>__<why>: each must be rejected."""

from lib.exercises.nb60 import ordinary_tests
from lib.tests.exercises.wrong_answers import solution

import torch

_right = solution("60_bug_museum")


tests__the_ordinary_ones = ordinary_tests


def tests__forward_only(op):
    for x in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(3, 1500)):
        torch.testing.assert_close(op(x, 0.5), torch.softmax(0.5 * x, dim=1))


def tests__refuse_everything(op):
    raise AssertionError("wrong")


def tests__bits_of_eager(op):
    x = torch.randn(64, 100)
    assert torch.equal(op(x, 0.3), torch.softmax(0.3 * x, dim=1))


planted__no_mistake = ("# One program handles one row of dy.", "# One program handles a row of dy.")
planted__found_at_once = ("dx = scale * y * (", "dx = y * (")
planted__no_such_line = ("n_cols + 1", "n_cols")


def shrink__as_it_is(fails, shape):
    return shape


def shrink__halves_alone(fails, shape):
    m, n = shape
    while m > 1 and fails((m // 2, n)):
        m //= 2
    while n > 1 and fails((m, n // 2)):
        n //= 2
    return m, n


def shrink__one_at_a_time(fails, shape):
    m, n = shape
    while m > 1 and fails((m - 1, n)):
        m -= 1
    while n > 1 and fails((m, n - 1)):
        n -= 1
    return m, n


def shrink__each_side_once(fails, shape):
    m, n = shape
    m = next(k for k in range(1, m + 1) if fails((k, n))) if m <= 60 else m
    n = next(k for k in range(1, n + 1) if fails((m, k))) if n <= 60 else n
    return m, n
