"""The table of the course's ops: what tests, benchmarks, ladders and the README's picture are made from.

One entry per file of lib/ops, under the file's name.
"""

import dataclasses
from collections.abc import Callable

from lib.ops import add_relu

import torch


@dataclasses.dataclass(frozen=True)
class Op:
    """One op: its definition, its versions, and the numbers that timing needs.

    inputs(shape, dtype, device) -> tensors, all with requires_grad.
    bytes_moved(shape, itemsize, gradients) -> the fewest bytes any version must read and write.
    flops(shape, gradients) -> floating-point operations.
    """

    name: str
    notebook: str
    title: str
    eager: Callable
    versions: dict
    registered: tuple
    inputs: Callable
    bytes_moved: Callable
    flops: Callable
    bench_shapes: tuple
    small_shape: tuple
    sources: tuple
    dtypes: tuple = (torch.float32, torch.bfloat16, torch.float16)


def _rows_and_bias(shape, dtype, device, seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    bias = torch.randn(shape[-1:], dtype=dtype, device=device, generator=generator)
    return x.requires_grad_(), bias.requires_grad_()


def _numel(shape):
    return torch.Size(shape).numel()


ADD_RELU = Op(
    name="add_relu",
    notebook="30_add_relu",
    title="relu(x + bias)",
    eager=add_relu.add_relu_eager,
    versions={"triton": add_relu.add_relu_triton, "cuda": add_relu.add_relu_cuda},
    registered=(add_relu.add_relu_op,),
    inputs=_rows_and_bias,
    # forward: read x, write y; backward: read dy and y, write dx
    bytes_moved=lambda shape, itemsize, gradients: (
        (5 if gradients else 2) * _numel(shape) * itemsize
    ),
    flops=lambda shape, gradients: (4 if gradients else 2) * _numel(shape),
    bench_shapes=((65536, 4096), (8192, 32768), (1048576, 64), (524288, 781)),
    small_shape=(257, 781),
    sources=("lib/ops/add_relu.py", "lib/ops/add_relu.cu"),
)

OPS = {op.name: op for op in (ADD_RELU,)}


def find(name):
    """The Op called `name`; ValueError lists the names there are."""
    if name not in OPS:
        raise ValueError(f"no op is called {name!r}; there are: {', '.join(OPS)}")
    return OPS[name]
