"""Compile a Triton kernel for a GPU that is not here, and read what came out.

    compiled = compile_for(add_kernel, signature_of(add_kernel, x, y, out, n, BLOCK_SIZE=1024), arch=90)
    compiled.ttir, .ttgir, .llir, .ptx, .sass      # the stages, as text
    compiled.registers, .shared_bytes, .spills     # what it needs of an SM (streaming multiprocessor)
    instruction_mix(compiled)                       # {"LDG.E.128": 2, "FADD": 8, ...}
    loop_mix(compiled)                              # the same of its longest loop, or one with an opcode
    instruction_mix(without_calls(compiled.sass))   # the same without subroutines
    programs_on_sm(compiled)                        # how many fit on one SM of a Hopper GPU

Triton's compiler, ptxas and the disassembler come with the triton wheel and need no driver, so this is
what a GPU would get, not an imitation. It stands in for the first launch of a kernel, when Triton
compiles. A launch tells Triton the types of its arguments, which ints are 1 and which values divide by
16. Here the caller says so, or `signature_of` works it out.

Works for kernels that the interpreter runs in the same process, with a GPU or without.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lib.nogpu.interpreter import swapped

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

# TMA's copies, which kernels of the course call by their names from Triton 3.8 on.
for _name, _before in (
    ("async_load", "async_copy_global_to_shared"),
    ("async_store", "async_copy_shared_to_global"),
):
    if not hasattr(tma, _name):
        setattr(tma, _name, getattr(tma, _before))

TARGETS = {
    75: GPUTarget("cuda", 75, 32),  # Turing: T4
    80: GPUTarget("cuda", 80, 32),  # Ampere: A100
    90: GPUTarget("cuda", 90, 32),  # Hopper: H100, H200
    100: GPUTarget("cuda", 100, 32),  # Blackwell: B200
    120: GPUTarget("cuda", 120, 32),  # Blackwell: RTX 5090
    "gfx942": GPUTarget("hip", "gfx942", 64),  # AMD CDNA 3: MI300
}
# Common desktop GPUs. Their code is much the same as that of the above, so tables leave them out.
_RELATIVES = {
    86: GPUTarget("cuda", 86, 32),  # Ampere: RTX 30, A10
    89: GPUTarget("cuda", 89, 32),  # Ada: RTX 40, L4, L40S
}

_TYPE_NAMES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


# Options of a launch that are no parameters of the kernel; compile_for takes them as arguments.
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


class Signature(NamedTuple):
    """What Triton reads off the arguments of a launch."""

    types: dict  # {"x_ptr": "*fp32", "n_elements": "i32"}
    constexprs: dict  # {"BLOCK_SIZE": 1024, and ints that are 1}
    divisible_by_16: list  # names of pointers and ints that are multiples of 16


def signature_of(kernel, *args, **constexprs):
    """The Signature that a launch `kernel[grid](*args, **constexprs)` would have.

    args are tensors, ints, floats, bools, None or Gluon's tensor descriptors, by position; any parameter may
    be given by name too.
    An int takes 32 bits if it fits, else 64. An int that is 1, and None, become constants.
    """
    params = _jit_function(kernel).params
    if len(args) > len(params):
        raise ValueError(f"{_name(kernel)} takes {len(params)} arguments, got {len(args)}.")
    names = [p.name for p in params]
    if unknown := [n for n in constexprs if n not in names and n not in _LAUNCH_OPTIONS]:
        raise ValueError(
            f"{_name(kernel)} has no parameter {unknown[0]!r}; it has {', '.join(names)}."
        )
    values = dict(zip(names, args)) | constexprs
    types, fixed, divisible = {}, {}, []
    for p in params:
        if p.name not in values:
            if not p.has_default:
                raise ValueError(
                    f"signature_of({_name(kernel)}): no value for parameter {p.name!r}."
                )
            values[p.name] = p.default
        value = values[p.name]
        is_one = type(value) is int and value == 1 and not p.do_not_specialize
        if p.is_constexpr or value is None or is_one:
            fixed[p.name] = value
            continue
        types[p.name] = _type_name(p.name, value)
        specialize = not (p.do_not_specialize or p.do_not_specialize_on_alignment)
        if specialize and _is_multiple_of_16(value):
            divisible.append(p.name)
    return Signature(types, fixed, divisible)


def _type_name(parameter, value):
    if isinstance(value, torch.Tensor) and value.dtype in _TYPE_NAMES:
        return "*" + _TYPE_NAMES[value.dtype]
    if isinstance(value, TensorDescriptor):
        dtype = _TYPE_NAMES[value.base.dtype]
        return f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise ValueError(
        f"signature_of: {parameter!r} is {value!r}, and Triton has no such type; "
        "pass a tensor of real numbers, an int, a float, a bool or None."
    )


def _is_multiple_of_16(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


def compile_for(
    kernel, signature, constexprs=None, arch=90, num_warps=4, num_stages=3, divisible_by_16=True
):
    """Compile a @triton.jit kernel (autotuned or not) or a @gluon.jit one for an architecture that is not here.

    signature is {"x_ptr": "*fp32", "n_elements": "i32"}, with constexprs={"BLOCK_SIZE": 1024}; or it is
    what signature_of returns, which holds all three. divisible_by_16 says which arguments the compiler may
    assume to be multiples of 16: every pointer and int (True), none (False), or the parameters named.
    """
    targets = TARGETS | _RELATIVES
    if arch not in targets:
        archs = ", ".join(map(str, targets))
        raise ValueError(f"compile_for: no arch {arch!r}; there are {archs}.")
    if isinstance(signature, Signature):
        signature, signature_constexprs, signature_divisible = signature
        constexprs = signature_constexprs | (constexprs or {})
        divisible_by_16 = signature_divisible if divisible_by_16 is True else divisible_by_16
    constexprs = constexprs or {}
    function = _jit_function(kernel)
    types = _types_in_order(function, signature, constexprs)
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, type_name) in enumerate(types.items())
        if _may_assume_16(name, type_name, divisible_by_16)
    }
    # Under the interpreter, tl.sum and the kernel's helpers cannot be compiled, so swap them for a while.
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    with swapped(function.fn, InterpretedFunction, JITFunction):
        result = triton.compile(
            source(function, types, constexprs, attributes),
            target=targets[arch],
            # fused multiply-adds, which are Triton's default before 3.10
            options={
                "num_warps": num_warps,
                "num_stages": num_stages,
                "enable_fp_fusion": True,
            },
        )
    return Compiled(result.metadata.name, arch, num_warps, result.metadata.shared, dict(result.asm))


def _jit_function(kernel):
    """The kernel as Triton compiles it, without an autotuner, heuristics or the interpreter's wrapper."""
    inner = kernel
    while not isinstance(inner, (JITFunction, InterpretedFunction)):
        inner = getattr(inner, "fn", None)
        if inner is None:
            raise TypeError(
                f"{_name(kernel)} is not a Triton kernel: decorate the function with @triton.jit."
            )
    return inner if isinstance(inner, JITFunction) else JITFunction(inner.fn, **inner.kwargs)


