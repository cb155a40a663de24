"""Absurd, unknown and unserved parameters: each is a 400 that names the field, and runs nothing."""

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = {"model": "tiny-base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PLAIN = {"model": "tiny-base", "prompt": "Hi", "max_tokens": 4}
HUGE = 10**30

BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", HUGE),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("stop_token_ids", [257]),
    ("stop_token_ids", list(range(129))),
    ("logit_bias", {"257": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", HUGE),
    ("max_tokens", "many"),
    ("min_tokens", -1),
    ("min_tokens", 5),
    ("min_tokens", HUGE),
    ("min_tokens", True),
    ("n", 0),
    ("n", 9),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"continuous_usage_stats": True}),
    ("user", 7),
    ("metadata", "x"),
    ("model", ""),
    ("model", None),
    ("adapter_id", ""),
    ("ignore_eos", 1),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "json_schema": {"name": "a"}}),
    ("best_of", 0),
    ("best_of", 21),
    ("use_beam_search", 1),
    ("length_penalty", 0.5),
    ("early_stopping", True),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("priority", 2**31),
    ("priority", 0.5),
    ("speculative_tokens", 17),
    ("speculative_tokens", -1),
    ("adapters", []),
    ("adapters", [{"id": "a"}] * 17),
    ("structured_outputs", 5),
    ("guided_json", 5),
    ("guided_json", ""),
    ("guided_regex", ""),
    ("guided_choice", []),
    ("guided_choice", "a"),
    ("guided_grammar", "x" * 65_537),
    ("nonsense", 1),
    ("modalities", ["audio"]),
    ("store", True),
    ("skip_special_tokens", False),
    ("include_stop_str_in_output", True),
    ("truncate_prompt_tokens", 5),
    ("bad_words", ["no"]),
    ("reasoning_effort", "high"),
]
BAD_NESTED = [
    ("logit_bias.5", "logit_bias", {"5": 101}),
    ("stop.1", "stop", ["a", ""]),
    ("stop.0", "stop", "x" * 1001),
    ("stop_token_ids.0", "stop_token_ids", [-1]),
    ("stream_options.nonsense", "stream_options", {"nonsense": 1}),
    ("response_format.type", "response_format", {"type": "yaml"}),
    (
        "response_format.json_schema.name",
        "response_format",
        {"type": "json_schema", "json_schema": {}},
    ),
    ("adapters.0.weight", "adapters", [{"id": "a", "weight": 101}]),
    ("adapters.0.weight", "adapters", [{"id": "a", "weight": "1"}]),
    ("adapters.1.id", "adapters", [{"id": "a"}, {"id": ""}]),
    ("structured_outputs.nonsense", "structured_outputs", {"nonsense": 1}),
    ("guided_choice.1", "guided_choice", ["a", ""]),
]
CALL = {"name": "f", "arguments": "{}"}
BAD_CHAT = [
    ("messages", "messages", []),
    ("messages", "messages", "Hi"),
    ("messages.0.role", "messages", [{"role": "wizard", "content": "Hi"}]),
    ("messages.0.role", "messages", [{"role": "function", "content": "Hi"}]),
    (
        "messages.0.tool_call_id",
        "messages",
        [{"role": "user", "content": "a", "tool_call_id": "b"}],
    ),
    ("messages.0.content", "messages", [{"role": "assistant", "content": None}]),
    (
        "messages.0.tool_calls.0.function.arguments",
        "messages",
        [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
                ],
            }
        ],
    ),
    ("messages.0.content", "messages", [{"role": "user"}]),
    ("messages.0.content", "messages", [{"role": "user", "content": None}]),
    ("messages.0.content", "messages", [{"role": "user", "content": 5}]),
    ("messages.0.content", "messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages.0.content", "messages", [{"role": "user", "content": ["Hi"]}]),
    ("messages.0.tool_calls", "messages", [{"role": "user", "content": "a", "tool_calls": [1]}]),
    ("top_logprobs", "top_logprobs", 2),
    ("logprobs", "logprobs", 3),
    ("tools.0.function", "tools", [{"type": "function"}]),
    ("tools.0.type", "tools", [{"type": "web", "function": {"name": "f"}}]),
    ("tools.0.function.name", "tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", "tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    (
        "tools.0.function.parameters",
        "tools",
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    ),
    ("tool_choice", "tool_choice", "required"),
    ("tool_choice", "tool_choice", "any"),
    ("tool_choice", "tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("parallel_tool_calls", "parallel_tool_calls", 1),
    ("add_generation_prompt", "add_generation_prompt", 1),
    ("continue_final_message", "continue_final_message", "yes"),
    ("chat_template_kwargs", "chat_template_kwargs", "thinking"),
    ("chat_template_kwargs", "chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", "chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", "chat_template_kwargs", {"bos_token": "<s>"}),
    ("chat_template_kwargs", "chat_template_kwargs", {"_private": 1}),
    ("chat_template_kwargs", "chat_template_kwargs", {"a" * 65: 1}),
    ("chat_template_kwargs", "chat_template_kwargs", {"long": "x" * 16_384}),
    ("chat_template_kwargs", "chat_template_kwargs", {f"v{i}": i for i in range(65)}),
    ("echo", "echo", True),
    ("functions", "functions", [{}]),
    ("max_tokens", "max_completion_tokens", 5),
]
BAD_PLAIN = [
    ("prompt", "prompt", []),
    ("prompt", "prompt", 5),
    ("prompt", "prompt", ""),
    ("prompt", "prompt", ["a", [1]]),
    ("prompt", "prompt", [[1], []]),
    ("prompt", "prompt", [1, -1]),
    ("prompt", "prompt", [1, True]),
    ("prompt", "prompt", [300]),
    ("prompt", "prompt", ["a"] * 17),
    ("prompt", "prompt", None),
    ("logprobs", "logprobs", 21),
    ("logprobs", "logprobs", True),
    ("echo", "echo", 0),
    ("suffix", "suffix", "x"),
    ("tools", "tools", []),
    ("messages", "messages", []),
]


