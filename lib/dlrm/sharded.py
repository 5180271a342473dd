"""DLRM on several processes: each has all MLPs, its share of the rows, and some of the tables.

Tables    each table is on one rank: the largest first, to the rank that has the fewest rows so far (`place`).
Forward   the ids of my rows go to the ranks that own the tables, their embeddings come back: two all-to-alls.
Backward  the gradients of the embeddings go to the owners: a third. Those of the MLPs are averaged by DDP.
Equal to  one process with the whole batch. Its loss is the mean of the ranks' losses, so the gradients that
          reach a table from all ranks are divided by the number of ranks.
Backend   NCCL with a GPU for each rank, else gloo on the CPU.
Fused     with fused=True lookups and interaction are those of lib.ops, and the tables' gradients are sparse.

    torchrun --standalone --nproc-per-node 2 -m lib.dlrm.sharded [--steps 20] [--fused]
    torchrun --standalone --nproc-per-node 2 -m lib.dlrm.sharded --measure 65536      needs two GPUs
"""

import argparse
import collections
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm.train import batch_of, train_step

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 0.5
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60  # how long a rank waits for a missing one

sent_bytes = collections.Counter()  # what this rank has sent to others: ids, embeddings, gradients


def place(num_rows, world_size, most=None):
    """The rank of each table, so that ranks have about as many rows: the largest table first.

    num_rows: rows of each table. Without `most`, at most 4/3 of the best largest share (Graham, 1969).
    most: how many tables a rank may have, as each costs a lookup for every row of the batch.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    most = len(num_rows) if most is None else most
    if most * world_size < len(num_rows):
        raise ValueError(
            f"{len(num_rows)} tables on {world_size} ranks: most must be larger, got {most}"
        )
    load, room, ranks = [0] * world_size, [most] * world_size, [0] * len(num_rows)
    for table in sorted(range(len(num_rows)), key=lambda k: -num_rows[k]):
        rank = min((r for r in range(world_size) if room[r]), key=load.__getitem__)
        ranks[table] = rank
        load[rank] += num_rows[table]
        room[rank] -= 1
    return ranks


# --- the exchange --------------------------------------------------------------------------------------------


def _all_to_all(x, send, receive, what):
    """`send[r]` elements of x go to rank r, `receive[r]` come from it; one after the other in one tensor."""
    y = x.new_empty(sum(receive))
    dist.all_to_all_single(y, x, receive, send)
    sent_bytes[what] += (sum(send) - send[dist.get_rank()]) * x.element_size()
    return y


class _Exchange(torch.autograd.Function):
    """_all_to_all of embeddings; backward sends the gradients the way back, averaged over the ranks."""

    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        return _all_to_all(x, send, receive, "embeddings")

    @staticmethod
    def backward(ctx, dy):
        send, receive = ctx.sizes
        dx = _all_to_all(dy.contiguous(), receive, send, "gradients")
        return dx / dist.get_world_size(), None, None


class _InOrder(torch.autograd.Function):
    """The ranks' embeddings, each rank's (b, its tables, D) after the other's → (b, T, D), tables in order."""

    @staticmethod
    def forward(ctx, x, tables, b, dim):
        ctx.tables = tables
        y = x.new_empty(b, sum(map(len, tables)), dim)
        for columns, part in zip(tables, _InOrder.parts(x, tables, b, dim)):
            y.index_copy_(1, columns, part)
        return y

    @staticmethod
    def backward(ctx, dy):  # autograd's own would add to zeros
        b, _, dim = dy.shape
        dx = dy.new_empty(dy.numel())
        for columns, part in zip(ctx.tables, _InOrder.parts(dx, ctx.tables, b, dim)):
            torch.index_select(dy, 1, columns, out=part)
        return dx, None, None, None

    @staticmethod
    def parts(x, tables, b, dim):
        """What is of each rank in x, as (b, its tables, D)."""
        sizes = [b * len(columns) * dim for columns in tables]
        return [part.view(b, len(t), dim) for part, t in zip(x.split(sizes), tables)]


