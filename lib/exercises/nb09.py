"""Exercises of notebook 09: bytes of a fused norm, a residual that is carried, and what to fuse next."""

import copy
from types import SimpleNamespace

from lib import machine
from lib.exercises import Wrong, a_number, attempted, case, exercise, expect, too_many_or_few
from lib.measure.check import CheckError, check_against_float64
from lib.nogpu.memory import count_traffic

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# --- 09.1 ------------------------------------------------------------------------------------------------


def _passes_saved(training, h_goes_on):
    """Passes over a tensor of M × N elements that fusing saves."""
    forward = 5 - (4 if training or h_goes_on else 3)
    backward = 2 if h_goes_on else 0
    return forward + (backward if training else 0)


_HINTS = {
    (False, True): "list what each of the two launches reads and writes, then what the one must",
    (False, False): "h is not needed again here; who would read it?",
    (
        True,
        False,
    ): "the backward pass reads h, so somebody has to write it; and what does one launch "
    "backward save over one launch?",
    (True, True): "the backward pass had two launches; which tensor went from one to the other?",
}


@exercise("09.1", "What a fused norm saves", minutes=15, level=2)
def check_bytes_saved(answer):
    for (training, h_goes_on), hint in _HINTS.items():
        for M, N, s in ((1, 1, 2), (2, 3, 4), (16384, 4096, 2)):
            at = f"M = {M}, N = {N}, s = {s}, training={training}, h_goes_on={h_goes_on}"
            with case(at):
                got = a_number(answer(M, N, s, training, h_goes_on), f"{at}, bytes")
            want = _passes_saved(training, h_goes_on) * M * N * s
            expect(got == want, f"{at}: {got:g} bytes are {too_many_or_few(got, want)}; {hint}")


# --- 09.2 ------------------------------------------------------------------------------------------------


_EPS = 1e-6, 1e-2  # of the two norms; the first is also the op's default


def _block(parts, eps):
    """What an answer gets: two norms, and small stand-ins for attention and the MLP."""
    weight1, weight2, attention, mlp = parts
    return SimpleNamespace(
        norm1=SimpleNamespace(weight=weight1, eps=eps[0]),
        norm2=SimpleNamespace(weight=weight2, eps=eps[1]),
        attention=lambda x, cos, sin: torch.tanh(x @ attention) * cos - sin,
        mlp=lambda x: torch.tanh(x @ mlp),
    )


def _carried_eager(block, branch, stream, cos, sin):
    def norm(x, layer):
        return F.rms_norm(x, layer.weight.shape, layer.weight, layer.eps)

    x = branch + stream
    h = x + block.attention(norm(x, block.norm1), cos, sin)
    return block.mlp(norm(h, block.norm2)), h


def _run(function, n_blocks, eps=_EPS):
    def run(branch, stream, cos, sin, *parts):
        for _ in range(n_blocks):
            result = attempted(function(_block(parts, eps), branch, stream, cos, sin))
            pair = isinstance(result, (tuple, list)) and len(result) == 2
            expect(pair, "should return two tensors, the branch and the stream")
            branch, stream = result
        return branch, stream

    return run


def _carried_inputs(batch, length, width, dtype):
    def random(*shape, needs_grad=True):
        made = torch.randn(shape, device=machine.device(), dtype=torch.float32).to(dtype)
        return made.requires_grad_(needs_grad)

    tables = [random(length, width, needs_grad=False) for _ in range(2)]
    sizes = ((width,), (width,), (width, width), (width, width))
    return *(random(batch, length, width) for _ in range(2)), *tables, *(random(*s) for s in sizes)


class _Additions(TorchDispatchMode):
    """Counts sums of two tensors of a shape, outside of kernels."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.n = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.shape == self.shape]
        name = func._schema.name
        self.n += name in ("aten::add", "aten::add_") and len(tensors) == 2
        return func(*args, **(kwargs or {}))


@exercise("09.2", "Carry the residual", minutes=20, level=2)
def check_carried(answer):
    for shape in ((1, 1, 4), (2, 3, 16), (2, 5, 33)):
        for n_blocks in (1, 2):
            at = f"x {shape}, {n_blocks} block{'s'[: n_blocks > 1]}"
            for dtype in (torch.float32, torch.bfloat16):
                inputs = _carried_inputs(*shape, dtype)
                what = f"{at}, {str(dtype).rpartition('.')[2]}"
                with case(what):
                    _expect_right(answer, inputs, n_blocks, what)
    inputs = [t.detach() for t in _carried_inputs(2, 3, 16, torch.float32)]
    with _Additions(inputs[0].shape) as additions:
        _run(answer, 1)(*inputs)
    at = "x (2, 3, 16), 1 block"
    expect(
        additions.n == 0,
        f"{at}: right, but outside of add_rms_norm_triton {additions.n} sum(s) of x's shape are launched; "
        "leave that sum to whoever takes the norm of it next",
    )
    launches = count_traffic(lambda: _run(answer, 1)(*inputs)).launches
    expect(
        launches == 2,
        f"{at}: {launches} launches of Triton; a block has two norms, and each takes its sum along",
    )


def _compare(answer, inputs, n_blocks, at, eps=_EPS):
    functions = (_run(f, n_blocks, eps) for f in (answer, _carried_eager))
    check_against_float64(*functions, *inputs, name=at)


def _is_right_with_one_eps(answer, inputs, n_blocks):
    try:
        _compare(answer, inputs, n_blocks, "one eps", eps=_EPS[:1] * 2)
    except CheckError:
        return False
    return True


def _agrees(answer, inputs, change, change_right):
    """Whether one block's results agree with the right ones, once both pairs are changed."""

    def changed(function, change):
        run = _run(function, 1)
        return lambda *tensors: change(*run(*tensors))

    try:
        check_against_float64(
            changed(answer, change), changed(_carried_eager, change_right), *inputs, name="changed"
        )
    except CheckError:
        return False
    return True


