"""Drawings of notebooks 03, 07, 25 and 32: tiles and their programs, strips, folded rows, pieces and parts."""

from lib.course.canvas import DARK, LIGHT, MIDDLE, canvas, cell
from lib.course.show import show_figure
from lib.recorded import results

import matplotlib.pyplot as plt


def show_order_of_programs(n_down=4, n_across=4):
    """The tiles of a matrix with the numbers of their programs, columns first and rows first."""
    figure, axes = canvas(7.5, 3.4, 2)
    for ax, title in zip(axes, ("columns first", "rows first")):
        reads = []
        for row in range(n_down):
            for column in range(n_across):
                first = title == "columns first"
                pid = row * n_across + column if first else column * n_down + row
                together = pid < n_across
                reads += [(row * n_across + column, pid)] if together else []
                cell(ax, column, 0.7 * row, 1, 0.6, MIDDLE if together else LIGHT, str(pid))
        places = dict(reads)
        width, top = n_across / (n_down * n_across), 0.7 * n_down + 0.8
        for place in range(n_down * n_across):
            together = place in places
            cell(ax, place * width, top, width, 0.4, MIDDLE if together else LIGHT)
            if together:
                ax.text((place + 0.5) * width, top + 0.75, str(places[place]), ha="center")
        ax.text(0, top - 0.12, "the same tiles as they lie in memory", fontsize="small")
        ax.set(xlim=(-0.1, n_across + 0.1), ylim=(top + 1.0, -0.2), title=title)
    show_figure(
        figure,
        "A matrix of 4 by 4 tiles with the numbers of their programs, twice; programs 0 to 3, which run at "
        "once, are shaded. Columns first: they are the first row of tiles, one stretch of memory. "
        "Rows first: they are the first column of tiles, four pieces that lie apart.",
    )


def show_strips(n_strips=3, n_across=4):
    """Strips of rows, what each adds to the sum, and the second launch."""
    figure, ax = canvas(7.5, 3.6)
    width, height = 1.1, 1.2
    for strip in range(n_strips):
        for column in range(n_across):
            mine = (strip, column) == (1, 2)
            y = strip * height
            text = str(strip * n_across + column)
            cell(ax, column * width, y, width, height, MIDDLE if mine else LIGHT)
            ax.text(column * width + 0.14, y + 0.24, text, fontsize="small", ha="center")
            x = column * width + width / 2
            ax.annotate("", (x, y + height - 0.12), (x, y + 0.2), arrowprops={"arrowstyle": "->"})
    ax.text(-0.15, 1.5 * height, "dy and y\nin, dx out", ha="right", va="center")
    right = n_across * width + 1.9
    for strip in range(n_strips):
        for column in range(n_across):
            mine = (strip, column) == (1, 2)
            x, y = right + 0.7 * column, strip * height + 0.4
            cell(ax, x, y, 0.7, 0.4, MIDDLE if mine else LIGHT)
        ax.annotate(
            "", (right - 0.2, (strip + 0.5) * height), (n_across * width + 0.2, (strip + 0.5) * height),
            arrowprops={"arrowstyle": "->"},
        )  # fmt: skip
    ax.text(right + 1.4, -0.25, "partial, a row for each strip", ha="center")
    ax.text(n_across * width / 2, -0.25, "first launch, a program for each number", ha="center")
    bottom = n_strips * height + 0.9
    for column in range(n_across):
        cell(ax, right + 0.7 * column, bottom, 0.7, 0.4, DARK)
        x = right + 0.7 * (column + 0.5)
        ax.annotate(
            "", (x, bottom - 0.08), (x, n_strips * height + 0.05), arrowprops={"arrowstyle": "->"}
        )
    ax.text(right - 0.2, bottom + 0.22, "second launch: dbias", ha="right", va="center")
    ax.set(xlim=(-1.6, right + 3.0), ylim=(bottom + 0.6, -0.7))
    show_figure(
        figure,
        "A matrix cut into three strips of rows and four tiles of columns, a program for each, whose arrow "
        "runs down its strip. Each strip writes one row of partial; a second launch adds the rows of partial "
        "to dbias.",
    )


