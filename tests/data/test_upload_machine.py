"""Uploads against a model in memory: whatever happens in which order, on both databases."""

import asyncio
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import URL

from loraplex.platform import upload_jobs as jobs
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Upload
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ApiError, Conflict, QuotaExceeded
from loraplex.platform.ids import new_id
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.tenants import create_tenant
from loraplex.platform.upload_hold import Hold, HoldLost
from loraplex.platform.upload_jobs import OPEN, Bounds, Wish

STORAGE = 100
BOUNDS = Bounds(max_open=3, max_bytes=80, ttl_s=3600)
LEASE_S = 3600.0
REPORT = {"checks": [], "reasons": []}
SIZES = st.integers(0, 60)


@dataclass
class Known:
    """What the model knows of one upload: who holds it is the last of `holds`."""

    state: str = "uploading"
    reserved: int = 0
    holds: list[Hold] = field(default_factory=list)


class Uploading(RuleBasedStateMachine):
    """One tenant's uploads, and processes that take them from one another."""

    db: Database
    runner: asyncio.Runner
    uploads = Bundle("uploads")

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Known] = {}
        self.tenant: str = self.runner.run(self.make_tenant())

    async def make_tenant(self) -> str:
        async with self.db.session(None) as session:
            name, limits = new_id("t").replace("_", "-"), TenantLimits(storage_bytes=STORAGE)
            return (await create_tenant(session, name, limits, actor=SYSTEM)).id

    def open_ones(self) -> list[Known]:
        return [known for known in self.known.values() if known.state in OPEN]

    def fits(self, more: int) -> bool:
        return sum(known.reserved for known in self.open_ones()) + more <= STORAGE

    @rule(target=uploads, size=SIZES)
    def begin(self, size: int) -> object:
        may = len(self.open_ones()) < BOUNDS.max_open and self.fits(size)
        try:
            row = self.runner.run(self.create(size))
        except QuotaExceeded:
            assert not may
            return multiple()
        assert may
        self.known[row.id] = Known(reserved=size)
        return row.id

    async def create(self, size: int) -> Upload:
        wish = Wish("poet", sizes={"adapter_config": size})
        async with self.db.session(self.tenant) as session:
            return await jobs.create(session, self.tenant, wish, BOUNDS, actor=SYSTEM)

    @rule(upload=uploads, upto=SIZES)
    def reserve(self, upload: str, upto: int) -> None:
        known = self.known[upload]
        parts = self.runner.run(self.row(upload)).parts
        more = max(0, upto - parts.get("adapter_model", jobs.UNTOLD)["reserved"])
        too_large = known.reserved + more > BOUNDS.max_bytes
        may = known.state == "uploading" and (not more or (self.fits(more) and not too_large))
        try:
            self.runner.run(self.make_room(upload, upto))
        except ApiError:
            assert not may
        else:
            assert may
            known.reserved += more

    async def make_room(self, upload: str, upto: int) -> None:
        async with self.db.session(self.tenant) as session:
            await jobs.reserve(session, self.tenant, upload, "adapter_model", upto, BOUNDS)

    @rule(upload=uploads)
    def finish(self, upload: str) -> None:
        if self.known[upload].state == "uploading":
            self.runner.run(self.take(upload))

    async def take(self, upload: str) -> None:
        async with self.db.session(self.tenant) as session:
            row = await jobs.get_upload(session, upload, lock=True)
            await jobs.begin(session, row)
        self.known[upload].state = "validating"
        self.known[upload].holds.append(Hold(self.db, row, LEASE_S))

    @rule(upload=uploads, let_go=st.booleans())
    def take_over(self, upload: str, let_go: bool) -> None:
        """Another process looks: it gets what was let go of, and nothing else."""
        if self.known[upload].state == "validating":
            self.runner.run(self.look(upload, let_go))

    async def look(self, upload: str, let_go: bool) -> None:
        known = self.known[upload]
        if let_go:
            await known.holds[-1].let_go()
        async with self.db.read(None) as session:
            seen = {row.id: row for row in await jobs.abandoned(session, LEASE_S)}
        assert (upload in seen) == let_go
        if let_go:
            async with self.db.session(None) as session:
                row = await jobs.take_over(session, seen[upload])
            assert row is not None
            known.holds.append(Hold(self.db, row, LEASE_S))

    @rule(upload=uploads, which=st.integers(0, 3), end=st.sampled_from(["", "rejected", "failed"]))
    def go_on(self, upload: str, which: int, end: str) -> None:
        """One of those who ever held it writes."""
        known = self.known[upload]
        if not known.holds:
            return
        hold = known.holds[which % len(known.holds)]
        may = hold is known.holds[-1] and known.state == "validating"
        try:
            self.runner.run(hold.end(end, REPORT) if end else hold.note_progress(REPORT))
        except HoldLost:
            assert not may
        else:
            assert may
            known.state = end or known.state

    @rule(upload=uploads)
    def cancel(self, upload: str) -> None:
        known = self.known[upload]
        try:
            self.runner.run(self.give_up(upload))
        except Conflict:
            assert known.state in ("rejected", "failed")
        else:
            assert known.state in (*OPEN, "cancelled")
            known.state = "cancelled"

    async def give_up(self, upload: str) -> None:
        async with self.db.session(self.tenant) as session:
            await jobs.cancel(session, upload, SYSTEM)

    async def row(self, upload: str) -> Upload:
        async with self.db.read(self.tenant) as session:
            return await jobs.get_upload(session, upload)

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        rows = self.runner.run(self.rows())
        assert {row.id: (row.state, jobs.reserved(row)) for row in rows} == {
            upload: (known.state, known.reserved) for upload, known in self.known.items()
        }
        held = [jobs.reserved(row) for row in rows if row.state in OPEN]
        assert len(held) <= BOUNDS.max_open
        assert sum(held) <= STORAGE

    async def rows(self) -> list[Upload]:
        async with self.db.read(self.tenant) as session:
            return (await jobs.list_uploads(session, self.tenant, limit=1000)).items


def test_uploads_are_what_the_model_says(db_url: URL) -> None:
    with asyncio.Runner() as runner:
        db = Database(db_url)
        machine = type("Machine", (Uploading,), {"db": db, "runner": runner})
        some = settings(
            max_examples=8,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        run_state_machine_as_test(machine, settings=some)
        runner.run(db.dispose())
