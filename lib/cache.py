"""Where the course caches what is slow to build: kernels, precompiled headers, compiled Triton."""

import os
import stat
import tempfile
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """The folder `parts` of the course's cache, created if it does not exist.

    The cache is `$FUSED_KERNELS_CACHE` if that is set, else `~/.cache/fused-kernels`. Where that cannot
    be written (a read-only home), it is a folder among the temporary files. Its name can be guessed and
    libraries are loaded from it, so the user must own it and nobody else may write there.
    """
    preferred = os.environ.get("FUSED_KERNELS_CACHE") or "~/.cache/fused-kernels"
    fallback = Path(tempfile.gettempdir(), f"fused-kernels-{os.getuid()}")
    for root in (Path(preferred).expanduser().absolute(), fallback):
        folder = root.joinpath(*parts)
        try:
            if root is fallback:
                _own(fallback)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise PermissionError(
        f"{preferred} cannot be written, and {fallback} cannot be either, or does not belong to you alone; "
        "set FUSED_KERNELS_CACHE to a folder of your own"
    )


def _own(folder):
    """Create the folder for this user only; OSError where it is another user's, a link, or open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(folder)
