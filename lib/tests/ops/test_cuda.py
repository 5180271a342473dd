"""The .cu files: what their text keeps to, what nvcc makes of them, what the checker sees, what they refuse."""

import importlib
import re

from lib import machine
from lib.measure import registry
from lib.nogpu import cuda
from lib.ops import _host as host
from lib.recorded.results import ROOT

import pytest
import torch

OPS = sorted(path.stem for path in (ROOT / "lib/ops").glob("*.cu"))
ops = pytest.mark.parametrize("op", OPS)
needs_cuda = pytest.mark.skipif(bool(cuda.why_no_cuda()), reason=str(cuda.why_no_cuda()))
needs_checker = pytest.mark.skipif(machine.HAS_GPU, reason="the checker belongs to the CPU build")


def source(op):
    return (ROOT / f"lib/ops/{op}.cu").read_text()


def forward(op):
    flags = ("-ftz=true",) if op == "softmax" else ()
    return host.load_cuda(importlib.import_module(f"lib.ops.{op}").__file__, *flags)


def tensors(op, shape, dtype=torch.float32):
    inputs = registry.find(op).configured().inputs(shape, dtype, machine.device())
    return [t.detach() for t in inputs if isinstance(t, torch.Tensor)]


# --- text ----------------------------------------------------------------------------------------------------

# where the code for the GPU begins and ends
DEVICE_CODE = {
    "add_relu": ("__global__", "void launch"),
    "gelu": ("__device__ __forceinline__ float gelu_tanh", "#ifndef STANDALONE"),
    "lora_epilogue": ("struct Identity", "void launch"),
    "matmul": ("", "void launch"),
    "softmax": ("__global__", "void launch"),
}


@ops
def test_the_source_uses_no_double_by_accident(op):
    text, (first, last) = re.sub(r"//[^\n]*", "", source(op)), DEVICE_CODE[op]
    code = text[text.index(first) : text.index(last)]
    code = re.sub(r"(?s)__forceinline__ double.*?\n(}|.*?}\n)", "", code)
    code = re.sub(r"Math\(-?[\d.]+\)", "", code)  # of the type that is computed in
    assert len(code) > 500
    assert not re.search(r"\d\.\d*(?!\d*f)", code), "a literal without f is a double"


@ops
def test_the_source_launches_as_pytorch_does(op):
    text = source(op)
    assert "getCurrentCUDAStream" in text and "CUDAGuard" in text
    assert "cudaDeviceSynchronize" not in text.partition("#else")[0]


# softmax: two kernels, four dtypes, wide and single loads; clusters for three dtypes
KERNELS = {"add_relu": 8, "gelu": 16, "lora_epilogue": 48, "matmul": 8, "softmax": 19}


@ops
def test_nvcc_compiles_it_without_spills(op):
    if not cuda.find_nvcc() or cuda.why_no_cuda():
        pytest.skip("there is no nvcc")
    kernels = cuda.nvcc_check(source(op))
    assert len(kernels) == KERNELS[op]
    wide = "double" if op == "softmax" else "no kernel"
    assert not [k.kernel for k in kernels if k.spill_store_bytes and wide not in k.kernel]
    if op == "matmul":
        two_at_a_time = [k for k in kernels if re.search(r"(Half|BFloat16), 8|float, 4", k.kernel)]
        assert len(two_at_a_time) == 3
        assert all(k.registers <= 128 for k in two_at_a_time), "one thread block to an SM"


# --- values and traffic --------------------------------------------------------------------------------------

