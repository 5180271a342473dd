"""Plausible wrong answers to the exercises of notebook 51: <answer>__<what is wrong>."""

import torch
import torch.nn.functional as F

# --- 51.1 fuse_first


def _whole(stages):
    return max(sum(s[0] for s in stages.values()), sum(s[1] for s in stages.values()))


def _without(stages, name):
    return _whole({n: s for n, s in stages.items() if n != name})


def fuse_first__longest_on_the_gpu(stages):
    name = max(stages, key=lambda n: stages[n][0])
    return name, _whole(stages) / _without(stages, name)


def fuse_first__longest_on_the_host(stages):
    name = max(stages, key=lambda n: stages[n][1])
    return name, _whole(stages) / _without(stages, name)


def fuse_first__longest_on_the_side_that_limits(stages):
    gpu, host = (sum(s[side] for s in stages.values()) for side in (0, 1))
    side = 0 if gpu >= host else 1
    name = max(stages, key=lambda n: stages[n][side])
    return name, _whole(stages) / (max(gpu, host) - stages[name][side])


def fuse_first__host_and_gpu_in_turn(stages):
    whole = sum(map(sum, stages.values()))
    name = max(stages, key=lambda n: sum(stages[n]))
    return name, whole / (whole - sum(stages[name]))


def fuse_first__the_share_saved(stages):
    name = min(stages, key=lambda n: _without(stages, n))
    return name, 1 - _without(stages, name) / _whole(stages)


def fuse_first__the_last_of_equal_ones(stages):
    name = min(reversed(stages), key=lambda n: _without(stages, n))
    return name, _whole(stages) / _without(stages, name)


def fuse_first__larger_side_of_each_stage(stages):
    times = {n: max(s) for n, s in stages.items()}
    name = max(times, key=times.get)
    return name, sum(times.values()) / (sum(times.values()) - times[name])


# --- 51.2 forward_bytes


def _bytes(b, t, d, ids=8, pairs=None, saved=2):
    pairs = (t + 1) * t // 2 if pairs is None else pairs
    one = b * t * (ids + 4 * d) + 4 * b * (2 * d + pairs)
    return one + saved * 4 * b * t * d, one


def forward_bytes__ids_of_four_bytes(b, t, d):
    return _bytes(b, t, d, ids=4)


