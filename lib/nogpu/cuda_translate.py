"""Rewrite CUDA C++ so that a C++ compiler can read it. Every line keeps its number.

    kernel<<<grid, block>>>(x)     ::cuda_on_cpu::Launch(grid, block).kernel("kernel", "x_ptr", ...)(x)
    __shared__ float part[32];     a reference to memory that the runtime hands out
    x.data_ptr<float>()            ::cuda_on_cpu::noted(x).data_ptr<float>()
    torch::empty_like(x)           ::cuda_on_cpu::made_empty(torch::empty_like(x))
    x.is_cuda(), kCUDA, NULL       x.is_cpu(), kCPU, nullptr
    __noinline__                   __attribute__((noinline))

The headers of `cuda_on_cpu/` hold the rest of what CUDA adds to C++. What they lack (PTX, tensor cores,
asynchronous copies ...) is refused here with its line, because the compiler's message would not help.
"""

import re


class NotOnCpu(ValueError):
    """The source uses something of a GPU that the CPU build does not have."""


# What is refused: a pattern of the source and its name.
_NOT_ON_CPU = [
    (r"\b(?:asm|__asm__)\b(?=\s*(?:volatile|__volatile__)?\s*\()", "inline PTX (asm)"),
    (r"\bnvcuda\b|\bwmma\b|[<\"]mma\.h[>\"]", "a tensor-core fragment (wmma)"),
    (r"__pipeline_\w+|\bmemcpy_async\b|cuda_pipeline\w*\.h", "an asynchronous copy (cp.async)"),
    (r"\bCUtensorMap\b|\bcp_async_bulk\w*", "a bulk tensor copy (TMA)"),
    (r"__cluster_dims__|\bcudaLaunchKernelEx\w*|\bthis_cluster\b", "a cluster launch"),
    (
        r"\bcudaLaunchCooperativeKernel\w*|\bmulti_grid_group\b",
        "a cooperative launch (here one thread block runs after another)",
    ),
    (r"\bcub::|<cub/", "CUB"),
    (r"\bthrust::|<thrust/", "Thrust"),
    (r"\bcuda::(?:std|barrier|atomic\w*|pipeline|ptx)\b|<cuda/", "libcu++ (cuda::)"),
    (r"\bcutlass::|<cutlass/|\bcute::|<cute/", "CUTLASS"),
    (r"\bcurand\w*", "cuRAND"),
    (
        r"\b(?:cublas|cudnn|cufft|cusparse|cusolver|nccl)[A-Z]\w*|[<\"](?:cublas|cudnn|cufft|nccl)\w*\.h",
        "a CUDA library",
    ),
    (r"\bcudaGraph\w*|\bcuda\w*BeginCapture\w*", "a CUDA graph"),
    (r"\b__v[a-z]+[24]\b", "arithmetic on packed bytes (__vadd4 ...)"),
    (r"\bcuda(?:Texture|Surface)Object_t\b|\btex[123]D\w*\s*[<(]", "a texture or surface"),
    (r"__nv_fp8\w*|cuda_fp8\.h", "an 8-bit float (cuda_fp8.h)"),
    (r"__match_(?:any|all)_sync|__reduce_\w+_sync", "a warp match or reduce intrinsic"),
    (r"\bPYBIND11_MODULE\b", "PYBIND11_MODULE (bind with `functions` or TORCH_LIBRARY)"),
]


def translate(source: str, name: str = "kernels") -> str:
    """The C++ of a CUDA source, for `cuda_on_cpu.h`. Raises NotOnCpu for what that cannot run."""
    refuse_what_needs_a_gpu(source, name)
    for rewrite in (_shared_memory, _launches, _data_pointers, _empty_tensors, _device_names):
        source = rewrite(source)
    return source


