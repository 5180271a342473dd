"""Submitted notebooks: whose they are, which page they answer, which cell answers which exercise."""

import collections
import dataclasses

from lib.exercises.grade import notebooks
from lib.exercises.grade.notebooks import NotANotebook, Page


@dataclasses.dataclass(frozen=True)
class Submission:
    """One submitted notebook. problem: why nothing of it can be graded; page is then None."""

    student: str
    name: str
    page: Page | None = None
    answers: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # exercises that the course does not have
    problem: str = ""

    @property
    def title(self):
        """The page that it answers, or else the name of its file."""
        return self.page.stem if self.page else self.name


def find(folder):
    """The Submissions of a folder, one read when the last has been graded: memory holds no others."""
    latest = {}
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        submission = _read(folder, path)
        key = submission.student, submission.title
        if key in latest:
            path = max(path, latest[key], key=lambda p: p.stat().st_mtime)
        latest[key] = path
    for path in latest.values():
        yield _read(folder, path)


def _read(folder, path):
    student = _student(folder, path)
    if path.is_symlink():
        return Submission(student, path.name, problem="a link, and no file")
    try:
        cells = notebooks.read(path)
    except NotANotebook as reason:
        return Submission(student, path.name, problem=str(reason))
    page = _page_by_name(path.stem) or _page_by_content(cells)
    if not page:
        problem = "neither its name nor its checks are those of a notebook of this course"
        return Submission(student, path.name, problem=problem)
    own = {id for cell in cells for id in cell.checks if id[:2] == page.stem[:2]}
    answers = {id: source for id in page.exercises if (source := _answer(page, id, cells))}
    unknown = tuple(sorted(own - set(page.exercises)))
    return Submission(student, path.name, page, answers, unknown)


def _page_by_name(stem):
    return next((page for name, page in notebooks.pages().items() if name in stem), None)


def _page_by_content(cells):
    numbers = collections.Counter(id[:2] for cell in cells for id in cell.checks)
    number = max(numbers, key=numbers.get, default="none")
    return next((p for stem, p in notebooks.pages().items() if stem.startswith(number)), None)


def _student(folder, path):
    """The name of the student's folder, or what the file's name has beside the notebook's."""
    first, *rest = path.relative_to(folder).parts
    if rest and first not in notebooks.pages():
        return first
    page = _page_by_name(path.stem)
    own = path.stem.replace(page.stem, "") if page else path.stem
    return own.strip(" _-.") or path.stem


def _answer(page, id, cells):
    """The source of the cell that answers an exercise: the one that checks it, or has its cell id; or None."""
    original = page.cells[page.exercises[id]]
    same_cell = [c for c in cells if original.id and c.id == original.id]
    checking = [c for c in cells if id in c.checks]
    best = [c for c in checking if c in same_cell] or checking[::-1] or same_cell
    return best[0].source if best else None
