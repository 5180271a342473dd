"""The Criteo reader on hand-written rows with every oddity, its speed, parquet, and the committed sample."""

import gzip
import math
import random
import re

from lib.dlrm import criteo
from lib.dlrm import sample as criteo_sample
from lib.tests import yardstick

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch


def row(label="0", integers=("1",) * 13, tokens=("68fd1e64",) * 26):
    return "\t".join([label, *integers, *tokens])


def row_with(place, text):
    """A row that is good except for one of its 40 fields."""
    fields = row().split("\t")
    fields[place] = text
    return "\t".join(fields)


def write(folder, text, name="day_0"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, **options):
    return criteo.read_tsv(path, progress=False, **options)


def bad_lines(report):
    """The numbers of the bad lines that a report has as examples."""
    return [int(re.match(r"line (\d+): ", example)[1]) for example in report.examples]


# --- good rows -----------------------------------------------------------------------------------------------

ODD = row("1", ["", "-3", "0", "-0", "007", "2147483648", str(2**63 - 1), *["5"] * 6])
ODD = ODD.replace("68fd1e64", "ffffffff", 1).replace("68fd1e64", "80000000", 1)
ODD = ODD.replace("68fd1e64", "", 1).replace("68fd1e64", "0", 1).replace("68fd1e64", "AbC", 1)
EMPTY = "0" + "\t" * 39


def test_every_oddity_of_a_good_row(tmp_path):
    table, report = read(write(tmp_path, f"{ODD}\n{EMPTY}\n"))
    assert table.schema == criteo.SCHEMA
    assert (report.rows, report.counts) == (2, {})
    first, second = table.to_pylist()
    integers = [first[name] for name in criteo.DENSE]
    assert integers == [None, -3, 0, 0, 7, 2**31, 2**63 - 1, *[5] * 6]
    tokens = [first[name] for name in criteo.SPARSE]
    assert tokens == [2**32 - 1, 2**31, None, 0, 0xABC, *[0x68FD1E64] * 21]
    assert second == {"label": 0, **dict.fromkeys(criteo.COLUMNS[1:])}


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_line_ends(tmp_path, end):
    text = f"{row('1')}{end or chr(10)}{row('0')}{end}"
    table, report = read(write(tmp_path, text))
    assert table["label"].to_pylist() == [1, 0]
    assert report.rows == 2


def test_quotes_are_no_quotes(tmp_path):
    """A quote that opened a field would swallow the lines after it."""
    lines = [row(), row_with(20, '"68fd1e6'), row()]
    table, report = read(write(tmp_path, "\n".join(lines)), on_bad="skip")
    assert len(table) == 2
    assert bad_lines(report) == [2]


def test_tensors(tmp_path):
    dense, sparse, labels = criteo.to_tensors(read(write(tmp_path, f"{ODD}\n{EMPTY}\n"))[0])
    assert (dense.dtype, sparse.dtype, labels.dtype) == (torch.float32, torch.int64, torch.float32)
    assert (dense.shape, sparse.shape, labels.shape) == ((2, 13), (2, 26), (2,))
    expected = [0, 0, 0, 0, math.log(8), math.log(2**31 + 1), math.log(2**63), *[math.log(6)] * 6]
    torch.testing.assert_close(dense[0], torch.tensor(expected), rtol=1e-6, atol=0)
    assert sparse[0, :5].tolist() == [2**32 - 1, 2**31, criteo.MISSING_TOKEN, 0, 0xABC]
    assert dense[1].eq(0).all()
    assert sparse[1].eq(criteo.MISSING_TOKEN).all()
    assert labels.tolist() == [1, 0]


# --- bad rows ------------------------------------------------------------------------------------------------

