"""What no client of good will sends; each answer is a 4xx that says what is wrong."""

import json

import pytest

pytestmark = pytest.mark.anyio

HALF = "\ud83d"  # of a surrogate pair
JSON = {"content-type": "application/json"}
SAID = {"model": "tiny-base", "max_tokens": 2}
HELLO = [{"role": "user", "content": "Hi"}]
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [HALF]}}
SCHEMA = {"type": "object", "properties": {HALF: {}}}
HALVES = [
    ("/v1/completions", {"prompt": HALF}),
    ("/v1/completions", {"prompt": ["a", HALF]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
    ("/v1/chat/completions", {"metadata": {"a": HALF}, "messages": HELLO}),
    ("/v1/chat/completions", {"guided_json": {"enum": [HALF]}, "messages": HELLO}),
    ("/v1/responses", {"input": HALF}),
    ("/v1/responses", {"input": [{"role": "user", "content": HALF}]}),
    ("/v1/responses", {"instructions": HALF, "input": "Hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": HALF}]}),
    ("/v1/messages", {"system": HALF, "messages": HELLO}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": SCHEMA}], "messages": HELLO}),
    ("/v1/messages", {"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, *HELLO]}),
]


@pytest.mark.parametrize(("path", "fields"), HALVES)
async def test_half_a_character_is_refused_by_the_fields_name(world, path, fields):
    async with world.client() as client:
        answer = await client.post(path, content=json.dumps(SAID | fields), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", error.get("details", {}).get("param")) == next(iter(fields))
    assert "surrogate" in error["message"]
    assert world.engine.requests == []


async def test_half_a_character_is_refused_however_it_is_written(world):
    raw = json.dumps({**SAID, "prompt": HALF}, ensure_ascii=False).encode(errors="surrogatepass")
    named = json.dumps({**SAID, "prompt": "a", HALF: 1}).encode()
    async with world.client() as client:
        for body in (raw, named):
            answer = await client.post("/v1/completions", content=body, headers=JSON)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_whole_characters_are_taken_however_they_are_written(world):
    said = {**SAID, "prompt": "\U0001f600 \\ud83d"}
    async with world.client() as client:
        for body in (json.dumps(said), json.dumps(said, ensure_ascii=False)):
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-le"):
                answer = await client.post(
                    "/v1/completions", content=body.encode(encoding), headers=JSON
                )
                assert answer.status_code == 200, answer.text
    assert len({request.token_ids for request in world.engine.requests}) == 1


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"])
async def test_a_moment_outside_the_calendar_of_utc_is_refused(world, moment):
    async with world.client() as client:
        asked = await client.get("/v1/audit", params={"since": moment})
        key = {"name": "late", "scopes": ["infer"], "expires_at": moment}
        made = await client.post("/v1/keys", json=key)
    for answer, param in ((asked, "since"), (made, "expires_at")):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
