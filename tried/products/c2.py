from compile import *
B = torch.bfloat16
def mk(*s, dtype=B): return torch.empty(s, dtype=dtype)
a, b, y = mk(1024, 512), mk(512, 2048), mk(1024, 2048)
bt = mk(2048, 512).t()
real = k.persistent
for nt, bb in (("NN", b), ("NT", bt)):
    for label, how in {
        "4 warps, roles": {"roles": True, "num_warps": 4},
        "4 warps, roles, flatten": {"roles": True, "num_warps": 4, "flatten": True},
        "4 warps, roles, 128x128": {"roles": True, "num_warps": 4, "tile": (128, 128, 64), "parts": 1},
        "2 ctas 256x256": {"num_ctas": 2, "tile": (256, 256, 64), "parts": 1},
        "2 ctas 128x256 ": {"num_ctas": 2, "tile": (128, 256, 64), "parts": 1},
        "2 ctas 256x256 flatten": {"num_ctas": 2, "tile": (256, 256, 64), "parts": 1, "flatten": True},
    }.items():
        k.persistent = Catch(f"{nt} {label}", real)
        c = k.run_persistent(a, bb, y, **how)
        if c and "ctas" in label:
            import re
            print("   multicast" if "multicast" in c.ptx else "   no multicast", "cluster" in c.ptx, c.ttgir.count("convert_layout"), re.findall(r"#shared\d* = .*", c.ttgir)[:3])