BAD = {
    "39 columns": (row().removeprefix("0\t"), "column count", "39 columns instead of 40, as in Kaggle's test"),
    "41 columns": (row() + "\t1", "column count", "41 columns instead of 40"),
    "spaces": (row().replace("\t", " "), "column count", "1 column instead of 40"),
    "blank line": ("", "label", "label is missing, not 0 or 1"),
    "label 2": (row("2"), "label", "label is '2', not 0 or 1"),
    "label -1": (row("-1"), "label", "label is '-1', not 0 or 1"),
    "label 1.0": (row("1.0"), "label", "label is '1.0', not 0 or 1"),
    "no label": (row(""), "label", "label is missing, not 0 or 1"),
    "float": (row_with(3, "1.5"), "integer", "I3 is '1.5', not a whole number"),
    "plus": (row_with(13, "+5"), "integer", "I13 is '+5', not a whole number"),
    "space": (row_with(1, " 5"), "integer", "I1 is ' 5', not a whole number"),
    "hex integer": (row_with(1, "0x10"), "integer", "I1 is '0x10', not a whole number"),
    "65 bits": (row_with(1, str(2**63)), "integer", f"I1 is '{2**63}', not a whole number"),
    "5000 digits": (row_with(1, "7" * 5000), "integer", f"I1 is '{'7' * 40}…', not a whole number"),
    "non-hex": (row_with(14, "68fd1e6g"), "token", "C1 is '68fd1e6g', not a token"),
    "negative token": (row_with(39, "-8fd1e64"), "token", "C26 is '-8fd1e64', not a token"),
    "0x token": (row_with(20, "0xfd1e64"), "token", "C7 is '0xfd1e64', not a token"),
    "nine digits": (row_with(20, "068fd1e64"), "token", "C7 is '068fd1e64', not a token"),
    "space in token": (row_with(20, "68fd 1e6"), "token", "C7 is '68fd 1e6', not a token"),
    "stray return": (row_with(20, "68fd\r1e6"), "token", "C7 is '68fd?1e6', not a token"),
    "e with an accent": (row_with(20, "68fd\xe91e6"), "token", "C7 is '68fd"),
    "such an e, 3 columns": ("0\t1\tcaf\xe9", "column count", "3 columns instead of 40"),
    "two bad fields": (row_with(3, "x").replace("68fd1e64", "y"), "integer", "I3 is 'x', not"),
    "very long": (row_with(20, "f" * 5000), "token", f"C7 is '{'f' * 40}…', not a token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_an_error_with_file_and_line(tmp_path, name):
    bad, _, why = BAD[name]
    path = write(tmp_path, f"{row()}\n{row()}\n{bad}\n{row()}\n")
    with pytest.raises(criteo.CriteoError, match=re.escape(f"day_0, line 3: {why}")) as error:
        read(path)
    assert "on_bad='skip'" in str(error.value)
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_counted_when_skipped(tmp_path, name):
    bad, kind, why = BAD[name]
    path = write(tmp_path, f"{row()}\n{row()}\n{bad}\n{row('1')}\n")
    table, report = read(path, on_bad="skip")
    assert table["label"].to_pylist() == [0, 0, 1]
    assert report.rows == 3
    assert bad_lines(report) == [3]
    assert report.counts == {kind: 1}
    assert f"line 3: {why}" in str(report)
    assert str(report).startswith("day_0: 3 rows read, 1 bad lines left out")


def test_a_header_and_commas_are_named(tmp_path):
    header = "\t".join(criteo.COLUMNS)
    with pytest.raises(
        criteo.CriteoError, match="line 1: label is 'label', not 0 or 1; is it a header"
    ):
        read(write(tmp_path, f"{header}\n{row()}\n"))
    with pytest.raises(criteo.CriteoError, match="1 column instead of 40; .* tabs, not by commas"):
        read(write(tmp_path, row().replace("\t", ",")))


def test_where_a_file_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no file day_9 in {tmp_path}"):
        read(tmp_path / "day_9")
    with pytest.raises(FileNotFoundError, match="is a folder; name the file in it"):
        read(tmp_path)


def test_bytes_that_are_no_text(tmp_path):
    bad = row_with(20, "?").encode().replace(b"?", b"\xff\xfe\x00")
    table, report = read(write(tmp_path, row().encode() + b"\n" + bad), on_bad="skip")
    assert len(table) == 1
    assert bad_lines(report) == [2]
    assert "C7 is" in report.examples[0]


def test_nothing_but_bad_rows(tmp_path):
    table, report = read(write(tmp_path, "a,b,c\n" * 100), on_bad="skip")
    assert table.schema == criteo.SCHEMA
    assert (len(table), report.rows) == (0, 0)
    assert report.counts == {"column count": 100}
    assert bad_lines(report) == list(range(1, 21))
    assert str(report).endswith("and 80 more")


def expected(lines):
    """(good rows as lists, bad line numbers) from a reader that takes one line at a time."""
    good, bad = [], []
    for number, line in enumerate(lines, start=1):
        fields = line.split("\t")
        ok = len(fields) == 40 and fields[0] in ("0", "1")
        ok = ok and all(re.fullmatch("-?[0-9]*", f) and f != "-" for f in fields[1:14])
        ok = ok and all(re.fullmatch("[0-9a-fA-F]{0,8}", f) for f in fields[14:])
        if ok:
            integers = [int(f) if f else None for f in fields[1:14]]
            tokens = [int(f, 16) if f else None for f in fields[14:]]
            good.append([int(fields[0]), *integers, *tokens])
        else:
            bad.append(number)
    return good, bad


def random_lines(n):
    rng = random.Random(0)
    beyond = {"stray return", "65 bits", "5000 digits"}  # which `expected` takes another view of
    wrong = [line for name, (line, _, _) in BAD.items() if name not in beyond]
    lines = []
    for _ in range(n):
        integers = [rng.choice(["", str(rng.randrange(-3, 10**9))]) for _ in range(13)]
        tokens = [rng.choice(["", f"{rng.randrange(2**32):08x}"]) for _ in range(26)]
        good = row(rng.choice("01"), integers, tokens)
        lines.append(good if rng.random() < 0.8 else rng.choice(wrong))
    return lines


@pytest.mark.parametrize("block_bytes", [100, 7777, 1 << 23])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_random_file_read_in_blocks_of_any_size(tmp_path, monkeypatch, block_bytes, zipped):
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(criteo, "_EXAMPLES", 1000)
    lines = random_lines(150)
    text = "\n".join(lines).encode()
    path = write(tmp_path, gzip.compress(text) if zipped else text)
    table, report = read(path, on_bad="skip")
    good, bad = expected(lines)
    assert [list(r.values()) for r in table.to_pylist()] == good
    assert bad_lines(report) == bad
    assert report.rows == len(good)
    assert report.counts.total() == len(bad)


# --- bad files -----------------------------------------------------------------------------------------------


def test_gz_is_recognised_by_its_bytes_and_may_be_several_files_joined(tmp_path):
    line = (row("1") + "\n").encode()
    content = gzip.compress(line * 3) + gzip.compress(line * 2) + b"\0" * 512
    table, report = read(write(tmp_path, content, "no_suffix"))
    assert (len(table), report.rows) == (5, 5)
    assert len(read(write(tmp_path, line, "plain.gz"))[0]) == 1


@pytest.mark.parametrize("on_bad", ["error", "skip"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (gzip.compress(b""), ": the file is empty"),
        (gzip.compress(f"{row()}\n".encode() * 500)[:-9], r" cannot be read after line \d+: .*end-of-stream"),
        (gzip.compress(f"{row()}\n".encode()) + b"garbage", " cannot be read after line 0: Not a gzipped"),
    ],
    ids=["empty", "empty gz", "cut short", "garbage"],
)  # fmt: skip
def test_a_file_that_is_none_is_an_error(tmp_path, content, message, on_bad):
    with pytest.raises(criteo.CriteoError, match=f"^day_0{message}"):
        read(write(tmp_path, content), on_bad=on_bad)


def test_arguments(tmp_path):
    path = write(tmp_path, row())
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        read(tmp_path / "nowhere.tsv")
    with pytest.raises(ValueError, match="on_bad must be 'error' or 'skip', got 'drop'"):
        read(path, on_bad="drop")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        criteo.capped(limit=0)
    with pytest.raises(ValueError, match="day_0 would be written over itself"):
        criteo.tsv_to_parquet(path, path)


def test_it_streams(tmp_path, monkeypatch):
    """One block is in memory at a time: each becomes a row group."""
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 50_000)
    path = write(tmp_path, f"{row()}\n" * 2000)
    criteo.tsv_to_parquet(path, tmp_path / "day_0.parquet", progress=False)
    groups = criteo.ParquetReader(tmp_path / "day_0.parquet")
    assert groups.rows == 2000
    assert max(map(len, groups)) <= 50_000 // len(row())


def test_a_progress_bar(tmp_path, capsys):
    criteo.read_tsv(write(tmp_path, row()))
    shown = capsys.readouterr().err
    assert "day_0" in shown
    assert "100%" in shown
    read(tmp_path / "day_0")
    assert capsys.readouterr().err == ""


# --- speed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample():
    return criteo.read_parquet(criteo.SAMPLE_TRAIN)


def test_50_000_rows_a_second_on_one_core(tmp_path, sample):
    """In CPU time, of all threads together."""
    criteo.write_tsv(sample, tmp_path / "day_0")
    seconds, (table, _) = yardstick.cpu_seconds(lambda: read(tmp_path / "day_0"))
    assert table.equals(sample)
    rate = f"{len(table) / seconds:,.0f} rows per second"
    assert seconds < yardstick.for_python(len(table) / 50_000), rate


# --- parquet -------------------------------------------------------------------------------------------------


def test_tsv_to_parquet_and_back(tmp_path):
    lines = random_lines(300)
    source, target = write(tmp_path, "\n".join(lines)), tmp_path / "day_0.parquet"
    report = criteo.tsv_to_parquet(source, target, on_bad="skip", progress=False)
    table = criteo.read_parquet(target)
    assert table.equals(read(source, on_bad="skip")[0])
    assert report.rows == len(table)
    assert report.counts.total() == len(lines) - len(table)
    criteo.write_tsv(table, tmp_path / "again")
    assert read(tmp_path / "again")[0].equals(table)


def test_an_error_leaves_the_old_parquet_file(tmp_path):
    target = write(tmp_path, "old", "day_0.parquet")
    with pytest.raises(criteo.CriteoError):
        criteo.tsv_to_parquet(write(tmp_path, f"{row()}\nbad"), target, progress=False)
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["day_0", "day_0.parquet"]


def foreign(tmp_path, **columns):
    """A parquet file of three rows with some columns replaced."""
    table = read(write(tmp_path, f"{row('1')}\n{row('0')}\n{EMPTY}\n"))[0]
    for name, column in columns.items():
        table = table.set_column(criteo.COLUMNS.index(name), name, column)
    pq.write_table(table, tmp_path / "foreign.parquet")
    return tmp_path / "foreign.parquet"


TOKENS = [2**32 - 1, 5, None]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TOKENS, pa.uint32()),
        pa.array(TOKENS, pa.int64()),
        pa.array([-1, 5, None], pa.int32()),
        pa.array(["ffffffff", "5", None]),
        pa.array(["FFFFFFFF", "00000005", ""], pa.large_string()),
        pa.array(["ffffffff", "00000005", None]).dictionary_encode(),
    ],
    ids=["uint32", "int64", "int32", "hex", "large hex", "dictionary"],
)
def test_parquet_of_others_tokens(tmp_path, column):
    table = criteo.read_parquet(foreign(tmp_path, C3=column, I2=pa.array([1.0, -2.0, None])))
    assert table.schema == criteo.SCHEMA
    assert table["C3"].to_pylist() == TOKENS
    assert table["I2"].to_pylist() == [1, -2, None]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"C3": pa.array([-1, 5, 6], pa.int64())}, "foreign.parquet, column C3"),
        ({"C3": pa.array([2**32, 5, 6], pa.int64())}, "foreign.parquet, column C3"),
        ({"C3": pa.array(["zz", "5", "6"])}, "foreign.parquet, column C3: .*0xzz"),
        ({"I1": pa.array([0.5, 1.0, 2.0])}, "foreign.parquet, column I1"),
        ({"label": pa.array([0, 1, 2])}, "column label: it must be 0 or 1"),
        ({"label": pa.array([0, 1, None])}, "column label: it must be 0 or 1"),
    ],
)
def test_parquet_of_others_with_faults(tmp_path, columns, message):
    with pytest.raises(criteo.CriteoError, match=message):
        criteo.read_parquet(foreign(tmp_path, **columns))


