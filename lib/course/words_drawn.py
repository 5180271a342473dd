"""Drawings of notebook 47: groups and their scales, and which number stands where in a word."""

from lib.course.canvas import DARK, LIGHT, MIDDLE, canvas, cell
from lib.course.show import show_figure


def show_groups(n_rows=3, n_groups=4):
    """A weight cut into groups along K, and where their scales stand."""
    figure, ax = canvas(7.5, 2.6)
    for row in range(n_rows):
        for group in range(n_groups):
            mine = (row, group) == (1, 2)
            cell(ax, 2.0 * group, row, 2.0, 0.9, MIDDLE if mine else LIGHT, "G numbers")
    right = 2.0 * n_groups + 1.2
    for group in range(n_groups):
        for row in range(n_rows):
            mine = (row, group) == (1, 2)
            cell(ax, right + 1.1 * row, 0.75 * group, 1.1, 0.68, MIDDLE if mine else LIGHT)
    ax.text(n_groups, -0.25, "W, (N, K): groups along K", ha="center")
    ax.text(right + 0.55 * n_rows, -0.25, "scales, (K/G, N)", ha="center")
    ax.set(xlim=(-0.2, right + 1.1 * n_rows + 0.3), ylim=(max(n_rows, 0.75 * n_groups) + 0.2, -0.7))
    show_figure(
        figure,
        "Three rows of a weight, each cut into four groups of G numbers along K. Beside it the scales, four "
        "rows of three: group 2 of row 1 has the scale in row 2, column 1.",
    )


def show_words(group=16):
    """A group's numbers in the order of K, the words that hold them, and what one shift and one AND leave."""
    figure, ax = canvas(7.5, 4.3)
    quarter, n_words = group // 4, group // 8
    for k in range(group):
        cell(ax, k, 0, 1, 0.9, MIDDLE if k % quarter // 2 == 0 else LIGHT, str(k))
    for q in range(5):
        ax.plot([q * quarter] * 2, [-0.25, 1.15], color="black", linewidth=2)
    for q in range(4):
        ax.text((q + 0.5) * quarter, -0.35, f"quarter {q}", ha="center", fontsize="small")
    for j in range(n_words):
        _word(ax, j, quarter, 2.4 + 1.3 * j, f"word {j}", MIDDLE if j == 0 else LIGHT)
    top = 2.4 + 1.3 * n_words + 0.4
    _word(ax, 0, quarter, top, "(word 0 >> 4)\n& 0x000F000F", DARK, quarter_alone=1)
    ax.text(8 + 0.1, 1.95, "bits 31 to 28 on the left, 3 to 0 on the right", fontsize="small")
    ax.set(xlim=(-0.4, group + 0.4), ylim=(top + 1.1, -1.0))
    show_figure(
        figure,
        f"A group of {group} numbers in four quarters. Word 0 holds the first two numbers of each quarter: "
        f"from bit 0 on 0, {quarter}, {2 * quarter}, {3 * quarter}, and from bit 16 on 1, {quarter + 1}, "
        f"{2 * quarter + 1}, {3 * quarter + 1}. Word 1 holds the next two of each. Word 0, shifted by 4 bits "
        f"and masked with 0x000F000F, leaves {quarter} in its low half and {quarter + 1} in its high half.",
    )


def _word(ax, j, quarter, y, name, face, quarter_alone=None):
    """One word, its highest bits on the left; quarter_alone: two numbers of that quarter alone."""
    ax.text(7.6, y + 0.45, name, ha="right", va="center")
    for place in range(8):
        half, q = divmod(7 - place, 4)
        if quarter_alone is None:
            text, colour = str(2 * j + q * quarter + half), face
        else:
            text = str(2 * j + quarter_alone * quarter + half) if q == 0 else ""
            colour = face if q == 0 else LIGHT
        cell(ax, 8 + place, y, 1, 0.9, colour, text)
    ax.plot([12, 12], [y - 0.1, y + 1.0], color="black", linewidth=2)
