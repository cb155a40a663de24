"""The official `openai` SDK's `responses`, unmodified, over a real socket."""

import openai
import pydantic
import pytest
from openai.types.responses import Response as ResponseObject
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from loraplex.platform.hermes import call_text

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TURN = {"role": "user", "content": "and now?"}


class Place(pydantic.BaseModel):
    """Where it is."""

    city: str


async def test_a_response_of_an_adapter(world):
    world.engine.tokens = list(b"Hi")
    await world.add_adapter("acme", "poet")
    async with world.sdk() as client:
        answer = await client.responses.create(
            model="poet",
            input="Hello",
            instructions="Be brief.",
            max_output_tokens=5,
            temperature=0,
            metadata={"a": "b"},
            extra_body={"top_k": 5, "seed": 7},
        )
    assert (answer.output_text, answer.status, answer.model) == ("Hi", "completed", "poet@1")
    assert (answer.instructions, answer.metadata, answer.store) == ("Be brief.", {"a": "b"}, False)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 2
    assert answer._request_id.startswith("req_")
    (request,) = world.engine.requests
    assert bytes(request.token_ids) == b"system:Be brief.\nuser:Hello\nassistant:"
    assert (request.sampling.top_k, request.sampling.seed) == (5, 7)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (5, 0)


async def test_a_stream_is_put_together_by_the_sdk(world):
    world.engine.tokens = list("Grüße".encode())
    async with world.sdk() as client:
        raw = await client.responses.create(model="tiny-base", input="Hello", stream=True)
        kinds = [event.type async for event in raw]
        async with client.responses.stream(model="tiny-base", input="Hello") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "".join(deltas) == final.output_text == "Grüße"
    assert final.usage.output_tokens == 7


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_calls_goes_on(world, streamed):
    world.engine.tokens = list(("Wait. " + call_text("weather", {"city": "Rome"})).encode())
    asked = {"model": "tiny-base", "tools": [WEATHER]}
    async with world.sdk() as client:
        if streamed:
            async with client.responses.stream(input="Hello", **asked) as stream:
                first = await stream.get_final_response()
        else:
            first = await client.responses.create(input="Hello", **asked)
        said, call = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        again = [{"role": "user", "content": "Hello"}, *first.output, result, TURN]
        second = await client.responses.create(model="tiny-base", input=again)
    assert said.content[0].text == "Wait."
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    assert second.status == "completed"
    prompt = bytes(world.engine.requests[1].token_ids).decode()
    made = call_text("weather", {"city": "Rome"})
    assert prompt.startswith(f"user:Hello\nassistant:Wait.\n{made}")
    assert "sunny" in prompt
    assert prompt.endswith("\nuser:and now?\nassistant:")


DUMPS = [
    lambda item: item.model_dump(),
    lambda item: item.model_dump(mode="json", by_alias=True),
    lambda item: item.to_dict(),
]


@pytest.mark.parametrize("dump", DUMPS)
async def test_items_are_sent_back_as_the_sdk_dumps_them(world, dump):
    world.engine.tokens = list(("Wait. " + call_text("weather", {"city": "Rome"})).encode())
    asked = {"model": "tiny-base", "tools": [WEATHER]}
    async with world.sdk(_strict_response_validation=True) as client:
        first = await client.responses.create(input="Hello", **asked)
        result = {"type": "function_call_output", "call_id": first.output[1].call_id}
        again = [*map(dump, first.output), result | {"output": "sunny"}, TURN]
        tools = [dump(tool) for tool in first.tools]
        second = await client.responses.create(model="tiny-base", input=again, tools=tools)
        kept = {"tools": tools, "tool_choice": first.tool_choice, "truncation": first.truncation}
        await client.responses.input_tokens.count(model="tiny-base", input=again, **kept)
    assert second.tools == first.tools


STREAMED = TypeAdapter(ResponseStreamEvent)
ALLOWED = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "weather"}],
}
ANSWERS = {
    "text and a call": {"tools": [WEATHER]},
    "an allowed call": {"tools": [WEATHER], "tool_choice": ALLOWED},
    "a cut": {"tools": [WEATHER], "max_output_tokens": 20},
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "a form": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
    "settings": {"metadata": {"a": "b"}, "user": "u", "max_tool_calls": 1, "instructions": "x"},
}


@pytest.mark.parametrize("fields", ANSWERS.values(), ids=ANSWERS.keys())
async def test_answers_are_of_the_sdks_types(world, fields):
    world.engine.tokens = list(("Wait. " + call_text("weather", {"city": "Rome"})).encode())
    body = {"model": "tiny-base", "input": "Hello"} | fields
    async with world.client() as client:
        whole = await client.post("/v1/responses", json=body)
        streamed = await client.post("/v1/responses", json=body | {"stream": True})
    ResponseObject.model_validate(whole.json())
    data = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert len(data) > 8
    for line in data:
        STREAMED.validate_json(line.removeprefix("data: "))


async def test_answers_and_calls_are_parsed_into_models(world):
    place = Place(city="Rome")
    async with world.sdk() as client:
        world.engine.tokens = list(place.model_dump_json().encode())
        answer = await client.responses.parse(model="tiny-base", input="a", text_format=Place)
        world.engine.tokens = list(call_text("Place", place.model_dump()).encode())
        called = await client.responses.parse(
            model="tiny-base",
            input="a",
            tools=[openai.pydantic_function_tool(Place)],
            tool_choice="required",
        )
        again = [*answer.output, *called.output, TURN]
        await client.responses.create(model="tiny-base", input=again)
    assert answer.output_parsed == place
    assert called.output[0].parsed_arguments == place
    kinds = [request.sampling.guide.kind for request in world.engine.requests[:2]]
    assert kinds == ["json_schema", "grammar"]


async def test_errors_have_the_sdks_types(world):
    async with world.sdk() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="nobody", input="Hello")
        with pytest.raises(openai.BadRequestError) as stored:
            await client.responses.create(
                model="tiny-base", input="Hello", previous_response_id="resp_1"
            )
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert stored.value.code == "previous_response_not_found"
    assert stored.value.param == "previous_response_id"


async def test_an_error_in_mid_stream_is_raised(world):
    tap = world.tap(1)
    async with world.sdk() as client:
        stream = await client.responses.create(model="tiny-base", input="Hello", stream=True)
        world.engine.fail = "internal"
        tap.release()
        with pytest.raises(openai.APIError, match="server failed"):
            async for _ in stream:
                pass
