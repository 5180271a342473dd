"""Plausible wrong answers to the exercises of notebook 12: <answer>__<what is wrong>."""

from lib.exercises.nb12 import Mending

import torch
import torch.nn.functional as F

# --- 12.1 Mended

Mended__as_it_was = Mending


class _Mended(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("n_missing", torch.zeros((), dtype=torch.int64))

    def forward(self, dense, sparse):
        self.n_missing += (sparse < 0).sum()
        return self.model(self.mended(dense), sparse)

    def mended(self, dense):
        return torch.where(dense.isnan(), 0.0, dense)


class Mended__still_branches(_Mended):
    def mended(self, dense):
        return torch.where(dense.isnan(), 0.0, dense) if dense.isnan().any() else dense


class Mended__infinity_is_mended_too(_Mended):
    def mended(self, dense):
        return dense.nan_to_num(0.0)


class Mended__minus_infinity_is_mended_too(_Mended):
    def mended(self, dense):
        return dense.nan_to_num(0.0, posinf=torch.inf)


class Mended__a_product_keeps_nan(_Mended):
    def mended(self, dense):
        return dense * ~dense.isnan()


class Mended__in_place(_Mended):
    def mended(self, dense):
        return dense.masked_fill_(dense.isnan(), 0.0)


class Mended__nothing_mended(_Mended):
    def mended(self, dense):
        return dense


class Mended__the_break_is_hidden(_Mended):
    @torch.compiler.disable
    def mended(self, dense):
        return torch.where(dense.isnan(), 0.0, dense) if dense.isnan().any() else dense


class Mended__counts_rows(_Mended):
    def forward(self, dense, sparse):
        self.n_missing += (sparse < 0).any(1).sum()
        return self.model(self.mended(dense), sparse)


class Mended__counts_minus_one_alone(_Mended):
    def forward(self, dense, sparse):
        self.n_missing += (sparse == -1).sum()
        return self.model(self.mended(dense), sparse)


class Mended__not_counted(_Mended):
    def forward(self, dense, sparse):
        return self.model(self.mended(dense), sparse)


class Mended__not_counted_when_compiled(_Mended):
    def forward(self, dense, sparse):
        if torch.compiler.is_compiling():
            return self.model(self.mended(dense), sparse)
        return super().forward(dense, sparse)


class Mended__the_last_call_alone_is_counted(_Mended):
    def forward(self, dense, sparse):
        self.n_missing.zero_()
        return super().forward(dense, sparse)


class Mended__a_guard_on_the_number_of_calls(_Mended):
    def __init__(self, model):
        super().__init__(model)
        self.calls = 0

    def forward(self, dense, sparse):
        self.calls += 1
        return super().forward(dense + 0 * self.calls, sparse)


class Mended__no_gradient(_Mended):
    def forward(self, dense, sparse):
        return super().forward(dense, sparse).detach()


# --- 12.2 padded_loss


def _pad(dense, sparse, labels, size):
    missing = size - len(labels)
    return (
        F.pad(dense, (0, 0, 0, missing)),
        F.pad(sparse, (0, 0, 0, missing)),
        F.pad(labels, (0, missing)),
    )


def padded_loss__mean_of_all_rows(model, dense, sparse, labels, size):
    dense, sparse, labels = _pad(dense, sparse, labels, size)
    return F.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def padded_loss__divided_by_size(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, labels = _pad(dense, sparse, labels, size)
    logits = model(dense, sparse)[:n_rows]
    losses = F.binary_cross_entropy_with_logits(logits, labels[:n_rows], reduction="sum")
    return losses / size


def padded_loss__not_padded(model, dense, sparse, labels, size):
    return F.binary_cross_entropy_with_logits(model(dense, sparse), labels)


def padded_loss__scaled_afterwards(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, labels = _pad(dense, sparse, labels, size)
    return F.binary_cross_entropy_with_logits(model(dense, sparse), labels) * size / n_rows


def padded_loss__first_row_repeated_and_counted(model, dense, sparse, labels, size):
    which = torch.arange(size, device=labels.device)
    which = torch.where(which < len(labels), which, 0)
    logits = model(dense[which], sparse[which])
    return F.binary_cross_entropy_with_logits(logits, labels[which])


def padded_loss__two_calls(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, _ = _pad(dense, sparse, labels, size)
    model(dense, sparse)
    return F.binary_cross_entropy_with_logits(model(dense, sparse)[:n_rows], labels)


def padded_loss__a_number(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, _ = _pad(dense, sparse, labels, size)
    return F.binary_cross_entropy_with_logits(model(dense, sparse)[:n_rows], labels).item()


def padded_loss__logits_masked_by_zero(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, labels = _pad(dense, sparse, labels, size)
    real = (torch.arange(size, device=labels.device) < n_rows).float()
    losses = F.binary_cross_entropy_with_logits(
        model(dense, sparse) * real, labels, reduction="none"
    )
    return losses.sum() / n_rows


def padded_loss__to_eight_rows(model, dense, sparse, labels, size):
    n_rows = len(labels)
    dense, sparse, _ = _pad(dense, sparse, labels, 8)
    return F.binary_cross_entropy_with_logits(model(dense, sparse)[:n_rows], labels)


def padded_loss__padding_that_nobody_wrote(model, dense, sparse, labels, size):
    n_rows = len(labels)
    buffers = dense.new_empty(size, dense.shape[1]), sparse.new_empty(size, sparse.shape[1])
    for buffer, rows in zip(buffers, (dense, sparse)):
        buffer[:n_rows] = rows
    return F.binary_cross_entropy_with_logits(model(*buffers)[:n_rows], labels)


# --- 12.3 options

options__another_kind_of_fusion = {"combo_kernels": True}
options__one_too_few = {"max_pointwise_cat_inputs": 25}
options__enough_for_nine_only = {"max_pointwise_cat_inputs": 9}
options__another_limit = {"max_fusion_size": 1000}
options__no_such_option = {"max_stack_inputs": 26}
options__the_name_alone = "max_pointwise_cat_inputs"

# --- 12.4 OneTable


class _Base(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        tables = [table.weight.detach() for table in sparse_arch.tables]
        self.weight = torch.nn.Parameter(torch.cat(tables))
        sizes = torch.tensor([len(table) for table in tables])
        self.register_buffer("starts", self.make_starts(sizes))

    def make_starts(self, sizes):
        return sizes.cumsum(0) - sizes

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight)


class OneTable__no_starts(_Base):
    def forward(self, rows):
        return F.embedding(rows, self.weight)


class OneTable__sixteen_numbers_a_row(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        tables = [table.weight.detach() for table in sparse_arch.tables]
        self.weight = torch.nn.Parameter(torch.zeros(sum(map(len, tables)), 16))
        sizes = torch.tensor([len(table) for table in tables])
        self.register_buffer("starts", sizes.cumsum(0) - sizes)
        for start, table in zip(self.starts.tolist(), tables):
            self.weight.data[start : start + len(table)] = table

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight)


class OneTable__one_row_late(_Base):
    def make_starts(self, sizes):
        return sizes.cumsum(0) - sizes + torch.arange(len(sizes)).clamp(max=1)

    def forward(self, rows):
        return F.embedding((rows + self.starts).clamp(max=len(self.weight) - 1), self.weight)


class OneTable__first_size_for_all(_Base):
    def make_starts(self, sizes):
        return torch.arange(len(sizes)) * sizes[0]

    def forward(self, rows):
        return F.embedding((rows + self.starts).clamp(max=len(self.weight) - 1), self.weight)


class OneTable__the_26_tables_again(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        self.arch = sparse_arch

    def forward(self, rows):
        return self.arch(rows)


class OneTable__put_together_in_each_call(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        self.tables = torch.nn.ParameterList(t.weight for t in sparse_arch.tables)

    def forward(self, rows):
        sizes = torch.tensor([len(t) for t in self.tables], device=rows.device)
        return F.embedding(rows + sizes.cumsum(0) - sizes, torch.cat(list(self.tables)))


class OneTable__no_parameter(_Base):
    def __init__(self, sparse_arch):
        super().__init__(sparse_arch)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


class OneTable__starts_stay_behind(torch.nn.Module):
    def __init__(self, sparse_arch):
        super().__init__()
        tables = [table.weight.detach() for table in sparse_arch.tables]
        self.weight = torch.nn.Parameter(torch.cat(tables))
        sizes = torch.tensor([len(table) for table in tables], device=self.weight.device)
        self.starts = sizes.cumsum(0) - sizes

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight)


class OneTable__a_lookup_for_each_table(_Base):
    def forward(self, rows):
        starts = enumerate(self.starts.unbind())
        return torch.stack([F.embedding(rows[:, k] + s, self.weight) for k, s in starts], dim=1)


class OneTable__flat(_Base):
    def forward(self, rows):
        return super().forward(rows).flatten(1)


class OneTable__trained_without_gradient(_Base):
    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight.detach())


class OneTable__starts_copied_in_each_call(_Base):
    def __init__(self, sparse_arch):
        super().__init__(sparse_arch)
        self.list_of_starts = self.starts.tolist()

    def forward(self, rows):
        return F.embedding(
            rows + torch.tensor(self.list_of_starts, device=rows.device), self.weight
        )
