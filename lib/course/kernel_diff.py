"""Your kernel beside the library's, line by line."""

import difflib
import inspect
import re

from lib.course.show import show_source


def lines_of(kernel):
    """The lines of a kernel, from its arguments on, without comments and what is under `if FOLD > 1`."""
    source = re.sub(r"(?m)^( *)if FOLD > 1.*\n(\1 +.*\n)+", "", inspect.getsource(kernel.fn))
    return [line for line in source.splitlines()[2:] if not line.lstrip().startswith("#")]


def show_difference(yours, shipped):
    """Lines that are only in one of two kernels, and how many they have in common."""
    a, b = lines_of(yours), lines_of(shipped)
    diff = [line for line in difflib.ndiff(a, b) if line[0] in "-+"]
    show_source("\n".join(diff), "diff")
    only = {sign: sum(line[0] == sign for line in diff) for sign in "-+"}
    print(f"the library has {len(a) - only['-']} of your {len(a)} lines, and {only['+']} others")
