"""The repairs of Triton's interpreter: each of these is wrong, or fails, without them."""

import re
import subprocess
import sys
import threading
import time

from lib import machine
from lib.nogpu import interpreter

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

pytestmark = pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    if OP == "add":
        out = x + y
    elif OP == "mul":
        out = x * y
    elif OP == "compare":
        out = tl.where(x < y, x, y)
    else:
        out = -x
    tl.store(out_ptr + offsets, out, mask=mask)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("add", lambda x, y: x + y),
        ("mul", lambda x, y: x * y),
        ("compare", torch.minimum),
        ("neg", lambda x, y: -x),
    ],
)
def test_bfloat16_arithmetic_equals_torch(op, want):
    x, y = torch.randn(2, 1000).bfloat16()
    out = torch.empty_like(x)
    _binary_kernel[(8,)](x, y, out, 1000, OP=op, BLOCK_SIZE=128)
    assert torch.equal(out, want(x, y))


def test_bfloat16_conversion_rounds_to_nearest_even():
    x = torch.cat([torch.randn(10_000) * 10.0**e for e in range(-38, 38, 4)])
    x = torch.cat(
        [x, torch.tensor([float("inf"), -float("inf"), 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])]
    )
    bits = interpreter.float32_to_bfloat16(x.numpy())
    assert torch.equal(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), x.bfloat16())
    nan = interpreter.float32_to_bfloat16(np.array([np.nan, -np.nan], np.float32))
    assert np.isnan(interpreter.bfloat16_to_float32(nan)).all()


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    c = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets))
    tl.store(c_ptr + offsets, c)


@triton.jit
def _to_bfloat16_and_back_kernel(x_ptr, y_ptr, z_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x.to(tl.bfloat16))
    tl.store(z_ptr + offsets, x.to(tl.bfloat16).to(x.dtype))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
def test_integers_become_bfloat16(dtype):
    """By their value: upstream takes the integer for the bits."""
    x = torch.tensor([-128, -3, 0, 1, 2, 101, 127, 257]).to(dtype)
    y, z = torch.empty(8, dtype=torch.bfloat16), torch.empty_like(x)
    _to_bfloat16_and_back_kernel[(1,)](x, y, z, BLOCK_SIZE=8)
    assert torch.equal(y, x.to(torch.bfloat16))
    assert torch.equal(z, x.to(torch.bfloat16).to(dtype))


def test_bfloat16_dot():
    a, b = torch.randn(2, 32, 32).bfloat16()
    c = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _reduce_kernel(
    x_ptr, y_ptr, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    if OP == "sum":
        y = tl.sum(x, axis=AXIS)
    elif OP == "max":
        y = tl.max(x, axis=AXIS)
    elif OP == "min":
        y = tl.min(x, axis=AXIS)
    elif OP == "argmax":
        y = tl.argmax(x, axis=AXIS)
    elif OP == "argmin":
        y = tl.argmin(x, axis=AXIS)
    elif OP == "cumsum":
        y = tl.cumsum(x, axis=AXIS)
    elif OP == "cumprod":
        y = tl.cumprod(x, axis=AXIS)
    else:
        y = tl.sort(x, dim=1)
    if OP == "cumsum" or OP == "cumprod" or OP == "sort":
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], y)
    elif AXIS is None:
        tl.store(y_ptr, y)
    elif AXIS == 0:
        tl.store(y_ptr + cols, y)
    else:
        tl.store(y_ptr + rows, y)


def _reduced(op, x, axis):
    scan = op in ("cumsum", "cumprod")
    if axis is None:
        x, axis = x.flatten(), 0
    if op == "sort":
        return x.sort(axis).values
    if op in ("max", "min"):
        return getattr(x, "a" + op)(axis)
    return getattr(x, op)(axis) if scan or op.startswith("arg") else x.sum(axis)


