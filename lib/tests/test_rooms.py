"""The rooms of lib: which may import which, and that no two import each other."""

import ast

from lib.recorded.results import ROOT

import pytest

# room -> the rooms it may import; the first three are the lowest layer
MAY_IMPORT = {
    "machine": "",
    "cache": "",
    "ops": "",
    "nogpu": "machine cache",
    "recorded": "machine nogpu",
    "course": "machine nogpu recorded",
    "profiling": "machine course",
    "measure": "machine nogpu ops recorded profiling",
    "dlrm": "machine ops recorded profiling measure",
    "exercises": "machine nogpu ops course profiling measure dlrm",
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