def _name(kernel):
    return getattr(kernel, "__name__", repr(kernel))


def _types_in_order(function, signature, constexprs):
    types = {}
    for p in function.params:
        if p.name in constexprs:
            types[p.name] = "constexpr"
        elif p.is_constexpr:
            raise ValueError(
                f"compile_for: {function.__name__} has the constexpr {p.name!r}; "
                f"give its value in constexprs={{{p.name!r}: ...}}."
            )
        elif p.name in signature:
            types[p.name] = _checked_type(p.name, signature[p.name])
        else:
            raise ValueError(
                f"compile_for: the signature of {function.__name__} lacks {p.name!r}; "
                "give it a type such as '*fp32', 'i32' or 'fp32'."
            )
    unknown = [name for name in (*signature, *constexprs) if name not in types]
    if unknown:
        raise ValueError(f"compile_for: {function.__name__} has no parameter {unknown[0]!r}.")
    return types


def _checked_type(parameter, name):
    type_names = [*_TYPE_NAMES.values(), "u16", "u32", "u64"]
    if name.removeprefix("*") not in type_names and not name.startswith("tensordesc"):
        raise ValueError(
            f"compile_for: {parameter!r} has the type {name!r}; Triton writes a pointer as '*fp32' and a "
            f"number as 'i32'. There are: {', '.join(type_names)}."
        )
    return name


def _may_assume_16(name, type_name, divisible_by_16):
    if type_name == "constexpr":
        return False
    if isinstance(divisible_by_16, bool):
        return divisible_by_16 and type_name[0] in "*iu" and type_name != "i1"
    return name in divisible_by_16


