"""Exercises of notebook 33, lora_epilogue."""

import functools
import re

from lib import machine
from lib.exercises import (
    Skip,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_any_dy,
    expect_launches,
    expect_op,
    expect_rounded_once,
    hinting,
)
from lib.exercises.watch import expect_no_float64_tiles, expect_no_pass, expect_no_race
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.memory import count_traffic
from lib.ops.lora_epilogue import lora_epilogue_eager

import torch
import torch.nn.functional as F

NAN = float("nan")


def _tensors(shape, dtype):
    """x, delta and bias with gradients, and z = x + delta / 2 + bias of either sign."""
    return registry.find("lora_epilogue").inputs(shape, dtype, machine.device())


def _detached(shape, dtype):
    return tuple(t.detach() for t in _tensors(shape, dtype))


def _with_nan(shape, dtype):
    x, delta, bias = _detached(shape, dtype)
    x[-1, -1] = NAN
    return x, delta, bias


@exercise("33.1", "Change a line: leaky ReLU", minutes=8, level=1)
def check_leaky_relu(answer):
    for scale, slope in ((0.7, 0.1), (1, 0), (-2.0, 1.5)):  # 0.7 is no number of 16 bits

        def eager(x, delta, bias, scale=scale, slope=slope):
            return F.leaky_relu(x + scale * delta + bias, slope)

        def version(x, delta, bias, scale=scale, slope=slope):
            return answer(x, delta, bias, scale, slope)

        with hinting(before=f"scale = {scale}, slope = {slope}: "):
            expect_op(version, eager, _detached)
            expect_op(version, eager, _with_nan, shapes=((2, 3),))
            x, delta, bias = _detached((17, 33), torch.float32)
            launch = functools.partial(version, x, delta, bias)
            expect_launches(launch, exactly=1)
            expect_no_pass(launch, x.nbytes, "at shape (17, 33)")
            _expect_float32_inside(version, eager, scale, max(1, slope))
    expect_no_float64_tiles(lambda: answer(x, delta, bias, 0.5, 0.1), "at shape (17, 33)")


def _expect_float32_inside(version, eager, scale, steepest):
    """Wrong unless y in bfloat16 is rounded once; steepest: the largest slope of y over z."""
    inputs = _detached((17, 33), torch.bfloat16)
    x, delta, bias = (t.double() for t in inputs)
    terms = steepest * (x.abs() + (scale * delta).abs() + bias.abs())
    expect_rounded_once(version(*inputs), eager(x, delta, bias), "at shape (17, 33)", terms=terms)


def _computed(rows, cols):
    """How many elements the lecture's launch computes: cols thread blocks of cols threads, 1024 at most."""
    return 0 if cols > 1024 else min(rows * cols, cols * cols)


