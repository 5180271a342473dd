"""Exercise 07.2: no matrix of fewer numbers than the check asks for shows a mistake."""

import itertools

from lib.exercises import nb07

import pytest
import torch

NUMBERS = (-nb07.INF, -200.0, 0.0, 1.0, 89.0, nb07.INF, nb07.NAN)


def shapes(n):
    return [(n // cols, cols) for cols in range(1, n + 1) if n % cols == 0]


@pytest.mark.parametrize("function", nb07.WRONG_SOFTMAXES, ids=lambda f: f.__name__)
def test_fewer_numbers_do_not_show_it(function):
    least = nb07._NUMBERS[function]
    seen = {
        n: any(
            nb07._shows(function, torch.tensor(numbers).view(shape))
            for shape in shapes(n)
            for numbers in itertools.product(NUMBERS, repeat=n)
        )
        for n in range(1, least + 1)
    }
    assert seen == {n: n == least for n in seen}
