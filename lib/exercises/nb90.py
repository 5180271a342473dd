"""Exercises of notebook 90, the capstone: cases that hurt, the limit, the op forward and backward, the gap."""

import math

from lib import machine
from lib.exercises import (
    Wrong,
    a_number,
    attempted,
    case,
    exercise,
    expect,
    expect_second_derivative,
    is_stub,
    not_rounded_once,
)
from lib.exercises.undefined import compare
from lib.exercises.watch import expect_fixed_order, expect_kernels_alone_calculate
from lib.exercises.whole_op import (
    expect_float32_sums,
    expect_frozen,
    expect_refusals,
    expect_saved,
    expect_sums,
)
from lib.measure import bench, registry
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu.memory import count_traffic

import pandas as pd
import torch

OP = registry.find("add_rms_norm")
SHAPE = (16384, 4096)  # of the ladder, in bfloat16
EPS = 1e-6

# --- a case: (shape, dtype, what is special about it) ----------------------------------------------------

SPECIALS = {
    None: "normal numbers",
    "zeros": "the first row of x and of residual is 0",
    "nan": "the first element of x is NaN",
    "inf": "the first element of x is infinite",
    "large": "x and residual are of size 300",
    "tiny": "x and residual are of size 0.001",
    "strided": "x is a transposed view, residual every second row of another tensor",
    "y only": "the loss uses y alone, so that h has no gradient",
    "h only": "the loss uses h alone, so that y has no gradient",
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST = 100_000  # elements


def _inputs(case, device):
    shape, dtype, special = case
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes):
        size = {"large": 300, "tiny": 0.001}.get(special, 1)
        return (size * torch.randn(sizes, generator=generator)).to(device, dtype)

    x, residual = draw(*shape), draw(*shape)
    if special == "strided":
        x = draw(*shape[:-2], *shape[:-3:-1]).mT if len(shape) > 1 else draw(2 * shape[0])[::2]
        residual = draw(2 * shape[0], *shape[1:])[::2]
    if special == "zeros":
        x.view(-1, shape[-1])[0], residual.view(-1, shape[-1])[0] = 0, 0
    if special in ("nan", "inf"):
        x.view(-1)[0] = float(special)
    weight = torch.randn(shape[-1], generator=generator).to(device, dtype)
    return [t.requires_grad_() for t in (x, residual, weight)]


def _definition(x, residual, weight, eps=1e-6):
    """F.rms_norm by hand, because PyTorch's GPU kernel turns all of a row with an infinity into NaN."""
    h = x + residual
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(h.dtype), h


def _at(case):
    shape, dtype, special = case
    what = f", {special}" if special else ""
    return f"at shape {tuple(shape)}, {str(dtype).removeprefix('torch.')}{what}"


def check_case(version, case, gradients=True, device=None):
    """CheckError unless `version` is right for this case: by the float64 rule, and y the norm of its own h."""
    inputs, at = _inputs(case, device or machine.device()), _at(case)
    chosen = {"y only": 0, "h only": 1}.get(case[2])
    if chosen == 1:
        inputs[2].requires_grad_(False)  # h does not depend on the weight

    def used(function):
        return function if chosen is None else lambda *args: function(*args)[chosen]

    result = version(*inputs)
    two = isinstance(result, (tuple, list)) and len(result) == 2
    if not two or not all(isinstance(t, torch.Tensor) for t in result):
        raise CheckError(f"{at}: should return two tensors, y and h")
    with torch.random.fork_rng():
        torch.manual_seed(
            0
        )  # the same incoming gradients, so that a case always gives the same result
        definition = used(_definition if case[2] == "inf" else OP.eager)
        compare(used(version), definition, *inputs, gradients=gradients, name=at)
    _expect_norm_of_h(*result, inputs[2], at)


def _expect_norm_of_h(y, h, weight, at):
    """CheckError unless y is the norm of the h beside it, rounded once.

    The float64 rule does not see this: it prefers the norm of the sum before rounding.
    """
    if h.dtype.itemsize != 2 or h.numel() == 0:
        return
    exact = h.detach().double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.detach().double()
    off = not_rounded_once(y, exact)
    if off.any():
        raise CheckError(
            f"{at}: {int(off.sum())} of {off.numel()} elements of y are not the norm of the h beside them,"
            " rounded once: more than half a unit in the last place off"
        )


# --- versions with one mistake each ----------------------------------------------------------------------

