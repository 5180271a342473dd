"""Paragraphs that begin "On the H200:" state recorded results: each number with a unit was recorded."""

import json
import re

from lib.recorded import notebooks, results

import nbformat
import pytest

UNITS = "µs|ms|s|%|GB/s|TB/s|TFLOP/s|MiB|GiB|MB|GB"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
JOINED = rf"(?:{NUMBER}(?:, | and | to | or | against )(?:\w+ )?)*{NUMBER}"
SCALES = {"%": (1, 100)}  # of others, also a thousandth and a thousand times as much
RATIO = rf"({NUMBER}) times"


def paragraphs(notebook):
    """The paragraphs of a notebook that begin with "On the H200:", without code and links."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for paragraph in re.split(r"\n\s*\n", cell.source):
                if paragraph.lstrip().startswith("On the H200:"):
                    yield re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph)


def numbers_with_units(paragraph):
    """(as written, value, unit) of each number before a unit; lists share theirs: "3, 5 and 7 µs"."""
    for match in re.finditer(rf"({JOINED}) ?({UNITS})(?![\w/])", paragraph):
        for written in re.findall(NUMBER, match[1]):
            yield written, value_of(written), match[2]


def value_of(written):
    return float(written.replace(",", ""))


def recorded_numbers(path):
    """Every number in the outputs of a notebook and in its recorded measurements."""
    values = []
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = " ".join(
                [
                    output.get("text", "") or "",
                    *(data.get(f"text/{k}", "") for k in ("html", "plain", "markdown")),
                ]
            )
            plain = re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.S)
            values += [value_of(n) for n in re.findall(rf"(?<![\w.]){NUMBER}", plain)]
    record = results.load(f"notebook_{path.stem}")
    return values + list(_numbers_in(record["rows"] if record else []))


def _numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def is_among(written, unit, recorded):
    """Whether a recorded number, rounded like the written one, equals it."""
    digits, value = len(written.partition(".")[2]), value_of(written)
    scales = SCALES.get(unit, (1, 1e-3, 1e3, 1e-6, 1e-9))
    return any(abs(n * scale - value) <= 0.5001 * 10**-digits for n in recorded for scale in scales)


def is_a_ratio(written, values):
    """Whether "2.1 times" is the ratio of two numbers of the paragraph, within their rounding."""
    digits, value = len(written.partition(".")[2]), value_of(written)
    room = 0.51 * 10**-digits + 0.02 * value  # the two are rounded themselves
    return any(b and abs(a / b - value) <= room for a in values for b in values)


@pytest.mark.parametrize("path", notebooks.notebooks(), ids=lambda p: p.stem)
def test_numbers_are_those_that_are_recorded(path):
    recorded = recorded_numbers(path)
    wrong = []
    for paragraph in paragraphs(nbformat.read(path, as_version=4)):
        numbers = list(numbers_with_units(paragraph))
        wrong += [f"{w} {unit}" for w, _, unit in numbers if not is_among(w, unit, recorded)]
        values = [value for _, value, _ in numbers]
        wrong += [f"{w} times" for w in re.findall(RATIO, paragraph) if not is_a_ratio(w, values)]
    assert not wrong, f"in no output of this notebook, nor in data/results: {wrong}"


@pytest.mark.parametrize(
    ("page", "record", "n_numbers"),
    [(90, "add_rms_norm", 4), (47, "quantized_linear", 3), (47, "generation", 2)],
)
def test_what_a_page_says_of_another_record_is_in_it(page, record, n_numbers):
    (path,) = notebooks.notebooks(page)
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    recorded = list(_numbers_in(results.load(record)["rows"]))
    paragraphs = [p for p in re.split(r"\n\n|\n- ", prose) if f"h200/{record}.json)" in p]
    numbers = [n for p in paragraphs for n in numbers_with_units(p)]
    assert len(numbers) == n_numbers
    assert not [w for w, _, unit in numbers if not is_among(w, unit, recorded)]


def test_a_number_that_is_not_recorded_is_found(tmp_path):
    table = {"text/html": "<td>1,012.4</td><td>93.2</td>"}
    cell = nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output("display_data", table)])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "99_test.ipynb")
    recorded = recorded_numbers(tmp_path / "99_test.ipynb")
    assert json.dumps(recorded) == "[1012.4, 93.2]"
    text = "On the H200: eager takes 1.01 ms, ours 93 µs, 10.9 times less; not 94 or 95 µs."
    numbers = list(numbers_with_units(text))
    assert [w for w, _, unit in numbers if not is_among(w, unit, recorded)] == ["94", "95"]
    assert is_a_ratio("10.9", [1010, 93]) and not is_a_ratio("12.9", [1010, 93])
