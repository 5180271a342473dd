"""Criteo click data: the Kaggle and Terabyte TSV files and parquet, as Arrow tables and as tensors.

A row     label (0 or 1), 13 integers I1 … I13, 26 tokens C1 … C26 of 32 bits in hex; these 39 may be missing.
TSV       these 40 in order, tab-separated, no header, missing = empty; plain, or gz by its first bytes.
Table     a pyarrow.Table with SCHEMA: label int8, I int64, C uint32; missing = null. No token is ever negative.
Tensors   Batch: dense (N, 13) float32 = log1p(max(x, 0)), missing = 0; sparse (N, 26) int64, 0 … 2**32 - 1,
          missing = -1; labels (N,) float32.
Errors    CriteoError, a ValueError, with file and line; with on_bad="skip" bad rows are left out and counted.
"""

import collections
import dataclasses
import gzip
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

LABEL = "label"
DENSE = tuple(f"I{k}" for k in range(1, 14))
SPARSE = tuple(f"C{k}" for k in range(1, 27))
COLUMNS = (LABEL, *DENSE, *SPARSE)
SCHEMA = pa.schema(
    [(LABEL, pa.int8())] + [(n, pa.int64()) for n in DENSE] + [(n, pa.uint32()) for n in SPARSE]
)
# How many different tokens the columns C1 … C26 of the Kaggle data have, as published.
CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
MISSING_TOKEN = -1  # in tensors; no token is negative, so it cannot be taken for one

# The sample that comes with the course: synthetic, see lib/dlrm/sample.py.
_SAMPLE = Path(__file__).resolve().parents[2] / "data" / "criteo_sample"
SAMPLE_TRAIN = _SAMPLE / "train.parquet"
SAMPLE_VALIDATION = _SAMPLE / "validation.parquet"

_BLOCK_BYTES = 1 << 23  # text parsed at a time: some 40,000 rows
_EXAMPLES = 20


class CriteoError(ValueError):
    """A file that is not what it should be; the message names the file and the line."""


class Batch(NamedTuple):
    """Rows as tensors: dense (B, 13) float32, sparse (B, 26) int64, labels (B,) float32."""

    dense: torch.Tensor
    sparse: torch.Tensor
    labels: torch.Tensor

    def to(self, device):
        """The same Batch on `device`."""
        return Batch(*(tensor.to(device) for tensor in self))

    def rows(self, which):
        """The Batch of the rows that `which` (a slice or an index tensor) selects."""
        return Batch(*(tensor[which] for tensor in self))


@dataclasses.dataclass
class Report:
    """Good rows read, and of the bad lines the number of each kind and the first 20 in words."""

    file: str
    rows: int = 0
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    examples: list = dataclasses.field(default_factory=list)

    def add(self, line, kind, why):
        """Count one bad line."""
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"line {line}: {why}")

    def __str__(self):
        n_bad = self.counts.total()
        text = [f"{self.file}: {self.rows:,} rows read, {n_bad:,} bad lines left out"]
        text += [f"  {kind}: {count:,}" for kind, count in self.counts.most_common()]
        text += [f"  {example}" for example in self.examples]
        more = [f"  and {n_bad - _EXAMPLES:,} more"] * (n_bad > _EXAMPLES)
        return "\n".join(text + more)


# --- TSV -----------------------------------------------------------------------------------------------------


def read_tsv(path, on_bad="error", progress=True):
    """(table of SCHEMA, Report) of a whole TSV file.

    on_bad: "error" raises CriteoError at the first bad line; "skip" leaves bad lines out and counts them.
    Raises FileNotFoundError, and CriteoError for a file that is empty, no text or cut short.
    """
    report = Report(Path(path).name)
    tables = list(_tables(path, report, on_bad, progress))
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks(), report


def tsv_to_parquet(source, target, on_bad="error", progress=True):
    """Write the TSV file `source`, of any size, as parquet to `target`; returns the Report. Errors as read_tsv.

    The target is replaced only when complete: after an error the old one is still there.
    """
    source, target = _existing(source), Path(target)
    if target.exists() and target.samefile(source):
        raise ValueError(
            f"{target.name} would be written over itself; give the target another name"
        )
    report = Report(source.name)
    part = target.with_name(target.name + ".part")
    try:
        with pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer:
            for table in _tables(source, report, on_bad, progress):
                writer.write_table(table)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return report


