"""Two ways to a generating route, and one answer."""

import json
from typing import Any

import fastapi.routing
import msgspec
import pytest

from loraplex.engine.protocol import Generate

pytestmark = pytest.mark.anyio

CHAT, PLAIN, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "Hi"}]
UNSEEDED = {"model": "tiny-base", "max_tokens": 2}
SAID = UNSEEDED | {"seed": 1}
RESPONSE = {"model": "tiny-base", "input": "Hi", "max_output_tokens": 2, "seed": 1}
SHORT, LONG = "application/json", "APPLICATION/JSON"  # FastAPI takes both
GOOD = [
    (CHAT, SAID | {"messages": HELLO}, {}),
    (CHAT, SAID | {"messages": HELLO, "stream": True}, {}),
    (CHAT, SAID | {"messages": HELLO}, {"x-loraplex-explain": "1"}),
    (CHAT, SAID | {"messages": HELLO}, {"x-loraplex-conversation": "c"}),
    (PLAIN, SAID | {"prompt": [[5, 6], [7]], "logprobs": 1}, {}),
    (MESSAGES, UNSEEDED | {"messages": HELLO}, {"anthropic-version": "2023-06-01"}),
    (RESPONSES, RESPONSE, {}),
    (RESPONSES, RESPONSE | {"stream": True}, {"x-loraplex-explain": "1"}),
]
BAD = [
    (CHAT, SAID, {}),
    (CHAT, SAID | {"messages": HELLO, "absurd": 1, "top_p": 7}, {}),
    (CHAT, SAID | {"messages": HELLO, "audio": {}}, {}),
    (CHAT, SAID | {"messages": HELLO}, {"x-loraplex-explain": "perhaps"}),
    (CHAT, SAID | {"messages": HELLO}, {"x-loraplex-conversation": "c" * 300}),
    (CHAT, SAID | {"messages": HELLO, "model": "nobody"}, {}),
    (CHAT, [1], {}),
    (CHAT, None, {}),
    (PLAIN, SAID | {"prompt": "a", "temperature": float("nan")}, {}),
    (MESSAGES, UNSEEDED | {"messages": HELLO}, {"anthropic-version": "1999-01-01"}),
    (RESPONSES, RESPONSE | {"input": [{"type": "item_reference", "id": "a"}]}, {}),
    (RESPONSES, RESPONSE | {"background": True}, {}),
]


async def ask(world, path, body, headers, content_type) -> tuple[int, Any, list[Generate]]:
    """Status, body and engine requests, without what differs from one request to the next."""
    before = len(world.engine.requests)
    headers = headers | {"content-type": content_type}
    async with world.client() as client:
        answer = await client.post(path, content=json.dumps(body), headers=headers)
    text = answer.text
    for name in ("x-request-id", "date"):
        text = text.replace(answer.headers.get(name, "-")[4:], "")
    ran = [
        msgspec.structs.replace(each, request_id="", sampling=without_seed(each))
        for each in world.engine.requests[before:]
    ]
    return answer.status_code, text, ran


def without_seed(request: Generate):
    return msgspec.structs.replace(request.sampling, seed=0)


@pytest.mark.parametrize(("path", "body", "headers"), [*GOOD, *BAD])
async def test_both_ways_give_the_same(world, path, body, headers, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_900_000_000.5)
    short = await ask(world, path, body, headers, SHORT)
    assert short == await ask(world, path, body, headers, LONG)
    assert (short[0] == 200) == ((path, body, headers) in GOOD), short


@pytest.mark.parametrize(("path", "body", "headers"), GOOD)
async def test_a_usual_request_does_not_trouble_fastapi(world, path, body, headers, monkeypatch):
    monkeypatch.setattr(fastapi.routing, "solve_dependencies", None)
    assert (await ask(world, path, body, headers, SHORT))[0] == 200
    assert (await ask(world, path, body, headers, LONG))[0] == 500


async def test_the_short_way_too_is_closed_to_strangers_and_while_stopping(world):
    async with world.client(None) as client:
        assert (await client.post(CHAT, json=GOOD[0][1])).status_code == 401
    world.app.state.context.drain.begin()
    async with world.client() as client:
        assert (await client.post(CHAT, json=GOOD[0][1])).status_code == 503
    assert world.engine.requests == []
