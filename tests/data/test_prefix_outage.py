"""Prefix-cache state while Redis is killed, or hangs: nothing waits, and nothing is lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import CacheEvent, CacheEvents, Finished
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.errors import Unavailable
from loraplex.platform.limits import connect
from loraplex.platform.prefix_counts import Counts
from loraplex.platform.prefix_state import PrefixState

pytestmark = pytest.mark.anyio
PATIENCE = 20.0
FOUND_HALF = Finished("x", "stop", prompt_tokens=10, completion_tokens=1, cached_tokens=5)


@pytest.fixture
async def state(own_redis: EmbeddedRedis) -> AsyncIterator[PrefixState]:
    client = connect(own_redis.url, timeout_s=0.1)
    yield PrefixState(client, "r1", FakeEngine(), lease_s=1000.0)
    await client.aclose()


@pytest.fixture
async def reader(own_redis: EmbeddedRedis) -> AsyncIterator[PrefixState]:
    """One with patience: this machine may be slow."""
    client = connect(own_redis.url, timeout_s=PATIENCE)
    yield PrefixState(client, "r2", FakeEngine())
    await client.aclose()


async def test_redis_is_killed_and_comes_back(
    own_redis: EmbeddedRedis,
    state: PrefixState,
    reader: PrefixState,
    tenant: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hear(state, "stored", tenant, "a", "b")
    state.count(tenant, FOUND_HALF)
    await written(state)
    watch = os.pidfd_open(own_redis.pid)
    os.kill(own_redis.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PIDFD, watch, os.WEXITED | os.WNOWAIT)
    os.close(watch)
    caplog.clear()
    async with asyncio.timeout(PATIENCE):
        assert await state.longest(tenant, ["a"]) == {}
        with pytest.raises(Unavailable, match="Try again"):
            await state.of(tenant)
        hear(state, "evicted", tenant, "b")
        hear(state, "stored", tenant, "c")
        state.count(tenant, FOUND_HALF)
        await state.flush()
        await state.flush()
    assert len(caplog.records) == 1, "an outage is logged once"
    own_redis.start()
    await written(state)
    assert await reader.longest(tenant, ["a", "c", "b"]) == {"r1": 2}
    found = await reader.of(tenant)
    assert found.resident_blocks == 2
    assert found.counts.requests in (1, 2)  # the append-only file may lack its last second


async def written(state: PrefixState) -> None:
    """Flush until it worked: a timeout may be this machine's fault."""
    async with asyncio.timeout(PATIENCE):
        await state.flush()
        while state._down:
            await state.flush()


async def test_a_redis_that_hangs_is_not_waited_for(
    own_redis: EmbeddedRedis, state: PrefixState, reader: PrefixState, tenant: str
) -> None:
    await written(state)
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE):
            for i in range(100):
                hear(state, "stored", tenant, f"{i}")
                state.count(tenant, FOUND_HALF)
            await state.flush()
            hear(state, "evicted", tenant, "99")
            await state.flush()
            assert [await state.longest(tenant, ["1"]) for _ in range(100)] == [{}] * 100
            with pytest.raises(Unavailable):
                await state.of(tenant)
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    await written(state)
    found = await reader.of(tenant)
    assert found.resident_blocks == 99
    assert found.counts == Counts(100, 100, 1000, 500, evicted_blocks=1)


def hear(state: PrefixState, kind: str, tenant: str, *blocks: str) -> None:
    state.hear(CacheEvents((CacheEvent(kind, tenant, blocks, 16 * len(blocks)),)))
