"""The drawing of walls in notebook 08: each of its rows is what Inductor writes."""

from lib.course import ops_drawn
from lib.nogpu import inductor

import pytest
import torch
import triton
import triton.language as tl

OPTION = "epilogue_fusion_user_defined_triton_kernel"


@triton.jit
def _square_kernel(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x * x, mask=mask)


_KERNEL = triton.JITFunction(getattr(_square_kernel, "fn", _square_kernel))


def _launch(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(_KERNEL)[(2,)](x, y, x.numel(), BLOCK_SIZE=1024)
    return y


_opaque = torch.library.custom_op(
    "drawn::opaque", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor"
)
_opaque.register_fake(torch.empty_like)
_visible = torch.library.triton_op("drawn::visible", _launch, mutates_args=())


@pytest.mark.parametrize(
    ("row", "op", "options"),
    [(0, _opaque, {}), (1, _visible, {}), (2, _visible, {OPTION: True}), (3, torch.square, {})],
)
def test_a_row_has_the_kernels_that_are_written(row, op, options):
    if options and not hasattr(torch._inductor.config, OPTION):
        pytest.skip("this torch has no such option")
    code = inductor.output_code(lambda x: op(2 * x) + 1, torch.empty(64, 32), options=options)
    _, drawn, passes = ops_drawn._LANES[row]
    assert len(inductor.kernels(code)) == len(drawn)
    assert passes == f"{2 * len(drawn)} passes"
