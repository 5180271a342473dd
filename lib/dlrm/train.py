"""Train a DLRM on Criteo's rows from parquet, and evaluate it on rows it has not seen.

Order     each epoch visits every training row once, in an order that depends on seed and epoch alone.
Metrics   log loss (mean binary cross-entropy) and AUC, by ranks. No host sync in a step: losses stay on the
          device, and the host reads one every 50 steps.

    python -m lib.dlrm.train [--epochs 2] [--architecture large]
"""

import argparse
import contextlib
import dataclasses
from pathlib import Path

from lib import machine
from lib.dlrm import criteo
from lib.dlrm import model as dlrm

import torch
import torch.nn.functional as F
from tqdm import tqdm

_LOOK_EVERY = 50  # steps between two looks at the loss, each of which waits for the device


# --- metrics -------------------------------------------------------------------------------------------------


def log_loss(logits, labels):
    """Mean binary cross-entropy of logits (N,) against labels (N,) of 0 and 1, in float64; a float."""
    return F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()


def auc(scores, labels):
    """The chance that a random positive scores higher than a random negative, ties counting half; a float.

    scores (N,), labels (N,) of 0 and 1. From ranks: one sort, no pairs. ValueError for NaN or labels all alike.
    """
    if scores.isnan().any():
        raise ValueError("auc: there are NaN among the scores; has training diverged?")
    positive = labels > 0.5
    n_positive = int(positive.sum())
    n_negative = len(labels) - n_positive
    if n_positive == 0 or n_negative == 0:
        raise ValueError("auc needs labels of both kinds, got one kind only; take more rows")
    _, which, counts = scores.unique(return_inverse=True, return_counts=True)  # sorted
    last = counts.cumsum(0).double()
    rank = last - (counts - 1) / 2  # equal scores share the mean of their ranks, from 1
    rank_sum = rank[which][positive].sum().item()
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def evaluate(model, path=criteo.SAMPLE_VALIDATION, batch_size=8192):
    """{'log_loss', 'auc', 'log_loss_of_mean'} of `model` on all rows of a parquet file.

    log_loss_of_mean is that of the best constant, the share of clicks: a model has to be below it.
    """
    was_training, device = model.training, _device_of(model)
    model.eval()
    logits, labels = [], []
    with torch.no_grad():
        for batch in ParquetBatches(path, batch_size, device).in_order():
            logits.append(model(batch.dense, batch.sparse))
            labels.append(batch.labels)
    model.train(was_training)
    logits, labels = torch.cat(logits), torch.cat(labels)
    constant = labels.double().mean().logit().expand_as(labels)
    return {
        "log_loss": log_loss(logits, labels),
        "auc": auc(logits, labels),
        "log_loss_of_mean": log_loss(constant, labels),
    }


def _device_of(model):
    return next(model.parameters()).device


# --- batches -------------------------------------------------------------------------------------------------


