"""Anthropic's face over raw HTTP: messages, their events, tools and conversations."""

import json

import pytest
from messages_kit import HELLO, PREFILL, WEATHER, ask, body_of, events

from loraplex.platform.hermes import call_text

pytestmark = pytest.mark.anyio


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