class ShardedSparseArch(nn.Module):
    """SparseArch whose tables are spread over the ranks: rows (b, T) of my batch → embeddings (b, T, D).

    sparse_arch: the whole SparseArch, equal on all ranks; tables of other ranks are dropped.
    most: as place has it.   fused: an EmbeddingHash for the tables; it takes ids and not rows.
    ranks: (mine, how many), for one that works alone while others are there.
    All ranks have to call with the same b.
    """

    def __init__(self, sparse_arch, most=None, fused=False, ranks=None):
        super().__init__()
        rank, world_size = ranks or (dist.get_rank(), dist.get_world_size())
        owners = place([table.num_embeddings for table in sparse_arch.tables], world_size, most)
        owned = [[k for k, owner in enumerate(owners) if owner == r] for r in range(world_size)]
        for r, tables in enumerate(owned):
            self.register_buffer(f"owned_{r}", torch.tensor(tables).long(), persistent=False)
        self.n_owned, self.n_mine = [len(tables) for tables in owned], len(owned[rank])
        mine = [sparse_arch.tables[k] for k in owned[rank]]  # may be none
        self.fused = fused and self.n_mine > 0
        self.tables = _fused_tables(mine) if self.fused else nn.ModuleList(mine)
        self.dim = sparse_arch.tables[0].embedding_dim

    def forward(self, rows):
        b, world_size = rows.shape[0], len(self.n_owned)
        if world_size == 1:
            return self._lookup(rows)
        owned = [self.get_buffer(f"owned_{r}") for r in range(world_size)]
        asked = torch.cat([rows.index_select(1, columns).flatten() for columns in owned])
        send, receive = [b * n for n in self.n_owned], [b * self.n_mine] * world_size
        mine = _all_to_all(asked, send, receive, "ids").view(world_size * b, self.n_mine)
        sizes = [[n * self.dim for n in count] for count in (receive, send)]
        answers = _Exchange.apply(self._lookup(mine).flatten(), *sizes)
        return _InOrder.apply(answers, owned, b, self.dim)

    def _lookup(self, rows):
        if self.fused:
            return self.tables(rows)
        vectors = [table(rows[:, k]) for k, table in enumerate(self.tables)]
        return torch.stack(vectors, 1) if vectors else self._nothing(rows)

    def _nothing(self, rows):
        return torch.empty(len(rows), 0, self.dim, device=rows.device, requires_grad=True)


# Of lib.ops what is asked for: each process imports anew, and theirs take a second or more.


def _fused_tables(tables):
    from lib.ops.embedding_hash import EmbeddingHash

    return EmbeddingHash.from_tables(tables, sparse=True)


def _fused_interaction():
    from lib.ops.interaction import interaction_triton

    return interaction_triton


class ShardedDLRM(nn.Module):
    """A DLRM that is equal on all ranks, spread over them: dense (b, 13), sparse (b, T) → logits (b,).

    most, fused, ranks: as ShardedSparseArch has them; fused takes the interaction of lib.ops, too.
    On GPUs lookups and exchanges have a stream of their own, beside the bottom MLP. A backward pass keeps to
    the streams of its forward pass, so the gradients' exchange runs beside that MLP's gradients.
    """

    def __init__(self, model, device, most=None, fused=False, ranks=None):
        super().__init__()
        world_size = ranks[1] if ranks else dist.get_world_size()
        # EmbeddingHash hashes where the table is
        self.hashing = nn.Identity() if fused else model.hashing.to(device)
        # Spread first, moved then: no device ever holds the tables of another.
        self.sparse_arch = ShardedSparseArch(model.sparse_arch, most, fused, ranks).to(device)
        self.interaction = _fused_interaction() if fused else model.interaction.to(device)
        self.dense_arch = _averaged(model.dense_arch.to(device), world_size)
        self.prediction = _averaged(model.prediction.to(device), world_size)
        on_gpus = device.type == "cuda" and world_size > 1
        self.beside = torch.cuda.Stream(device) if on_gpus else None

    def forward(self, dense, sparse):
        if self.beside is None:
            first, embedded = self.dense_arch(dense), self.sparse_arch(self.hashing(sparse))
            return self.prediction(self.interaction(first, embedded))
        stream = torch.cuda.current_stream()
        self.beside.wait_stream(stream)
        first = self.dense_arch(dense)
        with torch.cuda.stream(self.beside):
            embedded = self.sparse_arch(self.hashing(sparse))
        stream.wait_stream(self.beside)
        embedded.record_stream(stream)  # its memory is of the other stream
        return self.prediction(self.interaction(first, embedded))


def _averaged(module, world_size):
    return (
        DistributedDataParallel(module, gradient_as_bucket_view=True) if world_size > 1 else module
    )


