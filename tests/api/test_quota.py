"""Limits by the API: headers on every answer, every limit shown, every refusal explained."""

import pytest
from command_line import command_line
from limit_kit import YEAR
from redis.exceptions import ConnectionError as RedisDown

from loraplex.platform.limits import Limiter
from loraplex.platform.quotas import Limits, TenantLimits

pytestmark = pytest.mark.anyio
CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PATH = "/v1/chat/completions"
RATES = {
    f"x-ratelimit-{part}-{kind}"
    for part in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
}


@pytest.fixture(autouse=True)
async def endless(world, redis):
    """A minute that does not end during a test."""
    limiter = Limiter(redis, period_s=YEAR)
    world.hold_to(limiter)


@pytest.fixture
async def limited(world):
    """A tenant with a rate of requests and one of tokens."""
    await world.add_tenant("limited", TenantLimits(50, 10_000))
    async with world.client("limited") as client:
        yield client


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"stream": True}, 200),
        ({"temperature": 9}, 400),
        ({"nonsense": 1}, 400),
        ({"max_tokens": 10**6}, 400),
        ({"model": "nobody"}, 404),
        ({"max_tokens": None, "messages": []}, 400),
    ],
)
async def test_every_answer_tells_how_limits_stand(limited, change, status):
    answer = await limited.post(PATH, json=CHAT | change)
    assert answer.status_code == status, answer.text
    assert answer.headers.keys() >= RATES
    assert answer.headers["x-ratelimit-limit-requests"] == "50"
    assert answer.headers["x-ratelimit-limit-tokens"] == "10000"
    assert answer.headers["x-loraplex-limit"].startswith("tenant ")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engines_failure_tells_them_too(world, limited, stream):
    world.engine.fail = "overloaded"
    answer = await limited.post(PATH, json=CHAT | {"stream": stream})
    assert answer.status_code == 503
    assert answer.headers["x-ratelimit-remaining-requests"] == "49"


async def test_a_broken_body_and_the_other_face_tell_them_too(limited):
    headers = {"content-type": "application/json"}
    answer = await limited.post(PATH, content=b"{", headers=headers)
    assert (answer.status_code, answer.headers.keys() >= RATES) == (400, True)
    answer = await limited.post("/v1/messages", json={"model": "tiny-base"})
    assert (answer.status_code, answer.headers.keys() >= RATES) == (400, True)
    assert answer.json()["type"] == "error"


async def test_strangers_are_told_nothing(world):
    async with world.client("lpx_wrong") as client:
        answer = await client.post(PATH, json=CHAT)
    assert answer.status_code == 401
    assert not answer.headers.keys() & (RATES | {"x-loraplex-limit"})


async def test_a_rate_refuses_with_its_name_and_when_to_come_back(world):
    await world.add_tenant("one", TenantLimits(1))
    async with world.client("one") as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        refused = await client.post(PATH, json=CHAT)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "This tenant's limit of 1 requests per minute is reached" in error["message"]
    assert refused.headers["x-loraplex-limit"] == "tenant requests_per_minute"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert int(refused.headers["retry-after-ms"]) > 0


async def test_a_budget_refuses_for_good(world):
    await world.add_tenant("spent", TenantLimits(tokens_per_day=60))
    async with world.client("spent") as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        refused = await client.post(PATH, json=CHAT)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert "tokens per day does not suffice: 50 are used or reserved" in error["message"]
    assert refused.headers["x-loraplex-limit"] == "tenant tokens_per_day"


async def test_a_keys_own_limit_holds_that_key_only(world):
    await world.add_tenant("two")
    tight = await world.make_key(world.tenants["two"], "infer", limits=Limits(1))
    async with world.client(tight) as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        refused = await client.post(PATH, json=CHAT)
        assert refused.headers["x-loraplex-limit"] == "key requests_per_minute"
    async with world.client("two") as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
    counted = world.app.state.context.metrics.exposition().decode()
    line = 'loraplex_limited_requests_total{bucket="key",limit="requests_per_minute"} 1.0'
    assert line in counted


