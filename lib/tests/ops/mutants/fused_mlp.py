"""Mutants of lib/ops/fused_mlp.py. It takes weights beside rows: all checks that run on them are here."""

import functools

from lib.measure.check import check_against_float64
from lib.nogpu.memory import count_traffic
from lib.ops.fused_mlp import fused_mlp_eager
from lib.tests.ops import cases
from lib.tests.ops.mutants import Mutant

import torch

SMALL = (17, 33, 70, 9)  # M, K, H, N
WAYS = ("one kernel", "split", "cublas")


def _tensors(case=SMALL, dtype=torch.float32):
    """x, weights and biases: leaves that require grad. No hidden unit is near zero, where gradients turn."""
    m, k, h, n = case
    shapes = [(m, k), (h, k), (h,), (n, h), (n,)]
    scales = [1, max(1, k) ** -0.5, 1, max(1, h) ** -0.5, 1]
    x, w1, b1, *rest = [(torch.randn(s) * scale).to(dtype) for s, scale in zip(shapes, scales)]
    b1[b1.abs() < 2e-4] = 1.0
    if x.numel() and h:
        z = x.double() @ w1.double().T + b1.double()
        x[(z.abs() < 1e-4).any(-1)] = 0.0
    return [t.requires_grad_() for t in (x, w1, b1, *rest)]


def _go(module, way):
    """Let every call of this module go this way."""
    module._plan.cache_clear()
    for name, value in cases.way_of_fused_mlp(module, way).items():
        setattr(module, name, value)


def _check(module, inputs, final="sigmoid", version=None, eager=fused_mlp_eager, **kwargs):
    version = version or module.fused_mlp_triton
    bound = functools.partial(version, final=final)
    slack = torch.finfo(inputs[0].dtype).eps if inputs[0].itemsize == 2 else 1e-6
    eager = functools.partial(eager, final=final)
    check_against_float64(bound, eager, *inputs, **{"slack": slack, "name": final} | kwargs)


def _gradients(version, inputs, dy, **kwargs):
    return torch.autograd.grad(version(*inputs, **kwargs), inputs, dy)


def check_values(op, module):
    """Each way, each last function; sizes that fill no tile, one column and several, many units and few."""
    for way in WAYS:
        _go(module, way)
        for final in ("sigmoid", "relu", "identity"):
            for case in (SMALL, (20, 16, 200, 1), (5, 0, 7, 3), (18, 16, 40, 40)):
                _check(module, _tensors(case), final)
        _check(module, _tensors((17, 33, 70, 100), torch.bfloat16))
        _check(module, _tensors((3, 5, 0, 4)))


def check_eager(op, module):
    x, w1, b1, w2, b2 = _tensors()
    hidden = (x @ w1.T + b1).clamp(min=0)
    want = 1 / (1 + torch.exp(-(hidden @ w2.T + b2)))
    torch.testing.assert_close(module.fused_mlp_eager(x, w1, b1, w2, b2), want)


def check_all_units_count(op, module):
    """Whole numbers: y is 1 + 2 + … + H."""
    for way in WAYS:
        _go(module, way)
        for h, n in ((33, 1), (33, 5), (300, 5)):
            numbers, ones = torch.arange(1.0, h + 1), torch.ones(n, h)
            y = module.fused_mlp_triton(
                torch.zeros(40, 7),
                ones[:1].T.expand(-1, 7),
                numbers,
                ones,
                0 * ones[:, 0],
                "identity",
            )
            assert (y == h * (h + 1) / 2).all(), "not all hidden units count, or not once"


def check_float64(op, module):
    for way in WAYS:
        _go(module, way)
        _check(module, _tensors((17, 16, 40, 20), torch.float64), slack=1e-13)


def check_specials(op, module):
    """NaN through both relus; infinities beside units, rows and columns that are not there; large sums."""
    for way in WAYS:
        _go(module, way)
        for n in (5, 1):
            for k, place in ((0, (1, 3)), (2, (9,)), (4, (0,))):
                for special in (float("nan"), float("inf")):
                    inputs = _tensors((12, 20, 40, n))
                    with torch.no_grad():
                        inputs[k][place] = special
                    _check(module, inputs, "relu")
        x, w1, b1, w2, b2 = (t.detach() for t in _tensors((4, 5, 33, 1)))
        w1, w2, x[2] = w1.abs(), w2.abs(), float("inf")
        y = module.fused_mlp_triton(x, w1, b1, w2, b2, "identity")
        assert torch.isposinf(y[2]).all(), "a unit that is not there made a NaN"
        x, w1, b1, w2, b2 = (t.detach() for t in _tensors((4, 5, 33, 3)))
        x, w1, b1, w2 = x.abs(), w1.abs(), b1.abs().requires_grad_(), w2.abs()
        w2[:, 11] = float("inf")
        module.fused_mlp_triton(x, w1, b1, w2, b2, "identity").sum().backward()
        assert torch.isposinf(b1.grad[11]).all(), "a row that is not there made a NaN"
        b2 = torch.tensor([1e4, -1e4, 0.0])
        y = module.fused_mlp_triton(x, w1, b1.detach(), 0 * b1.detach().expand(3, -1), b2)
        assert torch.equal(y[0], torch.tensor([1.0, 0.0, 0.5])), "large sums"


