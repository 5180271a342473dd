"""Whole models: any mixture of parts gives the same losses and gradients, and text that can be learnt is."""

import functools
import math
import re

from lib import machine
from lib.models import generate, llama, train
from lib.models.text import Chain
from lib.recorded import results

import pytest
import torch

DEVICE = machine.device()


def small(case):
    """A small model of a case, and ids and labels for it."""
    torch.manual_seed(0)
    sizes = case.module.SMALL
    text = Chain(sizes.n_words).draw(2, 9).to(DEVICE)
    return case.model(sizes).to(DEVICE), text[:, :-1], text[:, 1:]


def losses_and_gradients(model, parts, ids, labels):
    model.parts = parts
    loss = model(ids, labels)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("case", train.CASES.values(), ids=train.CASES)
def test_every_version_has_the_same_loss_and_gradients(case):
    model, ids, labels = small(case)
    want = losses_and_gradients(model, case.module.EAGER, ids, labels)
    names = [name for name in train.versions(case) if name.startswith(("eager +", "ours"))]
    assert len(names) == 2 * len(case.parts) + 1
    for name in ["ours"] + [name for name in names if "+" in name]:
        got = losses_and_gradients(model, train.versions(case)[name][0], ids, labels)
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_in_sixteen_bits_places_are_as_exact():
    """model.bfloat16() rounds parameters, and leaves the tables of rope as they were."""
    model = llama.Llama(llama.SMALL)
    tables = [table.clone() for table in model.tables]
    rounded = model.bfloat16().tables
    assert all(torch.equal(a, b) for a, b in zip(tables, rounded))


@pytest.mark.parametrize("parts", [llama.EAGER, llama.OURS], ids=["eager", "ours"])
def test_token_by_token_is_as_at_once(parts):
    """Texts of which one is two tokens ahead."""
    torch.manual_seed(0)
    model = llama.Llama(llama.SMALL, parts).to(DEVICE)
    text = Chain(64).draw(2, 5).to(DEVICE)
    cache, logits = model.new_cache(2, 8), {}
    with torch.no_grad():
        for step in range(5):
            at = torch.tensor([step, max(0, step - 2)], device=DEVICE)
            new = model.next_logits(text[[0, 1], at], cache, at)
            logits |= {(row, at[row].item()): new[row] for row in range(2)}
        x, h = model.embedding(text), None
        for layer in model.layers:
            x, h = layer(llama.EAGER, x, h, *(table[:5] for table in model.tables))
        want = model.head(llama.EAGER["norm"](x, h, model.norm)[0])
    for (row, place), got in logits.items():
        torch.testing.assert_close(got, want[row, place], atol=1e-5, rtol=1e-4)


def test_a_model_learns_the_chain():
    """From knowing nothing to nearly the entropy; random tokens would stay at log(64)."""
    case = train.CASES["Llama"]
    losses, chain = train.learn(case, llama.EAGER, n_steps=120)
    assert losses[0] == pytest.approx(math.log(case.module.SMALL.n_words), abs=0.1)
    assert chain.entropy < losses[-1] < chain.entropy + 0.15


def test_ours_learns_step_by_step_as_eager_does():
    case = train.CASES["Llama"]
    n_steps = machine.pick(gpu=100, cpu=2)
    (eager, _), (ours, _) = (
        train.learn(case, parts, n_steps, n_texts=4) for parts in (llama.EAGER, llama.OURS)
    )
    assert max(abs(a - b) for a, b in zip(eager, ours)) < 1e-3


def test_the_chain_is_what_it_says():
    chain = Chain(100, seed=1)
    text = chain.draw(50, 200)
    assert torch.equal(text, Chain(100, seed=1).draw(50, 200))
    before, after = text[:, :-1].flatten(), text[:, 1:].flatten()
    follows = chain.followers[before] == after[:, None]
    assert follows.any(1).all()
    assert follows[:, 0].float().mean() == pytest.approx(0.5, abs=0.03)
    assert chain.entropy == pytest.approx(1.75 * math.log(2))


@pytest.mark.parametrize("case", train.CASES.values(), ids=train.CASES)
def test_the_bill_promises_that_fusing_gains(case):
    eager, ours = (
        train.promised_us(case, parts) for parts in (case.module.EAGER, case.module.OURS)
    )
    assert 0.5 * eager < ours < eager


def test_the_table_of_whole_models_shows_the_record():
    page = (results.ROOT / "lib/ops/README.md").read_text()
    rows = {(row["model"], row["version"]): row for row in results.load("model")["rows"]}
    section = page.split("\n## In a whole model")[1].split("\n## ")[0]
    _, *lines = re.findall(r"(?m)^\| ([^|]+) \|(.*)\|$", section)
    assert {name for name, _ in lines} >= {"eager", "ours", "compiled", "compiled + ours"}
    for name, cells in lines:
        both = [rows.get((model, name)) for model in train.CASES]
        pairs = [f"{r['step, ms']:.1f} | {r['peak, GB']:.1f}" if r else "– | –" for r in both]
        assert cells.strip() == " | ".join(pairs), name


@pytest.mark.skipif(machine.HAS_GPU, reason="on a GPU `make model` itself says it")
def test_each_version_starts_where_eager_did(monkeypatch):
    """And none is left out for its loss: the steps of one version must not train the next one's weights."""
    case = train.CASES["Llama"]
    small = case._replace(model=functools.partial(llama.Llama, llama.SMALL), n_texts=2, n_tokens=16)
    names, every = ("eager", train.FOREACH, "ours", "compiled"), train.versions(small)
    monkeypatch.setattr(train, "CASES", {"Llama": small})
    monkeypatch.setattr(train, "versions", lambda _: {name: every[name] for name in names})
    monkeypatch.setattr(
        train, "_timed", lambda step, *_: {"losses": [step().item(), step().item()]}
    )
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    rows = train.measure("Llama")
    assert tuple(row["version"] for row in rows) == names
    assert not [row["note"] for row in rows if row["note"]]
    assert all(row["losses"][0] == row["losses"][1] for row in rows)


@pytest.mark.skipif(machine.HAS_GPU, reason="says so where there is none")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="whole models need a GPU"):
        train.main([])


def test_a_quantized_model_goes_on_as_the_whole_one_does():
    """Trained on the chain, it says words that follow."""
    case = train.CASES["Llama"]
    torch.manual_seed(0)
    chain, model = Chain(64), llama.Llama(llama.SMALL).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        text = chain.draw(16, 33).to(DEVICE)
        train.step_of(model, optimizer, text[:, :-1], text[:, 1:])()
    model.parts = case.module.EAGER
    text = chain.draw(4, 6).to(DEVICE)
    whole = generate.greedy(model, text, 8)
    smaller = generate.greedy(generate.quantized(model, "int8"), text, 8)
    for words in (whole, smaller):
        said = torch.cat([text[:, -1:], words], 1).cpu()
        follows = (chain.followers[said[:, :-1]] == said[:, 1:, None]).any(-1)
        assert follows.float().mean() > 0.9
    assert (whole == smaller).float().mean() > 0.8
    half = generate.bytes_of_step(generate.quantized(model, "int8"), 1, 0)
    assert half < 0.5 * generate.bytes_of_step(model, 1, 0)
