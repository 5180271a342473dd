"""The model of Gluon: what goes wrong on a GPU has a name here. Right kernels: test_hopper.py and 44.3."""

from lib.exercises import check
from lib.exercises.nb44 import arguments_of, described
from lib.nogpu import gluon as model
from lib.nogpu.compile_only import compile_for, signature_of
from lib.tests.exercises.wrong_answers import nb44, solution
from lib.tests.ops import cases

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import tcgen05_mma
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

ONE_TILE, FOUR_TILES = (128, 256, 64), (256, 512, 192)


@pytest.mark.parametrize(
    ("mistake", "sizes", "seed", "error", "words"),
    [
        ("no_fence", ONE_TILE, 0, model.Misuse, "fence_async_shared"),
        ("ends_while_it_stores", ONE_TILE, 0, model.Misuse, "wait for the stores"),
        ("loads_beyond_its_last_step", ONE_TILE, 1, model.Misuse, r"into x_bufs\[1\].* may still go on"),
        ("the_phase_never_wraps", FOUR_TILES, 0, model.Misuse, "phase must be 0 or 1, not 2"),
        ("the_phase_begins_anew", FOUR_TILES, 0, model.Deadlock, r"role 0 .* phase 0 of full\[0\]"),
    ],
)  # fmt: skip
def test_a_mistake_has_a_name(mistake, sizes, seed, error, words):
    kernel, (m, n, k) = getattr(nb44, f"stays_kernel__{mistake}"), sizes
    x, w, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    with pytest.raises(error, match=words):
        model.run(kernel, (1,), *arguments_of(x, w, y), seed=seed, STAGES=3)


@gluon.jit
def lacking_kernel(x_ptr):
    gl.bank_conflicts(x_ptr, x_ptr)


def test_a_word_that_the_model_lacks_is_named():
    with pytest.raises(model.MissingWord, match="lib/nogpu/gluon.py has no bank_conflicts"):
        model.run(lacking_kernel, (1,), torch.zeros(4))


@gluon.jit
def of_blackwell_kernel(x_ptr, there: gl.constexpr):
    if there:
        tcgen05_mma(x_ptr, x_ptr, x_ptr)


def test_a_word_that_the_model_lacks_may_stand_where_nothing_goes():
    model.run(of_blackwell_kernel, (1,), torch.zeros(4), False)
    with pytest.raises(model.MissingWord, match="lib/nogpu/gluon.py has no tcgen05_mma"):
        model.run(of_blackwell_kernel, (1,), torch.zeros(4), True)


@gluon.jit
def arrives_by_copies_kernel(x_ptr, y_ptr, early: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    async_copy.async_copy_global_to_shared(smem, x_ptr + gl.arange(0, 128, layout))
    if not early:
        async_copy.mbarrier_arrive(ready)
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)
    gl.store(y_ptr + gl.arange(0, 128, layout), smem.load(layout))


def test_copies_of_threads_arrive_when_they_are_over():
    x, y = torch.arange(128.0), torch.zeros(128)
    for seed in range(4):
        model.run(arrives_by_copies_kernel, (1,), x, y.zero_(), False, seed=seed)
        assert torch.equal(x, y)
        with pytest.raises(model.Misuse, match="reads smem .*commit_group and wait_group"):
            model.run(arrives_by_copies_kernel, (1,), x, y, True, seed=seed)


@gluon.jit
def misspelt_kernel(x_ptr, of_memory: gl.constexpr):
    if of_memory:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        gl.allocate_shared_memory(gl.float32, [8], flat).lode(flat)
    else:
        mbarrier.arive(x_ptr)


def test_a_word_that_gluon_lacks_is_named_too():
    for of_memory, words in (
        (True, "memory of .* has no lode"),
        (False, "mbarrier of .* has no arive"),
    ):
        with pytest.raises(AttributeError, match=words) as raised:
            model.run(misspelt_kernel, (1,), torch.zeros(4), of_memory)
        assert not isinstance(raised.value, model.MissingWord)


