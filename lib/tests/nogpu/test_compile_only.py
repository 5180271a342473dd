"""Kernels compiled for GPUs that are not here: the stages, the resources, and the signature of a launch."""

from types import SimpleNamespace

import lib  # noqa: F401  before triton
from lib.nogpu.compile_only import (
    TARGETS,
    Signature,
    compile_for,
    instruction_mix,
    loop_mix,
    programs_on_sm,
    signature_of,
    without_calls,
)

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice

NVIDIA = [86, 89, *(arch for arch in TARGETS if arch != "gfx942")]


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, cols, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, BLOCK_K)
    c = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * N + cols)
        c += tl.dot(a, b)
    tl.store(c_ptr + rows * N + cols, c)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + libdevice.erf(x * 0.7071067811865476))


@triton.jit
def gelu_sum_kernel(x_ptr, out_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    # a helper, libdevice, and tl.sum, each of which the interpreter replaces
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + row, tl.sum(_gelu(x), axis=0))


@gluon.jit
def copy_tile_kernel(x_desc, y_desc, row):
    buffer = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.expect(landed, x_desc.block_type.nbytes)
    tma.async_load(x_desc, [row, 0], landed, buffer)
    mbarrier.wait(landed, 0)
    tma.async_store(y_desc, [row, 0], buffer)
    tma.store_wait(0)


ADD = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n_elements": "i32"}
MATMUL = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "K": "i32"}
GELU_SUM = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n_cols": "i32"}


def compile_add(**options):
    return compile_for(add_kernel, ADD, {"BLOCK_SIZE": 1024}, **options)


def compile_matmul(M=64, **options):
    return compile_for(matmul_kernel, MATMUL, {"M": M, "N": 64, "BLOCK_K": 32}, **options)


@pytest.mark.parametrize("arch", NVIDIA)
def test_every_stage_on_nvidia(arch):
    compiled = compile_add(arch=arch)
    assert "tt.load" in compiled.ttir
    assert "#ttg.blocked" in compiled.ttgir
    assert "define" in compiled.llir
    assert f".target sm_{arch}" in compiled.ptx
    assert compiled.sass.startswith(".text.add_kernel:")
    mix = instruction_mix(compiled)
    assert mix["FADD"] == 8  # 1024 elements by 128 threads
    assert sum(n for opcode, n in mix.items() if opcode.startswith("LDG.E.128")) == 4
    assert 0 < compiled.registers < 64
    assert compiled.spills == 0


def test_amd():
    compiled = compile_add(arch="gfx942")
    assert "global_load_dwordx4" in compiled.amdgcn
    assert "s_endpgm" in compiled.amdgcn
    assert compiled.registers > 0
    assert compiled.spills == 0
    assert "mfma" in compile_matmul(arch="gfx942").amdgcn
    for stage in ("ptx", "sass"):
        with pytest.raises(ValueError, match="compiled for gfx942 has no"):
            getattr(compiled, stage)


def test_nvidia_has_no_amdgcn():
    with pytest.raises(ValueError, match="has no amdgcn; it has .*ptx"):
        _ = compile_add().amdgcn


@pytest.mark.parametrize(
    ("divisible_by_16", "vector_loads", "scalar_loads"),
    [
        (True, 4, 0),
        (["x_ptr", "y_ptr", "out_ptr", "n_elements"], 4, 0),
        (["x_ptr", "n_elements"], 2, 8),
        # a mask that may end anywhere has to be tested per element
        (["x_ptr", "y_ptr", "out_ptr"], 0, 16),
        (False, 0, 16),
    ],
)
def test_loads_are_vectorized_when_pointers_and_sizes_divide(
    divisible_by_16, vector_loads, scalar_loads
):
    ptx = compile_add(divisible_by_16=divisible_by_16).ptx
    assert ptx.count("ld.global.v4.b32") == vector_loads
    assert ptx.count("ld.global.b32") == scalar_loads


