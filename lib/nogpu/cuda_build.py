"""From C++ text to a loaded shared library: compiler, precompiled header, cache on disk, error text.

A build lies in `cache_dir("cuda_on_cpu")/<name>_<key>`. The key is made of everything that could change
it: the text, our headers, the flags, the compiler, PyTorch and Python. The library is written under a
temporary name and then renamed, so a folder holds all of it or none; a file lock keeps two processes from
doing the same work.

PyTorch's headers take most of the compiler's time. In the background of the first build they are compiled
into a precompiled header, one for each mode, about 450 MB each; those that nobody has used for a month are
deleted.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lib.cache import cache_dir

import torch

HEADERS = Path(__file__).parent / "cuda_on_cpu"
TORCH = Path(torch.__file__).parent
MONTH = 30 * 24 * 3600
PRECOMPILED_BYTES = 500 << 20

# Every source begins with these headers; they take most of the compiler's time.
PRELUDE = "#include <torch/library.h>\n#include <torch/types.h>\n"


class ToolMissing(RuntimeError):
    """A compiler is needed and not installed; the message says which one and how to get it."""


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, else g++, c++ or clang++. None where there is none."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        return command if shutil.which(command[0]) else None
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def why_no_compiler() -> str | None:
    """None when C++ can be compiled here, else one sentence that says what to install."""
    if not sys.platform.startswith("linux"):
        return (
            "CUDA C++ on the CPU needs Linux (on Windows: WSL); use Linux or a machine with a GPU."
        )
    if os.environ.get("CXX") and find_compiler() is None:
        return f"CXX={os.environ['CXX']} is not a program; set it to a C++ compiler or unset it."
    if find_compiler() is None:
        return (
            "There is no C++ compiler; install one with `sudo apt install g++` "
            "or `conda install -c conda-forge gxx`."
        )
    return None


def build_library(
    cpp: str,
    name: str,
    *,
    source: str,
    flags: list[str] = (),
    checked: bool | None = None,
    verbose=False,
) -> Path:
    """Compile `cpp`, which came from the CUDA `source`, and return the library; at once if it is there.

    Compiler errors are raised as RuntimeError with the lines of `<name>.cu` that they are about.
    """
    if reason := why_no_compiler():
        raise ToolMissing(reason)
    flags = [*_mode_flags(checked), *flags]
    text = _beginning(checked) + cpp
    key = _key(text, _headers_hash(), flags, _toolchain())
    folder = cache_dir("cuda_on_cpu", f"{name}_{key}")
    library = folder / f"{name}.so"
    if not library.exists():
        with locked(folder):
            if not library.exists():  # another process may have built it while we waited
                _compile(text, library, source, flags, checked, verbose)
    return library


def load_library(library: Path):
    """Load a built library into this process: its operators appear under torch.ops.

    A function that is declared and nowhere defined, as some of glibc's headers are, is noticed only here.
    """
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        missing = re.search(r"undefined symbol: (\w+)", f"{error} {error.__cause__}")
        if not missing:
            raise
        name = missing[1]
        hint = _hint(name) if re.fullmatch(_CUDAS, name) else ""
        raise RuntimeError(
            f"{library.stem}.cu calls {name}, which is declared but not defined.{hint}"
        ) from None


def read_statistics(library: Path) -> list[int]:
    """What the runtime inside a loaded library has counted since the last call."""
    counts = (ctypes.c_int64 * 7)()
    ctypes.CDLL(str(library)).cuda_on_cpu_statistics(counts)
    return list(counts)


def source_key(*parts) -> str:
    """A short name for a source: two that differ get different ones."""
    return _key(*parts)[:8]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; another process that wants it waits."""
    with open(folder / "build.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Lines of g++, clang++, nvcc and ninja: those where an error begins, and those where it ends.
_ERROR = r":\s(?:fatal )?error:|\): (?:catastrophic )?error|ptxas (?:error|fatal)"
_NOT_AN_ERROR = (
    r"[\s:)](?:warning|note)\b.*:|^In file included|^\s*from \S+:\d+|: In \w+|^\S+: At "
    r"|^\[\d+/\d+\]|^ninja: |^FAILED: |^\d+ errors? detected"
)


def compiler_errors(output: str, limit: int = 40) -> str:
    """The errors in a compiler's output: no warnings, no notes, no commands of a build tool."""
    errors, in_error = [], False
    for line in output.splitlines():
        if re.search(_ERROR, line):
            in_error = True
        elif re.search(_NOT_AN_ERROR, line):
            in_error = False
        if in_error:
            errors.append(line.rstrip())
    if not errors:  # killed, out of memory, a linker's message: all we have
        errors = [line.rstrip() for line in output.splitlines() if line.strip()][-limit:]
    rest = [f"... and {len(errors) - limit} more lines"] if len(errors) > limit else []
    return "\n".join(errors[:limit] + rest)


# Names that look like CUDA's, and those of its math library that neither glibc nor `device_math.h` has.
_CUDAS = (
    r"cuda[A-Z]\w*|__\w+|u?(?:ll)?(?:max|min)"
    r"|(?:cyl_bessel_i[01]|erfc?inv|erfcx|fdivide|normcdfinv|r?norm(?:[34]d)?|rhypot)f?"
)


def _missing_here(errors: str) -> str:
    """A hint on the first undeclared name in a compiler's errors that looks like CUDA's, or ''."""
    unknown = re.search(
        rf"error: .*?['‘`]({_CUDAS})['’].*(?:not declared|undeclared|not name)", errors
    )
    return _hint(unknown[1]) if unknown else ""


def _hint(name: str) -> str:
    return (
        f"\nIf {name} is CUDA's, the CPU build does not have it: put it under `#ifndef CUDA_ON_CPU` "
        "with a plain version beside it, or use a machine with a GPU."
    )


def checked_by_default() -> bool | None:
    """What CUDA_ON_CPU_CHECKED wishes: 1 is True, 0 is False; None where it is not set."""
    wish = os.environ.get("CUDA_ON_CPU_CHECKED")
    return wish != "0" if wish else None


def _mode_flags(checked: bool | None) -> list[str]:
    flags = ["-std=c++20", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
    flags += ["-Wno-unknown-pragmas", "-Wno-attributes"]  # #pragma unroll, __align__
    if not _is_clang():
        flags += ["-fno-gnu-unique"]  # two builds of a template must not share its static variables
    if checked is not False:
        # These make the compiler call the functions in hooks.h; nothing is linked for them.
        sanitizers = [f"-fsanitize={name}" for name in ("thread", "alignment", "bounds")]
        flags += sanitizers
        # As a float it is -1.7e38 or NaN, as an index it is out of bounds.
        pattern = "-ftrivial-auto-var-init=pattern"
        flags += [pattern] if _takes(pattern, *find_compiler()) else []
    # -g1 adds lines to errors and costs nothing. With -O2 the compiler takes half as long again.
    return [*flags, "-O1", "-g1"]


# Without a wish, so many accesses of each launch are held to all rules: a quarter of a second.
CHECKED_FIRST = 1 << 19


def _beginning(checked: bool | None) -> str:
    """The first lines of every C++ file."""
    mode = "" if checked is False else "#define CUDA_ON_CPU_CHECKED\n"
    mode += f"#define CUDA_ON_CPU_CHECKED_FIRST {CHECKED_FIRST}\n" if checked is None else ""
    return f'#define CUDA_ON_CPU_ADDR2LINE "{_addr2line()}"\n{mode}#include "cuda_on_cpu.h"\n'


def _includes() -> list[str]:
    ours = [f"-I{HEADERS / 'stand_ins'}", f"-I{HEADERS}"]  # before PyTorch's own c10/cuda headers
    return [*ours, *_torch_includes()]


def _torch_includes() -> list[str]:
    include = TORCH / "include"
    return [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]


def _compile(
    text: str, library: Path, source: str, flags: list[str], checked: bool | None, verbose
):
    """Compile and link, by way of temporary names."""
    started = time.perf_counter()
    folder, name = library.parent, library.stem
    (folder / f"{name}.cu").write_text(source)  # the compiler quotes it in its messages
    cpp, part = folder / f"{name}.cpp", folder / f"{name}.{os.getpid()}"
    cpp.write_text(text)
    compiler = find_compiler()
    mode_flags = _mode_flags(checked)
    # Builds without the checker are too few to precompile headers for them, unless all are.
    few = checked is False and checked_by_default() is not False
    prelude = [] if few else _precompiled_header(mode_flags)
    command = [*compiler, "-c", cpp.name, "-o", f"{part}.o", *flags, *_includes()]
    try:
        result = _run([*command, *prelude], folder, verbose)
        if result.returncode and prelude and re.search(r"pch|PCH|precompiled", result.stdout):
            result = _run(command, folder, verbose)  # a precompiled header that does not load here
        if result.returncode:
            errors = compiler_errors(result.stdout)
            raise RuntimeError(f"{name}.cu does not compile:\n{errors}{_missing_here(errors)}")
        link = [*compiler, "-shared", f"{part}.o", "-o", f"{part}.so", f"-L{TORCH / 'lib'}"]
        # -Bsymbolic: two builds in one process that define the same name each keep their own.
        link += ["-lc10", "-ltorch_cpu", "-ltorch", "-Wl,-Bsymbolic", "-ldl", "-lrt", "-lpthread"]
        result = _run(link, folder, verbose)
        if result.returncode:
            raise RuntimeError(f"{name}.cu cannot be linked:\n{compiler_errors(result.stdout)}")
        os.replace(f"{part}.so", library)
    finally:
        for leftover in (Path(f"{part}.o"), Path(f"{part}.so")):
            leftover.unlink(missing_ok=True)
    if verbose:
        print(f"built {library} in {time.perf_counter() - started:.1f} s")


def precompile_headers(checked: bool | None):
    """Start precompiling PyTorch's headers for a mode, in the background, where they are not there yet."""
    if why_no_compiler() is None:
        _precompiled_header(_mode_flags(checked))


def _precompiled_header(flags: list[str]) -> list[str]:
    """The flags that use PyTorch's headers precompiled with `flags`; none while there are none.

    The first call starts their compilation in the background. This build and those of the next 15 s or
    so do not wait: they read the headers as text.
    """
    key = _key(PRELUDE, flags, _toolchain())
    folder = cache_dir("cuda_on_cpu", f"headers_{key}")
    header = folder / "prelude.h"
    compiled = folder / ("prelude.h.pch" if _is_clang() else "prelude.h.gch")
    if compiled.exists():
        os.utime(header)
        return ["-include-pch", str(compiled)] if _is_clang() else ["-include", str(header)]
    if shutil.disk_usage(folder).free > 4 * PRECOMPILED_BYTES:
        _start_precompiling(header, compiled, flags)
    return []


def _start_precompiling(header: Path, compiled: Path, flags: list[str]):
    """Compile a header in a process that outlives this one, unless another process is compiling it."""
    part = header.with_name("part")
    command = [*find_compiler(), "-x", "c++-header", str(header), "-o", str(part)]
    command += [*flags, *_torch_includes()]
    command += ["-fpch-instantiate-templates"] if _is_clang() else []
    rename = shlex.join(["mv", str(part), str(compiled)])
    with open(header.with_name("build.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if compiled.exists():  # it was finished between the caller's look and the lock
            return
        header.write_text(PRELUDE)
        _delete_unused_headers(current=header.parent)
        # The background process inherits the open file, and with it the lock, until it ends.
        subprocess.run(
            ["sh", "-c", f"({shlex.join(command)} && {rename}) &"],
            pass_fds=[lock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def _delete_unused_headers(current: Path):
    for folder in current.parent.glob("headers_*"):
        header = folder / "prelude.h"
        if folder != current and header.exists() and time.time() - header.stat().st_mtime > MONTH:
            shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: Path, verbose: bool) -> subprocess.CompletedProcess:
    if verbose:
        print(shlex.join(command))
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # English messages: compiler_errors() reads them.
    return subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, **output)


def _key(*parts) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _headers_hash() -> str:
    files = sorted(HEADERS.rglob("*.h"))
    return _key([(str(file.relative_to(HEADERS)), file.read_bytes()) for file in files])


def _toolchain() -> tuple:
    """What a compiled file depends on besides its text and flags."""
    compiler = find_compiler()
    program = Path(shutil.which(compiler[0])).resolve()
    state = program.stat()  # an upgrade changes these; asking for --version would take 20 ms
    versions = (torch.__version__, str(TORCH), sys.version)
    return (*versions, compiler, str(program), state.st_mtime_ns, state.st_size)


@functools.cache
def _takes(flag: str, *compiler: str) -> bool:
    """Whether the compiler knows a flag."""
    command = [*compiler, flag, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@functools.cache
def _version_text(command: tuple[str, ...]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True).stdout


def _is_clang() -> bool:
    compiler = find_compiler()
    name = Path(shutil.which(compiler[-1]) or compiler[-1]).resolve().name
    if "g++" in name and "clang" not in name:
        return False  # the usual case, without starting it
    return "clang" in _version_text(tuple(compiler))


def _addr2line() -> str:
    """The program that names the line of a machine instruction; it comes with the compiler."""
    name = find_compiler()[-1]
    prefixed = re.sub(r"(?:clang|g|c)\+\+(-\d+)?$", "addr2line", name)  # x86_64-conda-linux-gnu-g++
    return shutil.which("addr2line") or shutil.which(prefixed) or "addr2line"
