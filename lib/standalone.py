"""An op to take with you: its file of lib/ops, with what it uses of the files beside it.

    python -m lib.standalone gelu --to FOLDER [--lean] [--force]      or make copy OP=gelu TO=FOLDER

One op is written as one file that needs torch, triton and the standard library; its .cu stands beside it.
Several ops stay as they are, beside _host.py and _device.py with just what they use. `check` is
check_against_float64, for kernels of your own; `bill` counts launches and bytes of any PyTorch code.
--lean: with plain launches and asserts, a file to read, to show, to paste. This program needs the standard
library alone.
"""

import argparse
import ast
import copy
import functools
import itertools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "lib" / "ops"
# What else can be taken: files that import nothing of lib.
TOOLS = {"check": ROOT / "lib/measure/check.py", "bill": ROOT / "lib/profiling/bill.py"}
BAND = "# --- "
_CODE = (ast.FunctionDef, ast.ClassDef)


def read(stem):
    """The text of a Python file of lib/ops."""
    return (FOLDER / f"{stem}.py").read_text()


def ops():
    """The names of all ops."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def standalone(name, read=read, lean=False):
    """The text of an op that imports nothing of lib. read: from the stem of a file in lib/ops to its text."""
    op = _parsed(read(name))
    shared = _shared([op], read, lean)
    names = {n for file in shared.values() for s in file.statements for n in s.binds}
    if clash := names & op.bound:
        raise ValueError(f"{name}: {', '.join(sorted(clash))} would hide what is shared; rename it")
    lines, place = op.lines, _place(op, names)
    head = [line for line in lines[: op.docstring_end] if not line.startswith("Copy it ")]
    if lean:
        head[2:2] = [f"# {line}".rstrip() for line in _parsed(read("_lean")).docstring.splitlines()]
    imports = op.imports.union(*(file.imports for file in shared.values()))
    parts = [*head, "", *_import_lines(imports), *(lines[op.start : place] or [""])]
    for stem, file in shared.items():
        band = f"{BAND}shared by the ops, in lib/ops/{stem}.py ".ljust(111, "-")
        parts += [band, "", "", *file.body, "", ""]
    parts += lines[place:]
    aliases = {alias for file in (op, *shared.values()) for alias in file.siblings}
    prefix = rf"(?<![\w.])({'|'.join(aliases)})\.(?=({'|'.join(names)})\b)" if names else "(?!)"
    return re.sub(prefix, "", "\n".join(parts).rstrip("\n") + "\n")


def shared_by(names, read=read, lean=False):
    """{stem: text} of the files that several ops share, each with just what they use."""
    shared, texts = _shared([_parsed(read(name)) for name in names], read, lean), {}
    for stem, file in shared.items():
        block = [*file.block, ""] if any(s.siblings for s in file.statements) else []
        head = [*file.lines[: file.docstring_end], "", *_import_lines(file.imports), ""]
        gap = [""] if file.statements[0].is_code else []  # two blank lines before a function
        texts[stem] = "\n".join([*head, *block, *gap, *file.body]) + "\n"
    return texts


class _Statement:
    """One statement at the top level of a file, with the comments right above it."""

    def __init__(self, lines, node, after, aliases):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while first - 1 > after and re.match("#(?! ---)", lines[first - 2]):
            first -= 1
        self.first, self.is_code = first, isinstance(node, _CODE)
        self.text = "\n".join(lines[first - 1 : node.end_lineno])
        self.names, self.siblings = _names([node]), _taken([node], aliases)
        self.at_import = {name for _, name in _taken(_run_at_import(node), aliases)}
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        self.binds = {node.name} if self.is_code else _names(targets, ast.Store)


class _File:
    """A file of lib/ops, cut up: docstring, imports, the block that imports its siblings, statements."""

    def __init__(self, text):
        self.lines, self.statements, self.siblings, self.block = text.splitlines(), [], {}, []
        self.imported, tree = {}, ast.parse(text)  # {name: (module, what of it or None)}
        self.docstring, self.docstring_end = ast.get_docstring(tree), tree.body[0].end_lineno
        for node, after in zip(tree.body[1:], tree.body):
            if isinstance(node, ast.Import):
                self.imported |= {_bound(a): (_spelled(a), None) for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {_bound(a): (node.module, _spelled(a)) for a in node.names}
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "__package__":
                self.siblings = {_bound(a): a.name for n in node.body for a in n.names}
                self.block = self.lines[node.lineno - 1 : node.end_lineno]
            else:
                args = self.lines, node, after.end_lineno, self.siblings
                self.statements.append(_Statement(*args))
        self.start = self.statements[0].first - 1
        while not self.lines[self.start - 1]:
            self.start -= 1  # blank lines after imports stay as they are
        arguments = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        self.bound = (
            arguments | _names([tree], ast.Store) | {n for s in self.statements for n in s.binds}
        )

    @property
    def imports(self):
        """What the statements need."""
        names = {name for s in self.statements for name in s.names}
        return {self.imported[name] for name in names & {*self.imported}}

    @property
    def body(self):
        """The lines of the statements: constants one below the other, functions apart."""
        runs = itertools.groupby(self.statements, lambda s: s.is_code)
        texts = [("\n\n\n" if is_code else "\n").join(s.text for s in run) for is_code, run in runs]
        return "\n\n\n".join(texts).splitlines()

    def replaced_by(self, other):
        """This file with the statements of another in place of those that bind the same names."""
        names = {n for s in other.statements for n in s.binds}
        for statement in other.statements:
            statement.text = re.sub(r"\bhost\.", "", statement.text)  # this file is the host's
        self.statements = other.statements + [s for s in self.statements if not s.binds & names]
        self.imported = self.imported | other.imported
        self.lines, self.docstring_end = other.lines, other.docstring_end


def _names(nodes, context=ast.Load):
    walk = (n for node in nodes for n in ast.walk(node))
    return {n.id for n in walk if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _taken(nodes, aliases):
    """{(stem, name)} of what nodes take of the files beside theirs, as host.run."""
    attributes = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    pairs = [(n.value.id, n.attr) for n in attributes if isinstance(n.value, ast.Name)]
    return {(aliases[alias], name) for alias, name in pairs if alias in aliases}


def _run_at_import(node):
    """The parts of a statement that run when the file is imported: not the bodies of functions."""
    if isinstance(node, ast.FunctionDef):
        return [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.ClassDef):
        inside = (part for n in node.body for part in _run_at_import(n))
        return [*node.bases, *node.decorator_list, *inside]
    return [node]


def _bound(alias):
    return alias.asname or alias.name.split(".")[0]


def _spelled(alias):
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


@functools.lru_cache(maxsize=64)
def _parsed(text):
    return _File(text)


def _shared(files, read, lean):
    """{stem: its _File with just the statements that these files lead to}."""
    shared, used = {}, set()
    todo = [pair for file in files for s in file.statements for pair in s.siblings]
    while todo:
        stem, name = todo.pop()
        if stem not in shared:
            shared[stem] = copy.copy(_parsed(read(stem)))
            if lean and stem == "_host":
                shared[stem].replaced_by(_File(read("_lean")))
        for statement in shared[stem].statements:
            if name in statement.binds and statement not in used:
                used.add(statement)
                todo += [*statement.siblings, *((stem, n) for n in statement.names)]
    for file in shared.values():
        file.statements = [s for s in file.statements if s in used]
    return {stem: file for stem, file in sorted(shared.items()) if file.statements}


def _place(op, shared):
    """The line before which shared code goes: the start of the first band that needs some at its import."""
    needs = (s.first for s in op.statements if s.at_import & shared)
    first = next(needs, len(op.lines) + 1) - 1
    bands = [n for n, line in enumerate(op.lines[:first]) if line.startswith(BAND)]
    return bands[-1] if bands else op.start


def _import_lines(imports):
    """Lines in isort's order: the standard library, then the rest; `import` before `from`."""
    modules, sections = {}, {True: [], False: []}
    for module, name in sorted(imports, key=str):
        modules.setdefault((name is not None, module), []).append(name)
    for (is_from, module), names in sorted(modules.items()):
        line = f"from {module} import {', '.join(names)}" if is_from else f"import {module}"
        sections[re.split("[. ]", module)[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(section) for section in sections.values() if section).splitlines()


def _all_of(op):
    names = sorted(n for s in op.statements for n in s.binds if n[0] != "_")
    line = f"__all__ = {json.dumps(names)}"
    rows = "".join(f"    {json.dumps(name)},\n" for name in names)
    return "\n\n" + (line if len(line) <= 100 else f"__all__ = [\n{rows}]") + "\n"


# --- the command ---------------------------------------------------------------------------------------------


def files_of(names, lean=False):
    """{file name: text} of these ops and tools. ValueError for a name that is none."""
    if unknown := [name for name in names if name not in (*ops(), *TOOLS)]:
        known = ", ".join((*ops(), *TOOLS))
        raise ValueError(f"there is no op {unknown[0]!r} to copy; there are {known}")
    own, texts = [name for name in names if name not in TOOLS], {}
    for name in own:
        alone = standalone(name, lean=lean) + _all_of(_parsed(read(name)))
        texts[f"{name}.py"] = alone if len(own) == 1 else read(name)
        if (cuda := FOLDER / f"{name}.cu").exists():
            texts[cuda.name] = cuda.read_text()
    if len(own) > 1:
        texts |= {f"{stem}.py": text for stem, text in shared_by(own, lean=lean).items()}
    return texts | {f"{name}.py": TOOLS[name].read_text() for name in names if name in TOOLS}


def write(texts, folder, force=False):
    """Write {file name: text} into a folder, all or none. FileExistsError rather than change what is there."""
    for name, text in texts.items():
        path = folder / name
        if not force and path.exists() and path.read_text() != text:
            raise FileExistsError(f"{path} is there and differs; FORCE=1 (--force) overwrites it")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        print(f"{folder / name}, {len(text.splitlines())} lines")


def main(argv=None):
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.standalone", description=__doc__.split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help=f"ops, {' or '.join(TOOLS)}")
    parser.add_argument("--to", type=Path, help="a folder, made where there is none")
    parser.add_argument("--lean", action="store_true", help="plain launches and asserts")
    parser.add_argument("--force", action="store_true", help="overwrite files that differ")
    options = parser.parse_args(argv)
    try:
        if not options.names or not options.to:
            raise ValueError("say what and where: make copy OP=gelu TO=folder")
        write(files_of(options.names, options.lean), options.to.expanduser(), options.force)
    except (ValueError, OSError) as error:
        of_the_system = getattr(error, "errno", None)  # and not a sentence of ours
        print(f"cannot write: {error}" if of_the_system else error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