def _tables(path, report, on_bad, progress):
    """The good rows as tables of SCHEMA, one per block of the file; fills the report."""
    if on_bad not in ("error", "skip"):
        raise ValueError(f"on_bad must be 'error' or 'skip', got {on_bad!r}")
    path, n_lines = _existing(path), 0
    bar = {"total": path.stat().st_size, "desc": path.name, "disable": not progress}
    with open(path, "rb") as raw, tqdm.wrapattr(raw, "read", **bar) as file:
        zipped = raw.peek(2)[:2] == b"\x1f\x8b"
        try:
            for block in _blocks(gzip.GzipFile(fileobj=file) if zipped else file):
                table, bad = _parsed(block)
                for line in sorted(bad):
                    kind, why = bad[line]
                    if n_lines + line == 1 and kind == "label":
                        why += "; is it a header? Criteo's files have none"
                    report.add(n_lines + line, kind, why)
                    if on_bad == "error":
                        raise CriteoError(
                            f"{path.name}, {report.examples[0]}. Fix the file, or read it with "
                            "on_bad='skip' to leave out bad lines and count them"
                        )
                n_lines += block.count(b"\n")
                report.rows += len(table)
                yield table
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            message = f"{path.name} cannot be read after line {n_lines}: {error}"
            raise CriteoError(message) from None
    if not report.rows and not report.counts:
        raise CriteoError(f"{path.name}: the file is empty")


def _blocks(file):
    """The bytes of an open file in blocks that end where a line ends."""
    rest = b""
    while piece := file.read(_BLOCK_BYTES):
        lines, end, rest = (rest + piece).rpartition(b"\n")
        if end:
            yield lines + end
    if rest:
        yield rest


def _parsed(block):
    """(table of the good rows, {line in the block, from 1: (kind, why)} of the bad ones)."""
    bad = {}

    def skip(row):
        width = row.actual_columns
        why = f"{width} column{'s' * (width != 1)} instead of {len(COLUMNS)}"
        if width == len(COLUMNS) - 1:
            why += ", as in Kaggle's test.txt, which has no label"
        elif width == 1 and "," in row.text:
            why += "; columns are separated by tabs, not by commas"
        bad[row.number] = "column count", why
        return "skip"

    if b"\r" in block:  # a stray one would count as a line end
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"?")
    types = dict.fromkeys(COLUMNS, pa.string())
    texts = pyarrow.csv.read_csv(
        pa.BufferReader(block),
        # One chunk and one thread, or else rows have no numbers. In latin-1 any byte is a character.
        pyarrow.csv.ReadOptions(
            column_names=COLUMNS, use_threads=False, block_size=2 * len(block), encoding="latin-1"
        ),
        pyarrow.csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    ).combine_chunks()
    try:
        return _table(texts), bad
    except pa.ArrowInvalid:
        pass  # find out which
    lines = np.setdiff1d(np.arange(1, len(texts) + len(bad) + 1), list(bad))  # of the rows in texts
    good = np.ones(len(texts), bool)
    for name in COLUMNS:
        kind, convert, rule = _KINDS[name]
        strings = texts[name].combine_chunks()
        for row in _refused(convert, strings):
            good[row] = False
            bad.setdefault(
                int(lines[row]), (kind, f"{name} is {_quoted(strings[row])}, not {rule}")
            )
    return _table(texts.filter(pa.array(good))), bad


def _table(texts):
    columns = [_KINDS[name][1](texts[name].combine_chunks()) for name in COLUMNS]
    return pa.table(columns, schema=SCHEMA)


def _refused(convert, strings, first=0):
    """Indices of the strings that `convert` refuses, found by bisection."""
    try:
        convert(strings)
    except pa.ArrowInvalid:
        if len(strings) == 1:
            return [first]
        half = len(strings) // 2
        left = _refused(convert, strings[:half], first)
        return left + _refused(convert, strings[half:], first + half)
    return []


def _label(strings):
    values = pc.index_in(strings, pa.array(["0", "1"])).cast(pa.int8())
    if values.null_count:
        raise pa.ArrowInvalid("a label is 0 or 1")
    return values


def _integer(strings):
    if pc.any(pc.match_substring_regex(strings, "[xX]")).as_py():  # Arrow would take 0x10 for 16
        raise pa.ArrowInvalid("an integer is decimal")
    return strings.cast(pa.int64())


def _token(strings):
    return pc.binary_join_element_wise("0x", strings, "").cast(pa.uint32())


_KINDS = {
    LABEL: ("label", _label, "0 or 1"),
    **dict.fromkeys(DENSE, ("integer", _integer, "a whole number of 64 bits")),
    **dict.fromkeys(SPARSE, ("token", _token, "a token of 1 to 8 hex digits")),
}


def _quoted(value):
    text = value.as_py()
    return "missing" if text is None else repr(text if len(text) <= 40 else text[:40] + "…")


