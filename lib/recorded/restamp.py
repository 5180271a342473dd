"""Give recordings whose code was only renamed, moved or cut the hash of the code as it is now.

    python -m lib.recorded.restamp REF [--cut | --added] [old=new ...]

REF is the commit whose recordings are current. Each notebook and each record of data/results that is stale
is compared with its code at REF, as syntax trees without imports, comments and docstrings. The new hash is
written only where the trees are equal after the renames. All others are listed, and the exit status is 1.

Renames    suite=registry                      a name: of a variable, an argument or a function
           f:suite=registry                    the name inside functions called f, there in place of the above
           machine.describe=show.describe      an attribute of a name
           'f()=g(x)'                          a call without arguments
           '"gelu"="gelu_tanh"'                a string, the whole of it
           lib/a.py=lib/b/a.py                 a file, in `sources` and, as lib.a too, in strings of the code

With --cut a notebook may have fewer statements than were recorded, and its cells may be joined: the remaining
statements are recorded ones in the same order, so their outputs are still those of that run. Exercises may
change: a cell that ends in `check(...)` prints that nothing was attempted yet, and measures nothing. With
--added there may also be new statements between the recorded ones, which call nothing that measures and bind no
name that a recorded statement reads: they change no recorded output, and their own need no GPU. The hash of the
code that ran stays beside the new one, as `ran`.
"""

import argparse
import ast
import difflib
import json
import re
import symtable
import sys

from lib.recorded import notebooks, results

import nbformat

MEASURES = {"bench", "measured_or_recorded", "profiling", "perf_counter", "Event", "do_bench"}


class _Renamed(ast.NodeTransformer):
    """A tree without imports and docstrings, and with the renames applied."""

    def __init__(self, renames):
        self.renames = renames

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import

    def visit_Try(self, node):
        node = self.generic_visit(node)
        node.body = node.body or [ast.Pass()]  # of which nothing but imports was left
        return node

    def visit_Expr(self, node):
        return None if results.is_docstring(node) else self.generic_visit(node)

    def visit_FunctionDef(self, node):
        outside, f = self.renames, f"{node.name}:"
        inside = {old.removeprefix(f): new for old, new in outside.items() if old.startswith(f)}
        node.name, self.renames = outside.get(node.name, node.name), outside | inside
        node = self.generic_visit(node)
        self.renames = outside
        return node

    def visit_arg(self, node):
        node.arg = self.renames.get(node.arg, node.arg)
        return self.generic_visit(node)

    def visit_Name(self, node):
        return ast.parse(self.renames.get(node.id, node.id), mode="eval").body

    def visit_Call(self, node):
        new = self.renames.get(ast.unparse(node))
        return ast.parse(new, mode="eval").body if new else self.generic_visit(node)

    def visit_Attribute(self, node):
        new = self.renames.get(ast.unparse(node))
        return ast.parse(new, mode="eval").body if new else self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            if whole := self.renames.get(f'"{node.value}"'):
                node.value = whole.strip('"')
            for old, new in self.renames.items():
                if "/" in old:  # as a path, and as a module
                    node.value = node.value.replace(old, new)
                    module, renamed = (p.removesuffix(".py").replace("/", ".") for p in (old, new))
                    node.value = re.sub(rf"\b{re.escape(module)}\b", renamed, node.value)
        return node


def same_code(old, new, renames):
    """Whether `new` equals `old` except for imports, comments, docstrings and the renames."""
    if results.code_hash([old]) == results.code_hash([new]):
        return True
    trees = [_Renamed(names).visit(ast.parse(text)) for text, names in ((old, renames), (new, {}))]
    # contexts (load, store) aside: a renamed name has lost its own
    return ast.unparse(trees[0]) == ast.unparse(trees[1])


def is_edited(old, new, added=False):
    """Whether the code cells `new` are `old` with statements left out and cells joined, and no other change.

    added: statements may be new, too, if they measure nothing and bind no name that a recorded one reads.
    """
    old, new = _statements(old), _statements(new)
    if not added:
        rest = iter(old)
        return all(statement in rest for statement in new)
    same = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    recorded = {i for block in same for i in range(block.b, block.b + block.size)}
    ours = "\n".join(new[i] for i in range(len(new)) if i not in recorded)
    names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(ast.parse(ours))}
    bound, read = _bound(ours), _read("\n".join(new[i] for i in sorted(recorded)))
    return not names & MEASURES and not bound & read


