"""What was graded: a CSV of all rows, one of totals, one of who solved what, and a page for each student."""

import collections
import csv
import dataclasses
import html
import re
import string

from lib.exercises import MARKS
from lib.exercises.grade.notebooks import gradable

COLUMNS = (
    "student", "notebook", "exercise", "points", "possible", "verdict", "sentence", "seconds", "names to read",
)  # fmt: skip
TOTALS = ("student", "points", "possible", *MARKS.values(), "notices", "late")
LATE = "handed in late, as its name says"
_PAGE = string.Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$student</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } th, td { text-align: left; vertical-align: top; padding: .3em .8em }
tr { border-bottom: 1px solid #ccc } td:nth-child(4) { overflow-wrap: anywhere }
</style>
<h1>$student</h1>
<p>$summary</p>
$tables
</html>
""")


@dataclasses.dataclass(frozen=True)
class Row:
    """One exercise of one student; exercise '' where a file could not be graded."""

    student: str
    notebook: str
    exercise: str
    status: str
    sentence: str
    points: int = 0
    seconds: float = 0.0
    remark: str = (
        ""  # names that make a right answer worth reading: for the teacher, and not on the page
    )

    @property
    def mark(self):
        """✔ ✘ ○ or –"""
        return MARKS[self.status]

    @property
    def possible(self):
        """The points of a right answer: the dots of the exercise."""
        exercise = gradable().get(self.exercise)
        return exercise.level if exercise else 0


def write(rows, folder):
    """Write grades.csv, totals.csv, class.csv and a page for each student into `folder`; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(rows, key=lambda row: (row.student, row.notebook, row.exercise))
    students = _by(rows, "student")
    paths = [folder / "grades.csv", folder / "totals.csv", folder / "class.csv"]
    write_csv(paths[0], COLUMNS, map(_cells, rows))
    totals = [(_no_formula(student), *_total(own)) for student, own in students.items()]
    write_csv(paths[1], TOTALS, totals)
    ids = sorted({row.exercise for row in rows if row.possible})
    marks = {(row.student, row.exercise): row.mark for row in rows}
    verdicts = [(_no_formula(s), *(marks.get((s, id), "") for id in ids)) for s in students]
    write_csv(paths[2], ("student", *ids), verdicts)
    for student, own in students.items():
        paths.append(folder / f"{_file_name(student, {p.stem for p in paths})}.html")
        paths[-1].write_text(_page(student, own), encoding="utf-8")
    return paths


def write_csv(path, columns, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def _total(rows):
    """Points, possible points, how many exercises have each mark, other rows, and late notebooks."""
    counts = collections.Counter(row.mark for row in rows if row.possible)
    points, possible = sum(r.points for r in rows), sum(r.possible for r in rows)
    late = sum(row.sentence == LATE for row in rows)
    notices = len(rows) - counts.total()
    return points, possible, *(counts[mark] for mark in MARKS.values()), notices, late


def _by(rows, name):
    groups = collections.defaultdict(list)
    for row in rows:
        groups[getattr(row, name)].append(row)
    return groups


def _cells(row):
    sentence, student, notebook = map(_no_formula, (row.sentence, row.student, row.notebook))
    points, seconds = (row.points, row.possible), f"{row.seconds:.1f}"
    return student, notebook, row.exercise, *points, row.mark, sentence, seconds, row.remark


def _no_formula(text):
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _file_name(student, taken):
    """A file name for a student, whatever the name holds; not one that is taken."""
    name = re.sub(r"[^\w.-]+", "_", student).strip("._")[:80] or "student"
    while name in taken:
        name += "_"
    return name


def _page(student, rows):
    points, possible, *counts, _, _ = _total(rows)
    marks = ", ".join(f"{n} {mark}" for n, mark in zip(counts, MARKS.values()) if n)
    tables = "\n".join(_table(name, own) for name, own in _by(rows, "notebook").items())
    words = {"student": student, "summary": f"{points} of {possible} points: {marks}"}
    return _PAGE.substitute({k: html.escape(v) for k, v in words.items()}, tables=tables)


def _table(notebook, rows):
    head = "".join(
        f"<th>{name}" for name in ("exercise", "verdict", "points", "sentence", "seconds")
    )
    lines = [f"<h2>{html.escape(notebook)}</h2>", f"<table><tr>{head}"]
    for row in rows:
        points = f"{row.points} of {row.possible}" if row.possible else ""
        cells = (_title(row), row.mark, points, row.sentence, f"{row.seconds:.1f}")
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells))
    return "\n".join([*lines, "</table>"])


def _title(row):
    exercise = gradable().get(row.exercise)
    return f"{exercise.id} {exercise.title}" if exercise else row.exercise