REDUCTIONS = [
    *[(op, axis) for op in ("sum", "max", "min") for axis in (None, 0, 1)],
    *[(op, axis) for op in ("argmax", "argmin", "cumsum", "cumprod") for axis in (0, 1)],
    ("sort", 1),
]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float32], ids=str
)
@pytest.mark.parametrize(("op", "axis"), REDUCTIONS)
def test_reductions_and_scans_in_every_dtype(op, axis, dtype):
    m, n = 4, 16
    numbers = torch.randperm(m * n, generator=torch.Generator().manual_seed(0)) - 24
    x = numbers.reshape(m, n).to(dtype)  # all different, exact, and so are their sums
    if op == "cumprod":
        x = (2 * (x > 0).int() - 1).to(dtype)
    want = _reduced(op, x.double(), axis).double()
    out = torch.full((m, n), -77, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    _reduce_kernel[(1,)](x, out, OP=op, AXIS=axis, M=m, N=n)
    got = out.flatten()[: want.numel()].reshape(want.shape).double()
    assert torch.equal(got, want.to(torch.bfloat16).double() if dtype == torch.bfloat16 else want)


@triton.jit
def _atomic_kernel(x_ptr, y_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(y_ptr + i % 3, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def test_atomic_add_in_bfloat16():
    x, y = torch.arange(16).bfloat16(), torch.ones(4, dtype=torch.bfloat16)
    _atomic_kernel[(1,)](x, y, 13, N=16)
    assert y.tolist() == [1 + 0 + 3 + 6 + 9 + 12, 1 + 1 + 4 + 7 + 10, 1 + 2 + 5 + 8 + 11, 1]


@triton.jit
def _float8_kernel(x_ptr, y_ptr, z_ptr, WORK: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x_ptr + i).to(y_ptr.dtype.element_ty)
    if WORK:
        y = y + y
    tl.store(y_ptr + i, y)
    tl.store(z_ptr + i, y.to(tl.float32))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_casts_round_to_nearest_and_saturate(source, dtype):
    x = torch.cat(
        [torch.randn(248) * 8, torch.tensor([1e5, -1e5, 0, 1e-9, 449, 17, 19, float("nan")])]
    )
    x, y, z = x.to(source), torch.empty(256, dtype=dtype), torch.empty(256)
    _float8_kernel[(1,)](x, y, z, WORK=False, N=256)
    largest = torch.finfo(dtype).max
    want = x.float().clamp(-largest, largest).to(dtype)
    torch.testing.assert_close(z, want.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(y.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_arithmetic_on_float8_is_refused():
    x, y, z = torch.ones(16), torch.empty(16, dtype=torch.float8_e5m2), torch.empty(16)
    with pytest.raises(TypeError, match=r"arithmetic on float8: convert with .to\(tl.float32\)"):
        _float8_kernel[(1,)](x, y, z, WORK=True, N=16)


def test_a_product_too_small_for_a_compiler_is_refused():
    a, b = torch.randn(2, 4, 4)
    with pytest.raises(AssertionError, match="K >= 16"):
        _dot_kernel[(1,)](a, b, torch.empty(4, 4), N=4)


@triton.jit
def _libdevice_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, libdevice.tanh(x) + libdevice.erf(x) + libdevice.pow(x, 2.0))


def test_libdevice():
    x, out = torch.randn(64), torch.empty(64)
    _libdevice_kernel[(1,)](x, out, N=64)
    torch.testing.assert_close(out, torch.tanh(x) + torch.erf(x) + x**2)


@triton.jit
def _more_libdevice_kernel(x_ptr, n_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x, n = tl.load(x_ptr + offsets), tl.load(n_ptr + offsets)
    tl.store(out_ptr + offsets, libdevice.cbrt(x) + libdevice.fma(x, x, x) + libdevice.round(x))
    tl.store(
        out_ptr + N + offsets, libdevice.sinpi(x) + libdevice.fast_tanhf(x) + libdevice.normcdf(x)
    )
    counted = libdevice.popc(n) * 10000 + libdevice.clz(n) * 100 + libdevice.ffs(n)
    tl.store(out_ptr + 2 * N + offsets, counted.to(tl.float32))


def test_more_of_libdevice():
    x = torch.tensor([-2.5, -0.5, 0.5, 27.0])
    n = torch.tensor([0, 1, 12, -1], dtype=torch.int32)
    out = torch.empty(3, 4)
    _more_libdevice_kernel[(1,)](x, n, out, N=4)
    away = torch.tensor([-3.0, -1, 1, 27])
    torch.testing.assert_close(out[0], x.sign() * x.abs() ** (1 / 3) + x * x + x + away)
    want = torch.sin(torch.pi * x) + torch.tanh(x) + torch.special.ndtr(x)
    torch.testing.assert_close(out[1], want, atol=1e-5, rtol=1e-5)
    assert out[2].tolist() == [3200, 13101, 22803, 320001]


@triton.jit
def _rare_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out_ptr + offsets, libdevice.cyl_bessel_i0(tl.load(x_ptr + offsets)))


def test_libdevice_says_what_has_no_stand_in():
    with pytest.raises(NotImplementedError, match="libdevice.cyl_bessel_i0 has no stand-in"):
        _rare_kernel[(1,)](torch.ones(4), torch.empty(4), N=4)
    half = torch.ones(64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"libdevice.tanh takes float32 and float64, not bf16"):
        _libdevice_kernel[(1,)](half, half, N=64)


def test_several_threads_may_launch():
    """One after the other, because an interpreted launch patches triton.language while it runs."""
    xs = [torch.full((500,), float(k)) for k in range(4)]
    outs = [torch.zeros(1) for _ in xs]

    def launch(k):
        for _ in range(5):
            _loop_kernel[(1,)](xs[k], outs[k], 500, BLOCK_SIZE=16)

    threads = [threading.Thread(target=launch, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out.item() for out in outs] == [(500 + 32) * k for k in range(4)]


@triton.jit
def _nan_kernel(x_ptr, out_ptr, KEEP: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    nan: tl.constexpr = tl.PropagateNan.ALL if KEEP else tl.PropagateNan.NONE
    tl.store(out_ptr + offsets, tl.maximum(x, 0.0, propagate_nan=nan))
    tl.store(out_ptr + N + offsets, tl.minimum(x, 0.0, propagate_nan=nan))
    tl.store(out_ptr + 2 * N + offsets, tl.clamp(x, -1.0, 1.0, propagate_nan=nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maximum_minimum_and_clamp_drop_nan_as_compiled_code_does(dtype):
    x, out = torch.tensor([float("nan"), 2.0], dtype=dtype), torch.empty(3, 2, dtype=dtype)
    _nan_kernel[(1,)](x, out, KEEP=False, N=2)
    assert out.tolist() == [[0, 2], [0, 0], [-1, 1]]
    _nan_kernel[(1,)](x, out, KEEP=True, N=2)
    assert out[:, 0].isnan().all()
    assert out[:, 1].tolist() == [2, 0, 1]


@triton.autotune([triton.Config({"BLOCK_SIZE": b}) for b in (32, 64)], key=["n"])
@triton.jit
def _tuned_kernel(x_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(x_ptr + offsets, offsets, mask=offsets < n)


def test_autotune_runs():
    x = torch.empty(100, dtype=torch.int32)
    _tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK_SIZE"]),)](x, 100)
    assert torch.equal(x, torch.arange(100, dtype=torch.int32))


@triton.jit
def _helper(x):
    return tl.sum(x, axis=0) + tl.max(x, axis=0)


@triton.jit
def _loop_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    total = 0.0
    n_tiles = tl.cdiv(n, BLOCK_SIZE)
    for i in range(n_tiles):
        offsets = i * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        total += _helper(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))
    tl.store(out_ptr, total)


def test_helpers_and_loops_with_computed_bounds():
    x, out = torch.ones(100), torch.empty(1)
    _loop_kernel[(1,)](x, out, 100, BLOCK_SIZE=16)
    assert out.item() == 100 + 7


def test_helper_calls_do_not_get_slower_and_leave_the_language_as_it_was():
    def language():
        return tl.tensor.__add__, tl.tensor.__init__, tl.block_type.__init__, tl.sum, tl.range

    before = language()
    x, out = torch.ones(100), torch.empty(1)
    for _ in range(20):
        _loop_kernel[(1,)](x, out, 100, BLOCK_SIZE=16)
    assert language() == before


def test_importing_lib_without_triton_says_what_to_install():
    program = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "triton" else find(name)
import lib
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(r"ImportError: triton is not installed, .* 'triton==3\.\d\.\*'", done.stderr)


def test_importing_lib_after_triton_says_what_to_do():
    code = "import triton, lib"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    import os

    environment |= {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "Restart the kernel and import lib first" in result.stderr


@triton.jit
def _philox_kernel(out_ptr, seed, c1, N_ROUNDS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    words = tl.philox(seed, offsets, offsets * 3 + c1, offsets * 0, c1, N_ROUNDS)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * BLOCK_SIZE + offsets, words[i].to(tl.int32, bitcast=True))


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 7, -1])
@pytest.mark.parametrize("n_rounds", [1, 6, 10])
def test_philox_gives_what_triton_interprets(monkeypatch, seed, n_rounds):
    def words():
        out = torch.empty(4, 64, dtype=torch.int32)
        _philox_kernel[(1,)](out, seed, -9, N_ROUNDS=n_rounds, BLOCK_SIZE=64)
        return out

    short = words()
    rewritten = triton.runtime.interpreter.InterpretedFunction.rewritten_fn
    monkeypatch.delitem(rewritten, tl.random.philox_impl.fn)
    assert torch.equal(short, words())


def test_philox_of_one_counter_and_of_64_bits():
    words = interpreter.philox_rounds(0, 0, 0, 0, 0, 0)  # the known answer of Random123
    assert [hex(int(word)) for word in words] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]

    @triton.jit
    def kernel(out_ptr, seed, BLOCK_SIZE: tl.constexpr):
        offsets = tl.arange(0, BLOCK_SIZE)
        none = offsets.to(tl.int64) * 0
        words = tl.philox(seed, offsets.to(tl.int64), none, none, none)
        tl.store(out_ptr + offsets, words[0].to(tl.int64, bitcast=True))
        tl.store(out_ptr + BLOCK_SIZE, tl.rand(seed, tl.program_id(0)))

    out = torch.zeros(5, dtype=torch.float64)
    kernel[(1,)](out, 1, BLOCK_SIZE=4)
    assert 0 < out[4] < 1
    assert out[:4].unique().numel() == 4


def test_nan_in_a_kernel_is_no_warning():
    script = """
import lib, torch
from lib.ops.softmax import softmax_triton
softmax_triton(torch.full((2, 4), -float("inf")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@triton.jit
def _affine(a1, b1, a2, b2):  # not commutative
    return a1 * a2, b1 * a2 + b2


@triton.jit
def _log_add_exp(a, b):
    largest = tl.maximum(a, b)
    return largest + tl.log(tl.exp(a - largest) + tl.exp(b - largest))


@triton.jit
def _larger(a, b):
    return a if a > b else b  # a branch on a number, which a tile cannot take


@triton.jit
def _combined_kernel(
    x_ptr, w_ptr, y_ptr, r_ptr,
    CASE: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x, w = tl.load(x_ptr + offsets), tl.load(w_ptr + offsets)
    if CASE == "affine":
        _, y = tl.associative_scan((w, x), AXIS, _affine, reverse=REVERSE)
        _, r = tl.reduce((w, x), AXIS, _affine, keep_dims=True)
    elif CASE == "log_add_exp":
        y = tl.associative_scan(x, AXIS, _log_add_exp, reverse=REVERSE)
        r = tl.reduce(x, AXIS, _log_add_exp, keep_dims=True)
    else:
        y = tl.associative_scan(x, AXIS, _larger, reverse=REVERSE)
        r = tl.reduce(x, AXIS, _larger, keep_dims=True)
    tl.store(y_ptr + offsets, y)
    tl.store(r_ptr + offsets, r.broadcast_to(M, N))


def _combined(case, x, w, axis):
    if case == "affine":
        ys = [x.select(axis, 0)]
        for i in range(1, x.shape[axis]):
            ys.append(ys[-1] * w.select(axis, i) + x.select(axis, i))
        return torch.stack(ys, axis)
    return x.logcumsumexp(axis) if case == "log_add_exp" else x.cummax(axis).values


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", ["affine", "log_add_exp", "larger"])
def test_scans_and_reductions_with_a_function_of_their_own(case, reverse, axis):
    m, n = (4, 16) if case == "larger" else (4, 2048)
    x, w = torch.randn(m, n), torch.rand(m, n)
    y, r = torch.zeros(2, m, n)
    _combined_kernel[(1,)](x, w, y, r, CASE=case, AXIS=axis, REVERSE=reverse, M=m, N=n)
    turned = [t.flip(axis) if reverse else t for t in (x, w)]
    want = _combined(case, *turned, axis)
    torch.testing.assert_close(y, want.flip(axis) if reverse else want, rtol=1e-5, atol=1e-5)
    last = _combined(case, x, w, axis).narrow(axis, -1, 1)
    torch.testing.assert_close(r, last.expand(m, n), rtol=1e-5, atol=1e-5)


def test_a_long_scan_takes_no_minutes():
    x, y, r = torch.randn(3, 4, 4096)
    started = time.monotonic()
    _combined_kernel[(1,)](x, x, y, r, CASE="log_add_exp", AXIS=1, REVERSE=False, M=4, N=4096)
    assert time.monotonic() - started < 5  # 160 s, one number at a time
