"""Mutants of lib/ops/interaction.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant("high % 8, (dim, 0))", "high % 8, (dim + 1, 0))", "all pairs one place on"),
    Mutant(
        "low % 8 * 8 + high % 8", "high % 8 * 8 + low % 8", "other pairs, off the diagonal squares"
    ),
    Mutant(
        "square = low // 8 * (block_f // 8) + high // 8",
        "square = low // 8 * 4 + high // 8",
        "squares as if there were always 32 vectors",
    ),
    Mutant(
        "rows = (row + torch.arange(samples)[:, None] * block_f**2)",
        "rows = (row + torch.arange(samples)[:, None] * 0)",
        "the first sample's pairs for all that are worked on together",
    ),
    Mutant(
        "squares = tl.permute(squares, (0, 1, 3, 2, 4))",
        "squares = tl.permute(squares, (0, 1, 3, 4, 2))",
        "squares transposed, and with them what is not symmetric: the order of the pairs",
    ),
    Mutant(
        "tl.permute(rows, (1, 0, 2, 4, 3, 5)), (SAMPLES",
        "tl.permute(rows, (1, 0, 4, 2, 3, 5)), (SAMPLES",
        "columns taken for vectors",
    ),
    Mutant(
        "    mask = (sample < left) & (f <= TABLES) & (d < DIM)\n    if",
        "    mask = (sample < left) & (f < TABLES) & (d < DIM)\n    if",
        "the last table forgotten",
    ),
    Mutant(
        "    mask = (sample < left) & (f <= TABLES) & (d < DIM)\n    if",
        "    mask = (sample < left) & (f <= TABLES)\n    if",
        "the mask of the columns dropped",
    ),
    Mutant(
        "    mask = (sample < left) & (f <= TABLES) & (d < DIM)\n    if",
        "    mask = (f <= TABLES) & (d < DIM)\n    if",
        "samples read after the last",
    ),
    Mutant(
        "* stride_eb + table * stride_et +",
        "* stride_eb + table * DIM +",
        "tables as if contiguous",
    ),
    Mutant(
        "stride_et + d64 * stride_ed", "stride_et + d64", "the embeddings' column stride forgotten"
    ),
    Mutant(
        "(sample64 * stride_db + d64 * stride_dd + f * 0)",
        "(sample64 * DIM + d64 + f * 0)",
        "dense read as if contiguous",
    ),
    Mutant(
        "(own_sample * stride_db + own_d * stride_dd)",
        "(own_sample * DIM + own_d)",
        "y's part of dense as if dense were contiguous",
    ),
    Mutant(
        "y_ptr + first * ROW + (own_sample * ROW + own_d), own, mask=is_own",
        "y_ptr + first * ROW + (own_sample * ROW + own_d), own, mask=is_own & (own_sample == 0)",
        "dense of the first sample alone",
    ),
    Mutant(
        "mask & (f == 0), other=0.0).to(OPERAND)",
        "mask & (f == 1), other=0.0).to(OPERAND)",
        "mixed dtypes: no dense vector",
    ),
    Mutant(
        "from 8 GiB of float32 on\n    first = tl.program_id(0).to(tl.int64)",
        "from 8 GiB of float32 on\n    first = tl.program_id(0)",
        "int32 samples forward",
    ),
    Mutant(
        "as forward\n    first = tl.program_id(0).to(tl.int64)",
        "as forward\n    first = tl.program_id(0)",
        "int32 samples backward",
    ),
    Mutant(
        "following, next_left, sample, f, d",
        "first, left, sample, f, d",
        "forward, the first samples again and again",
    ),
    Mutant(
        "dy_ptr + following * ROW",
        "dy_ptr + first * ROW",
        "backward, the first samples again and again",
    ),
    Mutant(
        "return (host.cdiv(n_samples, plan.samples * trips),)",
        "return (n_samples // (plan.samples * trips),)",
        "floor where ceil was meant: the last samples forgotten",
    ),
    Mutant(
        "place[low, high] = place[high, low] = dim",
        "place[low, high] = dim",
        "slopes of a pair for its first vector alone",
    ),
    Mutant(
        "dim + torch.arange(len(low))\n",
        "dim + 1 + torch.arange(len(low))\n",
        "slopes one place on",
    ),
    Mutant(
        "    place = place[:, (k // (4 * pack) * pack + k % pack) * 4 + k // pack % 4]\n",
        "",
        "slopes beside other vectors",
    ),
    Mutant(
        "rows = torch.where(place >= 0, rows, block_y - 1)",
        "rows = torch.where(place >= 0, rows, 0)",
        "each vector paired with itself, by the first number of dy",
    ),
    Mutant(
        "plan.samples * (dim + _n_pairs(embeddings)) + 1)",
        "plan.samples * (dim + _n_pairs(embeddings)))",
        "no place for zeros where rows fill a power of two",
    ),
    Mutant(
        "dy.contiguous(), dense", "dy, dense", "dy read as if contiguous: a gradient of strides 0"
    ),
    Mutant(
        "            grad += tl.where(f == 0, own.to(COMPUTE), 0.0)\n",
        "",
        "dense's own gradient forgotten",
    ),
    Mutant(
        "own_d = column % 8 * 2 + column // 8",
        "own_d = column",
        "dense's own gradient in other columns",
    ),
    Mutant(
        "offsets = (out_sample * TABLES + out_vector - 1) * DIM + out",
        "offsets = (out_sample * TABLES + out_vector) * DIM + out",
        "gradients one table on",
    ),
    Mutant('precision: str = "tf32x3"', 'precision: str = "tf32"', "float32 rounded to TF32"),
    Mutant(
        '"OPERAND": _OPERANDS.get(dtype, compute)',
        '"OPERAND": tl.bfloat16 if dtype.itemsize == 4 else _OPERANDS.get(dtype, compute)',
        "float32 rounded to bfloat16",
    ),
    Mutant(
        "    dtype = host.dtype_of_sum(dense.dtype, embeddings.dtype)\n",
        "    dtype = dense.dtype\n",
        "mixed dtypes: y in that of dense",
    ),
    Mutant(
        "sources = _sources(*where, dense.device)",
        "sources = _sources.__wrapped__(*where, dense.device)",
        "a copy to the GPU in every call",
    ),
    Mutant("    @host.once\n", "", "a second derivative that is wrong in silence"),
    Mutant(
        "tl.store(ptr + place, rows, mask=place < left * ROW)",
        "tl.store(ptr + place, rows, mask=place < SAMPLES * ROW)",
        "rows after the last sample",
    ),
    Mutant(
        "rows = tl.load(ptr + place, mask=place < left * ROW, other=0.0)",
        "rows = tl.load(ptr + place, mask=place < SAMPLES * ROW, other=0.0)",
        "rows of dy after the last",
    ),
    Mutant(
        "sample64, table, d64 = sample.to(tl.int64),",
        "sample64, table, d64 = sample,",
        "int32 samples of a program",
    ),
    Mutant("f.to(tl.int64) - 1", "f - 1", "int32 tables"),
    Mutant(
        "tl.maximum(tl.minimum(n_samples - first, SAMPLES), 0)",
        "tl.minimum(n_samples - first + SAMPLES - 1, SAMPLES)",
        "samples after the last, where some are there",
    ),
]
