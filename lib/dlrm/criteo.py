"""Criteo click data: the Kaggle and Terabyte TSV files and parquet, as Arrow tables and as tensors.

A row     label (0 or 1), 13 integers I1 … I13, 26 tokens C1 … C26 of 32 bits in hex; these 39 may be missing.
TSV       these 40 in order, tab-separated, no header, missing = empty; plain or gz, told apart by first bytes.
Table     a pyarrow.Table with SCHEMA: label int8, I int64, C uint32; missing = null. No token is ever negative.
Tensors   Batch: dense (N, 13) float32 = log1p(max(x, 0)), missing = 0; sparse (N, 26) int64, 0 … 2**32 - 1,
          missing = -1; labels (N,) float32.
Errors    CriteoError, a ValueError, with file and line; with on_bad="skip" a bad row is left out and counted.
"""

import array
import binascii
import collections
import dataclasses
import gzip
import os
import re
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
_LONGEST_LINE = 1 << 20  # bytes; a row of Criteo's has about 250
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
    """What a reading gave: rows handed out, and the bad ones with their line numbers.

    bad_lines has every number, eight bytes each; counts says how many of each kind; examples tells of the
    first 20 in words.
    """

    file: str
    rows: int = 0
    bad_lines: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    examples: list = dataclasses.field(default_factory=list)

    def add(self, line, kind, why):
        """Count one bad line."""
        self.bad_lines.append(line)
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"line {line}: {why}")

    def __str__(self):
        told = [f"{self.file}: {self.rows:,} rows read, {len(self.bad_lines):,} bad lines left out"]
        told += [f"  {kind}: {count:,}" for kind, count in self.counts.most_common()]
        told += [f"  {example}" for example in self.examples]
        more = len(self.bad_lines) - len(self.examples)
        return "\n".join([*told, f"  and {more:,} more, in .bad_lines"] if more else told)


# --- from a file to blocks of whole lines --------------------------------------------------------------------


class _DamageError(Exception):
    """The file breaks off after the lines given so far; (kind, why)."""


def _pieces(file, piece_bytes, progress):
    """The bytes of an open file, piece by piece, told to the progress bar."""
    while piece := file.read(piece_bytes):
        progress.update(len(piece))
        yield piece


def _unzipped(pieces):
    """The bytes inside gz `pieces`, of several gz files on end as well; _DamageError where they break off."""
    decoder = None  # None between two of them
    for piece in pieces:
        while piece := (piece if decoder else piece.lstrip(b"\0")):  # zeros may pad the end
            decoder = decoder or zlib.decompressobj(wbits=31)
            try:
                text = decoder.decompress(piece)
            except zlib.error as error:
                raise _DamageError("gz damaged", f"the gz data is damaged here ({error})") from None
            if text:
                yield text
            piece = decoder.unused_data
            decoder = None if decoder.eof else decoder
    if decoder:
        raise _DamageError("gz cut short", "the gz data ends here, cut short; fetch the file again")


def _blocks(pieces, block_bytes):
    """Blocks of about `block_bytes` that end where a line ends. After damage the unfinished line is dropped."""
    held, damage = b"", None
    try:
        for piece in pieces:
            held += piece
            end = held.rfind(b"\n") + 1
            if not end and len(held) > _LONGEST_LINE:
                raise _DamageError(
                    "endless line", f"no line end in {len(held):,} bytes: this is no TSV"
                )
            if len(held) >= block_bytes and end:
                yield held[:end]
                held = held[end:]
    except _DamageError as error:
        damage, held = error, held[: held.rfind(b"\n") + 1]
    if held:
        yield held
    if damage:
        raise damage


# --- from a block to columns ---------------------------------------------------------------------------------


