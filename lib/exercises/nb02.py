"""Exercises of notebook 02: measure time."""

from lib.exercises import Wrong, a_number, attempted, case, exercise, expect, expect_number
from lib.measure import cheats
from lib.measure.virtual_gpu import VirtualGPU

import torch


def _expect_bool(got, want, what):
    attempted(got)
    kind = f"{type(got).__module__}.{type(got).__name__}".removeprefix("builtins.")
    expect(isinstance(got, bool), f"{what}: should be True or False, a Python bool, got {kind}")
    expect(got == want, f"{what}: should be {want}, got {got}")


# --- 02.1 ----------------------------------------------------------------------------------------------

_STEADY = [100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8, 100.1, 99.9, 100.3]
_PAIRS = (
    ("three runs each", [100.0, 101.0, 99.0], [90.0, 91.0, 89.0], False),
    ("ten runs of A and nine of B, each shorter", _STEADY, [t - 10 for t in _STEADY[:9]], False),
    ("nine runs of A and ten of B, each shorter", _STEADY[:9], [t - 10 for t in _STEADY], False),
    ("three runs of A and thirty of B, each shorter", _STEADY[:3], [85.0] * 30, False),
    ("thirty runs of A and three of B, each shorter", _STEADY * 3, [85.0, 86.0, 84.0], False),
    ("ten clearly shorter runs", _STEADY, [t - 10 for t in _STEADY], True),
    ("ten clearly longer runs", _STEADY, [t + 10 for t in _STEADY], False),
    (
        "unsorted runs, B shorter in six of ten",
        _STEADY,
        [70.0, 130.0, 70.0, 130.0, 70.0, 130.0, 70.0, 130.0, 70.0, 70.0],
        False,
    ),
    ("the same runs twice", _STEADY, _STEADY, False),
    (
        "the 80th percentile of B equal to the 20th of A, not below",
        [100.0] * 6 + [110.0] * 6,
        [90.0] * 6 + [100.0] * 6,
        False,
    ),
    ("A with one run of 900 µs, B without", [*_STEADY[:9], 900.0], list(_STEADY), False),
    ("B with one run of 900 µs, its others shorter", _STEADY, [80.0] * 11 + [900.0], True),
    ("B with one lucky run of 20 µs", _STEADY, [*_STEADY[:9], 20.0], False),
    (
        "two wide spreads, medians 3 µs apart",
        [float(t) for t in range(60, 141, 4)],
        [float(t) for t in range(57, 138, 4)],
        False,
    ),
    ("unsorted runs, B clearly shorter", _STEADY[::-1], [70.0, 99.0, *[85.0] * 10], True),
    (
        "a third of A at 80 µs, the rest at 100, and B at 90",
        [80.0, 100.0, 100.0] * 4,
        [90.0] * 12,
        False,
    ),
    (
        "a third of B at 110 µs, the rest at 90, and A at 100",
        _STEADY,
        [110.0, 90.0, 90.0] * 4,
        False,
    ),
    (
        "9 of 40 runs of A at 80 µs, the rest at 100, and B at 90",
        [80.0] * 9 + [100.0] * 31,
        [90.0] * 12,
        False,
    ),
    (
        "9 of 40 runs of B at 110 µs, the rest at 90, and A at 100",
        [100.0] * 12,
        [110.0] * 9 + [90.0] * 31,
        False,
    ),
)


@exercise("02.1", "Is B really faster than A?", minutes=5, level=1)
def _(really_faster):
    for what, a_us, b_us, want in _PAIRS:
        with case(what):
            _expect_bool(really_faster(list(a_us), list(b_us)), want, what)


# --- 02.2 ----------------------------------------------------------------------------------------------

# Elements that have to be read and written, for (M, N) inputs, and what to think of.
_ELEMENTS = {
    "gelu": (lambda m, n: 2 * m * n, "what is read, and what is written?"),
    "add": (lambda m, n: 3 * m * n, "how many tensors cross memory?"),
    "bias_relu": (lambda m, n: 2 * m * n + n, "how often must the bias be read?"),
    "row_sum": (lambda m, n: m * n + m, "how much is written?"),
    "softmax": (lambda m, n: 2 * m * n, "the least, not what eager moves"),
}


@exercise("02.2", "Effective bandwidth, counted honestly", minutes=8, level=1)
def _(bandwidth_gbps):
    for m, n, itemsize, time_us in ((2, 3, 4, 1.0), (64, 128, 2, 3.0), (4096, 781, 4, 20.0)):
        for op, (elements, idea) in _ELEMENTS.items():
            what = f"{op}, {m}×{n}, {itemsize} bytes an element, {time_us:g} µs ({idea}), in 10⁹ bytes/s"
            want = elements(m, n) * itemsize / time_us / 1e3
            with case(what):
                expect_number(bandwidth_gbps(op, m, n, itemsize, time_us), want, what)


