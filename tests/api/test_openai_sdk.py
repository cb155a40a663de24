"""The official `openai` SDK, unmodified, over a real socket."""

import openai
import pydantic
import pytest
from anyio import to_thread

from loraplex.platform.hermes import call_text
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]


async def test_chat_and_completion(world):
    world.engine.tokens = list(b"Hi")
    await world.add_adapter("acme", "poet")
    async with world.sdk() as client:
        chat = await client.chat.completions.create(
            model="poet", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
        )
        plain = await client.completions.create(model="poet@1", prompt="Hello", max_tokens=5)
        named = await client.chat.completions.create(
            model="tiny-base", messages=HELLO, extra_body={"adapter_id": "poet", "top_k": 5}
        )
    assert chat.choices[0].message.content == "Hi"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "H"
    assert chat.model == named.model == plain.model == "poet@1"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 2
    assert plain.choices[0].text == "Hi"
    assert chat._request_id.startswith("req_")


async def test_streams(world):
    world.engine.tokens = list("Grüße".encode())
    async with world.sdk() as client:
        stream = await client.chat.completions.create(
            model="tiny-base",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        plain = await client.completions.create(model="tiny-base", prompt="Hello", stream=True)
        texts = [chunk.choices[0].text async for chunk in plain]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Grüße"
    assert chunks[-1].usage.completion_tokens == 7
    assert "".join(texts) == "Grüße"


async def test_a_conversation_can_be_sent_back_as_it_came(world):
    async with world.sdk() as client:
        first = await client.chat.completions.create(
            model="tiny-base", messages=HELLO, max_tokens=5
        )
        turn = first.choices[0].message
        again = [*HELLO, turn, {"role": "user", "content": "more"}]
        second = await client.chat.completions.create(
            model="tiny-base", messages=again, max_tokens=5
        )
    assert second.choices[0].message.content


class Place(pydantic.BaseModel):
    """Where it is."""

    city: str
    people: int | None


async def test_answers_and_calls_are_parsed_into_models(world):
    place = Place(city="Rome", people=None)
    async with world.sdk() as client:
        parse = client.chat.completions.parse
        world.engine.tokens = list(place.model_dump_json().encode())
        answer = await parse(model="tiny-base", messages=HELLO, response_format=Place)
        world.engine.tokens = list(call_text("Place", place.model_dump()).encode())
        called = await parse(
            model="tiny-base",
            messages=HELLO,
            tools=[openai.pydantic_function_tool(Place)],
            tool_choice="required",
            max_tokens=400,
        )
        (call,) = called.choices[0].message.tool_calls
        done = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        said = (answer.choices[0].message, called.choices[0].message)
        turns = [each.model_dump(exclude_unset=True, warnings=False) for each in said]
        assert all("parsed" in turn for turn in turns)
        again = [*HELLO, *turns, done]
        await client.chat.completions.create(model="tiny-base", messages=again, max_tokens=5)
    assert answer.choices[0].message.parsed == call.function.parsed_arguments == place
    kinds = [request.sampling.guide.kind for request in world.engine.requests[:2]]
    assert kinds == ["json_schema", "grammar"]


async def test_models(world):
    await world.add_adapter("acme", "poet")
    await world.add_adapter("globex", "secret")
    async with world.sdk() as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("poet@1")
    assert [model.id for model in models] == ["tiny-base", "poet"]
    assert (one.id, one.object, one.parent) == ("poet@1", "model", "tiny-base")


async def test_errors_have_the_sdks_types(world):
    await world.add_tenant("slow", TenantLimits(requests_per_minute=1))
    async with world.sdk() as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="nobody", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as absurd:
            await create(model="tiny-base", messages=HELLO, temperature=9)
        with pytest.raises(openai.BadRequestError) as tools:
            tool = {"type": "function", "function": {"name": "no spaces"}}
            await create(model="tiny-base", messages=HELLO, tools=[tool])
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="lpx_wrong").models.list()
        with pytest.raises(openai.RateLimitError) as limited:
            slow = client.with_options(api_key=world.keys["slow"])
            for _ in range(2):
                await slow.completions.create(model="tiny-base", prompt="a", max_tokens=1)
        world.engine.die()
        with pytest.raises(openai.InternalServerError) as down:
            await create(model="tiny-base", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert (absurd.value.param, absurd.value.type) == ("temperature", "invalid_request_error")
    assert tools.value.param == "tools.0.function.name"
    assert unknown.value.code == "invalid_api_key"
    assert limited.value.code == "rate_limit_exceeded"
    assert down.value.code == "engine_unavailable"


async def test_an_error_in_mid_stream_is_raised(world):
    tap = world.tap(1)
    async with world.sdk() as client:
        stream = await client.chat.completions.create(
            model="tiny-base", messages=HELLO, stream=True
        )
        world.engine.fail = "internal"
        tap.release()
        with pytest.raises(openai.APIError, match="server failed"):
            async for _ in stream:
                pass


async def test_the_sdk_retries_what_is_worth_it(world):
    """A restarting engine is met with a retry of the SDK's own; a conflict is not."""
    world.engine.fail = "engine_died"

    def recover(request):
        if len(world.engine.requests) == 2:
            world.engine.fail = None
        return list(b"ok")

    world.engine.tokens = recover
    async with world.sdk(max_retries=2) as client:
        answer = await client.chat.completions.create(model="tiny-base", messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        assert len(world.engine.requests) == 2
        world.engine.tokens, world.engine.fail = list(b"ok"), "image_mismatch"
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(world.engine.requests) == 3


async def test_the_streaming_helper_gathers_text_calls_and_parsed_answers(world):
    place = Place(city="Rome", people=None)
    async with world.sdk() as client:
        stream = client.chat.completions.stream
        world.engine.tokens = list(place.model_dump_json().encode())
        async with stream(model="tiny-base", messages=HELLO, response_format=Place) as events:
            kinds = [event.type async for event in events]
            answer = await events.get_final_completion()
        said = "Well. " + call_text("Place", place.model_dump())
        world.engine.tokens = list(said.encode())
        tools = [openai.pydantic_function_tool(Place)]
        async with stream(model="tiny-base", messages=HELLO, tools=tools) as events:
            called = await events.get_final_completion()
    assert kinds[-1] == "content.done"
    assert answer.choices[0].message.parsed == place
    message = called.choices[0].message
    assert message.content == "Well."
    assert message.tool_calls[0].function.parsed_arguments == place
    assert called.choices[0].finish_reason == "tool_calls"


async def test_a_tools_whole_round(world):
    world.engine.tokens = list(call_text("Place", {"city": "Rome", "people": 1}).encode())
    asked = {"model": "tiny-base", "tools": [openai.pydantic_function_tool(Place)]}
    async with world.sdk() as client:
        create = client.chat.completions.create
        turn = (await create(messages=HELLO, **asked)).choices[0].message
        result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "Done."}
        world.engine.tokens = list(b"Fine.")
        answer = await create(messages=[*HELLO, turn, result], **asked)
    assert answer.choices[0].message.content == "Fine."


async def test_choices_seeds_stops_and_logprobs(world):
    world.engine.tokens = lambda request: [*b"ab|", request.sampling.seed % 256]
    async with world.sdk() as client:
        chat = await client.chat.completions.create(
            model="tiny-base", messages=HELLO, n=3, seed=70, stop="|", logprobs=True, top_logprobs=1
        )
        plain = await client.completions.create(
            model="tiny-base", prompt=["x", "y"], n=2, seed=70, logprobs=1, max_tokens=4
        )
    assert [choice.message.content for choice in chat.choices] == ["ab"] * 3
    assert {choice.finish_reason for choice in chat.choices} == {"stop"}
    assert [token.token for token in chat.choices[0].logprobs.content] == ["a", "b"]
    assert [choice.text for choice in plain.choices] == ["ab|F", "ab|G"] * 2
    assert plain.choices[0].logprobs.tokens == ["a", "b", "|", "F"]


async def test_raw_responses_have_the_headers(world):
    await world.add_adapter("acme", "poet", digest="d" * 64)
    async with world.sdk() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="poet", messages=HELLO, extra_headers={"x-loraplex-explain": "1"}
        )
        streaming = client.chat.completions.with_streaming_response
        async with streaming.create(model="poet", messages=HELLO, stream=True) as response:
            lines = [line async for line in response.iter_lines()]
    assert raw.headers["x-loraplex-model"] == response.headers["x-loraplex-model"] == "poet@1"
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.parse().model_extra["loraplex"]["digest"] == "d" * 64
    assert lines[-2] == "data: [DONE]"


async def test_a_spent_budget_is_not_retried(world):
    await world.add_tenant("spent-openai", TenantLimits(tokens_per_day=6))
    async with world.sdk("spent-openai", max_retries=3) as client:
        with pytest.raises(openai.RateLimitError) as spent:
            for _ in range(2):
                await client.completions.create(model="tiny-base", prompt="abc", max_tokens=1)
    assert spent.value.code == "insufficient_quota"
    assert spent.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_a_timeout_of_the_caller_ends_the_request_in_the_engine(world):
    world.tap(0)
    async with world.sdk(timeout=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="tiny-base", messages=HELLO)
        await world.engine.wait_in_flight(0)


async def test_the_synchronous_client(world):
    def talk(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=world.keys["acme"]) as client:
            create = client.chat.completions.create
            chunks = create(model="tiny-base", messages=HELLO, max_tokens=2, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return said, [model.id for model in client.models.list()]

    world.engine.tokens = list(b"Hi!")
    async with world.listening() as url:
        assert await to_thread.run_sync(talk, url) == ("Hi", ["tiny-base"])
