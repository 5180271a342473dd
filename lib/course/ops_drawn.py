"""Drawings of notebook 08: who asks which piece of an op, and which launches a wall leaves."""

from lib.course.canvas import DARK, LIGHT, MIDDLE, canvas, cell
from lib.course.show import show_figure

_ASKS = (
    ("eager PyTorch", "give me the numbers", "the function that launches"),
    ("autograd", "what is dx for this dy?", "register_autograd"),
    ("torch.compile", "which shape, dtype and strides?", "register_fake"),
    ("torch.compile", "may I drop or move the call?", "the schema: mutates_args"),
    ("torch.func.vmap", "what with one dimension more?", "register_vmap"),
)


def show_who_asks():
    """Who asks what of an op, and the piece that answers."""
    figure, ax = canvas(7.5, 2.9)
    for row, (who, question, piece) in enumerate(_ASKS):
        y = 1.3 * row
        cell(ax, 0, y, 4.2, 1, LIGHT, who)
        ax.annotate("", (12.2, y + 0.5), (4.3, y + 0.5), arrowprops={"arrowstyle": "->"})
        ax.text(8.2, y + 0.4, question, ha="center", va="bottom", fontsize="small")
        cell(ax, 12.3, y, 6.4, 1, MIDDLE, piece)
    ax.set(xlim=(-0.1, 18.8), ylim=(1.3 * len(_ASKS) - 0.2, -0.2))
    show_figure(
        figure,
        "Arrows from those who ask an op to the piece that answers: "
        + "; ".join(
            f"{who} asks “{question}”, answered by {piece}" for who, question, piece in _ASKS
        )
        + ".",
    )


# version: its kernels as (text, number of steps in it, is it the op's own?), and passes over x
_LANES = (
    ("a custom_op", [("2 · x", 1, False), ("op", 1, True), ("+ 1", 1, False)], "6 passes"),
    ("a triton_op", [("2 · x", 1, False), ("op", 1, True), ("+ 1", 1, False)], "6 passes"),
    ("the same, with the option", [("2 · x", 1, False), ("op, + 1", 2, True)], "4 passes"),
    ("plain PyTorch", [("2 · x, relu, square, + 1", 3, False)], "2 passes"),
)


def show_walls():
    """op(2 · x) + 1 under torch.compile: a box is a kernel, a bar a wall."""
    figure, ax = canvas(7.5, 2.9)
    for row, (name, kernels, passes) in enumerate(_LANES):
        y, x = 1.5 * row, 7.4
        ax.text(6.9, y + 0.5, name, ha="right", va="center")
        for text, steps, is_op in kernels:
            width = 2.6 * steps - 0.6
            cell(ax, x, y, width, 1, DARK if is_op else MIDDLE, text)
            if name == "a custom_op" and is_op:
                for edge in (x - 0.3, x + width + 0.3):
                    ax.plot([edge] * 2, [y - 0.2, y + 1.2], color="black", linewidth=4)
            x += 2.6 * steps
        ax.text(15.4, y + 0.5, passes, va="center")
    ax.set(xlim=(0, 18.4), ylim=(1.5 * len(_LANES) - 0.2, -0.4))
    show_figure(
        figure,
        "op(2 · x) + 1 in four versions, each a row of kernels. A custom_op: three kernels with a wall on "
        "both sides of the op, 6 passes over memory. A triton_op: three kernels without walls, 6 passes. "
        "The same with the option: two kernels, + 1 is in the op's, 4 passes. Plain PyTorch: one kernel, "
        "2 passes.",
    )