class ParquetBatches:
    """Batches of the rows of a parquet file, one row group in memory at a time, for any number of epochs.

    Every row comes once in each; the last batch may be smaller, down to one row.
    """

    def __init__(self, path, batch_size, device="cpu"):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.reader = criteo.ParquetReader(path)
        self.batch_size, self.device = batch_size, device

    def __len__(self):
        """Batches in one epoch."""
        return -(-self.reader.rows // self.batch_size)

    def in_order(self):
        """The rows as they stand in the file."""
        return self._cut(self._group(k) for k in range(len(self.reader)))

    def shuffled(self, seed, epoch):
        """The row groups in a random order, and the rows within each: the same for the same seed and epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.reader), generator=generator).tolist()

        def groups():
            for k in order:
                group = self._group(k)
                which = torch.randperm(len(group.labels), generator=generator)
                yield group.rows(which.to(self.device))

        return self._cut(groups())

    def _group(self, k):
        return criteo.to_tensors(self.reader.group(k), self.device)

    def _cut(self, groups):
        """Groups of rows as batches, which may reach over from one group to the next."""
        remainder = None
        for group in groups:
            if remainder is not None:
                group = criteo.Batch(*(torch.cat(pair) for pair in zip(remainder, group)))
            whole = len(group.labels) // self.batch_size * self.batch_size
            for start in range(0, whole, self.batch_size):
                yield group.rows(slice(start, start + self.batch_size))
            remainder = group.rows(slice(whole, None))
        if remainder is not None and len(remainder.labels):
            yield remainder


def batch_of(size, device):
    """A criteo.Batch of `size` rows of the sample, repeated where it has fewer."""
    rows = next(ParquetBatches(criteo.SAMPLE_TRAIN, size, device).in_order())
    return rows.rows(torch.arange(size, device=device) % len(rows.labels))


# --- training ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """A training run: the loss of every step, and `evaluate` on validation rows after every epoch."""

    losses: list
    metrics: list


def table_rows():
    """Rows of each table on this machine: full size (2.2 GB) on a GPU of 16 GB or more, else at most 10,000."""
    # training takes the weights, gradients, Adagrad's sums and two temporaries: five times the 2.2 GB
    if machine.HAS_GPU and torch.cuda.get_device_properties(0).total_memory > 15e9:
        return criteo.CARDINALITIES
    return criteo.capped(limit=10_000)


def default_model(architecture=dlrm.SMALL, seed=0, sparse_gradients=False):
    """A DLRM with the modulus hash and tables of `table_rows()`, made on this machine's device."""
    torch.manual_seed(seed)
    with machine.device():
        hashing = dlrm.ModulusHash(table_rows())
        return dlrm.DLRM(hashing, architecture, sparse_gradients=sparse_gradients)


def train_step(model, optimizer, batch):
    """One step: forward, loss, backward, update. Returns the loss, a tensor on the device: nobody waits."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    model,
    train_path=criteo.SAMPLE_TRAIN,
    validation_path=criteo.SAMPLE_VALIDATION,
    *,
    epochs=2,
    batch_size=512,
    learning_rate=0.005,
    seed=0,
    threads=1,
    progress=True,
    on_step=None,
):
    """Train `model` in place with Adagrad; returns its History.

    on_step(step, loss) is called after each step, the loss being a tensor.
    threads: CPU threads. One gives the same curve on any number of cores. Two gain little on operations this
    small. Where another program used the cores, two took ten times as long, because they wait for each other.
    Raises ValueError when train and validation are the same file.
    """
    for name, value in (("epochs", epochs), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    batches = ParquetBatches(train_path, batch_size, _device_of(model))
    if batches.reader.path.samefile(criteo.ParquetReader(validation_path).path):
        raise ValueError(
            "train and validation are the same file, and metrics on rows that were learnt say nothing; "
            "split the rows into two files"
        )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=learning_rate)
    losses, metrics = [], []
    bar = tqdm(total=epochs * len(batches), unit="step", disable=not progress)
    with _threads(threads), bar:
        for epoch in range(epochs):
            for batch in batches.shuffled(seed, epoch):
                losses.append(train_step(model, optimizer, batch))
                bar.update()
                if len(losses) % _LOOK_EVERY == 0:
                    bar.set_postfix(loss=f"{losses[-1].item():.4f}")
                if on_step is not None:
                    on_step(len(losses), losses[-1])
            metrics.append(evaluate(model, validation_path))
    return History(torch.stack(losses).tolist(), metrics)  # the losses come to the host in one copy


@contextlib.contextmanager
def _threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(argv=None):
    """Train on this machine; prints the metrics after each epoch."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.dlrm.train", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--train", type=Path, default=criteo.SAMPLE_TRAIN, help="parquet")
    parser.add_argument("--validation", type=Path, default=criteo.SAMPLE_VALIDATION, help="parquet")
    parser.add_argument("--architecture", choices=["small", "large"], default="small")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    architecture = {"small": dlrm.SMALL, "large": dlrm.LARGE}[options.architecture]
    history = train(
        default_model(architecture, options.seed),
        options.train,
        options.validation,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    for epoch, metrics in enumerate(history.metrics, start=1):
        print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))


if __name__ == "__main__":
    main()
