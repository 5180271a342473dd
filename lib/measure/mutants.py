"""Copies of a Python file with one mistake in them: would the tests notice?"""

import dataclasses
import functools
import importlib.util
import sys
import tempfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake: `old`, which the file has exactly once, becomes `new`; `why` names the mistake."""

    old: str
    new: str
    why: str


def mutants_in(text):
    """The mutants of a text like a diff: `# why`, the lines of `old` after `- `, those of `new` after `+ `."""
    parts = []
    for line in text.strip("\n").split("\n"):
        if line.startswith("# "):
            parts.append((line[2:], [], []))
        else:
            parts[-1]["-+".index(line[0]) + 1].append(line[2:])
    return [Mutant("\n".join(old), "\n".join(new), why) for why, old, new in parts]


def mutated(text, mutant):
    """`text` with the mistake in it; ValueError unless it has `mutant.old` exactly once."""
    if text.count(mutant.old) != 1:
        count = text.count(mutant.old)
        raise ValueError(f"{mutant.why}: {mutant.old!r} occurs {count} times, not once")
    return text.replace(mutant.old, mutant.new)


_loaded = []  # numbers the files, because Triton finds a kernel's source by its file


def load(name, text):
    """Load this text as a module; its file is deleted when the process ends."""
    _loaded.append(name)
    path = Path(_folder().name) / f"{name}_mutant_{len(_loaded)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # torch.compile imports it by that name
    spec.loader.exec_module(module)
    return module


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory()
