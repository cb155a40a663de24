"""Residency: an image's states, the budget, eviction, and fetches that nobody waits for."""

import runpy
import threading
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from loraplex.engine.image_places import State

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
KIB, House, damage = itemgetter("KIB", "House", "damage")(KIT)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, 10 * KIB)
    yield house
    house.residency.check_integrity()


def test_an_image_goes_through_its_states(house: House) -> None:
    digest, residency = house.image(4), house.residency
    assert residency.state(digest) is State.ABSENT
    residency.acquire(digest)
    assert residency.state(digest) is State.FETCHING
    assert residency.loading_count == 1
    residency.poll()
    assert house.pool.run()
    residency.poll()
    assert residency.state(digest) is State.FETCHING
    assert house.wakes == 1
    assert house.pool.run()
    assert house.wakes == 2
    assert residency.state(digest) is State.FETCHING, "only poll changes states"
    residency.poll()
    assert residency.state(digest) is State.DEVICE
    assert residency.resident_bytes == residency.held_bytes == house.device.bytes == 4 * KIB
    assert (residency.resident_count, residency.loading_count, residency.staged_bytes) == (1, 0, 0)
    residency.release(digest)
    assert residency.state(digest) is State.DEVICE
    assert residency.held_bytes == 0


def test_one_fetch_serves_all_who_wait(house: House) -> None:
    digest = house.image(4)
    house.residency.acquire(digest)
    house.residency.acquire(digest)
    assert len(house.pool.jobs) == 1
    house.settle()
    house.release(digest)
    assert house.residency.references(digest) == 1
    assert house.device.log == [f"+{digest[:4]}"]


def test_the_least_recently_used_makes_room(house: House) -> None:
    a, b, c, d = (house.image(kib) for kib in (3, 4, 2, 5))
    house.acquire(a, b, c)
    house.release(b, a, c)
    house.acquire(a)
    house.release(a)
    house.acquire(d)
    assert house.states(a, b, c, d) == [State.DEVICE, State.ABSENT, State.DEVICE, State.DEVICE]
    assert house.residency.resident_bytes == 10 * KIB


def test_what_counts_is_what_an_image_takes_on_the_device(tmp_path: Path) -> None:
    house = House(tmp_path, 10 * KIB, growth=2)
    a, b, c = (house.image(kib) for kib in (3, 4, 6))
    house.acquire(a, b, c)
    assert house.states(a, b) == [State.DEVICE, State.FETCHING], "6 + 8 KiB are more than 10"
    assert house.residency.resident_bytes == 6 * KIB
    failure = house.residency.failure(c)
    assert failure is not None and f"takes {12 * KIB} bytes" in failure.message


def test_nothing_that_is_held_is_evicted(house: House) -> None:
    a, b = house.image(6), house.image(5)
    house.acquire(a, b)
    assert house.states(a, b) == [State.DEVICE, State.FETCHING]
    assert house.residency.staged_bytes == 0, "what cannot be loaded takes no host memory"
    house.release(a)
    assert house.states(a, b) == [State.ABSENT, State.DEVICE]


def test_a_verified_image_waits_when_its_room_is_taken_back(house: House) -> None:
    a, b = house.image(6), house.image(5)
    house.acquire(a)
    house.release(a)
    house.residency.acquire(b)
    assert house.pool.run()
    house.residency.poll()
    house.acquire(a)
    assert house.states(a, b) == [State.DEVICE, State.HOST]
    assert house.residency.staged_bytes == 5 * KIB
    house.release(a)
    assert house.states(a, b) == [State.ABSENT, State.DEVICE]


def test_who_waits_for_room_lets_others_pass(house: House) -> None:
    held, large, small = house.image(6), house.image(5), house.image(4)
    house.acquire(held, large, small)
    assert house.states(held, large, small) == [State.DEVICE, State.FETCHING, State.DEVICE]


def test_nothing_is_evicted_for_an_image_that_is_not_verified(house: House) -> None:
    old, new = house.image(6), house.image(5)
    house.acquire(old)
    house.release(old)
    damage(house.path(new))
    house.acquire(new)
    assert house.residency.failure(new) is not None
    assert house.states(old, new) == [State.DEVICE, State.ABSENT]


def test_host_memory_for_images_on_their_way_is_bounded(house: House) -> None:
    digests = [house.image(kib) for kib in (3, 4, 2, 5, 6)]
    for digest in digests:
        house.residency.acquire(digest)
    for _ in digests:
        assert house.pool.run()
    house.residency.poll()
    assert len(house.pool.jobs) == 3
    assert house.residency.staged_bytes == 9 * KIB


def test_verified_images_that_wait_count_as_host_memory(tmp_path: Path) -> None:
    house = House(tmp_path, 12 * KIB)
    hot, first, second, third = (house.image(kib) for kib in (8, 5, 6, 3))
    house.acquire(hot)
    house.release(hot)
    house.residency.acquire(first)
    house.residency.acquire(second)
    assert house.pool.run()
    assert house.pool.run()
    house.residency.poll()
    house.acquire(hot, third)
    assert house.states(hot, first, second, third) == [
        State.DEVICE,
        State.HOST,
        State.HOST,
        State.FETCHING,
    ]
    assert house.residency.staged_bytes == 11 * KIB
    house.release(hot)
    assert house.states(first, second) == [State.DEVICE, State.DEVICE]


def test_a_fetch_that_has_not_begun_is_cancelled_when_nobody_waits(house: House) -> None:
    digest = house.image(3)
    house.residency.acquire(digest)
    house.residency.release(digest)
    assert house.residency.state(digest) is State.ABSENT
    house.residency.acquire(digest)
    house.settle()
    assert house.residency.state(digest) is State.DEVICE


@pytest.mark.parametrize("steps", [0, 1])
def test_a_fetch_that_runs_drains_when_nobody_waits(house: House, steps: int) -> None:
    digest, residency = house.image(3), house.residency
    residency.acquire(digest)
    for _ in range(steps):
        house.pool.run()
        residency.poll()
    end = house.pool.begin()
    assert end is not None
    residency.release(digest)
    assert residency.state(digest) is State.DRAINING
    residency.check_integrity()
    end()
    residency.poll()
    assert residency.state(digest) is State.ABSENT
    assert residency.staged_bytes == 0
    assert not house.device.images


def test_a_draining_fetch_serves_who_comes_back(house: House) -> None:
    digest, residency = house.image(3), house.residency
    residency.acquire(digest)
    end = house.pool.begin()
    assert end is not None
    residency.release(digest)
    residency.acquire(digest)
    assert residency.state(digest) is State.FETCHING
    assert not house.pool.jobs
    end()
    house.settle()
    assert residency.state(digest) is State.DEVICE


def test_a_reference_cannot_be_given_back_twice(house: House) -> None:
    digest = house.image(3)
    with pytest.raises(ValueError, match="more often"):
        house.residency.release(digest)
    house.acquire(digest)
    house.release(digest)
    with pytest.raises(ValueError, match="more often"):
        house.residency.release(digest)


def test_threads_bring_images_and_wake_the_loop(tmp_path: Path) -> None:
    woken = threading.Event()
    house = House(tmp_path, 100 * KIB, pool=None, wake=woken.set)
    residency = house.residency
    digests = [house.image(kib) for kib in range(1, 9)]
    for digest in digests:
        residency.acquire(digest)
    residency.poll()
    while residency.resident_count < len(digests):
        assert woken.wait(timeout=30), "nobody woke the loop"
        woken.clear()
        residency.poll()
        residency.check_integrity()
    assert house.device.images.keys() == set(digests)
    residency.close()
