"""Bills, waits and utilisation: on lists written by hand as a GPU gives them, and on real profiles."""

from lib import machine, profiling
from lib.profiling import cost as bill
from lib.profiling.events import trimmed
from lib.tests.profiling.profiles import PAGEABLE, TO_DEVICE, event, gpu_step, item, step

import pandas as pd
import pytest
import torch


def test_the_bill_of_a_step_on_a_gpu():
    assert bill.bill(gpu_step(), "eager") == {
        "version": "eager",
        "kernels": 2,
        "host_ops": 3,  # linear, item, mm; ops that these call do not count
        "device_us": 61.0,
        "host_us": 92.0,  # 100, less 8 of waiting
        "wall_us": 110.0,
        "busy_pct": 55.5,
        "syncs": 1,
        "sync_names": "aten::item ×1",
        "to_device": 0,
        "to_device_bytes": 0,
    }


def test_the_bill_with_no_gpu_has_nothing_to_say_of_a_device():
    events = [step(), event("op", 0, 5, "aten::mul")]
    row = bill.bill(events, "eager")
    nothing = ["kernels", "device_us", "busy_pct", "to_device", "to_device_bytes"]
    assert [name for name, value in row.items() if value is None] == nothing
    assert (row["host_ops"], row["host_us"], row["wall_us"]) == (1, 100, 100)
    assert (row["syncs"], row["sync_names"]) == (0, "none")


def test_bills_of_both_kinds_go_into_one_table():
    rows = [bill.bill(gpu_step(), "GPU"), bill.bill([step()], "CPU")]
    table = pd.DataFrame(rows).set_index("version")
    assert table.loc["GPU", "kernels"] == 2
    assert pd.isna(table.loc["CPU", "kernels"])


def test_utilisation_joins_overlapping_kernels():
    overlapping = [event("kernel", 10, 40), event("kernel", 30, 60, stream=8)]
    assert bill.utilisation([step(), *overlapping]) == 50
    assert bill.utilisation([step(), event("kernel", 0, 300)]) == 100
    assert bill.utilisation([step(), event("runtime", 5, 6, "cudaLaunchKernel")]) == 0
    assert bill.utilisation([step()]) is None


def test_copies_to_the_device_are_counted_with_their_bytes():
    copies = [event("copy", 5, 9, TO_DEVICE, bytes=4096), event("copy", 9, 10, TO_DEVICE, bytes=8)]
    row = bill.bill([step(), *copies, event("copy", 11, 12, PAGEABLE)], "x")
    assert (row["to_device"], row["to_device_bytes"]) == (2, 4104)


# --- waits on a GPU -----------------------------------------------------------------------------------------


def syncs_in(*events):
    return bill.syncs([step(), *events])


def test_an_item_is_one_wait_with_its_copy_and_its_line():
    (row,) = syncs_in(*item(10, 30, where="cell:3 step: loss.item()"))
    assert row == {
        "op": "aten::item",
        "inside": "aten::_local_scalar_dense",
        "call": "cudaMemcpyAsync (Device -> Pageable) + cudaStreamSynchronize",
        "times": 1,
        "waited_us": 20.0,
        "where": "cell:3 step: loss.item()",
    }


def test_waits_of_one_line_are_one_row_and_the_longest_comes_first():
    rows = syncs_in(*item(0, 5, "a"), *item(10, 30, "b"), *item(40, 44, "a"))
    assert [(row["where"], row["times"], row["waited_us"]) for row in rows] == [
        ("b", 1, 20),
        ("a", 2, 9),
    ]


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "cudaEventSynchronize"])
def test_a_wait_outside_of_ops_is_named_by_its_call(name):
    events = [step(), event("runtime", 5, 9, name, where="cell:1 f")]
    (row,) = bill.syncs(events)
    assert (row["op"], row["call"], row["where"]) == ("", name, "cell:1 f")
    assert bill.bill(events, "x")["sync_names"] == f"{name} ×1"


def test_nonzero_is_named_with_the_op_around_it():
    ops = {"op": "aten::nonzero", "outer": "aten::index"}
    (row,) = syncs_in(event("runtime", 5, 9, "cudaStreamSynchronize", **ops))
    assert (row["op"], row["inside"]) == ("aten::index", "aten::nonzero")


def copy_call(start, copies, op="aten::copy_", thread=0):
    more = {"op": op, "outer": "aten::to", "copies": copies, "bytes": 64, "thread": thread}
    return event("runtime", start, start + 1, "cudaMemcpyAsync", **more)


def test_a_copy_from_pageable_memory_holds_up_the_host_also_with_no_wait_after_it():
    (row,) = syncs_in(
        copy_call(5, TO_DEVICE), event("runtime", 9, 10, "cudaLaunchKernel", op="aten::mul")
    )
    assert row["call"] == "cudaMemcpyAsync (Pageable -> Device)"
    assert (row["op"], row["inside"]) == ("aten::to", "aten::copy_")
    assert syncs_in(copy_call(5, TO_DEVICE))[0]["times"] == 1  # the last call of all


def test_a_copy_from_pinned_memory_does_not():
    assert syncs_in(copy_call(5, "Memcpy HtoD (Pinned -> Device)")) == []
    assert syncs_in(copy_call(5, "Memcpy DtoD (Device -> Device)")) == []


