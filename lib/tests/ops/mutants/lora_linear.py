"""Mutants of lib/ops/lora_linear.py. Its weight is frozen, and it has a module: all checks are here."""

import functools

from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.lora_linear import lora_linear_eager
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch

ACTIVATIONS = ("identity", "relu", "gelu", "silu", "sigmoid")
SMALL = ((9,), 24, 40, 6)  # shape of x but for K; N, K, rank


def _inputs(case=SMALL, dtype=torch.float32, bias=True, coarse=False):
    """x, weight, lora_a, lora_b, bias: all but weight require grad. coarse: exact in 16 bits, for relu."""
    lead, n, k, r = case

    def draw(*shape, like=1):
        t = torch.randint(-1, 2, shape).float() if coarse else torch.randn(shape)
        return (t * 2.0 ** -(like.bit_length() // 2)).to(dtype)

    tensors = [draw(*lead, k), draw(n, k, like=k), draw(r, k, like=k), draw(n, r), draw(n)]
    return [t.requires_grad_(i != 1) for i, t in enumerate(tensors)][: 5 if bias else 4]


def _detached(*args, **kwargs):
    return [t.detach() for t in _inputs(*args, **kwargs)]


def _leaves(tensors):
    return [t for t in tensors if t.requires_grad]


def _check(version, tensors, scale=0.75, activation="identity", slack=1e-6):
    how = {"scale": scale, "activation": activation}
    bound = functools.wraps(version)(functools.partial(version, **how))
    check_against_float64(
        bound, functools.partial(lora_linear_eager, **how), *tensors, name=activation, slack=slack
    )


def _by(module, launch, tile):
    def version(x, weight, lora_a, lora_b, bias=None, scale=1.0, activation="identity"):
        def launch_it(*args):
            launch(*args, module._Tile(*tile))

        arguments = (x, weight, lora_a, lora_b, bias, scale, activation, False, launch_it)
        return module._LoRALinear.apply(*arguments)

    return version


def _raises(kinds, call, message=""):
    try:
        call()
    except kinds as error:
        if message in str(error):
            return
        raise AssertionError(f"another error: {error}") from error
    raise AssertionError(f"no error: {message}")


def check_values(op, module):
    for k, activation in enumerate(ACTIVATIONS):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[k % 3]
        tensors = _inputs(((33,), 72, 40, 6), dtype, coarse=activation == "relu")
        _check(module.lora_linear_triton, tensors, 0.75, activation)
        _check(module.lora_linear_cublas, tensors, 0.75, activation)
    _check(module.lora_linear_triton, _inputs(((2, 3), 24, 80, 16), bias=False), -1.5)
    _check(module.lora_linear_cublas, _inputs(((2, 3), 24, 80, 16), bias=False), -1.5, "gelu")


def check_tiles(op, module):
    """More tiles than programs, each cut; several pieces of a rank; stores in halves."""
    pointers, tma = module._launch_pointer_kernel, module._launch_tma_kernel
    for launch, tile, case in [
        (pointers, (16, 16, 16, 4, 1), ((150,), 41, 39, 37)),
        (pointers, (16, 256, 32, 4, 1), ((21,), 300, 40, 3)),
        (tma, (64, 64, 64, 4, 4), ((650,), 136, 72, 5)),
        (tma, (64, 256, 64, 8, 3), ((70,), 520, 80, 100)),
    ]:
        for activation in ("silu", "relu"):
            tensors = _inputs(case, torch.bfloat16, coarse=activation == "relu")
            _check(_by(module, launch, tile), tensors, 0.75, activation)


def check_rounded_once(op, module):
    """With exact products half of the last place is all that is lost, sums of many terms included."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = _detached(((40,), 24, 64, 8), dtype, coarse=True)
        tensors[4] += 2.0**-9
        for activation in ("identity", "relu"):
            want = lora_linear_eager(*(t.double() for t in tensors), 0.5, activation)
            for version in (module.lora_linear_triton, _by_tma(module, dtype)):
                got = version(*tensors, scale=0.5, activation=activation).double()
                error = (got - want).abs() - 0.51 * torch.finfo(dtype).eps * want.abs()
                assert (error <= 0).all(), "rounded more than once"


def _by_tma(module, dtype):
    if dtype.itemsize != 2:
        return module.lora_linear_triton
    return _by(module, module._launch_tma_kernel, (64, 64, 64, 4, 4))


def check_errors_are_no_larger_than_eagers(op, module):
    """In the mean of their squares, for y and each gradient."""
    for activation in ("identity", "gelu", "silu"):
        squares = []
        for _ in range(8):
            tensors = _inputs(((12,), 16, 24, 4), torch.bfloat16)
            exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
            dy = torch.randn(12, 16).bfloat16()
            found = []
            for version, inputs in (
                (lora_linear_eager, exact), (module.lora_linear_triton, tensors), (lora_linear_eager, tensors)
            ):  # fmt: skip
                y = version(*inputs, scale=0.75, activation=activation)
                grads = torch.autograd.grad(y, _leaves(inputs), dy.to(y.dtype))
                found.append([t.double() for t in (y, *grads)])
            want, *both = found
            squares.append([[(a - b).square().mean() for a, b in zip(g, want)] for g in both])
        ours, eagers = torch.tensor(squares).mean(0)
        assert (ours <= 1.05 * eagers).all(), activation


def check_specials(op, module):
    for activation in ("relu", "sigmoid"):
        tensors = _inputs(((6,), 24, 16, 3))
        with torch.no_grad():
            tensors[0][1, 2], tensors[0][3, 5] = float("nan"), float("inf")
            tensors[4][9], tensors[4][13] = float("nan"), -float("inf")
        _check(module.lora_linear_triton, tensors, 0.75, activation)
    large = _inputs(((6,), 24, 16, 3))
    with torch.no_grad():
        large[4][:] = torch.linspace(-1e4, 1e4, 24)
    for activation in ("gelu", "silu", "sigmoid"):
        _check(module.lora_linear_triton, large, 0.75, activation)


def check_empty(op, module):
    for case in [
        ((0,), 5, 7, 2),
        ((5,), 0, 7, 2),
        ((3,), 5, 0, 2),
        ((), 6, 10, 3),
        ((2, 0), 4, 8, 2),
    ]:
        for version in (module.lora_linear_triton, module.lora_linear_cublas):
            _check(version, _inputs(case), 0.75, "sigmoid")


def check_strides(op, module):
    """Of more columns than one step over K takes, too."""
    tensors, steps = _inputs(), _by(module, module._launch_pointer_kernel, (16, 16, 16, 4, 1))
    for k in range(4):
        for layout, strided in cases.layouts(tensors[k].detach()).items():
            if layout.endswith(("transposed", "every second column", "expanded row")):
                strided = strided.detach().requires_grad_(k != 1)
                changed = [strided if i == k else t for i, t in enumerate(tensors)]
                _check(module.lora_linear_triton, changed, 0.75, "silu")
                _check(steps, changed)
    _check(module.lora_linear_triton, [*tensors[:4], cases.spread(tensors[4])], 0.75, "silu")


def check_gradients(op, module):
    """A dy of strides 0 and a transposed one; twice the same; each gradient alone."""
    for activation, layout in [("identity", 0), ("gelu", 0), ("relu", 1), ("silu", 1)]:
        tensors = _inputs(coarse=True)
        dy = torch.randn(24, 9).t()
        dy = dy if layout else dy[:1, :1].expand(9, 24)
        before, leaves = dy.clone(), _leaves(tensors)
        y = module.lora_linear_triton(*tensors, 0.5, activation)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        second = torch.autograd.grad(y, leaves, dy)
        want = torch.autograd.grad(lora_linear_eager(*tensors, 0.5, activation), leaves, dy)
        for a, b, c in zip(first, second, want):
            assert torch.equal(a, b), "a second backward differs"
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)
        assert torch.equal(dy, before), "dy was changed"
        for k, c in zip((0, 2, 3, 4), want):
            alone = [t.detach().requires_grad_(i == k) for i, t in enumerate(tensors)]
            y = module.lora_linear_triton(*alone, 0.5, activation)
            (got,) = torch.autograd.grad(y, _leaves(alone), dy)
            torch.testing.assert_close(got, c, rtol=1e-4, atol=1e-5)


def check_what_is_saved(op, module):
    x, weight, lora_a, lora_b, bias = tensors = _detached()
    needs = {0: (weight, lora_a, lora_b), 2: (x, lora_b), 3: (), 4: ()}
    for k, needed in needs.items():
        some = [t.requires_grad_(i == k) for i, t in enumerate(tensors)]
        for activation, made in (("identity", 0), ("relu", 1), ("gelu", 1)):
            saved = []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            )
            with hooks:
                module.lora_linear_triton(*some, 0.5, activation)
            wanted = len(needed) + made + (k == 3)
            assert len(saved) == wanted, f"saved {len(saved)} tensors, not {wanted}"


def check_many_rows(op, module):
    """More rows than one strip has, for the sum over them."""
    _check(module.lora_linear_triton, _inputs(((2100,), 3, 4, 2)), 0.75, "sigmoid")


def check_second_derivative(op, module):
    tensors = _inputs()
    dy = torch.ones(9, 24, requires_grad=True)
    y = module.lora_linear_triton(*tensors, 0.5, "silu")
    (dx,) = torch.autograd.grad(y, tensors[:1], dy, create_graph=True)
    _raises(RuntimeError, lambda: (dx * tensors[0]).sum().backward())


def check_float64(op, module):
    for activation in ACTIVATIONS:
        tensors = _inputs(((3,), 5, 7, 2), torch.float64)
        _check(module.lora_linear_triton, tensors, 0.75, activation, slack=1e-13)


def check_far_apart(op, module):
    far = cases.far_apart(torch.float16, "cpu")
    for k, n in ((0, 16), (1, 3)):
        tensors = _inputs(((3,), n, 16, 4), torch.float16)
        tensors[k] = far.detach().requires_grad_(k != 1)
        _check(module.lora_linear_triton, tensors)
    tensors = _inputs(((3,), 3, 16, 16), torch.float16)
    tensors[3] = far.detach().requires_grad_()
    _check(module.lora_linear_triton, tensors)
    tensors = _inputs(((16,), 16, 3, 4), torch.float16)
    tensors[0] = far.t().detach().requires_grad_()
    _check(_by(module, module._launch_pointer_kernel, (16, 16, 16, 2, 1)), tensors)
    tensors = _inputs(((3,), 16, 8, 4), torch.float16)
    found = [
        torch.autograd.grad(v(*tensors, 0.5, "sigmoid"), _leaves(tensors), far)
        for v in (module.lora_linear_triton, lora_linear_eager)
    ]
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


def check_traffic(op, module):
    """One kernel forward, which writes y, and z where a gradient needs it; u read, x and W read."""
    x, weight, lora_a, lora_b, bias = _detached(((64,), 64, 64, 16), torch.bfloat16)
    read = x.nbytes + weight.nbytes + 64 * 16 * 2 + lora_b.nbytes + bias.nbytes
    for gradient in (False, True):
        leaf = x.detach().requires_grad_(gradient)
        call = functools.partial(
            module.lora_linear_triton, leaf, weight, lora_a, lora_b, bias, 1.0, "gelu"
        )
        traffic = count_traffic(call)
        assert traffic.launches == 1
        want = read + 64 * 64 * 2 * (1 + gradient)
        assert traffic.bytes_moved == want, f"{traffic.bytes_moved} bytes moved, not {want}"


def check_u(op, module):
    """Rounded once, and without its scale."""
    tensors = _detached(((40,), 8, 16, 8), torch.bfloat16)
    _, u, _ = module.lora_linear_op(*tensors, 0.7)
    want = tensors[0].double() @ tensors[2].double().T
    error = (u.double() - want).abs() - 0.51 * 2**-7 * want.abs()
    assert (error <= 1e-5).all(), "u rounded twice, or scaled"


def check_registered(op, module):
    for activation in ("silu", "relu", "identity"):
        tensors = _inputs(coarse=True)

        def version(*args, activation="identity", scale=1.0):
            return module.lora_linear_op(*args, scale, activation, False, activation == "silu")[0]

        _check(version, tensors, 0.75, activation)
        alone = [t.detach().requires_grad_(i == 2) for i, t in enumerate(tensors)]
        _check(version, alone, 0.75, activation)
    _raises(ValueError, lambda: module.lora_linear_op(*tensors, 1.0, "gelu"), "save_z")
    trained = tensors[1].clone().requires_grad_()
    _raises(
        ValueError,
        lambda: module.lora_linear_op(tensors[0], trained, *tensors[2:]),
        "requires_grad_(False)",
    )


def check_autocast(op, module):
    tensors = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.lora_linear_triton(*tensors)
    assert y.dtype == torch.bfloat16, "autocast not followed"


def check_refusals(op, module):
    x, weight, lora_a, lora_b, bias = good = _detached()
    run = module.lora_linear_triton
    _raises(ValueError, lambda: run(x, weight.clone().requires_grad_(), lora_a, lora_b), "freeze")
    with torch.no_grad():
        run(x, weight.clone().requires_grad_(), lora_a, lora_b)
    for bad, message in [
        ((x, weight, lora_a, lora_b[:, :5], bias), "rank 6"),
        ((x, weight, lora_a[:0], lora_b[:, :0], bias), "1 to 256"),
        ((x, weight, x.new_zeros(257, 40), x.new_zeros(24, 257), bias), "1 to 256"),
        ((x, weight, lora_a[:, :5], lora_b, bias), "lora_a must be"),
        ((x, weight, lora_a, lora_b[:5], bias), "lora_b must be"),
        ((x, weight, lora_a, lora_b, bias[:5]), "bias must have"),
        ((x[:, :5], weight, lora_a, lora_b, bias), "x must be"),
        ((*good, 1.0, "tanh"), "activation must be"),
    ]:
        _raises(ValueError, lambda bad=bad: run(*bad), message)
    _raises(TypeError, lambda: run(x, weight, lora_a.half(), lora_b, bias), "cast one of them")
    _raises(TypeError, lambda: run(*good, torch.tensor(1.0)), "Python number")


def check_routing(op, module):
    """TMA for large aligned matrices of 16 bits, pointers for all others; tf32 only if asked for."""
    taken = []
    module._launch_tma_kernel = lambda *args: taken.append("tma")
    module._launch_pointer_kernel = lambda *args: taken.append("pointer")

    def launched(n_cols, n_inner, dtype=torch.bfloat16, step=1):
        taken.clear()
        x = torch.zeros(512, step * n_inner, dtype=dtype)[:, ::step]
        y, weight = torch.empty(512, n_cols, dtype=dtype), torch.zeros(n_cols, n_inner, dtype=dtype)
        u, lora_b = torch.zeros(512, 4, dtype=dtype), torch.zeros(n_cols, 4, dtype=dtype)
        module._launch_fused(y, None, x, weight, u, lora_b, None, 1.0, "relu", False)
        return taken[0]

    assert launched(512, 512) == "tma"
    for args in [
        (513, 512), (512, 513), (512, 64), (512, 512, torch.float32), (512, 512, torch.bfloat16, 2)
    ]:  # fmt: skip
        assert launched(*args) == "pointer", args


def check_tf32(op, module):
    precisions, kernel = [], module._lora_linear_kernel

    class Noted:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: precisions.append(kwargs["PRECISION"])

    module._lora_linear_kernel = Noted()
    for allow in (False, True):
        module.lora_linear_triton(*_detached(), allow_tf32=allow)
    module._lora_linear_kernel = kernel
    assert precisions == ["tf32x3", "tf32"]


def check_module(op, module):
    x = torch.randn(9, 40)
    m = module.LoRALinear(torch.nn.Linear(40, 24), 4, 8, "silu")
    assert {n for n, p in m.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}
    assert len(list(m.parameters())) == 4
    on_meta = module.LoRALinear(torch.nn.Linear(40, 24, device="meta", dtype=torch.half), 4, 8)
    assert {n for n, _ in on_meta.named_parameters()} == {n for n, _ in m.named_parameters()}
    assert all((p.device.type, p.dtype) == ("meta", torch.half) for p in on_meta.parameters())
    torch.testing.assert_close(m(x), torch.nn.functional.silu(m.base(x)))
    assert m.lora_a.std() > 0.04, "A begins as zeros, and B does: nothing would ever train"
    torch.nn.init.normal_(m.lora_b)
    base = m.base
    want = lora_linear_eager(x, base.weight, m.lora_a, m.lora_b, base.bias, 2.0, "silu")
    torch.testing.assert_close(m(x), want, rtol=1e-5, atol=1e-5)


def check_merge(op, module):
    x = torch.randn(9, 40)
    m = module.LoRALinear(torch.nn.Linear(40, 24), 4, 8, "silu")
    torch.nn.init.normal_(m.lora_b)
    want, weight, state = m(x).detach(), m.base.weight.detach().clone(), m.state_dict()
    assert set(state) == {"base.weight", "base.bias", "lora_a", "lora_b"}
    m.merge()
    m.merge()
    _raises(RuntimeError, lambda: m(x), "unmerge() to train")
    _raises(RuntimeError, m.state_dict, "twice")
    _raises(RuntimeError, lambda: m.load_state_dict(state), "before loading")
    torch.testing.assert_close(m.eval()(x), want, rtol=1e-4, atol=1e-4)
    torch.nn.init.normal_(m.lora_a)
    m.unmerge()
    m.unmerge()
    torch.testing.assert_close(m.base.weight.detach(), weight, rtol=1e-5, atol=1e-5)
    half = module.LoRALinear(torch.nn.Linear(40, 24, dtype=torch.bfloat16), 4, 8)
    torch.nn.init.normal_(half.lora_b)
    exact = half.base.weight.double() + 2.0 * half.lora_b.double() @ half.lora_a.double()
    half.merge()
    error = (half.base.weight.double() - exact).abs() - 0.51 * 2**-7 * exact.abs()
    assert (error < 1e-6).all(), "merged with less than float32"
    with torch.no_grad():
        m.lora_b[0, 0] = float("inf")
    _raises(ValueError, m.merge, "not finite")
    assert torch.isfinite(m.base.weight).all()
    assert not m.merged


CHECKS = [
    check_tf32,
    check_refusals,
    check_module,
    check_merge,
    check_autocast,
    check_what_is_saved,
    check_values,
    check_u,
    check_rounded_once,
    check_gradients,
    check_empty,
    check_specials,
    check_strides,
    check_traffic,
    check_second_derivative,
    check_float64,
    check_registered,
    check_tiles,
    check_many_rows,
    check_errors_are_no_larger_than_eagers,
    check_far_apart,
    check_routing,
]

MUTANTS = [
    # --- both kernels
    Mutant(
        "z = tl.where(z < 0, 0.0, z)  # tl.maximum",
        "z = tl.maximum(z, 0.0)  # tl.maximum",
        "relu(NaN) = 0",
    ),
    Mutant(
        "z = _times_sigmoid(z, z * (1.5957691216057308 + 0.07135481627260025 * z * z))",
        "z = _times_sigmoid(z, z * (1.5957691216057308 + 0.044715 * z * z))",
        "gelu: 2√(2/π) forgotten in the cubic term",
    ),
    Mutant(
        "return z / t if z.dtype",
        "return z * tl.exp(v) / (tl.exp(v) + 1.0) if z.dtype",
        "sigmoid that overflows",
    ),
    Mutant(
        "    y = _act(z, ACTIVATION)\n    if TMA:",
        "    z = z.to(tl.bfloat16).to(z.dtype)\n    y = _act(z, ACTIVATION)\n    if TMA:",
        "rounded before the activation",
    ),
    Mutant(
        "z += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0)",
        "z += tl.load(bias_ptr + cols - col, mask=cols < n_cols, other=0.0)",
        "the bias of the first tile for all",
    ),
    Mutant("        col += half\n", "", "both halves written to the left one's place"),
    Mutant(
        "tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, half)), (0, 2, 1)))",
        "tl.split(tl.reshape(z, (z.shape[0], half, 2)))",
        "even and odd columns for left and right ones",
    ),
    Mutant(
        "height = tl.minimum(tiles_m - first, GROUP)",
        "height = GROUP",
        "a last group as high as the others",
    ),
    Mutant(
        "tile = tile % (GROUP * tiles_n)", "tile = tile % (tiles_m * tiles_n)", "groups overlap"
    ),
    Mutant(
        "u_mask = (rows < n_rows)[:, None] & (ranks < rank)[None, :]",
        "u_mask = (rows < n_rows)[:, None]",
        "u read past its rank",
    ),
    Mutant(
        "b_mask = (ranks < rank)[:, None] & (cols < n_cols)[None, :]",
        "b_mask = (ranks < rank)[:, None]",
        "B read past its rows",
    ),
    Mutant("ranks = piece * BLOCK_R", "ranks = 0 * BLOCK_R", "the first piece of the rank for all"),
    Mutant(
        "rows[:, None] * rank + ranks[None, :]",
        "rows[:, None] * BLOCK_R + ranks[None, :]",
        "u read with padding",
    ),
    Mutant(
        '"PIECES": _cdiv(rank, block_r)',
        '"PIECES": max(1, rank // block_r)',
        "the last ranks forgotten",
    ),
    # --- the pointer kernel
    Mutant(
        "x = tl.load(x_ptrs, mask=row_mask & inside[None, :], other=0.0)\n"
        "        w = tl.load(w_ptrs, mask=inside[:, None] & col_mask, other=0.0)",
        "x = tl.load(x_ptrs, mask=row_mask, other=0.0)\n        w = tl.load(w_ptrs, mask=col_mask, other=0.0)",
        "columns past K added",
    ),
    Mutant(
        "x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K",
        "x_ptrs += BLOCK_K",
        "x stepped through as if contiguous",
    ),
    Mutant(
        "w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K",
        "w_ptrs += BLOCK_K",
        "W stepped through as if contiguous",
    ),
    Mutant(
        "total = tl.dot(x, w, total, input_precision=PRECISION, out_dtype=COMPUTE)",
        "total = tl.dot(x, w, input_precision=PRECISION, out_dtype=COMPUTE)",
        "only the last step over K kept",
    ),
    Mutant(
        "rows, cols = row.to(tl.int64) + tl.arange(0, BLOCK_M), col.to(tl.int64) + tl.arange(0, BLOCK_N)",
        "rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)",
        "int32 rows and columns",
    ),
    Mutant(
        "inner = tl.arange(0, BLOCK_K).to(tl.int64)",
        "inner = tl.arange(0, BLOCK_K)",
        "int32 steps over K",
    ),
    Mutant(
        'return "tf32" if allow_tf32 else "tf32x3"',
        'return "tf32"',
        "tf32 though nobody asked",
    ),
    # --- the TMA kernel
    Mutant(
        "            total = tl.dot(u, b, total)\n        _finish",
        "        _finish",
        "TMA: no low-rank part",
    ),
    Mutant(
        "            total = tl.dot(u, b, total)\n        _finish",
        "        total = tl.dot(u, b, total)\n        _finish",
        "TMA: the last piece of the rank alone",
    ),
    Mutant(
        "row, col, rows, cols = _place(tile, n_rows",
        "row, col, rows, cols = _place(tl.program_id(0), n_rows",
        "TMA: each program's first tile again and again",
    ),
    Mutant(
        "aligned = pitch * t.itemsize % 16 == t.data_ptr() % 16 == 0",
        "aligned = True",
        "TMA: unaligned rows",
    ),
    Mutant(
        "return aligned and step == 1 and pitch",
        "return aligned and pitch",
        "TMA: every second column of x",
    ),
    Mutant("large and x.itemsize == 2 and", "large and", "TMA: float32"),
    # --- forward on the host
    Mutant(
        "u = _product(x_rows, lora_a.t())",
        "u = _product(x_rows, lora_a.t(), scale)",
        "scaled twice",
    ),
    Mutant("u = (u.to(tl.float32) * scale).to(u.dtype)", "pass", "no scale"),
    Mutant("u = u * scale if u.dtype == torch.float64 else u", "pass", "no scale in float64"),
    Mutant(
        "bias = None if bias is None else bias.contiguous()",
        "pass",
        "a strided bias read side by side",
    ),
    Mutant(
        "torch.mm(x, weight.t(), out=total)",
        "torch.mm(x, weight.t(), out=y)",
        "cuBLAS: z without bias",
    ),
    Mutant(
        "total.addmm_(u, _for_cublas(lora_b)",
        "y.addmm_(u, _for_cublas(lora_b)",
        "cuBLAS: z without its low-rank part",
    ),
    Mutant(
        'if activation != "identity":\n        _ACT',
        "if False:\n        _ACT",
        "cuBLAS: not activated",
    ),
    Mutant("save_z = _keeps_z(activation)\n", "save_z = True\n", "z saved for relu"),
    # --- backward
    Mutant(
        "dy = tl.where(saved <= 0, 0.0, dy)",
        "dy = tl.where(saved < 0, 0.0, dy)",
        "relu: a slope of 1 where y is 0",
    ),
    Mutant(
        "dy = dy * (s * (1.0 + saved * (1.0 - s)))",
        "dy = dy * (s * (1.0 - saved * (1.0 - s)))",
        "silu: a wrong slope",
    ),
    Mutant(
        "dy = dy * (saved * (1.0 - saved))",
        "dy = dy * (saved * (1.0 + saved))",
        "sigmoid: a wrong slope",
    ),
    Mutant(
        "e = tl.exp(-1.5957691216057308 * tl.abs(z)",
        "e = tl.exp(-1.5957691216057308 * z",
        "gelu: a wrong slope",
    ),
    Mutant("db = _product(dz.t(), u, scale)", "db = _product(dz.t(), u)", "dB without the scale"),
    Mutant(
        "du = _product(dz, lora_b, scale)",
        "du = _product(dz, lora_b)",
        "dA and dx without the scale",
    ),
    Mutant(
        "dx = _product(du, lora_a).addmm_(_for_cublas(dz), _for_cublas(weight))",
        "dx = _product(dz, weight)",
        "dx without its low-rank part",
    ),
    Mutant(
        "dz, dbias = _dz_and_dbias(dy_rows, saved",
        "dz, dbias = _dz_and_dbias(dy, saved",
        "dy of three dimensions",
    ),
    Mutant(
        "strips = _cdiv(n_rows, rows_per_program)",
        "strips = max(1, n_rows // rows_per_program)",
        "floor where ceil was meant: the last rows forgotten",
    ),
    Mutant(
        "dy_offsets = rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_offsets = rows[:, None] * n_cols + cols[None, :]",
        "dy read as if contiguous",
    ),
    Mutant(
        "rows = pid_m.to(tl.int64) * rows_per_program + start",
        "rows = pid_m * rows_per_program + start",
        "int32 rows of dy",
    ),
    Mutant(
        "tl.store(partial_ptr + pid_m.to(tl.int64) * n_cols + cols, sums, mask=cols < n_cols)",
        "tl.store(partial_ptr + cols, sums, mask=cols < n_cols)",
        "one strip's sums for all",
    ),
    Mutant("lora_b if has_dx or has_da else None", "lora_b", "B saved for nothing"),
    Mutant(
        "x if has_da else None, weight if has_dx else None",
        "x, weight",
        "x and W saved for nothing",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative wrong in silence",
    ),
    # --- checks, autocast, torch.library
    Mutant(
        "if weight.requires_grad and torch.is_grad_enabled():",
        "if False:",
        "a trained weight taken",
    ),
    Mutant(
        "if weight.requires_grad and torch.is_grad_enabled():",
        "if weight.requires_grad:",
        "refused under no_grad",
    ),
    Mutant("if a_shape[0] != b_shape[1]:", "if False:", "two ranks taken"),
    Mutant("if not 1 <= rank <= _MAX_RANK:", "if not rank <= _MAX_RANK:", "rank 0 taken"),
    Mutant(
        "if bias is not None and tuple(bias.shape) != w_shape[:1]:",
        "if False:",
        "a short bias taken",
    ),
    Mutant("        if t.dtype != x.dtype:", "        if False:", "two dtypes taken"),
    Mutant("if not torch.is_autocast_enabled(device):", "if True:", "autocast ignored"),
    Mutant("if ctx.needs_input_grad[1]:", "if False:", "op: a trained weight without a gradient"),
    Mutant("if _keeps_z(activation) and not save_z:", "if False:", "op: gelu's slope without z"),
    Mutant(
        "dx, da, db, dbias = (g if needed else None for g, needed in zip(grads, wanted))",
        "dx, db, da, dbias = (g if needed else None for g, needed in zip(grads, wanted))",
        "op: dA and dB mixed up",
    ),
    # --- LoRALinear
    Mutant("self.base = base.requires_grad_(False)", "self.base = base", "the base is trained"),
    Mutant(
        "self.base = base.requires_grad_(False)",
        "self.base = base\n        base.requires_grad = False",
        "an attribute set, and nothing frozen",
    ),
    Mutant(
        "self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank, **like_weight))",
        "self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank)).to(**like_weight)",
        "a parameter moved, and no parameter any more",
    ),
    Mutant(
        "alpha, alpha / rank, activation", "alpha, alpha, activation", "alpha not divided by rank"
    ),
    Mutant(
        "torch.nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))",
        "torch.nn.init.zeros_(self.lora_a)",
        "A is 0",
    ),
    Mutant("torch.nn.init.zeros_(self.lora_b)", "torch.nn.init.normal_(self.lora_b)", "B is not 0"),
    Mutant(
        "        if not self.merged:\n            a, b",
        "        if True:\n            a, b",
        "merged twice",
    ),
    Mutant(
        "        if self.merged:\n            self._add",
        "        if True:\n            self._add",
        "unmerged twice",
    ),
    Mutant(
        "self._add_to_weight(self._merged_a, self._merged_b, -self.scale)",
        "self._add_to_weight(self.lora_a, self.lora_b, -self.scale)",
        "unmerged by what A and B are now",
    ),
    Mutant(
        "total = torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)",
        "total = weight + scale * (b @ a)",
        "merged with s B A rounded before",
    ),
    Mutant("if not torch.isfinite(total).all():", "if False:", "merged what is not finite"),
    Mutant(
        "if self.training and torch.is_grad_enabled():",
        "if False:",
        "trained while merged, without effect",
    ),
    Mutant(
        'self.register_buffer("_merged_a", None, persistent=False)\n',
        'self.register_buffer("_merged_a", torch.zeros(0))\n',
        "merged from the start",
    ),
    Mutant(
        "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n        if self.merged:",
        "    def _save_to_state_dict(self, destination, prefix, keep_vars):\n        if False:",
        "s B A saved twice",
    ),
    Mutant(
        "    def _load_from_state_dict(self, *args, **kwargs):\n        if self.merged:",
        "    def _load_from_state_dict(self, *args, **kwargs):\n        if False:",
        "loaded while merged",
    ),
]
