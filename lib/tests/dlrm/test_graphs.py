"""What lib.dlrm.graphs times is checked first, and its records belong to the code."""

import json

from lib.dlrm import graphs
from lib.measure.check import CheckError
from lib.recorded import results

import pytest

SMALL = {"limit": 50, "n_rows": 8}


@pytest.mark.parametrize("version", ["one table", "ours"])
def test_versions_learn_as_eager_pytorch_does(version):
    graphs.expect_same(version, **SMALL)


def test_another_update_is_refused(monkeypatch):
    class Twice(graphs.RowSGD):
        def step(self):
            super().step()
            super().step()

    monkeypatch.setattr(graphs, "RowSGD", Twice)
    with pytest.raises(CheckError, match="one table: logits are .* away after three steps"):
        graphs.expect_same("one table", **SMALL)


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="version must be one of one table, .* got 'eager'"):
        graphs.version_of("eager", graphs.small_model(50))


def test_records_belong_to_the_code():
    records = [json.loads(p.read_text()) for p in results.FOLDER.glob("*/dlrm_graphs.json")]
    assert records and not any(results.is_stale(record) for record in records)
    for record in records:
        assert len(record["rows"]) == len(graphs.BATCHES) * len(graphs.VERSIONS)
        assert all(results.spread_of(row) <= 1.1 for row in record["rows"])
