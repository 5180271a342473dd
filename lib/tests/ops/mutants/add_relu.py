"""Mutants of lib/ops/add_relu.py."""

from lib.measure.mutants import Mutant
from lib.tests.ops.mutants._shared import FOLD, FOLD_CUDA, RUN

MUTANTS = [
    Mutant(
        "    dtype = _dtype_of_sum(x.dtype, bias.dtype)\n    y = ",
        "    dtype = x.dtype\n    y = ",
        "mixed dtypes: y in that of x",
    ),
    Mutant(
        "    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, mask, COMPUTE)\n",
        "    _add_relu_tile(x_ptrs, bias[None, :], y_ptr + offsets, (rows < n_rows)[:, None], COMPUTE)\n",
        "the mask of the columns dropped from the store",
    ),
    Mutant("rows = pid_m.to(tl.int64) * BLOCK_M +", "rows = pid_m * BLOCK_M +", "int32 rows of x"),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program +",
        "rows = pid_m * rows_per_program +",
        "int32 rows of dy",
    ),
    Mutant(
        "x_ptr + rows[:, None] * stride_xm + cols[None, :] * stride_xn",
        "x_ptr + rows[:, None] * stride_xm + cols[None, :]",
        "the column stride of x forgotten",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = offsets",
        "dy read as if contiguous: a gradient of strides 0",
    ),
    Mutant("y = tl.where(z < 0, 0.0, z)", "y = tl.maximum(z, 0.0)", "a relu that drops NaN"),
    Mutant("dx = tl.where(y <= 0, 0.0, dy)", "dx = tl.where(y < 0, 0.0, dy)", "gradient 1 at zero"),
    Mutant(
        "z = tl.load(x_ptrs, mask=mask).to(COMPUTE) +",
        "z = tl.load(x_ptrs, mask=mask).to(tl.float16).to(COMPUTE) +",
        "x rounded to float16 on the way",
    ),
    Mutant(".to(COMPUTE) + bias.to(", ".to(COMPUTE) - bias.to(", "the sign of the bias"),
    Mutant(
        "fold, bias.contiguous(), *matrices",
        "fold, bias, *matrices",
        "a strided bias read as if contiguous",
    ),
    Mutant(
        "        total += dx.to(COMPUTE)",
        "        total = dx.to(COMPUTE)",
        "only the last rows summed",
    ),
    Mutant(
        "    @_once\n",
        "    @staticmethod\n",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "strips, n_tiles = _cdiv(n_rows, rows_per_program),",
        "strips, n_tiles = max(1, n_rows // rows_per_program),",
        "floor where ceil was meant: the last strip of rows forgotten",
    ),
    Mutant(
        "y.new_zeros(y.shape[-1], dtype=dtypes[1]) if has_dbias else None",
        "None",
        "no gradient of the bias where x is empty",
    ),
    Mutant(
        "alone = (strips * fold, y.shape[1]), strips * fold == 1",
        "alone = (strips * fold, y.shape[1]), strips == 1",
        "partial sums of folded rows in the dtype of dbias",
    ),
    Mutant(
        "        sums += last_dx.to(COMPUTE)\n",
        "        sums = last_dx.to(COMPUTE)\n",
        "folded rows: dbias of the last elements alone",
    ),
    Mutant(
        "    x = x if x.stride(1) == 1 else x.contiguous()  # the",
        "    # the",
        "CUDA: columns with gaps",
    ),
    Mutant(
        "    x, bias = x.to(y.dtype), bias.to(y.dtype)",
        "    pass",
        "CUDA: mixed dtypes as they are",
    ),
    *RUN,
    *FOLD,
    *FOLD_CUDA,
]
