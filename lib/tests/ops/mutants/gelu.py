"""Mutants of lib/ops/gelu.py."""

from lib.measure.mutants import Mutant

_TANH = "return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))"

MUTANTS = [
    Mutant(
        _TANH,
        "u = tl.exp(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))\n    return z * (u / (u + 1.0))",
        "sigmoid as e/(e + 1): NaN for x > 10",
    ),
    Mutant(_TANH, _TANH.replace("0.044715", "0.44715"), "a wrong constant"),
    Mutant(_TANH, _TANH.replace("1.5957691216057308", "1.5957"), "a constant cut off"),
    Mutant(_TANH, _TANH.replace("exp(-", "exp("), "the wrong sign in the exponent"),
    Mutant(
        "return s + z * (e * t * t)", "return s - z * (e * t * t)", "a wrong sign in the gradient"
    ),
    Mutant(
        "s = tl.where(z < 0, e * t, t)",
        "s = t",
        "the gradient of -x as that of x: abs, and no more",
    ),
    Mutant("0.2140644488178008", "0.07135481627260025", "x³ without its factor 3 in the gradient"),
    Mutant(
        "z * (e * t * t) *",
        "z * (s * (1.0 - s)) *",
        "1 - s, which has lost its digits where s is nearly 1",
    ),
    Mutant(
        "cdf + z * (0.3989422804014327", "cdf + (0.3989422804014327", "erf: the density without x"
    ),
    Mutant(
        "e = tl.exp2(-0.7213475204444817 * z * z)",
        "e = tl.exp(-0.7213475204444817 * z * z)",
        "erf: e to the power where 2 belongs",
    ),
    Mutant(
        "cdf = tl.where(z < 0, tail, 1.0 - tail)",
        "cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))",
        "erf: digits lost where Φ is near 0",
    ),
    Mutant("cdf = tl.where(z < 0, tail, 1.0 - tail)", "cdf = tail", "erf: |z| where z belongs"),
    Mutant("a = tl.minimum(tl.abs(z), 1e3)", "a = tl.abs(z)", "0·inf in the gradient, far out"),
    Mutant(
        "y = device.gelu_tanh(x) if TANH else device.gelu(x)",
        "y = device.gelu_tanh(x)",
        "both forms the same",
    ),
    Mutant(
        "_fwd_tile(x_ptrs, y_ptrs, (rows < n_rows) & (cols < n_cols), TANH, COMPUTE)",
        "_fwd_tile(x_ptrs, y_ptrs, None, TANH, COMPUTE)",
        "the mask of the last tile dropped",
    ),
    Mutant(
        "full = (row + BLOCK_M <= n_rows) & (col + BLOCK_N <= n_cols)",
        "full = col + BLOCK_N <= n_cols",
        "the last rows taken for a full tile",
    ),
    Mutant(
        "row, col = pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N",
        "row, col = pid_m * BLOCK_M, pid_n * BLOCK_N",
        "int32 offsets",
    ),
    Mutant(
        "    if all([t.is_contiguous() for t in tensors]):",
        "    if True:",
        "strided tensors taken for rows",
    ),
    Mutant(
        "for s in (t.stride(0) if n_rows > 1 else 0, t.stride(1))]",
        "for s in (tensors[-1].stride(0) if n_rows > 1 else 0, tensors[-1].stride(1))]",
        "the strides of the result used for all: a gradient of strides 0",
    ),
    Mutant(
        "dy_ptrs = dy_ptr + rows * stride_dym + cols * stride_dyn",
        "dy_ptrs = dy_ptr + rows * stride_xm + cols * stride_xn",
        "dy read by the strides of x",
    ),
    Mutant(
        "x = tl.load(x_ptrs, mask=mask).to(COMPUTE)\n    y =",
        "x = tl.load(x_ptrs, mask=mask).to(tl.bfloat16).to(COMPUTE)\n    y =",
        "x rounded to bfloat16 on the way",
    ),
]
