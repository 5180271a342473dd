"""Check that sources of lib saved in notebooks are still those of lib.

    python -m lib.recorded.shown [--write]

`show_source` prints functions of lib into a notebook, where they are saved. A saved source is out of date when
lib's definitions of its name now differ; --write replaces it with the most similar of these.
"""

import argparse
import ast
import difflib
import functools
import re
import sys

from lib.recorded import notebooks, results

import nbformat

_FENCED = re.compile(r"(?<=```python\n).*(?=\n```)", re.DOTALL)


@functools.cache
def _definitions():
    """{name: the sources of functions and classes of lib with that name, methods included}"""
    sources = {}
    for path in sorted((results.ROOT / "lib").rglob("*.py")):
        if "tests" in path.parts:
            continue
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                text = "\n".join(lines[first - 1 : node.end_lineno])
                sources.setdefault(node.name, []).append(text)
    return sources


def saved_sources(notebook):
    """(output, source) of everything that show_source printed into a notebook."""
    for cell in notebook.cells:
        if cell.cell_type != "code" or "show_source(" not in cell.source:
            continue
        for output in cell.outputs:
            text = output.get("data", {}).get("text/markdown", "")
            if match := _FENCED.search(text):
                yield output, match[0]


def source_now(text, cells):
    """The definition in lib that `text` shows, or `text` itself where it shows something else.

    cells: the notebook's own code, which may define the same names.
    """
    name = re.search(r"^\s*(?:def|class) (\w+)", text, re.MULTILINE)
    sources = _definitions().get(name[1], ()) if name else ()
    if not sources or text in sources or text in cells:
        return text
    alike = {s: difflib.SequenceMatcher(None, text, s, autojunk=False).ratio() for s in sources}
    best = max(alike, key=alike.get)
    return best if alike[best] > 0.6 else text  # below that it is a namesake from elsewhere


def outdated(notebook):
    """(output, source, source now) of each source that a notebook shows and that lib has changed."""
    cells = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for output, text in saved_sources(notebook):
        if (now := source_now(text, cells)) != text:
            yield output, text, now


def main(argv=None):
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m lib.recorded.shown")
    parser.add_argument("--write", action="store_true")
    options, n_old = parser.parse_args(argv), 0
    for path in notebooks.notebooks():
        notebook = nbformat.read(path, as_version=4)
        stale = list(outdated(notebook))
        n_old += len(stale)
        for output, text, now in stale:
            print(f"{path.name}: {text.strip().splitlines()[0]} ... has changed")
            markdown = output.data["text/markdown"]
            output.data["text/markdown"] = markdown.replace(text, now.strip("\n"))
        if options.write and stale:
            path.write_text(nbformat.writes(notebook) + "\n")
    return 1 if n_old and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
