"""Plausible wrong answers to the exercises of notebook 42, named <answer>__<why>: each must be rejected."""

from lib.tests.exercises.wrong_answers import solution, without_other

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_right = solution("42_lora")


class _Lecture(torch.nn.Module):
    """The module of the notebook, with one fault at a time: parameter, freeze, scale, start, dtype, buffers."""

    def __init__(self, linear, rank, alpha, fault):
        super().__init__()
        n, k = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.linear, self.scale = linear, alpha if fault == "scale" else alpha / rank
        if fault == "freeze":
            self.linear.requires_grad = False
        else:
            self.linear.requires_grad_(False)
        a, b = torch.randn(rank, k) / k**0.5, torch.zeros(n, rank)
        a, b = (
            (torch.zeros_like(a) if fault == "zeros" else a),
            (b + 0.1 if fault == "start" else b),
        )
        if fault == "parameter":
            self.a, self.b = torch.nn.Parameter(a).to(**like), torch.nn.Parameter(b).to(**like)
        elif fault == "dtype":
            self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)
        elif fault == "buffers":
            self.register_buffer("a", a.to(**like))
            self.register_buffer("b", b.to(**like))
        else:
            self.a, self.b = (torch.nn.Parameter(t.to(**like)) for t in (a, b))

    def forward(self, x):
        return torch.relu(self.linear(x) + self.scale * (x @ self.a.t() @ self.b.t()))


def _module(fault):
    return lambda linear, rank, alpha: _Lecture(linear, rank, alpha, fault)


add_lora__parameter_then_to = _module("parameter")
add_lora__frozen_by_attribute = _module("freeze")
add_lora__alpha_not_divided = _module("scale")
add_lora__does_not_begin_as_linear = _module("start")
add_lora__both_zero = _module("zeros")
add_lora__always_float32 = _module("dtype")
add_lora__buffers = _module("buffers")


class _NoReLU(_right.EagerLoRA):
    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.t() @ self.b.t())


class _HidesNaN(_right.EagerLoRA):
    def forward(self, x):
        z = self.linear(x) + self.scale * (x @ self.a.t() @ self.b.t())
        return torch.where(z > 0, z, 0)


class _Detached(_right.EagerLoRA):
    """Only B learns."""

    def forward(self, x):
        return torch.relu(self.linear(x) + self.scale * (x @ self.a.detach().t() @ self.b.t()))


class _NoGradientOfX(_right.EagerLoRA):
    """W needs no gradient, but the layers before x do."""

    def forward(self, x):
        with torch.no_grad():
            y = self.linear(x)
        return torch.relu(y + self.scale * (x @ self.a.t() @ self.b.t()))


class _Unregistered(_right.EagerLoRA):
    """The linear layer is in a list: not in the state_dict, not moved by .to()."""

    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        del self.linear
        self.hidden = [linear]

    def forward(self, x):
        return torch.relu(self.hidden[0](x) + self.scale * (x @ self.a.t() @ self.b.t()))


class _Alike(_right.EagerLoRA):
    """All rows of A are alike, get the same gradient and stay alike: rank 1 for good."""

    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        torch.nn.init.ones_(self.a)


class _MergedInForward(_right.EagerLoRA):
    """A matrix of W's size in each call."""

    def forward(self, x):
        weight = self.linear.weight + self.scale * self.b @ self.a
        return torch.relu(F.linear(x, weight, self.linear.bias))


def add_lora__rows_alike(linear, rank, alpha):
    return _Alike(linear, rank, alpha)


def add_lora__merged_in_forward(linear, rank, alpha):
    return _MergedInForward(linear, rank, alpha)


def add_lora__relu_hides_nan(linear, rank, alpha):
    return _HidesNaN(linear, rank, alpha)


def add_lora__no_relu(linear, rank, alpha):
    return _NoReLU(linear, rank, alpha)


def add_lora__a_does_not_learn(linear, rank, alpha):
    return _Detached(linear, rank, alpha)


