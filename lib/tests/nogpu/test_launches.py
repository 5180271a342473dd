"""What a launch takes without a GPU, as it does with one, and the sentences in which it refuses the rest."""

from __future__ import annotations

from lib import machine
from lib.nogpu.compile_only import compile_for, signature_of

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")


@triton.jit
def _add_one_kernel(x_ptr, y_ptr, n, BLOCK_SIZE: "tl.constexpr", PLAIN: tl.constexpr = True):  # noqa: UP037
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


@pytest.mark.parametrize(
    "grid",
    [
        [4],
        [4, 1],
        torch.Size([4]),
        lambda meta: [triton.cdiv(meta["n"], meta["BLOCK_SIZE"])],
        lambda meta: (meta["x_ptr"].numel() // 32 + meta["PLAIN"], np.int64(1)),
    ],
)
def test_grids_and_quoted_annotations(grid):
    x, y = torch.randn(100), torch.zeros(100)
    _add_one_kernel[grid](x, y, 100, BLOCK_SIZE=32, num_warps=8, waves_per_eu=2)
    assert torch.equal(y, x + 1)


def test_quoted_annotations_compile_too():
    x = torch.randn(100)
    assert compile_for(_add_one_kernel, signature_of(_add_one_kernel, x, x, 100, BLOCK_SIZE=32)).ptx


X = torch.zeros(4)
GOOD = {"x_ptr": X, "y_ptr": X, "n": 4, "BLOCK_SIZE": 4}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"x_ptr": None},
            r"x_ptr is None, and the kernel computes with it in line \d+ of .*: pass a tensor, or guard",
        ),
        ({"n": None}, "n is None, and the kernel computes"),
        ({"x_ptr": X.to(torch.complex64)}, r"x_ptr is complex64, .* torch.view_as_real\(x\)"),
        ({"x_ptr": X.numpy()}, r"x_ptr is a NumPy array: pass torch.from_numpy\(x\)"),
        ({"x_ptr": [1.0]}, "x_ptr is a list: a kernel takes tensors"),
        ({"x_ptr": X.to_sparse()}, r"without memory of its own \(torch.sparse_coo\)"),
        ({"x_ptr": X.to("meta")}, r"without memory of its own \(on the device meta\)"),
        ({"n": np.int32(4)}, r"n is of NumPy's int32: pass int\(x\)"),
        ({"n": "4"}, "n is a str"),
        ({"BLOCK": 4}, "has no parameter 'BLOCK'; it has x_ptr, y_ptr, n, BLOCK_SIZE, PLAIN"),
        (
            {"BLOCK_SIZE": torch.float32},
            r"line \d+ of test_launches.py, `offsets = .*` uses something",
        ),
    ],
)
def test_wrong_arguments_are_sentences(given, sentence):
    with pytest.raises(TypeError, match=f"_add_one_kernel.*{sentence}"):
        _add_one_kernel[(1,)](**GOOD | given)


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        (4, "the grid 4 is not a tuple"),
        ((2.0,), r"the grid \(2.0,\) is not a tuple of one to three ints"),
        ((), "has 0 dimensions"),
        ((1, 1, 1, 1), "has 4 dimensions"),
        ((1, 70000), r"\(1, 70000, 1\) is larger than a GPU takes"),
    ],
)
def test_wrong_grids_are_sentences(grid, sentence):
    with pytest.raises((TypeError, ValueError), match=f"_add_one_kernel: .*{sentence}"):
        _add_one_kernel[grid](**GOOD)


def test_other_mistakes_of_a_call():
    with pytest.raises(
        TypeError, match="_add_one_kernel: missing a required argument: 'BLOCK_SIZE'"
    ):
        _add_one_kernel[(1,)](X, X, 4)
    with pytest.raises(RuntimeError, match=r"is a kernel: launch it .* _add_one_kernel\[\(n,\)\]"):
        _add_one_kernel(**GOOD)


@triton.autotune([triton.Config({"BLOCK_SIZE": size}) for size in (32, 64, 128)], key=["n"])
@triton.jit
def _picky_kernel(y_ptr, n, SMALLEST: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    tl.static_assert(BLOCK_SIZE >= SMALLEST, "BLOCK_SIZE is too small")
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(y_ptr + offsets, BLOCK_SIZE, mask=offsets < n)


def test_autotuning_drops_a_config_whose_static_assert_fails():
    y = torch.zeros(100)

    def grid(meta):
        return (triton.cdiv(100, meta["BLOCK_SIZE"]),)

    _picky_kernel[grid](y, 100, SMALLEST=64)
    assert y.unique().tolist() == [64]
    with pytest.raises(AssertionError, match="static_assert: BLOCK_SIZE is too small"):
        _picky_kernel[grid](y, 101, SMALLEST=256)


# --- tl.dot_scaled ---


@triton.jit
def _dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr,
    A: tl.constexpr, B: tl.constexpr, PACKED_K: tl.constexpr,
    AM: tl.constexpr, AK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    m, n, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, GROUPS)
    a = tl.load(a_ptr + tl.arange(0, AM)[:, None] * AK + tl.arange(0, AK)[None, :])
    b = tl.load(b_ptr + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * GROUPS + groups[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * GROUPS + groups[None, :])
    c = tl.dot_scaled(a, a_scale, A, b, b_scale, B, lhs_k_pack=PACKED_K, rhs_k_pack=PACKED_K)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}


def _operand(kind, shape, axis):
    """What the kernel gets, and the same numbers as float64."""
    if kind != "e2m1":
        x = torch.randn(shape).to(_DTYPES[kind])
        return x, x.double()
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    bits = torch.randint(0, 16, shape, dtype=torch.uint8)
    low, high = (bits.movedim(axis, 0)[k::2] for k in (0, 1))
    return (low | high << 4).movedim(0, axis).contiguous(), torch.cat([positive, -positive])[
        bits.long()
    ]


@pytest.mark.parametrize(
    ("a_kind", "b_kind", "packed_k"),
    [
        ("e4m3", "e4m3", True),
        ("e5m2", "e2m1", True),
        ("e2m1", "bf16", True),
        ("e2m1", "e2m1", False),
    ],
)
def test_scaled_products(a_kind, b_kind, packed_k):
    m, n, k = 16, 32, 64
    (a, a_numbers), (b, b_numbers) = (
        _operand(a_kind, (m, k), 1 if packed_k else 0),
        _operand(b_kind, (k, n), 0 if packed_k else 1),
    )
    a_scale, b_scale = (
        torch.randint(120, 134, (size, k // 32), dtype=torch.uint8) for size in (m, n)
    )
    a_numbers *= (2.0 ** (a_scale.double() - 127)).repeat_interleave(32, 1)
    b_numbers *= (2.0 ** (b_scale.double() - 127)).repeat_interleave(32, 1).T
    c = torch.zeros(m, n)
    sizes = {"AM": a.shape[0], "AK": a.shape[1], "BK": b.shape[0], "BN": b.shape[1], "M": m, "N": n}
    _dot_scaled_kernel[(1,)](
        a, a_scale, b, b_scale, c, A=a_kind, B=b_kind, PACKED_K=packed_k, GROUPS=k // 32, **sizes
    )
    torch.testing.assert_close(c.double(), a_numbers @ b_numbers, rtol=1e-5, atol=0.1)