def test_parquet_files_that_are_none(tmp_path):
    with pytest.raises(criteo.CriteoError, match="text: not a parquet file"):
        criteo.read_parquet(write(tmp_path, row(), "text"))
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        criteo.read_parquet(tmp_path / "nowhere")
    path = tmp_path / "few.parquet"
    pq.write_table(criteo.SCHEMA.empty_table().drop_columns("C26"), path)
    with pytest.raises(criteo.CriteoError, match="few.parquet: the column C26 is missing"):
        criteo.read_parquet(path)
    pq.write_table(criteo.SCHEMA.empty_table(), path)
    with pytest.raises(criteo.CriteoError, match="few.parquet: the file has no rows"):
        criteo.read_parquet(path)


# --- the committed sample ------------------------------------------------------------------------------------


def test_the_sample_is_small_and_says_what_it_is():
    paths = [criteo.SAMPLE_TRAIN, criteo.SAMPLE_VALIDATION]
    assert sum(p.stat().st_size for p in paths) < 3_000_000
    rows = [criteo.ParquetReader(p).rows for p in paths]
    assert rows == [criteo_sample.TRAIN_ROWS, criteo_sample.VALIDATION_ROWS]
    assert 50_000 <= sum(rows) <= 100_000
    for path in paths:
        assert pq.read_schema(path).metadata[b"description"].decode() == criteo_sample.NOTE
    assert "synthetic" in (criteo.SAMPLE_TRAIN.parent.parent / "README.md").read_text()


