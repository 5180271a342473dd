"""Any op file predicts any other: the same bands in the same order, one name and one text for one thing."""

import ast
import difflib
import itertools

from lib.measure import registry
from lib.recorded.results import ROOT

import pytest

FILES = [ROOT / "lib/ops" / f"{name}.py" for name in registry.OPS]
files = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
# What each file has of its own, under the same name: the bands, and what belongs to them.
BANDS = [
    "_plan",
    "_launch",
    "_forward",
    "_save",
    "_backward",
    "_check",
    "_fits",
    "_refuse",
    "_call",
]
OWN = {*BANDS, "_plan_backward", "_launch_backward", "_launch_cuda", "_forward_cuda", "_cuda", "_"}
OWN |= {"_setup_context", "_op_backward", "_refuse_arguments", "_dz", "_launch_tma", "_empty"}
OWN -= {"_refuse"}  # the same in all files
CLASSES = {"_Undifferentiable"}
MOST_LINES = 600
LONGER = {
    "attention": 1157,
    "linear_glu": 1151,
    "lora_linear": 1057,
    "matmul": 1004,
    "softmax": 873,
    "fused_mlp": 783,
    "linear_cross_entropy": 616,
    "rope": 613,
    "interaction": 604,
}  # to get shorter


def functions_of(path):
    """{name: (line, source)} of functions, and classes that repeat: decorators and comments included."""
    text = path.read_text()
    lines = text.splitlines()
    functions = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) or getattr(node, "name", "") in CLASSES:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions[node.name] = first, "\n".join(lines[first - 1 : node.end_lineno])
    return functions


@files
def test_bands_stand_in_order(path):
    functions = functions_of(path)
    lines = [functions[name][0] for name in BANDS if name in functions]
    checks = {"_check"} if "_check" in functions else {"_fits", "_refuse"}
    missing = {"_plan", "_forward", "_backward", "_save", *checks} - set(functions)
    assert not missing
    assert lines == sorted(lines), [name for name in BANDS if name in functions]


@files
def test_no_private_part_of_torch(path):
    assert "torch._C" not in path.read_text()


@files
def test_a_file_can_be_read_at_a_sitting(path):
    assert len(path.read_text().splitlines()) <= LONGER.get(path.stem, MOST_LINES)


def test_copies_are_equal():
    """A function repeated in another op file, rather than imported, is the same to the letter."""
    first, repeated = {}, set()
    for path in FILES:
        for name, (_, source) in functions_of(path).items():
            if name in OWN:
                continue
            its_file, its_source = first.setdefault(name, (path.name, source))
            assert source == its_source, f"{name} of {path.name} is not that of {its_file}"
            if its_file != path.name:
                repeated.add(name)
    known = {"_cdiv", "_refuse", "_needs_grad", "_sum_rows_kernel", "_gelu_grad", *CLASSES}
    assert known <= repeated


def test_one_thing_has_one_name():
    """Two functions of nearly the same body are one function, and have its name."""
    bodies = [
        (path.name, name, source.replace(name, "_name"))
        for path in FILES
        for name, (_, source) in functions_of(path).items()
        if len(source.splitlines()) > 3
    ]
    for (file_a, a, body_a), (file_b, b, body_b) in itertools.combinations(bodies, 2):
        longest = max(len(body_a), len(body_b))
        if a == b or file_a == file_b or min(len(body_a), len(body_b)) < 0.9 * longest:
            continue  # the ratio below is at most 2·shorter / (shorter + longer)
        match = difflib.SequenceMatcher(None, body_a, body_b, autojunk=False)
        if match.real_quick_ratio() > 0.95 and match.quick_ratio() > 0.95:
            assert match.ratio() <= 0.95, f"{a} of {file_a} is {b} of {file_b}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_public_functions_have_type_hints(path):
    """Those of a file that is copied are all that an editor knows of it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg != "device"]
            assert node.returns is not None or node.name.endswith("_op_"), node.name
            assert all(a.annotation for a in arguments), node.name
