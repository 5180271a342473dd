"""How the course's tables and plots look: one style, alt text, readable without colour."""

import base64
import inspect
import io

import matplotlib.pyplot as plt
from IPython.display import Markdown, display
from PIL import Image

_FORMATS = {
    "time_us": "{:,.1f}",
    "p20_us": "{:,.1f}",
    "p80_us": "{:,.1f}",
    "launches": "{:.0f}",
    "bytes_moved": "{:,.0f}",
    "bandwidth_gbps": "{:,.0f}",
    "ceiling_pct": "{:.1f}",
    "peak_mib": "{:,.0f}",
    "error_vs_float64": "{:.1e}",
}


def show_ladder(table):
    """Display a ladder (lib.bench.ladder) as a table and a plot of time against the ceiling."""
    shown = table.drop(columns=[c for c in ("note",) if not table[c].fillna("").any()])
    formats = {c: f for c, f in _FORMATS.items() if c in shown}
    style = shown.style.format(formats, na_rep="–").hide(axis="index")
    display(style.set_caption(table.attrs.get("caption", "")))
    if table["time_us"].notna().any():
        figure = plot_ladder(table)
        show_figure(figure, _alt_text(table))


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
    ax.bar_label(bars, percent, fontsize="small")
    limit = rows["time_us"].iloc[0] * rows["ceiling_pct"].iloc[0] / 100
    ax.axvline(limit, color="black", linestyle="--", linewidth=1)
    ax.set(xlabel="time, µs (dashed: the ceiling)", xlim=(0, rows["time_us"].max() * 1.35))
    ax.set_title(table.attrs.get("caption", ""), fontsize="medium")
    return figure


def _alt_text(table):
    rows = table[table["time_us"].notna()]
    bars = "; ".join(
        f"{r.version} {r.time_us:.0f} µs, {r.ceiling_pct:.0f} % of the ceiling, {r.where}"
        for r in rows.itertuples()
    )
    return f"Bar chart, {table.attrs.get('caption', '')}: {bars}."


def show_figure(figure, alt):
    """Display a matplotlib figure as a PNG with alt text, which also stands in for it as text, and close it."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    plt.close(figure)
    # 32 colours are enough for a plot, and a third of the bytes
    Image.open(drawn).convert("RGB").quantize(32).save(buffer, format="png", optimize=True)
    image = base64.b64encode(buffer.getvalue()).decode()
    bundle = {"image/png": image, "text/plain": alt}
    display(bundle, metadata={"image/png": {"alt": alt}}, raw=True)


def show_source(thing, language="python"):
    """Display the source of a function, kernel or class, or a string of code, highlighted."""
    thing = getattr(thing, "fn", thing)  # a @triton.jit kernel wraps its function
    text = thing if isinstance(thing, str) else inspect.getsource(thing)
    # Markdown rather than highlighted HTML: a tenth of the bytes in the notebook, and it follows the theme
    fence = "\n".join([f"```{language}", text.strip("\n"), "```"])
    display(Markdown(fence))
