"""Mutants of lib/ops/linear_cross_entropy.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# a label of V is one of what memory held
- in_range = (label >= 0) & (label < n_cols)
+ in_range = (label >= 0) & (label <= n_cols)
# a negative label is read before the row
- in_range = (label >= 0) & (label < n_cols)
+ in_range = label < n_cols
# sums of earlier tiles relative to another maximum
- total = total * tl.exp(top - shift) + 
+ total = total + 
# NaN after a tile of -inf alone
- shift = tl.where(new_top == -float("inf"), 0.0, new_top)
+ shift = new_top
# what lies behind a row is counted
- z = tl.where(cols < n_cols, _capped(z, SOFTCAP), -float("inf"))
+ z = _capped(z, SOFTCAP)
# a loss near 0 has lost its digits
- loss = log_total - (1.0 - SMOOTHING) * (of_label - top)
+ loss = lse - (1.0 - SMOOTHING) * of_label - SMOOTHING * top
# ignored labels have a loss
- tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))
+ tl.store(losses_ptr + row, loss)
# ignored labels have a gradient
- dz = tl.where(ignored | (cols >= n_cols), 0.0, dz * scale)
+ dz = tl.where(cols >= n_cols, 0.0, dz * scale)
# an ignored row of NaN has a gradient of NaN
- dz = tl.where(ignored | (cols >= n_cols), 0.0, dz * scale)
+ dz = tl.where(cols >= n_cols, 0.0, dz * tl.where(ignored, 0.0, scale))
# a label out of range has a gradient
- scale = tl.where(in_range, tl.full((), 1.0, COMPUTE), float("nan"))
+ scale = tl.full((), 1.0, COMPUTE)
# the smoothed part of the gradient forgotten
-                 dz -= SMOOTHING / tl.cast(n_cols, COMPUTE)
+                 dz -= 0.0
# the label's own part not smoothed
- dz - (1.0 - SMOOTHING), dz)
+ dz - 1.0, dz)
# the slope of the z-loss without its 2
- slope += 2.0 * Z_LOSS
+ slope += Z_LOSS
# the soft cap's slope forgotten
- dz *= 1.0 - t * t
+ dz *= 1.0
# the label's logit is not capped
-     of_label = _capped(of_label, SOFTCAP)
-
+
# tanh without digits near 0
- t = tl.where(s < 0.03, a + a * s * series, t)
+ t = t * 1.0
# tanh of negative numbers is positive
- t = tl.where(a < 0, -t, t)
+ t = t * 1.0
# rows that begin anywhere, unaligned
- pitch = host.cdiv(n_cols, 16) * 16
+ pitch = n_cols
# each chunk with the labels of the first
- (logits, labels[rows], *(
+ (logits, labels, *(
# dweight of the last chunk alone
- beta=int(start > 0))
+ beta=0)
# dx of the last columns alone
- beta=int(cols.start > 0))
+ beta=0)
# the last columns forgotten
- for a, b in ((0, whole), (whole, n_cols)) if a < b]
+ for a, b in ((0, whole),) if a < b]
# chunks of so few rows that W is what costs
- n_rows // _FEWEST_ROWS))
+ n_rows // 128))
# dweight rounded chunk after chunk where it is to be float32
- summed_in = host.sum_dtype(x.dtype) if plan.wide else _dweight_dtype(x.dtype)
+ summed_in = _dweight_dtype(x.dtype)
# dweight overflows in float16
- return torch.float32 if dtype == torch.float16 else dtype
+ return dtype
# gradients of a mean over ignored labels too
- scale = dloss / _n_counted(labels, options).clamp(min=1)
+ scale = dloss / labels.numel()
# gradients of NaN where all labels are ignored
- .clamp(min=1)
+
# an infinity upstream reaches the rows of others
- .nan_to_num(0.0, 0.0, 0.0)
+
# 0/0 where no gradient comes from upstream
- scale = torch.where(largest > 0, largest, 1.0)
+ scale = largest
# float16: 1/N from upstream underflows
- scale = torch.where(largest > 0, largest, 1.0)
+ scale = torch.ones_like(largest)
# a second backward scales what it gave away
-         ctx.gave_away = True
-
+
# who changes the gradient breaks the second backward
- y = t.data if
+ y = t if
# a frozen weight costs a product
- has_grads = [needed and options.reduction
+ has_grads = [options.reduction
# weights of classes are in the loss alone
- scales = None if weights is None else _relative(weights)[0]
+ scales = None
# the largest weight of a class forgotten
- scale = dloss * largest
+ scale = dloss
# a mean by the number of labels, whatever their weights
- (_n_counted(labels, options) if weights is None else weights.sum())
+ _n_counted(labels, options)
# ignored labels have a weight
- return weights.masked_fill(labels == options.ignore_index, 0.0)
+ return weights
# the first columns' bias for the last, too
- torch.addmm(bias[cols], part
+ torch.addmm(bias[: cols.stop - cols.start], part
# dbias of the last chunk alone
- dbias += logits.sum(0, dtype=dbias.dtype)
+ dbias.copy_(logits.sum(0, dtype=dbias.dtype))
# losses all in one row
- return losses.view(labels.shape), *grads
+ return losses, *grads
# a second derivative that is wrong in silence
-     @host.once
-
+
# behind the last column what memory held
- dz = tl.where(ignored | (cols >= n_cols), 0.0, dz * scale)
+ dz = tl.where(ignored, 0.0, dz * scale)
# 2.0 taken for 2, which it equals
- plain = tuple(options)
+ plain = options
""")
