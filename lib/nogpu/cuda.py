"""CUDA C++ without a GPU: the same source, built with g++ and run on the CPU, with a checker.

    source = Path("lib/ops/add_relu.cu").read_text()
    kernels = load_cuda(source, ["add_relu"])
    y = kernels.add_relu(x, bias)

With a GPU, nvcc builds it through PyTorch's load_inline. Without one, each CUDA thread is a fiber: thread
blocks run one after another, and the threads of a block take turns at barriers and warp intrinsics, so the
results are those of a GPU up to rounding. A checker watches loads and stores and raises, naming kernel, line
and thread, for: an access out of bounds of a tensor, of what cudaMalloc gave or of shared memory, through a
pointer of the host's or a freed one; a race (a missing barrier); a read, also by an atomic operation, of
uninitialized shared memory or of an uninitialized torch::empty or cudaMalloc; a misaligned vector load; a
barrier or a shuffle that only some threads reach; and a thread that waits forever. A host call that passes
the end of a buffer or copies in the wrong direction raises too, and so does a torch::empty that is returned
half-written. An uninitialized local variable holds one pattern, -1.7e38 as a float (NaN with clang), so that
what comes of it is plainly wrong.

How long it watches: with checked=True to the end, which takes a hundred times as long, so use small tensors,
up to 64 K elements. By default the first half million accesses of each launch, which takes a quarter of a
second, and from there on for bounds alone, which takes five times as long as nothing. With checked=False not
at all: an invalid access ends the kernel where the processor traps it, and else may end the process. A launch
that a GPU refuses, as with 2048 threads a block, raises with checked=True, and is silent by default, as there.

Where it differs from a GPU: it says nothing about speed, coalescing, bank conflicts or occupancy. Nothing
runs concurrently, so only the checker shows a race. One thread block cannot wait for another, so grid.sync()
takes a grid of one block. The checker misses an index that hits another tensor of the same launch, two arrays
that a kernel itself carves out of one, and a pointer past the end of a local or a `__constant__` array. A
kernel that ignores the strides of its input stays inside the tensor, so it gets wrong numbers and no error.
Cooperative groups are there: thread blocks, tiles of up to 32 threads, coalesced threads, reduce and scan.
Inline PTX, wmma/mma, cp.async and TMA, clusters, cooperative launches and CUB are refused (NotOnCpu).

Environment: CUDA_ON_CPU_CHECKED=1 and =0 set what load_inline, load and load_cuda do where nobody says it;
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
from lib.nogpu.cuda_translate import NotOnCpu, namespaces_of, translate, without_pybind11

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
    most_read_by_a_thread: int  # bytes
    shared_bytes: int  # of a thread block, at most


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

    `checked`: True to check every access of every launch, False to check none; None means what
    CUDA_ON_CPU_CHECKED says, else the first half million of a launch, and bounds to its end. It has no effect
    with a GPU: there, run `compute-sanitizer python script.py`.
    """
    if HAS_GPU:
        return _load_on_gpu(source, functions, name, verbose)
    checked = cuda_build.checked_by_default() if checked is None else checked
    return load_cuda_on_cpu(source, functions, name, checked, verbose)


def load_cuda_on_cpu(
    source: str, functions: list[str], name="kernels", checked: bool | None = None, verbose=False
):
    """`load_cuda` for CPU tensors, with or without a GPU; here CUDA_ON_CPU_CHECKED says nothing."""
    _require_functions(source, functions, name)
    namespace = _namespace(name, source, functions, checked, "cpu")
    if namespace not in _libraries:
        bindings = _bindings(namespace, functions, _STRICT)
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
    The bytes are not counted with checked=False.
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
    """Without a GPU, let torch.utils.cpp_extension's load_inline and load build CUDA sources for the CPU.

    An op file that builds its .cu with them then works unchanged. To CUDA this is what TRITON_INTERPRET=1 is
    to Triton. Calls without CUDA sources go to PyTorch. With a GPU this does nothing.
    """
    if HAS_GPU:
        return
    extension = _import_cpp_extension()
    _replace(extension.load_inline, _load_inline)
    _replace(extension.load, _load_files)


