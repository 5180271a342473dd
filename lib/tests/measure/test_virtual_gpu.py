"""The virtual GPU behaves as the notebook says a GPU does."""

import statistics

from lib.measure.virtual_gpu import FLUSH_US, WARM, VirtualGPU

import pytest


def quiet(**options):
    return VirtualGPU(compile_us=0, **options)


def test_launch_returns_before_the_kernel_is_done():
    gpu = quiet()
    gpu.launch("a", 100)
    assert gpu.clock_us() == 5
    gpu.synchronize()
    assert gpu.clock_us() == 105


def test_kernels_of_one_stream_run_one_after_the_other():
    gpu = quiet()
    for _ in range(3):
        gpu.launch("a", 100)
    gpu.synchronize()
    assert gpu.clock_us() == 305


def test_short_kernels_wait_for_the_host():
    gpu = quiet()
    for _ in range(10):
        gpu.launch("a", 1)
    gpu.synchronize()
    assert gpu.clock_us() == 10 * 5 + 1


def test_streams_run_side_by_side():
    gpu = quiet()
    gpu.launch("a", 100)
    gpu.launch("b", 100, stream=1)
    gpu.synchronize()
    assert gpu.clock_us() == 110


def test_only_the_first_launch_compiles():
    gpu = VirtualGPU(compile_us=300)
    gpu.launch("a", 1)
    assert gpu.clock_us() == 305
    gpu.launch("a", 1)
    assert gpu.clock_us() == 310


def test_events_see_the_device_and_only_their_stream():
    gpu = quiet()
    gpu.launch("before", 50)
    start, end, other = gpu.event(), gpu.event(), gpu.event(stream=1)
    start.record()
    gpu.launch("a", 100)
    end.record()
    other.record()
    with pytest.raises(RuntimeError, match="synchronize"):
        start.elapsed_us(end)
    gpu.synchronize()
    assert start.elapsed_us(end) == 100
    assert other.at_us == 10


def test_data_in_l2_is_faster_until_flushed():
    gpu = quiet()
    for expected in (100, 100 * WARM):
        before = gpu.free_at[0]
        gpu.launch("a", 100, data="x")
        assert gpu.free_at[0] - max(before, gpu.host_us) == pytest.approx(expected)
    gpu.synchronize()
    gpu.flush_l2()
    gpu.launch("a", 100, data="x")
    assert gpu.spans[-1].end_us - gpu.spans[-1].start_us == 100
    assert gpu.launch_us < FLUSH_US  # long enough to hide the launch of what is timed


def test_blocking_launches_wait():
    gpu = quiet(blocking=True)
    gpu.launch("a", 100)
    assert gpu.clock_us() == 105


def test_noise_is_repeatable_and_skewed():
    def times(seed):
        gpu = quiet(noise=0.03, outliers=0.1, seed=seed)
        for _ in range(300):
            gpu.launch("a", 100)
        return [s.end_us - s.start_us for s in gpu.spans if s.lane == "device"]

    assert times(0) == times(0)
    assert times(0) != times(1)
    assert statistics.median(times(0)) == pytest.approx(100, rel=0.03)
    assert statistics.mean(times(0)) > 130


def test_region_spans_what_the_host_does():
    gpu = quiet()
    with gpu.region("step"):
        gpu.launch("a", 100)
    assert gpu.spans[0] == ("region", "step", 0.0, 5.0)
