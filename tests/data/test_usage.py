"""The ledger counts a request once, and sums right."""

import asyncio
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from loraplex.platform import usage
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Tenant, UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.keys import KeyRing
from loraplex.platform.usage import SERVER_DIED, Entry, UsageTotal, decoded

pytestmark = pytest.mark.anyio
MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


def noon(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, 12, tzinfo=UTC)


@pytest.fixture
async def keys(db: Database, ring: KeyRing, acme: Tenant, globex: Tenant) -> dict[str, str]:
    made = {}
    for tenant in (acme, globex):
        async with db.session(tenant.id) as session:
            key, _ = await ring.create(session, tenant.id, "k", ["infer"], actor=SYSTEM)
            made[tenant.id] = key.id
    return made


def row(tenant_id: str, key_id: str, request_id: str, **more: Any) -> Entry:
    values = {
        "adapter": "poet",
        "model": "poet@1",
        "digest": "d" * 64,
        "outcome": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "created_at": utc_now(),
    }
    return Entry(tenant_id=tenant_id, key_id=key_id, request_id=request_id, **(values | more))


async def record(db: Database, one: Entry) -> UsageRecord:
    async with db.session(one.tenant_id) as session:
        return await usage.record(session, one)


async def test_a_request_is_counted_once(db: Database, acme: Tenant, keys: dict[str, str]) -> None:
    rows = [row(acme.id, keys[acme.id], "req_1") for _ in range(8)]
    await asyncio.gather(*(record(db, one) for one in rows))
    async with db.read(acme.id) as session:
        assert await usage.totals(session) == [UsageTotal(1, 10, 5, 0, adapter="poet")]


async def test_a_server_that_was_not_dead_is_believed(
    db: Database, acme: Tenant, keys: dict[str, str]
) -> None:
    """Whoever speaks first, the row of the server itself stays."""
    presumed = {"outcome": SERVER_DIED, "prompt_tokens": 0, "completion_tokens": 2}
    told = {"total_ms": 5.5, "arm": "canary"}
    for i, order in enumerate(((presumed, told), (told, presumed))):
        for more in order:
            await record(db, row(acme.id, keys[acme.id], f"req_{i}", **more))
    async with db.read(acme.id) as session:
        rows = list(await session.scalars(select(UsageRecord)))
    assert [(r.outcome, r.completion_tokens, r.total_ms, r.arm) for r in rows] == [
        ("stop", 5, 5.5, "canary")
    ] * 2


def test_an_entry_survives_being_kept_elsewhere() -> None:
    entry = row("ten_1", "key_1", "req_1", queue_ms=0.5)
    assert decoded(entry.encoded()) == entry


async def test_one_tenants_request_id_does_not_hide_anothers(
    db: Database, acme: Tenant, globex: Tenant, keys: dict[str, str]
) -> None:
    for tenant in (acme, globex):
        found = await record(db, row(tenant.id, keys[tenant.id], "req_1"))
        assert found.tenant_id == tenant.id


async def test_a_row_that_cannot_be_stored_is_no_duplicate(
    db: Database, acme: Tenant, keys: dict[str, str]
) -> None:
    with pytest.raises(IntegrityError):
        await record(db, row("ten_none", keys[acme.id], "req_1"))


async def test_totals_by_tenant_adapter_and_day(
    db: Database, acme: Tenant, globex: Tenant, keys: dict[str, str]
) -> None:
    for i, (tenant, adapter, day) in enumerate(
        [
            (acme, "poet", MONDAY),
            (acme, "poet", MONDAY),
            (acme, "poet", TUESDAY),
            (acme, None, TUESDAY),
            (globex, "poet", TUESDAY),
        ]
    ):
        more = {"adapter": adapter, "created_at": noon(day), "cached_tokens": i}
        await record(db, row(tenant.id, keys[tenant.id], f"req_{i}", prompt_tokens=10 + i, **more))
    async with db.read(None) as session:
        by_tenant = await usage.totals(session, group_by=("tenant",))
        tuesday = await usage.totals(session, since=TUESDAY, until=TUESDAY, group_by=())
        of_acme = await usage.totals(session, tenant_id=acme.id, group_by=("adapter", "day"))
    assert by_tenant == [
        UsageTotal(4, 46, 20, 6, tenant_id=acme.id),
        UsageTotal(1, 14, 5, 4, tenant_id=globex.id),
    ]
    assert by_tenant[0].total_tokens == 66
    assert tuesday == [UsageTotal(3, 39, 15, 9)]
    assert of_acme == [
        UsageTotal(1, 13, 5, 3, adapter=None, day=TUESDAY),
        UsageTotal(2, 21, 10, 1, adapter="poet", day=MONDAY),
        UsageTotal(1, 12, 5, 2, adapter="poet", day=TUESDAY),
    ]
    async with db.read(acme.id) as session:
        assert await usage.totals(session, group_by=("tenant",)) == by_tenant[:1]
        assert await usage.totals(session, tenant_id=globex.id) == []


async def test_totals_by_key_model_and_arm(
    db: Database, acme: Tenant, keys: dict[str, str]
) -> None:
    for i, (model, arm) in enumerate((("poet@1", "stable"), ("poet@2", "canary"), ("base", None))):
        await record(db, row(acme.id, keys[acme.id], f"req_{i}", model=model, arm=arm))
    async with db.read(acme.id) as session:
        by_arm = await usage.totals(session, group_by=("model", "arm"))
        by_key = await usage.totals(session, group_by=("key",))
    assert [(total.model, total.arm, total.requests) for total in by_arm] == [
        ("base", None, 1),
        ("poet@1", "stable", 1),
        ("poet@2", "canary", 1),
    ]
    assert by_key == [UsageTotal(3, 30, 15, 0, key_id=keys[acme.id])]


async def test_a_request_belongs_to_the_utc_day_it_was_made(
    db: Database, acme: Tenant, keys: dict[str, str]
) -> None:
    east = timezone(timedelta(hours=9))
    moment = datetime(2026, 3, 3, 8, 59, tzinfo=east)
    await record(db, row(acme.id, keys[acme.id], "req_1", created_at=moment))
    await record(db, row(acme.id, keys[acme.id], "req_2"))
    async with db.read(acme.id) as session:
        days = [total.day for total in await usage.totals(session, group_by=("day",))]
        (latest,) = await session.scalars(
            select(UsageRecord.created_at).where(UsageRecord.request_id == "req_2")
        )
    assert days == [MONDAY, latest.date()]


async def test_no_requests_no_groups(db: Database, acme: Tenant) -> None:
    async with db.read(acme.id) as session:
        assert await usage.totals(session) == []
        assert await usage.totals(session, group_by=()) == [UsageTotal(0, 0, 0, 0)]
