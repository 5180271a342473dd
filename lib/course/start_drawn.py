"""The picture of notebook 00, before and after."""

from lib.course.show import show_figure

import matplotlib.pyplot as plt
import torch


def dark_picture(size=256):
    """A ball in a dim room, (size, size) float32 numbers from 0 to 0.85."""
    y, x = torch.meshgrid(*(2 * [torch.linspace(-1, 1, size)]), indexing="ij")
    room = 0.25 + 0.1 * x - 0.1 * y
    height = (0.4 - (x - 0.1) ** 2 - y**2).clamp(min=0).sqrt()
    towards_light = (0.7 * height - 0.45 * (x - 0.1) - 0.55 * y) / 0.632  # the ball's radius
    ball = 0.03 + 0.82 * towards_light.clamp(0, 1)
    return torch.where(height > 0, ball, room)


def show_two(before, after):
    """Two pictures side by side, 0 black and 1 white."""
    figure, axes = plt.subplots(1, 2, figsize=(5.2, 2.8), layout="constrained")
    for ax, picture, title in zip(axes, (before, after), ("x", "brighten(x)")):
        ax.imshow(picture.cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[], title=title)
    show_figure(
        figure,
        "A ball in a dim room, twice. On the right it is brighter, and where it was brightest it is white.",
    )
