"""How the course's tables and plots look: one style, alt text, readable without colour."""

import base64
import html
import inspect
import io

from lib import machine
from lib.nogpu import cuda
from lib.recorded import results

import matplotlib.pyplot as plt
import pandas as pd
from IPython import get_ipython
from IPython.display import Markdown, display
from PIL import Image

_HEADINGS = {
    "version": "version",
    "where": "where",
    "time_us": "time, µs",
    "p20_us": "p20–p80",
    "gpu_us": "GPU alone, µs",
    "host_us": "host, µs",
    "launches": "launches",
    "bandwidth_gbps": "GB/s",
    "tflops": "TFLOP/s",
    "ceiling_pct": "% of ceiling",
    "peak_mib": "peak MiB",
    "error_vs_float64": "error",
    "note": "note",
}
_FORMATS = {
    "time, µs": "{:,.1f}",
    "GPU alone, µs": "{:,.1f}",
    "host, µs": "{:,.1f}",
    "launches": "{:.0f}",
    "GB/s": "{:,.0f}",
    "TFLOP/s": "{:,.1f}",
    "% of ceiling": "{:.1f}",
    "peak MiB": "{:,.0f}",
    "error": "{:.1e}",
}


def show_ladder(table):
    """Display a ladder (lib.measure.bench.ladder) as a table and a plot of time against the ceiling."""
    ladder = table.rename(columns=_HEADINGS)
    ladder["p20–p80"] = [_range(r.p20_us, r.p80_us) for r in table.itertuples()]
    # show the rate that sets the limit, the host's time where measured, and notes where there are any
    hidden = {"GB/s" if "flops" in table.attrs else "TFLOP/s"}
    hidden |= {_HEADINGS[c] for c in ("gpu_us", "host_us") if table[c].isna().all()}
    hidden |= set() if table["note"].fillna("").any() else {"note"}
    ladder = ladder[[c for c in _HEADINGS.values() if c not in hidden]]
    formats = {c: _FORMATS.get(c) for c in ladder}  # None: as it is, escaped
    style = style_table(ladder).format(formats, na_rep="–", escape="html")
    style = style.set_properties(**{"white-space": "nowrap"})
    display(style.set_caption(_caption(table)))
    if table["time_us"].notna().any():
        show_figure(plot_ladder(table), _alt_text(table))


def _range(low, high):
    return "–" if low != low else f"{low:,.1f}–{high:,.1f}"  # NaN is not equal to itself


def _caption(table):
    least = table["bytes_moved"].max()
    needs = f"; it has to move {least / 1e9:,.3g} GB" if least == least else ""
    if "flops" in table.attrs:
        needs = f"; it has to do {table.attrs['flops'] / 1e12:,.3g} TFLOP"
    return f"{table.attrs.get('caption', '')}{needs}"


def plot_ladder(table):
    """Horizontal bars, one per row with a time: µs, % of the ceiling beside it, hatched when recorded."""
    rows = table[table["time_us"].notna()].iloc[::-1]
    figure, ax = plt.subplots(figsize=(7.5, 0.8 + 0.42 * len(rows)), layout="constrained")
    recorded = ["recorded" in where for where in rows["where"]]
    bars = ax.barh(
        [f"{v} · {'recorded' if r else 'here'}" for v, r in zip(rows["version"], recorded)],
        rows["time_us"],
        color=["#b9c9dd" if r else "#1f4e79" for r in recorded],
        edgecolor="black",
        hatch=["//" if r else "" for r in recorded],
    )
    percent = [
        f" {t:,.0f} µs, {p:.0f} % of ceiling" for t, p in zip(rows["time_us"], rows["ceiling_pct"])
    ]
    over_the_line = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for label in ax.bar_label(bars, percent, padding=2, fontsize="small"):
        label.set_bbox(over_the_line)
    limit = rows["time_us"].iloc[0] * rows["ceiling_pct"].iloc[0] / 100
    ax.axvline(limit, color="black", linestyle="--", linewidth=1)
    fastest, slowest = rows["time_us"].min(), rows["time_us"].max()
    if slowest > 20 * fastest:  # else most bars would have no length
        ax.set(xscale="log", xlim=(fastest / 4, slowest * 12))
    else:
        ax.set(xlim=(0, slowest * 1.45))
    ax.set_xlabel("time, µs (dashed: the ceiling)")
    figure.suptitle(table.attrs.get("caption", ""), fontsize="medium")  # wider than the axes
    return figure


def _alt_text(table):
    rows = table[table["time_us"].notna()]
    bars = "; ".join(
        f"{r.version} {r.time_us:.0f} µs, {r.ceiling_pct:.0f} % of the ceiling, {r.where}"
        for r in rows.itertuples()
    )
    return f"Bar chart, {table.attrs.get('caption', '')}: {bars}."


