"""Five steps up to matmul_triton, the ladder of notebook 40: each is one Plan of lib/ops/matmul.py.

naive       tiles of 16 x 16, products and sums one by one, without tensor cores
tiled       tiles of 128 x 128 by tensor cores; programs take them along the rows
grouped     the same down groups of rows: programs that run together share more of a and b in L2
pipelined   cp.async brings the next pieces of a and b during the products; wider tiles
persistent  one program for each SM goes from tile to tile, and TMA brings the pieces
"""

import functools

from lib.ops import matmul
from lib.ops.matmul import Plan, Tile


def _without_stages(tile):
    return tile._replace(n=min(tile.n, 128), k=min(tile.k, 32), num_stages=1)


# rung -> its Plan, made of the largest tile for what multiplies
PLANS = {
    "naive": lambda tile: Plan(Tile(16, 16, 16, 4, 1), "naive", group=1),
    "tiled": lambda tile: Plan(_without_stages(tile), group=1),
    "grouped": lambda tile: Plan(_without_stages(tile)),
    "pipelined": lambda tile: Plan(tile),
    "persistent": lambda tile: Plan(tile, "tma", copies=True),
}


@functools.cache
def plan_of(rung, kind, device):
    """The Plan of a rung on this GPU; kind: what multiplies, from the shared kind_of."""
    return PLANS[rung](matmul._tiles(kind, device)[0])


def _launch(rung, plan, y, z, a, b, bias, activation, kind):
    """As a rung is launched, whatever the plan of matmul_triton."""
    matmul._launch(plan_of(rung, kind, a.device), y, z, a, b, bias, activation, kind)


def _call(rung, *arguments):
    return matmul._call(f"matmul_{rung}", *arguments, launch=functools.partial(_launch, rung))


def matmul_naive(a, b, bias=None, activation="identity", allow_tf32=False):
    """Each program computes 16 x 16 sums, product by product, and shares no loads with others."""
    return _call("naive", a, b, bias, activation, allow_tf32)


def matmul_tiled(a, b, bias=None, activation="identity", allow_tf32=False):
    """Large tiles, multiplied by tensor cores; loads, then products, then the next loads."""
    return _call("tiled", a, b, bias, activation, allow_tf32)


def matmul_grouped(a, b, bias=None, activation="identity", allow_tf32=False):
    """matmul_tiled with its programs in groups of rows, which share a and b in L2."""
    return _call("grouped", a, b, bias, activation, allow_tf32)


def matmul_pipelined(a, b, bias=None, activation="identity", allow_tf32=False):
    """matmul_grouped with wider tiles and the next loads under way during the products."""
    return _call("pipelined", a, b, bias, activation, allow_tf32)


def matmul_persistent(a, b, bias=None, activation="identity", allow_tf32=False):
    """One program for each SM, and loads by TMA: 16 bits, on Hopper. Else it is matmul_pipelined.

    A matrix with neither rows nor columns on 16-byte boundaries is copied into one that has them.
    """
    return _call("persistent", a, b, bias, activation, allow_tf32)


RUNGS = {
    "naive": matmul_naive,
    "tiled": matmul_tiled,
    "grouped": matmul_grouped,
    "pipelined": matmul_pipelined,
    "persistent": matmul_persistent,
}