def show_fold(n_cols=5, n_rows=9, fold=4, piece=4):
    """Rows of an odd length: where each begins, and four of them taken as one."""
    figure, axes = canvas(7.5, 4.6, 2)
    ax = axes[0]
    for row in range(n_rows):
        for column in range(n_cols):
            place = row * n_cols + column
            begins = column == 0 and place % piece == 0
            face = DARK if begins else MIDDLE if place // piece % 2 else LIGHT
            cell(ax, column, row, 1, 0.9, face, str(place))
    ax.set(xlim=(-0.2, n_cols + 0.2), ylim=(n_rows + 0.1, -0.2))
    ax.set_title(f"{n_rows} rows of {n_cols}", fontsize="medium")
    ax, wide = axes[1], n_cols * fold
    whole = n_rows * n_cols // piece * piece
    for place in range(n_rows * n_cols):
        row, column = divmod(place, wide)
        face = DARK if column == 0 else MIDDLE if place // piece % 2 else LIGHT
        x, y = column % (wide // 2), 2.6 * row + (column >= wide // 2)
        cell(ax, x, y, 1, 0.9, face, str(place), hatch="///" if place >= whole else None)
    ax.set(xlim=(-0.2, wide // 2 + 0.2), ylim=(2.6 * (n_rows // fold + 1) + 0.4, -0.4))
    ax.set_title(f"{fold} rows as one of {wide}, each drawn on two lines", fontsize="medium")
    show_figure(
        figure,
        "Elements of nine rows of five, numbered as they lie in memory; a load takes four of them, shown by "
        "alternate shading. On the left only rows 0, 4 and 8 begin where a load begins. On the right four rows "
        "count as one of twenty: each such row begins where a load begins. Element 44, the last, is hatched: "
        "it is behind the last whole load.",
    )


def show_pieces(n_cols=781, n_rows=5, piece=4):
    """Where rows begin and end in pieces of 16 bytes: both ends of each row."""
    figure, ax = canvas(8.5, 2.9)
    behind = n_cols // piece * piece - piece  # the first place drawn of the right part
    width, right = 2 * piece, 2 * piece + 1.6
    for row in range(n_rows):
        shift, y = row * n_cols % piece, 1.2 * row
        for place in (*range(width), *range(behind, behind + width)):
            x, col = place if place < width else right + place - behind, place - shift
            its_piece = place // piece * piece
            whole = its_piece >= shift and its_piece + piece <= shift + n_cols
            own = 0 <= col < n_cols
            face = MIDDLE if own and not whole else LIGHT
            cell(ax, x, y, 1, 0.9, face, str(col) if own else "", hatch=None if own else "////")
        for x in (0, piece, width, right, right + piece, right + width):
            ax.plot([x, x], [y - 0.1, y + 1.0], color=DARK, linewidth=2.5)
        ax.text(-0.3, y + 0.45, f"row {row}", ha="right", va="center")
        ax.text(width + 0.8, y + 0.45, "…", ha="center", va="center")
        ax.text(right + width + 0.3, y + 0.45, f"program {row % piece}", va="center")
    ax.set(xlim=(-2.2, right + width + 3.2), ylim=(1.2 * n_rows, -0.2))
    show_figure(
        figure,
        f"Both ends of {n_rows} rows of {n_cols} columns, over pieces of {piece} numbers that begin at the "
        "heavy lines. Row 0 begins with a piece, row 1 one number later, row 2 two, row 3 three, and row 4 "
        "begins with a piece again, so rows 0 and 4 belong to one program. Shaded numbers lie in pieces "
        "that their row shares with a neighbour; hatched ones are the neighbour's.",
    )


def show_parts(n_parts=3):
    """A row in parts: what each program tells the others, and what it waits for."""
    figure, ax = canvas(8.0, 3.4)
    width, gap = 3.4, 0.5
    for part in range(n_parts):
        x = part * (width + gap)
        cell(ax, x, 0, width, 0.8, LIGHT, f"part {part} of x")
        cell(ax, x, 1.6, width, 0.8, MIDDLE, f"program {part} holds it")
        cell(ax, x + 0.1, 3.3, width / 2 - 0.1, 0.8, LIGHT, "maximum")
        cell(ax, x + width / 2, 3.3, width / 2 - 0.1, 0.8, LIGHT, "sum")
        cell(ax, x, 5.0, width, 0.8, LIGHT, f"part {part} of y")
        middle = x + width / 2
        for y, end in ((0.8, 1.6), (2.4, 3.3)):
            ax.annotate("", (middle, end), (middle, y), arrowprops={"arrowstyle": "->"})
        for other in range(n_parts):
            start = other * (width + gap) + width / 2
            ax.annotate("", (middle, 5.0), (start, 4.1), arrowprops={"arrowstyle": "->"})
    right = n_parts * (width + gap)
    for y, text in (
        (0.4, "the row, read once"),
        (2.0, "registers"),
        (3.7, "words in memory:\neach program waits for all"),
        (5.4, "written once"),
    ):
        ax.text(right, y, text, va="center")
    ax.set(xlim=(-0.1, right + 4.6), ylim=(6.0, -0.2))
    show_figure(
        figure,
        "A row in three parts, each read once and held by a program of its own. Each program writes maximum "
        "and sum of its part into words in memory, waits until the words of all parts are there, and writes "
        "its part of y.",
    )


_LINES = ("^:", "s--", "d-.", "v--", "o-")


def show_over_columns(rows, names, where):
    """Lines over the number of columns, a plot for each dtype of which there are several widths.

    rows: dictionaries with size ("16384×8192"), dtype, and % of the ceiling under each of the names, or None.
    Below, the names without a line of two widths.
    """
    widths = {}  # dtype: {name: [(columns, %)]}
    for row in rows or ():
        lines = widths.setdefault(row["dtype"].removeprefix("torch."), {n: [] for n in names})
        for name in names:
            if row.get(name) is not None:
                lines[name].append((int(row["size"].split("×")[1]), row[name]))
    panels = {d: lines for d, lines in widths.items() if max(map(len, lines.values())) > 1}
    alt = "% of the ceiling over the number of columns."
    if not panels:
        show_figure(None, alt)
        return
    size = (4.0 + 3.6 * (len(panels) - 1) + 1.6, 3.4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, (dtype, lines) in zip(axes[0], panels.items()):
        for name, look in zip(names, _LINES):
            if points := sorted(lines[name]):
                ax.plot(*zip(*points), look, label=name, markersize=5)
                shares = ", ".join(f"{n} {share:.0f}" for n, share in points)
                alt += f" {dtype}, {name}: {shares}."
        ax.set_xscale("log", base=2)
        ax.set(xlabel="columns", ylim=(0, 105))
        ax.set_title(dtype, fontsize="medium")
    axes[0][0].set_ylabel(f"% of the ceiling\n{where}", fontsize="small")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside right center", fontsize="small"
    )
    show_figure(figure, alt)
    for dtype, lines in widths.items():
        if missing := [name for name in names if len(lines[name]) < 2]:
            print(f"{results.NOT_RECORDED}, {dtype}: {', '.join(missing)}")
