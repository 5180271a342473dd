"""Exercises of notebook 46, linear_cross_entropy."""

from functools import partial

from lib import machine
from lib.exercises import (
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
    expect_rounded_once,
    left_alone,
    plain,
)
from lib.exercises.watch import expect_no_pass
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

STEP, ALIGNMENT = 128, 16  # rows, bytes


@exercise("46.1", "Rows of a chunk from a budget", minutes=10, level=1)
def check_rows_of_chunk(answer):
    # (budget, rows, columns, bytes an element): from small to large
    cases = [
        (1000, 1, 1, 4),
        (1000, 8, 1, 4),
        (2**20, 1024, 256, 4),
        (2**20, 300, 256, 4),
        (310 * 1024, 300, 256, 4),  # room for all rows, and not for the next step
        (2**20, 1024, 1000, 2),
        (128 * 2016 * 2, 1024, 1001, 2),
        (256 * 2002, 1024, 1001, 2),
        (256 * 4016, 1024, 1001, 4),
        (256 * 2016 - 14, 1024, 1001, 2),  # room for all rows, and not for what follows the last
        (2**20, 1024, 50257, 2),
        (2**28, 8192, 50257, 2),
        (2**28, 8192, 128256, 2),
        (2**28, 100, 128256, 2),
    ]
    for numbers in cases:
        _expect_rows(answer, *numbers)


