"""Cures for the training step of a DLRM, timed in turns: fewer launches, smaller gradients, or both.

One table    the 26 tables one below the other, in one weight: one lookup, one gradient, one update.
Sparse       gradients that hold the rows of the batch alone.
Compiled     torch.compile for this batch size; CUDA graph: the same with mode="reduce-overhead".
"""

from lib.dlrm import model as dlrm
from lib.dlrm.bench import WithLoss, batch_of, version_of
from lib.dlrm.train import default_model
from lib.measure import bench
from lib.measure.check import CheckError

import torch
import torch.nn.functional as F

VERSIONS = ("eager", "compiled", "CUDA graph")


class OneWeight(torch.nn.Module):
    """A dlrm.SparseArch as one table: row r of table k is row r + start of k."""

    def __init__(self, sparse_arch, sparse=False):
        super().__init__()
        self.sparse, tables = sparse, [table.weight.detach() for table in sparse_arch.tables]
        self.tables = range(len(tables))  # a DLRM asks how many there are
        self.weight = torch.nn.Parameter(torch.cat(tables))
        sizes = torch.tensor([len(table) for table in tables], device=self.weight.device)
        self.register_buffer("starts", sizes.cumsum(0) - sizes)

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight, sparse=self.sparse)


def models():
    """{tables: a DLRM with large MLPs}, all of the same weights."""
    found = {}
    for tables in ("26 tables", "one table"):
        for gradients, sparse in (("", False), (", sparse gradients", True)):
            model = found[tables + gradients] = default_model(dlrm.LARGE, sparse_gradients=sparse)
            if tables == "one table":
                model.sparse_arch = OneWeight(model.sparse_arch, sparse)
    return found


def step_of(with_loss, parameters, batch):
    """A closure: one training step with a WithLoss, or a version of it; it returns the loss."""
    # A rate of 0 is as much work, and leaves all versions the weights that they share.
    optimizer = torch.optim.SGD(parameters, lr=0.0)

    def step():
        loss = with_loss(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def calls_of(n_rows):
    """{(tables, version): a training step that returns its loss}; with sparse gradients eager alone."""
    calls = {}
    for tables, model in models().items():
        batch = batch_of(n_rows, next(model.parameters()).device)
        for version in VERSIONS[: 1 if "sparse" in tables else None]:
            made = version_of(version, WithLoss(model))
            calls[tables, version] = step_of(made, model.parameters(), batch)
    return calls


def measure(n_rows=2048):
    """A row for each cure: µs of a training step, as a share of eager's, and MiB at its peak."""
    calls = calls_of(n_rows)
    losses = {name: call().item() for name, call in calls.items()}
    eager = next(iter(calls))
    for name, loss in losses.items():
        if not abs(loss - losses[eager]) <= 1e-5:  # a NaN is not
            raise CheckError(f"{name}: a loss of {loss:.6f}, eager's is {losses[eager]:.6f}")
    us = bench.in_turns_us(calls, n_rounds=3)
    return [
        {
            "tables": tables,
            "step": version,
            "µs": us[tables, version],
            "of eager, %": 100 * us[tables, version] / us[eager],
            "peak, MiB": bench.peak_mib(call),
        }
        for (tables, version), call in calls.items()
    ]
