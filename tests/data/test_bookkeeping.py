"""The ledger whatever dies (servers, the database, Redis): nothing lost, nothing counted twice."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from limit_kit import PATIENCE, leases, of_all
from redis.asyncio import Redis
from sqlalchemy import select

from loraplex.platform.bookkeeping import Books
from loraplex.platform.db.models import Tenant, UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Unavailable
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import Limits
from loraplex.platform.usage import SERVER_DIED, Entry
from loraplex.platform.usage_journal import KEY, Journal

pytestmark = pytest.mark.anyio
LEASE_S = 0.15
HELD = of_all(Limits(None, 1000, 5), Limits(tokens_per_day=2000))


class Flaky(Database):
    """A database that can be away."""

    away = False

    def session(self, tenant_id):  # type: ignore[no-untyped-def]
        if self.away:
            raise Unavailable("away")
        return super().session(tenant_id)


@pytest.fixture
async def flaky(db: Database, redis: Redis) -> AsyncIterator[Flaky]:
    await redis.delete("limits:open", KEY)  # books see the leftovers of all
    made = Flaky(db.url)
    yield made
    await made.dispose()


@pytest.fixture
def limiter(redis: Redis) -> Limiter:
    return Limiter(redis, lease_s=LEASE_S)


@pytest.fixture
def books(flaky: Flaky, limiter: Limiter, redis: Redis, tmp_path: Path) -> Books:
    return make_books(flaky, limiter, redis, tmp_path)


def make_books(db: Database, limiter: Limiter, redis: Redis, folder: Path) -> Books:
    return Books(db, limiter, Journal(redis, folder / "usage.journal", timeout_s=PATIENCE))


def entry_of(tenant: Tenant, request_id: str, **more: object) -> Entry:
    return Entry(
        tenant_id=tenant.id,
        request_id=request_id,
        key_id="key_1",
        model="poet@1",
        created_at=utc_now(),
        **more,
    )


async def rows(db: Database) -> dict[str, tuple[str, int]]:
    async with db.read(None) as session:
        found = await session.scalars(select(UsageRecord))
        return {row.request_id: (row.outcome, row.completion_tokens) for row in found}


async def let_in(limiter: Limiter, tenant: Tenant, request_id: str) -> Admission:
    note = entry_of(tenant, request_id).encoded()
    return await limiter.admit(tenant.id, HELD, 100, request_id=request_id, note=note)


async def swept(books: Books, count: int) -> None:
    """Wait until so many leases have ended and been seen to."""
    async with asyncio.timeout(PATIENCE):
        while count > 0:
            count -= await books.sweep()
            await asyncio.sleep(0.01)


async def at_last(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What is answered once there is something."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if answer := await ask():
                return answer
            await asyncio.sleep(0.01)


async def used(limiter: Limiter, tenant: Tenant) -> list[int]:
    standing = await limiter.look(tenant.id, HELD)
    named = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")
    return [use.used for use in standing.uses if use.name in named]


async def test_a_dead_servers_requests_are_charged_what_was_heard(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    heard = await let_in(limiter, acme, "req_1")
    await limiter.heartbeat(heard, 17)
    await let_in(limiter, acme, "req_2")
    await swept(books, 2)
    assert await rows(flaky) == {"req_1": (SERVER_DIED, 17), "req_2": (SERVER_DIED, 0)}
    assert set(await used(limiter, acme)) == {17}
    assert not await redis.exists(leases(acme.id), leases(acme.id, "key:k"))
    assert await books.sweep() == 0


async def test_several_servers_sweep_at_once_and_charge_once(
    flaky: Flaky, limiter: Limiter, redis: Redis, tmp_path: Path, acme: Tenant
) -> None:
    for i in range(12):
        await limiter.heartbeat(await let_in_unlimited(limiter, acme, f"req_{i}"), 5)
    several = [make_books(flaky, limiter, redis, tmp_path) for _ in range(4)]
    async with asyncio.timeout(PATIENCE):
        while await redis.zcard("limits:open"):
            await asyncio.gather(*(books.sweep() for books in several))
    assert await rows(flaky) == {f"req_{i}": (SERVER_DIED, 5) for i in range(12)}
    assert (await used(limiter, acme))[0] == 60


async def let_in_unlimited(limiter: Limiter, tenant: Tenant, request_id: str) -> Admission:
    note = entry_of(tenant, request_id).encoded()
    free = of_all(Limits(), Limits())
    return await limiter.admit(tenant.id, free, 100, request_id=request_id, note=note)


async def test_a_server_that_was_only_slow_puts_its_own_numbers_right(
    flaky: Flaky, limiter: Limiter, books: Books, acme: Tenant
) -> None:
    slow = await let_in(limiter, acme, "req_1")
    await limiter.heartbeat(slow, 3)
    await swept(books, 1)
    await limiter.settle(slow, 40)
    await limiter.settle(slow, 40)
    await books.record(entry_of(acme, "req_1", outcome="stop", completion_tokens=30))
    await books.flush()
    assert await rows(flaky) == {"req_1": ("stop", 30)}
    assert set(await used(limiter, acme)) == {40}


TOLD = {"outcome": "stop", "prompt_tokens": 20, "completion_tokens": 30}


async def test_a_server_that_died_before_its_ledger_had_the_request_is_found_to_have_ended_it(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    ended = await let_in(limiter, acme, "req_1")
    await limiter.heartbeat(ended, 17)
    await limiter.settle(ended, 50, note=entry_of(acme, "req_1", **TOLD).encoded())
    assert not await redis.exists(leases(acme.id), leases(acme.id, "key:k"))
    assert set(await used(limiter, acme)) == {50}
    await swept(books, 1)
    assert await rows(flaky) == {"req_1": ("stop", 30)}
    assert set(await used(limiter, acme)) == {50}


async def test_what_the_ledger_has_is_not_looked_for(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    entry = entry_of(acme, "req_1", **TOLD)
    await limiter.settle(await let_in(limiter, acme, "req_1"), 50, note=entry.encoded())
    await books.record(entry)
    await books.flush()
    assert await redis.zcard("limits:open") == 0
    assert not [key async for key in redis.scan_iter(f"limits:{{{acme.id}}}:reserved:*")]
    assert await rows(flaky) == {"req_1": ("stop", 30)}
    assert set(await used(limiter, acme)) == {50}


async def test_a_settlement_that_redis_has_not_heard_of_outlives_the_ledgers_row(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, tmp_path: Path, acme: Tenant
) -> None:
    """Else the whole reservation would stay charged."""
    admission = await let_in(limiter, acme, "req_1")
    limiter._owe(acme.id, "req_1", 50)
    await books.record(entry_of(acme, "req_1", **TOLD))
    await books.flush()
    await books.tidy()
    assert set(await used(limiter, acme)) == {50}
    assert await limiter.abandoned() == []
    await limiter.settle(admission, 50)
    assert set(await used(limiter, acme)) == {50}


async def test_what_is_asked_after_a_settlement_is_decided_after_it(
    flaky: Flaky, limiter: Limiter, books: Books, acme: Tenant
) -> None:
    one = of_all(Limits(max_concurrency=1), Limits())
    for i in range(50):
        admission = await limiter.admit(acme.id, one, 100, request_id=f"req_{i}")
        await books.settle(admission, entry_of(acme, f"req_{i}", **TOLD))
    await books.flush()
    assert set((await rows(flaky)).values()) == {("stop", 30)}
    assert len(await rows(flaky)) == 50


async def test_a_settlement_outlives_its_caller(
    flaky: Flaky, limiter: Limiter, books: Books, acme: Tenant
) -> None:
    admission = await let_in(limiter, acme, "req_1")
    caller = asyncio.create_task(books.settle(admission, entry_of(acme, "req_1", **TOLD)))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await books.close()
    assert await rows(flaky) == {"req_1": ("stop", 30)}
    assert set(await used(limiter, acme)) == {50}


async def test_entries_of_one_moment_are_written_together_and_a_bad_one_alone_waits(
    flaky: Flaky, books: Books, redis: Redis, acme: Tenant
) -> None:
    good = [entry_of(acme, f"req_{i}", outcome="stop") for i in range(150)]
    bad = msgspec.structs.replace(good[0], request_id="req_bad", tenant_id="ten_nobody")
    for entry in (*good[:20], bad, *good[20:]):
        await books.record(entry)
    assert await rows(flaky) == {}
    await asyncio.gather(books.flush(), books.flush(), books.close())
    assert (await rows(flaky)).keys() == {entry.request_id for entry in good}
    assert await redis.llen(KEY) == 0  # tried once more, and dropped


async def test_too_many_that_wait_go_to_the_journal(
    flaky: Flaky, books: Books, redis: Redis, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.platform.bookkeeping.MAX_WAITING", 2)
    for i in range(3):
        await books.record(entry_of(acme, f"req_{i}", outcome="stop"))
    assert await redis.llen(KEY) == 1
    await books.close()
    assert (await rows(flaky)).keys() == {"req_0", "req_1", "req_2"}


async def test_a_note_that_nobody_can_read_holds_nothing_up(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    await limiter.admit(acme.id, HELD, 50, note="nonsense")
    await let_in(limiter, acme, "req_1")
    await swept(books, 2)
    assert (await rows(flaky)).keys() == {"req_1"}
    assert set(await used(limiter, acme)) == {0}


async def test_who_speaks_again_is_not_swept(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    """It was found abandoned, but said something before it was buried."""
    slow = await let_in(limiter, acme, "req_1")
    (found,) = await at_last(limiter.abandoned)
    patient = Limiter(redis, lease_s=1000)
    await patient.heartbeat(slow, 9)
    assert not await limiter.sweep(found, 9)
    assert await books.sweep() == 0
    await limiter.settle(slow, 20)
    assert set(await used(limiter, acme)) == {20}


async def test_what_the_database_cannot_take_waits_in_redis(
    flaky: Flaky, limiter: Limiter, books: Books, redis: Redis, acme: Tenant
) -> None:
    flaky.away = True
    await limiter.heartbeat(await let_in(limiter, acme, "req_0"), 4)
    await at_last(limiter.abandoned)
    for i in (1, 2):
        await books.record(entry_of(acme, f"req_{i}", outcome="stop", completion_tokens=i))
    await books.flush()
    await books.tidy()
    assert await redis.llen(KEY) == 2
    flaky.away = False
    await asyncio.gather(books.tidy(), books.tidy())
    expected = {"req_0": (SERVER_DIED, 4), "req_1": ("stop", 1), "req_2": ("stop", 2)}
    assert await rows(flaky) == expected
    assert await redis.llen(KEY) == 0


async def test_without_both_it_waits_in_a_file(
    flaky: Flaky, limiter: Limiter, redis: Redis, tmp_path: Path, acme: Tenant
) -> None:
    nowhere = connect(f"unix://{tmp_path}/nothing.sock")
    books = make_books(flaky, limiter, nowhere, tmp_path)
    flaky.away = True
    for i in range(3):
        await books.record(entry_of(acme, f"req_{i}", outcome="stop"))
        await books.flush()
        await books.tidy()
    flaky.away = False
    reborn = make_books(flaky, limiter, redis, tmp_path)
    await reborn.record(entry_of(acme, "req_3", outcome="stop"))
    await reborn.flush()
    await reborn.tidy()
    await reborn.tidy()
    assert (await rows(flaky)).keys() == {f"req_{i}" for i in range(4)}
    assert [name for name in os.listdir(tmp_path) if name.startswith("usage")] == []
    await nowhere.aclose()


async def test_a_line_that_no_ledger_takes_holds_nothing_up(
    flaky: Flaky, books: Books, redis: Redis, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    good = entry_of(acme, "req_1", outcome="stop")
    await redis.rpush(KEY, "nonsense", good.encoded())
    await books.tidy()
    assert (await rows(flaky)).keys() == {"req_1"}
    assert await redis.llen(KEY) == 0
    assert "nonsense" in caplog.text


async def test_books_are_kept_in_the_background(
    flaky: Flaky, books: Books, redis: Redis, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.platform.bookkeeping.EVERY_S", 0.01)
    books.start()
    await redis.rpush(KEY, entry_of(acme, "req_1", outcome="stop").encoded())
    await at_last(lambda: rows(flaky))
    await books.close()
