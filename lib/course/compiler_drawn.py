"""Drawings of notebooks 05 and 06: a graph break, and how the compiler's kernels cut up a tensor."""

from lib.course.canvas import DARK, LIGHT, MIDDLE, canvas, cell
from lib.course.show import show_figure


def show_graph_break(graphs):
    """with_print of notebook 05: its lines, and what runs in their place: graph, Python, graph."""
    first_ops, second_ops = (_ops(graph) for graph in graphs)
    figure, ax = canvas(9.0, 2.1)
    lines = [
        "def with_print(x):",
        "    y = torch.relu(x)",
        '    print("largest:", y.max())',
        "    return 2 * y",
    ]
    for k, line in enumerate(lines):
        ax.text(0, 0.75 + 0.8 * k, line, family="monospace", va="center", fontsize="medium")
    left, width = 7.4, 8.0
    pieces = [
        (0.2, f"guards on x   →   graph 1:  {first_ops}", MIDDLE, None),
        (1.6, 'Python:  print("largest:", …)', LIGHT, "//"),
        (3.0, f"guards on y   →   graph 2:  {second_ops}", MIDDLE, None),
    ]
    for top, text, face, hatch in pieces:
        cell(ax, left, top, width, 0.9, face, hatch=hatch)
        paper = {"facecolor": "white" if hatch else "none", "edgecolor": "none", "pad": 1.5}
        ax.text(left + width / 2, top + 0.45, text, ha="center", va="center", bbox=paper)
    for top in (1.15, 2.55):
        ax.annotate(
            "", (left + width / 2, top + 0.42), (left + width / 2, top - 0.02),
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    for y, top in ((1.55, 0.65), (2.35, 2.05), (3.15, 3.45)):
        ax.annotate(
            "", (left - 0.15, top), (6.2, y),
            arrowprops={"arrowstyle": "-", "linestyle": ":", "color": "grey"},
        )  # fmt: skip
    ax.text(left + width + 0.3, 0.65, "compiled", va="center")
    ax.text(left + width + 0.3, 2.05, "not compiled", va="center")
    ax.text(left + width + 0.3, 3.45, "compiled, with\nguards of its own", va="center")
    ax.set(xlim=(-0.2, left + width + 3.2), ylim=(4.1, 0.0))
    show_figure(
        figure,
        "Four lines of with_print on the left. On the right the three pieces that run in their place, one "
        f"after another: guards on x and graph 1 ({first_ops}), compiled; the print, in Python; "
        f"guards on y and graph 2 ({second_ops}), compiled.",
    )


def _ops(graph):
    """The names of an FX graph's calls, as relu and max."""
    calls = (node.target for node in graph.graph.nodes if node.op.startswith("call"))
    return ", ".join(getattr(target, "__name__", target) for target in calls)


def show_flat(n_rows=4, n_cols=6, tile=8):
    """A matrix as one line of numbers, cut into tiles; under each number its column."""
    figure, ax = canvas(9.0, 1.4)
    n, size = n_rows * n_cols, 0.62
    for place in range(n):
        face = MIDDLE if place // tile % 2 else LIGHT
        cell(ax, place * size, 1.0, size, 0.6, face, str(place))
        mine = place % n_cols
        cell(ax, place * size, 2.3, size, 0.6, DARK if mine == 0 else LIGHT, str(mine))
    for k in range(n // tile):
        ax.text((k + 0.5) * tile * size, 0.75, f"program {k}", ha="center")
    ax.text(-0.2, 1.3, "x2 = xindex", ha="right", va="center", family="monospace")
    ax.text(-0.2, 2.6, f"x0 = xindex % {n_cols}", ha="right", va="center", family="monospace")
    ax.text(n * size + 0.2, 1.3, "the place in x and y", va="center")
    ax.text(n * size + 0.2, 2.6, "the place in bias", va="center")
    ax.set(xlim=(-4.4, n * size + 4.6), ylim=(3.1, 0.2))
    show_figure(
        figure,
        f"A matrix of {n_rows} rows and {n_cols} columns as one line of {n} numbers, cut into tiles of {tile}, "
        "a program each; a tile takes no notice of where a row ends. Under each number stands its column, the "
        f"remainder by {n_cols}: 0 to {n_cols - 1}, again and again.",
    )


def show_reductions(n_rows=4, tile_rows=2, pieces=4):
    """What one program of a persistent and of a looped reduction holds, and how it walks along rows."""
    figure, axes = canvas(9.0, 3.4, 2)
    for ax, title in zip(axes, ("persistent: one tile, whole rows", "looped: a tile walks, twice")):
        looped = title.startswith("looped")
        for row in range(n_rows):
            mine = row < tile_rows
            for piece in range(pieces):
                cell(ax, 1.2 * piece, 0.7 * row, 1.2, 0.6, MIDDLE if mine and not looped else LIGHT)
            if looped and mine:
                cell(ax, 0, 0.7 * row, 1.2, 0.6, MIDDLE)
        ax.text(-0.2, 0.65, "XBLOCK\nrows", ha="right", va="center", fontsize="small")
        width = 1.2 if looped else 1.2 * pieces
        ax.annotate(
            "", (0, -0.25), (width, -0.25), arrowprops={"arrowstyle": "<->"}, annotation_clip=False
        )
        ax.text(width / 2, -0.45, "R0_BLOCK", ha="center", fontsize="small")
        walks = ("first walk: add up", "second walk: use the sum, store") if looped else ()
        for k, what in enumerate(walks):
            y = 0.7 * n_rows + 0.3 + 0.5 * k
            ax.annotate("", (1.2 * pieces, y), (0, y), arrowprops={"arrowstyle": "->"})
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            ax.text(0.6 * pieces, y, what, ha="center", va="center", bbox=paper, fontsize="small")
        ax.set(xlim=(-1.3, 1.2 * pieces + 0.1), ylim=(0.7 * n_rows + 1.1, -1.0))
        ax.set_title(title, fontsize="medium")
    show_figure(
        figure,
        "Twice the same four rows. Persistent: the tile of one program, shaded, covers two whole rows, so "
        "R0_BLOCK is as long as a row. Looped: the tile covers the beginning of two rows and walks along them "
        "twice, first to add up, then to use the sum and store.",
    )


def show_loop_nests():
    """Loop nests as boxes of what they keep and what they reduce: which of them may share a kernel."""
    figure, axes = canvas(9.0, 1.7, 3)
    boxes = (
        ("one kernel: the same sizes", ("sum over the row", 3, 2), ("maximum of the row", 3, 2)),
        ("one kernel: elements = kept · reduced", ("x · x", 3, 2), ("sum over the row", 3, 2)),
        ("two kernels: the sizes differ", ("mean over W", 3, 2), ("mean over H", 1.2, 2)),
    )
    for ax, (title, *nests) in zip(axes, boxes):
        for k, (name, width, height) in enumerate(nests):
            x = 4.2 * k + (3 - width) / 2
            cell(ax, x, 0.8, width, height, MIDDLE if "two" not in title or k == 0 else LIGHT)
            ax.text(x + width / 2, 1.8, name.replace(" over", "\nover").replace(" of", "\nof"),
                    ha="center", va="center", fontsize="small")  # fmt: skip
            ax.text(x + width / 2, 3.15, "kept", ha="center", fontsize="small")
            ax.text(x - 0.12, 1.8, "reduced", rotation="vertical",
                    ha="right", va="center", fontsize="small")  # fmt: skip
        ax.set(xlim=(-0.9, 7.4), ylim=(3.5, 0.4))
        ax.set_title(title, fontsize="medium")
    show_figure(
        figure,
        "Three pairs of loop nests as boxes, as wide as what they keep, as high as what they reduce. "
        "A sum and a maximum of the same rows have boxes of one size: one kernel. A product of the elements "
        "and the sum over them have boxes of one size: one kernel. A mean over W and then over H have boxes "
        "of two widths: two kernels.",
    )


def show_threads(owner, per_row=128):
    """Which thread of a program holds which elements of a tile; owner: the thread of each element."""
    rows = owner.view(-1, per_row).tolist()
    figure, ax = canvas(10.5, 3.4)
    ax.set_aspect("auto")
    for r, row in enumerate(rows):
        starts = [c for c in range(per_row) if c == 0 or row[c] != row[c - 1]]
        for start, end in zip(starts, [*starts[1:], per_row]):
            face = MIDDLE if row[start] // 32 % 2 else LIGHT
            cell(ax, start, r, end - start, 0.85, face, edge="grey")
            middle = ((start + end) / 2, r + 0.42)
            ax.text(*middle, row[start], ha="center", va="center", fontsize=8)
        label = f"{r * per_row}–{(r + 1) * per_row - 1}, warp {row[0] // 32}"
        ax.text(-1, r + 0.42, label, ha="right", va="center", fontsize=9)
    ax.set(xlim=(-24, per_row), ylim=(len(rows), -0.7))
    width = sum(thread == rows[0][0] for thread in rows[0])
    ax.set_title(f"elements of the tile: each box is {width} neighbours, with their thread")
    show_figure(
        figure,
        f"A tile of {owner.numel()} elements in {len(rows)} rows of {per_row}, each with its warp. Boxes of "
        f"{width} elements are numbered by thread: {rows[0][0]} to {rows[0][-1]} in the first row, "
        f"{rows[-1][0]} to {rows[-1][-1]} in the last. After thread {max(map(max, rows))} comes 0 again.",
    )
