"""Loads and stores of interpreted kernels: errors that name the place, and exact byte counts."""

from lib import machine
from lib.nogpu import memory
from lib.nogpu.memory import OutOfBounds, count_traffic

import numpy as np
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, shift, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < (n if MASKED else 2 * n)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets + shift, mask=mask), mask=mask)


def copy(x, y, shift=0, masked=True):
    grid = (triton.cdiv(x.numel(), 256),)
    _copy_kernel[grid](x, y, x.numel(), shift, MASKED=masked, BLOCK_SIZE=256)


def pair(n=1000):
    x = torch.randn(n, device=machine.device())
    return x, torch.empty_like(x)


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
@pytest.mark.parametrize(
    ("shift", "masked", "message"),
    [
        (
            0,
            False,
            r"_copy_kernel: load from x_ptr at element 1000, .* 1000 elements; in program \(3, 0, 0\)",
        ),
        (1, True, "load from x_ptr at element 1000"),
        (-1, True, "load from x_ptr at element -1"),
    ],
)
def test_out_of_bounds_is_an_error_that_names_the_place(shift, masked, message):
    with pytest.raises(OutOfBounds, match=message):
        copy(*pair(), shift, masked)


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
def test_a_store_out_of_bounds():
    x, _ = pair()
    with pytest.raises(OutOfBounds, match="store to y_ptr at element 999, but that tensor has 999"):
        copy(x, torch.empty(999))


def test_the_process_goes_on_after_an_error():
    x, y = pair()
    copy(x, y)
    assert torch.equal(x, y)


def test_traffic_is_counted_per_argument():
    x, y = pair()
    traffic = count_traffic(lambda: copy(x, y))
    assert torch.equal(x, y)
    assert (traffic.launches, traffic.programs) == (1, 4)
    assert traffic.bytes_moved == traffic.bytes_requested == 8000
    table = traffic.table()
    assert table.loc["_copy_kernel.x_ptr", "loaded"] == 4000
    assert table.loc["_copy_kernel.y_ptr", "stored"] == 4000


def test_what_is_read_twice_is_requested_twice_and_moved_once():
    x, y = pair()

    @triton.jit
    def twice(x_ptr, y_ptr, BLOCK_SIZE: tl.constexpr):
        offsets = tl.arange(0, BLOCK_SIZE)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets) + tl.load(x_ptr + offsets))

    traffic = count_traffic(lambda: twice[(1,)](x, y, BLOCK_SIZE=512))
    assert traffic.bytes_requested == 3 * 2048
    assert traffic.bytes_moved == 2 * 2048


def test_two_launches_add_up_and_atomics_count_both_ways():
    out = torch.zeros(4, device=machine.device())

    @triton.jit
    def add_one(out_ptr):
        tl.atomic_add(out_ptr + tl.arange(0, 4), 1.0)

    traffic = count_traffic(lambda: [add_one[(2,)](out), add_one[(1,)](out)])
    assert traffic.launches == 2
    assert out.tolist() == [3.0] * 4
    assert traffic.by_argument["add_one.out_ptr"].stored == 3 * 16


def test_views_of_one_storage_are_distinguished():
    both = torch.randn(2000, device=machine.device())
    x, y = both[:1000], both[1000:]
    table = count_traffic(lambda: copy(x, y)).table()
    assert table.loc["_copy_kernel.x_ptr", "loaded"] == 4000
    assert table.loc["_copy_kernel.y_ptr", "stored"] == 4000


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * n_cols + cols, numerator / tl.sum(numerator, axis=0), mask=cols < n_cols)


