"""Mutants of lib/ops/gelu.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# sigmoid as e/(e + 1): NaN for x > 10
- return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
+ u = tl.exp(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
+     return z * (u / (u + 1.0))
# a wrong constant
- return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
+ return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.44715 * z * z)))
# a constant cut off
- return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
+ return z / (1.0 + tl.exp(-1.5957 * z * (1.0 + 0.044715 * z * z)))
# the wrong sign in the exponent
- return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
+ return z / (1.0 + tl.exp(1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))
# a wrong sign in the gradient
- return s + z * (e * t * t)
+ return s - z * (e * t * t)
# the gradient of -x as that of x: abs, and no more
- s = tl.where(z < 0, e * t, t)
+ s = t
# x³ without its factor 3 in the gradient
- 0.2140644488178008
+ 0.07135481627260025
# 1 - s, which has lost its digits where s is nearly 1
- z * (e * t * t) *
+ z * (s * (1.0 - s)) *
# erf: the density without x
- cdf + z * (0.3989422804014327
+ cdf + (0.3989422804014327
# erf: e to the power where 2 belongs
- else tl.exp2(-0.7213475204444817 * z * z)
+ else tl.exp(-0.7213475204444817 * z * z)
# erf of 16 bits: e to the power where 2 belongs
- e = fast_exp2(-0.7213475204444817 * z * z) if FAST
+ e = fast_exp(-0.7213475204444817 * z * z) if FAST
# erf of 16 bits: the polynomial cut off
- p = 0.08356428145807278 + t * (0.2002813387075429 - t * 0.09064265813592055)
+ p = 0.08356428145807278 + t * 0.2002813387075429
# erf of 16 bits: a constant of the other polynomial
- (0.375 if ROUGH else 0.3)
+ 0.3
# erf of 16 bits: a gradient as rough as the result
- cdf, e = normal(z, NARROW)
+ cdf, e = normal(z, NARROW, NARROW)
# erf: the rough polynomial for float32
- cdf, _ = normal(z, NARROW, NARROW)
+ cdf, _ = normal(z, True, True)
# erf: 16 bits taken for 32
-     NARROW: tl.constexpr = y_ptrs.dtype.element_ty.primitive_bitwidth == 16
+     NARROW: tl.constexpr = y_ptrs.dtype.element_ty.primitive_bitwidth == 32
# erf: digits lost where Φ is near 0
- cdf = tl.where(z < 0, tail, 1.0 - tail)
+ cdf = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))
# erf: |z| where z belongs
- cdf = tl.where(z < 0, tail, 1.0 - tail)
+ cdf = tail
# 0·inf in the gradient, far out
- a = tl.minimum(tl.abs(z), 1e3)
+ a = tl.abs(z)
# both forms the same
- y = device.gelu_tanh(x) if TANH else device.gelu(x, NARROW)
+ y = device.gelu_tanh(x)
# the mask of the last tile dropped
- _fwd_tile(x_ptrs, y_ptrs, (rows < n_rows) & (cols < n_cols), TANH, COMPUTE)
+ _fwd_tile(x_ptrs, y_ptrs, None, TANH, COMPUTE)
# the last rows taken for a full tile
- full = (row + BLOCK_M <= n_rows) & (col + BLOCK_N <= n_cols)
+ full = col + BLOCK_N <= n_cols
# int32 offsets
- row, col = pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N
+ row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
# strided tensors taken for rows
-     if all([t.is_contiguous() for t in tensors]):
+     if True:
# the strides of the result used for all: a gradient of strides 0
- for s in (t.stride(0) if n_rows > 1 else 0, t.stride(1))]
+ for s in (tensors[-1].stride(0) if n_rows > 1 else 0, tensors[-1].stride(1))]
# dy read by the strides of x
- dy_ptrs = dy_ptr + rows * stride_dym + cols * stride_dyn
+ dy_ptrs = dy_ptr + rows * stride_xm + cols * stride_xn
# x rounded to bfloat16 on the way
- x = tl.load(x_ptrs, mask=mask).to(COMPUTE)
-     y =
+ x = tl.load(x_ptrs, mask=mask).to(tl.bfloat16).to(COMPUTE)
+     y =
""")
