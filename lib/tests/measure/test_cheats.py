"""Each cheat is caught, each honest version is not."""

import math

from lib import machine
from lib.measure import cheats
from lib.measure.virtual_gpu import VirtualGPU

import pytest
import torch

BY_NAME = {cheat.name: cheat for cheat in cheats.CHEATS}
CAUGHT_BY = {
    "no sync": "find_missing_sync",
    "warm L2": "find_warm_l2",
    "other stream": "find_other_stream",
    "cached result": "find_cached_result",
    "wrong work": "find_wrong_output",
    "mutated input": "find_changed_input",
    "unchecked output": "find_wrong_output",
}


def test_every_cheat_is_listed():
    assert list(BY_NAME) == list(CAUGHT_BY)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_caught(name):
    caught = cheats.catch(cheats.find(name))
    assert caught
    # On a real GPU a host-side claim of a few µs is noise: which detector sees it first may vary.
    assert CAUGHT_BY[name] in caught or (machine.HAS_GPU and name == "no sync")


def test_rows_are_of_the_cheats_that_were_named():
    names = ["wrong work", "mutated input"]
    assert [row["cheat"] for row in cheats.claims(*names)] == names
    rows = [(row["cheat"], row["detector"]) for row in cheats.findings(*names)]
    assert {(name, CAUGHT_BY[name]) for name in names} <= set(rows)


@pytest.mark.parametrize(
    "version", [cheats.gelu, cheats.gelu_by_hand, lambda x: cheats.gelu(x) + 0]
)
def test_honest_versions_pass(version):
    assert cheats.find_cached_result(version) is None
    assert cheats.find_changed_input(version) is None
    assert cheats.find_wrong_output(version) is None


_buffer = {}


def gelu_into_one_buffer(x):
    y = _buffer.setdefault(x.shape, torch.empty_like(x))
    return y.copy_(cheats.gelu(x))


def test_one_buffer_for_all_results_is_found():
    finding = cheats.find_cached_result(gelu_into_one_buffer)
    assert finding == "the second call wrote over the result of the first"


def test_what_is_wrong_only_for_large_inputs_is_found():
    def version(x):
        y = cheats.gelu(x)
        return (
            y if x.numel() < 2**20 else y * (torch.arange(len(x), device=x.device) < 2048)[:, None]
        )

    assert "at (2050, 1030)" in cheats.find_wrong_output(version)


def test_a_last_bit_of_the_input_is_no_small_change():
    def version(x):
        y = cheats.gelu(x)
        x[3, 3] *= 1 + 2**-22
        return y

    assert cheats.find_changed_input(version) == "the input is not what it was"


@pytest.mark.parametrize("gpu", [VirtualGPU(), cheats.ThisDevice()], ids=["virtual", "this one"])
def test_a_stopwatch_that_divides_by_too_much_is_found(gpu):
    def halved(run, gpu):
        return cheats.honest(run, gpu, n=3) / 2

    finding = cheats.find_missing_sync(halved, lambda: gpu.busy(10), gpu)
    assert finding and " took " in finding


def test_sentences():
    with pytest.raises(ValueError, match="no cheat 'speed'; there are no sync, warm L2"):
        cheats.find("speed")
    gpu = VirtualGPU()
    with pytest.raises(ValueError, match="a kernel takes -5 µs"):
        gpu.launch("gelu", -5)
    with pytest.raises(RuntimeError, match="an event was never recorded"):
        gpu.event().elapsed_us(gpu.event())


def test_nan_of_large_inputs_is_found():
    def through_exp(x):
        e = torch.exp(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + (e - 1) / (e + 1))  # inf / inf once e overflows

    assert "NaN" in cheats.find_wrong_output(through_exp)


def test_each_version_is_caught_for_what_it_does_and_nothing_else():
    findings = {name: set(cheats.catch(cheats.find(name))) for name in list(CAUGHT_BY)[3:]}
    assert all(findings[name] == {CAUGHT_BY[name]} for name in findings), findings


@pytest.mark.parametrize("data", [None, "x"])
def test_the_honest_stopwatch_passes(data):
    gpu = VirtualGPU()
    assert cheats.honest(lambda: gpu.launch("a", 100, data=data), gpu) == pytest.approx(100)
    for detector in (cheats.find_missing_sync, cheats.find_other_stream, cheats.find_warm_l2):
        assert detector(cheats.honest, lambda: gpu.launch("a", 100, data=data), gpu) is None


def test_ceiling():
    assert cheats.find_above_ceiling(100, 4e8, 4250) is None
    assert "2.0× the ceiling" in cheats.find_above_ceiling(50, 4.25e8, 4250)


def test_claims():
    for name in ("no sync", "warm L2", "other stream", "cached result", "unchecked output"):
        assert cheats.claim(cheats.find(name))["speed_up"] > 1.3, name


def test_this_device_times_what_it_runs():
    gpu = cheats.ThisDevice()
    assert 1500 < cheats.honest(lambda: gpu.busy(2000), gpu, n=3) < 40_000
    x = torch.randn(64, 64, device=machine.device())
    assert cheats.honest(lambda: cheats.gelu(x), gpu, n=5) > 0


@pytest.mark.gpu
@pytest.mark.alone
def test_workshop_on_a_gpu():
    rows = {row["cheat"]: row for row in cheats.workshop()}
    for name, detector in CAUGHT_BY.items():
        assert detector.removeprefix("find_") in rows[name]["caught_by"], rows[name]


def test_an_input_holds_the_extreme_values_that_the_page_names():
    numbers = cheats.random_input((2, 3)).flatten().tolist()
    assert numbers[:3] == [20.0, -20.0, float("inf")] and numbers[3] != numbers[3]
