"""Make torch believe in one GPU, so that Inductor writes the code it would write for that GPU.

    with fake_gpu():
        x = torch.empty(1024, device="cuda")     # a fake tensor: shape, strides, dtype, no memory
        torch.compile(torch.relu)(x)

Inductor needs four things from a GPU before it writes one line of Triton, and each has a stand-in here:

    what the GPU is      a table of properties (H200), which torch.cuda's functions return
    tensors on it        FakeTensorMode: everything about a tensor but its numbers
    autograd's engine    a short one in Python; the C++ engine starts no thread for a missing GPU
    a Triton target      GPUTarget("cuda", 90, 32), to which Triton's compiler needs no driver

Where it differs from a GPU: nothing is computed. Whatever asks for a number (`x.item()`,
`if x.sum() > 0`, an autotuning run, the timing of a padded matmul) fails; `output_code` pads nothing.
Attention takes the math route, products and a softmax. All of it rests on private parts of torch, so the
versions are checked by `lib.nogpu.inductor` and the result is compared in `lib/tests/nogpu/test_inductor.py`.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

from lib.nogpu.driver import cudas_own_guard

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# What torch.cuda.get_device_properties returns. Inductor reads the number of SMs (streaming
# multiprocessors) and the limits of one SM; an H100 has the same values but for its memory.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 * 10**9,
    L2_cache_size=60 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    is_integrated=0,
    gcnArchName="",
)


@contextlib.contextmanager
def fake_gpu(properties=H200):
    """Inside, torch sees one GPU with these properties, and every tensor made is fake."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cudas_own_guard())
        # allow_non_fake_inputs: a constant inside a compiled function is a real CPU tensor
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for patch in (
            *_patches_of_torch_cuda(properties),
            *_patches_of_fake_tensors(),
            *_patches_of_triton(properties),
            *_patches_of_the_compiler(),
        ):
            stack.enter_context(patch)
        _clear_device_caches()
        stack.callback(_clear_device_caches)
        yield


def _patches_of_torch_cuda(properties):
    """torch.cuda, and the copy of its functions that Dynamo keeps, answer for the fake GPU."""
    from torch._dynamo.device_interface import CudaInterface

    capability = (properties.major, properties.minor)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *device: properties,
        "get_device_capability": lambda *device: capability,
        "get_device_name": lambda *device: properties.name,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *device: None,
        # AOTAutograd saves the state of the GPU's random generator while it traces; here there is none
        "get_rng_state": lambda *device: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
        # torch.cuda.device(...) and its guards switch GPUs with these; there is only one
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        yield mock.patch.object(torch.cuda, name, answer)
        if name in vars(CudaInterface):
            yield mock.patch.object(CudaInterface, name, staticmethod(answer))


def _patches_of_fake_tensors():
    """The first fake tensor on cuda would touch the driver; it need not."""
    yield mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    yield mock.patch("torch._subclasses.fake_tensor.init_gpu_context")
    # What Dynamo leaves to eager, as it does nn.LSTM, runs on fake tensors; cuDNN would ask the driver first.
    yield torch.backends.cudnn.flags(enabled=False)
    # A GPU's convolutions are cuDNN's, though, and PyTorch's CPU build does not have it to ask.
    yield mock.patch.object(
        torch._C, "_conv_determine_backend_memory_format", _cudnns_memory_format
    )


def _cudnns_memory_format(input, weight, backend):
    """As at::native::cudnn_conv_suggest_memory_format: channels last if one of the two is, but for float64."""
    suggested = [torch._prims_common.suggest_memory_format(t) for t in (input, weight)]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if last in suggested and torch.float64 not in (input.dtype, weight.dtype):
        return last
    return torch.contiguous_format


