"""Memory curves: sizes from a real step, thinning that keeps the peak, panels, the alt text."""

import json

from lib import machine, profiling
from lib.profiling import memory as memory_plot
from lib.profiling import region
from lib.tests.profiling.profiles import event, step

import matplotlib.pyplot as plt
import pytest
import torch

MIB = 2**20


def changes(*sizes, at=10.0, start=1000, device="cuda"):
    """Events of memory, one for each change of size, 1 µs apart."""
    events, total = [], start
    for k, size in enumerate(sizes):
        total += size
        more = {"bytes": size, "total_bytes": total, "device": device}
        events.append(event("memory", at + k, at + k, "[memory]", **more))
    return events


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_the_curve_is_above_the_start():
    curve = memory_plot.memory_of([step(), *changes(100, 50, -30)])
    assert curve["points"] == [[0.0, 0], [10, 100], [11, 150], [12, 120]]
    assert (curve["device"], curve["start_bytes"], curve["wall_us"]) == ("cuda", 1000, 100)
    assert memory_plot.peak(curve) == (11, 150)
    assert json.loads(json.dumps(curve)) == curve


def test_a_gpu_comes_before_the_cpu():
    events = [step(), *changes(7, 7, 7, device="cpu"), *changes(5)]
    assert memory_plot.memory_of(events)["points"] == [[0.0, 0], [10, 5]]
    on_cpu = memory_plot.memory_of([step(), *changes(7, device="cpu")])
    assert (on_cpu["device"], on_cpu["start_bytes"]) == ("cpu", 0)


def test_what_comes_after_the_step_is_left_out():
    curve = memory_plot.memory_of([step(), *changes(5), *changes(99, at=101, start=1005)])
    assert curve["points"] == [[0.0, 0], [10, 5]]


def test_phases_come_along():
    regions = [event("region", 0, 40, "forward"), event("region", 40, 90, "backward")]
    curve = memory_plot.memory_of([step(), *changes(5), *regions])
    assert curve["phases"] == [["forward", 0, 40], ["backward", 40, 90]]


@pytest.mark.parametrize("most", [4, 5, 37, 400])
def test_thinning_keeps_ends_peak_and_lowest_point(most):
    sizes = [(1 if k < 500 else -1) * (2 + 3 * (-1) ** k) for k in range(1000)]
    events = [step(2000), *changes(*sizes)]
    whole = memory_plot.memory_of(events, most=2000)
    few = memory_plot.memory_of(events, most=most)
    assert len(few["points"]) <= most < len(whole["points"]) == 1001
    assert few["points"][0] == whole["points"][0] and few["points"][-1] == whole["points"][-1]
    assert memory_plot.peak(few) == memory_plot.peak(whole)
    assert all(point in whole["points"] for point in few["points"])
    assert few["points"] == sorted(few["points"], key=lambda point: point[0])


def test_no_memory_and_no_room_are_refused():
    with pytest.raises(ValueError, match="profile with profiled.fn, memory=True"):
        memory_plot.memory_of([step()])
    with pytest.raises(ValueError, match="how many points to keep, 4 or more; got 3"):
        memory_plot.memory_of([step(), *changes(5)], most=3)
    with pytest.raises(TypeError, match="list of dictionaries"):
        memory_plot.memory_of({"points": []})


# --- the figure ---------------------------------------------------------------------------------------------


@pytest.fixture
def versions():
    """Two curves, one of them as events."""
    regions = [event("region", 0, 40, "forward"), event("region", 40, 90, "backward")]
    eager = [step(), *changes(8 * MIB, 8 * MIB, -MIB, at=20), *regions]
    compiled = [step(50), *changes(4 * MIB, 2 * MIB)]
    return {"eager": eager, "compiled": memory_plot.memory_of(compiled)}


def test_one_panel_per_version_with_phases_and_peaks(versions):
    figure = memory_plot.plot_memory(versions, "two versions")
    assert [ax.get_ylabel() for ax in figure.axes] == ["eager", "compiled"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    labels = [[t.get_text().strip() for t in ax.texts] for ax in figure.axes]
    assert labels == [["forward", "backward", "peak 16 MiB"], ["peak 6 MiB"]]
    dashed = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert dashed == [0, 40, 90]


def test_names_of_short_phases_do_not_meet():
    regions = [event("region", 90 + 2 * k, 92 + 2 * k, f"a phase {k}") for k in range(2)]
    figure = memory_plot.plot_memory({"a": [step(), *changes(5), *regions]}, "title")
    heights = [t.get_position()[1] for t in figure.axes[0].texts if "phase" in t.get_text()]
    assert heights == [0.98, 0.85]


def test_the_alt_text_names_peaks_and_phases(versions, monkeypatch):
    shown = []
    monkeypatch.setattr(memory_plot, "show_figure", lambda figure, alt: shown.append(alt))
    memory_plot.show_memory(versions, "two versions")
    assert shown == [
        "Memory in use over the time of a step, two versions. eager, on the GPU: peak 16 MiB above the "
        "start at 21 µs, 15 at the end; forward 0–40 µs; backward 40–90 µs. compiled, on the GPU: peak "
        "6 MiB above the start at 11 µs, 6 at the end."
    ]


@pytest.mark.parametrize("versions", [None, {}, [step()], {"a": 3}])
def test_only_events_and_curves_are_drawn(versions):
    with pytest.raises(TypeError, match="events or curve|list of dictionaries"):
        memory_plot.plot_memory(versions, "title")


# --- real steps ---------------------------------------------------------------------------------------------


@pytest.fixture
def curve():
    """Of a step that allocates 4 MiB, then 8, and releases the first."""

    def work():
        with region("first"):
            a = torch.ones(MIB, device=machine.device())
        with region("second"):
            b = torch.ones(2 * MIB, device=machine.device())
            del a
        return b

    return memory_plot.memory_of(profiling.events_of(profiling.profiled(work, memory=True)))


def test_a_real_step(curve):
    assert curve["device"] == machine.device().type
    assert memory_plot.peak(curve)[1] == 12 * MIB
    assert [name for name, *_ in curve["phases"]] == ["first", "second"]
    (_, first, end), (_, second, _) = curve["phases"]
    in_first = [n for us, n in curve["points"] if first <= us <= end]
    assert in_first == [4 * MIB]
    assert second <= memory_plot.peak(curve)[0]


def test_a_tensor_kept_for_the_backward_pass_is_held_until_then():
    weight = torch.ones(MIB, requires_grad=True, device=machine.device())

    def train():
        weight.grad = None
        with region("forward"):
            y = weight.exp()  # 4 MiB, which backward needs
            loss = y.sum()
            del y
        with region("backward"):
            loss.backward()

    events = profiling.events_of(profiling.profiled(train, memory=True))
    curve = memory_plot.memory_of(events)
    (_, _, forward_ends), _ = curve["phases"]
    held = [n for us, n in curve["points"] if us <= forward_ends][-1]
    start = curve["points"][0][1]
    freed = (
        4 * MIB if curve["device"] == "cuda" else 0
    )  # the old gradient; on a CPU it is not recorded
    assert 4 * MIB <= held - start + freed < 4.1 * MIB


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(2**17, "0.125"), (16.5 * 2**20, "16.5"), (2100 * 2**20, "2,100")]
)
def test_sizes_have_no_exponents(n_bytes, text):
    assert memory_plot._mib(n_bytes) == text