# --- 02.3 ----------------------------------------------------------------------------------------------


def _time(time_us, us, what, rel, data=None, n_kernels=1, **options):
    gpu = VirtualGPU(**options)

    def run():
        for _ in range(n_kernels):
            gpu.launch("kernel", us, data=data)

    with case(what):
        got = a_number(time_us(run, gpu), what)
    want = n_kernels * us
    expect(abs(got - want) <= rel * want, f"{what}: should be about {want} µs, got {got:.1f}")


@exercise("02.3", "Write a stopwatch", minutes=12, level=2)
def _(time_us):
    _time(time_us, 1000, "a kernel of 1000 µs, compiled already", 0.05, compile_us=0)
    _time(time_us, 2000, "a kernel of 2000 µs, compiled already", 0.05, compile_us=0)
    _time(time_us, 1000, "a kernel of 1000 µs whose first launch compiles", 0.05, compile_us=50_000)
    what = (
        "a kernel of 10 µs, twice as long as its launch: events around it, on a device that is busy"
    )
    _time(time_us, 10, what, 0.1)
    what = "a kernel of 10 µs whose launch takes 20 µs: the host's clock is no part of the answer"
    _time(time_us, 10, what, 0.1, launch_us=20)
    what = "a run of three kernels of 30 µs: one event before the first, one behind the last"
    _time(time_us, 30, what, 0.05, n_kernels=3)
    what = "a kernel of 100 µs that reads the same data in each run: flush L2 before each"
    _time(time_us, 100, what, 0.05, data="x")
    for seed in range(40):
        what = f"a kernel of 1000 µs, some runs 4 to 8 times as long (noise, seed {seed})"
        _time(time_us, 1000, what, 0.05, noise=0.03, outliers=0.15, seed=seed)
    what = "a kernel of 1000 µs, half of its runs shorter and half longer (noise of 10 %)"
    _time(time_us, 1000, what, 0.06, noise=0.1)


# --- 02.4 ----------------------------------------------------------------------------------------------


def make_inputs(shape):
    """New numbers in a new tensor, with NaN, infinity and ±20 where there is room."""
    _calls.append(shape)
    return cheats.random_input(shape, seed=len(_calls))


_calls: list = []


def _cached_by_shape():
    cache = {}
    return lambda x: cache.setdefault(tuple(x.shape), cheats.gelu(x))


def _cached_by_address():
    cache = {}  # x is kept too, so that no other tensor gets its address

    def version(x):
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = x, cheats.gelu(x)
        return cache[x.data_ptr()][1]

    return version


def _without_tail(x):
    y = torch.zeros_like(x)
    full = x.numel() // 8 * 8
    y.view(-1)[:full] = cheats.gelu(x.view(-1)[:full])
    return y


def _first_1024_columns(x):
    y = torch.zeros_like(x)
    y[..., :1024] = cheats.gelu(x[..., :1024])
    return y


def _rounded_to_bfloat16(x):
    return cheats.gelu(x).bfloat16().float()


def _nan_above_10(x):
    return torch.where(x > 10.06, torch.nan, cheats.gelu(x))


def _too_rough(x):
    return cheats.gelu(x) * 1.01


def _without_nan(x):
    return cheats.gelu(x).nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)


_HONEST = {
    "the reference itself": cheats.gelu,
    "GELU written out by hand": cheats.gelu_by_hand,
    "GELU in place on a copy": lambda x: torch.ops.aten.gelu_(x.clone(), approximate="tanh"),
}
_DISHONEST = {
    "1 % too large": lambda: _too_rough,
    "the result rounded to bfloat16": lambda: _rounded_to_bfloat16,
    "half of the rows": lambda: cheats.gelu_half,
    "the last elements left out unless their number is a multiple of 8": lambda: _without_tail,
    "columns from the 1,025th on left out": lambda: _first_1024_columns,
    "the input overwritten": lambda: cheats.gelu_in_place,
    "NaN for numbers above 10": lambda: _nan_above_10,
    "NaN turned into 0": lambda: _without_nan,
    "the first result of each shape kept": _cached_by_shape,
    "the result kept as long as the tensor is the same": _cached_by_address,
}


@exercise("02.4", "Is this version honest?", minutes=15, level=3)
def _(is_honest):
    def judge(version, want, what):
        try:
            got = is_honest(version, cheats.gelu, make_inputs)
        except Exception as error:
            kind = type(error).__name__
            raise Wrong(f"{what}: should return a verdict, raised {kind}: {error}") from None
        _expect_bool(got, want, what)

    for what, version in _HONEST.items():
        judge(version, True, f"an honest version ({what})")
    for what, make in _DISHONEST.items():
        judge(make(), False, f"a cheat ({what})")