@pytest.mark.parametrize("shape", [(7, 781), (1, 1), (3, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_fused_softmax_reads_once_and_writes_once(shape, dtype):
    """By hand: M rows of N elements of s bytes are MNs bytes read and MNs written, whatever BLOCK_SIZE."""
    x = torch.randn(shape, device=machine.device()).to(dtype)
    y = torch.empty_like(x)
    (m, n), s = shape, dtype.itemsize
    for block_size in (1024, 4096):
        traffic = count_traffic(lambda b=block_size: _softmax_kernel[(m,)](x, y, n, BLOCK_SIZE=b))
        assert traffic.by_argument["_softmax_kernel.x_ptr"].loaded == m * n * s
        assert traffic.by_argument["_softmax_kernel.y_ptr"].stored == m * n * s
        assert traffic.bytes_moved == traffic.bytes_requested == 2 * m * n * s
    torch.testing.assert_close(y, torch.softmax(x, -1))


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, M, N, BLOCK_SIZE: tl.constexpr):
    shape, block = [M, N], [BLOCK_SIZE, BLOCK_SIZE]
    x = tl.make_tensor_descriptor(x_ptr, shape=shape, strides=[N, 1], block_shape=block)
    y = tl.make_tensor_descriptor(y_ptr, shape=shape, strides=[N, 1], block_shape=block)
    y.store([0, 0], x.load([0, 0]))


@pytest.mark.skipif(machine.HAS_GPU, reason="a GPU needs Hopper and an allocator for this")
def test_loads_and_stores_through_descriptors_are_counted():
    x = torch.randn(20, 24)
    y = torch.zeros_like(x)
    traffic = count_traffic(lambda: _descriptor_kernel[(1,)](x, y, 20, 24, BLOCK_SIZE=32))
    assert torch.equal(x, y)
    assert traffic.bytes_moved == 2 * x.nbytes


# --- which tensor an address belongs to ---


@triton.jit
def _table_kernel(table_ptr, y_ptr, shift, HOW: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    # One program copies BLOCK_SIZE numbers from a tensor whose address stands in the table.
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    pointer: tl.constexpr = tl.pointer_type(tl.float32)
    if HOW == "scalar":
        x_ptr = tl.load(table_ptr + pid).to(pointer) + shift + cols
    elif HOW == "lanes":  # of several tensors
        x_ptr = tl.load(table_ptr + cols % 3).to(pointer) + shift + pid
    else:
        pointers = table_ptr.to(tl.pointer_type(pointer))
        x_ptr = tl.load(pointers + pid) + shift + cols
    tl.store(y_ptr + pid * BLOCK_SIZE + cols, tl.load(x_ptr))


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
@pytest.mark.parametrize("how", ["scalar", "lanes", "pointers to pointers"])
def test_tables_of_pointers(how):
    xs, y = [torch.randn(16), torch.randn(40)[8:24], torch.randn(4, 4)], torch.zeros(48)
    table = torch.tensor([x.data_ptr() for x in xs])
    _table_kernel[(3,)](table, y, 0, HOW=how, BLOCK_SIZE=16)
    rows = torch.stack([x.flatten() for x in xs])
    if how == "lanes":
        rows = torch.stack([rows[torch.arange(16) % 3, pid] for pid in range(3)])
    assert torch.equal(y, rows.flatten())
    traffic = count_traffic(lambda: _table_kernel[(3,)](table, y, 0, HOW=how, BLOCK_SIZE=16))
    assert traffic.by_argument["_table_kernel.y_ptr"].stored == 3 * 64


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
def test_out_of_bounds_through_a_table_of_pointers():
    xs, y = [torch.randn(16), torch.randn(4, 4), torch.randn(16)], torch.zeros(48)
    table = torch.tensor([x.data_ptr() for x in xs])
    with pytest.raises(
        OutOfBounds, match=r"load from a tensor of shape \(16,\) at element 16, .* 16"
    ):
        _table_kernel[(2,)](table, y, 1, HOW="scalar", BLOCK_SIZE=16)
    with pytest.raises(OutOfBounds, match="no living tensor is; in program"):
        _table_kernel[(2,)](table, y, 2**40, HOW="lanes", BLOCK_SIZE=16)
    table[2] += 4
    last = r"In a tensor of shape \(16,\), the nearest, it would be element 16 of 16 elements"
    with pytest.raises(OutOfBounds, match=last):
        _table_kernel[(1,)](table, y, 15, HOW="lanes", BLOCK_SIZE=16)
    table[0], without_memory = 0, torch._efficientzerotensor((16,))
    assert without_memory.data_ptr() == 0
    with pytest.raises(OutOfBounds, match="load from a null pointer"):
        _table_kernel[(1,)](table, y, 0, HOW="scalar", BLOCK_SIZE=16)
    del xs[1]
    freed = r"no living tensor is; in program \(0, 0, 0\).* a temporary"
    with pytest.raises(OutOfBounds, match=freed):
        _table_kernel[(1,)](table[1:], y, 0, HOW="scalar", BLOCK_SIZE=16)


@triton.jit
def _rows_kernel(x_ptr, y_ptr, first_row, row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row, cols = first_row + tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * row_stride + cols, mask=mask)
    tl.store(y_ptr + tl.program_id(0) * n_cols + cols, x, mask=mask)


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
def test_the_argument_named_is_the_one_read_and_not_the_nearest():
    both = torch.zeros(64), torch.zeros(64)
    for x, y in (both, both[::-1]):
        distance = (y.data_ptr() - x.data_ptr()) // 4
        with pytest.raises(OutOfBounds, match=rf"load from x_ptr at element {distance}, .* 64 "):
            _rows_kernel[(1,)](x, y, distance, 1, 4, BLOCK_SIZE=4)  # lands in y
    with pytest.raises(OutOfBounds, match=r"\(the address lies in y_ptr\); in program"):
        _rows_kernel[(1,)](x, y, distance, 1, 4, BLOCK_SIZE=4)


def test_elements_before_address_0_are_negative():
    """Where memory begins at low addresses, an int32 that wrapped leads there; NumPy's is unsigned."""
    tensor = memory._Tensor("x", torch.zeros(64))
    tensor.base = 2**20
    assert tensor.element(np.uint64(2**64 - 2**31 + 2**20)) == -(2**29)


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
def test_an_int32_product_that_wrapped_is_named():
    x, y = torch.zeros(64), torch.zeros(64)
    where = r"in program \(0, 0, 0\). In line \d+ of test_memory.py, `x = tl.load"
    with pytest.raises(
        OutOfBounds, match=rf"x_ptr at element -2147483648, .* {where}.* passed 2\*\*31"
    ):
        _rows_kernel[(8,)](x, y, 4, 2**29, 4, BLOCK_SIZE=4)
    with pytest.raises(OutOfBounds, match="Check the mask and the offsets"):
        _rows_kernel[(8,)](x, y, 1, 2**29, 4, BLOCK_SIZE=4)


@pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")
def test_pointers_that_were_chosen_or_cast():
    @triton.jit
    def kernel(a_ptr, b_ptr, y_ptr, shift, CAST: tl.constexpr, BLOCK_SIZE: tl.constexpr):
        cols = tl.arange(0, BLOCK_SIZE)
        a_ptrs = a_ptr + cols
        if CAST:
            tl.store(y_ptr + cols, tl.load(a_ptr.to(tl.pointer_type(tl.int32)) + shift + cols))
        else:
            tl.store(y_ptr + cols, tl.load(tl.where(cols < 2, a_ptrs, b_ptr + cols) + shift))

    a, b, y = torch.zeros(4), torch.ones(4), torch.zeros(4)
    kernel[(1,)](a, b, y, 0, CAST=False, BLOCK_SIZE=4)
    assert y.tolist() == [0, 0, 1, 1]
    kernel[(1,)](b, a, y, 0, CAST=True, BLOCK_SIZE=4)
    assert y[0] == 0x3F800000
    with pytest.raises(OutOfBounds, match="load from a_ptr at element 4"):
        kernel[(1,)](a, b, y, 1, CAST=True, BLOCK_SIZE=4)
    with pytest.raises(OutOfBounds):
        kernel[(1,)](a, b, y, 2**30, CAST=False, BLOCK_SIZE=4)
