"""What reading 30 MB takes, by kernels that only read: GPU time alone, L2 flushed."""
import torch, triton, triton.language as tl
from lib.measure import bench
@triton.jit
def read(x_ptr, y_ptr, n, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(TIMES):
        at = (tl.program_id(0) * TIMES + i) * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(x_ptr + at, mask=at < n, other=0)
    s = tl.sum(total, 0)
    tl.store(y_ptr + tl.program_id(0), s, mask=s == 123456789)
@triton.jit
def empty(x_ptr):
    pass
y = torch.zeros(1 << 20, device="cuda", dtype=torch.int32)
print("empty kernel", bench.gpu_us(lambda: empty[(1,)](y)))
for mb in (14336 * 512 * 4, 14336 * 4096, 2 * 14336 * 4096):
    x = torch.randint(0, 99, (mb // 4,), device="cuda", dtype=torch.int32); n = x.numel()
    rows = []
    for block, times, w in ((1024, 1, 4), (1024, 2, 4), (1024, 4, 4), (2048, 2, 4), (2048, 4, 4), (4096, 1, 8), (4096, 4, 8), (512, 4, 1), (512, 8, 1), (2048, 8, 4)):
        rows.append((bench.gpu_us(lambda: read[(triton.cdiv(n, block * times),)](x, y, n, BLOCK=block, TIMES=times, num_warps=w)), block, times, w))
    print(mb / 1e6, "MB", [(round(a, 1), *b) for a, *b in sorted(rows)][:5], "copy of half", bench.gpu_us(lambda: x[: n // 2].copy_(x[n // 2 :])), "sum", bench.gpu_us(lambda: x.sum()))