async def refusals(world, path, good, cases):
    """Cases that are not refused with 400, the named field and a sentence."""
    wrong = []
    async with world.client() as client:
        for named, field, value in cases:
            answer = await client.post(path, json={**good, field: value})
            error = answer.json().get("error", {})
            refused = (answer.status_code, error.get("param"), error.get("type"))
            message = error.get("message", "")
            if refused != (400, named, "invalid_request_error") or not message.endswith("."):
                wrong.append((field, value, answer.text))
    assert world.engine.requests == []
    return wrong


@pytest.mark.parametrize(
    ("path", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)]
)
async def test_values_out_of_range_are_refused(world, path, good):
    flat = [(field, field, value) for field, value in BAD_VALUES]
    assert await refusals(world, path, good, flat + BAD_NESTED) == []


async def test_what_a_chat_cannot_be_is_refused(world):
    assert await refusals(world, "/v1/chat/completions", CHAT, BAD_CHAT) == []


CALLING = [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}]


@pytest.mark.parametrize(
    "fields", [{"add_generation_prompt": True}, {"messages": CALLING}], ids=["both", "calls"]
)
async def test_what_cannot_be_continued_is_refused(world, fields):
    case = ("continue_final_message", "continue_final_message", True)
    assert await refusals(world, "/v1/chat/completions", CHAT | fields, [case]) == []


async def test_what_a_completion_cannot_be_is_refused(world):
    assert await refusals(world, "/v1/completions", PLAIN, BAD_PLAIN) == []


async def test_too_many_completions_in_one_request_are_refused(world):
    async with world.client() as client:
        for named, field, value in (("n", "n", 8), ("best_of", "best_of", 3)):
            asked = {**PLAIN, "prompt": ["a"] * 16, field: value}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == named


BEAMS = {"use_beam_search": True, "best_of": 2}
UNFIT = [
    ("best_of", {"n": 3, "best_of": 2}),
    ("best_of", {"n": 1, "best_of": 2, "stream": True}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("stream_options", {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
    ("use_beam_search", {"use_beam_search": True}),
    ("stream", {**BEAMS, "n": 2, "stream": True}),
    ("temperature", {**BEAMS, "temperature": 0.5}),
    ("top_k", {**BEAMS, "top_k": 5}),
    ("stop", {**BEAMS, "stop": "a"}),
    ("logprobs", {**BEAMS, "logprobs": 0}),
    ("speculative_tokens", {**BEAMS, "speculative_tokens": 2}),
    ("use_beam_search", {**BEAMS, "guided_regex": "a"}),
    ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("adapters", {"model": "poet", "adapters": [{"id": "poet"}]}),
    ("adapters", {"adapter_id": "poet", "adapters": [{"id": "poet"}]}),
]


async def test_what_does_not_go_together_is_refused(world):
    await world.add_adapter("acme", "poet")
    async with world.client() as client:
        for named, fields in UNFIT:
            answer = await client.post("/v1/completions", json=PLAIN | fields)
            refused = (answer.status_code, answer.json().get("error", {}).get("param"))
            assert refused == (400, named), (fields, answer.text)
    assert world.engine.requests == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_numbers_that_json_does_not_have_are_refused(world, number):
    text = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
    async with world.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("field", ["guided_json", "chat_template_kwargs"])
async def test_an_object_with_such_a_number_is_refused(world, field):
    text = json.dumps(CHAT)[:-1] + f', "{field}": {{"maximum": NaN}}}}'
    async with world.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_half_of_a_character_is_refused_and_not_echoed(world):
    text = json.dumps({**CHAT, "model": "\ud800"})
    async with world.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


HARMLESS = {
    "service_tier": "flex",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "Hi"},
    "modalities": ["text"],
    "store": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "reasoning_effort": "none",
    "verbosity": "medium",
}


async def test_fields_that_change_no_answer_are_taken(world):
    async with world.client() as client:
        for path, good in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
            answer = await client.post(path, json=good | HARMLESS)
            assert answer.status_code == 200, answer.text


async def test_every_optional_field_may_be_null(world):
    async with world.client() as client:
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"]
        for path, good, name in (
            ("/v1/chat/completions", CHAT, "ChatRequest"),
            ("/v1/completions", PLAIN, "CompletionRequest"),
        ):
            optional = schema[name]["properties"].keys() - set(schema[name]["required"])
            answer = await client.post(path, json=dict.fromkeys(optional) | good)
            assert answer.status_code == 200, answer.text
            assert len(optional) > 15