def _bound(code):
    """The names that a module of this code binds."""
    return {s.get_name() for s in _scopes(code)[0].get_symbols() if s.is_assigned()}


def _read(code):
    """The names of a module that this code reads, in its functions too."""
    module, *inner = _scopes(code)
    symbols = [*module.get_symbols(), *(s for t in inner for s in t.get_symbols() if s.is_global())]
    return {s.get_name() for s in symbols if s.is_referenced()}


def _scopes(code):
    """The symbol table of a module, followed by those of its functions and classes."""
    tables = [symtable.symtable(code, "cells", "exec")]
    for table in tables:  # grows on the way
        tables += table.get_children()
    return tables


def _statements(cells):
    bodies = [_Renamed({}).visit(ast.parse(cell)).body for cell in cells]
    return [ast.unparse(node) for body in bodies if not _is_exercise(body) for node in body]


def _is_exercise(body):
    return bool(body) and ast.unparse(body[-1]).startswith("check(")


def _still_holds(old, new, renames, edits):
    """Whether a recording of the pieces of code `old` holds for `new`; edits: "", "cut" or "added"."""
    if len(old) == len(new) and all(same_code(a, b, renames) for a, b in zip(old, new)):
        return True
    return bool(edits) and is_edited(old, new, edits == "added")


def _new_hash(stamped, key, new):
    """Put the hash of the code as it is now in place of the recorded one, which stays as `ran`."""
    stamped.setdefault("ran", stamped[key])
    stamped[key] = new


def _code_cells(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def number(notebook):
    """Number the code cells from 1, as a run does, where cells were cut or added."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count


def restamp_notebook(path, ref, renames, edits=""):
    """Write the hash of a notebook whose cells are those at `ref`; returns whether they are."""
    notebook = nbformat.read(path, as_version=4)
    text = results.text_at(ref, path.relative_to(results.ROOT))
    old, new = _code_cells(nbformat.reads(text, as_version=4)), _code_cells(notebook)
    if notebook.metadata[notebooks.KEY]["code_hash"] != results.code_hash(old):
        return False  # stale at `ref` already
    if not _still_holds(old, new, renames, edits):
        return False
    _new_hash(notebook.metadata[notebooks.KEY], "code_hash", notebooks.code_hash(notebook))
    number(notebook)
    path.write_text(nbformat.writes(notebook) + "\n")
    return True


def restamp_record(path, ref, renames, edits=""):
    """Write sources and hash of a record whose sources are those at `ref`; returns whether they are."""
    record = json.loads(path.read_text())
    old, new = record["sources"], [renames.get(source, source) for source in record["sources"]]
    before = [piece for a in old for piece in results.code_in(a, results.text_at(ref, a))]
    now = [piece for b in new for piece in results.code_in(b, (results.ROOT / b).read_text())]
    edits = edits if all(source.endswith(".ipynb") for source in new) else ""
    current = record["source_hash"] == results.code_hash(before)
    if not current or not _still_holds(before, now, renames, edits):
        return False
    record["sources"] = new
    _new_hash(record, "source_hash", results.source_hash(new))
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return True


def main(argv=None):
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.recorded.restamp")
    parser.add_argument("ref")
    parser.add_argument("renames", nargs="*", metavar="old=new")
    edits = parser.add_mutually_exclusive_group()
    edits.add_argument("--cut", action="store_const", const="cut", dest="edits", default="")
    edits.add_argument("--added", action="store_const", const="added", dest="edits")
    options = parser.parse_args(argv)
    # a string may hold = itself
    renames = dict(re.fullmatch(r'(".*"|[^=]*)=(.*)', pair).groups() for pair in options.renames)
    changed = []
    for path in notebooks.notebooks():
        if notebooks.status(path) == "stale":
            changed.append((path, restamp_notebook(path, options.ref, renames, options.edits)))
    for path in sorted(results.FOLDER.glob("*/*.json")):
        record = json.loads(path.read_text())
        moved = any(not (results.ROOT / source).exists() for source in record["sources"])
        if moved or results.is_stale(record):
            changed.append((path, restamp_record(path, options.ref, renames, options.edits)))
    for path, same in changed:
        print(f"{path.name}: {'restamped' if same else 'the code differs: record it again'}")
    return 0 if all(same for _, same in changed) else 1


if __name__ == "__main__":
    sys.exit(main())