def check_strides(op, module):
    for way in ("one kernel", "cublas"):
        _go(module, way)
        inputs = [t.detach() for t in _tensors((9, 20, 34, 6))]
        for k in (0, 1, 3):
            for layout, strided in cases.layouts(inputs[k]).items():
                if k and strided.dim() != 2:
                    continue
                leaves = [strided if i == k else t for i, t in enumerate(inputs)]
                _check(module, [t.detach().requires_grad_() for t in leaves], name=layout)
        x, w1, b1, w2, b2 = _tensors()
        _check(module, (x, w1, cases.spread(b1), w2, cases.spread(b2)))


def check_gradient_layouts(op, module):
    """Stride 0, transposed; twice the same; neither dy nor what was saved is changed."""
    for way in WAYS:
        _go(module, way)
        inputs = _tensors()
        for dy in (torch.randn(9, 17).T, torch.ones(()).expand(17, 9)):
            before = dy.clone()
            y = module.fused_mlp_triton(*inputs)
            first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
            first = [t.clone() for t in first]
            second = torch.autograd.grad(y, inputs, dy)
            for a, b, want in zip(first, second, _gradients(fused_mlp_eager, inputs, dy)):
                assert torch.equal(a, b), "a second backward differs"
                torch.testing.assert_close(a, want, rtol=1e-5, atol=1e-5)
            assert torch.equal(dy, before), "dy was changed"


def check_gradients_one_by_one(op, module):
    for way in WAYS:
        _go(module, way)
        inputs = _tensors()
        wanted = torch.autograd.grad(fused_mlp_eager(*inputs).square().sum(), inputs)
        for some in ([0], [1], [2], [3], [4], [1, 3], [2, 4]):
            leaves = [t if k in some else t.detach() for k, t in enumerate(inputs)]
            loss = module.fused_mlp_triton(*leaves).square().sum()
            for k, got in zip(some, torch.autograd.grad(loss, [inputs[k] for k in some])):
                torch.testing.assert_close(got, wanted[k], rtol=1e-5, atol=1e-5)


def check_second_derivative(op, module):
    inputs, dy = _tensors(), torch.randn(17, 9, requires_grad=True)
    y = module.fused_mlp_triton(*inputs)
    (dx,) = torch.autograd.grad(y, inputs[:1], dy, create_graph=True)
    try:
        (dx * inputs[0]).sum().backward()  # without the error: the part of it that goes through x
    except RuntimeError:
        return
    raise AssertionError("a second derivative does not raise")


def check_vmap(op, module):
    for way in WAYS:
        _go(module, way)
        x, *rest = (t.detach() for t in _tensors())
        try:
            torch.vmap(module.fused_mlp_triton, in_dims=(0, *[None] * 4))(x[None], *rest)
        except RuntimeError:
            continue
        raise AssertionError("vmap does not raise")


def check_empty(op, module):
    for case in [(0, 5, 7, 3), (4, 5, 6, 0), (0, 0, 0, 0)]:
        _check(module, _tensors(case))
    inputs = _tensors()
    inputs[0] = torch.randn(2, 3, 33, requires_grad=True)
    _check(module, inputs)


def check_registered(op, module):
    def version(*inputs, final):
        return module.fused_mlp_op(*inputs, final)

    for way in ("one kernel", "cublas"):
        _go(module, way)
        for final in ("sigmoid", "identity"):
            _check(module, _tensors(), final, version=version)
            frozen = [t if k in (0, 3) else t.detach() for k, t in enumerate(_tensors())]
            _check(module, frozen, final, version=version)
    _go(module, "one kernel")
    torch.library.opcheck(module.fused_mlp_op, (*_tensors((5, 3, 7, 4)), "sigmoid"))
    y, *tensors = (t.detach() for t in (torch.rand(17, 9), *_tensors()[:4]))
    args = (torch.randn(17, 9), *tensors, y, "sigmoid", False, [True] * 5)
    torch.library.opcheck(module._fused_mlp_backward_op, args)


