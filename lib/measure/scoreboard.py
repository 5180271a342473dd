"""The README's pictures: versions of ops as a share of the ceiling, from the recorded results.

python -m lib.measure.scoreboard      writes data/results/scoreboard.png and three_ops.png
"""

from lib.measure import registry
from lib.recorded import results

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend without a screen

PATH = results.FOLDER / "scoreboard.png"
SMALL, THREE = PATH.with_name("three_ops.png"), ("rope", "bias_gelu_dropout_add", "linear_glu")
STYLES = {
    "eager": ("#d9d9d9", ""),
    "compiled": ("#9db7d5", "//"),
    "triton": ("#1f4e79", ""),
    "cuda": ("#5b8c5a", "xx"),
    "cublas": ("#e0c080", ".."),
}


def shares(op, gpu=results.REFERENCE_GPU):
    """{(dtype, gradients): {version: % of ceiling}} of the op's first shape, and the record; or None."""
    record = results.load(op.name, gpu)
    if record is None:
        return None
    groups = {}
    for row in record["rows"]:
        first = row["shape"] == list(op.bench_shapes[0]) and row.get("configuration") is None
        if first and row.get("ceiling_pct"):
            group = groups.setdefault((row["dtype"], row["gradients"]), {})
            group[row["version"]] = row["ceiling_pct"]
    return groups, record


def draw():
    """Write both pictures; returns the path of the large one, or None when nothing is recorded yet."""
    ops = [(op, *result) for op in registry.OPS.values() if (result := shares(op))]
    if not ops:
        return None
    figure, axes = plt.subplots(
        len(ops), 1, figsize=(9, 0.6 + 2.9 * len(ops)), layout="constrained", squeeze=False
    )
    for ax, (op, groups, record) in zip(axes[:, 0], ops):
        _draw_op(ax, op, groups, record)
    figure.savefig(PATH, dpi=110)
    plt.close(figure)
    _draw_three([(op, groups["bfloat16", True]) for op, groups, _ in ops if op.name in THREE])
    return PATH


def _draw_three(ops):
    figure, ax = plt.subplots(figsize=(7, 2.7), layout="constrained")
    versions = [v for v in STYLES if all(v in group for _, group in ops)]
    labels = [f"{op.title}\n{'×'.join(map(str, op.bench_shapes[0]))}" for op, _ in ops]
    _bars(ax, versions, labels, [group for _, group in ops])
    ax.set(ylabel="% of the ceiling", ylim=(0, 119))
    ax.set_title("bfloat16, forward and backward, on an NVIDIA H200", fontsize="medium")
    figure.savefig(SMALL, dpi=130)
    plt.close(figure)


def _bars(ax, versions, labels, groups):
    width = 0.8 / len(versions)
    for k, version in enumerate(versions):
        color, hatch = STYLES[version]
        x = [i + width * (k - (len(versions) - 1) / 2) for i in range(len(groups))]
        height = [group.get(version, 0) for group in groups]
        bars = ax.bar(x, height, width, color=color, hatch=hatch, edgecolor="black", label=version)
        ax.bar_label(bars, [f"{h:.0f}" if h else "" for h in height], fontsize=7)
    ax.axhline(100, color="black", linestyle="--", linewidth=1)
    ax.set_xticks(range(len(groups)), labels, fontsize="small")
    ax.legend(loc="upper right", ncols=len(versions), fontsize="small")


def _draw_op(ax, op, groups, record):
    labels = [f"{dtype}\n{'forward + backward' if grad else 'forward'}" for dtype, grad in groups]
    versions = set().union(*groups.values())
    _bars(ax, [version for version in STYLES if version in versions], labels, list(groups.values()))
    shape = "×".join(map(str, op.bench_shapes[0]))
    # float32 products on tensor cores exceed the ceiling, which is that of the float32 units
    highest = max(max(group.values()) for group in groups.values())
    ax.set(ylabel="% of the ceiling", ylim=(0, max(128, 1.2 * highest)))
    ax.set_title(f"{op.name}: {op.title}, {shape}, {results.where(record)}", fontsize="medium")


if __name__ == "__main__":
    print(draw() or results.NOT_RECORDED)
