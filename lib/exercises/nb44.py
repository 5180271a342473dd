"""Exercises of notebook 44: slots and phases, a program that hangs, a ring that stays."""

import re

from lib.course import mbarriers
from lib.exercises import (
    NotAttempted,
    Skip,
    Wrong,
    attempted,
    case,
    exercise,
    expect,
    plain,
    plural,
)
from lib.measure.check import check_against_float64
from lib.nogpu import gluon
from lib.nogpu.compile_only import compile_for, signature_of

import torch
import torch.nn.functional as F
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# --- 44.1 ------------------------------------------------------------------------------------------------


@exercise("44.1", "Slot and phases", minutes=10, level=1)
def check_place(answer):
    for n_slots in (2, 4, 6, 8):  # with an odd number, one bit would not do
        for step in range(5 * n_slots):
            at = f"step {step} of the second consumer, {plural(n_slots, 'slot')}"
            with case(at):
                got = plain(attempted(answer(step, n_slots)))
            triple = isinstance(got, (tuple, list)) and len(got) == 3
            expect(triple, f"{at}: give (slot, full's phase, empty's phase), got {got!r}")
            number = 2 * step + 1  # of the producer's steps
            slot, turn = number % n_slots, number // n_slots
            ideas = (
                "the steps of both consumers go round the ring",
                "the first round of the ring is phase 0, and each round flips it",
                "the producer's first wait must pass although nobody has arrived yet",
            )
            for what, g, want, idea in zip(
                ("the slot", "full's phase", "empty's phase"),
                got, (slot, turn % 2, 1 - turn % 2), ideas,
            ):  # fmt: skip
                whole = isinstance(g, int) and not (what == "the slot" and isinstance(g, bool))
                bit = what == "the slot" or g in (0, 1)
                expect(
                    bit, f"{at}: {what} is not {g!r}; a phase is the lowest bit of a count, 0 or 1"
                )
                expect(whole and g == want, f"{at}: {what} is not {g!r}; {idea}")


# --- 44.2 ------------------------------------------------------------------------------------------------


def _producer(n_tiles, n_steps, full, empty):
    for count in range(n_tiles * n_steps):
        slot, turn = count % len(full), count // len(full)
        yield mbarriers.wait(empty[slot], 1 - turn % 2)
        yield mbarriers.load(slot, count, full[slot])


@exercise("44.2", "Mend what hangs", minutes=15, level=2)
def check_consumer(answer):
    sizes = (
        (1, 1, 3),
        (1, 2, 3),
        (1, 4, 3),
        (2, 1, 3),
        (2, 2, 3),
        (2, 3, 3),
        (3, 4, 3),
        (2, 7, 4),
        (5, 2, 5),
    )
    for n_tiles, n_steps, n_slots in sizes:
        for seed in range(20):
            full = [mbarriers.Barrier(f"full[{i}]") for i in range(n_slots)]
            empty = [mbarriers.Barrier(f"empty[{i}]") for i in range(n_slots)]
            at = f"{plural(n_tiles, 'tile')} of {plural(n_steps, 'step')}, {n_slots} slots"
            with case(at):
                consumer = attempted(answer(n_tiles, n_steps, full, empty))
                expect(hasattr(consumer, "__next__"), f"{at}: write a generator, with yield")
                roles = {
                    "producer": _producer(n_tiles, n_steps, full, empty),
                    "consumer": consumer,
                }
                try:
                    done = mbarriers.run(roles, seed)
                except mbarriers.Deadlock as error:
                    raise Wrong(
                        f"{at}: deadlock, {error}; count the arrivals for each slot"
                    ) from None
                except mbarriers.Overwritten as error:
                    raise Wrong(f"{at}: {error}; free a slot after its product is over") from None
            steps = list(range(n_tiles * n_steps))
            expect(done["consumer"] == steps, f"{at}: multiplied {done['consumer'][:9]} instead")
            arrivals = sum(barrier.completed for barrier in empty)
            expect(arrivals == len(steps), f"{at}: slots freed: {arrivals}, not {len(steps)}")
        _expect_overlap(answer, at, n_steps)
        _expect_ended(answer, at, n_tiles, n_steps, n_slots)


def _expect_overlap(answer, at, n_steps):
    """Wrong unless the consumer leaves two products in flight within a tile."""
    bars = [mbarriers.Barrier("b") for _ in range(n_steps)]
    actions = list(answer(1, n_steps, bars, bars))
    last = max(i for i, action in enumerate(actions) if action.kind == "multiply")
    left = [action.phase for action in actions[:last] if action.kind == "finish"]
    at += f": waits until at most {min(left, default=2)} are under way"
    expect(all(in_flight >= 2 for in_flight in left), f"{at} within a tile; leave two in flight")