def _what_is_wrong(answer, inputs):
    """The end of a message: what the two tensors are, if that can be told from their numbers."""
    if _agrees(answer, inputs, lambda a, b: (b, a), lambda a, b: (a, b)):
        return (
            "Both tensors are right and stand in the wrong order: the branch first, then the stream"
        )
    if _agrees(answer, inputs, torch.add, torch.add):
        return (
            "Their sum is the block's output, but they are not the branch and the stream: return the MLP's "
            "result and the residual before it, and leave their sum to the next block"
        )
    return (
        "The sum of what is returned, the branch first, has to be the block's output; "
        "which tensor is the residual behind each norm?"
    )


def _expect_right(answer, inputs, n_blocks, at, again=True):
    try:
        _compare(answer, inputs, n_blocks, at)
    except CheckError as error:
        if again:  # one draw in a hundred rounds a right answer, too, past twice eager's error
            inputs = [torch.randn_like(t).requires_grad_(t.requires_grad) for t in inputs]
            return _expect_right(answer, inputs, n_blocks, at, again=False)
        where = str(error)
        for number, name in enumerate(("branch", "stream")):
            where = where.replace(f"output {number}", f"the {name} that is returned")
            where = where.replace(f"gradient of input {number}:", f"gradient of the {name}:")
        if _is_right_with_one_eps(answer, inputs, n_blocks):
            raise Wrong(
                f"{where}. With the same eps in both norms it is right; each has its own"
            ) from None
        raise Wrong(f"{where}. {_what_is_wrong(answer, inputs)}") from None


# --- 09.3 ------------------------------------------------------------------------------------------------


def _least_us(row, gbps, tflops):
    return max(row["bytes"] / gbps / 1e3, row["flops"] / tflops / 1e6)


def _next_fusion(rows, gbps, tflops, noise_us):
    savings = {r["name"]: r["calls"] * (r["us"] - _least_us(r, gbps, tflops)) for r in rows}
    best = max(savings, key=savings.get, default=None)
    return best if best is not None and savings[best] > noise_us else None


def _row(name, calls, us, megabytes, gflops=0.0):
    return {"name": name, "calls": calls, "us": us, "bytes": megabytes * 1e6, "flops": gflops * 1e9}


# (what it is, rows, noise, the idea); 1000 GB/s: a megabyte takes 1 µs; 100 TFLOP/s: a GFLOP takes 10 µs
_PROFILES = (
    ("one row", [_row("norm", 1, 100, 20)], 10, "compare what it takes with what it must take"),
    ("no rows", [], 10, "with nothing to fuse it is time to stop"),
    (
        "two rows",
        [_row("gate", 1, 300, 250), _row("norm", 1, 200, 40)],
        10,
        "which row has most to give? that need be neither the longest nor the first above the noise",
    ),
    (
        "one fused already",
        [_row("fused rope", 1, 500, 480), _row("norm", 1, 60, 20)],
        10,
        "a row at its ceiling has nothing to give, however long it is",
    ),
    (
        "a product",
        [_row("product", 1, 1000, 100, 97), _row("norm", 1, 60, 20)],
        10,
        "bytes are not the only limit: what do the FLOPs take?",
    ),
    (
        "short ones, many times",
        [_row("norm", 1, 100, 40), _row("scale", 16, 10, 4)],
        10,
        "a step has `calls` of each",
    ),
    (
        "all below the noise",
        [_row("norm", 1, 46, 40), _row("rope", 1, 28, 20)],
        10,
        "you fuse one op at a time: can the gain of the next be seen above the noise?",
    ),
    (
        "below the noise by the call, not by the step",
        [_row("scale", 16, 5, 4), _row("norm", 1, 48, 40)],
        10,
        "noise_us is the step's",
    ),
    (
        "faster than its ceiling",
        [_row("in cache", 4, 10, 20), _row("product", 1, 100, 1, 11)],
        10,
        "a row that is faster than its ceiling saves nothing",
    ),
    (
        "both limits",
        [_row("gated product", 1, 500, 200, 30), _row("adapter", 1, 300, 150, 1)],
        10,
        "the longer of both limits is the least time, not their sum, and not the shorter",
    ),
)


@exercise("09.3", "The next fusion", minutes=10, level=1)
def check_next_fusion(answer):
    for gbps, tflops in ((1000.0, 100.0), (4000.0, 700.0)):
        for what, rows, noise_us, idea in _PROFILES:
            # on the faster GPU the same rows, as long as their limits and what is above them allow
            scaled = [_scaled(row, gbps / 1000, tflops / 100) for row in rows]
            at = f"{what}: {_summary(scaled)}, {gbps:g} GB/s, {tflops:g} TFLOP/s, noise {noise_us} µs"
            with case(at):
                got = answer(copy.deepcopy(scaled), gbps, tflops, noise_us)
            expect(got is not ..., f"{at}: gives `...`")
            want = _next_fusion(scaled, gbps, tflops, noise_us)
            expect(got == want, f"{at}: gives {got!r}; {idea}")


def _scaled(row, bandwidth, compute):
    return {**row, "bytes": row["bytes"] * bandwidth, "flops": row["flops"] * compute}


def _summary(rows):
    return "; ".join(
        f"{r['name']} {r['calls']} × {r['us']} µs, {r['bytes'] / 1e6:g} MB, {r['flops'] / 1e9:g} GFLOP"
        for r in rows
    )
