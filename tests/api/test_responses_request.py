"""Bodies of OpenAI's Responses API: what they mean as a chat, and what is refused."""

import json

import pytest

from loraplex.platform.api.chat import MAX_PAST_CALLS
from loraplex.platform.api.responses_request import ResponsesRequest
from loraplex.platform.hermes import call_text

pytestmark = pytest.mark.anyio

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"a"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
MADE = {"name": "weather", "arguments": CALL["arguments"]}
PAST = {"id": "c1", "type": "function", "function": MADE}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
SAID = {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
PLACE = {"type": "json_schema", "name": "place", "schema": PARAMETERS}
LOGPROBS = ["message.output_text.logprobs"]


async def ask(world, path=PATH, **fields):
    body = {"model": "tiny-base"} | ({"input": "Hello"} if path == PATH else {}) | fields
    async with world.client() as client:
        return await client.post(path, json=body)


def prompt_of(world):
    return bytes(world.engine.requests[-1].token_ids).decode()


ITEMS = [
    ("Hello", [HELLO]),
    ([HELLO | {"type": "message", "id": "m"}], [HELLO]),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    ([{"role": "developer", "content": "x"}, HELLO], [{"role": "system", "content": "x"}, HELLO]),
    (
        [HELLO, REASONING, CALL, CALL | {"call_id": "c2"}, RESULT],
        [HELLO, {"role": "assistant", "tool_calls": [PAST, PAST | {"id": "c2"}]}, ANSWERED],
    ),
    (
        [
            HELLO,
            {"type": "message", "role": "assistant", "content": [SAID], "status": "completed"},
            CALL,
            RESULT | {"output": [{"type": "input_text", "text": "sunny"}]},
            HELLO,
        ],
        [HELLO, {"role": "assistant", "content": "Wait.", "tool_calls": [PAST]}, ANSWERED, HELLO],
    ),
    (
        [HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO],
        [HELLO, {"role": "assistant", "content": "No."}, HELLO],
    ),
    (
        [
            HELLO | {"id": None, "status": None, "phase": None},
            CALL | {"caller": {"type": "direct"}},
            RESULT | {"caller": {"type": "direct"}, "name": "weather"},
        ],
        [HELLO, {"role": "assistant", "tool_calls": [PAST]}, ANSWERED | {"name": "weather"}],
    ),
    (
        [HELLO, CALL | dict.fromkeys(["async", "async_", "caller", "namespace", "more"]), RESULT],
        [HELLO, {"role": "assistant", "tool_calls": [PAST]}, ANSWERED],
    ),
]


async def test_items_are_a_chats_messages(world):
    for items, meant in ITEMS:
        chat = await ask(world, path=CHAT, messages=meant, max_tokens=1)
        assert chat.status_code == 200, chat.text
        expected = prompt_of(world)
        answer = await ask(world, input=items, max_output_tokens=1)
        assert answer.status_code == 200, answer.text
        assert prompt_of(world) == expected


def test_no_turn_has_more_calls_than_a_chat_may_have():
    body = {"model": "m", "input": [HELLO, *[CALL] * (MAX_PAST_CALLS + 1)]}
    _, *turns = ResponsesRequest.model_validate(body).chat().messages
    assert [len(turn.tool_calls) for turn in turns] == [MAX_PAST_CALLS, 1]


@pytest.mark.parametrize(
    ("choice", "kind", "calls"),
    [
        ("auto", None, 2),
        ("required", "grammar", 2),
        ({"type": "function", "name": "weather"}, "grammar", 1),
        ("none", None, 0),
    ],
)
async def test_the_choice_of_tools(world, choice, kind, calls):
    world.engine.tokens = list("\n".join([call_text("weather", {"city": "Rome"})] * 2).encode())
    body = (await ask(world, tools=[WEATHER | {"strict": True}], tool_choice=choice)).json()
    guide = world.engine.requests[0].sampling.guide
    assert (guide and guide.kind) == kind
    assert [item["type"] for item in body["output"]].count("function_call") == calls
    assert body["tool_choice"] == choice
    assert body["tools"] == [WEATHER | {"strict": True, "description": None}]


NOW = {"type": "function", "name": "now", "parameters": None}


def allowing(mode, *names):
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called_and_all_are_told(world, mode):
    calls = call_text("now", {}), call_text("weather", {"city": "Rome"})
    world.engine.tokens = list("\n".join(calls).encode())
    await ask(world, tools=[WEATHER, NOW])
    free = prompt_of(world)
    choice = allowing(mode, "weather")
    body = (await ask(world, tools=[WEATHER, NOW], tool_choice=choice)).json()
    called = [item["name"] for item in body["output"] if item["type"] == "function_call"]
    assert (called, body["tool_choice"]) == (["weather"], choice)
    assert len(body["tools"]) == 2
    assert prompt_of(world) == free
    weather = {"name": "weather", "parameters": PARAMETERS}
    wrapped = [{"type": "function", "function": each} for each in (weather, {"name": "now"})]
    named = [{"type": "function", "function": {"name": "weather"}}]
    same = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    await ask(world, CHAT, messages=[HELLO], tools=wrapped, tool_choice=same)
    ours, chats = (request.sampling.guide for request in world.engine.requests[-2:])
    assert ours == chats


async def test_one_call_alone(world):
    world.engine.tokens = list((call_text("weather", {}) * 2).encode())
    body = (await ask(world, tools=[WEATHER], parallel_tool_calls=False)).json()
    assert (len(body["output"]), body["parallel_tool_calls"]) == (1, False)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        (PLACE, json.dumps(PARAMETERS, separators=(",", ":"))),
    ],
)
async def test_the_form_of_the_text(world, form, text):
    body = (await ask(world, text={"format": form, "verbosity": "medium"})).json()
    guide = world.engine.requests[0].sampling.guide
    assert (guide and guide.text) == text
    assert body["text"]["format"] | form == body["text"]["format"]


