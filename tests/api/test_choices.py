"""Several choices of one engine request, the best of many, beams, priorities and scopes."""

import asyncio
from typing import Any

import pytest

from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


async def ask(world, path: str = PLAIN, key: str = "acme", **changes: Any):
    prompt = (
        {"prompt": "Hello"} if path == PLAIN else {"messages": [{"role": "user", "content": ""}]}
    )
    async with world.client(key) as client:
        return await client.post(
            path, json={"model": "tiny-base", "max_tokens": 4} | prompt | changes
        )


def texts(answer) -> list[str]:
    return [choice["text"] for choice in answer.json()["choices"]]


async def test_a_stop_string_ends_its_own_choice_alone(world):
    scripts = {0: b"abcd", 1: b"aXbc", 2: b"XX"}
    world.engine.tokens = lambda request: list(scripts[request.sampling.seed])
    answer = await ask(world, n=3, seed=0, stop="X")
    assert texts(answer) == ["abcd", "a", ""]
    reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
    assert reasons == ["length", "stop", "stop"]
    (request,) = world.engine.requests
    assert sorted(world.engine.aborted_choices) == [(request.request_id, i) for i in (1, 2)]
    assert world.engine.aborts == []
    assert answer.json()["usage"]["completion_tokens"] == 4 + 2 + 1


async def test_a_choice_that_was_ended_does_not_keep_the_answer_waiting(world):
    """The engine holds all further tokens; the end of a choice is not among them."""
    world.engine.tokens = list(b"aX and more")
    world.tap(2)
    answer = await asyncio.wait_for(ask(world, stop="X", max_tokens=10), 20)
    assert texts(answer) == ["a"]


async def test_cached_tokens_are_told_in_usage_and_header(world):
    world.engine.cached_tokens = 3
    answer = await ask(world, prompt=["Hello", "Hello"], stop="l")
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert answer.headers["x-loraplex-cached-tokens"] == "6"
    assert [row["cached_tokens"] for row in await world.usage_rows()] == [6]


async def test_best_of_answers_with_the_likeliest_and_charges_for_all(world):
    world.engine.logprob = lambda token: -token / 100
    scripts = {7: b"cc", 8: b"aaaa", 9: b"bbb", 10: b"d"}
    world.engine.tokens = lambda request: list(scripts[request.sampling.seed])
    answer = await ask(world, n=2, best_of=4, seed=7)
    assert texts(answer) == ["aaaa", "bbb"]  # by the mean, not the sum
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer.json()["choices"]] == [None, None]
    assert answer.json()["usage"]["completion_tokens"] == 2 + 4 + 3 + 1
    (request,) = world.engine.requests
    assert (request.choices, request.sampling.logprobs, request.beams) == (4, 0, None)


async def test_the_estimate_counts_all_that_is_run(world):
    await world.add_tenant("small", TenantLimits(tokens_per_minute=100))
    for fields in ({"best_of": 10}, {"best_of": 10, "use_beam_search": True}):
        answer = await ask(world, key="small", max_tokens=10, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
    assert (await ask(world, key="small", max_tokens=9, best_of=10)).status_code == 200


@pytest.mark.parametrize("path", [PLAIN, CHAT])
async def test_beams_are_one_engine_request(world, path):
    world.engine.tokens = list(b"beam")
    fields = {"length_penalty": 0.5, "early_stopping": True}
    answer = await ask(world, path, n=2, best_of=3, use_beam_search=True, **fields)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 2
    (request,) = world.engine.requests
    beams = request.beams
    assert (request.choices, beams.width) == (2, 3)
    assert (beams.length_penalty, beams.early_stopping) == (0.5, True)
    assert request.sampling.temperature == 0


async def test_priority_and_drafts_reach_the_engine(world):
    await ask(world, priority=-3, speculative_tokens=5)
    await ask(world)
    first, second = world.engine.requests
    assert (first.priority, first.sampling.draft_tokens) == (-3, 5)
    assert (second.priority, second.sampling.draft_tokens) == (0, None)


async def test_each_tenant_has_a_scope_of_its_own(world):
    for key in ("acme", "globex", "acme"):
        await ask(world, key=key)
    scopes = [request.scope for request in world.engine.requests]
    assert scopes[0] == scopes[2] != scopes[1]
    assert not any(world.tenants[key] in scope for key in ("acme", "globex") for scope in scopes)
