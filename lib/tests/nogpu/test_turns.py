"""Locks, flags and counters: programs may wait for one another, not for ever, and races() knows their order."""

import threading
import time

from lib import machine
from lib.nogpu.races import races
from lib.nogpu.turns import WaitsForever

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(machine.HAS_GPU, reason="about the interpreter")


def zeros(n, dtype=torch.int32):
    return torch.zeros(n, dtype=dtype)


@triton.jit
def _locked_kernel(lock_ptr, y_ptr, CASE: tl.constexpr):
    pid = tl.program_id(0)
    if CASE == "store before":
        tl.store(y_ptr + 1, pid)
    if CASE == "only some before" and pid == 0:
        tl.store(y_ptr + 1, pid)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) + 1)
    tl.debug_barrier()
    if CASE != "no release":
        tl.atomic_xchg(lock_ptr, 0)
    if CASE == "store after":
        tl.store(y_ptr + 1, pid)
    if CASE == "only some before" and pid > 0:
        tl.load(y_ptr + 1)


def test_a_lock_that_is_never_released_is_named():
    before, started = threading.active_count(), time.monotonic()
    message = (
        r"_locked_kernel: program \(1, 0, 0\) waits for ever in line \d+ of test_turns.py,"
        r" `while tl.atomic_cas\(lock_ptr, 0, 1\) == 1:`: it reads element 0 of lock_ptr, which is 1,"
    )
    with pytest.raises(WaitsForever, match=message):
        _locked_kernel[(200,)](zeros(1), zeros(2), "no release")
    with pytest.raises(WaitsForever, match="no other program is left"):
        races(lambda: _locked_kernel[(2,)](zeros(1), zeros(2), "no release"))
    assert threading.active_count() == before
    assert time.monotonic() - started < 30


@triton.jit
def _from_behind_kernel(flag_ptr, y_ptr, n, POLL: tl.constexpr):
    # Each program waits for the next one, the last for none.
    pid = tl.program_id(0)
    before = 0
    if pid < n - 1:
        if POLL == "load":
            while tl.load(flag_ptr + pid + 1, volatile=True) == 0:
                pass
        elif POLL == "add":
            while tl.atomic_add(flag_ptr + pid + 1, 0) == 0:
                pass
        else:
            n_tries = 0
            while tl.atomic_cas(flag_ptr + pid + 1, 1, 1) != 1:
                n_tries += 1
        before = tl.load(y_ptr + pid + 1)
    tl.store(y_ptr + pid, before + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + pid, 1)


@pytest.mark.parametrize("poll", ["load", "add", "cas"])
def test_a_program_may_wait_for_a_later_one(poll):
    n = 3 if poll == "cas" else 40  # a loop that counts waits 0.2 s before others run
    y = zeros(n)
    _from_behind_kernel[(n,)](zeros(n), y, n, POLL=poll)
    assert y.tolist() == list(range(n, 0, -1))


@triton.jit
def _barriers_kernel(count_ptr, x_ptr, y_ptr, n, N_TIMES: tl.constexpr):
    pid = tl.program_id(0)
    for i in range(N_TIMES):
        tl.store(x_ptr + i * n + pid, pid + i)
        tl.atomic_add(count_ptr, 1)
        while tl.atomic_add(count_ptr, 0) < (i + 1) * n:
            pass
        tl.store(y_ptr + i * n + pid, tl.load(x_ptr + i * n + (pid + 1) % n))


def test_barriers_of_all_programs():
    n, x, y = 7, zeros(21), zeros(21)
    assert races(lambda: _barriers_kernel[(n,)](zeros(1), x, y, n, N_TIMES=3)) == []
    assert torch.equal(y.view(3, n), x.view(3, n).roll(-1, 1))


@triton.jit
def _patient_kernel(x_ptr, y_ptr, LAST: tl.constexpr):
    # Reads one element many times and writes nothing meanwhile, but waits for nobody.
    total, n_tries = 0, 0
    while n_tries < LAST:
        total += tl.load(x_ptr)
        n_tries += 1
    for _ in range(300):
        total += tl.load(x_ptr)
    tl.store(y_ptr, total)


def test_a_slow_kernel_is_let_alone(monkeypatch):
    monkeypatch.setenv("TRITON_ON_CPU_TIMEOUT", "1000")
    y = zeros(1)
    _patient_kernel[(2,)](zeros(1) + 1, y, LAST=500)
    assert y.item() == 800


def test_a_loop_that_counts_its_tries_has_a_time_limit(monkeypatch):
    monkeypatch.setenv("TRITON_ON_CPU_TIMEOUT", "0.5")
    with pytest.raises(WaitsForever, match=r"Nothing changed for 0.5 seconds \(TRITON_ON_CPU_TIM"):
        _from_behind_kernel[(1,)](zeros(4), zeros(4), 4, POLL="cas")


def test_an_error_in_a_program_that_ran_while_another_waited():
    @triton.jit
    def kernel(flag_ptr, y_ptr):
        if tl.program_id(0) == 0:
            while tl.atomic_cas(flag_ptr, 1, 1) != 1:
                pass
        else:
            tl.store(y_ptr + 5, 1)

    before = threading.active_count()
    with pytest.raises(IndexError, match=r"store to y_ptr at element 5, .* program \(1, 0, 0\)"):
        kernel[(3,)](zeros(1), zeros(2))
    assert threading.active_count() == before


# --- races() knows acquire and release ---


