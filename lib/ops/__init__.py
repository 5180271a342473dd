"""The kernels: one file per op, each imports only torch, triton and the standard library. Copy them."""
