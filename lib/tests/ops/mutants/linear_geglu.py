"""Mutants of lib/ops/linear_geglu.py. Its inputs are a matrix and a layer's weights: all checks are here."""

import contextlib
import functools
import itertools
import math

from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.linear_geglu import linear_geglu_eager
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch
import torch.nn.functional as F

SMALL = ((17, 24), 40)  # shape of x, H


def _tensors(case=SMALL, dtype=torch.float32, bias=True):
    """x, weight and, if asked for, bias: leaves that require grad."""
    shape, n_hidden = case
    x, weight = torch.randn(shape), torch.randn(2 * n_hidden, shape[-1])
    found = [x, weight / math.sqrt(max(1, shape[-1]))] + [torch.randn(2 * n_hidden)] * bias
    return [t.to(dtype).requires_grad_() for t in found]


def _detached(*args, **kwargs):
    return [t.detach() for t in _tensors(*args, **kwargs)]


def _versions(module):
    """The op in its two ways to the gradient, as functions and as the compiler's node."""
    return {
        "saved": module.linear_geglu_triton,
        "recomputed": functools.partial(module.linear_geglu_triton, recompute=True),
        "op, saved": lambda x, w, b=None: module.linear_geglu_op(x, w, b, True)[0],
        "op, recomputed": lambda x, w, b=None: module.linear_geglu_op(x, w, b)[0],
    }


def _check(module, inputs, name, slack=1e-6):
    for label, version in _versions(module).items():
        check_against_float64(
            version, linear_geglu_eager, *inputs, slack=slack, name=f"{name}, {label}"
        )


@contextlib.contextmanager
def _with_tma(module):
    """Inside, the op takes the kernel for Hopper where it would there."""
    names = "_has_tma", "_n_multiprocessors", "_GROUP"
    launches, before = [], {n: getattr(module, n) for n in names}
    launch = module._launch_tma
    module._has_tma, module._n_multiprocessors = lambda device: True, lambda device: 2
    module._GROUP = 2  # so that three rows of tiles are a whole group and a part of one
    module._launch_tma = lambda *args: launches.append(args) or launch(*args)
    module._tiles_for.cache_clear()
    try:
        yield launches
    finally:
        module._launch_tma = launch
        for name, value in before.items():
            setattr(module, name, value)
        module._tiles_for.cache_clear()


def check_values(op, module):
    """Sizes that fill no tile, in each dtype, with a bias and without, and of any rank."""
    for case, dtype in [
        (SMALL, torch.float32),
        (((129, 77), 33), torch.bfloat16),
        (((2, 3, 8), 5), torch.float16),
        (((8,), 3), torch.float32),
        (((9, 24), 40), torch.float64),
    ]:
        for bias in (True, False):
            slack = {torch.float64: 1e-13, torch.float16: 1e-3}.get(dtype, 1e-6)
            _check(module, _tensors(case, dtype, bias), f"{case}, {dtype}, bias {bias}", slack)


def check_the_definition(op, module):
    x, weight, bias = (t.double() for t in _detached())
    value, gate = (F.linear(x, w, b) for w, b in zip(weight.split(40), bias.split(40)))
    u = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    want = value * 0.5 * gate * (1 + torch.tanh(u))
    torch.testing.assert_close(module.linear_geglu_eager(x, weight, bias), want)


def check_rounded_once(op, module):
    """y comes from h as summed: eager, which rounds h, is allowed more."""
    inputs = _detached(((33, 24), 40), torch.bfloat16)
    want = linear_geglu_eager(*(t.double() for t in inputs))
    error = (module.linear_geglu_triton(*inputs).double() - want).abs()
    assert (error <= 0.51 * 2**-7 * want.abs() + 1e-5).all(), "rounded on the way"


