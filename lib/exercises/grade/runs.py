"""Start attempts, watch their time and memory, and believe what comes with the right key."""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

from lib.exercises import MARKS, Verdict
from lib.exercises.capstones import CAPSTONES, PARTS
from lib.exercises.grade import attempt, fence, notebooks
from lib.exercises.grade.notebooks import ROOT
from lib.exercises.grade.remarks import ops_taken, remarkable
from lib.exercises.grade.report import LATE, Row

LOOK_S = 0.02
MOST_REPORTED = 200_000  # bytes; a longer report is none
# Solutions, also those in tests and in history, what the grader's own user has solved, and other weeks.
HIDDEN = ("notebooks/solutions", "lib/tests", ".git", ".reader", "submissions", "grades")
# Exercises whose check builds CUDA for the CPU.
COMPILED = {"04.1", "04.2", "04.3", "04.4", "22.4", "23.3", "31.5", "33.3"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How attempts run. hidden: folders that an answer finds empty. only: exercises to grade; if empty, all."""

    scratch: str
    hidden: tuple = ()
    timeout_s: float = 120
    memory: int = 8 << 30
    jobs: int = 1
    only: tuple = ()
    safe: bool = True

    def everything_hidden(self):
        """All folders and files that an answer finds empty, those inside others first."""
        scratch = Path(self.scratch).resolve()
        paths = {*(ROOT / name for name in HIDDEN), *self.hidden, *_own_files()}
        free = [
            p for p in paths if p.exists() and not holds_python(p) and not scratch.is_relative_to(p)
        ]
        return sorted(free, key=lambda path: len(path.parts), reverse=True)


def holds_python(folder):
    """Whether an answer needs what is in a folder: this course, or Python itself."""
    needed = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
    return any(path.resolve().is_relative_to(folder) for path in needed)


def _own_files():
    """The home of whom the grader runs for, or what of it is not needed: a sentence could show a key."""
    home = Path.home().resolve()
    if not holds_python(home):
        return [home]
    return [path for path in home.iterdir() if not path.is_symlink()]


@dataclasses.dataclass
class Run:
    """An attempt that has been started. work(report) is what it does."""

    id: str
    work: object
    settings: Settings
    began: float = dataclasses.field(default_factory=time.monotonic)
    text: bytes = b""

    def __post_init__(self):
        self.process, self.out = fence.start(
            self._inside(),
            scratch=self.settings.scratch,
            hidden=self.settings.everything_hidden(),
            timeout_s=self.settings.timeout_s,
            memory=self.settings.memory,
            safe=self.settings.safe,
        )

    def _inside(self):
        work, scratch = self.work, self.settings.scratch

        def inside(pipe):
            attempt.settle(scratch)
            work(attempt.reporter(pipe))

        return inside

    @property
    def seconds(self):
        """Since it began."""
        return time.monotonic() - self.began

    def look(self):
        """What it reported, or a Verdict on its end; None while it runs."""
        ended = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        with contextlib.suppress(BlockingIOError):
            while len(self.text) < MOST_REPORTED and (more := os.read(self.out, 65536)):
                self.text += more
        reason = "" if ended else self._too_much()
        if not ended and not reason:
            return None
        code = os.waitstatus_to_exitcode(fence.end(self.process))
        os.close(self.out)
        return self._report() or Verdict(self.id, "wrong", reason or _ended(code))

    def _too_much(self):
        """What it takes more of than it may, as a sentence; '' if nothing."""
        processes = fence.family(self.process)
        if self.seconds > self.settings.timeout_s:
            return f"still running after {self.settings.timeout_s:g} s: does it end?"
        if len(processes) > fence.MOST_PROCESSES:
            return f"starts more than {fence.MOST_PROCESSES} processes"
        if fence.bytes_held(processes) > self.settings.memory:
            return f"takes more than {self.settings.memory / 2**30:g} GiB of memory"
        if len(self.text) >= MOST_REPORTED:
            return "reports more than a verdict"
        return ""

    def _report(self):
        """The first line under the key, which is the line before all; None if there is none."""
        key, *lines = self.text.split(b"\n")[:-1] or [b""]
        for line in lines:
            if key and line.startswith(key + b" "):
                with contextlib.suppress(ValueError):
                    return json.loads(line[len(key) :])
        return None


def grade(all_submissions, settings):
    """A Row for each exercise of each Submission, in the order in which they end."""
    waiting, running = _tasks(all_submissions, settings), []
    try:
        while waiting or running:
            while waiting and len(running) < settings.jobs:
                task = next(waiting, None)
                if task is None:
                    waiting = None
                elif isinstance(task, Row):
                    yield task
                else:
                    running.append(task)
            for task in list(running):
                row = task.look()
                if row:
                    running.remove(task)
                    yield row
            time.sleep(LOOK_S)
    finally:
        for task in running:
            fence.end(task.run.process)


def _tasks(all_submissions, settings):
    """For each exercise a Task, which has begun, or a Row where there is nothing to run."""
    handed_in = collections.defaultdict(set)
    for submission in all_submissions:
        exercises = submission.page.exercises if submission.page else ()
        asked = [id for id in exercises if not settings.only or id in settings.only]
        graded = [id for id in asked if id not in handed_in[submission.student]]
        handed_in[submission.student].update(graded)
        for name in sorted({notebooks.base(id) for id in set(asked) - set(graded)}):
            why = f"{name} in {submission.name} is not graded, because another notebook that has it is newer"
            yield Row(submission.student, submission.title, "", "open", why)
        if submission.late:
            yield Row(submission.student, submission.title, "", "open", LATE)
        if submission.problem:
            yield Row(submission.student, submission.title, "", "open", submission.problem)
        for id in submission.unknown:
            why = "no exercise of this version of the course: an older notebook?"
            if id in CAPSTONES:
                why = "not graded here: a capstone needs a notebook of its own"
            yield Row(submission.student, submission.title, id, "open", why)
        for id in graded:
            yield _begin(submission, id, settings)
    stems = {id: stem for stem, page in notebooks.pages().items() for id in page.exercises}
    for student, ids in handed_in.items():
        for id in settings.only:
            if id not in ids:
                stem = stems.get(id, notebooks.base(id))
                yield Row(student, stem, id, "open", "its notebook is not handed in")


def _begin(submission, id, settings):
    page, answer = submission.page, submission.answers.get(id)
    if answer is None:
        return Row(submission.student, page.stem, id, "open", "its cell is not in the notebook")
    if id not in PARTS and answer.strip() == page.source_of(id).strip():
        return Row(submission.student, page.stem, id, "open", "not attempted yet")
    if id not in PARTS and (ops := ops_taken(_written(submission, id), _given(submission, id))):
        why = (
            f"not graded: the answer takes {ops[0]} from the course, and the cells above it do not"
        )
        return Row(submission.student, page.stem, id, "wrong", why)
    return Task(submission, id, settings)


def _written(submission, id):
    """What a student wrote for an answer: its cell, and earlier answers and cells that run for it."""
    cells = submission.page.cells_for(id, submission.answers)
    page = {cell.source for cell in submission.page.cells} if id not in PARTS else ()
    return "\n".join(source for source in cells if source not in page)


def _given(submission, id):
    """What the course's page has above an exercise; a capstone has no page of the course."""
    cells = submission.page.cells[: submission.page.exercises[id] + 1] if id not in PARTS else ()
    return "\n".join(cell.source for cell in cells)


class Task:
    """An answer that is being checked: at once, or its value first and then the check of that value."""

    def __init__(self, submission, id, settings):
        self.submission, self.id, self.settings = submission, id, settings
        self.exercise, self.seconds = notebooks.gradable()[id], 0.0
        self.awaits_value = id in attempt.values()
        page, answers = submission.page, submission.answers

        def work(report):
            sources = page.cells_for(id, answers)
            attempt.attempt(self.exercise, sources, page.answer_of(id), report)

        self.run = Run(id, work, settings)

    def look(self):
        """The Row when there is a verdict, else None."""
        result, run = self.run.look(), self.run
        if result is None:
            return None
        self.seconds += run.seconds
        if self.awaits_value and isinstance(result, dict) and "value" in result:
            text, self.awaits_value = str(result["value"]), False
            work = functools.partial(attempt.attempt_value, self.exercise, text)
            self.run = Run(self.id, work, self.settings)
            return None
        status, sentence = _verdict(result)
        if self.awaits_value and status == "right":  # that is for the check of the value to say
            status, sentence = "wrong", "reports a verdict and no value"
        return self._row(status, sentence)

    def _row(self, status, sentence):
        names = remarkable(_written(self.submission, self.id), _given(self.submission, self.id))
        remark = ", ".join(names[:4]) if status == "right" else ""
        points = self.exercise.level if status == "right" else 0
        names = self.submission.student, self.submission.title, self.id
        return Row(*names, status, sentence, points, self.seconds, remark)


def _verdict(result):
    """(status, sentence) of a Verdict or of what an attempt reported."""
    if isinstance(result, Verdict):
        return result.status, result.message
    status, message = str(result.get("status")), str(result.get("message"))[:2000]
    return (status, message) if status in MARKS else ("wrong", "reports no verdict")


def _ended(code):
    how = f"signal {code - 128}" if code > 128 else f"status {code}"
    return f"its process ended before the check did ({how})"
