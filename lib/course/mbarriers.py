"""A model of mbarriers in Python: roles that wait and arrive, asynchronous loads, slots of a ring.

A role is a generator that yields actions:

    wait(barrier, phase)       go on once the barrier has completed the phase of this parity, 0 or 1
    arrive(barrier)            count one arrival
    load(slot, step, barrier)  start loading step's data; it lands later, and then arrives at the barrier
    multiply(slot, step)       start to read the slot, which has to hold the data of step
    finish(in_flight)          go on once at most in_flight of this role's products still read

Where it differs from a GPU: roles take turns in a random order, and a barrier serves the loads of one slot.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple


class Deadlock(Exception):
    """No role can go on; the message says which role waits for what."""


class Overwritten(Exception):
    """A slot was loaded while a role read it, or read while it did not hold that step's data."""


@dataclass
class Barrier:
    """A counter with a phase: after `count` arrivals the phase is complete, and the next one begins."""

    name: str
    count: int = 1
    completed: int = 0  # phases
    arrived: int = 0  # in the phase under way

    def arrive(self):
        """Count one arrival."""
        self.arrived += 1
        if self.arrived == self.count:
            self.completed, self.arrived = self.completed + 1, 0

    def passed(self, phase):
        """Whether a wait for this parity goes on: hardware keeps one bit, not the number of phases."""
        return self.completed % 2 != phase


class Action(NamedTuple):
    """What a role does next; unused fields are None."""

    kind: str
    barrier: Barrier | None = None
    phase: int | None = None
    slot: int | None = None
    step: int | None = None


def wait(barrier, phase):
    return Action("wait", barrier, phase)


def arrive(barrier):
    return Action("arrive", barrier)


def load(slot, step, barrier):
    return Action("load", barrier, slot=slot, step=step)


def multiply(slot, step):
    return Action("multiply", slot=slot, step=step)


def finish(in_flight=0):
    return Action("finish", phase=in_flight)


def run(roles, seed=0):
    """Run {name: generator} to the end, in an order drawn from seed; raises Deadlock or Overwritten.

    Returns the steps that each role multiplied, {name: [step, …]}.
    """
    draw = random.Random(seed)
    pending = {name: next(role, None) for name, role in roles.items()}
    slots, landing = {}, []  # slots: the step each one holds, None while a load is under way
    reading = {name: [] for name in roles}  # the slots that products under way read, oldest first
    steps = {name: [] for name in roles}
    while any(pending.values()):
        ready = [
            name for name, action in pending.items() if action and _may_go(action, reading[name])
        ]
        events = ready + landing + [name for name in roles if reading[name]]
        if not events:
            waits = [
                f"{n} waits for {a.barrier.name}, phase {a.phase}" for n, a in pending.items() if a
            ]
            raise Deadlock("; ".join(waits))
        event = draw.choice(events)
        if isinstance(event, Action):
            landing.remove(event)
            slots[event.slot] = event.step
            event.barrier.arrive()
        elif event not in ready or (reading[event] and draw.random() < 0.5):
            reading[event].pop(0)
        else:
            _act(event, pending[event], slots, landing, reading, steps)
            pending[event] = next(roles[event], None)
    return steps


def _may_go(action, reading):
    if action.kind == "wait":
        return action.barrier.passed(action.phase)
    return action.kind != "finish" or len(reading) <= action.phase


def _act(name, action, slots, landing, reading, steps):
    slot, step = action.slot, action.step
    if action.kind == "arrive":
        action.barrier.arrive()
    elif action.kind == "load":
        for other, slots_read in reading.items():
            if slot in slots_read:
                raise Overwritten(f"slot {slot}: step {step} is loaded while {other} still reads")
        slots[slot] = None
        landing.append(action)
    elif action.kind == "multiply":
        if slots.get(slot) != step:
            held_step = slots.get(slot)
            content = "nothing yet" if held_step is None else f"step {held_step}"
            raise Overwritten(f"slot {slot}: {name} reads step {step}, and it holds {content}")
        reading[name].append(slot)
        steps[name].append(step)
