"""Structured output: every way to ask for it is one guide, and what cannot work is a 400."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from loraplex.engine.protocol import Guide
from loraplex.platform.api.structured import Guided, guide_of
from loraplex.platform.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ANY_OBJECT = Guide("json_schema", '{"type":"object"}')
JSON = {"content-type": "application/json"}
GRAMMAR = 'start: "yes" | "no"'

WAYS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
            }
        },
        Guide("json_schema", TEXT),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Guide("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT}}, Guide("json_schema", TEXT)),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Guide("regex", "a+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Guide("grammar", GRAMMAR)),
    ({"structured_outputs": {"grammar": GRAMMAR}}, Guide("grammar", GRAMMAR)),
    ({"guided_json": SCHEMA}, Guide("json_schema", TEXT)),
    ({"guided_regex": "a+"}, Guide("regex", "a+")),
    ({"guided_choice": ["yes", "no"]}, Guide("grammar", GRAMMAR)),
    ({"guided_grammar": GRAMMAR}, Guide("grammar", GRAMMAR)),
    ({"structured_outputs": None, "guided_json": None}, None),
]
HOPELESS = [
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}},
    ),
    ("structured_outputs", {"json": "{"}),
    ("guided_json", {"$ref": "https://example.org/schema"}),
    ("guided_json", {"type": "wizard"}),
    ("guided_regex", "a(b"),
    ("guided_regex", "(?=a)b"),
    ("guided_grammar", "start: nothing"),
    ("guided_json", {"enum": ["x" * 70_000]}),
]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_way_to_ask_is_one_guide(world, path):
    prompt = (
        {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": ""}]}
    )
    async with world.client() as client:
        for fields, guide in WAYS:
            body = {"model": "tiny-base", "max_tokens": 2} | prompt | fields
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert world.engine.requests[-1].sampling.guide == guide, fields


@pytest.mark.anyio
async def test_what_cannot_be_followed_is_refused_with_the_reason(world):
    async with world.client() as client:
        for param, value in HOPELESS:
            body = {"model": "tiny-base", "prompt": "a", "max_tokens": 2, param: value}
            answer = await client.post("/v1/completions", content=json.dumps(body), headers=JSON)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (value, error)
            assert error["message"].endswith(".")
            assert len(error["message"]) < 600
    assert world.engine.requests == []


def matches(guide: Guide, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(guide.text))
    content = text.encode()
    taken = matcher.try_consume_tokens(tokenizer.tokenize_bytes(content))
    return taken == len(content) and matcher.is_accepting()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_a_choice_is_one_of_its_texts_whatever_they_are(choices: list[str]):
    guide = guide_of(Guided(guided_choice=choices))
    assert guide is not None
    for choice in choices:
        assert matches(guide, choice)
        assert matches(guide, choice + "!") == (choice + "!" in choices)


def chain(count: int, rule: str) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}{rule}" for i in range(count))


DEEP = [
    {"guided_grammar": chain(4_000, "?") + '\nr4000: "a"'},
    {"guided_grammar": chain(4_000, "*").upper().replace("START", "start") + '\nR4000: "a"'},
    {
        "guided_json": {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1_400)}
            | {"d1400": {}},
            "$ref": "#/$defs/d0",
        }
    },
]


@pytest.mark.parametrize("fields", DEEP, ids=["rules", "terminals", "references"])
def test_rules_that_lead_ever_deeper_do_not_exhaust_the_stack(fields):
    """Each would end the whole process on a thread with a stack of the usual size."""
    assert guide_of(Guided(**fields)) is not None


def test_a_schema_that_is_too_deep_to_read_is_refused():
    with pytest.raises(BadRequest) as refused:
        guide_of(Guided(guided_json='{"items":' * 300 + "{}" + "}" * 300))
    assert refused.value.param == "guided_json"
