from compile import *
B = torch.bfloat16
def mk(*s, dtype=B): return torch.empty(s, dtype=dtype)
call = lambda label: lambda kk, g, *x, **h: show(label, kk, x, h)
a, bt, y, u, vt = mk(1024, 512), mk(2048, 512).t(), mk(1024, 2048), mk(1024, 16), mk(2048, 16).t()
k.run_roles(a, bt, y, low=(u, vt), bias=mk(2048), activation="relu", call=call("NT low bias relu"))
real_sum = k.host.sum_rows
k.host.sum_rows = lambda p, d: p[0]
for rank, act, bm, nw in ((32, "identity", 64, 4), (32, "identity", 128, 8), (16, "identity", 64, 4), (16, "identity", 128, 8), (16, "relu", 64, 4), (16, "relu", 128, 8)):
    k.host.run = lambda kk, g, t, *s, **h: show(f"dz {act} r{rank} {bm} rows warps {nw}", kk, (*t, *s), h)
    z = None if act == "identity" else mk(2048, 4096)
    k.run_dz_and_narrow(mk(2048, 4096), z, mk(2048, rank), mk(4096, rank), 2.0, act, z is not None, bm, 64, nw)
