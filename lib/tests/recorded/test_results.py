"""Recorded results: their contents, and that they are never mistaken for something else."""

import json

from lib import machine
from lib.course import predictions as predict
from lib.course import progress
from lib.measure import bench, registry, roofline
from lib.measure.check import CheckError
from lib.recorded import restamp, results

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

OPS = list(registry.OPS.values())


def test_a_record_carries_machine_date_and_source(tmp_path):
    path = results.save("x", [{"a": 1}], ["lib/recorded/results.py"], folder=tmp_path)
    record = json.loads(path.read_text())
    assert set(record["stamp"]) == {"gpu", "driver", "torch", "triton", "python", "date"}
    assert not results.is_stale(record)
    assert results.is_stale({**record, "source_hash": "0"})


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("# why\n\nx = 1\n", True),
        ('"""Why."""\n\nx = 1\n', True),
        ("import a\nfrom b import (\n    c,\n)\nx = 1\n", True),
        ("x = 2\n", False),
        ('x = """1"""\n', False),
        ("x = 1\ny = a.b\n", False),
    ],
)
def test_comments_docstrings_and_imports_do_not_count_in_a_hash(text, same):
    assert (results.code_hash([text]) == results.code_hash(["x = 1\n"])) == same


def test_the_hash_of_cuda_leaves_out_comments():
    code = "// why\nint x = 1;\n"
    assert results.code_hash([code]) == results.code_hash(["int x = 1;\n"])
    assert results.code_hash([code]) != results.code_hash(["int x = 2;\n"])


def test_the_hash_of_a_source_is_that_of_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    assert results.source_hash(["a.py"]) == results.code_hash(["x = 1\n"])


# --- restamping ----------------------------------------------------------------------------------------------


RENAMES = {
    "suite": "registry",
    "machine.describe": "describe",
    "lib/a.py": "lib/b/a.py",
    '"no"': '"yes"',
}


@pytest.mark.parametrize(
    ("new", "same"),
    [
        ('import x\nregistry.find("add_relu")', False),
        (
            'import y\ny = registry.find("add_relu")\ndescribe(y, "lib/b/a.py")\nz = "yes", "no more"',
            True,
        ),
        ('y = registry.find("add_relu")\ndescribe(y, "lib/b/a.py", 1)', False),
        ('y = registry.find("gelu")\ndescribe(y, "lib/b/a.py")', False),
        ('y = suite.find("add_relu")\ndescribe(y, "lib/b/a.py")', False),
        ('y = registry.find("add_relu")\ndescribe(y, "lib/b/a.py")\nz = "no", "no more"', False),
        ('y = registry.find("add_relu")\ndescribe(y, "lib/b/a.py")\nz = "yes", "yes more"', False),
        (
            'y = registry.find("add_relu")\ndescribe(y, "lib/b/a.py")\nz = "yes", \'"no more"\'',
            False,
        ),
    ],
)
def test_only_imports_and_renames_are_restamped(new, same):
    old = (
        'import x\ny = suite.find("add_relu")\nmachine.describe(y, "lib/a.py")\nz = "no", "no more"'
    )
    assert restamp.same_code(old, new, RENAMES) == same


def test_arguments_and_functions_are_renamed_too_and_a_name_in_one_function_alone():
    old = "def f(a):\n    b = a\n    return b\ndef g(a):\n    return a\nb = f(g)"
    new = "def f(x):\n    y = x\n    return y\ndef h(z):\n    return z\nb = f(h)"
    renames = {"a": "x", "f:b": "y", "g": "h", "g:a": "z"}
    assert restamp.same_code(old, new, renames)
    for name in renames:
        assert not restamp.same_code(old, new, renames | {name: name.split(":")[-1]})


@pytest.mark.parametrize(
    ("new", "cut"),
    [
        (["import z\nx = 1\ny = f(x)", "y"], True),
        (["x = 1", "y"], True),
        (["x = 1", 'z = None\ncheck("1", z)', "y"], True),
        (['x = 1\ncheck("1", x)\nz'], False),
        (["y = f(x)\nx = 1"], False),
        (["x = 1", "y = f(x, 2)"], False),
        (["x = 1", "x = 1"], False),
        (["x = 1", "if x:\n    y"], False),
    ],
)
def test_a_cut_leaves_out_statements_and_joins_cells(new, cut):
    assert restamp.is_edited(["import z\nx = 1", "y = f(x)", "y"], new) == cut


