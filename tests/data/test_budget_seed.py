"""Budgets after Redis lost its data: what the ledger has counts, and everything counts once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from ledger_kit import HELD, MONTH, Ledger, read_again
from limit_kit import PATIENCE, clock, dump, of_all
from redis.asyncio import Redis

from loraplex.platform.breaker import Breaker
from loraplex.platform.db.types import utc_now
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import BudgetSpent, LimiterDown, Unavailable
from loraplex.platform.ids import new_id
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import UNLIMITED, Bucket, Limits
from loraplex.platform.recount import recount

pytestmark = pytest.mark.anyio
FREE = of_all(Limits(99), UNLIMITED)
DAY = "tokens_per_day"


@pytest.fixture
def tenant() -> str:
    return new_id("ten")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
async def limiter(redis: Redis, ledger: Ledger) -> AsyncIterator[Limiter]:
    made = Limiter(redis, spent=ledger.spent)
    yield made
    await made.close()


async def used(limiter: Limiter, tenant: str, held: Sequence[Bucket] = HELD) -> list[int]:
    """Of the day and the month, as the tenant's bucket has it and then as the others do."""
    standing = await limiter.look(tenant, held, whole=True)
    return [use.used for use in standing.uses if use.name in (DAY, MONTH)]


async def test_what_the_ledger_has_is_held_after_a_loss(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    for _ in range(3):
        admission = await limiter.admit(tenant, HELD, 300)
        await limiter.settle(admission, 290)
        ledger.add(admission.at, 290)
    await redis.flushall()
    with pytest.raises(BudgetSpent) as caught:
        await limiter.admit(tenant, HELD, 131)
    assert (caught.value.used, caught.value.bucket) == (870, "tenant")
    admission = await limiter.admit(tenant, HELD, 130)
    assert admission.standing.use(MONTH).remaining == 0
    assert await used(limiter, tenant) == [1000] * 4


async def test_nothing_is_read_for_who_is_known(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    for _ in range(5):
        await limiter.settle(await limiter.admit(tenant, HELD, 10), 5)
        await limiter.look(tenant, HELD)
    assert ledger.reads == 1
    await redis.flushall()
    await asyncio.gather(*(limiter.admit(tenant, HELD, 10) for _ in range(20)))
    assert ledger.reads == 2


async def test_nothing_is_read_in_the_months_after(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    """Whoever was counted before the month began is counted in all of it."""
    now = datetime.fromtimestamp(await clock(redis), UTC)
    last_month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    since = int((last_month.timestamp() - 1e-3) * 1e6)
    await redis.set(f"limits:{{{tenant}}}:since", since, ex=60)
    ledger.error = Unavailable("away")
    await limiter.admit(tenant, HELD, 10)
    assert (await used(limiter, tenant), ledger.reads) == ([10] * 4, 0)
    assert await redis.ttl(f"limits:{{{tenant}}}:since") > 39 * 86400, "as long as the counters"


async def test_what_an_older_version_counted_is_believed(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    older = Limiter(redis)
    running = await older.admit(tenant, HELD, 100)
    await older.settle(await older.admit(tenant, HELD, 50), 40)
    ledger.add(utc_now() - timedelta(seconds=1), 40)
    assert await used(limiter, tenant) == [140] * 4
    await limiter.settle(running, 60)
    assert (await used(limiter, tenant), ledger.reads) == ([100] * 4, 0)


async def test_who_has_no_budget_never_waits(limiter: Limiter, ledger: Ledger, tenant: str) -> None:
    ledger.gate.clear()
    held_up = asyncio.create_task(limiter.admit(tenant, HELD, 10))
    async with asyncio.timeout(PATIENCE):
        await ledger.reading.wait()
        for _ in range(5):
            await limiter.admit(tenant, FREE, 10)
            await limiter.look(tenant, FREE)
    assert not held_up.done()
    ledger.gate.set()
    assert (await held_up).standing.use(MONTH).used == 60


async def test_a_reader_is_not_stopped_by_who_waits_for_it(
    limiter: Limiter, ledger: Ledger, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that takes longer than requests wait is read to its end all the same."""
    monkeypatch.setattr("loraplex.platform.budget_seed.WAIT_S", 0.01)
    ledger.gate.clear()
    for _ in range(3):
        with pytest.raises(LimiterDown):
            await limiter.admit(tenant, HELD, 10)
    assert ledger.reads == 1
    ledger.gate.set()
    assert (await admitted_at_last(limiter, tenant)).known
    assert ledger.reads == 1


async def admitted_at_last(limiter: Limiter, tenant: str) -> Admission:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await limiter.admit(tenant, HELD, 10)
            except LimiterDown:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("a bug")])
async def test_budgets_are_closed_while_the_ledger_is_away(
    redis: Redis,
    limiter: Limiter,
    ledger: Ledger,
    tenant: str,
    error: Exception,
) -> None:
    ledger.error = error
    for _ in range(20):
        with pytest.raises(LimiterDown) as caught:
            await limiter.admit(tenant, HELD, 10)
        with pytest.raises(LimiterDown):
            await limiter.look(tenant, HELD)
        await limiter.admit(tenant, FREE, 1)
    assert caught.value.headers["retry-after"] == "2"
    assert not limiter.is_degraded
    assert ledger.reads < 20, "it is not asked for each request"
    ledger.error, limiter._seed._breaker = None, Breaker()
    ledger.add(utc_now() - timedelta(seconds=60), 70)
    admission = await limiter.admit(tenant, HELD, 10)
    assert admission.standing.use(MONTH).used == 70 + 20 + 10
    await limiter.catch_up()
    assert (await used(limiter, tenant))[1] == 100


async def test_rows_of_what_ran_during_the_loss_come_later(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    running = await limiter.admit(tenant, HELD, 100)
    await redis.flushall()
    after = await limiter.admit(tenant, HELD, 200)
    assert after.standing.use(MONTH).used == 200
    for admission, tokens in ((running, 60), (after, 150)):
        await limiter.settle(admission, tokens)
        ledger.add(admission.at, tokens)
    await read_again(redis, limiter, tenant)
    assert await used(limiter, tenant) == [210] * 4
    ledger.error = Unavailable("away")
    await redis.hset(f"limits:{{{tenant}}}:ledger", "again", 0)
    assert (await limiter.admit(tenant, HELD, 1)).standing.use(MONTH).used == 211


async def test_it_is_read_again_after_twice_as_long(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    await limiter.admit(tenant, HELD, 1)
    names = (f"limits:{{{tenant}}}:since", f"limits:{{{tenant}}}:ledger")
    since, soon = int(await redis.get(names[0])), int(await redis.hget(names[1], "again"))
    assert 5e6 <= soon - since < 5e6 + PATIENCE * 1e6
    since -= 1000 * 10**6
    await redis.set(names[0], since)
    await read_again(redis, limiter, tenant)
    assert 2000e6 <= int(await redis.hget(names[1], "again")) - since < 2000e6 + 2 * PATIENCE * 1e6


async def test_data_lost_again_while_the_ledger_is_read(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    ledger.add(utc_now() - timedelta(seconds=60), 400)
    ledger.gate.clear()
    waiting = asyncio.create_task(limiter.admit(tenant, HELD, 10))
    async with asyncio.timeout(PATIENCE):
        await ledger.reading.wait()
    await redis.flushall()
    ledger.gate.set()
    with pytest.raises(LimiterDown):
        await waiting
    assert (await limiter.admit(tenant, HELD, 10)).standing.use(MONTH).used == 410


async def test_several_servers_after_a_loss_let_no_more_through(
    redis_server: EmbeddedRedis, ledger: Ledger, tenant: str
) -> None:
    ledger.add(utc_now() - timedelta(seconds=60), 750)
    clients = [connect(redis_server.url, timeout_s=PATIENCE) for _ in range(4)]
    limiters = [Limiter(client, spent=ledger.spent) for client in clients]
    results = await asyncio.gather(
        *(limiters[i % 4].admit(tenant, HELD, 10) for i in range(100)), return_exceptions=True
    )
    assert sum(isinstance(result, Admission) for result in results) == 25
    assert sum(isinstance(result, BudgetSpent) for result in results) == 75
    assert 1 <= ledger.reads <= 4
    for limiter, client in zip(limiters, clients, strict=True):
        await limiter.close()
        await client.aclose()


async def test_a_look_tells_the_ledgers_numbers(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    ledger.add(utc_now() - timedelta(seconds=60), 70, adapter="a0")
    free = of_all(UNLIMITED, UNLIMITED, UNLIMITED)
    assert await used(limiter, tenant, free) == [70] * 6
    before = await dump(redis, tenant)
    assert {key.rpartition(b":")[2] for key in before} == {b"since", b"ledger"}
    standing = await limiter.look(tenant, of_all(Limits(tokens_per_day=100), UNLIMITED), 31)
    assert standing.refused_by == standing.use(DAY)
    assert await dump(redis, tenant) == before


async def test_nothing_stays_for_ever(redis: Redis, limiter: Limiter, tenant: str) -> None:
    await limiter.admit(tenant, HELD, 10)
    left = {key: await redis.pttl(key) async for key in redis.scan_iter(f"*{tenant}*")}
    assert min(left.values()) > 0
    assert max(left, key=left.__getitem__).endswith(b":since")


async def test_closing_gives_up_what_is_read(redis: Redis, ledger: Ledger, tenant: str) -> None:
    limiter = Limiter(redis, spent=ledger.spent)
    ledger.gate.clear()
    waiting = asyncio.create_task(limiter.admit(tenant, HELD, 10))
    async with asyncio.timeout(PATIENCE):
        await ledger.reading.wait()
        await limiter.close()
        with pytest.raises(LimiterDown):
            await waiting


async def test_charges_that_were_lost_are_the_ledgers(
    redis: Redis, limiter: Limiter, ledger: Ledger, tenant: str
) -> None:
    """As after a kill: some counters are old, one request is still running, and its lease stays."""
    settled = await limiter.admit(tenant, HELD, 300)
    await limiter.settle(settled, 290)
    ledger.add(settled.at, 290)
    running = await limiter.admit(tenant, HELD, 500)
    for key in await redis.keys(f"*{tenant}*:[dm][ao][yn]*:*"):
        await redis.set(key, 7)
    await recount(redis)
    assert await used(limiter, tenant) == [290] * 4
    assert await limiter.heartbeat(running)
    await limiter.admit(tenant, HELD, 100)
    await limiter.settle(running, 450)
    assert await used(limiter, tenant) == [390] * 4
    ledger.add(running.at, 450)
    await read_again(redis, limiter, tenant)
    assert await used(limiter, tenant) == [840] * 4
