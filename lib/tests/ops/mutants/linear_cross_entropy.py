"""Mutants of lib/ops/linear_cross_entropy.py."""

from lib.measure.mutants import Mutant

MUTANTS = [
    Mutant(
        "in_range = (label >= 0) & (label < n_cols)",
        "in_range = (label >= 0) & (label <= n_cols)",
        "a label of V is one of what memory held",
    ),
    Mutant(
        "in_range = (label >= 0) & (label < n_cols)",
        "in_range = label < n_cols",
        "a negative label is read before the row",
    ),
    Mutant(
        "total = total * tl.exp(top - shift) + ",
        "total = total + ",
        "sums of earlier tiles relative to another maximum",
    ),
    Mutant(
        'shift = tl.where(new_top == -float("inf"), 0.0, new_top)',
        "shift = new_top",
        "NaN after a tile of -inf alone",
    ),
    Mutant(
        'z = tl.where(cols < n_cols, _capped(z, SOFTCAP), -float("inf"))',
        "z = _capped(z, SOFTCAP)",
        "what lies behind a row is counted",
    ),
    Mutant(
        "loss = log_total - (1.0 - SMOOTHING) * (of_label - top)",
        "loss = lse - (1.0 - SMOOTHING) * of_label - SMOOTHING * top",
        "a loss near 0 has lost its digits",
    ),
    Mutant(
        "tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))",
        "tl.store(losses_ptr + row, loss)",
        "ignored labels have a loss",
    ),
    Mutant(
        "dz = tl.where(ignored, 0.0, dz * scale)",
        "dz = dz * scale",
        "ignored labels have a gradient",
    ),
    Mutant(
        "dz = tl.where(ignored, 0.0, dz * scale)",
        "dz = dz * tl.where(ignored, 0.0, scale)",
        "an ignored row of NaN has a gradient of NaN",
    ),
    Mutant(
        'scale = tl.where(in_range, tl.full((), 1.0, COMPUTE), float("nan"))',
        "scale = tl.full((), 1.0, COMPUTE)",
        "a label out of range has a gradient",
    ),
    Mutant(
        "                dz -= SMOOTHING / tl.cast(n_cols, COMPUTE)\n",
        "                dz -= 0.0\n",
        "the smoothed part of the gradient forgotten",
    ),
    Mutant("dz - (1.0 - SMOOTHING), dz)", "dz - 1.0, dz)", "the label's own part not smoothed"),
    Mutant("slope += 2.0 * Z_LOSS", "slope += Z_LOSS", "the slope of the z-loss without its 2"),
    Mutant("dz *= 1.0 - t * t", "dz *= 1.0", "the soft cap's slope forgotten"),
    Mutant(
        "    of_label = _capped(of_label, SOFTCAP)\n\n", "\n", "the label's logit is not capped"
    ),
    Mutant(
        "t = tl.where(s < 0.03, a + a * s * series, t)", "t = t * 1.0", "tanh without digits near 0"
    ),
    Mutant("t = tl.where(a < 0, -t, t)", "t = t * 1.0", "tanh of negative numbers is positive"),
    Mutant(
        "pitch = host.cdiv(n_cols, 16) * 16",
        "pitch = n_cols",
        "rows that begin anywhere, unaligned",
    ),
    Mutant(
        "(logits, labels[rows], *(",
        "(logits, labels, *(",
        "each chunk with the labels of the first",
    ),
    Mutant("beta=int(start > 0))", "beta=0)", "dweight of the last chunk alone"),
    Mutant("beta=int(cols.start > 0))", "beta=0)", "dx of the last columns alone"),
    Mutant(
        "for a, b in ((0, whole), (whole, n_cols)) if a < b]",
        "for a, b in ((0, whole),) if a < b]",
        "the last columns forgotten",
    ),
    Mutant(
        "n_rows // _FEWEST_ROWS))", "n_rows // 128))", "chunks of so few rows that W is what costs"
    ),
    Mutant(
        "summed_in = host.sum_dtype(x.dtype) if plan.wide else _dweight_dtype(x.dtype)",
        "summed_in = _dweight_dtype(x.dtype)",
        "dweight rounded chunk after chunk where it is to be float32",
    ),
    Mutant(
        "return torch.float32 if dtype == torch.float16 else dtype",
        "return dtype",
        "dweight overflows in float16",
    ),
    Mutant(
        "scale = dloss / _n_counted(labels, options).clamp(min=1)",
        "scale = dloss / labels.numel()",
        "gradients of a mean over ignored labels too",
    ),
    Mutant(".clamp(min=1)", "", "gradients of NaN where all labels are ignored"),
    Mutant(".nan_to_num(0.0, 0.0, 0.0)", "", "an infinity upstream reaches the rows of others"),
    Mutant(
        "scale = torch.where(largest > 0, largest, 1.0)",
        "scale = largest",
        "0/0 where no gradient comes from upstream",
    ),
    Mutant(
        "scale = torch.where(largest > 0, largest, 1.0)",
        "scale = torch.ones_like(largest)",
        "float16: 1/N from upstream underflows",
    ),
    Mutant("        ctx.gave_away = True\n", "", "a second backward scales what it gave away"),
    Mutant("y = t.data if", "y = t if", "who changes the gradient breaks the second backward"),
    Mutant(
        "has_grads = [needed and options.reduction",
        "has_grads = [options.reduction",
        "a frozen weight costs a product",
    ),
    Mutant("return losses.view(labels.shape), dx", "return losses, dx", "losses all in one row"),
    Mutant("    @host.once\n", "", "a second derivative that is wrong in silence"),
]
