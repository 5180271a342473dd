"""The model of Gluon: what goes wrong on a GPU has a name here. Right kernels: test_hopper.py and 44.3."""

from lib.exercises.nb44 import arguments_of, described
from lib.nogpu import gluon as model
from lib.tests.exercises.wrong_answers import nb44

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ONE_TILE, FOUR_TILES = (128, 256, 64), (256, 512, 192)


@pytest.mark.parametrize(
    ("mistake", "sizes", "seed", "error", "words"),
    [
        ("no_fence", ONE_TILE, 0, model.Misuse, "fence_async_shared"),
        ("ends_while_it_stores", ONE_TILE, 0, model.Misuse, "wait for the stores"),
        ("loads_beyond_its_last_step", ONE_TILE, 1, model.Misuse, "loads under way that nobody waited for"),
        ("the_phase_never_wraps", FOUR_TILES, 0, model.Misuse, "phase must be 0 or 1, not 2"),
        ("the_phase_begins_anew", FOUR_TILES, 0, model.Deadlock, "role 0 waits for phase 0 of mbarrier 0"),
    ],
)  # fmt: skip
def test_a_mistake_has_a_name(mistake, sizes, seed, error, words):
    kernel, (m, n, k) = getattr(nb44, f"stays_kernel__{mistake}"), sizes
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    with pytest.raises(error, match=words):
        model.run(kernel, (1,), *arguments_of(x, w, y), seed=seed, STAGES=3)


@gluon.jit
def lacking_kernel(x_ptr):
    gl.histogram(x_ptr)


def test_a_word_that_the_model_lacks_is_named():
    with pytest.raises(AttributeError, match="lib/nogpu/gluon.py has no histogram"):
        model.run(lacking_kernel, (1,), torch.zeros(4))


@gluon.jit
def other_block_kernel(x_desc):
    buf = gl.allocate_shared_memory(x_desc.dtype, [8, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    tma.async_load(x_desc, [0, 0], full, buf)


def test_a_buffer_of_another_shape_is_refused():
    with pytest.raises(model.Misuse, match=r"blocks of \[16, 64\] meets a buffer of \[8, 64\]"):
        model.run(other_block_kernel, (1,), described(torch.zeros(16, 64).bfloat16(), 16, 64))


@gluon.jit
def copies_kernel(x_desc, y_desc):
    buf = gl.allocate_shared_memory(x_desc.dtype, [8, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    at = [8 * gl.program_id(0), 64 * gl.program_id(1)]
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_load(x_desc, at, full, buf)
    mbarrier.wait(full, 0)
    tma.async_store(y_desc, at, buf)
    tma.store_wait(0)


def test_it_runs_a_grid_of_two_axes_and_says_what_was_asked_for():
    x, y = torch.randn(20, 128).bfloat16(), torch.zeros(20, 128).bfloat16()
    log = model.run(copies_kernel, (3, 2), described(x, 8, 64), described(y, 8, 64))
    assert torch.equal(x, y)
    places = [(row, col) for row in (0, 8, 16) for col in (0, 64)]
    assert log == [(what, place) for place in places for what in ("load", "store")]
