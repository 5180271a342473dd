"""Mutants of functions that several op files repeat to the letter, as each of them stands alone."""

from lib.measure.mutants import Mutant

# of _run
RUN = [
    Mutant(
        "hooked or addresses % 16 else",
        "hooked else",
        "a kernel for aligned pointers launched on others",
    ),
    Mutant(
        "*options.items(), *kinds)",
        "*options.items())",
        "a kernel for other dtypes launched",
    ),
    Mutant(
        "*options.items(), *kinds)",
        "*options, *kinds)",
        "a kernel for other constants launched",
    ),
    Mutant(
        "    if launch and torch.cuda.current_device() == device:\n",
        "    if launch:\n",
        "a launch on the current GPU, which is not the tensors'",
    ),
    Mutant(
        "        given.apply_defaults()\n",
        "",
        "a launch without the kernel's defaults",
    ),
    Mutant(
        'if compiled and triton.__version__[:3] in ("3.6", "3.7") and',
        "if compiled and",
        "the launcher of any version of Triton",
    ),
    Mutant(
        "launch = None if hooked or",
        "launch = None if",
        "launches that hooks do not hear of",
    ),
    Mutant(
        "launch_enter_hook.calls or hooks.launch_exit_hook.calls",
        "launch_enter_hook.calls",
        "launches whose end no hook hears of",
    ),
    Mutant(
        "    how = kernel.fn, type(kernel).run",
        "    how = (kernel.fn,)",
        "launches that what watches them does not see",
    ),
]

# of folded rows: _fold_ends and what kernels do with it
FOLD = [
    Mutant(
        "bias_cols = cols.to(tl.int32) % (n_cols // FOLD)\n\n    x_ptrs",
        "bias_cols = cols.to(tl.int32) % n_cols\n\n    x_ptrs",
        "folded rows: a bias of the first row alone",
    ),
    Mutant(
        "    return whole, last, (last >= whole) & (last < end) & (cols < n_cols)\n",
        "    return whole, last, (last > whole) & (last < end) & (cols < n_cols)\n",
        "folded rows: the first element behind the last whole 16 forgotten",
    ),
    Mutant(
        "(last >= whole) & (last < end) & (cols < n_cols)\n",
        "(last >= whole) & (cols < n_cols)\n",
        "folded rows: written beyond the end",
    ),
]

# of _folded_and_rest
FOLD_CUDA = [
    Mutant(
        "bias.repeat(fold)",
        "bias.repeat_interleave(fold)",
        "CUDA: folded rows with the bias in the wrong order",
    ),
    Mutant(
        "    return folded + rest\n",
        "    return folded\n",
        "CUDA: the rows left over by folding forgotten",
    ),
    Mutant(
        "m[:top].view(wide) for",
        "m[n_rows - top :].view(wide) for",
        "CUDA: the last rows folded",
    ),
    Mutant(
        "else m[top:] for m in",
        "else m[: n_rows - top] for m in",
        "CUDA: the first rows again for those left over",
    ),
]
