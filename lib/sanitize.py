"""Every kernel of lib.ops once, forward and backward, small and odd shapes: what compute-sanitizer watches.

`make sanitize` runs this under memcheck and racecheck, `make sanitize OP=matmul` for one op. Needs a GPU.
"""

import argparse

from lib import machine, suite
from lib.bench import outputs

import torch


def main(argv=None):
    """Launch everything; an error of the sanitizer is its own exit status."""
    parser = argparse.ArgumentParser(prog="python -m lib.sanitize")
    parser.add_argument("--op", choices=[*suite.OPS], help="one op; default: all")
    name = parser.parse_args(argv).op
    if not machine.HAS_GPU:
        raise SystemExit(
            "sanitize needs a GPU; with none, the tests run every kernel under the checkers"
        )
    for op in [suite.find(name)] if name else suite.OPS.values():
        for label in op.configurations:
            _launch_all(op.configured(label), label)


def _launch_all(op, label):
    for name, version in op.all_versions().items():
        for shape in op.odd_shapes:
            for dtype in op.dtypes:
                inputs = op.inputs(shape, dtype, machine.device())
                leaves = [i for i in inputs if i.requires_grad]
                ys = outputs(version(*inputs))
                torch.autograd.grad([y.sum() for y in ys], leaves)
        torch.cuda.synchronize()
        print(op.name, label, name, "ran")


if __name__ == "__main__":
    main()
