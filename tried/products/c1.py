from compile import *
which = sys.argv[1]
B = torch.bfloat16
def mk(*s, dtype=B): return torch.empty(s, dtype=dtype)
if which == "a":
    a, b, y = mk(1024, 512), mk(512, 2048), mk(1024, 2048)
    bt = mk(2048, 512).t()
    real = k.persistent
    for nt, bb in (("NN", b), ("NT", bt)):
        for label, how in {
            "today": {}, "flatten": {"flatten": True}, "4 stages": {"num_stages": 4}, "flatten, 4 stages": {"flatten": True, "num_stages": 4},
            "flatten, quarters, 4": {"flatten": True, "num_stages": 4, "parts": 4},
            "flatten, quarters, 3": {"flatten": True, "num_stages": 3, "parts": 4},
            "roles": {"roles": True}, "roles, flatten": {"roles": True, "flatten": True},
            "2 ctas": {"num_ctas": 2, "tile": (256, 256, 64), "parts": 2}, 
            "2 ctas, flatten": {"num_ctas": 2, "tile": (256, 256, 64), "flatten": True},
            "2 ctas 128": {"num_ctas": 2, "tile": (128, 256, 64)},
            "256x128 flatten": {"tile": (256, 128, 64), "flatten": True, "parts": 1},
        }.items():
            k.persistent = Catch(f"{nt} {label}", real)
            k.run_persistent(a, bb, y, **how)
if which == "roles":
    at = mk(512, 1024).t()
    a, b, y = mk(1024, 512), mk(512, 2048), mk(1024, 2048)
    bt = mk(2048, 512).t()
    u, v, vt = mk(1024, 16), mk(16, 2048), mk(2048, 16).t()
    call = lambda label: lambda kk, g, *x, **h: show(label, kk, x, h)
    k.run_roles(a, bt, y, call=call("NT"))
    k.run_roles(a, b, y, call=call("NN"))
    k.run_roles(at, b, y, call=call("TN"))
    k.run_roles(at, bt, y, call=call("TT"))
    k.run_roles(a, bt, y, low=(u, vt), call=call("NT low"))
    k.run_roles(a, b, y, low=(u, v), call=call("NN low"))
    k.run_roles(a, bt, y, low=(u, vt), bias=mk(2048), z=mk(1024, 2048), activation="gelu_tanh", call=call("NT low bias z gelu_tanh"))
    k.run_roles(a, bt, y, stages=4, n=128, call=call("NT 128"))
if which == "glu":
    x, w, y, h = mk(1024, 512), mk(4096, 512), mk(1024, 2048), mk(1024, 4096)
    call = lambda label: lambda kk, g, *x, **hh: show(label, kk, x, hh)
    for act, gf in (("silu", True), ("gelu_tanh", False)):
        k.run_glu_with_h(x, w, None, y, h, act, gf, call=call(f"glu with h, {act}"))
    k.run_glu_with_h(x, w, mk(4096), y, h, "gelu_tanh", False, call=call("glu with h, bias"))
if which == "dz":
    real = k.dz_and_narrow
    for act, bm, bn, nw, st, bias in (("gelu_tanh", 64, 64, 4, 1, True), ("gelu_tanh", 128, 64, 8, 1, True), ("gelu_tanh", 128, 32, 4, 1, True),  ("gelu_tanh", 64, 32, 4, 1, True), ("gelu_tanh", 128, 128, 8, 1, True), ("silu", 64, 64, 4, 1, True), ("relu", 64, 128, 4, 1, True), ("identity", 64, 128, 4, 1, False), ("identity", 128, 128, 8, 1, False)):
        dy = mk(2048, 4096); z = None if act == "identity" else mk(2048, 4096)
        k.host.run = lambda kk, g, t, *s, **h: show(f"dz {act} {bm}x{bn} warps {nw} stages {st}", kk, (*t, *s), h)
        k.host.sum_rows = lambda p, d: p[0]
        k.run_dz_and_narrow(dy, z, mk(2048, 16), mk(4096, 16), 2.0, act, bias, bm, bn, nw, st)
