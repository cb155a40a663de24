"""Plain completions without streaming: a prompt's forms, and log-probabilities."""

import json

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


async def test_an_echo_opens_the_text_with_the_prompt(world):
    world.engine.tokens = list("é!".encode())
    got = await ask(world, prompt=["añ", "b"], echo=True, n=2)
    assert [choice["text"] for choice in got["choices"]] == ["añé!"] * 2 + ["bé!"] * 2
    assert [request.sampling.prompt_logprobs for request in world.engine.requests] == [None] * 2
    assert got["usage"]["completion_tokens"] == 3 * 4
    by_id = await ask(world, prompt=[97, 256, 98], echo=True)
    assert by_id["choices"][0]["text"] == "abé!"  # special tokens have no text


async def test_an_echo_with_logprobs_has_those_of_the_prompt_too(world):
    world.engine.tokens = list(b"yz")
    got = await ask(world, prompt="añb", echo=True, logprobs=1, prompt_logprobs=2)
    assert world.engine.requests[0].sampling.prompt_logprobs == 2
    assert got["choices"][0]["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd", "b", "y", "z"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, *({token: -0.5} for token in ("\ufffd", "\ufffd", "b", "y", "z"))],
        "text_offset": [0, 1, 1, 2, 3, 4],
    }


async def test_an_echo_streams_before_the_text(world):
    world.engine.tokens = list(b"yz")
    async with world.client() as client:
        body = {"model": "tiny-base", "prompt": "ab", "echo": True, "logprobs": 0, "stream": True}
        answer = await client.post("/v1/completions", json=body)
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    assert [choice["text"] for choice in choices] == ["aby", "z"]
    assert choices[0]["logprobs"]["tokens"] == ["a", "b", "y"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_logprobs_have_vllms_shape(world, path):
    chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "xyz"}
    async with world.client() as client:
        body = {"model": "tiny-base", "max_tokens": 2, "prompt_logprobs": 2, "n": 2, **prompt}
        got = (await client.post(path, json=body)).json()
    holders = [got] if chat else got["choices"]
    (request,) = world.engine.requests
    for holder in holders:
        first, second, *rest = holder["prompt_logprobs"]
        token = request.token_ids[1]
        assert first is None
        assert second == {
            str(token): {"logprob": -0.5, "rank": 1, "decoded_token": chr(token)},
            str(token + 1): {"logprob": -1.0, "rank": 2, "decoded_token": chr(token + 1)},
        }
        assert len(rest) == len(request.token_ids) - 2
    assert all("prompt_logprobs" not in each for each in (got["choices"] if chat else [got]))


async def test_a_prompts_token_that_is_not_likely_has_no_rank(world):
    got = await ask(world, prompt="xy", prompt_logprobs=0)
    assert got["choices"][0]["prompt_logprobs"] == [
        None,
        {"121": {"logprob": -0.5, "rank": None, "decoded_token": "y"}},
    ]


async def test_a_prompt_that_names_special_tokens_is_encoded_as_such(world):
    await ask(world, prompt="a<|end|>")
    assert world.engine.requests[0].token_ids == (97, 256)