def test_the_sample_is_what_the_script_makes(tmp_path, capsys):
    criteo_sample.main(["--folder", str(tmp_path)])
    assert str(tmp_path) not in capsys.readouterr().out
    for path in (criteo.SAMPLE_TRAIN, criteo.SAMPLE_VALIDATION):
        assert criteo.read_parquet(tmp_path / path.name).equals(criteo.read_parquet(path))


def test_the_sample_has_the_traits_of_click_logs(sample):
    batch = criteo.to_tensors(sample)
    assert 0.15 < batch.labels.mean() < 0.35
    assert (batch.sparse[batch.sparse != criteo.MISSING_TOKEN] >= 0).all()
    assert batch.sparse.max() >= 2**31
    integers = {name: sample[name].drop_null().to_numpy() for name in criteo.DENSE}
    assert integers["I2"].min() == -3
    assert all(x.min() == 0 for name, x in integers.items() if name != "I2")
    assert integers["I5"].max() > 1000 * np.median(integers["I5"])
    assert 0.7 < sample["I12"].null_count / len(sample) < 0.8
    assert 0.7 < sample["C22"].null_count / len(sample) < 0.8
    for name, cardinality in zip(criteo.SPARSE, criteo.CARDINALITIES):
        assert sample[name].drop_null().to_numpy().max() < 2**32
        distinct = len(sample[name].drop_null().unique())
        assert distinct <= cardinality
        assert distinct == cardinality or cardinality > 1000  # all the tokens of a small one
    assert len(criteo.CARDINALITIES) == 26
    assert criteo.CARDINALITIES[-1] == 142572