class RowSGD(torch.optim.Optimizer):
    """SGD; of a sparse gradient only the rows that it holds are touched, and those of one row added in turn."""

    def __init__(self, parameters, learning_rate):
        super().__init__(parameters, {"lr": learning_rate})

    @torch.no_grad()
    def step(self):
        """Add -lr times the gradient to every parameter that has one."""
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            dense = [p for p in given if not p.grad.is_sparse]
            if dense:
                torch._foreach_add_(dense, [p.grad for p in dense], alpha=-group["lr"])
            for p in given:
                if p.grad.is_sparse:  # torch.optim.SGD sorts the rows, and waits for the GPU
                    rows, values = p.grad._indices()[0], p.grad._values()
                    p.index_add_(0, rows, values, alpha=-group["lr"])


def my_rows(batch):
    """This rank's part of a batch of all ranks. ValueError unless it can be divided evenly."""
    size, world_size = len(batch.labels), dist.get_world_size()
    if size % world_size:
        raise ValueError(f"{size} rows cannot be divided by {world_size} ranks; leave some out")
    return batch.rows(slice(dist.get_rank(), None, world_size))


# --- a program for each rank, and one that starts them -------------------------------------------------------


def start():
    """Join the other ranks, as torchrun's environment says; returns this rank's device."""
    rank, local, world_size = (
        int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    on_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= world_size
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    # alone, without torchrun, there is nobody to meet
    how = {} if "MASTER_PORT" in os.environ else {"store": dist.HashStore()}
    if on_gpus:
        torch.cuda.set_device(device)
        # NCCL connects now, within the time-out, and not at the first collective
        how["device_id"] = device
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=TIMEOUT_S), **how,
    )  # fmt: skip
    return device


def small_model(n_tables):
    """The DLRM that every rank begins with: the first tables of Criteo, 10,000 rows at most."""
    torch.manual_seed(0)
    return dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=10_000)[:n_tables]), dlrm.SMALL)


