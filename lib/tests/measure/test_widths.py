"""The widths that are drawn, which versions are timed at them, and what is said of the rows."""

import re

from lib import machine
from lib.measure import registry, widths
from lib.recorded import results

import pandas as pd
import pytest
from PIL import Image


def test_widths_are_drawn_over_all_sizes_and_the_same_each_time():
    drawn = widths.draw()
    assert drawn == widths.draw() == sorted(drawn) != widths.draw(seed=1)
    assert len(drawn) == 40 and 33 <= drawn[0] < 100 and 65536 < drawn[-1] <= 131072


def test_a_wrong_version_is_told_and_a_right_one_is_not():
    op = registry.find("softmax").configured()
    inputs = op.checked_inputs((3, 37), widths.DTYPES["float32"], machine.device())
    assert widths._failure(op, "triton", inputs) == ""
    wrong = type(op)(**{**vars(op), "versions": {"triton": lambda x: x.softmax(0)}})
    assert widths._failure(wrong, "triton", inputs).startswith("✘ not timed")


def test_the_summary_names_widths_under_90_and_who_is_ahead():
    row = {"op": "softmax", "dtype": "float32", "pass": "forward", "note": ""}
    shares = {
        ("triton", 58): 80.0,
        ("eager", 58): 85.0,
        ("triton", 363): 95.0,
        ("eager", 363): 40.0,
    }
    rows = [
        row | {"version": version, "columns": columns, "share_pct": share}
        for (version, columns), share in shares.items()
    ]
    ours, eager = widths.summary(rows)
    assert "triton: lowest 80, median 88, 1 of 2 under 90: {58: 80.0}" in ours
    assert ours.endswith("behind: {58: (80.0, 85.0)}")
    assert "eager: lowest 40" in eager and "behind" not in eager


def test_the_picture_says_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    row = {"op": "softmax", "dtype": "bfloat16", "pass": "forward", "note": ""}
    rows = [
        row | {"version": version, "columns": n_cols, "share_pct": share}
        for version, share in (("triton", 96.0), ("eager", 41.0))
        for n_cols in (58, 363, 5120)
    ]
    results.save(f"{widths.NAME}_softmax", rows, [])
    records = widths.recorded(results.gpu_slug())
    picture = Image.open(widths.picture(records))
    assert picture.info["Description"] == widths.picture_text(records)
    assert widths.picture_text(records).endswith("of the op: softmax forward 96 and 96.")


def test_the_page_on_ops_says_what_its_picture_shows():
    page, records = (results.ROOT / "lib/ops/README.md").read_text(), widths.recorded("h200")
    assert f"![{widths.picture_text(records)}](../../data/results/{widths.NAME}.png)" in page
    assert not any(map(results.is_stale, records))
    groups = [group for record in records for group in _with_all_versions(record)]
    behind = sum(widths.is_behind(*group) for group in groups)
    said = re.search(
        r"In (\d+) of the (\d+) measurements of .* another is more than 2 % ahead", page
    )
    assert (int(said[1]), int(said[2])) == (behind, len(groups))


def _with_all_versions(record):
    table = pd.DataFrame(record["rows"]).dropna(subset=["share_pct"])
    for _, group in table.groupby(["dtype", "pass", "columns"]):
        shares = group.set_index("version")["share_pct"]
        if "compiled" in shares and "triton" in shares:
            yield shares["triton"], shares.drop("triton").max()


@pytest.mark.skipif(machine.HAS_GPU, reason="says so where there is none")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="the sweep needs a GPU"):
        widths.main([])
