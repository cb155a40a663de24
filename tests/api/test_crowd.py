"""200 clients against limits: two API processes, one Redis, streams, disconnects, and a kill -9.

By count, and by the engines' own diaries: nobody gets more than the limits say, the ledger and
Redis agree to the token, and what the killed server held is given back when its leases end.
"""

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from limit_kit import YEAR, clock
from sqlalchemy import select

from loraplex.platform.db.models import UsageRecord
from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import Bucket, Limits, TenantLimits
from loraplex.platform.usage import SERVER_DIED
from loraplex.platform.usage_journal import KEY

pytestmark = pytest.mark.anyio
SERVER = Path(__file__).with_name("crowd_server.py")
CLIENTS, VICTIMS, KILL_AFTER = 200, 6, 60
LEASE_S = 4.0
PATIENCE = 60.0
PATH = "/v1/chat/completions"
PROMPT = len(b"user:Hello\nassistant:")
LIMITED = {  # less of each than the 25 of 50 clients ask for whose server lives
    "requests": TenantLimits(20),
    "tokens": TenantLimits(tokens_per_minute=500, tokens_per_month=400),
    "at_once": TenantLimits(max_concurrency=9),
    "budget": TenantLimits(tokens_per_day=300),
}


def body(max_tokens: int, stream: bool) -> dict:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "tiny-base", "messages": messages, "max_tokens": max_tokens, "stream": stream}


@asynccontextmanager
async def process(world, redis_url: str, diary: Path) -> AsyncIterator[tuple]:
    """An API process; yields it with its URL."""
    given = {
        "data_dir": str(world.settings.data_dir),
        "redis_url": redis_url,
        "diary": str(diary),
        "base": msgspec.to_builtins(world.base),
        "lease_s": LEASE_S,
        "period_s": YEAR,
        "pepper": "a pepper for tests",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), json.dumps(given), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE):
            port = int(await child.stdout.readline())
        yield child, f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


class Crowd:
    """Clients that come all at once, each to a server and in a way of its own."""

    def __init__(self, client: httpx.AsyncClient, urls: list[str], keys: dict[str, str]) -> None:
        self.client, self.urls, self.keys = client, urls, keys
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)
        self.enough, self.killed_at = asyncio.Event(), 0.0

    @asynccontextmanager
    async def asking(self, name: str, url: str, request: dict) -> AsyncIterator[httpx.Response]:
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        stream = self.client.stream("POST", f"{url}{PATH}", json=request, headers=headers)
        async with stream as answer:
            self.statuses[name][answer.status_code] += 1
            yield answer

    async def ask(self, name: str, url: str, max_tokens: int, way: str) -> None:
        try:
            async with self.asking(name, url, body(max_tokens, way != "whole")) as answer:
                if way == "leave":
                    await anext(answer.aiter_lines(), None)
                else:
                    await answer.aread()
        except httpx.TransportError:
            self.statuses[name][0] += 1  # of the server that was killed
        if sum(counts.total() for counts in self.statuses.values()) >= KILL_AFTER:
            self.enough.set()

    async def come(self, number: int) -> None:
        chance = random.Random(number)
        way = chance.choice(("whole", "stream", "leave"))
        url, name = chance.choice(self.urls), sorted(LIMITED)[number % len(LIMITED)]
        await self.ask(name, url, chance.randint(1, 12), way)

    async def be_cut_off(self, name: str, url: str, has_begun: asyncio.Event) -> None:
        with pytest.raises(httpx.TransportError):
            async with self.asking(name, url, body(1_900, stream=True)) as answer:
                async for _ in answer.aiter_lines():
                    has_begun.set()


async def come_and_kill(crowd: Crowd, child: asyncio.subprocess.Process, url: str) -> None:
    """Long streams begin at a server, then the crowd comes, and amid it that server is killed."""
    begun = [asyncio.Event() for _ in range(VICTIMS)]
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for i, event in enumerate(begun):
            group.create_task(crowd.be_cut_off(("requests", "at_once")[i % 2], url, event))
        await asyncio.gather(*(event.wait() for event in begun))
        for number in range(CLIENTS):
            group.create_task(crowd.come(number))
        await crowd.enough.wait()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        crowd.killed_at = time.monotonic()


