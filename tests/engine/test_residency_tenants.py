"""What a tenant's images may take in the engine: its own give way or it waits, and nobody else."""

import runpy
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from random import Random

import pytest

from loraplex.engine.image_fetcher import Failure, Loaded, Located
from loraplex.engine.image_places import State
from loraplex.engine.images import ImageHeader
from loraplex.engine.protocol import Part, composition_digest
from loraplex.engine.residency import Residency

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
BASE, KIB, House, ManualPool, damage = itemgetter("BASE", "KIB", "House", "ManualPool", "damage")(
    KIT
)
ABSENT, FETCHING, DEVICE = State.ABSENT, State.FETCHING, State.DEVICE


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, 20 * KIB)
    yield house
    house.residency.check_integrity()


def use(house: House, *digests: str, kib: int | None = 6, tenant: str = "t") -> None:
    """Let a tenant whose images may take `kib` acquire some."""
    house.acquire(*digests, tenant=tenant, limit=None if kib is None else kib * KIB)


def end(house: House, *digests: str, tenant: str = "t") -> None:
    house.release(*digests, tenant=tenant)


def test_a_tenants_own_idle_images_give_way_the_oldest_first(house: House) -> None:
    a, b, other, c = (house.image(kib) for kib in (2, 3, 5, 4))
    use(house, other, kib=None, tenant="u")
    end(house, other, tenant="u")
    for digest in (a, b):
        use(house, digest)
        end(house, digest)
    assert house.residency.tenant_bytes("t") == 5 * KIB
    use(house, c)
    assert house.states(a, b, other, c) == [ABSENT, ABSENT, DEVICE, DEVICE]
    assert house.residency.tenant_bytes("t") == 4 * KIB


def test_no_more_of_them_go_than_have_to(house: House) -> None:
    a, b, c = (house.image(kib) for kib in (2, 3, 1))
    for digest in (a, b):
        use(house, digest)
        end(house, digest)
    use(house, c)
    assert house.states(a, b, c) == [DEVICE, DEVICE, DEVICE]


def test_what_does_not_fit_waits_for_its_own_tenants_requests_alone(house: House) -> None:
    a, b, c, other = (house.image(kib) for kib in (4, 3, 1, 8))
    use(house, a)
    use(house, b, c)
    residency = house.residency
    assert house.states(a, b, c) == [DEVICE, FETCHING, FETCHING], "c does not pass b"
    assert residency.is_barred("t")
    assert (residency.loading_count, residency.lacking_bytes, residency.staged_bytes) == (2, 0, 0)
    assert (residency.is_located(b), residency.lacks_room(b)) == (True, False)
    use(house, other, kib=None, tenant="u")
    assert house.states(other) == [DEVICE]
    end(house, a)
    assert house.states(a, b, c) == [ABSENT, DEVICE, DEVICE]
    assert not residency.is_barred("t")


def test_a_tenant_with_nothing_held_may_have_one_of_any_size(house: House) -> None:
    small, large, next_ = (house.image(kib) for kib in (2, 9, 3))
    use(house, small)
    end(house, small)
    use(house, large)
    assert house.states(small, large) == [ABSENT, DEVICE]
    use(house, next_)
    assert house.states(next_) == [FETCHING]
    end(house, large)
    assert house.states(large, next_) == [ABSENT, DEVICE]
    end(house, next_)
    use(house, large)
    end(house, large)
    assert house.states(large) == [DEVICE], "alone it may stay"


def test_one_that_waits_for_a_tenant_is_there_for_another_at_once(house: House) -> None:
    a, shared = house.image(4), house.image(5)
    use(house, a)
    use(house, shared)
    use(house, shared, kib=None, tenant="u")
    assert house.states(shared) == [DEVICE]
    assert house.residency.tenant_bytes("t") == 9 * KIB, "both use it"
    assert house.residency.tenant_bytes("u") == 5 * KIB


def test_a_resident_image_is_not_waited_for_and_the_tenants_idle_ones_make_good(
    house: House,
) -> None:
    own, shared = house.image(4), house.image(5)
    use(house, own)
    end(house, own)
    use(house, shared, kib=None, tenant="u")
    use(house, shared)
    assert house.states(own, shared) == [ABSENT, DEVICE]


def test_nothing_is_evicted_for_an_image_that_is_not_verified(house: House) -> None:
    a, bad = house.image(4), house.image(5)
    damage(house.path(bad))
    use(house, a)
    end(house, a)
    use(house, bad)
    assert house.residency.failure(bad) is not None
    assert house.states(a) == [DEVICE]


