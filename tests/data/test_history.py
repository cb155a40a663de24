"""Samples of totals become rates, shares and medians, also where the engine began anew."""

import math

import pytest

from loraplex.platform.history import EVERY_S, KEPT, History, Totals, median


def spans(*totals: Totals):
    history = History()
    for number, each in enumerate(totals):
        history.take(number * EVERY_S, each)
    return list(history.spans())


def test_rates_are_differences_by_time() -> None:
    first, second = spans(Totals(), Totals(generated=50), Totals(generated=50, prompt=5))
    assert (first.rate("generated"), first.rate("prompt")) == (10.0, 0.0)
    assert (second.rate("generated"), second.rate("prompt")) == (0.0, 1.0)


def test_an_engine_that_began_anew_is_no_negative_rate() -> None:
    (span,) = spans(Totals(generated=900), Totals(generated=10))
    assert span.rate("generated") == 0.0


def test_a_share_is_known_where_something_was_looked_up() -> None:
    nothing, half = spans(Totals(), Totals(), Totals(cache_queried=8, cache_hit=4))
    assert (nothing.hit_share, half.hit_share) == (None, 0.5)


def test_samples_that_come_too_soon_or_are_too_old_are_dropped() -> None:
    history = History()
    for number in range(2 * KEPT):
        history.take(number * EVERY_S, Totals())
        history.take(number * EVERY_S + 0.1, Totals(generated=1))
    kept = list(history.spans())
    assert len(kept) == KEPT
    assert {span.seconds for span in kept} == {EVERY_S}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((), (), None),
        (((1, 5), (math.inf, 5)), ((1, 5), (math.inf, 5)), None),
        ((), ((1, 10), (2, 10), (math.inf, 10)), 0.5),
        ((), ((1, 0), (2, 10), (math.inf, 10)), 1.5),
        (((1, 10), (2, 10), (math.inf, 10)), ((1, 10), (2, 14), (math.inf, 14)), 1.5),
        ((), ((1, 0), (math.inf, 4)), 1.0),
    ],
)
def test_a_median_lies_between_the_bounds_that_hold_it(before, after, expected) -> None:
    assert median(before, after) == expected
