"""Chats without streaming: their shape, what the engine is asked, and whose adapter answers."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from loraplex.engine.protocol import Part, composition_digest
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = b"user:Hello\nassistant:"
PATH = "/v1/chat/completions"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny-base", "messages": HELLO, "max_tokens": 8, **changes}


async def ask(world, **changes):
    async with world.client() as client:
        return await client.post(PATH, json=body(**changes))


async def test_a_chat_has_openais_shape_and_counts_its_tokens(world):
    world.engine.tokens = list(b"Hi there")
    answer = await ask(world)
    assert answer.status_code == 200
    got = answer.json()
    assert got["id"].startswith("chatcmpl-")
    assert got["object"] == "chat.completion"
    assert got["model"] == "tiny-base"
    assert got["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert got["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 8,
        "total_tokens": len(PROMPT) + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert bytes(world.engine.requests[0].token_ids) == PROMPT
    assert answer.headers["x-loraplex-model"] == "tiny-base"
    assert answer.headers["x-loraplex-digest"] == "base"
    assert answer.headers["x-loraplex-cached-tokens"] == "0"
    assert float(answer.headers["x-loraplex-first-token-ms"]) >= 0


async def test_every_parameter_reaches_the_engine(world):
    await ask(
        world,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={"65": -100, "66": 2.5},
        seed=7,
        stop_token_ids=[10],
        ignore_eos=True,
        min_tokens=2,
        logprobs=True,
        top_logprobs=3,
        max_tokens=5,
        response_format={"type": "text"},
        user="someone",
        metadata={"a": "b"},
    )
    sampling = world.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, -1)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, 1.1)
    assert sampling.logit_bias == ((65, -100.0), (66, 2.5))
    assert (sampling.seed, sampling.stop_token_ids) == (7, (10,))
    assert (sampling.ignore_eos, sampling.logprobs, sampling.max_tokens) == (True, 3, 5)
    assert sampling.min_tokens == 2


async def test_absent_parameters_have_openais_defaults(world):
    await ask(world, temperature=None, top_k=-1, stop=None, n=None)
    await ask(world)
    first, second = (request.sampling for request in world.engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.logprobs) == (1.0, 1.0, 0, None)
    assert first.seed != second.seed  # drawn anew each time


async def test_n_choices_are_one_engine_request(world):
    world.engine.tokens = lambda request: [65 + request.sampling.seed % 10] * 2
    answer = await ask(world, n=3, seed=2)
    contents = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert contents == ["CC", "DD", "EE"]
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
    (request,) = world.engine.requests
    assert (request.choices, request.sampling.seed) == (3, 2)
    assert answer.json()["usage"]["prompt_tokens"] == len(PROMPT)  # once
    assert answer.json()["usage"]["completion_tokens"] == 6


async def test_the_largest_seed_wraps_and_is_served(world):
    answer = await ask(world, n=2, seed=2**63 - 1)
    assert answer.status_code == 200
    assert [request.sampling.seed for request in world.engine.requests] == [2**63 - 1]


async def test_logprobs_have_tokens_bytes_and_the_likeliest(world):
    world.engine.tokens = list("é!".encode())
    answer = await ask(world, logprobs=True, top_logprobs=2, max_tokens=3)
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x21]]
    assert [entry["token"] for entry in entries] == ["�", "�", "!"]
    assert entries[2]["logprob"] == -0.5
    assert [top["token"] for top in entries[2]["top_logprobs"]] == ["!", '"']


async def test_a_stop_token_has_no_text_and_ends_the_answer(world):
    world.engine.tokens = list(b"ab\ncd")
    answer = await ask(world, stop_token_ids=[10], logprobs=True)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "ab"
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == 2
    assert answer.json()["usage"]["completion_tokens"] == 3  # the stop token was generated


async def test_a_stop_string_is_trimmed_and_ends_the_engine_request(world):
    world.engine.tokens = list(b"one END two")
    answer = await ask(world, stop=["END", "never"], max_tokens=50, logprobs=True)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "one "
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == 4  # those of the trimmed string are gone
    assert answer.json()["usage"]["completion_tokens"] == 7
    assert world.engine.aborted_choices == [(world.engine.requests[0].request_id, 0)]
    assert world.engine.aborts == []


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "developer", "content": "Be brief"}], b"system:Be brief\nassistant:"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ],
            b"user:a\nb\nassistant:",
        ),
        (
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": []},
                {"role": "user", "content": "", "name": "bob"},
            ],
            b"user:hi\nassistant:yo\nuser:\nassistant:",
        ),
    ],
)
async def test_messages_of_all_roles_and_forms_are_rendered(world, messages, prompt):
    answer = await ask(world, messages=messages)
    assert answer.status_code == 200
    assert bytes(world.engine.requests[0].token_ids) == prompt


async def test_fields_that_ask_for_nothing_are_accepted(world):
    answer = await ask(
        world, tools=[], tool_choice="none", store=False, modalities=["text"], service_tier="auto"
    )
    assert answer.status_code == 200


async def test_an_adapter_answers_under_its_immutable_id(world):
    await world.add_adapter("acme", "poet", "b" * 64)
    await world.add_adapter("acme", "poet", "c" * 64)
    answer = await ask(world, model="poet")
    assert answer.json()["model"] == "poet@2"
    assert answer.headers["x-loraplex-model"] == "poet@2"
    assert answer.headers["x-loraplex-digest"] == "c" * 64
    await ask(world, model="poet@1")
    assert [request.image for request in world.engine.requests] == ["c" * 64, "b" * 64]
    assert {request.tenant for request in world.engine.requests} == {world.tenants["acme"]}


NAMINGS = [
    ("tiny-base", "poet", "poet@2"),
    ("tiny-base", "poet@1", "poet@1"),
    ("tiny-base", "tiny-base", "tiny-base"),
    ("poet", "poet", "poet@2"),
    ("poet@1", "poet", "poet@1"),
    ("poet", "poet@1", "poet@1"),
    ("poet@2", "poet@1", "adapter_id conflicts"),
    ("poet", "bard", "adapter_id conflicts"),
    ("poet", "tiny-base", "adapter_id conflicts"),
    ("nobody", "poet", "model is unknown"),
    ("tiny-base", "nobody", "adapter_id is unknown"),
    ("tiny-base", "poet@3", "adapter_id is unknown"),
    ("poet@0", None, "model is unknown"),
    ("Poet", None, "model is unknown"),
    ("poet@", None, "model is unknown"),
    ("../poet", None, "model is unknown"),
]


async def test_model_and_adapter_id_name_one_adapter_or_none(world):
    for name, digest in (("poet", "a"), ("poet", "b"), ("bard", "c")):
        await world.add_adapter("acme", name, digest * 64)
    async with world.client() as client:
        for model, adapter_id, expected in NAMINGS:
            world.engine.requests.clear()
            answer = await client.post(PATH, json=body(model=model, adapter_id=adapter_id))
            assert outcome(answer) == expected, (model, adapter_id)
            assert bool(world.engine.requests) == answer.is_success  # never the base instead


async def test_adapters_are_composed_with_their_weights(world):
    await world.add_adapter("acme", "poet", "a" * 64)
    await world.add_adapter("acme", "bard", "b" * 64)
    parts = [{"id": "poet", "weight": 0.5}, {"id": "bard@1"}]
    first, second = await ask(world, adapters=parts), await ask(world, adapters=parts[::-1])
    other = await ask(world, adapters=[{"id": "poet"}, {"id": "bard"}])
    assert [answer.status_code for answer in (first, second, other)] == [200] * 3
    model = first.json()["model"]
    assert model.startswith("composition-")
    assert (second.json()["model"], other.json()["model"] == model) == (model, False)
    assert first.headers["x-loraplex-model"] == model
    request = world.engine.requests[0]
    assert request.parts == (Part("a" * 64, 0.5), Part("b" * 64, 1.0))
    assert request.image == composition_digest(request.parts)
    assert world.engine.requests[1].image == request.image
    rows = await world.usage_rows()
    assert [(row["adapter"], row["requests"]) for row in rows] == [("(composition)", 3)]


async def test_a_composition_that_the_engine_cannot_make_names_the_field(world):
    await world.add_adapter("acme", "poet")
    world.engine.fail = "invalid_request"
    answer = await ask(world, adapters=[{"id": "poet"}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapters")


async def test_a_composition_of_what_is_not_there_is_refused(world):
    await world.add_adapter("acme", "poet")
    await world.add_adapter("acme", "double")  # the same image
    await world.add_adapter("globex", "secret")
    for adapters, status, param in (
        ([{"id": "poet"}, {"id": "secret"}], 404, "adapters.1.id"),
        ([{"id": "poet@2"}], 404, "adapters.0.id"),
        ([{"id": "tiny-base"}], 400, "adapters.0.id"),
        ([{"id": "poet"}, {"id": "double"}], 400, "adapters"),
    ):
        answer = await ask(world, adapters=adapters)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert world.engine.requests == []


def outcome(answer) -> str:
    """The model that answered, or what was wrong."""
    if answer.is_success:
        return answer.json()["model"]
    error = answer.json()["error"]
    unknown = (answer.status_code, error["code"]) == (404, "model_not_found")
    assert unknown or answer.status_code == 400
    return f"{error['param']} {'is unknown' if unknown else 'conflicts'}"


async def test_another_tenants_adapter_looks_like_none(world):
    await world.add_adapter("globex", "secret")
    foreign, absent = await ask(world, model="secret"), await ask(world, model="absent")
    assert foreign.status_code == absent.status_code == 404
    expected = absent.json()["error"]["message"].replace("absent", "secret")
    assert foreign.json()["error"]["message"] == expected


async def test_without_max_tokens_the_answer_may_fill_the_context(world):
    async with world.client() as client:
        request = {"model": "tiny-base", "messages": HELLO, "stop_token_ids": [58]}
        assert (await client.post(PATH, json=request)).status_code == 200
    assert world.engine.requests[0].sampling.max_tokens == 2048 - len(PROMPT)


async def test_without_max_tokens_the_answer_fits_the_tenants_minute(world):
    await world.add_tenant("small", TenantLimits(tokens_per_minute=100))
    async with world.client("small") as client:
        answer = await client.post(PATH, json={"model": "tiny-base", "messages": HELLO})
    assert answer.status_code == 200
    assert world.engine.requests[0].sampling.max_tokens == 100 - len(PROMPT)


async def test_what_cannot_fit_the_context_is_refused_with_the_numbers(world):
    answer = await ask(world, max_completion_tokens=2048, max_tokens=None)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")
    for number in (2048, len(PROMPT), 2048 + len(PROMPT)):
        assert str(number) in error["message"]
    long = [{"role": "user", "content": "x" * 3000}]
    error = (await ask(world, messages=long)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_what_no_minute_can_hold_is_refused_for_good(world):
    await world.add_tenant("small", TenantLimits(tokens_per_minute=50))
    async with world.client("small") as client:
        answer = await client.post(PATH, json=body(max_tokens=100))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    assert "retry-after" not in answer.headers


async def test_limits_are_told_and_enforced(world):
    await world.add_tenant("slow", TenantLimits(requests_per_minute=2, tokens_per_minute=1000))
    async with world.client("slow") as client:
        first = await client.post(PATH, json=body())
        await client.post(PATH, json=body())
        refused = await client.post(PATH, json=body())
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(world.engine.requests) == 2


@pytest.mark.parametrize(
    ("code", "status", "error_code", "retry"),
    [
        ("engine_died", 503, "engine_restarted", True),
        ("engine_unavailable", 503, "engine_unavailable", True),
        ("overloaded", 503, "overloaded", True),
        ("image_missing", 500, "image_missing", False),
        ("image_corrupt", 500, "image_corrupt", False),
        ("image_mismatch", 409, "image_mismatch", False),
        ("invalid_request", 400, None, None),
        ("internal", 500, "internal_error", None),
    ],
)
async def test_an_engines_failure_is_one_clear_error_and_costs_nothing(
    world, code, status, error_code, retry
):
    world.engine.fail = code
    answer = await ask(world)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == error_code
    if retry:
        assert int(answer.headers["retry-after"]) >= 1
    elif retry is False:
        assert answer.headers["x-should-retry"] == "false"
    rows = await world.usage_rows()
    assert [(row["requests"], row["total_tokens"]) for row in rows] == [(1, 0)]


async def test_usage_is_kept_by_adapter(world):
    await world.add_adapter("acme", "poet")
    await ask(world, model="poet")
    await ask(world, n=2)
    rows = {row["adapter"]: row for row in await world.usage_rows()}
    assert (rows["poet"]["requests"], rows["poet"]["completion_tokens"]) == (1, 8)
    assert (rows[None]["requests"], rows[None]["completion_tokens"]) == (1, 16)
    assert rows[None]["prompt_tokens"] == len(PROMPT)


async def test_too_slow_a_generation_ends_with_504(world):
    world.engine.hold = asyncio.Event()
    context = world.app.state.context
    settings = context.settings.model_copy(update={"request_timeout_s": 0.05})
    world.app.state.context = replace(context, settings=settings)
    answer = await ask(world)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert answer.headers["x-should-retry"] == "false"
    assert world.engine.in_flight == set()
