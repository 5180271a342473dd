"""A candidate for the walk kernel of embedding_hash: dy of the next lookup is read before this row takes its step."""

from lib.measure.mutants import Mutant
from lib.tests.ops.mutants import load

OLD = """        lookup = tl.load(order_ptr + place, mask=is_there, other=0)
        next_row = tl.load(rows_ptr + place + 1, mask=place + 1 < n_lookups, other=-1)
        offsets = lookup // TABLES * STRIDE_YB + lookup % TABLES * STRIDE_YT
        dy_ptrs = dy_ptr + offsets + cols * STRIDE_YD
        grad += tl.load(dy_ptrs, mask=is_there & (cols < DIM), other=0.0).to(COMPUTE)
"""
NEW = """        next_row = tl.load(rows_ptr + place + 1, mask=place + 1 < n_lookups, other=-1)
        grad += dy.to(COMPUTE)
        offsets = lookup // TABLES * STRIDE_YB + lookup % TABLES * STRIDE_YT
        more = (place + 1 < n_lookups) & (step + 1 < LENGTH)
        dy = tl.load(dy_ptr + offsets + cols * STRIDE_YD, mask=more & (cols < DIM), other=0.0)
        lookup = tl.load(order_ptr + place + 2, mask=place + 2 < n_lookups, other=0)
"""
LOOP = "    for step in range(0, LENGTH):\n        is_there, is_last"
BEFORE = """    lookup = tl.load(order_ptr + place, mask=place < n_lookups, other=0)
    offsets = lookup // TABLES * STRIDE_YB + lookup % TABLES * STRIDE_YT
    dy = tl.load(dy_ptr + offsets + cols * STRIDE_YD, mask=(place < n_lookups) & (cols < DIM), other=0.0)
    lookup = tl.load(order_ptr + place + 1, mask=place + 1 < n_lookups, other=0)
"""


def module():
    """embedding_hash with that kernel."""
    text = (LOOP + " = place < n_lookups, step == LENGTH - 1\n" + OLD)
    return load(
        "embedding_hash", Mutant(text, BEFORE + LOOP + " = place < n_lookups, step == LENGTH - 1\n" + NEW, "ahead")
    )
