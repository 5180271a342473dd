"""The README's pictures show today's records, at a size to read, and only steady times in the first one."""

import re

from lib.measure import registry, scoreboard
from lib.recorded import results
from lib.recorded.results import ROOT

import pytest
from PIL import Image

README = " ".join((ROOT / "README.md").read_text().split())
TABLE = (ROOT / "lib/ops/README.md").read_text().splitlines()
PICTURES = {
    scoreboard.PATH: scoreboard.scoreboard_text,
    scoreboard.SMALL: scoreboard.three_ops_text,
}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_drawn_from_the_records_of_today(path):
    assert Image.open(path).text["Description"] == PICTURES[path](), (
        "python -m lib.measure.scoreboard"
    )


def test_the_readme_says_what_its_picture_shows():
    assert f"![{scoreboard.three_ops_text()}](data/results/three_ops.png)" in README
    groups = [scoreboard.shares(registry.OPS[n], s) for n, s in scoreboard.THREE.items()]
    for version, text in (
        ("compiled", "`torch.compile` reaches {} to {} % of"),
        ("triton", "Triton {} to {} %"),
    ):
        percent = [round(group["bfloat16", True][version][0]) for group in groups]
        assert text.format(min(percent), max(percent)) in README


@pytest.mark.parametrize("op", registry.OPS.values(), ids=lambda op: op.name)
def test_the_table_of_ops_shows_the_records(op):
    rows = [line for line in TABLE if line.startswith(f"| [{op.name}]({op.name}.py)")]
    (row,) = [line for line in rows if line.count("|") == 6]
    assert row.endswith(f" | {scoreboard.table_cells(op)} |")


def test_the_readmes_picture_has_no_unsteady_time():
    assert "~" not in scoreboard.three_ops_text()


def test_an_unsteady_time_is_marked(monkeypatch):
    op, row = registry.OPS["gelu"], {"dtype": "float32", "gradients": False, "ceiling_pct": 80.2}
    times = {"eager": (10, 10.9), "triton": (10, 11.1)}
    rows = [
        {**row, "shape": [*op.bench_shapes[0]], "version": v, "p20_us": low, "p80_us": high}
        for v, (low, high) in times.items()
    ]
    monkeypatch.setattr(results, "load", lambda *_: {"rows": rows})
    labels = {"eager": (80.2, "80"), "triton": (80.2, "~80")}
    assert scoreboard.shares(op) == {("float32", False): labels}


def test_drawing_writes_both_pictures_with_their_text(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "OPS", {n: registry.OPS[n] for n in scoreboard.THREE})
    for name in ("PATH", "SMALL"):
        monkeypatch.setattr(scoreboard, name, tmp_path / getattr(scoreboard, name).name)
    assert scoreboard.draw() == tmp_path / "scoreboard.png"
    small = Image.open(tmp_path / "three_ops.png")
    assert small.width >= 1000 and small.text["Description"] == scoreboard.three_ops_text()
    large = Image.open(tmp_path / "scoreboard.png").text["Description"]
    assert set(re.findall(r"(?m)^\w+", large)) == set(scoreboard.THREE)


def test_no_records_no_picture(monkeypatch):
    monkeypatch.setattr(results, "load", lambda *_: None)
    assert scoreboard.draw() is None
