"""Exercises of notebook 51: what to fuse first, its bytes, paid or noise, 26 tables loaded into one weight."""

from lib import machine
from lib.dlrm import model as dlrm
from lib.exercises import (
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    expect_module_class,
    expect_number,
    first_numbers,
)
from lib.nogpu.memory import count_traffic
from lib.ops.embedding_hash import embedding_hash_triton
from lib.ops.interaction import interaction_triton

import torch

# --- 51.1 ------------------------------------------------------------------------------------------------

_STAGES = (
    ("one stage of two", {"a": (1.0, 0.0), "b": (3.0, 0.0)}),
    ("limited by the host", {"a": (9.0, 1.0), "b": (1.0, 19.0)}),
    ("limited by the GPU", {"a": (9.0, 1.0), "b": (1.0, 5.0)}),
    # without b the GPU is the limit; without a still the host
    ("limited by both", {"a": (10.0, 2.0), "b": (2.0, 10.0), "c": (8.0, 9.0)}),
    ("the limit changes sides", {"a": (8.0, 2.0), "b": (1.0, 9.0), "c": (4.0, 6.0)}),
    ("equal ones", {"a": (2.0, 5.0), "b": (3.0, 5.0)}),
)


def _fuse_first(stages):
    def us(names):
        return max(sum(stages[n][side] for n in names) for side in (0, 1))

    whole = us(stages)
    speed_ups = {name: whole / us([n for n in stages if n != name]) for name in stages}
    best = max(speed_ups, key=speed_ups.get)
    return best, speed_ups[best]


@exercise("51.1", "What to fuse first", minutes=20, level=2)
def _(answer):
    for what, stages in _STAGES:
        at = f"{what}, {stages}"
        with case(at):
            got = attempted(answer(dict(stages)))
        pair = isinstance(got, (tuple, list)) and len(got) == 2
        expect(pair, f"{at}: should be a name and a number, got {got!r}")
        name, speed_up = _fuse_first(stages)
        expect(
            got[0] == name, f"{at}: {got[0]!r} is not the stage; what does a pass without it take?"
        )
        expect_number(got[1], speed_up, f"{at}: the speed-up at most (a pass takes the larger sum)")


# --- 51.2 ------------------------------------------------------------------------------------------------


