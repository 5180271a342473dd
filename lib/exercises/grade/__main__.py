"""`make grade DIR=submissions`: see lib/exercises/grade/__init__.py."""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

from lib.exercises.grade import fence, report, runs, submissions
from lib.exercises.grade.notebooks import ROOT, gradable, parts
from lib.nogpu.cuda_build import why_no_compiler

# Without a GPU, so that a verdict is the same everywhere; one thread, so that attempts can be forked.
CLEAN = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONSAFEPATH": "1",
}
NO_FENCE = """this system allows no fence around answers: {reason}
Answers could then write to this disk and use the network. Grade on Linux outside a container, or in one that
may make user namespaces. Ubuntu from 24.04 on forbids them; this allows them until its next start:
    sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0
UNSAFE=1 grades all the same, with limits of time and memory alone."""


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.exercises.grade", description=report.__doc__
    )
    parser.add_argument("folder", type=Path, help="of notebooks, or of one folder for each student")
    parser.add_argument(
        "--out", type=Path, default=Path("grades"), help="where the grades go (default: grades)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for an answer (default: 120)"
    )
    parser.add_argument("--memory", type=float, default=8, help="GiB for an answer (default: 8)")
    parser.add_argument("--only", default="", help="exercises, as '00.3 01.3' (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="answers at a time (default: 1)")
    return parser.parse_args()


def ids(only):
    """What is to be graded of a text such as "00.3 01.3"."""
    words = only.replace(",", " ").split()
    return tuple(dict.fromkeys(id for word in words for id in parts(word)))


def reason_not_to_grade(options):
    """A sentence on what is wrong with the command line or this machine; '' if nothing."""
    folder, out = options.folder.resolve(), options.out.resolve()
    if not folder.is_dir():
        return f"there is no folder {options.folder}"
    if runs.holds_python(folder):
        return (
            f"{options.folder} holds the course or its Python; give a folder with submissions alone"
        )
    if out.is_relative_to(folder):
        return f"{options.out} lies inside {options.folder}: name a folder beside it, OUT=grades"
    if (out / "grades.csv").exists():
        return (
            f"{options.out} has the grades of an earlier run: name another folder, OUT=grades/week2"
        )
    if unknown := [id for id in ids(options.only) if id not in gradable()]:
        return f"there is no exercise {', '.join(unknown)} to grade"
    asked = runs.COMPILED.intersection(ids(options.only) or gradable())
    if asked and (reason := why_no_compiler()):
        names = ", ".join(sorted(asked))
        return f"no right answer to {names} would get a point here: {reason} Or leave these out by ONLY=…"
    return ""


def main():
    """Grade; the exit status."""
    options = arguments()
    if reason := reason_not_to_grade(options):
        return reason
    with tempfile.TemporaryDirectory(prefix="grade-") as scratch:
        settings = runs.Settings(
            scratch=scratch,
            hidden=(options.folder.resolve(), options.out.resolve()),
            timeout_s=options.timeout,
            memory=int(options.memory * 2**30),
            jobs=options.jobs,
            only=ids(options.only),
            safe=os.environ.get("UNSAFE") != "1",
        )
        if settings.safe and (
            reason := fence.reason_against(scratch, settings.everything_hidden())
        ):
            return NO_FENCE.format(reason=reason)
        return grade(options, settings)


def grade(options, settings):
    """Grade all submissions and write what came out, also when interrupted."""
    rows = []
    gradable()
    gc.freeze()  # else each attempt's first collection copies the pages that it shares with this process
    try:
        for row in runs.grade(submissions.find(options.folder), settings):
            rows.append(row)
            print(row.mark, row.student, row.notebook, row.exercise, row.sentence, flush=True)
    except KeyboardInterrupt:
        print("interrupted; what was graded until now is written")
    finally:
        gc.unfreeze()
        if rows:
            paths = report.write(rows, options.out)
            print(
                f"{len(rows)} rows in {paths[0]}; beside it totals.csv, class.csv and {len(paths) - 3} pages"
            )
    return 0 if rows else f"there is no notebook in {options.folder}"


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in CLEAN.items()):
        again = [sys.executable, "-m", "lib.exercises.grade", *sys.argv[1:]]
        same = {
            k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "LC_ALL", "UNSAFE")
        }
        os.execve(sys.executable, again, same | CLEAN)
    sys.exit(main())
