"""This machine: its GPU or the lack of one, and the versions to report with a measurement."""

import dataclasses
import datetime
import functools
import os
import platform
import subprocess

import torch

HAS_GPU = torch.cuda.is_available()
# The triton that a torch is released with; Inductor often fails with another.
PARTNERS = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
OLDEST_GPU = (7, 5)  # the compute capability of Turing, the oldest that PyTorch is still built for

# Some virtual machines announce Intel's AMX and hide the sizes of its tiles (CPUID leaf 1DH). There oneDNN
# fails at nearly every 16-bit product on the CPU: "could not create a primitive". With AVX-512 it works.
# oneDNN reads the variable at its first product, and child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def device():
    """The device on which the course's tensors live: 'cuda' with a GPU, else 'cpu'."""
    return torch.device("cuda" if HAS_GPU else "cpu")


def pick(gpu, cpu):
    """`gpu` on a machine with a GPU, else `cpu`: real sizes on a GPU, small ones for the interpreter."""
    return gpu if HAS_GPU else cpu


def has_gpus(n):
    """Whether this machine has a GPU, and n of them or more."""
    return HAS_GPU and (n == 1 or torch.cuda.device_count() >= n)


def gpu_is_too_old():
    """Whether kernels may fail on this machine's GPU because it is older than OLDEST_GPU."""
    return HAS_GPU and torch.cuda.get_device_capability() < OLDEST_GPU


def partner_of_torch():
    """The minor version of triton that this torch is released with, as '3.9'; None where it is not known."""
    return PARTNERS.get(".".join(torch.__version__.split(".")[:2]))


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
    import triton  # not at the top: lib.nogpu sets TRITON_INTERPRET before triton is first imported

    return Stamp(
        gpu=gpu_name(),
        driver=_driver(),
        torch=torch.__version__.split("+")[0],
        triton=triton.__version__,
        python=platform.python_version(),
        date=datetime.date.today().isoformat(),
    )
