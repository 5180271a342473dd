"""The sentences of all ops' errors stand in sentences.txt: a change to one is seen, and read, by its author.

Written anew by `python -m lib.tests.ops.test_sentences`, by which a new op comes in.
"""

from pathlib import Path

from lib import machine
from lib.measure import registry
from lib.tests.ops import battery

import pytest

WRITTEN = Path(__file__).with_name("sentences.txt")


def _now(names):
    """One line each: what is wrong with the call, and what its error says."""
    return [
        f"{op.name}, {what} | {sentence}"
        for op in (registry.find(name).configured() for name in names)
        for what, sentence in battery.sentences(op, op.versions["triton"]).items()
    ]


@pytest.mark.skipif(machine.HAS_GPU, reason="the sentences name the device, here the CPU")
def test_the_sentences_of_errors_are_those_written_down():
    written = WRITTEN.read_text().splitlines()
    names = dict.fromkeys(line.split(",")[0] for line in written)  # in their order
    assert _now(names) == written


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(_now(registry.OPS)) + "\n")
