"""Plausible wrong answers to the exercises of notebook 23, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import beside_an_empty_kernel, solution

import torch
import triton
import triton.language as tl

_right = solution("23_interpreter_is_not_a_gpu")


@triton.jit
def _one_other_kernel(x_ptr, y_ptr, n_cols, OTHER: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=OTHER)
    tl.store(y_ptr + row, tl.max(x, axis=0) - tl.min(x, axis=0))


def _row_range(x, other):
    y = torch.empty(x.shape[0], device=x.device)
    size = triton.next_power_of_2(x.shape[1])
    _one_other_kernel[(x.shape[0],)](x, y, x.shape[1], OTHER=other, BLOCK_SIZE=size)
    return y


def row_range__padding_of_0(x):
    return _row_range(x, 0.0)


def row_range__padding_of_minus_infinity(x):
    return _row_range(x, float("-inf"))


@triton.jit
def _large_numbers_kernel(x_ptr, y_ptr, n_cols, LARGE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    mask, x_ptrs = cols < n_cols, x_ptr + row * n_cols + cols
    largest = tl.max(tl.load(x_ptrs, mask=mask, other=-LARGE), axis=0)
    smallest = tl.min(tl.load(x_ptrs, mask=mask, other=LARGE), axis=0)
    tl.store(y_ptr + row, largest - smallest)


def _row_range_with(x, large):
    y = torch.empty(x.shape[0], device=x.device)
    size = triton.next_power_of_2(x.shape[1])
    _large_numbers_kernel[(x.shape[0],)](x, y, x.shape[1], LARGE=large, BLOCK_SIZE=size)
    return y


def row_range__100_for_infinity(x):
    return _row_range_with(x, 100.0)


def row_range__1000_for_infinity(x):
    return _row_range_with(x, 1000.0)


def row_range__1e9_for_infinity(x):
    return _row_range_with(x, 1e9)


def row_range__the_largest_number_for_infinity(x):
    return _row_range_with(x, torch.finfo(torch.float32).max)


def row_range__eager(x):
    return x.amax(1) - x.amin(1)


right_here_wrong_there__races_only = {"count", "running_total", "shift"}
right_here_wrong_there__reverse_order_only = {"running_total", "shift"}
right_here_wrong_there__atomics_too = _right.right_here_wrong_there | {"count_atomic"}
right_here_wrong_there__everything_in_place = _right.right_here_wrong_there | {"scale"}
right_here_wrong_there__wrong_here_already = _right.right_here_wrong_there | {"relu"}
right_here_wrong_there__both_matmuls = _right.right_here_wrong_there | {"matmul_ieee"}
right_here_wrong_there__nothing = set()
right_here_wrong_there__one_name_only = "count"


_second_barrier = "    __syncthreads();  // outside the if: every thread has to come by\n"
smooth_source__one_barrier = _right.smooth_source.replace(_second_barrier, "")
smooth_source__warps_only = _right.smooth_source.replace(
    _second_barrier, _second_barrier.replace("syncthreads", "syncwarp")
)
smooth_source__barrier_in_a_branch = _right.smooth_source.replace(
    _second_barrier, "    if (t > 0) __syncthreads();\n"
)
smooth_source__barrier_inside_the_guard = _right.smooth_source.replace(
    _second_barrier, "    if (i < n) __syncthreads();\n"
)
smooth_source__no_shared_memory = (
    smooth_source__one_barrier.replace("__shared__ float tile[130];", "")
    .replace("    __syncthreads();\n", "")
    .replace("tile[t + 1] = i < n ? x[i] : 0.f;", "const float own = i < n ? x[i] : 0.f;")
    .replace("if (t == 0) tile[0] = start > 0 ?", "const float left = i > 0 && i <= n ?")
    .replace("x[start - 1]", "x[i - 1]")
    .replace("if (t == 127) tile[129] =", "const float right =")
    .replace("tile[t] + tile[t + 1] + tile[t + 2]", "left + own + right")
)
smooth_source__an_unused_tile = smooth_source__no_shared_memory.replace(
    "  const int t = threadIdx.x;", "  __shared__ float tile[130];\n  const int t = threadIdx.x;"
)


def _hides(*changes):
    return solution("23_interpreter_is_not_a_gpu", *changes).what_hides


what_hides__reverse_order_alone = _hides('("reverse", 0, 1, 2, 3)', '("reverse",)')
what_hides__no_other_order = _hides('("reverse", 0, 1, 2, 3)', '("forward",)')
what_hides__no_races = _hides("races(suspect.run)", "False")
what_hides__no_products = _hides(r're.search(r"mma\S*tf32", suspect.ptx())', "False")
what_hides__any_product = _hides(r"mma\S*tf32", "mma|fma")
what_hides__atomics_in_the_ptx = _hides(
    "if not torch.equal(again.nan_to_num(), result.nan_to_num())",
    'if re.search(r"(atom|red)\S*add", suspect.ptx())',
)
what_hides__what_is_wrong_here = _hides(
    "torch.equal(again.nan_to_num(), result.nan_to_num())",
    "torch.allclose(result.float(), _.float(), atol=1e-4, equal_nan=True)",
)
what_hides__the_first_alone = _hides("    return hides", "    return {*sorted(hides)[:1]}")


def what_hides__all_of_them(suspect):
    return {"race", "order", "tf32"}


def what_hides__nothing(suspect):
    return set()


row_range__eager_beside_an_empty_kernel = beside_an_empty_kernel(row_range__eager)
