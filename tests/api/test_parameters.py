"""Absurd, unknown and unserved parameters: each is a 400 that names the field, and runs nothing."""

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PLAIN = {"model": "tiny-base", "prompt": "Hi", "max_tokens": 4}
HUGE = 10**30

BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", HUGE),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", 5),
    ("stop_token_ids", [257]),
    ("stop_token_ids", list(range(129))),
    ("logit_bias", {"257": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", HUGE),
    ("max_tokens", "many"),
    ("n", 0),
    ("n", 9),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 7),
    ("metadata", "x"),
    ("model", ""),
    ("model", None),
    ("adapter_id", ""),
    ("ignore_eos", 1),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema"}),
    ("nonsense", 1),
    ("modalities", ["audio"]),
    ("store", True),
    ("reasoning_effort", "high"),
]
BAD_NESTED = [
    ("logit_bias.5", "logit_bias", {"5": 101}),
    ("stop.1", "stop", ["a", ""]),
    ("stop.0", "stop", "x" * 1001),
    ("stop_token_ids.0", "stop_token_ids", [-1]),
    ("stream_options.nonsense", "stream_options", {"nonsense": 1}),
]
BAD_CHAT = [
    ("messages", "messages", []),
    ("messages", "messages", "Hi"),
    ("messages.0.role", "messages", [{"role": "wizard", "content": "Hi"}]),
    ("messages.0.role", "messages", [{"role": "tool", "content": "Hi"}]),
    ("messages.0.content", "messages", [{"role": "user"}]),
    ("messages.0.content", "messages", [{"role": "user", "content": None}]),
    ("messages.0.content", "messages", [{"role": "user", "content": 5}]),
    ("messages.0.content", "messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages.0.content", "messages", [{"role": "user", "content": ["Hi"]}]),
    ("messages.0.tool_calls", "messages", [{"role": "user", "content": "a", "tool_calls": [1]}]),
    ("top_logprobs", "top_logprobs", 2),
    ("logprobs", "logprobs", 3),
    ("tools", "tools", [{"type": "function"}]),
    ("tool_choice", "tool_choice", "required"),
    ("functions", "functions", [{}]),
    ("max_tokens", "max_completion_tokens", 5),
]
BAD_PLAIN = [
    ("prompt", "prompt", []),
    ("prompt", "prompt", 5),
    ("prompt", "prompt", ""),
    ("prompt", "prompt", ["a", [1]]),
    ("prompt", "prompt", [[1], []]),
    ("prompt", "prompt", [1, -1]),
    ("prompt", "prompt", [1, True]),
    ("prompt", "prompt", [300]),
    ("prompt", "prompt", ["a"] * 17),
    ("prompt", "prompt", None),
    ("logprobs", "logprobs", 21),
    ("logprobs", "logprobs", True),
    ("echo", "echo", True),
    ("echo", "echo", 0),
    ("suffix", "suffix", "x"),
    ("best_of", "best_of", 2),
    ("messages", "messages", []),
]


async def refusals(world, path, good, cases):
    """Cases that are not refused with 400, the named field and a sentence."""
    wrong = []
    async with world.client() as client:
        for named, field, value in cases:
            answer = await client.post(path, json={**good, field: value})
            error = answer.json().get("error", {})
            refused = (answer.status_code, error.get("param"), error.get("type"))
            message = error.get("message", "")
            if refused != (400, named, "invalid_request_error") or not message.endswith("."):
                wrong.append((field, value, answer.text))
    assert world.engine.requests == []
    return wrong


@pytest.mark.parametrize(
    ("path", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)]
)
async def test_values_out_of_range_are_refused(world, path, good):
    flat = [(field, field, value) for field, value in BAD_VALUES]
    assert await refusals(world, path, good, flat + BAD_NESTED) == []


async def test_what_a_chat_cannot_be_is_refused(world):
    assert await refusals(world, "/v1/chat/completions", CHAT, BAD_CHAT) == []


async def test_what_a_completion_cannot_be_is_refused(world):
    assert await refusals(world, "/v1/completions", PLAIN, BAD_PLAIN) == []


async def test_too_many_completions_in_one_request_are_refused(world):
    async with world.client() as client:
        answer = await client.post("/v1/completions", json={**PLAIN, "prompt": ["a"] * 16, "n": 8})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_numbers_that_json_does_not_have_are_refused(world, number):
    text = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
    async with world.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"


async def test_half_of_a_character_is_refused_and_not_echoed(world):
    text = json.dumps({**CHAT, "model": "\ud800"})
    async with world.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


async def test_every_optional_field_may_be_null(world):
    async with world.client() as client:
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"]
        for path, good, name in (
            ("/v1/chat/completions", CHAT, "ChatRequest"),
            ("/v1/completions", PLAIN, "CompletionRequest"),
        ):
            optional = schema[name]["properties"].keys() - set(schema[name]["required"])
            answer = await client.post(path, json=dict.fromkeys(optional) | good)
            assert answer.status_code == 200, answer.text
            assert len(optional) > 15
