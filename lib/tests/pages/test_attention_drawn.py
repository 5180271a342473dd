"""The sketches of notebooks 45 and 48: what runs beside what, and who waits for whom."""

from lib.pages.attention_drawn import lanes_of, starts_of

import pytest


def busy(spans):
    """The share of the time, up to the last product, in which the tensor cores multiply."""
    products = [s for s in spans if s.lane.endswith("tensor cores")]
    end = max(s.end_us for s in products)
    return sum(s.end_us - s.start_us for s in products) / end


@pytest.mark.parametrize(
    ("n_groups", "beside", "least", "most"),
    [(1, False, 0.57, 0.58), (1, True, 0.75, 0.8), (2, True, 0.97, 1)],
)
def test_more_of_a_softmax_hides_from_lane_to_lane(n_groups, beside, least, most):
    spans = lanes_of("", n_groups, beside, n_tiles=20)
    assert least <= busy(spans) <= most
    assert sum(s.lane.endswith("tensor cores") for s in spans) == 2 * 20 * n_groups
    for lane in {s.lane for s in spans}:
        mine = sorted((s.start_us, s.end_us) for s in spans if s.lane == lane)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:])), lane


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_in_turns_from_the_last_queries_nobody_waits_twice(n):
    for from_last, end in ((False, 2 * n - 1), (True, n)):
        starts = starts_of(n, from_last)
        assert max(starts.values()) + 1 == end
        for (program, tile), at in starts.items():
            assert program == 0 or starts[program - 1, tile] < at
    for program in range(n):  # `starts` is that of the last queries
        mine = sorted(at for (j, _), at in starts.items() if j == program)
        assert mine == list(range(program, n))