@dataclass
class Compiled:
    """One kernel compiled for one architecture."""

    name: str
    arch: int | str
    num_warps: int
    shared_bytes: int  # shared memory of one program
    asm: dict = field(repr=False)  # every stage that Triton keeps: text, and the binary at the end

    @property
    def ttir(self):
        """Triton IR: the kernel as written, with types and without Python."""
        return self.asm["ttir"]

    @property
    def ttgir(self):
        """Triton GPU IR: the same with layouts, that is, which thread holds which elements."""
        return self.asm["ttgir"]

    @property
    def llir(self):
        """LLVM IR: what one thread does."""
        return self.asm["llir"]

    @property
    def ptx(self):
        """NVIDIA's portable assembly."""
        return self._stage("ptx")

    @property
    def amdgcn(self):
        """AMD's assembly."""
        return self._stage("amdgcn")

    @cached_property
    def sass(self):
        """NVIDIA's machine instructions, one a line, as nvdisasm prints them."""
        text = _nvidia_tool("nvdisasm", "-c", binary=self._stage("cubin"))
        return text[text.index(f".text.{self.name}:") :].rstrip() + "\n"

    @property
    def registers(self):
        """Registers of one thread (on AMD: vector registers of one lane)."""
        return self._resources["registers"]

    @property
    def spills(self):
        """32-bit words of one thread in local memory, as Triton counts them.

        Spilled registers, and also local arrays, which are no spills: sin and cos of large numbers need one.
        """
        return self._resources["spills"]

    @cached_property
    def _resources(self):
        if "amdgcn" in self.asm:
            registers = re.search(r"\.vgpr_count: +(\d+)", self.amdgcn)
            spills = re.search(r"\.vgpr_spill_count: +(\d+)", self.amdgcn)
            return {"registers": int(registers[1]), "spills": int(spills[1])}
        usage = _nvidia_tool("cuobjdump", "-res-usage", binary=self._stage("cubin"))
        registers, stack_bytes, local_bytes = (
            int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL")
        )
        return {"registers": registers, "spills": (stack_bytes + local_bytes) // 4}

    def _stage(self, stage):
        if stage not in self.asm:
            there = ", ".join(self.asm)
            raise ValueError(
                f"{self.name} compiled for {self.arch} has no {stage}; it has {there}."
            )
        return self.asm[stage]


def _nvidia_tool(tool, option, binary):
    """The output of one of the triton wheel's tools for a cubin."""
    path = Path(getattr(triton.knobs.nvidia, tool).path)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary)
        result = subprocess.run([path, option, cubin], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{tool} {option} failed: {result.stderr.strip()}")
    return result.stdout


def instruction_mix(sass):
    """Counter of the opcodes in SASS text, or of a Compiled kernel: {"LDG.E.128": 2, "FADD": 8, ...}.

    It counts instructions as they stand in the code: one in a loop counts once.
    """
    text = sass.sass if isinstance(sass, Compiled) else sass
    # /*0130*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;   (the padding after the end is NOP)
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return Counter(opcode for opcode in opcodes if opcode != "NOP")


def programs_on_sm(compiled):
    """How many programs fit on an SM of compute capability 9.0, by its registers and by its shared memory."""
    per_thread = -(-compiled.registers // 8) * 8
    by_registers = (
        4 * (16384 // (32 * per_thread)) // compiled.num_warps
    )  # each quarter has its own
    return by_registers, 228 * 1024 // (compiled.shared_bytes + 1024)


def without_calls(sass):
    """SASS text without subroutines and the blocks that call them.

    A 64-bit division or remainder calls one only where a number has more than 32 bits.
    """
    kernel = re.split(r"(?m)^\s*\.(?:weak|type)\s+\$", sass)[0]
    blocks = [""]  # one begins at each label, and after each jump
    for line in kernel.splitlines(keepends=True):
        blocks += [""] if line.startswith(".L_x_") else []
        blocks[-1] += line
        blocks += [""] if "BRA `" in line else []
    return "".join(block for block in blocks if "CALL." not in block)


def loop_mix(sass, holding=None):
    """The instruction_mix of the longest loop, from a label to the jump back to it: one pass of a warp.

    holding: an opcode's beginning; then it is the shortest loop that has one, as "HGMMA" for the loop along K
    inside the loop over tiles.
    """
    text, loops = sass.sass if isinstance(sass, Compiled) else sass, []
    for label in re.finditer(r"(?m)^(\.L_x_\d+):", text):
        jumps = re.compile(re.escape(f"`({label[1]})")).finditer(text, label.end())
        loops += [instruction_mix(text[label.end() : jump.start()]) for jump in jumps]
    if holding is not None:
        loops = [mix for mix in loops if any(opcode.startswith(holding) for opcode in mix)]
        return min(loops, key=Counter.total, default=Counter())
    return max(loops, key=Counter.total, default=Counter())