@pytest.mark.parametrize(
    ("new", "holds"),
    [
        (["x = 1", "y = f(x)", "y"], True),
        (["x = 1", "w = x + 2", "w\ny = f(x)"], True),
        (["x = 1", "def g(y):\n    z = y\n    return z", "y = f(x)", "y"], True),
        (["x = 1", "x += 2", "y = f(x)", "y"], False),
        (["x = 1", "def f(x):\n    return x", "y = f(x)"], False),
        (["x = 1", "for y in range(x):\n    print(y)", "y"], False),
        (["x = 1", "w = bench.time_us(f)", "y = f(x)"], False),
        (["x = 1", "w = results.measured_or_recorded('a.b', f)", "y"], False),
    ],
)
def test_what_is_added_changes_no_name_that_a_recorded_statement_reads(new, holds):
    old = ["x = 1", "y = f(x)", "y"]
    assert restamp.is_edited(old, new, added=True) == holds
    assert restamp.is_edited(old, new) == (new == old)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_recorded_results_belong_to_this_code(op):
    record = results.load(op.name)
    if record is None:
        pytest.skip(f"{op.name}: {results.NOT_RECORDED}")
    assert not results.is_stale(record), f"the code changed since: make bench OP={op.name}"
    for row in record["rows"]:
        note = row.get("note", "")
        if row["version"] == "compiled" and "time_us" not in row and note:
            # not our code: a compiled version that the check refuses has no time
            assert note.startswith("✘ not timed: compiled, "), row
            continue
        assert not note or note.startswith("unsteady: "), row
        if "time_us" in row:
            assert row["error_vs_float64"] is not None, row


def test_gpu_slugs():
    assert results.gpu_slug("NVIDIA H200") == "h200"
    assert results.gpu_slug("NVIDIA GeForce RTX 4090") == "rtx_4090"


@pytest.mark.skipif(machine.HAS_GPU, reason="about machines with none")
def test_with_no_gpu_a_measurement_is_a_recorded_one_or_none():
    def measure():
        raise AssertionError("nothing may be measured here")

    missing = results.measured_or_recorded("99_nowhere.x", measure)
    assert missing.value is None
    assert missing.where == results.NOT_RECORDED


@pytest.mark.skipif(machine.HAS_GPU, reason="about machines with none")
def test_with_no_gpu_a_ladder_checks_here_and_times_nowhere():
    table = bench.ladder("add_relu")
    assert not table["where"].str.contains("here").any()
    assert table.loc[table.version == "triton", "error_vs_float64"].notna().all()
    with pytest.raises(ValueError, match="needs a GPU"):
        bench.time_us(lambda: None)


def test_a_wrong_version_gets_no_time():
    op = registry.find("add_relu")
    table = bench.ladder(op, (64, 128), versions={"wrong": lambda x, bias: torch.relu(x)})
    row = table[table.version == "wrong"].iloc[0]
    assert pd.isna(row.time_us)
    assert row.note.startswith("✘ not timed: wrong, output:")


@pytest.mark.gpu
@pytest.mark.alone
def test_timing_counts_launches_and_bytes():
    op = registry.find("add_relu")
    rows = {
        r["version"]: r for r in bench.measure(op, (4096, 4096), torch.float32, gradients=False)
    }
    assert rows["eager"]["launches"] == 2
    assert (
        rows["triton"]["launches"] == rows["compiled"]["launches"] == rows["cuda"]["launches"] == 1
    )
    assert rows["triton"]["time_us"] < rows["eager"]["time_us"]
    assert rows["triton"]["peak_mib"] == pytest.approx(64, abs=3)
    assert 10 < rows["triton"]["ceiling_pct"] < 115


@pytest.mark.gpu
@pytest.mark.alone
def test_time_grows_with_the_work():
    a = torch.randn(4096, 4096, device="cuda")
    one, four = bench.time_us(lambda: a * 2), bench.time_us(lambda: [a * 2 for _ in range(4)])
    assert 3 < four.median_us / one.median_us < 5
    assert one.p20_us <= one.median_us <= one.p80_us


def test_attainable_time_is_the_longer_of_two():
    top = roofline.Ceilings(4000.0, {"float32": 50.0}, "test")
    assert top.attainable_us(4_000_000) == pytest.approx(1.0)
    assert top.attainable_us(4_000_000, 10**9) == pytest.approx(20.0)
    assert top.ridge() == pytest.approx(12.5)


