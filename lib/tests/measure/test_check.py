"""The check itself: it passes right versions, and finds each kind of mistake and its place."""

from lib.measure.check import CheckError, check_against_float64

import pytest
import torch


def eager(x, w):
    return torch.relu(x * w).sum(-1)


def pair(dtype=torch.float32):
    x, w = torch.randn(6, 50), torch.randn(50)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()


def test_the_definition_passes_and_errors_are_reported():
    check = check_against_float64(eager, eager, *pair(torch.bfloat16), name="same")
    assert check.version_error == check.eager_error > 1e-4
    assert "same: error" in str(check)


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
    ("version", "message"),
    [
        (wrong_value, r"output: 1 of 6 elements .* worst at \(4,\)"),
        (low_precision, "output: .* elements differ"),
        (wrong_gradient, "gradient of input 0"),
        (wrong_dtype, "dtype is torch.float64"),
        (wrong_shape, r"shape is \(6, 1\), should be \(6,\)"),
        (drops_nan, r"NaN is missing, at \(2,\)"),
        (changes_its_input, "changed its input 0"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_wrong_versions_are_found(version, message):
    x, w = pair()
    if version is drops_nan:
        with torch.no_grad():
            x[2, 3] = float("nan")
    with pytest.raises(CheckError, match=message):
        check_against_float64(version, eager, x, w)


def test_float16_may_overflow_where_eager_does():
    x = torch.full((2, 3), 60000.0, dtype=torch.float16)
    check_against_float64(lambda a: a + a, lambda a: a + a, x)
    with pytest.raises(CheckError, match="60000, should be 120000"):
        check_against_float64(lambda a: a, lambda a: a + a, x)


def test_several_outputs_and_empty_ones():
    check_against_float64(torch.aminmax, torch.aminmax, torch.randn(4))
    check_against_float64(torch.exp, torch.exp, torch.empty(0, 3))


def test_the_wrong_order_of_a_float32_sum_is_no_error():
    x = torch.randn(1, 100_000).requires_grad_()
    check_against_float64(lambda a: a.flip(-1).sum(-1), lambda a: a.sum(-1), x)


# --- wrong versions that one large error of eager, or one large value, would hide ----------------------------


def relu_of_a_sum(x, bias, residual):
    return torch.relu(x + bias + residual)


def rounded_sums(rows=123, cols=781, seed=0):
    """bfloat16: eager rounds twice, sometimes to the other side of 0, where its error is all of dy."""
    torch.manual_seed(seed)
    tensors = torch.randn(rows, cols), torch.randn(cols), torch.randn(rows, cols)
    return [t.bfloat16().requires_grad_() for t in tensors]


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.shapes = [t.shape for t in tensors]
        return relu_of_a_sum(*tensors)

    @staticmethod
    def backward(ctx, dy):
        return tuple(dy.new_zeros(shape) for shape in ctx.shapes)


def once_rounded(x, bias, residual):
    return torch.relu(x.float() + bias.float() + residual.float()).to(x.dtype)


@pytest.mark.parametrize("seed", range(10))
def test_one_flipped_sign_does_not_hide_a_gradient_of_zeros(seed):
    tensors = rounded_sums(seed=seed)
    check = check_against_float64(once_rounded, relu_of_a_sum, *tensors)
    if check.eager_units > 100:  # in most of these
        assert "units in the last place: a sign flipped, or digits cancelled" in str(check)
    with pytest.raises(CheckError, match="gradient of input 0"):
        check_against_float64(NoGradient.apply, relu_of_a_sum, *tensors)


def with_an_outlier():
    torch.manual_seed(0)
    x, bias = torch.randn(64, 768), 0.1 * torch.randn(768)
    x[:, 17] += 60  # as the activations of language models have them
    return x.bfloat16(), bias.bfloat16()


def softmax(x):
    return torch.softmax(x, -1)


def softmax_cut_off(x):
    y = softmax(x)
    return torch.where(y < 2e-3, 0.0, y)


def with_one_large_element():
    torch.manual_seed(0)
    x = torch.randn(64, 512)
    x[3, 4] = 100
    return x.bfloat16()


def test_one_large_value_does_not_hide_errors_of_the_others():
    x, bias = with_an_outlier()
    with pytest.raises(CheckError, match="row 0 the median"):
        check_against_float64(lambda x, b: x.clone(), torch.add, x, bias, name="bias forgotten")
    torch.manual_seed(0)
    scores = (3 * torch.randn(8, 1024)).bfloat16()
    with pytest.raises(CheckError, match="row 0 the median"):
        check_against_float64(softmax_cut_off, softmax, scores)
    x = with_one_large_element()
    for rows in (slice(64), slice(20, 21)):
        scale = torch.ones(64, 1)
        scale[rows] = 1.15
        scale[3] = 1  # the large one itself is right
        with pytest.raises(CheckError, match=f"row {rows.start or 0} the median"):
            check_against_float64(lambda x, s=scale: (x * s).bfloat16(), torch.clone, x)
    columns = torch.ones(512)
    columns[7] = 1.15
    with pytest.raises(CheckError, match="1 of 512 columns .* column 7 the median"):
        check_against_float64(lambda x: (x * columns).bfloat16(), torch.clone, x)


def test_where_most_are_zero_the_others_count():
    torch.manual_seed(0)
    x = torch.randn(40, 400) * (torch.rand(40, 400) < 0.2)
    x[3, 4] = 100
    x = x.bfloat16()
    check_against_float64(lambda x: x.float().bfloat16(), torch.clone, x)
    with pytest.raises(CheckError, match="typical error of 40 of 40 rows"):
        check_against_float64(lambda x: torch.where(x < 50, 1.15 * x, x), torch.clone, x)


def test_where_rounding_is_all_there_is_the_largest_error_judges():
    """The gradient of a softmax under equal gradients is zero. By luck eager's float32 mostly is too."""
    logits = torch.randn(1, 37, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def summed(x):
        return torch.softmax(x, -1).sum()

    def otherwise(x):
        y = torch.exp(x - x.detach().amax(-1, keepdim=True))
        return (y / y.sum(-1, keepdim=True)).sum()

    check_against_float64(otherwise, summed, logits)
    with pytest.raises(CheckError, match="37 of 37 elements differ"):
        check_against_float64(lambda x: summed(x) + 1e-4 * (x - x.detach()).sum(), summed, logits)


def test_of_few_elements_one_unit_in_the_last_place_is_no_error():
    """Eager may be exact by luck, so a version that rounds once more is not wrong."""
    x = torch.full((4, 4), 3.484375, dtype=torch.bfloat16)
    check_against_float64(lambda x: x.float().sub(0.025).to(x.dtype), torch.clone, x)
    with pytest.raises(CheckError, match="16 of 16 elements differ"):
        check_against_float64(lambda x: x - 0.0625, torch.clone, x)


def test_what_is_right_where_eager_overflows_passes():
    """Eager's float16 is infinite and its gradient NaN; the version computes in float32 and has neither."""

    def eager(x):
        return torch.exp(x) / (1 + torch.exp(x))

    x = torch.tensor([[1.0, 12.0], [-3.0, 20.0]], dtype=torch.float16, requires_grad=True)
    check_against_float64(torch.sigmoid, eager, x)
    with pytest.raises(CheckError, match="NaN in the wrong place"):
        check_against_float64(eager, torch.sigmoid, x)


# --- versions that are no versions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "eager", "message"),
    [
        (torch.exp, lambda x: (x.exp(), -x), "number of outputs is 1, should be 2"),
        (lambda x: (x.exp(), -x), torch.exp, "number of outputs is 2, should be 1"),
        (lambda x: None, torch.exp, "output must be a tensor, got NoneType"),
        (lambda x: x.detach().exp(), torch.exp, "the output has no gradient; it was computed under no_grad"),
        (lambda x: torch.exp(x).long(), torch.exp, "the output has no gradient"),
    ],
)  # fmt: skip
def test_versions_that_cannot_be_compared_get_a_sentence(version, eager, message):
    with pytest.raises(CheckError, match=f"mine: {message}|mine, {message}"):
        check_against_float64(
            version, eager, torch.randn(4, dtype=torch.float64, requires_grad=True), name="mine"
        )


def test_integers_and_gradients_that_are_not_there():
    x = torch.randn(6, 50)
    check_against_float64(lambda x: x.argmax(-1), lambda x: x.argmax(-1), x)
    with pytest.raises(CheckError, match="6 of 6 elements differ"):
        check_against_float64(lambda x: x.argmax(-1) + 1, lambda x: x.argmax(-1), x)
    a, b = torch.randn(2, 5, 3).unbind()
    a.requires_grad_(), b.requires_grad_()
    check_against_float64(lambda a, b: a * 2, lambda a, b: a + a, a, b)
    with pytest.raises(CheckError, match="gradient of input 1 is missing"):
        check_against_float64(lambda a, b: a * b.detach(), torch.mul, a, b)
