"""The sample of data/criteo_sample: synthetic rows in Criteo's schema, the same in every run.

Tokens    C1 … C26 follow Zipf's law over the published cardinalities of the Kaggle data: few tokens in most
          rows, and a long tail of which most tokens are never drawn, or only in one part of the split.
Integers  I1 … I13 are log-normal, rounded down: small ones in most rows, a few very large; I2 falls below zero.
Missing   at random, at a rate of the column's own.
Labels    drawn from a planted model (`_planted_logits`), so there is something to learn.

No row comes from Criteo. To make the files again, with the same rows:  python -m lib.dlrm.sample
"""

import argparse
from pathlib import Path

from lib.dlrm import criteo

import numpy as np
import pyarrow as pa

TRAIN_ROWS, VALIDATION_ROWS = 48_000, 12_000
SEED = 2026
NOTE = (
    "Synthetic data in the schema of the Criteo Kaggle data, made by python -m lib.dlrm.sample of the Fused "
    f"Kernels course with seed {SEED}. No row comes from Criteo; labels are drawn from a planted model."
)

# I1 … I13: mean and spread of the logarithm, the smallest value, the share of missing ones.
_INTEGERS = (
    (0.5, 1.2, 0, 0.45), (2.0, 2.0, -3, 0.0), (1.7, 1.5, 0, 0.2), (1.5, 1.1, 0, 0.2),
    (7.5, 2.2, 0, 0.03), (3.5, 1.7, 0, 0.2), (1.6, 1.5, 0, 0.04), (2.0, 1.2, 0, 0.0),
    (4.0, 1.5, 0, 0.04), (-0.3, 0.6, 0, 0.45), (0.9, 1.0, 0, 0.04), (-0.5, 1.2, 0, 0.75),
    (1.6, 1.1, 0, 0.2),
)  # fmt: skip
# C1 … C26: the share of missing tokens.
_MISSING_TOKENS = (
    0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0, 0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.75, 0,
    0.03, 0.44, 0.44,
)  # fmt: skip
_ZIPF = 1.2  # the token of rank r is drawn in proportion to r ** -1.2


def make(n_rows, seed=SEED):
    """A table of criteo.SCHEMA with n_rows rows. Another seed gives other rows from the same planted model."""
    if n_rows < 1:
        raise ValueError(f"n_rows must be at least 1, got {n_rows}")
    integers = [_integer_column(k, n_rows, seed) for k in range(len(criteo.DENSE))]
    ranks = [_rank_column(k, n_rows, seed) for k in range(len(criteo.SPARSE))]
    chance = 1 / (1 + np.exp(-_planted_logits(integers, ranks)))
    labels = _uniform(seed, 0, n_rows) < chance
    tokens = [
        pa.array(_token(k, np.maximum(rank, 0)), mask=rank < 0) for k, rank in enumerate(ranks)
    ]
    integers = [pa.array(np.nan_to_num(x).astype(np.int64), mask=np.isnan(x)) for x in integers]
    return pa.table([pa.array(labels.astype(np.int8)), *integers, *tokens], schema=criteo.SCHEMA)


def _uniform(seed, stream, *shape):
    """Uniform numbers in (0, 1) of a stream of their own: PCG64's, the same in all versions of NumPy."""
    rng = np.random.Generator(np.random.PCG64([seed, stream]))
    return np.maximum(rng.random(shape), 2.0**-53)


def _normal(u, v):
    """Standard normal numbers from two arrays of uniform ones (Box and Muller)."""
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def _integer_column(k, n_rows, seed):
    """Column I(k + 1) as whole float64 numbers, NaN where missing."""
    mean, spread, smallest, missing = _INTEGERS[k]
    u, v, gap = _uniform(seed, 1 + k, 3, n_rows)
    values = np.floor(np.exp(mean + spread * _normal(u, v))) + smallest
    return np.where(gap < missing, np.nan, values)


def _rank_column(k, n_rows, seed):
    """Column C(k + 1) as ranks, 0 the most frequent token; -1 where missing."""
    weights = np.arange(1, criteo.CARDINALITIES[k] + 1, dtype=np.float64) ** -_ZIPF
    chances = np.cumsum(weights)
    u, gap = _uniform(seed, 100 + k, 2, n_rows)
    ranks = np.searchsorted(chances, u * chances[-1])
    return np.where(gap < _MISSING_TOKENS[k], -1, ranks)


def _mixed(x):
    """A permutation of the 32-bit numbers (the last step of MurmurHash3)."""
    x = x.astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _token(k, rank):
    """The 32-bit token of each rank in column C(k + 1)."""
    return _mixed(rank.astype(np.uint32) + np.uint32(0x9E3779B9 * (k + 1) % 2**32))


def _trait(k, rank, which):
    """A fixed standard normal number for each token of column C(k + 1): its trait `which`."""
    # a missing token, rank -1, has traits too
    start = _mixed(_token(k, rank + 1) ^ np.uint32(0x51ED270B * (which + 1) % 2**32))
    u, v = ((_mixed(start + np.uint32(i)) + 0.5) / 2**32 for i in (1, 2))
    return _normal(u, v)


def _planted_logits(integers, ranks):
    """The model that the labels come from, (n_rows,): tokens, integers, and three pairs of columns together."""
    logits = np.full(len(ranks[0]), -2.4)
    for k, rank in enumerate(ranks):
        logits += 0.27 * _trait(k, rank, 0)
    for k, x in enumerate(integers):
        mean, spread = _INTEGERS[k][:2]
        scaled = (np.log1p(np.maximum(np.nan_to_num(x), 0)) - mean) / spread
        logits += 0.18 * (-1) ** k * scaled
    for a, b in ((0, 16), (4, 13), (5, 8)):  # what a dot product of two embeddings can learn
        logits += 0.5 * _trait(a, ranks[a], 1) * _trait(b, ranks[b], 1)
    return logits


def main(argv=None):
    """Write train.parquet and validation.parquet."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.dlrm.sample", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, default=criteo.SAMPLE_TRAIN.parent)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    table = make(TRAIN_ROWS + VALIDATION_ROWS)
    parts = {criteo.SAMPLE_TRAIN.name: table[:TRAIN_ROWS]}
    parts[criteo.SAMPLE_VALIDATION.name] = table[TRAIN_ROWS:]
    for name, part in parts.items():
        criteo.write_parquet(part, folder / name, NOTE, row_group_rows=16_000, compression_level=19)
        print(f"{name}: {len(part):,} rows, {(folder / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
