"""Mutants of lib/ops/embedding_hash.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "    row += tl.where(row < 0, n_rows, 0)\n", "", "C's remainder: rows before the table's first"
    ),
    Mutant("row = (ids + 1) % n_rows", "row = ids % n_rows", "the 1 forgotten in the kernel"),
    Mutant(
        "(ids.long() + 1) % n_rows", "ids.long() % n_rows", "the 1 forgotten where rows are counted again"
    ),
    Mutant(
        "(ids.long() + 1) % n_rows",
        "torch.fmod(ids.long() + 1, n_rows).abs()",
        "the sign dropped in place of a floor"
    ),
    Mutant(
        "tl.load(tables_ptr + TABLES + table)",
        "tl.load(tables_ptr + TABLES + (table + 1) % TABLES)",
        "the start of the next table"
    ),
    Mutant(
        "n_rows, start = tl.load(tables_ptr + table)",
        "n_rows, start = tl.load(tables_ptr)",
        "all tables as long as the first"
    ),
    Mutant(
        "itertools.accumulate(num_rows[:-1], initial=0)",
        "itertools.accumulate(num_rows[1:], initial=0)",
        "starts counted from the second table on"
    ),
    Mutant("other=0).to(tl.int64)", "other=0)", "1 added to an id in 32 bits"),
    Mutant(
        "first = tl.program_id(0).to(tl.int64) *", "first = tl.program_id(0) *", "int32 lookups"
    ),
    Mutant(
        "row[:, None] * STRIDE_WR",
        "row[:, None].to(tl.int32) * STRIDE_WR",
        "int32 offsets of rows that are read"
    ),
    Mutant(
        "dweight_ptr + row[:, None] * DIM",
        "dweight_ptr + row[:, None].to(tl.int32) * DIM",
        "int32 offsets of rows that are added to"
    ),
    Mutant(
        "is_there = lookup < n_lookups", "is_there = lookup <= n_lookups", "one lookup more than there are"
    ),
    Mutant(
        "mask = is_there[:, None] & (cols < DIM)\n    weight",
        "mask = is_there[:, None] & (cols < DIM + BLOCK_D)\n    weight",
        "the mask of the columns dropped forward"
    ),
    Mutant(
        "mask = is_there[:, None] & (cols < DIM)\n    dy",
        "mask = is_there[:, None] & (cols < DIM + BLOCK_D)\n    dy",
        "the mask of the columns dropped backward"
    ),
    Mutant(
        "place = (first % TABLES).to(tl.int32) + tl.arange(0, BLOCK_L)",
        "place = tl.arange(0, BLOCK_L)",
        "every program begins with the first table"
    ),
    Mutant(
        "sample * stride_ib + table * stride_it",
        "sample * stride_ib + table",
        "the column stride of ids forgotten"
    ),
    Mutant("cols * STRIDE_WD", "cols", "the column stride of weight forgotten"),
    Mutant(
        "sample * STRIDE_YB + table * STRIDE_YT",
        "sample * TABLES * DIM + table * DIM",
        "dy read as if contiguous: a gradient of strides 0"
    ),
    Mutant(
        'tl.atomic_add(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask, sem="relaxed")',
        "tl.store(dweight_ptr + row[:, None] * DIM + cols, dy, mask=mask)",
        "the last lookup of a row wins"
    ),
    Mutant(
        "dweight = dy.new_zeros(size, dtype", "dweight = dy.new_empty(size, dtype",
        "atomic additions to what was in memory"
    ),
    Mutant(
        "dtype=host.sum_dtype(dy.dtype))",
        "dtype=dy.dtype)",
        "sums of 16 bits in 16 bits"
    ),
    Mutant(
        "grid = host.cdiv(n_lookups, plan.block_l), host.cdiv(dim, plan.block_d)",
        "grid = host.cdiv(n_lookups, plan.block_l), dim // plan.block_d",
        "floor where ceil was meant: the last columns forgotten"
    ),
    Mutant("-1, False, sparse)", "-1, False, False)", "a sparse gradient that is dense"),
    Mutant(
        "_backward(dy, ids, num_rows, deterministic=deterministic)",
        "_backward(dy, ids, num_rows)",
        "the registered op always sorts"
    ),
    Mutant(
        "torch.compiler.is_compiling() or host.active_transforms()",
        "torch.compiler.is_compiling()",
        "what was made under torch.func is used after it"
    ),
    Mutant(
        "_tables_once = functools.cache(_tables_anew)",
        "_tables_once = _tables_anew",
        "a copy to the GPU in every call"
    ),
    Mutant(
        "-(len(table) ** -0.5), len(table) ** -0.5",
        "-1 / len(table), 1 / len(table)",
        "tables that begin too small"
    ),
    Mutant("    @host.once\n", "", "a second derivative that is wrong in silence"),
]  # fmt: skip
