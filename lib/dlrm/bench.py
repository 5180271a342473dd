"""Time the DLRM with tables of full size on this GPU: eager, compiled and as CUDA graphs, at three batch sizes.

Passes    forward: logits, without gradients.  training: forward, loss, backward, update (SGD). Gradients of the
          tables are dense, as by default: as large as the tables, all zeros but for the rows of the batch.
Versions  eager; compiled: torch.compile for this batch size; CUDA graph: the same with mode="reduce-overhead".
          In training the loss is compiled with the model, the update is not. Two more versions of training
          have sparse gradients, which hold the rows of the batch alone (nn.Embedding(sparse=True)).
Rule      a version whose logits, loss or gradients differ from eager's is not timed: its row says why.
Data      rows of the course's sample, repeated where there are not enough; the same batch in every call.

    python -m lib.dlrm.bench [--batches 128 2048]      some minutes; saves data/results/<gpu>/dlrm*.json
"""

import argparse
import gc

from lib import machine
from lib.dlrm import criteo
from lib.dlrm import model as dlrm
from lib.dlrm.train import ParquetBatches, default_model
from lib.measure import bench
from lib.measure.check import CheckError
from lib.profiling import events_of, profiled
from lib.profiling.cost import utilisation
from lib.profiling.events import trimmed
from lib.profiling.memory import memory_of
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
SOURCES = ("lib/dlrm/model.py", "lib/dlrm/bench.py")
_LEARNING_RATE = 1e-4
_CLOSE = 1e-3  # of the largest value; in float32, sums in another order differ by 1e-6 or so


def batch_of(size, device):
    """A criteo.Batch of `size` rows of the sample, repeated where it has fewer."""
    rows = next(ParquetBatches(criteo.SAMPLE_TRAIN, size, device).in_order())
    which = torch.arange(size, device=device) % len(rows.labels)
    return rows.rows(which)


# --- versions ------------------------------------------------------------------------------------------------


class WithLoss(torch.nn.Module):
    """A DLRM and its loss: dense, sparse, labels → the mean loss of the batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, sparse, labels):
        return F.binary_cross_entropy_with_logits(self.model(dense, sparse), labels)


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
    small = {n: p.grad for n, p in model.named_parameters() if p.numel() < 1e6}
    tensors = {"loss": loss.detach().clone()}
    dense = {n: g.to_dense() if g.is_sparse else g.clone() for n, g in small.items()}
    tensors |= {f"gradient of {n}": g for n, g in dense.items()}
    model.zero_grad(set_to_none=True)
    return tensors


def expect_close(got, want):
    """CheckError unless every tensor of `got` is that of `want`, within a thousandth of its largest value."""
    for name in want:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max().clamp_min(1e-12)
        if not error.item() <= _CLOSE:  # a NaN is not
            raise CheckError(f"{name}: {error.item():.1e} of the largest value away from eager's")


# --- measuring -----------------------------------------------------------------------------------------------


def _fresh():
    """Drop compiled code and its CUDA graphs, and return unused memory to the GPU."""
    torch._dynamo.reset()
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
    _give_back()
    before = torch.cuda.memory_reserved()
    variant = version_of(version, module)
    if variant is not module:
        expect_close(results_of(what, variant, model, batch), want)
    call = forward_call(variant, batch)
    if what == "training":
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
    """A row that a reader without a GPU can draw again: the timeline of a forward pass, or a step's memory."""
    row = {"pass": what, "version": version}
    if what == "forward":
        return {**row, "timeline": trimmed(events_of(profiled(call)), most=120)}
    return {**row, "memory": memory_of(events_of(profiled(call, memory=True)), most=120)}


# A replayed CUDA graph allocates nothing that a profile of memory could see.
_PICTURES = {
    ("forward", "eager"),
    ("forward", "compiled"),
    ("forward", "CUDA graph"),
    ("training", "eager"),
    ("training", "compiled"),
}


def case(what, version, size):
    """(row, picture or None) of one pass, version and batch size; the row's note reports a failure."""
    row, picture_row = {"batch": size, "pass": what, "version": version}, None
    # One model at a time: its tables take 2.2 GB, and their gradients as much again.
    model = default_model(dlrm.LARGE, sparse_gradients="sparse" in version)
    try:
        row, call = measure(what, version, model, batch_of(size, machine.device()))
        if size == PICTURED and (what, version) in _PICTURES:
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

    name: 'dlrm' for the table, 'dlrm_pictures' for timelines and memory curves.
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