def read(killed_at: float, *diaries: Path) -> list[tuple[str, float, str, str]]:
    """What, when, whose and which, in the order of time; what a kill ended too."""
    lines = [line.split() for diary in diaries for line in diary.read_text().splitlines()]
    told = [(what, float(at), tenant, id) for what, at, tenant, id in lines]
    ended = {id for what, _, _, id in told if what == "end"}
    cut = [("end", killed_at, tenant, id) for _, _, tenant, id in told if id not in ended]
    return sorted(told + cut, key=lambda event: event[1])


async def ledger(world) -> dict[str, UsageRecord]:
    async with world.db.read(None) as session:
        return {row.request_id: row for row in await session.scalars(select(UsageRecord))}


async def test_200_clients_two_servers_and_a_kill(world, redis, redis_server, tmp_path):
    for name, limits in LIMITED.items():
        await world.add_tenant(name, limits)
    diaries = [tmp_path / "a.diary", tmp_path / "b.diary"]
    a, b = (process(world, redis_server.url, diary) for diary in diaries)
    pool = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(limits=pool, timeout=PATIENCE)
    async with a as (child, url_a), b as (_, url_b), client:
        crowd = Crowd(client, [url_a, url_b], world.keys)
        await come_and_kill(crowd, child, url_a)
        await world.until(lambda: is_swept(redis), PATIENCE)
        found = await ledger(world)
        await check_counts(world, crowd, read(crowd.killed_at, *diaries), found)
        await check_redis(world, redis, found)
        await check_places_are_free(crowd, url_b)


async def is_swept(redis) -> bool:
    """Whether no request is open and none waits for the ledger.

    None may be open longer than a lease after its last word.
    """
    now = await clock(redis)
    opened = await redis.zrange("limits:open", 0, -1, withscores=True)
    assert all(score / 1e6 <= now + LEASE_S for _, score in opened)
    return not opened and not await redis.llen(KEY)


async def check_counts(world, crowd, diary, found) -> None:
    """Every request that an engine saw is in the ledger once, and no limit was passed."""
    names = {world.tenants[name]: name for name in LIMITED}
    started = [(names[tenant], id) for what, _, tenant, id in diary if what == "start"]
    seen = {id for _, id in started}
    assert seen <= found.keys()
    assert {found[id].completion_tokens for id in found.keys() - seen} <= {0}
    by_name = Counter(name for name, _ in started)
    assert by_name["requests"] <= 20
    tokens = Counter[str]()
    for row in found.values():
        tokens[names[row.tenant_id]] += row.prompt_tokens + row.completion_tokens
    assert tokens["tokens"] <= 400
    assert tokens["budget"] <= 300
    assert all(crowd.statuses[name][429] for name in LIMITED), crowd.statuses
    assert sum(row.outcome == SERVER_DIED for row in found.values()) >= VICTIMS
    running = peak = 0
    for what, _, tenant, _ in diary:
        if names[tenant] == "at_once":
            running += 1 if what == "start" else -1
            peak = max(peak, running)
    assert VICTIMS / 2 < peak <= 9


async def check_redis(world, redis, found) -> None:
    """Redis charged what the ledger says, to the token, and holds no lease."""
    for name, limits in LIMITED.items():
        tenant = world.tenants[name]
        rows = [row for row in found.values() if row.tenant_id == tenant]
        charged = sum(row.prompt_tokens + row.completion_tokens for row in rows)
        bucket = Bucket("tenant", tenant, Limits.of(limits))
        standing = await Limiter(redis, period_s=YEAR).look(tenant, [bucket])
        used = {use.name: use.used for use in standing.uses}
        assert used["tokens_per_day"] == used["tokens_per_month"] == charged
        assert used["max_concurrency"] == 0
        keys = [key async for key in redis.scan_iter(f"limits:{{{tenant}}}:*:leases")]
        assert keys == []


async def check_places_are_free(crowd, url) -> None:
    """As many as may run at once can, at once: the dead server's places are given back."""
    crowd.statuses["at_once"].clear()
    fresh = httpx.AsyncClient(timeout=PATIENCE)  # the server may be closing what was idle
    async with fresh as crowd.client, asyncio.TaskGroup() as group:
        for _ in range(9):
            group.create_task(crowd.ask("at_once", url, 3, "whole"))
    assert crowd.statuses["at_once"] == {200: 9}
