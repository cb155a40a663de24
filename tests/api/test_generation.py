"""One choice's events: chunks of several tokens, a stop string inside one, and how it ends."""

from pathlib import Path

import pytest

from loraplex.engine.protocol import Chunk, Failed, Finished, Generate, Sampling, TokenLogprob
from loraplex.platform.api.choice import Choice
from loraplex.platform.api.generation import Run
from loraplex.platform.errors import EngineRestarted
from loraplex.platform.text import Decoder, StopStrings, Vocabulary


@pytest.fixture
def choose(tiny_base):
    vocabulary = Vocabulary(Path(tiny_base.path))

    def make(*stops: str, min_tokens: int = 0) -> Choice:
        return Choice(0, Decoder(vocabulary), StopStrings(stops), min_tokens)

    return make


def chunk(text: str) -> Chunk:
    tokens = tuple(text.encode())
    return Chunk("r", tokens, tuple(TokenLogprob(token, -1.0) for token in tokens))


def test_a_chunk_of_many_tokens_is_one_delta(choose):
    choice = choose()
    delta = choice.take(chunk("né!"))
    assert (delta.text, delta.finish) == ("né!", None)
    assert [shown.offset for shown in delta.tokens] == [0, 1, 1, 2]
    assert choice.completion_tokens == 4


def test_a_stop_string_inside_a_chunk_ends_it_there(choose):
    choice = choose("STOP")
    first, last = choice.take(chunk("go S")), choice.take(chunk("TOP more"))
    assert (first.text, last.text, last.finish) == ("go ", "", "stop")
    assert [len(delta.tokens) for delta in (first, last)] == [3, 0]
    assert choice.completion_tokens == 7  # what came after the stop string is not charged


@pytest.mark.parametrize(("least", "tokens"), [(3, 4), (4, 8), (7, 8), (8, 12)])
def test_a_stop_string_counts_where_it_is_complete_after_min_tokens(choose, least, tokens):
    choice = choose("STOP", min_tokens=least)
    deltas = [choice.take(chunk(text)) for text in ("STO", "PSTO", "PSTOP", "!")]
    assert "".join(delta.text for delta in deltas) == "STOP" * (tokens // 4 - 1)
    assert (choice.completion_tokens, choice.finish) == (tokens, "stop")


def test_what_was_held_back_comes_with_the_end(choose):
    choice = choose("STOP")
    choice.take(chunk("go STO"))
    delta = choice.take(Chunk("r", (), finish="length"))
    assert (delta.text, delta.finish) == ("STO", "length")
    assert [shown.offset for shown in delta.tokens] == [3, 4, 5]


def test_what_comes_after_the_end_adds_and_costs_nothing(choose):
    choice = choose("STOP")
    choice.take(chunk("STOP"))
    assert not choice.take(chunk("more"))
    assert choice.completion_tokens == 4


def test_a_request_that_the_engine_aborts_by_itself_is_a_failure(choose):
    with pytest.raises(EngineRestarted):
        choose().take(Chunk("r", (), finish="abort"))
    run = Run(Generate("r", (1,), Sampling(max_tokens=9)), [choose()])
    with pytest.raises(EngineRestarted):
        run.take(Finished("r", "abort", 1, 0))


def test_a_death_after_the_end_is_no_failure(choose):
    run = Run(Generate("r", (1,), Sampling(max_tokens=9)), [choose()])
    run.take(Chunk("r", (65,), finish="stop"))
    assert run.take(Failed("r", "engine_died", "")) is None
