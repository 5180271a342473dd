# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The Fused Kernels authors; Fused Kernels 0.1.0, lib/profiling/bill.py
"""What PyTorch code costs at least: launches, bytes and floating-point operations, counted without a GPU.

    with Counter() as counter:
        model(x).sum().backward()
    pandas.DataFrame(counter.rows, columns=["op", "bytes", "flops"])

It sees each op below autograd, in the backward pass too. On the device "meta" or under FakeTensorMode nothing
is computed, so any size can be counted on any machine. Views and allocations cost nothing. Any other op reads
its arguments once and writes its results once, in one launch, or in as many as launches_of says.
Needs torch and the standard library.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_NO_WORK = (
    "empty", "new_empty", "empty_like", "set_", "_unsafe_view", "promote_types", "device",
    "_sparse_coo_tensor_with_dims_and_tensors",
)  # fmt: skip
_SORTED_FROM = 3072  # ids from which on PyTorch sorts them for the gradient of a table
# FLOPs of ops that PyTorch has no formula for, from the tensors among their arguments
FORMULAS = {
    # x, W
    "linear_glu": lambda t: 2 * _rows(t[0]) * t[1].numel(),
    # x, W, A, B
    "lora_linear": lambda t: 2 * _rows(t[0]) * sum(w.numel() for w in t[1:4]),
    # dy, x, W, A, B; no dW, and two products for each of A and B
    "lora_linear_backward": lambda t: 2 * _rows(t[0]) * (t[2].numel() + 2 * t[3].numel() + 2 * t[4].numel()),
    # q, ... of (B, H, S, D), causal: two products, five backward, half of each masked
    "attention": lambda t: 2 * t[0].numel() * t[0].shape[2],
    "attention_backward": lambda t: 5 * t[0].numel() * t[0].shape[2],
}  # fmt: skip


def _rows(t):
    return t.shape[:-1].numel()


def n_bytes(*tensors):
    """Bytes of all tensors in any nest of tuples and lists; of a sparse one those of its two parts."""
    leaves = [t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    parts = [p for t in leaves for p in ((t._indices(), t._values()) if t.is_sparse else (t,))]
    return sum(p.numel() * p.element_size() for p in parts)


def bytes_of(name, args, result):
    """Bytes that an op reads and writes at least."""
    if name == "embedding":  # ids, rows read, rows written
        return n_bytes(args[1]) + 2 * n_bytes(result)
    if name == "embedding_dense_backward":  # zeros for the table, then rows are added to it
        return n_bytes(result) + n_bytes(args[1]) + 3 * n_bytes(args[0])
    if name == "_foreach_add_":  # in place: the first list is read and written
        return n_bytes(args) + n_bytes(args[0])
    # an expanded tensor counts in full
    read = {id(t): t for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    return n_bytes([*read.values()], result)


def launches_of(name, args):
    """Kernels of an op."""
    if name == "_foreach_add_":  # 320 chunks of 65,536 elements a launch
        return -(-sum(-(-t.numel() // 65536) for t in args[0]) // 320)
    if name == "embedding_dense_backward":
        # two copies, a fill with zeros, the sum; and those of the sort
        return 4 if args[1].numel() <= _SORTED_FROM else 23
    return 1


def flops_of(func, args, kwargs, result):
    """Floating-point operations of an op's matrix products; 0 for all others, which wait for memory."""
    packet = func.overloadpacket
    if formula := FORMULAS.get(packet.__name__):
        return formula([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
    return flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0


class Counter(TorchDispatchMode):
    """Inside, `rows` gets (op, bytes, flops) of every op that computes something, `launches` their kernels."""

    def __init__(self):
        super().__init__()
        self.rows, self.launches = [], 0

    @property
    def bytes(self):
        """Of all ops."""
        return sum(n for _, n, _ in self.rows)

    @property
    def flops(self):
        """Of all ops."""
        return sum(n for _, _, n in self.rows)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if not func.is_view and name not in _NO_WORK:
            moved = bytes_of(name, (*args, *kwargs.values()), result)
            self.rows.append((name, moved, flops_of(func, args, kwargs, result)))
            self.launches += launches_of(name, args)
        return result