def refuse_what_needs_a_gpu(source: str, name: str = "kernels"):
    """Raise NotOnCpu at the first construct of `source` that the CPU build lacks.

    Lines that are left out when CUDA_ON_CPU is defined may hold anything:

        #ifdef CUDA_ON_CPU
          y[i] = x[i];
        #else
          asm volatile("st.global.cs.f32 [%0], %1;" :: "l"(y + i), "f"(x[i]));
        #endif
    """
    text = _without_gpu_only_lines(_without_comments(source, strings=False))
    code = _without_gpu_only_lines(_without_comments(source))
    includes = re.sub(r"(?m)^(?!\s*#\s*include).*$", "", text)
    refusals = []
    for pattern, construct in _NOT_ON_CPU:
        # Quoted text only counts in an #include.
        match = re.search(pattern, code) or re.search(pattern, includes)
        if match:
            refusals.append((code.count("\n", 0, match.end()) + 1, construct))
    if refusals:
        line, construct = min(refusals)
        file = name if name.endswith((".cpp", ".cu")) else f"{name}.cu"
        raise NotOnCpu(
            f"{file} line {line}: {construct} cannot run on the CPU; put it under "
            "`#ifndef CUDA_ON_CPU` with a plain version beside it, or use a machine with a GPU."
        )


def namespaces_of(source: str) -> list[str]:
    """The namespaces under torch.ops that the TORCH_LIBRARY blocks of a source define."""
    pattern = r"\bTORCH_LIBRARY(?:_FRAGMENT|_IMPL)?\s*\(\s*(\w+)"
    return list(dict.fromkeys(re.findall(pattern, _without_comments(source))))


def without_pybind11(source: str) -> tuple[str, dict[str, str]]:
    """`source` without its PYBIND11_MODULE, and the functions that it binds by their names in Python.

    A module that binds anything but functions stays where it is, and translate() refuses it.
    """
    code = _without_comments(source)
    module = re.search(r"\bPYBIND11_MODULE\s*\(\s*\w+\s*,\s*(\w+)\s*\)\s*\{", code)
    if not module:
        return source, {}
    end = _end_of_bracket(code, module.end())
    body = _without_comments(source[module.end() : end - 1], strings=False)
    functions = re.findall(
        rf"\b{module[1]}\s*\.\s*def\s*\(\s*\"(\w+)\"\s*,\s*&?\s*([\w:]+)\s*[,)]", body
    )
    if code.count(";", module.end(), end) != len(functions):
        return source, {}
    return _replace(source, [(module.start(), end, "")]), dict(functions)


def _without_comments(source: str, strings: bool = True) -> str:
    """`source` with spaces in place of comments and, if `strings`, of quoted text. Positions stay the same."""
    comments = r"//[^\n]*|/\*.*?\*/"
    quoted = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''

    def blank(match):
        if match["quoted"] and not strings:
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(rf"(?s:{comments})|(?P<quoted>{quoted})", blank, source)


