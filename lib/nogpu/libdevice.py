"""libdevice in Triton's interpreter: PyTorch's functions for those in common use, an error for the rest."""

import math

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as upstream

# The same name and meaning in PyTorch, element by element, of float32 and float64.
_SAME = (
    "tanh erf erfc exp exp2 expm1 log log2 log1p log10 sqrt rsqrt sin cos tan atan asin acos sinh"
    " cosh asinh acosh atanh abs floor ceil trunc pow atan2 fmod isnan isinf signbit lgamma copysign"
    " hypot erfinv nextafter"
)


def _half_away(x):
    """Rounded to the nearest whole number, halves away from 0."""
    whole = torch.trunc(x)
    return whole + torch.where((x - whole).abs() >= 0.5, torch.sign(x), 0)


def _bits(x, n):
    """The bits of whole numbers, the lowest first, in a new last dimension."""
    return (x.to(torch.int64)[..., None] >> torch.arange(n)) & 1


def _popc(x):
    return _bits(x, 8 * x.element_size()).sum(-1).int()


def _clz(x):
    n = 8 * x.element_size()
    return (n - (_bits(x, n) * torch.arange(1, n + 1)).amax(-1)).int()


def _ffs(x):
    n = 8 * x.element_size()
    lowest = n + 1 - (_bits(x, n) * torch.arange(n, 0, -1)).amax(-1)
    return torch.where(lowest > n, 0, lowest).int()


def _mulhi(x, y):
    if x.element_size() != 4:
        raise NotImplementedError("libdevice.mulhi: without a GPU only for 32-bit integers")
    return ((x.to(torch.int64) * y.to(torch.int64)) >> 32).to(x.dtype)


_STAND_INS = {name: getattr(torch, name) for name in _SAME.split()} | {
    "add_rn": torch.add,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "clz": _clz,
    "cospi": lambda x: torch.cos(math.pi * torch.fmod(x, 2)),
    "div_rn": torch.div,
    "erfcx": torch.special.erfcx,
    "exp10": lambda x: 10**x,
    "fast_cosf": torch.cos,
    "fast_dividef": torch.div,
    "fast_exp10f": lambda x: 10**x,
    "fast_expf": torch.exp,
    "fast_log10f": torch.log10,
    "fast_log2f": torch.log2,
    "fast_logf": torch.log,
    "fast_powf": torch.pow,
    "fast_sinf": torch.sin,
    "fast_tanf": torch.tan,
    "fast_tanhf": torch.tanh,
    "fdim": lambda x, y: (x - y).clamp_min(0),
    "ffs": _ffs,
    "finitef": torch.isfinite,
    "float2int_rn": lambda x: torch.round(x).int(),
    "float2int_rz": lambda x: x.int(),
    "float_as_int": lambda x: x.view(torch.int32),
    "fma": lambda x, y, z: (x.double() * y + z).to(x.dtype),
    "int_as_float": lambda x: x.view(torch.float32),
    "isfinited": torch.isfinite,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "ldexp": lambda x, n: torch.ldexp(x, n),
    "llrint": lambda x: torch.round(x).long(),
    "mul_rn": torch.mul,
    "mulhi": _mulhi,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "popc": _popc,
    "rcbrt": lambda x: x.sign() * x.abs() ** (-1 / 3),
    "rcp_rn": torch.reciprocal,
    "remainder": lambda x, y: x - y * torch.round(x / y),
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "rint": torch.round,
    "round": _half_away,
    "saturatef": lambda x: x.clamp(0, 1),
    "sinpi": lambda x: torch.sin(math.pi * torch.fmod(x, 2)),
    "sqrt_rn": torch.sqrt,
    "sub_rn": torch.sub,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)) * torch.where((x < 0) & (x.floor() % 2 != 0), -1, 1),
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}  # fmt: skip


def install():
    """Put the stand-ins where kernels find libdevice. Compiled kernels get the real functions."""
    import triton.language.extra.cuda.libdevice as cuda_libdevice
    import triton.language.extra.libdevice as libdevice

    for module in (libdevice, cuda_libdevice):
        for name, original in list(vars(module).items()):
            if callable(original) and getattr(original, "__module__", "") == module.__name__:
                setattr(module, name, _either(name, original))


def _either(name, original):
    def function(*args, _semantic=None, **options):
        compiling = _semantic is not None and not isinstance(
            _semantic.builder, upstream.InterpreterBuilder
        )
        if compiling:  # lib.nogpu.compile_only compiles in the same process
            return original(*args, _semantic=_semantic, **options)
        return _stand_in(name, args)

    function.__triton_builtin__ = True
    return function


def _stand_in(name, args):
    if name not in _STAND_INS:
        raise NotImplementedError(
            f"libdevice.{name} has no stand-in for the CPU; use a function of tl or tl.math, or write it out"
        )
    first = next((a for a in args if isinstance(a, tl.tensor)), None)
    if first is None:
        raise TypeError(f"libdevice.{name}: give it a tensor, not only Python numbers")
    kinds = {a.dtype.scalar for a in args if isinstance(a, tl.tensor)}
    if narrow := kinds & {tl.bfloat16, tl.float16}:
        raise TypeError(
            f"libdevice.{name} takes float32 and float64, not {narrow.pop()}: convert with .to(tl.float32)"
        )
    data = [a.handle.data if isinstance(a, tl.tensor) else getattr(a, "value", a) for a in args]
    tensors = [torch.from_numpy(np.array(d)) if isinstance(d, np.ndarray) else d for d in data]
    result = _STAND_INS[name](*tensors).numpy()
    scalar = _SCALARS.get(result.dtype.name, first.dtype.scalar)
    kind = tl.block_type(scalar, list(first.shape)) if first.shape else scalar
    return tl.tensor(upstream.TensorHandle(result, scalar), kind)


_SCALARS = {
    "bool": tl.int1,
    "int32": tl.int32,
    "int64": tl.int64,
    "float32": tl.float32,
    "float64": tl.float64,
}
