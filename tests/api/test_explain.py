"""What answers tell of how they came about: in headers, and in the object `loraplex`."""

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}
WEIGHTS = {"adapter": "poet", "arm": None, "digest": "c" * 64, "model": "poet@1", "version": 1}
TIMES = {"queue_ms", "load_ms", "first_token_ms", "total_ms"}


async def ask(world, path, *, headers=None, **fields):
    body = {"model": "poet"} | ROUTES[path] | fields
    async with world.client() as client:
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def told(text):
    """The objects `loraplex` of a stream, by the place of their event from the end."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    said = [each.get("response", each) for each in events]
    return {i - len(said): each["loraplex"] for i, each in enumerate(said) if "loraplex" in each}


@pytest.mark.parametrize("path", ROUTES)
async def test_an_answer_explains_itself_where_that_is_asked_for(world, path):
    await world.add_adapter("acme", "poet", digest="c" * 64)
    world.engine.cached_tokens = 2
    silent = await ask(world, path)
    by_field = await ask(world, path, loraplex=True)
    by_header = await ask(world, path, headers={"x-loraplex-explain": "1"})
    assert "loraplex" not in silent.json()
    for answer in (by_field, by_header):
        explained = answer.json()["loraplex"]
        assert set(explained) == {*WEIGHTS, *TIMES, "cached_tokens"}
        assert explained | WEIGHTS | {"cached_tokens": 2} == explained
        for name, value in explained.items():
            header = answer.headers.get(f"x-loraplex-{name.replace('_', '-')}")
            assert header == (None if value is None else str(value))


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_explains_itself_in_its_last_event(world, path):
    await world.add_adapter("acme", "poet", digest="c" * 64)
    silent = await ask(world, path, stream=True)
    explained = await ask(world, path, stream=True, loraplex=True)
    (place, found), *others = told(explained.text).items()
    assert (place, others, told(silent.text)) == (-1, [], {})
    assert found | WEIGHTS == found
    assert set(found) >= TIMES
    for name in ("model", "adapter", "version", "digest"):
        assert explained.headers[f"x-loraplex-{name}"] == str(WEIGHTS[name])


async def test_usage_and_explanation_share_a_chunk(world):
    await world.add_adapter("acme", "poet")
    usage = {"include_usage": True}
    answer = await ask(
        world, "/v1/chat/completions", stream=True, stream_options=usage, loraplex=True
    )
    last = json.loads(answer.text.split("data: ")[-2])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    assert last["loraplex"]["model"] == "poet@1"


async def test_a_base_has_no_adapter_to_tell_of(world):
    answer = await ask(world, "/v1/completions", model="tiny-base", loraplex=True)
    assert answer.headers["x-loraplex-digest"] == "base"
    assert "x-loraplex-version" not in answer.headers
    assert answer.json()["loraplex"]["digest"] is None
