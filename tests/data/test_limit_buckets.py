"""Buckets of a tenant, its keys and its adapters: one decision, and the windows of budgets."""

from calendar import monthrange
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from limit_kit import YEAR, clock, dump, leases, of_all, of_tenant
from redis.asyncio import Redis

from loraplex.platform import limits as room
from loraplex.platform.errors import BudgetSpent, RateLimited
from loraplex.platform.ids import new_id
from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import UNLIMITED, Bucket, Limits

pytestmark = pytest.mark.anyio
SHARED = Path(room.__file__).with_name("limits.lua").read_text()


@pytest.fixture
def limiter(redis: Redis) -> Limiter:
    return Limiter(redis, period_s=YEAR)


async def today(redis: Redis) -> datetime:
    return datetime.fromtimestamp(await clock(redis), UTC)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("limits", [Limits(1), Limits(None, 10), Limits(None, None, 1)])
async def test_any_bucket_refuses_for_all(
    redis: Redis, limiter: Limiter, tenant: str, place: int, limits: Limits
) -> None:
    held = [UNLIMITED] * 4
    held[place] = limits
    await limiter.admit(tenant, of_all(*held), 10)
    before = await dump(redis, tenant)
    with pytest.raises(RateLimited) as caught:
        await limiter.admit(tenant, of_all(*held), 10)
    assert caught.value.bucket == ("tenant", "key", "adapter", "adapter")[place]
    assert await dump(redis, tenant) == before
    others = of_all(UNLIMITED, UNLIMITED)
    if place > 1:
        await limiter.admit(tenant, others, 10)


async def test_keys_and_adapters_are_counted_apart_and_by_tenant(
    limiter: Limiter, tenant: str
) -> None:
    def one(kind: str, id: str) -> tuple[Bucket, ...]:
        return (Bucket("tenant", "t", UNLIMITED), Bucket(kind, id, Limits(1)))

    for kind, id in (("key", "a"), ("key", "b"), ("adapter", "a")):
        await limiter.admit(tenant, one(kind, id), 1)
        with pytest.raises(RateLimited):
            await limiter.admit(tenant, one(kind, id), 1)
    await limiter.admit(new_id("ten"), one("adapter", "a"), 1)


@pytest.mark.parametrize("name", ["tokens_per_day", "tokens_per_month"])
async def test_a_budget_refuses_before_rates_and_says_until_when(
    redis: Redis, limiter: Limiter, tenant: str, name: str
) -> None:
    held = of_all(Limits(None, 15, 1), Limits(**{name: 15}))
    await limiter.admit(tenant, held, 10)
    with pytest.raises(BudgetSpent) as caught:
        await limiter.admit(tenant, held, 10)
    error, now = caught.value, await today(redis)
    assert (error.bucket, error.name, error.used) == ("key", name, 10)
    end = now.replace(hour=0, minute=0) + timedelta(
        days=1 if name == "tokens_per_day" else monthrange(now.year, now.month)[1] - now.day + 1
    )
    assert f"{end:%Y-%m-%d} 00:00 UTC" in error.message
    assert error.headers["x-loraplex-limit"] == f"key {name}"


async def test_of_several_budgets_the_one_that_lasts_longest_refuses(
    limiter: Limiter, tenant: str
) -> None:
    """On a month's last day both end at once, and either may be named."""
    held = of_all(Limits(tokens_per_day=5), Limits(tokens_per_month=5))
    await limiter.admit(tenant, held, 5)
    standing = await limiter.look(tenant, held, 5)
    day, month = standing.use("tokens_per_day"), standing.use("tokens_per_month", "key")
    assert standing.refused_by == (month if month.reset_s > day.reset_s else day)
    assert standing.wait_s == pytest.approx(month.reset_s)


