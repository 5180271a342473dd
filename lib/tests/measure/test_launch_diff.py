"""launch_diff: what it records of a launch, and that a changed launch or kernel is a difference."""

from lib import machine
from lib.measure import launch_diff, registry
from lib.nogpu.fake_gpu import fake_gpu
from lib.recorded import results
from lib.standalone import standalone

import pytest
import torch


@pytest.fixture(scope="module")
def ops():
    return launch_diff._fresh_registry()


def one_case(op, text):
    return next(call for case, call in launch_diff.cases_of(op) if text in case)


def test_launches_are_those_of_an_h200_and_nothing_runs(ops):
    call = one_case(ops.find("add_relu"), "triton (65536, 4096) float32")
    with fake_gpu(), launch_diff._addresses():
        launches = launch_diff.launches_of(call)
    names = [launch.kernel.__name__ for launch in launches]
    forward = "_add_relu_fwd_kernel"
    assert names == [forward, forward, "_add_relu_bwd_kernel", "sum_rows_kernel"]
    assert launches[0].grid == (65536 * 4096 * 4 // 2048, 1, 1)
    assert launches[0].made_of.types["x_ptr"] == "*fp32"
    assert "x_ptr" in launches[0].made_of.divisible_by_16


def test_the_registry_of_this_process_is_left_alone(ops):
    assert ops.find("add_relu").eager is not registry.find("add_relu").eager
    x, bias = torch.zeros(2, 3, device=machine.device()), torch.ones(3, device=machine.device())
    y = registry.find("add_relu").versions["triton"](x, bias)
    assert y.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("# One 16-byte load in each of 128 threads", "# the same", ""),
        ("return (2048 if fold", "return (4096 if fold", "before"),
        ("tl.where(z < 0, 0.0, z)", "tl.maximum(z, 0.0)", "PTX"),
    ],
)
def test_another_tile_and_another_instruction_are_differences(ops, old, new, difference, tmp_path):
    op = ops.find("add_relu")
    few = {"bench_shapes": ((64, 4096),), "odd_shapes": (), "dtypes": (torch.float32,)}
    op = launch_diff.dataclasses.replace(op, versions={"triton": op.versions["triton"]}, **few)
    text = standalone("add_relu")
    assert text.count(old) == 1
    module = launch_diff._load(text.replace(old, new), tmp_path / "add_relu_changed.py")
    sentences, _ = launch_diff.differences(op, launch_diff._with_module(op, module))
    assert bool(sentences) == bool(difference)
    assert all(difference in sentence for sentence in sentences)


@pytest.mark.skipif(not (results.ROOT / ".git").exists(), reason="not a git checkout")
def test_at_a_commit_the_rungs_run_on_its_kernels(ops, tmp_path):
    module = launch_diff._module_at("HEAD", ops.find("matmul"), tmp_path)
    assert module.matmul_naive.__module__ == "matmul_ladder_at_ref"
    assert module.matmul_naive.__globals__["matmul"] is module
