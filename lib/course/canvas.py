"""What drawings of tiles are made of: cells in three shades, on axes that count downwards."""

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
