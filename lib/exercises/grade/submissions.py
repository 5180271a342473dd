"""Submitted notebooks: whose they are, which page they answer, which cell answers which exercise."""

import collections
import dataclasses
import re

from lib.exercises.capstones import CAPSTONES
from lib.exercises.grade import notebooks
from lib.exercises.grade.notebooks import NotANotebook, Page

# Canvas: lovelaceada_LATE_12345_67890_03_add_relu-1.ipynb, the student's number and then the submission's.
_CANVAS = re.compile(r"(.+?)(?:_LATE)?_(\d{3,})_(\d{3,})_")
_LITTER = ("__MACOSX", "__pycache__")


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
    def late(self):
        """Whether its name says so, as Canvas writes it."""
        return bool(re.match(r".+?_LATE_\d{3,}_\d{3,}_", self.name))

    @property
    def title(self):
        """The page that it answers, or else the name of its file."""
        return self.page.stem if self.page else self.name


def find(folder):
    """The Submissions of a folder, one read when the last has been graded: memory holds no others."""
    copies, unread, students = collections.defaultdict(list), collections.defaultdict(list), {}
    for path in sorted(folder.rglob("*")):
        if any(p[0] == "." or p in _LITTER for p in path.relative_to(folder).parts):
            continue
        if path.is_dir() and not path.is_symlink():
            if path.parent == folder and path.name not in notebooks.pages():
                students.setdefault(path.name)
            continue
        student = _student(folder, path)
        students[student] = path
        if path.suffix.lower() == ".ipynb":
            copies[student, _read(folder, path).title].append(path)
        else:
            unread[student].append(str(path.relative_to(folder)))
    for (student, title), paths in sorted(copies.items(), key=_newest_first):
        *older, newest = sorted(paths, key=_age)
        yield _read(folder, newest)
        for path in older:
            yield Submission(student, title, problem=_superseded(folder, path, newest))
    for student, names in unread.items():
        more = f", and {len(names) - 3} more" * (len(names) > 3)
        problem = f"not read, because only files .ipynb are: {', '.join(names[:3])}{more}"
        yield Submission(student, "", problem=problem)
    for student in [student for student, path in students.items() if path is None]:
        yield Submission(student, "", problem="nothing handed in: the folder is empty")


def _age(path):
    """Copies sorted by it end with the one that counts."""
    canvas = _CANVAS.match(path.stem)
    return int(canvas[3]) if canvas else 0, path.stat(follow_symlinks=False).st_mtime


def _newest_first(copies):
    """Of a student's two notebooks with one capstone, the newer is graded."""
    (student, _), paths = copies
    return student, [-number for number in max(map(_age, paths))]


def _superseded(folder, path, newest):
    """Why a copy is not graded."""
    names = [str(p.relative_to(folder)) for p in (path, newest)]
    why = f"{names[0]} is not graded, because {names[1]} is newer"
    if path.parent == newest.parent:
        return why
    return f"{why}; if these are two students' files, grade the folder that holds theirs"


def _read(folder, path):
    student = _student(folder, path)
    if path.is_symlink():
        return Submission(student, path.name, problem="a link, and no file")
    try:
        cells = notebooks.read(path)
    except NotANotebook as reason:
        return Submission(student, path.name, problem=str(reason))
    if page := notebooks.page_of_capstones(cells):
        answers = {id: page.source_of(id) for id in page.exercises}
        return Submission(student, path.name, page, answers)
    page = _page_by_name(path.stem) or _page_by_content(cells)
    if not page:
        problem = "neither its name nor its checks are those of a notebook of this course"
        return Submission(student, path.name, problem=problem)
    checked = {id for cell in cells for id in cell.checks}
    own = {id for id in checked if id[:2] == page.stem[:2] or id in CAPSTONES}
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
    if canvas := _CANVAS.match(path.stem):
        return f"{canvas[1]}_{canvas[2]}"
    names = (*notebooks.pages(), *CAPSTONES, "capstone")
    if name := next((name for name in names if name in path.stem), ""):
        for number in (r"(?: ?\(\d+\)|-\d+)?", ""):  # of a browser's second download
            if own := re.sub(name + number, "", path.stem).strip(" _-."):
                return own
    return path.stem


def _answer(page, id, cells):
    """The source of the cell that answers an exercise, or None.

    Of the cells that check it or have its cell's id, the last with an answer: not one that is still the stub,
    and not one that checks again what another cell defines.
    """
    original, name = page.cells[page.exercises[id]], page.answer_of(id)
    its_cells = [c for c in cells if id in c.checks or original.id and c.id == original.id]
    defining = [c for c in its_cells if not _needs(c.source, name)]
    attempts = [c for c in defining if c.source.strip() != original.source.strip()]
    return next((some[-1].source for some in (attempts, defining, its_cells) if some), None)


def _needs(source, name):
    return name in notebooks.names_needed(source) - notebooks.names_bound(source)
