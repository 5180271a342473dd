"""Tables, traces, regions, traffic and timelines, with what this machine has."""

from lib import cheats, machine, profiling
from lib.profiling import Span

import matplotlib.pyplot as plt
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


def test_trace_starts_at_zero_and_has_every_op(x):
    spans = profiling.trace(lambda: cheats.gelu_by_hand(x))
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
    assert ("region", "my gelu") in {span[:2] for span in profiling.trace(work)}


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


def test_timeline_draws_one_lane_for_each():
    spans = [
        Span("host", "launch", 0, 5),
        Span("device", "k", 5, 50),
        Span("device", "event", 50, 50),
    ]
    figure = profiling.plot_timeline(spans, "title")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["host", "device"]
    plt.close(figure)


@pytest.mark.parametrize(
    ("room", "label"),
    [(40, "elementwise_kernel<MulFunctor>"), (12, "MulFunctor"), (8, "MulFunc…"), (5, "")],
)
def test_labels_fit(room, label):
    assert profiling._label("elementwise_kernel<MulFunctor>", room) == label
