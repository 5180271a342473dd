"""Whole models in training: eager, compiled, with the course's ops one by one, and what their bytes promise.

Models    Llama 3 8B with 4 of its 32 layers, 4 texts of 4096 tokens, and GPT-2 small, 16 texts of 1024;
          bfloat16, AdamW.
Step      forward, backward, update, gradients set to None; after three ten are timed, each between two events.
          Learning rate 0: an update takes its time and changes nothing, so all versions start where eager did.
          Tokens per second of the median step; peak: the most that PyTorch had allocated, parameters included.
Versions  eager; the same with AdamW's update by PyTorch's foreach kernels, for all others use its fused one;
          eager with one op fused, and ours without one; ours; compiled; compiled with ours; Liger's
          functions where it is installed. All share their parameters; a version whose loss differs from
          eager's is not timed.
Promise   the bill: bytes at the copy rate or FLOPs at the rate of a large product, whichever takes longer,
          summed over the ops of a step; of the update each parameter, gradient and two moments read, three
          written.
Learning  small models, 200 steps of eager and of ours on text of a Markov chain: the same losses.

    python -m lib.models.train [--quick]       on a GPU; saves data/results/<gpu>/model.json
"""

import argparse
import gc
import itertools
import statistics
import types
from typing import NamedTuple

from lib import machine
from lib.measure import bench, roofline
from lib.models import gpt2, llama
from lib.models.text import Chain
from lib.nogpu.one_call import as_on_gpu
from lib.profiling.bill import Counter, n_bytes
from lib.recorded import results

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

SOURCES = tuple(f"lib/models/{name}.py" for name in ("llama", "gpt2", "text", "train"))
FOREACH, LIGER = "eager, AdamW foreach", "Liger"  # versions
_CLOSE = 0.01  # relative; two kernels round a loss in bfloat16 differently


class Case(NamedTuple):
    """A model in training: its module and class, the parts that it uses, rows and columns of its ids."""

    module: types.ModuleType
    model: type
    parts: tuple
    n_texts: int
    n_tokens: int


CASES = {
    "Llama": Case(llama, llama.Llama, ("norm", "rope", "attention", "glu", "loss"), 4, 4096),
    "GPT-2": Case(gpt2, gpt2.GPT2, ("norm", "attention", "up", "loss"), 16, 1024),
}


def versions(case):
    """{name: (parts, whether torch.compile gets the model)}."""
    ours = {name: case.module.OURS[name] for name in case.parts}
    some = {f"eager + {name}": {name: part} for name, part in ours.items()}
    some |= {f"ours - {name}": {n: p for n, p in ours.items() if n != name} for name in ours}
    named = {"eager": ({}, False), FOREACH: ({}, False)}
    named |= {name: (parts, False) for name, parts in some.items()}
    named |= {"ours": (ours, False), "compiled": ({}, True), "compiled + ours": (ours, True)}
    if case.module is llama and (parts := liger()):
        named[LIGER] = parts, False
    return {
        name: (case.module.EAGER | parts, compiled) for name, (parts, compiled) in named.items()
    }


def liger():
    """Liger's parts, {} where it is not installed."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}

    def norm(x, residual, weight):
        residual = torch.zeros_like(x) if residual is None else residual
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)

    def rope(q, k, cos, sin):
        cos, sin = (torch.cat([t, t], dim=-1)[None].to(q.dtype) for t in (cos, sin))
        return LigerRopeFunction.apply(q, k, cos, sin)

    def glu(x, layer):
        gate, up = layer(x).chunk(2, dim=-1)
        return LigerSiLUMulFunction.apply(gate.contiguous(), up.contiguous())

    def loss(x, weight, labels):
        return LigerFusedLinearCrossEntropyFunction.apply(x, weight, labels)[0]

    return {"norm": norm, "rope": rope, "glu": glu, "loss": loss}


# --- a step, on a GPU and on paper ---------------------------------------------------------------------------


def step_of(model, optimizer, ids, labels):
    """A closure: one step; it returns the loss."""

    def step():
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def promised_us(case, parts):
    """µs of a step at least, by the bill of these parts. Nothing is computed, and no memory is needed."""
    top, one_thread = roofline.ceilings(), torch.autograd.set_multithreading_enabled
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), torch.device(machine.device()), as_on_gpu(), one_thread(False):
            model = case.model(parts=parts)
            ids = torch.zeros(case.n_texts, case.n_tokens, dtype=torch.int64)
            with Counter() as counter:
                model(ids, ids).backward()
            n = n_bytes([*model.parameters()])
    finally:
        torch.set_default_dtype(default)
    rows = [*counter.rows, ("AdamW", 7 * n, 0)]
    return sum(top.attainable_us(moved, flops, "bfloat16") for _, moved, flops in rows)


def on_paper(case):
    """{version: promised_us}. No bill sees what a compiler fuses, or Liger's loss, which reads a value."""
    return {
        name: promised_us(case, parts)
        for name, (parts, compiled) in versions(case).items()
        if not compiled and name not in (FOREACH, LIGER)
    }


