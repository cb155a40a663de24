"""What the ledger says was used of budgets: sums by day and month, and whose they are."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from limit_kit import PATIENCE
from redis.asyncio import Redis

from loraplex.platform import parts, registry, usage
from loraplex.platform.audit import SYSTEM
from loraplex.platform.bookkeeping import Books
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BudgetSpent
from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import UNLIMITED, Bucket, Limits
from loraplex.platform.settings import Settings
from loraplex.platform.spending import Spending
from loraplex.platform.spent_before import spent_before
from loraplex.platform.usage import Entry
from loraplex.platform.usage_journal import Journal

pytestmark = pytest.mark.anyio


@pytest.fixture
def rows(db: Database, acme: Tenant) -> "Rows":
    return Rows(db, acme)


class Rows:
    """Writes a tenant's rows of the ledger."""

    def __init__(self, db: Database, tenant: Tenant) -> None:
        self.db, self.tenant, self.ids = db, tenant, count()

    async def add(self, at: datetime, tokens: int, **more: Any) -> None:
        more = {"key_id": "key_1", "tenant_id": self.tenant.id} | more
        entry = Entry(
            request_id=f"req_{next(self.ids)}",
            model="poet@1",
            outcome="stop",
            prompt_tokens=tokens - tokens // 3,
            completion_tokens=tokens // 3,
            created_at=at,
            **more,
        )
        async with self.db.session(None) as session:
            await usage.record_all(session, [entry])


async def publish(db: Database, tenant: Tenant, name: str) -> str:
    """The id of the adapter."""
    async with db.session(tenant.id) as session:
        await registry.add_version(
            session,
            tenant.id,
            name,
            digest=f"{tenant.name}-{name}",
            base="f" * 64,
            base_name="Base",
            report={"rank": 8, "bytes": 1024},
            actor=SYSTEM,
        )
        return (await registry.get_adapter(session, tenant.id, name)).id


def at(day: date, hour: int) -> datetime:
    return datetime(day.year, day.month, day.day, hour, tzinfo=UTC)


async def test_the_ledger_is_summed_by_day_and_month(
    db: Database, rows: Rows, acme: Tenant, globex: Tenant
) -> None:
    first, second, third = (date(2028, 2, day) for day in (1, 28, 29))
    moment = at(third, 12)
    await rows.add(at(first, 0) - timedelta(microseconds=1), 1_000_000)
    await rows.add(at(first, 0), 1)
    await rows.add(at(second, 23), 10, key_id="key_2")
    await rows.add(at(third, 0), 100)
    await rows.add(moment - timedelta(microseconds=1), 1000)
    await rows.add(moment, 1_000_000)
    await rows.add(at(third, 1), 1_000_000, tenant_id=globex.id)
    assert await spent_before(db, acme.id, moment) == {
        ("tenant", acme.id): Spending(1100, 1111),
        ("key", "key_1"): Spending(1100, 1101),
        ("key", "key_2"): Spending(0, 10),
    }
    assert await spent_before(db, acme.id, at(date(2028, 1, 1), 0)) == {}


async def test_the_ledger_is_summed_by_adapter(
    db: Database, rows: Rows, acme: Tenant, globex: Tenant
) -> None:
    """Its own, another's of the same name, one that was deleted, a composition and the base."""
    own, foreign = await publish(db, acme, "poet"), await publish(db, globex, "poet")
    gone = await publish(db, acme, "gone")
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "gone", actor=SYSTEM)
    noon = at(date(2028, 2, 29), 12)
    named = ("poet", "globex/poet", "gone", "(composition)", None, "nobody/poet")
    for power, adapter in enumerate(named):
        await rows.add(noon, 10**power, adapter=adapter)
    sums = await spent_before(db, acme.id, noon + timedelta(hours=1))
    assert sums == {
        ("tenant", acme.id): Spending(111_111, 111_111),
        ("key", "key_1"): Spending(111_111, 111_111),
        ("adapter", own): Spending(1, 1),
        ("adapter", foreign): Spending(10, 10),
        ("adapter", gone): Spending(100, 100),
    }


async def test_a_dead_servers_request_counts_once(
    db: Database, redis: Redis, acme: Tenant, tmp_path: Path
) -> None:
    """It was asked for before Redis began to count, let in after that, and is in the ledger now."""
    await redis.delete("limits:open")
    limiter = Limiter(redis, lease_s=0.1, spent=partial(spent_before, db))
    books = Books(db, limiter, Journal(redis, tmp_path / "journal", timeout_s=PATIENCE))
    held = (Bucket("tenant", acme.id, Limits(tokens_per_month=100)),)
    asked = Entry(
        tenant_id=acme.id, request_id="req_1", key_id="k", model="m", created_at=utc_now()
    )
    admission = await limiter.admit(
        acme.id, held, 50, request_id=asked.request_id, note=asked.encoded()
    )
    await limiter.heartbeat(admission, 20)
    left = 1
    async with asyncio.timeout(PATIENCE):
        while left:
            left -= await books.sweep()
            await asyncio.sleep(0.01)
    later = admission.at + timedelta(microseconds=1)
    assert await spent_before(db, acme.id, admission.at) == {}
    assert (await spent_before(db, acme.id, later))["tenant", acme.id] == Spending(20, 20)
    assert (await limiter.look(acme.id, held)).use("tokens_per_month").used == 20
    await limiter.close()


async def test_a_server_reads_its_own_database(
    db: Database, rows: Rows, redis: Redis, acme: Tenant, tmp_path: Path
) -> None:
    poet = await publish(db, acme, "poet")
    await rows.add(utc_now() - timedelta(milliseconds=1), 90, adapter="poet")
    patient = Settings(data_dir=tmp_path, redis_timeout_s=PATIENCE)
    async with AsyncExitStack() as stack:
        limiter = parts.open_limits(patient, redis, db, stack)
        for held in one_budget_each(acme.id, "key_1", poet):
            with pytest.raises(BudgetSpent) as caught:
                await limiter.admit(acme.id, held, 11)
            assert caught.value.used == 90
            await limiter.settle(await limiter.admit(acme.id, held, 10), 0)


def one_budget_each(*ids: str) -> Iterator[tuple[Bucket, ...]]:
    """The three buckets of a request, of which one has a budget of the day or of the month."""
    kinds = ("tenant", "key", "adapter")
    for place in range(3):
        for budget in (Limits(tokens_per_day=100), Limits(tokens_per_month=100)):
            limits = [UNLIMITED] * 3
            limits[place] = budget
            yield tuple(map(Bucket, kinds, ids, limits))
