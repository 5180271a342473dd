"""Programs in the shape of Triton's Gluon tutorials run in the model, and what breaks them has a name there."""

from pathlib import Path

from lib.measure.mutants import load, mutants_in, mutated
from lib.nogpu import gluon as model
from lib.nogpu.compile_only import compile_for, signature_of
from lib.nogpu.memory import OutOfBounds
from lib.tests.nogpu import gluon_programs

import pytest
import torch
import torch.nn.functional as F
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCKED = gl.BlockedLayout([1], [32], [4], [0])


def described(tensor, *block):
    dtype = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


class Case:
    """A program's launch, and what it must give."""

    def __init__(self, kernel, grid, *arguments, **constants):
        self.kernel, self.grid, self.arguments, self.constants = kernel, grid, arguments, constants

    def run(self, programs, seed, out, want, rtol=0.0):
        kernel = getattr(programs, self.kernel)
        model.run(kernel, self.grid, *self.arguments, seed=seed, **self.constants)
        pairs = zip(out, want) if isinstance(out, tuple) else [(out, want)]
        return all(((a.double() - b).abs() <= rtol * b.abs() + rtol).all() for a, b in pairs)


def scalar():
    x, y = drawn(1), torch.zeros(1)
    return Case("scalar_kernel", (1,), x, y), y, x


