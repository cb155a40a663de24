"""Residency's faults: what is wrong with one image is that image's alone, and can be mended."""

import runpy
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from loraplex.engine import image_fetcher
from loraplex.engine.image_places import State
from loraplex.engine.images import ImageError, ImageStore
from loraplex.engine.residency import Residency

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
BASE, OTHER_BASE, KIB, House, damage = itemgetter("BASE", "OTHER_BASE", "KIB", "House", "damage")(
    KIT
)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, 10 * KIB)
    yield house
    house.residency.check_integrity()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def garble(path: Path) -> None:
    path.write_bytes(b"no image" * 100)


FAULTS = {
    "missing": (lambda path: path.unlink(), "image_missing"),
    "damaged": (damage, "image_corrupt"),
    "cut": (cut, "image_corrupt"),
    "garbled": (garble, "image_corrupt"),
    "empty": (lambda path: path.write_bytes(b""), "image_corrupt"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "internal"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_image_fails_alone_and_is_tried_again_later(fault: str, house: House) -> None:
    bad, good = house.image(3), house.image(4)
    path, spoil, code = house.path(bad), *FAULTS[fault]
    content = path.read_bytes()
    spoil(path)
    house.acquire(bad, good, bad)
    failure = house.residency.failure(bad)
    assert failure is not None
    assert failure[0] == code
    assert bad[:12] in failure[1]
    assert house.residency.failure(good) is None
    assert house.states(bad, good) == [State.ABSENT, State.DEVICE]

    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_bytes(content)
    house.acquire(bad)
    assert house.residency.failure(bad) == failure, "who comes while others wait shares it"
    house.release(bad, bad, bad)
    assert house.residency.failure(bad) is None
    house.acquire(bad)
    assert house.residency.state(bad) is State.DEVICE


def test_an_image_is_verified_piece_by_piece(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetcher, "PIECE_BYTES", 1000)
    digest = house.image(4)
    house.acquire(digest)
    stored = house.path(digest).read_bytes()
    assert house.device.images[digest] == stored[-4 * KIB :]


def test_an_image_that_the_executor_cannot_take_is_damaged(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise ImageError("it does not fit the model")

    house = House(tmp_path, 10 * KIB)
    house.prepare = refuse
    house.residency = Residency(house.fetcher(house.store), **house.options)
    digest = house.image(3)
    house.acquire(digest)
    failure = house.residency.failure(digest)
    assert failure is not None
    assert failure.code == "image_corrupt"
    assert "does not fit the model" in failure.message


def test_an_image_of_another_base_is_refused(house: House) -> None:
    digest = house.image(3, OTHER_BASE)
    house.acquire(digest)
    failure = house.residency.failure(digest)
    assert failure is not None
    assert failure.code == "image_mismatch"
    assert OTHER_BASE[:12] in failure.message
    assert BASE[:12] in failure.message


def test_an_image_larger_than_the_budget_can_never_be_served(house: House) -> None:
    digest, fits = house.image(11), house.image(10)
    house.acquire(digest)
    failure = house.residency.failure(digest)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert str(11 * KIB) in failure.message
    assert str(10 * KIB) in failure.message
    house.acquire(fits)
    assert house.residency.state(fits) is State.DEVICE


def test_what_is_no_digest_is_refused(house: House) -> None:
    house.acquire("../../etc/passwd")
    failure = house.residency.failure("../../etc/passwd")
    assert failure is not None
    assert failure.code == "invalid_request"


def test_an_image_that_vanishes_while_resident_is_still_served(house: House) -> None:
    digest = house.image(3)
    house.acquire(digest)
    house.release(digest)
    house.store.delete(digest)
    house.acquire(digest)
    assert house.residency.state(digest) is State.DEVICE


def test_an_image_that_vanishes_between_fetch_and_read_is_missing(house: House) -> None:
    digest = house.image(3)
    house.residency.acquire(digest)
    assert house.pool.run()
    house.residency.poll()
    house.store.delete(digest)
    house.settle()
    failure = house.residency.failure(digest)
    assert failure is not None
    assert failure.code == "image_missing"


def test_a_device_that_cannot_take_an_image_fails_it_alone(house: House) -> None:
    bad, good = house.image(3), house.image(4)
    house.device.faulty.add(bad)
    house.acquire(bad, good)
    failure = house.residency.failure(bad)
    assert failure is not None
    assert failure.code == "internal"
    assert house.states(bad, good) == [State.ABSENT, State.DEVICE]
    assert house.residency.staged_bytes == 0
    house.release(bad)
    house.device.faulty.clear()
    house.acquire(bad)
    assert house.residency.state(bad) is State.DEVICE


def test_a_bad_copy_in_the_cache_is_fetched_anew(tmp_path: Path) -> None:
    house = House(tmp_path, 10 * KIB)
    digest = house.image(3)
    remote = ImageStore(f"memory://{tmp_path.name}")
    remote.put(house.path(digest), digest)
    house.residency = Residency(house.fetcher(remote), **house.options)
    damage(remote.fetch(digest, tmp_path / "cache"))
    house.acquire(digest)
    failure = house.residency.failure(digest)
    assert failure is not None
    assert failure.code == "image_corrupt"
    house.release(digest)
    house.acquire(digest)
    assert house.residency.state(digest) is State.DEVICE
