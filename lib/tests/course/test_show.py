"""Tables and figures: what a reader sees when there are numbers, and when there are none yet."""

import base64
import io
import re

from lib import machine
from lib.course import show
from lib.measure import bench
from lib.recorded import results
from lib.recorded.results import ROOT

import matplotlib.pyplot as plt
import nbconvert
import nbformat
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

ROW = {
    "version": "triton",
    "where": "recorded on NVIDIA H200, 2026-11-21",
    "time_us": 505.1,
    "p20_us": 504.5,
    "p80_us": 505.5,
    "launches": 1,
    "bytes_moved": 2_147_483_648,
    "bandwidth_gbps": 4251.0,
    "ceiling_pct": 101.0,
    "peak_mib": 1024.0,
    "error_vs_float64": 2.4e-7,
}


@pytest.fixture
def displayed(monkeypatch):
    """A list of what a cell displays: objects, and (bundle, metadata) of figures."""
    outputs = []
    monkeypatch.setattr(show, "display", lambda thing, **kw: outputs.append((thing, kw)))
    return outputs


def ladder(*rows):
    table = pd.DataFrame(rows).reindex(columns=bench.COLUMNS)
    table.attrs["caption"] = "an op"
    return table


def test_a_ladder_is_a_table_and_a_plot_that_say_where_numbers_come_from(displayed):
    show.show_ladder(ladder(ROW, {**ROW, "where": "measured here", "version": "eager"}))
    (table, _), (figure, extra) = displayed
    html = table.to_html()
    assert "recorded on NVIDIA H200" in html and "measured here" in html
    assert "504.5–505.5" in html and "2.4e-07" in html and "2.15 GB" in html
    assert "recorded on NVIDIA H200" in extra["metadata"]["image/png"]["alt"]
    assert figure["text/plain"] == extra["metadata"]["image/png"]["alt"]


def test_a_ladder_shows_the_rate_that_sets_its_limit(displayed):
    rows = {**ROW, "tflops": 612.3}
    show.show_ladder(ladder(rows))
    compute_bound = ladder(rows)
    compute_bound.attrs["flops"] = 1.1e12
    show.show_ladder(compute_bound)
    memory, compute = [output.to_html() for output, _ in displayed if hasattr(output, "to_html")]
    assert "GB/s" in memory and "TFLOP" not in memory
    assert "612.3" in compute and "1.1 TFLOP" in compute and "GB/s" not in compute


@pytest.mark.parametrize(("slowest_us", "scale"), [(1000.0, "linear"), (20_000.0, "log")])
def test_an_axis_on_which_every_bar_has_a_length(slowest_us, scale):
    slow = {**ROW, "version": "naive", "time_us": slowest_us}
    (ax,) = show.plot_ladder(ladder(ROW, slow)).axes
    assert ax.get_xscale() == scale
    assert ax.get_xlim()[0] < ROW["time_us"] and ax.get_xlim()[1] > slowest_us


def test_a_ladder_with_no_times_has_no_plot(displayed):
    show.show_ladder(ladder({"version": "eager", "where": results.NOT_RECORDED}))
    assert len(displayed) == 1
    assert "not recorded yet" in displayed[0][0].to_html()


def test_a_note_is_shown_when_there_is_one(displayed):
    show.show_ladder(
        ladder({"version": "wrong", "where": "measured here", "note": "✘ not timed: <why>"})
    )
    assert "✘ not timed: &lt;why&gt;" in displayed[0][0].to_html()


def test_a_plot_with_no_value_yet_says_so(displayed):
    nothing = results.Measurement(None, results.NOT_RECORDED)
    show.show_plot(nothing, lambda ax, value: 1 / 0, "Lines.")
    show.show_plot(results.Measurement([1, 2], "here"), lambda ax, v: ax.plot(v), "Lines.")
    alts = [extra["metadata"]["image/png"]["alt"] for _, extra in displayed]
    assert "not recorded yet" in alts[0]
    assert alts[1] == "Lines. here."
    assert "not recorded yet" in show.table_of(nothing).to_html()


def test_figures_are_closed_and_small(displayed):
    plt.close("all")
    figure, ax = plt.subplots()
    ax.plot(range(100))
    show.show_figure(figure, "a line")
    assert not plt.get_fignums()
    ((bundle, extra),) = displayed
    assert len(bundle["image/png"]) < 40_000
    width, height = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).size
    shown = extra["metadata"]["image/png"]
    assert (width, height) == (2 * shown["width"], 2 * shown["height"])


