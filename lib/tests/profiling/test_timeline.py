"""Timelines of spans and of events: lanes, labels, hatching, the alt text."""

import json

from lib import profiling
from lib.course import show
from lib.measure.virtual_gpu import VirtualGPU
from lib.profiling import timeline
from lib.profiling.events import trimmed
from lib.profiling.timeline import Span
from lib.recorded import results
from lib.recorded.results import ROOT
from lib.tests.profiling.profiles import PAGEABLE, event, gpu_step, item, step

import matplotlib.pyplot as plt
import pytest
import torch


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def lanes(figure):
    return [t.get_text() for t in figure.axes[0].get_yticklabels()]


def texts(figure):
    return [t.get_text() for t in figure.axes[0].texts if t.get_text()]


def legend(figure):
    return [t.get_text() for each in figure.legends for t in each.get_texts()]


def bars(figure, hatch):
    return [p for p in figure.axes[0].patches if p.get_hatch() == hatch]


def ends(patches):
    return [(p.get_x(), p.get_x() + p.get_width()) for p in patches]


# --- spans --------------------------------------------------------------------------------------------------


def test_one_lane_for_each_of_the_spans():
    spans = [
        Span("host", "launch", 0, 5),
        Span("device", "k", 5, 50),
        Span("device", "event", 50, 50),
    ]
    figure = timeline.plot_timeline(spans, "title")
    assert lanes(figure) == ["host", "device"]
    assert texts(figure) == ["launch", "k"]
    assert not bars(figure, "////")  # a drawn example does not show its gaps


def test_the_model_of_a_gpu_can_be_drawn():
    gpu = VirtualGPU()
    gpu.launch("gelu", us=40)
    gpu.synchronize()
    assert lanes(timeline.plot_timeline(gpu.spans, "title")) == ["host", "device"]
    assert lanes(timeline.plot_timeline([], "nothing")) == []


@pytest.mark.parametrize(
    ("room", "label"),
    [(40, "elementwise_kernel<MulFunctor>"), (12, "MulFunctor"), (8, "Mul\nFunctor"), (5, "")],
)
def test_labels_fit(room, label):
    assert timeline._label("elementwise_kernel<MulFunctor>", room) == label


@pytest.mark.parametrize(
    ("name", "room", "label"),
    [
        ("26 kernels", 7, "26\nkernels"),
        ("pow_tensor_scalar", 12, "pow_tensor_\nscalar"),
        ("k ×1000, 25 % busy", 11, "k ×1000,\n25 % busy"),
        ("addmm", 4, ""),
        ("launch k0", 6, "launch\nk0"),
        ("loop<tanh_kernel_cuda>", 16, "tanh_kernel_cuda"),
        ("loop<tanh_kernel_cuda>", 12, "tanh"),
        ("loop<pow_scalar_kernel_impl>", 8, "pow_\nscalar"),
        ("loop<GeluCUDAKernelImpl>", 6, "Gelu"),
        ("add_kernel", 5, "add"),
    ],
)
def test_a_name_goes_on_in_a_second_line_and_no_word_is_cut(name, room, label):
    assert timeline._label(name, room) == label


def test_a_wait_is_called_one_also_where_there_is_little_room():
    assert timeline._label("wait: item", 10) == "wait: item"
    assert timeline._label("wait: item", 5) == "wait"
    assert timeline._label("", 40) == ""


def test_spans_are_saved_as_a_trace(tmp_path):
    call = [Span("host", "launch", 0.0, 5.25), Span("device", "gelu", 4.0, 44.5)]
    timeline.save_spans({"a": call, "b": call[:1]}, tmp_path / "t.json")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    named = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert len({thread for _, thread in named}) == 3  # viewers take a number for one thread
    titles = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}
    ran = [r for r in records if r["ph"] == "X"]
    got = [(titles[r["pid"]], named[r["pid"], r["tid"]], r["name"], r["ts"], r["dur"]) for r in ran]
    assert got == [
        ("a", "host", "launch", 0, 5.25),
        ("a", "device", "gelu", 4, 40.5),
        ("b", "host", "launch", 0, 5.25),
    ]


