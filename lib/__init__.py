"""Kernels (`lib.ops`) and tools of the Fused Kernels course. Import it before triton.

On a machine with no GPU, importing this package makes `TRITON_INTERPRET=1` the default and repairs the
interpreter (`lib.nogpu`), so that every kernel of the course runs on the CPU. Triton reads that setting
once, when it is first imported, which is why `lib` has to come first.
"""

import importlib.util

if importlib.util.find_spec("torch"):  # lib.standalone does without
    from lib import nogpu

    nogpu.install()
