"""Tables, traces, regions, traffic and timelines, with what this machine has."""

import json
import os

from lib import machine, profiling
from lib.measure import cheats
from lib.profiling import events as ev
from lib.tests.profiling.profiles import event, gpu_step

import pytest
import torch


@pytest.fixture
def x():
    return torch.randn(64, 64, device=machine.device())


def test_op_table_counts_launches(x):
    by_hand = profiling.op_table(lambda: cheats.gelu_by_hand(x))
    assert by_hand["calls"].sum() == 8
    assert list(by_hand["self_us"]) == sorted(by_hand["self_us"], reverse=True)
    assert profiling.op_table(lambda: cheats.gelu(x))["calls"].sum() == 1


def test_op_table_of_recorded_events():
    on_gpu = profiling.op_table(json.loads(json.dumps(gpu_step())))
    rows = [["gemm", 2, 60.0], ["Memcpy DtoH", 1, 1.0]]
    assert list(on_gpu.columns) == ["kernel", "calls", "self_us"]
    assert on_gpu.to_numpy().tolist() == rows
    ops = [e for e in gpu_step() if e["kind"] in ("step", "op")]
    on_cpu = profiling.op_table([*ops, event("op", 90, 91, "aten::empty", outer="aten::mm")])
    assert list(on_cpu.columns) == ["op", "calls", "self_us"]
    assert on_cpu["op"].tolist()[0] == "linear"
    assert "empty" not in set(on_cpu["op"])  # memory for another op


def test_op_table_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="trimmed for a plot"):
        profiling.op_table(ev.trimmed(gpu_step()))
    with pytest.raises(TypeError, match="takes a function to call, got Tensor; use a lambda"):
        profiling.op_table(torch.ones(1))


def test_trace_starts_at_zero_and_has_every_op(x):
    spans = profiling.spans_of(lambda: cheats.gelu_by_hand(x))
    assert min(span.start_us for span in spans) == 0
    host = [span.name for span in spans if span.lane == "host" and span.name != "wait"]
    assert host == ["mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"]
    if machine.HAS_GPU:
        assert sum(span.lane == "device" for span in spans) == 8


def test_region_names_code(x):
    def work():
        with profiling.region("my gelu"):
            cheats.gelu(x)

    assert "my gelu" in {event.name for event in profiling.profiled(work).events()}
    assert profiling.op_table(work)["calls"].sum() == 1
    assert ("region", "my gelu") in {span[:2] for span in profiling.spans_of(work)}


def test_region_passes_errors_on():
    with pytest.raises(ZeroDivisionError), profiling.region("fails"):
        raise ZeroDivisionError


def test_traffic(x):
    n_bytes = x.numel() * 4
    by_hand = profiling.traffic_table(lambda: cheats.gelu_by_hand(x))
    assert by_hand[["bytes_read", "bytes_written"]].to_numpy().sum() == 18 * n_bytes
    one = profiling.traffic_table(lambda: cheats.gelu(x.view(-1)))  # a view moves nothing
    assert one.to_numpy().tolist() == [["gelu", n_bytes, n_bytes]]


def test_save_trace(x, tmp_path):
    line = profiling.save_trace(lambda: cheats.gelu(x), tmp_path / "gelu.json")
    assert line.startswith("gelu.json, ")
    assert str(tmp_path) not in line


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("_add_relu_fwd_kernel", "_add_relu_fwd_kernel"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
            "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#2}::operator()() const, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel<tanh_kernel_cuda>",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_short_name(kernel, short):
    assert profiling.short_name(kernel) == short


def test_profiled_calls_three_times_and_takes_only_what_can_be_called():
    calls = []
    profiling.profiled(lambda: calls.append(1))
    assert len(calls) == 3
    with pytest.raises(TypeError, match="takes a function to call, got int; use a lambda"):
        profiling.profiled(3)


def test_a_profile_of_memory_writes_nothing_but_what_others_write(capfd):
    tensors = [torch.ones(64)]

    def release():
        tensors.clear()  # memory from before the profile: the profiler warns of it
        tensors.append(torch.ones(64))
        os.write(2, b"someone else\n")

    profiling.profiled(release, memory=True)
    written = capfd.readouterr().err
    assert "unknown size" not in written
    assert written.count("someone else") == 3


def test_an_error_in_a_profile_of_memory_is_passed_on(capfd):
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 2:  # the first call is no part of the profile
            os.write(2, b"before it failed\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        profiling.profiled(fails, memory=True)
    assert "before it failed" in capfd.readouterr().err
    os.write(2, b"works again\n")
    assert "works again" in capfd.readouterr().err
