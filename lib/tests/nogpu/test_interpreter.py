"""The repairs of Triton's interpreter: each of these is wrong, or fails, without them."""

import subprocess
import sys

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


def test_bfloat16_dot():
    a, b = torch.randn(2, 32, 32).bfloat16()
    c = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


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


def test_importing_lib_after_triton_says_what_to_do():
    code = "import triton, lib"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    import os

    environment |= {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "Restart the kernel and import lib first" in done.stderr


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