def test_one_that_is_overtaken_while_it_is_read_takes_no_memory_from_others(house: House) -> None:
    """An idle image of the tenant's is used again before the new one is there."""
    a, late = house.image(4), house.image(5)
    use(house, a)
    end(house, a)
    house.residency.acquire(late, "t", limit=6 * KIB)
    house.residency.poll()
    house.pool.run()  # it is found,
    house.residency.poll()
    use(house, a)  # and read after this
    assert house.states(a, late) == [DEVICE, FETCHING]
    assert house.residency.staged_bytes == 0
    end(house, a)
    assert house.states(a, late) == [ABSENT, DEVICE]


def test_a_newer_limit_holds_at_once(house: House) -> None:
    a, b, c = (house.image(kib) for kib in (3, 2, 1))
    for digest in (a, b):
        use(house, digest)
        end(house, digest)
    use(house, c, kib=3)
    assert house.states(a, b, c) == [ABSENT, DEVICE, DEVICE]
    end(house, c)
    use(house, a, kib=2)
    assert house.states(a, b, c) == [DEVICE, ABSENT, ABSENT]
    use(house, b, kib=2)
    assert house.states(b) == [FETCHING]
    use(house, a, kib=None)
    assert house.states(b) == [DEVICE]


def test_a_composition_counts_as_one_image(house: House) -> None:
    a, part = house.image(4), (Part(house.image(3), 0.5),)
    composed = composition_digest(part)
    use(house, a)
    house.residency.acquire(composed, "t", part, 6 * KIB)
    house.settle()
    assert house.states(a, composed) == [DEVICE, FETCHING]
    end(house, a)
    assert house.states(composed) == [DEVICE]


def test_pins_count_for_nobody_while_they_are_idle(house: House) -> None:
    a, b = house.image(4), house.image(5)
    use(house, a)
    assert house.residency.pin(a, True)
    end(house, a)
    use(house, b)
    assert house.states(a, b) == [DEVICE, DEVICE]
    assert house.residency.tenant_bytes("t") == 5 * KIB


class Bytes:
    """Images without files, of tenant "a", "b" or "c": "a4.1" takes four bytes."""

    limit_bytes = 40

    def locate(self, digest: str, parts: tuple[Part, ...]) -> Located | Failure:
        size = int(digest[1])
        return Located((), False, ImageHeader(BASE, "bf16", size, ()), size, size)

    def read(self, digest: str, located: Located) -> Loaded | Failure:
        return Loaded(digest)


@pytest.mark.parametrize("seed", range(4))
def test_no_tenant_passes_its_limit_or_waits_for_another(seed: int) -> None:
    """Images of one's own, in any order of requests and threads; there is memory for all."""
    random, pool, running = Random(seed), ManualPool(), list[Callable[[], None]]()
    device, held = set[str](), list[str]()
    limits = {"a": None, "b": 9, "c": 5}
    residency = Residency(
        Bytes(), budget_bytes=400, load=lambda d, _: device.add(d), unload=device.remove,
        wake=lambda: None, host_bytes=12, pool=pool,
    )  # fmt: skip

    def check() -> None:
        residency.check_integrity()
        for tenant, limit in limits.items():
            sizes = [int(digest[1]) for digest in device if digest[0] == tenant]
            assert residency.tenant_bytes(tenant) == sum(sizes)
            assert limit is None or sum(sizes) <= limit or len(sizes) == 1
        assert not residency.is_barred("a")

    def settle() -> None:
        while running:
            running.pop()()
        residency.poll()
        while pool.run():
            residency.poll()
            check()

    for _ in range(4000):
        match random.choices(range(5), (6, 6, 8, 8, 8))[0]:
            case 0 if len(held) < 25:
                digest = f"{random.choice('abc')}{random.randint(1, 7)}.{random.randint(0, 2)}"
                residency.acquire(digest, digest[0], limit=limits[digest[0]])
                held.append(digest)
            case 1 if held:
                digest = held.pop(random.randrange(len(held)))
                residency.release(digest, digest[0])
            case 2:
                running += filter(None, [pool.begin()])
            case 3 if running:
                running.pop(random.randrange(len(running)))()
            case 4:
                residency.poll()
                check()
        if random.random() < 0.01:
            settle()
            assert {d for d in held if d[0] == "a"} <= device
            for tenant in "bc":
                wanted = {d for d in held if d[0] == tenant}
                assert not wanted or wanted & device, "one is always served"
    while held:
        settle()
        digest = next(d for d in held if d in device)
        held.remove(digest)
        residency.release(digest, digest[0])
    settle()
    assert residency.held_bytes == residency.loading_count == 0
