"""README's pictures, and the table of lib/ops/README: ops' shares of the ceiling, from the recorded results.

python -m lib.measure.scoreboard      writes data/results/scoreboard.png and three_ops.png, prints the table

Each file holds its numbers as text too, so a test can tell whether it shows today's records.
"""

import io

from lib.measure import registry
from lib.recorded import results

import matplotlib
from PIL import Image, PngImagePlugin

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend without a screen

PATH = results.FOLDER / "scoreboard.png"
SMALL = PATH.with_name("three_ops.png")
THREE = {
    "bias_gelu_dropout_add": (16384, 4096),
    # at rope's first shape the host limits forward and backward, and their times are unsteady
    "rope": (1, 16384, 64, 8, 128),
    "linear_glu": (16384, 1024, 4096),
}
STYLES = {
    "eager": ("#d9d9d9", ""),
    "compiled": ("#9db7d5", "//"),
    "triton": ("#1f4e79", ""),
    "cuda": ("#5b8c5a", "xx"),
    "cublas": ("#e0c080", ".."),
}


def shares(op, shape=None, gpu=results.REFERENCE_GPU):
    """{(dtype, gradients): {version: (% of ceiling, its label)}} of a shape, by default the op's first.

    The label of an unsteady time, one whose p80 passes STEADY times its p20, begins with "~".
    """
    groups, record = {}, results.load(op.name, gpu)
    for row in record["rows"] if record else []:
        drawn = row["shape"] == list(shape or op.bench_shapes[0])
        if drawn and row.get("configuration") is None and row.get("ceiling_pct"):
            unsteady = "~" if results.spread_of(row) > results.STEADY else ""
            group = groups.setdefault((row["dtype"], row["gradients"]), {})
            group[row["version"]] = row["ceiling_pct"], f"{unsteady}{row['ceiling_pct']:.0f}"
    return groups


def draw():
    """Write both pictures; returns the path of the large one, or None when nothing is recorded yet."""
    ops = [(op, groups) for op in registry.OPS.values() if (groups := shares(op))]
    if not ops:
        return None
    figure, axes = plt.subplots(
        len(ops), 1, figsize=(9, 0.6 + 3 * len(ops)), layout="constrained", squeeze=False
    )
    figure.get_layout_engine().set(h_pad=0.12)  # a title stands clear of the panel above it
    for ax, (op, groups) in zip(axes[:, 0], ops):
        _draw_op(ax, op, groups)
    save(figure, PATH, scoreboard_text())
    _draw_three()
    return PATH


def scoreboard_text():
    """The numbers of the large picture, a line for each group of bars."""
    return "\n".join(
        f"{op.name}, {dtype}, {_passes(gradients)}: {_listed(group)}"
        for op in registry.OPS.values()
        for (dtype, gradients), group in shares(op).items()
    )


def three_ops_text():
    """The small picture in words: its alt text in the README."""
    ops = ". ".join(f"{name}: {_listed(group)}" for name, group in _three().items())
    return f"Bar chart, % of the ceiling on an H200, bfloat16, forward and backward. {ops}."


def table_cells(op):
    """The table's cells for an op, bfloat16: shape, eager / compiled / Triton forward, then both passes.

    An op without records has words in their place.
    """
    groups = shares(op)
    letters = op.letters.replace("...", "M").replace(" ", "×")
    shape = f"{letters} = {'×'.join(map(str, op.bench_shapes[0]))}".removeprefix("M = ")
    percent = (
        " / ".join(groups["bfloat16", gradients][v][1] for v in ("eager", "compiled", "triton"))
        if groups
        else results.NOT_RECORDED
        for gradients in (False, True)
    )
    return " | ".join([shape, *percent])


def _three():
    return {name: shares(registry.OPS[name], s)["bfloat16", True] for name, s in THREE.items()}


def _listed(group):
    return ", ".join(f"{version} {group[version][1]}" for version in STYLES if version in group)


def _passes(gradients):
    return "forward + backward" if gradients else "forward"


def _draw_three():
    figure, ax = plt.subplots(figsize=(7, 2.7), layout="constrained")
    labels = [
        f"{registry.OPS[name].title}\n{'×'.join(map(str, shape))}" for name, shape in THREE.items()
    ]
    groups = list(_three().values())
    _bars(ax, [v for v in STYLES if all(v in group for group in groups)], labels, groups)
    ax.set(ylabel="% of the ceiling", ylim=(0, 128))
    ax.set_title("bfloat16, forward and backward, on an NVIDIA H200", fontsize="medium")
    save(figure, SMALL, three_ops_text())


def _bars(ax, versions, labels, groups):
    width = 0.8 / len(versions)
    over_the_line = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for k, version in enumerate(versions):
        color, hatch = STYLES[version]
        x = [i + width * (k - (len(versions) - 1) / 2) for i in range(len(groups))]
        height, text = zip(*[group.get(version, (0, "")) for group in groups])
        bars = ax.bar(x, height, width, color=color, hatch=hatch, edgecolor="black", label=version)
        for label in ax.bar_label(bars, text, padding=2, fontsize=7):
            label.set_bbox(over_the_line if label.get_text() else None)
    ax.axhline(100, color="black", linestyle="--", linewidth=1)
    ax.set_xticks(range(len(groups)), labels, fontsize="small")
    ax.legend(loc="upper right", ncols=len(versions), fontsize="small")


def _draw_op(ax, op, groups):
    labels = [f"{dtype}\n{_passes(gradients)}" for dtype, gradients in groups]
    versions = set().union(*groups.values())
    _bars(ax, [version for version in STYLES if version in versions], labels, list(groups.values()))
    shape = "×".join(map(str, op.bench_shapes[0]))
    # float32 products on tensor cores exceed the ceiling, which is that of the float32 units
    highest = max(percent for group in groups.values() for percent, _ in group.values())
    ax.set(ylabel="% of the ceiling", ylim=(0, max(135, 1.25 * highest)))
    where = results.where(results.load(op.name, results.REFERENCE_GPU))
    ax.set_title(f"{op.name}: {op.title}, {shape}, {where}", fontsize="medium")


def save(figure, path, text):
    """Write the picture; `text` goes into the file: a test can tell whether it shows today's records."""
    raw, information = io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(raw, format="png", dpi=160)
    plt.close(figure)
    information.add_itxt("Description", text)
    # 32 colours are enough for bars, and a third of the bytes
    Image.open(raw).convert("RGB").quantize(32).save(path, optimize=True, pnginfo=information)


if __name__ == "__main__":
    print(draw() or results.NOT_RECORDED)
    for op in registry.OPS.values():
        print(op.name, "|", table_cells(op))
