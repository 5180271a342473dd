"""The rooms of lib: which may import which, and that no two import each other."""

import ast
import re
import tokenize

from lib.recorded.results import ROOT

import pytest

# room -> the rooms it may import; the first five are the lowest layer
MAY_IMPORT = {
    "machine": "",
    "cache": "",
    "standalone": "",
    "hosted": "",
    "ops": "",
    "nogpu": "machine cache",
    "recorded": "machine standalone nogpu",
    "course": "machine nogpu recorded",
    "profiling": "machine course",
    "measure": "machine standalone nogpu ops recorded profiling",
    "dlrm": "machine ops recorded profiling measure",
    "models": "machine nogpu ops recorded profiling measure",
    "pages": "machine nogpu ops recorded course profiling measure",
    "exercises": "machine nogpu ops recorded course profiling measure dlrm",
}
LIB = ROOT / "lib"
FILES = [
    p for p in LIB.rglob("*.py") if p.relative_to(LIB).parts[0] not in ("tests", "__init__.py")
]


def room_of(path):
    return path.relative_to(LIB).parts[0].removesuffix(".py")


def imports(path):
    """(module, at the top?) of each import of lib in a file; `from lib import a` imports lib.a."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "lib")


def test_the_table_names_every_room():
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(LIB)))
def test_a_room_imports_only_what_the_table_says(path):
    room = room_of(path)
    for name in imports(path):
        other = name.split(".")[1] if "." in name else "lib"
        assert other in (room, *MAY_IMPORT[room].split()), f"{room} imports {name}"


def private_names_of_others(text):
    """What code takes from other modules of lib though it begins with an underscore: `bench._timed`.

    Parts of ops may be taken: ladders and exercises are made of them, and an op file stands by itself.
    """
    nodes = list(ast.walk(ast.parse(text)))
    modules, names = set(), []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            ours = [a for a in node.names if re.match(r"lib\.(?!ops\b)", of + a.name)]
            modules |= {a.asname or a.name for a in ours}
            names += [a.name for a in ours]
    names += [
        n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) in modules
    ]
    return [name for name in names if re.match(r"_[^_]", name)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(LIB)))
def test_a_name_with_an_underscore_stays_in_its_module(path):
    assert not private_names_of_others(path.read_text())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from lib.measure import bench\nbench._timed(1)\nbench.time_us(1)", ["_timed"]),
        ("from lib.measure import bench as b\nb._timed", ["_timed"]),
        ("from lib.measure.bench import _timed", ["_timed"]),
        ("import lib.measure.bench\nlib.measure.bench._timed", ["_timed"]),
        ("import torch\nfrom lib.measure import bench\ntorch._dynamo, bench.x._y", []),
        ("from lib.measure import bench\nbench.__name__", []),
        ("from lib.ops import matmul\nfrom lib.ops.gelu import _plan\nmatmul._plan", []),
    ],
)
def test_which_names_are_private(text, names):
    assert private_names_of_others(text) == names


# "matches" says what a thing is, "found" only what happened to it
VAGUE = re.compile(r"(^|_)(told|found|kept|noted|wanted)(_|$)", re.IGNORECASE)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(LIB)))
def test_a_name_says_what_a_thing_is(path):
    with path.open() as text:
        tokens = list(tokenize.generate_tokens(text.readline))
    vague = {t.string for t in tokens if t.type == tokenize.NAME and VAGUE.search(t.string)}
    assert not vague


def test_the_table_has_no_circle():
    """Each room imports only rooms that stand above it."""
    above = set()
    for room, others in MAY_IMPORT.items():
        assert set(others.split()) <= above, room
        above.add(room)


def _module(name):
    """The file of a module, or of the module that a name is taken from; None for a package's own names."""
    path = ROOT / name.replace(".", "/")
    for candidate in (
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
    ):
        if candidate.exists():
            return candidate
    return path.parent / "__init__.py"


def test_no_two_files_import_each_other():
    """Imports inside functions count: they hide an import cycle and do not remove it."""
    edges = {path: {_module(name) for name in imports(path)} - {path} for path in FILES}
    visited = set()

    def walk(path, trail):
        assert path not in trail, " -> ".join(str(p.relative_to(LIB)) for p in [*trail, path])
        if path not in visited:
            for other in edges.get(path, ()):
                walk(other, [*trail, path])
            visited.add(path)

    for path in FILES:
        walk(path, [])