def test_tokens_of_the_sample_follow_zipfs_law(sample):
    counts = -np.sort(-np.unique(sample["C1"].to_numpy(), return_counts=True)[1])
    ranks = np.arange(1, 31)
    slope = np.polyfit(np.log(ranks), np.log(counts[:30]), 1)[0]
    assert slope == pytest.approx(-1.2, abs=0.05)


def test_validation_has_other_rows_and_unseen_tokens(sample):
    train = criteo.to_tensors(sample)
    validation = criteo.to_tensors(criteo.read_parquet(criteo.SAMPLE_VALIDATION))
    rows = {r.tobytes() for r in train.sparse.numpy()}
    assert not any(r.tobytes() in rows for r in validation.sparse.numpy())
    unseen = ~torch.isin(validation.sparse[:, 2], train.sparse[:, 2])
    assert 0.05 < unseen.float().mean() < 0.3


def test_another_size_and_seed(monkeypatch):
    monkeypatch.setattr(criteo, "CARDINALITIES", criteo.capped(limit=100))  # quick
    a, b, c = criteo_sample.make(50), criteo_sample.make(50), criteo_sample.make(50, seed=1)
    assert a.equals(b)
    assert not a.equals(c)
    assert len(criteo_sample.make(1)) == 1
    with pytest.raises(ValueError, match="n_rows must be at least 1"):
        criteo_sample.make(0)
