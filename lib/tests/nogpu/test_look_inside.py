"""Notebook 23's cells that look into a kernel: print, and Python's debugger in the interpreter."""

import subprocess
import sys

from lib.recorded import notebooks
from lib.recorded.results import ROOT

import nbformat

(PATH,) = notebooks.notebooks("23")
CELLS = [c.source for c in nbformat.read(PATH, as_version=4).cells if c.cell_type == "code"]
IMPORTS = """import lib, torch, triton, triton.language as tl
from lib.nogpu.interpreter import interpreted_launches
"""


def run(folder, last, typed=""):
    cells = [c for c in CELLS if "row_mean_kernel" in c]
    assert len(cells) == 2
    script = folder / "cells.py"  # triton reads a kernel's source from its file
    script.write_text("\n".join([IMPORTS, *cells, last]))
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_print_shows_the_tile_of_one_program(tmp_path):
    shown, error = run(tmp_path, "print(row_means())")
    assert shown == 2 * "x = [3. 4. 5. 0.]\n" + "tensor([1., 4.])\n", error


def test_the_debugger_stops_in_each_program(tmp_path):
    typed = "p x\np x.shape, cols < n_cols\nn\nc\np x\nc\n"
    shown, error = run(tmp_path, "print(row_means(stop=True))", typed)
    assert shown.endswith("tensor([1., 4.])\n"), error
    first, second = "[0., 1., 2., 0.]", "[3., 4., 5., 0.]"
    assert shown.index(first) < shown.index("[ True,  True,  True, False]") < shown.index(second)
    assert "tl.store(y_ptr + row" in shown


def test_q_ends_it(tmp_path):
    _, error = run(tmp_path, "row_means(stop=True)", "q\n")
    assert "BdbQuit" in error
