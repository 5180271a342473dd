"""Host code of public Triton programs runs without a GPU as it stands."""

import logging
import os
import subprocess
import sys

from lib import machine
from lib.nogpu import driver

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(machine.HAS_GPU, reason="about a machine without a GPU")


@triton.jit
def _softmax_kernel(y_ptr, x_ptr, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    # Persistent: one program handles every n-th row, with n programs.
    cols = tl.arange(0, BLOCK_SIZE)
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=-float("inf"))
        y = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + row * n_cols + cols, y / tl.sum(y, axis=0), mask=cols < n_cols)


def test_a_tutorial_that_asks_for_the_gpu_runs():
    device = triton.runtime.driver.active.get_active_torch_device()
    assert device == torch.device("cpu")
    assert triton.runtime.driver.active.get_current_target().backend == "cpu"
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    x = torch.randn(20, 30, device=device)
    y = torch.empty_like(x)
    compiled = _softmax_kernel.warmup(y, x, 20, 30, BLOCK_SIZE=32, num_warps=4, grid=(1,))
    compiled._init_handles()
    per_sm = properties["max_num_regs"] // (compiled.n_regs * properties["warpSize"] * 4)
    n_programs = min(properties["multiprocessor_count"] * per_sm, 20)
    with torch.cuda.device(x.device.index):
        _softmax_kernel[(n_programs, 1, 1)](y, x, 20, 30, BLOCK_SIZE=32)
    torch.cuda.synchronize()
    torch.testing.assert_close(y, torch.softmax(x, 1))
    with pytest.raises(
        AttributeError, match="has no get_current_stream. A @triton.jit kernel runs"
    ):
        triton.runtime.driver.active.get_current_stream(0)


def test_do_bench_warns_that_its_times_are_the_interpreters():
    driver._warn_once.cache_clear()
    x, calls = torch.randn(3, requires_grad=True), []

    def step():
        calls.append(x.grad)
        (x * x).sum().backward()

    with pytest.warns(
        UserWarning, match="the interpreter's time, which says nothing about a GPU's"
    ):
        assert triton.testing.do_bench(step, warmup=1, rep=1, grad_to_none=[x]) > 0
    assert all(grad is None for grad in calls)
    low, middle, high = triton.testing.do_bench(step, quantiles=[0.2, 0.5, 0.8])
    assert 0 < low <= middle <= high
    assert len(triton.testing.do_bench(step, return_mode="all")) == 3


MAKERS = {
    "empty": lambda: torch.empty(3, device="cuda"),
    "randn": lambda: torch.randn(3, 2, dtype=torch.bfloat16, device="cuda:0"),
    "arange": lambda: torch.arange(3, device=torch.device("cuda")),
    "tensor": lambda: torch.tensor([1, 2], device="cuda"),
    "like": lambda: torch.zeros_like(torch.ones(2), device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "to both": lambda: torch.ones(2).to("cuda:0", torch.float16),
    "cuda": lambda: torch.ones(2).cuda(),
    "strided": lambda: torch.empty_strided((2, 2), (1, 2), device="cuda"),
    "module": lambda: torch.nn.Linear(2, 2, device="cuda").weight,
    "module moved": lambda: torch.nn.Linear(2, 2).cuda().weight,
}


def test_tensors_asked_for_on_cuda_are_made_on_the_cpu():
    driver._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="tensors asked for on cuda are made on the CPU"):
        made = {name: make() for name, make in MAKERS.items()}
    assert {x.device.type for x in made.values()} == {"cpu"}
    assert made["randn"].dtype == torch.bfloat16
    assert made["strided"].stride() == (1, 2)
    assert made["tensor"].tolist() == [1, 2]
    assert not torch.cuda.is_available()


@pytest.mark.parametrize("ask", ["get_device_capability", "get_device_name", "current_stream"])
def test_what_only_a_gpu_can_answer_is_a_sentence(ask):
    with pytest.raises(RuntimeError, match=r"torch.cuda.\w+: there is no GPU to ask"):
        getattr(torch.cuda, ask)()


def test_nothing_to_switch():
    for device in (None, 0, torch.device("cpu"), "cuda"):
        with torch.cuda.device(device):
            assert torch.cuda.current_device() == 0


# --- TORCH_LOGS=output_code ---


def test_output_code_in_cpp_says_why_once(capsys):
    logger = logging.getLogger("torch._inductor.codecache.__output_code")
    driver._say_once.cache_clear()
    for text in ("def call(args): triton_poi_fused_0", "cpp_fused_0 = async_compile.cpp_pybinding"):
        for _ in range(2):
            assert logger.filter(logger.makeRecord("", 10, "", 1, "Output code: %s", (text,), None))
        said = capsys.readouterr().err
        assert said.count("torch.compile writes C++ here, as there is no GPU") == ("cpp" in text)


def test_torch_logs_of_a_plain_compile():
    program = "import lib, torch; torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(9))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TORCH_LOGS": "output_code"},
        capture_output=True,
        text=True,
    )
    assert "cpp_fused" in done.stderr
    assert done.stderr.count("lib.nogpu.inductor.output_code(f, *inputs) writes the Triton") == 1
