"""Prefix-cache state in a real Redis: true to events, counted once, void with its replica."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import CacheEvent, CacheEvents, Finished
from loraplex.platform import prefix_mirror
from loraplex.platform.ids import new_id
from loraplex.platform.prefix_counts import Counts, PrefillMeter, counts_of
from loraplex.platform.prefix_state import Holding, PrefixState

pytestmark = pytest.mark.anyio
PATIENCE = 20.0
LONG = 1000.0  # seconds; a lease that does not end during a test


@pytest.fixture
async def fresh(redis: Redis) -> None:
    """No replica of another test is known."""
    await redis.flushall()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def state(redis: Redis, fresh: None, engine: FakeEngine) -> PrefixState:
    return PrefixState(redis, "r1", engine, lease_s=LONG)


def hear(state: PrefixState, kind: str, tenant: str, *blocks: str) -> None:
    state.hear(CacheEvents((CacheEvent(kind, tenant, blocks, 16 * len(blocks)),)))


def ran(prompt: int, cached: int = 0, *, compute_s: float = 0.0, completion: int = 1) -> Finished:
    """A request that ended; one without a completion was given up."""
    return Finished(
        "x",
        "stop" if completion else "abort",
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        queue_s=1.0,
        first_token_s=1.0 + compute_s,
    )


async def resident(state: PrefixState, tenant: str) -> int:
    return (await state.of(tenant)).resident_blocks


async def before_long(probe: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until it is so."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if await probe():
                return
            await asyncio.sleep(0.005)


async def test_what_a_tenant_holds_follows_the_engines_events(
    state: PrefixState, engine: FakeEngine, tenant: str
) -> None:
    other = new_id("ten")
    stored = CacheEvent("stored", tenant, ("a", "b", "c"), 48)
    engine.cache_listener(CacheEvents((stored, CacheEvent("stored", other, ("d",), 16))))
    assert await resident(state, tenant) == 0
    await state.flush()
    found = await state.of(tenant)
    assert found.holdings == (Holding("r1", 3, complete=True),)
    assert (found.complete, found.since) == (True, None)
    hear(state, "hit", tenant, "a", "d")
    hear(state, "evicted", tenant, "c", "b")
    hear(state, "stored", tenant, "b")
    await state.flush()
    found = await state.of(tenant)
    assert found.resident_blocks == 2
    assert found.counts == Counts(evicted_blocks=2)
    assert await resident(state, other) == 1


async def test_requests_add_up(state: PrefixState, tenant: str) -> None:
    state.count(tenant, ran(100, compute_s=0.5))
    state.count(tenant, ran(100, 80))
    state.count(new_id("ten"), ran(1000, 999))
    state.count(tenant, ran(500, completion=0))  # given up before it ran
    await state.flush()
    state.count(tenant, ran(200, 40))
    await state.flush()
    found = await state.of(tenant)
    assert found.counts == Counts(3, 2, 400, 120, saved_us=120 * 5000)
    assert found.counts.hit_rate == pytest.approx(0.3)
    assert found.since > 1_700_000_000


def test_the_meter_believes_late_requests_more() -> None:
    meter = PrefillMeter()
    assert meter.seconds_per_token == 0.0
    assert counts_of(ran(64, 64), meter) == Counts(1, 1, 64, 64)
    for seconds in [1.0] * 100 + [2.0] * 1000:
        meter.observe(ran(100, compute_s=seconds))
    assert meter.seconds_per_token == pytest.approx(0.02, rel=1e-3)
    assert Counts().hit_rate == 0.0


async def test_a_router_finds_who_holds_the_longest_prefix(
    redis: Redis, state: PrefixState, tenant: str
) -> None:
    second, idle = (PrefixState(redis, r, FakeEngine(), lease_s=LONG) for r in ("r2", "r3"))
    hear(state, "stored", tenant, "a", "b", "d")
    hear(second, "stored", tenant, "a", "b", "c", "d")
    hear(idle, "stored", tenant, "b")
    for each in (state, second, idle):
        await each.flush()
    assert await state.longest(tenant, ["a", "b", "c", "x", "d"]) == {"r1": 2, "r2": 3}
    assert await state.longest(tenant, ["x", "a"]) == {}
    assert await state.longest(tenant, []) == {}
    assert await state.longest(new_id("ten"), ["a"]) == {}
    assert (await state.of(tenant)).resident_blocks == 8


async def test_a_new_engine_voids_what_the_old_one_had(
    state: PrefixState, engine: FakeEngine, tenant: str
) -> None:
    silent = new_id("ten")
    hear(state, "stored", tenant, "a", "b")
    hear(state, "stored", silent, "c")
    state.count(tenant, ran(10))
    await state.flush()
    engine.die()
    await state.flush()
    engine.revive()
    hear(state, "stored", tenant, "b")
    await state.flush()
    found = await state.of(tenant)
    assert found.holdings == (Holding("r1", 1, complete=True),)
    assert found.counts.requests == 1
    assert await resident(state, silent) == 0
    assert await state.longest(tenant, ["a", "b"]) == {}


async def test_an_engine_that_was_out_of_reach_may_hold_more(
    state: PrefixState, engine: FakeEngine, tenant: str
) -> None:
    hear(state, "stored", tenant, "a")
    await state.flush()
    engine.die()
    await state.flush()
    engine.revive()
    engine._described = FakeEngine().info  # it was the connection that died
    await state.flush()
    assert (await state.of(tenant)).holdings == (Holding("r1", 1, complete=False),)


async def test_a_dead_replicas_state_vanishes(redis: Redis, fresh: None, tenant: str) -> None:
    dead = PrefixState(redis, "dead", FakeEngine(), lease_s=0.2)
    alive = PrefixState(redis, "alive", FakeEngine(), lease_s=LONG)
    for each in (dead, alive):
        hear(each, "stored", tenant, "a")
        await each.flush()

    async def is_gone() -> bool:
        return await alive.longest(tenant, ["a"]) == {"alive": 1}

    await before_long(is_gone)
    assert (await alive.of(tenant)).holdings == (Holding("alive", 1, complete=True),)


async def test_of_two_workers_one_tells_and_both_count(
    redis: Redis, fresh: None, tenant: str
) -> None:
    first, second = (PrefixState(redis, "r1", FakeEngine(), lease_s=LONG) for _ in range(2))
    for each in (first, second):
        hear(each, "stored", tenant, "a", "b")
        await each.flush()
        hear(each, "evicted", tenant, "b")
        each.count(tenant, ran(10, 5))
        await each.flush()
    found = await first.of(tenant)
    assert found.holdings == (Holding("r1", 1, complete=True),)
    assert found.counts == Counts(2, 2, 20, 10, evicted_blocks=1)

    await redis.zadd("{cache-replicas}:leases", {"r1": 1})  # the first one has died since
    await second.flush()
    assert (await second.of(tenant)).holdings == (Holding("r1", 1, complete=False),)
    hear(second, "stored", tenant, "c")
    await second.flush()
    assert await resident(second, tenant) == 2


async def test_lost_events_are_noticed(state: PrefixState, tenant: str) -> None:
    hear(state, "stored", tenant, "a", "b")
    await state.flush()
    hear(state, "evicted", tenant, "x")
    await state.flush()
    assert (await state.of(tenant)).holdings == (Holding("r1", 2, complete=False),)
    hear(state, "stored", tenant, "c", "b", "d")  # b, and who knows what else, had been evicted
    await state.flush()
    assert (await state.of(tenant)).holdings == (Holding("r1", 2, complete=False),)
    assert await state.longest(tenant, ["b", "d", "a"]) == {"r1": 2}


async def test_a_mirror_does_not_grow_without_end(
    state: PrefixState, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_mirror, "MAX_BLOCKS", 10)
    hear(state, "stored", tenant, *map(str, range(25)))
    await state.flush()
    assert (await state.of(tenant)).holdings == (Holding("r1", 5, complete=False),)


async def test_much_is_told_in_several_messages(state: PrefixState, tenant: str) -> None:
    blocks = [f"{i:016x}" for i in range(2 * prefix_mirror.MAX_CHANGES + 1)]
    hear(state, "stored", tenant, *blocks)
    await state.flush()
    assert await state.longest(tenant, blocks) == {"r1": len(blocks)}
    hear(state, "evicted", tenant, *blocks[1:])
    await state.flush()
    assert await state.longest(tenant, blocks) == {"r1": 1}


async def test_nothing_stays_in_redis_for_ever(
    redis: Redis, state: PrefixState, tenant: str
) -> None:
    hear(state, "stored", tenant, "a")
    state.count(tenant, ran(10))
    await state.flush()
    keys = [key async for key in redis.scan_iter("*")]
    assert len(keys) == 6
    assert all([await redis.pttl(key) > 0 for key in keys])
    assert all(
        key.startswith((f"cache:{{{tenant}}}:".encode(), b"{cache-replicas}:")) for key in keys
    )


async def test_an_idle_tenants_state_is_kept(
    redis: Redis, state: PrefixState, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear(state, "stored", tenant, "a")
    await state.flush()
    for key in (f"cache:{{{tenant}}}:{name}:r1" for name in ("blocks", "last")):
        await redis.pexpire(key, 1000)
    await state.flush()
    assert await redis.pttl(key) <= 1000
    monkeypatch.setattr("loraplex.platform.prefix_state.BLOCKS_S", 0.0)
    monkeypatch.setattr("loraplex.platform.prefix_state._ms", lambda seconds: 10**7)
    await state.flush()
    assert await redis.pttl(key) > 1000
    assert await resident(state, tenant) == 1


async def test_redis_forgets_and_is_told_again(
    redis: Redis, state: PrefixState, tenant: str
) -> None:
    other = new_id("ten")
    for each in (tenant, other):
        hear(state, "stored", each, f"{each}1", f"{each}2")
    await state.flush()
    await redis.flushall()
    await state.flush()
    assert [await resident(state, each) for each in (tenant, other)] == [2, 2]
    await redis.delete(f"cache:{{{tenant}}}:last:r1")
    assert await resident(state, tenant) == 0
    hear(state, "stored", tenant, "c")
    await state.flush()
    assert await resident(state, tenant) == 3


async def test_late_duplicates_change_nothing(
    redis: Redis, state: PrefixState, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What timed out at our end may be run by Redis long after it was sent again."""
    sent: list[tuple[AsyncScript, dict[str, Any]]] = []

    def record(name: str) -> None:
        script = getattr(state, name)

        async def recorded(**call: Any) -> object:
            sent.append((script, call))
            return await script(**call)

        monkeypatch.setattr(state, name, recorded)

    record("_blocks")
    record("_total")
    for kind, block in (("stored", "a"), ("stored", "b"), ("evicted", "b")):
        hear(state, kind, tenant, block)
        state.count(tenant, ran(10, 5))
        await state.flush()
    for script, call in (*sent, *reversed(sent)):
        await script(**call)
    assert len(sent) == 6
    assert await state.longest(tenant, ["a", "b"]) == {"r1": 1}
    assert await resident(state, tenant) == 1
    assert (await state.of(tenant)).counts == Counts(3, 3, 30, 15, evicted_blocks=1)


async def test_events_may_come_while_earlier_ones_are_written(
    state: PrefixState, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_mirror, "MAX_CHANGES", 7)
    hear(state, "stored", tenant, *map(str, range(100)))
    writing = asyncio.create_task(state.flush())
    for i in range(100):
        hear(state, "evicted", tenant, str(i))
        hear(state, "stored", tenant, str(i + 100))
        await asyncio.sleep(0)
    await writing
    await state.flush()
    state._mirror.check_integrity()
    assert await state.longest(tenant, list(map(str, range(100, 200)))) == {"r1": 100}
    assert await resident(state, tenant) == 100


async def test_it_writes_by_itself_and_once_more_at_the_end(
    state: PrefixState, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.platform.prefix_state.FLUSH_S", 0.001)
    state.start()
    hear(state, "stored", tenant, "a")

    async def is_there() -> bool:
        return await resident(state, tenant) == 1

    await before_long(is_there)
    monkeypatch.setattr("loraplex.platform.prefix_state.FLUSH_S", 1000.0)
    state.count(tenant, ran(10))
    async with asyncio.timeout(PATIENCE):
        await state.close()
    assert (await state.of(tenant)).counts.requests == 1
