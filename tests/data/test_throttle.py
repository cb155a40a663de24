"""Guessing passwords gets slower; who is right is not held up, and nobody is kept for ever."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.throttle import FORGIVEN_S, FREE, LONGEST_S, REMEMBERED, Throttle


def test_the_wait_doubles_after_a_few_free_tries_up_to_five_minutes() -> None:
    throttle, now, waits = Throttle(), 0.0, []
    for _ in range(FREE + 12):
        throttle.failed("ada", now)
        waits.append(throttle.wait_s("ada", now))
        now += waits[-1]
    assert waits[: FREE - 1] == [0.0] * (FREE - 1)
    assert waits[FREE - 1 : FREE + 3] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == LONGEST_S
    assert throttle.wait_s("bob", now) == 0.0


def test_success_and_time_forgive() -> None:
    throttle = Throttle()
    for _ in range(FREE):
        throttle.failed("ada", 0.0)
    assert throttle.wait_s("ada", 0.0) > 0
    assert throttle.wait_s("ada", FORGIVEN_S) == 0.0
    throttle.succeeded("ada")
    throttle.failed("ada", 1.0)
    assert throttle.wait_s("ada", 1.0) == 0.0


def test_a_flood_of_names_is_forgotten_oldest_first() -> None:
    throttle = Throttle(free=1)
    for number in range(REMEMBERED + 1):
        throttle.failed(f"name {number}", 0.0)
    assert throttle.wait_s("name 0", 0.0) == 0.0
    assert throttle.wait_s(f"name {REMEMBERED}", 0.0) > 0


@given(st.lists(st.floats(0, 400), max_size=30))
def test_whoever_waits_as_told_may_always_try(pauses: list[float]) -> None:
    throttle, now = Throttle(), 0.0
    for pause in pauses:
        now += max(pause, throttle.wait_s("ada", now))
        assert throttle.wait_s("ada", now) < 1e-6
        throttle.failed("ada", now)