def check_precision(op, module):
    """What tensor cores may round; the interpreter rounds nothing."""
    kernel, options = module._linear_geglu_fwd_kernel, []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **given: options.append(given)

    module._linear_geglu_fwd_kernel = Recorder()
    try:
        for allow_tf32 in (False, True):
            module.linear_geglu_triton(*_detached(), allow_tf32=allow_tf32)
        module.linear_geglu_triton(*_detached())
    finally:
        module._linear_geglu_fwd_kernel = kernel
    assert [o["PRECISION"] for o in options] == ["tf32x3", "tf32", "tf32x3"]


def check_empty(op, module):
    for case in [((5, 0), 7), ((0, 5), 7), ((3, 0, 8), 4), ((5, 5), 0)]:
        _check(module, _tensors(case), str(case))


def check_tails(op, module):
    """gelu and its gradient where they are nearly 0 and nearly z, against float64; NaN and infinities."""
    gate = torch.linspace(-12, 12, 961)[:, None]
    found = []
    for run, dtype in (
        (module.linear_geglu_triton, torch.float32),
        (linear_geglu_eager, torch.float64),
    ):
        x = torch.cat([torch.ones_like(gate), gate], dim=1).to(dtype).requires_grad_()
        weight = torch.eye(2, dtype=dtype)
        y = run(x, weight)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    for a, b in zip(*found):
        assert ((a - b).abs() <= 8e-7 * b.abs().clamp(min=1)).all(), "digits lost in the tails"
    inf = float("inf")
    x = torch.tensor([[0.0], [1e4], [-1e4], [inf], [-inf], [float("nan")], [90.0], [-90.0]])
    for gate in (1.0, -1.0):
        _check(module, [x.requires_grad_(), torch.tensor([[0.5], [gate]])], f"gate {gate}")


def check_strides(op, module):
    x, weight, bias = _detached(((34, 40), 40))
    for which, t in enumerate((x, weight)):
        for layout, strided in cases.layouts(t).items():
            if layout.startswith(("transposed", "every second col", "chunk", "expanded")):
                inputs = [x, weight, bias]
                inputs[which] = strided
                inputs = [i.detach().requires_grad_() for i in inputs]
                check_against_float64(
                    module.linear_geglu_triton,
                    linear_geglu_eager,
                    *inputs,
                    name=f"{which} {layout}",
                )
    spread = cases.spread(bias)
    check_against_float64(module.linear_geglu_triton, linear_geglu_eager, x, weight, spread)


def check_past_k(op, module):
    """What lies behind the last column of x, and of W, is NaN."""
    for n, k in ((0, 40), (1, 40), (0, 70), (1, 70)):
        inputs = _detached(((9, k), 16), bias=False)
        inputs[n] = torch.full((len(inputs[n]), 130), float("nan"))[:, :k].copy_(inputs[n])
        torch.testing.assert_close(module.linear_geglu_triton(*inputs), linear_geglu_eager(*inputs))


def check_gradient_layouts(op, module):
    """Incoming gradients of strides 0 and others; twice the same, and left alone."""
    inputs = _tensors()
    wide = torch.randn(17, 83)
    for dy in (
        torch.ones(()).expand(17, 40),
        torch.randn(40, 17).t(),
        wide[:, 3::2],
        wide[:, 3:43],
    ):
        before = dy.clone()
        for label, version in _versions(module).items():
            y = version(*inputs)
            first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            second = torch.autograd.grad(y, inputs, dy)
            want = torch.autograd.grad(linear_geglu_eager(*inputs), inputs, dy)
            for a, b, c in zip(first, second, want):
                assert torch.equal(a, b), f"{label}: a second backward differs"
                torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)
        assert torch.equal(dy, before), "dy was changed"


