"""The row ops at widths that nobody chose: checked on this GPU, then timed beside eager, compile and Liger.

Widths    drawn log-uniformly from 33 to 131,072 with a seed, 2²⁷ elements in all; compiled versions and Liger
          at every third of them in bfloat16, as compiling takes the time.
Method    lib.measure.bench.time_us: L2 flushed before each run, the median in µs; its share of the fewest bytes
          at the copy rate of this GPU. A version that fails the float64 check on a few rows is not timed.
Compiles  first, in as many processes as there are cores, which takes most of the time.
Saved     data/results/<gpu>/widths_<op>.json, with stamp and source hash, as soon as an op is done.

Picture   of what is saved, beside it: widths.png

    python -m lib.measure.widths [--op softmax] [--seed 0] [--count 40] [--versions triton eager compiled liger]
"""

import argparse
import random

from lib import machine
from lib.measure import bench, registry, roofline, scoreboard
from lib.measure.check import CheckError, check_against_float64
from lib.recorded import results

import matplotlib.pyplot as plt
import pandas as pd
import torch
from tqdm import tqdm

NAME = "widths"
ROW_OPS = (
    "softmax", "add_rms_norm", "layer_norm", "bias_gelu_dropout_add", "gelu", "lora_epilogue", "add_relu",
)  # fmt: skip
VERSIONS = ("triton", "eager", "compiled", "liger")
FEW = ("compiled", "liger")  # timed at every third width
LINES = {  # colour, marker and line of each version: hues of scoreboard.STYLES, darker, as lines are thin
    "eager": ("#a0a0a0", ".", ":"),
    "compiled": ("#7499c2", "s", "--"),
    "liger": ("#c06000", "^", "--"),
    "triton": ("#1f4e79", "o", "-"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ELEMENTS = 2**27
WIDEST = {"add_rms_norm": 32768, "layer_norm": 32768}


def draw(seed=0, count=40):
    """`count` widths, log-uniform from 33 to 131,072, ascending."""
    rng = random.Random(seed)
    return sorted(round(33 * (131072 / 33) ** rng.random()) for _ in range(count))


def liger(name):
    """Liger's version of an op, or None where it has none or is not installed."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.softmax import LigerSoftmaxFunction
    except ImportError:
        return None
    norm = LigerFusedAddRMSNormFunction.apply
    return {
        "softmax": LigerSoftmaxFunction.apply,
        "add_rms_norm": lambda x, r, w: norm(x, r, w, 1e-6, 0.0, "llama", False),
    }.get(name)


def versions_of(op, names=VERSIONS):
    """{name: version} of those named that there are."""
    known = {**bench.versions_of(op), "liger": liger(op.name)}
    return {name: known[name] for name in names if known.get(name)}


def run(ops=ROW_OPS, widths=None, dtypes=tuple(DTYPES), versions=VERSIONS):
    """Rows (dictionaries), one for each op, dtype, width, pass and version. Needs a GPU."""
    cases = [
        (registry.find(name), dtype, i, n_cols)
        for name in ops
        for dtype in dtypes
        for i, n_cols in enumerate(widths or draw())
        if n_cols <= WIDEST.get(name, n_cols)
    ]
    bench.compile_ahead(
        _compile,
        [(op.name, dtype, n, _to_compile(versions, i, dtype)) for op, dtype, i, n in cases],
    )
    rows = []
    with tqdm(cases, unit="width", desc="widths") as progress:
        for op, dtype, i, n_cols in progress:
            progress.set_postfix_str(f"{op.name} {dtype} {n_cols}")
            names = [name for name in versions if name not in FEW or _is_one_of_few(i, dtype)]
            rows += _measure(op, names, dtype, n_cols)
            torch.cuda.empty_cache()
    return rows


def _is_one_of_few(i, dtype):
    return i % 3 == 0 and dtype == "bfloat16"


def _to_compile(versions, i, dtype):
    of_few = FEW if _is_one_of_few(i, dtype) else ()
    return [name for name in versions if name == "triton" or name in of_few]


def _compile(name, dtype, n_cols, versions):
    op = registry.find(name).unfixed().configured()
    for version, run_version in versions_of(op, versions).items():
        # code of torch.compile is for this number of rows; of others only its kind counts
        n_rows = max(1, ELEMENTS // n_cols)
        shape = (n_rows if version == "compiled" else min(n_rows, 2048), n_cols)
        for gradients in (False, True):
            bench.run_once(run_version, op, shape, DTYPES[dtype], gradients)


def _measure(op, names, dtype, n_cols):
    """op: with all its configurations; what is random in it is fixed for checks alone."""
    fixed, free = op.configured(), op.unfixed().configured()
    shape, device, rows = (max(1, ELEMENTS // n_cols), n_cols), machine.device(), []
    inputs = free.inputs(shape, DTYPES[dtype], device)
    few = fixed.checked_inputs((min(shape[0], 35), n_cols), DTYPES[dtype], device)
    for name, version in versions_of(free, names).items():
        with bench.really_compiled(op.not_compiled):
            note = _failure(fixed, name, few)
            for passes in ("forward", "forward and backward"):
                row = {"op": op.name, "dtype": dtype, "columns": n_cols, "rows": shape[0]}
                row |= {"pass": passes, "version": name, "note": note}
                if not note:
                    gradients = passes != "forward"
                    call = bench.call_of(version, inputs, gradients)
                    timing = bench.time_us(call, rep_ms=20)
                    least = free.bytes_moved(shape, DTYPES[dtype].itemsize, gradients)
                    share = roofline.ceilings().attainable_us(least) / timing.median_us
                    row["time_us"] = round(timing.median_us, 2)
                    row["share_pct"] = round(100 * share, 1)
                rows.append(row)
    return rows


def _failure(op, name, inputs):
    """Why a version is not timed, or ''; compiled code is eager's, and is not compiled for few rows first."""
    if name == "compiled":
        return ""
    version = versions_of(op, (name,))[name]
    try:
        check_against_float64(version, op.eager, *inputs, slack=op.slack, name=name)
    except (CheckError, RuntimeError) as error:  # at some widths kernels of others do not launch
        return f"✘ not timed: {str(error).splitlines()[0]}"
    return ""


def summary(rows):
    """A line for each op, dtype, pass and version: lowest and median share, and how many are under 90 %.

    Of ours also which those are, and where another is more than 2 % ahead: (ours, the best of them).
    """
    table = pd.DataFrame(rows).dropna(subset=["share_pct"])
    others = table[table["version"] != "triton"]
    best = others.groupby(["op", "dtype", "pass", "columns"])["share_pct"].max().to_dict()
    lines = []
    for (*of, version), group in table.groupby(["op", "dtype", "pass", "version"], sort=False):
        shares = group.set_index("columns")["share_pct"]
        low = shares[shares < 90].to_dict()
        line = (
            f"{' '.join(of)} {version}: lowest {shares.min():.0f}, median {shares.median():.0f}, "
        )
        line += f"{len(low)} of {len(shares)} under 90"
        if version == "triton" and low:
            ahead = {n: (share, best.get((*of, n), 0.0)) for n, share in low.items()}
            behind = {n: both for n, both in ahead.items() if is_behind(*both)}
            line += f": {low}; behind: {behind or 'nowhere'}"
        lines.append(line)
    return lines


def is_behind(ours, best):
    """Whether another version is more than 2 % ahead."""
    return ours < 0.98 * best


def recorded(gpu):
    """The records of all ops that were swept on this kind of GPU."""
    names = [f"{NAME}_{name}" for name in ROW_OPS]
    return [
        results.load(name, gpu)
        for name in names
        if (results.FOLDER / gpu / f"{name}.json").exists()
    ]


def picture(records):
    """Draw bfloat16's shares of saved sweeps over widths, an op a row, into widths.png; returns its path."""
    table = pd.DataFrame(_in_bfloat16(records)).dropna(subset=["share_pct"])
    groups = table.groupby(["op", "pass"], sort=False)
    ops, passes = table["op"].unique(), table["pass"].unique()
    figure, axes = plt.subplots(
        len(ops), len(passes), figsize=(9, 2.2 * len(ops)), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for ax, ((op, what), group) in zip(axes.flat, groups):
        for version, (color, marker, line) in LINES.items():
            own = group[group["version"] == version].sort_values("columns")
            ax.plot(
                own["columns"], own["share_pct"], line, color=color, marker=marker, label=version
            )
        ax.axhline(90, color="black", linestyle=":", linewidth=1)
        ax.set(xscale="log", ylim=(0, 110))
        ax.set_title(f"{op}, {what}", fontsize="medium")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LINES)
    )
    figure.supxlabel("columns")
    figure.supylabel(f"% of the copy rate, bfloat16, {results.where(records[0])}")
    path = results.FOLDER / f"{NAME}.png"
    scoreboard.save(figure, path, picture_text(records))
    return path


def picture_text(records):
    """The picture in words: its alt text."""
    table, parts = pd.DataFrame(_in_bfloat16(records)).dropna(subset=["share_pct"]), {}
    shares = table[table["version"] == "triton"].groupby(["op", "pass"], sort=False)["share_pct"]
    for (op, what), of_op in shares:
        parts.setdefault(op, []).append(f"{what} {of_op.min():.0f} and {of_op.median():.0f}")
    words = "; ".join(f"{op} {', '.join(passes)}" for op, passes in parts.items())
    return f"% of the copy rate over widths, bfloat16, lowest and median of the op: {words}."


def _in_bfloat16(records):
    return [row for record in records for row in record["rows"] if row["dtype"] == "bfloat16"]


def main(argv=None):
    """Run the sweep on this GPU and save it; says so where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.measure.widths", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--op", choices=ROW_OPS, nargs="+", default=ROW_OPS)
    parser.add_argument("--versions", choices=VERSIONS, nargs="+", default=VERSIONS)
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=tuple(DTYPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="how many widths")
    options = parser.parse_args(argv)
    if not machine.HAS_GPU:
        where = "what was recorded is in data/results"
        raise SystemExit(f"the sweep needs a GPU, and torch sees none; {where}")
    print(machine.stamp().line())
    widths = draw(options.seed, options.count)
    defaults = parser.parse_args([])
    defaults.op = options.op
    for name in options.op:
        rows = run([name], widths, options.dtypes, options.versions)
        print("\n".join(summary(rows)), flush=True)
        if options == defaults:  # anything else is a part, or other widths
            sources = ("lib/measure/widths.py", f"lib/ops/{name}.py")
            saved = results.save(f"{NAME}_{name}", rows, sources)
            print("saved", saved.relative_to(results.ROOT), flush=True)
    if options == defaults:
        print("drawn", picture(recorded(results.gpu_slug())).relative_to(results.ROOT))


if __name__ == "__main__":
    main()
