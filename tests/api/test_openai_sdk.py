"""The official `openai` SDK, unmodified, over a real socket."""

from contextlib import asynccontextmanager

import openai
import pytest

from loraplex.platform.tenants import TenantLimits

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def sdk(world, key="acme", **options):
    async with world.listening() as url:
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=world.keys.get(key, key), **{"max_retries": 0} | options
        )
        async with client:
            yield client


async def test_chat_and_completion(world):
    world.engine.tokens = list(b"Hi")
    await world.add_adapter("acme", "poet")
    async with sdk(world) as client:
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
    async with sdk(world) as client:
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
    async with sdk(world) as client:
        first = await client.chat.completions.create(
            model="tiny-base", messages=HELLO, max_tokens=5
        )
        turn = first.choices[0].message
        again = [*HELLO, turn, {"role": "user", "content": "more"}]
        second = await client.chat.completions.create(
            model="tiny-base", messages=again, max_tokens=5
        )
    assert second.choices[0].message.content


async def test_models(world):
    await world.add_adapter("acme", "poet")
    await world.add_adapter("globex", "secret")
    async with sdk(world) as client:
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("poet@1")
    assert [model.id for model in models] == ["tiny-base", "poet"]
    assert (one.id, one.object, one.parent) == ("poet@1", "model", "tiny-base")


async def test_errors_have_the_sdks_types(world):
    await world.add_tenant("slow", TenantLimits(requests_per_minute=1))
    async with sdk(world) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="nobody", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as absurd:
            await create(model="tiny-base", messages=HELLO, temperature=9)
        with pytest.raises(openai.BadRequestError) as tools:
            tool = {"type": "function", "function": {"name": "f"}}
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
    assert tools.value.param == "tools"
    assert unknown.value.code == "invalid_api_key"
    assert limited.value.code == "rate_limit_exceeded"
    assert down.value.code == "engine_unavailable"


async def test_an_error_in_mid_stream_is_raised(world):
    tap = world.tap(1)
    async with sdk(world) as client:
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
    async with sdk(world, max_retries=2) as client:
        answer = await client.chat.completions.create(model="tiny-base", messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        assert len(world.engine.requests) == 2
        world.engine.tokens, world.engine.fail = list(b"ok"), "image_mismatch"
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(world.engine.requests) == 3
