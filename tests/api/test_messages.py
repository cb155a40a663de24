"""Anthropic's face over raw HTTP: bodies, events and errors."""

import json

import pytest

from loraplex.platform.hermes import call_text
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

PREFILL = {"role": "assistant", "content": "Once upon"}
CALL = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
CALLING = {"role": "assistant", "content": [CALL]}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


def body_of(**fields):
    return {"model": "tiny-base", "max_tokens": 200, "messages": HELLO} | fields


async def ask(world, key="acme", headers=None, **fields):
    async with world.client(key) as client:
        return await client.post("/v1/messages", json=body_of(**fields), headers=headers)


async def events(world, **fields):
    """The names and the data of a stream's events."""
    answer = await ask(world, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    blocks = answer.text.strip().split("\n\n")
    pairs = [block.split("\n", 1) for block in blocks]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in data]
    return data


async def test_a_message(world):
    world.engine.tokens = list(b"Hi")
    world.engine.cached_tokens = 6
    answer = await ask(world)
    body = answer.json()
    assert body | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "tiny-base",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("user:Hello\nassistant:") - 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 6,
            "output_tokens": 2,
        },
    }
    assert body["id"].startswith("msg_")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-loraplex-cached-tokens"] == "6"


async def test_an_answer_goes_on_with_what_is_prefilled(world):
    world.engine.tokens = list(b" a time")
    answer = await ask(world, messages=[*HELLO, PREFILL])
    assert answer.json()["content"] == [{"type": "text", "text": " a time"}]
    prompt = b"user:Hello\nassistant:Once upon"
    assert bytes(world.engine.requests[0].token_ids) == prompt
    async with world.client() as client:
        asked = {"model": "tiny-base", "messages": [*HELLO, PREFILL]}
        counted = await client.post("/v1/messages/count_tokens", json=asked)
    assert counted.json() == {"input_tokens": len(prompt)}


async def test_a_stream_has_anthropics_events_in_their_order(world):
    world.engine.tokens = list(b"Hi")
    world.engine.cached_tokens = 6
    start, *others = await events(world)
    assert start["type"] == "message_start"
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == len("user:Hello\nassistant:")
    assert others == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {
                "input_tokens": len("user:Hello\nassistant:") - 6,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 6,
                "output_tokens": 2,
            },
        },
        {"type": "message_stop"},
    ]


async def test_text_and_calls_are_blocks_of_their_own(world):
    said = "Let me see. " + call_text("weather", {"city": "Rome"}) + call_text("weather", {})
    world.engine.tokens = list(said.encode())
    whole = (await ask(world, tools=[WEATHER])).json()
    first, second, third = whole["content"]
    assert first == {"type": "text", "text": "Let me see."}
    assert second | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "weather",
        "input": {"city": "Rome"},
    }
    assert (third["input"], whole["stop_reason"]) == ({}, "tool_use")
    assert second["id"] != third["id"]
    streamed = await events(world, tools=[WEATHER])
    starts = [each for each in streamed if each["type"] == "content_block_start"]
    stops = [each["index"] for each in streamed if each["type"] == "content_block_stop"]
    assert [each["content_block"]["type"] for each in starts] == ["text", "tool_use", "tool_use"]
    assert stops == [0, 1, 2]
    written = "".join(
        each["delta"]["partial_json"]
        for each in streamed
        if each["type"] == "content_block_delta" and each["index"] == 1
    )
    assert json.loads(written) == {"city": "Rome"}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "kind", "calls"),
    [
        ({"type": "auto"}, None, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, 1),
        ({"type": "any"}, "grammar", 2),
        ({"type": "tool", "name": "weather"}, "grammar", 1),
        ({"type": "none"}, None, 0),
    ],
)
async def test_the_choice_of_tools(world, choice, kind, calls):
    world.engine.tokens = list("\n".join([call_text("weather", {"city": "Rome"})] * 2).encode())
    answer = (await ask(world, tools=[WEATHER], tool_choice=choice)).json()
    used = [block for block in answer["content"] if block["type"] == "tool_use"]
    guide = world.engine.requests[-1].sampling.guide
    assert len(used) == calls
    assert (guide and guide.kind) == kind
    assert answer["stop_reason"] == ("tool_use" if calls else "end_turn")


async def test_why_an_answer_ended(world):
    world.engine.tokens = list(b"one two three")
    cut = (await ask(world, max_tokens=3)).json()
    stopped = (await ask(world, stop_sequences=["three", " t"])).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "one")
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " t")
    assert stopped["content"][0]["text"] == "one"
    streamed = await events(world, stop_sequences=[" t"])
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " t"}


async def test_an_empty_answer_has_no_blocks(world):
    world.engine.tokens = []
    assert (await ask(world)).json()["content"] == []
    kinds = [each["type"] for each in await events(world)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


async def test_a_call_that_is_cut_off_keeps_what_came_and_broken_ones_are_text(world):
    said = call_text("weather", {"city": "Rome"})
    world.engine.tokens = list(said.encode())
    cut = (await ask(world, tools=[WEATHER], max_tokens=said.index("me"))).json()
    assert cut["stop_reason"] == "max_tokens"
    world.engine.tokens = list(said.replace('"Rome"}', "Rome}").encode())
    broken = (await ask(world, tools=[WEATHER])).json()
    assert [block["type"] for block in broken["content"]] == ["text"]
    assert (broken["stop_reason"], "Rome" in broken["content"][0]["text"]) == ("end_turn", True)


async def test_a_conversation_with_tools_reaches_the_template(world):
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "?"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Well.", "citations": None},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sun"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}]
    answer = await ask(world, messages=messages, system=system, max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert bytes(world.engine.requests[-1].token_ids).decode() == (
        "system:Be brief.\n"
        "user:Where\n?\n"
        f"assistant:Well.\n{call_text('weather', {'city': 'é'})}\n"
        "user:<tool_response>\nSun\n</tool_response>\n<tool_response>\nError: \n</tool_response>\n"
        "user:So?\n"
        "assistant:"
    )


async def test_sampling_and_form_reach_the_engine(world):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output = {"format": {"type": "json_schema", "schema": schema}}
    await ask(world, temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, output_config=output)
    sampling = world.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.max_tokens, json.loads(sampling.guide.text)) == (9, schema)


async def test_counting_runs_nothing_and_is_exact(world):
    counted = body_of(system="Be brief.", tools=[WEATHER])
    del counted["max_tokens"]
    async with world.client() as client:
        answer = await client.post("/v1/messages/count_tokens", json=counted)
        assert not world.engine.requests
        ran = (await client.post("/v1/messages", json=counted | {"max_tokens": 1})).json()
        missing = await client.post("/v1/messages/count_tokens", json=counted | {"model": "nobody"})
    assert answer.json() == {"input_tokens": ran["usage"]["input_tokens"]}
    assert missing.json()["error"]["type"] == "not_found_error"


async def test_a_message_is_charged_as_a_chat_is(world):
    tenant = "charged-messages"
    await world.add_tenant(tenant)
    usage = (await ask(world, tenant, max_tokens=3)).json()["usage"]
    (row,) = await world.usage_rows(tenant)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["input_tokens"], 3)


async def test_an_adapter_is_named_by_model(world):
    await world.add_adapter("acme", "poet", digest="c" * 64)
    answer = await ask(world, model="poet")
    assert answer.json()["model"] == "poet@1"
    assert answer.headers["x-loraplex-digest"] == "c" * 64
    assert (await ask(world, "globex", model="poet")).status_code == 404


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
