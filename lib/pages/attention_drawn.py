"""Drawings of notebooks 45 and 48: causal tiles, products beside a softmax, sums, turns, parts of the keys."""

import heapq

from lib.course.canvas import DARK, LIGHT, MIDDLE, canvas, cell
from lib.course.show import show_figure
from lib.profiling.timeline import Span, plot_timeline


def show_tiles(kind_of, n_down=4, n_across=8, block_m=128, block_n=64):
    """The tiles of a causal call. kind_of(i, j, block_m, block_n): 0 skipped, 1 masked, 2 whole."""
    figure, ax = canvas(5.2, 3.0)
    for i in range(n_down):
        for j in range(n_across):
            kind = kind_of(i, j, block_m, block_n)
            face = (LIGHT, MIDDLE, DARK)[kind]
            cell(ax, j, 1.1 * i, 1, 1.1, face, ("skip", "mask", "all")[kind])
        ax.text(-0.15, 1.1 * (i + 0.5), f"program {i}", ha="right", va="center", fontsize="small")
    ax.text(n_across / 2, -0.2, f"keys, {block_n} a tile", ha="center", fontsize="small")
    ax.set(xlim=(-2.0, n_across + 0.1), ylim=(1.1 * n_down + 0.1, -0.6))
    show_figure(
        figure,
        f"A map of {n_down} by {n_across} tiles, {block_m} queries by {block_n} keys each, a program for each "
        "row: above the diagonal all say skip, two in each row say mask, and those to the left say all.",
    )


# --- products beside a softmax -------------------------------------------------------------------------------


def lanes_of(name, n_groups, beside, softmax=1.5, n_tiles=4):
    """Spans of the tensor cores and of each group's threads: a product takes 1, a softmax `softmax`.

    beside: whether a group asks for q kᵀ of the next tile together with p v, and softens beside the latter.
    """
    spans, free, threads = (
        [],
        0.0,
        [f"{name}: softmax" + f" {g}" * (n_groups > 1) for g in range(n_groups)],
    )

    def multiply(what, group, tile, ready):
        nonlocal free
        start = max(ready, free)
        free = start + 1
        label = f"{what}{tile}" + "ab"[group] * (n_groups > 1)
        spans.append(Span(f"{name}: tensor cores", label, start, free))
        return free

    waiting = [(0.0, group, 0) for group in range(n_groups)]
    while waiting:
        now, group, tile = heapq.heappop(waiting)
        if tile == n_tiles:
            multiply("pv", group, tile - 1, now) if beside else None
            continue
        there = multiply("qk", group, tile, now)
        over = multiply("pv", group, tile - 1, now) if beside and tile > 0 else there
        spans.append(Span(threads[group], str(tile), there, there + softmax))
        now = max(over, there + softmax)
        if not beside:
            now = multiply("pv", group, tile, now)
        heapq.heappush(waiting, (now, group, tile + 1))
    return spans


def show_overlap():
    """A sketch: one group in turns, one with a product beside its softmax, two of these."""
    kinds = [("1 in turns", 1, False), ("2 beside p v", 1, True), ("3 two groups", 2, True)]
    spans = [span for kind in kinds for span in lanes_of(*kind)]
    figure = plot_timeline(spans, "a sketch: products by tile; a product takes 1, a softmax 1.5")
    figure.axes[0].set_xlabel("time, in no unit")
    show_figure(
        figure,
        "Lanes of tensor cores and of the threads that soften. In turns the tensor cores idle while a tile is "
        "softened. Beside p v half of them is hidden. With two groups the tensor cores have no gap after the "
        "first products.",
    )


# --- whose sums, and parts of the keys -----------------------------------------------------------------------


def show_sums(n=4):
    """The tiles of scores: dq adds up along a row of tiles, dk and dv down a column."""
    figure, axes = canvas(7.5, 3.1, 2)
    for ax, title, along in zip(
        axes, ("dq: a program for a row", "dk, dv: a program for a column"), (1, 0)
    ):
        for i in range(n):
            for j in range(i + 1):
                mine = (i if along else j) == 2
                cell(ax, j, 0.7 * i, 1, 0.7, MIDDLE if mine else LIGHT)
        if along:
            ax.annotate("", (n + 0.3, 1.75), (0.1, 1.75), arrowprops={"arrowstyle": "->"})
            cell(ax, n + 0.4, 1.4, 0.9, 0.7, DARK, "dq 2")
        else:
            ax.annotate("", (2.5, 0.7 * n + 0.3), (2.5, 1.5), arrowprops={"arrowstyle": "->"})
            cell(ax, 2, 0.7 * n + 0.35, 1, 0.6, DARK, "dk 2")
        ax.text(-0.15, 0.35 * n, "queries", rotation=90, ha="right", va="center", fontsize="small")
        ax.text(n / 2, -0.15, "keys", ha="center", fontsize="small")
        ax.set(xlim=(-0.6, n + 1.4), ylim=(0.7 * n + 1.1, -0.5), title=title)
    show_figure(
        figure,
        "The tiles of a causal call, twice. Left: an arrow goes along row 2 of the tiles to dq of these "
        "queries. Right: an arrow goes down column 2 to dk of these keys.",
    )


