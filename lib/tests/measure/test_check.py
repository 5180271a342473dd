"""The check itself: it passes what is right and finds each kind of wrong, saying where."""

from lib.measure.check import CheckError, check_against_float64

import pytest
import torch


def eager(x, w):
    return torch.relu(x * w).sum(-1)


def pair(dtype=torch.float32):
    x, w = torch.randn(6, 50), torch.randn(50)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def test_the_definition_passes_and_errors_are_reported():
    found = check_against_float64(eager, eager, *pair(torch.bfloat16), name="same")
    assert found.version_error == found.eager_error > 1e-4
    assert "same: error" in str(found)


def wrong_value(x, w):
    y = eager(x, w)
    return torch.where(torch.arange(6) == 4, y + 1, y)


def low_precision(x, w):
    return eager(x.half(), w.half()).float()


def wrong_gradient(x, w):
    y = torch.clamp_min(x * w, 0).sum(-1)
    return y + (x * w).sum(-1).detach() * 0 + 0.5 * (x.sum(-1) - x.sum(-1).detach())


def wrong_dtype(x, w):
    return eager(x, w).double()


def wrong_shape(x, w):
    return eager(x, w)[:, None]


def drops_nan(x, w):
    return eager(torch.nan_to_num(x), w)


def changes_its_input(x, w):
    y = eager(x, w)
    with torch.no_grad():
        x += 1
    return y.detach() + (eager(x - 1, w) - eager(x - 1, w).detach())


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (wrong_value, r"output: 1 of 6 elements .* worst at \(4,\)"),
        (low_precision, "output: .* elements differ"),
        (wrong_gradient, "gradient of input 0"),
        (wrong_dtype, "dtype is torch.float64"),
        (wrong_shape, r"shape is \(6, 1\), should be \(6,\)"),
        (drops_nan, r"NaN in the wrong place, at \(2,\)"),
        (changes_its_input, "changed its input 0"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_wrong_versions_are_found(version, says):
    x, w = pair()
    if version is drops_nan:
        with torch.no_grad():
            x[2, 3] = float("nan")
    with pytest.raises(CheckError, match=says):
        check_against_float64(version, eager, x, w)


def test_float16_may_overflow_where_eager_does():
    x = torch.full((2, 3), 60000.0, dtype=torch.float16)
    check_against_float64(lambda a: a + a, lambda a: a + a, x)
    with pytest.raises(CheckError, match="inf"):
        check_against_float64(lambda a: a, lambda a: a + a, x)


def test_several_outputs_and_empty_ones():
    check_against_float64(torch.aminmax, torch.aminmax, torch.randn(4))
    check_against_float64(torch.exp, torch.exp, torch.empty(0, 3))


def test_the_wrong_order_of_a_float32_sum_is_no_error():
    x = torch.randn(1, 100_000).requires_grad_()
    check_against_float64(lambda a: a.flip(-1).sum(-1), lambda a: a.sum(-1), x)