def loop():
    x, y = drawn(45), torch.zeros(45)
    return Case("loop_kernel", lambda meta: (-(-45 // meta["BLOCK"]),), x, y, 45), y, x


def line(n=200):
    x, y = drawn(n), torch.zeros(n)
    return Case("line_kernel", (2,), x, y, n, BLOCK=128, layout=BLOCKED, num_warps=4), y, x


def line_in_any_layout():
    case, *result = line(130)
    case.kernel = "any_layout_kernel"
    return case, *result


def plane():
    x, y = drawn(50, 70, dtype=torch.float16), torch.zeros(70, 50, dtype=torch.float16).T
    sizes = 50, 70, *x.stride(), *y.stride()
    return Case("plane_kernel", (2, 2), x, y, *sizes, BLOCK_M=32, BLOCK_N=64, num_warps=4), y, x


def softmax():
    x, y = drawn(5, 100, dtype=torch.bfloat16), torch.zeros(5, 100, dtype=torch.bfloat16)
    return Case("softmax_kernel", (5,), x, y, 100, BLOCK=128), y, x.double().softmax(-1), 0.01


def words():
    x, y, sums = drawn(16, 32), torch.zeros(16, 32), torch.zeros(16)
    case = Case("words_kernel", (2,), x, y, sums, BLOCK_M=16, BLOCK_N=32)
    x = F.gelu(x.double())
    want = (x - x.amin(1, keepdim=True)).view(16, 2, 16).mT.reshape(16, 32)
    return case, (y, sums), (want, 2 * (x.sum(1) + x.prod(1))), 1e-5


def copies():
    x, y, z = drawn(1000), drawn(1000), torch.zeros(1000)
    return Case("copies_kernel", (3,), x, y, z, 1000, STEPS=3, BLOCK=128), z, x + y


def by_tma():
    x, y = drawn(500), torch.zeros(500)
    return Case("by_tma_kernel", (4,), described(x, 128), described(y, 128), BLOCK=128), y, x


def own_descriptors():
    x, y = drawn(100, 64), torch.zeros(100, 64)
    return Case("own_descriptors_kernel", (4,), x, y, 100, 64, BLOCK_M=32, BLOCK_N=64), y, x


def add():
    x, y, z = (drawn(40, 300).narrow(1, 0, 300), drawn(40, 300), torch.zeros(40, 300))
    blocks = [described(t, 32, 64) for t in (x, y, z)]
    return Case("add_kernel", (2,), *blocks, 300, n_slots=2), z, x + y


def one_product(in_registers=False):
    a, b, c = drawn(64, 32, dtype=torch.float16), drawn(32, 64, dtype=torch.float16), drawn(64, 64)
    d = torch.zeros(64, 64)
    blocks = described(a, 64, 32), described(b, 32, 64), described(c, 64, 64), described(d, 64, 64)
    case = Case("one_product_kernel", (1,), *blocks, IN_REGISTERS=in_registers, num_warps=4)
    return case, d, a.double() @ b.double() + c, 1e-4


def one_product_in_registers():
    return one_product(True)


def product(kernel, grid=(3, 2), dtype=torch.bfloat16, **constants):
    a, b = drawn(130, 264, dtype=dtype), drawn(264, 144, dtype=dtype)
    c = torch.zeros(130, 144, dtype=dtype)
    blocks = described(a, 64, 64), described(b, 64, 128), described(c, 64, 128)
    return Case(kernel, grid, *blocks, **constants), c, a.double() @ b.double(), 0.02


def matmul():
    return product("matmul_kernel", num_warps=4)


def matmul_in_float16():
    return product("matmul_kernel", dtype=torch.float16, num_warps=4)


def stays():
    return product("stays_kernel", (2,), Scheduler=gluon_programs.Tiles, num_warps=4)


def roles():
    return product("roles_kernel", n_slots=2)


def roles_three_slots():
    return product("roles_kernel", n_slots=3)


PROGRAMS = [
    scalar, loop, line, line_in_any_layout, plane, softmax, words, copies, by_tma, own_descriptors, add,
    one_product, one_product_in_registers, matmul, matmul_in_float16, stays, roles, roles_three_slots,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_is_right_in_every_order(program):
    for seed in range(6):
        case, *result = program()
        assert case.run(gluon_programs, seed, *result), seed


def test_a_launch_without_a_gpu_runs_in_the_model():
    for program in (loop, line, matmul):
        case, out, want, *rtol = program()
        kernel = getattr(gluon_programs, case.kernel)
        kernel[case.grid](*case.arguments, **case.constants)
        torch.testing.assert_close(out.double(), want.double(), rtol=0.02, atol=0.02)


MISTAKES = r"""
# loads_without_a_mask
-     gl.store(y_ptr + offsets, gl.load(x_ptr + offsets, mask=mask), mask=mask)
+     gl.store(y_ptr + offsets, gl.load(x_ptr + offsets), mask=mask)
# reads_before_its_copies_are_over
-             async_copy.wait_group(num_outstanding=1)
+             async_copy.wait_group(num_outstanding=2)
# does_not_wait_for_the_load
-     mbarrier.wait(ready.index(slot), read // n_slots & 1)
+
# does_not_change_phase
-     mbarrier.wait(ready.index(slot), read // n_slots & 1)
+     mbarrier.wait(ready.index(slot), 0)
# no_fence
-     z_smem.store(z)
-     fence_async_shared()
+     z_smem.store(z)
# writes_while_tma_stores
-     tma.store_wait(pendings=0)  # of the step before
+
# ends_while_tma_stores
-         mbarrier.invalidate(ready.index(i))
-     tma.store_wait(pendings=0)
+         mbarrier.invalidate(ready.index(i))
# counts_too_few_bytes
-     mbarrier.expect(bar, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
+     mbarrier.expect(bar, x_desc.block_type.nbytes)
# arrives_and_expects_nothing
-     mbarrier.expect(bar, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
+     mbarrier.arrive(bar, count=1)
# expects_nothing
-     mbarrier.expect(bar, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
+
# counts_too_many_bytes
-     mbarrier.expect(bar, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
+     mbarrier.expect(bar, 3 * x_desc.block_type.nbytes)
# no_init
-         mbarrier.init(ready.index(i), count=1)
+         pass
# counts_two_arrivals
-         mbarrier.init(ready.index(i), count=1)
+         mbarrier.init(ready.index(i), count=2)
# counts_no_arrivals
-         mbarrier.init(ready.index(i), count=1)
+         mbarrier.init(ready.index(i), count=0)
# refills_while_a_product_reads
-         slot ^= 1
+
# stores_sums_while_a_product_runs
-     acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
-     mbarrier.invalidate(ready)
+     acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
+     mbarrier.invalidate(ready)
# drops_what_the_wait_returns
-     acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
-     mbarrier.invalidate(ready)
+     warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
+     mbarrier.invalidate(ready)
# multiplies_before_the_load
-         mbarrier.wait(ready, phase=phase)
-         phase ^= 1
+         phase ^= 1
# invalidates_too_early
-     phase = 0
-     slot = 0
+     mbarrier.invalidate(ready)
+     phase = slot = 0
# frees_before_the_product_is_over
-         acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
-         mbarrier.arrive(empty.index(slot), count=1)
+         mbarrier.arrive(empty.index(slot), count=1)
+         acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
# never_frees_a_slot
-         mbarrier.arrive(empty.index(slot), count=1)
+
# arrives_with_too_many
-         mbarrier.arrive(empty.index(slot), count=1)
+         mbarrier.arrive(empty.index(slot), count=2)
# arrives_twice
-         mbarrier.arrive(empty.index(slot), count=1)
+         mbarrier.arrive(empty.index(slot), count=1)
+         mbarrier.arrive(empty.index(slot), count=1)
# begins_in_the_wrong_phase
-         mbarrier.wait(empty.index(slot), (step // n_slots & 1) ^ 1)
+         mbarrier.wait(empty.index(slot), step // n_slots & 1)
# counts_phases_by_steps
-         mbarrier.wait(full.index(slot), step // n_slots & 1)
+         mbarrier.wait(full.index(slot), step & 1)
# does_not_wait_for_a_free_slot
-         mbarrier.wait(empty.index(slot), (step // n_slots & 1) ^ 1)
+
"""
EITHER = model.Misuse, model.Deadlock  # by the order
SAYS = {  # in every order
    "loads_without_a_mask": (line, OutOfBounds, "load from x_ptr at element 200"),
    "reads_before_its_copies_are_over": (copies, model.Misuse, r"reads x_smem\[0\].*wait_group"),
    "does_not_wait_for_the_load": (add, model.Misuse, r"reads x_smem\[0\].*phase 0 of ready\[0\]"),
    "does_not_change_phase": (add, EITHER, "needs phase 1|change phase after each wait"),
    "no_fence": (add, model.Misuse, "TMA may miss what the threads wrote to z_smem"),
    "writes_while_tma_stores": (add, model.Misuse, "writes z_smem .*tma.store_wait"),
    "ends_while_tma_stores": (add, model.Misuse, "ends while TMA may still read z_smem .*wait for the"),
    "counts_too_few_bytes": (add, EITHER, "expect must count the bytes|expect says 8192 bytes fewer"),
    "arrives_and_expects_nothing": (add, model.Misuse, r"no mbarrier.expect of ready\[0\] came before"),
    "expects_nothing": (add, model.Deadlock, r"ready\[0\] .*there was no mbarrier.expect"),
    "counts_too_many_bytes": (add, model.Deadlock, r"ready\[0\] .*expect says 8192 bytes more than"),
    "no_init": (add, model.Misuse, r"ready\[0\] has no mbarrier.init"),
    "counts_two_arrivals": (add, model.Deadlock, r"ready\[0\] .*only 1 of 2 arrivals"),
    "counts_no_arrivals": (add, model.Misuse, r"ready\[0\] counts 0 arrivals"),
    "refills_while_a_product_reads": (matmul, model.Misuse, r"load into a_smem\[0\].*a product of"),
    "stores_sums_while_a_product_runs": (matmul, model.Misuse, "sums are read .*while a product"),
    "drops_what_the_wait_returns": (matmul, model.Misuse, "use what that returns"),
    "multiplies_before_the_load": (matmul, model.Misuse, "product of a_smem.*phase 0 of ready"),
    "invalidates_too_early": (matmul, model.Misuse, "ready was invalidated"),
    "frees_before_the_product_is_over": (roles, model.Misuse, r"role 0 \(multiply\).*free the slot only"),
    "never_frees_a_slot": (roles, model.Deadlock, r"\(fetch\) waits for phase 0 of empty\[0\].*nobody"),
    "arrives_with_too_many": (roles, model.Misuse, r"empty\[0\] counts 1 arrivals a phase, and 2 came"),
    "arrives_twice": (roles, EITHER, r"more arrivals came|product of role 0|a phase, and 2 came"),
    "begins_in_the_wrong_phase": (roles, model.Deadlock, "empty.*a wait for phase 1 would pass"),
    "counts_phases_by_steps": (roles, EITHER, r"full\[1\]"),
    "does_not_wait_for_a_free_slot": (roles, model.Misuse, r"load into a_smem\[0\]|and 2 came"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants_in(MISTAKES), ids=lambda mutant: mutant.why)
def test_a_mistake_has_a_name_in_every_order(mutant):
    program, error, words = SAYS[mutant.why]
    broken = load("gluon", mutated(Path(gluon_programs.__file__).read_text(), mutant))
    for seed in range(6):
        case, *result = program()
        with pytest.raises(error, match=words):
            case.run(broken, seed, *result)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_compiles_for_hopper(program):
    """So these are legal, and the model has to run them."""
    case, *_ = program()
    kernel, constants = getattr(gluon_programs, case.kernel), case.constants
    if hasattr(kernel, "configs"):
        kernel, constants = kernel.fn, constants | kernel.configs[0].all_kwargs()
    n_warps = constants.get("num_warps", 4)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = signature_of(kernel, *case.arguments, **constants)
    assert compile_for(kernel, signature, arch=90, num_warps=n_warps).registers
