"""The profile by Nsight Compute that notebook 22 reads: data/traces/add_relu_ncu.txt.

    python -m lib.recorded.nsight

writes it anew, on a machine with a GPU whose counters may be read. The kernel is the notebook's own.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import machine
from lib.recorded import notebooks, results

import pandas as pd

PROFILE = results.ROOT / "data" / "traces" / "add_relu_ncu.txt"
LAUNCHES = {  # dtype, n_elements
    "float32, 2**26": ("float32", 2**26),
    "float32, 2**26 - 1": ("float32", 2**26 - 1),
    "bfloat16, 2**26": ("bfloat16", 2**26),
    "bfloat16, 2**26 - 1": ("bfloat16", 2**26 - 1),
}
_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "smsp__sass_inst_executed_op_global_ld.sum": "load instructions, millions",
    "l1tex__t_sector_hit_rate.pct": "sectors found in L1, %",
    "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum": "sectors read from L2, millions",
    "l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_st.sum": "sectors written to L2, millions",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 at work, %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM at work, %",
    _STALLED.format("long_scoreboard"): "a warp waits for data, cycles an instruction",
    _STALLED.format("lg_throttle"): "a warp waits to ask for data, cycles an instruction",
    "gpu__time_duration.sum": "time, µs",
}
_SCRIPT = """import torch
import triton
import triton.language as tl


{kernel}

for dtype, n in {launches}:
    x, residual, y = (torch.randn(n, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    add_relu_kernel[(triton.cdiv(n, 1024),)](x, residual, y, n, BLOCK_SIZE=1024)
    torch.cuda.synchronize()
"""


def kernel():
    """The source of notebook 22's `add_relu_kernel`."""
    (path,) = notebooks.notebooks(22)
    pieces = results.code_in(path, path.read_text())
    (cell,) = (piece for piece in pieces if "def add_relu_kernel" in piece)
    return cell[cell.index("@triton.jit") :]


def read(text):
    """A table of METRICS, a column for each of LAUNCHES, from what `ncu --metrics` prints."""
    table = pd.DataFrame({"counter": METRICS.values()})
    for launch, page in zip(LAUNCHES, _pages(text), strict=True):
        values = dict(re.findall(r"^ *(\w+__[\w.]+) +\S* +([\d.,]+) *$", page, re.M))
        table[launch] = [float(values[metric].replace(",", "")) for metric in METRICS]
    table.loc[table["counter"].str.endswith("millions"), list(LAUNCHES)] /= 1e6
    return table


def section(text, title, launch):
    """One section of the page of one of LAUNCHES, its metrics without the advice below them."""
    page = _pages(text)[list(LAUNCHES).index(launch)]
    lines = page[page.index(f"Section: {title}") :].splitlines()
    ends = [i for i, line in enumerate(lines) if set(line.strip()) == set("- ")]
    return "\n".join(line.removeprefix("    ") for line in lines[: ends[2] + 1])


def _pages(text):
    return text.split("\n  add_relu_kernel ")[1:]


def record():
    """Run the script under ncu; save what it prints, this machine's stamp and the kernel's hash."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "add_relu.py")
        script.write_text(_SCRIPT.format(kernel=kernel(), launches=[*LAUNCHES.values()]))
        command = ["ncu", "--set", "full", "--metrics", ",".join(METRICS), "-k", "add_relu_kernel"]
        command += ["--clock-control", "none", sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    stamp = machine.stamp()
    header = f"# {stamp.line()} · driver {stamp.driver} · code {results.code_hash([kernel()])}\n"
    pages = done.stdout[done.stdout.index("\n  add_relu_kernel ") :]
    PROFILE.write_text(header + "\n".join(line.rstrip() for line in pages.splitlines()) + "\n")


if __name__ == "__main__":
    record()
