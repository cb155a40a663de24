"""Tokens to text and back: equal to what Transformers does, and whole characters only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from loraplex.platform.chat_template import ChatTemplate
from loraplex.platform.errors import BadRequest
from loraplex.platform.rendering import Rendering
from loraplex.platform.text import Decoder, StopStrings, Vocabulary

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?\n\n  Täglich 😀"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "<|im_end|> & <b>"},
    ],
]
TEMPLATES = {
    "loops": "{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {{ m.role }}: {{ m.content | trim }}\n{% endfor %}\nend",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
    "specials": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{{ unk_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}go{% endif %}{{ tools is none }}",
    "dates": "{{ strftime_now('%Y') }}",
}


@pytest.fixture(scope="module")
def vocabulary(demo_base) -> Vocabulary:
    return Vocabulary(Path(demo_base.path))


@pytest.fixture(scope="module")
def bytes_alone(tiny_base) -> Vocabulary:
    return Vocabulary(Path(tiny_base.path))


@pytest.fixture(scope="module")
def reference(demo_base):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_base.path)


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_has_the_tokens_that_transformers_gives_it(demo_base, vocabulary, reference, chat):
    template = ChatTemplate.load(Path(demo_base.path))
    expected = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert vocabulary.encode(template.render(chat), special=False) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(reference, name):
    source, specials = TEMPLATES[name], reference.special_tokens_map
    specials = {key: value for key, value in specials.items() if isinstance(value, str)}
    template = ChatTemplate(source, specials)
    for chat in CHATS:
        expected = reference.apply_chat_template(
            chat, chat_template=source, add_generation_prompt=True, tokenize=False
        )
        assert template.render(chat) == expected


SPACED = [[*CHATS[0], {"role": "assistant", "content": text}] for text in ("So ", " So\n", "")]


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_a_prompt_ends_as_transformers_ends_it(demo_base, reference, name):
    template = ChatTemplate.load(Path(demo_base.path))
    source = TEMPLATES[name] if name else None
    if source:
        specials = reference.special_tokens_map
        template = ChatTemplate(source, {k: v for k, v in specials.items() if isinstance(v, str)})
    asked = {"chat_template": source, "tokenize": False}
    for chat in CHATS + SPACED:
        plain = reference.apply_chat_template(chat, add_generation_prompt=False, **asked)
        assert template.render(chat, (), Rendering(begins=False)) == plain
        try:
            expected = reference.apply_chat_template(chat, continue_final_message=True, **asked)
        except ValueError:
            expected = None
        try:
            found = template.render(chat, (), Rendering(begins=False, continues=True))
        except BadRequest:
            found = None
        assert found == expected


def test_a_message_is_continued_behind_tools_that_its_template_has_no_place_for():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = template.render(chat, tools, Rendering(begins=False, continues=True))
    assert text.startswith("[You may call") and text.endswith("[a][b")


def test_a_template_finds_variables_but_none_of_its_own_is_changed(reference):
    source = "{{ bos_token }}{% if thinking %}{{ budget + 1 }}{% endif %}{{ messages | length }}"
    variables = {"thinking": True, "budget": 4}
    expected = reference.apply_chat_template(
        CHATS[0], chat_template=source, tokenize=False, **variables
    )
    template = ChatTemplate(source, {"bos_token": reference.bos_token})
    told = Rendering(variables=variables | {"messages": [], "bos_token": "", "self": 1})
    assert template.render(CHATS[0], (), told) == expected
    with pytest.raises(BadRequest):
        template.render(CHATS[0], (), Rendering(variables=variables | {"budget": "x"}))


@pytest.mark.parametrize(
    "text", ["", "Hello", " two  spaces\n\ttab", "Ünïcödé 日本語 😀", "<|im_end|>"]
)
def test_plain_text_has_the_tokens_that_transformers_gives_it(vocabulary, reference, text):
    assert vocabulary.encode(text, special=True) == reference(text)["input_ids"]


def test_the_api_never_imports_torch():
    code = "import sys, loraplex.platform.app;print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert done.stdout.strip() == b"set()"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role here') }}",
        "{{ messages[9].content }}",
        "{{ messages[0].content + 5 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__init__=1) %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_the_callers_400(source):
    with pytest.raises(BadRequest) as refused:
        ChatTemplate(source, {}).render(CHATS[0])
    assert refused.value.param == "messages"


def test_templates_are_found_where_models_keep_them(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = {
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ eos_token }}"},
        ],
        "eos_token": {"content": "</s>", "lstrip": False},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(CHATS[0]) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render(CHATS[0]) == "file </s>"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="broken"):
        ChatTemplate.load(tmp_path)


def test_a_template_of_its_own_for_tools_is_used_where_it_calls_as_hermes_does(tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    named = {"default": "{{ messages[0].content }}", "tool_use": "<tool_call>{{ tools | length }}"}
    for tool_use, rendered in ((named["tool_use"], "<tool_call>1"), ("other", None)):
        entries = [{"name": n, "template": t} for n, t in (named | {"tool_use": tool_use}).items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
        template = ChatTemplate.load(tmp_path)
        assert template.render(CHATS[0]) == "Hello"
        if rendered:
            assert template.render(CHATS[0], tools) == rendered
        else:
            assert template.render(CHATS[0], tools).startswith("You may call")


def test_a_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        Vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Vocabulary(tmp_path)


@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<")))
def test_decoding_token_by_token_gives_the_text_back(bytes_alone, text):
    decoder = Decoder(bytes_alone)
    pieces = [decoder.push(token) for token in bytes_alone.encode(text, special=False)]
    assert [piece for piece in pieces if piece] == list(text)  # whole characters


@given(tokens=st.lists(st.integers(min_value=0, max_value=49151), max_size=40))
def test_any_tokens_decode_as_the_tokenizer_decodes_them_whole(vocabulary, tokens):
    decoder = Decoder(vocabulary)
    got = "".join(decoder.push(token) for token in tokens)
    whole = vocabulary._tokenizer.decode(tokens, skip_special_tokens=True)
    assert whole.startswith(got)
    assert whole[len(got) :] in ("", "�")  # what was dropped is one unfinished character


def test_a_sentencepiece_vocabulary_has_spaces_and_single_bytes(tmp_path):
    pieces = {
        "▁Hello": 0,
        "▁world": 1,
        "<0xF0>": 2,
        "<0x9F>": 3,
        "<0x98>": 4,
        "<0x80>": 5,
        "<0x0A>": 6,
    }
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = Decoder(Vocabulary(tmp_path), silent=frozenset({6}))
    pushed = [decoder.push(token) for token in (0, 1, 2, 3, 4, 5, 7, 6, 99)]
    assert pushed == [" Hello", " world", "", "", "", "😀", "", "", ""]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The plain definition: grow the text a character at a time until it ends with a stop."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4).map(tuple),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_split(pieces, stops):
    stopping, shown = StopStrings(stops), ""
    text = "".join(pieces)
    expected, hit = first_stop(text, stops)
    for piece in pieces:
        shown += stopping.push(piece)
        assert expected.startswith(shown)  # nothing shown is ever taken back
    shown += stopping.flush()
    assert (shown, stopping.hit) == (expected, hit)


@given(
    early=st.text("abc", max_size=8),
    late=st.text("abc", max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_a_stop_string_may_begin_in_text_that_may_not_end(early, late, stops):
    stopping = StopStrings(stops)
    shown = "".join(stopping.push(char, may_end=False) for char in early)
    assert stopping.hit is None
    shown += "".join(map(stopping.push, late)) + stopping.flush()
    ends = range(len(early) + 1, len(early + late) + 1)
    heads = [(early + late)[:end] for end in ends]
    text = next((head for head in heads if head.endswith(stops)), None)
    if text is None:
        assert (shown, stopping.hit) == (early + late, None)
    else:
        longest = max((stop for stop in stops if text.endswith(stop)), key=len)
        assert (shown, stopping.hit) == (text.removesuffix(longest), longest)


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_a_stop_string_could_claim(text, stop):
    stopping, shown = StopStrings((stop,)), 0
    for i, char in enumerate(text):
        shown += len(stopping.push(char))
        if stopping.hit is None:
            held = text[shown : i + 1]
            assert stop.startswith(held)
            assert len(held) < len(stop)
