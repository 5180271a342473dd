"""Solutions to the exercises of notebook 46."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


# %% 46.1 the row in bytes first, then whole steps of 128, one of them at least, and no more than there is
def rows_of_chunk(budget, n_rows, n_cols, itemsize):
    row_bytes = -(-n_cols * itemsize // 16) * 16
    return min(n_rows, max(128, budget // row_bytes // 128 * 128))


# %% 46.2 the derivative of cap * tanh(z / cap) is 1 - tanh(z / cap)**2: the two caps cancel
def capped_loss(logits, labels, cap):
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    tanh = torch.tanh(wide / cap)
    loss = F.cross_entropy(cap * tanh, labels)
    d = torch.softmax(cap * tanh, -1)
    d[torch.arange(len(d), device=d.device), labels] -= 1
    return loss, (d / len(d) * (1 - tanh * tanh)).to(logits.dtype)


# %% 46.3 probabilities go into the product as they are, and 1 / N meets float32. (A probability below 6e-5 has
# fewer digits in float16, one below 3e-8 none: for large vocabularies multiply by 1024 as well.)
def dw_in_float16(x, logits, labels):
    d = torch.softmax(logits.float(), -1)
    d[torch.arange(len(d), device=d.device), labels] -= 1
    return (d.half().t() @ x).float() / len(x)


# %% 46.4 -(1 - s) log p[label] - s mean(log p) = lse - (1 - s) z[label] - s mean(z): one more sum in the walk,
# in which what is beyond the row has to be 0, and not the -inf that it is for the maximum
@triton.jit
def smoothed_loss_kernel(
    logits_ptr, labels_ptr, loss_ptr, smoothing, n_cols, BLOCK_SIZE: tl.constexpr
):
    # One program handles one row of logits, (n_cols,), BLOCK_SIZE columns at a time.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n_cols
    at_label = tl.load(logits_ptr + tl.load(labels_ptr + row)).to(tl.float32)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    plain = tl.full((), 0.0, tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        cols = start + tl.arange(0, BLOCK_SIZE)
        z = tl.load(logits_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), axis=0)
        plain += tl.sum(tl.where(cols < n_cols, z, 0.0), axis=0)
        top = new_top
    s = tl.cast(smoothing, tl.float32)
    loss = top + tl.log(total) - (1 - s) * at_label - s * plain / n_cols
    tl.store(loss_ptr + row, loss)


def smoothed_loss(logits, labels, smoothing):
    n_rows, n_cols = logits.shape
    loss = torch.empty(n_rows, device=logits.device)
    smoothed_loss_kernel[(n_rows,)](logits, labels, loss, float(smoothing), n_cols, BLOCK_SIZE=1024)
    return loss
