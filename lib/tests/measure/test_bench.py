"""What a benchmark checks and times; the times themselves need a GPU."""

from lib import machine
from lib.measure import bench, registry
from lib.measure.check import check_against_float64
from lib.recorded import results

import pytest
import torch


@pytest.mark.parametrize(
    ("shape", "most", "want"),
    [
        ((100, 10), None, (100, 10)),
        ((100, 10), 1000, (100, 10)),
        ((100, 10), 999, (99, 10)),
        ((100, 10), 5, (1, 10)),
        ((4, 8, 16), 256, (2, 8, 16)),
    ],
)
def test_fewer_rows(shape, most, want):
    assert registry.fewer_rows(shape, most) == want


def test_calls_are_timed_in_turns(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}

    def time_us(call, rep_ms):
        call()
        us = {3: 9.0, 5: 1.0, 7: 2.0}.get(len(order), 50.0)  # of a: one slow, one fast, one usual
        return bench.Timing(us, us, us)

    monkeypatch.setattr(bench, "time_us", time_us)
    assert bench.in_turns_us(calls, n_rounds=3) == {"a": 2.0, "b": 50.0}
    assert "".join(order) == "ab" + "ab" * 3


@pytest.mark.parametrize(
    ("spreads", "want"), [([1.05], 1.05), ([1.3, 1.1], 1.1), ([1.5, 1.2, 1.3], 1.2)]
)
def test_what_is_unsteady_is_timed_again(spreads, want, monkeypatch):
    timings = [bench.Timing(100.0, 90.0, 90.0 * spread) for spread in spreads]
    monkeypatch.setattr(bench, "time_us", lambda fn: timings.pop(0))
    assert bench.steady_us(None).spread == pytest.approx(want)
    assert not timings


@pytest.mark.parametrize(
    ("recorded", "want"),
    [
        ({"p20_us": 100, "p80_us": 110, "note": ""}, ""),
        ({"p20_us": 100, "p80_us": 111, "note": ""}, "unsteady: p80 is 1.11 times p20"),
        ({"note": "✘ not timed: …"}, "✘ not timed: …"),
    ],
)
def test_a_recorded_row_that_is_unsteady_says_so_as_a_measured_one(recorded, want, monkeypatch):
    """Some records are older than the note."""
    op = registry.ROPE
    case = {"shape": [*op.bench_shapes[0]], "dtype": "bfloat16", "gradients": True}
    record = results.load(op.name) | {"rows": [{**case, "version": "triton", **recorded}]}
    monkeypatch.setattr(results, "load", lambda name: record)
    (row,) = bench._recorded_rows(op, op.bench_shapes[0], torch.bfloat16, gradients=True)
    assert row["note"] == want


def test_a_function_kept_out_of_the_compiler_still_runs():
    """The mask of dropout's definition: compiled it takes a minute, and it is only there for checks."""
    op = registry.BIAS_GELU_DROPOUT_ADD.configured()
    inputs = op.inputs((8, 16), torch.float32, machine.device())
    compiled = torch.compile(op.eager, backend="eager", dynamic=False)
    (mask,) = op.not_compiled
    with bench.really_compiled(op.not_compiled):
        check_against_float64(compiled, op.eager, *inputs, name="compiled")
        frames = torch._dynamo.utils.counters["graph_break"]
        assert frames, "the mask was compiled with the rest"
    assert registry.bias_gelu_dropout_add.keep_mask is mask


@pytest.mark.skipif(machine.HAS_GPU, reason="about a machine with no GPU")
@pytest.mark.parametrize("function", ["time_us", "host_us", "peak_mib", "kernels_launched"])
def test_what_only_a_gpu_can_measure_says_so(function):
    with pytest.raises(ValueError, match=f"{function} needs a GPU: the interpreter's times say"):
        getattr(bench, function)(lambda: None)


@pytest.mark.parametrize(
    ("gpu", "recording", "n_rows"),
    [
        ("NVIDIA H200", "30_add_relu", 1),
        ("NVIDIA H200", "", 2),
        ("NVIDIA H100", "30_add_relu", 2),
    ],
)
def test_a_page_recorded_on_the_reference_gpu_shows_each_version_once(
    gpu, recording, n_rows, monkeypatch
):
    monkeypatch.setenv("FUSED_KERNELS_RECORD", recording)
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(machine, "gpu_name", lambda: gpu)
    monkeypatch.setattr(bench, "fit", lambda op, shape, dtype: shape)
    monkeypatch.setattr(
        bench.roofline, "ceilings", lambda: bench.roofline.Ceilings(1, {"float32": 1}, "test")
    )
    monkeypatch.setattr(
        bench, "measure", lambda *args, **kw: [{"version": "eager", "where": "measured here"}]
    )
    table = bench.ladder("add_relu", versions={"eager": None})
    assert len(table) == n_rows
    assert table["where"][0] == "measured here"
