"""Mutants of lib/ops/interaction.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant("g - f - 1\n    is_pair", "g - f\n    is_pair", "all pairs one place on"),
    Mutant(
        "is_pair = (f < g) & (g <= n_tables)",
        "is_pair = f < g",
        "pairs with tables that are not there",
    ),
    Mutant(
        "dim + f * (2 * n_tables + 1 - f) // 2",
        "dim + f * (2 * n_tables - f) // 2",
        "pairs over those of the vector before",
    ),
    Mutant(
        "(k + AHEAD < samples_per_program) & ", "", "a sample read that another program computes"
    ),
    Mutant(" & (sample + AHEAD < n_samples)", "", "a sample read after the last"),
    Mutant("        vectors = last_read\n\n", "\n", "the first sample again and again"),
    Mutant(
        "is_there & (f > 0) & (f <= n_tables) & (d < dim)\n    embeddings",
        "is_there & (f > 0) & (f < n_tables) & (d < dim)\n    embeddings",
        "the last table forgotten",
    ),
    Mutant(
        "mask=is_there & (f == 0) & (d < dim), other=0.0)\n    # the",
        "mask=is_there & (f == 0), other=0.0)\n    # the",
        "the mask of the columns dropped from dense",
    ),
    Mutant(
        "table_offsets = (f - 1).to(tl.int64) * stride_et",
        "table_offsets = (f - 1) * dim",
        "tables read as if contiguous",
    ),
    Mutant(
        "sample * stride_eb + table_offsets + d * stride_ed",
        "sample * stride_eb + table_offsets + d",
        "the column stride of the embeddings forgotten",
    ),
    Mutant(
        "dense_ptr + sample * stride_db + d * stride_dd + f * 0",
        "dense_ptr + sample * dim + d + f * 0",
        "dense read as if contiguous",
    ),
    Mutant(
        "first_sample = tl.program_id(0).to(tl.int64) *",
        "first_sample = tl.program_id(0) *",
        "int32 samples forward",
    ),
    Mutant(
        "samples_per_program):\n        sample = tl.program_id(0).to(tl.int64) *",
        "samples_per_program):\n        sample = tl.program_id(0) *",
        "int32 samples backward",
    ),
    Mutant(
        "return plan, (_cdiv(n_samples, samples_per_program),)",
        "return plan, (n_samples // samples_per_program,)",
        "floor where ceil was meant: the last samples forgotten",
    ),
    Mutant(
        "low * (2 * n_tables + 1 - low) // 2",
        "low * (2 * n_tables - low) // 2",
        "slopes of other pairs",
    ),
    Mutant(
        "is_pair = (f != g) & (high <= n_tables)",
        "is_pair = high <= n_tables",
        "each vector paired with itself",
    ),
    Mutant(
        "dy_row + place * stride_yn",
        "dy_row + place",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant("            grad += own.to(COMPUTE)\n", "", "dense's own gradient forgotten"),
    Mutant(
        "offsets = (sample * n_tables + f - 1) * dim + d",
        "offsets = (sample * n_tables + f) * dim + d",
        "gradients one table on",
    ),
    Mutant('small, "tf32x3")', 'small, "tf32")', "float32 rounded to TF32"),
    Mutant(
        "operand = vectors.to(OPERAND)",
        "operand = vectors.to(tl.bfloat16)",
        "float32 rounded to bfloat16",
    ),
    Mutant(
        "    dtype = _dtype_of_sum(dense.dtype, embeddings.dtype)\n    y = ",
        "    dtype = dense.dtype\n    y = ",
        "mixed dtypes: y in that of dense",
    ),
    Mutant("    @_once\n", "", "a second derivative that is wrong in silence"),
]
