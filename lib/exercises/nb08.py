"""Exercises of notebook 08: a fake, a whole op, and an op that writes in place."""

import itertools

from lib.exercises import Wrong, attempted, case, exercise, expect, expect_second_derivative
from lib.measure.check import check_against_float64

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_numbers = itertools.count()


def _expect_opcheck(op, args, at):
    """Wrong, in opcheck's words, unless the op does what its schema, fake and formula say."""
    try:
        torch.library.opcheck(op, args)
    except NotImplementedError:
        raise
    except Exception as error:  # opcheck raises what the op raises, and errors of its own
        raise Wrong(f"{at}: {str(error).partition(' (scroll up')[0][:400]}") from None


def _expect_op(answer, name):
    expect(
        hasattr(attempted(answer), "register_fake"),
        f"{name} has to be what torch.library.custom_op returns, got {type(answer).__name__}",
    )


def _said(error):
    """An error's text in one line, and what to do about the one that editing a cell leads to."""
    text = " ".join(str(error).split())[:400]
    if "Schema has no argument" in text:  # of the op that had this name before
        text += " ... PyTorch remembers the arguments of an op of this name; take another name, or restart"
    return text


def _compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


# --- 08.1 ------------------------------------------------------------------------------------------------


def _row_max_pool(x: torch.Tensor, k: int) -> torch.Tensor:
    """The largest of each k neighbours of a row, in float32; the last window may be shorter."""
    short = -x.shape[1] % k
    padded = torch.nn.functional.pad(x.float(), (0, short), value=-torch.inf)
    return padded.unflatten(1, (-1, k)).amax(2)


_POOLED = (
    ("(2, 4), k = 2", torch.randn(2, 4), 2),
    ("(5, 7), k = 3", torch.randn(5, 7), 3),
    ("(5, 8) in bfloat16, k = 4", torch.randn(5, 8).bfloat16(), 4),
    ("(3, 6) of int64, k = 4", torch.arange(18).view(3, 6), 4),
    ("a transposed (9, 6), k = 4", torch.randn(6, 9).t(), 4),
    ("(3, 5), k = 8", torch.randn(3, 5), 8),
)


def _metadata(t):
    return f"{tuple(t.shape)}, {t.dtype}, strides {t.stride()}"


@exercise("08.1", "What comes out", minutes=10, level=1)
def check_fake(answer):
    for at, x, k in _POOLED:
        with case(at), FakeTensorMode() as mode:
            fake = attempted(answer(mode.from_tensor(x), k))
        expect(isinstance(fake, torch.Tensor), f"{at}: has to give a tensor, got {fake!r}")
        with case(at), FakeTensorMode(shape_env=ShapeEnv()) as mode:  # sizes are symbols here
            sizes = answer(mode.from_tensor(x), k).shape
        real = _row_max_pool(x, k)
        expect(
            _metadata(fake) == _metadata(real),
            f"{at}: says {_metadata(fake)}; the op gives {_metadata(real)}",
        )
        expect(
            not any(isinstance(size, int) for size in sizes if size != 1),
            f"{at}: turns sizes into numbers, so each new shape would be compiled anew; take x.shape as it is",
        )
        with case(at):
            on = answer(x.to("meta"), k).device.type
        expect(
            on == "meta", f"{at}: x is on the device meta and the result on {on}; use x.new_empty"
        )
        op = torch.library.custom_op(
            f"exercise::row_max_pool_{next(_numbers)}", _row_max_pool, mutates_args=()
        )
        op.register_fake(answer)
        _expect_opcheck(op, (x, k), at)
    graphs = []
    torch.compiler.reset()
    pool = torch.compile(
        lambda x, k: op(x, k), backend=lambda g, _: graphs.append(g) or g.forward, dynamic=True
    )
    for k in (2, 3, 4):
        pool(torch.randn(5, 7), k)
    expect(
        len(graphs) == 1,
        "turns k into a number, so each new k is compiled anew; take k as it is",
    )


# --- 08.2 ------------------------------------------------------------------------------------------------


def _silu_mul_eager(gate, up):
    return torch.nn.functional.silu(gate) * up


@exercise("08.2", "A whole op", minutes=20, level=2)
def check_silu_mul(answer):
    _expect_op(answer, "silu_mul")
    for at, shape, needs_grad in (
        ("(3, 4)", (3, 4), (True, True)),
        ("(5, 7), up frozen", (5, 7), (True, False)),
        ("(5, 7), gate frozen", (5, 7), (False, True)),
    ):
        gate, up = (torch.randn(shape, requires_grad=needs) for needs in needs_grad)
        for what, version in (("", answer), (", compiled", _compiled(lambda g, u: answer(g, u)))):
            try:
                check_against_float64(version, _silu_mul_eager, gate, up, name=at + what)
            except (RuntimeError, NotImplementedError) as error:
                raise Wrong(f"{at}{what}: {_said(error)}") from None
        _expect_opcheck(answer, (gate, up), at)
    for dtype in (torch.bfloat16, torch.float16):
        at = f"(5, 7), {str(dtype).removeprefix('torch.')}"
        pair = [torch.randn(5, 7).to(dtype).requires_grad_() for _ in range(2)]
        # the functions that are given round more often than eager's backward kernel
        slack = torch.finfo(dtype).eps
        with case(at):
            check_against_float64(answer, _silu_mul_eager, *pair, slack=slack, name=at)
        _expect_opcheck(answer, pair, at)
    _expect_fakes_of_any_shape(answer)
    _expect_saved(answer)
    fixed = torch.randn(5)
    leaf = torch.randn(5, requires_grad=True)
    expect_second_derivative(lambda g: answer(g, fixed), lambda g: _silu_mul_eager(g, fixed), leaf)
    halves = [half.detach() for half in torch.randn(5, 8).chunk(2, dim=1)]
    turned = [torch.randn(4, 5).t() for _ in range(2)]
    for at, views in (
        ("two halves of one tensor", halves),
        ("transposed inputs", turned),
        ("gate transposed, up not", [turned[0].detach(), torch.randn(5, 4)]),
        ("up transposed, gate not", [torch.randn(5, 4), turned[1].detach()]),
    ):
        with case(at), FakeTensorMode() as mode:
            fake = answer(*(mode.from_tensor(view) for view in views))
        real = answer(*views)
        same = _metadata(fake) == _metadata(real)
        expect(same, f"{at}: the fake says {_metadata(fake)}; the op gives {_metadata(real)}")
        views = [view.requires_grad_() for view in views]
        check_against_float64(answer, _silu_mul_eager, *views, name=at)
        _expect_opcheck(answer, views, at)
        for layout, dy in (
            ("dy contiguous", torch.randn(5, 4)),
            ("dy transposed", torch.randn(4, 5).t()),
        ):
            _expect_strides_of_gradients(answer, views, dy, f"{at}, {layout}")


