"""DLRM, a recommendation model: the chance that someone clicks, from 13 numbers and 26 tokens.

Letters   B rows, T = 26 tables, D the embedding's length, F = T + 1 vectors, P = F(F - 1)/2 pairs.
Stages    dense (B, 13) → DenseArch → (B, D).   sparse (B, T) → hash → rows (B, T) → SparseArch → (B, T, D).
          InteractionArch: the dot products of all pairs of the F vectors, beside the dense one: (B, D + P).
          PredictionLayer → logits (B,). For T = 26 and D = 16: 27 vectors, 351 + 16 = 367 inputs.
Hash      token → row of a table. ModulusHash: (id + 1) % cardinality. IndexHash: a place in a known vocabulary,
          and row 0 for all tokens outside it. The hash tells how many rows each table has.
Loss      on logits: torch.nn.functional.binary_cross_entropy_with_logits. torch.sigmoid gives the chance.

    model = DLRM(ModulusHash(criteo.capped(limit=10_000)), SMALL)
    logits = model(batch.dense, batch.sparse)
"""

import dataclasses
import itertools

from lib.dlrm import criteo

import torch
from torch import nn

OOV_ROW = 0  # IndexHash's row for tokens out of its vocabulary


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Widths after each linear layer; the bottom MLP ends in the embedding's length, the top one in 1."""

    name: str
    bottom: tuple
    top: tuple

    def __post_init__(self):
        if not self.bottom or not self.top or self.top[-1] != 1:
            raise ValueError(
                f"architecture {self.name!r}: bottom {self.bottom} needs a layer, and top {self.top} "
                "must end in 1"
            )


SMALL = Architecture("small", bottom=(64, 16), top=(64, 1))
LARGE = Architecture("large", bottom=(512, 256, 64, 16), top=(512, 256, 1))


# --- token → row ---------------------------------------------------------------------------------------------


class ModulusHash(nn.Module):
    """row = (id + 1) % cardinality: two operations for all tables, no vocabulary; tokens may share a row.

    Never negative, as Python's %: a missing token, -1, goes to row 0. ids: |id| < 2**62.
    """

    def __init__(self, cardinalities=criteo.CARDINALITIES):
        super().__init__()
        self.num_rows = _checked_sizes(cardinalities)
        self.register_buffer("cardinalities", torch.tensor(self.num_rows, dtype=torch.int64))

    def forward(self, ids):
        """ids (B, T), any integers → rows (B, T) int64."""
        # torch's % floors, as Python's; C's and Triton's would give a negative row for a negative id
        return (ids.long() + 1) % self.cardinalities


class IndexHash(nn.Module):
    """row = 1 + the token's place in the sorted vocabulary of its table; OOV_ROW for tokens that are not there.

    vocabularies: one 1-D int64 tensor per table, sorted, each token once. They are buffers: they move with
    .to(device), and state_dict keeps them. A table has len(vocabulary) + 1 rows.
    """

    def __init__(self, vocabularies):
        super().__init__()
        for k, vocabulary in enumerate(vocabularies):
            _check_vocabulary(k, vocabulary)
            self.register_buffer(f"vocabulary_{k}", vocabulary.clone())
        self.num_rows = _checked_sizes(len(v) + 1 for v in vocabularies)

    @classmethod
    def from_ids(cls, ids, min_count=2):
        """From training ids (N, T): tokens seen min_count times or more.

        With min_count = 1 no training row goes to OOV_ROW, and the row for unseen tokens learns nothing.
        """
        vocabularies = []
        for column in ids.long().unbind(1):
            tokens, counts = column.unique(return_counts=True)  # sorted
            vocabularies.append(tokens[counts >= min_count])
        return cls(vocabularies)

    def forward(self, ids):
        """ids (B, T), any integers → rows (B, T) int64."""
        columns = ids.long().unbind(1)
        return torch.stack([self._rows(k, column) for k, column in enumerate(columns)], dim=1)

    def _rows(self, k, ids):
        vocabulary = self.get_buffer(f"vocabulary_{k}")
        if len(vocabulary) == 0:
            return torch.full_like(ids, OOV_ROW)
        place = torch.searchsorted(
            vocabulary, ids.contiguous()
        )  # log2(vocabulary) steps for each id
        place = place.clamp(max=len(vocabulary) - 1)  # larger than every token
        return torch.where(vocabulary[place] == ids, place + 1, OOV_ROW)


def _checked_sizes(sizes):
    sizes = tuple(int(size) for size in sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"every table needs at least one row, got cardinalities {sizes}")
    return sizes


def _check_vocabulary(k, vocabulary):
    if not isinstance(vocabulary, torch.Tensor) or vocabulary.dtype != torch.int64:
        raise TypeError(
            f"vocabulary {k} must be an int64 tensor, got {getattr(vocabulary, 'dtype', type(vocabulary))}; "
            "use torch.tensor(tokens)"
        )
    if vocabulary.dim() != 1 or not bool((vocabulary[1:] > vocabulary[:-1]).all()):
        raise ValueError(
            f"vocabulary {k} must be 1-D, sorted, each token once; use torch.unique(tokens)"
        )


# --- the parts of the model ----------------------------------------------------------------------------------


