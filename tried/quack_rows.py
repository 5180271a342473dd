"""softmax and add_rms_norm beside quack (CuTe DSL) and eager: shares of the copy rate, in turns, L2 flushed."""
import sys, torch
from lib.measure import bench, roofline
from lib.ops.softmax import softmax_triton
from lib.ops.add_rms_norm import add_rms_norm_triton
import quack
from quack.softmax import softmax as qsoftmax
from quack.rmsnorm import rmsnorm as qnorm
top = roofline.ceilings()
def share(us, moved): return round(100*top.attainable_us(moved)/us,1)
print(top)
def line(name, shape, dtype, calls, moved):
    try:
        us = bench.in_turns_us(calls, 3, 40)
        print(name, shape, dtype, {n: (round(t,1), share(t, moved)) for n,t in us.items()}, flush=True)
    except Exception as e: print(name, shape, dtype, "FAILED", type(e).__name__, str(e)[:160], flush=True)
for dtype in (torch.bfloat16, torch.float32):
    for shape in ((262144,200),(12000,5120),(16384,4096),(60704,2211),(131072,781),(1024,131072),(32768,1024)):
        if dtype == torch.float32 and shape[0]*shape[1] > 2**26*1.2 and shape != (12000,5120): continue
        x = torch.randn(shape, device="cuda", dtype=dtype); m = x.numel()*x.element_size()
        x2 = x.clone().requires_grad_(True); dy = torch.randn_like(x)
        try:
            e = (qsoftmax(x).float()-torch.softmax(x.float(),-1)).abs().max().item(); print("quack error", e)
        except Exception as ex: print("quack fails", str(ex)[:200]); continue
        with torch.no_grad(): line("softmax fwd", shape, dtype, {"ours": lambda: softmax_triton(x), "quack": lambda: qsoftmax(x), "eager": lambda: torch.softmax(x,-1)}, 2*m)
        def both(f):
            return lambda: torch.autograd.grad(f(x2), x2, dy)
        line("softmax both", shape, dtype, {"ours": both(softmax_triton), "quack": both(qsoftmax)}, 5*m)
for shape in ((16384,4096),(262144,200),(22448,5979),(22448,5976),(8192,8192),(131072,768)):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16); r = torch.randn_like(x); w = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16)
    m = x.numel()*2
    with torch.no_grad():
        line("add_rms_norm fwd", shape, "bf16", {"ours": lambda: add_rms_norm_triton(x, r, w), "quack": lambda: qnorm(x, w, residual=r, eps=1e-6, prenorm=True)}, 4*m)
