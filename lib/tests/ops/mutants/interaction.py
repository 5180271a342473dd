"""Mutants of lib/ops/interaction.py."""

from lib.measure.mutants import mutants_in

MUTANTS = mutants_in("""
# all pairs one place on
- high % 8, (dim, 0))
+ high % 8, (dim + 1, 0))
# other pairs, off the diagonal squares
- low % 8 * 8 + high % 8
+ high % 8 * 8 + low % 8
# squares as if there were always 32 vectors
- square = low // 8 * (block_f // 8) + high // 8
+ square = low // 8 * 4 + high // 8
# the first sample's pairs for all that are worked on together
- rows = (row + torch.arange(samples)[:, None] * block_f**2)
+ rows = (row + torch.arange(samples)[:, None] * 0)
# squares transposed, and with them what is not symmetric: the order of the pairs
- squares = tl.permute(squares, (0, 1, 3, 2, 4))
+ squares = tl.permute(squares, (0, 1, 3, 4, 2))
# columns taken for vectors
- tl.permute(rows, (1, 0, 2, 4, 3, 5)), (SAMPLES
+ tl.permute(rows, (1, 0, 4, 2, 3, 5)), (SAMPLES
# the last table forgotten
-     mask = (sample < left) & (f <= TABLES) & (d < DIM)
-     if
+     mask = (sample < left) & (f < TABLES) & (d < DIM)
+     if
# the mask of the columns dropped
-     mask = (sample < left) & (f <= TABLES) & (d < DIM)
-     if
+     mask = (sample < left) & (f <= TABLES)
+     if
# samples read after the last
-     mask = (sample < left) & (f <= TABLES) & (d < DIM)
-     if
+     mask = (f <= TABLES) & (d < DIM)
+     if
# tables as if contiguous
- * stride_eb + table * stride_et +
+ * stride_eb + table * DIM +
# the embeddings' column stride forgotten
- stride_et + d64 * stride_ed
+ stride_et + d64
# dense read as if contiguous
- (sample64 * stride_db + d64 * stride_dd + f * 0)
+ (sample64 * DIM + d64 + f * 0)
# y's part of dense as if dense were contiguous
- (own_sample * stride_db + own_d * stride_dd)
+ (own_sample * DIM + own_d)
# dense of the first sample alone
- y_ptr + first * ROW + (own_sample * ROW + own_d), own, mask=is_own
+ y_ptr + first * ROW + (own_sample * ROW + own_d), own, mask=is_own & (own_sample == 0)
# mixed dtypes: no dense vector
- mask & (f == 0), other=0.0).to(OPERAND)
+ mask & (f == 1), other=0.0).to(OPERAND)
# int32 samples forward
- from 8 GiB of float32 on
-     first = tl.program_id(0).to(tl.int64)
+ from 8 GiB of float32 on
+     first = tl.program_id(0)
# int32 samples backward
- as forward
-     first = tl.program_id(0).to(tl.int64)
+ as forward
+     first = tl.program_id(0)
# forward, the first samples again and again
- following, next_left, sample, f, d
+ first, left, sample, f, d
# backward, the first samples again and again
- dy_ptr + following * ROW
+ dy_ptr + first * ROW
# floor where ceil was meant: the last samples forgotten
- return (host.cdiv(n_samples, plan.samples * trips),)
+ return (n_samples // (plan.samples * trips),)
# slopes of a pair for its first vector alone
- place[low, high] = place[high, low] = dim
+ place[low, high] = dim
# slopes one place on
- dim + torch.arange(len(low))
+ dim + 1 + torch.arange(len(low))
# slopes beside other vectors
-     place = place[:, (k // (4 * pack) * pack + k % pack) * 4 + k // pack % 4]
-
+
# each vector paired with itself, by the first number of dy
- rows = torch.where(place >= 0, rows, block_y - 1)
+ rows = torch.where(place >= 0, rows, 0)
# no place for zeros where rows fill a power of two
- plan.samples * (dim + _n_pairs(embeddings)) + 1)
+ plan.samples * (dim + _n_pairs(embeddings)))
# dy read as if contiguous: a gradient of strides 0
- dy.contiguous(), dense
+ dy, dense
# dense's own gradient forgotten
-             grad += tl.where(f == 0, own.to(COMPUTE), 0.0)
-
+
# dense's own gradient in other columns
- own_d = column % 8 * 2 + column // 8
+ own_d = column
# gradients one table on
- offsets = (out_sample * TABLES + out_vector - 1) * DIM + out
+ offsets = (out_sample * TABLES + out_vector) * DIM + out
# float32 rounded to TF32
- precision: str = "tf32x3"
+ precision: str = "tf32"
# float32 rounded to bfloat16
- "OPERAND": _OPERANDS.get(dtype, compute)
+ "OPERAND": tl.bfloat16 if dtype.itemsize == 4 else _OPERANDS.get(dtype, compute)
# mixed dtypes: y in that of dense
-     dtype = host.dtype_of_sum(dense.dtype, embeddings.dtype)
+     dtype = dense.dtype
# a copy to the GPU in every call
- sources = _sources(*where, dense.device)
+ sources = _sources.__wrapped__(*where, dense.device)
# a second derivative that is wrong in silence
-     @host.once
-
+
# rows after the last sample
- tl.store(ptr + place, rows, mask=place < left * ROW)
+ tl.store(ptr + place, rows, mask=place < SAMPLES * ROW)
# rows of dy after the last
- rows = tl.load(ptr + place, mask=place < left * ROW, other=0.0)
+ rows = tl.load(ptr + place, mask=place < SAMPLES * ROW, other=0.0)
# int32 samples of a program
- sample64, table, d64 = sample.to(tl.int64),
+ sample64, table, d64 = sample,
# int32 tables
- f.to(tl.int64) - 1
+ f - 1
# samples after the last, where some are there
- tl.maximum(tl.minimum(n_samples - first, SAMPLES), 0)
+ tl.minimum(n_samples - first + SAMPLES - 1, SAMPLES)
# DLRM's order taken for the one here
- second, first = torch.tril_indices(
+ first, second = torch.triu_indices(
""")
