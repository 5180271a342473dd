"""Exercises of notebook 06: read the code torch.compile writes."""

import functools
import re
import warnings

from lib import machine
from lib.exercises import (
    SHAPES,
    NotAttempted,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_launches,
    expect_op,
)
from lib.exercises.watch import expect_no_pass
from lib.measure.check import check_against_float64
from lib.nogpu.inductor import kernel_source, kernels, output_code

import torch
import torch.nn.functional as F


def _filled_in(answers, keys):
    """The dictionary `answers`; NotAttempted when all its values are None, Wrong when some are."""
    expect(isinstance(answers, dict), "give a dictionary, as the cell does")
    missing = [key for key in keys if answers.get(key) is None]
    if len(missing) == len(keys):
        raise NotAttempted
    expect(not missing, f"{', '.join(missing)}: no answer yet")
    return answers


# --- 06.1 ----------------------------------------------------------------------------------------------


def _add_relu(x, bias):
    return torch.relu(x + bias)


def _add_relu_inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[1:]))
    x[-1, -1] = float("nan")  # the compiler's ReLU keeps it
    return x.to(machine.device()), bias.to(machine.device())


@exercise("06.1", "The compiler's kernel, for any size", minutes=10, level=2)
def check_any_size(answer):
    expect_op(answer, _add_relu, _add_relu_inputs, (*SHAPES, (128, 512)), (torch.float32,))
    x, bias = _add_relu_inputs((5, 7), torch.float32)
    expect_launches(lambda: answer(x, bias), exactly=1)
    expect_no_pass(lambda: answer(x, bias), x.nbytes, "at shape (5, 7)")


# --- 06.2 ----------------------------------------------------------------------------------------------


def _hidden(x, per_row, per_column):
    return x * torch.sigmoid(1.5 * x + per_row[:, None]) - per_column


def _hidden_inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape[:1], shape[1:])
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@functools.cache
def unknown_kernel():
    """The source of the kernel that exercise 06.2 asks to write in PyTorch."""
    return kernel_source(output_code(_hidden, *_hidden_inputs((96, 320), torch.float32)), 0)


@exercise("06.2", "From the kernel back to the function", minutes=12, level=2)
def check_unknown(answer):
    try:
        expect_op(answer, _hidden, _hidden_inputs)
    except Wrong as wrong:
        hint = "the index of each load tells how long its tensor is: which of x0, x1 and x2 does it use?"
        raise Wrong(f"{wrong}; {hint}" if "raised RuntimeError" in str(wrong) else wrong) from None


# --- 06.3 ----------------------------------------------------------------------------------------------


@functools.cache
def kernel_in_question():
    """The source of the kernel that exercise 06.3 asks about."""

    def centred(x):
        return (x - x.mean(dim=1, keepdim=True)) / x.amax(dim=1, keepdim=True)

    return kernel_source(output_code(centred, torch.zeros(48, 3000)), 0)


def _loads(source, pointer):
    return re.findall(rf"tl\.load\({pointer} .*", source)


def _facts(source):
    """{question: (answer, where to look)}, the answers read off the text."""
    loads = _loads(source, "in_ptr0")
    policy = re.search(r"eviction_policy='(\w+)'", loads[-1])[1]
    number = {
        name: int(re.search(rf"\b{name} = (\d+)", source)[1]) for name in ("xnumel", "r0_numel")
    }
    running = set(re.findall(r"(?m)^    (_tmp\w+) = tl\.(?:full|zeros)", source))
    return {
        "rows": (number["xnumel"], "the x index counts what is kept, here rows"),
        "row_length": (number["r0_numel"], "the r0_ index counts what is reduced"),
        "loads_of_x": (
            len(loads),
            "count the loads through in_ptr0: each loop walks the whole row",
        ),
        "running_tiles": (
            len(running),
            "they are filled before the first loop, and are named _tmp",
        ),
        "last_policy": (policy, "look at the second loop's load"),
    }


@exercise("06.3", "Five questions to a kernel", minutes=8, level=1)
def check_questions(answers):
    facts = _facts(kernel_in_question())
    answers = _filled_in(answers, facts)
    for question, (want, hint) in facts.items():
        got = answers[question]
        expect(got == want, f"{question}: {got!r} is not right; {hint}")


# --- 06.4 ----------------------------------------------------------------------------------------------


def softmax_of_relu(x, bias):  # (128, 512), (512,)
    return torch.softmax(torch.relu(x + bias), dim=1)


def both_sums(x):  # (128, 512)
    return x.sum(dim=0), x.sum(dim=1)


def through_a_copy(x, y):  # (128, 512), (512, 128)
    return F.gelu(x).t().contiguous() + y


def two_layers(x, w, v):  # (128, 512), (512, 64), (64, 16)
    return torch.relu(x @ w) @ v


def side_by_side(x, y):  # (128, 512), (128, 512)
    return torch.sigmoid(x), torch.sigmoid(y), x * y


# Each with the shapes of its inputs, and what to think about when the count is wrong.
COUNTED = {
    softmax_of_relu: ([(128, 512), (512,)], "one walk over a row serves every op in it"),
    both_sums: (
        [(128, 512)],
        "compare how many numbers each sum keeps; 128 rows are few enough to add up in one step",
    ),
    through_a_copy: (
        [(128, 512), (512, 128)],
        "does the copy have to be in memory before `+ y` can use it?",
    ),
    two_layers: ([(128, 512), (512, 64), (64, 16)], "what can be fused into a matmul here?"),
    side_by_side: (
        [(128, 512), (128, 512)],
        "draw an arrow from each tensor to the ops that read it",
    ),
}


@functools.cache
def _launches(fn):
    inputs = [torch.zeros(shape) for shape in COUNTED[fn][0]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32")
        return len(kernels(output_code(fn, *inputs)))


@exercise("06.4", "Count before you look", minutes=10, level=2)
def check_counts(answers):
    answers = _filled_in(answers, [fn.__name__ for fn in COUNTED])
    for fn, (_, hint) in COUNTED.items():
        got, want = answers[fn.__name__], _launches(fn)
        what = "too few" if isinstance(got, int) and got < want else "not the number"
        expect(got == want, f"{fn.__name__}: {got!r} is {what}; {hint}")


# --- 06.5 ----------------------------------------------------------------------------------------------


def two_kernels(x, y, x_bias, y_bias):
    return F.gelu(x + x_bias), F.gelu(y + y_bias)


def _two_inputs(rows, cols):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, cols), (rows, cols), (cols,), (cols,))
    x, y, *biases = [torch.randn(shape, generator=generator) for shape in shapes]
    x[0, 0] = y[-1, -1] = float("nan")  # so x + 0 * y, to share data, is not the same
    return x, y, *biases


@exercise("06.5", "Two kernels become one", minutes=15, level=3)
def check_one_kernel(answer):
    for shape in [(1, 1), (2, 3), (17, 33), (128, 512)]:
        inputs, at = _two_inputs(*shape), f"at {shape[0]}×{shape[1]}"
        with case(at):
            outputs = attempted(answer(*inputs))
            expect(
                isinstance(outputs, (tuple, list)) and len(outputs) == 2,
                f"{at}: return two tensors, as two_kernels does",
            )
            check_against_float64(answer, two_kernels, *inputs, name=at)
    infos = kernels(output_code(answer, *inputs))
    names = ", ".join(info.name for info in infos)
    expect(len(infos) == 1, f"the values are right, in {len(infos)} kernels: {names}")
