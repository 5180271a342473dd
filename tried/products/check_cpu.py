"""The candidates on the CPU: Gluon's by the model, Triton's by the interpreter."""
import sys
from pathlib import Path
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import os
os.environ.setdefault("TRITON_INTERPRET", "1")
from lib import machine
from lib.nogpu import gluon
import kernels as k
import torch, torch.nn.functional as F
torch.manual_seed(0)
def r(*s): return (torch.randn(s) * .3).bfloat16()
def near(label, got, want):
    e = (got.double() - want).abs().max() / want.abs().max()
    print(f"{label:40s} {e:.1e}", "ok" if e < 6e-3 else "WRONG", flush=True)
call = lambda kk, g, *a, **h: gluon.run(kk, g, *a, seed=seed, **h)
for seed in (0, 1):
    m, n, kk = 200, 328, 200
    a, b, at, bt = r(m, kk), r(kk, n), r(kk, m).t(), r(n, kk).t()
    for label, x, w in (("NN", a, b), ("NT", a, bt), ("TN", at, b), ("TT", at, bt)):
        y = torch.full((m, n), float("nan")).bfloat16()
        k.run_roles(x, w, y, n_programs=2, call=call)
        near(f"roles {label} seed {seed}", y, x.double() @ w.double())
    u, v, vt, bias, z = r(m, 16), r(16, n), r(n, 16).t(), r(n), r(m, n) * 0
    for label, w, vv in (("NN", b, v), ("NT", bt, vt)):
        y = torch.full((m, n), float("nan")).bfloat16()
        k.run_roles(a, w, y, low=(u, vv), bias=bias, z=z, activation="gelu_tanh", n_programs=2, call=call)
        want = a.double() @ w.double() + u.double() @ vv.double() + bias.double()
        near(f"roles low {label} z", z, want)
        near(f"roles low {label} y", y, F.gelu(want, approximate="tanh"))
    m, kk, hid = 300, 264, 200
    x, w, bias = r(m, kk), r(2 * hid, kk), r(2 * hid)
    for gf in (True, False):
        y, h = r(m, hid) * 0, r(m, 2 * hid) * 0
        k.run_glu_with_h(x, w, bias, y, h, "silu", gf, n_programs=2 + 2 * gf, call=call)
        want = F.linear(x.double(), w.double(), bias.double())
        x1, x2 = want.chunk(2, -1)
        if gf: x1, x2 = x2, x1
        near("glu h", h, want); near("glu y", y, x1 * F.silu(x2))
m, n, rank = 130, 200, 16
dy, z, u, lb = r(m, n), r(m, n) * 5, r(m, rank), r(n, rank)
for act in ("gelu_tanh", "identity", "relu"):
    zd = z.double().requires_grad_()
    g = dy.double()
    if act != "identity":
        (g,) = torch.autograd.grad(k.host.ACTIVATIONS[act](zd), zd, g)
    got = k.run_dz_and_narrow(dy, None if act == "identity" else z, u, lb, 2.0, act, True)
    for label, a, b in zip(("dz", "du", "db", "dbias"), got, (g, 2 * g @ lb.double(), 2 * g.t() @ u.double(), g.sum(0))):
        near(f"{act} {label}", a, b)
a, b, y = r(300, 200), r(200, 320), r(300, 320)
for how in ({}, {"flatten": True}, {"parts": 4}, {"parts": 1, "tile": (256, 128, 64)}):
    y.zero_(); k.run_persistent(a, b, y, **how); near(f"persistent {how}", y, a.double() @ b.double())
