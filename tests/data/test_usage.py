"""The ledger counts a request once, and sums right."""

import asyncio
from datetime import date, datetime, timedelta, timezone

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from loraplex.platform import usage
from loraplex.platform.db.models import Tenant, UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.keys import KeyRing
from loraplex.platform.usage import UsageTotal

pytestmark = pytest.mark.anyio
MONDAY, TUESDAY = date(2026, 3, 2), date(2026, 3, 3)


@pytest.fixture
async def keys(db: Database, ring: KeyRing, acme: Tenant, globex: Tenant) -> dict[str, str]:
    made = {}
    for tenant in (acme, globex):
        async with db.session(tenant.id) as session:
            key, _ = await ring.create(session, tenant.id, "k", ["infer"])
            made[tenant.id] = key.id
    return made


def row(tenant_id: str, key_id: str, request_id: str, **more: object) -> UsageRecord:
    values = {
        "adapter": "poet",
        "model": "poet@1",
        "digest": "d" * 64,
        "outcome": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }
    return UsageRecord(tenant_id=tenant_id, key_id=key_id, request_id=request_id, **(values | more))


async def record(db: Database, one: UsageRecord) -> bool:
    async with db.session(one.tenant_id) as session:
        return await usage.record(session, one)


async def test_a_request_is_counted_once(db: Database, acme: Tenant, keys: dict[str, str]) -> None:
    rows = [row(acme.id, keys[acme.id], "req_1") for _ in range(8)]
    assert sorted(await asyncio.gather(*(record(db, one) for one in rows))) == [False] * 7 + [True]
    async with db.read(acme.id) as session:
        assert await usage.totals(session) == [UsageTotal(1, 10, 5, 0, adapter="poet")]


async def test_one_tenants_request_id_does_not_hide_anothers(
    db: Database, acme: Tenant, globex: Tenant, keys: dict[str, str]
) -> None:
    assert await record(db, row(acme.id, keys[acme.id], "req_1"))
    assert await record(db, row(globex.id, keys[globex.id], "req_1"))


async def test_a_row_that_cannot_be_stored_is_no_duplicate(
    db: Database, acme: Tenant, keys: dict[str, str]
) -> None:
    with pytest.raises(IntegrityError):
        await record(db, row(acme.id, "key_none", "req_1"))


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
        more = {"adapter": adapter, "day": day, "cached_tokens": i, "prompt_tokens": 10 + i}
        await record(db, row(tenant.id, keys[tenant.id], f"req_{i}", **more))
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
