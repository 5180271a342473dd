"""The bench of the DLRM: its calls, its checks and its record. Times need a GPU."""

from lib.dlrm import bench as dlrm_bench
from lib.dlrm import model as dlrm
from lib.dlrm.train import batch_of
from lib.measure.check import CheckError
from lib.recorded import results

import pytest
import torch

ROWS = (50, 3, 700)


def model_and_batch(size=64, sparse_gradients=False):
    torch.manual_seed(0)
    hashing = dlrm.ModulusHash(ROWS)
    model = dlrm.DLRM(hashing, dlrm.SMALL, sparse_gradients=sparse_gradients)
    batch = batch_of(size, "cpu")
    return model, batch._replace(sparse=batch.sparse[:, : len(ROWS)])


@pytest.mark.parametrize("sparse_gradients", [False, True])
def test_a_training_call_trains_and_leaves_no_gradients(sparse_gradients):
    model, batch = model_and_batch(sparse_gradients=sparse_gradients)
    before = {n: p.clone() for n, p in model.named_parameters()}
    step = dlrm_bench.training_call(dlrm_bench.WithLoss(model), model.parameters(), batch)
    losses = [step().item() for _ in range(200)]
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in model.parameters())
    assert all((p != before[n]).any() for n, p in model.named_parameters())


def test_a_forward_call_gives_logits_without_gradients():
    model, batch = model_and_batch()
    logits = dlrm_bench.forward_call(model, batch)()
    assert torch.equal(logits, model(batch.dense, batch.sparse)) and not logits.requires_grad


def test_versions_are_compiled_for_one_batch_size(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: calls.append(options))
    model, _ = model_and_batch()
    assert dlrm_bench.version_of("eager, sparse gradients", model) is model
    for version in ("compiled, sparse gradients", "CUDA graph"):
        dlrm_bench.version_of(version, model)
    assert [options.pop("mode") for options in calls] == [None, "reduce-overhead"]
    assert calls == [{"dynamic": False}] * 2


@pytest.mark.parametrize("sparse_gradients", [False, True])
@pytest.mark.parametrize("what", dlrm_bench.PASSES)
def test_a_wrong_version_is_found(what, sparse_gradients):
    model, batch = model_and_batch(sparse_gradients=sparse_gradients)
    module = model if what == "forward" else dlrm_bench.WithLoss(model)
    want = dlrm_bench.results_of(what, module, model, batch)
    assert len(want) == (1 if what == "forward" else 1 + len(list(model.parameters())))
    dlrm_bench.expect_close(dlrm_bench.results_of(what, module, model, batch), want)
    for name, tensor in want.items():
        for wrong in (1.01 * tensor, tensor * torch.nan):
            with pytest.raises(CheckError, match=name):
                dlrm_bench.expect_close({**want, name: wrong}, want)


@pytest.mark.parametrize("sparse_gradients", [False, True])
def test_one_table_is_all_of_them(sparse_gradients):
    model, batch = model_and_batch()
    want = dlrm_bench.results_of("training", dlrm_bench.WithLoss(model), model, batch)
    one = dlrm_bench.OneTable(model.sparse_arch, sparse_gradients)
    rows = model.hashing(batch.sparse)
    assert torch.equal(one(rows), model.sparse_arch(rows))
    model.sparse_arch = one
    got = dlrm_bench.results_of("training", dlrm_bench.WithLoss(model), model, batch)
    assert got.keys() == want.keys()
    dlrm_bench.expect_close(got, want)
    one.starts.zero_()
    got = dlrm_bench.results_of("training", dlrm_bench.WithLoss(model), model, batch)
    with pytest.raises(CheckError, match="gradient of"):
        dlrm_bench.expect_close({**got, "loss": want["loss"]}, want)


def test_a_picture_is_the_timeline_of_one_call():
    model, batch = model_and_batch()
    drawn = dlrm_bench.picture("forward", "eager", dlrm_bench.forward_call(model, batch))
    assert {e["kind"] for e in drawn["timeline"]} == {"step", "op"}


def test_the_row_of_a_failing_case_says_why(monkeypatch):
    def fails(*args):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(dlrm_bench, "measure", fails)
    monkeypatch.setattr(dlrm_bench, "default_model", lambda *args, **options: None)
    row, drawn = dlrm_bench.case("forward", "eager", 128)
    assert row["note"] == "✘ RuntimeError: out of" and drawn is None


def test_the_record_says_when_it_is_missing_or_old(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert dlrm_bench.recorded() == ([], results.NOT_RECORDED)
    monkeypatch.setattr(results, "gpu_slug", lambda name=None: "h200")
    results.save("dlrm", [{"batch": 128}], dlrm_bench.SOURCES)
    rows, where = dlrm_bench.recorded()
    assert rows == [{"batch": 128}] and where.startswith("recorded on") and "before" not in where
    monkeypatch.setattr(results, "source_hash", lambda paths: "other")
    assert dlrm_bench.recorded()[1].endswith("before the code last changed")


@pytest.mark.parametrize("name", ["dlrm", "dlrm_pictures"])
def test_the_records_belong_to_this_code(name):
    assert not results.is_stale(results.load(name)), (
        "the code changed since: python -m lib.dlrm.bench"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs a GPU"):
        dlrm_bench.main([])
