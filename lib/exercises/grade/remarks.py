"""Names in an answer that make it worth reading, and what of the course it takes, where it may not."""

import io
import re
import tokenize
import unicodedata

# Anywhere in a.b.c.
_ANYWHERE = set("_getframe _exit _exercises settrace setprofile get_objects get_referrers".split())
# At its beginning: `open(…)`, and not `file.open`.
_FIRST = set(
    "exec eval compile open getattr setattr delattr globals locals vars importlib ctypes builtins gc mock"
    " signal atexit sys pkgutil runpy".split()
)
# What every answer may take from the course.
_FREE = {"lib.machine", "lib.exercises.check", "lib.exercises.capstones.check", "lib.ops._host"}
_NAME = r"[\w*]+(?:\s+as\s+\w+)?"
_FROM_IMPORT = re.compile(rf"\bfrom\s+(lib\b[\w.]*)\s+import\s+\(?\s*({_NAME}(?:\s*,\s*{_NAME})*)")
_UNDER_ANOTHER_NAME = re.compile(r"\blib\s+as\b|(?<!import )\blib\b(?!\.|\s+as\b)")

_USUAL = set("__init__ __name__ __doc__ __call__ __len__ __getitem__ __enter__ __exit__".split())


def remarkable(source, given=""):
    """The names in an answer that a teacher should look at, sorted. given: the cells of its page."""
    names = {name for name in _names(source) if _is_remarkable(name)}
    return sorted(names.union(_taken(source, given)))


def ops_taken(source, given=""):
    """What an answer takes from the course's ops and its page does not, such as lib.ops.rope.rope_triton."""
    return [n for n in _taken(source, given) if re.match(r"lib\.ops\b|.*\bfused_kernels\b", n)]


def _taken(source, given):
    known = (_FREE | _of_the_course(given)) - {"lib"}
    return sorted(
        n for n in _of_the_course(source) if not f"{n}.".startswith(tuple(f"{k}." for k in known))
    )


def _of_the_course(source):
    """The names of lib, also those of `from lib.ops.rope import rope_triton`, and of its ops in torch.ops."""
    code = _FROM_IMPORT.sub(
        lambda m: " ".join(f"{m[1]}.{name.split()[0]}" for name in m[2].split(",")), _code(source)
    )
    names = _dotted(code)
    own = {n for n in names if n.startswith("lib.") or "fused_kernels" in n.split(".")}
    return own | {"lib"} if _UNDER_ANOTHER_NAME.search(code) else own


def _names(source):
    """Every a.b.c of the code."""
    return _dotted(_code(source))


def _dotted(code):
    return re.findall(r"[^\W\d]\w*(?:\.[\w*]+)*", code)


def _code(source):
    """The code without its comments and texts; where it is no Python, the source."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        code = " ".join(token.string for token in tokens if _is_code(token))
    except (tokenize.TokenError, SyntaxError):
        code = source
    code = unicodedata.normalize("NFKC", code)  # as Python reads names
    return re.sub(r"\s*\.\s*", ".", code)


def _is_code(token):
    """Names and what stands between them; an f-string is one token before Python 3.12."""
    text = (
        token.type == tokenize.STRING and "f" in token.string.lower().partition(token.string[-1])[0]
    )
    return text or token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)


def _is_remarkable(name):
    parts = name.split(".")
    hidden = {part for part in parts if re.fullmatch(r"__\w+__", part)} - _USUAL
    return bool(hidden or _ANYWHERE & set(parts) or parts[0] in _FIRST)