def test_a_figure_of_nothing_is_a_line(displayed, capsys):
    show.show_figure(None, "Guesses against results.")
    assert not displayed
    assert "To come: Guesses against results." in capsys.readouterr().out


def test_kernel_names_survive_as_html():
    html = show.style_table(pd.DataFrame({"kernel": ["elementwise<Mul>"], "us": [1.25]})).to_html()
    assert "elementwise&lt;Mul&gt;" in html


def test_a_long_name_may_break_so_that_its_table_fits_on_the_page():
    long, short = "sm80_xmma_gemm<f32>" + "_tilesize32x32x8" * 4, "reduce_kernel"
    html = show.style_table(pd.DataFrame({"kernel": [long, short], "us": [1.2, 3.4]})).to_html()
    assert "sm80_<wbr>xmma_<wbr>gemm&lt;f32&gt;_<wbr>tilesize" in html
    assert short in html


def test_a_source_is_highlighted_in_a_font_of_one_width_on_a_page_of_nbconvert(displayed):
    show.show_source("def f():\n    return 1\n")
    ((shown, _),) = displayed
    output = nbformat.v4.new_output("display_data", {"text/markdown": shown.data})
    cell = nbformat.v4.new_code_cell("show_source(f)", outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert re.search(r'<div style="font-family: monospace">\s*<div class="highlight"><pre>', page)


def test_a_source_under_a_summary_is_folded(displayed):
    show.show_source("x = 1", summary="All of it")
    ((shown, _),) = displayed
    assert shown.data.startswith("<details><summary>All of it</summary>\n\n<div")
    assert "\n```python\nx = 1\n```\n" in shown.data and shown.data.endswith("</details>")


SET_UP = "from lib.course.show import describe\ndescribe()"


def errors(*sources, **how):
    """The error output and its text for each cell that fails, run in one kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(notebook, kernel_name="python3", timeout=120, **how).execute(cwd=ROOT)
    outputs = [o for cell in notebook.cells for o in cell.outputs if o.output_type == "error"]
    return [(o, re.sub(r"\x1b\[[\d;]*m", "", "\n".join(o.traceback)).rstrip()) for o in outputs]


def test_a_cell_run_too_early_says_what_to_run_first():
    ((error, text),) = errors(SET_UP, "x = y + 1", allow_errors=True)
    assert (error.ename, error.evalue) == ("NameError", "name 'y' is not defined")
    assert "----> 1 x = y + 1" in text
    assert text.splitlines()[-2:] == [
        "NameError: name 'y' is not defined",
        "`y` is not defined yet: run the cells above this one (Run > Run All Above Selected Cell), "
        "or look for a typing mistake.",
    ]


def test_it_fails_all_the_same():
    with pytest.raises(CellExecutionError, match="name 'y' is not defined"):
        errors(SET_UP, "x = y + 1", "2")


def test_other_errors_look_as_ever():
    others = ["def f():\n    y\n    y = 1\nf()", "1 / 0", "raise NameError('x')"]
    failures = errors(*others, SET_UP, *others, allow_errors=True)
    texts = [re.sub(r"In\[\d+\]", "In", text) for _, text in failures]
    assert len(texts) == 6 and texts[:3] == texts[3:]


def test_describe_works_outside_ipython():
    assert "this machine" in show.describe().to_html()


@pytest.mark.parametrize(
    ("of_torch", "odd"), [("2.11.0", True), ("2.14.1+cpu", False), ("2.99.0", False)]
)
def test_a_triton_that_torch_is_not_released_with_is_named(monkeypatch, of_torch, odd):
    stamp = machine.Stamp("a GPU", "1", of_torch, "3.8.0", "3.12", "2026-11-26")
    monkeypatch.setattr(machine, "stamp", lambda: stamp)
    monkeypatch.setattr(torch, "__version__", of_torch)
    assert ("this torch is released with triton 3.6" in show.describe().to_html()) == odd


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (9, 0)])
def test_a_gpu_older_than_those_supported_is_named(monkeypatch, capability):
    stamp = machine.Stamp("a GPU", "1", "2.13.0", "3.7.1", "3.12", "2026-11-26")
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(machine, "stamp", lambda: stamp)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    html = show.describe().to_html()
    assert ("older than compute capability 7.5" in html) == (capability < (7, 5))
    assert ("measured here" in html) == (capability >= (7, 5))
    assert "compute capability 7.5 on" in (ROOT / "README.md").read_text().replace("\n", " ")