@exercise("33.2", "The smallest shapes that show it", minutes=10, level=2)
def check_smallest_shapes(shapes):
    expect(
        isinstance(shapes, (tuple, list)) and len(shapes) == 2 and all(map(_is_shape, shapes)),
        "give two tuples of two positive whole numbers, ((rows, columns), (rows, columns))",
    )
    kinds = {
        "some elements but not all": lambda m, n: 0 < _computed(m, n) < m * n,
        "none": lambda m, n: _computed(m, n) == 0,
    }
    for (m, n), (what, shows) in zip(shapes, kinds.items()):
        expect(
            shows(m, n),
            f"at {m}×{n} it computes {_computed(m, n)} of {m * n} elements; find where it computes {what}",
        )
        smaller = (
            (k // cols, cols) for k in range(1, m * n) for cols in range(1, k + 1) if k % cols == 0
        )
        expect(
            not any(shows(*shape) for shape in smaller),
            f"at {m}×{n} it computes {what}, but so it does at a shape with fewer elements",
        )


def _is_shape(shape):
    return (
        isinstance(shape, (tuple, list))
        and len(shape) == 2
        and all(type(n) is int and n > 0 for n in shape)
    )


# What may be missing in the source, and a test of (the code, its kernel, the code after the launch).
_WRITTEN = {
    "no launch check after the launch": lambda code, kernel, after: (
        "LAUNCH_CHECK" in after or "cudaGetLastError" in after
    ),
    "the host still waits for the GPU": lambda code, *_: "Synchronize" not in code,
    "the launch does not ask for the current stream": lambda code, *_: (
        "getCurrentCUDAStream" in re.findall(r"<<<.*?>>>", code, re.S)[-1]
        or re.search(r"=\s*(\w+::)*getCurrentCUDAStream", code)
    ),
    "no device guard": lambda code, *_: re.search(r"(CUDA|Device)Guard\b(?!\.h)", code),
    "nothing asks whether the tensors are on a GPU": lambda code, *_: re.search(
        r"is_cuda|kCUDA|DeviceType::CUDA", code
    ),
    "x, delta and bias must be on one GPU, and not all of them are asked": lambda code, *_: (
        _asks_all_for_their_device(code)
    ),
    "all tensors may be on GPUs, and still not on one: compare their devices": lambda code, *_: (
        _asks_which_device(code)
    ),
    "a size is kept in 32 bits on the host": lambda code, kernel, _: (
        not _keeps_a_size_in_32_bits(code.replace(kernel, ""))
    ),
    "there is still a double in the kernel, a type or a literal": lambda code, kernel, _: (
        not re.search(r"\bdouble\b|\d\.\d*(?![\df])", kernel)
    ),
    "no 64-bit index in the kernel": lambda code, kernel, _: re.search(
        r"int64_t|long long|size_t", kernel
    ),
    "a size comes into the kernel as int, of 32 bits": lambda code, kernel, _: (
        not re.search(r"\bint(32_t)?\b", kernel.partition("{")[0])
    ),
    "blockIdx is multiplied in 32 bits, whatever type takes the product": lambda code, kernel, _: (
        not _multiplies_in_32_bits(code, kernel)
    ),
    "an int in the kernel takes a value of 64 bits": lambda code, kernel, _: (
        not _narrows_to_32_bits(kernel)
    ),
}
_SHORT, _LONG = r"(?:int|int32_t|unsigned|uint32_t)", r"(?:int64_t|uint64_t|long|size_t)"


def _asks_all_for_their_device(code):
    """Whether x, delta and bias are asked by name; what asks under another name, as in a loop, may ask all."""
    return _all_or_by_another_name(code, "is_cuda|device|get_device")


def _asks_which_device(code):
    """The same, of what tells one GPU from another: is_cuda and device().is_cuda() do not."""
    return _all_or_by_another_name(code, r"get_device|device(?!\(\)\s*\.\s*(?:is_|type))")


def _all_or_by_another_name(code, methods):
    if re.search(r"check(All)?SameGPU", code):
        return True
    unguarded = re.sub(r"\w*Guard\b[^;]*;", "", code)
    asked = set(re.findall(rf"(\w+)\s*\.\s*(?:options\(\)\.)?(?:{methods})\(", unguarded))
    names = {"x", "delta", "bias"}
    return names <= asked or not asked <= names


def _keeps_a_size_in_32_bits(host):
    """Whether an int takes a size as it is; one that is bounded or divided first may fit."""
    values = re.findall(r"(?<!long )\b(?:int|int32_t|unsigned|uint32_t)\s+\w+\s*=([^;]*);", host)
    return any(
        re.search(r"\.(numel|size)\(", value) and not re.search(r"[/?]|>>|min|div|ceil", value)
        for value in values
    )


def _multiplies_in_32_bits(code, kernel):
    """Whether blockIdx is the first factor beside one of 32 bits, or an int takes a product of it."""
    short = rf"\b{_SHORT}"
    if re.search(rf"{short} \w+ = [^;]*blockIdx[^;]*\*", " ".join(kernel.split())):
        return True
    # A cast ends in ")", and after a "*" stands what a factor before it made of the product.
    products = r"(?:^|[^)*\s])\s*\bblock(?:Idx|Dim)\.\w\s*\*\s*([\w.]+)"
    return any(
        re.fullmatch(r"blockDim\.\w|blockIdx\.\w|\d+", factor)
        or re.search(rf"{short}\s+{re.escape(factor)}\b", code)
        for factor in re.findall(products, kernel)
    )


def _narrows_to_32_bits(kernel):
    """Whether 32 bits take what is made of a name of 64; a quotient or a remainder of it may fit."""
    longs = "|".join(re.findall(rf"\b{_LONG}\s+(\w+)\s*[=,)]", kernel)) or "(?!)"
    shorts = "|".join(re.findall(rf"(?<!long )\b{_SHORT}\s+(\w+)\s*[=,;]", kernel)) or "(?!)"
    taken = re.findall(rf"\b(?:{shorts})\s*[+*]?=(?!=)([^;]*);", kernel)
    cast = rf"(?:static_cast<{_SHORT}>|\({_SHORT}\)|\b{_SHORT})\s*\(([^()]*)\)"
    return any(
        re.search(rf"\b(?:{longs})\b", value) and ("*" in value or not re.search(r"[/%]", value))
        for value in taken + re.findall(cast, kernel)
    )


def _expect_written(source):
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    expect("__global__" in code and "<<<" in code, "there is no kernel, or no launch of it")
    kernel = _body(code[code.index("__global__") :])
    after = code.rpartition(">>>")[2]
    open_points = [m for m, holds in _WRITTEN.items() if not holds(code, kernel, after)]
    expect(not open_points, f"read it once more: {'; '.join(open_points)}")


def _body(code):
    """`code` up to the brace that closes its first one."""
    depth = 0
    for at, character in enumerate(code):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and depth == 0:
            return code[: at + 1]
    return code


_SHAPES = [(1, 1), (8, 8), (2, 1), (0, 3), (5, 7), (64, 16), (3, 2000), (1500, 2), (129, 33)]


@exercise("33.3", "Mend it", minutes=20, level=2)
def check_mended_source(source):
    expect(isinstance(source, str), "mended_source has to be the source, a string")
    if missing := cuda.cuda_build.why_no_compiler():
        raise Skip(missing)
    _expect_written(source)  # first: it takes no time, and names all at once
    mended = cuda.load_cuda_on_cpu(source, ["lora_epilogue"], name="mended", checked=True)
    for shape in _SHAPES:
        x, delta, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[1:])
        _expect_right(mended, f"at {shape[0]}×{shape[1]}", x, delta, bias)
    x, delta, bias = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3)
    x[0, 1] = NAN
    _expect_right(mended, "with a NaN in x", x, delta, bias)
    _expect_refusals(mended)