def _expect_ended(answer, at, n_tiles, n_steps, n_slots):
    """Wrong where sums are read, or a slot is freed, with products of them under way.

    Orders that are drawn meet that too rarely: here a product is over when somebody has waited for it.
    """
    full, empty = ([mbarriers.Barrier(f"{n}[{i}]") for i in range(n_slots)] for n in ("f", "e"))
    under_way, done = [], 0  # slots, oldest first
    for action in [*answer(n_tiles, n_steps, full, empty), None]:
        if action is None or action.kind == "multiply":
            ended = done > 0 and done % n_steps == 0
            left = f"{at}: when a tile's epilogue reads the sums, products may be under way: {len(under_way)}"
            expect(not ended or not under_way, left)
            done += 1
        if action is None:
            break
        if action.kind == "multiply":
            under_way.append(action.slot)
        elif action.kind == "finish":
            del under_way[: max(0, len(under_way) - action.phase)]
        elif action.kind == "arrive":
            slot = next((i for i, barrier in enumerate(empty) if barrier is action.barrier), None)
            early = f"{at}: slot {slot} is freed while its product may still read it; wait for that first"
            expect(slot not in under_way, early)


# --- 44.3 ------------------------------------------------------------------------------------------------


def described(tensor, *block):
    """A TensorDescriptor of a 16-bit matrix, in blocks of this shape."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


def arguments_of(x, w, y):
    """What 44.3's kernel gets before its constants: descriptors, and the sizes M, N, K."""
    descriptors = described(x, 128, 64), described(w, 256, 64), described(y, 128, 256)
    return *descriptors, *y.shape, x.shape[1]


@exercise("44.3", "A ring that stays", minutes=30, level=3)
def check_stays(kernel):
    def in_model(seed, programs):
        def version(x, w):
            y = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype)
            try:
                log[:] = gluon.run(kernel, (programs,), *arguments_of(x, w, y), seed=seed, STAGES=3)
            except gluon.MissingWord as error:
                raise Skip(f"{error}, so it cannot tell whether this is right") from None
            if not log:
                raise NotAttempted
            return y

        log = []
        return version, log

    # tiles are 128 × 256, steps 64 along K: one tile, then several for a program, then parts of tiles
    for m, n, k, programs in (
        (128, 256, 64, 1), (128, 256, 320, 1), (128, 512, 64, 1), (256, 512, 192, 3), (256, 512, 192, 1),
        (200, 776, 328, 2), (200, 776, 328, 6), (384, 256, 128, 1),
    ):  # fmt: skip
        for seed in range(6):
            torch.manual_seed(seed)
            x, w = torch.randn(m, k).bfloat16(), (torch.randn(n, k) / k**0.5).bfloat16()
            at = f"{m} × {n} × {k}, {plural(programs, 'program')}, order {seed}"
            version, log = in_model(seed, programs)
            with case(at):
                check_against_float64(version, F.linear, x, w, name=at)
    _expect_it_runs_ahead(in_model)
    _expect_it_compiles(kernel)


def _expect_it_runs_ahead(in_model):
    """Wrong unless a product is left in flight, and loads of the next tile are asked for before a store."""
    version, log = in_model(0, 1)
    version(
        *(torch.zeros(n, 320, dtype=torch.bfloat16) for n in (256, 256))
    )  # two tiles of five steps
    in_flight = max(detail for what, detail in log if what == "multiply")
    expect(in_flight > 0, "no product starts while another is under way; leave one in flight")
    store = [what for what, _ in log].index("store")
    early = sum(what == "load" for what, _ in log[:store]) - 2 * 5
    expect(
        early > 0,
        "two tiles for one program: before the first is stored, no load of the second is asked for; "
        "count steps over all tiles",
    )


def _expect_it_compiles(kernel):
    sample = [torch.empty(512, 512, dtype=torch.bfloat16) for _ in range(3)]
    with case("right in the model, but for a Hopper GPU"):
        signature = signature_of(kernel, *arguments_of(*sample), STAGES=3)
        compiled = compile_for(kernel, signature, arch=90, num_warps=8)
    waits = [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", compiled.ptx)]
    expect(
        max(waits, default=0) > 0,
        "compiled for a Hopper GPU, each product is waited for at once; leave one in flight",
    )
