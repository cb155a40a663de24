"""The grammar of calls against their reader: what one lets through, the other understands."""

import json
from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from loraplex.platform.api.call_grammar import calls_or_json, calls_or_text, only_calls
from loraplex.platform.api.tool_calls import Begin, CallReader, Text
from loraplex.platform.hermes import OPEN, call_text

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = {"a": CITY, "b": {}}
ROME = {"city": "Rome <tool_call>"}
GRAMMARS = {
    (make, one): make(FUNCTIONS, *more, one=one)
    for make, more in ((only_calls, ()), (calls_or_text, ()), (calls_or_json, (CITY,)))
    for one in (True, False)
}
CALLS = st.sampled_from([call_text("a", ROME), call_text("b", {}), call_text("b", {"x": [1]})])
BAD = st.sampled_from([call_text("c", {}), call_text("a", {}), call_text("a", {"city": 1})])
TEXTS = st.text("ab <\n{é", max_size=6)
SPEECH = st.lists(
    st.one_of(TEXTS, CALLS, BAD, st.sampled_from(["\n", OPEN, json.dumps(ROME)])), max_size=5
).map("".join)
TOKENIZER = LLTokenizer("byte")


@cache
def compiled(grammar):
    return LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar))


def accepts(make, text, *, one=False):
    matcher, data = compiled(GRAMMARS[make, one]).deep_copy(), TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def read(text):
    """What is said, and who is called."""
    reader = CallReader(FUNCTIONS)
    pieces = reader.push(text) + reader.flush()
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return said, [piece.name for piece in pieces if isinstance(piece, Begin)]


@given(SPEECH, st.booleans())
@example(json.dumps(ROME), False)
def test_what_may_be_said_is_read_as_it_is_meant(text, one):
    said, called = read(text)
    if accepts(only_calls, text, one=one):
        assert called
        assert not said
    if accepts(calls_or_text, text, one=one):
        assert OPEN not in said
        assert text.count("</tool_call>") == len(called)
    if accepts(calls_or_json, text, one=one):
        assert said == ("" if called else text)
    assert not one or len(called) < 2 or not accepts(calls_or_text, text, one=True)


@given(TEXTS, st.lists(CALLS, max_size=3))
def test_text_and_good_calls_may_be_said(text, calls):
    joined = "\n".join(calls)
    assert accepts(calls_or_text, text + joined)
    assert accepts(only_calls, joined) == bool(calls)
    assert accepts(only_calls, joined, one=True) == (len(calls) == 1)
    assert not calls or accepts(calls_or_json, joined)


@given(TEXTS, BAD, SPEECH)
def test_no_other_call_may_be_said(text, bad, more):
    assert not accepts(calls_or_text, text + bad + more)
    assert not accepts(calls_or_json, bad)
    assert not accepts(only_calls, bad)
