# %% [markdown]
# # Solutions · 10 Build DLRM from scratch
#
# One answer to each exercise; others are as right. The verdicts are the notebook's own.

# %%
from lib.exercises import check

import torch

# %% [markdown]
# ## 10.1 A modulus hash for C
#
# A remainder that was cut toward zero has the sign of its left side. Where it is negative, one cardinality more
# is what rounding down would have given. Always adding one would be wrong for a remainder of 0.


# %%
def row_of(token, cardinality):
    row = (token + 1) % cardinality
    return row + cardinality if row < 0 else row


check("10.1", row_of)

# %% [markdown]
# ## 10.2 Strangers to the OOV row
#
# `searchsorted` says where an id would have to stand, known or not; so look whether it stands there. An id
# larger than all has its place behind the end, and an empty vocabulary has no places at all.


# %%
def index_rows(ids, vocabulary):
    if len(vocabulary) == 0:
        return torch.zeros_like(ids)
    place = torch.searchsorted(vocabulary, ids).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[place] == ids, place + 1, 0)


check("10.2", index_rows)

# %% [markdown]
# ## 10.3 Bytes of the lookups
#
# Row 3 of one table is not row 3 of another, so distinct rows are counted column by column.


# %%
def lookup_bytes(rows, dim):
    distinct = sum(len(column.unique()) for column in rows.unbind(1))
    return distinct * dim * 4


check("10.3", lookup_bytes)

# %% [markdown]
# ## 10.4 The interaction, backward
#
# Put the gradient of each pair at its place above the diagonal of an (F, F) matrix G. Then G v gives every a
# its share of the v[b] behind it, and Gᵀ v every b its share of the v[a] before it.


# %%
def interaction_backward(dpairs, vectors):
    n_rows, n_vectors, _ = vectors.shape
    first, second = torch.triu_indices(n_vectors, n_vectors, offset=1, device=vectors.device)
    gradient = vectors.new_zeros(n_rows, n_vectors, n_vectors)
    gradient[:, first, second] = dpairs
    return (gradient + gradient.mT) @ vectors


check("10.4", interaction_backward)
