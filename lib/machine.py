"""What this machine is and can do: the GPU or its absence, versions, and what is missing for a cell."""

import dataclasses
import datetime
import functools
import platform
import subprocess

from lib import nogpu

import pandas as pd
import torch
import triton

HAS_GPU = nogpu.HAS_GPU


def device():
    """The device on which the course's tensors live: 'cuda' with a GPU, else 'cpu'."""
    return torch.device("cuda" if HAS_GPU else "cpu")


def pick(gpu, cpu):
    """`gpu` on a machine with one, else `cpu`: real sizes there, small ones for the interpreter."""
    return gpu if HAS_GPU else cpu


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Where and when something was measured."""

    gpu: str
    driver: str
    torch: str
    triton: str
    python: str
    date: str

    def line(self):
        """One line for a caption: 'NVIDIA H200 · torch 2.11.0 · triton 3.6.0 · 2026-11-21'."""
        return f"{self.gpu} · torch {self.torch} · triton {self.triton} · {self.date}"


def gpu_name():
    """'NVIDIA H200', or 'no GPU'."""
    return torch.cuda.get_device_name() if HAS_GPU else "no GPU"


@functools.cache
def _driver():
    if not HAS_GPU:
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(query, text=True, timeout=20).splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def stamp():
    """The Stamp of this machine, today."""
    return Stamp(
        gpu=gpu_name(),
        driver=_driver(),
        torch=torch.__version__.split("+")[0],
        triton=triton.__version__,
        python=platform.python_version(),
        date=datetime.date.today().isoformat(),
    )


def why_no_cuda():
    """None when a CUDA C++ source can be built and run here, else one sentence that says what is missing."""
    from lib.nogpu import cuda

    return cuda.why_no_cuda()


def describe():
    """A table for the first cell of a notebook: what is here, and how each part of the course runs on it."""
    here = stamp()
    missing = why_no_cuda()
    rows = {
        "GPU": f"{here.gpu}, driver {here.driver}" if HAS_GPU else "none found",
        "torch, triton": f"{here.torch}, {here.triton}",
        "Triton kernels": "compiled"
        if HAS_GPU
        else "interpreted on the CPU, loads and stores checked",
        "CUDA kernels": missing
        or ("compiled by nvcc" if HAS_GPU else "compiled by g++ for the CPU, with a checker"),
        "torch.compile": "compiled for this GPU"
        if HAS_GPU
        else "the Triton code it writes for an H200 is shown; times are recorded ones",
        "times in tables": "measured here" if HAS_GPU else "recorded on an NVIDIA H200",
    }
    from lib.show import style_table  # which needs this module

    return style_table(pd.DataFrame(rows.items(), columns=["", "this machine"]))
