"""What tests of `/v1/messages` ask: a plain body, and what came as JSON or as events."""

import json

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PREFILL = {"role": "assistant", "content": "Once upon"}


def body_of(**fields):
    return {"model": "tiny-base", "max_tokens": 200, "messages": HELLO} | fields


async def ask(world, key="acme", headers=None, **fields):
    async with world.client(key) as client:
        return await client.post("/v1/messages", json=body_of(**fields), headers=headers)


async def events(world, **fields):
    """The names and the data of a stream's events."""
    answer = await ask(world, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    blocks = answer.text.strip().split("\n\n")
    pairs = [block.split("\n", 1) for block in blocks]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in data]
    return data
