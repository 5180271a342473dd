"""Mutants of lib/ops/fused_mlp.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant("db2 = db2.clone()", "db2 = db2", "two gradients in one storage"),
    # --- the whole MLP in one kernel
    Mutant(
        "for start in range(first, tl.minimum(first + units_per_program, n_hidden), BLOCK_H):",
        "for start in range(first, tl.minimum(first + 1, n_hidden), BLOCK_H):",
        "a tile of the hidden layer taken for all of it",
    ),
    Mutant(
        "z = device.dot(hidden, w2, z, PRECISION",
        "z = device.dot(hidden, w2, z * 0.0, PRECISION",
        "each tile forgets the ones before it",
    ),
    Mutant(
        "z += tl.sum(hidden.to(COMPUTE) * w2",
        "z = tl.sum(hidden.to(COMPUTE) * w2",
        "one column: each tile forgets the ones before it",
    ),
    Mutant(
        "first = tl.program_id(1) * units_per_program",
        "first = tl.program_id(1) * BLOCK_H",
        "split: parts that overlap",
    ),
    Mutant(
        "tl.minimum(first + units_per_program, n_hidden)",
        "n_hidden",
        "split: each part up to the end",
    ),
    Mutant(
        "y_ptrs = y_ptr + tl.program_id(1).to(tl.int64) * n_rows * n_cols",
        "y_ptrs = y_ptr + 0 * n_rows",
        "split: all parts in one place",
    ),
    Mutant(
        'FINAL="identity" if split else final',
        "FINAL=final",
        "split: the last function of each part, and of their sum",
    ),
    Mutant("w2, None if split else b2, out", "w2, b2, out", "split: b2 in each part"),
    Mutant("parts_ptr += n_elements", "parts_ptr += 0", "split: the first part again and again"),
    Mutant(
        "out = x.new_empty((plan.n_splits, *y.shape), dtype=wide) if split else y",
        "out = x.new_empty((plan.n_splits, *y.shape)) if split else y",
        "split: parts rounded to the dtype of x",
    ),
    Mutant("b2_ptr + offsets % n_cols", "b2_ptr + offsets * 0", "split: one bias for all columns"),
    Mutant(
        "split, wide = plan.n_splits > 1,",
        "split, wide = False,",
        "split: without the second kernel",
    ),
    Mutant("of_a_row // _LEAST_OF_A_PART)", "0)", "never split"),
    # --- sums, masks, relu
    Mutant(
        "inside = inner < n_inner - k",
        "inside = inner < n_inner",
        "the mask of the last piece of K dropped",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where(z < 0, 0.0, z)",
        "units that are not there: 0 times infinity",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where((z > 0) & (units < n_hidden)[None, :], z, 0.0)",
        "relu turns NaN into 0",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where((units >= n_hidden)[None, :], 0.0, z)",
        "no relu",
    ),
    Mutant(
        "z = tl.where(z < 0, 0.0, z)", "z = tl.maximum(z, 0.0)", "the last relu turns NaN into 0"
    ),
    Mutant(
        "z = 1.0 / (1.0 + tl.exp(-z))",
        "z = tl.exp(z) / (1.0 + tl.exp(z))",
        "sigmoid as e/(1 + e): NaN for z > 88",
    ),
    Mutant(
        "    z += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0).to(COMPUTE)[None, :]\n",
        "",
        "b1 forgotten",
    ),
    Mutant(
        "z += tl.load(b2_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]",
        "z += 0.0",
        "b2 forgotten",
    ),
    Mutant(
        "0.0, z).to(x_ptr.dtype.element_ty)",
        "0.0, z).to(tl.bfloat16).to(x_ptr.dtype.element_ty)",
        "the hidden layer rounded to bfloat16",
    ),
    Mutant(
        "tl.store(y_ptrs, device.activate(z, FINAL), mask=mask)",
        "tl.store(y_ptrs, device.activate(z, FINAL), mask=(rows < n_rows)[:, None])",
        "columns that are not there are written",
    ),
    Mutant(
        '"ONE_STEP": k <= block_k and not backward',
        '"ONE_STEP": not backward',
        "the rest of K forgotten",
    ),
    Mutant(
        "return tl.float64 if dtype == torch.float64 else tl.float32",
        "return tl.float32",
        "float64 computed in float32",
    ),
    # --- strides and offsets
    Mutant(
        "rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "int32 rows",
    ),
    Mutant(
        "units = (start + tl.arange(0, BLOCK_H)).to(tl.int64)",
        "units = start + tl.arange(0, BLOCK_H)",
        "int32 units",
    ),
    Mutant(
        "x_ptr + rows[:, None] * stride_xm + inner.to(tl.int64)[None, :] * stride_xk",
        "x_ptr + rows[:, None] * stride_xm + inner[None, :] * stride_xk",
        "int32 columns of x",
    ),
    Mutant(
        "cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)",
        "cols = start + tl.arange(0, BLOCK_N)",
        "backward: int32 columns",
    ),
    Mutant(
        "dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_ptr + rows[:, None] * n_cols + cols[None, :]",
        "dy taken for contiguous",
    ),
    Mutant(
        "w2_ptr + cols[:, None] * stride_2n + units[None, :] * stride_2h",
        "w2_ptr + cols[:, None] * n_hidden + units[None, :]",
        "backward: W2 taken for contiguous",
    ),
    Mutant(
        "_launch(chosen, out, x, w1, b1.contiguous(), w2, b2.contiguous(), final)",
        "_launch(chosen, out, x, w1, b1, w2, b2, final)",
        "biases with gaps",
    ),
    Mutant("w1, b1.contiguous(), w2, hidden", "w1, b1, w2, hidden", "backward: b1 with gaps"),
    # --- gradients
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where((rows >= n_rows)[:, None], 0.0, dh)",
        "the gradient of relu forgotten",
    ),
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where((hidden > 0) & (rows < n_rows)[:, None], dh, 0.0)",
        "NaN lets no gradient through",
    ),
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where(hidden <= 0, 0.0, dh)",
        "rows that are not there: 0 times infinity",
    ),
    Mutant("dy = dy * (saved * (1.0 - saved))", "dy = dy * saved", "a wrong gradient of sigmoid"),
    Mutant(
        "dy = tl.where(saved <= 0, 0.0, dy)",
        "dy = tl.where(saved > 0, dy, 0.0)",
        "the last relu: NaN lets no gradient through",
    ),
    Mutant("        if pid_h == 0:\n", "        if pid_m == 0:\n", "dz2 of the first rows only"),
    Mutant(
        "tl.store(partial + n_hidden + cols, tl.sum(dz2, axis=0)",
        "tl.store(partial + n_hidden + cols, dz2.to(COMPUTE).to(tl.bfloat16).to(COMPUTE).sum(axis=0)",
        "db2 from rounded numbers",
    ),
    Mutant(
        "partial += pid_m.to(tl.int64) * (n_hidden + n_cols)",
        "partial += 0 * n_cols",
        "the sums of the last rows alone",
    ),
    Mutant(
        "dh = device.dot(dz2, w2, dh, PRECISION",
        "dh = device.dot(dz2, w2, dh * 0.0, PRECISION",
        "dh of the last columns alone",
    ),
    Mutant(
        "hidden = x.new_empty(n_rows, n_hidden) if has_dw2 else None",
        "hidden = x.new_empty(n_rows, n_hidden) if has_dx else None",
        "no hidden layer for dW2 alone",
    ),
    Mutant("if has_dx or has_dw1 else None", "if has_dx else None", "no dz1 for dW1 alone"),
    Mutant("if has_db1 or has_db2:", "if has_db1:", "no sums for db2 alone"),
    Mutant(
        "hidden = _hidden_by_cublas(x, w1, b1) if hidden is None else hidden",
        "hidden = torch.mm(x, w1.t()) + b1 if hidden is None else hidden",
        "cublas: computed again without relu",
    ),
    Mutant(
        "dz2 = aten.threshold_backward(dy, y, 0)", "dz2 = dy", "cublas: relu's gradient forgotten"
    ),
    Mutant(
        "torch.mm(dz1, host.for_cublas(w1), out=x.new_empty(x.shape))",
        "torch.mm(dz1, w1)",
        "autocast rounds the products of the backward pass",
    ),
    Mutant(
        "tensors = host.autocast(x, weight1, bias1, weight2, bias2)\n",
        "tensors = (x, weight1, bias1, weight2, bias2)\n",
        "autocast ignored",
    ),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    Mutant(
        "if needs_autograd(*tensors) else",
        "if needs_autograd(tensors[0]) else",
        "no gradients where x needs none",
    ),
    # --- checks
    Mutant(
        'weight2=(weight2, "N H"), bias2=(bias2, "N"),',
        'weight2=(weight2, "N H"), bias2=(bias2, "B"),',
        "a bias unchecked",
    ),
    Mutant(
        "hidden = torch.relu(F.linear(x, weight1, bias1))",
        "hidden = F.linear(x, weight1, bias1)",
        "eager: no relu",
    ),
    Mutant(
        "wide = x.dtype if plan.n_tiles == 1 else host",
        "wide = host",
        "one strip's sums in float32",
    ),
    Mutant(
        "wide = x.dtype if plan.n_tiles == 1 else host.sum_dtype(x.dtype)",
        "wide = x.dtype",
        "partial sums rounded to 16 bits",
    ),
]
