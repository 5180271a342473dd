"""Programs that wait for one another take turns, and those that wait for ever are named.

Stands in for   the many programs that a GPU runs at once. The interpreter runs one after the other, and one
                that waits for a later one would hang. Here it stops where it waits, and others run meanwhile.
Differs in      when they change: only while one waits, that is, reads the same memory again and again while no
                memory and no variable of the kernel changes. If all wait like that, none ever ends.

A loop that counts its tries does change a variable. It is ended after TRITON_ON_CPU_TIMEOUT seconds (60) in
which no program wrote anything or read anything new.
"""

import linecache
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream

# So many programs are begun at most while others wait. An H200 has as many multiprocessors.
AT_ONCE = 132
_READS = 64  # without a change, before a program is looked at: most kernels never get there
_HIDDEN = (str(Path(triton.__file__).parent), str(Path(__file__).parent))


class WaitsForever(RuntimeError):
    """The programs of a launch that have not ended wait for a change that none of them will make."""


class _Ended(BaseException):
    """Takes a waiting program off its thread when the launch has failed."""


def kernel_frames():
    """The frames of the kernel that runs and of its helpers, innermost first."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in (Turns.run.__code__, _Program._run.__code__):
        if not frame.f_code.co_filename.startswith(_HIDDEN):
            yield frame
        frame = frame.f_back


def line_of_error(error):
    """The innermost line of a kernel or helper that an error came through, in words, or None."""
    place, step = None, error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            place = line_of(step.tb_frame)
        step = step.tb_next
    return place


def line_of(frame):
    """'line 7 of softmax.py, `while True:`'"""
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()
    return f"line {number} of {Path(path).name}" + (f", `{text}`" if text else "")


class Turns:
    """The programs of one launch: the main thread runs them in their order, and others while one waits."""

    def __init__(self, kernel, name):
        self.kernel, self.name = kernel, name
        # waiting: program -> its _Program, on a thread of its own
        self.begun, self.waiting = set(), {}
        self.on_thread = None  # the _Program that runs now, if it is not the main thread's
        self.n_changes = 0  # of memory, by all programs
        # where the main thread's program waits, and whether surely
        self.place, self.certain = "", True
        self._rest = None
        self._look_afresh()
        self._time_of_change()

    # --- what the running program does to memory: called after each access ---

    def wrote(self):
        self.n_changes += 1
        self._look_afresh()
        self._time_of_change()

    def read(self, address, what):
        """The running program read memory that it left as it was; `what()` names it."""
        self.n_reads += 1
        if address not in self.addresses:
            self.addresses.add(address)
            self.changed_at = time.monotonic()
        if self.n_reads < _READS:
            return
        state = _state()
        if self.n_reads % _READS == 0:
            self.state = state
        elif _same(state, self.state):
            self._wait(what, certain=not _polls_with_a_timeout())
        if self.n_reads % 256 == 0 and self._idle_s() > 0.2:
            self._wait(what, certain=False)

    def _look_afresh(self):
        self.n_reads, self.state = 0, None

    def _time_of_change(self):
        self.addresses, self.changed_at = set(), time.monotonic()

    # --- turns ---

    def run(self, arguments):
        """One program to its end, for the interpreter's loop over the grid."""
        self.arguments = arguments
        program = upstream.interpreter_builder.grid_idx
        while program in self.waiting:
            self.place, self.certain = self.waiting[program].place, self.waiting[program].certain
            self._round()
        if program not in self.begun:
            self.begun.add(program)
            self._look_afresh()
            self.kernel(**arguments)
            self.n_changes += 1

    def _wait(self, what, certain):
        place = f"program {upstream.interpreter_builder.grid_idx} waits for ever in "
        place += line_of(next(kernel_frames())) + f": it reads {what()} again and again"
        if self.on_thread is None:
            self.place, self.certain = place, certain
            self._round()
        else:
            self.on_thread.pause(place, certain)
        self._look_afresh()

    def _round(self):
        """Let others run until one changes something: those that wait, the latest first, then new ones."""
        before = self.n_changes
        for other in list(reversed(self.waiting.values())):
            if not other.certain or other.paused_at != self.n_changes:
                self._resume(other)
        while before == self.n_changes and self._begin_another():
            pass
        if before != self.n_changes:
            self._time_of_change()
            return
        limit = os.environ.get("TRITON_ON_CPU_TIMEOUT", "60")
        if all(p.certain for p in [self, *self.waiting.values()]):
            raise WaitsForever(self._message())
        if self._idle_s() > float(limit):
            raise WaitsForever(
                self._message() + f" Nothing changed for {limit} seconds (TRITON_ON_CPU_TIMEOUT)."
            )

    def _begin_another(self):
        program = self._next() if len(self.waiting) < AT_ONCE else None
        if program is None:
            return False
        self.begun.add(program)
        self.waiting[program] = _Program(self, program)
        self._resume(self.waiting[program])
        return True

    def _idle_s(self):
        return time.monotonic() - self.changed_at

    def _next(self):
        """The next program of the grid that has not begun, or None."""
        builder = upstream.interpreter_builder
        self._rest = self._rest or np.ndindex(*builder.grid_dim)
        current = builder.grid_idx
        try:
            for index in self._rest:
                builder.set_grid_idx(*index)
                if builder.grid_idx not in self.begun:
                    return builder.grid_idx
        finally:
            builder.grid_idx = current
        return None

    def _resume(self, program):
        builder = upstream.interpreter_builder
        current, builder.grid_idx = builder.grid_idx, program.index
        self._look_afresh()
        self.on_thread = program
        program.resume()
        self.on_thread = None
        builder.grid_idx = current
        if program.ended:
            del self.waiting[program.index]
            self.n_changes += 1
        if program.error is not None:
            raise program.error

    def _message(self):
        rest = "no other program is left" if not self.waiting else "all others wait too"
        if self._rest is not None and self._next() is not None:
            rest += f", {AT_ONCE} of them at once"
        return (
            f"{self.name}: {self.place}, but {rest}. Release a lock with tl.atomic_xchg on every path, and wait"
            " only for what another program surely does."
        )

    def end(self):
        """Take programs that still wait, after an error, off their threads."""
        for program in self.waiting.values():
            program.resume(and_end=True)


