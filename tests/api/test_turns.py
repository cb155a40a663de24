"""How a conversation becomes a prompt, and what must not end its answer too soon."""

from typing import Any

import pytest

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]


async def ask(world, **changes: Any):
    body = {"model": "tiny-base", "messages": HELLO, "max_tokens": 8, **changes}
    async with world.client() as client:
        return await client.post("/v1/chat/completions", json=body)


OPEN = [*HELLO, {"role": "assistant", "content": "Once upon"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"add_generation_prompt": True, "continue_final_message": False}, b"\nassistant:"),
        ({"add_generation_prompt": False}, b"\n"),
        ({"continue_final_message": True}, b""),
        ({"continue_final_message": True, "add_generation_prompt": False}, b""),
    ],
    ids=str,
)
async def test_a_prompt_ends_as_it_is_told_to(world, fields, prompt):
    assert (await ask(world, messages=OPEN, **fields)).status_code == 200
    (asked,) = world.engine.requests
    assert bytes(asked.token_ids) == b"user:Hello\nassistant:Once upon" + prompt


async def test_variables_that_the_template_does_not_read_change_nothing(world):
    assert (await ask(world, chat_template_kwargs={"enable_thinking": False})).status_code == 200
    assert bytes(world.engine.requests[0].token_ids) == b"user:Hello\nassistant:"


async def test_min_tokens_holds_stop_strings_and_stop_tokens_back(world):
    world.engine.tokens = list(b"a.b.c.d.")
    for asked in ({"stop": "."}, {"stop_token_ids": [ord(".")]}):
        answer = (await ask(world, min_tokens=4, **asked)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"].replace(".", "") == "abc"
        assert answer["usage"]["completion_tokens"] == 6
