"""The kernels that ship are those that are taught: the op's notebook types or shows their lines."""

import ast
import importlib
import inspect
import re

from lib.recorded import notebooks

import nbformat
import pytest

# op: its notebooks, the least share of the lines of its kernels on them, and which kernels are there whole
PAGES = {
    "add_relu": ((3,), 0.6, ["_add_relu_tile"]),
    "gelu": ((31,), 0.8, ["_gelu_fwd_kernel", "_gelu_bwd_kernel", "_fwd_tile", "_bwd_tile", "_locate"]),
    "softmax": ((7, 32), 0.5, ["_softmax_fwd_kernel", "_softmax_bwd_kernel", "_softmax_parts_fwd_kernel"]),
    "_attention_gluon": ((45,), 0.9, ["_attention_gluon_kernel", "_attend", "_soften", "_fetch", "_job_of"]),
    "attention": ((48,), 0.2, ["_attention_dkdv_kernel"]),
    "_linear_glu_gluon": ((44,), 0.4, ["_linear_glu_gluon_kernel"]),
    "linear_cross_entropy": ((46,), 0.5, ["_cross_entropy_kernel"]),
    "quantized_linear": (
        (47,), 0.6, ["_quantized_linear_kernel", "_numbers", "_quarter", "_sum_parts_kernel", "_weight_kernel"],
    ),
    "matmul": ((40,), 0.5, ["_matmul_persistent_kernel", "_store_by_tma"]),
    "linear_glu": ((41,), 0.4, ["_linear_glu_tma_kernel", "_store_gated"]),
    "lora_linear": ((42,), 0.5, ["_lora_linear_tma_kernel", "_low_rank", "_finish_part"]),
    "fused_mlp": ((43,), 0.5, ["_fused_mlp_fwd_kernel", "_hidden_tile"]),
    "lora_epilogue": ((33,), 0.7, [
        "_sum_of", "_lora_epilogue_fwd_tile", "_lora_epilogue_fwd_kernel", "_lora_epilogue_bwd_tile"]),
    "bias_gelu_dropout_add": ((34,), 0.7, [
        "_keep_tile", "_bias_gelu_dropout_add_fwd_tile", "_bias_gelu_dropout_add_fwd_kernel",
        "_bias_gelu_dropout_add_bwd_tile"]),
    "rope": ((35,), 0.8, ["_rotate_tile"]),
}  # fmt: skip


def kernels_of(op):
    """{name: kernel} of the functions under @triton.jit that the op's file defines."""
    module = importlib.import_module(f"lib.ops.{op}")
    own = {name: getattr(value, "fn", None) for name, value in vars(module).items()}
    return {
        n: f for n, f in own.items() if inspect.isfunction(f) and f.__module__ == module.__name__
    }


def body_of(kernel):
    """The lines of a kernel's body without comments, as they would stand in any place."""
    source = inspect.cleandoc("\n" + inspect.getsource(kernel))
    (function,) = ast.parse(source).body
    lines = source.splitlines()[function.body[0].lineno - 1 :]
    return [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]


def lines_on(number, shown=True):
    """All lines of the code cells of a notebook and, with `shown`, of the sources in its outputs and prose."""
    (path,) = notebooks.notebooks(number)
    both = nbformat.read(path, as_version=4).cells
    cells = [c for c in both if c.cell_type == "code"]
    texts = [c.source for c in cells]
    if shown:
        prose = [c.source for c in both if c.cell_type == "markdown"]
        outputs = [o.get("data", {}).get("text/markdown", "") for c in cells for o in c.outputs]
        fenced = re.compile(r"(?s)```\w+\n(.*?)```")
        texts += [code for text in prose + outputs for code in fenced.findall(text)]
    return {line.strip() for text in texts for line in text.splitlines()}


@pytest.mark.parametrize("op", PAGES)
def test_the_notebook_has_the_kernels_that_ship(op):
    numbers, least, whole = PAGES[op]
    page, kernels = set().union(*map(lines_on, numbers)), kernels_of(op)
    lines = [line for kernel in kernels.values() for line in body_of(kernel)]
    share = sum(line in page for line in lines) / len(lines)
    assert share >= least, f"{share:.0%} of the kernels of {op} are in notebooks {numbers}"
    missing = {n: [line for line in body_of(kernels[n]) if line not in page] for n in whole}
    assert not any(missing.values()), missing


def test_a_line_that_is_nowhere_is_missed():
    kernel = kernels_of("softmax")["_softmax_fwd_kernel"]
    lines = body_of(kernel)
    assert lines[0].startswith("n_cols, stride_xm =") and lines[-1].startswith("device.store_tile(")
    assert set(lines) <= lines_on(7) and not set(lines) <= lines_on(7, shown=False)
    assert not set(lines) <= lines_on(3)


def test_what_44_quotes_of_the_op_is_in_its_file():
    (path,) = notebooks.notebooks(44)
    prose = "\n".join(
        c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"
    )
    quoted = re.findall(r"(?s)```python\n(.*?)```", prose)
    module = importlib.import_module("lib.ops._linear_glu_gluon")
    lines = {line.strip() for line in inspect.getsource(module).splitlines()}
    assert len(quoted) > 3
    missing = [line for text in quoted for line in text.splitlines() if line.strip() not in lines]
    assert not missing
