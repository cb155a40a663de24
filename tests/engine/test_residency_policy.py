"""Residency's policies: budget, pins, tenants' minimum, time-to-live and prefetches."""

import logging
import runpy
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from loraplex.engine import residency as residency_module
from loraplex.engine.arrivals import MAX_HINTS
from loraplex.engine.image_places import State
from loraplex.engine.pins import MAX_PINS

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
KIB, House, damage = itemgetter("KIB", "House", "damage")(KIT)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, 10 * KIB, limit=20 * KIB)
    yield house
    house.residency.check_integrity()


def bring(house: House, *digests: str, tenant: str = "") -> None:
    """Make images resident and idle, the first the oldest."""
    for digest in digests:
        house.acquire(digest, tenant=tenant)
        house.release(digest, tenant=tenant)


def expect(house: House, *digests: str) -> None:
    for digest in digests:
        house.residency.prefetch(digest)
    house.residency.poll()
    house.settle()


def test_a_resident_image_shows_its_header(house: House) -> None:
    digest = house.image(3)
    house.acquire(digest)
    assert house.residency.header(digest).block_bytes == 3 * KIB
    with pytest.raises(KeyError):
        house.residency.header("f" * 64)


def test_a_smaller_budget_evicts_what_is_idle(house: House) -> None:
    a, b, c = (house.image(kib) for kib in (3, 2, 4))
    bring(house, a, b)
    house.acquire(c)
    residency = house.residency
    assert (residency.idle_bytes, residency.spare_bytes) == (5 * KIB, 6 * KIB)
    residency.set_budget(6 * KIB)
    assert house.states(a, b, c) == [State.ABSENT, State.DEVICE, State.DEVICE]
    with pytest.raises(ValueError, match="must stay"):
        residency.set_budget(4 * KIB - 1)
    assert residency.budget_bytes == 6 * KIB


def test_a_larger_budget_lets_in_what_waited(house: House) -> None:
    a, b = house.image(6), house.image(8)
    house.acquire(a, b)
    assert house.states(a, b) == [State.DEVICE, State.FETCHING]
    assert (house.residency.lacking_bytes, house.residency.spare_bytes) == (4 * KIB, 0)
    house.residency.set_budget(14 * KIB)
    assert house.residency.lacking_bytes == 0
    house.settle()
    assert house.states(a, b) == [State.DEVICE, State.DEVICE]


def test_an_image_larger_than_host_memory_is_read_alone(tmp_path: Path) -> None:
    """One that was given up before it was found takes no memory beside it."""
    house = House(tmp_path, 12 * KIB, host_bytes=10 * KIB)
    large, small = house.image(11), house.image(1)
    house.residency.acquire(large)
    house.pool.run()
    house.residency.acquire(small)
    end = house.pool.begin()
    house.residency.poll()
    house.residency.release(small)
    house.residency.check_integrity()
    end()
    house.settle()
    assert house.states(large, small) == [State.DEVICE, State.ABSENT]


def test_an_image_larger_than_the_budget_waits_for_the_budget_to_grow(house: House) -> None:
    digest = house.image(16)
    house.acquire(digest)
    assert house.states(digest) == [State.FETCHING]
    assert house.residency.lacking_bytes == 6 * KIB
    house.residency.set_budget(16 * KIB)
    house.settle()
    assert house.states(digest) == [State.DEVICE]


def test_one_poll_copies_no_more_than_a_step_can_bear(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency_module, "POLL_BYTES", 4 * KIB)
    digests = [house.image(kib) for kib in (3, 1, 2, 4)]
    for digest in digests:
        house.residency.acquire(digest)
    house.residency.poll()
    for _ in range(2):
        for _ in digests:
            house.pool.run()
        wakes = house.wakes
        house.residency.poll()
    assert house.residency.resident_bytes == 4 * KIB
    assert house.wakes == wakes + 1, "the rest is for the next poll"
    house.residency.poll()
    assert house.residency.resident_bytes == 6 * KIB
    house.residency.poll()
    assert house.states(*digests) == [State.DEVICE] * 4


def test_a_poll_without_news_does_nothing(house: House) -> None:
    held, waits = house.image(8), house.image(5)
    house.acquire(held, waits)
    house.residency._load_what_fits = None  # would fail if called
    house.residency.poll()


def test_a_pinned_image_is_not_evicted(house: House) -> None:
    a, b, c = (house.image(kib) for kib in (4, 3, 6))
    bring(house, a, b)
    assert house.residency.pin(a, True)
    assert house.residency.pin(a, True)
    assert (house.residency.pinned_count, house.residency.idle_bytes) == (1, 3 * KIB)
    house.acquire(c)
    assert house.states(a, b, c) == [State.DEVICE, State.ABSENT, State.DEVICE]
    house.release(c)
    assert house.residency.pin(a, False)
    bring(house, b)
    assert house.states(a, b, c) == [State.DEVICE, State.DEVICE, State.ABSENT], "c is older"


