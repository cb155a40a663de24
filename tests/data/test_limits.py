"""Limits in a real Redis: never exceeded, all or nothing, settled once."""

import asyncio
from pathlib import Path

import anyio
import pytest
from limit_kit import (
    PATIENCE,
    YEAR,
    admitted_before_long,
    clock,
    dump,
    leases,
    of_tenant,
)
from redis.asyncio import Redis

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import BadRequest, LimiterDown, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.limit_standing import Use
from loraplex.platform.limits import Admission, Limiter, connect
from loraplex.platform.quotas import Bucket

pytestmark = pytest.mark.anyio
Buckets = tuple[Bucket, ...]


@pytest.fixture
def tenant() -> str:
    return new_id("ten")


@pytest.fixture
def limiter(redis: Redis) -> Limiter:
    return Limiter(redis, period_s=YEAR)


def tokens_left(admission: Admission) -> int | None:
    return admission.standing.use("tokens_per_minute").remaining


async def refused(limiter: Limiter, tenant: str, limits: Buckets, n: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await limiter.admit(tenant, limits, n)
    return caught.value


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (of_tenant(requests_per_minute=70), 70),
        (of_tenant(tokens_per_minute=1000), 100),
        (of_tenant(30, 1000, 50), 30),
        (of_tenant(70, 405, 50), 40),
        (of_tenant(70, 1000, 20), 20),
    ],
)
async def test_200_at_once_never_exceed_a_limit(
    redis_server: EmbeddedRedis, tenant: str, limits: Buckets, expected: int
) -> None:
    clients = [connect(redis_server.url, timeout_s=PATIENCE) for _ in range(4)]
    limiters = [Limiter(client, period_s=YEAR) for client in clients]
    results = await asyncio.gather(
        *(limiters[i % 4].admit(tenant, limits, 10) for i in range(200)), return_exceptions=True
    )
    admitted = [result for result in results if isinstance(result, Admission)]
    assert len(admitted) == expected
    assert all(isinstance(r, RateLimited) for r in results if not isinstance(r, Admission))
    await asyncio.gather(*(client.aclose() for client in clients))