@pytest.mark.parametrize(
    ("case", "n_races"), [("", 0), ("store before", 1), ("store after", 1), ("only some before", 1)]
)
def test_races_knows_locks(case, n_races):
    y = zeros(2)
    sentences = races(lambda: _locked_kernel[(3,)](zeros(1), y, case))
    assert len(sentences) == n_races
    assert all("element 1 of y_ptr" in sentence for sentence in sentences)
    assert y[0] == 3  # though it may have run twice


@triton.jit
def _rows_kernel(
    x_ptr, lock_ptr, count_ptr, dw_ptr, N_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    # The sum of rows as layer norm's backward makes it: one lock and one buffer for each group of rows.
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK_SIZE)
    group = pid % N_GROUPS
    dw = tl.load(x_ptr + pid * BLOCK_SIZE + cols)
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    if tl.load(count_ptr + group) == 0:
        tl.atomic_xchg(count_ptr + group, 1)
    else:
        dw += tl.load(dw_ptr + group * BLOCK_SIZE + cols)
    tl.store(dw_ptr + group * BLOCK_SIZE + cols, dw)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


def test_races_lets_the_sums_of_layer_norm_alone():
    x, dw = torch.randn(6, 8), zeros(16, torch.float32).view(2, 8)
    assert races(lambda: _rows_kernel[(6,)](x, zeros(2), zeros(2), dw, 2, 8)) == []
    torch.testing.assert_close(dw.sum(0), x.sum(0))


@triton.jit
def _last_kernel(part_ptr, count_ptr, y_ptr, n, SEM: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(part_ptr + pid, pid + 1)
    if tl.atomic_add(count_ptr, 1, sem=SEM) == n - 1:
        total = 0
        for i in range(n):
            total += tl.load(part_ptr + i)
        tl.store(y_ptr, total)


@pytest.mark.parametrize(("sem", "n_races"), [("acq_rel", 0), ("relaxed", 1), ("release", 1)])
def test_races_knows_which_atomics_put_programs_in_order(sem, n_races):
    y = zeros(1)
    sentences = races(lambda: _last_kernel[(4,)](zeros(4), zeros(1), y, 4, SEM=sem))
    assert len(sentences) == n_races
    assert y.item() == 10


@pytest.mark.parametrize("poll", ["load", "add"])
def test_races_where_programs_wait(poll):
    y = zeros(4)
    sentences = races(lambda: _from_behind_kernel[(4,)](zeros(4), y, 4, POLL=poll))
    # A load, even a volatile one, acquires nothing: what another stored before its flag may come later.
    assert len(sentences) == (poll == "load")
    assert y.tolist() == [4, 3, 2, 1]


def test_races_of_descriptors_and_of_a_table_of_pointers():
    @triton.jit
    def kernel(x_ptr, table_ptr, BLOCK_SIZE: tl.constexpr):
        x = tl.make_tensor_descriptor(x_ptr, [16], [1], [BLOCK_SIZE])
        y_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
        tl.store(y_ptr + tl.arange(0, BLOCK_SIZE), x.load([0]))

    y = torch.zeros(16)
    (sentence,) = races(lambda: kernel[(2,)](torch.randn(16), torch.tensor([y.data_ptr()]), 16))
    assert "program 0 stores element 0 of a tensor of shape (16,), program 1 stores it" in sentence


@triton.jit
def _collect_kernel(flag_ptr, y_ptr, POLL: tl.constexpr, N: tl.constexpr):
    # Program 0 waits for a flag of each other one, with the same store over and over.
    pid, all_flags = tl.program_id(0), flag_ptr + tl.arange(0, N)
    if pid > 0:
        tl.atomic_xchg(flag_ptr + pid, 1)
    elif POLL == "add":
        while tl.sum(tl.atomic_add(all_flags, 0)) < N - 1:
            tl.store(y_ptr, 5)
    else:
        while tl.sum(tl.load(all_flags, volatile=True)) < N - 1:
            tl.store(y_ptr, 5)


@pytest.mark.parametrize("poll", ["add", "load"])
def test_several_flags_at_once(poll):
    y = zeros(1)
    _collect_kernel[(4,)](zeros(4), y, POLL=poll, N=4)
    assert y.item() == 5
    with pytest.raises(WaitsForever, match="no other program is left"):
        _collect_kernel[(1,)](zeros(4), y, POLL=poll, N=4)


@triton.jit
def _ticket_kernel(next_ptr, serving_ptr, y_ptr):
    ticket = tl.atomic_add(next_ptr, 1)
    while tl.atomic_add(serving_ptr, 0) != ticket:
        pass
    tl.store(y_ptr, tl.load(y_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_add(serving_ptr, 1)


def test_races_knows_a_lock_with_tickets():
    y = zeros(1)
    assert races(lambda: _ticket_kernel[(4,)](zeros(1), zeros(1), y)) == []
    assert y.item() == 4


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="Triton 3.9 has it")
def test_a_poll_may_have_a_time_limit_of_its_own():
    @triton.jit
    def kernel(flag_ptr, y_ptr, LIMITED: tl.constexpr):
        if LIMITED:
            tl.store(y_ptr, tl.atomic_poll(flag_ptr, 1, timeout_ns=10_000_000).to(tl.int32) + 5)
        elif tl.program_id(0) == 0:
            tl.atomic_poll(flag_ptr, 1)
            tl.store(y_ptr, 7)
        else:
            tl.atomic_xchg(flag_ptr, 1)

    y = zeros(1)
    kernel[(1,)](zeros(1), y, LIMITED=True)
    assert y.item() == 5
    kernel[(2,)](zeros(1), y, LIMITED=False)
    assert y.item() == 7
    assert races(lambda: kernel[(2,)](zeros(1), y, LIMITED=False)) == []
