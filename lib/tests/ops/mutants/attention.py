"""Mutants of lib/ops/attention.py."""

from lib.measure.mutants import Mutant

_SEEN = "s = tl.where((js >= lowest) & (js <= highest), s, -float("
_HIGHEST = "tl.minimum(i + right, end - 1)[:, None]"
_FIRST = "\n            j = start + tile * BLOCK_N\n            k = _load_rows(k_ptr, j, end"
_TILE = f"else t + a{_FIRST}", f"else t{_FIRST}"

MUTANTS = [
    # --- which keys are seen
    Mutant(_SEEN, _SEEN.replace("(js <= highest)", "(js <= highest + 1)"), "one key too many"),
    Mutant(
        _SEEN, _SEEN.replace("(js >= lowest)", "(js > lowest)"), "the first of a window missing"
    ),
    Mutant(
        f"(i - left)[:, None], {_HIGHEST}",
        f"(i - left)[:, None], {_HIGHEST.replace('end - 1', 'n_keys - 1')}",
        "padding seen: zeros counted in the sum",
    ),
    Mutant(
        "return left, 0 if is_causal else right",
        "return left, k.shape[2] - q.shape[2] if is_causal else right",
        "causal from the bottom right",
    ),
    Mutant(
        "left = q.shape[2] if left < 0 else min(left, q.shape[2])",
        "left = max(left, 0)",
        "-1 on the left as 0",
    ),
    Mutant(
        "a = tl.minimum(tl.cdiv(tl.maximum(begin, last - before) - start, BLOCK), n)",
        "a = tl.minimum(tl.cdiv(tl.maximum(begin, first - before) - start, BLOCK), n)",
        "a tile cut by the window taken as whole",
    ),
    Mutant(
        "b = tl.maximum(tl.minimum(end, first + after + 1) - start, 0) // BLOCK",
        "b = tl.maximum(tl.minimum(end, last + after + 1) - start, 0) // BLOCK",
        "a tile cut by the diagonal taken as whole",
    ),
    Mutant(
        "n = tl.cdiv(tl.maximum(tl.minimum(end, last + after + 1) - start, 0), BLOCK)",
        "n = tl.maximum(tl.minimum(end, last + after + 1) - start, 0) // BLOCK",
        "floor where ceil was meant: the last keys forgotten",
    ),
    Mutant(
        "start = tl.maximum(begin, first - before) // BLOCK * BLOCK",
        "start = tl.minimum(begin, first - before) // BLOCK * BLOCK",
        "begins before the first key",
    ),
    Mutant(
        "n = tl.cdiv(tl.maximum(tl.minimum(end, last + after + 1) - start, 0), BLOCK)",
        "n = tl.cdiv(tl.maximum(end - start, 0), BLOCK)",
        "tiles that nothing sees are read",
    ),
    Mutant(*_TILE, "tiles seen whole: from the first one on"),
    Mutant(
        "tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), n_keys).to(tl.int32)",
        "tl.minimum(tl.load(lengths_ptr + batch), n_keys).to(tl.int32)",
        "lengths below 0 as they are",
    ),
    Mutant(
        "k = _load_rows(k_ptr, first, length, stride_ks, True",
        "k = _load_rows(k_ptr, first, n_keys, stride_ks, True",
        "padding read in the backward pass",
    ),
    Mutant(
        "_store_rows(dv_ptr, dv, first, n_keys",
        "_store_rows(dv_ptr, dv, first, length",
        "dv of padding not written",
    ),
    Mutant("dv = tl.where(is_key, dv, 0.0)", "dv = dv + 0.0", "padding has a gradient"),
    # --- softmax
    Mutant(
        "top = tl.maximum(top, tl.max(s, axis=1))",
        "top = tl.max(s, axis=1)",
        "the maximum of the last tile alone",
    ),
    Mutant(
        "total = total * old + tl.sum(p, axis=1)",
        "total = total + tl.sum(p, axis=1)",
        "the sum not rescaled",
    ),
    Mutant("v, o * old[:, None], PRECISION", "v, o, PRECISION", "o not rescaled"),
    Mutant(
        "top = tl.full((BLOCK_M,), -(2.0**125), COMPUTE)",
        'top = tl.full((BLOCK_M,), -float("inf"), COMPUTE)',
        "-inf - -inf: NaN where a tile shows a query nothing",
    ),
    Mutant(
        "    o = tl.where(sees[:, None], o * (1.0 / total)[:, None], 0.0)\n",
        "    o = o * tl.where(total == 0, 0.0, 1.0 / total)[:, None]\n",
        "0 for a row of scores -inf",
    ),
    Mutant(
        "tl.cast(tl.maximum(tl.abs(scale), 1e-30) * 1.4426950408889634, COMPUTE)",
        "tl.cast(tl.maximum(tl.abs(scale), 1e-30), COMPUTE)",
        "powers of 2 in place of e",
    ),
    Mutant(
        "o = device.dot(p.to(v.dtype), v, o * old",
        "o = device.dot(p.to(tl.bfloat16).to(v.dtype), v, o * old",
        "weights rounded to bfloat16",
    ),
    Mutant("    top *= log2_scale\n", "", "what is saved is not scaled"),
    Mutant(
        "NEGATIVE=scale < 0",
        "NEGATIVE=False",
        "of a negative scale the smallest score as the largest",
    ),
    Mutant(
        "factor = tl.where(tl.abs(top * factor) < LIMIT, factor, ",
        "factor = tl.where(top == top, factor, ",
        "weights far above 1 where scores are huge",
    ),
    Mutant(
        "2.0**56 if top.dtype == tl.float64 else 2.0**27",
        "2.0**27",
        "float64 with a power of 2 where it makes a difference",
    ),
    # --- heads, parts, places
    Mutant(
        "sample, first_head = place // n_kv_heads, place % n_kv_heads * n_repeats",
        "sample, first_head = place // n_kv_heads, place % n_kv_heads",
        "dk and dv of other heads' queries",
    ),
    Mutant(
        "aligned = t.data_ptr() % 16 == 0 and all([p > 0 and p % 16 == 0 for p in pitches])",
        "aligned = t.data_ptr() % 16 == 0",
        "rows that TMA cannot read",
    ),
    Mutant(
        "kv_head = (first_head // n_repeats).to(tl.int64)",
        "kv_head = (first_head % n_repeats).to(tl.int64)",
        "heads of q take those of k and v in turn",
    ),
    Mutant(
        "i, head, d = row // PACKED, (first_head + row % PACKED)",
        "i, head, d = row // PACKED, (first_head + row * 0)",
        "the first head of a tile for all",
    ),
    Mutant(
        "end = tl.minimum(length, (part + 1) * keys_per_part)",
        "end = length",
        "keys in several parts",
    ),
    Mutant(
        "keys_per_part = host.cdiv(host.cdiv(n_keys, plan.n_parts), tile.n) * tile.n",
        "keys_per_part = host.cdiv(n_keys, plan.n_parts) // tile.n * tile.n or tile.n",
        "more parts than were planned",
    ),
    Mutant(
        "        total = total * old + part_total * new\n",
        "        total = total + part_total\n",
        "parts added up as they are",
    ),
    Mutant("        rows += n_rows\n", "", "the first part again and again"),
    Mutant(
        "place, i = row // n_queries, row % n_queries",
        "place, i = row // n_queries, row",
        "another query's mask",
    ),
    Mutant(
        "(head * stride_qh + i.to(tl.int64) * stride_qs)[:, None]\n    q = ",
        "(head * stride_qh + i * stride_qs)[:, None]\n    q = ",
        "int32 rows of q",
    ),
    Mutant(
        "first_head + row % PACKED).to(tl.int64), tl",
        "first_head + row % PACKED), tl",
        "int32 heads of q",
    ),
    Mutant(
        "(rows.to(tl.int64) * stride + d)\n    if desc",
        "(rows * stride + d)\n    if desc",
        "int32 rows of k and v",
    ),
    Mutant("stride = out.stride(0)", "stride = 0", "all parts in one place"),
    # --- backward
    Mutant(
        "ds = p * (device.dot(do, v.T, None, PRECISION, COMPUTE) - delta[:, None])",
        "ds = p * device.dot(do, v.T, None, PRECISION, COMPUTE)",
        "delta forgotten in dq",
    ),
    Mutant("    dq *= tl.cast(scale, COMPUTE)\n", "", "dq without the scale"),
    Mutant("dk * tl.cast(scale, COMPUTE), 0.0)", "dk * log2_scale, 0.0)", "log₂ e in dk"),
    Mutant(
        "ds = tl.where((js >= lowest) & (js <= highest), ds, 0.0)",
        "ds = tl.where(js <= highest, ds, 0.0)",
        "dq without the left side of the window",
    ),
    Mutant(
        "(j - right)[:, None], tl.minimum(j + left, n_queries - 1)",
        "(j - left)[:, None], tl.minimum(j + right, n_queries - 1)",
        "left and right exchanged in dk and dv",
    ),
    Mutant(
        "head, tile = t // n_tiles, t % n_tiles",
        "head, tile = t // n_tiles * 0, t % n_tiles",
        "dk and dv of one head of a group",
    ),
    Mutant(
        "tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        "tl.minimum(s - lse, 0.0)",
        "NaN lost in the gradients",
    ),
    Mutant(
        "ds = tl.where(seen, ds, 0.0)  # 0 times NaN is NaN",
        "ds = ds  # 0 times NaN is NaN",
        "gradients of hidden scores",
    ),
    Mutant(
        "do, q, k, v = _dense(do), _dense(q)",
        "do, q, k, v = do, _dense(q)",
        "a gradient of strides 0 read as if dense",
    ),
    Mutant(
        "grads = [None if g is None else g.zero_() for g in grads]",
        "grads = [*grads]",
        "no queries: gradients never written",
    ),
    Mutant('"tf32x3" if tensor_cores', '"tf32" if tensor_cores', "float32 rounded to TF32"),
    Mutant("    @host.once\n", "", "a second derivative that is wrong in silence"),
]
