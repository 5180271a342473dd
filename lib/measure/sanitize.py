"""Run every kernel of lib.ops once, forward and backward, at small and odd shapes, for compute-sanitizer.

`make sanitize` runs this under memcheck and racecheck, `make sanitize OP=matmul` for one op. Needs a GPU.
"""

import argparse
import contextlib
from unittest import mock

from lib import machine
from lib.measure import registry
from lib.measure.bench import leaves, outputs
from lib.ops import _host as host

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ProductsOnTheCpu(TorchDispatchMode):
    """Inside, torch.mm and torch.addmm are computed by the CPU, and cuBLAS launches nothing.

    Racecheck reports hazards in cuBLAS's kernels, which we cannot fix, and fails on some of these kernels.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if name not in ("mm", "addmm", "addmm_"):
            return func(*args, **kwargs)
        out = args[0] if name == "addmm_" else kwargs.pop("out", None)
        tensors = [a.cpu() for a in args if isinstance(a, torch.Tensor)]
        # the CPU has no product whose sums have another dtype than its factors
        dtypes = [a for a in (*args, kwargs.pop("out_dtype", None)) if isinstance(a, torch.dtype)]
        product = torch.mm if name == "mm" else torch.addmm
        result = product(*(t.to(*dtypes) for t in tensors), **kwargs).to(args[0].device)
        return result if out is None else out.copy_(result)


def main(argv=None):
    """Launch everything; the sanitizer reports errors by its own exit status."""
    parser = argparse.ArgumentParser(prog="python -m lib.measure.sanitize")
    parser.add_argument("--op", choices=[*registry.OPS], help="one op; default: all")
    parser.add_argument("--without-cublas", action="store_true", help="its products by the CPU")
    options = parser.parse_args(argv)
    if not machine.HAS_GPU:
        raise SystemExit(
            "sanitize needs a GPU; with none, the tests run every kernel under the checkers"
        )
    products = ProductsOnTheCpu() if options.without_cublas else contextlib.nullcontext()
    # This mode is to see products, not ops: those would be called in place of each version and plan
    straight = mock.patch.object(host, "modes", int)
    # backward passes in this thread, where the products are replaced
    with products, straight, torch.autograd.set_multithreading_enabled(False):
        for op in [registry.find(options.op)] if options.op else registry.OPS.values():
            for label, configured in op.all_configured().items():
                _launch_all(configured, label)
            for label in op.plans:
                _launch_all(op.configured().planned(label), label)


def _launch_all(op, label):
    for name, version in op.all_versions().items():
        for shape in op.odd_shapes:
            for dtype in op.dtypes:
                inputs = op.inputs(shape, dtype, machine.device())
                ys = outputs(version(*inputs))
                torch.autograd.grad([y.sum() for y in ys], leaves(inputs))
        torch.cuda.synchronize()
        print(op.name, label, name, "ran")


if __name__ == "__main__":
    main()
