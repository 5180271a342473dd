"""Training: metrics against their definitions, batches, learning on the sample."""

import math
import os

from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm import train as train_dlrm
from lib.tests import yardstick

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small train and validation files: 700 rows in groups of 300, and 400 rows."""
    folder = tmp_path_factory.mktemp("criteo")
    table = criteo.read_parquet(criteo.SAMPLE_VALIDATION)
    criteo.write_parquet(table[:700], folder / "train.parquet", row_group_rows=300)
    criteo.write_parquet(table[700:1100], folder / "validation.parquet")
    return folder / "train.parquet", folder / "validation.parquet"


def small_model(seed=0):
    torch.manual_seed(seed)
    return dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=50)))


def train(model, files, **options):
    options = {"epochs": 3, "batch_size": 64, "progress": False} | options
    return train_dlrm.train(model, *files, **options)


# --- metrics -------------------------------------------------------------------------------------------------


def pairs_won(scores, labels):
    """AUC by its definition: every positive against every negative, a tie counting half."""
    positive = [s for s, y in zip(scores.tolist(), labels.tolist()) if y]
    negative = [s for s, y in zip(scores.tolist(), labels.tolist()) if not y]
    won = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    return won / (len(positive) * len(negative))


@pytest.mark.parametrize("n_scores", [2, 5, 10**6], ids=["many ties", "some ties", "no ties"])
def test_auc_is_the_share_of_pairs_in_the_right_order(n_scores):
    for n in (2, 3, 50, 301):
        scores = torch.randint(n_scores, (n,)).float() - 1
        labels = (torch.rand(n) < 0.3).float()
        labels[:2] = torch.tensor([0.0, 1.0])
        assert train_dlrm.auc(scores, labels) == pytest.approx(pairs_won(scores, labels), abs=1e-12)


def test_auc_at_its_ends():
    labels = torch.tensor([0.0, 0, 1, 1])
    scores = torch.tensor([-math.inf, 0.1, 0.2, math.inf])
    assert train_dlrm.auc(scores, labels) == 1
    assert train_dlrm.auc(-scores, labels) == 0
    assert train_dlrm.auc(torch.zeros(4), labels) == 0.5
    for alike in (torch.zeros(4), torch.ones(4)):
        with pytest.raises(ValueError, match="labels of both kinds"):
            train_dlrm.auc(scores, alike)
    with pytest.raises(ValueError, match="there are NaN among the scores"):
        train_dlrm.auc(torch.tensor([0.0, math.nan, 0, 0]), labels)


def test_auc_of_many_rows_does_not_round():
    n = 3_000_000  # the sum of ranks passes 2**24, where float32 stops counting, and 2**31
    scores = torch.arange(n).float()
    labels = (torch.arange(n) % 2).float()
    assert train_dlrm.auc(scores, labels) == pytest.approx(0.5 + 0.5 / (n // 2), abs=1e-9)


def test_log_loss_is_the_definition_and_stays_finite():
    logits, labels = torch.tensor([0.3, -2.0, 4.0]), torch.tensor([1.0, 0.0, 0.0])
    chances = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    want = -(math.log(chances[0]) + math.log(1 - chances[1]) + math.log(1 - chances[2])) / 3
    assert train_dlrm.log_loss(logits, labels) == pytest.approx(want, rel=1e-9)
    assert train_dlrm.log_loss(torch.tensor([1000.0]), torch.tensor([0.0])) == 1000


def test_evaluate_covers_all_rows_and_leaves_the_model_as_it_was(files):
    model = small_model().train()
    metrics = train_dlrm.evaluate(model, files[0], batch_size=64)
    batch = criteo.to_tensors(criteo.read_parquet(files[0]))
    with torch.no_grad():
        logits = model(batch.dense, batch.sparse)
    assert metrics["auc"] == pytest.approx(train_dlrm.auc(logits, batch.labels), abs=1e-4)
    assert metrics["log_loss"] == pytest.approx(train_dlrm.log_loss(logits, batch.labels), rel=1e-5)
    p = batch.labels.mean().item()
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert metrics["log_loss_of_mean"] == pytest.approx(entropy, rel=1e-5)
    assert model.training


# --- batches -------------------------------------------------------------------------------------------------


def rows_of(batches):
    """The rows of all batches, one tuple each, in order."""
    rows = []
    for batch in batches:
        rows += [
            tuple(r)
            for r in torch.cat([batch.dense, batch.sparse, batch.labels[:, None]], 1).tolist()
        ]
    return rows


@pytest.mark.parametrize("batch_size", [1, 64, 233, 300, 700, 5000])
def test_every_row_once_in_each_epoch(files, batch_size):
    batches = train_dlrm.ParquetBatches(files[0], batch_size)
    in_order = rows_of(batches.in_order())
    assert len(in_order) == 700
    for epoch in range(2):
        shuffled = list(batches.shuffled(0, epoch))
        assert sorted(rows_of(shuffled)) == sorted(in_order)
        assert len(shuffled) == len(batches)
        lengths = [len(b.labels) for b in shuffled]
        assert set(lengths[:-1]) <= {batch_size}
        assert lengths[-1] == (700 % batch_size or min(batch_size, 700))


def test_the_order_depends_on_seed_and_epoch_alone(files):
    batches = train_dlrm.ParquetBatches(files[0], 64)
    orders = [rows_of(batches.shuffled(seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    torch.manual_seed(123)
    assert rows_of(train_dlrm.ParquetBatches(files[0], 64).shuffled(0, 1)) == orders[1]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != rows_of(batches.in_order())


# --- learning ------------------------------------------------------------------------------------------------


def test_the_sample_is_learnt_within_a_minute():
    """AUC on rows that were not trained on, starting from an untrained model."""
    model = train_dlrm.default_model()
    before = train_dlrm.evaluate(model)
    assert before["auc"] == pytest.approx(0.5, abs=0.06)
    seconds, history = yardstick.cpu_seconds(
        lambda: train_dlrm.train(model, epochs=2, progress=False)
    )
    assert seconds < yardstick.for_python(60)
    assert len(history.losses) == 2 * math.ceil(48_000 / 512)
    last = history.metrics[-1]
    assert last["auc"] > 0.70
    assert last["log_loss"] < last["log_loss_of_mean"] - 0.03
    assert last == train_dlrm.evaluate(model)


def test_epochs_follow_each_other(files):
    history = train(small_model(), files, epochs=5)
    assert len(history.losses) == 5 * 11
    assert len(history.metrics) == 5
    assert sum(history.losses[-11:]) < 0.9 * sum(history.losses[:11])


def test_a_last_batch_of_one_row(files):
    history = train(small_model(), files, batch_size=233, epochs=1)  # 3 × 233 + 1
    assert len(history.losses) == 4
    assert all(math.isfinite(loss) for loss in history.losses)


def test_a_batch_larger_than_the_sample_repeats_its_rows():
    batch = train_dlrm.batch_of(50_000, "cpu")
    assert batch.dense.shape == (50_000, 13) and batch.sparse.shape == (50_000, 26)
    assert torch.equal(batch.sparse[:2_000], batch.sparse[48_000:])


def test_the_seed_decides(files):
    curves = [train(small_model(), files, seed=seed).losses for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]


def test_train_is_not_validation(files, tmp_path):
    os.link(files[0], tmp_path / "another_name.parquet")
    for path in (files[0], tmp_path / "another_name.parquet"):
        with pytest.raises(ValueError, match="train and validation are the same file"):
            train(small_model(), (files[0], path))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_learn_as_dense_ones_do(files):
    curves = []
    for sparse_gradients in (False, True):
        torch.manual_seed(0)
        hashing = dlrm.ModulusHash(criteo.capped(limit=50))
        curves.append(train(dlrm.DLRM(hashing, sparse_gradients=sparse_gradients), files).losses)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_a_step_has_no_host_sync(files):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names.append(op._schema.name)
            return op(*args, **(kwargs or {}))

    names, model = [], small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = next(train_dlrm.ParquetBatches(files[0], 64).in_order())
    with Names():
        loss = train_dlrm.train_step(model, optimizer, batch)
    assert "aten::embedding_dense_backward" in names
    assert "aten::_local_scalar_dense" not in names
    assert loss.shape == ()
    assert not loss.requires_grad


def test_training_leaves_the_number_of_threads_as_it_was(files):
    def interrupt(step, loss):
        during.append(torch.get_num_threads())
        if step == 3:
            raise KeyboardInterrupt

    before, during = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(small_model(), files, on_step=interrupt)
        assert during == [1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_arguments(files):
    for options, message in [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(small_model(), files, **options)
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        train(small_model(), (files[0], files[1].with_name("nowhere")))


def test_a_progress_bar(files, capsys):
    train(small_model(), files, progress=True, epochs=5)
    output = capsys.readouterr().err
    assert "55/55" in output
    assert "loss=" in output


def test_the_command_line(files, capsys):
    options = ["--train", str(files[0]), "--validation", str(files[1]), "--epochs", "1"]
    train_dlrm.main(options)
    assert capsys.readouterr().out.startswith("epoch 1: log_loss 0.")
