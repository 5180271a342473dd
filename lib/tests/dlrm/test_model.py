"""The DLRM against an independent float64 computation, its gradients, the hashes, and the naive parts."""

import random
import warnings

from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm import naive as dlrm_naive

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# Ids that go wrong where a token is taken for a signed 32-bit number, or for a row.
ODD_IDS = [-(2**40), -(2**31) - 1, -4, -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40]
FEW = (1, 3, 2, 7, *[5] * 22)  # cardinalities
TINY = dlrm.Architecture("tiny", bottom=(4, 3), top=(4, 1))


def rows(n, seed=0, ids=ODD_IDS):
    """dense (n, 13) float32 and sparse (n, 26) int64 with ids from a few."""
    rng = random.Random(seed)
    dense = [[rng.uniform(-1, 3) for _ in range(13)] for _ in range(n)]
    sparse = [[rng.choice(ids) for _ in range(26)] for _ in range(n)]
    return torch.tensor(dense).reshape(n, 13), torch.tensor(sparse).reshape(n, 26)


class Recorder(TorchDispatchMode):
    """The names of the operations that ran, and the most elements that one of them returned."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.names.append(op._schema.name)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


# --- the whole model -----------------------------------------------------------------------------------------


def by_hand(model, dense, sparse, row_of):
    """The logits in float64 with NumPy, one row, one pair at a time. row_of(column, id) -> row of a table."""
    weights = {name: w.detach().double().numpy() for name, w in model.named_parameters()}

    def linear(x, part, layer):
        # the layers of a Sequential are numbered with a ReLU after each
        return (
            weights[f"{part}.mlp.{2 * layer}.weight"] @ x + weights[f"{part}.mlp.{2 * layer}.bias"]
        )

    logits = []
    for x, ids in zip(dense.double().numpy(), sparse.tolist()):
        for layer in range(len(model.architecture.bottom)):
            x = np.maximum(linear(x, "dense_arch", layer), 0)
        vectors = [x]
        for k, token in enumerate(ids):
            vectors.append(weights[f"sparse_arch.tables.{k}.weight"][row_of(k, token)])
        features = list(x)
        for i in range(len(vectors)):
            for j in range(i + 1, len(vectors)):
                features.append(sum(a * b for a, b in zip(vectors[i], vectors[j])))
        y = np.array(features)
        n_layers = len(model.architecture.top)
        for layer in range(n_layers):
            y = linear(y, "prediction", layer)
            y = np.maximum(y, 0) if layer < n_layers - 1 else y
        logits.append(y.item())
    return torch.tensor(logits, dtype=torch.float64)


def cases():
    modulus = dlrm.ModulusHash(FEW)
    vocabularies = [sorted(ODD_IDS[k % 3 :: 2]) for k in range(26)]
    index = dlrm.IndexHash([torch.tensor(v) for v in vocabularies])
    in_list = [{token: 1 + place for place, token in enumerate(v)} for v in vocabularies]
    return {
        "modulus": (modulus, lambda k, token: (token + 1) % FEW[k]),
        "index": (index, lambda k, token: in_list[k].get(token, 0)),
    }


@pytest.mark.parametrize("architecture", [dlrm.SMALL, dlrm.LARGE], ids=lambda a: a.name)
@pytest.mark.parametrize("hashing", cases())
def test_logits_equal_an_independent_float64_computation(hashing, architecture):
    module, row_of = cases()[hashing]
    model = dlrm.DLRM(module, architecture)
    dense, sparse = rows(5)
    want = by_hand(model, dense, sparse, row_of)
    assert want.std() > 1e-3  # something to compare
    torch.testing.assert_close(model(dense, sparse).double(), want, rtol=1e-4, atol=1e-5)
    exact = model.double()(dense.double(), sparse)
    torch.testing.assert_close(exact, by_hand(model, dense, sparse, row_of), rtol=1e-12, atol=1e-12)


def test_batch_of_one_and_of_none():
    model = dlrm.DLRM(dlrm.ModulusHash(FEW))
    dense, sparse = rows(4)
    together = model(dense, sparse)
    one = model(dense[2:3], sparse[2:3])
    assert one.shape == (1,)
    torch.testing.assert_close(one, together[2:3])
    assert model(dense[:0], sparse[:0]).shape == (0,)


def test_gradients_of_all_parameters_and_of_dense():
    torch.manual_seed(1)
    model = dlrm.DLRM(dlrm.ModulusHash((1, 3, 2)), TINY).double()
    sparse = torch.tensor([[-1, 5, 2**32 - 1], [7, 0, -(2**40)], [0, 0, 0]])
    dense = torch.randn(3, 13, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*model.named_parameters())

    def logits(dense, *weights):
        return torch.func.functional_call(model, dict(zip(names, weights)), (dense, sparse))

    assert torch.autograd.gradcheck(logits, (dense, *weights))


@pytest.mark.parametrize("sparse_gradients", [False, True])
def test_only_the_rows_that_were_used_get_gradients(sparse_gradients):
    model = dlrm.DLRM(dlrm.ModulusHash([10] * 26), sparse_gradients=sparse_gradients)
    dense, sparse = rows(3, ids=[0, 1, 8, 9])  # rows 1, 2, 9 and 0
    F.binary_cross_entropy_with_logits(model(dense, sparse), torch.ones(3)).backward()
    for k, table in enumerate(model.sparse_arch.tables):
        assert table.weight.grad.is_sparse == sparse_gradients
        used = table.weight.grad.to_dense().abs().sum(1).nonzero().flatten().tolist()
        assert used == sorted({(token + 1) % 10 for token in sparse[:, k].tolist()})


@pytest.mark.parametrize("hashing", cases())
def test_compiled_as_one_graph_it_gives_the_same(hashing):
    model = dlrm.DLRM(cases()[hashing][0])
    dense, sparse = rows(6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(dense, sparse), model(dense, sparse))
    grads = []
    for version in (model, compiled):
        model.zero_grad()
        version(dense, sparse).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("hashing", cases())
def test_a_step_never_waits_for_the_device(hashing):
    model = dlrm.DLRM(cases()[hashing][0])
    dense, sparse = rows(6)
    with Recorder() as recorder:
        model(dense, sparse).sum().backward()
    assert "aten::embedding" in recorder.names
    assert "aten::_local_scalar_dense" not in recorder.names
    assert "aten::nonzero" not in recorder.names


def test_logits_and_no_chances():
    """A sigmoid at the end would keep all of them above 0."""
    model = dlrm.DLRM(dlrm.ModulusHash(FEW))
    with torch.no_grad():
        model.prediction.mlp[-1].bias.fill_(-5)
    assert (model(*rows(4)) < -1).all()


def test_wrong_inputs():
    model = dlrm.DLRM(dlrm.ModulusHash(FEW))
    dense, sparse = rows(4)
    for bad, error, message in [
        ((dense[:, :12], sparse), ValueError, r"dense must be \(B, 13\), got \(4, 12\)"),
        ((dense[0], sparse), ValueError, r"dense must be \(B, 13\), got \(13,\)"),
        ((dense, sparse[:3]), ValueError, r"sparse must be \(B, 26\) with the B = 4 of dense"),
        ((dense, sparse[:, :25]), ValueError, r"sparse must be \(B, 26\)"),
        ((dense, sparse.float()), TypeError, "sparse must hold integers, got torch.float32"),
    ]:
        with pytest.raises(error, match=message):
            model(*bad)
    with pytest.raises(ValueError, match="top .* must end in 1"):
        dlrm.Architecture("wrong", (16,), (64,))


# --- hashes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_modulus_hash_is_pythons(dtype):
    ids = ODD_IDS if dtype == torch.int64 else [-(2**31), -7, -1, 0, 5, 2**31 - 1]
    cardinalities = (1, 2, 3, 10, 1000, criteo.CARDINALITIES[2])
    want = [[(token + 1) % n for n in cardinalities] for token in ids]
    hashing = dlrm.ModulusHash(cardinalities)
    got = hashing(torch.tensor(ids, dtype=dtype)[:, None].expand(-1, len(cardinalities)))
    assert got.tolist() == want
    assert got.dtype == torch.int64
    assert hashing(torch.full((1, 6), criteo.MISSING_TOKEN)).tolist() == [[0] * 6]


def test_a_hash_moves_and_is_saved_with_the_model():
    for module, _ in cases().values():
        model = dlrm.DLRM(module).double()
        saved = model.state_dict()
        buffers = dict(model.hashing.named_buffers())
        assert buffers
        assert all(f"hashing.{name}" in saved for name in buffers)
        assert all(b.dtype == torch.int64 for b in buffers.values())
        assert all(b.is_meta for b in model.to("meta").hashing.buffers())


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 1000])
def test_the_index_hash_is_a_dictionary_with_a_row_for_all_others(n_tokens):
    rng = random.Random(n_tokens)
    vocabulary = sorted(rng.sample(range(2**32), n_tokens))
    row_of = {token: row for row, token in enumerate(vocabulary, start=1)}
    unseen = [*ODD_IDS, *(token + 1 for token in vocabulary), *(t - 1 for t in vocabulary)]
    ids = vocabulary + unseen
    got = dlrm.IndexHash([torch.tensor(vocabulary, dtype=torch.int64)])(torch.tensor(ids)[:, None])
    assert got.flatten().tolist() == [row_of.get(token, dlrm.OOV_ROW) for token in ids]


def test_unseen_tokens_share_the_oov_row_which_no_token_has():
    train = torch.tensor([[7, 1], [7, 2], [9, 2], [-1, 2], [-1, 3]])
    hashing = dlrm.IndexHash.from_ids(train, min_count=1)
    assert hashing.num_rows == (4, 4)
    assert (hashing(train) != dlrm.OOV_ROW).all()
    assert hashing(train)[:, 0].tolist() == [2, 2, 3, 1, 1]
    unseen = torch.tensor([[8, -1], [10**9, 0], [-2, 2**32 - 1]])
    assert (hashing(unseen) == dlrm.OOV_ROW).all()
    rare = dlrm.IndexHash.from_ids(train)  # tokens seen once are as good as unseen
    assert rare.num_rows == (3, 2)
    assert rare(train)[:, 0].tolist() == [2, 2, 0, 1, 1]


def test_the_index_hash_makes_nothing_of_the_vocabularys_size():
    ids = torch.randint(2**32, (64, 2))
    vocabularies = [torch.arange(5000), torch.arange(7000)]
    lists = [v.tolist() for v in vocabularies]
    largest = []
    for hashing in (dlrm.IndexHash(vocabularies), dlrm_naive.ListIndexHash(lists)):
        with warnings.catch_warnings(), Recorder() as recorder:
            warnings.simplefilter("error")  # searchsorted warns of strided ids
            hashing(ids)
        largest.append(recorder.largest)
    assert largest == [128, 64 * 7000]


def test_wrong_sizes_and_vocabularies():
    for cardinalities in ((), (3, 0), (-1,)):
        with pytest.raises(ValueError, match="every table needs at least one row"):
            dlrm.ModulusHash(cardinalities)
    for vocabulary in ([2, 1], [1, 1], [[1, 2]]):
        with pytest.raises(ValueError, match="vocabulary 0 must be 1-D, sorted, each token once"):
            dlrm.IndexHash([torch.tensor(vocabulary)])
    for vocabulary in ([1, 2], torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(TypeError, match="vocabulary 0 must be an int64 tensor"):
            dlrm.IndexHash([vocabulary])


# --- what it is made of --------------------------------------------------------------------------------------


def test_27_vectors_give_351_pairs_and_367_features():
    model = dlrm.DLRM(dlrm.ModulusHash(FEW), dlrm.LARGE)
    stages = {s["stage"]: s for s in dlrm.stage_shapes(model, *rows(8))}
    assert [(name, s["input"], s["output"]) for name, s in stages.items()] == [
        ("hash", [(8, 26)], (8, 26)),
        ("DenseArch", [(8, 13)], (8, 16)),
        ("SparseArch", [(8, 26)], (8, 26, 16)),
        ("interaction", [(8, 16), (8, 26, 16)], (8, 367)),
        ("prediction", [(8, 367)], (8,)),
    ]
    assert not any(m._forward_hooks for m in model.modules())
    assert [tuple(m.weight.shape) for m in model.prediction.mlp if hasattr(m, "weight")] == [
        (512, 367), (256, 512), (1, 256),
    ]  # fmt: skip


def test_the_interaction_has_each_pair_once():
    dense, embeddings = torch.randn(2, 3), torch.randn(2, 2, 3)
    a, b, c = dense, embeddings[:, 0], embeddings[:, 1]
    pairs = [(a * b).sum(1), (a * c).sum(1), (b * c).sum(1)]
    got = dlrm.InteractionArch(3, 3)(dense, embeddings)
    torch.testing.assert_close(got, torch.cat([dense, torch.stack(pairs, 1)], 1))


def test_parameters_and_bytes_at_full_size():
    with torch.device("meta"):  # counted, not made
        model = dlrm.DLRM(dlrm.ModulusHash(), dlrm.LARGE)
    sizes = {s["part"]: s for s in dlrm.sizes(model)}
    tables = sum(criteo.CARDINALITIES) * 16
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 16 + 16
    top = 367 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert sizes["sparse_arch"]["parameters"] == tables
    assert sizes["dense_arch"]["parameters"] == bottom
    assert sizes["prediction"]["parameters"] == top
    assert sizes["total"]["parameters"] == tables + bottom + top
    assert sizes["total"]["parameter_bytes"] == 4 * (tables + bottom + top)
    assert 2.1e9 < sizes["total"]["parameter_bytes"] < 2.2e9
    assert sizes["hashing"]["buffer_bytes"] == 26 * 8
    assert sizes["interaction"]["buffer_bytes"] == 351 * 8


@pytest.mark.gpu
def test_full_size_tables_on_a_gpu(device):
    model = dlrm.DLRM(dlrm.ModulusHash(), dlrm.LARGE).to(device)
    dense, sparse = (x.to(device) for x in rows(2048))
    with torch.no_grad():
        got = model(dense, sparse)
        want = by_hand_on_gpu(model, dense, sparse)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def by_hand_on_gpu(model, dense, sparse):
    """The logits in float64, from only those rows of the tables that are used."""
    x = dense.double()
    for layer in model.dense_arch.mlp:
        x = (
            F.linear(x, layer.weight.double(), layer.bias.double())
            if hasattr(layer, "weight")
            else x.relu()
        )
    vectors = [x]
    for k, table in enumerate(model.sparse_arch.tables):
        vectors.append(table.weight[(sparse[:, k] + 1) % criteo.CARDINALITIES[k]].double())
    pairs = [(a * b).sum(1) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
    y = torch.cat([x, torch.stack(pairs, 1)], 1)
    for layer in model.prediction.mlp:
        y = (
            F.linear(y, layer.weight.double(), layer.bias.double())
            if hasattr(layer, "weight")
            else y.relu()
        )
    return y.squeeze(1)


# --- the naive parts: each has the fault that it is there to show --------------------------------------------

NAIVE = [dlrm_naive.ListIndexHash, dlrm_naive.BufferIndexHash, dlrm_naive.SyncFreeIndexHash]


@pytest.mark.parametrize("naive", NAIVE, ids=lambda n: n.__name__)
def test_naive_hashes_are_right_for_known_tokens_and_silent_about_others(naive):
    train = rows(50)[1]
    lists = dlrm_naive.vocabulary_lists(train)
    hashing = naive(lists)
    assert hashing(train).tolist() == (dlrm.IndexHash.from_ids(train, 1)(train) - 1).tolist()
    assert int(hashing.n_unseen) == 0
    unseen = torch.full((4, 26), 12345)
    first = torch.tensor([v[0] for v in lists]).expand(4, 26)
    assert hashing(unseen).tolist() == hashing(first).tolist() == [[0] * 26] * 4
    hashing(unseen)
    assert int(hashing.n_unseen) == 4 * 26
    assert dlrm.DLRM(hashing)(*rows(3)).shape == (3,)


def test_each_cut_takes_one_fault_away():
    train = rows(50)[1]
    syncs, buffers = [], []
    for naive in NAIVE:
        hashing = naive(dlrm_naive.vocabulary_lists(train))
        with Recorder() as recorder:
            hashing(train)
        syncs.append(recorder.names.count("aten::_local_scalar_dense"))
        buffers.append(len(list(hashing.buffers())))
    assert syncs == [26, 26, 0]
    assert buffers == [0, 26, 26]


def test_the_wrong_interaction_has_432_by_432_features():
    dense, embeddings = torch.randn(2, 16), torch.randn(2, 26, 16)
    layer = dlrm_naive.OuterProductInteraction(27, 16)
    got = layer(dense, embeddings)
    flat = torch.cat([dense[:, None], embeddings], 1).reshape(2, 432)
    assert got.shape == (2, layer.n_features) == (2, 186_624)
    torch.testing.assert_close(got, torch.einsum("bi,bj->bij", flat, flat).reshape(2, -1))
    with torch.device("meta"):
        wrong = dlrm.DLRM(dlrm.ModulusHash(), dlrm.LARGE, dlrm_naive.OuterProductInteraction)
    assert wrong.prediction.mlp[0].weight.numel() == 186_624 * 512  # 95.6 million
