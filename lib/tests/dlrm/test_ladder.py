"""Versions are checked before they are timed, and alone or as a graph as asked."""

from types import SimpleNamespace

from lib import machine
from lib.dlrm import bill, criteo, ladder
from lib.dlrm import model as dlrm
from lib.dlrm.bench import WithLoss
from lib.dlrm.train import batch_of

import pytest
import torch


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        model = dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=50)), dlrm.SMALL)
        self.bottom, self.top = model.dense_arch, model.prediction
        self.lookup = torch.nn.Sequential(model.hashing, model.sparse_arch)
        self.interaction = model.interaction

    def forward(self, dense, ids):
        return self.top(self.interaction(self.bottom(dense), self.lookup(ids)))


def step_of(module, data, update, learning_rate):
    def step():
        loss = module(*data)
        parameters = list(module.parameters())
        update(parameters, torch.autograd.grad(loss, parameters), learning_rate)
        return loss.detach()

    return step


@pytest.fixture
def timed(monkeypatch):
    calls = []

    def time_us(call, rep_ms):
        calls.append(call)
        return SimpleNamespace(median_us=float(len(calls)))

    monkeypatch.setattr(ladder.bench, "time_us", time_us)
    monkeypatch.setattr(ladder, "as_graph", lambda call: call)
    return calls


@pytest.mark.parametrize("what", ladder.PASSES)
def test_each_version_is_timed_alone_and_as_a_graph(what, timed):
    made = {name: (WithLoss(Parts()), bill.sgd) for name in ("eager", "ours")}
    row = ladder.row_of(what, batch_of(8, "cpu"), made, step_of, alone={"eager"})
    assert row == {"pass": what, "rows": 8, "eager": 1.0, "ours": 2.0, "ours + graph": 3.0}


@pytest.mark.parametrize("what", ladder.PASSES)
def test_a_wrong_version_is_not_timed(what, timed):
    made = {name: (WithLoss(Parts()), bill.sgd) for name in ("eager", "ours")}
    with torch.no_grad():
        made["ours"][0].model.top.mlp[-1].bias += 0.5
    with pytest.raises(AssertionError, match=f"{what}, 8 rows, ours: "):
        ladder.row_of(what, batch_of(8, "cpu"), made, step_of)
    assert len(timed) == 2  # eager, twice


def test_all_passes_and_the_precision_comes_back(timed, monkeypatch):
    monkeypatch.setattr(ladder, "BATCHES", (4, 8))
    make = lambda: WithLoss(Parts()).to(machine.device())  # noqa: E731
    versions = lambda: {n: (make(), bill.sgd) for n in ("eager", "other")}  # noqa: E731
    before = torch.get_float32_matmul_precision()
    rows = ladder.measure(versions, step_of, alone={"eager", "other"}, in_training={"other"})
    assert [row["pass"] for row in rows] == [w for w in ladder.PASSES for _ in ladder.BATCHES]
    assert ["other" in row for row in rows] == [row["pass"] == "training" for row in rows]
    assert torch.get_float32_matmul_precision() == before


def test_steps_are_drawn_and_told():
    import matplotlib.pyplot as plt

    rows = [{"pass": "forward", "step": "eager", "GPU µs": 243.0, "host µs": 1419.0}]
    figure, ax = plt.subplots()
    ladder.draw_steps(ax, rows)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["eager"]
    assert ladder.steps_text(rows) == "forward, eager: GPU 243, host 1,419"
    plt.close(figure)
