"""The official `anthropic` SDK, unmodified, over a real socket."""

from contextlib import asynccontextmanager

import anthropic
import pydantic
import pytest
from anyio import to_thread

from loraplex.platform.hermes import call_text
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKED = {"model": "tiny-base", "max_tokens": 200, "messages": HELLO}


@asynccontextmanager
async def sdk(world, key="acme", **options):
    async with world.listening() as url:
        options = {"max_retries": 0, "api_key": world.keys.get(key, key)} | options
        async with anthropic.AsyncAnthropic(base_url=url, **options) as client:
            yield client


async def test_a_message_and_its_tokens(world):
    world.engine.tokens = list("Grüße".encode())
    await world.add_adapter("acme", "poet")
    async with sdk(world) as client:
        message = await client.messages.create(**ASKED | {"model": "poet"}, system="Be brief.")
        count = await client.messages.count_tokens(model="poet", messages=HELLO, system="Be brief.")
    assert message.content[0].text == "Grüße"
    assert (message.model, message.stop_reason) == ("poet@1", "end_turn")
    assert message.usage.input_tokens == count.input_tokens
    assert message.usage.output_tokens == 7
    assert message._request_id.startswith("req_")


async def test_a_bearer_token_is_a_key_too(world):
    async with sdk(world, api_key=None, auth_token=world.keys["acme"]) as client:
        assert (await client.messages.create(**ASKED)).content


async def test_raw_events_and_the_streaming_helper(world):
    world.engine.tokens = list("Grüße".encode())
    world.engine.cached_tokens = 3
    async with sdk(world) as client:
        raw = await client.messages.create(**ASKED, stream=True)
        kinds = [event.type async for event in raw]
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            message = await stream.get_final_message()
    assert (kinds[0], kinds[-1], kinds.count("message_delta")) == (
        "message_start",
        "message_stop",
        1,
    )
    assert text == message.content[0].text == "Grüße"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 7
    assert message.usage.cache_read_input_tokens == 3


async def test_a_tools_whole_round(world):
    world.engine.tokens = list(("So. " + call_text("weather", {"city": "Rome"})).encode())
    async with sdk(world) as client:
        async with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
        first = await client.messages.create(**ASKED, tools=[WEATHER])
        call = first.content[1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
        again = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        world.engine.tokens = list(b"Sunny.")
        second = await client.messages.create(**ASKED | {"messages": again}, tools=[WEATHER])
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Rome"}, "tool_use")
    assert streamed.content[1].input == {"city": "Rome"}
    assert second.content[0].text == "Sunny."


class Place(pydantic.BaseModel):
    """Where it is."""

    city: str


async def test_the_helpers_that_parse_and_run_tools(world):
    asked = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        world.engine.tokens = list(b"Sunny.")
        return "Sun"

    async with sdk(world) as client:
        world.engine.tokens = list(b'{"city":"Rome"}')
        parsed = await client.messages.parse(**ASKED, output_format=Place)
        world.engine.tokens = list(call_text("weather", {"city": "Rome"}).encode())
        runner = client.beta.messages.tool_runner(**ASKED, tools=[weather])
        final = await runner.until_done()
    assert parsed.parsed_output == Place(city="Rome")
    assert (asked, final.content[0].text) == (["Rome"], "Sunny.")


async def test_errors_have_the_sdks_types(world):
    await world.add_tenant("slow-anthropic", TenantLimits(requests_per_minute=1))
    async with sdk(world) as client:
        create = client.messages.create
        with pytest.raises(anthropic.NotFoundError) as missing:
            await create(**ASKED | {"model": "nobody"})
        with pytest.raises(anthropic.BadRequestError) as absurd:
            await create(**ASKED, thinking={"type": "adaptive"})
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.with_options(api_key="lpx_wrong").messages.create(**ASKED)
        slow = client.with_options(api_key=world.keys["slow-anthropic"])
        with pytest.raises(anthropic.RateLimitError) as limited:
            for _ in range(2):
                await slow.messages.create(**ASKED)
        world.engine.die()
        with pytest.raises(anthropic.InternalServerError) as down:
            await create(**ASKED)
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    assert "thinking" in absurd.value.api_message
    assert unknown.value.type == "authentication_error"
    assert limited.value.type == "rate_limit_error"
    assert (down.value.type, down.value.status_code) == ("overloaded_error", 503)
    assert down.value.request_id.startswith("req_")


async def test_an_error_in_mid_stream_is_raised(world):
    tap = world.tap(1)
    async with sdk(world) as client:
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with client.messages.stream(**ASKED) as stream:
                async for event in stream:
                    if event.type == "content_block_delta":
                        world.engine.die()
                        tap.release()
    assert broken.value.error_code == "engine_restarted"


async def test_retries_wait_as_long_as_they_are_told(world):
    world.engine.die()
    async with sdk(world, max_retries=1) as client:
        with pytest.raises(anthropic.InternalServerError) as down:
            await client.messages.create(**ASKED)
    assert down.value.response.request.headers["x-stainless-retry-count"] == "1"


async def test_the_synchronous_client(world):
    def talk(url):
        client = anthropic.Anthropic(base_url=url, api_key=world.keys["acme"])
        with client, client.messages.stream(**ASKED) as stream:
            return stream.get_final_text(), client.messages.create(**ASKED).content[0].text

    world.engine.tokens = list(b"Hi")
    async with world.listening() as url:
        assert await to_thread.run_sync(talk, url) == ("Hi", "Hi")
