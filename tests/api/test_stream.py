"""Server-sent events: their framing, and text that arrives whole, trimmed and in order."""

import asyncio
import json
from typing import Any

import pytest

from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


PLAIN = "/v1/completions"
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "Hello"}]}, PLAIN: {"prompt": "Hello"}}


def body(path: str = CHAT, **changes: Any) -> dict[str, Any]:
    common = {"model": "tiny-base", "max_tokens": 200, "stream": True}
    return common | PROMPTS[path] | changes


async def stream(world, path=CHAT, **changes):
    async with world.client() as client:
        answer = await client.post(path, json=body(path, **changes))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(answer.text), answer


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def contents(chunks, index=0):
    return [
        choice["delta"]["content"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index and choice["delta"].get("content")
    ]


async def test_a_stream_opens_speaks_and_ends(world):
    world.engine.tokens = list(b"Hey")
    (*chunks, done), answer = await stream(world, max_tokens=3)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "e"},
        {"content": "y"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 4 + ["length"]
    identities = {(c["id"], c["created"], c["model"], c["object"]) for c in chunks}
    assert len(identities) == 1
    assert identities.pop()[2:] == ("tiny-base", "chat.completion.chunk")
    assert all("usage" not in chunk for chunk in chunks)
    assert answer.headers["x-loraplex-model"] == "tiny-base"
    assert "x-request-id" in answer.headers


async def test_a_stream_tells_the_limits_before_its_first_byte(world):
    await world.add_tenant("small", TenantLimits(tokens_per_minute=1000))
    async with world.client("small") as client:
        answer = await client.post(CHAT, json=body(max_tokens=3))
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000


async def test_usage_comes_last_and_is_null_before(world):
    world.engine.tokens = list(b"Hey")
    (*chunks, last, done), _ = await stream(world, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 3


@pytest.mark.parametrize(("path", "n"), [(CHAT, 2), (PLAIN, 1), (PLAIN, 2)])
async def test_usage_comes_with_every_chunk(world, path, n):
    world.engine.tokens = list(b"Hey")
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {} if path == CHAT else {"prompt": ["ab", "abc"]}
    (*chunks, last, _), _ = await stream(world, path, n=n, stream_options=options, **asked)
    lengths = {request.request_id: len(request.token_ids) for request in world.engine.requests}
    prompts = [lengths[name] for name in sorted(lengths) for _ in range(n)]
    for index, prompt in enumerate(prompts):
        told = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        totals = [usage["completion_tokens"] for usage in told]
        assert totals == ([0, 1, 2, 3, 3] if path == CHAT else [1, 2, 3])
        assert all(usage["prompt_tokens"] == prompt for usage in told)
        assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in told)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3 * len(prompts)


async def test_usage_is_counted_whether_or_not_it_is_asked_for(world):
    world.engine.tokens = list(b"Hey")
    await stream(world)
    assert [row["completion_tokens"] for row in await world.usage_rows()] == [3]


async def test_a_character_is_sent_whole_or_not_at_all(world):
    text = "aé€😀b"
    world.engine.tokens = list(text.encode())
    (*chunks, _), _ = await stream(world)
    assert contents(chunks) == ["a", "é", "€", "😀", "b"]


async def test_half_a_character_at_the_end_is_dropped(world):
    world.engine.tokens = list("ok😀".encode())
    (*chunks, _), _ = await stream(world, max_tokens=5)
    assert "".join(contents(chunks)) == "ok"


@pytest.mark.parametrize("stop", ["END", ["xyz", "END"], ["END", "ENDING"], "END!"])
async def test_a_stop_string_over_many_tokens_is_held_back_and_trimmed(world, stop):
    world.engine.tokens = list(b"an E, an EN, the END! and more")
    (*chunks, _), _ = await stream(world, stop=stop)
    assert "".join(contents(chunks)) == "an E, an EN, the "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert world.engine.aborted_choices == [(world.engine.requests[0].request_id, 0)]


async def test_what_only_looks_like_a_stop_string_is_sent_in_the_end(world):
    world.engine.tokens = list(b"this is the EN")
    (*chunks, _), _ = await stream(world, stop="END")
    assert "".join(contents(chunks)) == "this is the EN"
    assert contents(chunks)[-1] == "EN"


async def test_choices_are_told_apart_by_their_index(world):
    world.engine.tokens = lambda request: list(b"abc" if request.sampling.seed == 1 else b"xyz")
    (*chunks, _), _ = await stream(world, n=2, seed=1)
    assert "".join(contents(chunks, 0)) == "abc"
    assert "".join(contents(chunks, 1)) == "xyz"
    opened = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert opened == [0, 1]
    ended = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1]


async def test_logprobs_come_with_their_text(world):
    world.engine.tokens = list("é!".encode())
    (*chunks, _), _ = await stream(world, logprobs=True, top_logprobs=1)
    told = [
        (choice["delta"]["content"], [entry["bytes"] for entry in choice["logprobs"]["content"]])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert told == [("é", [[0xC3], [0xA9]]), ("!", [[0x21]])]


async def test_a_failure_before_the_first_token_has_a_status(world):
    world.engine.fail = "overloaded"
    async with world.client() as client:
        answer = await client.post(CHAT, json=body())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"


async def test_a_failure_in_mid_stream_is_an_event_and_no_done(world):
    async def die_after_three() -> None:
        await world.until(lambda: world.engine.stats.generated_tokens == 3)
        world.engine.die()

    world.engine.tokens = list(b"Hello world")
    world.tap(3)
    death = asyncio.create_task(die_after_three())
    (*chunks, last), _ = await stream(world)
    await death
    assert last["error"]["code"] == "engine_restarted"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert contents(chunks) == ["H", "e", "l"]
    (row,) = await world.usage_rows()
    assert row["prompt_tokens"] == 0  # a failed request pays for what it generated only
    assert row["completion_tokens"] == 3


async def test_completions_stream_too(world):
    world.engine.tokens = list(b"Hey")
    (*chunks, last, done), _ = await stream(
        world,
        PLAIN,
        prompt=["a", "b"],
        logprobs=1,
        stream_options={"include_usage": True},
    )
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "Hey", 1: "Hey"}
    assert last["usage"]["prompt_tokens"] == 2
    offsets = [
        offset
        for chunk in chunks
        if chunk["choices"][0]["index"] == 1
        for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2]