async def test_beside_tools_the_text_has_its_form(world):
    world.engine.tokens = list(b'{"city": "Rome"}')
    fields = {"tools": [WEATHER], "text": {"format": PLACE}}
    body = (await ask(world, **fields)).json()
    assert body["output"][0]["content"][0]["text"] == '{"city": "Rome"}'
    assert world.engine.requests[-1].sampling.guide.kind == "grammar"
    assert (await ask(world, tool_choice="none", **fields)).status_code == 200
    assert world.engine.requests[-1].sampling.guide.kind == "json_schema"


async def test_fields_that_change_nothing(world):
    tool = {"allowed_callers": ["direct"], "defer_loading": False, "async": False}
    harmless = {
        "tools": [WEATHER | tool | {"output_schema": None, "async_": None}],
        "store": True,
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "reasoning": {"effort": "none", "summary": None},
        "context_management": [],
        "max_tool_calls": 3,
        "image": {"context_compression": "auto"},
        "prompt_cache_options": {"mode": "explicit", "ttl": "12h", "prewarm": False},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
        "stream_options": None,
    }
    body = (await ask(world, **harmless)).json()
    told = (body["prompt_cache_key"], body["safety_identifier"], body["service_tier"])
    assert told == ("k", "s", "default")
    assert body["max_tool_calls"] == 3
    assert body["tools"] == [WEATHER | {"description": None, "strict": None}]


IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}


