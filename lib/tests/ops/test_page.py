"""lib/ops/README.md's whole Llama block: copied by make into an empty folder it equals one in plain PyTorch."""

import re
import subprocess

from lib.recorded.results import ROOT
from lib.tests.ops.test_copyable import INTERPRETED, _run, interpreter_loops

import pytest

PAGE = (ROOT / "lib/ops/README.md").read_text()
SECTION = re.search(r"(?ms)^## Your Llama block, whole$(.*?)^## ", PAGE)[1]
OPS = " ".join(re.search(r'`make copy OP="(.*?)" TO=folder`', SECTION, re.DOTALL)[1].split())
CODE = "\n\n".join(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL))
MISTAKES = {
    "the hook": ("        join_projections(self)  #", "        #"),
    "swapped results": ("return self.mlp(y), h", "return self.mlp(h), y"),
    "untied": ("self.embed_tokens.weight, labels", "self.embed_tokens.weight.detach(), labels"),
    "unshifted": ("F.pad(labels[:, 1:], (0, 1), value=-100)", "labels"),
    "up first": ('gate="first"', 'gate="second"'),
    "not causal": ("v, is_causal=True", "v, is_causal=False"),
}


def run(folder, code):
    """The comparison with plain PyTorch, in an empty folder with copies of the ops."""
    command = ["make", "--silent", "copy", f"OP={OPS} matmul", f"TO={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (folder / "pieces.py").write_text(code)
    script = (ROOT / "lib/tests/ops/plain_llama.py").read_text()
    return _run(folder, script, **INTERPRETED)


@interpreter_loops
def test_the_block_of_the_page_equals_a_plain_one(tmp_path):
    done = run(tmp_path, CODE)
    assert done.stdout.strip() == "ran", done.stderr[-2000:]


@interpreter_loops
@pytest.mark.parametrize("name", MISTAKES)
def test_the_comparison_finds(name, tmp_path):
    old, new = MISTAKES[name]
    assert CODE.count(old) == 1
    done = run(tmp_path, CODE.replace(old, new))
    assert done.returncode, "nobody noticed"


def test_the_section_names_the_ops_that_it_uses():
    used = set(re.findall(r"(?m)^from (\w+) import", CODE)) - {"torch"}
    assert set(OPS.split()) == used
