"""However a request ends, its engine work is aborted, its tokens charged and its lease released."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from loraplex.platform import limits
from loraplex.platform.quotas import Bucket, TenantLimits

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
PROMPT_TOKENS = len(b"user:Hello\nassistant:")
ALONE = TenantLimits(max_concurrency=1, tokens_per_minute=1000)


def body(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "tiny-base", "messages": messages, "max_tokens": 100, **changes}


@asynccontextmanager
async def raw_request(url: str, key: str, request: dict[str, Any]):
    """A connection that has sent a request and can be dropped at any time."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps(request).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def free_tokens(world, tenant: str) -> int:
    """What is left of the tenant's minute; the asking charges nothing."""
    buckets = (Bucket("tenant", world.tenants[tenant], ALONE),)
    standing = await world.limiter.look(world.tenants[tenant], buckets)
    return standing.use("tokens_per_minute").remaining


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_caller_who_leaves_frees_everything_and_pays_for_what_came(
    world, streaming, tokens
):
    await world.add_tenant("alone", ALONE)
    world.tap(tokens)
    async with world.listening() as url:
        async with raw_request(url, world.keys["alone"], body(stream=streaming)) as reader:
            await world.until(lambda: bool(world.engine.in_flight))
            await world.until(lambda: world.engine.stats.generated_tokens == tokens)
            if streaming and tokens:
                await reader.readuntil(b'"content":"n"')
        await world.until(lambda: not world.engine.in_flight)
        assert world.engine.aborts == [world.engine.requests[0].request_id]
        found = await world.until(lambda: world.records())
        world.engine.hold = None
        async with world.client("alone") as client:
            after = await client.post(PATH, json=body(max_tokens=2))
    assert after.status_code == 200, after.text
    (row,) = found
    charged = (PROMPT_TOKENS if tokens else 0, tokens)
    assert (row.prompt_tokens, row.completion_tokens) == charged
    assert row.outcome == "client_disconnected"
    assert await free_tokens(world, "alone") == 1000 - sum(charged) - PROMPT_TOKENS - 2


async def test_all_choices_of_a_request_are_aborted_together(world):
    world.tap(4)
    async with world.listening() as url:
        async with raw_request(url, world.keys["acme"], body(n=4)):
            await world.until(lambda: world.engine.stats.generated_tokens == 4)
        await world.until(lambda: world.engine.aborts)
    assert world.engine.aborts == [world.engine.requests[0].request_id]
    assert world.engine.requests[0].choices == 4


async def test_a_cancelled_request_is_settled_all_the_same(world):
    world.tap(2)
    async with world.client() as client:
        task = asyncio.create_task(client.post(PATH, json=body()))
        await world.until(lambda: world.engine.stats.generated_tokens == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (row,) = await world.records()
    assert (row.completion_tokens, row.outcome) == (2, "cancelled")
    assert not world.engine.in_flight


async def test_a_server_whose_send_raises_is_understood(world):
    """ASGI 2.4 servers raise `OSError` on a send to a caller who left, and say nothing else."""
    content = json.dumps(body(stream=True)).encode()
    requests = iter([{"type": "http.request", "body": content, "more_body": False}])
    sent = []

    async def receive():
        if (message := next(requests, None)) is None:
            await asyncio.Event().wait()
        return message

    async def send(message):
        sent.append(message)
        if len(sent) > 3:
            raise OSError("gone")

    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "authorization": f"Bearer {world.keys['acme']}",
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await world.app(scope, receive, send)
    assert len(sent) == 4
    (row,) = await world.records()
    assert row.outcome == "client_disconnected"
    assert 2 <= row.completion_tokens < 100
    assert not world.engine.in_flight


async def test_the_lease_lives_as_long_as_the_generation(world, redis, monkeypatch):
    """Counts heartbeats, by the lease's end that each puts off; none runs out meanwhile."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    leases = f"limits:{{{await world.add_tenant('alone', ALONE)}}}:tenant:leases"

    async def end() -> float:
        ((_, ends),) = await redis.zrange(leases, 0, -1, withscores=True)
        return ends

    async def renewed() -> bool:
        return await end() > before

    world.engine.hold = asyncio.Event()
    async with world.client("alone") as client:
        task = asyncio.create_task(client.post(PATH, json=body(max_tokens=5)))
        await world.until(lambda: bool(world.engine.in_flight))
        for _ in range(4):
            before = await end()
            await world.until(renewed)
            refused = await client.post(PATH, json=body(max_tokens=5))
            assert refused.status_code == 429
        world.engine.hold.set()
        assert (await task).status_code == 200
        assert (await client.post(PATH, json=body(max_tokens=5))).status_code == 200


async def test_a_next_request_never_meets_the_lease_of_the_last(world):
    await world.add_tenant("alone", TenantLimits(max_concurrency=1))
    headers = {"authorization": f"Bearer {world.keys['alone']}"}
    async with world.listening() as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        for i in range(20):
            answer = await client.post(PATH, json=body(max_tokens=2, stream=i % 2 == 0))
            assert answer.status_code == 200, answer.text