UNSERVED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items"),
    ({"conversation": "conv_1"}, "conversation", "send all items"),
    ({"background": True}, "background", "leave background out"),
    ({"background": 0}, "background", "leave background out"),
    ({"background_options": {}}, "background_options", "leave background_options out"),
    ({"moderation": {"model": "m"}}, "moderation", "leave moderation out"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "False"),
    ({"prompt_cache_options": {"comparison_response_id": "resp_1"}}, None, "Unrecognized"),
    ({"max_tool_calls": 0}, "max_tool_calls", "1"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "instructions and input"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "leave reasoning out"),
    ({"truncation": "auto"}, "truncation", "send fewer items"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": [HELLO]}, "messages", "send input"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
    ({"tools": [{"type": "web_search"}]}, "tools.0", "runs no tools"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools.0", "runs no tools"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools.0.defer_loading", "False"),
    ({"tools": [WEATHER | {"allowed_callers": ["programmatic"]}]}, None, "direct"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "one name"),
    ({"tools": [WEATHER | {"name": "no spaces"}]}, "tools.0.name", "match"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "a name"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
    (
        {"tools": [WEATHER], "tool_choice": allowing("auto", "weather", "x")},
        "tool_choice",
        "'x' is none of the tools",
    ),
    ({"tools": [WEATHER], "tool_choice": allowing("auto")}, "tool_choice", "at least one"),
    ({"tools": [WEATHER], "tool_choice": allowing("none", "weather")}, "tool_choice", '"auto" or'),
    ({"tool_choice": allowing("auto", "weather")}, "tool_choice", "none of the tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice",
        "a name",
    ),
    (
        {"tools": [WEATHER], "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "may call tools",
    ),
    ({"tools": [WEATHER], "include": LOGPROBS}, "include", "text alone"),
    ({"text": {"format": PLACE | {"schema": {"type": "x"}}}}, "text.format", "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"top_logprobs": 2}, "top_logprobs", LOGPROBS[0]),
    ({"include": ["file_search_call.results"]}, "include.0", LOGPROBS[0]),
    ({"stream_options": {}}, "stream_options", "set stream"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"max_output_tokens": 1 << 20}, "max_output_tokens", "context"),
    ({"input": "a" * 100_000}, "input", "context"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [REASONING]}, "input", "send a message"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "send the item itself"),
    ({"input": [{"id": "a"}]}, "input.0", "send the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input.0", "function_call_output"),
    ({"input": [{"type": ["message"]}]}, "input.0", "function_call_output"),
    ({"input": [HELLO | {"content": [IMAGE]}]}, "input.0.message.content.0", "only text"),
    ({"input": [RESULT | {"output": [IMAGE]}]}, None, "only text"),
    ({"input": [CALL | {"caller": {"type": "program", "caller_id": "a"}}]}, None, "direct"),
    ({"input": [CALL | {"namespace": "a"}]}, None, "Unrecognized"),
    ({"input": [HELLO | {"content": [{"type": "refusal", "text": "a"}]}]}, None, "refusal"),
    ({"input": [HELLO | {"content": None}]}, None, "content"),
    ({"input": [CALL | {"arguments": "no JSON"}]}, None, "JSON object"),
    ({"n": 2}, "n", "Unrecognized"),
]


async def test_what_is_not_served_is_refused_by_name(world):
    for fields, param, told in UNSERVED:
        answer = await ask(world, **fields)
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert told in error["message"], error
        assert error["type"] == "invalid_request_error"
        assert param is None or error["param"] == param, error
    assert world.engine.requests == []


async def test_a_deep_schema_is_served_or_refused(world):
    async with world.client() as client:
        for depth in (250, 480, 495, 2_000):
            deep = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
            tools = f'"tools":[{{"type":"function","name":"f","parameters":{deep}}}]'
            form = f'"text":{{"format":{{"type":"json_schema","name":"f","schema":{deep}}}}}'
            choice = f'"tool_choice":{{"type":"function","name":"f","more":{deep}}}'
            none = '"tool_choice":"none"'
            for field in (tools, f"{tools},{none}", f"{tools},{choice}", form):
                body = f'{{"model":"tiny-base","input":"a","max_output_tokens":1,{field}}}'
                headers = {"content-type": "application/json"}
                answer = await client.post(PATH, content=body, headers=headers)
                assert answer.status_code in (200, 400), answer.text
