"""Residency as a state machine: requests, threads and faults in any order, and the books agree."""

import runpy
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.engine.residency import State

KIT = runpy.run_path(str(Path(__file__).with_name("residency_kit.py")))
KIB, House, damage = itemgetter("KIB", "House", "damage")(KIT)


class ResidencyMachine(RuleBasedStateMachine):
    """Requests, threads and faults in any order; after each step the books must agree."""

    SIZES = (1, 2, 3, 4, 5, 8, 10, 11)

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.house = House(Path(self.temporary.name), 10 * KIB)
        self.running: list[Callable[[], None]] = []

    @initialize()
    def fill_store(self) -> None:
        self.digests = [self.house.image(kib) for kib in self.SIZES]
        self.content = {d: self.house.path(d).read_bytes() for d in self.digests}
        self.paths = {d: self.house.path(d) for d in self.digests}
        self.held: dict[str, int] = dict.fromkeys(self.digests, 0)

    @rule(at=st.integers(0, len(SIZES) - 1))
    def acquire(self, at: int) -> None:
        digest = self.digests[at]
        self.house.residency.acquire(digest)
        self.held[digest] += 1

    @rule(at=st.integers(0, len(SIZES) - 1))
    def release(self, at: int) -> None:
        digest = self.digests[at]
        if self.held[digest]:
            self.house.residency.release(digest)
            self.held[digest] -= 1

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
        assert residency.resident_bytes == device.bytes <= self.house.budget
        for digest in self.digests:
            assert residency.references(digest) == self.held[digest]
            state, failure = residency.state(digest), residency.failure(digest)
            if not self.held[digest]:
                assert state in (State.ABSENT, State.DEVICE, State.DRAINING)
                assert failure is None
            else:
                assert (failure is not None) == (state is State.ABSENT)

    def teardown(self) -> None:
        """Left alone, every image that is wanted arrives, fails, or waits for room it lacks."""
        house, residency = self.house, self.house.residency
        while self.running:
            self.running.pop()()
        house.settle()
        for digest, held in getattr(self, "held", {}).items():
            if held and residency.state(digest) in (State.FETCHING, State.HOST):
                size = KIB * self.SIZES[self.digests.index(digest)]
                assert residency.held_bytes + size > house.budget
            for _ in range(held):
                residency.release(digest)
            house.settle()
        assert residency.held_bytes == residency.staged_bytes == residency.loading_count == 0
        self.temporary.cleanup()


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
