"""What a check allows an answer: some time, and some lines of print."""

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
from unittest import mock

# The longest check of a right answer takes 5 s of its thread's time, whatever else the machine does.
BUSY_S = 60
WAITING_S = 300  # for one that waits: a build takes that long where nothing is cached yet
LOOK_S = 1
MOST_PRINTED = 20_000  # characters


class TimeUp(BaseException):
    """Raised inside an answer that does not end. It passes an answer's `except Exception`."""


@contextlib.contextmanager
def time_limit():
    """TimeUp once the code inside has computed for BUSY_S, or is still there after WAITING_S.

    Only the main thread, where notebooks run, can be interrupted. CUDA kernels on the CPU have a limit of
    their own, which is made shorter.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, began_busy = time.monotonic(), time.thread_time()

    def look(*_):
        busy_s, seconds = time.thread_time() - began_busy, time.monotonic() - began
        if busy_s > BUSY_S or seconds > WAITING_S:
            raise TimeUp(f"still running after {seconds:.0f} s: does it end?")

    before = signal.signal(signal.SIGALRM, look)
    # again and again, because Python drops what is raised inside some callbacks
    timer = signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    shorter = {"CUDA_ON_CPU_TIMEOUT": os.environ.get("CUDA_ON_CPU_TIMEOUT", str(BUSY_S))}
    try:
        with mock.patch.dict(os.environ, shorter):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def stopped(threads):
    """When the time for the code inside is up, threads that still run Python are ended, too."""
    try:
        yield
    except TimeUp:
        for thread in threads:  # is_alive() is wrong after a join that was interrupted
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
        raise


class _Short(io.TextIOBase):
    """Hands on to `stream` what is written, up to MOST_PRINTED characters."""

    def __init__(self, stream):
        self.stream, self.left = stream, MOST_PRINTED

    def write(self, text):
        if self.left >= 0:
            self.stream.write(text[: self.left])
            self.left -= len(text)
            if self.left < 0:
                self.stream.write("\n… the answer prints more than is shown here\n")
        return len(text)

    def flush(self):
        self.stream.flush()


@contextlib.contextmanager
def short_print():
    """What is printed inside ends after MOST_PRINTED characters, so that a page can still be read."""
    with (
        contextlib.redirect_stdout(_Short(sys.stdout)),
        contextlib.redirect_stderr(_Short(sys.stderr)),
    ):
        yield