def _expect_rows(answer, budget, n_rows, n_cols, itemsize):
    at = f"budget {budget:,} bytes, {n_rows} rows of {n_cols} columns, {itemsize} bytes an element"
    with case(at):
        got = plain(attempted(answer(budget, n_rows, n_cols, itemsize)))
    expect(type(got) is int, f"{at}: should be an int, got {type(got).__name__}")
    expect(got > 0, f"{at}: {got} rows; a chunk has at least one")
    expect(got <= n_rows, f"{at}: {got} rows are more than there are")
    whole = got == n_rows or got % STEP == 0
    expect(whole, f"{at}: {got} is neither a multiple of {STEP} nor all rows")
    stride = -(-n_cols * itemsize // ALIGNMENT) * ALIGNMENT
    too_many = got > STEP and got * stride > budget
    alignment = f"each of {n_cols * itemsize:,} bytes and, the last too, up to the next multiple of {ALIGNMENT}"
    expect(not too_many, f"{at}: {got} rows take {got * stride:,} bytes; {alignment}")
    more = (got // STEP + 1) * STEP
    room = got < n_rows and (more <= STEP or more * stride <= budget)
    why = "fewer than one step are allowed only where there are no more rows"
    expect(
        not room,
        f"{at}: with {got} rows a chunk is smaller than it need be; {why if got < STEP else 'there is room'}",
    )
    step = -(-got // STEP) * STEP
    cut = got <= STEP or step * stride <= budget
    expect(cut, f"{at}: {got} are all rows, but {step} do not fit, so take {step - STEP}")


def _capped(logits, labels, cap):
    """Loss and gradient by autograd; the answer must compute them without it."""
    leaf = logits.detach().requires_grad_()
    wide = leaf.float() if leaf.dtype.itemsize == 2 else leaf
    loss = F.cross_entropy(cap * torch.tanh(wide / cap), labels)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _logits_and_labels(size, shape, dtype):
    """Logits that grow along a row, so that a walk meets ever larger ones."""
    generator = torch.Generator().manual_seed(0)
    logits = size * (torch.randn(shape, generator=generator) + torch.linspace(-2, 2, shape[1]))
    labels = torch.randint(shape[1], shape[:1], generator=generator)
    return logits.to(machine.device(), dtype), labels.to(machine.device())


@exercise("46.2", "The gradient of a soft cap", minutes=12, level=2)
def check_capped_loss(answer):
    def without_autograd(logits, labels, cap):
        with torch.inference_mode():
            return attempted(answer(logits, labels, cap))

    result = without_autograd(*_logits_and_labels(1, (2, 3), torch.float32), 30.0)
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    expect(pair, "should return two tensors, the loss and the gradient of the logits")
    for cap, size in ((30.0, 1), (30.0, 40), (5.0, 10)):
        expect_op(
            partial(without_autograd, cap=cap),
            partial(_capped, cap=cap),
            partial(_logits_and_labels, size),
            shapes=((1, 1), (1, 2), (2, 3), (5, 7), (17, 33), (64, 128)),
        )
    for dtype in (torch.bfloat16, torch.float16):
        logits, labels = _logits_and_labels(4, (8, 33), dtype)
        exact = _capped(logits.double(), labels, 5.0)[1]
        at = f"(8, 33), {str(dtype).removeprefix('torch.')}, cap 5"
        got = without_autograd(logits, labels, 5.0)[1]
        expect_rounded_once(got, exact, at, "the gradient")


class _Products(TorchDispatchMode):
    """Records the dtypes of the factors of each matrix product inside."""

    def __init__(self):
        super().__init__()
        self.factors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "addmm_", "baddbmm"):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.factors.append([t.dtype for t in tensors[-2:]])
        return result


@exercise("46.3", "float16 without underflow", minutes=12, level=2)
def check_dw_in_float16(answer):
    for n_rows in (64, 1024, 16384):
        _expect_dw(answer, n_rows, n_inner=16, n_cols=512)


def _expect_dw(answer, n_rows, n_inner, n_cols):
    generator, device = torch.Generator().manual_seed(0), machine.device()
    x = (torch.randn(n_rows, n_inner, generator=generator) / 10).to(device, torch.float16)
    logits = torch.randn(n_rows, n_cols, generator=generator).to(device, torch.float16)
    # no label is in the second half of the vocabulary, so its gradients are sums of small numbers
    labels = torch.randint(n_cols // 2, (n_rows,), generator=generator).to(device)
    at = f"at {n_rows} rows, {n_cols} columns"
    given = left_alone(at, x=x, logits=logits, labels=labels)
    with case(at), given, _Products() as products:
        dw = attempted(answer(x, logits, labels))
    expect(isinstance(dw, torch.Tensor), f"{at}: should be a tensor, got {type(dw).__name__}")
    size = (n_cols, n_inner)
    expect(dw.shape == size, f"{at}: dW should be {size}, is {tuple(dw.shape)}")
    expect(dw.dtype == torch.float32, f"{at}: dW should be float32, is {dw.dtype}")
    half = [[torch.float16] * 2]
    expect(
        products.factors == half,
        f"{at}: there should be one matrix product, of two float16 tensors; its factors are {products.factors}",
    )
    d = logits.double().softmax(-1)
    d[torch.arange(n_rows, device=device), labels] -= 1
    want = d.t() @ x.double() / n_rows
    for what, part in (("labels", slice(n_cols // 2)), ("no labels", slice(n_cols // 2, None))):
        off = 100 * ((dw.double() - want)[part].norm() / want[part].norm()).item()
        where = f"in the rows of dW that are {what} of this batch"
        expect(off < 0.2, f"{at}: {where} the error is {off:.2g} % of the gradient")


def _smoothed(logits, labels, smoothing):
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    return F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)


@exercise("46.4", "Label smoothing in the same walk", minutes=20, level=3)
def check_smoothed_loss(answer):
    shapes = ((1, 1), (1, 2), (2, 3), (5, 7), (8, 8), (17, 33), (9, 1031), (2, 5000))
    for smoothing, size in ((0.1, 1), (0.0, 1), (0.5, 40), (1.0, 1)):
        expect_op(
            lambda *args, s=smoothing: attempted(answer(*args, s)),
            partial(_smoothed, smoothing=smoothing),
            partial(_logits_and_labels, size),
            shapes=shapes,
        )
    logits, labels = _logits_and_labels(1, (4, 1031), torch.float32)
    expect_launches(lambda: answer(logits, labels, 0.1), exactly=1)
    expect_no_pass(lambda: answer(logits, labels, 0.1), logits.nbytes, "at (4, 1031)")
    traffic = count_traffic(lambda: answer(logits, labels, 0.1))
    loaded = sum(argument.loaded for argument in traffic.by_argument.values())
    expect(
        loaded < 1.5 * logits.nbytes,
        f"loads {loaded / logits.nbytes:.1f} times the bytes of the logits; one walk along a row is enough",
    )