def two_kernels_bytes(b, t, d):
    """Bytes of the two kernels' forward pass, of rows that no two lookups share."""
    lookups = b * t * (8 + 2 * 4 * d)
    return lookups + 4 * b * ((t + 1) * d + d + (t + 1) * t // 2)


def counted_bytes(b, t, d):
    """The same, counted in the interpreter, without the sizes of tables and the places in y."""
    num_rows = (b,) * t
    ids = torch.arange(b)[:, None].expand(b, t).contiguous()  # each row of each table once
    weight, dense = torch.randn(b * t, d), torch.randn(b, d)
    traffic = count_traffic(
        lambda: interaction_triton(dense, embedding_hash_triton(ids, weight, num_rows))
    )
    small = "tables_ptr", "sources_ptr"
    arguments = [a for n, a in traffic.by_argument.items() if not n.endswith(small)]
    return sum(a.loaded_distinct + a.stored_distinct for a in arguments)


@exercise("51.2", "The bytes of one more fusion", minutes=10, level=1)
def _(answer):
    for b, t, d in ((1, 1, 1), (1, 1, 2), (3, 1, 2), (2, 3, 4), (4, 26, 16), (2048, 26, 16)):
        at = f"B = {b}, T = {t}, D = {d}"
        with case(at):
            got = attempted(answer(b, t, d))
        pair = isinstance(got, (tuple, list)) and len(got) == 2
        expect(pair, f"{at}: should be two numbers, got {got!r}")
        want = two_kernels_bytes(b, t, d)
        if b < 10 and not machine.HAS_GPU:
            want = counted_bytes(b, t, d)
        ways = "each tensor that is read or written, int64 or float32"
        expect_number(got[0], want, f"{at}: the two kernels ({ways})")
        expect_number(got[1], want - 8 * b * t * d, f"{at}: one kernel (without the embeddings)")


# --- 51.3 ------------------------------------------------------------------------------------------------

WORDS = "noise", "elsewhere", "paid", "not worth it"
_STILL = [(100.0, 100.4), (200.0, 199.0)]
# (what, before, after, stage, idle): the first four are from an earlier recording on the H200
_JUDGED = (
    ("lookups, training, GPU", (4628.6, 2698.1, 2534.0, [(96.8, 97.0)])),
    ("interaction, training, GPU", (2698.1, 2656.0, 52.4, [(96.8, 97.0)])),
    ("interaction, training, host", (4357.7, 3574.2, 422.4, [(656.5, 696.9)])),
    ("top MLP, forward, host", (656.5, 688.1, 172.0, [(656.5, 696.9)])),
    # more µs than the idle step, and a smaller share
    ("interaction, training, a noisy host", (3454.4, 3266.9, 487.3, [(448.5, 487.0)])),
    ("a share as large as an idle one", (100.0, 99.5, 50.0, _STILL)),
    ("slower, and by more than the noise", (100.0, 120.0, 50.0, _STILL)),
    ("nothing saved", (100.0, 100.0, 50.0, _STILL)),
    ("a twentieth", (100.0, 95.0, 50.0, _STILL)),
    ("a little less than a twentieth", (100.0, 95.2, 50.0, _STILL)),
    ("more than its stage took, and the stage alone pays", (1000.0, 870.0, 100.0, _STILL)),
    ("a stage of a twentieth", (1000.0, 900.0, 50.0, _STILL)),
    ("more than its stage took, and the stage alone is too little", (1000.0, 940.0, 40.0, _STILL)),
    ("more than its stage took, and little", (1000.0, 980.0, 5.0, _STILL)),
    ("more than its stage took, but no more than an idle step", (1000.0, 999.5, 0.1, _STILL)),
    ("idle steps that are slower afterwards", (100.0, 92.0, 50.0, [(100.0, 90.0), (100.0, 109.0)])),
    ("a small stage, within the noise", (100.0, 92.0, 2.0, [(100.0, 90.0)])),
    ("an idle step that is a smaller share of its before", (100.0, 90.5, 50.0, [(110.0, 100.0)])),
)


def _judge(before, after, stage, idle):
    saved = before - after
    if abs(saved) / before <= max(abs(a - b) / a for a, b in idle):
        return "noise"
    if min(saved, stage) >= 0.05 * before:
        return "paid"
    return "elsewhere" if saved >= 0.05 * before else "not worth it"


@exercise("51.3", "Paid, or noise?", minutes=10, level=2)
def _(answer):
    for what, case_of in _JUDGED:
        before, after, stage, idle = case_of
        at = f"{what}: before {before}, after {after}, stage {stage}, idle {idle}"
        with case(at):
            got = attempted(answer(before, after, stage, list(idle)))
        expect(got in WORDS, f"{at}: give one of {', '.join(map(repr, WORDS))}, got {got!r}")
        want = _judge(*case_of)
        expect(got == want, f"{at}: should be {want!r}, got {got!r}")


# --- 51.4 ------------------------------------------------------------------------------------------------

_DIM = 4


def _arch(num_rows, dim=_DIM):
    """A SparseArch on the CPU: there a row out of range is an error and no end of the session."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(num_rows))
        return dlrm.SparseArch(num_rows, dim)


class _Around(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.sparse_arch, self.top = part, torch.nn.Linear(1, 1)


def _load(at, module, state):
    try:
        incompatible = module.load_state_dict(state)
    except RuntimeError as error:
        says = " ".join(str(error).split())[:300]
        expect(False, f"{at}: load_state_dict raised: {says}")
    expect(not any(incompatible), f"{at}: keys are left over: {incompatible}")


def _expect_lookups(at, module, arch, num_rows):
    sizes = torch.tensor(num_rows)
    ids = torch.tensor(
        [[k] * len(num_rows) for k in (-1, -2, -6, 10**9 + 7)] + [[n - 2 for n in num_rows]]
    )
    got, want = attempted(module(ids)), arch((ids + 1) % sizes)
    expect(isinstance(got, torch.Tensor), f"{at}: should give a tensor, got {type(got).__name__}")
    expect(
        got.shape == want.shape, f"{at}: shape {tuple(got.shape)}, should be {tuple(want.shape)}"
    )
    wrong = (got != want).any(2).nonzero().tolist()
    if wrong:
        b, k = wrong[0]
        rows = f"gives {first_numbers(got[b, k])}, should be {first_numbers(want[b, k])}"
        raise Wrong(f"{at}: id {ids[b, k]} of table {k}, which has {num_rows[k]} rows, {rows}")
    dy = torch.linspace(-1, 2, want.numel()).view(want.shape)
    (gradient,) = torch.autograd.grad(got, module.weight, dy)
    tables = torch.autograd.grad(want, [table.weight for table in arch.tables], dy)
    for k, (mine, table) in enumerate(zip(gradient.split(list(num_rows)), tables)):
        wrong = (~torch.isclose(mine, table, atol=1e-6)).any(1).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            rows = f"is {first_numbers(mine[row])}, should be {first_numbers(table[row])}"
            raise Wrong(f"{at}: the gradient of row {row} of table {k} {rows}")


def _expect_refused(what, answer, num_rows, state):
    """Wrong unless loading `state` raises the RuntimeError that callers of load_state_dict expect."""
    try:
        answer(num_rows, _DIM).load_state_dict(state)
    except RuntimeError:
        return
    except Exception as error:  # the reader's hook may raise anything
        got = f"{type(error).__name__}: {error}"[:200]
        raise Wrong(f"{what} should be load_state_dict's RuntimeError, got {got}") from None
    raise Wrong(f"{what} should be an error, and is loaded")


@exercise("51.4", "Load the old checkpoint", minutes=25, level=3)
def _(answer):
    expect_module_class(answer)
    for num_rows in ((3,), (3, 2), (1, 5, 1, 4), tuple(range(2, 14))):
        arch, at = _arch(num_rows), f"tables of {num_rows} rows"
        attempted(answer(num_rows, _DIM)(torch.zeros(1, len(num_rows), dtype=torch.int64)))
        with case(at):
            _expect_loads(at, answer, arch, num_rows)
    _expect_refusals(answer)


def _expect_loads(at, answer, arch, num_rows):
    """Wrong unless a module loads arch's checkpoint, also inside a model, and its own."""
    state = arch.state_dict()
    before = list(state)
    module = answer(num_rows, _DIM)
    _load(at, module, state)
    expect(list(state) == before, f"{at}: the checkpoint itself should be left as it was")
    _expect_lookups(at, module, arch, num_rows)
    inside = _Around(answer(num_rows, _DIM))
    _load(f"{at}, inside a model", inside, _Around(arch).state_dict())
    _expect_lookups(f"{at}, inside a model", inside.sparse_arch, arch, num_rows)
    keys = list(module.state_dict())
    expect(keys == ["weight"], f"{at}: its own state_dict should have the key weight, has {keys}")
    again = answer(num_rows, _DIM)
    _load(f"{at}, its own state_dict", again, module.state_dict())
    _expect_lookups(f"{at}, its own state_dict", again, arch, num_rows)


def _expect_refusals(answer):
    num_rows = (3, 2, 4)
    whole = _arch(num_rows).state_dict()
    missing = {name: t for name, t in whole.items() if "1" not in name}
    _expect_refused("a checkpoint without table 1", answer, num_rows, missing)
    for what, sizes in (
        # as many rows in all, but not table by table
        ("a checkpoint of tables of (2, 3, 4) rows in place of (3, 2, 4)", (2, 3, 4)),
        ("a table of 5 rows in place of one of 2", (3, 5, 4)),
        ("a table of 1 row in place of one of 2", (3, 1, 4)),  # copied, it would be spread
        ("a checkpoint with a fourth table", (3, 2, 4, 1)),
    ):
        _expect_refused(what, answer, num_rows, _arch(sizes).state_dict())
    what = f"a checkpoint of vectors of {_DIM + 1} numbers in place of {_DIM}"
    _expect_refused(what, answer, num_rows, _arch(num_rows, _DIM + 1).state_dict())
