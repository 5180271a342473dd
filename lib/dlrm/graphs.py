"""Training steps with sparse gradients, each as one CUDA graph: do the kernels gain, or the rows left alone?

Versions  one table: plain PyTorch, the 26 tables one below the other in one weight; one table, compiled: the
          same by torch.compile for the batch size; ours: embedding_hash and interaction.
Update    sharded.RowSGD, which visits only the rows that the batch used. It is in the graph.
Rule      checked first: three steps on small tables leave the logits as eager PyTorch's dense gradients do.
Data      as in lib.dlrm.bench.

    python -m lib.dlrm.graphs      a minute or so; saves data/results/<gpu>/dlrm_graphs.json
"""

from lib import machine
from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm.bench import BATCHES, OneTable
from lib.dlrm.sharded import RowSGD, ShardedDLRM
from lib.dlrm.train import batch_of, default_model, train_step
from lib.measure import bench
from lib.measure.check import CheckError
from lib.recorded import results

import torch

VERSIONS = ("one table", "one table, compiled", "ours")
SOURCES = tuple(f"lib/{name}.py" for name in ("dlrm/graphs", "dlrm/sharded", "dlrm/model"))
SOURCES += ("lib/ops/embedding_hash.py", "lib/ops/interaction.py")
_CLOSE = 1e-4  # of the largest logit; float32, sums in another order


def version_of(version, model):
    """A dlrm.DLRM changed into one of VERSIONS; ValueError for another."""
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if version == "ours":
        return ShardedDLRM(model, machine.device(), fused=True, ranks=(0, 1))
    model.sparse_arch = OneTable(model.sparse_arch, sparse_gradients=True)
    if version.endswith("compiled"):
        model.compile(dynamic=False)
    return model


def small_model(limit):
    """A DLRM with small tables; each call makes the same one."""
    torch.manual_seed(0)
    with machine.device():
        return dlrm.DLRM(dlrm.ModulusHash(criteo.capped(limit=limit)), dlrm.SMALL)


def expect_same(version, limit=10_000, n_rows=2048, learning_rate=0.1):
    """CheckError unless three steps of a version leave the logits of eager PyTorch with dense gradients."""
    batch, logits = batch_of(n_rows, machine.device()), []
    for optimizer_of, model in (
        (torch.optim.SGD, small_model(limit)),
        (RowSGD, version_of(version, small_model(limit))),
    ):
        optimizer = optimizer_of(model.parameters(), learning_rate)
        for _ in range(3):
            train_step(model, optimizer, batch)
        with torch.no_grad():
            logits.append(model(batch.dense, batch.sparse))
    want, got = logits
    error = ((got - want).abs().max() / want.abs().max()).item()
    if not error <= _CLOSE:  # a NaN is not
        raise CheckError(f"{version}: logits are {error:.1e} of the largest away after three steps")


def as_graph(call):
    """A closure that replays the launches of `call` as one CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream()):  # compiles, allocates
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(version, n_rows):
    """A row: the time of one training step of a version, with tables of full size."""
    torch.compiler.reset()
    model = version_of(version, default_model(dlrm.LARGE))
    optimizer, batch = RowSGD(model.parameters(), 1e-4), batch_of(n_rows, machine.device())
    timing = bench.time_us(as_graph(lambda: train_step(model, optimizer, batch)))
    times = {"time_us": timing.median_us, "p20_us": timing.p20_us, "p80_us": timing.p80_us}
    return {"batch": n_rows, "version": version} | {k: round(us, 1) for k, us in times.items()}


def main():
    """Check, measure and save; prints one line per row."""
    if not machine.HAS_GPU:
        raise SystemExit("lib.dlrm.graphs needs a GPU; what one gave is in data/results")
    print(machine.stamp().line())
    for version in VERSIONS:
        expect_same(version)
    rows = []
    for n_rows in BATCHES:
        for version in VERSIONS:
            rows.append(measure(version, n_rows))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    print("saved", results.save("dlrm_graphs", rows, SOURCES).relative_to(results.ROOT))


if __name__ == "__main__":
    main()
