"""python -m lib.tests.ops.mutants [op]: one line per mutant. Exit status 1 if one is alive."""

import argparse
import sys

from lib import machine
from lib.tests.ops.mutants import NAMES, mutants_of, what_kills


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m lib.tests.ops.mutants", description=__doc__)
    parser.add_argument(
        "op", nargs="?", choices=NAMES, help="one op; default: all that have mutants"
    )
    chosen = parser.parse_args(argv).op
    if machine.HAS_GPU:
        raise SystemExit(
            "a mutant may write anywhere: run this with CUDA_VISIBLE_DEVICES= (the interpreter)"
        )
    alive = 0
    for name in [chosen] if chosen else NAMES:
        for mutant in mutants_of(name):
            killer = what_kills(name, mutant)
            alive += killer is None
            print(f"{name}: {'ALIVE ' if killer is None else 'killed'} {mutant.why}", flush=True)
            if killer:
                print(f"    by {killer[:140]}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
