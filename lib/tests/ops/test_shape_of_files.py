"""Any op file predicts any other: the same bands in the same order, one text for one thing, kernels early."""

import ast
import difflib
import itertools
import re

from lib.measure import registry
from lib.recorded.results import ROOT

import pytest

OPS = [ROOT / "lib/ops" / f"{name}.py" for name in registry.OPS]
ALL = sorted((ROOT / "lib/ops").glob("*.py"))  # what they share, too
files = pytest.mark.parametrize("path", OPS, ids=lambda p: p.stem)
BANDS = ["_plan", "_launch", "_forward", "_save", "_backward", "_check"]
MOST_LINES = {"add_relu": 300, "gelu": 300, "_host": 725, "lora_linear": 750, "attention": 1020}
# private to PyTorch and Triton
PRIVATE = r"torch\._|_functorch|_current_level|packed_metadata|compiled\.run|_get_build_directory"


def functions_of(path):
    """[(name, line, source, body)] of a file's functions, without those of classes; source without the name."""
    text = path.read_text()
    lines, functions = text.splitlines(), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            body = "\n".join(ast.unparse(n) for n in node.body)
            functions.append((node.name, node.lineno, source.replace(node.name, "_name"), body))
    return functions


@files
def test_bands_stand_in_order(path):
    lines = {name: line for name, line, *_ in functions_of(path)}
    assert not set(BANDS) - {"_launch"} - set(lines)
    assert [name for name in sorted(lines, key=lines.get) if name in BANDS] == [
        n for n in BANDS if n in lines
    ]


def test_what_is_private_to_torch_and_triton_is_used_in_one_file():
    users = [p.name for p in ALL if re.search(PRIVATE, re.sub(r"#.*", "", p.read_text()))]
    assert users == ["_host.py"]


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_a_file_can_be_read_at_a_sitting(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES.get(path.stem, 700)


@files
def test_the_kernel_comes_first(path):
    """Facts, definition, kernel: before any code of the host's, and on the second screen at the latest."""
    names = {name: line for name, line, *_ in functions_of(path)}
    lines = path.read_text().splitlines()
    first = next(k for k, line in enumerate(lines, 1) if line.startswith("@triton.jit"))
    kernel = min(line for name, line in names.items() if name.endswith("_kernel"))
    assert names[f"{path.stem}_eager"] < first <= 110
    of_the_host = [name for name in names if re.match("_(plan|launch|forward)", name)]
    assert all(names[name] > kernel for name in of_the_host)


def test_no_function_stands_in_two_files():
    """Neither to the letter nor nearly: what two ops need is in _host.py or _device.py."""
    functions = [(path.name, *function) for path in ALL for function in functions_of(path)]
    for (file_a, a, _, text_a, body_a), (file_b, b, _, text_b, body_b) in itertools.combinations(
        functions, 2
    ):
        if file_a == file_b:
            continue
        assert body_a != body_b or len(body_a.splitlines()) == 1, (
            f"{a} of {file_a} is {b} of {file_b}"
        )
        longest, shortest = sorted((len(text_b), len(text_a)), reverse=True)
        if min(len(text_a.splitlines()), len(text_b.splitlines())) <= 3 or shortest < 0.9 * longest:
            continue  # the ratio below is at most 2·shorter / (shorter + longer)
        match = difflib.SequenceMatcher(None, text_a, text_b, autojunk=False)
        if match.real_quick_ratio() > 0.95 and match.quick_ratio() > 0.95:
            assert match.ratio() <= 0.95, f"{a} of {file_a} is {b} of {file_b}"


@files
def test_public_functions_have_type_hints(path):
    """Those of a file that is copied are all that an editor knows of it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg != "device"]
            assert node.returns is not None or node.name.endswith("_op_"), node.name
            assert all(a.annotation for a in arguments), node.name
