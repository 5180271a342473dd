"""Time the DLRM with tables of full size on this GPU: eager, compiled and as CUDA graphs, at three batch sizes.

Passes    forward: logits, without gradients.  training: forward, loss, backward, update (SGD). Gradients of the
          tables are dense, as by default: as large as the tables, all zeros but for the rows of the batch.
          training, one table: the same, with the 26 tables one below the other in one weight.
Versions  eager; compiled: torch.compile for this batch size; CUDA graph: the same with mode="reduce-overhead".
          In training the loss is compiled with the model, the update is not. Two more versions of training
          have sparse gradients, which hold the rows of the batch alone (nn.Embedding(sparse=True)).
Rule      a version whose logits, loss or gradients differ from eager's is not timed: its row says why.
Data      rows of the course's sample, repeated where there are not enough; the same batch in every call.

    python -m lib.dlrm.bench [--batches 128 2048]      ten minutes or so; saves data/results/<gpu>/dlrm*.json
"""

import argparse
import gc

from lib import machine
from lib.dlrm import model as dlrm
from lib.dlrm.train import batch_of, default_model
from lib.measure import bench
from lib.measure.check import CheckError
from lib.profiling import events_of, profiled
from lib.profiling.cost import utilisation
from lib.profiling.events import trimmed
from lib.recorded import results

import torch
import torch.nn.functional as F
from tqdm import tqdm

BATCHES = (128, 2048, 65536)
PICTURED = 2048  # the batch size of the pictures
PASSES = {
    "forward": ("eager", "compiled", "CUDA graph"),
    "training": (
        "eager",
        "compiled",
        "CUDA graph",
        "eager, sparse gradients",
        "compiled, sparse gradients",
    ),
}
PASSES["training, one table"] = PASSES["training"]
SOURCES = ("lib/dlrm/model.py", "lib/dlrm/bench.py")
_LEARNING_RATE = 1e-4
_CLOSE = 1e-3  # of the largest value; in float32, sums in another order differ by 1e-6 or so


# --- versions ------------------------------------------------------------------------------------------------


