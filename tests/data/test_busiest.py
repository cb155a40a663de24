"""Counts of the busiest names: nothing is lost, no series goes down while it is shown."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.busiest import CANDIDATES, OTHER, Busiest

REMEMBERED = CANDIDATES - 1  # names that one series' candidates have room for


def steps_of(names: int) -> st.SearchStrategy[list[tuple[int, int] | None]]:
    """Uses of names, each with a weight, and looks."""
    return st.lists(st.none() | st.tuples(st.integers(0, names), st.integers(1, 9)), max_size=200)


@given(steps_of(REMEMBERED), st.integers(0, 2))
def test_what_is_shown_never_goes_down(steps, most) -> None:
    busiest, before = Busiest(most), {}
    for step in steps:
        if step is not None:
            busiest.add((str(step[0]),), step[1], (1.0,))
            continue
        shown = busiest.shown()
        for name in shown.keys() & before.keys():
            assert shown[name] >= before[name]
        before = before | shown


@given(steps_of(40), st.integers(0, 2))
def test_nothing_is_lost_and_little_is_remembered(steps, most) -> None:
    busiest, uses = Busiest(most), 0
    for step in steps:
        if step is not None:
            busiest.add((str(step[0]),), step[1], (1.0,))
            uses += 1
        assert len(busiest.shown()) <= most + 1
    hidden = sum(amounts[0] for amounts in busiest._amounts.values())
    assert hidden + sum(busiest._other) == uses
    assert len(busiest._weights) <= most * CANDIDATES


def test_a_name_that_becomes_busy_is_shown_from_then_on() -> None:
    busiest = Busiest(1)
    busiest.add(("first",), 1, (1.0,))
    busiest.add(("second",), 10, (1.0,))
    assert busiest.shown() == {(OTHER,): (1.0,)}
    busiest.add(("second",), 10, (1.0,))
    assert busiest.shown() == {("second",): (1.0,), (OTHER,): (1.0,)}
