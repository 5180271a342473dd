"""CUDA C++ without a GPU: the same source, built with g++ and run on the CPU, with a checker.

    source = Path("lib/ops/add_relu.cu").read_text()
    kernels = load_cuda(source, ["add_relu"])
    y = kernels.add_relu(x, bias)

With a GPU, nvcc builds it through PyTorch's load_inline. Without one, each CUDA thread is a fiber: thread
blocks run one after another, and the threads of a block take turns at barriers and warp intrinsics, so the
results are those of a GPU up to rounding. `checked=True` watches every load and store and raises, naming
kernel, line and thread, for: an access out of bounds of a tensor or of shared memory, a race (a missing
barrier), a read of uninitialized shared memory or of an uninitialized torch::empty, a tensor that was freed
before the launch, a misaligned vector load, a barrier or a shuffle that only some threads reach, and a
thread that waits forever. It fills an uninitialized local variable with one pattern, -1.7e38 as a float (NaN
with clang), so that what comes of it is plainly wrong. Without `checked`, an invalid access ends the kernel
with a less detailed error, and only where the processor traps it.

Where it differs from a GPU: it says nothing about speed, coalescing, bank conflicts or occupancy. Nothing
runs concurrently, so a race shows in checked mode only. One thread block cannot wait for another. The checker
misses an index that hits another tensor of the same launch, two arrays that a kernel itself carves out of one,
and a pointer past the end of a local or a `__constant__` array. A kernel that ignores the strides of its input
stays inside the tensor, so it gets no error, only wrong numbers. Inline PTX, wmma/mma, cp.async and TMA,
clusters, cooperative groups and CUB are refused (NotOnCpu). In checked mode use small tensors, up to 64 K
elements: it is thousands of times slower.

Environment: CUDA_ON_CPU_CHECKED=1 makes checked the default of load_inline and load_cuda;
CUDA_ON_CPU_ORDER=forward, reverse or a seed sets the order in which the threads of a block take turns;
CUDA_ON_CPU_TIMEOUT ends a launch after that many seconds (300). The rewriting of the source
is in `cuda_translate.py`, the building in `cuda_build.py`, what runs the threads in `cuda_on_cpu/`.
"""

import functools
import logging
import os
import re
import types
from pathlib import Path
from typing import NamedTuple

from lib.cache import cache_dir
from lib.machine import HAS_GPU
from lib.nogpu import cuda_build
from lib.nogpu.cuda_build import ToolMissing
from lib.nogpu.cuda_toolkit import (
    KernelResources,
    find_nvcc,
    how_to_get_nvcc,
    nvcc_check,
    use_pip_cuda,
)
from lib.nogpu.cuda_translate import NotOnCpu, namespaces_of, translate

import torch

__all__ = [
    "KernelError",
    "KernelResources",
    "MemoryTraffic",
    "NotOnCpu",
    "ToolMissing",
    "install",
    "load_cuda",
    "load_cuda_on_cpu",
    "memory_traffic",
    "nvcc_check",
    "translate",
    "use_pip_cuda",
    "why_no_cuda",
]

# A kernel's error raises this RuntimeError, on the CPU as on a GPU.
KernelError = torch.AcceleratorError


class MemoryTraffic(NamedTuple):
    """What the kernels of one source did: counted at every load and store, not estimated."""

    launches: int
    thread_blocks: int
    threads: int
    bytes_read: int  # from tensors; shared memory and local variables are not counted
    bytes_written: int


# The libraries that this process has loaded, by the namespace of their operators under torch.ops.
_libraries: dict[str, Path] = {}


def load_cuda(
    source: str, functions: list[str], name="kernels", checked: bool | None = None, verbose=False
):
    """Build a CUDA C++ source and return a namespace with its host functions `functions`.

    The functions take and return tensors, int64_t, double and bool; the namespace is torch.ops.<name and
    a hash of the source>, so an edited source gets a new one. `name` is the name of the .cu in messages.
    The same source is built once: in this process the call then returns at once, in others it loads the
    built library from the course's cache.

    `checked`: whether to use the checker; None means what CUDA_ON_CPU_CHECKED says. It has no effect with
    a GPU: there, run `compute-sanitizer python script.py`.
    """
    if HAS_GPU:
        return _load_on_gpu(source, functions, name, verbose)
    checked = cuda_build.checked_by_default() if checked is None else checked
    return load_cuda_on_cpu(source, functions, name, checked, verbose)


