"""Output code saved in data/output_code, for versions of torch and triton that the fake GPU does not support.

While notebooks are recorded on a GPU, `output_code` saves each text it returns here, trimmed. Later, without
a GPU and with a torch or triton that lib.nogpu.inductor does not support, the same function with the same
inputs gets that text back, and its first line says where and when it was recorded. Another function, or one
changed since, has no recording.
"""

import hashlib
import inspect
import os
import re
import textwrap
import warnings
from pathlib import Path

from lib import machine
from lib.nogpu.inductor_text import normalize, split_graphs

import torch

FOLDER = Path(__file__).resolve().parents[2] / "data" / "output_code"
MARK = "# Recorded on "


def remember(fn, inputs, settings, code):
    """Save `code` when a notebook is being recorded. settings: the options of torch.compile."""
    notebook, key = os.environ.get("FUSED_KERNELS_RECORD"), _key(fn, inputs, settings)
    if notebook and key:
        path = FOLDER / notebook / f"{key}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{MARK}{machine.stamp().line()}\n{trimmed(code)}")


def forget(notebook):
    """Delete the texts saved for one notebook, which is about to be recorded again."""
    for path in (FOLDER / notebook).glob("*.txt"):
        path.unlink()


def find(fn, inputs, settings):
    """The text recorded for fn(*inputs), with a warning that says so, or None."""
    key = _key(fn, inputs, settings)
    for path in sorted(FOLDER.glob(f"*/{key}.txt")):
        code = path.read_text()
        warnings.warn(
            f"This output code was not written here: {code.splitlines()[0].removeprefix('# ')}",
            stacklevel=3,
        )
        return code
    return None


def trimmed(code):
    """The text without paths, hashes and the benchmark at the end of each graph."""
    texts = [re.split(r"(?m)^def (?:get_args|benchmark_compiled_module)\(", text)[0] for _, text in
             split_graphs(normalize(code))]  # fmt: skip
    return "\n".join(text.rstrip() + "\n" for text in texts)


def _key(fn, inputs, settings):
    """'<name>-<eight hex digits>' of fn's source and of what the inputs look like; None without a source."""
    try:
        what = _identity(fn)
    except (OSError, TypeError):  # typed at a prompt, or built in
        return None
    text = "\0".join([what, *map(_look, inputs), repr(sorted(settings.items(), key=str))])
    name = re.sub(r"\W+", "", getattr(fn, "__name__", type(fn).__name__)) or "function"
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _identity(fn):
    if isinstance(fn, torch.nn.Module):
        return textwrap.dedent(inspect.getsource(type(fn))) + repr(fn)
    return textwrap.dedent(inspect.getsource(fn)) + repr(inspect.getclosurevars(fn).nonlocals)


def _look(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    look = f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"
    dims = {name: sorted(map(str, of)) for name, of in marks(value).items() if isinstance(of, set)}
    return f"{look} {sorted(dims.items())}" if any(dims.values()) else look


def marks(t):
    """What torch._dynamo.mark_dynamic, mark_static and the like wrote on a tensor: its attributes."""
    return {
        name: mark for name, mark in vars(t).items() if "dynamo" in name or name == "_specialize_on"
    }
