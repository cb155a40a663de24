"""Guides on the demo base's tokenizer: what may come, where a text ends, and who is turned away."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from loraplex.engine.guidance import GuideError, Guides, Matcher
from loraplex.engine.images import BaseManifest
from loraplex.engine.protocol import Guide, GuideKind

Make = Callable[[GuideKind, str], Matcher]


@pytest.fixture(scope="module")
def tokenizer(demo_base: BaseManifest) -> Tokenizer:
    return Tokenizer.from_file(str(Path(demo_base.path) / "tokenizer.json"))


@pytest.fixture(scope="module")
def guides(demo_base: BaseManifest) -> Iterator[Guides]:
    made = Guides(
        Path(demo_base.path) / "tokenizer.json", demo_base.vocab_size, demo_base.eos_token_ids
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def make(guides: Guides) -> Make:
    return lambda kind, text: guides.compile(Guide(kind, text)).result()


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def follow(matcher: Matcher, token_ids: list[int]) -> bool:
    """Whether all the tokens may come, one after the other."""
    for token in token_ids:
        if token not in allowed(matcher):
            return False
        matcher.consume(token)
    return True


def random_text(
    matcher: Matcher, tokenizer: Tokenizer, eos: tuple[int, ...], seed: int, most: int = 400
) -> str:
    """A text drawn uniformly among the tokens that may come, until it ends."""
    rng, tokens = np.random.default_rng(seed), []
    while not matcher.is_complete:
        choices = allowed(matcher)
        assert choices and len(tokens) < most
        token = int(rng.choice(choices))
        if token in eos:
            break
        tokens.append(token)
        matcher.consume(token)
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{3}-[a-z]+", ["123-abc"], ["12-abc", "123abc"]),
        ("grammar", 'start: "yes" | "no" " way"', ["yes", "no way"], ["no", "maybe"]),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 17}', ["12"], ["4", "18"]),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],'
            ' "additionalProperties": false}',
            ['{"a":"x"}', '{"a": "y"}', '{\n  "a": "y"\n}'],
            ['{"a":"z"}', "{}", '{"a":"x","b":1}', '{\n\n"a":"x"}', '{"a":  "x"}'],
        ),
    ],
)
def test_exactly_what_matches_may_come(
    make: Make,
    tokenizer: Tokenizer,
    demo_base: BaseManifest,
    kind: GuideKind,
    text: str,
    good: list[str],
    bad: list[str],
) -> None:
    ends = list(demo_base.eos_token_ids)
    for one in good:
        matcher = make(kind, text)
        assert follow(matcher, tokenizer.encode(one).ids), one
        assert set(ends) <= set(allowed(matcher)), one
    for one in bad:
        matcher = make(kind, text)
        reached = follow(matcher, tokenizer.encode(one).ids)
        assert not reached or not set(ends) & set(allowed(matcher)), one


def test_a_text_is_complete_when_nothing_but_the_end_may_come(
    make: Make, tokenizer: Tokenizer, demo_base: BaseManifest
) -> None:
    matcher = make("regex", "ab+c?")
    (a, b, c) = (tokenizer.encode(letter).ids[0] for letter in "abc")
    assert follow(matcher, [a])
    assert not matcher.is_complete and not set(demo_base.eos_token_ids) & set(allowed(matcher))
    assert follow(matcher, [b])
    assert not matcher.is_complete and set(demo_base.eos_token_ids) < set(allowed(matcher))
    assert follow(matcher, [c])
    assert matcher.is_complete and allowed(matcher) == list(demo_base.eos_token_ids)
    assert matcher.error is None


def test_an_end_token_completes_the_text(
    make: Make, tokenizer: Tokenizer, demo_base: BaseManifest
) -> None:
    matcher = make("regex", "a+")
    assert follow(matcher, [tokenizer.encode("a").ids[0], demo_base.eos_token_ids[0]])
    assert matcher.is_complete and matcher.error is None


def test_a_fork_goes_its_own_way(make: Make, guides: Guides, tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.encode(text).ids for text in ("left", "right"))
    matcher = make("grammar", 'start: "left" | "right"')
    guides.prepare([matcher])
    fork = matcher.fork()
    assert follow(matcher, first) and follow(fork, second)
    assert matcher.is_complete and fork.is_complete


def test_a_prepared_mask_is_the_one_computed_on_the_spot(
    make: Make, guides: Guides, tokenizer: Tokenizer
) -> None:
    text = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2})
    ahead, late = make("json_schema", text), make("json_schema", text)
    for token in tokenizer.encode("[true, false, true").ids:
        guides.prepare([ahead, ahead])
        assert np.array_equal(ahead.mask(), late.mask())
        guides.prepare([ahead])
        ahead.consume(token)
        late.consume(token)
        guides.prepare([ahead])
    assert allowed(ahead.fork()) == allowed(late)


def test_a_token_that_may_not_come_is_an_error_and_then_nothing_may(
    make: Make, tokenizer: Tokenizer
) -> None:
    matcher = make("regex", "a+")
    matcher.consume(tokenizer.encode("b").ids[0])
    assert matcher.error is not None and "\n" not in matcher.error
    assert not matcher.is_complete
    assert allowed(matcher) == [] == allowed(matcher.fork())


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(ab", "regular expression .* invalid regex"),
        ("grammar", "start: missing", "grammar .* unknown name"),
        ("json_schema", '{"type": ', "JSON schema .* cannot be parsed"),
        ("json_schema", '{"type": "object", "type": "object"}', "JSON schema .* twice"),
        ("json_schema", '{} }, {"lark_grammar": "start: /a/"', "JSON schema .* cannot be parsed"),
        ("json_schema", '{"type": "text"}', "JSON schema .* Invalid type"),
        ("json_schema", '{"contains": {}}', "JSON schema .*contains"),
        ("json_schema", '{"$ref": "#"}', "JSON schema"),
        ("json_schema", '{"items":' * 900 + "{}" + "}" * 900, "JSON schema .*recursion"),
        ("json_schema", '{"items":' * 9000 + "{}" + "}" * 9000, "JSON schema .*deeply"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "does not fetch"),
    ],
)
def test_a_bad_guide_is_refused(make: Make, kind: GuideKind, text: str, message: str) -> None:
    with pytest.raises(GuideError, match=message):
        make(kind, text)


def _chain(rule: str, last: str, count: int = 9000) -> str:
    return "\n".join(rule.format(i, i + 1) for i in range(count)) + last.format(count)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", "start: r0\n" + _chain("r{}: r{}", '\nr{}: "a"')),
        ("grammar", "start: T0\n" + _chain("T{}: T{}", '\nT{}: "a"')),
        ("grammar", "start: T0\n" + _chain("T{0}: T{1} T{1}", '\nT{}: "a"', 40)),
        ("grammar", 'start: "a"~1000000'),
        ("grammar", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000),
        ("regex", "(" * 60_000 + "a" + ")" * 60_000),
        ("regex", "((a{1000}){1000}){1000}"),
        (
            "json_schema",
            '{"$ref":"#/$defs/0","$defs":{'
            + _chain('"{}":{{"items":{{"$ref":"#/$defs/{}"}}}},', '"{}":{{}}}}}}', 5000),
        ),
    ],
    ids=["rules", "terms", "doubling", "repeat", "parentheses", "groups", "powers", "references"],
)
def test_a_bomb_harms_nobody(make: Make, tokenizer: Tokenizer, kind: GuideKind, text: str) -> None:
    """It is followed or refused or it fails on the way; the process is there afterwards."""
    try:
        matcher = make(kind, text)
    except GuideError:
        return
    for _ in range(3):
        if matcher.is_complete or not (choices := allowed(matcher)):
            break
        matcher.consume(choices[0])


def test_a_vocabulary_may_be_larger_than_the_tokenizers(
    demo_base: BaseManifest, tokenizer: Tokenizer
) -> None:
    file, size = Path(demo_base.path) / "tokenizer.json", demo_base.vocab_size
    guides = Guides(file, size + 65, demo_base.eos_token_ids)
    matcher = guides.compile(Guide("regex", r"(.|\n)*")).result()
    assert matcher.mask().shape == (-(-(size + 65) // 32),)
    assert max(allowed(matcher)) < size
    guides.close()


def test_a_base_without_a_fitting_tokenizer_says_so(
    demo_base: BaseManifest, tmp_path: Path
) -> None:
    for file, size in ((tmp_path / "none", 99), (Path(demo_base.path) / "tokenizer.json", 99)):
        guides = Guides(file, size, demo_base.eos_token_ids)
        with pytest.raises(GuideError, match="tokenizer"):
            guides.compile(Guide("regex", "a")).result()
        guides.close()


def test_close_ends_the_threads(demo_base: BaseManifest) -> None:
    before = set(threading.enumerate())
    guides = Guides(Path(demo_base.path) / "tokenizer.json", demo_base.vocab_size, (0,))
    guides.prepare([guides.compile(Guide("regex", "a")).result()])
    guides.close()
    assert set(threading.enumerate()) == before


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -9, "maximum": 300},
            {"type": "string", "maxLength": 5},
            {"enum": ["a", 1, None]},
        ]
    ),
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:2],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(SCHEMAS, st.integers(0, 9))
def test_whatever_is_drawn_is_valid(
    make: Make, tokenizer: Tokenizer, demo_base: BaseManifest, schema: dict, seed: int
) -> None:
    text = random_text(
        make("json_schema", json.dumps(schema)), tokenizer, demo_base.eos_token_ids, seed
    )
    jsonschema.validate(json.loads(text), schema)
