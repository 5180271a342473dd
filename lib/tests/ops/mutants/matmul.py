"""Mutants of lib/ops/matmul.py. Its inputs have three shapes: all checks that run on them are here."""

import contextlib
import functools
import itertools
import sys

from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.matmul import matmul_eager
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch

ACTIVATIONS = ("identity", "relu", "gelu", "silu", "sigmoid")
NAN, INF = float("nan"), float("inf")


def _tensors(case=(17, 33, 40), dtype=torch.float32):
    """a, b and bias, leaves that require grad."""
    m, n, k = case
    scale = max(1, k) ** -0.25
    made = [torch.randn(m, k) * scale, torch.randn(k, n) * scale, torch.randn(n)]
    return [t.to(dtype).requires_grad_() for t in made]


def _detached(*args, **kwargs):
    return [t.detach() for t in _tensors(*args, **kwargs)]


def _in_parts(module, n_parts=3):
    """Split-K, whatever the shape."""

    def launch(y, *args):
        module._launch_split(y, *args, module._tiles(args[-1], y.device)[-1], n_parts)

    def matmul_split(a, b, bias=None, activation="identity", allow_tf32=False):
        return module._call("matmul_split", launch, a, b, bias, activation, allow_tf32)

    return matmul_split


def _registered(module):
    def matmul_registered(a, b, bias=None, activation="identity"):
        return module.matmul_op(a, b, bias, activation)[0]

    return matmul_registered


def _kinds_of_kernels(module):
    return [module.matmul_triton, module.matmul_persistent, _in_parts(module)]


def _check(version, inputs, activation="identity", slack=1e-6, eager=matmul_eager):
    bound = functools.wraps(version)(functools.partial(version, activation=activation))
    eager = functools.partial(eager, activation=activation)
    check_against_float64(bound, eager, *inputs, slack=slack)