async def test_an_adapters_limit_holds_it_alone_and_in_compositions(world):
    await world.add_tenant("owner")
    await world.add_adapter("owner", "busy", "a" * 64)
    await world.add_adapter("owner", "calm", "b" * 64)
    async with world.client("owner") as client:
        changed = await client.patch("/v1/adapters/busy", json={"requests_per_minute": 2})
        assert changed.status_code == 200, changed.text
        composed = {"adapters": [{"id": "calm"}, {"id": "busy"}]}
        for body in (CHAT | {"model": "busy"}, CHAT | composed):
            assert (await client.post(PATH, json=body)).status_code == 200
        for body in (CHAT | {"model": "busy@1"}, CHAT | composed):
            refused = await client.post(PATH, json=body)
            assert refused.status_code == 429
            assert refused.headers["x-loraplex-limit"] == "adapter requests_per_minute"
        assert (await client.post(PATH, json=CHAT | {"model": "calm"})).status_code == 200
        shown = (await client.get("/v1/quota", params={"adapter": ["busy", "calm"]})).json()
    used = [
        bucket["limits"][0]["used"] for bucket in shown["buckets"] if bucket["kind"] == "adapter"
    ]
    assert used == [2, 0]


async def test_a_default_fits_the_smallest_bucket(world):
    await world.add_tenant("small", TenantLimits(None, 5_000))
    key = await world.make_key(world.tenants["small"], "infer", limits=Limits(tokens_per_day=30))
    async with world.client(key) as client:
        answer = await client.post(PATH, json=CHAT | {"max_tokens": None})
        assert answer.status_code == 200, answer.text
        assert world.engine.requests[-1].sampling.max_tokens == 30 - 21
        never = await client.post(PATH, json=CHAT | {"max_tokens": 10})
    assert never.status_code == 400
    assert "this key's limit of 30 tokens per day can ever hold" in never.json()["error"]["message"]


async def test_everything_is_shown_as_it_stands(world):
    limits = TenantLimits(5, 1000, 3, tokens_per_month=9_000, storage_bytes=5_000, max_adapters=7)
    await world.add_tenant("shown", limits)
    await world.add_adapter("shown", "poet")
    async with world.client("shown") as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        quota = (await client.get("/v1/quota")).json()
    tenant, key = quota["buckets"]
    assert (tenant["kind"], tenant["id"]) == ("tenant", world.tenants["shown"])
    assert key["kind"] == "key"
    shown = {use["name"]: (use["limit"], use["used"], use["remaining"]) for use in tenant["limits"]}
    assert shown == {
        "requests_per_minute": (5, 1, 4),
        "tokens_per_minute": (1000, 25, 975),
        "max_concurrency": (3, 0, 3),
        "tokens_per_day": (None, 25, None),
        "tokens_per_month": (9000, 25, 8975),
    }
    assert quota["storage_bytes"] == {"used": 1000, "limit": 5000}
    assert quota["adapters"] == {"used": 1, "limit": 7}
    assert quota["refusals"] == []


async def test_an_operator_sees_any_tenant_and_key_and_others_see_their_own(world):
    await world.add_tenant("seen", TenantLimits(9))
    async with world.client("seen") as client:
        mine = (await client.get("/v1/quota")).json()
    key_id = mine["buckets"][1]["id"]
    named = {"tenant_id": world.tenants["seen"]}
    async with world.client("operator") as client:
        theirs = (await client.get("/v1/quota", params=named | {"key_id": key_id})).json()
        assert theirs["buckets"][1]["id"] == key_id
        without = (await client.get("/v1/quota", params=named)).json()
        assert [bucket["kind"] for bucket in without["buckets"]] == ["tenant"]
        assert (await client.get("/v1/quota")).status_code == 400
    async with world.client("acme") as client:
        for params in (named, {"key_id": key_id}, {"adapter": "nobody"}):
            assert (await client.get("/v1/quota", params=params)).status_code == 404
    plain = await world.make_key(world.tenants["seen"], "infer")
    async with world.client(plain) as client:
        assert (await client.get("/v1/quota", params={"key_id": key_id})).status_code == 404


