"""NVIDIA's own compiler: finding nvcc, a toolkit from pip, and compile-only checks.

`nvcc_check` needs nvcc but no GPU. It says whether a source compiles and what resources each kernel
uses (registers, shared memory, spills).
"""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from lib.cache import cache_dir
from lib.nogpu.cuda_build import TORCH, ToolMissing, compiler_errors, find_compiler

import torch

_USUAL_NVCC = "/usr/local/cuda/bin/nvcc"

# The flags that PyTorch gives nvcc (torch.utils.cpp_extension.COMMON_NVCC_FLAGS).
_TORCH_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
]


class KernelResources(NamedTuple):
    """The resources of one kernel, as ptxas reports them."""

    kernel: str
    registers: int  # of each thread
    shared_bytes: int  # of each thread block, without dynamic shared memory
    stack_bytes: int  # of each thread: local arrays that did not fit in registers
    spill_store_bytes: int
    spill_load_bytes: int


def find_nvcc() -> str | None:
    """The path of nvcc, from $CUDA_HOME, $PATH, /usr/local/cuda or pip's wheels."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    for home in filter(None, homes):
        if os.path.exists(os.path.join(home, "bin", "nvcc")):
            return os.path.join(home, "bin", "nvcc")
    for path in (shutil.which("nvcc"), _USUAL_NVCC):
        if path and os.path.exists(path):
            return path
    home = _pip_cuda_home()
    return os.path.join(home, "bin", "nvcc") if home else None


def how_to_get_nvcc() -> str:
    """What to type for a compiler of the CUDA version that this PyTorch was built with."""
    version = f"=={torch.version.cuda}.*" if torch.version.cuda else ""
    return f'pip install "cuda-toolkit[nvcc,nvvm,cccl,crt]{version}" ninja'


def use_pip_cuda() -> str | None:
    """Make PyTorch build with the CUDA toolkit from pip, where there is no other nvcc.

    Sets CUDA_HOME and returns it. Changes nothing and returns None where another nvcc is installed or
    pip's wheels have none.
    """
    nvcc, home = find_nvcc(), _pip_cuda_home()
    if not home or nvcc != os.path.join(home, "bin", "nvcc"):
        return None
    # The linker asks for libcudart.so; wheels bring libcudart.so.13 alone.
    for library in glob.glob(os.path.join(home, "lib", "libcudart.so.*")):
        link = os.path.join(home, "lib", "libcudart.so")
        if not os.path.exists(link):
            os.symlink(os.path.basename(library), link)
    os.environ["CUDA_HOME"] = home
    if extension := sys.modules.get("torch.utils.cpp_extension"):
        extension.CUDA_HOME = home  # read from the environment when it was imported
    return home


def nvcc_check(source: str, arch: str = "sm_90") -> list[KernelResources]:
    """Compile a CUDA source with nvcc, discard the result and return the resources of each kernel.

    The source may include PyTorch's headers, even those of a CPU-only PyTorch. Raises RuntimeError with
    nvcc's errors if it does not compile, ToolMissing where there is no nvcc.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise ToolMissing(f"There is no nvcc; install one with `{how_to_get_nvcc()}`.")
    if find_compiler() is None:
        raise ToolMissing("nvcc needs a C++ compiler; install one with `sudo apt install g++`.")
    include = TORCH / "include"
    folders = [_missing_headers(), include, include / "torch/csrc/api/include"]
    folders.append(sysconfig.get_paths()["include"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.cu").write_text(source)
        command = [nvcc, "-std=c++20", f"-arch={arch}", "-cubin", "-Xptxas", "-v", "kernels.cu"]
        command += ["-o", "kernels.cubin", *_TORCH_FLAGS, *(f"-isystem={path}" for path in folders)]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode:
        raise RuntimeError(f"nvcc does not compile the source:\n{compiler_errors(output)}")
    return _read_ptxas(output, nvcc)


def _read_ptxas(output: str, nvcc: str) -> list[KernelResources]:
    kernels = []
    for part in output.split("Compiling entry function '")[1:]:
        mangled = part.split("'")[0]
        # Device functions that were not inlined have lines like these too, under their own names.
        frame = re.search(
            rf"Function properties for {re.escape(mangled)}\s+(\d+) bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads",
            part,
        )
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append(
            KernelResources(
                demangled(mangled, nvcc),
                int(registers[1]) if registers else 0,
                int(shared[1]) if shared else 0,
                *(int(number) for number in (frame.groups() if frame else (0, 0, 0))),
            )
        )
    return kernels


def demangled(symbol: str, nvcc: str) -> str:
    """`_Z4axpyfPKfPf` is `axpy`: the name without its parameters."""
    beside = os.path.join(os.path.dirname(nvcc), "cu++filt")
    tool = beside if os.path.exists(beside) else shutil.which("c++filt")
    if not tool:
        return symbol
    result = subprocess.run([tool, symbol], capture_output=True, text=True)
    return short_kernel_name(result.stdout.strip() or symbol)


def short_kernel_name(name: str) -> str:
    """`void k<(int)64, float>(float*)` is `k<64, float>`: what one writes before <<<>>>."""
    name = re.sub(r"\([\w ]+\)(?=-?\d)", "", name.removeprefix("void "))
    depth = 0
    for i, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and not name.startswith("(anonymous", i):
            return name[:i]
    return name


def _missing_headers() -> Path:
    """A folder with the one header of PyTorch's CUDA build that its CPU-only wheel leaves out."""
    folder = cache_dir("nvcc_headers")
    header = folder / "c10/cuda/impl/cuda_cmake_macros.h"
    if not header.exists():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return folder


def _pip_cuda_home() -> str | None:
    """`site-packages/nvidia/cu13`, if pip has put an nvcc there for PyTorch's version of CUDA."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    version = torch.version.cuda.split(".")[0] if torch.version.cuda else "*"
    for root in spec.submodule_search_locations if spec else []:
        for home in sorted(glob.glob(os.path.join(root, f"cu{version}"))):
            if os.path.exists(os.path.join(home, "bin", "nvcc")):
                return home
    return None
