"""What host code asks of a GPU, answered where there is none, so that public Triton programs run as they stand.

    triton.runtime.driver.active      the CPU is the active device; its properties are an H200's
    triton.testing.do_bench           the interpreter's time, with a warning: it says nothing about a GPU's
    kernel.warmup(...)                the kernel compiled for a GPU that is not here: n_regs, metadata.shared
    device="cuda", x.cuda()           a tensor on the CPU, with a warning
    torch.cuda.device, synchronize    nothing to switch, nothing to wait for
    TORCH_LOGS=output_code            one line says why torch.compile prints C++

Refused in a sentence: the rest of torch.cuda, which only a GPU can answer. `torch.cuda.is_available()` and
`x.is_cuda` stay False, as much of PyTorch asks them before it calls CUDA: delete an `assert x.is_cuda`.
"""

import contextlib
import ctypes
import functools
import logging
import sys
import time
import types
import warnings
from pathlib import Path

import numpy as np
import torch
import triton
import triton.testing
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter as upstream

_CPU = torch.device("cpu")
# As driver.active.utils.get_device_properties gives them on an H200.
_H200 = {
    "max_shared_mem": 227 << 10,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6144,
}


def install():
    """Answer for the missing GPU, for this process."""
    triton.runtime.driver.set_active(_Driver())
    triton.testing.do_bench = triton.testing.do_bench_cudagraph = do_bench
    upstream.InterpretedFunction.run = _run_or_compile(upstream.InterpretedFunction.run)
    _make_cuda_tensors_on_the_cpu()
    _answer_for_torch_cuda()
    logging.getLogger("torch._inductor.codecache.__output_code").addFilter(_say_why_it_is_cpp)


class _Driver:
    """triton.runtime.driver.active: the CPU, which runs kernels in the interpreter."""

    def __init__(self):
        self.utils = types.SimpleNamespace(get_device_properties=lambda device=None: dict(_H200))

    def get_active_torch_device(self):
        return _CPU

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        return do_bench

    def get_empty_cache_for_benchmark(self):
        return torch.empty(1)

    def clear_cache(self, cache):
        pass

    def __getattr__(self, name):
        raise AttributeError(
            f"without a GPU triton.runtime.driver.active has no {name}. A @triton.jit kernel runs in the"
            " interpreter; lib.nogpu.compile_only compiles one, lib.nogpu.gluon runs one in Gluon."
        )


@functools.cache
def _warn_once(text):
    warnings.warn(text, stacklevel=3)


def do_bench(fn, *_, grad_to_none=None, quantiles=None, return_mode="mean", **__):
    """triton.testing.do_bench on the CPU: three runs, in ms."""
    _warn_once("do_bench without a GPU: the interpreter's time, which says nothing about a GPU's")
    times_ms = []
    for _ in range(3):
        for x in grad_to_none or ():
            x.grad = None
        started = time.perf_counter()
        fn()
        times_ms.append((time.perf_counter() - started) * 1e3)
    if quantiles is not None:
        values = np.quantile(times_ms, quantiles).tolist()
        return values[0] if len(values) == 1 else values
    return times_ms if return_mode == "all" else float(getattr(np, return_mode)(times_ms))


def _run_or_compile(run):
    """kernel.warmup(...) compiles, for a Hopper GPU, as it does beside one."""

    def run_or_compile(self, *args, grid, warmup, **kwargs):
        if not warmup:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        from lib.nogpu.compile_only import compile_for, signature_of

        options = {k: kwargs[k] for k in ("num_warps", "num_stages") if k in kwargs}
        compiled = compile_for(self, signature_of(self, *args, **kwargs), **options)
        return types.SimpleNamespace(
            asm=compiled.asm,
            name=compiled.name,
            n_regs=compiled.registers,
            n_spills=compiled.spills,
            metadata=types.SimpleNamespace(
                shared=compiled.shared_bytes, num_warps=compiled.num_warps, name=compiled.name
            ),
            _init_handles=lambda: None,
        )

    return run_or_compile


# --- torch.cuda ------------------------------------------------------------------------------------------


def _device_guards():
    """C++'s registry of device guards; their places are c10::DeviceType, fixed numbers."""
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * 21).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")


_CPU_SLOT, _CUDA_SLOT, _META_SLOT = 0, 1, 14
_CUDAS_GUARD = _device_guards()[_CUDA_SLOT]  # None in a torch that was built without CUDA


@contextlib.contextmanager
def cudas_own_guard():
    """Inside, CUDA's slot in the registry has CUDA's guard, or in a torch without CUDA one that does nothing.

    Before an op on a cuda tensor, fake or not, C++ asks CUDA's guard to switch to the right GPU, and aborts
    where there is none. The device `meta` has a guard that does nothing: it serves both.
    """
    guards = _device_guards()
    guards[_CUDA_SLOT], ours = _CUDAS_GUARD or guards[_META_SLOT], guards[_CUDA_SLOT]
    try:
        yield
    finally:
        guards[_CUDA_SLOT] = ours or guards[_CUDA_SLOT]  # cuda tensors made inside may live on


def _make_cuda_tensors_on_the_cpu():
    # A guard says which device is meant by "cuda" without a number: the CPU's says "cpu".
    guards = _device_guards()
    guards[_CUDA_SLOT] = guards[_CPU_SLOT]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a build for CUDA has these, and says that they are replaced
        _library.impl("empty.memory_format", _on_cpu(torch.ops.aten.empty.memory_format), "CUDA")
        _library.impl("empty_strided", _on_cpu(torch.ops.aten.empty_strided.default), "CUDA")


_library = torch.library.Library("aten", "IMPL")  # its registrations live as long as it does


def _on_cpu(op):
    def made(*args, **kwargs):
        _warn_once("there is no GPU: tensors asked for on cuda are made on the CPU")
        return op(*args, **kwargs | {"device": _CPU, "pin_memory": False})

    return made


def _answer_for_torch_cuda():
    refuse = torch.cuda._lazy_init

    def lazy_init():
        """C++ calls it for a tensor on cuda, which is then made on the CPU; torch.cuda for itself."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if asks.startswith("torch.cuda"):
            name = sys._getframe(1).f_code.co_name
            raise RuntimeError(
                f"torch.cuda.{name}: there is no GPU to ask. Ask torch.cuda.is_available() first, or leave it"
                " out: without a GPU tensors live on the CPU, and Triton kernels run there."
            )

    torch.cuda._lazy_init = functools.wraps(refuse)(lazy_init)
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None

    def init_device(self, device):
        self.idx = self.prev_idx = -1  # torch's number for no GPU: entering and leaving do nothing

    torch.cuda.device.__init__ = init_device


# --- TORCH_LOGS=output_code ------------------------------------------------------------------------------


@functools.cache
def _say_once():
    print(
        "lib: torch.compile writes C++ here, as there is no GPU. lib.nogpu.inductor.output_code(f, *inputs)"
        " writes the Triton code of a GPU.",
        file=sys.stderr,
    )


def _say_why_it_is_cpp(record):
    """A filter of the logger that prints output code: lets everything pass."""
    with contextlib.suppress(Exception):
        if "cpp_fused" in record.getMessage() or "async_compile.cpp" in record.getMessage():
            _say_once()
    return True
