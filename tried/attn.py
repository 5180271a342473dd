"""Rows of attention: ours (same bits; atomics), cuDNN, flash; forward and both passes; also Triton's backward."""
import random, sys, time, torch
from unittest import mock
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from lib.measure import bench
from lib.ops import attention as A

rows = [(4,32,8,4096,128,1),(4,32,8,4096,128,0),(1,32,8,16384,128,1),(16,16,16,1024,64,1),(2,24,24,3000,128,1),(8,16,4,2048,64,0),(2,16,16,4096,256,1)]
rng = random.Random(5)
for _ in range(10):
    d = rng.choice([64,128,96,64,128]); g = rng.choice([1,2,4,8]); h = g*rng.choice([1,2,4]); s = round(256*2**(rng.random()*5)); b = max(1, min(64, round(2**27/(h*s*max(s,1024)))))
    rows.append((b,h,g,s,d,rng.choice([0,1])))
def sdpa(backend, causal):
    def f(q,k,v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q,k,v,is_causal=bool(causal),enable_gqa=q.shape[1]!=k.shape[1])
    return f
def both(f, tensors, do):
    def call():
        o = f(*tensors)
        torch.autograd.grad(o, tensors, do)
    return call
t0 = time.time()
limit = float(sys.argv[1]) if len(sys.argv) > 1 else 75
for b,h,g,s,d,causal in rows:
    if time.time()-t0 > limit: print("stop"); break
    try:
        q = torch.randn(b,h,s,d,device="cuda",dtype=torch.bfloat16,requires_grad=True)
        k,v = (torch.randn(b,g,s,d,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in "kv")
        do = torch.randn_like(q)
        fs = {"ours": lambda q,k,v: A.attention_triton(q,k,v,is_causal=bool(causal)),
              "atomics": lambda q,k,v: A.attention_triton(q,k,v,is_causal=bool(causal),deterministic=False),
              "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, causal), "flash": sdpa(SDPBackend.FLASH_ATTENTION, causal)}
        want = torch.autograd.grad(fs["flash"](q,k,v), (q,k,v), do)
        for n in ("ours","atomics"):
            got = torch.autograd.grad(fs[n](q,k,v), (q,k,v), do)
            e = max(((a-b_).float().norm()/b_.float().norm()).item() for a,b_ in zip(got,want))
            if not e < 0.02: print("WRONG", n, e)
        with torch.no_grad(): fwd = bench.in_turns_us({n: (lambda f=f: f(q,k,v)) for n,f in fs.items() if n!="atomics"}, 3, 60)
        calls = {n: both(f,(q,k,v),do) for n,f in fs.items()}
        fit = A._roles_fit
        def slow():
            with mock.patch.object(A, "_roles_fit", return_value=False):
                calls["ours"]()
        calls["triton"] = slow
        bt = bench.in_turns_us(calls, 3, 60)
        print((b,h,g,s,d,"causal" if causal else "full"), "fwd", {n: round(t,1) for n,t in fwd.items()}, f"cudnn/ours {fwd['cudnn']/fwd['ours']:.2f}", "| both", {n: round(t,1) for n,t in bt.items()}, f"cudnn/ours {bt['cudnn']/bt['ours']:.2f} cudnn/atomics {bt['cudnn']/bt['atomics']:.2f}", flush=True)
        del q,k,v,do,want,got
    except Exception as e: print((b,h,g,s,d,causal), "FAILED", type(e).__name__, str(e)[:200], flush=True)
# same bits over 50 runs
for shape in ((2,8,2,2048,128),(4,8,8,1024,64)):
    b,h,g,s,d = shape
    q = torch.randn(b,h,s,d,device="cuda",dtype=torch.bfloat16,requires_grad=True)
    k,v = (torch.randn(b,g,s,d,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in "kv")
    for causal in (True, False):
        first, same = None, 0
        for _ in range(50):
            got = torch.autograd.grad(A.attention_triton(q,k,v,is_causal=causal).float().square().sum(), (q,k,v))
            first = first or got; same += all(map(torch.equal, first, got))
        print("bits", shape, causal, same, "of 50", flush=True)