async def test_settling_corrects_every_window_of_every_bucket(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    held = of_all(*[UNLIMITED] * 3)
    await limiter.settle(await limiter.admit(tenant, held, 100), 7)
    counters = {
        key.decode(): int(await redis.get(key))
        async for key in redis.scan_iter(f"*{tenant}*")
        if await redis.type(key) == b"string"
    }
    assert len(counters) == 9
    assert set(counters.values()) == {7}
    now = await today(redis)
    for bucket in ("tenant", "key:k", "adapter:a0"):
        prefix = f"limits:{{{tenant}}}:{bucket}"
        assert {f"{prefix}:day:{now:%Y-%m-%d}", f"{prefix}:month:{now:%Y-%m}"} <= counters.keys()
        assert not await redis.exists(leases(tenant, bucket))


async def test_counters_outlive_their_windows_and_no_more(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    await limiter.admit(tenant, of_tenant(), 5)
    now = await today(redis)
    month_left = (monthrange(now.year, now.month)[1] - now.day + 1) * 86400
    for window, left in ((f"day:{now:%Y-%m-%d}", 86400), (f"month:{now:%Y-%m}", month_left)):
        lives = await redis.ttl(f"limits:{{{tenant}}}:tenant:{window}")
        assert left - 86400 + 2 * 86400 - 2 <= lives <= left + 2 * 86400


async def test_what_was_used_yesterday_does_not_count_today(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    now = await today(redis)
    last_month = now.replace(day=1) - timedelta(days=1)
    for window in (f"day:{now - timedelta(days=1):%Y-%m-%d}", f"month:{last_month:%Y-%m}"):
        await redis.set(f"limits:{{{tenant}}}:tenant:{window}", 1000)
    held = of_tenant(tokens_per_day=100, tokens_per_month=100)
    admission = await limiter.admit(tenant, held, 100)
    assert [u.remaining for u in admission.standing.uses if u.limit] == [0, 0]


async def test_the_calendar_is_the_real_one(redis: Redis) -> None:
    """All days of 400 years, as Lua and as Python count them."""
    script = SHARED + (
        "local out = {} "
        "for day = tonumber(ARGV[1]), tonumber(ARGV[2]) do "
        "  local y, m, d = civil(day) "
        "  out[#out + 1] = y * 1000000 + m * 10000 + d * 100 + days_in(y, m) "
        "end return out"
    )
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for first in range(0, 146_100, 4_870):
        last = first + 4_869
        found = await redis.eval(script, 0, first, last)
        days = [epoch + timedelta(days=day) for day in range(first, last + 1)]
        assert found == [
            d.year * 1_000_000 + d.month * 10_000 + d.day * 100 + monthrange(d.year, d.month)[1]
            for d in days
        ]


async def test_looking_charges_nothing_and_tells_all(
    redis: Redis, limiter: Limiter, tenant: str
) -> None:
    held = of_all(Limits(5, 100, 2), UNLIMITED)
    await limiter.admit(tenant, held, 30)
    before = await dump(redis, tenant)
    standing = await limiter.look(tenant, held, 71)
    assert await dump(redis, tenant) == before
    assert standing.refused_by == standing.use("tokens_per_minute")
    used = {(u.bucket.kind, u.name): u.used for u in standing.uses}
    assert used["tenant", "requests_per_minute"] == 1
    assert used["key", "tokens_per_day"] == used["tenant", "tokens_per_month"] == 30
    assert used["key", "max_concurrency"] == 1
    assert not await limiter.refusals(tenant)


async def test_refusals_are_kept_by_request(redis: Redis, limiter: Limiter, tenant: str) -> None:
    held = of_all(UNLIMITED, Limits(None, 50, 1))
    await limiter.admit(tenant, held, 10)
    for i in range(103):
        with pytest.raises(RateLimited):
            await limiter.admit(tenant, held, 45, request_id=f"req_{i}")
    kept = await limiter.refusals(tenant)
    assert [refusal.request_id for refusal in kept] == [f"req_{i}" for i in range(102, 2, -1)]
    newest = kept[0]
    assert (newest.bucket, newest.name, newest.estimate) == ("key:k", "tokens_per_minute", 45)
    assert newest.wait_us > 1e6
    assert abs(newest.at - await clock(redis)) < 60
    assert 0 < await redis.ttl(f"limits:{{{tenant}}}:refusals") <= 7 * 86400
