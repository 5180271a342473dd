"""Limits in seconds, for machines of different speed.

A limit holds unchanged where a fixed piece of work of the same kind takes the seconds below, or less.
Where that takes longer, on an old or a busy machine, the limit grows by the same factor.
"""

import ast
import json
import resource
import subprocess

from lib.nogpu import cuda_build

PYTHON_SECONDS = 0.4
COMPILER_SECONDS = 1.5

_SOURCE = """
#include <functional>
#include <iostream>
#include <map>
#include <regex>
#include <vector>
int main() { return std::regex_match(std::string(), std::regex()); }
"""


def for_python(limit):
    """The CPU seconds that Python may take on this machine for a limit of `limit`."""
    return limit * max(1.0, cpu_seconds(_python)[0] / PYTHON_SECONDS)


def for_compiler(limit):
    """The CPU seconds that the C++ compiler may take on this machine for a limit of `limit`."""
    return limit * max(1.0, cpu_seconds(_compiler)[0] / COMPILER_SECONDS)


def cpu_seconds(fn):
    """CPU seconds of fn() and of the processes that it starts and waits for, and what fn() returned."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result = fn()
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pairs = zip(after, before)
    return sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in pairs), result


def _python():
    ast.unparse(ast.parse(json.dumps([{str(i): list(range(20))} for i in range(3000)])))


def _compiler():
    command = [*cuda_build.find_compiler(), *"-std=c++17 -O2 -x c++ -c - -o /dev/null".split()]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
