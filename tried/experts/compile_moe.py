"""Registers, spills and shared memory of moe_mlp's kernels on sm_90, by Triton's own compiler, without a GPU."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from lib.nogpu import compile_only

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import moe_mlp as moe

moe.INTERPRETED = False  # the tiles of a GPU
NAMES = compile_only._TYPE_NAMES


class Recorder:
    """In a kernel's place: compiles what it would be launched with."""

    def __init__(self, kernel, rows):
        self.kernel, self.rows = kernel, rows

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, **constants):
        plain = [
            torch.empty(0, dtype=torch.int8) if isinstance(a, TensorDescriptor) else a for a in args
        ]
        signature = compile_only.signature_of(self.kernel, *plain, **constants)
        for name, a in zip(self.kernel.arg_names, args):
            if isinstance(a, TensorDescriptor):
                signature.types[name] = f"tensordesc<{NAMES[a.base.dtype]}{list(a.block_shape)}>"
        c = compile_only.compile_for(
            self.kernel, signature, arch=90, num_warps=num_warps, num_stages=num_stages
        )
        mix = compile_only.instruction_mix(c)
        ops = {
            k: sum(n for o, n in mix.items() if o.startswith(k))
            for k in ("HGMMA", "HMMA", "UTMALDG", "UTMASTG")
        }
        self.rows.append(
            (
                c.name,
                constants.get("BLOCK_N"),
                num_warps,
                c.registers,
                c.spills,
                c.shared_bytes,
                ops,
            )
        )
        print(*self.rows[-1], flush=True)


def main():
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "bfloat16")
    rows = []
    for name in [n for n in vars(moe) if n.endswith("_kernel")]:
        setattr(moe, name, Recorder(getattr(moe, name), rows))
    sizes = dict(dtype=dtype, device="meta")
    x, ids = (
        torch.empty(8192, 2048, **sizes),
        torch.empty(8192, 6, dtype=torch.int64, device="meta"),
    )
    weights = torch.empty(8192, 6, device="meta")
    w1, w2 = torch.empty(64, 2816, 2048, **sizes), torch.empty(64, 2048, 1408, **sizes)
    table = moe.Table(ids, 64)
    xs = table.gather(x)
    h, act = moe._gate_up(table, xs, w1, True)
    table.combine(moe._product(table, "down", act, w2, True), weights)
    dh, scaled, _ = moe._d_act(table, xs, w2, h, weights)
    moe._dw(table, xs, scaled)
    moe._product(table, "dx", dh.view(table.n_rows, -1), w1, False)


main()