def check_autocast(op, module):
    """In bfloat16 where autocast says so; a float32 backward pass inside it stays float32."""
    for way in WAYS:
        _go(module, way)
        inputs, dy = _tensors(), torch.randn(17, 9)
        y = module.fused_mlp_triton(*inputs)
        want = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module.fused_mlp_triton(*inputs).dtype == torch.bfloat16
            got = torch.autograd.grad(y, inputs, dy)
        assert all(torch.equal(a, b) for a, b in zip(got, want)), "rounded by autocast"


def check_traffic(op, module):
    """The hidden layer stays on chip; splits are used, and in the order that the tables say."""
    inputs = [t.detach() for t in _tensors((40, 32, 200, 24))]
    least = sum(t.nbytes for t in inputs) + 40 * 24 * 4
    _go(module, "one kernel")
    traffic = count_traffic(lambda: module.fused_mlp_triton(*inputs))
    assert (traffic.launches, traffic.bytes_moved) == (1, least)
    _go(module, "split")
    splits = module._plan(40, 32, 200, 24, "tf32x3", inputs[0].device).n_splits
    traffic = count_traffic(lambda: module.fused_mlp_triton(*inputs))
    assert splits > 1, "not split"
    assert (traffic.launches, traffic.bytes_moved) == (2, least + 2 * splits * 40 * 24 * 4)


def check_far_apart(op, module):
    """Offsets past 2**31 of x, weights and dy, along rows and along columns."""
    _go(module, "one kernel")
    near = cases.near(fused_mlp_eager)
    far = cases.far_apart(torch.float16, "cpu")
    for k, case in ((0, (3, 16, 8, 2)), (1, (5, 16, 3, 2)), (3, (5, 6, 16, 3))):
        values = [far if i == k else t for i, t in enumerate(_tensors(case, torch.float16))]
        _check(module, [t.detach().requires_grad_() for t in values], eager=near)
    for k, case in ((0, (5, 3, 8, 2)), (1, (5, 3, 16, 2)), (3, (5, 6, 3, 4)), (3, (5, 6, 3, 1))):
        values = [t.detach() for t in _tensors(case, torch.float16)]
        columns = cases.far_apart(torch.float16, "cpu")[:, : len(values[k])].T.copy_(values[k])
        values = [columns if i == k else t for i, t in enumerate(values)]
        _check(module, [t.detach().requires_grad_() for t in values], eager=near)
    dys = far, cases.far_apart(torch.float16, "cpu")[:, :5].T
    for case, dy in zip(((3, 4, 8, 16), (5, 4, 8, 3)), dys):
        inputs = _tensors(case, torch.float16)
        want = _gradients(fused_mlp_eager, inputs, dy.contiguous())
        for a, b in zip(_gradients(module.fused_mlp_triton, inputs, dy), want):
            torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def check_refused(op, module):
    x, w1, b1, w2, b2 = (t.detach() for t in _tensors())
    bad = [
        (x, w1.T, b1, w2, b2),
        (x, w1[:, :-1], b1, w2, b2),
        (x, w1, b1[:-1], w2, b2),
        (x, w1, b1, w2[:, :-1], b2),
        (x, w1, b1, w2, b2[:-1]),
        (x, w1, b1, w2, b2, "tanh"),
    ]
    for inputs in bad:
        try:
            module.fused_mlp_triton(*inputs)
        except ValueError as error:
            assert "fused_mlp_triton: " in str(error)  # noqa: PT017
            continue
        raise AssertionError("taken, and wrong")


CHECKS = [
    check_values,
    check_eager,
    check_all_units_count,
    check_empty,
    check_refused,
    check_second_derivative,
    check_vmap,
    check_far_apart,
    check_traffic,
    check_autocast,
    check_registered,
    check_gradients_one_by_one,
    check_gradient_layouts,
    check_float64,
    check_strides,
    check_specials,
]

