"""Residency as a state machine: requests, threads and faults in any order, and the books agree."""

import runpy
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.engine.image_fetcher import Failure, Loaded, Located
from loraplex.engine.image_places import State
from loraplex.engine.images import ImageHeader
from loraplex.engine.protocol import Part
from loraplex.engine.residency import Residency

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
BASE, KIB, House, ManualPool, damage = itemgetter("BASE", "KIB", "House", "ManualPool", "damage")(
    KIT
)


class ResidencyMachine(RuleBasedStateMachine):
    """Requests, threads and faults in any order; after each step the books must agree."""

    SIZES = (1, 2, 3, 4, 5, 8, 10, 11)

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.house = House(
            Path(self.temporary.name), 10 * KIB, limit=12 * KIB, ttl_s=5.0, tenant_minimum=1
        )
        self.running: list[Callable[[], None]] = []

    @initialize()
    def fill_store(self) -> None:
        self.digests = [self.house.image(kib) for kib in self.SIZES]
        self.content = {d: self.house.path(d).read_bytes() for d in self.digests}
        self.paths = {d: self.house.path(d) for d in self.digests}
        self.held: Counter[tuple[str, str]] = Counter()  # by digest and tenant
        self.limits: dict[str, int | None] = {"x": 6 * KIB, "y": None, "z": 3 * KIB}

    @rule(at=st.integers(0, len(SIZES) - 1), tenant=st.sampled_from("xyz"))
    def acquire(self, at: int, tenant: str) -> None:
        digest = self.digests[at]
        self.house.residency.acquire(digest, tenant, limit=self.limits[tenant])
        self.held[digest, tenant] += 1

    @rule(kib=st.integers(1, 9))
    def set_limit(self, kib: int) -> None:
        self.limits["x"] = kib * KIB

    @rule(at=st.integers(0, len(SIZES) - 1))
    def prefetch(self, at: int) -> None:
        self.house.residency.prefetch(self.digests[at])

    @rule(at=st.integers(0, len(SIZES) - 1), pinned=st.booleans())
    def pin(self, at: int, pinned: bool) -> None:
        residency = self.house.residency
        assert residency.pin(self.digests[at], pinned) or pinned

    @rule(kib=st.integers(4, 12))
    def set_budget(self, kib: int) -> None:
        residency = self.house.residency
        kept = residency.resident_bytes - residency.idle_bytes
        if kib * KIB >= kept:
            residency.set_budget(kib * KIB)
        else:
            with pytest.raises(ValueError, match="must stay"):
                residency.set_budget(kib * KIB)

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.house.now += seconds

    @rule(at=st.integers(0, len(SIZES) - 1), tenant=st.sampled_from("xyz"))
    def release(self, at: int, tenant: str) -> None:
        digest = self.digests[at]
        if self.held[digest, tenant]:
            self.house.residency.release(digest, tenant)
            self.held[digest, tenant] -= 1
        else:
            with pytest.raises(ValueError, match="more often than acquired"):
                self.house.residency.release(digest, tenant)

    @precondition(lambda self: self.house.pool.jobs)
    @rule()
    def begin_job(self) -> None:
        if end := self.house.pool.begin():
            self.running.append(end)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_job(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))()

    @rule()
    def poll(self) -> None:
        self.house.residency.poll()
        assert not self.house.residency.is_barred("y"), "it has no limit"

    @rule(at=st.integers(0, len(SIZES) - 1), fault=st.sampled_from(["damage", "remove", "device"]))
    def spoil(self, at: int, fault: str) -> None:
        digest = self.digests[at]
        if fault == "device":
            self.house.device.faulty.add(digest)
        elif fault == "remove":
            self.paths[digest].unlink(missing_ok=True)
        elif self.paths[digest].exists():
            damage(self.paths[digest])

    @rule(at=st.integers(0, len(SIZES) - 1))
    def mend(self, at: int) -> None:
        digest = self.digests[at]
        self.paths[digest].write_bytes(self.content[digest])
        self.house.device.faulty.discard(digest)

    @invariant()
    def books_agree(self) -> None:
        residency, device = self.house.residency, self.house.device
        residency.check_integrity()
        if not hasattr(self, "digests"):
            return
        on_device = {d for d in self.digests if residency.state(d) is State.DEVICE}
        assert on_device == device.images.keys()
        assert residency.resident_bytes == device.bytes <= residency.budget_bytes
        for digest in self.digests:
            held = sum(self.held[digest, tenant] for tenant in "xyz")
            assert residency.references(digest) == held
            state, failure = residency.state(digest), residency.failure(digest)
            if not held:
                assert failure is None
            else:
                assert (failure is not None) == (state is State.ABSENT)

    def teardown(self) -> None:
        """Left alone, every image that is wanted arrives, fails, or waits for room it lacks."""
        house, residency = self.house, self.house.residency
        while self.running:
            self.running.pop()()
        residency.poll()
        house.settle()
        for digest, tenant in list(getattr(self, "held", {})):
            self.check_why_it_waits(digest)
            for _ in range(self.held.pop((digest, tenant))):
                residency.release(digest, tenant)
            residency.poll()
            house.settle()
        assert residency.held_bytes == residency.loading_count == residency.lacking_bytes == 0
        self.temporary.cleanup()

    def check_why_it_waits(self, digest: str) -> None:
        residency = self.house.residency
        if residency.state(digest) not in (State.FETCHING, State.HOST):
            return
        if not residency.lacks_room(digest):
            assert all(residency.is_barred(t) for d, t in +self.held if d == digest)
            return
        size = KIB * self.SIZES[self.digests.index(digest)]
        kept = residency.resident_bytes - residency.idle_bytes
        lacks_host_room = residency.staged_bytes + size > residency.host_bytes
        assert kept + size > residency.budget_bytes or lacks_host_room
        assert residency.lacking_bytes or lacks_host_room