def _relu(x, delta, bias):
    return lora_epilogue_eager(x, delta, bias, 0.7, "relu")


def _expect_right(mended, at, x, delta, bias):
    with case(at):
        y = attempted(mended.lora_epilogue(x, delta, bias, 0.7))
        check_against_float64(lambda *_: y, _relu, x, delta, bias, name=at)


def _expect_refusals(mended):
    x, delta, bias = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)
    for what, inputs in {
        "a bias of 5 numbers for 6 columns": (x, delta, bias[:5].clone()),
        "a bias of 6×2 for 6 columns": (x, delta, torch.randn(6, 2)),
        "a delta of 5 rows for 6": (x, delta[:5].clone(), bias),
        "a bias of 3 numbers for an x of 2×3×4": (*torch.randn(2, 2, 3, 4), torch.randn(3)),
        "an x that is a transposed view": (x.t(), delta, bias),
        "a delta that is a transposed view": (x, delta.t(), bias),
        "a bias that is every other number": (x, delta, torch.randn(12)[::2]),
        "float64 tensors": (x.double(), delta.double(), bias.double()),
    }.items():
        try:
            mended.lora_epilogue(*inputs, 0.7)
        except cuda.KernelError as error:
            raise Wrong(f"{what} reached the kernel: {str(error).splitlines()[0]}") from None
        except (RuntimeError, ValueError, TypeError):
            continue
        raise Wrong(f"{what} should be refused, and was not")


