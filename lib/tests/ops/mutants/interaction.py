"""Mutants of lib/ops/interaction.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "(8 * q + 2).to(tl.float32)", "(8 * q).to(tl.float32)", "a pair counted to the vector after"
    ),
    Mutant(
        "n_tables - (q - t * (t + 1) // 2)",
        "n_tables - 1 - (q - t * (t + 1) // 2)",
        "each pair with the vector before",
    ),
    Mutant("q = n_pairs - 1 - pair", "q = n_pairs - pair", "all pairs one place on"),
    Mutant(
        "(f > 0) & (f <= n_tables) & (d < dim)\n    embeddings",
        "(f > 0) & (f < n_tables) & (d < dim)\n    embeddings",
        "the last table forgotten",
    ),
    Mutant(
        "mask=(f == 0) & (d < dim), other=0.0)\n    # the",
        "mask=f == 0, other=0.0)\n    # the",
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
        "of float32 on\n        sample = tl.program_id(0).to(tl.int64) *",
        "of float32 on\n        sample = tl.program_id(0) *",
        "int32 samples forward",
    ),
    Mutant(
        "samples_per_program):\n        sample = tl.program_id(0).to(tl.int64) *",
        "samples_per_program):\n        sample = tl.program_id(0) *",
        "int32 samples backward",
    ),
    Mutant(
        "return (_cdiv(n_samples, samples_per_program),)",
        "return (n_samples // samples_per_program,)",
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
    Mutant('operand), None, "ieee"', 'operand), None, "tf32"', "float32 rounded to TF32"),
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
