"""Compare the kernel launches of two states of lib/ops, without a GPU, as an H200 would get them.

    python -m lib.measure.launch_diff REF [--op gelu]        `make launch-diff REF=… [OP=gelu]`

For each version of an op, dtype and shape of the registry, forward and backward, with tensors that have no
memory: every launch at the commit REF and now (kernel, grid, types and divisibility of the arguments,
constexprs, warps and stages), and the PTX that Triton makes of each kernel for compute capability 9.0.
Differences are printed, and then the exit status is 1. Kernel names may differ.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from lib.measure.bench import detached, leaves, outputs
from lib.nogpu.compile_only import Signature, compile_for, signature_of
from lib.nogpu.fake_gpu import fake_gpu
from lib.recorded import results
from lib.standalone import standalone

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from tqdm import tqdm
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch, without its tensors; `kernel` is the JITFunction."""

    kernel: object = dataclasses.field(compare=False)
    grid: tuple
    signature: str
    num_warps: int
    num_stages: int
    made_of: object = dataclasses.field(compare=False)  # the Signature

    def __str__(self):
        return (
            f"{self.kernel.__name__}{self.grid} {self.signature} {self.num_warps}/{self.num_stages}"
        )


@contextlib.contextmanager
def _compiled_kernels():
    """Inside, @triton.jit makes kernels to compile, in a process that otherwise interprets them."""
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = False
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = before


def _fresh_registry():
    """The registry with ops whose kernels are to be compiled; the process keeps its own."""
    op_modules = [
        n
        for n in sys.modules
        if n.startswith(("lib.ops", "lib.measure.registry", "lib.measure.matmul"))
    ]
    own_modules = {name: sys.modules.pop(name) for name in op_modules}
    libraries = _as_if_undefined()
    try:
        with _compiled_kernels(), libraries:
            registry = importlib.import_module("lib.measure.registry")
            _launch_under_modes(sys.modules["lib.ops._host"])
            return registry
    finally:
        for name in [n for n in sys.modules if n in own_modules]:
            del sys.modules[name]
        sys.modules.update(own_modules)


def _launch_under_modes(host):
    """Fake tensors go to the kernel, whose launch is what is asked for, and not to the registered op."""
    host.modes, host.PLAIN = int, {*getattr(host, "PLAIN", ()), FakeTensor}


def _as_if_undefined():
    """Inside, custom_op returns the function: the names are taken, and a fake GPU runs no registered op."""

    class Registered:
        def __init__(self, function):
            self.function, self._name = function, function.__name__

        def __call__(self, *args, **how):
            return self.function(*args, **how)

        def register_fake(self, function):
            return function

        def register_autograd(self, *_, **__):
            pass

    return mock.patch.object(torch.library, "custom_op", return_value=Registered)


def _module_at(ref, op, folder):
    """lib/ops/<name>.py as it was at a commit, with the versions that other files build on it (rungs)."""
    file = f"lib.ops.{op.name}"
    module, ops = _loaded_at(ref, file, folder), sys.modules["lib.ops"]
    elsewhere = [v for v in op.versions.values() if not hasattr(module, v.__name__)]
    for other in {v.__module__ for v in elsewhere}:
        with mock.patch.dict(sys.modules, {file: module}), mock.patch.object(ops, op.name, module):
            rungs = _loaded_at(ref, other, folder)
        names = [v.__name__ for v in elsewhere if v.__module__ == other]
        vars(module).update({name: getattr(rungs, name) for name in names})
    return module


def _loaded_at(ref, name, folder):
    folder_at, _, stem = name.replace(".", "/").rpartition("/")

    def read(stem):
        return results.text_at(ref, f"{folder_at}/{stem}.py")

    text = standalone(stem, read) if folder_at == "lib/ops" else read(stem)
    return _load(text, Path(folder, f"{name.split('.')[-1]}_at_ref.py"))


def _load(text, path):
    """A module from its text, with kernels to compile and names of its own in torch.library."""
    # fused_kernels, or what stands for it in a mutant
    path.write_text(re.sub(r'"fused_kernels\w*::', f'"{path.stem}::', text))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _compiled_kernels(), _as_if_undefined():
        spec.loader.exec_module(module)
    _launch_under_modes(module)
    return module


def _with_module(op, module):
    def versions_in(versions):
        return {name: getattr(module, v.__name__) for name, v in versions.items() if name != "cuda"}

    return dataclasses.replace(
        op, versions=versions_in(op.versions), in_place=versions_in(op.in_place)
    )


def launches_of(call):
    """The launches of one call, under fake_gpu: nothing runs."""
    launches = []

    def run(self, *args, grid, warmup=False, num_warps=4, num_stages=3, **named):
        signature = _signature(self, args, named)
        launches.append(
            Launch(self, (*grid, 1, 1)[:3], repr(signature), num_warps, num_stages, signature)
        )

    with mock.patch.object(JITFunction, "run", run):
        call()
    return launches