class WithLoss(torch.nn.Module):
    """A DLRM and its loss: dense, sparse, labels → the mean loss of the batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, sparse, labels):
        return F.binary_cross_entropy_with_logits(self.model(dense, sparse), labels)


class OneTable(torch.nn.Module):
    """A dlrm.SparseArch as one table: row r of table k is row r + start of k."""

    def __init__(self, sparse_arch, sparse_gradients=False):
        super().__init__()
        weights = [table.weight.detach() for table in sparse_arch.tables]
        self.sparse_gradients, self.num_rows = sparse_gradients, [len(w) for w in weights]
        self.tables = range(len(weights))  # a DLRM asks how many there are
        self.weight = torch.nn.Parameter(torch.cat(weights))
        sizes = torch.tensor(self.num_rows, device=self.weight.device)
        self.register_buffer("starts", sizes.cumsum(0) - sizes)

    def forward(self, rows):
        return F.embedding(rows + self.starts, self.weight, sparse=self.sparse_gradients)


def version_of(version, module):
    """`module` in one of the versions of PASSES."""
    if version.startswith("eager"):
        return module
    # dynamic=False: each batch size gets its own code, the fastest that torch.compile can write for it
    mode = "reduce-overhead" if version == "CUDA graph" else None
    return torch.compile(module, dynamic=False, mode=mode)


def forward_call(module, batch):
    """A closure to time: one forward pass of a DLRM, or of a version of it; it returns the logits."""

    def forward():
        with torch.no_grad():
            return module(batch.dense, batch.sparse)

    return forward


def training_call(with_loss, parameters, batch):
    """A closure to time: one training step with a WithLoss, or a version of it; it returns the loss."""
    optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE)

    def step():
        loss = with_loss(*batch)
        loss.backward()
        optimizer.step()
        # At the end, so that the gradients count as memory of the step: between steps there are none.
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# --- checks --------------------------------------------------------------------------------------------------


def results_of(what, module, model, batch):
    """{name: tensor} to compare: logits, in training loss and gradients; no update is made.

    Only gradients of tensors below a million elements: the MLPs, and the tables that are not large.
    """
    if what == "forward":
        return {"logits": forward_call(module, batch)().clone()}
    loss = module(*batch)
    loss.backward()
    tensors = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        gradients = {name: parameter.grad}
        if isinstance(model.sparse_arch, OneTable) and parameter is model.sparse_arch.weight:
            gradients = _of_each_table(parameter.grad, model.sparse_arch.num_rows)
        small = {n: g for n, g in gradients.items() if g.numel() < 1e6}
        dense = {n: g.to_dense() if g.is_sparse else g.clone() for n, g in small.items()}
        tensors |= {f"gradient of {n}": g for n, g in dense.items()}
    model.zero_grad(set_to_none=True)
    return tensors


def _of_each_table(gradient, num_rows):
    """The gradient of one table as those of the tables in it, named as a dlrm.SparseArch names them."""
    parts = (gradient.to_dense() if gradient.is_sparse else gradient).split(num_rows)
    return {f"sparse_arch.tables.{k}.weight": part for k, part in enumerate(parts)}


def expect_close(got, want):
    """CheckError unless every tensor of `got` is that of `want`, within a thousandth of its largest value."""
    for name in want:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-12)
        if not error.item() <= _CLOSE:  # a NaN is not
            raise CheckError(f"{name}: {error.item():.1e} of the largest value away from eager's")


# --- measuring -----------------------------------------------------------------------------------------------


def _fresh():
    """Drop compiled code and its CUDA graphs, and return unused memory to the GPU."""
    torch.compiler.reset()
    _give_back()


def _give_back():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(what, version, model, batch):
    """(row, call) of a version, which is checked and then timed. CheckError where it is wrong.

    time_us, p20_us, p80_us   between two events on the GPU, waits for the host included
    launches, kernels         what the host launched, a CUDA graph being one; kernels that then ran
    busy_pct                  share of a profiled call in which the GPU works: the profiler slows the host down
    peak_mib                  the most that a call allocates on top of what was in use
    held_mib                  stays allocated between calls, as the memory of a CUDA graph does
    """
    row = {"batch": len(batch.labels), "pass": what, "version": version, "note": ""}
    module = model if what == "forward" else WithLoss(model)
    _fresh()
    want = results_of(what, module, model, batch)  # cuBLAS takes its workspace here
    if one_table := what == "training, one table":
        model.sparse_arch = OneTable(model.sparse_arch, "sparse" in version)
    _give_back()
    before = torch.cuda.memory_reserved()
    variant = version_of(version, module)
    if variant is not module or one_table:
        expect_close(results_of(what, variant, model, batch), want)
    call = forward_call(variant, batch)
    if what != "forward":
        call = training_call(variant, model.parameters(), batch)
    for _ in range(3):  # records the CUDA graph, replays it
        call()
    _give_back()
    row["held_mib"] = round((torch.cuda.memory_reserved() - before) / 2**20, 1)
    row |= _timed(call)
    if version == "CUDA graph" and not row["graph_launches"]:
        row["note"] = "Inductor made no CUDA graph of this"
    return row, call


def _timed(call):
    events = events_of(profiled(call))
    names = [e["name"] for e in events if e["kind"] == "runtime"]
    n_graphs = sum("GraphLaunch" in name for name in names)
    timing = bench.time_us(call)
    return {
        "time_us": round(timing.median_us, 1),
        "p20_us": round(timing.p20_us, 1),
        "p80_us": round(timing.p80_us, 1),
        "launches": sum("LaunchKernel" in name for name in names) + n_graphs,
        "graph_launches": n_graphs,
        "kernels": sum(e["kind"] == "kernel" for e in events),
        "busy_pct": utilisation(events),
        "peak_mib": round(bench.peak_mib(call), 1),
    }


def picture(what, version, call):
    """A row that a reader without a GPU can draw again: the timeline of a pass."""
    timeline = trimmed(events_of(profiled(call)), most=120)
    return {"pass": what, "version": version, "timeline": timeline}


def case(what, version, size):
    """(row, picture or None) of one pass, version and batch size; the row's note reports a failure."""
    row, picture_row = {"batch": size, "pass": what, "version": version}, None
    # One model at a time: its tables take 2.2 GB, and their gradients as much again.
    model = default_model(dlrm.LARGE, sparse_gradients="sparse" in version)
    try:
        row, call = measure(what, version, model, batch_of(size, machine.device()))
        if size == PICTURED and what == "forward":
            picture_row = picture(what, version, call)
    except Exception as error:  # of any kind: the other versions are still to be measured
        message = next(iter(str(error).splitlines()), "")[:200]
        row["note"] = f"✘ {type(error).__name__}: {message}"
    return row, picture_row


def run(batches=BATCHES):
    """(rows, pictures) of every pass, version and batch size on this GPU, with a progress bar."""
    rows, pictures = [], []
    cases = [(what, v, n) for what, versions in PASSES.items() for v in versions for n in batches]
    with tqdm(cases, unit="case", desc="dlrm") as progress:
        for what, version, size in progress:
            progress.set_postfix_str(f"{what} {version} {size}")
            row, picture_row = case(what, version, size)
            rows.append(row)
            pictures += [picture_row] if picture_row else []
            _fresh()
    return rows, pictures


# --- the record ----------------------------------------------------------------------------------------------


def recorded(name="dlrm"):
    """(rows, where) of the record of the reference GPU: [] and 'not recorded yet' when there is none.

    name: 'dlrm' for the table, 'dlrm_pictures' for timelines.
    """
    record = results.load(name)
    if record is None:
        return [], results.NOT_RECORDED
    old = ", before the code last changed" if results.is_stale(record) else ""
    return record["rows"], results.where(record) + old


def main(argv=None):
    """Measure and save; prints one line per row."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.dlrm.bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="other sizes: nothing is saved"
    )
    options = parser.parse_args(argv)
    if not machine.HAS_GPU:
        raise SystemExit(
            "dlrm_bench needs a GPU, and torch sees none; the recorded results are in data/results"
        )
    print(machine.stamp().line())
    rows, pictures = run(tuple(options.batches))
    for row in rows:
        print(row)
    if tuple(options.batches) == BATCHES:
        for name, content in (("dlrm", rows), ("dlrm_pictures", pictures)):
            print("saved", results.save(name, content, SOURCES).relative_to(results.ROOT))


if __name__ == "__main__":
    main()
