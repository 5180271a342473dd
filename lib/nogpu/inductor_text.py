"""Read the text that Inductor writes: its graphs, the kernels each launches, and a form to compare.

Used through lib.nogpu.inductor. It reads text only, so it serves code from a log or a file as well.
"""

import ast
import re
from dataclasses import dataclass, field


@dataclass
class KernelInfo:
    """One launch in the text. A kernel that is launched twice is listed twice."""

    name: str
    kind: str  # pointwise, reduction, persistent_reduction, template, ... or extern (cuBLAS, ATen)
    graph: str  # inference, forward, backward
    size_hints: dict = field(default_factory=dict)  # sizes rounded up to a power of 2: x, y, r0_
    fused_ops: list = field(default_factory=list)  # the aten ops fused into it
    source_nodes: list = field(default_factory=list)  # their names in the traced function
    source: str = ""  # the @triton.jit function, or the line of the extern call


def split_graphs(code):
    """[(graph, text)]: the module of each graph; graph is "inference", "forward" or "backward"."""
    graphs = []
    for text in re.split(r"(?m)^(?=# AOT ID)", code):
        head = re.match(r"# AOT ID: \['\d+_(\w+)'\]", text)
        if head:
            graphs.append((head[1], text))
    if not graphs:
        raise ValueError("This is not the output code of Inductor: it has no line `# AOT ID`.")
    return graphs


def kernels(code):
    """Every launch in output code, in order: Triton kernels, and calls into cuBLAS or ATen ("extern")."""
    return [info for graph, text in split_graphs(code) for info in _launches(graph, text)]


def kernel_source(code, which):
    """The source of one kernel of the text, by its position in `kernels(code)` or by its name."""
    infos = kernels(code)
    if isinstance(which, int):
        if not -len(infos) <= which < len(infos):
            raise ValueError(
                f"No kernel {which}: the code launches {len(infos)} (see kernels(code))."
            )
        return infos[which].source
    for info in infos:
        if info.name == which:
            return info.source
    names = ", ".join(dict.fromkeys(info.name for info in infos))
    raise ValueError(f"No kernel named {which!r} in this code; it has {names}.")


def _launches(graph, text):
    tree, lines = ast.parse(text), text.splitlines()
    sources = _triton_sources(tree)
    for call in _calls_of_the_graph(tree):
        callee = ast.unparse(call.func)
        name, _, method = callee.rpartition(".")
        nodes, ops = _comment_above(lines, call.lineno)
        if method == "run" and name in sources:
            kind, size_hints, source = _describe(sources[name])
            yield KernelInfo(name, kind, graph, size_hints, ops, nodes, source)
        elif callee.startswith(("extern_kernels.", "aten.", "torch.ops.")):
            line = ast.unparse(call)
            yield KernelInfo(callee, "extern", graph, {}, ops, nodes, line)
        elif callee.startswith("workspace_") and method == "sum":
            # what each program of the kernel above left in the workspace, summed by ATen
            yield KernelInfo("aten.sum", "extern", graph, {}, ops, nodes, ast.unparse(call))


def _triton_sources(tree):
    """{name: source} from the assignments `name = async_compile.triton('name', '''source''')`."""
    sources = {}
    for node in tree.body:
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            sources[node.targets[0].id] = call.args[1].value
    return sources


def _calls_of_the_graph(tree):
    """The calls in `def call(...)`, in the order of their lines, and those of both branches of a torch.cond."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    by_name = {node.name: node for node in functions}

    def calls_in(body):
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            branch = by_name.get(ast.unparse(call.func).rpartition(".")[2])
            if branch is None or branch is body:
                yield call
            else:
                yield from calls_in(branch)

    return list(calls_in(by_name["call"]))


def _comment_above(lines, lineno):
    """Source nodes and ATen ops from the comment that Inductor puts above each launch."""
    for line in reversed(lines[: lineno - 1]):
        match = re.search(
            r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]", line
        )
        if match:
            return [[name for name in group.split(", ") if name] for group in match.groups()]
        if "raw_stream" not in line and "empty_strided" not in line:
            break  # another statement: this launch has no comment of its own
    return [], []


def _describe(source):
    """Kind, size hints and the bare function of one kernel's source."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    # The one with @triton_heuristics.pointwise(size_hints={...}, ...); beside it may stand its helpers.
    decorators = [f.decorator_list[0] for f in functions]
    (heuristic,) = [d for d in decorators if ast.unparse(d).startswith("triton_heuristics.")]
    hints = {k.arg: k.value for k in heuristic.keywords}.get("size_hints")
    size_hints = {} if hints is None else ast.literal_eval(hints)
    return heuristic.func.attr, size_hints, source[source.index("@triton.jit") :].strip() + "\n"


def normalize(code):
    """The text without what changes from run to run: paths, hashes, graph numbers, trailing blanks."""
    code = re.sub(r"(?m)^# kernel path: .*\n", "", code)
    code = re.sub(r"'backend_hash': '\w+'", "'backend_hash': ''", code)
    code = re.sub(r"(?m)^# AOT ID: \['\d+_", "# AOT ID: ['0_", code)
    code = re.sub(r"(?m)^# code hash: .*\n", "", code)
    code = re.sub(r"compiled_module_main\('.*?',", "compiled_module_main('',", code)
    return re.sub(r"(?m)[ \t]+$", "", code)
