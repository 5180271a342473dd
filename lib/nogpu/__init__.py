"""What stands in for a GPU when there is none: one file per idea.

    interpreter   Triton kernels run on CPU tensors, program by program, through NumPy.
    launches      What an interpreted launch takes, and the sentences in which it refuses the rest.
    turns         Programs that wait for one another, and those that wait for ever.
    memory        Every load and store of an interpreted kernel is checked and its bytes are counted.
    races         Which programs of a launch race, and other orders of them.
    driver        Host code that asks for a GPU: device="cuda", the active driver, do_bench.
    inductor      torch.compile writes the Triton code of a GPU that is not here.
    compile_only  A Triton or CUDA kernel compiled to PTX and SASS for a GPU that is not here.
    one_call      Attention and rms_norm as the one call that each is on a GPU, for counting and output code.
    cuda          A CUDA C++ source built and run on the CPU, with a checker.
    gluon         A kernel in Gluon, the level below Triton, is run by a model on the CPU (and gluon_words,
                  gluon_memory, gluon_roles).

With a GPU the same calls use it.
"""

import importlib.util
import os
import sys

from lib.machine import HAS_GPU, partner_of_torch


def install():
    """Set up this process: find nvcc where there is a GPU, else install the stand-ins.

    Raises ImportError where there is no triton, as beside PyTorch's CPU build, and RuntimeError when triton was
    imported first and so missed TRITON_INTERPRET=1.
    """
    if not importlib.util.find_spec("triton"):
        which = f"'triton=={partner_of_torch()}.*'" if partner_of_torch() else "triton"
        raise ImportError(
            f"triton is not installed, and every kernel needs it: pip install {which}"
        )
    if HAS_GPU:
        from lib.nogpu import cuda_toolkit, memory

        cuda_toolkit.use_pip_cuda()  # unless another toolkit is installed
        memory.install()  # for kernels that are interpreted beside the GPU
        return
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError(
            "lib was imported after triton. Without a GPU, lib must come first, because it switches on "
            "Triton's interpreter. Restart the kernel and import lib first."
        )
    os.environ["TRITON_INTERPRET"] = "1"
    from lib.nogpu import cuda, driver, interpreter, memory

    interpreter.install()
    memory.install()
    cuda.install()
    driver.install()
    _launch_gluon()


def _launch_gluon():
    """kernel[grid](…) of a kernel in Gluon, for which Triton has no interpreter, runs in the model."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if warmup or not self.is_gluon():
            return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        from lib.nogpu import gluon  # here, because every import of lib would take 0.1 s longer

        return gluon.run(self, grid, *args, **kwargs)

    JITFunction.run = run