def _replace(function, new):
    """Make `function` call new(original, ...), also for whoever has imported it before lib.

    So the function stays the object that it is and gets another code, which finds `new` among its defaults.
    """
    if hasattr(function, "builds_for_the_cpu"):
        return
    defaults, more = function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, function.__closure__
    )
    original.__kwdefaults__ = more

    def call(*args, _new, **kwargs):
        return _new(*args, **kwargs)

    function.__code__, function.__defaults__ = call.__code__, None
    function.__kwdefaults__ = {"_new": functools.partial(new, original)}
    function.builds_for_the_cpu = True


def _load_inline(original, name, cpp_sources, cuda_sources=None, *args, **kwargs):
    if not cuda_sources:
        return original(name, cpp_sources, cuda_sources, *args, **kwargs)
    return _load_inline_on_cpu(name, cpp_sources, cuda_sources, *args, **kwargs)


def _load_files(original, name, sources, *args, **kwargs):
    paths = [Path(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if not any(path.suffix == ".cu" for path in paths):
        return original(name, sources, *args, **kwargs)
    options = dict(zip(["extra_cflags", "extra_cuda_cflags"], args)) | kwargs
    folders = [str(path.parent) for path in paths]
    options["extra_include_paths"] = folders + list(options.pop("extra_include_paths", None) or [])
    return _build_inline(name, [(path.name, path.read_text()) for path in paths], **options)


def _load_inline_on_cpu(
    name,
    cpp_sources,
    cuda_sources,
    sycl_sources=None,
    functions=None,
    extra_cflags=None,
    extra_cuda_cflags=None,
    *_,
    **options,
):
    """load_inline for the CPU. Options that only concern nvcc or pybind11 are ignored."""
    files = [(f"{name}.cpp", _joined(cpp_sources)), (f"{name}.cu", _joined(cuda_sources))]
    names = [functions] if isinstance(functions, str) else list(functions or [])
    return _build_inline(name, files, names, extra_cflags, extra_cuda_cflags, **options)


def _build_inline(
    name,
    files,
    functions=(),
    extra_cflags=None,
    extra_cuda_cflags=None,
    extra_include_paths=None,
    verbose=False,
    is_python_module=True,
    **_,
):
    """Build `files`, pairs of a name and a text, as one library.

    Returns a namespace with `functions` and those of a PYBIND11_MODULE; where there are none, the path of
    the loaded library.
    """
    checked = cuda_build.checked_by_default()
    all_flags = [*(extra_cflags or []), *(extra_cuda_cflags or [])]
    flags = list(dict.fromkeys(flag for flag in all_flags if re.match("-[DUI]", flag)))
    flags += [f"-I{os.path.abspath(path)}" for path in extra_include_paths or []]

    bound, cpp = {function: function for function in functions}, "#include <torch/types.h>\n"
    for file, text in files:  # PyTorch's own begins with that header too
        text, names = without_pybind11(text)
        bound |= names
        cpp += f'#line 1 "{file}"\n{translate(text, file)}\n'
    source = "\n".join(text for file, text in files)
    namespace = _namespace(name, (files, flags), bound, checked, "inline")
    cpp += _bindings(namespace, bound, _WIDENED)
    options = {"source": source, "flags": flags, "checked": checked, "verbose": verbose}
    library = cuda_build.build_library(cpp, name, **options)
    if library not in _libraries.values():
        cuda_build.load_library(library)
    for registered in (namespace, *namespaces_of(source)):
        _libraries[registered] = library
    return getattr(torch.ops, namespace) if bound else str(library)


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


# How a function is bound: with its own types, or as pybind11 does, which has int and float too.
_STRICT = "::cuda_on_cpu::Strict<&{}>::call"
_WIDENED = "::cuda_on_cpu::Bound<&{}>::call"


def _bindings(namespace: str, functions: list[str] | dict[str, str], how: str = "&{}") -> str:
    """The C++ that makes host functions callable from Python; `functions` may map a name to its function."""
    if not functions:
        return ""
    targets = functions if isinstance(functions, dict) else dict(zip(functions, functions))
    calls = ((name, how.format(target)) for name, target in targets.items())
    lines = "".join(f'  m.def("{name}", {call});\n' for name, call in calls)
    return f'#line 1 "bindings"\nTORCH_LIBRARY({namespace}, m) {{\n{lines}}}\n'
