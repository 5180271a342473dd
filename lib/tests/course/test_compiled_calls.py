"""From which size on compiled code is faster."""

from lib.course.compiled_calls import crossing


def test_the_crossing_is_the_first_size_from_which_compiled_always_wins():
    def rows(*pairs):
        return [{"elements": 2**k, "eager": a, "compiled": b} for k, (a, b) in enumerate(pairs)]

    assert crossing(rows((1, 2), (3, 2), (1, 2), (5, 2), (9, 2))) == 8
    assert crossing(rows((1, 2), (3, 4))) is None
    assert crossing(rows((2, 1), (3, 1))) == 1
