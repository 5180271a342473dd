"""Solutions to the exercises of notebook 42."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import triton
import triton.language as tl


# %% 42.1 parameters are made where they are to be, the method with the underscore freezes, α is divided by r
class EagerLoRA(torch.nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        n, k = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.a = torch.nn.Parameter(torch.randn(rank, k, **like) / k**0.5)
        self.b = torch.nn.Parameter(torch.zeros(n, rank, **like))  # BA = 0, and B has a gradient

    def forward(self, x):
        return torch.relu(self.linear(x) + self.scale * (x @ self.a.t() @ self.b.t()))


def add_lora(linear, rank, alpha):
    return EagerLoRA(linear, rank, alpha)


# %% 42.2 inside: a second step over K, and nothing else. flat: a rank that was padded, whose padding finds a
# next row both in u and in B; with one row, or one column, the flat mask ends where the tensor does
shapes_that_show_it = ((1, 33, 1, 1), (2, 1, 2, 1))


# %% 42.3 a program owns rows and walks along N: it has dz in registers, stores it, and adds its product with a
# piece of B to du. A row's du is complete at the end, so nothing is added up by others.
@triton.jit
def dz_and_du_kernel(
    dy_ptr, y_ptr, b_ptr, dz_ptr, du_ptr, n_rows, n_cols, rank, scale, stride_dym, stride_dyn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # One program handles BLOCK_M rows: dz, BLOCK_N columns at a time, and du, (BLOCK_M, BLOCK_R).
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    du = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N).to(tl.int64)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn
        dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        dz = tl.where(y <= 0, 0.0, dy).to(dy.dtype)
        tl.store(dz_ptr + offsets, dz, mask=mask)
        b_mask = (cols < n_cols)[:, None] & (ranks < rank)[None, :]
        b = tl.load(b_ptr + cols[:, None] * rank + ranks[None, :], mask=b_mask, other=0.0)
        du = tl.dot(dz, b, du, input_precision="ieee")
    du_mask = (rows < n_rows)[:, None] & (ranks < rank)[None, :]
    tl.store(du_ptr + rows[:, None] * rank + ranks[None, :], du * scale, mask=du_mask)


def dz_and_du(dy, y, lora_b, scale):
    (m, n), rank = y.shape, lora_b.shape[1]
    dz, du = torch.empty_like(y), y.new_empty(m, rank)
    block_r = max(16, triton.next_power_of_2(rank))
    dz_and_du_kernel[(triton.cdiv(m, 32),)](
        dy, y, lora_b, dz, du, m, n, rank, float(scale), *dy.stride(),
        BLOCK_M=32, BLOCK_N=64, BLOCK_R=block_r,
    )  # fmt: skip
    return dz, du


# %% 42.4 tiles of 16 rows, so that a tile has one adapter: its number is one load, and moves the pointers to A
# and B. (Tiles of 16 rows read W eight times as often as tiles of 128; rows sorted by adapter can use those.)
@triton.jit
def many_kernel(
    x_ptr, w_ptr, a_ptr, b_ptr, bias_ptr, adapter_ptr, y_ptr, n_rows, n_cols, n_inner, rank, scale,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # One program handles one tile of y, (BLOCK_M, BLOCK_N), whose rows share an adapter.
    n_tiles = tl.cdiv(n_cols, BLOCK_N)
    pid_m = tl.program_id(0) // n_tiles
    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, BLOCK_R)
    adapter = tl.load(adapter_ptr + pid_m).to(tl.int64)
    a_ptr += adapter * rank * n_inner
    b_ptr += adapter * rank * n_cols

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
    u = (u * tl.cast(scale, tl.float32)).to(b.dtype)
    total = tl.dot(u, b, total, input_precision="ieee")
    total += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]
    y = tl.where(total < 0, 0.0, total)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


def lora_many(x, weight, lora_a, lora_b, bias, adapter, scale):
    (n_rows, n_inner), n_cols = x.shape, weight.shape[0]
    y = x.new_empty(n_rows, n_cols)
    many_kernel[(triton.cdiv(n_rows, 16) * triton.cdiv(n_cols, 64),)](
        x, weight, lora_a, lora_b, bias, adapter, y, n_rows, n_cols, n_inner, lora_a.shape[1],
        float(scale), BLOCK_R=16, BLOCK_M=16, BLOCK_N=64, BLOCK_K=64,
    )  # fmt: skip
    return y
