"""Anthropic's face over raw HTTP: what is refused, what is let pass, and the shape of errors."""

import pytest
from messages_kit import HELLO, PREFILL, WEATHER, ask, events

from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

CALL = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
CALLING = {"role": "assistant", "content": [CALL]}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"container": "c_1"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, CALLING], "tools": [WEATHER]}, "messages"),
        ({"messages": [*HELLO, PREFILL], "output_config": {"format": FORM}}, "output_config"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages.0.content.0.tool_use.id",
        ),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"max_tokens": 5_000}, "max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(world, fields, named):
    answer = await ask(world, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"]["param"] == named
    assert named.split(".")[0] in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "disabled"}, "mcp_servers": [], "service_tier": "auto"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "metadata": {"user_id": "u1"}},
        {"tools": [WEATHER | {"type": "custom", "cache_control": {"type": "ephemeral"}}]},
    ],
)
async def test_what_changes_nothing_is_accepted(world, fields):
    assert (await ask(world, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"anthropic-version": "2023-06-01"}, 200),
        ({"anthropic-version": "2026-10-21"}, 200),
        ({"anthropic-version": "1999-01-01"}, 400),
        ({"anthropic-beta": "prompt-caching-2024-07-31, token-counting-2024-11-01"}, 200),
        ({"anthropic-beta": "computer-use-2025-01-24"}, 400),
    ],
)
async def test_versions_and_betas(world, headers, status):
    answer = await ask(world, headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["details"]["param"] in headers


async def test_every_error_has_anthropics_shape(world):
    await world.add_tenant("slow-messages", TenantLimits(requests_per_minute=1))
    await ask(world, "slow-messages")
    reader = await world.make_key(world.tenants["acme"], "adapters:read")
    async with world.client() as client:
        found = {
            400: await client.post("/v1/messages", content=b"{"),
            401: await ask(world, "lpx_wrong"),
            403: await ask(world, reader),
            404: await ask(world, model="nobody"),
            405: await client.get("/v1/messages"),
            413: await client.post("/v1/messages", content=b" " * (5 << 20)),
            429: await ask(world, "slow-messages"),
        }
    world.engine.die()
    found[503] = await ask(world)
    types = {}
    for status, answer in found.items():
        body = answer.json()
        assert answer.status_code == status
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["request-id"]
        types[status] = body["error"]["type"]
    assert types == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    assert found[429].json()["error"]["details"]["error_code"] == "rate_limit_exceeded"


async def test_an_unknown_fault_has_the_shape_too(world, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("loraplex.platform.api.messages.read_chat", broken)
    answer = await ask(world)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")


async def test_an_error_in_mid_stream_is_an_event(world):
    world.engine.tokens = list(b"Hi")
    world.engine.hold = Dying(world.engine, after=1)
    *_, last = await events(world)
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert last["error"]["details"]["error_code"] == "engine_restarted"
    assert last["request_id"].startswith("req_")


class Dying:
    """A `hold` that lets some tokens out, then has the engine die."""

    def __init__(self, engine, after):
        self.engine, self.after = engine, after

    async def wait(self):
        self.after -= 1
        if self.after < 0:
            self.engine.die()


async def test_deep_bodies_are_refused_not_failed(world):
    deep = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    call = b'{"type":"tool_use","id":"a","name":"b","input":%b}'
    message = b'[{"role":"assistant","content":[' + call + b']},{"role":"user","content":"x"}]'
    async with world.client() as client:
        for depth in (deep, b'{"a":' * 900 + b"1" + b"}" * 900):
            body = b'{"model":"tiny-base","max_tokens":1,"messages":%b}' % (message % depth)
            answer = await client.post("/v1/messages", content=body)
            assert answer.status_code == 400
