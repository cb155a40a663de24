"""Tools in chats: what the model is told, what it is held to, and how calls come back."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from loraplex.platform.chat_template import ChatTemplate
from loraplex.platform.hermes import call_text

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": CITY},
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
CALL = call_text("weather", {"city": "Rome"})
PAST = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": "warm"},
]
NATIVE = (
    "{% if tools %}tools:<tool_call>{% for t in tools %}{{ t | tojson }};{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};"
    "{% for c in m.tool_calls or [] %}call:{{ c.function.arguments | tojson }};{% endfor %}"
    "{% endfor %}assistant:"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


async def ask(world, **changes: Any):
    body = {"model": "tiny-base", "messages": HELLO, "max_tokens": 400, "tools": [WEATHER, NOW]}
    async with world.client() as client:
        return await client.post(PATH, json=body | changes)


def message(answer) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def prompt(world) -> str:
    return bytes(world.engine.requests[-1].token_ids).decode()


async def test_a_call_comes_back_in_openais_shape(world):
    world.engine.tokens = list(f"Let me see.\n{CALL}\n{call_text('now', {})}".encode())
    answer = await ask(world)
    got = message(answer)
    assert got["content"] == "Let me see."
    assert [call["function"] for call in got["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert {call["type"] for call in got["tool_calls"]} == {"function"}
    assert len({call["id"] for call in got["tool_calls"]}) == 2
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert world.engine.requests[0].sampling.guide is None


async def test_an_answer_without_a_call_is_a_plain_one(world):
    world.engine.tokens = list(b"Sunny < rainy.")
    answer = await ask(world, tool_choice="auto")
    assert message(answer) == {"role": "assistant", "content": "Sunny < rainy.", "refusal": None}
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_a_broken_call_is_content(world):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": Rome}}\n</tool_call>'
    world.engine.tokens = list(text.encode())
    answer = await ask(world)
    assert message(answer)["content"] == text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_none_means_that_the_model_hears_of_no_tools(world):
    world.engine.tokens = list(CALL.encode())
    answer = await ask(world, tool_choice="none", response_format={"type": "json_object"})
    assert message(answer)["content"] == CALL
    assert prompt(world) == "user:Rome?\nassistant:"


async def test_tools_and_another_form_exclude_each_other(world):
    answer = await ask(world, guided_regex="a")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"


async def test_one_call_at_most_ends_the_answer_with_it(world):
    world.engine.tokens = list(f"{CALL}\n{CALL}".encode())
    answer = await ask(world, parallel_tool_calls=False)
    assert len(message(answer)["tool_calls"]) == 1
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert len(world.engine.aborted_choices) == 1


def accepts(guide, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(guide.text))
    content = text.encode()
    return (
        matcher.try_consume_tokens(tokenizer.tokenize_bytes(content)) == len(content)
        and matcher.is_accepting()
    )


FORCED = [
    ("required", None, [CALL, call_text("now", {}), f"{CALL}\n{CALL}"]),
    ("required", False, [CALL, call_text("now", {})]),
    ({"type": "function", "function": {"name": "weather"}}, None, [CALL]),
]
NEVER = [
    "Hello",
    call_text("weather", {}),
    call_text("weather", {"city": 5}),
    call_text("now", {"x": 1}),
    call_text("nobody", {}),
]


@pytest.mark.parametrize(("choice", "parallel", "good"), FORCED)
async def test_a_forced_call_is_held_to_its_schema(world, choice, parallel, good):
    world.engine.tokens = list(CALL.encode())
    answer = await ask(world, tool_choice=choice, parallel_tool_calls=parallel)
    assert message(answer)["content"] is None
    guide = world.engine.requests[-1].sampling.guide
    every = {*NEVER, *(text for _, _, texts in FORCED for text in texts)}
    assert {text for text in every if accepts(guide, text)} == {*good}


def allowing(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


ALLOWED = [
    ("auto", ["weather"], ["", "Hello", CALL, f"See: {CALL}", f"{CALL}\n{CALL}"]),
    ("required", ["weather"], [CALL, f"{CALL}\n{CALL}"]),
    ("auto", ["now", "now"], ["", "Hello", call_text("now", {})]),
]
SAYINGS = {*NEVER, *(text for *_, texts in ALLOWED for text in texts), "<tool_call>", f"{CALL} Bye"}


@pytest.mark.parametrize(("mode", "names", "good"), ALLOWED)
async def test_only_allowed_tools_are_called_and_all_are_told(world, mode, names, good):
    await ask(world)
    expected = prompt(world)
    assert (await ask(world, tool_choice=allowing(mode, *names))).status_code == 200
    assert prompt(world) == expected
    guide = world.engine.requests[-1].sampling.guide
    assert {text for text in SAYINGS if accepts(guide, text)} == {*good}


async def test_an_allowed_call_comes_back_and_no_other(world):
    world.engine.tokens = list(f"See:\n{call_text('now', {})}\n{CALL}".encode())
    got = message(await ask(world, tool_choice=allowing("auto", "now")))
    assert [call["function"]["name"] for call in got["tool_calls"]] == ["now"]
    choice = allowing("auto", "weather", "now")
    got = message(await ask(world, tool_choice=choice, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in got["tool_calls"]] == ["now"]
    assert world.engine.requests[-1].sampling.guide is None  # all are allowed, as without a choice
    await ask(world, tool_choice=allowing("auto", "weather"), parallel_tool_calls=False)
    assert not accepts(world.engine.requests[-1].sampling.guide, f"{CALL}\n{CALL}")


FORM = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": CITY | {"x-guidance": {"item_separator": ";"}}},
}
ROME = '{"city": "Rome"}'
BESIDE = [
    ({}, FORM, [CALL, ROME]),
    ({}, {"type": "json_object"}, [CALL, ROME, '{"a": 5}']),
    ({}, {"type": "json_schema", "json_schema": {"name": "any"}}, [CALL, ROME, '{"a": 5}', "5"]),
    ({"tool_choice": allowing("auto", "now")}, FORM, [ROME]),
    ({"tool_choice": "required"}, FORM, [CALL]),
    ({"parallel_tool_calls": False}, FORM, [CALL, ROME]),
]
ENDLESS = ROME.replace(" ", "  "), CALL.replace('": "', '":  "')


@pytest.mark.parametrize(("fields", "form", "good"), BESIDE)
async def test_an_answer_is_calls_or_has_its_form(world, fields, form, good):
    world.engine.tokens = list(ROME.encode())
    got = message(await ask(world, response_format=form, **fields))
    assert got["content"] == ROME
    guide = world.engine.requests[-1].sampling.guide
    texts = {*SAYINGS, ROME, '{"a": 5}', "5", *ENDLESS} - {f"{CALL}\n{CALL}", call_text("now", {})}
    assert {text for text in texts if accepts(guide, text)} == {*good}
    twice = accepts(guide, f"{CALL}\n{CALL}")
    assert twice == (CALL in good and "parallel_tool_calls" not in fields)


BAD_CHOICES = [
    (allowing("auto", "weather", "nobody"), "'nobody' is none of the tools"),
    (allowing("auto"), "at least one function"),
    (allowing("none", "now"), '"auto" or "required"'),
    (allowing("auto", "x" * 5_000), "none of the tools"),
    (allowing(["auto"], "now"), '"auto" or "required"'),
    ({"type": "allowed_tools", "mode": "auto", "tools": [NOW]}, "allowed_tools"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}}, "a name"),
    ({"type": "function", "name": "now"}, "a name"),
]


@pytest.mark.parametrize(("choice", "told"), BAD_CHOICES)
async def test_a_choice_that_chooses_nothing_is_refused(world, choice, told):
    answer = await ask(world, tool_choice=choice)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tool_choice")
    assert told in error["message"]
    assert len(error["message"]) < 500


async def test_a_schema_that_cannot_be_followed_is_refused_where_it_is_forced(world):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    answer = await ask(world, tools=[odd], tool_choice="required")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert (await ask(world, tools=[odd])).status_code == 200
    long = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 70_000}}}
    answer = await ask(world, tools=[long])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_a_template_without_tools_has_them_spelled_out(world):
    await ask(world, messages=[{"role": "system", "content": "Be brief."}, *PAST])
    told = prompt(world)
    assert told.startswith("system:Be brief.\n\nYou may call")
    assert json.dumps(WEATHER["function"]["parameters"]) in told
    assert '"strict"' not in told
    assert f"assistant:{CALL}\n" in told
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert told.endswith(f"user:{results}\nassistant:")


async def test_a_template_with_tools_gets_them_as_they_are():
    tools = [WEATHER]
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    past = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    template = ChatTemplate(NATIVE, {})
    rendered = template.render(past, tools)
    assert rendered.startswith(f"tools:<tool_call>{json.dumps(WEATHER)};user:")
    assert 'call:{"city": "Rome"};' in rendered
    assert template.render(HELLO) == "user:Rome?;assistant:"


async def test_a_template_without_a_system_role_tells_the_user_of_tools():
    rendered = ChatTemplate(NO_SYSTEM, {}).render(HELLO, [WEATHER])
    assert rendered.startswith("user:You may call")
    assert rendered.endswith("</tool_call>\n\nRome?;")


def deltas(chunks) -> list[Any]:
    return [choice.delta for chunk in chunks for choice in chunk.choices]


async def test_the_sdk_reads_a_stream_of_calls(world):
    world.engine.tokens = list(f"See:\n{CALL}\n{call_text('now', {})}".encode())
    async with world.sdk() as client:
        stream = await client.chat.completions.create(
            model="tiny-base",
            messages=HELLO,
            tools=[WEATHER, NOW],
            stream=True,
            logprobs=True,
            max_tokens=400,
        )
        chunks = [chunk async for chunk in stream]
    calls = [call for delta in deltas(chunks) for call in delta.tool_calls or []]
    assert "".join(delta.content or "" for delta in deltas(chunks)) == "See:"
    begun = [(call.index, call.function.name) for call in calls if call.id]
    assert begun == [(0, "weather"), (1, "now")]
    spelled = ["".join(c.function.arguments for c in calls if c.index == i) for i in (0, 1)]
    assert spelled == ['{"city": "Rome"}', "{}"]
    assert len(calls) > 10  # as they come, not at the end
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    told = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs]
    assert sum(map(len, told)) == len(world.engine.tokens)


async def test_the_sdk_answers_a_call_with_its_result(world):
    world.engine.tokens = list(CALL.encode())
    async with world.sdk() as client:
        create = client.chat.completions.create
        first = await create(
            model="tiny-base", messages=HELLO, tools=[WEATHER], tool_choice="required"
        )
        turn = first.choices[0].message
        (call,) = turn.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        world.engine.tokens = list(b"It is sunny.")
        last = await create(
            model="tiny-base", messages=[*HELLO, turn, result], tools=[WEATHER], max_tokens=400
        )
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert last.choices[0].message.content == "It is sunny."
    assert f"assistant:{CALL}\nuser:<tool_response>\nsunny" in prompt(world)
