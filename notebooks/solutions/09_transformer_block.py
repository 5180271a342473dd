"""Solutions to the exercises of notebook 09."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on
from lib.ops.add_rms_norm import add_rms_norm_triton


# %% 09.1 forward: x, residual in, y out, and h if somebody reads it; backward: dy, h in, dx out, and dh
def bytes_saved(M, N, s, training, h_goes_on):
    eager = 3 + 2  # the sum: x, residual, h; the norm: h, y
    fused = 3 + (training or h_goes_on)  # x, residual, y; h for the next block or the backward pass
    if training:
        eager += 3 + 3 * h_goes_on  # dy, h, dx; then that, dh and their sum
        fused += 3 + h_goes_on
    return (eager - fused) * M * N * s


# %% 09.2 a norm takes its sum along; the last sum is the next block's first
def carried(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, h, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


# %% 09.3 what is above the longer limit, times the calls
def next_fusion(rows, gbps, tflops, noise_us):
    def saving_us(row):
        least_us = max(row["bytes"] / gbps / 1e3, row["flops"] / tflops / 1e6)
        return row["calls"] * (row["us"] - least_us)

    best = max(rows, key=saving_us, default=None)
    return best["name"] if best and saving_us(best) > noise_us else None
