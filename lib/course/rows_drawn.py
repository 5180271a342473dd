"""Drawings of notebooks 30 and 25: which tile is whose, strips of rows, rows that are folded."""

from lib.course.show import show_figure

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

DARK, MIDDLE, LIGHT = "#1f4e79", "#b9c9dd", "white"


def cell(ax, x, y, width=1.0, height=1.0, face=LIGHT, text="", hatch=None, edge="black"):
    ax.add_patch(
        Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.8)
    )
    colour = "white" if face == DARK else "black"
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=colour)


def canvas(width, height, n_axes=1):
    figure, axes = plt.subplots(1, n_axes, figsize=(width, height), layout="constrained")
    for ax in [axes] if n_axes == 1 else axes:
        ax.set_axis_off()
        ax.set_aspect("equal")
        ax.invert_yaxis()
    return figure, axes


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
