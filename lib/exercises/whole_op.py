"""What checkers ask of a whole op besides values: bad input, frozen inputs, saved tensors. For capstones.

make(): new inputs on this machine's device; those that need a gradient are leaves.
"""

import itertools

from lib import machine
from lib.exercises import Wrong, case, expect
from lib.measure.check import check_against_float64

import torch


def expect_refusals(answer, bad):
    """Wrong unless each of bad, {what: arguments}, raises a TypeError or ValueError with a sentence."""
    for what, args in bad.items():
        try:
            answer(*args)
        except (TypeError, ValueError) as error:
            is_sentence = len(str(error).split()) >= 4
            expect(
                is_sentence, f"bad input, {what}: the error says {str(error)!r}; make it a sentence"
            )
        except Exception as error:
            raise Wrong(
                f"bad input, {what}: {type(error).__name__}; raise a TypeError or ValueError that says"
                " what is wrong"
            ) from None
        else:
            raise Wrong(f"bad input, {what}: is taken; raise an error that says what is wrong")


def expect_frozen(answer, eager, make, names, at):
    """Wrong where inputs that are frozen change the gradients of the others: all sets of one or two."""
    for frozen in itertools.chain(*(itertools.combinations(range(len(names)), n) for n in (1, 2))):
        inputs = make()
        for k in frozen:
            inputs[k].requires_grad_(False)
        what = " and ".join(names[k] for k in frozen)
        check_against_float64(answer, eager, *inputs, name=f"{at}, {what} frozen")


def expect_sums(answer, eager, make, at):
    """Wrong where a gradient that arrives with stride 0, that of a sum, makes a difference."""

    def sums(function):
        def summed(*args):
            results = function(*args)
            is_one = isinstance(results, torch.Tensor)
            return results.sum(0) if is_one else tuple(t.sum(0) for t in results)

        return summed

    at = f"{at}, the loss a sum, so that gradients arrive with stride 0"
    check_against_float64(sums(answer), sums(eager), *make(), name=at)


def expect_saved(answer, make, names):
    """Wrong where a tensor that is overwritten before backward changes a gradient in silence.

    names: of the inputs and of the results, which are a tensor or several.
    """
    for k, name in enumerate(names):
        leaves = make()
        tensors = [leaf * 1 for leaf in leaves]
        results = answer(*tensors)
        results = [results] if isinstance(results, torch.Tensor) else [*results]
        tensors += results
        dys = [torch.ones_like(t) for t in results]
        want = torch.autograd.grad(results, leaves, dys, retain_graph=True)
        try:
            with torch.no_grad():
                tensors[k].zero_()
            got = torch.autograd.grad(results, leaves, dys)
        except RuntimeError:
            continue
        same = all(torch.equal(a, b) for a, b in zip(got, want))
        expect(
            same,
            f"{name} was overwritten before backward, and other gradients came, without an error",
        )


def expect_float32_sums(sum_of, what):
    """Wrong unless sum_of(dy), the sum of dy's rows, is exact for whole numbers that cancel, in bfloat16.

    It is in float32, and not from parts that were rounded to 8 bits.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(128, 256, (600, 6), generator=generator)
    # the second half takes away what the first adds, 5 rows on, so that no part of it rounds as one before
    dy = torch.cat([half, -half.roll(5, 0)]).to(machine.device(), torch.bfloat16)
    at = "at shape (1200, 6), bfloat16, whole numbers whose sums are 0"
    with case(at):
        total = sum_of(dy)
    off = total.float().abs().max().item()
    expect(off < 1, f"{at}: {what} is off by {off:g}; keep sums in float32 until the last is done")
