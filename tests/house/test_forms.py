"""Structured output and tools on a running platform: what was asked for is what comes."""

import asyncio
import json
import re

import httpx
import jsonschema
import openai
import pytest

QUESTION = [{"role": "user", "content": "How is the weather in Paris? Answer in JSON."}]
TOKENS = 160  # some five times what such an answer takes
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "sky": {"enum": ["clear", "cloudy"]},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
    },
    "required": ["city", "sky", "degrees"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": SCHEMA, "get_time": ZONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ONE = {"type": "function", "function": {"name": "get_time"}}


async def say(sdk: openai.AsyncOpenAI, model: str, **fields) -> str:
    """A whole answer, which must have ended by itself."""
    answer = await sdk.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, **{"max_tokens": TOKENS} | fields
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    return choice.message.content


async def stream(sdk: openai.AsyncOpenAI, model: str, **fields) -> str:
    """The same as it comes."""
    text, ends = "", []
    async with await sdk.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        stream=True,
        max_tokens=TOKENS,
        **fields,
    ) as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert ends == ["stop"]
    return text


async def count(sdk: openai.AsyncOpenAI, model: str) -> str:
    """A plain completion."""
    answer = await sdk.completions.create(
        model=model, prompt="One, two,", temperature=0, max_tokens=8
    )
    return answer.choices[0].text


@pytest.mark.anyio
async def test_every_model_keeps_to_a_schema_beside_plain_requests(served, demo_base) -> None:
    """Base and adapters in shared steps, whole and streamed; plain requests notice nothing."""
    base, names = demo_base.name, [demo_base.name, *served.adapters]
    async with served.async_sdk() as sdk:
        alone = await count(sdk, base)
        *plains, wholes, streams = await asyncio.gather(
            count(sdk, base),
            count(sdk, base),
            asyncio.gather(*(say(sdk, name, response_format=FORMAT) for name in names)),
            asyncio.gather(*(stream(sdk, name, response_format=FORMAT) for name in names[:2])),
        )
    assert plains == [alone, alone]
    assert wholes[:2] == streams
    for text in wholes:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.anyio
async def test_a_regex_and_a_choice(served, demo_base) -> None:
    async with served.async_sdk() as sdk:
        code, word = await asyncio.gather(
            say(sdk, demo_base.name, extra_body={"guided_regex": "[0-9]{3}-[a-c]{2}"}),
            say(
                sdk,
                "pirate",
                extra_body={"structured_outputs": {"choice": ["Sunny, ahoy!", "Foul weather."]}},
            ),
        )
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", code)
    assert word in ("Sunny, ahoy!", "Foul weather.")


def chat(served, model: str, **fields) -> httpx.Response:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 8} | fields
    with served.http(served.api_key) as client:
        return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "bad", "schema": {"type": "nope"}},
                }
            },
            "response_format",
            "Invalid type: nope",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        (
            {"guided_json": {"type": "string", "minLength": 5, "maxLength": 2}},
            "guided_json",
            "minLength (5) is greater than maxLength (2)",
        ),
    ],
)
def test_a_form_that_cannot_be_is_refused_with_the_reason(
    served, demo_base, fields, param, why
) -> None:
    answer = chat(served, demo_base.name, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert why in error["message"]


def test_a_form_that_nothing_matches_ends_cleanly(served, demo_base) -> None:
    """Whether that shows before the first token or never, the next request is served."""
    empty = chat(served, demo_base.name, guided_regex=r"a[^\s\S]")
    assert empty.status_code == 400
    endless = chat(served, demo_base.name, guided_grammar="start: x\nx: /[a-z]/ x")
    assert endless.json()["choices"][0]["finish_reason"] == "length"
    assert chat(served, demo_base.name, max_tokens=1).status_code == 200


def calling(model: str, choice) -> dict:
    """A request that must call one tool."""
    return {
        "model": model,
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": TOKENS,
    }


@pytest.mark.parametrize("choice", ["required", ONE], ids=["required", "named"])
def test_a_call_is_forced_and_its_arguments_are_valid(served, demo_base, choice) -> None:
    """In OpenAI's shape, and the same in a stream."""
    asked = calling(demo_base.name, choice)
    with served.sdk() as sdk:
        (whole,) = sdk.chat.completions.create(**asked).choices
        with sdk.chat.completions.create(**asked, stream=True) as stream:
            heard = [chunk.choices[0] for chunk in stream]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert call.type == "function"
    assert call.function.name in (SCHEMAS if choice == "required" else ["get_time"])
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert streamed_call(heard) == (call.function.name, call.function.arguments)


def streamed_call(heard: list) -> tuple[str, str]:
    """Name and arguments of the one call of a stream, which has no text beside it."""
    assert [each.finish_reason for each in heard if each.finish_reason] == ["tool_calls"]
    assert not any(each.delta.content for each in heard)
    first, *rest = [part for each in heard for part in each.delta.tool_calls or ()]
    assert first.type == "function"
    assert first.id
    assert all((part.index, part.id) == (0, None) for part in rest)
    return first.function.name, "".join(part.function.arguments for part in (first, *rest))


def test_a_call_and_its_result_go_back_into_the_conversation(served, demo_base) -> None:
    asked = calling(demo_base.name, ONE)
    with served.sdk() as sdk:
        first = sdk.chat.completions.create(**asked)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12:00"}
        turns = {"messages": [*QUESTION, message, result], "tool_choice": "auto", "max_tokens": 4}
        second = sdk.chat.completions.create(**asked | turns)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > 0