def test_the_roofline_has_its_ridge_and_a_point_for_each_row(monkeypatch):
    top = roofline.Ceilings(4000.0, {"float32": 50.0}, "test")
    monkeypatch.setattr(roofline, "ceilings", lambda: top)
    rows = [{"version": "a", "flops": 10**9, "bytes_moved": 4 * 10**9, "time_us": 1000.0}]
    _, ax = plt.subplots()
    roofline.draw(ax, rows)
    roof, ridge, point = ax.lines
    assert list(roof.get_xdata())[1] == ridge.get_xdata()[0] == pytest.approx(12.5)
    assert (point.get_xdata()[0], point.get_ydata()[0]) == pytest.approx((0.25, 1.0))
    assert {"a, 1,000 µs", "ridge: 12.5 FLOPs per byte"} <= {t.get_text() for t in ax.texts}
    plt.close("all")


def test_copies_are_drawn_with_the_size_at_which_two_buffers_fill_l2():
    _, ax = plt.subplots()
    roofline.draw_copies(ax, {"1": 1000.0, "64": 4000.0})
    copies, l2 = ax.lines
    assert list(copies.get_xdata()) == [1, 64]
    assert machine.HAS_GPU or l2.get_xdata()[0] == 30
    plt.close("all")


# --- predictions ---------------------------------------------------------------------------------------------


def test_a_prediction_and_its_outcome_go_to_the_ledger(reader_folder):
    assert predict.plot_calibration() is None
    assert "Your prediction: 10 µs" in predict.predict("t.1", "How long?", 10)
    assert "2.0× off" in predict.outcome("t.1", 20.0)
    assert predict.outcome("t.1", 10.0).endswith(": exact.")
    assert "within 20 %" in predict.outcome("t.1", 9.0)
    (entry,) = predict.ledger()
    assert (entry["guess"], entry["result"]) == (10, 9.0)
    assert entry["ratio"] == pytest.approx(10 / 9)
    assert predict.plot_calibration().axes[0].lines


def test_the_plot_names_the_predictions_of_the_last_notebook_apart_from_each_other(reader_folder):
    for key, unit in (("00.a", "µs"), ("01.a", "GB"), ("01.b", "µs")):
        predict.predict(key, "How much?", 10, unit)
        predict.outcome(key, 10.0)
    (ax,) = predict.plot_calibration().axes
    assert [text.get_text() for text in ax.texts] == ["01.a, GB", "01.b, µs"]
    assert len({text.get_position()[1] for text in ax.texts}) == 2
    assert ax.get_xlabel() and ax.get_ylabel()
    predict.outcome("00.a", 12.0)  # 00 is open again
    (ax,) = predict.plot_calibration().axes
    assert [text.get_text() for text in ax.texts] == ["00.a, µs"]
    plt.close("all")


def test_calibration_counts_by_notebook_how_near_predictions_came(reader_folder):
    assert predict.calibration() == []
    assert predict.plot_ratios().axes[0].get_xticklabels() == []
    for key, guess in {"31.a": 19, "03.a": 11, "03.b": 500, "03.c": 4}.items():
        predict.predict(key, "How long?", guess)
        predict.outcome(key, 10.0)
    first, second, both = predict.calibration()
    names = ("notebook", "predictions", "within 1.2×", "within 2×", "within 10×")
    assert [first[name] for name in names] == ["03", 3, 1, 1, 2]
    assert [second[name] for name in names] == ["31", 1, 0, 1, 1]
    assert [both[name] for name in names] == ["all", 4, 1, 2, 3]
    assert first["median, times off"] == pytest.approx(2.5)
    (ax,) = predict.plot_ratios().axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["03", "31"]
    low, high = ax.get_ylim()
    assert low < 0.4 and high > 50


def test_no_guess_and_no_result_are_no_error(reader_folder):
    assert "in place of None" in predict.predict("t.2", "How long?")
    assert "no prediction" in predict.outcome("t.2", 20.0)
    assert results.NOT_RECORDED in predict.outcome("t.2", None, results.NOT_RECORDED)
    assert predict.ledger() == []


@pytest.mark.parametrize(
    ("guess", "error"), [("10", TypeError), (True, TypeError), (0, ValueError), (-1, ValueError)]
)
def test_a_guess_that_is_no_positive_number(guess, error):
    with pytest.raises(error, match="guess must be"):
        predict.predict("t.3", "How long?", guess)


def test_an_unwritable_folder_keeps_things_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSED_KERNELS_READER", str(tmp_path / "file" / "reader"))
    monkeypatch.setattr(progress, "_in_memory", {})
    progress.append("x", "line")
    assert progress.read_lines("x") == ["line"]


def test_check_error_is_an_assertion():
    assert issubclass(CheckError, AssertionError)