def _existing(path):
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder; name the file in it")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name} in {path.parent.resolve()}")
    return path


def write_tsv(table, path):
    """Write a table of SCHEMA as Criteo does."""
    forms = {name: "{:08x}" if name in SPARSE else "{}" for name in COLUMNS}
    rows = (
        "\t".join("" if row[n] is None else form.format(row[n]) for n, form in forms.items())
        for row in table.to_pylist()
    )
    Path(path).write_text("".join(f"{row}\n" for row in rows))


# --- parquet -------------------------------------------------------------------------------------------------


def write_parquet(table, path, note=None, row_group_rows=65536, compression_level=3):
    """Write a table of SCHEMA; `note`, a string, goes into the file's metadata as 'description'."""
    table = table.select(COLUMNS).cast(SCHEMA)
    table = table.replace_schema_metadata({"description": note} if note else None)
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=compression_level,
        row_group_size=row_group_rows,
    )


class ParquetReader:
    """A parquet file of Criteo's columns, row group by row group, as tables of SCHEMA.

    Tokens may be uint32, hex strings, int64 from 0 to 2**32 - 1, or int32 holding the same 32 bits with a sign.
    Raises FileNotFoundError, and CriteoError for a file that is no parquet or lacks columns.
    """

    def __init__(self, path):
        self.path = _existing(path)
        try:
            self.file = pq.ParquetFile(self.path)
        except pa.ArrowInvalid as error:
            raise CriteoError(f"{self.path.name}: not a parquet file ({error})") from None
        missing = [name for name in COLUMNS if name not in self.file.schema_arrow.names]
        if missing:
            raise CriteoError(f"{self.path.name}: the column {missing[0]} is missing")
        self.rows = self.file.metadata.num_rows
        if self.rows == 0:
            raise CriteoError(f"{self.path.name}: the file has no rows")

    def __len__(self):
        """The number of row groups."""
        return self.file.num_row_groups

    def __iter__(self):
        return (self.group(k) for k in range(len(self)))

    def group(self, k):
        """Row group k as a table of SCHEMA. CriteoError names the column that does not fit."""
        table = self.file.read_row_group(k, columns=list(COLUMNS)).combine_chunks()
        columns = [self._conform(name, table[name]) for name in COLUMNS]
        return pa.table(columns, schema=SCHEMA)

    def _conform(self, name, column):
        column = column.combine_chunks()
        try:
            if name in SPARSE:
                return _token_column(column)
            column = column.cast(SCHEMA.field(name).type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise CriteoError(f"{self.path.name}, column {name}: {error}") from None
        if name == LABEL and not pc.all(pc.is_in(column, pa.array([0, 1], pa.int8()))).as_py():
            raise CriteoError(f"{self.path.name}, column label: it must be 0 or 1 in every row")
        return column


def _token_column(column):
    """Tokens of any of the types that ParquetReader takes as uint32."""
    if column.type == pa.int32():
        return column.view(pa.uint32())  # the same 32 bits: -1 is 0xffffffff
    if pa.types.is_integer(column.type):
        return column.cast(pa.uint32())  # raises where one does not fit
    column = column.cast(pa.string())
    return _token(pc.if_else(pc.equal(column, ""), None, column))


def read_parquet(path):
    """All rows of a parquet file as one table of SCHEMA; errors as for ParquetReader."""
    return pa.concat_tables(ParquetReader(path)).combine_chunks()


# --- tensors -------------------------------------------------------------------------------------------------


def to_tensors(table, device="cpu"):
    """The Batch of a table of SCHEMA, all its rows, on `device`."""
    n_rows = len(table)
    dense = np.empty((n_rows, len(DENSE)), np.float32)
    sparse = np.empty((n_rows, len(SPARSE)), np.int64)
    for k, name in enumerate(DENSE):
        dense[:, k] = log_transform(np.asarray(table[name].fill_null(0)))
    for k, name in enumerate(SPARSE):
        # int64 holds every 32-bit token without a sign; int32 would make half of them negative
        sparse[:, k] = np.asarray(table[name].cast(pa.int64()).fill_null(MISSING_TOKEN))
    labels = np.asarray(table[LABEL]).astype(np.float32)
    return Batch(*(torch.from_numpy(a) for a in (dense, sparse, labels))).to(device)


def log_transform(integers):
    """log1p(max(x, 0)) of integers (any shape), float32: heavy tails become bells, negatives become 0."""
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def capped(cardinalities=CARDINALITIES, limit=10_000):
    """The cardinalities with none above `limit`: tables hashed down, for a machine with little memory."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1 row per table, got {limit}")
    return tuple(min(c, limit) for c in cardinalities)