@exercise("33.4", "A sibling: squared ReLU, forward and backward", minutes=25, level=3)
def check_squared_relu(answer):
    for scale in (0.5, -2.0):

        def eager(x, delta, bias, scale=scale):
            return torch.relu(x + scale * delta + bias).square()

        def version(x, delta, bias, scale=scale):
            return answer(x, delta, bias, scale)

        with hinting(before=f"scale = {scale}: "):
            # bfloat16 without gradients, because eager's may be exact by luck on few numbers
            expect_op(version, eager, _tensors, dtypes=(torch.float32,))
            expect_op(version, eager, _detached, dtypes=(torch.bfloat16,))
            expect_op(version, eager, _with_nan, shapes=((2, 3),))
            _expect_float32_inside(version, eager, scale, steepest=20)  # 2z
    for dtype in (torch.float32, torch.bfloat16):
        _expect_gradients_of_a_sum(answer, dtype)
    _expect_traffic(answer)
    inputs = (*_tensors((9, 20), torch.float32), 0.5)
    expect_any_dy(answer, inputs, "at shape (9, 20)")
    inputs = _tensors((9, 20), torch.float32)
    both = lambda: torch.autograd.grad(answer(*inputs, 0.5).sum(), inputs)  # noqa: E731
    expect_no_float64_tiles(both, "at shape (9, 20)")
    inputs = _tensors((300, 40), torch.float32)
    dy = torch.ones_like(inputs[0])
    expect_no_race(
        lambda: torch.autograd.grad(answer(*inputs, 0.5), inputs, dy), "at shape (300, 40)"
    )


def _expect_gradients_of_a_sum(answer, dtype):
    """A dy of strides 0, as y.sum() sends it. In bfloat16 each of an answer's steps may round."""
    inputs = _tensors((9, 20), dtype)
    with case(f"the gradients of y.sum() in {dtype}"):
        got = torch.autograd.grad(answer(*inputs, 0.5).sum(), inputs)
    x, delta, bias = (t.detach().double().requires_grad_() for t in inputs)
    y = torch.relu(x + 0.5 * delta + bias).square()
    want = torch.autograd.grad(y.sum(), (x, delta, bias))
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (0.03, 0.1)
    for name, a, b in zip(("x", "delta", "bias"), got, want):
        expect(
            torch.allclose(a.double(), b, rtol=rtol, atol=atol),
            f"the gradient of {name} in {dtype} is wrong where dy has strides 0, as y.sum() sends it",
        )


def _expect_traffic(answer):
    inputs = _tensors((64, 640), torch.float32)
    mns, results = inputs[0].nbytes, []
    forward = count_traffic(lambda: results.append(answer(*inputs, 0.5)))
    expect(
        forward.launches == 1, f"forward should launch 1 Triton kernel, launched {forward.launches}"
    )
    expect_no_pass(lambda: results.append(answer(*inputs, 0.5)), mns, "forward")
    y, again = results
    dy = torch.randn_like(y)
    backward = count_traffic(lambda: torch.autograd.grad(y, inputs, dy))
    expect(backward.launches >= 1, "backward should launch a Triton kernel of yours")
    for name, traffic, most in (("forward", forward, 3), ("backward", backward, 4)):
        moved = traffic.bytes_moved / mns
        expect(
            moved <= most + 0.2,
            f"{name} moves {moved:.1f} MNs bytes; {most} are enough. Which tensor need it not save or read?",
        )
    expect_no_pass(lambda: torch.autograd.grad(again, inputs, dy), mns, "backward", but=("sum",))