def forward_bytes__pairs_of_the_tables_alone(b, t, d):
    return _bytes(b, t, d, pairs=t * (t - 1) // 2)


def forward_bytes__all_products(b, t, d):
    return _bytes(b, t, d, pairs=(t + 1) ** 2)


def forward_bytes__saves_one_way_only(b, t, d):
    return _bytes(b, t, d, saved=1)


def forward_bytes__elements(b, t, d):
    return tuple(n / 4 for n in _bytes(b, t, d))


def forward_bytes__no_dense_vector(b, t, d):
    return tuple(n - 4 * b * d for n in _bytes(b, t, d))


def forward_bytes__the_wrong_way_round(b, t, d):
    return _bytes(b, t, d)[::-1]


def forward_bytes__one_number(b, t, d):
    return _bytes(b, t, d)[1]


# --- 51.3 judge


def _judged(before, after, stage, idle, noise=None, share=0.05, saved=None):
    noise = max(abs(a - b) / a for a, b in idle) if noise is None else noise
    saved = before - after if saved is None else saved
    if abs(saved) / before <= noise:
        return "noise"
    if min(saved, stage) >= share * before:
        return "paid"
    return "elsewhere" if saved >= share * before else "not worth it"


def judge__the_stage_forgotten(before, after, stage, idle):
    return _judged(before, after, before, idle)


def judge__more_than_the_stage_is_elsewhere(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    return "elsewhere" if word != "noise" and before - after > stage else word


def judge__more_than_the_stage_by_a_tenth(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    return "elsewhere" if word == "paid" and before - after > 1.1 * stage else word


def judge__the_stage_for_the_saving(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    return "paid" if word != "noise" and stage >= 0.05 * before else word


def judge__more_than_the_stage_and_little(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    return "elsewhere" if word == "not worth it" and before - after > stage else word


def judge__noise_in_microseconds(before, after, stage, idle):
    noise = max(abs(a - b) for a, b in idle) / before
    return _judged(before, after, stage, idle, noise=noise)


def judge__noise_forgotten(before, after, stage, idle):
    return _judged(before, after, stage, idle, noise=-1.0)


def judge__noise_with_its_sign(before, after, stage, idle):
    return _judged(before, after, stage, idle, noise=max((a - b) / a for a, b in idle))


def judge__the_first_idle_step_alone(before, after, stage, idle):
    return _judged(before, after, stage, idle[:1])


def judge__the_mean_of_idle_steps(before, after, stage, idle):
    noise = sum(abs(a - b) / a for a, b in idle) / len(idle)
    return _judged(before, after, stage, idle, noise=noise)


def judge__noise_as_a_share_of_what_is_left(before, after, stage, idle):
    return _judged(before, after, stage, idle, noise=max(abs(a - b) / b for a, b in idle))


def judge__less_than_the_noise(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    saved, noise = abs(before - after) / before, max(abs(a - b) / a for a, b in idle)
    return _judged(before, after, stage, idle, noise=-1.0) if saved == noise else word


def judge__a_share_of_what_is_left(before, after, stage, idle):
    word = _judged(before, after, stage, idle)
    if word != "noise":
        return "paid" if min(before - after, stage) >= 0.05 * after else word
    return word


def judge__slower_pays(before, after, stage, idle):
    return _judged(before, after, stage, idle, saved=abs(before - after))


def judge__elsewhere_first(before, after, stage, idle):
    if before - after >= 0.05 * before > stage:
        return "elsewhere"
    return _judged(before, after, stage, idle)


def judge__a_truth_value(before, after, stage, idle):
    return _judged(before, after, stage, idle) == "paid"


# --- 51.4 OneWeight


class _Base(torch.nn.Module):
    def __init__(self, num_rows, dim):
        super().__init__()
        self.num_rows = num_rows
        self.weight = torch.nn.Parameter(torch.zeros(sum(num_rows), dim))
        sizes = torch.tensor(num_rows)
        self.register_buffer("sizes", sizes, persistent=False)
        self.register_buffer("starts", sizes.cumsum(0) - sizes, persistent=False)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if all(name in state for name in names):
            state[f"{prefix}weight"] = torch.cat([state.pop(name) for name in names])

    def forward(self, ids):
        return F.embedding((ids + 1) % self.sizes + self.starts, self.weight)


class OneWeight__sizes_not_compared(_Base):
    pass


def _joined(module, state, names, error):
    """The tables in one tensor; `error` where one has another size."""
    tables = [state.pop(name) for name in names]
    if [len(table) for table in tables] != list(module.num_rows):
        raise error("tables of another size")
    return torch.cat(tables)


class OneWeight__fmod(_Base):
    def forward(self, ids):
        return self.weight[torch.fmod(ids + 1, self.sizes) + self.starts]


class OneWeight__a_missing_table_is_a_key_error(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if f"{prefix}weight" not in state:
            state[f"{prefix}weight"] = _joined(module, state, names, RuntimeError)


class OneWeight__another_size_is_a_value_error(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if all(name in state for name in names):
            state[f"{prefix}weight"] = _joined(module, state, names, ValueError)


class OneWeight__longer_tables_cut_off(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if all(name in state for name in names):
            tables = [state.pop(name)[:n] for name, n in zip(names, module.num_rows)]
            state[f"{prefix}weight"] = torch.cat(tables)


class OneWeight__longer_vectors_cut_off(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        sizes = [len(state.get(name, ())) for name in names]
        if sizes == list(module.num_rows):
            weight = torch.cat([state.pop(name) for name in names])
            state[f"{prefix}weight"] = weight[:, : module.weight.shape[1]]


class OneWeight__copied_table_by_table(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if all(name in state for name in names):
            weight = torch.zeros_like(module.weight)
            for part, name in zip(weight.split(list(module.num_rows)), names):
                part.copy_(state.pop(name))  # spreads a table of one row over all
            state[f"{prefix}weight"] = weight


class OneWeight__nothing_loaded(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        pass


class OneWeight__no_prefix(_Base):
    @staticmethod
    def join(module, state, prefix, *rest):
        _Base.join(module, state, "", *rest)


class OneWeight__in_the_order_of_names(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = sorted(name for name in state if name.startswith(f"{prefix}tables."))
        if names:
            state[f"{prefix}weight"] = torch.cat([state.pop(name) for name in names])


class OneWeight__a_missing_table_is_zero(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        dim = module.weight.shape[1]
        if f"{prefix}weight" not in state:
            tables = [
                state.pop(f"{prefix}tables.{k}.weight", torch.zeros(n, dim))
                for k, n in enumerate(module.num_rows)
            ]
            state[f"{prefix}weight"] = torch.cat(tables)


class OneWeight__its_own_no_longer_loads(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        state[f"{prefix}weight"] = torch.cat([state.pop(name) for name in names])


class OneWeight__old_keys_left(_Base):
    @staticmethod
    def join(module, state, prefix, *_):
        names = [f"{prefix}tables.{k}.weight" for k in range(len(module.num_rows))]
        if all(name in state for name in names):
            state[f"{prefix}weight"] = torch.cat([state[name] for name in names])


class OneWeight__more_tables_left_out(_Base):
    def load_state_dict(self, state, strict=True):
        return super().load_state_dict(state, strict=False)


class OneWeight__saves_tables_too(_Base):
    def __init__(self, num_rows, dim):
        super().__init__(num_rows, dim)
        self.register_buffer("starts", self.starts, persistent=True)


class OneWeight__no_starts(_Base):
    def forward(self, ids):
        return F.embedding((ids + 1) % self.sizes, self.weight)


class OneWeight__id_and_not_id_plus_one(_Base):
    def forward(self, ids):
        return F.embedding(ids % self.sizes + self.starts, self.weight)


class OneWeight__trained_without_gradient(_Base):
    def forward(self, ids):
        return F.embedding((ids + 1) % self.sizes + self.starts, self.weight.detach())