# --- measurements --------------------------------------------------------------------------------------------


def measure(name, n_steps=10):
    """Rows of {"model", "version", "step, ms", "tokens/s", "peak, GB", "promised, ms", "note"}. Needs a GPU."""
    case, rows, first = CASES[name], [], None
    promised = on_paper(case)
    with torch.device(machine.device()):
        model = case.model().bfloat16()
        text = torch.randint(model.sizes.n_words, (case.n_texts, case.n_tokens + 1))
    ids, labels = text[:, :-1], text[:, 1:]
    progress = tqdm(versions(case).items(), desc=name)
    for version, (parts, compiled) in progress:
        progress.set_postfix_str(version)
        model.parts = parts
        with torch.no_grad():
            loss = model(ids, labels).item()
        first = loss if first is None else first
        row = {"model": name, "version": version, "note": ""}
        if abs(loss - first) > _CLOSE * first:
            row["note"] = f"✘ not timed: its loss is {loss:.4f}, eager's {first:.4f}"
        else:
            run = torch.compile(model, dynamic=False) if compiled else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=version != FOREACH)
            if version in promised:
                row["promised, ms"] = promised[version] / 1e3
            try:
                row |= _timed(step_of(run, optimizer, ids, labels), n_steps, ids.numel())
            except torch.OutOfMemoryError:
                row["note"] = "✘ not timed: out of memory"
        progress.write(str(row))
        rows.append(row)
        model.zero_grad(set_to_none=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _timed(step, n_steps, n_tokens):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {"step, ms": ms, "tokens/s": 1e3 * n_tokens / ms, "peak, GB": peak}


def learn(case, parts, n_steps=200, n_texts=16, seed=0):
    """The losses of a small model's steps, in float32 on this machine; and the chain, which tells the least."""
    torch.manual_seed(seed)
    sizes = case.module.SMALL
    chain, model = Chain(sizes.n_words, seed=seed), case.model(sizes, parts).to(machine.device())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(n_steps):
        text = chain.draw(n_texts, sizes.longest + 1).to(machine.device())
        losses.append(step_of(model, optimizer, text[:, :-1], text[:, 1:])().item())
    return losses, chain


def main(argv=None):
    """Measure and save; prints one line per row."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.models.train", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="three steps each, saved nowhere")
    options, rows = parser.parse_args(argv), []
    if not machine.HAS_GPU:
        where = "what was recorded is in data/results"
        raise SystemExit(f"whole models need a GPU, and torch sees none; {where}")
    print(machine.stamp().line())
    for name, case in CASES.items():
        with bench.really_compiled():
            rows += measure(name, 3 if options.quick else 10)
        eager, ours = (learn(case, parts)[0] for parts in (case.module.EAGER, case.module.OURS))
        apart = max(abs(a - b) for a, b in zip(eager, ours))
        rows.append({"model": name, "version": "learning", "losses": eager, "apart": apart})
        print(f"{name}, learning: losses of eager and ours at most {apart:.1e} apart")
    if not options.quick:
        print("saved", results.save("model", rows, SOURCES).relative_to(results.ROOT))


if __name__ == "__main__":
    main()