def test_pins_take_half_of_the_budget_at_most(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = (house.image(kib) for kib in (3, 2, 1))
    bring(house, a, b)
    assert house.residency.pin(a, True)
    assert house.residency.pin(b, True)
    assert house.residency.pin(c, True), "it is not known yet how much it takes"
    bring(house, c)
    assert house.residency.pinned_count == 2
    assert "is not pinned" in caplog.text
    assert not house.residency.pin(c, True)


def test_pins_are_bounded(house: House) -> None:
    for number in range(MAX_PINS):
        assert house.residency.pin(f"{number:064x}", True)
    assert not house.residency.pin("f" * 64, True)
    assert house.residency.pin("0" * 64, False)
    assert house.residency.pin("f" * 64, True)


def test_an_image_that_pins_leave_no_room_for_fails(tmp_path: Path) -> None:
    house = House(tmp_path, 10 * KIB)
    pinned, large = house.image(4), house.image(8)
    bring(house, pinned)
    assert house.residency.pin(pinned, True)
    house.acquire(large)
    failure = house.residency.failure(large)
    assert failure is not None
    assert failure.code == "overloaded"


def test_a_tenant_keeps_its_youngest_images(tmp_path: Path) -> None:
    house = House(tmp_path, 10 * KIB, tenant_minimum=1)
    a, b, c, d = (house.image(kib) for kib in (3, 4, 2, 5))
    bring(house, a, tenant="quiet")
    bring(house, b, c, d, tenant="busy")
    assert house.states(a, b, c, d) == [State.DEVICE, State.ABSENT, State.DEVICE, State.DEVICE]


def test_an_expired_image_goes_first(tmp_path: Path) -> None:
    house = House(tmp_path, 10 * KIB, tenant_minimum=1, ttl_s=60)
    a, b, c, d = (house.image(kib) for kib in (4, 3, 2, 5))
    bring(house, a, tenant="quiet")
    house.now = 61
    bring(house, b, c, d, tenant="busy")
    assert house.states(a, b, c, d) == [State.ABSENT, State.DEVICE, State.DEVICE, State.DEVICE]


def test_a_prefetched_image_is_resident_where_room_is_free(house: House) -> None:
    digest = house.image(4)
    expect(house, digest)
    assert house.states(digest) == [State.DEVICE]
    assert house.residency.held_bytes == 0
    house.acquire(digest)
    assert house.device.log == [f"+{digest[:4]}"]


def test_a_prefetched_image_evicts_what_is_older_than_its_hint(house: House) -> None:
    old, new, expected = (house.image(kib) for kib in (6, 5, 4))
    bring(house, old)
    house.now = 1
    house.residency.prefetch(expected)
    house.now = 2
    house.residency.poll()
    house.settle()
    assert house.states(old, expected) == [State.DEVICE, State.DEVICE], "6 + 4 KiB fit"
    bring(house, expected)
    house.now = 3
    expect(house, new)
    assert house.states(old, new, expected) == [State.ABSENT, State.DEVICE, State.DEVICE]


def test_a_prefetched_image_waits_in_host_memory_for_what_is_held_or_younger(house: House) -> None:
    held, younger, expected = (house.image(kib) for kib in (6, 2, 5))
    house.acquire(held)
    house.residency.prefetch(expected)
    house.now = 1
    bring(house, younger)
    house.settle()
    assert house.states(held, younger, expected) == [State.DEVICE, State.DEVICE, State.HOST]
    assert house.residency.staged_bytes == 5 * KIB
    house.store.delete(expected)
    house.release(held)
    house.acquire(expected)
    assert house.states(expected) == [State.DEVICE], "it came from host memory"


def test_requests_take_the_host_memory_of_prefetched_images(house: House) -> None:
    held, first, second, wanted = (house.image(kib) for kib in (7, 5, 4, 3))
    house.acquire(held)
    expect(house, first, second)
    assert house.states(first, second) == [State.HOST, State.HOST]
    house.acquire(wanted)
    assert house.states(first, second, wanted) == [State.ABSENT, State.HOST, State.DEVICE]


def test_prefetches_begin_while_no_request_waits(house: House) -> None:
    held, waits, expected = (house.image(kib) for kib in (7, 5, 2))
    house.acquire(held, waits)
    expect(house, expected)
    assert house.states(waits, expected) == [State.FETCHING, State.ABSENT]
    house.release(held)
    assert house.states(waits, expected) == [State.DEVICE, State.DEVICE]


def test_a_prefetch_that_has_begun_gives_way_to_a_request(house: House) -> None:
    held, wanted, expected = (house.image(kib) for kib in (7, 5, 2))
    house.acquire(held)
    house.residency.prefetch(expected)
    house.residency.poll()
    house.residency.acquire(wanted)
    house.residency.poll()
    house.settle()
    assert house.states(wanted, expected) == [State.FETCHING, State.ABSENT]
    house.release(wanted)
    assert house.states(expected) == [State.DEVICE], "the hint is still there"


def test_a_request_takes_over_a_prefetch(house: House) -> None:
    digest = house.image(4)
    house.residency.prefetch(digest)
    house.residency.poll()
    assert house.states(digest) == [State.FETCHING]
    house.acquire(digest)
    assert house.states(digest) == [State.DEVICE]
    assert house.residency.held_bytes == 4 * KIB


def test_a_prefetched_image_is_used_already_when_it_is_resident(house: House) -> None:
    a, b, c = (house.image(kib) for kib in (5, 4, 3))
    bring(house, a, b)
    house.residency.prefetch(a)
    house.acquire(c)
    assert house.states(a, b) == [State.DEVICE, State.ABSENT]


@pytest.mark.parametrize("fault", ["missing", "damaged", "device", "no digest"])
def test_a_failed_prefetch_is_only_logged(
    fault: str, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    digest = house.image(4)
    if fault == "missing":
        house.store.delete(digest)
    elif fault == "damaged":
        damage(house.path(digest))
    elif fault == "device":
        house.device.faulty.add(digest)
    else:
        digest = "../etc/passwd"
    expect(house, digest)
    assert house.states(digest) == [State.ABSENT]
    assert house.residency.failure(digest) is None
    assert digest[:12] in caplog.text


def test_old_hints_give_way(house: House) -> None:
    for number in range(MAX_HINTS + 10):
        house.residency.prefetch(f"{number:064x}")
    house.residency.check_integrity()
    assert len(house.residency._arrivals._hints) == MAX_HINTS