def test_the_trace_to_open_is_the_one_recorded_by_notebook_01(tmp_path):
    rows = results.load("notebook_02_measure_time")["rows"]
    (traces,) = (row["value"] for row in rows if row["key"] == "traces")
    spans_of = {title: [Span(*span) for span in spans] for title, spans in traces.items()}
    new, saved = tmp_path / "gelu.json", ROOT / "data/traces/gelu.json"
    timeline.save_spans(spans_of, new)
    assert saved.read_text() == new.read_text(), f"cp {new} {saved}"


# --- events -------------------------------------------------------------------------------------------------


def test_a_step_on_a_gpu_has_four_lanes():
    figure = timeline.plot_timeline(gpu_step(), "title")
    assert lanes(figure) == ["region", "host", "host, backward", "device"]
    assert {"forward", "backward", "wait", "gemm"} <= set(texts(figure))
    assert figure.axes[0].get_xlabel() == "time, µs; the device is busy 56 % of 110 µs"
    assert legend(figure) == ["the host waits", "copy", "the device is idle"]


def test_gaps_are_hatched_and_show_their_length():
    figure = timeline.plot_timeline(gpu_step(), "title")
    assert ends(bars(figure, "////")) == [(0, 8), (18, 21), (22, 60)]
    assert "idle 38" in texts(figure)
    assert "idle 3" not in texts(figure)  # no room


def test_copies_are_stippled():
    figure = timeline.plot_timeline([step(), event("copy", 10, 60, PAGEABLE)], "title")
    assert ends(bars(figure, "....")) == [(10, 60)]
    assert "DtoH" in texts(figure)


def test_a_copy_too_narrow_to_see_is_not_in_the_legend():
    events = [step(1000), event("copy", 10, 12, PAGEABLE), event("kernel", 12, 1000, "k")]
    assert "copy" not in legend(timeline.plot_timeline(events, "title"))
    events[1:] = [event("copy", 10, 60, PAGEABLE), event("kernel", 60, 1000, "k")]
    assert "copy" in legend(timeline.plot_timeline(events, "title"))


def test_a_block_is_as_high_as_its_part_of_busy_time():
    kernels = [event("kernel", k, k + 0.25, "k") for k in range(1000)]
    figure = timeline.plot_timeline([step(1000), *kernels], "title")
    (block,) = [p for p in figure.axes[0].patches if p.get_hatch() is None]
    assert block.get_height() == pytest.approx(0.62 * 0.25, rel=0.01)
    assert block.get_y() + block.get_height() == pytest.approx(0.62 / 2 + 1)  # on the lane's edge
    assert texts(figure) == ["k ×1000, 25 % busy"]
    assert len(bars(figure, "////")) == 2  # behind the block, and after it


def test_streams_have_lanes_of_their_own_and_idle_means_all_of_them():
    more = [event("kernel", 40, 90, "other", stream=20), event("kernel", 60, 70, "k")]
    figure = timeline.plot_timeline([step(), event("kernel", 0, 50, "k"), *more], "title")
    assert lanes(figure) == ["host", "device", "stream 20"]
    assert ends(bars(figure, "////")) == [(90, 100)]


def test_a_narrow_region_is_named_above_itself():
    regions = [event("region", 0, 990, "forward"), event("region", 990, 1000, "optimizer")]
    figure = timeline.plot_timeline([step(1000), *regions], "title")
    (above,) = [t for t in figure.axes[0].texts if t.get_text() == "optimizer"]
    assert above.get_position()[0] == 1000 and above.get_ha() == "right"


