"""What a benchmark checks and times; the times themselves need a GPU."""

import os
from types import SimpleNamespace

from lib import machine
from lib.measure import bench, registry
from lib.measure.check import check_against_float64
from lib.recorded import results

import pytest
import torch
import triton


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


class Clock:
    """A GPU on which only calls take time, in µs: as much of it as in_turns asks for."""

    def __init__(self, patch):
        self.us, self.log = 0.0, []
        driver = SimpleNamespace(
            get_empty_cache_for_benchmark=lambda: None,
            clear_cache=lambda _: self.log.append("flush"),
        )
        patch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        patch.setattr(machine, "HAS_GPU", True)
        patch.setattr(bench, "_clock_and_power", lambda: (1400, 690))

    def call(self, name, times):
        """A closure that takes the next of these µs, and then the last of them again and again."""

        def run():
            self.us += times.pop(0) if len(times) > 1 else times[0]
            self.log.append(name)

        return run


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.us = self.clock.us

    def elapsed_time(self, later):
        return (later.us - self.us) / 1e3


def test_calls_are_timed_in_turns(monkeypatch):
    clock = Clock(monkeypatch)
    slow_at_first = clock.call("a", [900.0, 900.0, 8.0, 2.0])
    timings = bench.in_turns({"a": slow_at_first, "b": clock.call("b", [50.0])}, rep_ms=1)
    assert timings["a"] == bench.Timing(2.0, 2.0, 2.0, 1400, 690)
    assert timings["b"] == bench.Timing(50.0, 50.0, 50.0, 1400, 690)
    assert clock.log[::2] == ["flush"] * (len(clock.log) // 2)
    rounds = {"".join(pair) for pair in zip(clock.log[1::4], clock.log[3::4])}
    assert rounds == {"ab", "ba"}, "in each round each once, in an order drawn anew"


@pytest.mark.parametrize(
    ("spreads", "want"), [([1.05], 1.05), ([1.3, 1.1], 1.1), ([1.5, 1.2, 1.3], 1.2)]
)
def test_what_is_unsteady_is_timed_again(spreads, want, monkeypatch):
    steady = bench.Timing(10.0, 10.0, 10.0)
    tries = [{"a": steady, "b": bench.Timing(100.0, 90.0, 90.0 * spread)} for spread in spreads]
    monkeypatch.setattr(bench, "in_turns", lambda calls: tries.pop(0))
    timings = bench.steadily(None)
    assert timings["a"] == steady
    assert timings["b"].spread == pytest.approx(want)
    assert not tries


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
        ("NVIDIA H200", "03_add_relu", 1),
        ("NVIDIA H200", "", 2),
        ("NVIDIA H100", "03_add_relu", 2),
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


def test_what_is_compiled_ahead_is_each_case_in_other_processes(tmp_path):
    bench.compile_ahead(_leave, [(tmp_path, "a"), (tmp_path, "b")])
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(left) == {"a", "b"}
    assert str(os.getpid()) not in left.values()


def _leave(folder, name):
    (folder / name).write_text(str(os.getpid()))
