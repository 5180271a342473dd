"""The roles of a kernel in Gluon, as threads of which one goes on at a time. A part of `gluon`."""

import random
import threading


class Deadlock(Exception):
    """Nobody can go on; the message says which role waits for what, and what is missing."""


class Scheduler:
    """Threads of which one runs at a time; events are what happens by itself in between."""

    def __init__(self, seed):
        self.draw, self.turn = random.Random(seed), threading.Condition()
        self.late = seed % 2 == 1  # events come as late as can be: when everybody waits for one
        self.waiting, self.events, self.running, self.error = {}, [], None, None
        self.here, self.threads, self.names, self.ended = threading.local(), [], [], set()

    @property
    def role(self):
        """The number of the role that runs."""
        return self.here.number

    def run(self, function, name):
        """Run this to its end, as role 0, and what it starts by `fork`."""
        self._start([function], [name])
        with self.turn:
            self._next()
        for thread in self.threads:  # it grows
            thread.join()
        if self.error:
            raise self.error

    def fork(self, functions, names):
        """Run these to their ends: the first as the role that calls, the others as new ones.

        Returns what the first returns.
        """
        with self.turn:
            self._start(functions[1:], names[1:])
            caller, self.names[self.role] = self.names[self.role], _name(self.role, names[0])
        result = functions[0]()
        self.pause(
            lambda: len(self.ended) == len(self.threads) - 1, lambda: (True, "the others to end")
        )
        self.names[self.role] = caller
        return result

    def _start(self, functions, names):
        for function, name in zip(functions, names):
            number = len(self.threads)
            self.names.append(_name(number, name))
            self.waiting[number] = lambda: True, lambda: (True, "its start")
            self.threads.append(
                threading.Thread(target=self._body, args=(number, function), daemon=True)
            )
            self.threads[-1].start()

    def pause(self, may_go=lambda: True, what=lambda: (True, "its turn")):
        """Let others go on, until may_go(). what(): whether others are to blame, and what is waited for."""
        with self.turn:
            self.waiting[self.role] = may_go, what
            self._next()
            self._wait()

    def _wait(self):
        number = self.role
        self.turn.wait_for(lambda: self.running == number or self.error)
        if self.error:
            raise self.error
        del self.waiting[number]

    def _next(self):
        self.running = None
        while self.running is None and self.waiting and not self.error:
            ready = [role for role, (may_go, _) in self.waiting.items() if may_go()]
            choices = ready if ready and self.late else ready + self.events
            if not choices:
                self.error = Deadlock(self._who_waits())
                break
            choice = self.draw.choice(choices)
            if choice in ready:
                self.running = choice
            else:
                self.events.remove(choice)
                choice()
        self.turn.notify_all()

    def _who_waits(self):
        """Each role and what it waits for, first those that need not wait for another."""
        waits = [(*what(), self.names[role]) for role, (_, what) in self.waiting.items()]
        waits = sorted(waits, key=lambda wait: wait[0])
        return "nobody can go on: " + "; ".join(f"{name} waits for {w}" for _, w, name in waits)

    def _body(self, number, function):
        self.here.number = number
        try:
            with self.turn:
                self._wait()
            function()
        except Exception as error:
            self.error = self.error or error
        with self.turn:
            self.ended.add(number)
            self._next()


def _name(number, name):
    return f"role {number} ({name})"