async def test_nothing_is_written_when_one_limit_fails(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    await limiter.admit(tenant, of_tenant(100, 100, 100), 10)
    before = await dump(redis, tenant)
    assert len(before) == 6
    for limits in (of_tenant(1, 99, 99), of_tenant(99, 19, 99), of_tenant(99, 99, 1)):
        await refused(limiter, tenant, limits, 10)
    assert await dump(redis, tenant) == before


async def test_the_refusal_names_the_limit_that_lasts_longest(
    limiter: Limiter, tenant: str
) -> None:
    await limiter.admit(tenant, of_tenant(), 10)
    await limiter.admit(tenant, of_tenant(1), 10)
    assert (await refused(limiter, tenant, of_tenant(max_concurrency=2))).name == "max_concurrency"
    assert (await refused(limiter, tenant, of_tenant(1, None, 1))).name == "requests_per_minute"
    error = await refused(limiter, tenant, of_tenant(None, 25, 1), 10)
    assert (error.name, error.limit, error.remaining) == ("tokens_per_minute", 25, 5)
    assert error.headers["x-ratelimit-remaining-tokens"] == "5"


async def test_an_admission_tells_how_the_tenant_stands(limiter: Limiter, tenant: str) -> None:
    limits = of_tenant(4, 100, 9)
    first = await limiter.admit(tenant, limits, 30)
    second = await limiter.admit(tenant, limits, 30)
    in_a_while = pytest.approx(YEAR / 4, abs=1e-3)
    requests = Use(limits[0], "requests_per_minute", 4, 1, in_a_while)
    assert first.standing.use("requests_per_minute") == requests
    assert second.standing.use("requests_per_minute").remaining == 2
    assert [tokens_left(a) for a in (first, second)] == [70, 40]
    assert 0 < second.standing.use("tokens_per_minute").reset_s <= YEAR
    assert [a.standing.use("max_concurrency").used for a in (first, second)] == [1, 2]
    assert (await limiter.admit(tenant, of_tenant(), 1)).headers == {}


async def test_settling_returns_the_difference_and_the_lease(limiter: Limiter, tenant: str) -> None:
    limits = of_tenant(tokens_per_minute=100, max_concurrency=1)
    admission = await limiter.admit(tenant, limits, 90)
    assert (await refused(limiter, tenant, limits, 10)).name == "max_concurrency"
    await limiter.settle(admission, 25)
    after = await limiter.admit(tenant, limits, 10)
    assert tokens_left(after) == 100 - 25 - 10


@pytest.mark.parametrize("used", [0, 25])
async def test_what_is_given_back_whole_has_no_reset(
    limiter: Limiter, tenant: str, used: int
) -> None:
    limits = of_tenant(None, 100, None, tokens_per_day=1000)
    await limiter.settle(await limiter.admit(tenant, limits, 90), used)
    standing = await limiter.look(tenant, limits, whole=True)
    for name in ("tokens_per_minute", "tokens_per_day"):
        use = standing.use(name)
        assert (use.used, use.reset_s > 0) == (used, used > 0)


async def test_settling_again_changes_nothing(redis: Redis, limiter: Limiter, tenant: str) -> None:
    admission = await limiter.admit(tenant, of_tenant(), 90)
    await asyncio.gather(*(limiter.settle(admission, 25) for _ in range(10)))
    before = await dump(redis, tenant)
    await limiter.settle(admission, 80)
    assert await dump(redis, tenant) == before
    limits = of_tenant(tokens_per_minute=100)
    assert tokens_left(await limiter.admit(tenant, limits, 0)) == 75


async def test_using_more_than_the_estimate_is_charged(limiter: Limiter, tenant: str) -> None:
    limits = of_tenant(tokens_per_minute=100)
    await limiter.settle(await limiter.admit(tenant, limits, 10), 150)
    error = await refused(limiter, tenant, limits)
    assert (error.name, error.remaining) == ("tokens_per_minute", 0)


async def test_tenants_do_not_share_anything(limiter: Limiter) -> None:
    limits = of_tenant(1, 10, 1)
    for tenant in (new_id("ten"), new_id("ten")):
        await limiter.admit(tenant, limits, 10)
        await refused(limiter, tenant, limits, 10)


async def test_a_changed_limit_holds_for_the_next_request(limiter: Limiter, tenant: str) -> None:
    for _ in range(5):
        await limiter.admit(tenant, of_tenant(), 10)
    assert (await refused(limiter, tenant, of_tenant(None, 55, None), 10)).remaining == 5
    await refused(limiter, tenant, of_tenant(max_concurrency=5))
    await limiter.admit(tenant, of_tenant(1, 60, 6), 10)


async def test_retry_after_is_exact_for_requests(redis: Redis, tenant: str) -> None:
    await check_retry_after(
        redis, tenant, of_tenant(requests_per_minute=3), "requests_per_minute", 0.6
    )


async def test_retry_after_is_exact_for_tokens(redis: Redis, tenant: str) -> None:
    await check_retry_after(redis, tenant, of_tenant(tokens_per_minute=3), "tokens_per_minute", 0.6)


async def check_retry_after(
    redis: Redis, tenant: str, limits: Buckets, kind: str, period: float
) -> None:
    """By Redis's clock every refusal names the same moment, and that is when it ends."""
    limiter = Limiter(redis, period_s=period)

    not_before, not_after, asked_in_vain = 0.0, float("inf"), 0.0
    async with asyncio.timeout(PATIENCE):
        while True:
            before = await clock(redis)
            try:
                await limiter.admit(tenant, limits, 1)
            except RateLimited as error:
                assert error.name == kind
                not_before = max(not_before, before + error.retry_after_s)
                not_after = min(not_after, await clock(redis) + error.retry_after_s)
                asked_in_vain = before
            else:
                if asked_in_vain:
                    break
    assert not_before <= not_after + 1e-5
    assert asked_in_vain < not_after + 1e-5
    assert await clock(redis) >= not_before - 1e-5


async def test_a_new_window_begins_whole(redis: Redis, tenant: str) -> None:
    limits, limiter = of_tenant(tokens_per_minute=100), Limiter(redis, period_s=0.3)
    await limiter.admit(tenant, limits, 60)
    new = await admitted_before_long(limiter, tenant, limits, 90)
    assert tokens_left(new) == 10


async def test_a_late_settlement_leaves_the_present_window_alone(redis: Redis, tenant: str) -> None:
    limits, limiter = of_tenant(tokens_per_minute=100), Limiter(redis, period_s=0.3)
    late = await limiter.admit(tenant, limits, 60)
    new = await admitted_before_long(limiter, tenant, limits, 90)
    counters = [key async for key in redis.scan_iter(f"*{tenant}*:minute:*")]
    present = max(counters)
    await limiter.settle(late, 0)
    assert await redis.get(present) in (b"90", None)
    await limiter.settle(new, 90)


async def test_nothing_stays_in_redis_for_ever(redis: Redis, limiter: Limiter, tenant: str) -> None:
    await limiter.admit(tenant, of_tenant(9, 99, 9), 10)
    keys = [key async for key in redis.scan_iter(f"*{tenant}*")]
    assert len(keys) == 6
    assert all([await redis.pttl(key) > 0 for key in keys])


async def test_a_lease_ends_without_heartbeats(redis: Redis, tenant: str) -> None:
    limits = of_tenant(tokens_per_minute=100, max_concurrency=1)
    limiter = Limiter(redis, period_s=YEAR, lease_s=0.2)
    start = await clock(redis)
    lost = await limiter.admit(tenant, limits, 40)
    taken = await admitted_before_long(limiter, tenant, limits, 10)
    assert await clock(redis) - start >= 0.2
    assert tokens_left(taken) == 50  # the lost one stays charged at its estimate until it is swept
    assert not await limiter.heartbeat(lost)
    await limiter.settle(lost, 5)  # it was not lost, only slow
    assert await redis.zrange(leases(tenant), 0, -1) == [taken.id.encode()]


async def test_heartbeats_keep_a_lease(redis: Redis, limiter: Limiter, tenant: str) -> None:
    admission = await limiter.admit(tenant, of_tenant(), 1)
    first = await redis.zscore(leases(tenant), admission.id)
    assert await limiter.heartbeat(admission)
    assert await redis.zscore(leases(tenant), admission.id) > first
    await limiter.settle(admission, 1)
    assert not await limiter.heartbeat(admission)
    assert not await redis.exists(leases(tenant))


async def test_heartbeats_are_sent_while_a_block_runs(redis: Redis, tenant: str) -> None:
    limiter = Limiter(redis, lease_s=0.3)
    admission = await limiter.admit(tenant, of_tenant(), 1)
    first = await redis.zscore(leases(tenant), admission.id)
    before = asyncio.all_tasks()
    with limiter.kept_alive(admission, lambda: 7):
        async with asyncio.timeout(PATIENCE):
            while await redis.zscore(leases(tenant), admission.id) < first + 600_000:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert int(await redis.hget(f"limits:{{{tenant}}}:reserved:{admission.id}", "heard")) == 7
    left = asyncio.all_tasks() - before
    assert all(task.cancelling() for task in left)


async def test_an_estimate_that_no_minute_holds_is_a_bad_request(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    with pytest.raises(
        BadRequest, match=r"101 tokens, more than .* 100 tokens per minute"
    ) as error:
        await limiter.admit(tenant, of_tenant(tokens_per_minute=100), 101)
    assert error.value.param == "max_tokens"
    assert await dump(redis, tenant) == {}


async def test_a_cancelled_caller_still_learns_what_was_charged(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        admission = await limiter.admit(tenant, of_tenant(), 10)
        await limiter.settle(admission, 3)
    assert await redis.zcard(leases(tenant)) == 0
    limits = of_tenant(tokens_per_minute=10)
    assert tokens_left(await limiter.admit(tenant, limits, 0)) == 7


async def test_no_redis_no_admission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(f"unix://{tmp_path}/nothing.sock")
    limiter = Limiter(client)
    for call in (
        limiter.admit("ten_x", of_tenant(tokens_per_day=9), 1),
        limiter.ping(),
    ):
        with pytest.raises(LimiterDown):
            await call
    assert limiter.is_degraded
    assert [r.message.partition(":")[0] for r in caplog.records] == ["Redis does not answer"]
    await client.aclose()