def _signature(kernel, args, named):
    """signature_of, with TMA descriptors among the arguments."""
    names = [p.name for p in kernel.params]
    values = dict(zip(names, args)) | named
    described = {n: v for n, v in values.items() if isinstance(v, TensorDescriptor)}
    plain = signature_of(kernel, **{n: 16 if n in described else v for n, v in values.items()})
    types = {n: _description(described[n]) if n in described else t for n, t in plain.types.items()}
    divisible = [n for n in plain.divisible_by_16 if n not in described]
    return Signature(types, plain.constexprs, divisible)


def _description(descriptor):
    return f"tensordesc<{_TYPES[descriptor.base.dtype]}{list(descriptor.block_shape)}>"


def cases_of(op):
    """(label, function without arguments) of every call that is compared."""
    for label in op.configurations:
        configured = op.configured(label)
        shapes = dict.fromkeys(configured.bench_shapes + configured.odd_shapes)
        for name, version in configured.all_versions().items():
            for shape in (
                shapes if label == next(iter(op.configurations)) else configured.bench_shapes[:1]
            ):
                for dtype in op.dtypes:
                    case = " ".join(
                        filter(None, (op.name, label, name, str(shape), str(dtype)[6:]))
                    )
                    yield case, functools.partial(_both_passes, configured, version, shape, dtype)


def _both_passes(op, version, shape, dtype):
    empty = functools.partial(torch.empty, dtype=dtype, device="cuda")
    inputs = op.inputs(shape, dtype, torch.device("cuda"), draw=empty)
    with torch.no_grad():
        version(*detached(inputs))
    ys = outputs(version(*inputs))
    torch.autograd.grad(ys, leaves(inputs), [torch.empty_like(y) for y in ys])


def _storage_ptr(storage):
    return storage._cdata << 40  # storages lie far apart


def _data_ptr(tensor):
    return _storage_ptr(tensor.untyped_storage()) + tensor.storage_offset() * tensor.itemsize


@contextlib.contextmanager
def _addresses():
    """Inside, tensors without memory have aligned addresses, far apart for different storages."""
    with (
        mock.patch.object(FakeTensor, "data_ptr", _data_ptr),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _storage_ptr),
    ):
        yield


def _alike(a, b):
    """Whether two launches are equal except for the kernel's name and constexprs that only one of them has.

    The PTX shows what such a constexpr does.
    """
    shared = set(a.made_of.constexprs) & set(b.made_of.constexprs)
    how = [
        (x.grid, x.num_warps, x.num_stages, x.made_of.types, x.made_of.divisible_by_16)
        + tuple(x.made_of.constexprs[name] for name in sorted(shared))
        for x in (a, b)
    ]
    return how[0] == how[1]


def differences(op, before):
    """Sentences on the cases where `op` launches differently from `before` and on kernels whose PTX differs."""
    pairs, messages = {}, []
    old_cases = dict(cases_of(before))
    for case, call in tqdm(list(cases_of(op)), desc=op.name, unit="case"):
        with fake_gpu(), _addresses():
            new, old = launches_of(call), launches_of(old_cases[case])
        for a, b in zip(old, new):
            if not _alike(a, b):
                messages.append(f"{case}:\n  before {a}\n  now    {b}")
                break
            pairs[a.kernel.__name__, b.kernel.__name__, b.signature, b.num_warps, b.num_stages] = (
                a,
                b,
            )
        if len(old) != len(new):
            messages.append(f"{case}: {len(old)} launches before, {len(new)} now")
    for a, b in tqdm(pairs.values(), desc=f"{op.name}, PTX", unit="kernel"):
        texts = [_ptx_of(launch) for launch in (a, b)]
        if texts[0] != texts[1]:
            messages.append(f"{b}: its PTX differs")
    return messages, len(pairs)


def _ptx_of(launch):
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        how = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        ptx = compile_for(launch.kernel, launch.made_of, **how).ptx
    ptx = ptx.replace(launch.kernel.__name__, "kernel")
    return re.sub(r"(?m)^\s*(//|\.file).*\n", "", ptx)


def main(argv=None):
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.measure.launch_diff")
    parser.add_argument("ref", help="a commit")
    parser.add_argument("--op", help="one op; default: all")
    parser.add_argument(
        "--restamp",
        action="store_true",
        help="where nothing differs, what was recorded at REF stays valid",
    )
    options = parser.parse_args(argv)
    registry, failed = _fresh_registry(), False
    with tempfile.TemporaryDirectory() as folder:
        for op in [registry.find(options.op)] if options.op else registry.OPS.values():
            before = _with_module(op, _module_at(options.ref, op, folder))
            messages, n_kernels = differences(_without_cuda(op), before)
            print(
                "\n".join(messages)
                or f"{op.name}: the same launches, {n_kernels} kernels of the same PTX"
            )
            failed |= bool(messages)
            if options.restamp and not messages:
                results.launches_are_the_same(op.name)
    return 1 if failed else 0


def _without_cuda(op):
    return dataclasses.replace(op, versions={n: v for n, v in op.versions.items() if n != "cuda"})


if __name__ == "__main__":
    sys.exit(main())