def test_copies_and_waits_of_different_threads_or_ops_stay_apart():
    sync = event("runtime", 7, 9, "cudaStreamSynchronize", op="aten::copy_", outer="aten::to")
    assert len(syncs_in(copy_call(5, TO_DEVICE), sync)) == 1
    assert len(syncs_in(copy_call(5, TO_DEVICE, thread=1), sync)) == 2
    assert len(syncs_in(copy_call(5, TO_DEVICE, op="aten::other"), sync)) == 2
    assert syncs_in(copy_call(4, TO_DEVICE), copy_call(5, TO_DEVICE), sync)[0]["times"] == 1


def test_a_call_between_copy_and_wait_makes_no_second_wait():
    sync = event("runtime", 8, 9, "cudaStreamSynchronize", op="aten::copy_", outer="aten::to")
    between = event("runtime", 7, 8, "cudaEventRecord", op="aten::copy_", outer="aten::to")
    (row,) = syncs_in(copy_call(5, TO_DEVICE), between, sync)
    assert row["call"].endswith("+ cudaStreamSynchronize")


def test_ops_that_only_look_like_a_wait_are_none_on_a_gpu():
    # .item() of a tensor on the CPU makes no runtime call.
    cpu = [e for e in item(10, 30) if e["kind"] == "op"]
    assert syncs_in(*cpu, event("runtime", 40, 41, "cudaLaunchKernel")) == []


def test_the_profiler_waits_at_the_end_and_nobody_pays():
    assert syncs_in(event("runtime", 101, 150, "cudaDeviceSynchronize")) == []


# --- with no GPU --------------------------------------------------------------------------------------------


@pytest.fixture
def x():
    return torch.randn(64, device=machine.device())


def syncs_of(fn):
    return bill.syncs(profiling.events_of(profiling.profiled(fn, stack=True)))


def counts(fn):
    rows = syncs_of(fn)
    return sorted((row["op"].removeprefix("aten::"), row["times"]) for row in rows)


def test_item_is_found(x):
    rows = syncs_of(lambda: x.sum().item())
    assert [(r["op"], r["inside"], r["times"]) for r in rows] == [
        ("aten::item", "aten::_local_scalar_dense", 1)
    ]
    assert "x.sum().item()" in rows[0]["where"]


@pytest.mark.skipif(machine.HAS_GPU, reason="with a GPU, waits are seen and not guessed")
def test_what_would_wait_on_a_gpu(x):
    assert counts(lambda: x * 2 + x.pow(3)) == []
    assert counts(lambda: x.nonzero()) == [("nonzero", 1)]
    assert counts(lambda: x[x > 0]) == [("index", 1)]
    assert counts(lambda: x.masked_select(x > 0)) == [("masked_select", 1)]
    assert counts(lambda: x.unique()) == [("_unique2", 1)]
    assert counts(lambda: bool(x[0] > 0)) == [("is_nonzero", 1)]
    assert counts(lambda: [float(y) for y in x[:3]]) == [("item", 3)]
    assert counts(lambda: torch.equal(x, x)) == [("equal", 1)]


@pytest.mark.skipif(machine.HAS_GPU, reason="with a GPU, waits are seen and not guessed")
def test_an_optimizer_reads_its_own_counters_on_the_host():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight])

    def train():
        weight.sum().backward()
        optimizer.step()

    events = profiling.events_of(profiling.profiled(train))
    assert "aten::_local_scalar_dense" in {e["name"] for e in events}
    assert bill.syncs(events) == []


def test_a_removed_item_shows_in_the_bill(x):
    before, after = (lambda: (x * 2).sum().item()), (lambda: (x * 2).sum())
    rows = [bill.bill(profiling.events_of(profiling.profiled(fn)), "x") for fn in (before, after)]
    assert [row["syncs"] for row in rows] == [1, 0]
    assert rows[0]["sync_names"] == "aten::item ×1"
    assert [row["host_ops"] for row in rows] == [3, 2]


# --- with a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: x.sum().item(), "aten::item"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x.cpu(), "aten::to"),
        (lambda x: torch.cuda.synchronize(), ""),
    ],
)
def test_real_waits(x, fn, op):
    (row,) = syncs_of(lambda: fn(x))
    assert (row["op"], row["times"]) == (op, 1)
    assert row["waited_us"] > 0
    assert row["where"].startswith("lib/tests/profiling/test_cost.py:")


@pytest.mark.gpu
def test_real_work_without_waits(x):
    row = bill.bill(profiling.events_of(profiling.profiled(lambda: x * 2 + 1)), "x")
    assert (row["kernels"], row["host_ops"], row["syncs"]) == (2, 2, 0)
    assert 0 < row["busy_pct"] <= 100
    assert 0 < row["device_us"] <= row["wall_us"]


@pytest.mark.gpu
def test_a_list_copied_to_the_gpu_is_seen():
    numbers = list(range(1000))
    row = bill.bill(
        profiling.events_of(profiling.profiled(lambda: torch.tensor(numbers, device="cuda"))), "x"
    )
    assert (row["to_device"], row["to_device_bytes"]) == (1, 8000)
    assert row["syncs"] == 1


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_whole_list_is_asked_for():
    for fn in (bill.syncs, lambda events: bill.bill(events, "x")):
        with pytest.raises(ValueError, match="trimmed for a plot; count the list that events_of"):
            fn(trimmed(gpu_step()))
        with pytest.raises(TypeError, match="list of dictionaries"):
            fn("events")
    with pytest.raises(TypeError, match="list of dictionaries"):
        bill.utilisation(profiling.profiled)