def _patches_of_triton(properties):
    """Triton compiles for a target, which is a name and a number; only finding it out needs a driver."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", properties.major * 10 + properties.minor, properties.warp_size)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    backend = make_backend(target)
    yield mock.patch("torch.utils._triton.triton_backend", return_value=backend)
    yield mock.patch.object(triton.runtime.driver, "_active", driver)


def _patches_of_the_compiler():
    import torch._functorch.config as aot_config
    import torch._inductor.config as inductor_config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    # With a cache hit there is no code generation, and so no text. Worker processes have no fake GPU.
    yield inductor_config.patch(fx_graph_cache=False, compile_threads=1)
    # The backward graph is normally compiled when backward() runs: here nothing runs.
    yield aot_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False)
    # AOTAutograd traces the backward graph by calling torch.autograd.grad.
    yield mock.patch.object(torch.autograd, "grad", grad)

    # To recognise constants such as torch.full(n, 2.0) and x * 0, Inductor really runs them on their device.
    prepare = Folder.__init__

    def prepare_on_cpu(self, *args, **options):
        with OnCPU():
            prepare(self, *args, **options)

    def fold_on_cpu(self, *args):
        with OnCPU():
            return super(Folder, self).run(*args)

    yield mock.patch.object(Folder, "__init__", prepare_on_cpu)
    yield mock.patch.object(Folder, "run", fold_on_cpu, create=True)


class OnCPU(TorchDispatchMode):
    """Every `device=` given to a torch op inside means the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _clear_device_caches():
    """Empty the caches in which torch keeps facts about the GPU (has_triton and the like).

    Called on the way in, and on the way out so that nothing of the fake GPU stays behind. The hash of
    Triton's own files stays cached: a GPU does not change it, and computing it takes seconds.
    """
    import torch._inductor.utils
    import torch.utils._triton
    from torch._inductor.runtime.hints import DeviceProperties

    cached = [DeviceProperties.create]
    for module in (torch.utils._triton, torch._inductor.utils):
        cached += [
            f for name, f in vars(module).items() if "hash" not in name and "key" not in name
        ]
    for function in cached:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@torch._dynamo.disable  # torch's engine is C++, which Dynamo does not trace
@torch.no_grad()  # as the engine runs when create_graph is False
def grad(outputs, inputs, grad_outputs=None, allow_unused=False, **_):
    """torch.autograd.grad, in Python: walk the recorded nodes from the newest back to the inputs.

    torch's own engine starts a thread per device and refuses cuda where there is none. A node, called
    with the gradients of its outputs, returns those of its inputs; that call is ordinary torch ops, which
    is what AOTAutograd wants to see.
    """
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    grad_outputs = _as_list(grad_outputs) or [None] * len(outputs)
    received = {}  # node -> {index of the node's output: gradient summed so far}
    output_edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
    input_edges = [torch.autograd.graph.get_gradient_edge(t) for t in inputs]
    for output, edge, dy in zip(outputs, output_edges, grad_outputs):
        _accumulate(
            received, edge.node, edge.output_nr, torch.ones_like(output) if dy is None else dy
        )
    nodes = _reachable(edge.node for edge in output_edges)
    for node in sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True):
        is_leaf = not node.next_functions
        if is_leaf or node not in received:
            continue
        dys = [received[node].get(i) for i in range(len(node._input_metadata))]
        for (next_node, i), dx in _gradients_of(node, dys):
            _accumulate(received, next_node, i, dx)
    return tuple(received.get(edge.node, {}).get(edge.output_nr) for edge in input_edges)


def _gradients_of(node, dys):
    """((next node, which of its outputs), gradient) for the inputs of a node."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return zip(node.next_functions, _as_list(node(*dys)))
    # A torch.autograd.Function returns a gradient for each argument, tensor or not.
    dxs = [dx for dx, needed in zip(_as_list(node.apply(*dys)), node.needs_input_grad) if needed]
    return zip([edge for edge in node.next_functions if edge[0] is not None], dxs)


def _accumulate(received, node, i, gradient):
    """Add a gradient to what a node has received, in the shape and dtype of the node's output."""
    if node is None or gradient is None:
        return
    expected = node._input_metadata[i]
    if tuple(gradient.shape) != tuple(expected.shape):  # the output was broadcast
        gradient = gradient.sum_to_size(expected.shape)
    gradient = gradient.to(expected.dtype)
    so_far = received.setdefault(node, {}).get(i)
    received[node][i] = gradient if so_far is None else so_far + gradient


def _reachable(nodes):
    visited, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node is not None and node not in visited:
            visited.add(node)
            todo += [next_node for next_node, _ in node.next_functions]
    return visited


def _as_list(value):
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]
