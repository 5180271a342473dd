"""What is particular to embedding_hash: Python's modulus, DLRM's tables, gradients, updates, its loads."""

from lib import machine
from lib.dlrm.model import ModulusHash, SparseArch
from lib.measure import registry
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import embedding_hash
from lib.ops.embedding_hash import EmbeddingHash, embedding_hash_eager, embedding_hash_triton
from lib.tests.ops import battery

import pytest
import torch
import triton.language as tl

OP = registry.find("embedding_hash")
UNEVEN = (5, 1, 40, 2, 1)
WAYS = {"dense": {}, "atomics": {"deterministic": False}, "sparse": {"sparse": True}}
ways = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def integers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=machine.device())


def inputs(n_batch=33, dim=6, num_rows=UNEVEN, dtype=torch.float32):
    """ids of both signs, among them -1, and a table in which most rows are asked for several times."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-60, 60, (n_batch, len(num_rows)), generator=generator)
    ids[0] = -1
    weight = torch.randn(sum(num_rows), dim, generator=generator).to(machine.device(), dtype)
    return ids.to(machine.device()), weight.requires_grad_(), num_rows


def rows_of(module, ids, num_rows):
    """The rows that are read: those of a table that holds its rows' numbers."""
    numbers = torch.arange(sum(num_rows), dtype=torch.float64, device=ids.device)
    return module.embedding_hash_triton(ids, numbers[:, None], num_rows)[..., 0].long().tolist()


# --- which rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_modulus_is_pythons_for_any_integer(module, dtype):
    """Negative ones, those at the ends, and those that 1 more takes past 32 bits."""
    end = 2**62 - 1 if dtype == torch.int64 else 2**31 - 1
    ids = [-end, -end + 1, -101, -100, -8, -7, -6, -2, -1, 0, 1, 5, 6, 99, 2**31 - 1, end - 1, end]
    num_rows = (7, 1, 100, 3)
    want = [[(k + 1) % n + start for n, start in zip(num_rows, (0, 7, 8, 108))] for k in ids]
    assert rows_of(module, integers(*[[k] * 4 for k in ids], dtype=dtype), num_rows) == want
    assert module._rows(integers(*[[k] * 4 for k in ids], dtype=dtype), num_rows).tolist() == want


def test_many_programs_in_which_samples_begin_anywhere(module):
    num_rows = tuple(range(1, 27))
    ids = torch.arange(26 * 57, device=machine.device()).view(57, 26) - 300
    want = embedding_hash_eager(
        ids, torch.arange(351, device=ids.device).double()[:, None], num_rows
    )
    assert rows_of(module, ids, num_rows) == want[..., 0].long().tolist()


def test_it_is_dlrms_hash_and_tables():
    ids, _, num_rows = inputs()
    hashing, tables = ModulusHash(num_rows).to(ids.device), SparseArch(num_rows, 6).to(ids.device)
    fused = EmbeddingHash.from_tables(tables.tables)
    y, want = fused(ids), tables(hashing(ids))
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    grads = torch.cat([table.weight.grad for table in tables.tables])
    torch.testing.assert_close(fused.weight.grad, grads)


def test_rows_that_begin_past_two_to_the_31_elements(module):
    """One table of 2**27 + 1 rows of 16: its last row, read, and added to."""
    weight = torch.empty(2**27 + 1, 16, dtype=torch.float16, device=machine.device())
    weight[-1] = torch.arange(16)
    ids, num_rows = integers([2**27 - 1], [-2]), (len(weight),)
    y = module.embedding_hash_triton(ids, weight, num_rows)
    assert torch.equal(y, weight[-1].expand(2, 1, 16))
    module._launch_backward(module.Plan(4, 16, 1), y, ids, num_rows, weight)
    assert torch.equal(weight[-1], 3 * y[0, 0])


# --- gradients -----------------------------------------------------------------------------------------------