# op: pairs of what `forward` takes after its tensors, and what eager does
MORE = {
    "gelu": [((f == "tanh", wide), (f,)) for f in ("none", "tanh") for wide in (True, False)],
    "lora_epilogue": [((0.5, n), (0.5, a)) for n, a in enumerate(host.ACTIVATIONS)],
}
SHAPES = {
    "gelu": [(1, 1), (1, 3), (1, 8), (1, 127), (1, 1024), (1, 1031)],
    "softmax": [(1, 1), (5, 7), (9, 33), (3, 781), (2, 1024), (2, 1025), (1, 4099)],
}
# op: pairs of a shape and how often as many bytes as x has are read: of a bias, a piece for each piece of x
READS = {
    "add_relu": [((8, 640), 2)],
    "gelu": [((1, 1031), 1)],
    "lora_epilogue": [((8, 640), 3)],
    "softmax": [((8, 640), 1), ((7, 781), 1), ((3, 2049), 2)],
}
elementwise = pytest.mark.parametrize(
    "op", READS
)  # a matrix product counts in tiles: test_matmul.py


@needs_cuda
@needs_checker
@elementwise
def test_it_is_right_and_clean_under_the_checker(op):
    eager, checked = registry.find(op).eager, forward(op)  # with no GPU the tests build all checked
    for shape in SHAPES.get(op, [(1, 1), (5, 7), (17, 33), (9, 640), (3, 4096)]):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            inputs = tensors(op, shape, dtype)
            for more, how in MORE.get(op, [((), ())]):
                checked.forward(*inputs, y := torch.empty_like(inputs[0]), *more)
                want = eager(*(t.double() for t in inputs), *how)
                torch.testing.assert_close(y, want.to(dtype))


@needs_cuda
@needs_checker
@elementwise
def test_it_reads_and_writes_what_it_has_to(op):
    checked = forward(op)
    for shape, reads in READS[op]:
        x, *others = tensors(op, shape)
        for more, _ in MORE.get(op, [((), ())]):
            cuda.memory_traffic(checked)
            checked.forward(x, *others, torch.empty_like(x), *more)
            traffic = cuda.memory_traffic(checked)
            assert traffic.bytes_written == x.nbytes
            ends = 64 * len(x) if op == "softmax" else 0  # those of a row are read once
            assert reads * x.nbytes - ends <= traffic.bytes_read <= reads * x.nbytes


# --- what is refused -----------------------------------------------------------------------------------------


def bad_calls(op):
    """(arguments, what the error says)"""
    if op == "matmul":
        a, b = tensors(op, (4, 8, 6))[:2]
        y = torch.empty(4, 6, device=a.device)
        yield (a, b, y[:3]), r"\(M, K\)"
        yield (a, b[:7], y), r"\(K, N\)"
        yield (a[0], b, y), r"\(M, K\)"
        yield (a, b.t().contiguous().t(), y), "contiguous"
        yield (a, b, torch.empty(6, 4, device=a.device).t()), "contiguous"
        yield (a, b, y.half()), "one dtype"
        return
    x, *others = tensors(op, (4, 8))
    narrow = x[:, :4].contiguous()
    if op in ("gelu", "softmax"):
        more = (True, True) if op == "gelu" else ()
        yield (x, x[:3], *more), "one shape"
        yield (x.t(), x.t(), *more), "contiguous"
        yield (x, x.half(), *more), "one dtype"
    if op == "softmax":
        yield (x[0], x[0]), r"\(M, N\)"
        yield (x[:, ::2], narrow), "contiguous"
        yield (x, torch.empty(8, 4, device=x.device).t()), "contiguous"
    if op == "add_relu":
        (bias,) = others
        yield (x, bias[:3], x), "must be"
        yield (x, bias, x[:3]), "must be"
        yield (x[:, ::2], bias[:4], narrow), "contiguous"
        yield (x, bias.half(), x), "one dtype"
    if op == "lora_epilogue":
        delta, bias = others
        yield (x, delta, bias[:3], x, 1.0, 0), "must be"
        yield (x, delta[:3], bias, x, 1.0, 0), "must be"
        yield (x[:, ::2], delta[:, ::2], bias[:4], narrow, 1.0, 0), "contiguous"
        yield (x, delta.half(), bias, x, 1.0, 0), "one dtype"
        yield (x, delta, bias, x, 1.0, 6), "activation"


@needs_cuda
@ops
def test_it_says_what_is_wrong(op):
    for bad, message in bad_calls(op):
        with pytest.raises(ValueError, match=message):
            forward(op).forward(*bad)
