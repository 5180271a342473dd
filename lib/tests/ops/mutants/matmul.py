"""Mutants of lib/ops/matmul.py, and of what products share with it: tiles, activations, dz and dbias."""

from lib.measure.mutants import Mutant

_ROWS = "of bfloat16 on\n    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)\n"
_COLS = "    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)\n"

MUTANTS = [
    Mutant(
        "a = tl.minimum(tl.abs(z), 1e3)", "a = tl.abs(z)", "gelu: 0·inf in the gradient, far out"
    ),
    # --- the epilogue and its gradient
    Mutant("z = tl.where(z < 0, 0.0, z)", "z = tl.maximum(z, 0.0)", "relu that drops NaN"),
    Mutant(
        "return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))",
        "return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.04 * z * z)))",
        "gelu: a constant cut off",
    ),
    Mutant(
        "0.2140644488178008", "0.07135481627260025", "gelu: x³ without its factor 3 in the gradient"
    ),
    Mutant("z * (e * t * t) *", "z * (s * (1.0 - s)) *", "gelu: 1 - s where s is nearly 1"),
    Mutant("+ saved * (e * t * t))", "+ saved * (t * t))", "silu: s for 1 - s in the gradient"),
    Mutant("dy * (saved * (1.0 - saved))", "dy * (1.0 - saved)", "sigmoid: half of its gradient"),
    Mutant(
        "tl.where(saved <= 0, 0.0, dy)",
        "tl.where(saved < 0, 0.0, dy)",
        "relu: a gradient where y is 0",
    ),
    Mutant(
        'OF_Z = ("gelu", "gelu_tanh", "silu")',
        'OF_Z = ("gelu", "gelu_tanh")',
        "silu: its slope from y",
    ),
    Mutant(
        "tl.store(z_ptr + offsets, z.to(y_ptr.dtype.element_ty), mask=mask)",
        "tl.store(z_ptr + offsets, y, mask=mask)",
        "y saved for z",
    ),
    Mutant(
        "z_desc.store([row, col], z.to(z_desc.dtype))",
        "z_desc.store([row, col], device.activate(z, ACTIVATION).to(z_desc.dtype))",
        "persistent: y saved for z",
    ),
    Mutant(
        "z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]",
        "z += tl.load(bias_ptr + rows, mask=rows < n_rows, other=0.0).to(z.dtype)[:, None]",
        "a bias for each row",
    ),
    Mutant(
        "cols = col + tl.arange(0, z.shape[1])",
        "cols = tl.arange(0, z.shape[1])",
        "TMA: the first bias again",
    ),
    # --- the order of tiles
    Mutant(
        "height = tl.minimum(tiles_m - first, GROUP)",
        "height = GROUP",
        "the last group taken for a whole one",
    ),
    Mutant(
        "first = tile // (GROUP * tiles_n) * GROUP",
        "first = tile // (GROUP * tiles_n)",
        "groups that overlap",
    ),
    Mutant(
        "return first + tile % height, tile // height",
        "return first + tile // height, tile % height",
        "rows and columns of tiles mixed up",
    ),
    Mutant(
        "tl.program_id(0), n_tiles, tl.num_programs(0)):",
        "tl.program_id(0), tl.num_programs(0), n_tiles):",
        "persistent: one tile for each program",
    ),
    # --- steps along K, split-K
    Mutant(
        "inside = tl.arange(0, BLOCK_K) < n_inner - k",
        "inside = tl.arange(0, BLOCK_K) < n_inner",
        "columns past K added",
    ),
    Mutant(
        "mask=row_mask & inside[None, :], other=0.0)",
        "mask=inside[None, :], other=0.0)",
        "rows past M read",
    ),
    Mutant(
        "a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K",
        "a_ptrs += BLOCK_K",
        "a read as if contiguous",
    ),
    Mutant(
        "a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K",
        "a_ptrs += stride_ak * BLOCK_K",
        "int32 steps in a",
    ),
    Mutant(
        "b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K",
        "b_ptrs += stride_bk * BLOCK_K",
        "int32 steps in b",
    ),
    Mutant("start = tl.program_id(1) * inner_per_part", "start = 0", "every part the first"),
    Mutant(
        "tl.minimum(inner_per_part, n_inner - start)", "(n_inner - start)", "parts that overlap"
    ),
    Mutant(
        "    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols\n",
        "",
        "parts written over each other",
    ),
    Mutant("        rows += n_rows\n", "", "the first part added again and again"),
    Mutant("    rows -= n_parts * n_rows\n", "", "y written where a part further on would be"),
    Mutant(
        "wide = host.sum_dtype(y.dtype)\n    parts",
        "wide = y.dtype\n    parts",
        "parts rounded to bfloat16",
    ),
    Mutant(
        "    n_parts = host.cdiv(n_inner, inner_per_part or 1)\n",
        "    n_parts = plan.n_parts\n",
        "a part with nothing in it",
    ),
    Mutant("(parts, bias, y, z),", "(parts, None, y, z),", "split-K without the bias"),
    Mutant(
        "COMPUTE=host.compute_dtype(a.dtype), GROUP",
        "COMPUTE=tl.float32, GROUP",
        "float64 summed in float32",
    ),
    # --- sizes past 2**31
    Mutant(_ROWS, _ROWS.replace(".to(tl.int64)", ""), "int32 rows of a"),
    Mutant(
        _COLS + "    inner = ",
        _COLS.replace(".to(tl.int64)", "") + "    inner = ",
        "int32 columns of b",
    ),
    Mutant(
        "inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)",
        "inner = start + tl.arange(0, BLOCK_K)",
        "int32 columns of a",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program",
        "rows = pid_m * rows_per_program",
        "int32 rows of dy",
    ),
    # --- halves, TMA
    Mutant("        cols += BLOCK_N // 2\n", "", "both halves in one place"),
    Mutant("            col += BLOCK_N // 2\n", "", "TMA: both halves in one place"),
    Mutant("a_desc.load([k, row]).T if", "a_desc.load([row, k]).T if", "TMA: a transposed twice"),
    Mutant("b_desc.load([col, k]).T if", "b_desc.load([col, k]) if", "TMA: b not transposed"),
    Mutant(
        "pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0",
        "pitch * t.itemsize % 16 == 0",
        "TMA from any address",
    ),
    Mutant(
        "step == 1 and pitch >= t.shape[1] and pitch * t.itemsize % 16 ==",
        "step == 1 and pitch >= t.shape[1] and 0 ==",
        "TMA of rows that begin anywhere",
    ),
    Mutant(
        "(t.t(), True) if host.tma_reads",
        "(t.t(), False) if host.tma_reads",
        "TMA: the transpose taken for the matrix",
    ),
    Mutant(
        "            t.copy_(out)\n",
        "            pass\n",
        "what TMA has stored aside not brought home",
    ),
    Mutant('"half" and n_inner > 0 and', '"half" and', "TMA with nothing to load"),
    Mutant("None if bias is None else bias.contiguous(),", "bias,", "a bias with gaps"),
    # --- the choice
    Mutant("k // (_LEAST_STEPS * tile.k)", "k // tile.k", "parts of one step"),
    Mutant(", n_programs // n_tiles)", ")", "more parts than run at once"),
    Mutant("_RESIDENT.get(kind, 1)", "3", "three programs for each multiprocessor"),
    Mutant("pitch % 16 == t.data_ptr()", "0 == t.data_ptr()", "any pitch taken for aligned"),
    Mutant("else _to_aligned(t.t()).t()", "else _to_aligned(t.t())", "the copy of a transpose"),
    Mutant(
        "        a, b = _to_aligned(a), _to_aligned(b)\n",
        "        pass\n",
        "a large product element by element",
    ),
    Mutant("aligned = _is_aligned(a) and", "aligned =", "the rows of b alone decide"),
    Mutant("<= t <= max(16, size)", "<= t", "tiles larger than y"),
    Mutant(
        "        if n_tiles * max(1, parts) >= _ENOUGH * n_sms:\n            break\n",
        "",
        "always the smallest tile",
    ),
    # --- handed to cuBLAS
    Mutant(
        'activation == "identity" and not host.ON_CPU',
        "not host.ON_CPU",
        "an epilogue handed to cuBLAS, which has none",
    ),
    Mutant(
        "bare and aligned and m * n * k < _CUBLAS_UP_TO",
        "bare and aligned",
        "large products handed to cuBLAS, too",
    ),
    Mutant(
        'bare = kind == "half" and activation',
        "bare = activation",
        "float32 handed to cuBLAS: no 3xTF32",
    ),
    Mutant(
        'activation == "identity" and not host.ON_CPU',
        'activation == "identity"',
        "the CPU's product in the interpreter",
    ),
    Mutant(
        "if bare and aligned and", "if bare and", "odd rows handed to cuBLAS, which is slow at them"
    ),
    Mutant(
        "torch.addmm(bias, a, b, out=total)", "torch.mm(a, b, out=total)", "cuBLAS without the bias"
    ),
    Mutant(
        "    total = y if z is None else z\n    a, b = host.for",
        "    total = y\n    a, b = host.for",
        "cuBLAS: z not written",
    ),
    Mutant(
        "y.copy_(host.ACTIVATIONS[activation](total))",
        "y.copy_(total)",
        "cuBLAS without the activation",
    ),
    Mutant(
        'for tile in fit if tiles is _TILES["half"] else []:',
        "for tile in []:",
        "16 bits: parts of K where a smaller tile would do",
    ),
    Mutant(
        'for tile in fit if tiles is _TILES["half"] else []:',
        "for tile in fit:",
        "float32, too: a smaller tile than it is tuned for",
    ),
    # --- gradients
    Mutant("        total += dz\n", "        total = dz\n", "dbias of the last rows alone"),
    Mutant(
        "            dz = slope_times(dz, saved, ACTIVATION)",
        "            total += dz - slope_times(dz, saved, ACTIVATION)\n"
        "            dz = slope_times(dz, saved, ACTIVATION)",
        "dbias of dy instead of dz",
    ),
    Mutant(
        "offsets = rows[:, None] * n_cols + cols[None, :]\n        if saved",
        "offsets = dy_offsets\n        if saved",
        "what was saved read by the strides of dy",
    ),
    Mutant(
        "has_dz = plan and plan.backward, has_da or has_db",
        "has_dz = plan and plan.backward, has_da",
        "no dz for db alone",
    ),
    Mutant(
        "a if has_db else None, b if has_da else None",
        "a if has_da else None, b if has_db else None",
        "a kept for da, b for db",
    ),
    Mutant(
        "ctx.needs_grad = [*ctx.needs_input_grad[:2],",
        "ctx.needs_grad = [True, True,",
        "gradients nobody wants",
    ),
    Mutant(
        'da = _forward(dz, b.t(), None, "identity", allow_tf32)',
        'da = _forward(dz, b.t(), None, "identity", True)',
        "tf32 in silence, backward",
    ),
    Mutant('return "tf32" if allow_tf32 else "tf32x3"', 'return "tf32"', "tf32 in silence"),
    Mutant(
        "    @host.once\n", "    @staticmethod\n", "a second derivative that is wrong in silence"
    ),
    # --- torch.library, torch.compile, autocast
    Mutant("    ctx.mark_non_differentiable(z)\n", "", "z with a gradient of its own"),
    Mutant(
        'matmul_op(a, b, bias, "identity", allow_tf32)',
        'matmul_op(a, b, None, "identity", allow_tf32)',
        "z computed again without the bias",
    ),
    Mutant(
        "    ctx.how = activation, allow_tf32\n",
        "    ctx.how = activation, True\n",
        "tf32 in silence, both products of the backward pass",
    ),
    Mutant(
        "save_z = activation in host.OF_Z and host.needs_autograd(a, b, bias)",
        "save_z = False",
        "compiled: multiplied once more",
    ),
    Mutant(
        "    y, z = _empty(a, b, save_z)\n",
        "    y, z = _empty(a, b, save_z or activation in host.OF_Z)\n",
        "z stored for inference",
    ),
    Mutant(
        'getattr(t, "dtype", None) in MIXED',
        'getattr(t, "dtype", None) in DTYPES',
        "autocast: float64 too",
    ),
    Mutant(
        "    if not torch.is_autocast_enabled(where):\n", "    if True:\n", "autocast passed over"
    ),
    # --- checks, eager
    Mutant('"b": (b, "K N")', '"b": (b, "J N")', "b with too few rows"),
    Mutant('"bias": (bias, "N")', '"bias": (bias, "J")', "a bias of one element"),
    Mutant('"b": (b, "K N")', '"b": (b, "... K N")', "a batch"),
    Mutant("        if t.device != x.device:\n", "        if False:\n", "two devices"),
    Mutant(
        "z if bias is None else z + bias)",
        "z if bias is None else z - bias)",
        "eager: the bias taken off",
    ),
    Mutant(", all_inputs=True)", ")", "the op: a second derivative without what goes through z"),
    Mutant(
        "        return y, z  # z too",
        "        ctx.mark_non_differentiable(*filter(torch.is_tensor, [z]))\n        return y, z  # z too",
        "a second derivative without what goes through z",
    ),
    Mutant("z = gelu(z)", "z = gelu_tanh(z)", "gelu: another form"),
    Mutant("dy * gelu_grad(saved)", "dy * gelu_tanh_grad(saved)", "gelu: the other form's slope"),
    Mutant(
        "dtype, n_tiles = dy.dtype if has_dbias",
        "dtype, n_tiles = torch.float32 if has_dbias",
        "one strip's sums in float32",
    ),
]
