"""Steps that fly: the next is launched before this one's tokens are read, and nobody can tell."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from loraplex.engine.ahead import may_fly, remaining, take_off, touch_down
from loraplex.engine.costs import Costs
from loraplex.engine.draw import Draw
from loraplex.engine.philox import uniform
from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.protocol import Beams, Chunk, Failed, Finished, Generate, Guide, Sampling
from loraplex.engine.sequence import Sequence, from_request

Rig = Callable[..., Any]
IMAGE = "a" * 64
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_p": 0.8, "max_tokens": 12},
    {"temperature": 1.0, "seed": 3, "top_k": 4, "min_p": 0.05},
    {"max_tokens": 1},
    {"choices": 2, "temperature": 1.0, "seed": 4},
]


def sequence(*prompt: int, **options: Any) -> Sequence:
    own = {key: options.pop(key) for key in list(options) if key in Generate.__struct_fields__}
    asked = Sampling(**{"max_tokens": 8, "temperature": 0.0, **options})
    return from_request(Generate("r", prompt or (1, 2, 3), asked, None, **own), 0.0, (), 100)


def whole(of: Sequence) -> Scheduled:
    return Scheduled(of, of.computed, of.pending, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((3, 1.0),)},
        {"choices": 2},
        {"beams": Beams(2)},
    ],
    ids=str,
)
def test_what_needs_the_host_does_not_fly(options: dict[str, Any]) -> None:
    plain, other = sequence(), sequence(**options)
    assert may_fly(Plan((whole(plain),)))
    assert not may_fly(Plan((whole(plain), whole(other))))


def test_what_moves_blocks_does_not_fly() -> None:
    part = whole(sequence())
    for moves in ("swap_out", "copies", "swap_in"):
        assert not may_fly(Plan((part,), **{moves: ((0, 1),)}))
    assert not may_fly(Plan((part,), preempted=(sequence(),)))
    assert not may_fly(Plan())
    part.sequence.drafts = [5]
    assert not may_fly(Plan((part,)))


def test_a_sequence_flies_until_a_token_is_certain_to_end_it() -> None:
    flying = sequence(1, 2, 3, temperature=0.5, seed=9, max_tokens=3)
    draws = []
    for ahead, pending in ((1, 1), (2, 1), (2, 0)):
        draws += take_off([whole(flying)], model_len=100)
        assert (flying.ahead, flying.pending, flying.fed) == (ahead, pending, -1)
    sampling = flying.request.sampling
    assert draws == [Draw(sampling, uniform(9, place)) for place in range(3)]
    for token in (7, 8, 9):
        touch_down(whole(flying))
        flying.token_ids.append(token)
    assert (flying.ahead, flying.computed, flying.pending) == (0, 5, 1)
    assert take_off([Scheduled(sequence(), 0, 2, 0), whole(sequence())], model_len=4) == [None]


def test_what_ended_is_left_out() -> None:
    parts = [whole(sequence()) for _ in range(3)]
    plan = Plan(tuple(parts), copies=((1, 2),))
    left = remaining(plan, lambda each: each is not parts[1].sequence)
    assert (left.scheduled, left.copies) == ((parts[0], parts[2]), ((1, 2),))


def run(rig: Rig, stand_in: Any, **options: Any) -> Any:
    subject = rig(**options)
    subject.arrive(IMAGE)
    for name, asked in enumerate(MIXED):
        image = IMAGE if name % 2 else None
        subject.add(stand_in.request(str(name), 9, *range(name + 1), image=image, **asked))
        subject.step()
    subject.drain()
    assert subject.holds_nothing()
    return subject


def test_tokens_are_those_of_steps_that_wait(rig: Rig, stand_in: Any) -> None:
    ahead, apart = run(rig, stand_in, late=True), run(rig, stand_in)
    off = run(rig, stand_in, late=True, async_scheduling=False)
    for name, asked in enumerate(MIXED):
        for index in range(asked.get("choices", 1)):
            expected = apart.tokens(str(name), index)
            assert ahead.tokens(str(name), index) == off.tokens(str(name), index) == expected
        reasons = {each.end(str(name)).reason for each in (ahead, apart, off)}
        assert len(reasons) == 1
    assert ahead.executor.most_flying == 2 and ahead.executor.fed > 10
    assert off.executor.launched == 0


@pytest.mark.parametrize("default", [0, 3])
@pytest.mark.parametrize("words", [2, 6])
def test_guesses_that_are_wanted_let_steps_fly(
    rig: Rig, stand_in: Any, words: int, default: int
) -> None:
    """Out of two words guesses come with almost every step; out of six many steps have none."""
    asked = {"draft_tokens": None if default else 3, "temperature": 1.0, "ignore_eos": True}
    told = []
    for options in ({"late": True}, {"late": True, "async_scheduling": False}, {}):
        subject = rig(speculative_tokens=default, **options)
        likely, logits = np.arange(64) < words, subject.executor._logits
        subject.executor._logits = partial(_more_likely, logits, likely)
        for name in range(3):
            odd = {"max_tokens": 20 + name, "stop_token_ids": (words - name,)} if name else {}
            sent = asked | {"seed": name, "max_tokens": 30} | odd
            subject.add(stand_in.request(str(name), *range(20, 24 + name), **sent))
            subject.step()
        subject.drain()
        assert subject.holds_nothing()
        told.append([(subject.tokens(n), subject.end(n).reason) for n in ("0", "1", "2")])
        stats = subject.engine.stats()
        assert stats.drafted_tokens > stats.accepted_tokens > 0
        if options == {"late": True} and words > 2:
            assert subject.executor.most_flying == 2 and subject.executor.fed > 3
    assert told[0] == told[1] == told[2]


def _more_likely(
    logits: Callable[[int, int], Any], likely: np.ndarray, state: int, token: int
) -> np.ndarray:
    return np.where(likely, logits(state, token) + 50, logits(state, token)).astype(np.float32)


def test_what_goes_on_as_before_is_read_before_it_goes_on(rig: Rig, stand_in: Any) -> None:
    """Which is seen one step late, so that few steps fly."""
    subject = rig(late=True)
    subject.executor._logits = lambda _, token: np.eye(64, dtype=np.float32)[6 if token == 5 else 5]
    asked = {"draft_tokens": 4, "max_tokens": 30, "ignore_eos": True}
    subject.add(stand_in.request("a", 1, 2, 3, **asked))
    subject.drain()
    assert subject.tokens("a") == [5, 6] * 15
    stats = subject.engine.stats()
    assert stats.accepted_tokens > 15 and 3 <= subject.executor.launched < 8
    assert subject.holds_nothing()


def test_a_swap_is_waited_for_before_its_cost_is_noted(
    rig: Rig, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    subject = rig(late=True, num_blocks=8, swap_slots=8, max_model_len=32)
    monkeypatch.setattr(
        Costs, "note_swap", lambda *_: waiting.append(len(subject.executor._waiting))
    )
    monkeypatch.setattr(Costs, "prefers_swap", lambda *_: True)
    for name in "abc":
        subject.add(stand_in.request(name, *range(1, 8), max_tokens=20, ignore_eos=True))
    subject.drain()
    assert waiting and not any(waiting)
    assert subject.holds_nothing()


def prompt(name: str) -> tuple[int, ...]:
    return 1, 2, ord(name) % 64


def fly(rig: Rig, stand_in: Any, *names: str, **options: Any) -> Any:
    """An engine with requests that never stop by themselves, one of whose steps is in flight."""
    subject = rig(late=True)
    for name in names:
        subject.add(stand_in.request(name, *prompt(name), ignore_eos=True, **options))
    subject.step()
    subject.step()
    assert subject.executor.flying == 1 and len(subject.chunks(names[0])) == 1
    return subject


def test_a_length_that_is_known_launches_nothing_more(rig: Rig, stand_in: Any) -> None:
    subject = fly(rig, stand_in, "a", max_tokens=5)
    subject.drain()
    assert subject.executor.launched == 5 == len(subject.tokens("a"))


def test_what_is_computed_after_a_stop_is_dropped(rig: Rig, stand_in: Any) -> None:
    apart = fly(rig, stand_in, "a", "b")
    apart.drain()
    tokens = apart.tokens("a")
    place = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    subject = rig(late=True)
    stops = {"stop_token_ids": (tokens[place],)}
    subject.add(stand_in.request("a", *prompt("a"), ignore_eos=True, **stops))
    subject.add(stand_in.request("b", *prompt("b"), ignore_eos=True))
    subject.drain()
    assert subject.end("a").reason == "stop"
    assert subject.tokens("a") == tokens[: place + 1]
    assert subject.end("a").completion_tokens == place + 1
    assert subject.tokens("b") == apart.tokens("b")
    assert subject.holds_nothing()
    assert len(subject.executor.batches[place + 1].token_ids) == 2  # one of them for nothing


def test_an_abort_in_flight_and_its_name_used_again(rig: Rig, stand_in: Any) -> None:
    subject = fly(rig, stand_in, "a", "b")
    expected = fly(rig, stand_in, "b")
    expected.drain()
    subject.engine.abort("a")
    subject.engine.add(stand_in.request("a", 7, max_tokens=2, ignore_eos=True))
    subject.drain()
    ends = [e for e in subject.events if isinstance(e, Finished) and e.request_id == "a"]
    assert [(e.reason, e.completion_tokens) for e in ends] == [("abort", 1), ("length", 2)]
    assert len(subject.tokens("a")) == 3
    assert subject.tokens("b") == expected.tokens("b")
    assert subject.holds_nothing()


def test_an_abort_of_one_choice_in_flight(rig: Rig, stand_in: Any) -> None:
    subject = rig(late=True)
    subject.add(stand_in.request("a", 1, 2, ignore_eos=True, choices=2, temperature=1.0))
    while subject.executor.flying == 0:
        subject.step()
    told = [subject.tokens("a", index) for index in range(2)]
    subject.engine.abort("a", 0)
    subject.drain()
    assert subject.tokens("a", 0) == told[0] and len(subject.tokens("a", 1)) == 8
    assert subject.end("a").reason == "length" and subject.holds_nothing()


def test_logits_that_are_no_numbers_fail_their_own_request(rig: Rig, stand_in: Any) -> None:
    expected = fly(rig, stand_in, "a", "b")
    expected.drain()
    only_a = set(expected.tokens("a")[:6]) - set(expected.tokens("b"))
    subject = fly(rig, stand_in, "a", "b")
    subject.executor.poison = only_a
    subject.drain()
    assert isinstance(subject.end("a"), Failed) and subject.end("a").code == "internal"
    assert subject.tokens("b") == expected.tokens("b")
    assert subject.holds_nothing()


def test_a_step_that_breaks_in_flight_ends_its_requests_and_no_others(
    rig: Rig, stand_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    subject = fly(rig, stand_in, "a", "b")
    subject.executor.broken = RuntimeError("broken")
    subject.step()
    subject.executor.broken = None
    subject.add(stand_in.request("c", 5))
    subject.drain()
    assert {subject.end(name).code for name in "ab"} == {"internal"}
    assert isinstance(subject.end("c"), Finished)
    assert subject.holds_nothing()


def test_a_launch_that_fails_lets_what_flies_land(
    rig: Rig, stand_in: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("CRITICAL")
    subject = fly(rig, stand_in, "a", max_tokens=2)  # all of it flies
    monkeypatch.setattr(subject.executor, "launch", lambda *_: 1 / 0)
    subject.add(stand_in.request("b", 5))
    subject.drain()
    assert subject.end("a").reason == "length" and subject.end("b").code == "internal"
    assert subject.holds_nothing()


def test_a_request_that_needs_the_host_lands_the_flight_first(rig: Rig, stand_in: Any) -> None:
    subject = fly(rig, stand_in, "a")
    launched = subject.executor.launched
    subject.add(stand_in.request("b", 1, 2, guide=Guide("grammar", "3,4 5,6 7"), max_tokens=3))
    while not subject.chunks("b"):
        subject.step()
    assert subject.executor.flying == 0
    subject.drain()
    assert subject.executor.launched > launched, "it flies again"
    expected = fly(rig, stand_in, "a")
    expected.drain()
    assert subject.tokens("a") == expected.tokens("a")
    assert subject.tokens("b")[-1] == 7


def test_who_ends_as_a_flight_lands_is_not_in_the_step_that_waited_for_it(
    rig: Rig, stand_in: Any
) -> None:
    apart = fly(rig, stand_in, "a")
    apart.drain()
    first, second, *_ = apart.tokens("a")
    assert first != second
    subject = fly(rig, stand_in, "a", stop_token_ids=(second,))
    subject.add(stand_in.request("b", 4, 5, 6, logprobs=0, ignore_eos=True))
    subject.step()
    assert subject.end("a").reason == "stop" and subject.tokens("a") == [first, second]
    assert subject.executor.batches[-1].token_ids.tolist() == [4, 5, 6]
    subject.drain()
    assert subject.holds_nothing()


def test_only_blocks_that_are_computed_can_be_found(rig: Rig, stand_in: Any) -> None:
    """Blocks of four tokens: a prompt of seven fills its second with its first token's step."""
    subject = rig(late=True)
    subject.add(stand_in.request("a", *range(1, 8), ignore_eos=True))
    stored = []
    for _ in range(3):
        subject.step()
        told = subject.engine.take_cache_events()
        stored.append(sum(len(e.blocks) for e in told if e.kind == "stored"))
    assert stored == [0, 1, 1]
    subject.drain()


def test_a_prompt_in_flight_tells_what_its_tokens_cost(
    rig: Rig, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, float]] = []
    monkeypatch.setattr(Costs, "note_step", lambda _, *noted: heard.append(noted))
    subject = rig(late=True, max_num_batched_tokens=64)
    subject.add(stand_in.request("a", *[5] * 40))
    subject.drain()
    ((rows, seconds),) = heard
    assert rows == 40 and seconds > 0


def test_the_end_of_the_engine_in_flight(rig: Rig, stand_in: Any) -> None:
    subject = fly(rig, stand_in, "a", "b")
    subject.engine.fail_all("engine_died", "told to stop")
    assert subject.engine.has_work
    subject.drain()
    assert {subject.end(name).code for name in "ab"} == {"engine_died"}
    assert [e.request_id for e in subject.events if isinstance(e, Chunk)] == ["a", "b"]
    assert subject.holds_nothing()