def starts_of(n, from_last):
    """{(program, tile of queries): when it starts} of a causal call in turns, where a tile takes 1.

    Program j has the j-th tile of keys, so it takes the tiles of queries from j on, or from the last down to j.
    It takes each of them behind the program before.
    """
    starts = {}
    for program in range(n):
        free = 0
        for tile in reversed(range(program, n)) if from_last else range(program, n):
            free = max(free, starts.get((program - 1, tile), -1) + 1)
            starts[program, tile] = free
            free += 1
    return starts


def show_turns(n=5):
    """When each program adds to which tile of dq, in turns: from the first queries, and from the last."""
    figure, axes = canvas(9.0, 2.6, 2)
    for ax, from_last in zip(axes, (False, True)):
        starts = starts_of(n, from_last)
        for (program, tile), at in starts.items():
            cell(ax, at, program, 1, 0.9, MIDDLE if tile == n - 1 else LIGHT, str(tile))
        for program in range(n):
            mine = {at for (j, _), at in starts.items() if j == program}
            for at in set(range(max(mine))) - mine:
                cell(ax, at, program, 1, 0.9, LIGHT, hatch="///", edge="#999999")
            ax.text(-0.2, program + 0.45, f"keys {program}", ha="right", va="center")
        end = max(starts.values()) + 1
        ax.annotate("", (2 * n - 0.5, n + 0.4), (0, n + 0.4), arrowprops={"arrowstyle": "->"})
        ax.text(0, n + 0.95, "time", va="center", fontsize="small")
        title = f"from the {'last' if from_last else 'first'} queries: {end} units"
        ax.set(xlim=(-2.2, 2 * n - 0.4), ylim=(n + 1.2, -0.3), title=title)
    first, last = (max(starts_of(n, which).values()) + 1 for which in (False, True))
    show_figure(
        figure,
        f"{n} programs in turns, one a row, each with a tile of keys; numbers are tiles of queries, hatched is "
        f"waiting. Left, from the first queries: later programs wait longer, and the last ends after {first} "
        f"units. Right, from the last queries: each waits one unit longer than the one before, has one tile "
        f"less, and all end after {last} units.",
    )


def show_parts(n_parts=4):
    """One query, its keys in parts, a program for each, and the second kernel."""
    figure, ax = canvas(7.5, 2.3)
    width = 2.2
    for part in range(n_parts):
        x = part * width
        cell(ax, x, 0, width, 0.7, MIDDLE if part % 2 else LIGHT, f"keys, part {part}")
        cell(ax, x + 0.35, 1.3, width - 0.7, 0.6, LIGHT, "m, l, o")
        arrow = {"arrowstyle": "->"}
        ax.annotate("", (x + width / 2, 1.25), (x + width / 2, 0.75), arrowprops=arrow)
        ax.annotate("", (n_parts * width / 2, 2.5), (x + width / 2, 1.95), arrowprops=arrow)
    cell(ax, n_parts * width / 2 - 1, 2.55, 2, 0.6, DARK, "o")
    ax.text(-0.2, 1.0, "a program each", ha="right", va="center", fontsize="small")
    ax.text(-0.2, 2.3, "a second launch", ha="right", va="center", fontsize="small")
    ax.set(xlim=(-3.0, n_parts * width + 0.1), ylim=(3.3, -0.2))
    show_figure(
        figure,
        f"The keys of one head in {n_parts} parts. A program for each part leaves its maximum m, its sum l and "
        "its o; a second launch joins them into one o.",
    )


def show_alignment(n_queries=3, n_keys=6):
    """What each query sees: counted from the first key, and from the last."""
    figure, axes = canvas(7.5, 2.2, 2)
    for ax, title, shift in zip(axes, ("top left", "bottom right"), (0, n_keys - n_queries)):
        for i in range(n_queries):
            for j in range(n_keys):
                cell(ax, j, 0.8 * i, 1, 0.8, MIDDLE if j <= i + shift else LIGHT)
            ax.text(-0.15, 0.8 * (i + 0.5), f"query {i}", ha="right", va="center", fontsize="small")
        ax.text(n_keys / 2, -0.15, "keys", ha="center", fontsize="small")
        ax.set(xlim=(-1.7, n_keys + 0.1), ylim=(0.8 * n_queries + 0.1, -0.5), title=title)
    show_figure(
        figure,
        f"{n_queries} queries and {n_keys} keys, seen ones shaded. Top left: query 0 sees key 0 alone. Bottom "
        f"right: query {n_queries - 1} sees all {n_keys} keys, and query 0 sees the first "
        f"{n_keys - n_queries + 1}.",
    )