@ways
def test_each_gradient_is_that_of_eager(module, how):
    ids, weight, num_rows = inputs()
    y = module.embedding_hash_triton(ids, weight, num_rows, **how)
    want = embedding_hash_eager(ids, weight, num_rows)
    dy = torch.randn_like(y)
    (got,), (want,) = (torch.autograd.grad(out, weight, dy) for out in (y, want))
    torch.testing.assert_close(got.to_dense(), want)


@pytest.mark.parametrize("check", [battery.layouts, battery.gradient_layouts, battery.far_apart])
def test_atomics_too(module, check):
    check(OP, registry.bind(module.embedding_hash_triton, {"deterministic": False}))


def test_a_sparse_gradient_has_an_entry_for_each_lookup(module):
    """As nn.Embedding(sparse=True) gives it: dy itself, and nothing added up."""
    ids, weight, num_rows = inputs()
    y = module.embedding_hash_triton(ids, weight, num_rows, sparse=True)
    dy = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, weight, dy)
    assert not grad.is_coalesced() and grad._nnz() == ids.numel()
    assert grad._indices().flatten().tolist() == sum(rows_of(module, ids, num_rows), [])
    assert grad._values().data_ptr() == dy.data_ptr()
    none = module.embedding_hash_triton(ids[:0], weight, num_rows, sparse=True)
    (grad,) = torch.autograd.grad(none.sum(), weight)
    assert grad.is_sparse and grad.shape == weight.shape and grad._nnz() == 0


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_training_with_sparse_gradients_is_training(name):
    ids, _, num_rows = inputs()
    tables = SparseArch(num_rows, 6, sparse_gradients=True).to(ids.device)
    modules = [EmbeddingHash.from_tables(tables.tables, sparse) for sparse in (True, False)]
    rows = ModulusHash(num_rows).to(ids.device)(ids)
    calls = {module: (module, ids) for module in modules} | {tables: (tables, rows)}
    for layer, (call, argument) in calls.items():
        steps = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            call(argument).square().sum().backward()
            steps.step()
    trained = torch.cat([table.weight for table in tables.tables])
    for module in modules:
        torch.testing.assert_close(module.weight, trained)


def test_atomics_add_16_bits_in_32(module):
    """In bfloat16, 256 + 1 is 256."""
    weight = torch.zeros(1, 3, dtype=torch.bfloat16, device=machine.device(), requires_grad=True)
    ids = torch.zeros(300, 1, dtype=torch.int64, device=machine.device())
    module.embedding_hash_triton(ids, weight, (1,), deterministic=False).sum().backward()
    assert weight.grad.tolist() == [[300.0] * 3]


