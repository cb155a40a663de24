"""Limits while Redis is away or hangs: who is let in, who waits, and what is charged in the end."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from limit_kit import PATIENCE, leases, of_all, of_tenant
from redis.asyncio import Redis

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import LimiterDown, RateLimited
from loraplex.platform.limits import Limiter, connect
from loraplex.platform.quotas import UNLIMITED, Limits

pytestmark = pytest.mark.anyio
TIMEOUT_S = 0.2


@pytest.fixture
async def limiter(own_redis: EmbeddedRedis) -> AsyncIterator[Limiter]:
    client = connect(own_redis.url, timeout_s=PATIENCE)
    yield Limiter(client, replicas=2, timeout_s=TIMEOUT_S)
    await client.aclose()


@pytest.fixture
def patient(client: Redis) -> Limiter:
    return Limiter(client)


def kill(own_redis: EmbeddedRedis) -> None:
    watch = os.pidfd_open(own_redis.pid)
    os.kill(own_redis.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, watch, os.WEXITED | os.WNOWAIT)
    os.close(watch)


async def on_disk(client: Redis) -> None:
    """Wait until Redis has written all: while it syncs it puts that off, yet answers."""
    async with asyncio.timeout(PATIENCE):
        while (await client.info("persistence"))["aof_buffer_length"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def caught_up(limiter: Limiter) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await limiter.ping()
                return await limiter.catch_up()
            except LimiterDown:
                await asyncio.sleep(0.02)


async def test_budgets_close_and_rates_go_on_with_a_share(
    own_redis: EmbeddedRedis, limiter: Limiter, tenant: str
) -> None:
    kill(own_redis)
    for budget in (Limits(tokens_per_day=100), Limits(tokens_per_month=100)):
        for held in (of_all(budget, UNLIMITED), of_all(UNLIMITED, budget), of_all(*[budget] * 3)):
            with pytest.raises(LimiterDown) as caught:
                await limiter.admit(tenant, held, 1)
            assert caught.value.headers["retry-after"] == "2"
    held = of_all(Limits(6), Limits(None, 100))
    admissions = [await limiter.admit(tenant, held, 10) for _ in range(3)]
    with pytest.raises(RateLimited) as refused:
        await limiter.admit(tenant, held, 10)
    assert (refused.value.bucket, refused.value.limit) == ("tenant", 3)
    assert admissions[-1].headers["x-ratelimit-limit-tokens"] == "50"
    with pytest.raises(LimiterDown):
        await limiter.admit(tenant, held, 51)  # this share of a minute can never hold it
    assert limiter.is_degraded


async def test_requests_at_once_are_counted_without_redis(
    own_redis: EmbeddedRedis, limiter: Limiter, tenant: str
) -> None:
    kill(own_redis)
    held = of_tenant(None, None, 2)
    for _ in range(3):
        admission = await limiter.admit(tenant, held, 10)
        with pytest.raises(RateLimited, match="1 requests at once"):
            await limiter.admit(tenant, held, 10)
        await limiter.settle(admission, 5)


async def test_nobody_waits_longer_than_the_timeout_and_then_nobody_waits(
    own_redis: EmbeddedRedis, limiter: Limiter, tenant: str
) -> None:
    await limiter.ping()
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            before = time.monotonic()
            admission = await limiter.admit(tenant, of_tenant(), 1)
            assert admission.known
            assert time.monotonic() - before >= TIMEOUT_S * 0.9
        async with asyncio.timeout(PATIENCE):
            answers = [await limiter.admit(tenant, of_tenant(), 1) for _ in range(4_000)]
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    probes = sum(admission.known for admission in answers)
    assert probes < PATIENCE, "all but a probe a second are answered at once"


async def test_what_redis_did_unheard_is_charged_once(
    own_redis: EmbeddedRedis, limiter: Limiter, client: Redis, patient: Limiter, tenant: str
) -> None:
    """It hangs, gets the requests all the same, and runs them when nobody waits any more."""
    open_held, closed_held = of_all(UNLIMITED, Limits(None, 500)), of_tenant(tokens_per_day=500)
    await limiter.ping()
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        admitted = await limiter.admit(tenant, open_held, 100, request_id="req_1")
        with pytest.raises(LimiterDown):
            await limiter.admit(tenant, closed_held, 100, request_id="req_2")
        await limiter.settle(admitted, 30)
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    await caught_up(limiter)
    standing = await patient.look(tenant, of_all(UNLIMITED, UNLIMITED))
    assert standing.use("tokens_per_day").used in (0, 30)
    assert standing.use("max_concurrency").used == 0
    assert not await client.exists(leases(tenant), f"limits:{{{tenant}}}:reserved:req_2")


async def test_settlements_of_an_outage_are_told_later(
    own_redis: EmbeddedRedis, limiter: Limiter, client: Redis, patient: Limiter, tenant: str
) -> None:
    held = of_tenant(None, 1000, 5)
    before = await limiter.admit(tenant, held, 100)
    await on_disk(client)
    kill(own_redis)
    during = await limiter.admit(tenant, held, 100)
    await limiter.settle(before, 40)
    await limiter.settle(during, 60)
    own_redis.start()
    await caught_up(limiter)
    await caught_up(limiter)
    standing = await patient.look(tenant, held)
    assert standing.use("tokens_per_minute").used == 40
    assert standing.use("max_concurrency").used == 0
    assert not limiter.is_degraded
    after = await limiter.admit(tenant, held, 1)
    assert after.standing.use("tokens_per_minute").limit == 1000
