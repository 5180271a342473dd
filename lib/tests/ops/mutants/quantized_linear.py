"""Mutants of lib/ops/quantized_linear.py; those of what products share are in matmul.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# the numbers of a pair in turn
- low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
+ high, low = pair.to(tl.int16), (pair >> 16).to(tl.int16)
# quarters two and three in turn
- tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3])), (0, 2, 3, 1))
+ tl.join(tl.join(q[0], q[1]), tl.join(q[2], q[3])), (0, 2, 3, 1))
# eight neighbours in a word
- tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3])), (0, 2, 3, 1))
+ tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3])), (0, 1, 2, 3))
# another order of packing and of the definition
- torch.tensor([0, 16], dtype=torch.int32, device=device)
+ torch.tensor([16, 0], dtype=torch.int32, device=device)
# the last number of a word with the sign of the word
- numbers = ((words >> _shifts(packed.device)) & 15).flatten(2)
+ numbers = (words >> _shifts(packed.device)).flatten(2)
# float32: the high number with its sign
- numbers = tl.join(pair & 15, pair >> 16).to(DTYPE)
+ numbers = tl.join(pair & 15, words >> (16 + 4 * i)).to(DTYPE)
# bfloat16 centred at 7
- 1032.0 if is_half else 136.0
+ 1032.0 if is_half else 135.0
# float16 with the bits of bfloat16
- pair |= 0x64006400 if is_half else 0x43004300
+ pair |= 0x43004300
# with zero points no room below
- (0x66006600 if is_half else 0x43404340)
+ (0x64006400 if is_half else 0x43004300)
# float16: zero points centred elsewhere
- 1536.0 if is_half else 192.0
+ 1024.0 if is_half else 192.0
# zero points added with an or
- pair += ((0x66006600
+ pair |= ((0x66006600
# the zero point of the low number alone
- zero * 0x00010001
+ zero
# no zero points in float32
- numbers -= 8 if zero is None else zero[:, None, None].to(DTYPE)
+ numbers -= 8
# zero points of the first group for all
- zero = tl.load(zeros_ptr + at, mask=mask, other=0)
+ zero = tl.load(zeros_ptr + at % mask.shape[0], mask=mask, other=0)
# scales of the group before
- at = step * n_cols + cols  # of int8
+ at = tl.maximum(step - 1, 0) * n_cols + cols  # of int8
# scales read in the order of rows of W
- at = step * n_cols + cols  # of int8
+ at = cols * tl.cdiv(n_inner, BLOCK_K) + step  # of int8
# a part begins with the scales of the first group
- at = step * n_cols + cols  # of int8
+ at = (step - start) * n_cols + cols  # of int8
# the sum so far scaled again
- part = device.dot(x, w.T, tl.zeros_like(total), PRECISION, COMPUTE)
-                 total += part
+ part = device.dot(x, w.T, total, PRECISION, COMPUTE)
+                 total = part
# scaled twice
- w = (w * scale.to(DTYPE)[:, None]).to(DTYPE)
+ w = (w * scale.to(DTYPE)[:, None] * scale.to(DTYPE)[:, None]).to(DTYPE)
# int8 not scaled
- total *= tl.load(scales_ptr + cols, mask=col_mask, other=0.0)
+ total *= tl.load(scales_ptr + cols, mask=col_mask & (cols < 0), other=1.0)
# int8: columns past K added
- x = tl.load(x_ptrs, mask=row_mask & inside, other=0.0)
-             packed = tl.load(packed_ptrs, mask=col_mask[:, None] & inside, other=0)
+ x = tl.load(x_ptrs, mask=row_mask, other=0.0)
+             packed = tl.load(packed_ptrs, mask=col_mask[:, None], other=0)
# rows of W past N read
- packed = tl.load(packed_ptrs, mask=col_mask[:, None], other=0)
+ packed = tl.load(packed_ptrs)
# x and W step by words
- x_ptrs += BLOCK_K
-         packed_ptrs += BLOCK_K // PER_WORD
+ x_ptrs += BLOCK_K
+         packed_ptrs += BLOCK_K
# W read as if contiguous
- packed_ptrs = packed_ptr + cols[:, None] * stride_pn + words[None, :]
-     row_mask
+ packed_ptrs = packed_ptr + cols[:, None] * (n_inner // PER_WORD) + words[None, :]
+     row_mask
# int32 rows
- rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
-     cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
+ rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
+     cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
# every part takes all of K
- tl.minimum(start + steps_per_part, tl.cdiv(n_inner, BLOCK_K))
+ tl.cdiv(n_inner, BLOCK_K)
# the last step forgotten
- tl.minimum(start + steps_per_part, tl.cdiv(n_inner, BLOCK_K))
+ tl.minimum(start + steps_per_part, n_inner // BLOCK_K)
# parts written to one place
- y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
+ pass
# one part left out
- for part in range(1, n_parts):
+ for part in range(1, n_parts - 1):
# each part has the bias
- outs, how = (None, parts, None), "identity"
+ outs, how = (bias, parts, None), "identity"
# each part is activated
- outs, how = (None, parts, None), "identity"
+ outs, how = (None, parts, None), how
# parts in 16 bits
- dtype=host.sum_dtype(y.dtype), device
+ dtype=y.dtype, device
# z of parts not written
- _sum_parts_kernel, (host.cdiv(y.numel(), 512),), (parts, bias, y, z),
+ _sum_parts_kernel, (host.cdiv(y.numel(), 512),), (parts, bias, y, None),
# W whole: scales of the first group
- at = cols if PER_WORD == 1 else step * n_cols + cols
+ at = cols
# W whole: not scaled
- w = _numbers(packed, zeros_ptr, at, col_mask, COMPUTE) * scale[:, None]
+ w = _numbers(packed, zeros_ptr, at, col_mask, COMPUTE)
# W whole: columns past K written into the next row
-     mask = col_mask[:, None] & (inner < n_inner)[None, :]
+     mask = col_mask[:, None]
# W whole: rows past N written
-     mask = col_mask[:, None] & (inner < n_inner)[None, :]
+     mask = (inner < n_inner)[None, :]
# W whole: packed read as if contiguous
- packed = tl.load(packed_ptr + cols[:, None] * stride_pn + words[None, :], mask=mask, other=0)
+ packed = tl.load(packed_ptr + cols[:, None] * (n_inner // PER_WORD) + words[None, :], mask=mask, other=0)
# W whole: only the first steps along K
- (host.cdiv(n_cols, _ROWS_WRITTEN) * n_steps,), (*weight, w),
+ (n_steps,), (*weight, w),
# whole: no bias
- torch.addmm(bias, x, w, out=product)
+ torch.mm(x, w, out=product)
# whole: z overwritten
- product = host.for_cublas(x), _whole(*weight, x.dtype).t(), y if z is None else z
+ product = host.for_cublas(x), _whole(*weight, x.dtype).t(), y
# whole: bias added twice
- _finish_parts(product, 1, None, y, None, activation)
+ _finish_parts(product, 1, bias, y, None, activation)
# whole: in float32 too, by units that are slower than 3xTF32
- if kind == "half" and n_rows > _MOST_ROWS[kind_of_weight]:
+ if n_rows > _MOST_ROWS[kind_of_weight]:
# whole: from one row less on
- n_rows > _MOST_ROWS[kind_of_weight]
+ n_rows >= _MOST_ROWS[kind_of_weight]
# a strided x read side by side
- return t if t.stride(1) == 1 else t.contiguous()
+ return t
# strided scales read side by side
- scales, zeros = (t if t is None else t.contiguous() for t in (scales, zeros))
+ pass
# the plan that is given ignored
- plan = plan or _plan(n_rows, n_cols, n_steps, x.dtype, x.device, weight.kind)
+ plan = _plan(n_rows, n_cols, n_steps, x.dtype, x.device, weight.kind)
# W saved for nothing
- weight = weight if ctx.needs_grad[0] or all_inputs else (None, None, None)
+ pass
# x saved for nothing
- x, bias = (x, bias) if all_inputs else (None, None)
+ pass
# z saved for relu
- activation, plan, activation in host.OF_Z)
+ activation, plan, True)
# trained scales taken
- if ctx.needs_input_grad[2]:
+ if False:
# a second derivative wrong in silence
-     @host.once
+     @staticmethod
# scales rounded to 16 bits under autocast
- x, bias = host.autocast(x, bias)
+ x, scales, bias = host.autocast(x, scales, bias)
# quantize: a step from the largest number, not the largest size
- torch.maximum(high, -low)
+ high
# quantize: scales not those that are stored
- steps = torch.where(scales == 0, 1, scales).to(wide.dtype)
+ steps = (high - low if zero_points else torch.maximum(high, -low)) / most
# quantize: groups of zeros are NaN
- steps = torch.where(scales == 0, 1, scales).to(wide.dtype)
+ steps = scales.to(wide.dtype)
# quantize: cut, not rounded
- else torch.round(wide / steps)
+ else torch.floor(wide / steps)
# quantize: zero is no integer
- wide.amin(-1, True).clamp(max=0)
+ wide.amin(-1, True)
# quantize: symmetric numbers around 7
- else numbers + 8)
+ else numbers + 7)
# quantize: NaN taken
- if not torch.isfinite(wide).all():
+ if False:
# quantize: groups that do not divide K named late
- kind == "int4" and weight.shape[1] % group:
+ False:
# fp8 read as integers
- words = words.to(tl.float8e4nv, bitcast=True)
+ pass
# fp8 read as e5m2
- words.to(tl.float8e4nv, bitcast=True)
+ words.to(tl.float8e5, bitcast=True)
# fp8: the conversion of GPUs before Ada forgotten
- packed = packed.view(_E4M3).to(torch.float16)
+ packed = packed.to(torch.float16)
# fp8 not scaled
- if PER_WORD == 1:
-         total *=
+ if packed_ptr.dtype.element_ty == tl.int8:
+         total *=
# quantize: fp8 from whole numbers
- numbers = wide / steps if kind == "fp8" else torch.round(wide / steps)
+ numbers = torch.round(wide / steps)
# quantize: fp8 up to 240, as of another float8
- "fp8": 448}
+ "fp8": 240}
# quantize: numbers past the largest, of a scale rounded down, are not cut
- .clamp(0 if zero_points else -most, most)
+ .clamp(0 if zero_points else -2 * most, 2 * most)
# dequantize: fp8 read as integers
- packed if weight.kind == "int8" else packed.view(_E4M3)
+ packed
# fp8 with scales of int4 taken
- if packed.dtype != torch.int32:
-         fits
+ if packed.dtype == torch.int8:
+         fits
# float8 taken for words
- if dtype not in (_KINDS if label == "packed" else (torch.int8,)):
+ if dtype not in (torch.float8_e4m3fn, *(_KINDS if label == "packed" else (torch.int8,))):
# dequantize: always around 8
- numbers - (8 if zeros is None else zeros.t()[..., None])
+ numbers - 8
# packed of another kind taken
- packed.shape == (n_cols, n_inner) and n_scales == 1 and zeros is None
+ packed.shape == (n_cols, n_inner)
# words of another K taken
- and packed.shape == (n_cols, n_inner // 8)
+
# zeros of another shape taken
- (zeros is None or zeros.shape == scales.shape)
+ True
# a bias of another dtype taken
-     host.check_tensors(name, "quantized_linear_eager", **tensors)
+     host.check_tensors(name, "quantized_linear_eager", host.MIXED, **tensors)
# op: gelu's slope without z
- if saved is None and ctx.activation != "identity":
+ if False:
# op: no gradient where zeros and bias are left out
- bias is not None and ctx.needs_input_grad[4]]
+ ctx.needs_input_grad[4]]
# op: another dx than the bias asked for
- dx, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))
+ dx, dbias = grads
# the module shares the layer's bias
- linear.bias.detach().clone()
+ linear.bias.detach()
# the module has a trained bias
- linear.bias.detach().clone()
+ linear.bias.clone()
# the module's activation forgotten
- *self.weight, self.bias, self.activation)
+ *self.weight, self.bias)
# the module's zero points forgotten
- quantize(linear.weight, kind, group, zero_points), bias
+ quantize(linear.weight, kind, group), bias
""")