def load_cuda_on_cpu(
    source: str, functions: list[str], name="kernels", checked: bool | None = None, verbose=False
):
    """`load_cuda` for CPU tensors, with or without a GPU in the machine."""
    _require_functions(source, functions, name)
    namespace = _namespace(name, source, functions, checked, "cpu")
    if namespace not in _libraries:
        bindings = _bindings(namespace, functions)
        cpp = f'#line 1 "{name}.cu"\n{translate(source, name)}\n{bindings}'
        library = cuda_build.build_library(
            cpp, name, source=source, checked=checked, verbose=verbose
        )
        cuda_build.load_library(library)
        _libraries[namespace] = library
    return getattr(torch.ops, namespace)


def memory_traffic(namespace) -> MemoryTraffic:
    """What the kernels behind `namespace` have done since the last call. Each call resets the counts.

    `namespace` is what load_cuda returned, or torch.ops.<name> of a source with its own TORCH_LIBRARY.
    The bytes are counted in checked mode only.
    """
    name = getattr(namespace, "name", None)
    if name not in _libraries:
        raise ValueError(
            f"{name} was not built for the CPU in this process; pass what load_cuda returned there"
        )
    return MemoryTraffic(*cuda_build.read_statistics(_libraries[name]))


def why_no_cuda() -> str | None:
    """None when CUDA sources can be built here, else one sentence: what is missing, what to install."""
    if not HAS_GPU:
        return cuda_build.why_no_compiler()
    use_pip_cuda()
    if find_nvcc() is None:
        return (
            f"There is a GPU but no nvcc to build for it; install one with `{how_to_get_nvcc()}`."
        )
    if cuda_build.find_compiler() is None:
        return "nvcc needs a C++ compiler; install one with `sudo apt install g++`."
    return None


def install():
    """Without a GPU, let torch.utils.cpp_extension.load_inline build CUDA sources for the CPU.

    An op file that builds its .cu with load_inline then works unchanged. To CUDA this is what
    TRITON_INTERPRET=1 is to Triton. Calls without cuda_sources go to PyTorch. With a GPU this does nothing.
    """
    if HAS_GPU:
        return
    extension = _import_cpp_extension()
    original = extension.load_inline
    if getattr(original, "builds_for_the_cpu", False):
        return

    @functools.wraps(original)
    def load_inline(name, cpp_sources, cuda_sources=None, *args, **kwargs):
        if not cuda_sources:
            return original(name, cpp_sources, cuda_sources, *args, **kwargs)
        return _load_inline_on_cpu(name, cpp_sources, cuda_sources, *args, **kwargs)

    load_inline.builds_for_the_cpu = True
    extension.load_inline = load_inline


def _load_inline_on_cpu(
    name,
    cpp_sources,
    cuda_sources,
    sycl_sources=None,
    functions=None,
    extra_cflags=None,
    extra_cuda_cflags=None,
    *_,
    extra_include_paths=None,
    verbose=False,
    is_python_module=True,
    **__,
):
    """load_inline for the CPU. Options that only concern nvcc or pybind11 are ignored.

    Returns a namespace with `functions` if they are given, else the path of the loaded library.
    """
    checked = cuda_build.checked_by_default()
    cpp_source, cuda_source = _joined(cpp_sources), _joined(cuda_sources)
    names = [functions] if isinstance(functions, str) else list(functions or [])
    all_flags = [*(extra_cflags or []), *(extra_cuda_cflags or [])]
    flags = list(dict.fromkeys(flag for flag in all_flags if re.match("-[DUI]", flag)))
    flags += [f"-I{os.path.abspath(path)}" for path in extra_include_paths or []]

    own = namespaces_of(cpp_source + "\n" + cuda_source)
    namespace = _namespace(name, (cpp_source, cuda_source, flags), names, checked, "inline")
    cpp = "#include <torch/types.h>\n" + "".join(  # PyTorch's own begins so
        f'#line 1 "{name}.{suffix}"\n{translate(text.replace(_PYBIND_HEADER, _PLAIN_HEADER), name)}\n'
        for suffix, text in (("cpp", cpp_source), ("cu", cuda_source))
    )
    cpp += _bindings(namespace, names, widen=True)
    options = {"source": cuda_source, "flags": flags, "checked": checked, "verbose": verbose}
    library = cuda_build.build_library(cpp, name, **options)
    if library not in _libraries.values():
        cuda_build.load_library(library)
    for registered in (namespace, *own):
        _libraries[registered] = library
    return getattr(torch.ops, namespace) if names else str(library)