@pytest.mark.parametrize(
    ("arch", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")]
)
def test_dot_uses_the_tensor_cores_of_the_architecture(arch, instruction):
    compiled = compile_matmul(arch=arch)
    assert instruction in compiled.ptx
    assert compiled.shared_bytes >= 2 * 64 * 32 * 2  # a tile of a and one of b, in fp16
    others = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} - {instruction}
    assert not [other for other in others if other in compiled.ptx]


def test_num_stages_costs_shared_memory():
    two, four = compile_matmul(num_stages=2), compile_matmul(num_stages=4)
    assert four.shared_bytes > two.shared_bytes


def test_spills_are_counted():
    # 128 x 64 float32 sums in 32 threads: 256 each, and a thread has at most 255 registers
    one_warp = compile_matmul(M=128, arch=80, num_warps=1)
    assert one_warp.spills > 0
    assert instruction_mix(one_warp)["STL"] > 0
    assert one_warp.registers == 255
    four_warps = compile_matmul(M=128, arch=80, num_warps=4)
    assert four_warps.spills == 0
    assert instruction_mix(four_warps)["STL"] == 0


def test_helpers_and_libdevice_compile():
    ptx = compile_for(gelu_sum_kernel, GELU_SUM, {"BLOCK_SIZE": 1024}).ptx
    assert "shfl.sync.bfly" in ptx  # tl.sum
    assert "ex2.approx" in ptx  # erf


