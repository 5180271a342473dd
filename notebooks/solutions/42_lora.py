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


# %% 42.3 [x u] [W B]ᵀ. Copying x costs 2MK elements, y MN, ReLU in place 2MN: 5MNs where K = N, once more.
# With ReLU in cuBLASLt's epilogue it is 3, and 1 if x already lies in memory that has room for u beside it.
# (torch.cat reads and writes W as well, NK each; that can be done once.)
def lora_one_product(x, weight, lora_a, lora_b, bias, scale):
    u = x.new_empty(x.shape[0], lora_a.shape[0]).addmm_(x, lora_a.t(), beta=0, alpha=scale)
    wide = torch.cat([weight, lora_b], dim=1)
    return torch.addmm(bias, torch.cat([x, u], dim=1), wide.t()).relu_()


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