@contextlib.contextmanager
def _with(module, **values):
    """The module with other values of some of its names."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def check_definition(op, module):
    a, b, bias = _detached((5, 6, 7), torch.float64)
    z = (a[:, :, None] * b).sum(1) + bias
    want = {
        "identity": z,
        "relu": z.clamp(min=0),
        "silu": z * z.sigmoid(),
        "sigmoid": z.sigmoid(),
        "gelu": 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
    }
    for activation, expected in want.items():
        torch.testing.assert_close(module.matmul_eager(a, b, bias, activation), expected)
    torch.testing.assert_close(module.matmul_eager(a, b), z - bias)


def check_refusals(op, module):
    a, b, bias = _detached((4, 6, 5))
    wrong = {
        "as many columns as b has rows": (a, b[:3], bias),
        "cast one of them": (a, b.double(), bias),
        "floating-point": (a.int(), b.int(), bias.int()),
        "one element for each column": (a, b, bias[:1]),
        "must be matrices": (a.new_ones(2, 5, 5), b, bias),
        "activation must be one of": (a, b, bias, "tanh"),
        "move both to one device": (a, b.to("meta"), bias),
    }
    for what, arguments in wrong.items():
        try:
            module.matmul_triton(*arguments)
        except (TypeError, ValueError) as error:
            if what in str(error):
                continue
            raise AssertionError(f"not told: {what}") from error
        raise AssertionError(f"came as far as the kernel: {what}")


def check_values(op, module):
    """Every kernel and every epilogue, on shapes that fill no tile, with and without a bias."""
    for version in _kinds_of_kernels(module):
        for activation, dtype in zip(ACTIVATIONS, [torch.bfloat16, torch.float32] * 3):
            _check(version, _tensors(dtype=dtype), activation)
            _check(version, _tensors((20, 7, 150), dtype)[:2], activation)


def check_specials(op, module):
    for version in [*_kinds_of_kernels(module), module.matmul_naive]:
        for dtype in (torch.float32, torch.bfloat16):
            a, b, bias = _tensors((20, 24, 33), dtype)
            with torch.no_grad():
                a[1, 2], a[3, 32], b[32, 5], b[0, 23], bias[7] = NAN, INF, -INF, NAN, INF
            _check(version, [a, b, bias], "relu", eager=cases.in_float32(matmul_eager))


def check_tails(op, module):
    """Far out, where 1 - sigmoid has lost its digits, and where exp overflows if it is taken the wrong way."""
    z = torch.linspace(-100, 100, 401, dtype=torch.float32)[None]
    one = torch.ones(1, 1)
    for activation in ("gelu", "silu", "sigmoid"):
        bias = z[0].clone().requires_grad_()
        y = module.matmul_triton(one * 0, torch.zeros(1, 401), bias, activation)
        (got,) = torch.autograd.grad(y.sum(), bias)
        exact = z[0].double().requires_grad_()
        want = matmul_eager(one.double() * 0, torch.zeros(1, 401).double(), exact, activation)
        assert (y.double() - want).abs().max() < 1e-5, activation
        assert (got - torch.autograd.grad(want.sum(), exact)[0]).abs().max() < 1e-6, activation


def check_ladder(op, module):
    """Several tiles in each direction, the last of each cut, in both orders of programs."""
    for name, case in [
        ("naive", (50, 40, 20)),
        ("tiled", (300, 150, 40)),
        ("grouped", (300, 150, 40)),
    ]:
        version = getattr(module, f"matmul_{name}")
        for dtype in (torch.float32, torch.bfloat16):
            _check(version, _detached(case, dtype), "silu")
    _check(module.matmul_pipelined, _detached((150, 530, 70), torch.bfloat16), "relu")
    for turned in itertools.product((False, True), repeat=2):
        for case in [(304, 536, 136), (300, 530, 70)]:  # as TMA reads and writes them, and not
            a, b, bias = _detached(case, torch.bfloat16)
            a, b = (t.t().contiguous().t() if turn else t for t, turn in zip((a, b), turned))
            _check(module.matmul_persistent, [a, b, bias], "gelu")
    # a group of eight rows of tiles, and one row beyond it
    places = _detached((9 * 16 - 3, 40, 16))
    tile = module._Tile(16, 16, 16, 1, 1)

    def launch(y, *args):
        module._launch_tiles(y, *args, tile, group=8)

    y, _ = module._forward(*places, "identity", False, launch=launch)
    torch.testing.assert_close(y, matmul_eager(*places), rtol=1e-4, atol=1e-4)


def check_strides(op, module):
    for version in [*_kinds_of_kernels(module), module.matmul_naive]:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = _tensors((20, 24, 36), dtype)
            pieces, gaps = [], []
            for t in (i.detach() for i in inputs[:2]):
                wide = torch.full((80, 80), NAN).to(dtype)
                pieces.append(wide[: t.shape[0], 1 : t.shape[1] + 1].copy_(t))
                wide = wide.clone()
                gaps.append(wide[: 2 * t.shape[0] : 2, : 2 * t.shape[1] : 2].copy_(t))
            turned = [t.detach().t().contiguous().t() for t in inputs[:2]]
            expanded = [t.detach()[:1].expand(t.shape) for t in inputs[:2]]
            bias = inputs[2].detach()
            bias = torch.stack([bias, torch.full_like(bias, NAN)], dim=1)[:, 0]
            for pair in (pieces, gaps, turned, expanded):
                _check(version, [*(t.detach().requires_grad_() for t in (*pair, bias))])


def check_empty(op, module):
    for version in [*_kinds_of_kernels(module)[:2], module.matmul_naive, _registered(module)]:
        for case in [(17, 33, 0), (0, 5, 3), (5, 0, 3)]:
            for dtype in (torch.float32, torch.bfloat16):
                _check(version, _tensors(case, dtype), "silu")


def check_gradients(op, module):
    """dy of strides 0 and of another layout; twice the same, and left alone; one gradient at a time."""
    for activation in ACTIVATIONS:
        inputs = _tensors()
        for dy in [
            torch.ones(()).expand(17, 33),
            torch.randn(33, 17).t(),
            torch.randn(17, 66)[:, ::2],
        ]:
            before = dy.clone()
            y = module.matmul_triton(*inputs, activation)
            first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            first = [t.clone() for t in first]
            second = torch.autograd.grad(y, inputs, dy)
            want = torch.autograd.grad(matmul_eager(*inputs, activation), inputs, dy)
            for a, b, c in zip(first, second, want):
                assert torch.equal(a, b), "a second backward differs"
                torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
            assert torch.equal(dy, before), "dy was changed"
        for k, version in itertools.product(range(3), (module.matmul_triton, _registered(module))):
            others = [t if i == k else t.detach() for i, t in enumerate(inputs)]
            (got,) = torch.autograd.grad(version(*others, activation).sum(), [others[k]])
            (want,) = torch.autograd.grad(matmul_eager(*others, activation).sum(), [others[k]])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def check_strips(op, module):
    """dbias over several strips of rows, each of several steps."""
    with _with(module, _MOST_STRIPS=2):
        for activation in ("identity", "gelu"):
            _check(module.matmul_triton, _tensors((150, 130, 8)), activation)


def check_launches(op, module):
    """No product for a gradient nobody wants, no z for inference, parts that are not empty, each byte once."""
    inputs = _tensors((16, 24, 40), torch.bfloat16)
    for needed, launches in [((1, 0, 0), 2), ((0, 1, 0), 2), ((0, 0, 1), 2), ((1, 1, 1), 4)]:
        some = [t if n else t.detach() for t, n in zip(inputs, needed)]
        for version in (module.matmul_triton, _registered(module)):
            y = version(*some, "relu")
            assert count_traffic(lambda y=y: y.sum().backward()).launches == launches, needed
    with torch.no_grad():
        traffic = count_traffic(lambda: module.matmul_triton(*inputs, "gelu"))
    stored = sum(t.stored for t in traffic.by_argument.values())
    assert stored == 16 * 24 * 2, "z was stored and nobody needs it"
    y, z = module.matmul_op(*inputs, "gelu", False, True)
    assert y.requires_grad and not z.requires_grad, "z has a gradient"
    a, b, _ = _detached((16, 16, 2112), torch.bfloat16)
    traffic = count_traffic(lambda: module.matmul_triton(a, b))
    assert traffic.by_argument["_sum_parts_kernel.parts_ptr"].loaded == 2 * 16 * 16 * 4, "parts"


def check_choice(op, module):
    """Of a tile on a GPU of 132 multiprocessors."""
    device = torch.device("cpu")
    with _with(module, _n_multiprocessors=lambda device: 132):
        for m, n, k in itertools.product([1, 16, 33, 100, 512, 4096, 65536], repeat=3):
            for kind in ("half", "tf32x3"):
                tile, parts = module._choose.__wrapped__(m, n, k, kind, device)
                n_tiles = -(-m // tile.m) * -(-n // tile.n)
                assert tile.m < 2 * max(9, m) and tile.n < 2 * max(9, n), "a tile half empty"
                assert parts >= 1
                resident = {"half": 132, "tf32x3": 264}[kind]
                assert parts == 1 or n_tiles * parts <= resident, "more parts than run at once"
                assert parts == 1 or k // parts >= 8 * tile.k, "parts too short"
                if min(m, n) >= 4096:
                    assert tile == module._tiles(kind, device)[0], "a large product in small tiles"
                    assert parts == 1
        tile, parts = module._choose.__wrapped__(512, 512, 65536, "half", device)
        assert tile[:2] == (128, 256) and parts > 8, "a long K not split"


def check_alignment(op, module):
    """Rows that begin anywhere: loaded element by element in tiles of one stage, large products from copies."""
    launched, launch_tiles = [], module._launch_tiles

    def noted(y, z, a, b, bias, activation, kind, tile, **how):
        wide = all(max(t.stride()) % 16 == t.data_ptr() % 16 == 0 for t in (a, b))
        launched.append((wide, tile.num_stages))
        launch_tiles(y, z, a, b, bias, activation, kind, tile, **how)

    for large, (m, n, k) in itertools.product(
        (False, True), [(20, 33, 48), (20, 48, 37), (32, 32, 48)]
    ):
        a, b, bias = _detached((m, n, k))
        launched.clear()
        with _with(module, _launch_tiles=noted, _LARGE=2**10 if large else 2**32):
            _check(module.matmul_triton, [a, b, bias], "relu")
            if large:  # y is its transpose's transpose
                _check(module.matmul_triton, [a.t().contiguous().t(), b.t().contiguous().t(), bias])
        aligned = large or (n, k) == (32, 48)
        assert all(wide or not aligned for wide, _ in launched), (
            "a large product element by element"
        )
        assert all((stages > 1) == aligned for _, stages in launched), "stages that only wait"


def check_far_apart(op, module):
    """Offsets past 2**31: rows and columns of a and b, steps along K, the incoming gradient."""
    storage = torch.empty(2**31 + 2**27, dtype=torch.float16)
    far = storage.as_strided((3, 16), (2**30, 1)).copy_(torch.randn(3, 16))
    near = {n: torch.randn(16, n).half() for n in (3, 8)}
    for version in (module.matmul_triton, module.matmul_persistent):
        for a, b in [
            (far, near[8]),
            (far.t(), near[3].t()),
            (near[3], far),
            (near[8].t(), far.t()),
        ]:
            _check(version, [t.detach().requires_grad_() for t in (a, b)], "silu")
    for activation in ("identity", "silu"):
        inputs = _tensors((3, 16, 5), torch.float16)
        got = torch.autograd.grad(module.matmul_triton(*inputs, activation), inputs, far)
        want = torch.autograd.grad(matmul_eager(*inputs, activation), inputs, far)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
        inputs = _tensors((16, 3, 5), torch.float16)
        got = torch.autograd.grad(module.matmul_triton(*inputs, activation), inputs, far.t())
        want = torch.autograd.grad(matmul_eager(*inputs, activation), inputs, far.t())
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    far = storage.as_strided((132, 5), (2**24, 1)).copy_(torch.randn(132, 5))
    close = torch.randn(132, 16).half()  # aligned, so that a step is 128 rows of far
    _check(module.matmul_triton, [far.t(), close])
    _check(module.matmul_triton, [close.t(), far])


def check_rounding(op, module):
    """To bfloat16 once, at the end; float64 in float64."""
    for version in _kinds_of_kernels(module):
        a, b, bias = _detached((20, 24, 640), torch.bfloat16)
        want = matmul_eager(a.double(), b.double(), bias.double(), "gelu")
        error = (version(a, b, bias, "gelu").double() - want).abs()
        assert (error <= 0.51 * 2**-7 * want.abs() + 1e-5).all(), "rounded on the way"
        inputs = _tensors((17, 20, 40), torch.float64)
        _check(version, inputs, "silu", slack=1e-13)


def check_tf32(op, module):
    """It is asked for by the caller, forward and backward, or it is not used."""
    seen = []

    class Noted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **options):
                seen.append(options["PRECISION"])
                return self.kernel[grid](*args, **options)

            return launch

    with _with(module, _matmul_kernel=Noted(module._matmul_kernel)):
        for allow, precision in [(False, "tf32x3"), (True, "tf32")]:
            seen.clear()
            a, b, _ = _tensors()
            module.matmul_triton(a, b, allow_tf32=allow).sum().backward()
            assert seen == [precision] * 3, seen


def check_second_derivative(op, module):
    a, b, bias = _tensors()
    dy = torch.randn(17, 33, requires_grad=True)
    (da,) = torch.autograd.grad(
        module.matmul_triton(a, b, bias, "gelu"), [a], dy, create_graph=True
    )
    try:
        (da * a).sum().backward()  # without the error: the part of it that goes through a
    except RuntimeError:
        return
    raise AssertionError("a second derivative does not raise")


def check_autocast(op, module):
    a, b, bias = _tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.matmul_triton(a.bfloat16(), b, bias, "relu")
        assert y.dtype == torch.bfloat16, "autocast passed over"
        assert module.matmul_triton(a.double(), b.double()).dtype == torch.float64


def check_compiled(op, module):
    """With z saved or computed again, with a bias or without."""
    torch._dynamo.reset()
    sys.modules[module.__name__] = module  # where the compiler looks for it
    try:
        _check_compiled(module)
    finally:
        del sys.modules[module.__name__]


def _check_compiled(module):
    for activation in ("identity", "relu", "gelu"):
        inputs = _tensors((9, 10, 11))
        _check(_registered(module), inputs, activation)
        compiled = torch.compile(
            functools.partial(module.matmul_triton, activation=activation),
            fullgraph=True,
            backend="aot_eager",
        )
        eager = functools.partial(matmul_eager, activation=activation)
        check_against_float64(compiled, eager, *inputs, name="compiled")
        check_against_float64(compiled, eager, *inputs[:2], name="compiled without a bias")
    y = compiled(*inputs)
    assert count_traffic(lambda: y.sum().backward()).launches == 4, "multiplied once more"


# The cheap ones first: most mutants die at once.
CHECKS = [
    check_definition,
    check_refusals,
    check_second_derivative,
    check_autocast,
    check_choice,
    check_alignment,
    check_tf32,
    check_tails,
    check_specials,
    check_empty,
    check_values,
    check_rounding,
    check_far_apart,
    check_launches,
    check_gradients,
    check_strips,
    check_strides,
    check_ladder,
    check_compiled,
]

_ROWS = "of bfloat16 on\n    rows = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)\n"
_COLS = "    cols = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)\n"

MUTANTS = [
    # --- the epilogue and its gradient
    Mutant("z = tl.where(z < 0, 0.0, z)", "z = tl.maximum(z, 0.0)", "relu that drops NaN"),
    Mutant(
        "return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * z * z)))",
        "return z / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.04 * z * z)))",
        "gelu: a constant cut off",
    ),
    Mutant("0.134145", "0.044715", "gelu: x³ without its factor 3 in the gradient"),
    Mutant("z * (e * t * t) *", "z * (s * (1.0 - s)) *", "gelu: 1 - s where s is nearly 1"),
    Mutant(
        "s * (1.0 + saved * (1.0 - s))",
        "s * (1.0 + saved * s)",
        "silu: s for 1 - s in the gradient",
    ),
    Mutant("dy * (saved * (1.0 - saved))", "dy * (1.0 - saved)", "sigmoid: half of its gradient"),
    Mutant(
        "tl.where(saved <= 0, 0.0, dy)",
        "tl.where(saved < 0, 0.0, dy)",
        "relu: a gradient where y is 0",
    ),
    Mutant(
        'return activation in ("gelu", "silu")',
        'return activation in ("gelu",)',
        "silu: its slope from y",
    ),
    Mutant(
        "tl.store(z_ptr + offsets, z.to(y_ptr.dtype.element_ty), mask=mask)",
        "tl.store(z_ptr + offsets, y, mask=mask)",
        "y saved for z",
    ),
    Mutant(
        "z_desc.store([row, col], z.to(z_desc.dtype))",
        "z_desc.store([row, col], _activate(z, ACTIVATION).to(z_desc.dtype))",
        "persistent: y saved for z",
    ),
    Mutant(
        "z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(z.dtype)[None, :]",
        "z += tl.load(bias_ptr + rows, mask=rows < n_rows, other=0.0).to(z.dtype)[:, None]",
        "a bias for each row",
    ),
    Mutant(
        "cols = col + tl.arange(0, z.shape[1])",
        "cols = tl.arange(0, z.shape[1])",
        "TMA: the first bias again",
    ),
    # --- the order of tiles
    Mutant(
        "height = tl.minimum(tiles_m - first, GROUP)",
        "height = GROUP",
        "the last group taken for a whole one",
    ),
    Mutant(
        "first = tile // (GROUP * tiles_n) * GROUP",
        "first = tile // (GROUP * tiles_n)",
        "groups that overlap",
    ),
    Mutant(
        "return first + tile % height, tile // height",
        "return first + tile // height, tile % height",
        "rows and columns of tiles mixed up",
    ),
    Mutant(
        "tl.program_id(0), n_tiles, tl.num_programs(0), flatten",
        "tl.program_id(0), tl.num_programs(0), n_tiles, flatten",
        "persistent: one tile for each program",
    ),
    # --- steps along K, split-K
    Mutant(
        "inside = tl.arange(0, BLOCK_K) < n_inner - k",
        "inside = tl.arange(0, BLOCK_K) < n_inner",
        "columns past K added",
    ),
    Mutant(
        "mask=row_mask & inside[None, :], other=0.0)",
        "mask=inside[None, :], other=0.0)",
        "rows past M read",
    ),
    Mutant(
        "a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K",
        "a_ptrs += BLOCK_K",
        "a read as if contiguous",
    ),
    Mutant(
        "a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K",
        "a_ptrs += stride_ak * BLOCK_K",
        "int32 steps in a",
    ),
    Mutant(
        "b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K",
        "b_ptrs += stride_bk * BLOCK_K",
        "int32 steps in b",
    ),
    Mutant("start = tl.program_id(1) * inner_per_part", "start = 0", "every part the first"),
    Mutant(
        "tl.minimum(inner_per_part, n_inner - start)", "(n_inner - start)", "parts that overlap"
    ),
    Mutant(
        "    y_ptr += tl.program_id(1).to(tl.int64) * n_rows * n_cols\n",
        "",
        "parts written over each other",
    ),
    Mutant("        rows += n_rows\n", "", "the first part added again and again"),
    Mutant("    rows -= n_parts * n_rows\n", "", "y written where a part further on would be"),
    Mutant(
        "wide = torch.float64 if y.dtype == torch.float64 else torch.float32\n    inner",
        "wide = y.dtype\n    inner",
        "parts rounded to bfloat16",
    ),
    Mutant(
        "    n_parts = _cdiv(a.shape[1], inner_per_part)  # whole steps are longer, and may be fewer\n",
        "    n_parts += 1\n",
        "a part with nothing in it",
    ),
    Mutant(
        "parts, bias, y, z, n_rows, n_cols, n_parts,",
        "parts, None, y, z, n_rows, n_cols, n_parts,",
        "split-K without the bias",
    ),
    Mutant(
        "COMPUTE=_compute_dtype(a.dtype), GROUP",
        "COMPUTE=tl.float32, GROUP",
        "float64 summed in float32",
    ),
    # --- sizes past 2**31
    Mutant(_ROWS, _ROWS.replace(".to(tl.int64)", ""), "int32 rows of a"),
    Mutant(
        _COLS + "    inner = ",
        _COLS.replace(".to(tl.int64)", "") + "    inner = ",
        "int32 columns of b",
    ),
    Mutant(
        "inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)",
        "inner = start + tl.arange(0, BLOCK_K)",
        "int32 columns of a",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program",
        "rows = pid_m * rows_per_program",
        "int32 rows of dy",
    ),
    # --- halves, TMA
    Mutant("        cols += BLOCK_N // 2\n", "", "both halves in one place"),
    Mutant("            col += BLOCK_N // 2\n", "", "TMA: both halves in one place"),
    Mutant("a_desc.load([k, row]).T if", "a_desc.load([row, k]).T if", "TMA: a transposed twice"),
    Mutant("b_desc.load([col, k]).T if", "b_desc.load([col, k]) if", "TMA: b not transposed"),
    Mutant("pitch % 8 == t.data_ptr() % 16 == 0", "pitch % 8 == 0", "TMA from any address"),
    Mutant(
        "step == 1 and pitch >= view.shape[1] and pitch % 8 ==",
        "step == 1 and pitch >= view.shape[1] and 0 ==",
        "TMA of rows that begin anywhere",
    ),
    Mutant(
        "return view, transposed", "return view, False", "TMA: the transpose taken for the matrix"
    ),
    Mutant(
        "            t.copy_(out)\n",
        "            pass\n",
        "what TMA has stored aside not brought home",
    ),
    Mutant(" or n_inner == 0:", ":", "TMA with nothing to load"),
    Mutant("bias = None if bias is None else bias.contiguous()", "pass", "a bias with gaps"),
    # --- the choice
    Mutant("k // (_LEAST_STEPS * tile.k)", "k // tile.k", "parts of one step"),
    Mutant(", n_programs // n_tiles)", ")", "more parts than run at once"),
    Mutant("_RESIDENT.get(kind, 1)", "3", "three programs for each multiprocessor"),
    Mutant("pitch % 16 == t.data_ptr()", "0 == t.data_ptr()", "any pitch taken for aligned"),
    Mutant("else _to_aligned(t.t()).t()", "else _to_aligned(t.t())", "the copy of a transpose"),
    Mutant(
        "        a, b = _to_aligned(a), _to_aligned(b)\n",
        "        pass\n",
        "a large product element by element",
    ),
    Mutant("large or _is_aligned(a) and", "large or", "the rows of b alone decide"),
    Mutant("<= size <= max(16, _power_of_2(length))", "<= size", "tiles larger than y"),
    Mutant(
        "            if n_tiles * max(1, parts) >= _ENOUGH * n_multiprocessors:\n                break\n",
        "",
        "always the smallest tile",
    ),
    # --- gradients
    Mutant("        total += dz\n", "        total = dz\n", "dbias of the last rows alone"),
    Mutant(
        "            dz = _slope_times(dz, saved, ACTIVATION)",
        "            total += dz - _slope_times(dz, saved, ACTIVATION)\n"
        "            dz = _slope_times(dz, saved, ACTIVATION)",
        "dbias of dy instead of dz",
    ),
    Mutant(
        "offsets = rows[:, None] * n_cols + cols[None, :]\n        if saved",
        "offsets = dy_offsets\n        if saved",
        "what was saved read by the strides of dy",
    ),
    Mutant(
        "activation, has_da or has_db, has_dbias)",
        "activation, has_da, has_dbias)",
        "no dz for db alone",
    ),
    Mutant(
        "    strips = _cdiv(n_rows, rows_per_program)\n",
        "    strips = max(1, n_rows // rows_per_program)\n",
        "floor where ceil was meant: the last rows forgotten",
    ),
    Mutant(
        "a if has_db else None, b if has_da else None",
        "a if has_da else None, b if has_db else None",
        "a kept for da, b for db",
    ),
    Mutant(
        "wanted = ctx.needs_input_grad[:3]\n",
        "wanted = (True, True, ctx.needs_input_grad[2])\n",
        "gradients nobody wants",
    ),
    Mutant(
        'da = _forward(dz, b.t(), None, "identity", allow_tf32)',
        'da = _forward(dz, b.t(), None, "identity", True)',
        "tf32 in silence, backward",
    ),
    Mutant('return "tf32" if allow_tf32 else "tf32x3"', 'return "tf32"', "tf32 in silence"),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    # --- torch.library, torch.compile, autocast
    Mutant("    ctx.mark_non_differentiable(z)\n", "", "z with a gradient of its own"),
    Mutant(
        'matmul_op(a, b, bias, "identity", allow_tf32)',
        'matmul_op(a, b, None, "identity", allow_tf32)',
        "z computed again without the bias",
    ),
    Mutant(
        "bias is not None and ctx.needs_input_grad[2]",
        "ctx.needs_input_grad[2]",
        "compiled: a bias left out",
    ),
    Mutant(
        "wanted = [*ctx.needs_input_grad[:2],",
        "wanted = [True, True,",
        "compiled: gradients nobody wants",
    ),
    Mutant(
        "save_z = needed and _saves_z(activation)",
        "save_z = False",
        "compiled: multiplied once more",
    ),
    Mutant(
        "_forward(a, b, bias, activation, allow_tf32, launch=launch)[0]",
        "_forward(a, b, bias, activation, allow_tf32, _saves_z(activation), launch)[0]",
        "z stored for inference",
    ),
    Mutant(
        "dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]",
        "dtype, casts = torch.get_autocast_dtype(device), _DTYPES",
        "autocast: float64 too",
    ),
    Mutant(
        "    if not torch.is_autocast_enabled(device):\n", "    if True:\n", "autocast passed over"
    ),
    # --- checks, eager
    Mutant("if a.shape[1] != b.shape[0]:", "if a.shape[1] < b.shape[0]:", "b with too few rows"),
    Mutant("bias.shape != b.shape[1:]:", "bias.dim() != 1:", "a bias of one element"),
    Mutant("if a.dim() != 2 or b.dim() != 2:", "if b.dim() != 2:", "a batch"),
    Mutant("        if t.device != a.device:\n", "        if False:\n", "two devices"),
    Mutant(
        "z if bias is None else z + bias)",
        "z if bias is None else z - bias)",
        "eager: the bias taken off",
    ),
]