def add_lora__no_gradient_through_w(linear, rank, alpha):
    return _NoGradientOfX(linear, rank, alpha)


def add_lora__linear_in_a_list(linear, rank, alpha):
    return _Unregistered(linear, rank, alpha)


def add_lora__the_linear_itself(linear, rank, alpha):
    return linear


shapes_that_show_it__one_step_over_k = ((1, 32, 1, 1), (2, 1, 2, 1))
shapes_that_show_it__not_the_smallest_k = ((1, 64, 1, 1), (2, 1, 2, 1))
shapes_that_show_it__one_row = ((1, 33, 1, 1), (1, 1, 2, 1))
shapes_that_show_it__one_column = ((1, 33, 1, 1), (2, 1, 1, 1))
shapes_that_show_it__a_rank_without_padding = ((1, 33, 1, 1), (2, 1, 2, 16))
shapes_that_show_it__rank_15 = ((1, 33, 1, 1), (2, 1, 2, 15))
shapes_that_show_it__the_other_way_round = ((2, 1, 2, 1), (1, 33, 1, 1))
shapes_that_show_it__one_shape = (1, 33, 1, 1)
shapes_that_show_it__not_numbers = (("1", "33", "1", "1"), ("2", "1", "2", "1"))


def _dz_and_du(*changes):
    return solution("42_lora", *changes).dz_and_du


dz_and_du__no_scale = _dz_and_du("du * scale, mask=du_mask", "du, mask=du_mask")
dz_and_du__a_scale_of_sixteen_bits = _dz_and_du(
    "du * scale, mask=du_mask", "du * tl.cast(scale, tl.bfloat16).to(tl.float32), mask=du_mask"
)
dz_and_du__strides_of_dy_ignored = _dz_and_du("float(scale), *dy.stride()", "float(scale), n, 1")
dz_and_du__zeros_of_y_let_through = _dz_and_du("tl.where(y <= 0,", "tl.where(y < 0,")
dz_and_du__drops_dy_where_y_is_nan = _dz_and_du(
    "tl.where(y <= 0, 0.0, dy)", "tl.where(y > 0, dy, 0.0)"
)
dz_and_du__du_of_dy = _dz_and_du("tl.dot(dz, b, du", "tl.dot(dy, b, du")
dz_and_du__tf32 = _dz_and_du('tl.dot(dz, b, du, input_precision="ieee")', "tl.dot(dz, b, du)")
dz_and_du__rounds_the_sum_on_the_way = _dz_and_du(
    'tl.dot(dz, b, du, input_precision="ieee")',
    'tl.dot(dz, b, du, input_precision="ieee").to(dy.dtype).to(tl.float32)',
)
dz_and_du__copies_dy = _dz_and_du(
    "dz, du = torch.empty_like(y)", "dy, dz, du = dy.contiguous(), torch.empty_like(y)"
)
dz_and_du__ranks_above_16_dropped = _dz_and_du(
    "max(16, triton.next_power_of_2(rank))\n    dz_and_du", "16\n    dz_and_du"
)
dz_and_du__dy_loaded_twice = _dz_and_du(
    "        tl.store(dz_ptr + offsets, dz, mask=mask)",
    "        tl.store(dz_ptr + offsets, dz, mask=mask)\n"
    "        dz = tl.where(y <= 0, 0.0, tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0)).to(dy.dtype)",
)
dz_and_du__column_tiles_race_for_du = _dz_and_du(
    "for start in range(0, n_cols, BLOCK_N):", "for start in [tl.program_id(1) * BLOCK_N]:",
    "    tl.store(du_ptr +",
    "    du_ptrs = du_ptr + rows[:, None] * rank + ranks[None, :]\n"
    "    du += tl.load(du_ptrs, mask=du_mask, other=0.0) / scale\n"
    "    tl.store(du_ptr +",
    "y.new_empty(m, rank)", "torch.zeros(m, rank, device=y.device)",
    "dz_and_du_kernel[(triton.cdiv(m, 32),)]", "dz_and_du_kernel[(triton.cdiv(m, 32), triton.cdiv(n, 64))]",
    "return dz, du", "return dz, du.to(y.dtype)",
)  # fmt: skip


