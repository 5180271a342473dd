"""Names in an answer that make it worth reading: only one that deceives its check has a use for them."""

import io
import re
import tokenize
import unicodedata

# Anywhere in a.b.c.
_ANYWHERE = set("_getframe _exit _exercises settrace setprofile get_objects get_referrers".split())
# At its beginning: `open(…)`, and not `file.open`.
_FIRST = set(
    "exec eval compile open getattr setattr delattr globals locals vars importlib ctypes builtins gc mock"
    " signal atexit sys".split()
)
_USUAL = set("__init__ __name__ __doc__ __call__ __len__ __getitem__ __enter__ __exit__".split())


def remarkable(source):
    """The names in an answer that a teacher should look at, sorted."""
    return sorted({name for name in _names(source) if _is_remarkable(name)})


def _names(source):
    """Every a.b.c of the code; where it is no Python also those of comments and texts."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        code = " ".join(token.string for token in tokens if _is_code(token))
    except (tokenize.TokenError, SyntaxError):
        code = source
    code = unicodedata.normalize("NFKC", code)  # as Python reads names
    return re.findall(r"[^\W\d]\w*(?:\.\w+)*", re.sub(r"\s*\.\s*", ".", code))


def _is_code(token):
    """Names and what stands between them; an f-string is one token before Python 3.12."""
    text = (
        token.type == tokenize.STRING and "f" in token.string.lower().partition(token.string[-1])[0]
    )
    return text or token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)


def _is_remarkable(name):
    parts = name.split(".")
    if name.startswith("lib.exercises."):
        return True
    hidden = {part for part in parts if re.fullmatch(r"__\w+__", part)} - _USUAL
    return bool(hidden or _ANYWHERE & set(parts) or parts[0] in _FIRST)