def check_gradients_one_by_one(op, module):
    inputs = _tensors()
    y = linear_geglu_eager(*inputs)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, inputs, dy)
    for needs in itertools.product((False, True), repeat=3):
        for label, version in list(_versions(module).items())[::2]:
            some = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs)]
            y = version(*some)
            assert y.requires_grad == any(needs), f"{label}: a gradient is lost"
            if any(needs):
                got = torch.autograd.grad(y, [t for t in some if t.requires_grad], dy)
                for a, b in zip(got, itertools.compress(wanted, needs)):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def check_many_rows(op, module):
    """db of so many rows that each program takes several tiles; x1 = 1 and x2 = 8: all is known, and exact."""
    n_rows = 2**21 + 5
    dy, h = torch.ones(n_rows, 1), torch.tensor([[1.0, 8.0]]).repeat(n_rows, 1)
    dh, db = module._backward(dy, h, True)
    assert (dh == torch.tensor([8.0, 1.0])).all()
    assert db.tolist() == [8 * n_rows, n_rows]
    _check(module, _tensors(((300, 8), 200)), "two tiles of columns")


def check_second_derivative(op, module):
    for label, version in _versions(module).items():
        inputs = _tensors()
        y = version(*inputs)
        dy = torch.randn_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, inputs[:1], dy, create_graph=True)
        try:
            (dx * inputs[0]).sum().backward()  # without the error: the part that goes through x
        except RuntimeError as error:
            if "once_differentiable" in str(error):
                continue
            raise
        raise AssertionError(f"{label}: a second derivative does not raise")