@gluon.jit
def turned_kernel(x_ptr, y_ptr, n: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, n, layout)
    smem = gl.allocate_shared_memory(gl.float32, [n], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem.store(gl.load(x_ptr + at))
    gl.store(y_ptr + at, smem.gather(n - 1 - at, 0))
    smem.scatter(gl.load(x_ptr + at), n - 1 - at, axis=0)
    gl.store(y_ptr + n + at, smem.load(layout))


def test_numbers_of_shared_memory_one_by_one():
    x, y = torch.arange(128.0), torch.zeros(256)
    model.run(turned_kernel, (1,), x, y, 128)
    assert torch.equal(y, torch.cat([x.flip(0), x.flip(0)]))


def test_heuristics_and_the_first_config_give_constants():
    x = torch.arange(128.0)
    of_size = triton.heuristics({"n": lambda given: given["x_ptr"].numel()})(turned_kernel)
    tuned = triton.autotune([triton.Config({"n": n}) for n in (128, 4)], key=[])(turned_kernel)
    for kernel in (of_size, tuned):
        y = torch.zeros(256)
        model.run(kernel, (1,), x, y)
        assert torch.equal(y, torch.cat([x.flip(0), x.flip(0)]))


@gluon.jit
def by_old_names_kernel(x_desc, y_desc):
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, bytes=x_desc.nbytes_per_cta)
    tma.async_copy_global_to_shared(x_desc, [0, 0], ready, smem)
    mbarrier.wait(ready, 0)
    tma.async_copy_shared_to_global(
        y_desc, [0, 0], smem._reinterpret(x_desc.dtype, [8, 64], x_desc.layout)
    )
    tma.store_wait(0)


@gluon.jit
def write(x_ptr, smem, ready, fenced: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * 64
    smem.store(gl.load(x_ptr + i + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]))
    if fenced:
        fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def multiply(y_ptr, smem, ready):
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mbarrier.wait(ready, 0)
    y = warpgroup_mma(smem, smem.permute((1, 0)), gl.zeros((64, 64), gl.float32, sums))
    i = gl.arange(0, 64, gl.SliceLayout(1, sums))[:, None] * 64
    gl.store(y_ptr + i + gl.arange(0, 64, gl.SliceLayout(0, sums))[None, :], y)


@gluon.jit
def by_threads_kernel(x_ptr, y_ptr, roles: gl.constexpr, fenced: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    if roles:
        gl.warp_specialize(
            [(write, (x_ptr, smem, ready, fenced)), (multiply, (y_ptr, smem, ready))], [4], [64]
        )
    else:
        write(x_ptr, smem, ready, fenced)
        multiply(y_ptr, smem, ready)


def test_a_product_of_what_another_role_wrote_needs_a_fence():
    """Compiled without one, PTX has no fence.proxy.async either; within a role it has."""
    x = torch.randn(64, 64).half()
    for roles, fenced in ((True, True), (False, True), (False, False)):
        y = torch.zeros(64, 64)
        model.run(by_threads_kernel, (1,), x, y, roles, fenced)
        torch.testing.assert_close(y, x.float() @ x.float().T, rtol=1e-4, atol=1e-4)
    with pytest.raises(model.Misuse, match="a product may miss what the threads wrote to smem"):
        model.run(by_threads_kernel, (1,), x, y, True, False)


@pytest.mark.skipif(cases.release(triton) < (3, 7), reason="from Triton 3.7 on")
def test_the_compiler_puts_in_the_fence_within_a_role_alone():
    x, y = torch.empty(64, 64).half(), torch.empty(64, 64)
    for roles, n_fences in ((False, 1), (True, 0)):
        signature = signature_of(by_threads_kernel, x, y, roles=roles, fenced=False)
        ptx = compile_for(by_threads_kernel, signature, arch=90, num_warps=4).ptx
        assert ptx.count("fence.proxy.async") == n_fences


def test_tensors_that_are_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"y_ptr is on meta; call .cpu\(\)"):
        model.run(turned_kernel, (1,), torch.zeros(4), torch.zeros(4, device="meta"), 4)


def test_names_before_triton_3_7_and_3_8_still_run():
    x, y = torch.randn(8, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    model.run(by_old_names_kernel, (1,), described(x, 8, 64), described(y, 8, 64))
    assert torch.equal(x, y)


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


OTHER_WORDS = (
    ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(num_outstanding=1,"),
    ("gl.cdiv(n_rows, BLOCK_M) * tiles_n", "gl.maximum(gl.cdiv(n_rows, BLOCK_M), 1) * tiles_n"),
    ("    count = 0\n", "    gl.static_assert(STAGES > 1)\n    count = 0\n"),
    ("acc.to(y_desc.dtype)", "gl.where(acc == acc, acc, gl.full_like(acc, 0.0)).to(y_desc.dtype)"),
)


LACKING = (("    count = 0\n", "    gl.fp4_to_fp(0, gl.float16, 0)\n    count = 0\n"),)


@pytest.mark.parametrize(("changes", "status"), [(OTHER_WORDS, "right"), (LACKING, "skipped")])
def test_the_exercise_takes_legal_gluon(changes, status):
    changes = [text for pair in changes for text in pair]
    verdict = check("44.3", solution("44_hopper", *changes).stays_kernel)
    assert verdict.status == status, verdict
