"""Plain completions without streaming: a prompt's forms, and log-probabilities."""

import pytest

pytestmark = pytest.mark.anyio


async def ask(world, **changes):
    async with world.client() as client:
        answer = await client.post(
            "/v1/completions", json={"model": "tiny-base", "max_tokens": 3, **changes}
        )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("abc", [b"abc"]),
        (["abc", "de"], [b"abc", b"de"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_a_prompt_has_four_forms(world, prompt, tokens):
    got = await ask(world, prompt=prompt)
    assert [bytes(request.token_ids) for request in world.engine.requests] == tokens
    assert got["object"] == "text_completion"
    assert got["id"].startswith("cmpl-")
    assert [choice["index"] for choice in got["choices"]] == list(range(len(tokens)))
    assert got["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert got["usage"]["completion_tokens"] == 3 * len(tokens)


async def test_choices_are_in_order_of_prompt_then_n(world):
    world.engine.tokens = lambda request: [request.token_ids[0], 48 + request.sampling.seed]
    got = await ask(world, prompt=["a", "b"], n=2, seed=3)
    assert [choice["text"] for choice in got["choices"]] == ["a3", "a4", "b3", "b4"]


async def test_logprobs_have_the_older_shape(world):
    world.engine.tokens = list(b"Hi")
    got = await ask(world, prompt="x", logprobs=2)
    assert got["choices"][0]["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5, "I": -1.0}, {"i": -0.5, "j": -1.0}],
        "text_offset": [0, 1],
    }


async def test_a_prompt_that_names_special_tokens_is_encoded_as_such(world):
    await ask(world, prompt="a<|end|>")
    assert world.engine.requests[0].token_ids == (97, 256)
