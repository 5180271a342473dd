"""The sweep: its check refuses wrong versions, its files can be read back, its plot draws the rows."""

import json

from lib import machine
from lib.measure import dropout_sweep
from lib.measure.check import CheckError
from lib.ops.bias_gelu_dropout_add import bias_gelu_dropout_add_eager, bias_gelu_dropout_add_triton
from lib.recorded import results

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

ROWS = [
    {"rows": m, "columns": 4096, "p": p, "dtype": "bfloat16", "version": v, "pass": "forward"}
    | {"time_us": 10.0 * m, "ceiling_pct": 50.0, "note": ""}
    for m in (64, 1024)
    for p in (0.0, 0.1)
    for v in ("triton", "eager")
]


def tensors(dtype=torch.float32):
    return dropout_sweep.inputs((64, 512), dtype, machine.device())


@pytest.mark.parametrize("p", dropout_sweep.SHARES)
@pytest.mark.parametrize("dtype", dropout_sweep.DTYPES, ids=str)
def test_right_versions_pass(dtype, p):
    for version in (bias_gelu_dropout_add_triton, bias_gelu_dropout_add_eager):
        assert dropout_sweep.check_version(version, *tensors(dtype), p) < 1


WRONG = {
    "no scale": lambda x, b, r, p: F.dropout(F.gelu(x + b, approximate="tanh"), p) * (1 - p) + r,
    "p the other way round": lambda x, b, r, p: bias_gelu_dropout_add_eager(x, b, r, 1 - p),
    "drops more": lambda x, b, r, p: bias_gelu_dropout_add_eager(x, b, r, p + 0.1) * 1,
    "drops none": lambda x, b, r, p: F.gelu(x + b, approximate="tanh") / (1 - p) + r,
    "residual dropped too": lambda x, b, r, p: F.dropout(F.gelu(x + b, approximate="tanh") + r, p),
    "bias left out": lambda x, b, r, p: bias_gelu_dropout_add_eager(x, 0 * b, r, p),
    "NaN": lambda x, b, r, p: bias_gelu_dropout_add_eager(x, b, r, p) * float("nan"),
}


@pytest.mark.parametrize("version", WRONG.values(), ids=WRONG)
def test_wrong_versions_are_refused(version):
    with pytest.raises(CheckError):
        dropout_sweep.check_version(version, *tensors(), 0.1)


def test_files_can_be_read_back(tmp_path):
    as_json, as_csv = dropout_sweep.save(ROWS, tmp_path)
    record = json.loads(as_json.read_text())
    assert record["rows"] == ROWS
    assert record["stamp"]["torch"] and not results.is_stale(record)
    assert machine.stamp().line() in as_csv.read_text().splitlines()[0]
    table = pd.read_csv(as_csv, comment="#", keep_default_na=False)
    assert table.to_dict("records") == ROWS


@pytest.mark.parametrize(("x", "points"), [("elements", [64 * 4096, 1024 * 4096]), ("p", [0, 0.1])])
def test_the_plot_has_a_line_per_version(x, points):
    figure, ax = plt.subplots()
    dropout_sweep.plot(ax, ROWS, x=x, shape=(64, 4096))
    curves = [line for line in ax.get_lines() if line.get_label() in ("triton", "eager")]
    assert len(curves) == 2
    assert all(list(line.get_xdata()) == points for line in curves)
    plt.close(figure)


def test_without_a_record_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert dropout_sweep.recorded() == results.Measurement(None, results.NOT_RECORDED)
    folder = tmp_path / results.REFERENCE_GPU
    folder.mkdir()
    saved, _ = dropout_sweep.save(ROWS, tmp_path / "elsewhere")
    (folder / "dropout_sweep.json").write_text(saved.read_text())
    assert dropout_sweep.recorded().value == ROWS


def test_with_no_gpu_it_says_what_it_needs():
    if machine.HAS_GPU:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a GPU"):
        dropout_sweep.main([])


@pytest.mark.gpu
@pytest.mark.alone
def test_every_case_is_checked_and_timed():
    rows = dropout_sweep._measure(
        "triton", bias_gelu_dropout_add_triton, (64, 4096), 0.1, torch.float32
    )
    assert [row["pass"] for row in rows] == ["forward", "forward and backward"]
    assert all(row["time_us"] > 0 and not row["note"] for row in rows)
