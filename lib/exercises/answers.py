"""Write your answers into the notebooks of a newer version: `python -m lib.exercises.answers mine v0.3.0`.

mine      a commit or tag with your answers in its notebooks
v0.3.0    the version whose notebooks are in the folder now; what stood in a cell where `mine` left this
          history, a stub or a comment, is no answer

An answer goes into the cell of its exercise. Other cells stay as the newer version has them.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lib.exercises import FORMER
from lib.exercises.grade import notebooks, submissions

import nbformat


def _git(*arguments):
    command = ["git", "-C", str(notebooks.ROOT), *arguments]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode().strip())
    return done.stdout


def cells_at(commit):
    """{exercise: source of its cell} at a commit, those of exercises that are gone too."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "notebooks"))) as archive:
            archive.extractall(folder, filter="data")
        cells = {}
        for path in sorted(Path(folder, "notebooks").glob("*.ipynb")):
            tagged = [c for c in notebooks.read(path) if "exercise" in c.tags]
            cells |= {id: cell.source for cell in tagged for id in cell.checks}
        for submission in submissions.find(Path(folder, "notebooks")):
            cells |= submission.answers
        is_old = Path(folder, "notebooks", "30_add_relu.ipynb").exists()
    return renumbered(cells) if is_old else cells


def renumbered(cells):
    """{exercise: source of its cell} of version 0.1, with today's numbers; without those that are gone."""
    new = {}
    for id, source in cells.items():
        if now := FORMER.get(id, id):
            new[now] = source.replace(f'check("{id}"', f'check("{now}"')
    return new


def carry(answers, stubs):
    """Write {exercise: source} where it is not in `stubs`, the same of before; returns a line for each."""
    lines, mine = [], {id: s for id, s in sorted(answers.items()) if stubs.get(id) != s}
    for page in notebooks.pages().values():
        path, here = notebooks.FOLDER / f"{page.stem}.ipynb", mine.keys() & page.exercises.keys()
        if not here:
            continue
        notebook = nbformat.read(path, as_version=4)
        for id in sorted(here):
            same = page.source_of(id) == stubs.get(id)
            lines.append(
                f"{id} written" + ("" if same else "; the cell was changed, so read it again")
            )
            for cell in notebook.cells:
                if "exercise" in cell.metadata.get("tags", []) and f'check("{id}",' in cell.source:
                    cell.source = mine[id]
        nbformat.write(notebook, path)
    there = {id for page in notebooks.pages().values() for id in page.exercises}
    return lines + [f"{id} is no longer there" for id in mine if id not in there]


def main(arguments=None):
    """Carry the answers, and print what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.exercises.answers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("mine", help="a commit with your answers")
    parser.add_argument("version", help="the version whose notebooks are there now")
    given = parser.parse_args(arguments)
    before = _git("merge-base", given.mine, given.version).decode().strip()
    print("\n".join(carry(cells_at(given.mine), cells_at(before))) or "there are no answers")


if __name__ == "__main__":
    main()
