"""The kernel with roles of notebook 44, run on the CPU so that each program takes several tiles."""

from types import SimpleNamespace

from lib.measure.mutants import Mutant, load, mutated
from lib.nogpu import gluon
from lib.recorded import notebooks

import nbformat
import pytest
import torch
import torch.nn.functional as F

STAGES, SEEDS = 3, range(8)
KERNELS = ("from triton.experimental import gluon", "gl.constexpr(", "@gluon.jit")


@pytest.fixture(scope="module")
def source():
    notebook = nbformat.read(notebooks.notebooks(44)[0], as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return "\n\n".join(cell for cell in cells if any(words in cell for words in KERNELS))


def described(tensor, *block):
    return SimpleNamespace(
        base=tensor, shape=tensor.shape, strides=tensor.stride(), block_shape=block, layout=None
    )


def is_right(module, gate, programs, seed, m=40, k=24, h=64):
    """Whether y is that of eager in float64; 12 tiles, with rows and a part of K that are not there."""
    torch.manual_seed(seed)
    x, w = torch.randn(m, k).bfloat16(), (torch.randn(2 * h, k) / k**0.5).bfloat16()
    y = torch.full((m, h if gate else 2 * h), float("nan"), dtype=torch.bfloat16)
    tensors = described(x, 8, 16), described(w.view(2, h, k), 2, 16, 16), described(y, 8, 16)
    gluon.run(
        module.roles_kernel, (programs,), *tensors, m, h, k,
        seed=seed, GATE=gate, GROUP=2, STAGES=STAGES,
    )  # fmt: skip
    want = F.linear(x.double(), w.double())
    if gate:
        x1, x2 = want.chunk(2, dim=-1)
        want = x1 * (F.gelu(x2, approximate="tanh") if gate == 2 else x2)
    return bool(((y.double() - want).abs() <= 0.01 * want.abs() + 1e-4).all())


@pytest.mark.parametrize("programs", [12, 5, 1])
@pytest.mark.parametrize("gate", [0, 1, 2])
def test_it_is_right_for_several_tiles_a_program(source, gate, programs):
    module = load("hopper", source)
    assert all(is_right(module, gate, programs, seed) for seed in SEEDS)


_STORE = "        store_tile(y_desc, row, col, left, y_buf)\n"
_FREED = "    mbarrier.arrive(empty.index((count - 1) % STAGES), count=1)\n    return"
MISTAKES = (
    Mutant("acc, count = multiply(", "acc, _ = multiply(", "the ring begins anew"),
    Mutant(f"        tma.store_wait(0)\n{_STORE}", _STORE, "the buffer is written too early"),
    Mutant(_FREED, "    return", "a tile's last slot is not freed"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.why)
def test_mistakes_show_with_several_tiles_alone(source, mistake):
    module = load("hopper", mutated(source, mistake))

    def passes(programs):
        try:
            return all(is_right(module, 1, programs, seed) for seed in SEEDS)
        except (gluon.Deadlock, gluon.Misuse):
            return False

    assert passes(12) and not passes(3)