def _text_columns(block):
    """The block's rows of 40 fields as a table of strings, '' being null, and {line: its width}."""
    wrong_width = {}

    def skip(row):
        wrong_width[row.number] = row.actual_columns
        return "skip"

    table = pyarrow.csv.read_csv(
        pa.BufferReader(block),
        # One chunk and one thread, or else rows have no numbers.
        pyarrow.csv.ReadOptions(column_names=COLUMNS, use_threads=False, block_size=len(block) + 1),
        pyarrow.csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(COLUMNS, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )
    return table, wrong_width


def _bytes_of(strings):
    """A list of bytes objects, None where null: strings need not be UTF-8."""
    return strings.cast(pa.binary()).to_pylist()


def _labels(strings):
    """(int8 array, bad): 0 or 1, and nothing else."""
    found = pc.index_in(strings, pa.array(["0", "1"])).cast(pa.int8())  # null where it is neither
    return found, np.asarray(found.is_null()) if found.null_count else None


def _integers(strings):
    """(int64 array, bad), bad None when all are well."""
    # Arrow's cast is the fast way; but it would take 0x10 for 16.
    if b"x" not in _characters(strings).tobytes().lower():
        try:
            return pc.cast(strings, pa.int64()), None
        except pa.ArrowInvalid:
            pass  # find out which
    # Python refuses to read much longer numbers
    return _one_by_one(strings, rb"-?[0-9]{1,4000}", int, pa.int64())


def _tokens(strings):
    """(uint32 array, bad), bad None when all are well; one to eight hex digits each."""
    characters = _characters(strings)
    lengths = np.diff(_offsets(strings))
    null = np.asarray(strings.is_null())
    if lengths.max(initial=0) <= 8:
        # (N, 8) digits, zeros in front; a missing token is eight zeros until it is made null
        digits = np.full((len(strings), 8), ord("0"), np.uint8)
        digits[np.arange(8) >= 8 - lengths[:, None]] = characters
        try:
            values = np.frombuffer(binascii.unhexlify(digits.tobytes()), ">u4")
            return pa.array(values.astype(np.uint32), mask=null), None
        except binascii.Error:
            pass  # find out which
    return _one_by_one(strings, rb"[0-9a-fA-F]{1,8}", lambda digits: int(digits, 16), pa.uint32())


def _offsets(strings):
    """Where each string begins and ends in the characters, (N + 1,) int32."""
    return np.frombuffer(strings.buffers()[1], np.int32)[strings.offset :][: len(strings) + 1]


def _characters(strings):
    """The characters of all strings on end, uint8."""
    offsets, characters = _offsets(strings), strings.buffers()[2]
    if characters is None or not len(strings):
        return np.empty(0, np.uint8)
    return np.frombuffer(characters, np.uint8)[offsets[0] : offsets[-1]]


def _one_by_one(strings, pattern, convert, dtype):
    """(array, bad): the slow way, for a column in which something is wrong."""
    matches = re.compile(pattern).fullmatch
    texts = _bytes_of(strings)
    values = [convert(t) if t is not None and matches(t) else None for t in texts]
    if dtype == pa.int64():
        values = [v if v is None or -(2**63) <= v < 2**63 else None for v in values]
    bad = [v is None and t is not None for v, t in zip(values, texts)]
    return pa.array(values, dtype), np.array(bad, bool)


_KINDS = {
    LABEL: ("label", _labels, "0 or 1"),
    **dict.fromkeys(DENSE, ("integer", _integers, "a whole number of 64 bits")),
    **dict.fromkeys(SPARSE, ("token", _tokens, "a token of 1 to 8 hex digits")),
}


def _parse(block):
    """(table of the good rows, {line in the block, from 1: (kind, why it is bad)}, lines in the block)."""
    n_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if b"\r" in block:  # a stray one would count as a line end
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"?")
    texts, wrong_width = _text_columns(block)
    bad = {line: _width_problem(width) for line, width in wrong_width.items()}
    lines = np.setdiff1d(np.arange(1, n_lines + 1), list(wrong_width))

    columns, keep = [], np.ones(len(texts), bool)
    for name in COLUMNS:
        kind, convert, wanted = _KINDS[name]
        strings = texts[name].combine_chunks()
        values, wrong = convert(strings)
        columns.append(values)
        for row in [] if wrong is None else np.flatnonzero(wrong & keep):
            bad[int(lines[row])] = kind, f"{name} is {_quoted(strings[row])}, not {wanted}"
            keep[row] = False
    table = pa.table(columns, schema=SCHEMA)
    return (table if keep.all() else table.filter(pa.array(keep))), bad, n_lines


def _width_problem(width):
    test_file = "; has it no label, as Kaggle's test.txt?" if width == len(COLUMNS) - 1 else ""
    return "column count", f"{width} columns instead of {len(COLUMNS)}{test_file}"


def _quoted(value):
    text = value.cast(pa.binary()).as_py()
    if text is None:
        return "missing"
    text = text.decode(errors="replace")
    return repr(text if len(text) <= 40 else text[:40] + "…")


# --- readers -------------------------------------------------------------------------------------------------