def _without_gpu_only_lines(code: str) -> str:
    """`code` with empty lines where the preprocessor drops them because CUDA_ON_CPU is defined."""
    hidden = []  # one entry for each open #if: are its lines dropped on the CPU?
    ours = []  # and does it test CUDA_ON_CPU?
    lines = code.split("\n")
    for i, line in enumerate(lines):
        directive = re.match(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b\s*(.*?)\s*$", line)
        word = directive[1] if directive else ""
        if word.startswith("if"):
            ours.append(word != "if" and directive[2] == "CUDA_ON_CPU")
            hidden.append(ours[-1] and word == "ifndef")
        elif word == "else" and ours and ours[-1]:
            hidden[-1] = not hidden[-1]
        elif word == "endif" and ours:
            ours.pop()
            hidden.pop()
        elif any(hidden):
            lines[i] = ""
    return "\n".join(lines)


def _replace(source: str, edits: list[tuple[int, int, str]]) -> str:
    """`source` with each (start, end, new text) applied; the lines that follow keep their numbers."""
    parts, position = [], 0
    for start, end, new in edits:
        missing = source.count("\n", start, end) - new.count("\n")
        parts += [source[position:start], new, "\n" * missing]
        position = end
    return "".join(parts) + source[position:]


# ---- kernel<<<grid, block, bytes, stream>>>(...) ---------------------------------------------


def _launches(source: str) -> str:
    code, edits = _without_comments(source), []
    for match in re.finditer(r"<<<(.*?)>>>", code, re.S):
        start = _start_of_kernel_name(code, match.start())
        kernel = " ".join(code[start : match.start()].split())
        call = f"[&](auto... a_) {{ {kernel}(a_...); }}"
        names = ",".join(_parameter_names(code, kernel))
        launch = f'::cuda_on_cpu::Launch({match[1]}).kernel("{kernel}", "{names}", {call})'
        edits.append((start, match.end(), launch))
    return _replace(source, edits)


def _parameter_names(code: str, kernel: str) -> list[str]:
    """What the kernel calls its parameters; [] where its definition is not in this source."""
    name = re.sub(r"<.*", "", kernel, flags=re.S).split("::")[-1].strip()
    head = re.search(rf"__global__\b[^;{{}}]*?\b{re.escape(name)}\s*\(", code) if name else None
    if not head:
        return []
    parameters = code[head.end() : _end_of_bracket(code, head.end()) - 1]
    ends = (
        re.search(r"(\w*)\s*(?:\[[^\]]*\]\s*)*(?:=.*)?$", p, re.S)
        for p in _split_at_commas(parameters)
    )
    return [end[1] for end in ends]


def _start_of_kernel_name(code: str, end: int) -> int:
    """Where the name that ends before `end` begins: `ops::kernel<float, 4>`."""
    at = len(code[:end].rstrip())
    if code[at - 1] == ">":
        at = _start_of_bracket(code, at, "<", ">")
    return at - _length_backwards(r"\s*[\w:]*", code, at)


def _length_backwards(reversed_pattern: str, code: str, end: int) -> int:
    """How many characters before `end` the pattern matches, read backwards; a search would begin at the top."""
    match = re.match(reversed_pattern, code[:end][::-1])
    return match.end() if match else 0


def _start_of_bracket(code: str, end: int, opening: str, closing: str) -> int:
    """Where the bracket that closes before `end` was opened."""
    depth, at = 0, end
    while at > 0:
        at -= 1
        depth += (code[at] in closing) - (code[at] in opening)
        if depth == 0:
            break
    return at


# ---- __shared__ ------------------------------------------------------------------------------

_ALIGNMENT = r"(?:__align__|alignas)\s*\(([^()]*)\)"
_SHARED = re.compile(
    rf"((?:(?:extern|static|volatile|{_ALIGNMENT})\s+)*)\b__shared__\b\s*((?:\{{[^{{}}]*\}}|[^;{{}}])*);",
    re.S,
)


def _shared_memory(source: str) -> str:
    code = _without_comments(source)
    return _replace(source, [(*m.span(), _shared_declaration(m)) for m in _SHARED.finditer(code)])


def _shared_declaration(match: re.Match) -> str:
    before, declaration = match[1], match[3]
    alignment = re.search(_ALIGNMENT, before + declaration)
    declaration = re.sub(_ALIGNMENT, "", declaration)
    first, *others = _split_at_commas(declaration)
    array = r"(\w+)\s*((?:\[[^\]]*\]\s*)*)\s*"
    head = re.fullmatch(rf"\s*(.*[\s>*&]){array}", first, re.S)
    tails = [re.fullmatch(rf"\s*{array}", other, re.S) for other in others]
    if not head or None in tails:
        raise NotOnCpu(f"cannot read the declaration `__shared__ {' '.join(match[3].split())};`")
    element, result = " ".join(head[1].split()), []
    if "{" in element:  # a struct or union defined here, with or without a name
        kind, _, body = element.partition("{")
        words = kind.split()
        element = words[1] if len(words) > 1 else f"{head[2]}_type_"
        result.append(f"{words[0]} {element} {{{body};")
    element += " volatile" if "volatile" in before else ""
    for name, sizes in [(head[2], head[3]), *(tail.groups() for tail in tails)]:
        if "extern" in before:
            get = f'::cuda_on_cpu::dynamic_slot.get_dynamic<{element}>("{name}")'
            result.append(f"{element}* {name} = {get};")
        else:
            shape = f"{element}{''.join(sizes.split())}" + (
                f", {alignment[1]}" if alignment else ""
            )
            slot = f"static ::cuda_on_cpu::SharedSlot {name}_slot_;"
            result.append(f'{slot} auto& {name} = {name}_slot_.get<{shape}>("{name}");')
    return " ".join(result)


def _split_at_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


# ---- x.data_ptr<T>() -------------------------------------------------------------------------

_DATA_POINTER = re.compile(
    r"\s*\.\s*(?:template\s+)?"
    r"(?:(?:const_|mutable_)?data_ptr\b|(?:packed_)?accessor(?:32|64)?\s*<|data\s*<[\w:\s]+>\s*\()"
)


def _data_pointers(source: str) -> str:
    code, edits = _without_comments(source), []
    for match in _DATA_POINTER.finditer(code):
        start = _start_of_expression(code, match.start())
        edits.append(
            (start, match.start(), f"::cuda_on_cpu::noted({source[start : match.start()]})")
        )
    return _replace(source, edits)


def _start_of_expression(code: str, end: int) -> int:
    """Where the tensor that ends before `end` begins: `f(a)[0].grad()` has names, calls and members."""
    at = end
    while True:
        while at and code[at - 1] in ")]":
            at = _start_of_bracket(code, at, "([", ")]")
        at -= _length_backwards(r"[\w:]*", code, at)
        member = _length_backwards(r"\s*(?:\.|>-)", code, at)
        if not member:
            return at
        at -= member


# ---- torch::empty ----------------------------------------------------------------------------

_EMPTY = re.compile(
    r"\b(?:torch|at)::empty(?:_like|_strided)?\s*\(|\s*\.\s*new_empty(?:_strided)?\s*\("
)


def _empty_tensors(source: str) -> str:
    """Mark uninitialized tensors, so that checked mode reports a kernel that reads one."""
    code, edits = _without_comments(source), []
    for match in _EMPTY.finditer(code):
        member = match[0].lstrip().startswith(".")
        start = _start_of_expression(code, match.start()) if member else match.start()
        end = _end_of_bracket(code, match.end())
        edits += [(start, start, "::cuda_on_cpu::made_empty("), (end, end, ")")]
    return _replace(source, sorted(edits))


def _end_of_bracket(code: str, start: int) -> int:
    """The position after the bracket that is open before `start`."""
    depth, at = 1, start
    while depth and at < len(code):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        at += 1
    return at


# ---- Names -----------------------------------------------------------------------------------

_NAMES = [
    (r"\.\s*is_cuda\s*\(\s*\)", ".is_cpu()"),
    (r"\bkCUDA\b", "kCPU"),
    (r"\bNULL\b", "nullptr"),  # NULL is a number to the lambda that a launch becomes
    (r"\b(DeviceType|DispatchKey|Backend)::CUDA\b", r"\1::CPU"),
    (r"(\bTORCH_LIBRARY_IMPL\s*\(\s*\w+\s*,\s*(?:Autograd)?)CUDA\b", r"\1CPU"),
    (r"(?<!\(\()\b__noinline__\b", "__attribute__((noinline))"),
    # The cast of every book; without it cudaMalloc knows what its memory will hold.
    (r"\b(cuda(?:Malloc\w*|HostAlloc)\s*\(\s*)\(\s*void\s*\*\s*\*\s*\)", r"\1"),
    (r"\b(cuda(?:Malloc\w*|HostAlloc)\s*\(\s*)reinterpret_cast\s*<\s*void\s*\*\s*\*\s*>", r"\1"),
]


def _device_names(source: str) -> str:
    for pattern, new in _NAMES:
        code = _without_comments(source)
        source = _replace(source, [(*m.span(), m.expand(new)) for m in re.finditer(pattern, code)])
    return source
