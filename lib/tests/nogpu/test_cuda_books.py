"""CUDA as in books and one-file language models: mistakes are found with their line, programs are right."""

import re
from pathlib import Path

from lib import machine
from lib.nogpu import cuda, cuda_build, cuda_toolkit

import pytest
import torch
import torch.nn.functional as F

SOURCES = Path(__file__).parent / "cuda"
TEXTS = {
    name: (SOURCES / f"{name}.cu").read_text()
    for name in ("book_mistakes", "groups_mistakes", "book_programs")
}

pytestmark = [
    pytest.mark.skipif(
        cuda_build.why_no_compiler() is not None, reason=str(cuda_build.why_no_compiler())
    ),
    pytest.mark.skipif(machine.HAS_GPU, reason="about CUDA on a CPU: make test runs it"),
]

# In the order of run()'s cases: the mark of the line, and what the message says.
BOOK_MISTAKES = [
    ("no_tail_guard", "element 1000 of `inp`, a tensor with 1000 elements"),
    ("more_warps_than_partials", "element 4 of shared memory `partial` with 4 elements"),
    ("maximum_before_the_barrier", "uninitialised element 1 of shared memory `warp_max`"),
    ("gradient_without_atomics", "race: .* element 0 of `dwte`"),
    ("ignored_target", "element -100 of `probs`"),
    ("half_a_moment", "element 500 of `v`, memory of cudaMalloc with 500 elements"),
    ("accumulator_never_zeroed", "`total`, .* nobody has written since .* cudaMemset writes zeros"),
    ("one_too_many", "element 1000 of `y`"),
    ("no_second_barrier", "race: .* element 0 of shared memory `s_a`"),
    ("tile_without_barrier", "uninitialised element 17 of shared memory `tile`"),
    ("tree_without_barrier", "race: .* element 1 of shared memory `sdata`"),
    ("tail_of_the_cache", "uninitialised element 50 of shared memory `cache`"),
    ("bins_never_zeroed", "atomic update of uninitialised element 1 of shared memory `local`"),
    ("halo_without_barrier", "uninitialised element 1 of shared memory `temp`"),
    ("one_buffer", "race: .* element 0 of `data`"),
    ("left_border", "element -2 of `in`"),
    ("rows_for_columns", "element 1000 of `in`"),
    ("bytes_for_elements", "element 250 of `x`, memory of cudaMalloc with 1000 .* nobody has"),
    ("copy_too_long", "invalid argument: cudaMemcpy to memory that has 4000 bytes .*: 4096 are"),
    ("wrong_direction", "cudaMemcpy to memory of cudaMalloc: the direction .* is the host's"),
    ("freed_before", "`x` is a pointer to memory that cudaFree has freed"),
    ("vector_of_the_host", "`x` points to memory of the host, or beside all that was allocated"),
    ("address_of_a_local", "`count` points to memory of the host"),
    ("fills_the_host", "cudaMemset of memory of the host"),
    ("past_the_symbol", "cudaMemcpyToSymbol of 28 bytes .* the symbol, which has 20 bytes"),
    ("fill_too_long", "cudaMemset of memory that has 4000 bytes .*: 8008 are asked for"),
    ("copy_of_freed", "cudaMemcpy from memory that cudaFree has freed"),
    ("where_more_was_freed", "out-of-bounds read .* element 32000 of `x`"),
]
GROUPS_MISTAKES = [
    ("some_of_a_tile", "with different masks"),
    ("block_in_a_branch", "24 of 64 threads of the block never reach"),
    ("rows_past_the_last", "shuffle reads lane 16 of its warp, which has returned"),
    ("reduced_by_half", "shuffle reads lane 1 of its warp, which has returned"),
    ("sums_of_warps", "race: .* element 1 of shared memory `part`"),
    ("neighbour_tile", "uninitialised element 16 of shared memory `row`"),
    ("waits_for_the_grid", r"grid.sync\(\) with 4 thread blocks: here they run one after another"),
    ("one_sync_in_the_loop", "race: .* element 32 of shared memory `scratch`"),
]
MISTAKES = [
    (name, case, *mistake)
    for name, mistakes in [("book_mistakes", BOOK_MISTAKES), ("groups_mistakes", GROUPS_MISTAKES)]
    for case, mistake in enumerate(mistakes)
]


