"""What is particular to embedding_hash: Python's modulus, DLRM's tables, three kinds of gradient, its loads."""

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