def test_the_interpreter_still_works_after_compiling():
    """Compiling swaps functions of triton.language; both worlds alternate in a notebook."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(3, 100, device=device)
    out = torch.empty(3, device=device)
    before = {name: tl.__dict__[name] for name in ("sum", "cdiv", "load", "store")}
    for _ in range(2):
        compile_for(gelu_sum_kernel, GELU_SUM, {"BLOCK_SIZE": 128})
        gelu_sum_kernel[(3,)](x, out, 100, BLOCK_SIZE=128)
        torch.testing.assert_close(out, torch.nn.functional.gelu(x).sum(1), atol=1e-4, rtol=1e-5)
    with pytest.raises(
        Exception, match="."
    ):  # a type that does not exist: the compiler fails inside
        compile_for(gelu_sum_kernel, GELU_SUM | {"n_cols": "i33x"}, {"BLOCK_SIZE": 128})
    assert before == {name: tl.__dict__[name] for name in before}


@triton.autotune([triton.Config({"BLOCK_SIZE": 1024})], key=["n_elements"])
@triton.jit
def autotuned_add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x, mask=mask)


def test_autotuned_kernels():
    compiled = compile_for(autotuned_add_kernel, ADD, {"BLOCK_SIZE": 1024})
    assert instruction_mix(compiled) == instruction_mix(compile_add())


# --- signature_of -----------------------------------------------------------------------------------------


def test_signature_of_a_launch():
    x = torch.zeros(1024, dtype=torch.bfloat16)
    y, out = torch.zeros(1024, dtype=torch.int64), torch.zeros(1024)
    assert signature_of(add_kernel, x, y, out, 1024, BLOCK_SIZE=256) == Signature(
        types={"x_ptr": "*bf16", "y_ptr": "*i64", "out_ptr": "*fp32", "n_elements": "i32"},
        constexprs={"BLOCK_SIZE": 256},
        divisible_by_16=["x_ptr", "y_ptr", "out_ptr", "n_elements"],
    )


@pytest.mark.parametrize(
    ("n_elements", "type_name", "divisible"),
    [
        (1000, "i32", False),
        (1008, "i32", True),
        (-16, "i32", True),
        (2**31 - 1, "i32", False),
        (2**31, "i64", True),
        (-(2**31) - 1, "i64", False),
        (2**63, "u64", True),
        (0.5, "fp32", False),
        (True, "i1", False),
    ],
)
def test_type_of_a_number(n_elements, type_name, divisible):
    x = torch.zeros(8)
    signature = signature_of(add_kernel, x, x, x, n_elements, BLOCK_SIZE=16)
    assert signature.types["n_elements"] == type_name
    assert ("n_elements" in signature.divisible_by_16) == divisible


@pytest.mark.parametrize("value", [1, None])
def test_one_and_none_become_constants(value):
    x = torch.zeros(8)
    signature = signature_of(add_kernel, x, x, x, value, BLOCK_SIZE=16)
    assert signature.constexprs == {"n_elements": value, "BLOCK_SIZE": 16}
    assert "n_elements" not in signature.types


@triton.jit(do_not_specialize=["n_elements"])
def negate_kernel(x_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    tl.store(x_ptr + offsets, -tl.load(x_ptr + offsets, mask=mask), mask=mask)


def test_do_not_specialize_keeps_one_an_argument():
    signature = signature_of(negate_kernel, torch.zeros(64), 1, BLOCK_SIZE=64)
    assert signature.types["n_elements"] == "i32"


def test_a_slice_is_not_divisible():
    x = torch.zeros(1025)
    signature = signature_of(add_kernel, x[1:], x, x, 1024, BLOCK_SIZE=1024)
    assert signature.divisible_by_16 == ["y_ptr", "out_ptr", "n_elements"]
    ptx = compile_for(add_kernel, signature).ptx
    assert ptx.count("ld.global.v4.b32") == 2
    assert ptx.count("ld.global.b32") == 8


def test_a_constant_one_is_folded():
    x = torch.zeros(1024)
    compiled = compile_for(add_kernel, signature_of(add_kernel, x, x, x, 1, BLOCK_SIZE=1024))
    assert "n_elements" not in compiled.ttir
    assert compiled.ptx.count(".param") < compile_add().ptx.count(".param")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("n_elements", [1024, 1000, 1])
def test_it_is_what_a_launch_compiles(n_elements):
    x = torch.zeros(1024, device="cuda")
    launched = add_kernel[(1,)](x, x, x, n_elements, BLOCK_SIZE=1024)
    major, minor = torch.cuda.get_device_capability()
    signature = signature_of(add_kernel, x, x, x, n_elements, BLOCK_SIZE=1024)
    compiled = compile_for(add_kernel, signature, arch=10 * major + minor)
    assert compiled.ptx == launched.asm["ptx"]
    assert (compiled.registers, compiled.spills) == (launched.n_regs, launched.n_spills)
    assert compiled.shared_bytes == launched.metadata.shared


# --- instruction mix --------------------------------------------------------------------------------------

SASS = """.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 EXIT ;
        /*0030*/              @UP0 UMOV UR4, 0x1 ;
        /*0040*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
.L_x_0:
        /*0050*/                   BRA `(.L_x_0);
        /*0060*/                   NOP;
"""


def test_instruction_mix():
    expected = {"LDC": 1, "LDG.E.128": 2, "EXIT": 1, "UMOV": 1, "BRA": 1}
    assert instruction_mix(SASS) == expected


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "programs"),
    [(255, 4, 0, (2, 228)), (120, 4, 72 * 1024, (4, 3)), (33, 8, 113 * 1024, (6, 2))],
)
def test_programs_that_fit_on_an_sm(registers, num_warps, shared_bytes, programs):
    needs = SimpleNamespace(registers=registers, num_warps=num_warps, shared_bytes=shared_bytes)
    assert programs_on_sm(needs) == programs


LOOPS = """.text.k:
        /*0000*/              @!P0 BRA `(.L_x_2);
.L_x_0:
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   FFMA R5, R4, R4, R5 ;
        /*0030*/               @P1 BRA `(.L_x_1);
        /*0040*/               @P2 BRA `(.L_x_0);
.L_x_2:
        /*0050*/                   EXIT ;