def check_autocast(op, module):
    inputs = _tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.linear_geglu_triton(*inputs).dtype == torch.bfloat16
        doubles = [t.double() for t in inputs]
        assert module.linear_geglu_triton(*doubles).dtype == torch.float64
    y = module.linear_geglu_triton(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(y.sum(), inputs)
    want = torch.autograd.grad(linear_geglu_eager(*inputs).sum(), inputs)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def check_traffic(op, module):
    """h is written and read where it is saved, and nowhere else; each byte once."""
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = inputs = _tensors(((64, 32), 64), dtype)
        y_bytes = 64 * 64 * dtype.itemsize
        least = x.nbytes + weight.nbytes + bias.nbytes + y_bytes
        for recompute, no_grad in itertools.product((False, True), repeat=2):
            run = functools.partial(module.linear_geglu_triton, *inputs, recompute)
            with torch.set_grad_enabled(not no_grad):
                traffic = count_traffic(run)
            want = least if recompute or no_grad else least + 2 * y_bytes
            assert traffic.bytes_moved == want, f"{traffic.bytes_moved} bytes moved, not {want}"
    y = module.linear_geglu_triton(*inputs)
    traffic = count_traffic(lambda: torch.autograd.grad(y, inputs, torch.ones_like(y)))
    by = {name.rpartition(".")[2]: a.loaded + a.stored for name, a in traffic.by_argument.items()}
    assert by["dy_ptr"] == y_bytes
    assert by["h_ptr"] == by["dh_ptr"] == 2 * y_bytes


def _kept(version, *inputs):
    """The tensors that autograd keeps."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        version(*inputs)
    return found


def check_what_is_kept(op, module):
    """x for dW, W for dx, and h; or x, W and b alone."""
    for label, version in _versions(module).items():
        for needs in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
            some = [t.requires_grad_(bool(n)) for t, n in zip(_detached(), needs)]
            kept = sorted(tuple(t.shape) for t in _kept(version, *some))
            wanted = [(17, 24), (80, 24), (80,)]
            if "recomputed" not in label:
                wanted = [(17, 24)] * needs[1] + [(80, 24)] * needs[0] + [(17, 80)]
            assert kept == sorted(wanted), f"{label}, {needs}: something else is kept"
    for save_h in (False, True):
        y, h = module.linear_geglu_op(*_tensors(), save_h)
        assert y.requires_grad and not h.requires_grad, "h has a gradient"


def check_tma(op, module):
    """The kernel for Hopper: values, h, halves that do not run into each other, what TMA can read."""
    with _with_tma(module) as launches:
        for dtype, bias in ((torch.bfloat16, True), (torch.float16, False)):
            inputs = _tensors(((300, 136), 264), dtype, bias)
            check_against_float64(module.linear_geglu_triton, linear_geglu_eager, *inputs)
        assert len(launches) == 2, "another kernel was taken"
        for bad in (0, 1):
            x, weight, bias = _detached(((200, 64), 136), torch.float16)
            weight.view(2, 136, 64)[bad] = bias.view(2, 136)[bad] = float("nan")
            nan = module._forward(x, weight, bias, False, True)[1].view(200, 2, 136).isnan()
            assert nan[:, bad].all() and not nan[:, 1 - bad].any(), "halves run into each other"
        x, weight, bias = _detached(((256, 64), 256), torch.bfloat16)
        wide = torch.cat([x, x], dim=1)
        for bad in (wide[:, 1:65], wide[:, :33].contiguous()[:, :32], x.t().contiguous().t(),
                    x[:1].expand(256, 64), x[:, :0], x.float()):  # fmt: skip
            before = len(launches)
            w, b = weight[:, : bad.shape[1]].to(bad.dtype), bias.to(bad.dtype)
            got, want = module.linear_geglu_triton(bad, w, b), linear_geglu_eager(bad, w, b)
            torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
            assert len(launches) == before, "TMA cannot read this"


def check_far_apart(op, module):
    """Elements that begin past 2**31, of x, of W and of the incoming gradient, by rows and by columns."""
    storage = torch.empty(66 * (2**25 + 1), dtype=torch.float16)

    def spread_out(t, dim):
        step = max(-(-(2**31) // (t.shape[dim] - 1)), 2**25 + 1)  # or 2**31 in a step of 64 columns
        return storage.as_strided(t.shape, [step, 1] if dim == 0 else [1, step]).copy_(t)

    for which, (dim, n_in) in itertools.product((0, 1), ((0, 16), (1, 16), (1, 66))):
        inputs = _detached(((3, n_in), 2), torch.float16)
        want = linear_geglu_eager(*inputs)
        inputs[which] = spread_out(inputs[which], dim)
        torch.testing.assert_close(module.linear_geglu_triton(*inputs), want, rtol=0.03, atol=0.03)
    for dim in (0, 1):
        inputs = _tensors(((3, 8), 3), torch.float16)
        dy = torch.randn(3, 3).half()
        want = torch.autograd.grad(linear_geglu_eager(*inputs), inputs, dy)
        got = torch.autograd.grad(module.linear_geglu_triton(*inputs), inputs, spread_out(dy, dim))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def check_refuses(op, module):
    x, weight, bias = _detached()
    for bad, kind, message in [
        ((x, weight[1:], bias[1:]), ValueError, "even number"),
        ((x, weight[:1].expand(2**24 + 2, 24), None), ValueError, "at most"),
        ((x, weight, bias[:40]), ValueError, "bias must"),
        ((x[:, :5], weight, bias), ValueError, "weight.t()"),
        ((x, weight.half(), bias), TypeError, "cast one"),
        ((x, weight, bias.half()), TypeError, "cast one"),
        ((x[0, 0], weight, bias), ValueError, "x must be"),
    ]:
        try:
            module._check(
                "linear_geglu_triton", *bad
            )  # alone: the kernel would take hours for some
        except kind as error:
            if message in str(error):
                continue
            raise
        raise AssertionError(f"not refused: {message}")


def check_module(op, module):
    torch.manual_seed(3)
    linear = torch.nn.Linear(24, 80)
    torch.manual_seed(3)
    layer = module.LinearGEGLU(24, 40, recompute=True)
    x = torch.randn(5, 24)
    value, gate = linear(x).chunk(2, dim=-1)
    want = value * F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(layer(x), want)
    assert list(layer.state_dict()) == list(linear.state_dict())
    layer.load_state_dict(linear.state_dict())
    assert all(t.shape != (5, 80) for t in _kept(layer, x)), "h is kept"
    assert len(list(module.LinearGEGLU(24, 40, bias=False).parameters())) == 1


CHECKS = [
    check_the_definition,
    check_refuses,
    check_precision,
    check_rounded_once,
    check_empty,
    check_tails,
    check_second_derivative,
    check_autocast,
    check_module,
    check_what_is_kept,
    check_gradient_layouts,
    check_gradients_one_by_one,
    check_traffic,
    check_values,
    check_past_k,
    check_strides,
    check_far_apart,
    check_tma,
    check_many_rows,
]

MUTANTS = [
    # --- the gate
    Mutant("x1, x2 = F.linear", "x2, x1 = F.linear", "eager: the gate is the first half"),
    Mutant("x1, x2 = tl.split", "x2, x1 = tl.split", "the gate is the first half"),
    Mutant(
        "(BLOCK_M, 2, BLOCK_N)), (0, 2, 1))",
        "(BLOCK_M, BLOCK_N, 2)), (0, 1, 2))",
        "halves taken for neighbours",
    ),
    Mutant(
        "e = _exp2(x2 * (-2.302208198144325 - 0.1029432395800235 * x2 * x2))  # exp(-2u)\n"
        "    return x1 * _divide(x2, 1.0 + e)",
        "e = _exp2(x2 * (2.302208198144325 + 0.1029432395800235 * x2 * x2))\n"
        "    return x1 * x2 * _divide(e, 1.0 + e)",
        "sigmoid as e/(e + 1): NaN where e overflows",
    ),
    Mutant(
        "    return x1 * _divide(x2, 1.0 + e)",
        "    return _divide(x2, 1.0 + e)",
        "no x1: gelu alone",
    ),
    Mutant(
        "_exp2(x2 * (-2.302208198",
        "_exp2(x2 * (-2.4554669595",
        "gelu's other approximation, forward",
    ),
    Mutant("s = tl.where(x2 < 0, e * t, t)", "s = t", "the gradient of -x2 as that of x2"),
    Mutant("x2 * (e * t * t) *", "x2 * (s * (1.0 - s)) *", "1 - s, which has lost its digits"),
    Mutant("0.2140644488178008", "0.07135481627260025", "x³ without its factor 3 in the gradient"),
    Mutant(
        "return dy * (x2 * s), dy * x1 * slope",
        "return dy * x1 * slope, dy * (x2 * s)",
        "the gradients of both halves mixed up",
    ),
    Mutant("dy * x1 * slope", "dy * slope", "the gradient of the gate without x1"),
    # --- the products
    Mutant("mask=inside[None, :], other=0.0", "mask=None", "what lies past K read from x"),
    Mutant(
        "mask=inside[:, None] & (cols < n_hidden)[None, :]",
        "mask=(cols < n_hidden)[None, :]",
        "what lies past K read from W",
    ),
    Mutant(
        "rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)",
        "rows = rows.to(tl.int64)",
        "rows that are not there read",
    ),
    Mutant(
        "mask=inside[:, None] & (cols < n_hidden)[None, :], other=0.0",
        "mask=inside[:, None], other=0.0",
        "rows of W that are not there read",
    ),
    Mutant(
        "w_rows = (cols + pair // BLOCK_N * n_hidden)",
        "w_rows = (cols + pair // BLOCK_N * BLOCK_N)",
        "the gate from the next rows of W",
    ),
    Mutant("w_rows[None, :] * stride_wn", "w_rows[None, :] * stride_xm", "W by the strides of x"),
    Mutant('return "tf32" if allow_tf32', 'return "tf32" if not allow_tf32', "tf32 unasked"),
    Mutant("x1 += bias1.to", "x1 += bias2.to", "the bias of the gate for both halves"),
    Mutant(
        "tl.load(bias_ptr + n_hidden + cols",
        "tl.load(bias_ptr + cols + 1",
        "the gate's bias beside x1's",
    ),
    Mutant("else bias.contiguous()", "else bias", "a spread bias read as if contiguous"),
    Mutant(
        "height = tl.minimum(tiles_m - first, GROUP)",
        "height = GROUP",
        "the last group as high as others",
    ),
    Mutant(
        "(_cdiv(n_rows, tile.m) * _cdiv(n_hidden, tile.n),)",
        "(max(1, n_rows // tile.m) * _cdiv(n_hidden, tile.n),)",
        "floor where ceil was meant: the last rows forgotten",
    ),
    Mutant(
        "mask = (rows < n_rows - row) & (cols < n_hidden - col)",
        "mask = (rows < n_rows - row) & (cols < 2 * n_hidden - col)",
        "columns past H written",
    ),
    Mutant(
        "mask = (rows < n_rows - row) & (cols < n_hidden - col)",
        "mask = (rows < n_rows) & (cols < n_hidden - col)",
        "rows past M written",
    ),
    Mutant("tl.store(h_ptrs + n_hidden, x2", "tl.store(h_ptrs + n_hidden, x1", "h with x1 twice"),
    Mutant(
        "    y = _geglu(x1, x2)\n",
        "    half: tl.constexpr = y_out.dtype if BY_TMA else y_out.dtype.element_ty\n"
        "    y = _geglu(x1.to(half).to(x1.dtype), x2.to(half).to(x1.dtype))\n",
        "h rounded on the way to y",
    ),
    Mutant("if y.numel() > 0:", "if n_in > 0:", "K = 0: nothing written"),
    # --- int32
    Mutant(
        "rows = tl.where(rows < n_rows, rows, 0).to(tl.int64)",
        "rows = tl.where(rows < n_rows, rows, 0)",
        "int32 rows of x",
    ),
    Mutant(
        "pair // BLOCK_N * n_hidden).to(tl.int64)", "pair // BLOCK_N * n_hidden)", "int32 rows of W"
    ),
    Mutant(
        "inner = tl.arange(0, BLOCK_K).to(tl.int64)",
        "inner = tl.arange(0, BLOCK_K)",
        "int32 columns",
    ),
    Mutant("x_ptrs += tl.cast(stride_xk, tl.int64)", "x_ptrs += stride_xk", "int32 steps along x"),
    Mutant("w_ptrs += tl.cast(stride_wk, tl.int64)", "w_ptrs += stride_wk", "int32 steps along W"),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program",
        "rows = pid_m * rows_per_program",
        "int32 rows of dy",
    ),
    Mutant("cols = pid_n.to(tl.int64) * BLOCK_N", "cols = pid_n * BLOCK_N", "int32 columns of dy"),
    Mutant("weight.shape[0] > 2**24:", "weight.shape[0] > 2**30:", "H too large for int32 offsets"),
    # --- Hopper
    Mutant("w_desc.load([0, col, k])", "w_desc.load([0, row, k])", "TMA: rows of x for rows of W"),
    Mutant(
        "weight, [2, n_hidden, n_in], [n_hidden * pitch, pitch, 1]",
        "weight, [2, n_hidden, n_in], [tile.n * pitch, pitch, 1]",
        "TMA: the gate right behind a tile",
    ),
    Mutant(
        "weight, [2, n_hidden, n_in], [n_hidden * pitch, pitch, 1]",
        "weight, [2, 2 * n_hidden, n_in], [n_hidden * pitch, pitch, 1]",
        "TMA: the first half runs into the second",
    ),
    Mutant(
        "tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)",
        "tl.range(tl.program_id(0), n_tiles, n_tiles",
        "TMA: each program does one tile and stops",
    ),
    Mutant("step == 1 and pitch >= t.shape[1]", "step == 1", "TMA: rows that are one in memory"),
    Mutant(
        "pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0",
        "pitch * t.itemsize % 16 == 0",
        "TMA: any address",
    ),
    Mutant("and x.itemsize == 2 and", "and x.itemsize <= 4 and", "TMA: float32 too"),
    # --- backward
    Mutant(
        "x2 = tl.load(h_ptr + n_hidden + offsets, mask=mask",
        "x2 = tl.load(h_ptr + offsets + 1, mask=mask",
        "backward: the gate beside x1",
    ),
    Mutant(
        "offsets = rows[:, None] * (2 * n_hidden)",
        "offsets = rows[:, None] * n_hidden",
        "h as wide as y",
    ),
    Mutant(
        "rows[:, None] * stride_dym", "rows[:, None] * n_hidden", "dy taken for contiguous rows"
    ),
    Mutant("cols[None, :] * stride_dyn", "cols[None, :]", "dy taken for columns without gaps"),
    Mutant("total2 += dx2", "total2 += dx1", "db of the gate from dx1"),
    Mutant("total1 += dx1", "total1 = dx1", "db of the last rows only"),
    Mutant(
        "partial_ptr + pid_m.to(tl.int64) * (2 * n_hidden)",
        "partial_ptr + pid_m.to(tl.int64) * 0",
        "all programs' sums in one row",
    ),
    Mutant(
        "strips = _cdiv(n_rows, rows_per_program)",
        "strips = max(1, n_rows // rows_per_program)",
        "floor where ceil was meant: the last rows of dh forgotten",
    ),
    Mutant("empty_like(h)\n", "h\n", "h overwritten by dh: a second backward is wrong"),
    Mutant(
        "enabled=False):",
        "enabled=torch.is_autocast_enabled(dy.device.type)):",
        "autocast in the backward pass",
    ),
    Mutant(
        "h = F.linear(_for_cublas(x), _for_cublas(weight), bias)",
        "h = F.linear(x, weight)",
        "computed again without its bias",
    ),
    Mutant("rows @ _for_cublas(weight)", "rows @ weight.flip(0)", "dx from W upside down"),
    # --- what is kept, autograd, torch.library
    Mutant("save_h=not recompute", "save_h=True", "h written though it is not kept"),
    Mutant(
        "        return x, weight, bias, None\n",
        "        return x, weight, bias, h\n",
        "recompute: h kept all the same",
    ),
    Mutant(
        "return x if wanted[1] else None, weight if wanted[0] else None, None, h",
        "return x, weight, None, h",
        "x and W kept for gradients that nobody needs",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable  # a second derivative raises",
        "@staticmethod  # a second derivative raises",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable\ndef",
        "def",
        "the op: a second derivative wrong in silence",
    ),
    Mutant(
        "return (*ctx.needs_input_grad, False)[:3]",
        "return ctx.needs_input_grad[:3]",
        "the op without a bias",
    ),
    Mutant(
        "    ctx.mark_non_differentiable(h)\n", "", "the op: h with a gradient, which is ignored"
    ),
    Mutant(
        "dtype, casts = torch.get_autocast_dtype(device), _DTYPES[:3]",
        "dtype, casts = torch.get_autocast_dtype(device), _DTYPES",
        "autocast of float64",
    ),
    Mutant("    x, weight, bias = _as_autocast(x, weight, bias)\n", "", "deaf to autocast"),
    Mutant("if weight.shape[0] % 2 or", "if", "an odd number of rows"),
    Mutant(
        "if bias is not None and bias.shape != weight.shape[:1]:",
        "if False:",
        "a bias of another size",
    ),
    # --- the module
    Mutant(
        "linear = torch.nn.Linear(in_features, 2 * hidden_features",
        "linear = torch.nn.Linear(in_features, hidden_features",
        "half the rows",
    ),
    Mutant(
        "self.weight, self.bias, self.recompute)",
        "self.weight, self.bias)",
        "the module keeps h though asked not to",
    ),
    Mutant(
        "self.weight, self.bias, self.recompute)",
        "self.weight, None, self.recompute)",
        "the module without its bias",
    ),
]
