"""Every kernel of lib.ops once, forward and backward, small and odd shapes: what compute-sanitizer watches.

`make sanitize` runs this under memcheck and racecheck. Needs a GPU.
"""

from lib import machine, suite
from lib.bench import outputs

import torch


def main():
    """Launch everything; an error of the sanitizer is its own exit status."""
    if not machine.HAS_GPU:
        raise SystemExit(
            "sanitize needs a GPU; with none, the tests run every kernel under the checkers"
        )
    for op in suite.OPS.values():
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
