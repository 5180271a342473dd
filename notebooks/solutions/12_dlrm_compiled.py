"""Solutions to the exercises of notebook 12."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch
import torch.nn.functional as F


# %% 12.1 a choice on the device in place of `if`, and a count in a buffer, which no guard compares
class Mended(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("n_missing", torch.zeros((), dtype=torch.int64))

    def forward(self, dense, sparse):
        dense = torch.where(dense.isnan(), 0.0, dense)  # without a NaN it changes nothing
        self.n_missing += (sparse < 0).sum()
        return self.model(dense, sparse)


# %% 12.2 any row will do as padding, as long as its loss counts nothing
def padded_loss(model, dense, sparse, labels, size):
    n_rows, missing = len(labels), size - len(labels)
    logits = model(F.pad(dense, (0, 0, 0, missing)), F.pad(sparse, (0, 0, 0, missing)))
    # A weight for each row, not logits[:n_rows]: no shape of what follows depends on n_rows either.
    is_real = torch.arange(size, device=labels.device) < n_rows
    padded = F.pad(labels, (0, missing))
    losses = F.binary_cross_entropy_with_logits(logits, padded, reduction="none")
    return torch.where(is_real, losses, 0.0).sum() / n_rows


# %% 12.3 one kernel, in which every program makes 26 masked loads of ids and 26 of rows, for one that counts
options = {"max_pointwise_cat_inputs": 26}


# %% 12.4 the starts are a buffer: they move with the module, and no copy from the host is made in a call
class OneTable(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        tables = [table.weight.detach() for table in sparse_arch.tables]
        self.weight = torch.nn.Parameter(torch.cat(tables))  # (rows of all tables, D)
        sizes = torch.tensor([len(table) for table in tables])
        self.register_buffer("starts", sizes.cumsum(0) - sizes)  # int64: 33 million rows times D

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight)