async def test_a_request_is_explained_before_it_is_sent(world):
    await world.add_tenant("asks", TenantLimits(2, 100))
    async with world.client("asks") as client:

        async def ask(**body: object) -> dict:
            asked = {"model": "tiny-base", "prompt_tokens": 21, "max_tokens": 4} | body
            return (await client.post("/v1/quota/explain", json=asked)).json()

        yes = await ask()
        assert yes["admitted"]
        assert yes["tokens"] == 25
        assert (await ask(max_tokens=None))["max_tokens"] == 79
        never = await ask(max_tokens=80)
        assert (never["admitted"], never["retry_after_s"]) == (False, None)
        assert "can ever hold" in never["explanation"]
        for _ in range(2):
            assert (await client.post(PATH, json=CHAT)).status_code == 200
        no = await ask()
        assert not no["admitted"]
        assert (no["binding"]["kind"], no["binding"]["name"]) == ("tenant", "requests_per_minute")
        refused = await client.post(PATH, json=CHAT)
        assert refused.json()["error"]["message"][:60] == no["explanation"][:60]
        id = refused.headers["x-request-id"]
        why = (await client.get(f"/v1/quota/refusals/{id}")).json()
        assert (why["kind"], why["name"], why["tokens"]) == ("tenant", "requests_per_minute", 25)
        assert (await client.get("/v1/quota")).json()["refusals"] == [why]
        assert (await client.get("/v1/quota/refusals/req_none")).status_code == 404
    async with world.client("acme") as client:
        assert (await client.get(f"/v1/quota/refusals/{id}")).status_code == 404


async def test_while_redis_is_away_rates_hold_and_usage_is_counted(world, monkeypatch):
    async def down(*_: object, **__: object) -> None:
        raise RedisDown("connection refused")

    limiter = world.app.state.context.limiter
    tenant = await world.add_tenant("steady", TenantLimits(2))
    async with world.client("steady") as client:
        with monkeypatch.context() as away:
            for name in limiter._scripts._scripts:
                away.setitem(limiter._scripts._scripts, name, down)
            for status in (200, 200, 429):
                answer = await client.post(PATH, json=CHAT)
                assert answer.status_code == status, answer.text
            assert answer.headers["x-loraplex-limit"] == "tenant requests_per_minute"
            assert limiter.is_degraded
            refused = await client.get("/v1/quota")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "limiter_down")
        await limiter.ping()
        await limiter.catch_up()
        assert not limiter.is_degraded
        quota = (await client.get("/v1/quota")).json()
        assert {use["used"] for use in quota["buckets"][0]["limits"]} == {0}
        assert [row["requests"] for row in await world.usage_rows("steady")] == [2]
        assert (await client.post(PATH, json=CHAT)).status_code == 200
    assert tenant == quota["tenant_id"]


async def test_the_metrics_say_when_limits_are_held_without_redis(world, monkeypatch):
    metrics = world.app.state.context.metrics
    assert b"loraplex_quota_backend_degraded 0.0" in metrics.exposition()
    monkeypatch.setattr(Limiter, "is_degraded", True)
    assert b"loraplex_quota_backend_degraded 1.0" in metrics.exposition()


async def test_the_ledger_has_times_and_groups(world):
    await world.add_tenant("ledger")
    async with world.client("ledger") as client:
        assert (await client.post(PATH, json=CHAT)).status_code == 200
        groups = {"group_by": ["key", "model", "arm"]}
        (total,) = (await client.get("/v1/usage", params=groups)).json()["data"]
        assert (total["model"], total["arm"], total["total_tokens"]) == ("tiny-base", None, 25)
        assert total["key_id"].startswith("key_")
        by_accept = await client.get("/v1/usage", headers={"accept": "text/csv"})
        by_query = await client.get("/v1/usage", params={"format": "csv"})
        as_json = await client.get(
            "/v1/usage", params={"format": "json"}, headers={"accept": "text/csv"}
        )
    assert by_accept.headers["content-type"].startswith("text/csv")
    assert by_accept.text == by_query.text
    head, line = by_accept.text.splitlines()
    assert head.startswith("tenant_id,key_id,adapter,model,arm,day,requests,prompt_tokens")
    assert line == ",,,,,,1,21,4,0,25"
    assert as_json.json()["object"] == "list"


async def test_the_command_line_shows_explains_and_says_why(world):
    tenant = await world.add_tenant("typist", TenantLimits(1, max_adapters=2))
    async with command_line(world, "typist", "quota") as run:
        yes = await run("explain", "tiny-base", "--prompt-tokens", "9", "--json")
        assert yes["admitted"]
        async with world.client("typist") as client:
            assert (await client.post(PATH, json=CHAT)).status_code == 200
            refused = await client.post(PATH, json=CHAT)
        assert "admitted:       no" in await run("explain", "tiny-base", "--prompt-tokens", "9")
        shown = await run("show", "--json")
        assert [(row["id"], row["limit"], row["of"], row["remaining"]) for row in shown] == [
            (tenant, "requests_per_minute", 1, 0),
            (tenant, "max_adapters", 2, 2),
        ]
        assert "requests_per_minute" in await run("why", refused.headers["x-request-id"])
        assert "No limit has refused" in await run("why", "req_none", code=1)
