"""How many tokens a response's prompt has: exact, of whatever body, and free."""

import pytest

from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
COUNT = f"{PATH}/input_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
NOW = {"type": "function", "name": "now", "description": "The time.", "parameters": None}
ONLY_NOW = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
PLACE = {"type": "json_schema", "name": "place", "schema": PARAMETERS}
BODIES = {
    "text": {"input": "Grüße 😀"},
    "instructions": {"input": "Hello", "instructions": "Be brief."},
    "tools": {"input": "Hello", "instructions": "Be brief.", "tools": [WEATHER, NOW]},
    "allowed tools": {"input": "Hello", "tools": [WEATHER, NOW], "tool_choice": ONLY_NOW},
    "no tools": {"input": "Hello", "tools": [WEATHER], "tool_choice": "none"},
    "calls": {"input": [{"role": "user", "content": "Hello"}, CALL, RESULT], "tools": [NOW]},
    "a form": {"input": "Hello", "text": {"format": PLACE}},
    "an ending": {"input": "Hello", "add_generation_prompt": False},
    "an adapter": {"input": "Hello", "model": "poet"},
    "an adapter beside the base": {"input": "Hello", "adapter_id": "poet@1"},
    "what only generation needs": {"input": "Hello", "stream": True, "max_output_tokens": 1},
}


@pytest.mark.parametrize("fields", BODIES.values(), ids=BODIES.keys())
async def test_a_count_is_what_the_response_uses(world, fields):
    await world.add_adapter("acme", "poet")
    body = {"model": "tiny-base"} | fields
    async with world.client() as client:
        counted = await client.post(COUNT, json=body)
        assert counted.status_code == 200, counted.text
        assert not world.engine.requests
        ran = await client.post(PATH, json=body | {"stream": False})
    used = ran.json()["usage"]["input_tokens"]
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": used}


async def test_a_count_costs_nothing(world):
    await world.add_tenant("counting", TenantLimits(requests_per_minute=1))
    async with world.client("counting") as client:
        for _ in range(3):
            counted = await client.post(COUNT, json={"model": "tiny-base", "input": "Hello"})
            assert counted.status_code == 200
    assert await world.records(world.tenants["counting"]) == []


async def test_what_no_context_has_room_for_is_counted(world):
    text = "a" * 100_000
    async with world.client() as client:
        counted = await client.post(COUNT, json={"model": "tiny-base", "input": text})
    assert counted.json()["input_tokens"] == len(f"user:{text}\nassistant:")


async def test_what_a_response_refuses_is_not_counted(world):
    async with world.client() as client:
        for fields, status, param in [
            ({"model": "nobody"}, 404, "model"),
            ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
            ({"conversation": "conv_1"}, 400, "conversation"),
            ({"truncation": "auto"}, 400, "truncation"),
            ({"personality": "friendly"}, 400, "personality"),
            ({"tools": [WEATHER], "tool_choice": ONLY_NOW}, 400, "tool_choice"),
        ]:
            body = {"model": "tiny-base", "input": "Hello"} | fields
            refused = await client.post(COUNT, json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (status, param), error
        assert (await client.get(COUNT)).status_code == 405


async def test_the_sdk_counts(world):
    async with world.sdk() as client:
        asked = {"model": "tiny-base", "input": "Hello", "instructions": "x", "tools": [WEATHER]}
        counted = await client.responses.input_tokens.count(**asked)
        ran = await client.responses.create(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == ran.usage.input_tokens