class MemoryFetcher:
    """Images without files: number n takes n % 7 + 1 bytes, and some cannot be had."""

    limit_bytes = 30

    def locate(self, digest: str, parts: tuple[Part, ...]) -> Located | Failure:
        number = int(digest)
        if number % 11 == 3:
            return Failure("image_missing", digest)
        size = number % 7 + 1
        return Located((), False, ImageHeader(BASE, "bf16", size, ()), size, size)

    def read(self, digest: str, located: Located) -> Loaded | Failure:
        broken = int(digest) % 13 == 5
        return Failure("image_corrupt", digest) if broken else Loaded(digest)


@pytest.mark.parametrize("seed", range(3))
def test_books_agree_over_many_random_steps(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    random, pool, running = Random(seed), ManualPool(), list[Callable[[], None]]()
    device, held, now = set[str](), list[tuple[str, str]](), [0.0]
    limits = {"x": None, "y": 9, "z": 4}

    def load(digest: str, _: object) -> None:
        if int(digest) % 17 == 9:
            raise MemoryError
        assert digest not in device
        device.add(digest)

    residency = Residency(
        MemoryFetcher(), budget_bytes=20, load=load, unload=device.remove, wake=lambda: None,
        clock=lambda: now[0], ttl_s=30, tenant_minimum=1, pool=pool,
    )  # fmt: skip
    caplog.set_level("CRITICAL")
    for _ in range(5000):
        digest = str(min(int(random.expovariate(0.1)), 60))
        match random.choices(range(8), (6, 6, 2, 1, 1, 8, 8, 8))[0]:
            case 0 if len(held) < 12:
                tenant = random.choice("xyz")
                residency.acquire(digest, tenant, limit=limits[tenant])
                held.append((digest, tenant))
            case 1 if held:
                residency.release(*held.pop(random.randrange(len(held))))
            case 2:
                residency.prefetch(digest)
            case 3:
                residency.pin(digest, random.random() < 0.4)
            case 4:
                kept = residency.resident_bytes - residency.idle_bytes
                residency.set_budget(random.randint(max(10, kept), 30))
            case 5:
                running += filter(None, [pool.begin()])
            case 6 if running:
                running.pop(random.randrange(len(running)))()
            case 7:
                now[0] += random.random()
                residency.poll()
        residency.check_integrity()
        assert residency.resident_count == len(device)
    while held:
        residency.release(*held.pop())
    residency.check_integrity()
    assert residency.held_bytes == residency.loading_count == 0


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
