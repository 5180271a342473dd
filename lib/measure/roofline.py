"""The measured ceilings of a GPU, and the least time for a given amount of traffic and arithmetic.

Roofline model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. A ceiling here is what this GPU was measured to do, not its datasheet peak.
"""

import dataclasses
import functools

from lib import machine
from lib.nogpu import fake_gpu
from lib.recorded import results

import torch
import triton

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """bandwidth_gbps: copy rate, reads plus writes, 1e9 bytes/s; tflops: matrix products by dtype name."""

    bandwidth_gbps: float
    tflops: dict
    where: str

    def attainable_us(self, bytes_moved, flops=0, dtype="float32"):
        """The least time in µs: the slower of moving the bytes and doing the arithmetic."""
        memory_us = bytes_moved / self.bandwidth_gbps / 1e3
        compute_us = flops / self.tflops[dtype] / 1e6
        return max(memory_us, compute_us)

    def ridge(self, dtype="float32"):
        """FLOPs per byte above which a kernel is compute-bound."""
        return self.tflops[dtype] * 1e3 / self.bandwidth_gbps


def measure_copy_gbps(n_bytes=GIB):
    """Device-to-device copy of `n_bytes`, counting bytes read plus bytes written, in GB/s."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * n_bytes / ms / 1e6


def measure_gemm_tflops(dtype, n=8192):
    """An n×n×n matrix product on random data (zeros run faster), in TFLOP/s; float32 means not TF32.

    Measured after 500 ms of products, because the clock starts higher than the GPU can sustain.
    """
    a, b = (torch.randn(n, n, dtype=dtype, device="cuda") for _ in range(2))
    ms = triton.testing.do_bench(lambda: a @ b, warmup=500, return_mode="median")
    return 2 * n**3 / ms / 1e9


@functools.cache
def ceilings():
    """This GPU's Ceilings, measured once a process (two seconds); with no GPU the recorded ones of an H200."""
    if machine.HAS_GPU:
        tflops = {
            str(dtype).removeprefix("torch."): measure_gemm_tflops(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        return Ceilings(measure_copy_gbps(), tflops, "measured here")
    record = results.load("ceilings")
    row = record["rows"][0]
    return Ceilings(row["bandwidth_gbps"], row["tflops"], results.where(record))


def save():
    """Measure this GPU's ceilings and write data/results/<gpu>/ceilings.json."""
    here = ceilings()
    row = {"bandwidth_gbps": round(here.bandwidth_gbps, 1), "tflops": here.tflops}
    return results.save("ceilings", [row], ["lib/measure/roofline.py"])


def draw(ax, rows, dtype="float32"):
    """The roofline of `ceilings()` and its ridge, with one marker for each row.

    A row is a dictionary: version, flops, bytes_moved, time_us.
    """
    top = ceilings()
    ridge, roof, slope = top.ridge(dtype), top.tflops[dtype], top.bandwidth_gbps / 1e3
    left, right = 0.03, 1000
    ax.loglog([left, ridge, right], [left * slope, roof, roof], color="black", linewidth=1.5)
    ax.plot([ridge, ridge], [0, roof], color="black", linestyle=":", linewidth=1)
    for marker, row in zip("osD^vP*X", rows):
        tflops, intensity = row["flops"] / row["time_us"] / 1e6, row["flops"] / row["bytes_moved"]
        ax.plot(intensity, tflops, marker, color="black", fillstyle="none", markersize=9)
        beside = {"xytext": (10, -4), "textcoords": "offset points", "va": "center"}
        ax.annotate(f"{row['version']}, {row['time_us']:,.0f} µs", (intensity, tflops), **beside)
    ax.set(xlabel="arithmetic intensity, FLOPs per byte", ylabel="TFLOP/s")
    ax.set(xlim=(left, right), ylim=(left * slope, 5 * roof))
    ax.text(right / 1.3, roof * 1.3, f"{dtype}: {roof:.0f} TFLOP/s", ha="right")
    ax.text(2, 3 * slope, f"copy: {top.bandwidth_gbps:,.0f} GB/s", ha="right")
    ax.text(ridge * 1.15, left * slope * 1.6, f"ridge: {ridge:.1f} FLOPs per byte")
    ax.grid(alpha=0.3)


def draw_copies(ax, rates):
    """Copy rates, {MiB of the buffer: GB/s}, with a line where two such buffers fill L2."""
    gpu = torch.cuda.get_device_properties(0) if machine.HAS_GPU else fake_gpu.H200
    l2 = gpu.L2_cache_size / 2**20
    ax.semilogx([int(mib) for mib in rates], list(rates.values()), "o-", base=2, color="black")
    ax.axvline(l2 / 2, color="black", linestyle="--", linewidth=1)
    label = f" two buffers fill L2: {l2 / 2:.0f} MiB each"
    ax.text(l2 / 2, 0.06, label, transform=ax.get_xaxis_transform())
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set(xlabel="size of the buffer, MiB", ylabel="copy, GB/s", ylim=0)
    ax.grid(alpha=0.3)