def dz_and_du__du_by_pytorch(dy, y, lora_b, scale):
    dz, _ = _right.dz_and_du(dy, y, lora_b, scale)
    return dz, scale * (dz @ lora_b)


def dz_and_du__eager(dy, y, lora_b, scale):
    dz = torch.where(y <= 0, 0, dy)
    return dz, scale * (dz @ lora_b)


@triton.jit
def _many_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, bias_ptr, adapter_ptr, y_ptr, n_rows, n_cols, n_inner, rank, scale,
    FLAW: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m = tl.program_id(0) // n_tiles
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % n_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    adapter = tl.load(adapter_ptr) if FLAW == "first" else tl.load(adapter_ptr + pid_m)
    a_ptr += adapter * rank * n_inner
    if FLAW != "b of the first":
        b_ptr += adapter * rank * (n_inner if FLAW == "stride" else n_cols)

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    u = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        inside = inner < n_inner
        x_mask = (rows < n_rows)[:, None] & inside[None, :]
        w_mask = inside[:, None] & (cols < n_cols)[None, :]
        a_mask = inside[:, None] & (ranks < rank)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + cols[None, :] * n_inner + inner[:, None], mask=w_mask, other=0.0)
        a = tl.load(a_ptr + ranks[None, :] * n_inner + inner[:, None], mask=a_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        u = tl.dot(x, a, u, input_precision="ieee")
    b_mask = (ranks < rank)[:, None] & (cols < n_cols)[None, :]
    b = tl.load(b_ptr + cols[None, :] * rank + ranks[:, None], mask=b_mask, other=0.0)
    if FLAW != "scale":
        u = u * tl.cast(scale, tl.float32)
    total = tl.dot(u.to(b.dtype), b, total, input_precision="ieee")
    total += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    y = total if FLAW == "relu" else tl.where(total < 0, 0.0, total)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


def _many(x, weight, lora_a, lora_b, bias, adapter, scale, flaw, block_m=16):
    (n_rows, n_inner), n_cols = x.shape, weight.shape[0]
    y = x.new_empty(n_rows, n_cols)
    _many_kernel[(triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, 64),)](
        x, weight, lora_a, lora_b, bias, adapter, y, n_rows, n_cols, n_inner, lora_a.shape[1],
        float(scale), FLAW=flaw, BLOCK_R=16, BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=64,
    )  # fmt: skip
    return y


lora_many__tf32 = solution("42_lora", 'input_precision="ieee"', 'input_precision="tf32"').lora_many


lora_many__a_scale_of_sixteen_bits = solution(
    "42_lora", "tl.cast(scale, tl.float32)", "tl.cast(scale, tl.bfloat16).to(tl.float32)"
).lora_many
lora_many__zero_where_torch_has_nan = solution(
    "42_lora", "tl.where(total < 0, 0.0, total)", "tl.maximum(total, 0.0)"
).lora_many


def lora_many__the_first_adapter_for_all(*inputs):
    return _many(*inputs, "first")


def lora_many__b_of_the_first_adapter(*inputs):
    return _many(*inputs, "b of the first")


def lora_many__adapters_of_tiles_of_32(*inputs):
    return _many(*inputs, None, block_m=32)


def lora_many__no_scale(*inputs):
    return _many(*inputs, "scale")


def lora_many__no_relu(*inputs):
    return _many(*inputs, "relu")