class _Program:
    """One program on a thread of its own, which runs only while the main thread waits for it."""

    def __init__(self, turns, index):
        self.turns, self.index = turns, index
        self.ended, self.error, self.must_end = False, None, False
        self.place, self.certain, self.paused_at = "", True, None
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        self._mine.acquire()
        try:
            if not self.must_end:
                self.turns.kernel(**self.turns.arguments)
        except _Ended:
            pass
        except BaseException as error:  # the main thread raises it
            self.error = error
        self.ended = True
        self._others.release()

    def pause(self, place, certain):
        """On the program's thread: let the main thread go on."""
        self.place, self.certain, self.paused_at = place, certain, self.turns.n_changes
        self._others.release()
        self._mine.acquire()
        if self.must_end:
            raise _Ended

    def resume(self, and_end=False):
        """On the main thread: let this program run until it ends or waits."""
        self.must_end = and_end
        self._mine.release()
        self._others.acquire()


def _state():
    """Where the kernel and its helpers are, and all their variables."""
    return [(f.f_code, f.f_lasti, dict(f.f_locals)) for f in kernel_frames()]


def _polls_with_a_timeout():
    """Whether tl.atomic_poll, which Triton 3.9 has, will stop by itself: its clock is no variable."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "create_atomic_poll":
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("timeout_ns") is not None


def _same(state, before):
    """Whether two states are equal, so that the loop between them will do the same again."""
    if [s[:2] for s in state] != [s[:2] for s in before]:
        return False
    return all(
        now.keys() == then.keys() and all(_equal(now[name], then[name]) for name in now)
        for (*_, now), (*_, then) in zip(state, before, strict=True)
    )


def _equal(a, b):
    if a is b:
        return True
    if isinstance(a, tl.tensor) and isinstance(b, tl.tensor):
        return np.array_equal(_data(a), _data(b))
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # an object without an equality that gives yes or no
        return False


def _data(tensor):
    return getattr(tensor.handle, "data", tensor.handle)
