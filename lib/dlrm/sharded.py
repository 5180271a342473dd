"""DLRM on several processes: each has all MLPs, its share of the rows, and some of the tables.

Tables    each table is on one rank: the largest first, to the rank that has the fewest rows so far (`place`).
Forward   the ids of my rows go to the ranks that own the tables, their embeddings come back: two all-to-alls.
Backward  the gradients of the embeddings go to the owners: a third. Those of the MLPs are averaged by DDP.
Equal to  one process with the whole batch. Its loss is the mean of the ranks' losses, so the gradients that
          reach a table from all ranks are divided by the number of ranks.
Backend   NCCL with a GPU for each rank, else gloo on the CPU.

    torchrun --standalone --nproc-per-node 2 -m lib.dlrm.sharded [--steps 20]
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

from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm.bench import batch_of
from lib.dlrm.train import train_step

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 0.5
TIMEOUT_S = 60  # how long a rank waits for a missing one

sent_bytes = collections.Counter()  # what this rank has sent to others: ids, embeddings, gradients


def place(num_rows, world_size):
    """The rank of each table, so that ranks have about as many rows: the largest table first.

    num_rows: rows of each table. At most 4/3 of the best possible largest share (Graham, 1969).
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    load, ranks = [0] * world_size, [0] * len(num_rows)
    for table in sorted(range(len(num_rows)), key=lambda k: -num_rows[k]):
        ranks[table] = load.index(min(load))
        load[ranks[table]] += num_rows[table]
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


class ShardedSparseArch(nn.Module):
    """SparseArch whose tables are spread over the ranks: rows (b, T) of my batch → embeddings (b, T, D).

    sparse_arch: the whole SparseArch, equal on all ranks; tables of other ranks are dropped.
    All ranks have to call with the same b.
    """

    def __init__(self, sparse_arch):
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        owners = place([table.num_embeddings for table in sparse_arch.tables], world_size)
        by_owner = sorted(range(len(owners)), key=lambda table: (owners[table], table))
        self.register_buffer("by_owner", torch.tensor(by_owner), persistent=False)
        self.register_buffer("back", torch.tensor(by_owner).argsort(), persistent=False)
        self.n_owned = [owners.count(r) for r in range(world_size)]
        self.tables = nn.ModuleList(
            sparse_arch.tables[k] for k in by_owner if owners[k] == rank
        )  # may be none
        self.dim = sparse_arch.tables[0].embedding_dim

    def forward(self, rows):
        b, n_mine = rows.shape[0], len(self.tables)
        asked = rows.T[self.by_owner].flatten()  # (T, b), the first rank's tables first
        mine = _all_to_all(
            asked, [n * b for n in self.n_owned], [n_mine * b] * len(self.n_owned), "ids"
        )
        ids = mine.view(len(self.n_owned), n_mine, b)  # from rank, table, row
        found = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        embedded = torch.stack(found, 1) if found else self._nothing(len(self.n_owned), b)
        answers = _Exchange.apply(
            embedded.flatten(),
            [n_mine * b * self.dim] * len(self.n_owned),
            [n * b * self.dim for n in self.n_owned],
        )
        return answers.view(-1, b, self.dim)[self.back].transpose(0, 1)

    def _nothing(self, world_size, b):
        return torch.empty(world_size, 0, b, self.dim, device=self.back.device, requires_grad=True)


class ShardedDLRM(nn.Module):
    """A DLRM that is equal on all ranks, spread over them: dense (b, 13), sparse (b, T) → logits (b,)."""

    def __init__(self, model, device):
        super().__init__()
        self.hashing, self.interaction = model.hashing.to(device), model.interaction.to(device)
        # Spread first, moved then: no device ever holds the tables of another.
        self.sparse_arch = ShardedSparseArch(model.sparse_arch).to(device)
        self.dense_arch = DistributedDataParallel(model.dense_arch.to(device))
        self.prediction = DistributedDataParallel(model.prediction.to(device))

    def forward(self, dense, sparse):
        embedded = self.sparse_arch(self.hashing(sparse))
        return self.prediction(self.interaction(self.dense_arch(dense), embedded))


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
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # alone, without torchrun, there is nobody to meet
    how = {} if "MASTER_PORT" in os.environ else {"store": dist.HashStore()}
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=TIMEOUT_S), **how,
    )  # fmt: skip
    return device


def small_model(n_tables):
    """The DLRM that every rank begins with: the first tables of Criteo, 10,000 rows at most."""
    torch.manual_seed(0)
    return dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=10_000)[:n_tables]), dlrm.SMALL)


def train_here(steps, batch_size, n_tables, die_at=None):
    """Train on this rank. Returns the results as a dictionary; its losses are those of all rows."""
    device = start()
    model = ShardedDLRM(small_model(n_tables), device)
    # Not Adagrad: it takes no notice of the size of gradients, nor of a factor that is missing from them.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
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
        "sent_bytes": {what: n // steps for what, n in sent_bytes.items()},  # of rank 0, a step
        "table_bytes": parameter_bytes["sparse_arch"],
    }


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
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as job:
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
    parser.add_argument("--die-at", type=int, help="the step at which the last rank leaves")
    options = parser.parse_args(argv)
    result = train_here(options.steps, options.batch_size, options.tables, options.die_at)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
