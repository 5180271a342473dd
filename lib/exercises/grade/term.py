"""`make term DIR=grades`: the totals of all weeks, one folder of grades each, in one CSV."""

import csv
import sys
from pathlib import Path

from lib.exercises.grade.report import write_csv


def join(folder):
    """Write term.csv into `folder` from the totals.csv of its folders; its path. ValueError: there are none."""
    paths = sorted(folder.glob("*/totals.csv"), key=lambda path: (len(str(path)), path))
    if not paths:
        raise ValueError(f"no folder in {folder} has a totals.csv: grade first, OUT={folder}/week1")
    weeks = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            weeks[path.parent.name] = {row["student"]: row for row in csv.DictReader(file)}
    possible = sum(max(int(row["possible"]) for row in week.values()) for week in weeks.values())
    rows = []
    for student in sorted(set().union(*weeks.values())):
        own = {name: week[student] for name, week in weeks.items() if student in week}
        points = {name: int(row["points"]) for name, row in own.items()}
        late = " ".join(name for name, row in own.items() if row["late"] != "0")
        each = (points.get(name, "") for name in weeks)
        rows.append((student, *each, sum(points.values()), possible, late))
    write_csv(folder / "term.csv", ("student", *weeks, "points", "possible", "late"), rows)
    return folder / "term.csv"


if __name__ == "__main__":
    try:
        print(join(Path(sys.argv[1])))
    except ValueError as reason:
        sys.exit(str(reason))
