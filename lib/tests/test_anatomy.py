"""The page on the anatomy of an op: its blocks, put together, are an op that is right."""

import re

from lib import machine
from lib.measure.mutants import load
from lib.recorded.results import ROOT

import torch

PAGE = (ROOT / "notebooks/anatomy.md").read_text()
OP = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def test_the_blocks_are_an_op_that_passes_its_own_check():
    module = load("anatomy", OP)
    loaded, stored = module.check_it(machine.device())
    assert stored == 512 * 781 * 4 and loaded == stored + 781 * 4, "2MNs, and the bias"


def test_it_is_one_node_of_a_graph():
    module = load("anatomy", OP.replace("my_kernels::", "my_compiled_kernels::"))
    x, bias = (torch.randn(s, device=machine.device(), requires_grad=True) for s in ((5, 7), (7,)))
    compiled = torch.compile(module.gated_triton, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, bias), module.gated_eager(x, bias))


def test_names_of_the_page_are_in_the_files():
    shared = (ROOT / "lib/ops/_host.py").read_text() + (ROOT / "lib/ops/_device.py").read_text()
    for name in re.findall(r"(?:host|device)\.(\w+)", OP):
        assert re.search(rf"def {name}\(|^{name}\b", shared, re.MULTILINE), name
