"""Candidates for few rows of quantized_linear (int4, group 128): µs of GPU time alone, L2 flushed."""
import itertools, sys, time
from lib import machine
from lib.ops import quantized_linear as Q
from lib.ops import _device as device
import torch, triton, triton.language as tl

@triton.jit
def gemv(x_ptr, packed_ptr, scales_ptr, zeros_ptr, y_ptr, n_rows, n_cols, n_inner, stride_xm, stride_pn, magic,
         M: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    W: tl.constexpr = GROUP // 8
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    j = tl.arange(0, GROUPS * W)
    half = (j // W) * (GROUP // 2) + j % W   # place of quarter 0's pair, in pairs
    fours = tl.arange(0, GROUPS * W // 4) * 4 // W
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32))
    accs = ()
    for m in tl.static_range(M):
        accs = accs + (tl.zeros((BLOCK_N, GROUPS * W // 4), tl.float32),)
    for start in range(0, n_inner // GROUP, GROUPS):
        there = (start + j // W) < n_inner // GROUP
        words = tl.load(packed_ptr + cols[:, None] * stride_pn + (start * W + j)[None, :],
                        mask=col_mask[:, None] & there[None, :], other=0)
        group = start + fours
        mask = col_mask[:, None] & (group < n_inner // GROUP)[None, :]
        at = group.to(tl.int64)[None, :] * n_cols + cols[:, None]
        scale = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
        parts = ()
        sums = ()
        for m in tl.static_range(M):
            parts = parts + (tl.zeros((BLOCK_N, GROUPS * W), tl.float32),)
            sums = sums + (tl.zeros((GROUPS * W,), tl.float32),)
        for i in tl.static_range(4):
            bits = ((words >> (4 * i)) & 0x000F000F) | magic
            low = (bits << 16).to(tl.float32, bitcast=True)
            high = (bits & -65536).to(tl.float32, bitcast=True)
            new = ()
            more = ()
            for m in tl.static_range(M):
                xw = tl.load(x_ptr + m * (stride_xm // 2) + start * (GROUP // 2) + half + i * W, mask=there & (m < n_rows), other=0)
                xl = (xw << 16).to(tl.float32, bitcast=True)
                xh = (xw & -65536).to(tl.float32, bitcast=True)
                new = new + (parts[m] + low * xl[None, :] + high * xh[None, :],)
                more = more + (sums[m] + (xl + xh),)
            parts = new
            sums = more
        new = ()
        for m in tl.static_range(M):
            four = tl.sum(tl.reshape(parts[m], (BLOCK_N, GROUPS * W // 4, 4)), 2)
            less = 136.0 * tl.sum(tl.reshape(sums[m], (GROUPS * W // 4, 4)), 1)
            new = new + (accs[m] + (four - less[None, :]) * scale,)
        accs = new
    for m in tl.static_range(M):
        if m < n_rows:
            tl.store(y_ptr + m * n_cols + cols, tl.sum(accs[m], 1).to(y_ptr.dtype.element_ty), mask=col_mask)

@triton.jit
def dots(x_ptr, packed_ptr, scales_ptr, zeros_ptr, y_ptr, n_rows, n_cols, n_inner, stride_xm, stride_pn, steps_per_part,
         GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GPS: tl.constexpr, TURNED: tl.constexpr):
    W: tl.constexpr = GROUP // 8
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < n_cols
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < n_rows)[:, None]
    start = tl.program_id(1) * steps_per_part
    BK: tl.constexpr = GROUP * GPS
    x_ptrs = x_ptr + rows[:, None] * stride_xm + start * BK + tl.arange(0, BK)[None, :]
    p_ptrs = packed_ptr + cols[:, None] * stride_pn + start * (BK // 8) + tl.arange(0, BK // 8)[None, :]
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M) if TURNED else (BLOCK_M, BLOCK_N), tl.float32)
    for step in range(start, tl.minimum(start + steps_per_part, n_inner // BK)):
        x = tl.load(x_ptrs, mask=row_mask, other=0.0)
        words = tl.load(p_ptrs, mask=col_mask[:, None], other=0)
        groups = step * GPS + tl.arange(0, GPS)
        scale = tl.load(scales_ptr + groups.to(tl.int64)[None, :] * n_cols + cols[:, None], mask=col_mask[:, None], other=0.0)
        q = ()
        for i in tl.static_range(4):
            q = q + (Q._quarter(words, i, None, DTYPE),)
        n = tl.join(tl.join(q[0], q[2]), tl.join(q[1], q[3]))   # (N, 2·words, i//... ) 
        n = tl.reshape(n, (BLOCK_N, GPS, 2 * W, 2, 2))
        n = tl.permute(n, (0, 1, 3, 4, 2)) if False else tl.permute(n, (0, 1, 4, 3, 2)) if False else tl.permute(n, (0, 1, 3, 4, 2))
        n = tl.reshape(n, (BLOCK_N, GPS, GROUP))
        w = tl.reshape((n * scale.to(DTYPE)[:, :, None]).to(DTYPE), (BLOCK_N, BK))
        if TURNED:
            total = tl.dot(w, x.T, total)
        else:
            total = tl.dot(x, w.T, total)
        x_ptrs += BK
        p_ptrs += BK // 8
    if TURNED:
        total = total.T
    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=row_mask & col_mask[None, :])

def run_gemv(x, w, m, block_n, groups, warps):
    y = x.new_empty(x.shape[0], w.scales.shape[1])
    gemv[(triton.cdiv(y.shape[1], block_n),)](x, w.packed, w.scales, None, y, x.shape[0], y.shape[1], x.shape[1], x.stride(0), w.packed.stride(0), 0x43004300,
        M=m, GROUP=w.group, BLOCK_N=block_n, GROUPS=groups, num_warps=warps)
    return y

def run_dots(x, w, block_n, gps, warps, stages, parts, turned):
    n_steps = x.shape[1] // (128 * gps)
    spp = triton.cdiv(n_steps, parts); parts = triton.cdiv(n_steps, spp)
    y = x.new_empty(x.shape[0], w.scales.shape[1])
    out = y if parts == 1 else torch.empty((parts, *y.shape), device=x.device)
    dots[(triton.cdiv(y.shape[1], block_n), parts)](x, w.packed, w.scales, None, out, x.shape[0], y.shape[1], x.shape[1], x.stride(0), w.packed.stride(0), spp,
        GROUP=w.group, BLOCK_M=16, BLOCK_N=block_n, GPS=gps, TURNED=turned, num_warps=warps, num_stages=stages)
    if parts > 1:
        Q._sum_parts_kernel[(triton.cdiv(y.numel(), 512),)](out, None, y, None, y.numel(), y.shape[1], parts, ACTIVATION="identity", BLOCK_SIZE=512, num_warps=4)
    return y

def error(y, x, w):
    want = x.double() @ Q.dequantize(w).double().t()
    return ((y.double() - want).abs().max() / want.abs().max()).item()

def main(limit):
    from lib.measure import bench
    t0, K, N = time.time(), 4096, 14336
    full = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / 64
    w = Q.quantize(full)
    best = []
    for m in (1, 16, 4):
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        ways = {"now": lambda: Q.quantized_linear_triton(x, *w)}
        if m <= 4:
            for bn, g, nw in ((8, 8, 4), (16, 8, 4), (4, 32, 4), (8, 32, 4), (8, 16, 4), (2, 32, 2), (4, 32, 2), (4, 8, 2), (16, 32, 8), (16, 8, 8), (4, 16, 1), (8, 8, 1), (4, 8, 4), (2, 32, 1)):
                ways[f"gemv n{bn} g{g} w{nw}"] = lambda bn=bn, g=g, nw=nw: run_gemv(x, w, m, bn, g, nw)
        for turned, bn, gps, nw, st, parts in ((0, 128, 1, 4, 4, 4), (0, 128, 2, 4, 3, 4), (0, 64, 2, 4, 3, 2), (0, 64, 4, 4, 2, 2), (0, 32, 4, 2, 3, 2), (0, 32, 4, 4, 2, 1), (0, 64, 4, 4, 3, 4), (0, 32, 2, 2, 4, 2), (0, 64, 1, 2, 4, 4), (0, 128, 1, 8, 4, 4), (0, 64, 2, 8, 3, 2),
                                      (1, 128, 1, 4, 4, 4), (1, 64, 2, 4, 3, 2), (1, 64, 4, 4, 2, 2), (1, 64, 4, 4, 3, 4), (1, 64, 1, 4, 6, 4), (1, 128, 2, 8, 3, 4)):
            ways[f"dots {'T ' if turned else ''}n{bn} g{gps} w{nw} s{st} p{parts}"] = lambda a=(bn, gps, nw, st, parts, bool(turned)): run_dots(x, w, *a)
        rows = []
        for name, way in ways.items():
            if time.time() - t0 > limit: print("stop"); break
            try:
                e = error(way(), x, w)
                us = bench.gpu_us(way)
                rows.append((us, name, e))
            except Exception as ex: print(m, name, "FAILED", type(ex).__name__, str(ex)[:120], flush=True)
        for us, name, e in sorted(rows): print(f"m={m} {us:6.1f} us  {name}  error {e:.1e}", flush=True)

if __name__ == "__main__":
    if machine.HAS_GPU: main(float(sys.argv[1]) if len(sys.argv) > 1 else 90)
    else:
        w = Q.quantize(torch.randn(70, 1024).bfloat16())
        for m in (1, 3):
            x = torch.randn(m, 1024).bfloat16()
            print(error(Q.quantized_linear_triton(x, *w), x, w), error(run_gemv(x, w, 4, 8, 4, 4), x, w), error(run_dots(x, w, 32, 2, 4, 2, 2, False), x, w), error(run_dots(x, w, 64, 1, 4, 2, 3, True), x, w))