def show_figure(figure, alt):
    """Display a matplotlib figure as a PNG with alt text, which is also its plain text, and close it.

    None means that there is nothing to draw yet; a line says so.
    """
    if figure is None:
        print(f"○ Nothing to draw yet. To come: {alt}")
        return
    raw, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=160)
    plt.close(figure)
    # 32 colours are enough for a plot, and a third of the bytes
    picture = Image.open(raw).convert("RGB").quantize(32)
    picture.save(buffer, format="png", optimize=True)
    image = base64.b64encode(buffer.getvalue()).decode()
    bundle = {"image/png": image, "text/plain": alt}
    size = {"width": picture.width // 2, "height": picture.height // 2}  # sharp on a dense screen
    display(bundle, metadata={"image/png": {"alt": alt, **size}}, raw=True)


def show_source(thing, language="python", summary=None):
    """Display the source of a function, kernel or class, or a string of code, folded if it has a summary."""
    thing = getattr(thing, "fn", thing)  # a @triton.jit kernel wraps its function
    text = thing if isinstance(thing, str) else inspect.getsource(thing)
    # Markdown rather than highlighted HTML: a tenth of the bytes in the notebook, and it follows the theme.
    # The div sets the font for nbconvert's pages, where code in an output inherits the font around it.
    lines = [
        '<div style="font-family: monospace">',
        "",
        f"```{language}",
        text.strip("\n"),
        "```",
        "",
        "</div>",
    ]
    if summary is not None:
        lines = [f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"]
    display(Markdown("\n".join(lines)))


def show_plot(measurement, draw, alt, title=""):
    """Display `draw(ax, value)` for a results.Measurement with its origin, or say that there is none yet."""
    figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    if measurement.value is None:
        figure.set_size_inches(7.5, 1.2)
        ax.text(0.5, 0.5, results.NOT_RECORDED, ha="center", va="center", fontsize="large")
        ax.set(xticks=[], yticks=[])
        alt = f"An empty frame: {results.NOT_RECORDED}. To come: {alt}"
    else:
        draw(ax, measurement.value)
        alt = f"{alt} {measurement.where}."
        title = f"{title}, {measurement.where}"
    ax.set_title(title, fontsize="medium")
    show_figure(figure, alt)


def table_of(measurement, note=""):
    """A results.Measurement of a list of rows (dictionaries) as a table with its origin as caption."""
    if measurement.value is None:
        return style_table(pd.DataFrame({note or "GPU numbers": [results.NOT_RECORDED]}))
    caption = " · ".join(part for part in (note, measurement.where) if part)
    return style_table(pd.DataFrame(measurement.value)).set_caption(caption)


def style_table(table):
    """A table in the course's style: one decimal, text to the left, no index."""
    words = list(table.select_dtypes(exclude="number").columns)
    left = {word: [{"selector": "th.col_heading", "props": "text-align: left"}] for word in words}
    style = table.style.format(precision=1, thousands=",", na_rep="–", escape="html").hide()
    texts = [word for word in words if all(isinstance(v, str) for v in table[word])]
    style = style.format(_breakable, subset=texts)
    style = style.set_properties(subset=words, **{"text-align": "left"})
    caption = {"selector": "caption", "props": "white-space: nowrap; text-align: left"}
    return style.set_table_styles(left).set_table_styles([caption], overwrite=False)


def _breakable(text):
    """As HTML. cuBLAS's names have 120 characters: they may break, or the columns behind leave the page."""
    escaped = html.escape(text)
    return escaped.replace("_", "_<wbr>") if len(text) > 60 else escaped


def describe():
    """A table for a notebook's first cell: this machine, and how each part of the course runs on it.

    From then on the NameError of a cell that is run too early says what to run first.
    """
    if shell := get_ipython():
        shell.set_custom_exc((NameError,), _show_name_error)
    here, has_gpu = machine.stamp(), machine.HAS_GPU
    rows = {
        "GPU": f"{here.gpu}, driver {here.driver}" if has_gpu else "none found",
        "torch, triton": f"{here.torch}, {here.triton}{_odd_pair(here.triton)}",
    }
    if machine.gpu_is_too_old():
        rows["kernels"] = (
            "may fail: this GPU is older than compute capability {}.{}. Start Jupyter "
            "with CUDA_VISIBLE_DEVICES= in its environment, and everything runs as with no GPU"
        ).format(*machine.OLDEST_GPU)
    else:
        rows |= _parts(has_gpu)
    return style_table(pd.DataFrame(rows.items(), columns=["", "this machine"]))


def _odd_pair(triton_version):
    """What to say of a triton that this torch is not released with."""
    partner = machine.partner_of_torch()
    if partner is None or triton_version.startswith(f"{partner}."):
        return ""
    return (
        f"; this torch is released with triton {partner}, and torch.compile may fail with another"
    )


def _parts(has_gpu):
    missing = cuda.why_no_cuda()
    return {
        "Triton kernels": "compiled"
        if has_gpu
        else "interpreted on the CPU, loads and stores checked",
        "CUDA kernels": missing
        or ("compiled by nvcc" if has_gpu else "compiled by g++ for the CPU, with a checker"),
        "torch.compile": "compiled for this GPU"
        if has_gpu
        else "the Triton code it writes for an H200 is shown; times are recorded ones",
        "times in tables": "measured here" if has_gpu else "recorded on an NVIDIA H200",
    }


def _show_name_error(shell, kind, error, traceback, tb_offset=None):
    """IPython's handler for a NameError: the usual traceback, and a line on what to run."""
    if kind is NameError and error.name:  # not UnboundLocalError, which is a bug in a function
        error.add_note(
            f"`{error.name}` is not defined yet: run the cells above this one "
            "(Run > Run All Above Selected Cell), or look for a typing mistake."
        )
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
