"""The bill of a DLRM: what is counted, by hand and beside the launches recorded on an H200."""

from lib.dlrm import bench as dlrm_bench
from lib.dlrm import bill, criteo
from lib.dlrm import model as dlrm
from lib.recorded import results

import pytest
import torch
import torch.nn.functional as F


def on_meta(n_rows, num_rows=criteo.CARDINALITIES):
    with torch.device("meta"):
        model = dlrm.DLRM(dlrm.ModulusHash(num_rows), dlrm.LARGE)
        ids = torch.empty(n_rows, len(num_rows), dtype=torch.int64)
        return model, torch.empty(n_rows, 13), ids, torch.empty(n_rows)


def test_a_lookup_moves_rows_and_its_gradient_the_table():
    table, ids = torch.randn(1000, 4, requires_grad=True), torch.arange(6)
    with bill.Counter() as count:
        y = F.embedding(ids, table)
    assert (count.launches, count.bytes) == (1, 6 * 8 + 2 * 6 * 16)
    dy = torch.ones_like(y)
    with bill.Counter() as count:
        torch.autograd.grad(y, table, dy)
    assert (count.launches, count.bytes) == (4, 1000 * 16 + 6 * 8 + 3 * 6 * 16)


def test_a_sparse_gradient_is_its_rows():
    table, ids = torch.randn(1000, 4, requires_grad=True), torch.arange(6)
    (gradient,) = torch.autograd.grad(F.embedding(ids, table, sparse=True).sum(), table)
    assert bill.n_bytes([gradient]) == 6 * 8 + 6 * 16


def test_an_update_reads_gradient_and_parameter_and_writes_it():
    parameters, gradients = [torch.ones(70_000), torch.ones(3)], [torch.ones(70_000), torch.ones(3)]
    with bill.Counter() as count:
        bill.sgd(parameters, gradients, learning_rate=0.5)
    assert (count.launches, count.bytes) == (1, 3 * 4 * 70_003)
    assert all((p == 0.5).all() for p in parameters)


@pytest.mark.parametrize("n_rows", dlrm_bench.BATCHES)
def test_launches_are_near_those_recorded(n_rows):
    totals = bill.totals(bill.bill(*on_meta(n_rows)))
    for row in results.load("dlrm")["rows"]:
        if (row["version"], row["batch"]) == ("eager", n_rows) and row["pass"] in totals:
            missing = row["launches"] - totals[row["pass"]]["launches"]
            assert 0 <= missing <= {"forward": 8, "training": 20}[row["pass"]]


def test_the_stages_are_the_model():
    """Counted stage by stage and in one go, a forward pass is the same."""
    model, dense, ids, labels = on_meta(64, (5, 7, 11))
    rows = bill.bill(model, dense, ids, labels)
    with torch.no_grad():
        _, whole = bill.counted(lambda: model(dense, ids))
    forward = bill.totals(rows)["forward"]
    assert forward["launches"] == whole["launches"] and forward["MB"] == pytest.approx(whole["MB"])
    _, backward = bill.counted(
        lambda: F.binary_cross_entropy_with_logits(model(dense, ids), labels).backward()
    )
    assert bill.totals(rows)["training"]["launches"] == pytest.approx(backward["launches"], abs=3)


def test_a_bill_as_a_table_and_as_rows():
    rows = bill.bill(*on_meta(64, (5, 7)))
    table = bill.table(rows)
    assert list(table.index) == list(rows) and table.loc["update", ("forward", "launches")] == 0
    assert len(bill.flat(rows)) == 12  # hash has no backward pass, update no forward pass
    assert "total" in bill.show_table(rows, "caption").to_html()


def test_the_hosts_time_is_taken_before_any_profile():
    order = []

    def rows_of(meter):
        order.append(meter)
        costs = {"host µs": 3.0} if meter is bill.on_host else {"GPU µs": 5.0}
        return [{"step": name} | costs for name in "ab"]

    rows = bill.measured(rows_of)
    assert order == [bill.on_host, bill.timed]
    assert rows == [{"step": name, "GPU µs": 5.0, "host µs": 3.0} for name in "ab"]


def test_the_update_of_a_bill_reads_gradients_of_their_own(monkeypatch):
    """Parameters as their own gradients would come from memory once."""
    given = []
    monkeypatch.setattr(bill, "sgd", lambda p, g, learning_rate: given.append((p, g)))
    bill.bill(*on_meta(64, (5, 7)))
    for parameters, gradients in given:
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert not any(g is p for p, g in zip(parameters, gradients))
    assert given