@ways
def test_nothing_is_left_that_nobody_wrote(module, how):
    """torch.empty gives NaN here: in y, and below what atomics add."""
    ids, weight, num_rows = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        y = module.embedding_hash_triton(ids, weight, num_rows, **how)
        (grad,) = torch.autograd.grad(y.sum(), weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert y.isfinite().all() and grad.to_dense().isfinite().all()


# --- launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_is_one_launch_that_reads_rows_and_writes_y(dtype):
    ids, weight, num_rows = inputs(dim=16, dtype=dtype)
    traffic = count_traffic(lambda: embedding_hash_triton(ids, weight.detach(), num_rows))
    assert traffic.launches == 1
    n_rows = len({*sum(rows_of(embedding_hash, ids, num_rows), [])})
    n_bytes = ids.nbytes + (n_rows + ids.numel()) * 16 * dtype.itemsize
    assert traffic.bytes_moved == n_bytes + 2 * 8 * len(num_rows)  # and what the tables' sizes are


@pytest.mark.parametrize("call", ["embedding_hash_triton", "embedding_hash_op"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_only_atomics_launch_a_kernel_of_this_file(module, call, deterministic):
    """Else PyTorch's do it; that the registered op passes on which way."""
    ids, weight, num_rows = inputs()
    y = getattr(module, call)(ids, weight, num_rows, deterministic=deterministic)
    traffic = count_traffic(lambda: y.backward(torch.randn_like(y)))
    assert traffic.launches == (0 if deterministic else 1)


def test_the_tables_are_put_on_the_device_once(module):
    device = machine.device()
    assert module._tables((3, 4), device) is module._tables((3, 4), device)
    assert module._tables((3, 4), device).tolist() == [[3, 4], [0, 3]]


def test_what_is_made_under_torch_func_does_not_outlive_it(module):
    ids, weight, num_rows = inputs(num_rows=(3, 5, 6))
    call = module.embedding_hash_eager
    torch.func.grad(lambda w: call(ids, w, num_rows).sum())(weight.detach())
    got = module.embedding_hash_triton(ids, weight, num_rows)
    assert torch.equal(got, embedding_hash_eager(ids, weight, num_rows))


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.float32, 16), (torch.float32, 128), (torch.float32, 12), (torch.float32, 4), (torch.bfloat16, 8)],
    ids=str,
)  # fmt: skip
def test_rows_of_16_bytes_are_moved_by_16_bytes_at_a_time(module, dtype, dim):
    ids, tables = torch.empty(64, 26, dtype=torch.int64), torch.empty(2, 26, dtype=torch.int64)
    weight, y = torch.empty(2600, dim, dtype=dtype), torch.empty(64, 26, dim, dtype=dtype)
    plan = module._plan(dim, dtype.itemsize)
    sizes = {"TABLES": 26, "DIM": dim, "BLOCK_L": plan.block_l, "BLOCK_D": plan.block_d}
    strides = {"STRIDE_YB": 26 * dim, "STRIDE_YT": dim, "STRIDE_YD": 1}
    forward, backward = module._embedding_hash_fwd_kernel, module._embedding_hash_bwd_kernel
    signatures = {
        forward: signature_of(
            forward, ids, weight, tables, y, 64 * 26, 26, 1, STRIDE_WR=dim, STRIDE_WD=1, **sizes
        ),
        backward: signature_of(
            backward, y, ids, tables, weight.float(), 64 * 26, 26, 1, **strides, **sizes
        ),
    }
    for kernel, signature in signatures.items():
        compiled = compile_for(kernel, signature, arch=90, num_warps=plan.num_warps)
        assert compiled.spills == 0
        assert any("LDG" in name and "128" in name for name in instruction_mix(compiled))
    mix = instruction_mix(
        compile_for(forward, signatures[forward], arch=90, num_warps=plan.num_warps)
    )
    assert any("STG" in name and "128" in name for name in mix)


