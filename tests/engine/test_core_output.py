"""What steers an output: guides, guesses, log-probabilities of the prompt."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from loraplex.engine.protocol import Chunk, Failed, Finished, Guide, PromptLogprobs

Start = Callable[..., Any]
A = "a" * 64


def guided(stand_in: ModuleType, name: str, text: str, *prompt: int, **options: Any) -> Any:
    return stand_in.request(name, *prompt, guide=Guide("grammar", text), **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guide_rules_what_comes(rig: Start, stand_in: ModuleType, temperature: float) -> None:
    subject = rig()
    subject.add(guided(stand_in, "r", "3,4 5 6,7,8", temperature=temperature, ignore_eos=True))
    subject.add(stand_in.request("free", ignore_eos=True, max_tokens=5))
    subject.drain()
    first, second, third = subject.tokens("r")
    assert first in (3, 4) and second == 5 and third in (6, 7, 8)
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == "stop"
    assert len(subject.tokens("free")) == 5


def test_each_choice_has_a_guide_of_its_own(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(guided(stand_in, "r", "3,4,5,6 7,8,9,10 11,12", choices=4, temperature=1.5))
    subject.step()
    subject.drain()
    found = [subject.tokens("r", i) for i in range(4)]
    assert all(a in range(3, 7) and b in range(7, 11) and c in (11, 12) for a, b, c in found)
    assert len({tuple(tokens) for tokens in found}) > 1


def test_a_bad_guide_fails_its_request_only(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.arrive(A)
    subject.add(guided(stand_in, "bad", "bad", image=A), stand_in.request("good"))
    subject.drain()
    end = subject.end("bad")
    assert isinstance(end, Failed) and (end.code, end.message) == (
        "invalid_request",
        "the grammar is bad",
    )
    assert isinstance(subject.end("good"), Finished)
    assert subject.holds_nothing()


def test_nobody_waits_for_another_s_guide(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.guides.holds = True
    subject.add(guided(stand_in, "slow", "3 4"), stand_in.request("quick"))
    subject.drain()
    assert isinstance(subject.end("quick"), Finished)
    assert subject.engine.stats().waiting == 1
    subject.guides.let_go()
    subject.step()
    subject.drain()
    assert subject.tokens("slow") == [3, 4]


def test_what_waits_for_its_guide_can_be_aborted(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.guides.holds = True
    subject.add(guided(stand_in, "r", "3 4", image=A))
    subject.engine.abort("r")
    subject.guides.let_go()
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == "abort"
    assert subject.holds_nothing()


def test_a_preempted_sequence_keeps_its_guide(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(num_blocks=5)
    subject.add(stand_in.request("first", max_tokens=16, ignore_eos=True))
    text = "3,4 5,6 7,8 9,10 11,12 13,14"
    subject.add(guided(stand_in, "r", text, *range(1, 9), tenant="t", temperature=1.0))
    subject.drain()
    tokens = subject.tokens("r")
    assert [token // 2 for token in (t + 1 for t in tokens)] == [2, 3, 4, 5, 6, 7]
    assert subject.engine.stats().preemptions > 0


REPEATING = (5, 6, 7, 8) * 6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_guesses_change_nothing_but_the_steps(
    rig: Start, stand_in: ModuleType, temperature: float, penalty: float
) -> None:
    options = {
        "max_tokens": 30, "temperature": temperature, "frequency_penalty": penalty,
        "logit_bias": tuple((token, 6.0) for token in (5, 6, 7, 8)), "logprobs": 2,
    }  # fmt: skip
    plain, guessing = rig(), rig()
    for i in range(3):
        for subject, drafts in ((plain, 0), (guessing, 4)):
            asked = stand_in.request(str(i), *REPEATING, seed=i, draft_tokens=drafts, **options)
            subject.add(asked)
    plain.drain()
    guessing.drain()
    for i in range(3):
        assert guessing.tokens(str(i)) == plain.tokens(str(i))
        told = [[entry for c in each.chunks(str(i)) for entry in c.logprobs] for each in
                (plain, guessing)]  # fmt: skip
        assert told[0] == told[1]
        assert guessing.end(str(i)).reason == plain.end(str(i)).reason
    stats = guessing.engine.stats()
    assert stats.drafted_tokens >= stats.accepted_tokens > 0
    if not temperature:
        assert stats.steps < plain.engine.stats().steps
    assert guessing.holds_nothing()


def test_a_stop_token_among_guesses_ends_at_once(rig: Start, stand_in: ModuleType) -> None:
    bias = tuple((token, 50.0) for token in (5, 6))
    subject = rig()
    subject.add(
        stand_in.request(
            "r", *REPEATING, draft_tokens=4, logit_bias=bias, stop_token_ids=(6,), max_tokens=30
        )
    )
    subject.drain()
    tokens = subject.tokens("r")
    assert tokens[-1] == 6 and 6 not in tokens[:-1]
    assert subject.holds_nothing()


def test_guesses_are_off_unless_asked_for(rig: Start, stand_in: ModuleType) -> None:
    for settings, asked, guesses in (({}, None, False), ({"speculative_tokens": 3}, None, True),
                                     ({"speculative_tokens": 3}, 0, False)):  # fmt: skip
        subject = rig(**settings)
        bias = tuple((token, 9.0) for token in (5, 6, 7, 8))
        subject.add(stand_in.request("r", *REPEATING, draft_tokens=asked, logit_bias=bias))
        subject.drain()
        assert (subject.engine.stats().drafted_tokens > 0) == guesses


@pytest.mark.parametrize("budget", [24, 9], ids=["whole", "in chunks"])
def test_the_prompt_s_logprobs_come_before_its_tokens(
    rig: Start, stand_in: ModuleType, budget: int
) -> None:
    prompt = tuple(range(1, 20))
    subject = rig(max_num_batched_tokens=budget)
    seen: dict[int, np.ndarray] = {}
    execute = subject.executor.execute

    def watch(batch: Any) -> Any:
        outcome = execute(batch)
        seen.update(
            zip(batch.positions[batch.wanted].tolist(), outcome.logits.numpy(), strict=True)
        )
        return outcome

    subject.executor.execute = watch
    subject.add(stand_in.request("r", *prompt, prompt_logprobs=2, max_tokens=2))
    subject.drain()
    kinds = [type(event) for event in subject.events]
    assert kinds.count(PromptLogprobs) == 1 and kinds.index(PromptLogprobs) < kinds.index(Chunk)
    [told] = [event for event in subject.events if isinstance(event, PromptLogprobs)]
    assert [entry.token_id for entry in told.logprobs] == list(prompt[1:])
    for position, entry in enumerate(told.logprobs):
        logits = seen[position].astype(np.float64)
        logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-logprobs)[:2].tolist()


def test_the_prompt_s_logprobs_survive_a_preemption(rig: Start, stand_in: ModuleType) -> None:
    alone, crowded = rig(), rig(num_blocks=9, max_model_len=36, max_num_batched_tokens=9)
    asked = stand_in.request("r", *range(1, 20), prompt_logprobs=1, max_tokens=9, tenant="t")
    crowded.add(stand_in.request("other", *range(30, 40), max_tokens=20, ignore_eos=True))
    for subject in (crowded, alone):
        subject.add(asked)
        subject.drain()
    assert crowded.engine.stats().preemptions > 0
    told = [
        next(e for e in subject.events if isinstance(e, PromptLogprobs))
        for subject in (alone, crowded)
    ]
    assert told[0] == told[1]
    assert alone.tokens("r") == crowded.tokens("r")


def test_a_prompt_of_one_token_has_no_logprobs(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", 5, prompt_logprobs=1))
    subject.drain()
    [told] = [event for event in subject.events if isinstance(event, PromptLogprobs)]
    assert told.logprobs == ()