class TsvReader:
    """Criteo's TSV as a stream: iterating gives tables of SCHEMA, some 40,000 rows each, of any size of file.

    on_bad: "error" raises CriteoError at the first bad line, after the blocks before it; "skip" leaves bad
    lines out. `report` tells of the latest iteration; of a gz cut short it counts the line where it breaks off.
    Raises FileNotFoundError at once.
    """

    def __init__(self, path, on_bad="error", progress=True, block_bytes=_BLOCK_BYTES):
        if on_bad not in ("error", "skip"):
            raise ValueError(f"on_bad must be 'error' or 'skip', got {on_bad!r}")
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be positive, got {block_bytes}")
        self.path, self.on_bad = Path(path), on_bad
        self.progress, self.block_bytes = progress, block_bytes
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path.name}; where is it?")
        self.report = Report(self.path.name)

    def __iter__(self):
        self.report = Report(self.path.name)
        bar = tqdm(
            total=self.path.stat().st_size,
            unit="B",
            unit_scale=True,
            desc=self.path.name,
            disable=not self.progress,
        )
        with open(self.path, "rb") as file, bar:
            zipped = file.peek(2)[:2] == b"\x1f\x8b"
            pieces = _pieces(file, min(self.block_bytes, 1 << 20), bar)
            yield from self._tables(_unzipped(pieces) if zipped else pieces)

    def _tables(self, pieces):
        line, damage = 0, None  # the last line of the blocks so far
        try:
            for block in _blocks(pieces, self.block_bytes):
                table, bad, n_lines = _parse(block)
                for number in sorted(bad):
                    self._bad(line + number, *bad[number])
                line += n_lines
                self.report.rows += len(table)
                if len(table):
                    yield table
        except _DamageError as error:
            damage = error.args
        if damage:
            self._bad(line + 1, *damage)
        elif line == 0:
            self._bad(1, "empty file", "the file is empty")

    def _bad(self, line, kind, why):
        self.report.add(line, kind, why)
        if self.on_bad == "error":
            raise CriteoError(
                f"{self.path.name}, line {line}: {why}. Mend the file, or read it with on_bad='skip' "
                "to leave bad lines out and have them counted"
            )


def read_tsv(path, on_bad="error", progress=True, block_bytes=_BLOCK_BYTES):
    """(table of SCHEMA, Report) of a whole TSV file; the arguments and errors of TsvReader."""
    reader = TsvReader(path, on_bad, progress, block_bytes)
    tables = list(reader)
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks(), reader.report


def tsv_to_parquet(source, target, on_bad="error", progress=True):
    """Write the TSV file `source` as parquet to `target`, streaming; returns the Report.

    The target appears when it is complete: an error leaves what was there before.
    """
    reader = TsvReader(source, on_bad, progress)
    part = Path(target).with_name(Path(target).name + ".part")
    try:
        with pq.ParquetWriter(part, SCHEMA, compression="zstd") as writer:
            for table in reader:
                writer.write_table(table)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return reader.report


def write_tsv(table, path):
    """Write a table of SCHEMA as Criteo does, gz where the name ends in .gz."""
    texts = [_as_text(table[name].combine_chunks()) for name in COLUMNS]
    rows = pc.binary_join_element_wise(*texts, "\t").to_pylist()
    text = "".join(f"{row}\n" for row in rows).encode()
    zipped = Path(path).suffix == ".gz"
    Path(path).write_bytes(gzip.compress(text, compresslevel=6, mtime=0) if zipped else text)


def _as_text(column):
    if column.type != pa.uint32():
        return pc.fill_null(column.cast(pa.string()), "")
    big_endian = np.asarray(column.fill_null(0)).astype(">u4")
    digits = np.frombuffer(binascii.hexlify(big_endian.tobytes()), "S8").astype("U8")
    return pc.if_else(column.is_valid(), pa.array(digits, pa.string()), "")


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
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path.name}; where is it?")
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
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values, bad = _tokens(pc.if_else(pc.equal(column, ""), None, column).cast(pa.string()))
        if bad is not None and bad.any():
            wrong = _quoted(column[int(bad.argmax())])
            raise pa.ArrowInvalid(f"{wrong} is not a token of 1 to 8 hex digits")
        return values
    if column.type == pa.int32():
        return column.view(pa.uint32())  # the same 32 bits: -1 is 0xffffffff
    return column.cast(pa.uint32())  # raises where one does not fit


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