# --- what is refused, the module, torch.compile --------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [(5, 0), (5, -4), (5.0, 4), (), 9, None, "54"], ids=repr)
def test_wrong_numbers_of_rows_are_refused(module, num_rows):
    ids, weight, _ = inputs(num_rows=(5, 4))
    with pytest.raises(ValueError, match="num_rows must be a tuple of ints, .* 1 or more, got "):
        module.embedding_hash_triton(ids, weight, num_rows)
    with pytest.raises(ValueError, match="EmbeddingHash: num_rows must be a tuple of ints"):
        module.EmbeddingHash(num_rows, 4)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda i, w, n: (i[:, 0], w, n), ValueError, r"ids must be \(B, T\) with the T = 5 .*\(33,\)"),
        (lambda i, w, n: (i[:, 1:], w, n), ValueError, r"with the T = 5 tables of .* got shape \(33, 4\)"),
        (lambda i, w, n: (i.short(), w, n), TypeError, "int32 tensor, got torch.int16; use .long()"),
        (lambda i, w, n: (i, w[1:], n), ValueError, r"\(R, D\) with R = 49, the sum of .* \(48, 6\)"),
        (lambda i, w, n: (i, w[:, 0], n), ValueError, r"weight must be \(R, D\), got shape \(49,\)"),
        (lambda i, w, n: (i, w.int(), n), TypeError, "weight must be a floating-point tensor"),
        (lambda i, w, n: (i, w.tolist(), n), TypeError, "weight must be a torch.Tensor, got list"),
        (lambda i, w, n: (i, w.to("meta"), n), ValueError, "ids is on .* and weight on meta; move"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(module, change, kind, message):
    with pytest.raises(kind, match="embedding_hash_triton: .*" + message):
        module.embedding_hash_triton(*change(*inputs()))


def test_the_registered_op_refuses_too(module):
    ids, weight, num_rows = inputs()
    with pytest.raises(ValueError, match="embedding_hash_op: ids must be"):
        module.embedding_hash_op(ids[:, 1:], weight, num_rows)


def test_a_list_of_sizes_is_one_too(module):
    ids, weight, num_rows = inputs()
    got = module.embedding_hash_triton(ids, weight, list(num_rows))
    assert torch.equal(got, embedding_hash_eager(ids, weight, list(num_rows)))


def test_the_module_begins_as_dlrms_tables_do(module):
    layer = module.EmbeddingHash([4, 100, 1], 64)
    assert repr(layer) == "EmbeddingHash(3 tables, 105 rows, embedding_dim=64)"
    for table, bound in zip(layer.weight.split([4, 100, 1]), (0.5, 0.1, 1.0)):
        assert 0.9 * bound < table.abs().max() <= bound
        assert abs(table.mean()) < 0.2 * bound


def test_tables_with_rules_of_their_own_are_refused(module):
    with pytest.raises(ValueError, match="it knows no padding_idx, max_norm and"):
        module.EmbeddingHash.from_tables([torch.nn.Embedding(3, 4, padding_idx=0)])


def test_a_sparse_gradient_of_a_weight_with_the_negative_bit(module):
    """It has no registered op, and its memory holds other numbers than it."""
    plain = torch.randn(12, 8, device=machine.device())
    ids, weights = torch.arange(6, device=plain.device).view(3, 2), (plain, torch._neg_view(-plain))
    (want, of_plain), (got, of_view) = (
        (module.embedding_hash_triton(ids, w, (5, 7), sparse=True), w)
        for w in (w.detach().requires_grad_() for w in weights)
    )
    assert of_view.is_neg()
    assert torch.equal(got, want)
    grads = torch.autograd.grad(want.sum(), of_plain), torch.autograd.grad(got.sum(), of_view)
    assert torch.equal(*(g.to_dense() for (g,) in grads))


def test_frozen_tables_stay_frozen(module):
    frozen = torch.nn.Embedding.from_pretrained(torch.randn(4, 8))
    trained = torch.nn.Embedding(5, 8)
    of_tables = module.EmbeddingHash.from_tables
    assert not of_tables([frozen, frozen]).weight.requires_grad
    assert of_tables([trained]).weight.requires_grad
    with pytest.raises(ValueError, match="some tables are frozen and others trained; freeze all"):
        of_tables([frozen, trained])
    with pytest.raises(ValueError, match=r"must have one embedding_dim, got \[8, 16\]"):
        of_tables([trained, torch.nn.Embedding(5, 16)])


def test_a_module_made_on_meta_begins_as_any_other(module):
    made = module.EmbeddingHash([4, 400], 8, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        made.weight.fill_(9.0)
    made.reset_parameters()
    first, second = made.weight.detach().split([4, 400])
    assert 0.25 < first.abs().max() <= 0.5
    assert 0.04 < second.abs().max() <= 0.05


def test_a_sparse_gradient_breaks_a_compiled_graph(module):
    ids, weight, num_rows = inputs()
    torch.compiler.reset()

    def call(ids, weight):
        return module.embedding_hash_triton(ids, weight, num_rows, sparse=True)

    whole = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="torch.compile has no sparse gradients; use sparse=False"):
        whole(ids, weight)
    with torch.no_grad():
        assert torch.equal(whole(ids, weight), call(ids, weight))
    parts = torch.compile(lambda *tensors: call(*tensors) * 2, backend="aot_eager")
    grads = [torch.autograd.grad(f(ids, weight).sum(), weight)[0] for f in (parts, call)]
    assert torch.equal(grads[0].to_dense(), 2 * grads[1].to_dense())


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_no_columns(module, way):
    ids = torch.arange(6, device=machine.device()).view(3, 2)
    weight = torch.empty(9, 0, device=machine.device(), requires_grad=True)
    y = module.embedding_hash_triton(ids, weight, (4, 5), **WAYS[way])
    assert y.shape == (3, 2, 0)
    y.sum().backward()
    assert weight.grad.shape == (9, 0)


# --- an update in the backward pass --------------------------------------------------------------------------


def step(weight, state, rows, dy, lr, eps):
    """A step of SGD, or with a state of row-wise Adagrad, in plain PyTorch: (weight, state) after it."""
    flat, dy = rows.flatten(), dy.flatten(0, 1)
    grad = torch.zeros_like(weight).index_add_(0, flat, dy)
    if state is None:
        return weight - lr * grad, None
    state = state + grad.to(state.dtype).square().mean(1)
    moved = (weight - lr / (state.sqrt()[:, None] + eps) * grad).to(weight.dtype)
    read = torch.zeros(len(weight), 1, dtype=torch.bool, device=weight.device)
    read[flat] = True
    return torch.where(read, moved, weight), state


def updated(module, ids, weight, num_rows, dy, state=None, lr=0.125, eps=0.5, plan=None):
    """weight and state after a step by the op: of copies of them. A number goes into float32 unchanged."""
    weight, state = weight.detach().clone(), None if state is None else state.clone()
    weight.requires_grad_()
    if plan is None:
        update = module.Update(lr, state, eps)
        module.embedding_hash_triton(ids, weight, num_rows, update=update).backward(dy)
        assert weight.grad is None
    else:
        module._launch_update(
            plan, dy, ids, num_rows, weight.detach(), module.Update(lr, state, eps)
        )
    return weight.detach(), state


def state_of(weight):
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.arange(len(weight), device=weight.device).to(wide) / 8


@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_200_steps_stay_as_near_to_float64_as_those_of_a_dense_gradient(dtype, adagrad):
    """Most rows are looked up several times in each step."""
    ids, weight, num_rows = inputs(5, dtype=dtype)
    state = torch.zeros(len(weight), device=weight.device) if adagrad else None
    lr, eps, wide = (
        0.03,
        1e-3,
        (weight.detach().double(), state if state is None else state.double()),
    )
    dense, dense_state = weight.detach().clone().requires_grad_(), state
    optimizer, update = torch.optim.SGD([dense], lr), embedding_hash.Update(lr, state, eps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        ids = torch.randint(-60, 60, ids.shape, generator=generator).to(ids.device)
        dy = torch.randn(*ids.shape, weight.shape[1], generator=generator).to(ids.device, dtype)
        rows = embedding_hash._rows(ids, num_rows)
        wide = step(*wide, rows, dy.double(), lr, eps)
        embedding_hash_triton(ids, weight, num_rows, update=update).backward(dy)
        if adagrad:
            with torch.no_grad():
                moved, dense_state = step(dense, dense_state, rows, dy, lr, eps)
                dense.copy_(moved)
        else:
            optimizer.zero_grad()
            embedding_hash_eager(ids, dense, num_rows).backward(dy)
            optimizer.step()
    ours, eagers = ((w.double() - wide[0]).abs().max() for w in (weight, dense))
    assert ours <= 2 * eagers + 1e-6
    if adagrad:
        torch.testing.assert_close(state.double(), wide[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("n_batch", "num_rows", "dim"),
    [(1, (1,), 1), (33, UNEVEN, 6), (300, (1,), 4), (40, (2, 1, 90), 16), (7, (9, 200), 33), (2, (1, 3), 1030)],
)  # fmt: skip
def test_a_step_is_that_of_plain_pytorch(module, n_batch, num_rows, dim, ids_dtype, adagrad):
    """One row everywhere, rows that end where a walk ends, rows over many walks, and rows of odd lengths."""
    ids, weight, _ = inputs(n_batch, dim, num_rows, torch.float64)
    state, dy = state_of(weight) if adagrad else None, torch.randn_like(weight[:1])
    dy = dy * torch.arange(1, ids.numel() + 1, device=dy.device).view(*ids.shape, 1) / 16
    want = step(weight.detach(), state, module._rows(ids, num_rows), dy, 0.125, 0.5)
    for plan in (None, module.WalkPlan(4, 2, 1), module.WalkPlan(1, 4, 1)):
        got = updated(module, ids.to(ids_dtype), weight, num_rows, dy, state, plan=plan)
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_an_update_has_the_same_bits_in_every_run():
    """In the interpreter programs run one by one, so it would have them anyway."""
    ids, weight, num_rows = inputs(20_000, 16, (3, 5000, 100_000))
    dy = torch.randn(*ids.shape, 16, device=ids.device)
    runs = [updated(embedding_hash, ids, weight, num_rows, dy, state_of(weight)) for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_no_lookups_are_no_step(module):
    ids, weight, num_rows = inputs()
    state, none = state_of(weight), torch.empty(0, 5, 6, device=weight.device)
    got, after = updated(module, ids[:0], weight, num_rows, none, state)
    assert torch.equal(got, weight) and torch.equal(after, state)


def test_what_is_not_a_number_stays_in_its_row(module):
    ids, weight, num_rows = inputs()
    rows, dy = module._rows(ids, num_rows), torch.randn(*ids.shape, 6, device=ids.device)
    dy[7, 2, 3] = float("nan")
    got, state = updated(module, ids, weight, num_rows, dy, state_of(weight))
    at = torch.arange(len(weight), device=ids.device) == rows[7, 2]
    assert torch.equal(state.isnan(), at)
    assert torch.equal(got.isnan(), at[:, None].expand_as(got))
    got, _ = updated(module, ids, weight, num_rows, dy)
    assert got.isnan().sum() == 1 and got[rows[7, 2], 3].isnan()


@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
def test_rows_that_nobody_looked_up_keep_their_bits(module, adagrad):
    ids, weight, num_rows = inputs(3, num_rows=(40, 40))
    weight = torch.where(weight > 0, float("nan"), -0.0).detach()
    dy, state = torch.randn(3, 2, 6, device=ids.device), state_of(weight) if adagrad else None
    got, after = updated(module, ids, weight, num_rows, dy, state)
    others = torch.ones(80, dtype=torch.bool, device=ids.device)
    others[module._rows(ids, num_rows)] = False
    assert torch.equal(got[others].view(torch.int32), weight[others].view(torch.int32))
    assert not adagrad or torch.equal(after[others], state[others])


def test_a_weight_and_a_gradient_of_any_strides(module):
    """y.sum().backward() sends a dy of strides 0; a weight may be every other row of another."""
    ids, _, num_rows = inputs()
    apart = torch.randn(12, 98, dtype=torch.float64, device=ids.device)[::2, ::2].T
    before, expanded = apart.clone(), torch.ones(1, 1, 1, device=ids.device).double()
    for dy in (
        expanded.expand(33, 5, 6),
        torch.randn(6, 5, 33, device=ids.device).double().permute(2, 1, 0),
    ):
        weight = apart.detach().requires_grad_()
        apart.copy_(before)
        update = module.Update(0.125)
        module.embedding_hash_triton(ids, weight, num_rows, update=update).backward(dy)
        want, _ = step(before, None, module._rows(ids, num_rows), dy, 0.125, 0.0)
        torch.testing.assert_close(apart, want)


def test_steps_of_rows_past_two_to_the_31_elements(module):
    """And of 8 GiB of float32 no gradient is made."""
    weight = torch.empty(2**27 + 1, 16, dtype=torch.float16, device=machine.device())
    state = torch.zeros(len(weight), device=weight.device)
    weight[-1], ids = 1.0, integers([2**27 - 1], [-2])
    dy, plan = torch.ones_like(weight[:2, None]), module.WalkPlan(4, 1, 1)
    module._launch_update(plan, dy, ids, (len(weight),), weight, module.Update(0.5, state, 0.0))
    assert state[-1] == 4.0 and weight[-1].tolist() == [0.5] * 16


def test_16_bits_are_added_up_in_32(module):
    """In bfloat16, 256 + 1 is 256; and 263, which the first walk has, would be 264."""
    ids = torch.zeros(300, 1, dtype=torch.int64, device=machine.device())
    weight = torch.zeros(1, 3, dtype=torch.bfloat16, device=ids.device)
    dy = torch.ones(300, 1, 3, dtype=torch.bfloat16, device=ids.device)
    dy[0], dy[-1] = 256.0, -256.0
    got, _ = updated(module, ids, weight, (1,), dy, lr=1.0)
    assert got.tolist() == [[-298.0] * 3]


def test_autograd_knows_that_weight_has_changed(module):
    """Whoever saved it gets an error, and no gradient of another weight."""
    ids, weight, num_rows = inputs()
    saved = weight.square()
    y = module.embedding_hash_triton(ids, weight, num_rows, update=module.Update(0.1))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_two_lookups_of_one_weight_are_two_steps(module):
    ids, weight, num_rows = inputs(dtype=torch.float64)
    before, dy = weight.detach().clone(), torch.randn(33, 5, 6, device=ids.device).double()
    update = module.Update(0.125)
    parts = [
        module.embedding_hash_triton(i, weight, num_rows, update=update) for i in (ids, ids + 1)
    ]
    torch.autograd.backward(parts, [dy, dy])
    for i in (ids, ids + 1):
        before, _ = step(before, None, module._rows(i, num_rows), dy, 0.125, 0.0)
    torch.testing.assert_close(weight.detach(), before)


def test_without_gradients_an_update_waits(module):
    ids, weight, num_rows = inputs()
    before, how = weight.detach().clone(), {"update": module.Update(0.1)}
    with torch.no_grad():
        y = module.embedding_hash_triton(ids, weight, num_rows, **how)
    frozen = module.embedding_hash_triton(ids, weight.detach(), num_rows, **how)
    assert torch.equal(y, frozen) and not frozen.requires_grad
    assert torch.equal(weight, before)


def test_an_update_is_three_launches(module):
    """Rows' numbers, walks, and rows over several walks; the sort is PyTorch's."""
    ids, weight, num_rows = inputs()
    y = module.embedding_hash_triton(ids, weight, num_rows, update=module.Update(0.1))
    assert count_traffic(lambda: y.backward(torch.randn_like(y))).launches == 3


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 16), (torch.float32, 128), (torch.bfloat16, 16)], ids=str
)
def test_walks_move_rows_of_16_bytes_by_16_bytes_at_a_time(module, dtype, dim):
    weight, dy = torch.empty(2600, dim, dtype=dtype), torch.empty(64, 26, dim, dtype=dtype)
    rows, order = torch.empty(1664, dtype=torch.int32), torch.empty(1664, dtype=torch.int64)
    parts, state, plan = (
        torch.empty(2, 208, dim),
        torch.empty(2600),
        module._plan_update(2**20, dim, dtype.itemsize),
    )
    signature = signature_of(
        module._embedding_hash_walk_kernel, dy, rows, order, parts, weight, state, 1664, 0.1, 1e-8,
        STRIDE_YB=26 * dim, STRIDE_YT=dim, STRIDE_YD=1, STRIDE_WR=dim, STRIDE_WD=1, TABLES=26, DIM=dim,
        COMPUTE=tl.float32, LENGTH=plan.length, WALKS=plan.walks, BLOCK_D=dim,
    )  # fmt: skip
    kernel = module._embedding_hash_walk_kernel
    compiled = compile_for(kernel, signature, arch=90, num_warps=plan.num_warps)
    assert compiled.spills == 0
    mix = instruction_mix(compiled)
    for what, least in (("LDG", 2), ("STG", 2)):  # dy and weight; weight and parts
        assert sum(n for name, n in mix.items() if what in name and "128" in name) >= least


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda m, w: (w, 0.1), TypeError, r"update must be an Update, got float; use Update\(lr=0.01\)"),
        (lambda m, w: (w, m.Update("0.1")), TypeError, "update.lr must be a Python number, got '0.1'"),
        (lambda m, w: (w, m.Update(0.1, None, None)), TypeError, "update.eps must be a .* got None"),
        (lambda m, w: (w * 2, m.Update(0.1)), ValueError, "update writes into weight, which is computed"),
        (lambda m, w: (w[:1].detach().expand(49, 6), m.Update(0.1)), ValueError, r"strides \(0, 1\), and"),
        (lambda m, w: (w, m.Update(0.1, w[:, 0])), ValueError, r"for each row; use torch.zeros\(49, dtype="),
        (lambda m, w: (w, m.Update(0.1, [0.0] * 49)), ValueError, "state must be a number for each row"),
        (lambda m, w: (w, m.Update(0.1, w.new_zeros(49).half())), ValueError, "dtype=torch.float32, "),
    ],
)  # fmt: skip
def test_wrong_updates_are_refused(module, change, kind, message):
    ids, weight, num_rows = inputs()
    weight, update = change(module, weight)
    with pytest.raises(kind, match="embedding_hash_triton: .*" + message):
        module.embedding_hash_triton(ids, weight, num_rows, update=update)


