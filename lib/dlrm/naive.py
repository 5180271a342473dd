"""First attempts at the parts of a DLRM, each with its faults. For notebooks 10 and 11 only.

ListIndexHash has faults for notebook 11 to find, so its own text is silent on them: each call copies the lists
from the host, compares each id with all of its vocabulary (B × cardinality booleans, and their int64 copy), and
waits for the device at `.item()`. The hashes below it lose the faults one by one.

Each hash takes the vocabularies as lists of ints and replaces one of lib.dlrm.model, as in
DLRM(ListIndexHash(lists)). They silently map an unseen token to row 0, which is the row of a real token;
lib.dlrm.model.IndexHash has a row for unseen tokens.
"""

import torch
from torch import nn


def vocabulary_lists(ids):
    """The different tokens of each column of ids (N, T), as T lists of ints."""
    return [column.unique().tolist() for column in ids.unbind(1)]


class ListIndexHash(nn.Module):
    """The row of an id is its place in its column's vocabulary, a list of ints."""

    def __init__(self, vocabularies):
        super().__init__()
        self.vocabularies = [list(v) for v in vocabularies]
        self.num_rows = tuple(len(v) for v in self.vocabularies)
        self.n_unseen = 0  # in the last call

    def forward(self, ids):
        """ids (B, T) int64 → rows (B, T) int64."""
        self.n_unseen = 0
        columns = enumerate(ids.unbind(1))
        return torch.stack([self._rows(k, column) for k, column in columns], dim=1)

    def _vocabulary(self, k, device):
        return torch.tensor(self.vocabularies[k], device=device)

    def _rows(self, k, ids):
        matches = ids[:, None] == self._vocabulary(k, ids.device)[None]
        self._count_unseen(matches)
        return matches.long().argmax(1)

    def _count_unseen(self, matches):
        self.n_unseen += (~matches.any(1)).sum().item()


class BufferIndexHash(ListIndexHash):
    """First cut: the vocabularies are buffers, on the device already. The comparison and `.item()` stay."""

    def __init__(self, vocabularies):
        super().__init__(vocabularies)
        for k, vocabulary in enumerate(self.vocabularies):
            self.register_buffer(f"vocabulary_{k}", torch.tensor(vocabulary))

    def _vocabulary(self, k, device):
        return self.get_buffer(f"vocabulary_{k}")


class SyncFreeIndexHash(BufferIndexHash):
    """Second cut: unseen tokens are counted on the device, and nobody waits. The comparison stays.

    n_unseen is a tensor then: look at it once in a while, as each look waits.
    """

    def _count_unseen(self, matches):
        self.n_unseen = self.n_unseen + (~matches.any(1)).sum()


class OuterProductInteraction(nn.Module):
    """Wrong: all products of all *elements* of the vectors, (B, D), (B, T, D) → (B, (F·D)²).

    A DLRM takes the dot products of pairs of *vectors*. For F = 27 and D = 16 this gives 432 × 432 = 186,624
    features where 367 are due, and a first top layer that dwarfs all the others. To count its weights without
    making them:  with torch.device("meta"): DLRM(ModulusHash(), LARGE, OuterProductInteraction)
    """

    def __init__(self, n_vectors, embedding_dim):
        super().__init__()
        self.n_features = (n_vectors * embedding_dim) ** 2

    def forward(self, dense, embeddings):
        flat = torch.cat([dense, embeddings.flatten(1)], dim=1)  # (B, F·D)
        return (flat[:, :, None] * flat[:, None, :]).flatten(1)