def train_here(device, steps, batch_size, n_tables, fused=False, die_at=None):
    """Train on this rank. Returns the results as a dictionary; its losses are those of all rows."""
    model = ShardedDLRM(small_model(n_tables), device, fused=fused)
    # Not Adagrad: it takes no notice of the size of gradients, nor of a factor that is missing from them.
    optimizer = RowSGD(model.parameters(), LEARNING_RATE)
    batch, losses, times = my_rows(batch_of(batch_size, device)), [], []
    batch = batch._replace(sparse=batch.sparse[:, :n_tables])
    for step in range(steps):
        if step == die_at and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError(f"rank {dist.get_rank()} was asked to die at step {step}")
        started = time.perf_counter()
        loss = train_step(model, optimizer, batch)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        times.append(time.perf_counter() - started)
    parameter_bytes = {row["part"]: row["parameter_bytes"] for row in dlrm.sizes(model)}
    return {
        "world_size": dist.get_world_size(),
        "device": device.type,
        "losses": losses,
        "step_ms": statistics.median(times) * 1e3,
        # of rank 0, a step
        "sent_bytes": {w: sent_bytes[w] // steps for w in ("ids", "embeddings", "gradients")},
        "table_bytes": parameter_bytes["sparse_arch"],
    }


# --- the clock, on GPUs --------------------------------------------------------------------------------------


def slowest_us(call, n_calls=20, n_rounds=5, alone=False):
    """Median µs of a call that all ranks make together, on the slowest rank, and the spread of the rounds.

    alone: only this rank calls, and none waits for another.
    """
    times = []
    for _ in range(n_rounds + 1):  # one to warm up
        if not alone:
            dist.barrier()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        for _ in range(n_calls):
            call()
        end_event.record()
        torch.cuda.synchronize()
        times.append(start_event.elapsed_time(end_event) / n_calls * 1e3)
    slowest = torch.tensor(times[1:], device="cuda")
    if not alone:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    low, median, high = slowest.quantile(slowest.new_tensor([0.2, 0.5, 0.8])).tolist()
    return {"µs": round(median, 1), "p20": round(low, 1), "p80": round(high, 1)}


def exchange_row(mib):
    """An all-to-all of a tensor of that many MiB on each rank: MB that leave a rank, µs, GB/s.

    GB/s is what NCCL's own tests call bus bandwidth: bytes that leave a GPU in a second.
    """
    world_size = dist.get_world_size()
    share = mib * 2**18 // world_size  # float32
    x = torch.ones(share * world_size, device="cuda")
    y = torch.empty_like(x)
    time = slowest_us(lambda: dist.all_to_all_single(y, x))
    left = share * (world_size - 1) * 4
    return {
        "GPUs": world_size,
        "MiB": mib,
        "MB sent": left / 1e6,
        **time,
        "GB/s": round(left / time["µs"] / 1e3, 1),
    }


def step_row(device, b, fused, alone):
    """A training step with b rows on each rank, full tables of which no rank has more than its share.

    alone: of this rank without the others, which has all tables.
    """
    torch.manual_seed(0)
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    with device:
        hashing = dlrm.ModulusHash(criteo.CARDINALITIES)
        model = dlrm.DLRM(hashing, dlrm.LARGE, sparse_gradients=True)
    most = -(-len(criteo.CARDINALITIES) // world_size)
    model = ShardedDLRM(model, device, most, fused, (rank, world_size))
    optimizer = RowSGD(model.parameters(), 1e-4)
    batch = batch_of(b * world_size, device).rows(slice(rank, None, world_size))
    batch = type(batch)(*(t.contiguous() for t in batch))
    sent_bytes.clear()
    loss = train_step(model, optimizer, batch)
    sent = sum(sent_bytes.values())
    if not loss.isfinite():
        raise RuntimeError(f"the loss is {loss.item()}")
    time = slowest_us(lambda: train_step(model, optimizer, batch), n_calls=10, alone=alone)
    rate = world_size * b / time["µs"]
    row = {"GPUs": world_size, "rows a GPU": b, "parts": "fused" if fused else "eager"}
    return row | time | {"million rows/s": round(rate, 2), "MB sent": round(sent / 1e6, 1)}


def measure_here(device, batch_sizes):
    """{exchange, steps}: rows of all-to-alls, and of steps of all ranks together and of rank 0 alone."""
    world_size = dist.get_world_size()
    if device.type != "cuda":
        raise RuntimeError(
            f"a time needs NCCL and a GPU for each of {world_size} ranks; there are "
            f"{torch.cuda.device_count()} GPUs, and {'' if dist.is_nccl_available() else 'no '}NCCL"
        )
    cases = [(b, fused) for b in batch_sizes for fused in (False, True)]
    exchange, steps = [], []
    if world_size > 1:
        exchange = [exchange_row(mib) for mib in (1, 8, 64, 512)]
        steps = [step_row(device, *case, alone=False) for case in cases]
    if dist.get_rank() == 0:
        steps += [step_row(device, *case, alone=True) for case in cases]
    dist.barrier()
    return {"exchange": exchange, "steps": steps}


# --- all ranks -----------------------------------------------------------------------------------------------


def measure(world_size, *batch_sizes):
    """What measure_here gives for that many GPUs of this machine, and for one of them."""
    return launch(world_size, 1, 512, "--measure", *batch_sizes)


def launch(world_size, steps=20, batch_size=512, *options, timeout_s=180):
    """Start that many processes of this module by torchrun; returns the results of rank 0.

    Raises RuntimeError with the error of the rank that failed first, or when they take longer than timeout_s;
    none is left running.
    """
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    what = ["-m", "lib.dlrm.sharded", "--steps", str(steps), "--batch-size", str(batch_size)]
    command = [sys.executable, *run, *what, *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # from the project's folder, so that each finds lib, installed or not
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes) as job:
        try:
            printed, log = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise RuntimeError(f"{world_size} ranks took longer than {timeout_s} s") from None
    if job.returncode:
        raise RuntimeError(f"a rank failed: {_root_cause(log)}")
    return json.loads(printed.splitlines()[-1])


def _root_cause(log):
    """The error in torchrun's summary, which is that of the rank that failed first."""
    summary = log.rpartition("Root Cause")[2]
    errors = re.findall(r"(?m)^\s*(\w*(?:Error|Exception): .*)", summary)
    return errors[-1] if errors else log[-500:]


@record  # the summary of torchrun then has the traceback
def main(argv=None):
    """The program of one rank; rank 0 prints what came of it, as JSON."""
    parser = argparse.ArgumentParser(prog="torchrun -m lib.dlrm.sharded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=512, help="of all ranks together")
    parser.add_argument("--tables", type=int, default=len(criteo.CARDINALITIES))
    parser.add_argument("--fused", action="store_true", help="lookups and interaction of lib.ops")
    parser.add_argument("--die-at", type=int, help="the step at which the last rank leaves")
    what = "time all-to-alls and steps with so many rows a rank"
    parser.add_argument("--measure", type=int, nargs="+", metavar="ROWS", help=what)
    options = parser.parse_args(argv)
    device = start()
    if options.measure:
        result = measure_here(device, options.measure)
    else:
        how = options.steps, options.batch_size, options.tables, options.fused, options.die_at
        result = train_here(device, *how)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # All is done. A thread of gloo that outlives Python now and then ends a rank by abort on its way out.
    os._exit(0)