MUTANTS = [
    # --- the whole MLP in one kernel
    Mutant(
        "for start in range(first, tl.minimum(first + units_per_program, n_hidden), BLOCK_H):",
        "for start in range(first, tl.minimum(first + 1, n_hidden), BLOCK_H):",
        "a tile of the hidden layer taken for all of it",
    ),
    Mutant(
        "z = tl.dot(hidden, w2, z, input_precision",
        "z = tl.dot(hidden, w2, z * 0.0, input_precision",
        "each tile forgets the ones before it",
    ),
    Mutant(
        "z += tl.sum(hidden.to(COMPUTE) * w2",
        "z = tl.sum(hidden.to(COMPUTE) * w2",
        "one column: each tile forgets the ones before it",
    ),
    Mutant(
        "first = tl.program_id(1) * units_per_program",
        "first = tl.program_id(1) * BLOCK_H",
        "split: parts that overlap",
    ),
    Mutant(
        "tl.minimum(first + units_per_program, n_hidden)",
        "n_hidden",
        "split: each part up to the end",
    ),
    Mutant(
        "y_ptrs = y_ptr + tl.program_id(1).to(tl.int64) * n_rows * n_cols",
        "y_ptrs = y_ptr + 0 * n_rows",
        "split: all parts in one place",
    ),
    Mutant(
        'FINAL="identity" if split else final',
        "FINAL=final",
        "split: the last function of each part, and of their sum",
    ),
    Mutant(
        "w2, None if split else b2, out",
        "w2, b2, out",
        "split: b2 in each part",
    ),
    Mutant("parts_ptr += n_elements", "parts_ptr += 0", "split: the first part again and again"),
    Mutant(
        "out = x.new_empty((plan.n_splits, *y.shape), dtype=wide) if split else y",
        "out = x.new_empty((plan.n_splits, *y.shape)) if split else y",
        "split: parts rounded to the dtype of x",
    ),
    Mutant("b2_ptr + offsets % n_cols", "b2_ptr + offsets * 0", "split: one bias for all columns"),
    Mutant("split = plan.n_splits > 1", "split = False", "split: without the second kernel"),
    Mutant("of_a_row // _LEAST_OF_A_PART)", "0)", "never split"),
    # --- sums, masks, relu
    Mutant(
        "inside = inner < n_inner - k",
        "inside = inner < n_inner",
        "the mask of the last piece of K dropped",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where(z < 0, 0.0, z)",
        "units that are not there: 0 times infinity",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where((z > 0) & (units < n_hidden)[None, :], z, 0.0)",
        "relu turns NaN into 0",
    ),
    Mutant(
        "tl.where((z < 0) | (units >= n_hidden)[None, :], 0.0, z)",
        "tl.where((units >= n_hidden)[None, :], 0.0, z)",
        "no relu",
    ),
    Mutant(
        "z = tl.where(z < 0, 0.0, z)", "z = tl.maximum(z, 0.0)", "the last relu turns NaN into 0"
    ),
    Mutant(
        "z = 1.0 / (1.0 + tl.exp(-z))",
        "z = tl.exp(z) / (1.0 + tl.exp(z))",
        "sigmoid as e/(1 + e): NaN for z > 88",
    ),
    Mutant(
        "    z += tl.load(b1_ptr + units, mask=units < n_hidden, other=0.0).to(COMPUTE)[None, :]\n",
        "",
        "b1 forgotten",
    ),
    Mutant(
        "z += tl.load(b2_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]",
        "z += 0.0",
        "b2 forgotten",
    ),
    Mutant(
        "0.0, z).to(x_ptr.dtype.element_ty)",
        "0.0, z).to(tl.bfloat16).to(x_ptr.dtype.element_ty)",
        "the hidden layer rounded to bfloat16",
    ),
    Mutant(
        "_final(z, FINAL), mask=(rows < n_rows)[:, None] & (cols < n_cols)[None, :])",
        "_final(z, FINAL), mask=(rows < n_rows)[:, None])",
        "columns that are not there are written",
    ),
    Mutant(
        '"ONE_STEP": k <= block_k and not backward',
        '"ONE_STEP": not backward',
        "the rest of K forgotten",
    ),
    Mutant(
        "return tl.float64 if dtype == torch.float64 else tl.float32",
        "return tl.float32",
        "float64 computed in float32",
    ),
    # --- strides and offsets
    Mutant(
        "rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "int32 rows",
    ),
    Mutant(
        "units = (start + tl.arange(0, BLOCK_H)).to(tl.int64)",
        "units = start + tl.arange(0, BLOCK_H)",
        "int32 units",
    ),
    Mutant(
        "x_ptr + rows[:, None] * stride_xm + inner.to(tl.int64)[None, :] * stride_xk",
        "x_ptr + rows[:, None] * stride_xm + inner[None, :] * stride_xk",
        "int32 columns of x",
    ),
    Mutant(
        "cols = (start + tl.arange(0, BLOCK_N)).to(tl.int64)",
        "cols = start + tl.arange(0, BLOCK_N)",
        "backward: int32 columns",
    ),
    Mutant(
        "dy_ptr + rows[:, None] * stride_dym + cols[None, :] * stride_dyn",
        "dy_ptr + rows[:, None] * n_cols + cols[None, :]",
        "dy taken for contiguous",
    ),
    Mutant(
        "w2_ptr + cols[:, None] * stride_2n + units[None, :] * stride_2h",
        "w2_ptr + cols[:, None] * n_hidden + units[None, :]",
        "backward: W2 taken for contiguous",
    ),
    Mutant(
        "_launch_forward(out, x, w1, b1.contiguous(), w2, b2.contiguous(), final, kind)",
        "_launch_forward(out, x, w1, b1, w2, b2, final, kind)",
        "biases with gaps",
    ),
    Mutant("w1, b1.contiguous(), w2, hidden", "w1, b1, w2, hidden", "backward: b1 with gaps"),
    # --- gradients
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where((rows >= n_rows)[:, None], 0.0, dh)",
        "the gradient of relu forgotten",
    ),
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where((hidden > 0) & (rows < n_rows)[:, None], dh, 0.0)",
        "NaN lets no gradient through",
    ),
    Mutant(
        "dz1 = tl.where((hidden <= 0) | (rows >= n_rows)[:, None], 0.0, dh)",
        "dz1 = tl.where(hidden <= 0, 0.0, dh)",
        "rows that are not there: 0 times infinity",
    ),
    Mutant("dy = dy * (y * (1.0 - y))", "dy = dy * y", "a wrong gradient of sigmoid"),
    Mutant(
        "dy = tl.where(y <= 0, 0.0, dy)",
        "dy = tl.where(y > 0, dy, 0.0)",
        "the last relu: NaN lets no gradient through",
    ),
    Mutant("        if pid_h == 0:\n", "        if pid_m == 0:\n", "dz2 of the first rows only"),
    Mutant(
        "tl.store(partial + n_hidden + cols, tl.sum(dz2, axis=0)",
        "tl.store(partial + n_hidden + cols, dz2.to(COMPUTE).to(tl.bfloat16).to(COMPUTE).sum(axis=0)",
        "db2 from rounded numbers",
    ),
    Mutant(
        "partial += pid_m.to(tl.int64) * (n_hidden + n_cols)",
        "partial += 0 * n_cols",
        "the sums of the last rows alone",
    ),
    Mutant(
        "dh = tl.dot(dz2, w2, dh, input_precision",
        "dh = tl.dot(dz2, w2, dh * 0.0, input_precision",
        "dh of the last columns alone",
    ),
    Mutant(
        "hidden = x.new_empty(n_rows, n_hidden) if has_dw2 else None",
        "hidden = x.new_empty(n_rows, n_hidden) if has_dx else None",
        "no hidden layer for dW2 alone",
    ),
    Mutant("if has_dx or has_dw1 else None", "if has_dx else None", "no dz1 for dW1 alone"),
    Mutant("if has_db1 or has_db2:", "if has_db1:", "no sums for db2 alone"),
    Mutant(
        "hidden = _hidden_by_cublas(x, w1, b1) if hidden is None else hidden",
        "hidden = torch.mm(x, w1.t()) + b1 if hidden is None else hidden",
        "cublas: computed again without relu",
    ),
    Mutant(
        "dz2 = aten.threshold_backward(dy, y, 0)", "dz2 = dy", "cublas: relu's gradient forgotten"
    ),
    Mutant(
        "torch.mm(dz1, _for_cublas(w1), out=x.new_empty(x.shape))",
        "torch.mm(dz1, w1)",
        "autocast rounds the products of the backward pass",
    ),
    Mutant(
        "    x, weight1, bias1, weight2, bias2 = _autocast(x, weight1, bias1, weight2, bias2)\n",
        "",
        "autocast ignored",
    ),
    Mutant(
        "@torch.autograd.function.once_differentiable",
        "@staticmethod",
        "a second derivative that is wrong in silence",
    ),
    Mutant(
        "if not _needs_gradient(*tensors):",
        "if not _needs_gradient(x):",
        "no gradients where x needs none",
    ),
    Mutant(
        "return dx, dw1, db1.clone(), dw2, db2.clone()",
        "return dx, dw1, db1, dw2, db2",
        "the op's results share memory",
    ),
    # --- checks
    Mutant(
        "k == inner and h == h1 == hidden and n == n2",
        "k == inner and h == hidden",
        "biases unchecked",
    ),
    Mutant(
        "hidden = torch.relu(F.linear(x, weight1, bias1))",
        "hidden = F.linear(x, weight1, bias1)",
        "eager: no relu",
    ),
]
