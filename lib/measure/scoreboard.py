"""The README's picture: every op's versions as a share of the ceiling, from the recorded results.

python -m lib.measure.scoreboard      writes data/results/scoreboard.png
"""

from lib.measure import registry
from lib.recorded import results

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend without a screen

PATH = results.FOLDER / "scoreboard.png"
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
    found = {}
    for row in record["rows"]:
        first = row["shape"] == list(op.bench_shapes[0]) and row.get("configuration") is None
        if first and row.get("ceiling_pct"):
            group = found.setdefault((row["dtype"], row["gradients"]), {})
            group[row["version"]] = row["ceiling_pct"]
    return found, record


def draw():
    """Write the picture; returns its path, or None when nothing is recorded yet."""
    ops = [(op, *found) for op in registry.OPS.values() if (found := shares(op))]
    if not ops:
        return None
    figure, axes = plt.subplots(
        len(ops), 1, figsize=(9, 0.6 + 2.9 * len(ops)), layout="constrained", squeeze=False
    )
    for ax, (op, groups, record) in zip(axes[:, 0], ops):
        _draw_op(ax, op, groups, record)
    figure.savefig(PATH, dpi=110)
    plt.close(figure)
    return PATH


def _draw_op(ax, op, groups, record):
    labels = [f"{dtype}\n{'forward + backward' if grad else 'forward'}" for dtype, grad in groups]
    shown = set().union(*groups.values())
    styles = {version: style for version, style in STYLES.items() if version in shown}
    width = 0.8 / len(styles)
    for k, (version, (color, hatch)) in enumerate(styles.items()):
        x = [i + width * (k - (len(styles) - 1) / 2) for i in range(len(groups))]
        height = [group.get(version, 0) for group in groups.values()]
        bars = ax.bar(x, height, width, color=color, hatch=hatch, edgecolor="black", label=version)
        ax.bar_label(bars, [f"{h:.0f}" if h else "" for h in height], fontsize=7)
    ax.axhline(100, color="black", linestyle="--", linewidth=1)
    ax.set_xticks(range(len(groups)), labels, fontsize="small")
    shape = "×".join(map(str, op.bench_shapes[0]))
    # float32 products by tensor cores pass the ceiling, which is that of units for float32
    highest = max(max(group.values()) for group in groups.values())
    ax.set(ylabel="% of the ceiling", ylim=(0, max(128, 1.2 * highest)))
    ax.set_title(f"{op.name}: {op.title}, {shape}, {results.where(record)}", fontsize="medium")
    ax.legend(loc="upper right", ncols=len(styles), fontsize="small")


if __name__ == "__main__":
    print(draw() or results.NOT_RECORDED)
