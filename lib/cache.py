"""Where the course keeps what is slow to make: built kernels, precompiled headers, compiled Triton."""

import os
import tempfile
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """The folder `parts` of the course's cache, made if need be.

    The cache is `$FUSED_KERNELS_CACHE` if that is set, else `~/.cache/fused-kernels`. Where that cannot
    be written (a read-only home), it is a folder of the user's own among the temporary files.
    """
    preferred = os.environ.get("FUSED_KERNELS_CACHE") or "~/.cache/fused-kernels"
    fallback = Path(tempfile.gettempdir(), f"fused-kernels-{os.getuid()}")
    for root in (Path(preferred).expanduser().absolute(), fallback):
        folder = root.joinpath(*parts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise PermissionError(
        f"neither {preferred} nor {fallback} can be written; set FUSED_KERNELS_CACHE to a folder that can"
    )