def mlp(widths, last_relu):
    """Linear layers between the widths, a ReLU after each; after the last one only if `last_relu`."""
    layers = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class DenseArch(nn.Module):
    """The bottom MLP: dense (B, 13) → one more vector among the embeddings, (B, D)."""

    def __init__(self, bottom):
        super().__init__()
        self.mlp = mlp((len(criteo.DENSE), *bottom), last_relu=True)

    def forward(self, dense):
        return self.mlp(dense)


class SparseArch(nn.Module):
    """One embedding table for each column: rows (B, T) → embeddings (B, T, D).

    sparse_gradients: gradients hold only the rows that were used; for optimizers that take them (SGD, Adagrad).
    """

    def __init__(self, num_rows, embedding_dim, sparse_gradients=False):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(n, embedding_dim, sparse=sparse_gradients) for n in num_rows
        )
        for table in self.tables:
            bound = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, rows):
        columns = rows.unbind(1)
        return torch.stack([table(c) for table, c in zip(self.tables, columns)], dim=1)


class InteractionArch(nn.Module):
    """Dot products of all pairs of vectors, beside the dense one: (B, D), (B, T, D) → (B, D + P).

    Each pair once, and no vector with itself: the triangle above the diagonal of the (F, F) products.
    """

    def __init__(self, n_vectors, embedding_dim):
        super().__init__()
        self.n_features = embedding_dim + n_vectors * (n_vectors - 1) // 2
        first, second = torch.triu_indices(n_vectors, n_vectors, offset=1)  # (2, P)
        self.register_buffer("pairs", first * n_vectors + second, persistent=False)  # (P,)

    def forward(self, dense, embeddings):
        vectors = torch.cat([dense[:, None], embeddings], dim=1)  # (B, F, D)
        products = vectors @ vectors.mT  # (B, F, F)
        # Not products[:, first, second]: on a GPU its backward sorts the indices, index_select's does not.
        pairs = products.flatten(1).index_select(1, self.pairs)  # (B, P)
        return torch.cat([dense, pairs], dim=1)


class PredictionLayer(nn.Module):
    """The top MLP: (B, D + P) → logits (B,). No sigmoid at the end: loss and metrics take logits."""

    def __init__(self, n_inputs, top):
        super().__init__()
        self.mlp = mlp((n_inputs, *top), last_relu=False)

    def forward(self, features):
        return self.mlp(features).squeeze(1)


class DLRM(nn.Module):
    """dense (B, 13) float, sparse (B, T) integers → logits (B,).

    hashing: a ModulusHash, an IndexHash or the like; its num_rows say how large the tables are.
    interaction: the class of that layer, made as interaction(n_vectors, embedding_dim).
    """

    def __init__(
        self, hashing, architecture=SMALL, interaction=InteractionArch, sparse_gradients=False
    ):
        super().__init__()
        n_tables, dim = len(hashing.num_rows), architecture.bottom[-1]
        self.architecture = architecture
        self.hashing = hashing
        self.dense_arch = DenseArch(architecture.bottom)
        self.sparse_arch = SparseArch(hashing.num_rows, dim, sparse_gradients)
        self.interaction = interaction(n_tables + 1, dim)
        self.prediction = PredictionLayer(self.interaction.n_features, architecture.top)

    def forward(self, dense, sparse):
        """Logits (B,). TypeError, ValueError for a wrong dtype or shape; only shapes are looked at: no sync."""
        self._check(dense, sparse)
        rows = self.hashing(sparse)
        embedded = self.sparse_arch(rows)
        return self.prediction(self.interaction(self.dense_arch(dense), embedded))

    def _check(self, dense, sparse):
        n_dense, n_tables = self.dense_arch.mlp[0].in_features, len(self.sparse_arch.tables)
        if dense.dim() != 2 or dense.shape[1] != n_dense:
            raise ValueError(f"dense must be (B, {n_dense}), got {tuple(dense.shape)}")
        if sparse.shape != (dense.shape[0], n_tables):
            raise ValueError(
                f"sparse must be (B, {n_tables}) with the B = {dense.shape[0]} of dense, "
                f"got {tuple(sparse.shape)}"
            )
        if sparse.is_floating_point():
            raise TypeError(f"sparse must hold integers, got {sparse.dtype}; use .long()")


# --- what it is made of --------------------------------------------------------------------------------------


def stage_shapes(model, dense, sparse):
    """[{stage, input, output}, …] with the shapes in one forward pass of `model`."""
    stages = {
        "hash": model.hashing,
        "DenseArch": model.dense_arch,
        "SparseArch": model.sparse_arch,
        "interaction": model.interaction,
        "prediction": model.prediction,
    }
    rows = {}

    def note(stage):
        def hook(module, inputs, output):
            shapes = [tuple(tensor.shape) for tensor in inputs]
            rows[stage] = {"stage": stage, "input": shapes, "output": tuple(output.shape)}

        return hook

    hooks = [module.register_forward_hook(note(stage)) for stage, module in stages.items()]
    try:
        with torch.no_grad():
            model(dense, sparse)
    finally:
        for hook in hooks:
            hook.remove()
    return [rows[stage] for stage in stages]


def sizes(model):
    """[{part, parameters, parameter_bytes, buffer_bytes}, …] for each part of `model`, and the total of all."""
    parts = [*model.named_children(), ("total", model)]
    return [{"part": name, **_size(module)} for name, module in parts]


def _size(module):
    parameters, buffers = list(module.parameters()), list(module.buffers())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers),
    }