# pybind11 takes half a minute to compile and is not needed: functions are bound by TORCH_LIBRARY.
_PYBIND_HEADER = "#include <torch/extension.h>"
_PLAIN_HEADER = "#include <torch/types.h>"


def _joined(sources: str | list[str] | None) -> str:
    return sources if isinstance(sources, str) else "\n".join(sources or [])


def _load_on_gpu(source: str, functions: list[str], name: str, verbose: bool):
    """Build with nvcc through load_inline, in the course's cache."""
    _require_functions(source, functions, name)
    if reason := why_no_cuda():
        raise ToolMissing(reason)
    architecture = torch.cuda.get_device_capability()
    versions = (torch.__version__, torch.version.cuda, architecture)
    namespace = _namespace(name, source, functions, versions, "gpu")
    if namespace in _libraries:
        return getattr(torch.ops, namespace)
    folder = cache_dir("cuda", namespace)
    library, complete = folder / f"{namespace}.so", folder / "complete"
    with cuda_build.locked(folder):
        if complete.exists():
            cuda_build.load_library(library)
        else:
            _build_with_nvcc(source, functions, name, namespace, folder, verbose)
            complete.touch()
    _libraries[namespace] = library
    return getattr(torch.ops, namespace)


def _build_with_nvcc(source, functions, name, namespace, folder, verbose):
    extension = _import_cpp_extension()
    # A killed build leaves this file behind, and load_inline would wait for it forever.
    (folder / "lock").unlink(missing_ok=True)
    text = f'#include <torch/library.h>\n#line 1 "{name}.cu"\n{source}\n{_bindings(namespace, functions)}'
    try:
        extension.load_inline(
            name=namespace,
            cpp_sources="",
            cuda_sources=text,
            extra_cuda_cflags=["-lineinfo"],  # profilers and compute-sanitizer name lines
            build_directory=str(folder),
            is_python_module=False,
            no_implicit_headers=True,
            verbose=verbose,
        )
    except RuntimeError as error:
        errors = cuda_build.compiler_errors(str(error))
        raise RuntimeError(f"{name}.cu does not compile:\n{errors}") from None


def _import_cpp_extension() -> types.ModuleType:
    """torch.utils.cpp_extension, without its warning that nvcc is here and a GPU is not."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from torch.utils import cpp_extension
    finally:
        logger.setLevel(level)
    return cpp_extension


def _namespace(name: str, *parts) -> str:
    """A name for torch.ops, which takes each one once in a process."""
    return re.sub(r"\W", "_", f"{name}_{cuda_build.source_key(*parts)}")


def _require_functions(source: str, functions: list[str], name: str):
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name is used in file names: letters, digits and _ only, not {name!r}")
    for function in functions:
        if not re.search(rf"\b{function}\s*\(", source):
            raise ValueError(f"{name}.cu defines no function {function}; name its host functions")


def _bindings(namespace: str, functions: list[str], widen: bool = False) -> str:
    """The C++ that makes host functions callable from Python.

    PyTorch binds int64_t and double; `widen` lets a function have int and float too, as pybind11 does.
    """
    if not functions:
        return ""
    targets = {f: f"::cuda_on_cpu::Bound<&{f}>::call" if widen else f"&{f}" for f in functions}
    lines = "".join(f'  m.def("{f}", {target});\n' for f, target in targets.items())
    return f'#line 1 "bindings"\nTORCH_LIBRARY({namespace}, m) {{\n{lines}}}\n'
