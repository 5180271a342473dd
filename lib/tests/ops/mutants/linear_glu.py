"""Mutants of lib/ops/linear_glu.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant("a = tl.minimum(tl.abs(z), 1e3)", "a = tl.abs(z)", "0·inf in the gradient, far out"),
    Mutant("over_h=not save_h", "over_h=True", "dh written over an h that was saved"),
    # --- the gate
    Mutant(
        "        x1, x2 = x2, x1\n    return", "        pass\n    return", "eager: deaf to the gate"
    ),
    Mutant("x1, x2 = tl.split", "x2, x1 = tl.split", "the gate is the first half"),
    Mutant(
        "(BLOCK_M, 2, BLOCK_N)), (0, 2, 1))",
        "(BLOCK_M, BLOCK_N, 2)), (0, 1, 2))",
        "halves taken for neighbours",
    ),
    Mutant(
        "e = fast_exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)\n"
        "        y = x1 * fast_divide(x2, 1.0 + e)",
        "e = fast_exp2(x2 * (2.302208198144325 + 0.1029432395800235 * x2 * x2))\n"
        "        y = x1 * x2 * fast_divide(e, 1.0 + e)",
        "sigmoid as e/(e + 1): NaN where e overflows",
    ),
    Mutant(
        "y = x1 * fast_divide(x2, 1.0 + e)", "y = fast_divide(x2, 1.0 + e)", "no x1: gelu alone"
    ),
    Mutant(
        "fast_exp2(x2 * (-2.302208198",
        "fast_exp2(x2 * (-2.4554669595",
        "gelu's other approximation, forward",
    ),
    Mutant("s = tl.where(z < 0, e * t, t)", "s = t", "the gradient of -x2 as that of x2"),
    Mutant("z * (e * t * t) *", "z * (s * (1.0 - s)) *", "1 - s, which has lost its digits"),
    Mutant("0.2140644488178008", "0.07135481627260025", "x³ without its factor 3 in the gradient"),
    Mutant(
        "return dy * y, dy * x1 * slope",
        "return dy * x1 * slope, dy * y",
        "the gradients of both halves mixed up",
    ),
    Mutant("dy * x1 * slope", "dy * slope", "the gradient of the gate without x1"),
    Mutant("x1, x2 = x2, x1\n    y", "x1, x2 = x1, x2\n    y", "deaf to the gate, forward"),
    Mutant(
        "dx2, dx1 = _gated_grad(dy, x2, x1, ACTIVATION)",
        "dx1, dx2 = _gated_grad(dy, x1, x2, ACTIVATION)",
        "deaf to the gate, backward",
    ),
    Mutant(
        "y = x1 * gelu(x2)",
        "y = x1 * fast_divide(x2, 1.0 + fast_exp(-1.702 * x2))",
        "gelu: another",
    ),
    Mutant(
        "y, slope = device.gelu(x2), device.gelu_grad(x2)",
        "y, slope = device.gelu(x2), _gelu_tanh_slope(x2)[1]",
        "gelu: the other form's slope",
    ),
    Mutant("slope = y + x2 * slope", "slope = y + slope", "silu: a slope without x2"),
    Mutant("            y = x2 * y\n", "", "silu: the gradient of x1 by sigmoid"),
    Mutant("tl.where(x2 <= 0, 0.0, 1.0)", "tl.where(x2 < -1, 0.0, 1.0)", "relu: a slope below 0"),
    Mutant(
        "y, slope = tl.where(x2 < 0, e * t, t), e * t * t",
        "y, slope = t, e * t * t",
        "sigmoid: of |x2|, backward",
    ),
    Mutant(
        "y = fast_divide(x1, 1.0 + fast_exp(-x2))",
        "y = fast_divide(x1, 1.0 + fast_exp(x2))",
        "sigmoid of -x2",
    ),
    # --- the products
    Mutant("mask=inside[None, :], other=0.0", "mask=None", "what lies past K read from x"),
    Mutant(
        "mask=inside[:, None] & (cols < n_hidden)[None, :]",
        "mask=(cols < n_hidden)[None, :]",
        "what lies past K read from W",
    ),
    Mutant(
        "rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)",
        "rows = rows.to(tl.int64)",
        "rows that are not there read",
    ),
    Mutant(
        "mask=inside[:, None] & (cols < n_hidden)[None, :], other=0.0",
        "mask=inside[:, None], other=0.0",
        "rows of W that are not there read",
    ),
    Mutant(
        "w_rows = (cols + pair // BLOCK_N * n_hidden)",
        "w_rows = (cols + pair // BLOCK_N * BLOCK_N)",
        "the gate from the next rows of W",
    ),
    Mutant("w_rows[None, :] * stride_wn", "w_rows[None, :] * stride_xm", "W by the strides of x"),
    Mutant('8 else "tf32" if allow_tf32', '8 else "tf32" if not allow_tf32', "tf32 unasked"),
    Mutant("x1 += bias1.to(total", "x1 += bias2.to(total", "the bias of the gate for both halves"),
    Mutant(
        "tl.load(bias_ptr + n_hidden + cols",
        "tl.load(bias_ptr + cols + 1",
        "the gate's bias beside x1's",
    ),
    Mutant("else bias.contiguous()", "else bias", "a spread bias read as if contiguous"),
    Mutant(
        "height = tl.minimum(tiles_m - first, GROUP)",
        "height = GROUP",
        "the last group as high as others",
    ),
    Mutant(
        "(host.cdiv(n_rows, tile.m) * host.cdiv(n_hidden, tile.n),)",
        "(max(1, n_rows // tile.m) * host.cdiv(n_hidden, tile.n),)",
        "floor where ceil was meant: the last rows forgotten",
    ),
    Mutant(
        "mask = (rows < n_rows - row) & (cols < n_hidden - col)",
        "mask = (rows < n_rows - row) & (cols < 2 * n_hidden - col)",
        "columns past H written",
    ),
    Mutant(
        "mask = (rows < n_rows - row) & (cols < n_hidden - col)",
        "mask = (rows < n_rows) & (cols < n_hidden - col)",
        "rows past M written",
    ),
    Mutant("tl.store(h_ptrs + n_hidden, x2", "tl.store(h_ptrs + n_hidden, x1", "h with x1 twice"),
    Mutant(
        "    y = device.gated(x1, x2, ACTIVATION)\n",
        "    half: tl.constexpr = y_out.dtype if BY_TMA else y_out.dtype.element_ty\n"
        "    y = device.gated(x1.to(half).to(x1.dtype), x2.to(half).to(x1.dtype), ACTIVATION)\n",
        "h rounded on the way to y",
    ),
    Mutant("if y.numel() > 0:", "if n_in > 0:", "K = 0: nothing written"),
    # --- int32
    Mutant(
        "rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)",
        "rows = tl.where(rows < n_rows, rows, 0)",
        "int32 rows of x",
    ),
    Mutant(
        "pair // BLOCK_N * n_hidden).to(tl.int64)", "pair // BLOCK_N * n_hidden)", "int32 rows of W"
    ),
    Mutant(
        "inner = tl.arange(0, BLOCK_K).to(tl.int64)",
        "inner = tl.arange(0, BLOCK_K)",
        "int32 columns",
    ),
    Mutant("x_ptrs += tl.cast(stride_xk, tl.int64)", "x_ptrs += stride_xk", "int32 steps along x"),
    Mutant("w_ptrs += tl.cast(stride_wk, tl.int64)", "w_ptrs += stride_wk", "int32 steps along W"),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program",
        "rows = pid_m * rows_per_program",
        "int32 rows of dy",
    ),
    Mutant("cols = pid_n.to(tl.int64) * BLOCK_N", "cols = pid_n * BLOCK_N", "int32 columns of dy"),
    Mutant("weight.shape[0] > 2**24", "weight.shape[0] > 2**30", "H too large for int32 offsets"),
    # --- Hopper
    Mutant("w_desc.load([0, col, k])", "w_desc.load([0, row, k])", "TMA: rows of x for rows of W"),
    Mutant(
        "[n_rows // 2 * pitch, pitch, 1]",
        "[128 * pitch, pitch, 1]",
        "TMA: the gate right behind a tile",
    ),
    Mutant(
        "weight, [2, n_rows // 2, n_in]",
        "weight, [2, n_rows, n_in]",
        "TMA: the first half runs into the second",
    ),
    Mutant(
        "tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)",
        "tl.range(tl.program_id(0), n_tiles, n_tiles",
        "TMA: each program does one tile and stops",
    ),
    Mutant("step == 1 and pitch >= t.shape[1]", "step == 1", "TMA: rows that are one in memory"),
    Mutant(
        "pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0",
        "pitch * t.itemsize % 16 == 0",
        "TMA: any address",
    ),
    Mutant("can_tma = x.itemsize == 2", "can_tma = x.itemsize <= 4", "TMA: float32 too"),
    Mutant("== 2 and n_in > 0 and", "== 2 and", "TMA: descriptors of no columns"),
    Mutant("can_tma and host.tma_reads(weight)", "can_tma", "TMA: a W that it cannot read"),
    # --- Gluon
    Mutant(
        "mbarrier.init(empty.index(i), count=2)",
        "mbarrier.init(empty.index(i), count=1)",
        "Gluon: a slot free when one consumer is done",
    ),
    Mutant(
        "warpgroup_mma_wait(1, deps=(total,))",
        "warpgroup_mma_wait(2, deps=(total,))",
        "Gluon: a slot free while a product reads it",
    ),
    Mutant(
        "if step > 0:  # the product",
        "if step >= 0:  # the product",
        "Gluon: the last slot of a tile freed twice",
    ),
    Mutant(
        "        mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)\n\n",
        "\n",
        "Gluon: the last slot of a tile never freed",
    ),
    Mutant(
        "((count // STAGES) & 1) ^ 1)",
        "(count // STAGES) & 1)",
        "Gluon: the producer waits for a slot that nobody has used",
    ),
    Mutant(
        "mbarrier.wait(full.index(slot), (count // STAGES) & 1)",
        "mbarrier.wait(full.index(slot), 0)",
        "Gluon: a slot taken for full in every second round",
    ),
    Mutant(
        "2 * x_desc.block_type.nbytes + w",
        "x_desc.block_type.nbytes + w",
        "Gluon: one consumer's x not waited for",
    ),
    Mutant(
        "x_bufs.index(2 * slot + WHO)",
        "x_bufs.index(2 * slot)",
        "Gluon: both consumers multiply the same rows",
    ),
    Mutant("        hopper.fence_async_shared()\n", "", "Gluon: TMA reads y before it is there"),
    Mutant(
        "        tma.store_wait(0)  # of the tile before: y_buf is free\n",
        "",
        "Gluon: y_buf written while TMA reads it",
    ),
    Mutant(
        "    )  # fmt: skip\n    tma.store_wait(0)\n",
        "    )  # fmt: skip\n",
        "Gluon: a program that ends while TMA reads its memory",
    ),
    Mutant(
        "WHO == 0 and count == LAG",
        "WHO == 0 and count == 0",
        "Gluon: nobody lets the second consumer go",
    ),
    Mutant(
        "(n_tiles - n_whole) * PARTS\n", "n_tiles - n_whole\n", "Gluon: a quarter of the last wave"
    ),
    Mutant(
        "n_in, n_tiles - left_over, GROUP",
        "n_in, n_tiles, GROUP",
        "Gluon: the last wave never cut up",
    ),
    Mutant(
        "    if left_over * _PARTS > n_programs:\n",
        "    if left_over > n_programs:\n",
        "Gluon: a wave cut up that takes two then",
    ),
    Mutant("at, x = [row + who * BLOCK_M,", "at, x = [row,", "Gluon: the first 64 rows of x twice"),
    Mutant(
        "can_tma and h is None and _can_gluon", "can_tma and _can_gluon", "Gluon: h never written"
    ),
    Mutant(
        "return hopper and n_hidden % 8 == 0 and",
        "return hopper and",
        "Gluon: rows of y that TMA cannot write",
    ),
    Mutant(
        "host.generation(gpu) == 9\n",
        "host.generation(gpu) >= 9\n",
        "Gluon: wgmma on Blackwell, which has none",
    ),
    Mutant("(_FEWEST_STEPS - 1) * _GLUON_TILE.k", "0", "Gluon: a K with no lag in it"),
    Mutant("x1 = x1 + bias1.to(gl", "x1 = x1 + bias2.to(gl", "Gluon: the gate's bias for both"),
    Mutant(
        "(pid_n * PARTS + part % PARTS) * BLOCK_N",
        "pid_n * PARTS * BLOCK_N",
        "Gluon: the first part of a tile again and again",
    ),
    Mutant(
        "tile = first + part // PARTS",
        "tile = part // PARTS",
        "Gluon: the first tiles cut up again",
    ),
    # --- backward
    Mutant(
        "x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask",
        "x2 = tl.load(h_ptr + offsets + 1, mask=mask",
        "backward: the gate beside x1",
    ),
    Mutant(
        "offsets = rows[:, None] * (2 * n_hidden)",
        "offsets = rows[:, None] * n_hidden",
        "h as wide as y",
    ),
    Mutant(
        "rows[:, None] * stride_dym", "rows[:, None] * n_hidden", "dy taken for contiguous rows"
    ),
    Mutant("cols[None, :] * stride_dyn", "cols[None, :]", "dy taken for columns without gaps"),
    Mutant("total2 += dx2", "total2 += dx1", "db of the gate from dx1"),
    Mutant("total1 += dx1", "total1 = dx1", "db of the last rows only"),
    Mutant(
        "partial_ptr + pid_m.to(tl.int64) * (2 * n_hidden)",
        "partial_ptr + pid_m.to(tl.int64) * 0",
        "all programs' sums in one row",
    ),
    Mutant("torch.empty_like(h)\n", "h\n", "h overwritten by dh: a second backward is wrong"),
    Mutant(
        "enabled=False):",
        "enabled=torch.is_autocast_enabled(dy.device.type)):",
        "autocast in the backward pass",
    ),
    Mutant(
        "h = F.linear(host.for_cublas(x), host.for_cublas(weight), bias)",
        "h = F.linear(x, weight)",
        "computed again without its bias",
    ),
    Mutant("rows @ host.for_cublas(weight)", "rows @ weight.flip(0)", "dx from W upside down"),
    # --- what is saved, autograd, torch.library
    Mutant("save_h = not recompute and host", "save_h = host", "recompute: h written and kept"),
    Mutant(
        "_save(ctx, *tensors, h if save_h else None,",
        "_save(ctx, *tensors, h,",
        "the op: an h that is not there kept",
    ),
    Mutant(
        "x, weight, bias = x if has_dw else None, weight if has_dx else None, None",
        "bias = None",
        "x and W kept for gradients that nobody needs",
    ),
    Mutant("@host.once\n", "", "a second derivative that is wrong in silence"),
    Mutant(
        "autograd(_backward, setup_context",
        "autograd(lambda *of: _backward.__closure__[0].cell_contents(*of), setup_context",
        "the op: a second derivative wrong in silence",
    ),
    Mutant(
        "(*ctx.needs_input_grad, False)[:3]", "ctx.needs_input_grad[:3]", "the op without a bias"
    ),
    Mutant(
        "    ctx.mark_non_differentiable(h)\n", "", "the op: h with a gradient, which is ignored"
    ),
    Mutant(
        'getattr(t, "dtype", None) in MIXED',
        'getattr(t, "dtype", None) in DTYPES',
        "autocast of float64",
    ),
    Mutant(
        "tensors = host.autocast(x, weight, bias)\n",
        "tensors = (x, weight, bias)\n",
        "deaf to autocast",
    ),
    Mutant("weight.shape[0] % 2 or weight", "weight", "an odd number of rows"),
    Mutant('{"bias": (bias, "2H")}', '{"bias": (bias, "B")}', "a bias of another size"),
    Mutant(
        "dtype, n_tiles = h.dtype if has_db",
        "dtype, n_tiles = torch.float32 if has_db",
        "one strip's sums in float32",
    ),
]