def test_names_above_do_not_meet():
    parts = [event("region", 900 + 10 * k, 910 + 10 * k, f"part {k}") for k in range(9)]
    figure = timeline.plot_timeline([step(1000), *parts], "title")
    above = [t for t in figure.axes[0].texts if t.get_text().startswith("part")]
    assert [t.get_text() for t in above] == ["part 0", "part 6"]


def test_hundreds_of_events_are_few_bars():
    ops = [event("op", 3 * k, 3 * k + 2, "aten::relu") for k in range(900)]
    figure = timeline.plot_timeline([step(2700), *ops], "title")
    assert len(figure.axes[0].patches) < 10
    assert texts(figure)[0] == "relu ×900"


def test_with_no_gpu_the_device_lane_is_empty_and_says_so():
    figure = timeline.plot_timeline([step(), event("op", 10, 60, "aten::mul")], "title")
    assert lanes(figure) == ["host", "device"]
    assert texts(figure) == ["mul", "no GPU in this profile: nothing ran on a device"]
    assert figure.axes[0].get_xlabel() == "time, µs"


def test_recorded_events_are_drawn_as_they_were():
    there = timeline.plot_timeline(gpu_step(), "title")
    recorded = json.loads(json.dumps(trimmed(gpu_step())))
    here = timeline.plot_timeline(recorded, "title")
    assert [ends([p]) for p in here.axes[0].patches] == [ends([p]) for p in there.axes[0].patches]
    assert texts(here) == texts(there)
    assert here.axes[0].get_xlabel() == there.axes[0].get_xlabel()
    assert timeline.summary(recorded) == timeline.summary(gpu_step())


def test_the_summary_is_in_sentences():
    assert timeline.summary(gpu_step()) == (
        "Regions: forward 0–50; backward 50–95. Host: 3 ops in 110 µs, 1 waits for the device. "
        "Device: 3 kernels and copies, busy 56 % of the time. "
        "Longest idle stretches: 0–8; 18–21; 22–60."
    )
    no_gpu = timeline.summary([step(), event("op", 10, 60, "aten::mul")])
    assert no_gpu.endswith("Device: no GPU in this profile: nothing ran on a device.")


def test_showing_puts_the_summary_into_the_alt_text(monkeypatch):
    shown = []
    monkeypatch.setattr(timeline, "show_figure", lambda figure, alt: shown.append(alt))
    timeline.show_timeline(gpu_step(), "a step")
    timeline.show_timeline([Span("host", "mul", 0, 5)], "one op")
    assert shown[0] == f"Timeline in µs, a step. {timeline.summary(gpu_step())}"
    assert shown[1] == "Timeline in µs, one op. host: mul 0–5."
    assert timeline.show_figure is not show.show_figure


def test_a_real_step_here():
    x = torch.randn(64, 64)
    events = profiling.events_of(profiling.profiled(lambda: (x @ x).relu().sum().item()))
    figure = timeline.plot_timeline(events, "title")
    assert lanes(figure)[:1] == ["host"] and lanes(figure)[-1] == "device"
    assert figure.axes[0].patches


def test_a_wait_says_for_what_where_there_is_room():
    assert "wait: item" in texts(timeline.plot_timeline([step(), *item(10, 60)], "title"))


@pytest.mark.gpu
def test_a_real_step_on_a_gpu():
    x = torch.randn(1024, 1024, device="cuda")
    events = profiling.events_of(profiling.profiled(lambda: (x @ x).relu().sum().item()))
    figure = timeline.plot_timeline(trimmed(events), "title")
    assert lanes(figure) == ["host", "device"]
    assert "the device is busy" in figure.axes[0].get_xlabel()
    assert "the host waits" in legend(figure)


@pytest.mark.parametrize(
    "source", [None, [Span("host", "a", 0, 1), step()], [("host", "a", 0, 1)], [{"name": "a"}]]
)
def test_what_is_neither_spans_nor_events_is_refused(source):
    with pytest.raises(TypeError, match="list of spans|list of dictionaries"):
        timeline.plot_timeline(source, "title")