def lora_many__products_by_pytorch(x, weight, lora_a, lora_b, bias, adapter, scale):
    rows = adapter.long().repeat_interleave(16)[: x.shape[0]]
    u = torch.einsum("mk,mrk->mr", x, lora_a[rows])
    delta = torch.einsum("mr,mnr->mn", u, lora_b[rows])
    return torch.relu(F.linear(x, weight, bias) + scale * delta)


def lora_many__one_launch_for_each_adapter(x, weight, lora_a, lora_b, bias, adapter, scale):
    rows = adapter.long().repeat_interleave(16)[: x.shape[0]]
    y = x.new_empty(x.shape[0], weight.shape[0])
    for k in range(len(lora_a)):
        inputs = (x, weight, lora_a[k : k + 1], lora_b[k : k + 1], bias, 0 * adapter, scale)
        y = torch.where((rows == k)[:, None], _right.lora_many(*inputs), y)
    return y


def lora_many__u_by_pytorch(x, weight, lora_a, lora_b, bias, adapter, scale):
    """One launch without the low-rank part, which PyTorch adds."""
    rows = adapter.long().repeat_interleave(16)[: x.shape[0]]
    z = _many(x, weight, 0 * lora_a, lora_b, bias, adapter, scale, "relu")
    u = torch.einsum("mk,mrk->mr", x, lora_a[rows])
    return torch.relu(z + scale * torch.einsum("mr,mnr->mn", u, lora_b[rows]))


@triton.jit
def _with_delta_kernel(
    x_ptr, w_ptr, bias_ptr, delta_ptr, y_ptr, n_rows, n_cols, n_inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    rows = (tl.program_id(0) // n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % n_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = (rows < n_rows)[:, None], (cols < n_cols)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        inside = inner < n_inner
        x_mask, w_mask = row_mask & inside[None, :], inside[:, None] & col_mask
        x = tl.load(x_ptr + rows[:, None] * n_inner + inner[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + cols[None, :] * n_inner + inner[:, None], mask=w_mask, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    offsets, mask = rows[:, None] * n_cols + cols[None, :], row_mask & col_mask
    total += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    total += tl.load(delta_ptr + offsets, mask=mask, other=0.0)
    tl.store(y_ptr + offsets, tl.where(total < 0, 0.0, total), mask=mask)


def lora_many__delta_by_sums_of_pytorch(x, weight, lora_a, lora_b, bias, adapter, scale):
    """No product by PyTorch in name: it multiplies and sums."""
    (m, k), n = x.shape, weight.shape[0]
    rows = adapter.long().repeat_interleave(16)[:m]
    u = (x.float()[:, None] * lora_a[rows].float()).sum(-1)
    delta, y = scale * (u[:, None] * lora_b[rows].float()).sum(-1), x.new_empty(m, n)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 32),)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    _with_delta_kernel[grid](x, weight, bias, delta, y, m, n, k, **blocks)
    return y


def lora_many__a_copy_of_a_and_b_for_each_group(x, weight, lora_a, lora_b, bias, adapter, scale):
    each = adapter.long()
    groups = torch.arange(len(adapter), dtype=torch.int32, device=x.device)
    return _right.lora_many(x, weight, lora_a[each], lora_b[each], bias, groups, scale)


_undefined = without_other("42_lora")
dz_and_du__undefined_lanes = _undefined.dz_and_du
lora_many__undefined_lanes = _undefined.lora_many
dz_and_du__a_mask_times_dy = solution(
    "42_lora", "tl.where(y <= 0, 0.0, dy).to(dy.dtype)", "dy * (1 - (y <= 0).to(dy.dtype))"
).dz_and_du


class _UpdateInFloat32(torch.nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        new = linear.weight.new_zeros
        self.a = torch.nn.Parameter(new(rank, linear.in_features).normal_())
        self.b = torch.nn.Parameter(new(linear.out_features, rank))

    def forward(self, x):
        update = (x.float() @ self.a.float().T) @ self.b.float().T
        return torch.relu(self.linear(x) + self.scale * update)


add_lora__update_in_float32 = _UpdateInFloat32
