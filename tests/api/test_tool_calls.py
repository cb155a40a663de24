"""The reader of calls: they come out the same however the text is split, and no tag leaks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.platform.api.tool_calls import Arguments, Begin, CallReader, Text
from loraplex.platform.hermes import CLOSE, OPEN, call_text

NAMES = frozenset({"weather", "time-2"})
Read = tuple[str, list[tuple[str, str]]]

words = st.text("ab <>/{}\n", max_size=12).filter(
    lambda text: "<t" not in text and "</" not in text
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\<{}[]é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy", max_size=2), inner),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("xy", max_size=2), values, max_size=3)
calls = st.tuples(st.sampled_from(sorted(NAMES)), arguments)


def read(pieces: list[str]) -> tuple[Read, list[Text | Begin | Arguments]]:
    """The text and the calls that come of these pushes, and the events themselves."""
    reader, events = CallReader(NAMES), []
    for piece in pieces:
        events += reader.push(piece)
    events += reader.flush()
    text = "".join(event.text for event in events if isinstance(event, Text))
    begun = [event.name for event in events if isinstance(event, Begin)]
    said = [""] * len(begun)
    for event in events:
        if isinstance(event, Arguments):
            said[event.index] += event.text
    return (text, list(zip(begun, said, strict=True))), events


@settings(deadline=None)
@given(before=words, made=st.lists(calls, min_size=1, max_size=3), data=st.data())
def test_calls_do_not_depend_on_how_the_text_is_split(before, made, data):
    text = before + "\n".join(call_text(*call) for call in made)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for split in (pieces, [text], list(text)):
        (said, found), _ = read(split)
        assert said == before.rstrip()
        assert [(name, json.loads(arguments)) for name, arguments in found] == made


@pytest.mark.parametrize("length", range(len(OPEN)))
def test_a_tag_that_a_limit_cuts_off_after_a_call_is_no_text(length: int) -> None:
    call = call_text("weather", {})
    for pieces in ([call, "\n" + OPEN[:length]], list(call + "\n" + OPEN[:length])):
        assert read(pieces)[0] == ("", [("weather", "{}")])
    assert read([OPEN[:length]])[0] == (OPEN[:length], [])


@given(text=st.text("ab <tool_c>/\n", max_size=40))
def test_text_without_a_tag_comes_back_as_it_was(text):
    if OPEN not in text:
        assert read(list(text))[0] == (text, [])
        assert read([text])[0] == (text, [])


def test_a_tag_inside_a_string_ends_nothing():
    text = call_text("weather", {"city": CLOSE})
    for split in ([text], list(text)):
        assert read(split)[0] == ("", [("weather", json.dumps({"city": CLOSE}))])


def test_arguments_come_as_they_are_written():
    text = call_text("weather", {"city": "Rome", "days": [1, 2]})
    _, events = read(list(text))
    assert isinstance(events[0], Begin)
    assert events[0].id.startswith("call_")
    pieces = [event.text for event in events[1:] if isinstance(event, Arguments)]
    assert len(pieces) == len('{"city": "Rome", "days": [1, 2]}') == len(events) - 1


@pytest.mark.parametrize("end", range(1, len(OPEN)))
def test_nothing_of_half_a_tag_is_shown_before_it_is_decided(end):
    reader = CallReader(NAMES)
    assert reader.push("Well, " + OPEN[:end]) == [Text("Well,")]
    assert reader.push("!") == [Text(" " + OPEN[:end] + "!")]


@pytest.mark.parametrize(
    "block",
    [
        "{not json}",
        '{"name": "nobody", "arguments": {}}',
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "Rome"}',
        '{"name": 5, "arguments": {}}',
        "[1, 2]",
        "",
    ],
)
def test_what_is_no_call_is_text_tags_and_all(block):
    text = f"So: {OPEN}\n{block}\n{CLOSE} then"
    (said, found), _ = read([text])
    assert found == []
    assert said == text
    assert read(list(text))[0] == (said, [])


def test_a_whole_block_that_is_broken_is_text():
    text = f'{OPEN}{{"name": "weather", "arguments": {{"city": }}}}{CLOSE}'
    assert read([text])[0] == (text, [])


def test_a_forgotten_brace_is_forgiven():
    text = f'{OPEN}{{"name": "weather", "arguments": {{"city": "Rome"}}{CLOSE}'
    for split in ([text], list(text)):
        assert read(split)[0] == ("", [("weather", '{"city": "Rome"}')])


def test_names_may_come_last_and_the_end_may_be_missing():
    assert read([f'{OPEN}{{"arguments": {{"x": "é"}}, "name": "weather"}}'])[0] == (
        "",
        [("weather", '{"x": "é"}')],
    )


def test_a_call_that_is_cut_off_keeps_what_has_come():
    text = call_text("weather", {"city": "Rome"})
    (said, found), _ = read(list(text[: text.index('me"}')]))
    assert (said, found) == ("", [("weather", '{"city": "Ro')])


def test_space_between_calls_is_dropped_and_text_after_them_is_not():
    call = call_text("weather", {})
    assert read([f"{call}\n\n{call}\n"])[0] == ("", [("weather", "{}")] * 2)
    assert read([f"{call} Done."])[0] == (" Done.", [("weather", "{}")])
