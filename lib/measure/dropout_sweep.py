"""bias_gelu_dropout_add over sizes × p × dtype: check each case on this GPU, then time it, save CSV and JSON.

Check     y is the residual where an element is dropped, elsewhere the residual plus gelu(x + bias) / (1 - p),
          by float64; and p of the elements are dropped, within six standard deviations. It holds for any
          seed, so eager and compiled are checked as they are timed, drawing their own. What fails is not timed.
Method    lib.measure.bench.time_us: L2 flushed before each run, the median in µs.
Saved     data/results/<gpu>/dropout_sweep.json (with stamp and source hash) and .csv (first line: the stamp).

    python -m lib.measure.dropout_sweep [--quick] [--versions triton eager compiled]
"""

import argparse
import itertools

from lib import machine
from lib.measure import bench, roofline
from lib.measure.check import CheckError
from lib.ops.bias_gelu_dropout_add import bias_gelu_dropout_add_eager, bias_gelu_dropout_add_triton
from lib.recorded import results

import pandas as pd
import torch
import torch.nn.functional as F
from tqdm import tqdm

NAME = "dropout_sweep"
SOURCES = ("lib/ops/bias_gelu_dropout_add.py", "lib/measure/dropout_sweep.py")
SHAPES = ((64, 4096), (1024, 4096), (16384, 4096), (32768, 8192))
SHARES = (0.0, 0.1, 0.5, 0.9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VERSIONS = ("triton", "eager", "compiled")
COMPILED_P = 0.1  # the one p for torch.compile: it stands as a constant in the code, and each p compiles anew
_MARKERS = {"triton": "o-", "compiled": "s--", "eager": "^:"}
_SIGMAS = 6


def inputs(shape, dtype, device):
    """x, bias and residual, (M, N), (N,) and (M, N), that need gradients. None of the results is near zero."""
    generator = torch.Generator(device=device).manual_seed(0)

    def between_1_and_2(*size):
        u = torch.rand(size, dtype=torch.float32, device=device, generator=generator)
        return (1 + u).to(dtype).requires_grad_()

    return between_1_and_2(*shape), between_1_and_2(shape[-1]), between_1_and_2(*shape)


def check_version(version, x, bias, residual, p):
    """The largest error of version(x, bias, residual, p) against float64, over dropped and kept elements alike.

    Raises CheckError where an element is neither dropped nor kept, or where too many or too few are dropped.
    """
    y = version(x, bias, residual, p).detach().double()
    residual = residual.detach().double()
    value = F.gelu((x + bias).detach().double(), approximate="tanh") / (1 - p)
    dropped = (y - residual).abs() < (y - residual - value).abs()
    error = (y - residual - torch.where(dropped, 0.0, value)).abs().max().item()
    # 1/65536: the op rounds p, and with it the scale; 4 roundings of numbers below 2 + 4 / (1 - p)
    size = 2 + 4 / (1 - p)
    allowed = size * (4 * torch.finfo(x.dtype).eps + 1 / 65536 / (1 - p))
    if not error <= allowed:
        raise CheckError(f"an element is off by {error:.2e}, allowed are {allowed:.2e}")
    share, deviation = dropped.double().mean().item(), (p * (1 - p) / x.numel()) ** 0.5
    if abs(share - p) > _SIGMAS * deviation + 1 / 65536:
        raise CheckError(f"{share:.6f} of the elements are dropped, p is {p}")
    return error


def cases(quick=False):
    """(shape, p, dtype) of the sweep; quick: the smallest shape alone."""
    return list(itertools.product(SHAPES[:1] if quick else SHAPES, SHARES, DTYPES))


def run(quick=False, versions=VERSIONS):
    """All rows (dictionaries), two per case and version: forward, forward and backward. Needs a GPU."""
    functions = {
        "triton": bias_gelu_dropout_add_triton,
        "eager": bias_gelu_dropout_add_eager,
        "compiled": torch.compile(bias_gelu_dropout_add_eager, dynamic=False),
    }
    rows = []
    with tqdm(cases(quick), unit="case", desc="sweep") as progress:
        for shape, p, dtype in progress:
            progress.set_postfix_str(f"{shape[0]}×{shape[1]} p={p} {bench.dtype_name(dtype)}")
            for name in versions:
                if name == "compiled" and p != COMPILED_P:
                    continue
                rows += _measure(name, functions[name], shape, p, dtype)
    return rows


def _measure(name, function, shape, p, dtype):
    x, bias, residual = tensors = inputs(shape, dtype, machine.device())
    itemsize, n = x.element_size(), x.numel()
    case = {"rows": shape[0], "columns": shape[1], "p": p, "dtype": bench.dtype_name(dtype)}
    case["version"] = name
    rows = []
    with bench.really_compiled():
        try:
            error = check_version(function, *tensors, p)
        except CheckError as difference:
            return [{**case, "pass": "forward", "note": f"✘ not timed: {difference}"}]
        for gradients in (False, True):
            call = bench.call_of(lambda x, b, r: function(x, b, r, p), tensors, gradients)
            timing = bench.time_us(call, rep_ms=50)
            least = (6 if gradients else 3) * n * itemsize
            rows.append(
                {
                    **case,
                    "pass": "forward and backward" if gradients else "forward",
                    "time_us": round(timing.median_us, 2),
                    "bandwidth_gbps": round(least / timing.median_us / 1e3, 1),
                    "ceiling_pct": round(
                        100 * roofline.ceilings().attainable_us(least) / timing.median_us, 1
                    ),
                    "error_vs_float64": error,
                    "note": "",
                }
            )
    return rows


def save(rows, folder=None):
    """Write rows as JSON and CSV into the folder of this GPU; returns both paths."""
    path = results.save(NAME, rows, SOURCES, folder)
    table = path.with_suffix(".csv")
    table.write_text(f"# {machine.stamp().line()}\n" + pd.DataFrame(rows).to_csv(index=False))
    return path, table


def recorded():
    """The rows recorded on this GPU, else those of an H200, as a results.Measurement; its value may be None."""
    record = (machine.HAS_GPU and results.load(NAME, results.gpu_slug())) or results.load(NAME)
    if record is None:
        return results.Measurement(None, results.NOT_RECORDED)
    old = ", before the code last changed" if results.is_stale(record) else ""
    return results.Measurement(record["rows"], results.where(record) + old)


def plot(
    ax, rows, x="elements", dtype="bfloat16", direction="forward", p=COMPILED_P, shape=SHAPES[-1]
):
    """Share of the copy ceiling over `x`, 'elements' (at one p) or 'p' (at one shape), a line per version."""
    table = pd.DataFrame(rows)
    table = table[(table["dtype"] == dtype) & (table["pass"] == direction)]
    if x == "elements":
        table = table[table["p"] == p].assign(elements=lambda t: t["rows"] * t["columns"])
        ax.set_xscale("log", base=2)
    else:
        table = table[(table["rows"] == shape[0]) & (table["columns"] == shape[1])]
    for version, style in _MARKERS.items():
        part = table[table["version"] == version].sort_values(x)
        if len(part):
            ax.plot(part[x], part["ceiling_pct"], style, label=version)
    ax.axhline(100, color="black", linewidth=0.8, linestyle="--")
    ax.set(xlabel=x, ylabel="% of the ceiling", ylim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return ax


def main(argv=None):
    """Run the sweep on this GPU and save it; says so where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.measure.dropout_sweep", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="the smallest shape, nothing saved")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=VERSIONS)
    options = parser.parse_args(argv)
    if not machine.HAS_GPU:
        raise SystemExit(
            "the sweep needs a GPU, and torch sees none; what was recorded is in data/results"
        )
    print(machine.stamp().line())
    rows = run(options.quick, options.versions)
    print(pd.DataFrame(rows).to_string(index=False, na_rep="–"))
    if not options.quick:
        for path in save(rows):
            print("saved", path.relative_to(results.ROOT))


if __name__ == "__main__":
    main()