.L_x_3:
        /*0060*/                   BRA `(.L_x_3);
"""


def test_the_mix_of_the_longest_loop():
    assert loop_mix(LOOPS) == {"LDG.E": 1, "FFMA": 1, "BRA": 2}
    assert loop_mix(SASS) == {"BRA": 1}  # the jump to itself after the end
    assert loop_mix(".text.k:\n        /*0000*/                   EXIT ;\n") == {}


def test_the_mix_of_the_shortest_loop_that_holds_an_opcode():
    assert loop_mix(LOOPS, "FFMA") == {"FFMA": 1, "BRA": 1}
    assert loop_mix(LOOPS, "LDG") == {"LDG.E": 1, "FFMA": 1, "BRA": 2}
    assert loop_mix(LOOPS, "HGMMA") == {}


@triton.jit
def remainder_kernel(out_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + offsets, offsets % n)


def test_a_remainder_of_64_bits_without_its_slow_path():
    signature = signature_of(remainder_kernel, torch.empty(256), 4096, BLOCK_SIZE=128)
    sass = compile_for(remainder_kernel, signature).sass
    fast = instruction_mix(without_calls(sass))
    assert "__cuda_sm20_rem_s64" in sass and "CALL.REL.NOINC" in instruction_mix(sass)
    assert "CALL.REL.NOINC" not in fast and "RET.REL.NODEC" not in fast
    assert fast["EXIT"] == 1 and any(name.startswith("STG") for name in fast)
    assert 20 < fast.total() < instruction_mix(sass).total() - 70


def test_a_kernel_without_calls_stays_whole():
    assert without_calls(LOOPS) == LOOPS


def test_the_instruction_mix_shows_narrow_loads():
    wide, narrow = compile_add(), compile_add(divisible_by_16=False)
    assert instruction_mix(wide)["LDG.E.128"] == 4 and instruction_mix(narrow)["LDG.E.128"] == 0
    assert instruction_mix(narrow)["LDG.E"] - instruction_mix(wide)["LDG.E"] == 16


# --- errors -----------------------------------------------------------------------------------------------


def test_unknown_arch():
    with pytest.raises(
        ValueError, match="no arch 91; there are 75, 80, 90, 100, 120, gfx942, 86, 89"
    ):
        compile_add(arch=91)


def test_missing_and_unknown_parameters():
    without_x = {name: t for name, t in ADD.items() if name != "x_ptr"}
    with pytest.raises(ValueError, match="lacks 'x_ptr'"):
        compile_for(add_kernel, without_x, {"BLOCK_SIZE": 1024})
    with pytest.raises(ValueError, match="constexpr 'BLOCK_SIZE'; give its value"):
        compile_for(add_kernel, ADD)
    with pytest.raises(ValueError, match="no parameter 'z_ptr'"):
        compile_for(add_kernel, ADD | {"z_ptr": "*fp32"}, {"BLOCK_SIZE": 1024})
    with pytest.raises(ValueError, match="no value for parameter 'out_ptr'"):
        signature_of(add_kernel, torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match="takes 5 arguments, got 6"):
        signature_of(add_kernel, 1, 2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match="has no parameter 'BLOK_SIZE'; it has x_ptr, "):
        signature_of(add_kernel, *[torch.zeros(4)] * 3, 4, BLOK_SIZE=16)
    with pytest.raises(
        ValueError, match=r"'x_ptr' has the type 'float\*'; .* a pointer as '\*fp32'"
    ):
        compile_for(add_kernel, ADD | {"x_ptr": "float*"}, {"BLOCK_SIZE": 1024})
    with pytest.raises(ValueError, match="'x_ptr' is 'text'"):
        signature_of(add_kernel, "text", 2, 3, 4, BLOCK_SIZE=16)


def test_not_a_kernel():
    with pytest.raises(TypeError, match="softmax is not a Triton kernel.*@triton.jit"):
        compile_for(torch.softmax, {})


def test_a_gluon_kernel_and_its_descriptors():
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = TensorDescriptor.from_tensor(torch.empty(64, 64, dtype=torch.bfloat16), [32, 64], layout)
    signature = signature_of(copy_tile_kernel, x, x, 32)
    assert signature.types["x_desc"].startswith("tensordesc<bf16[32, 64]")
    mix = instruction_mix(compile_for(copy_tile_kernel, signature))
    for name in ("UTMALDG", "UTMASTG", "SYNCS.PHASECHK"):
        assert any(op.startswith(name) for op in mix), (name, mix)
