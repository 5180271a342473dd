"""Plausible wrong answers to the exercises of notebook 09, named <answer>__<why>: each must be rejected."""

from lib.ops.add_rms_norm import add_rms_norm_triton
from lib.tests.exercises.wrong_answers import solution

import torch
import torch.nn.functional as F


def _saves(passes):
    """An answer with passes(training, h_goes_on) over a tensor."""
    return lambda M, N, s, training, h_goes_on: passes(training, h_goes_on) * M * N * s


bytes_saved__always_three = _saves(lambda training, h_goes_on: 3)
bytes_saved__forward_alone = _saves(lambda training, h_goes_on: 1 if training or h_goes_on else 2)
bytes_saved__h_always_written = _saves(
    lambda training, h_goes_on: 1 + (2 if training and h_goes_on else 0)
)
bytes_saved__h_saved_by_nobody = _saves(
    lambda training, h_goes_on: (1 if h_goes_on else 2) + (2 if training and h_goes_on else 0)
)
bytes_saved__backward_never_changes = _saves(
    lambda training, h_goes_on: 3 if training else 1 if h_goes_on else 2
)


def bytes_saved__elements(M, N, s, training, h_goes_on):
    return solution("09_transformer_block").bytes_saved(M, N, 1, training, h_goes_on)


def bytes_saved__two_bytes(M, N, s, training, h_goes_on):
    return solution("09_transformer_block").bytes_saved(M, N, 2, training, h_goes_on)


def bytes_saved__what_is_moved(M, N, s, training, h_goes_on):
    return (4 + 4 * training) * M * N * s


def carried__eager(block, branch, stream, cos, sin):
    def norm(x, layer):
        return F.rms_norm(x, layer.weight.shape, layer.weight, layer.eps)

    x = branch + stream
    h = x + block.attention(norm(x, block.norm1), cos, sin)
    return block.mlp(norm(h, block.norm2)), h


def carried__second_norm_alone(block, branch, stream, cos, sin):
    x = branch + stream
    y = F.rms_norm(x, x.shape[-1:], block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, x, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


def carried__stream_of_before(block, branch, stream, cos, sin):
    y, _ = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, stream, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


def carried__first_stream_returned(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, _ = add_rms_norm_triton(y, h, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


def carried__detached(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, h.detach(), block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


def carried__default_eps(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight)
    y, h = add_rms_norm_triton(block.attention(y, cos, sin), h, block.norm2.weight)
    return block.mlp(y), h


def carried__one_eps(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, h, block.norm2.weight, block.norm1.eps)
    return block.mlp(y), h


def carried__stream_first(block, branch, stream, cos, sin):
    return solution("09_transformer_block").carried(block, branch, stream, cos, sin)[::-1]


def carried__summed(block, branch, stream, cos, sin):
    y, h = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, h, block.norm2.weight, block.norm2.eps)
    return block.mlp(y) + h, h


def carried__results_exchanged(block, branch, stream, cos, sin):
    h, y = add_rms_norm_triton(branch, stream, block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    h, y = add_rms_norm_triton(y, h, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h


def carried__added_at_once(block, branch, stream, cos, sin):
    branch, stream = solution("09_transformer_block").carried(block, branch, stream, cos, sin)
    return branch + stream, torch.zeros_like(stream)


def _least_us(row, gbps, tflops):
    return max(row["bytes"] / gbps / 1e3, row["flops"] / tflops / 1e6)


def _choose(rows, saving_us, noise_us):
    best = max(rows, key=saving_us, default=None)
    return best["name"] if best and saving_us(best) > noise_us else None


def next_fusion__longest(rows, gbps, tflops, noise_us):
    return _choose(rows, lambda row: row["calls"] * row["us"], noise_us)


def next_fusion__first_above_the_noise(rows, gbps, tflops, noise_us):
    for row in rows:
        if row["calls"] * (row["us"] - _least_us(row, gbps, tflops)) > noise_us:
            return row["name"]
    return None


def next_fusion__bytes_alone(rows, gbps, tflops, noise_us):
    return _choose(
        rows, lambda row: row["calls"] * (row["us"] - row["bytes"] / gbps / 1e3), noise_us
    )


def next_fusion__one_call(rows, gbps, tflops, noise_us):
    return _choose(rows, lambda row: row["us"] - _least_us(row, gbps, tflops), noise_us)


def next_fusion__never_stops(rows, gbps, tflops, noise_us):
    return _choose(
        rows, lambda row: row["calls"] * (row["us"] - _least_us(row, gbps, tflops)), -1e9
    )


def next_fusion__noise_against_all(rows, gbps, tflops, noise_us):
    def saving_us(row):
        return row["calls"] * (row["us"] - _least_us(row, gbps, tflops))

    worth_it = sum(max(saving_us(row), 0) for row in rows) > noise_us
    return max(rows, key=saving_us)["name"] if worth_it else None


def next_fusion__as_a_share(rows, gbps, tflops, noise_us):
    def share(row):
        return 1 - _least_us(row, gbps, tflops) / row["us"]

    rows = [r for r in rows if r["calls"] * (r["us"] - _least_us(r, gbps, tflops)) > noise_us]
    return max(rows, key=share)["name"] if rows else None


def next_fusion__limits_added(rows, gbps, tflops, noise_us):
    def saving_us(row):
        both = row["bytes"] / gbps / 1e3 + row["flops"] / tflops / 1e6
        return row["calls"] * (row["us"] - both)

    return _choose(rows, saving_us, noise_us)


def next_fusion__distance(rows, gbps, tflops, noise_us):
    return _choose(
        rows, lambda row: row["calls"] * abs(row["us"] - _least_us(row, gbps, tflops)), noise_us
    )


def next_fusion__of_an_h200(rows, gbps, tflops, noise_us):
    return _choose(
        rows, lambda row: row["calls"] * (row["us"] - _least_us(row, 4244.0, 679.0)), noise_us
    )


def carried__branch_normed_alone(block, branch, stream, cos, sin):
    y = F.rms_norm(branch, branch.shape[-1:], block.norm1.weight, block.norm1.eps)
    y = block.attention(y, cos, sin)
    y, h = add_rms_norm_triton(y, branch + stream, block.norm2.weight, block.norm2.eps)
    return block.mlp(y), h
