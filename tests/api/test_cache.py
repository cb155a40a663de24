"""What the API tells of a tenant's prefix cache: its own, by replica for operators, and outages."""

import pytest

from loraplex.engine.protocol import CacheEvent, CacheEvents
from loraplex.platform.limits import connect
from loraplex.platform.prefix_state import PrefixState

pytestmark = pytest.mark.anyio


def cache(world, *events):
    """Have the engine say that it stored or evicted these blocks of acme."""
    told = (CacheEvent(kind, world.tenants["acme"], tuple(blocks), 0) for kind, blocks in events)
    world.engine.cache_listener(CacheEvents(tuple(told)))


async def ask(world, key, path="/v1/cache", **params):
    async with world.client(key) as client:
        return await client.get(path, params=params)


async def test_a_tenant_without_requests_has_nothing(world):
    tenant = await world.add_tenant("new")
    assert (await ask(world, "new")).json() == {
        "object": "cache",
        "tenant_id": tenant,
        "resident_blocks": 0,
        "complete": True,
        "since": None,
        "requests": 0,
        "hits": 0,
        "queried_tokens": 0,
        "cached_tokens": 0,
        "hit_rate": 0.0,
        "evicted_blocks": 0,
        "saved_seconds": 0.0,
    }


async def test_requests_and_the_engines_events_are_shown(world):
    await world.add_tenant("busy")
    async with world.client("busy") as client:
        for world.engine.cached_tokens in (0, 6):
            body = {"model": "tiny-base", "prompt": ["abcdefgh", "ijkl"], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    events = (CacheEvent("stored", world.tenants["busy"], ("a", "b"), 32),)
    world.engine.cache_listener(CacheEvents(events))
    await world.prefixes.flush()
    shown = (await ask(world, "busy")).json()
    assert shown["resident_blocks"] == 2
    assert (shown["requests"], shown["hits"]) == (4, 2)
    assert (shown["queried_tokens"], shown["cached_tokens"]) == (24, 12)
    assert shown["hit_rate"] == 0.5
    assert shown["since"] > 1_700_000_000


async def test_an_operator_sees_any_tenant_by_replica(world):
    cache(world, ("stored", "abc"), ("evicted", "b"))
    await world.prefixes.flush()
    acme, globex = world.tenants["acme"], world.tenants["globex"]
    shown = (await ask(world, "operator", f"/v1/tenants/{acme}/cache")).json()
    assert shown["tenant_id"] == acme
    on = [each for each in shown["replicas"] if each["resident_blocks"]]
    assert [(each["resident_blocks"], each["complete"]) for each in on] == [(2, True)]
    assert (await ask(world, "operator", tenant_id=acme)).json()["resident_blocks"] == 2
    assert (await ask(world, "operator", tenant_id=globex)).json()["resident_blocks"] == 0


async def test_a_tenant_sees_itself_alone_and_no_replicas(world):
    assert "replicas" not in (await ask(world, "acme")).json()
    other = await ask(world, "acme", tenant_id=world.tenants["globex"])
    assert other.status_code == 404
    unknown = await ask(world, "operator", "/v1/tenants/ten_nobody/cache")
    assert unknown.status_code == 404
    nameless = await ask(world, "operator")
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "tenant_id")


async def test_without_redis_it_says_to_come_back(world, tmp_path, monkeypatch):
    client = connect(f"unix://{tmp_path}/nothing.sock")
    dead = PrefixState(client, "test", world.engine)
    monkeypatch.setattr(world.prefixes, "of", dead.of)
    for key, path in (
        ("acme", "/v1/cache"),
        ("operator", f"/v1/tenants/{world.tenants['acme']}/cache"),
    ):
        answer = await ask(world, key, path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert "retry-after" in answer.headers
    await client.aclose()
