"""Mutants of lib/ops/lora_linear.py; those of what products share are in matmul.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    # --- both kernels
    Mutant(
        "z = tl.where(z < 0, 0.0, z)  # tl.maximum",
        "z = tl.maximum(z, 0.0)  # tl.maximum",
        "relu(NaN) = 0",
    ),
    Mutant(
        "z = _times_sigmoid(z, z * (1.5957691216057308 + 0.07135481627260025 * z * z))",
        "z = _times_sigmoid(z, z * (1.5957691216057308 + 0.044715 * z * z))",
        "gelu: 2√(2/π) forgotten in the cubic term",
    ),
    Mutant(
        "return device.fast_divide(z, 1.0 + device.fast_exp(-v))",
        "return z * tl.exp(v) / (tl.exp(v) + 1.0)",
        "sigmoid that overflows",
    ),
    Mutant(
        "    y = _act(z, ACTIVATION)\n    if TMA:",
        "    z = z.to(tl.bfloat16).to(z.dtype)\n    y = _act(z, ACTIVATION)\n    if TMA:",
        "rounded before the activation",
    ),
    Mutant(
        "z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0)",
        "z += tl.load(bias_ptr + cols - col, mask=cols < n_cols, other=0.0)",
        "the bias of the first tile for all",
    ),
    Mutant("        col += z.shape[1] // 2\n", "", "both halves written to the left one's place"),
    Mutant(
        "tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))",
        "tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))",
        "even and odd columns for left and right ones",
    ),
    Mutant(
        "tile = tile % (GROUP * tiles_n)", "tile = tile % (tiles_m * tiles_n)", "groups overlap"
    ),
    Mutant(
        "u_mask = (rows < n_rows)[:, None] & (ranks < rank)[None, :]",
        "u_mask = (rows < n_rows)[:, None]",
        "u read past its rank",
    ),
    Mutant(
        "b_mask = (ranks < rank)[:, None] & (cols < n_cols)[None, :]",
        "b_mask = (ranks < rank)[:, None]",
        "B read past its rows",
    ),
    Mutant("ranks = piece * BLOCK_R", "ranks = 0 * BLOCK_R", "the first piece of the rank for all"),
    Mutant(
        "rows[:, None] * rank + ranks[None, :]",
        "rows[:, None] * BLOCK_R + ranks[None, :]",
        "u read with padding",
    ),
    Mutant(
        '"PIECES": host.cdiv(rank, block_r)',
        '"PIECES": max(1, rank // block_r)',
        "the last ranks forgotten",
    ),
    # --- the pointer kernel
    Mutant(
        "x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)\n"
        "        w = tl.load(w_ptrs, mask=inside[:, None] & col_mask, other=0.0)",
        "x = tl.load(x_ptrs, mask=row_mask, other=0.0)\n        w = tl.load(w_ptrs, mask=col_mask, other=0.0)",
        "columns past K added",
    ),
    Mutant(
        "x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K",
        "x_ptrs += BLOCK_K",
        "x stepped through as if contiguous",
    ),
    Mutant(
        "w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K",
        "w_ptrs += BLOCK_K",
        "W stepped through as if contiguous",
    ),
    Mutant(
        "total = device.dot(x, w, total, PRECISION, COMPUTE)",
        "total = device.dot(x, w, total * 0.0, PRECISION, COMPUTE)",
        "only the last step over K kept",
    ),
    Mutant(
        "rows, cols = row.to(tl.int64) + tl.arange(0, BLOCK_M), col.to(tl.int64) + tl.arange(0, BLOCK_N)",
        "rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)",
        "int32 rows and columns",
    ),
    Mutant(
        "inner = tl.arange(0, BLOCK_K).to(tl.int64)",
        "inner = tl.arange(0, BLOCK_K)",
        "int32 steps over K",
    ),
    Mutant(
        '< 8 else "tf32" if allow_tf32 else "tf32x3"', '< 8 else "tf32"', "tf32 though nobody asked"
    ),
    # --- the TMA kernel
    Mutant(
        "            total = device.dot(u, b, total)\n        _finish",
        "        _finish",
        "TMA: no low-rank part",
    ),
    Mutant(
        "            total = device.dot(u, b, total)\n        _finish",
        "        total = device.dot(u, b, total)\n        _finish",
        "TMA: the last piece of the rank alone",
    ),
    Mutant(
        "row, col, rows, cols = _place(tile, n_rows",
        "row, col, rows, cols = _place(tl.program_id(0), n_rows",
        "TMA: each program's first tile again and again",
    ),
    Mutant(" and pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0", "", "TMA: unaligned rows"),
    Mutant(
        "return step == 1 and pitch >= t.shape[1]",
        "return pitch >= t.shape[1]",
        "TMA: every second column of x",
    ),
    Mutant("step == 1 and pitch >= t.shape[1] and", "step == 1 and", "TMA: rows that are one"),
    Mutant(
        "large and has_tma and dtype.itemsize == 2", "large and has_tma", "TMA: float32 planned"
    ),
    Mutant('"tma" and x.itemsize == 2 and', '"tma" and', "TMA: float32, by a plan"),
    Mutant("large = n_rows * n_cols * n_inner >= _TMA_FROM and", "large =", "TMA: small products"),
    # --- forward on the host
    Mutant(
        "_product(rows, lora_a.t(), out=u)",
        "_product(rows, lora_a.t(), scale, out=u)",
        "scaled twice",
    ),
    Mutant("u = (u.to(tl.float32) * scale).to(u.dtype)", "pass", "no scale"),
    Mutant("u = u * scale if u.dtype == torch.float64 else u", "pass", "no scale in float64"),
    Mutant(
        "bias, out = None if bias is None else bias.contiguous(), y",
        "out = y",
        "a strided bias read side by side",
    ),
    Mutant(
        "torch.mm(x, weight.t(), out=total)",
        "torch.mm(x, weight.t(), out=y)",
        "cuBLAS: z without bias",
    ),
    Mutant(
        "total.addmm_(u, host.for_cublas(lora_b)",
        "y.addmm_(u, host.for_cublas(lora_b)",
        "cuBLAS: z without its low-rank part",
    ),
    Mutant(
        'if activation != "identity":\n        _ACT',
        "if False:\n        _ACT",
        "cuBLAS: not activated",
    ),
    Mutant("*how, plan, activation in host.OF_Z)", "*how, plan, True)", "z saved for relu"),
    Mutant("plan = plan or _plan(", "plan = _plan(", "the plan that is given ignored"),
    # --- backward
    Mutant("e = tl.exp2(a", "e = tl.exp2(z", "gelu: a wrong slope"),
    Mutant("db = _product(dz.t(), u, scale)", "db = _product(dz.t(), u)", "dB without the scale"),
    Mutant(
        "du = _product(dz, lora_b, scale)",
        "du = _product(dz, lora_b)",
        "dA and dx without the scale",
    ),
    Mutant(
        "dx = _product(du, lora_a).addmm_(host.for_cublas(dz), host.for_cublas(weight))",
        "dx = _product(dz, weight)",
        "dx without its low-rank part",
    ),
    Mutant(
        "dz, dbias = host.dz_of(dy_rows, saved",
        "dz, dbias = host.dz_of(dy, saved",
        "dy of three dimensions",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = rows[:, None] * n_cols + cols[None, :]",
        "dy read as if contiguous",
    ),
    Mutant(
        "tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)",
        "tl.store(partial_ptr + cols, sums, mask=cols < n_cols)",
        "one strip's sums for all",
    ),
    Mutant("lora_b if has_dx or has_da or all_inputs else None", "lora_b", "B saved for nothing"),
    Mutant(
        "x if has_da or all_inputs else None, weight if has_dx or all_inputs else None",
        "x, weight",
        "x and W saved for nothing",
    ),
    Mutant("    @host.once\n", "    @staticmethod\n", "a second derivative wrong in silence"),
    # --- checks, autocast, torch.library
    Mutant("    if trains_weight:\n", "    if False:\n", "a trained weight taken"),
    Mutant(
        'return getattr(weight, "requires_grad", False) and torch.is_grad_enabled()',
        'return getattr(weight, "requires_grad", False)',
        "refused under no_grad",
    ),
    Mutant('"lora_b": (lora_b, "N R")', '"lora_b": (lora_b, "N Q")', "two ranks taken"),
    Mutant("        _check_rank(name, lora_a.shape[0])\n", "        pass\n", "rank 0 taken"),
    Mutant("if not 1 <= rank <= _MAX_RANK:", "if not rank <= _MAX_RANK:", "rank 0 not named"),
    Mutant('"bias": (bias, "N")', '"bias": (bias, "P")', "a short bias taken"),
    Mutant("        if t.dtype != x.dtype and not", "        if False and not", "two dtypes taken"),
    Mutant("if ctx.needs_input_grad[1]:", "if False:", "op: a trained weight without a gradient"),
    Mutant(
        'if saved is None and activation != "identity":', "if False:", "op: gelu's slope without z"
    ),
    Mutant("z if save_z else None, how", "z, how", "op: gelu's slope of a z that is empty"),
    Mutant("bias if all_inputs else None", "None", "op: what makes z again not saved"),
    Mutant(
        "u, saved, scale, activation, ctx.needs_grad)",
        "u, saved, scale, activation, [ctx.needs_input_grad[k] for k in (0, 2, 3, 4)])",
        "op: no gradient where the bias is left out",
    ),
    Mutant(
        "dx, da, db, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))",
        "dx, db, da, dbias = (g if needed else None for g, needed in zip(grads, ctx.needs_grad))",
        "op: dA and dB mixed up",
    ),
    # --- LoRALinear
    Mutant("self.base = base.requires_grad_(False)", "self.base = base", "the base is trained"),
    Mutant(
        "self.base = base.requires_grad_(False)",
        "self.base = base\n        base.requires_grad = False",
        "an attribute set, and nothing frozen",
    ),
    Mutant(
        "self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank, **like_weight))",
        "self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank)).to(**like_weight)",
        "a parameter moved, and no parameter any more",
    ),
    Mutant(
        "alpha, alpha / rank, activation", "alpha, alpha, activation", "alpha not divided by rank"
    ),
    Mutant(
        "torch.nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))",
        "torch.nn.init.zeros_(self.lora_a)",
        "A is 0",
    ),
    Mutant("torch.nn.init.zeros_(self.lora_b)", "torch.nn.init.normal_(self.lora_b)", "B is not 0"),
    Mutant(
        "        if not self.merged:\n            a, b",
        "        if True:\n            a, b",
        "merged twice",
    ),
    Mutant(
        "        if self.merged:\n            self._add",
        "        if True:\n            self._add",
        "unmerged twice",
    ),
    Mutant(
        "self._add_to_weight(self._merged_a, self._merged_b, -self.scale)",
        "self._add_to_weight(self.lora_a, self.lora_b, -self.scale)",
        "unmerged by what A and B are now",
    ),
    Mutant(
        "total = torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)",
        "total = weight + scale * (b @ a)",
        "merged with s B A rounded before",
    ),
    Mutant("if not torch.isfinite(total).all():", "if False:", "merged what is not finite"),
    Mutant(
        "if self.training and torch.is_grad_enabled():",
        "if False:",
        "trained while merged, without effect",
    ),
    Mutant(
        'self.register_buffer("_merged_a", None, persistent=False)\n',
        'self.register_buffer("_merged_a", torch.zeros(0))\n',
        "merged from the start",
    ),
    Mutant(
        "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n        if self.merged:",
        "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n        if False:",
        "s B A saved twice",
    ),
    Mutant(
        "    def _load_from_state_dict(self, *args, **kwargs):\n        if self.merged:",
        "    def _load_from_state_dict(self, *args, **kwargs):\n        if False:",
        "loaded while merged",
    ),
    Mutant("z = device.gelu(z)", "z = _times_sigmoid(z, 1.702 * z)", "gelu: another form"),
]
