"""What each candidate compiles to for sm_90: registers, spills, shared memory, machine code. No GPU needed."""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import kernels as k
import torch
import triton
from lib.nogpu import compile_only as co
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from lib.nogpu.interpreter import swapped
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

k.host.n_multiprocessors = lambda _: 132


def type_of(name, v):
    if isinstance(v, TensorDescriptor):
        return f"tensordesc<{co._TYPE_NAMES[v.base.dtype]}{list(v.block_shape)}>"
    return co._type_name(name, v)


def compile_call(kernel, args, options):
    function = co._jit_function(kernel)
    names = [p.name for p in function.params]
    values = dict(zip(names, args)) | {n: v for n, v in options.items() if n in names}
    types, constants, attrs = {}, {}, {}
    for i, p in enumerate(function.params):
        v = values[p.name] if p.name in values else p.default
        if p.is_constexpr or v is None or (type(v) is int and v == 1 and not p.do_not_specialize):
            types[p.name], constants[p.name] = "constexpr", v
            continue
        types[p.name] = 'fp64' if '64' in str(p.annotation) and isinstance(v, float) else type_of(p.name, v)
        if isinstance(v, torch.Tensor) or (type(v) is int and v % 16 == 0 and not p.do_not_specialize):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    how = {n: v for n, v in options.items() if n in ("num_warps", "num_stages", "num_ctas")}
    with swapped(function.fn, InterpretedFunction, JITFunction):
        r = triton.compile(
            source(function, types, constants, attrs), target=GPUTarget("cuda", 90, 32),
            options={**how, "enable_fp_fusion": True},
        )
    return co.Compiled(r.metadata.name, 90, how.get("num_warps", 4), r.metadata.shared, dict(r.asm))


def show(label, kernel, args, options):
    start = time.perf_counter()
    try:
        c = compile_call(kernel, args, options)
        mix = co.instruction_mix(c)
        # a name's last part is the size of the tile
        kept = {o: n for o, n in mix.items() if o.startswith(
            ("HGMMA", "HMMA", "UTMA", "LDGSTS", "STG", "LDL", "STL", "USETMAXREG", "WARPSYNC.EX", "SYNCS.EXCH", "BAR"))}
        ws = "ttg.warp_specialize" in c.ttgir
        print(f"{label:56s} {time.perf_counter() - start:5.1f} s  regs {c.registers:3d} spills {c.spills:4d} "
              f"shared {c.shared_bytes:6d}{'  roles' if ws else ''}  {kept}", flush=True)
        return c
    except Exception as e:  # noqa: BLE001
        print(f"{label:56s} {time.perf_counter() - start:5.1f} s  {type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)


class Catch:
    """kernel[grid](...) that compiles."""
    def __init__(self, label, kernel):
        self.label, self.kernel = label, kernel
    def __getitem__(self, grid):
        return lambda *args, **how: show(self.label, self.kernel, args, how)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype=dtype, device="cpu")