@pytest.mark.parametrize("checked", [True, None], ids=["checked", "default"])
@pytest.mark.parametrize(("name", "case", "mark", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_line(name, case, mark, message, checked):
    kernels = cuda.load_cuda_on_cpu(TEXTS[name], ["run"], name=name, checked=checked)
    with pytest.raises(cuda.KernelError, match=message) as error:
        kernels.run(torch.linspace(0.1, 0.5, 1024), case)
    lines = TEXTS[name].splitlines()
    (line,) = [k for k, text in enumerate(lines, 1) if re.search(rf"BUG {mark}\b", text)]
    assert str(error.value).endswith(f"\n  at {name}.cu:{line}")


def gelu_gradient(x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, x)[0]


def votes_and_scans(x):
    warps, tiles = (x[:64] > 0).view(2, 32), x[:64].view(8, 8)
    positive, rank = tiles > 0, torch.arange(8)
    before = torch.cat([tiles[:, :1], tiles[:, :-1]], 1)
    n_positive = warps.sum(1, keepdim=True)
    columns = [
        (positive << rank).sum(1, keepdim=True).expand(8, 8),
        positive.cumsum(1) - positive.long(),
        tiles.cumsum(1),
        torch.where(warps, n_positive, 32 - n_positive).view(8, 8),
        tiles.amin(1, keepdim=True).expand(8, 8),
        (255 + torch.arange(8) % 4 + 40).view(8, 1).expand(8, 8),
        before.flip(1) * positive.any(1, keepdim=True),
        torch.arange(64).view(8, 8),
    ]
    return torch.stack([column.float() for column in columns], -1)


# In the order of run()'s cases: what is right.
PROGRAMS = {
    "layernorm_forward": lambda x: F.layer_norm(x.view(10, 100), (100,)),
    "softmax_forward": lambda x: x.view(4, 250).softmax(1),
    "gelu_backward": gelu_gradient,
    "matmul_bias": lambda x: F.linear(x[:450].view(30, 15), x[500:800].view(20, 15), x[:20]),
    "adamw": lambda x: x - 0.01 * x.sign(),
    "even_easier": lambda x: x + 1,
    "pinned_and_by_parts": lambda x: x,
    "pitched": lambda x: 1 - x,
    "filter": lambda x: F.conv1d(x[None], torch.tensor([[[1.0, -2, 3, -2, 1]]]), padding=2),
    "workspace": lambda x: x[:100] ** 2,
    "dot": lambda x: x.dot(x),
    "guarded": lambda x: x[:64].max(),
    "sum_by_block": lambda x: x.sum(),
    "sum_by_tiles": lambda x: x[:128].view(8, 16).sum(1),
    "sum_of_tiles_32": lambda x: x.sum(),
    "sum_of_tiles_4": lambda x: x.sum(),
    "keep_positive": lambda x: x[x > 0],
    "votes_and_scans": votes_and_scans,
    "largest_in_a_tile": lambda x: x[:64].view(16, 4).argmax(1) + 4 * torch.arange(16),
    "grid_of_one": lambda x: x[:100] + x[:100].flip(0),
}


@pytest.mark.parametrize("checked", [False, True, None], ids=["plain", "checked", "default"])
@pytest.mark.parametrize("case", range(len(PROGRAMS)), ids=list(PROGRAMS))
def test_a_correct_program_is_right_and_let_alone(case, checked):
    text = TEXTS["book_programs"]
    kernels = cuda.load_cuda_on_cpu(text, ["run"], name="book_programs", checked=checked)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    want = list(PROGRAMS.values())[case](x).float().flatten()
    got = kernels.run(x, case).flatten()[: len(want)]
    if list(PROGRAMS)[case] == "keep_positive":
        want, got = want.sort().values, got.sort().values
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("order", ["reverse", "7"])
def test_groups_do_not_depend_on_the_order_of_threads(monkeypatch, order):
    text = TEXTS["book_programs"]
    kernels = cuda.load_cuda_on_cpu(text, ["run"], name="book_programs", checked=True)
    x = torch.randn(1000)
    want = [kernels.run(x, case) for case in (0, 13, 17, 18)]
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    assert all(map(torch.equal, want, [kernels.run(x, case) for case in (0, 13, 17, 18)]))


@pytest.mark.skipif(cuda_toolkit.find_nvcc() is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", list(TEXTS))
def test_nvcc_compiles_them_too(name):
    assert len(cuda.nvcc_check(TEXTS[name])) >= 8
