"""Cells of a notebook file; a page of the course, and which of its cells an answer needs."""

import ast
import contextlib
import dataclasses
import functools
import json
import re
import symtable
from pathlib import Path

from lib.exercises import all_exercises
from lib.exercises.capstones import CAPSTONES, PARTS

from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "notebooks"
MOST_BYTES = 50_000_000  # of a notebook file; the course's own have one or two million
_CALL = re.compile(rf"""\bcheck\(\s*["'](\d\d\.\d+|{"|".join(CAPSTONES)})["']""")


class NotANotebook(ValueError):
    """The file is no notebook that can be graded; the message says why."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A code cell."""

    id: str
    source: str
    tags: tuple[str, ...] = ()

    @property
    def checks(self):
        """The exercises that it checks, by their number."""
        return tuple(_CALL.findall(self.source))


def read(path):
    """The code cells of a notebook file. NotANotebook: with a sentence, whatever is in the file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise NotANotebook(f"larger than {MOST_BYTES // 10**6} MB")
        content = json.loads(path.read_bytes())
        cells = content["cells"]
        return [_cell(c) for c in cells if c["cell_type"] == "code"]
    except NotANotebook:
        raise
    except OSError as error:
        raise NotANotebook(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise NotANotebook("no notebook: it is not JSON") from None
    except (KeyError, TypeError, AttributeError):
        raise NotANotebook("no notebook of version 4: it has no list of cells") from None


def _cell(cell):
    source, tags = cell["source"], cell.get("metadata", {}).get("tags", [])
    source = source if isinstance(source, str) else "".join(source)
    return Cell(str(cell.get("id", "")), source, tuple(map(str, tags)))


@dataclasses.dataclass(frozen=True)
class Page:
    """A notebook of the course."""

    stem: str
    cells: list[Cell]

    @property
    def exercises(self):
        """{exercise: the position of its cell}."""
        places = {k: c for k, c in enumerate(self.cells) if "exercise" in c.tags}
        return {part: k for k, c in places.items() for id in c.checks for part in parts(id)}

    def source_of(self, id):
        """The cell of an exercise, as a reader finds it."""
        return self.cells[self.exercises[id]].source

    def answer_of(self, id):
        """The name under which the page's cell gives its answer to `check`."""
        given = re.search(rf'\bcheck\("{re.escape(id)}", (\w+)\)', self.source_of(id))
        return given[1] if given else base(id)

    def cells_for(self, id, answers):
        """The sources to run for an answer to `id`, in order, its own last.

        answers: {exercise: source} of a submission; those of other exercises run where this one needs them.
        """
        places = self.exercises
        sources = [c.source for c in self.cells]
        for other, source in answers.items():
            sources[places[other]] = source
        last = places[id]
        needed, chosen = names_needed(sources[last]), [last]
        for k in reversed(range(last)):
            setup = "setup" in self.cells[k].tags
            if setup or needed & names_bound(sources[k]):
                chosen.append(k)
                needed |= names_needed(sources[k])
        return [sources[k] for k in reversed(chosen)]


@functools.cache
def pages():
    """{stem: Page} of the course."""
    return {p.stem: Page(p.stem, read(p)) for p in sorted(FOLDER.glob("[0-9]*.ipynb"))}


def parts(id):
    """What is graded for what a cell checks: an exercise is one thing, a capstone several."""
    return [part for part in PARTS if base(part) == id] or [id]


def base(id):
    """What a cell checks for something that is graded: 03.2, or a capstone for its part."""
    return id.rpartition(".")[0] if id in PARTS else id


def page_of_capstones(cells):
    """A student's own notebook as a Page, where it checks capstones and nothing else; else None."""
    checked = {id for cell in cells for id in cell.checks}
    if not checked or checked - CAPSTONES.keys():
        return None
    marked = [dataclasses.replace(c, tags=("exercise",) * bool(c.checks)) for c in cells]
    return Page(", ".join(sorted(checked)), marked)


@functools.cache
def gradable():
    """{id: Exercise} of all pages, and of the capstones' parts."""
    return all_exercises() | PARTS


# --- names of a cell -----------------------------------------------------------------------------------


@functools.lru_cache(4096)
def names_needed(source):
    """The global names that a cell reads before it binds them itself, `check` left out: the grader checks."""
    needed, bound = set(), {"check"}
    for table in _tables(source):
        needed |= _globals_read(table) - bound
        bound |= _bound(table)
    return frozenset(needed)


@functools.lru_cache(4096)
def names_bound(source):
    """The global names that a cell binds."""
    return frozenset().union(*map(_bound, _tables(source)))


def _tables(source):
    """The symbol table of each statement; none where the source is no Python."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(TransformerManager().transform_cell(source))
        return [symtable.symtable(ast.unparse(s), "cell", "exec") for s in tree.body]
    return []


def _bound(table):
    symbols = table.get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _globals_read(table):
    top = table.get_type() == "module"
    names = {
        s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())
    }
    return names.union(*map(_globals_read, table.get_children()))
