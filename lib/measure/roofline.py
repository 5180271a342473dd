"""The measured ceilings of a GPU, and the least time for a given amount of traffic and arithmetic.

Roofline model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. A ceiling here is what this GPU was measured to do, not its datasheet peak.
"""

import dataclasses
import functools

from lib import machine
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
    """This GPU's Ceilings, measured once a process (two seconds); with no GPU the recorded ones of an H200.

    Returns None when there is no GPU and nothing was recorded yet.
    """
    if machine.HAS_GPU:
        tflops = {
            str(dtype).removeprefix("torch."): measure_gemm_tflops(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        return Ceilings(measure_copy_gbps(), tflops, "measured here")
    record = results.load("ceilings")
    if record is None:
        return None
    row = record["rows"][0]
    return Ceilings(row["bandwidth_gbps"], row["tflops"], results.where(record))


def save():
    """Measure this GPU's ceilings and write data/results/<gpu>/ceilings.json."""
    here = ceilings()
    row = {"bandwidth_gbps": round(here.bandwidth_gbps, 1), "tflops": here.tflops}
    return results.save("ceilings", [row], ["lib/measure/roofline.py"])


def plot(points, dtype="float32", ax=None):
    """The roofline of `ceilings()` with one marker for each (label, flops, bytes_moved, time_us) of points."""
    import matplotlib.pyplot as plt
    import numpy as np

    top = ceilings()
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if top is None:
        ax.set_title(results.NOT_RECORDED)
        return ax
    intensity = np.logspace(-2, 4, 200)
    roof = np.minimum(intensity * top.bandwidth_gbps / 1e3, top.tflops[dtype])
    ax.loglog(intensity, roof, color="black", linewidth=1.5)
    ax.annotate(
        f"{top.bandwidth_gbps:.0f} GB/s", (0.03, 0.03 * top.bandwidth_gbps / 1e3), rotation=32,
        xytext=(-4, 12), textcoords="offset points",
    )  # fmt: skip
    ax.annotate(
        f"{top.tflops[dtype]:.0f} TFLOP/s ({dtype})", (1e3, top.tflops[dtype] * 1.25), ha="center"
    )
    for marker, (label, flops, bytes_moved, time_us) in zip("osD^vP*X", points):
        ax.plot(
            flops / bytes_moved, flops / time_us / 1e6, marker, markersize=8, label=label, alpha=0.8
        )
    ax.set(
        xlabel="arithmetic intensity, FLOPs per byte",
        ylabel="TFLOP/s",
        title=f"Roofline, {top.where}",
    )
    ax.grid(True, which="major", alpha=0.3)
    if points:
        ax.legend(loc="lower right", fontsize="small")
    return ax
