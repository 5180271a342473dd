"""python -m lib.tests.ops.mutants [op] [--jobs 2] [--write]: a line each. Exit status 1 if one is alive."""

import argparse
import copy
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from lib import machine
from lib.tests.ops.mutants import KILLERS, NAMES, killers, mutants_of, what_kills


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m lib.tests.ops.mutants", description=__doc__)
    parser.add_argument(
        "op", nargs="?", choices=NAMES, help="one op; default: all that have mutants"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help=f"keep what kills in {KILLERS.name}")
    options = parser.parse_args(argv)
    if machine.HAS_GPU:
        raise SystemExit(
            "a mutant may write anywhere: run this with CUDA_VISIBLE_DEVICES= (the interpreter)"
        )
    tasks = [(n, m) for n in ([options.op] if options.op else NAMES) for m in mutants_of(n)]
    # what is not run stays; mutants that are no longer there go
    alive, killed_by = 0, copy.deepcopy(killers()) | {name: {} for name, _ in tasks}
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not live through a fork
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        for (name, mutant), killer in zip(tasks, pool.map(what_kills, *zip(*tasks))):
            alive += killer is None
            print(f"{name}: {'ALIVE ' if killer is None else 'killed'} {mutant.why}", flush=True)
            if killer:
                print(f"    by {killer[:140]}")
                killed_by[name][mutant.why] = killer.split(" | ")[0]
    if options.write:
        KILLERS.write_text(
            json.dumps(killed_by, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