# The hint says where to look, not what is wrong.
MISTAKES = {
    "eps outside": "very small rows",
    "padded mean": "widths",
    "neighbour": "the end of a row",
    "unrounded": "the h that y is the norm of, in 16 bits",
    "weight rounded": "digits of the weight",
    "rows cut": "numbers of rows",
    "columns cut": "long rows",
    "narrow squares": "large numbers in 16 bits",
    "nan dropped": "NaN",
    "strides": "the layout of x",
    "in place": "what a call leaves behind",
    "two dimensions": "how many dimensions x has",
    "empty": "tensors of no elements",
    "no dresidual": "a gradient",
    "no dh": "a gradient that arrives",
    "dh always": "a gradient that does not arrive",
    "full blocks": "dweight and the number of rows",
    "narrow dweight": "dweight in 16 bits and the number of rows",
}
_MOST_CASES, _FEWEST_CAUGHT = 7, 17


class _Mistaken(torch.autograd.Function):
    """add_rms_norm in PyTorch as a kernel would do it, right where `mistake` is None."""

    @staticmethod
    def forward(ctx, x, residual, weight, mistake):
        if mistake == "two dimensions":
            _, n = x.shape
        if mistake == "empty":
            x.amax()  # of nothing: an error
        n, shape = x.shape[-1], x.shape
        n_rows = math.prod(shape[:-1])
        if mistake == "strides":
            x = x.as_strided((n_rows, n), (n, 1)).view(shape)
        total = x.float() + residual.float()
        h = total.to(x.dtype)
        if mistake == "in place":
            residual.copy_(h)
        wide = (total if mistake == "unrounded" else h.float()).reshape(n_rows, n)
        values = wide.nan_to_num(0.0) if mistake == "nan dropped" else wide
        root = _root(values, h.dtype, mistake)
        scale = weight.bfloat16() if mistake == "weight rounded" else weight
        y = values * root * scale.float()
        if mistake == "rows cut":
            y[len(y) // 4 * 4 :] = 0
        if mistake == "columns cut":
            y[:, 1024:] = 0
        ctx.mistake = mistake
        ctx.save_for_backward(wide, root, weight)
        ctx.set_materialize_grads(False)
        return y.to(h.dtype).view(shape), h

    @staticmethod
    def backward(ctx, dy, dh):
        (wide, root, weight), mistake = ctx.saved_tensors, ctx.mistake
        if mistake == "dh always":
            dh = dh.clone()
        like = dy if dy is not None else dh
        dy = torch.zeros_like(wide) if dy is None else dy.reshape(wide.shape).float()
        normal, g = wide * root, weight.float() * dy
        dx = root * (g - normal * (g * normal).mean(1, keepdim=True))
        if dh is not None and mistake != "no dh":
            dx = dx + dh.reshape(wide.shape).float()
        dx = dx.to(like.dtype).view(like.shape)
        dresidual = torch.zeros_like(dx) if mistake == "no dresidual" else dx
        return dx, dresidual, _dweight(dy * normal, weight.dtype, mistake), None


def _root(wide, dtype, mistake):
    n, squares = wide.shape[1], wide.square()
    if mistake == "narrow squares":
        squares = wide.to(dtype).square().float()
    if mistake == "neighbour" and n & (
        n - 1
    ):  # the tile has a column more, which is the next row's first
        beside = torch.cat([squares[1:, :1], squares[:0, :1], squares.new_zeros(1, 1)])
        squares = torch.cat([squares, beside[: len(squares)]], dim=1)
    width = 1 << (n - 1).bit_length() if mistake == "padded mean" and n else n
    mean = squares.sum(1, keepdim=True) / width
    return 1 / (mean.sqrt() + EPS) if mistake == "eps outside" else 1 / (mean + EPS).sqrt()


def _dweight(rows, dtype, mistake):
    if mistake == "full blocks":
        rows = rows[: len(rows) // 64 * 64]
    if mistake != "narrow dweight":
        return rows.sum(0).to(dtype)
    total = torch.zeros_like(rows[0] if len(rows) else rows.sum(0)).to(dtype)
    for row in rows:
        total += row.to(dtype)
    return total


def version_with(mistake=None):
    """A version of the op with this mistake, or a right one."""

    def version(x, residual, weight, eps=EPS):
        return _Mistaken.apply(x, residual, weight, mistake)

    return version


def _fails(version, case):
    try:
        check_case(version, case, device="cpu")
    except Exception:  # a mistake may show as any error
        return True
    return False


def caught_by(cases):
    """{mistake: does one of the cases show it?}"""
    return {m: any(_fails(version_with(m), case) for case in cases) for m in MISTAKES}


def _expect_case(case):
    what = f"{case!r} is no case"
    expect(isinstance(case, (tuple, list)) and len(case) == 3, f"{what}: (shape, dtype, special)")
    shape, dtype, special = case
    sizes = isinstance(shape, (tuple, list)) and all(
        type(size) is int and size >= 0 for size in shape
    )
    expect(sizes and len(shape) > 0, f"{what}: the shape has to be a tuple of one or more sizes")
    expect(math.prod(shape) <= _LARGEST, f"{what}: at most {_LARGEST:,} elements")
    names = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
    expect(dtype in DTYPES, f"{what}: the dtype is one of {names}")
    specials = ", ".join(map(repr, SPECIALS))
    expect(isinstance(special, (str, type(None))) and special in SPECIALS, f"{what}: {specials}")
    empty = math.prod(shape) == 0 and special in ("zeros", "nan", "inf")
    expect(not empty, f"{what}: there is no element to make special")


@exercise("90.1", "Choose the cases that hurt", minutes=20, level=2)
def check_cases(cases):
    expect(isinstance(cases, (list, tuple)), "give a list of cases, (shape, dtype, special)")
    for each in cases:
        _expect_case(each)
        check_case(version_with(), each, device="cpu")
    caught = caught_by(cases)
    n_caught = sum(caught.values())
    missed = next((MISTAKES[m] for m, is_caught in caught.items() if not is_caught), "nothing")
    rate = f"{n_caught} of {len(caught)} broken versions caught by {len(cases)} cases"
    expect(
        n_caught >= _FEWEST_CAUGHT,
        f"{rate}; the bar is {_FEWEST_CAUGHT}. One that got away has to do with {missed}",
    )
    expect(
        len(cases) <= _MOST_CASES,
        f"{rate}; the bar is {_MOST_CASES} cases: can one case hurt in several ways?",
    )


# --- 90.2 ------------------------------------------------------------------------------------------------


@exercise("90.2", "Predict the limit", minutes=15, level=1)
def check_limits(limits):
    labels = ("bytes forward", "bytes backward", "µs forward", "µs backward")
    # weight and dweight count or not: they are one row among thousands
    for m, n, itemsize, gbps in ((10_000, 64, 4, 1000.0), (20_000, 48, 2, 3000.0)):
        least = 4 * m * n * itemsize
        want = (least, least, least / gbps / 1e3, least / gbps / 1e3)
        at = f"M = {m}, N = {n}, {itemsize} bytes an element, {gbps:g} GB/s"
        with case(at):
            got = attempted(limits(m, n, itemsize, gbps))
        shaped = isinstance(got, (tuple, list)) and len(got) == 4
        expect(shaped, f"should return four numbers: {', '.join(labels)}")
        for label, number, right in zip(labels, got, want):
            number = a_number(number, label)
            if abs(number - right) <= 0.01 * right:
                continue
            way = "less would do" if number > right else "that is too few"
            idea = (
                "name each tensor of M rows that has to come from memory or go there, and count it once"
                if "bytes" in label
                else "bytes over the rate: 1 GB is 1e9 bytes, 1 µs is 1e-6 s"
            )
            raise Wrong(f"{label} at {at}: {number:g}, and {way}; {idea}")


# --- 90.3 and 90.4: the reader's versions ----------------------------------------------------------------

# From small to large, so that the first failure is the smallest one. Together they catch all mistakes above.
CASES = (
    ((1, 1), torch.float32, None),
    ((2, 3), torch.bfloat16, None),
    ((7,), torch.float32, None),
    ((5, 7), torch.float32, "tiny"),
    ((5, 7), torch.float32, "y only"),
    ((5, 7), torch.bfloat16, "h only"),
    ((5, 7), torch.float32, "nan"),
    ((5, 7), torch.bfloat16, "inf"),
    ((0, 5), torch.float32, None),
    ((5, 0), torch.float32, None),
    ((2, 3, 5), torch.float16, "large"),
    ((6, 33), torch.float32, "zeros"),
    ((33, 17), torch.float16, "strided"),
    ((600, 9), torch.bfloat16, None),
    ((66, 128), torch.bfloat16, None),
    ((3, 1100), torch.float32, None),
    ((2, 5000), torch.float16, None),
)


def _expect_cases(answer, gradients):
    for each in CASES:
        with case(_at(each)):
            if each is CASES[0]:
                attempted(answer(*_inputs(each, machine.device())))
            check_case(answer, each, gradients)


def _expect_refusals(answer):
    x = torch.ones(5, 7, device=machine.device())
    bad = {
        "residual (5, 1) beside x (5, 7)": (x, x[:, :1], x[0]),
        "weight (1,) beside x (5, 7)": (x, x, x[0, :1]),
        "x and residual of int64": (x.long(), x.long(), x[0]),
    }
    expect_refusals(answer, bad)


def _expect_eps(answer, gradients):
    inputs = _inputs(((5, 7), torch.float32, None), machine.device())
    versions = [lambda *args, f=f: f(*args, 0.5) for f in (answer, OP.eager)]
    at = "at shape (5, 7), float32, eps = 0.5"
    check_against_float64(*versions, *inputs, gradients=gradients, name=at)


def _expect_any_weight(answer, gradients):
    x, residual, weight = _inputs(((5, 7), torch.float32, None), machine.device())
    views = x, residual, weight.detach().repeat_interleave(2)[::2].requires_grad_()
    at = "at shape (5, 7), float32, weight every second number of another tensor"
    compare(answer, OP.eager, *views, gradients=gradients, name=at)


@exercise("90.3", "The forward kernel", minutes=45, level=3)
def check_forward(answer):
    _expect_cases(answer, gradients=False)
    _expect_eps(answer, gradients=False)
    _expect_any_weight(answer, gradients=False)
    _expect_refusals(answer)
    inputs = _inputs(((24, 640), torch.float32, None), machine.device())
    x, residual, weight = (t.detach() for t in inputs)
    expect_kernels_alone_calculate(lambda: answer(x, residual, weight))
    traffic = count_traffic(lambda: answer(x, residual, weight))
    expect(traffic.launches == 1, f"should be one launch, and it is {traffic.launches}")
    least = 4 * x.nbytes
    expect(
        traffic.bytes_moved <= 1.03 * least,
        f"at shape (24, 640), float32: moves {traffic.bytes_moved:,} bytes, and {least:,} would do; let each"
        " tensor of M rows cross memory once",
    )


def _new(*case):
    return lambda: _inputs(case, machine.device())


def _expect_same_bits(answer):
    def dweight(*inputs):
        with torch.autograd.set_multithreading_enabled(False):
            y, h = answer(*inputs)
            return torch.autograd.grad((y, h), inputs[2], (torch.sin(y), h), allow_unused=True)[0]

    inputs = _inputs(((70, 9), torch.float32, None), machine.device())
    expect_fixed_order(dweight, inputs, "dweight at shape (70, 9):")


def _dweight_of(answer):
    """dy → dweight where the norm is 1, so that it is the sum of dy's rows."""

    def dweight(dy):
        x = torch.ones_like(dy)
        weight = x[0].clone().requires_grad_()
        y, _ = answer(x, torch.zeros_like(x), weight, 0.0)
        return torch.autograd.grad(y, weight, dy)[0]

    return dweight


@exercise("90.4", "Forward and backward", minutes=60, level=3)
def check_backward(answer):
    _expect_cases(answer, gradients=True)
    _expect_eps(answer, gradients=True)
    _expect_any_weight(answer, gradients=True)
    small, names = _new((5, 7), torch.float32, None), ("x", "residual", "weight")
    expect_frozen(answer, OP.eager, small, names, "at shape (5, 7), float32")
    wide = _new((6, 33), torch.float32, None)
    expect_sums(answer, OP.eager, wide, "at shape (6, 33), float32")
    expect_saved(answer, small, (*names, "y", "h"))
    _expect_same_bits(answer)
    expect_float32_sums(_dweight_of(answer), "dweight")
    leaf, residual, weight = _inputs(((5, 7), torch.float32, None), machine.device())
    fixed = residual.detach(), weight.detach()
    expect_second_derivative(lambda x: answer(x, *fixed)[0], lambda x: OP.eager(x, *fixed)[0], leaf)
    _expect_refusals(answer)
    x, residual, weight = _inputs(((24, 64), torch.float32, None), machine.device())
    forward = count_traffic(lambda: answer(x, residual, weight))
    y, h = answer(x, residual, weight)
    dys = torch.ones_like(y), torch.ones_like(h)
    backward = count_traffic(lambda: torch.autograd.grad((y, h), (x, residual, weight), dys))
    both = forward.launches and backward.launches
    expect(both, "forward and backward should launch a Triton kernel each")


# --- 90.5 ------------------------------------------------------------------------------------------------

TERMS = ("extra bytes", "launches", "host", "slow memory")
_ROWS = (
    # (what, row)
    ("a row whose bytes are twice the least", (260.0, 20.0, 1, 2.0e9, 1.0e9)),
    ("a row of nine launches", (60.0, 12.0, 9, 1.2e8, 1.0e8)),
    ("a row whose host is slower than its GPU", (30.0, 90.0, 2, 6.0e7, 4.0e7)),
    ("a row that moves the least, slowly", (200.0, 205.0, 2, 5.0e8, 5.0e8)),
    ("a small row, host first", (9.0, 40.0, 3, 8.0e6, 8.0e6)),
)


def gap_row(gpu_us, host_us, launches, bytes_moved, bytes_least):
    """A row as exercise 90.5 gets it."""
    return {
        "gpu_us": gpu_us,
        "host_us": host_us,
        "launches": launches,
        "bytes_moved": bytes_moved,
        "bytes_least": bytes_least,
    }


def _explained(row, gbps, launch_us):
    least_us, moved_us = (row[k] / gbps / 1e3 for k in ("bytes_least", "bytes_moved"))
    started_us = row["launches"] * launch_us
    terms = {
        "extra bytes": moved_us - least_us,
        "launches": started_us,
        "host": max(0.0, row["host_us"] - row["gpu_us"]),
        "slow memory": max(0.0, row["gpu_us"] - moved_us - started_us),
    }
    share = 100 * least_us / max(row["gpu_us"], row["host_us"])
    return share, tuple(sorted(terms, key=terms.get, reverse=True)[:2])


@exercise("90.5", "Explain the gap", minutes=20, level=2)
def check_explain(explain):
    for what, numbers in _ROWS:
        row = gap_row(*numbers)
        share, names = _explained(row, 8000.0, 2.0)
        at = f"{what}, {row}, at 8000 GB/s and 2 µs a launch"
        with case(at):
            got = attempted(explain(dict(row), 8000.0, 2.0))
        shaped = isinstance(got, (tuple, list)) and len(got) == 2
        expect(shaped, "should return two things: the share in % and a pair of names")
        percent = a_number(got[0], f"{at}: the share")
        expect(
            abs(percent - share) <= 0.01 * share,
            f"{at}: a share of {percent:.4g} %; divide the time that the least bytes need by a call's time",
        )
        valid = isinstance(got[1], (tuple, list)) and len(got[1]) == 2 and set(got[1]) <= set(TERMS)
        expect(valid, f"{at}: should name two of {', '.join(TERMS)}, got {got[1]!r}")
        expect(
            tuple(got[1]) == names,
            f"{at}: {' and '.join(got[1])} are not the two largest terms, the larger first; compute all four"
            " in µs and compare",
        )


# --- the ladder ------------------------------------------------------------------------------------------


def _why_empty(version, gradients):
    """Why a rung has no time, or ''."""
    if version is None:
        return "○ not attempted yet"
    inputs = OP.inputs(OP.small_shape, torch.bfloat16, machine.device())
    try:
        check_against_float64(version, OP.eager, *inputs, gradients=gradients, name="yours")
    except CheckError as error:
        return f"✘ not timed: {error}"
    except Exception as error:  # the reader's code may raise anything; the note shows it
        if is_stub(error):
            return "○ not attempted yet"
        return f"✘ not timed: raised {type(error).__name__}: {str(error)[:200]}"
    return ""


def ladder(gradients=False, course=True, **rungs):
    """The ladder at SHAPE in bfloat16: eager, compiled, the course's, and a row for each of the reader's rungs.

    rungs: name_with_underscores=version. A version that is None, a stub or wrong has a row without a time.
    """
    versions = bench.versions_of(OP)
    if not course:
        del versions["triton"]
    reader_versions = {name.replace("_", " "): version for name, version in rungs.items()}
    empty = {name: _why_empty(version, gradients) for name, version in reader_versions.items()}
    versions |= {name: version for name, version in reader_versions.items() if not empty[name]}
    table = bench.ladder(OP, SHAPE, torch.bfloat16, gradients, versions)
    notes = [{"version": name, "where": "–", "note": note} for name, note in empty.items() if note]
    attrs = table.attrs
    table = (
        pd.concat([table, pd.DataFrame(notes).reindex(columns=bench.COLUMNS)]) if notes else table
    )
    table = table.astype({"note": object}).reset_index(drop=True)
    table["version"] = table["version"].replace({"triton": "the course's"})
    table.attrs = attrs
    return table