def _expect_fakes_of_any_shape(answer):
    """Wrong unless both fakes keep the device, leave sizes symbols, and take three axes.

    Each of them hides where every tensor is a matrix on the CPU.
    """

    def results(made):
        pair = [made().requires_grad_() for _ in range(2)]
        y = answer(*pair)
        return {"y": y} | dict(zip(("gate", "up"), torch.autograd.grad(y.sum(), pair)))

    with case("the device meta"):
        on_meta = results(lambda: torch.randn(2, 3, 4, device="meta"))
    real = torch.randn(5, 6, 7)
    with case("sizes are symbols"), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbolic = results(lambda: mode.from_tensor(real))
    for name, t in on_meta.items():
        of = "y" if name == "y" else f"the gradient of {name}"
        expect(
            t.device.type == "meta" and t.shape == (2, 3, 4),
            f"inputs (2, 3, 4) on the device meta: {of} is {tuple(t.shape)} on {t.device}; "
            "a fake takes device and shape from its argument, as t.new_empty(t.shape) does",
        )
        expect(
            not any(isinstance(size, int) for size in symbolic[name].shape),
            f"the fake for {of} turns sizes into numbers, so each new shape would be compiled anew",
        )


def _expect_strides_of_gradients(answer, inputs, dy, at):
    """Wrong unless the backward op's fake promises the strides that its gradients have."""

    def gradients(inputs, dy):
        inputs = [t.detach().requires_grad_() for t in inputs]
        return [_metadata(g) for g in torch.autograd.grad(answer(*inputs), inputs, dy)]

    inputs = [t.detach() for t in inputs]
    with case(f"{at}, backward"), FakeTensorMode() as mode:
        promised = gradients([mode.from_tensor(t) for t in inputs], mode.from_tensor(dy))
    for name, says, gives in zip(("gate", "up"), promised, gradients(inputs, dy)):
        expect(
            says == gives,
            f"{at}: for the gradient of {name} the backward op's fake says {says}; the op gives {gives}",
        )


def _expect_saved(answer):
    """Wrong unless backward notices that an input has changed, as it does after save_for_backward."""
    for k, overwritten in enumerate(("gate", "up")):
        leaves = [torch.randn(4, requires_grad=True) for _ in range(2)]
        inputs = [leaf * 1 for leaf in leaves]
        y = answer(*inputs)
        inputs[k].zero_()
        try:
            torch.autograd.grad(y.sum(), leaves)
        except RuntimeError:
            continue
        raise Wrong(
            f"{overwritten} was overwritten before backward, and a gradient came all the same; "
            "save_for_backward"
        )


# --- 08.3 ------------------------------------------------------------------------------------------------


def _clipped(x, limit):
    return x / torch.clamp(x.norm() / limit, min=1.0)


@exercise("08.3", "In place, and declared", minutes=15, level=2)
def check_clip(answer):
    _expect_op(answer, "clip_")
    written = answer._opoverload._schema.arguments[0].alias_info
    expect(written and written.is_write, "the schema says that x is only read; see mutates_args")

    def clip_two_x(x, limit):
        y = 2 * x
        answer(y, limit)
        return y

    for at, x, limit in (
        ("[3, 4], limit 1", torch.tensor([3.0, 4.0]), 1.0),
        ("[0.1, 0.2], limit 1", torch.tensor([0.1, 0.2]), 1.0),
        ("[3, 4], limit 0.5", torch.tensor([3.0, 4.0]), 0.5),
        ("zeros, limit 1", torch.zeros(3), 1.0),
        ("(3, 5), limit 2", torch.randn(3, 5) + 1, 2.0),
        ("a transposed (5, 3), limit 2", torch.randn(3, 5).t() + 1, 2.0),
    ):
        y = x.clone()
        with case(at):
            expect(answer(y, limit) is None, f"{at}: should return nothing")
        right = _clipped(x, limit)
        expect(torch.allclose(y, right), f"{at}: gives {y.tolist()}, should be {right.tolist()}")
        try:
            y = _compiled(clip_two_x)(x, limit)
        except Exception as error:
            raise Wrong(f"2 · {at}, compiled: {_said(error)}") from None
        right = _clipped(2 * x, limit)
        close = torch.allclose(y, right)
        expect(close, f"2 · {at}, compiled: gives {y.tolist()}, should be {right.tolist()}")
        _expect_opcheck(answer, (x.clone(), limit), at)
