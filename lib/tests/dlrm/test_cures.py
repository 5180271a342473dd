"""Cures for a DLRM's training step: the same losses and gradients, whatever is cured. Times need a GPU."""

from lib.dlrm import cures
from lib.measure import bench
from lib.measure.check import CheckError

import pytest
import torch


def test_one_table_is_all_of_them():
    found = cures.models()
    plain, one = found["26 tables"].sparse_arch, found["one table"].sparse_arch
    rows = torch.stack([torch.randint(len(t.weight), (7,)) for t in plain.tables], dim=1)
    assert torch.equal(one(rows), plain(rows))
    sparse = found["one table, sparse gradients"].sparse_arch
    sparse(rows).sum().backward()
    one(rows).sum().backward()
    assert sparse.weight.grad.is_sparse
    assert torch.equal(sparse.weight.grad.to_dense(), one.weight.grad)


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(cures, "version_of", lambda version, module: module)
    monkeypatch.setattr(bench, "in_turns_us", lambda calls, n_rounds: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(bench, "peak_mib", lambda call: 1.0)


def test_each_cure_is_a_row_beside_eager(without_compiler):
    rows = cures.measure(n_rows=16)
    cured = [(row["tables"], row["step"]) for row in rows]
    assert cured[:2] == [("26 tables", "eager"), ("26 tables", "compiled")]
    assert ("one table, sparse gradients", "eager") in cured and len(cured) == 8
    assert all(row["of eager, %"] == 100 for row in rows)


def test_a_cure_that_changes_the_loss_is_refused(without_compiler, monkeypatch):
    def shifted(self, rows):
        return torch.nn.functional.embedding(rows, self.weight)

    monkeypatch.setattr(cures.OneWeight, "forward", shifted)
    with pytest.raises(CheckError, match="one table.*: a loss of"):
        cures.measure(n_rows=16)
