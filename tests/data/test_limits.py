"""Limits in a real Redis: never exceeded, all or nothing, settled once."""

import asyncio
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import BadRequest, LimiterDown, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.limits import Admission, Budget, Limiter, connect
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio
YEAR = 3.15e7  # seconds; a period that does not end during a test
PATIENCE = 20.0


@pytest.fixture
def tenant() -> str:
    return new_id("ten")


@pytest.fixture
def limiter(redis: Redis) -> Limiter:
    return Limiter(redis, period_s=YEAR)


async def dump(redis: Redis, tenant: str) -> dict[bytes, bytes]:
    return {key: await redis.dump(key) async for key in redis.scan_iter(f"*{tenant}*")}


async def clock(redis: Redis) -> float:
    seconds, micros = await redis.time()
    return seconds + micros / 1e6


def leases(tenant: str) -> str:
    return f"limits:{{{tenant}}}:leases"


async def refused(limiter: Limiter, tenant: str, limits: TenantLimits, n: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await limiter.admit(tenant, limits, n)
    return caught.value


async def admitted_before_long(
    limiter: Limiter, tenant: str, limits: TenantLimits, estimate: int = 1
) -> Admission:
    """Ask again and again until the request is let in; each refusal must say so."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await limiter.admit(tenant, limits, estimate)
            except RateLimited:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (TenantLimits(requests_per_minute=70), 70),
        (TenantLimits(tokens_per_minute=1000), 100),
        (TenantLimits(30, 1000, 50), 30),
        (TenantLimits(70, 405, 50), 40),
        (TenantLimits(70, 1000, 20), 20),
    ],
)
async def test_200_at_once_never_exceed_a_limit(
    redis_server: EmbeddedRedis, tenant: str, limits: TenantLimits, expected: int
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
    await limiter.admit(tenant, TenantLimits(100, 100, 100), 10)
    before = await dump(redis, tenant)
    assert len(before) == 4
    for limits in (TenantLimits(1, 99, 99), TenantLimits(99, 19, 99), TenantLimits(99, 99, 1)):
        await refused(limiter, tenant, limits, 10)
    assert await dump(redis, tenant) == before


async def test_the_refusal_names_the_limit_that_lasts_longest(
    limiter: Limiter, tenant: str
) -> None:
    await limiter.admit(tenant, TenantLimits(), 10)
    await limiter.admit(tenant, TenantLimits(1), 10)
    assert (await refused(limiter, tenant, TenantLimits(max_concurrency=2))).kind == "concurrency"
    assert (await refused(limiter, tenant, TenantLimits(1, None, 1))).kind == "requests"
    error = await refused(limiter, tenant, TenantLimits(None, 25, 1), 10)
    assert (error.kind, error.limit, error.remaining) == ("tokens", 25, 5)
    assert error.headers["x-ratelimit-remaining-tokens"] == "5"


async def test_an_admission_tells_how_the_tenant_stands(limiter: Limiter, tenant: str) -> None:
    limits = TenantLimits(4, 100, 9)
    first = await limiter.admit(tenant, limits, 30)
    second = await limiter.admit(tenant, limits, 30)
    assert first.standing.requests == Budget(4, 3, pytest.approx(YEAR / 4, abs=1e-3))
    assert second.standing.requests.remaining == 2
    assert [a.standing.tokens.remaining for a in (first, second)] == [70, 40]
    assert 0 < second.standing.tokens.reset_s <= YEAR
    assert [a.standing.running for a in (first, second)] == [1, 2]
    assert (await limiter.admit(tenant, TenantLimits(), 1)).headers == {}


async def test_settling_returns_the_difference_and_the_lease(limiter: Limiter, tenant: str) -> None:
    limits = TenantLimits(tokens_per_minute=100, max_concurrency=1)
    admission = await limiter.admit(tenant, limits, 90)
    assert (await refused(limiter, tenant, limits, 10)).kind == "concurrency"
    await limiter.settle(admission, 25)
    after = await limiter.admit(tenant, limits, 10)
    assert after.standing.tokens.remaining == 100 - 25 - 10


async def test_settling_again_changes_nothing(redis: Redis, limiter: Limiter, tenant: str) -> None:
    admission = await limiter.admit(tenant, TenantLimits(), 90)
    await asyncio.gather(*(limiter.settle(admission, 25) for _ in range(10)))
    before = await dump(redis, tenant)
    await limiter.settle(admission, 80)
    assert await dump(redis, tenant) == before
    limits = TenantLimits(tokens_per_minute=100)
    assert (await limiter.admit(tenant, limits, 0)).standing.tokens.remaining == 75


async def test_using_more_than_the_estimate_is_charged(limiter: Limiter, tenant: str) -> None:
    limits = TenantLimits(tokens_per_minute=100)
    await limiter.settle(await limiter.admit(tenant, limits, 10), 150)
    error = await refused(limiter, tenant, limits)
    assert (error.kind, error.remaining) == ("tokens", 0)


async def test_tenants_do_not_share_anything(limiter: Limiter) -> None:
    limits = TenantLimits(1, 10, 1)
    for tenant in (new_id("ten"), new_id("ten")):
        await limiter.admit(tenant, limits, 10)
        await refused(limiter, tenant, limits, 10)


async def test_a_changed_limit_holds_for_the_next_request(limiter: Limiter, tenant: str) -> None:
    for _ in range(5):
        await limiter.admit(tenant, TenantLimits(), 10)
    assert (await refused(limiter, tenant, TenantLimits(None, 55, None), 10)).remaining == 5
    await refused(limiter, tenant, TenantLimits(max_concurrency=5))
    await limiter.admit(tenant, TenantLimits(1, 60, 6), 10)


async def test_retry_after_is_exact_for_requests(redis: Redis, tenant: str) -> None:
    await check_retry_after(redis, tenant, TenantLimits(requests_per_minute=3), "requests", 0.6)


async def test_retry_after_is_exact_for_tokens(redis: Redis, tenant: str) -> None:
    await check_retry_after(redis, tenant, TenantLimits(tokens_per_minute=3), "tokens", 0.6)


async def check_retry_after(
    redis: Redis, tenant: str, limits: TenantLimits, kind: str, period: float
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
                assert error.kind == kind
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
    limits, limiter = TenantLimits(tokens_per_minute=100), Limiter(redis, period_s=0.3)
    old = await limiter.admit(tenant, limits, 60)
    new = await admitted_before_long(limiter, tenant, limits, 90)
    assert new.window > old.window
    assert new.standing.tokens.remaining == 10


async def test_a_late_settlement_leaves_the_present_window_alone(
    limiter: Limiter, tenant: str
) -> None:
    limits = TenantLimits(tokens_per_minute=100)
    late = await limiter.admit(tenant, limits, 60)
    await limiter.settle(replace(late, window=late.window - 1), 0)
    assert (await limiter.admit(tenant, limits, 0)).standing.tokens.remaining == 40


async def test_nothing_stays_in_redis_for_ever(redis: Redis, limiter: Limiter, tenant: str) -> None:
    await limiter.admit(tenant, TenantLimits(9, 99, 9), 10)
    keys = [key async for key in redis.scan_iter(f"*{tenant}*")]
    assert len(keys) == 4
    assert all([await redis.pttl(key) > 0 for key in keys])


async def test_a_lease_ends_without_heartbeats(redis: Redis, tenant: str) -> None:
    limits = TenantLimits(tokens_per_minute=100, max_concurrency=1)
    limiter = Limiter(redis, period_s=YEAR, lease_s=0.2)
    start = await clock(redis)
    lost = await limiter.admit(tenant, limits, 40)
    taken = await admitted_before_long(limiter, tenant, limits, 10)
    assert await clock(redis) - start >= 0.2
    assert taken.standing.tokens.remaining == 50  # the lost one stays charged at its estimate
    assert not await limiter.heartbeat(lost)
    await limiter.settle(lost, 5)  # it was not lost, only slow
    assert await redis.zrange(leases(tenant), 0, -1) == [taken.id.encode()]


async def test_heartbeats_keep_a_lease(redis: Redis, limiter: Limiter, tenant: str) -> None:
    admission = await limiter.admit(tenant, TenantLimits(), 1)
    first = await redis.zscore(leases(tenant), admission.id)
    assert await limiter.heartbeat(admission)
    assert await redis.zscore(leases(tenant), admission.id) > first
    await limiter.settle(admission, 1)
    assert not await limiter.heartbeat(admission)
    assert not await redis.exists(leases(tenant))


async def test_heartbeats_are_sent_until_cancelled(redis: Redis, tenant: str) -> None:
    limiter = Limiter(redis, lease_s=0.3)
    admission = await limiter.admit(tenant, TenantLimits(), 1)
    first = await redis.zscore(leases(tenant), admission.id)
    async with asyncio.timeout(PATIENCE), anyio.create_task_group() as group:
        group.start_soon(limiter.keep_alive, admission)
        while await redis.zscore(leases(tenant), admission.id) < first + 600_000:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        group.cancel_scope.cancel()


async def test_an_estimate_that_no_minute_holds_is_a_bad_request(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    with pytest.raises(
        BadRequest, match=r"101 tokens, more than .* 100 tokens per minute"
    ) as error:
        await limiter.admit(tenant, TenantLimits(tokens_per_minute=100), 101)
    assert error.value.param == "max_tokens"
    assert await dump(redis, tenant) == {}


async def test_a_cancelled_caller_still_learns_what_was_charged(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        admission = await limiter.admit(tenant, TenantLimits(), 10)
        await limiter.settle(admission, 3)
    assert await redis.zcard(leases(tenant)) == 0
    limits = TenantLimits(tokens_per_minute=10)
    assert (await limiter.admit(tenant, limits, 0)).standing.tokens.remaining == 7


async def test_no_redis_no_admission(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(f"unix://{tmp_path}/nothing.sock")
    limiter = Limiter(client)
    for call in (
        limiter.admit("ten_x", TenantLimits(), 1),
        limiter.ping(),
    ):
        with pytest.raises(LimiterDown):
            await call
    assert [record.message for record in caplog.records if "closed" in record.message] != []
    assert len(caplog.records) == 1, "an outage is logged once"
    await client.aclose()