def test_an_update_beside_a_sparse_gradient_is_refused(module):
    ids, weight, num_rows = inputs()
    with pytest.raises(ValueError, match="with update there is no gradient; use sparse=False"):
        module.embedding_hash_triton(ids, weight, num_rows, sparse=True, update=module.Update(0.1))


@pytest.mark.parametrize("adagrad", [False, True], ids=["sgd", "adagrad"])
def test_a_module_that_steps_in_its_backward_pass(module, adagrad):
    ids, _, num_rows = inputs()
    layer = module.EmbeddingHash.from_tables(SparseArch(num_rows, 6).to(ids.device).tables)
    assert layer.step_in_backward(lr=9.0, rowwise_adagrad=adagrad) is layer
    weight, rows = layer.weight.detach().clone(), module._rows(ids, num_rows)
    state = layer.state.clone() if adagrad else None
    assert sorted(layer.state_dict()) == (["state", "weight"] if adagrad else ["weight"])
    for lr in (0.5, 0.25):
        layer.step_in_backward(lr, adagrad, eps=0.125)
        y = layer(ids)
        (y * y.detach()).sum().backward()
        weight, state = step(weight, state, rows, y.detach(), lr, 0.125)
    torch.testing.assert_close(layer.weight.detach(), weight)
    assert layer.weight.grad is None
    if adagrad:
        torch.testing.assert_close(layer.state, state)
    layer.reset_parameters()
    assert not adagrad or layer.state.eq(0).all()
    assert layer.step_in_backward(0.1).state is None


def test_an_update_breaks_a_compiled_graph(module):
    ids, weight, num_rows = inputs()
    torch.compiler.reset()

    def call(ids, weight):
        return module.embedding_hash_triton(ids, weight, num_rows, update=module.Update(0.125))

    whole = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="knows no backward pass that changes weight; leave out"):
        whole(ids, weight)
    want, _ = updated(module, ids, weight, num_rows, torch.full((33, 5, 6), 2.0, device=ids.device))
    torch.compile(lambda *tensors: call(*tensors) * 2, backend="aot_eager")(
        ids, weight
    ).sum().backward()
    assert torch.equal(weight, want) and weight.grad is None
