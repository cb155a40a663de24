"""Several choices of one request, and beams: they share blocks, and end one by one."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from loraplex.engine.protocol import Beams, Chunk, Failed, Finished
from loraplex.engine.sequence import SEED_MASK

Start = Callable[..., Any]
A = "a" * 64
PROMPT = tuple(range(1, 15))


def singles(rig: Start, stand_in: ModuleType, count: int, **sampling: Any) -> list[list[int]]:
    """The tokens of requests of one choice each, whose seeds are one apart."""
    found, seed = [], sampling.pop("seed", 0)
    for i in range(count):
        subject = rig()
        subject.arrive(A)
        subject.add(
            stand_in.request("r", *PROMPT, image=A, seed=(seed + i) & SEED_MASK, **sampling)
        )
        subject.drain()
        found.append(subject.tokens("r"))
    return found


@pytest.mark.parametrize("blocks", [64, 9], ids=["roomy", "preempting"])
@pytest.mark.parametrize("slots", [0, 64], ids=["recompute", "swap"])
def test_choices_are_those_of_requests_with_their_seeds(
    rig: Start, stand_in: ModuleType, blocks: int, slots: int
) -> None:
    options = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    subject = rig(num_blocks=blocks, swap_slots=slots, max_num_batched_tokens=8)
    subject.arrive(A)
    subject.add(stand_in.request("r", *PROMPT, image=A, choices=4, seed=5, **options))
    subject.drain()
    expected = singles(rig, stand_in, 4, seed=5, **options)
    assert [subject.tokens("r", i) for i in range(4)] == expected
    end = subject.end("r")
    assert isinstance(end, Finished) and end.completion_tokens == 48
    stats = subject.engine.stats()
    assert (stats.preemptions > 0) == (blocks == 9)
    assert (stats.blocks_swapped_in > 0) == (blocks == 9 and slots > 0)
    assert subject.holds_nothing()


def test_a_prompt_is_computed_once_for_all_its_choices(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", *PROMPT, choices=4, max_tokens=3, ignore_eos=True))
    subject.drain()
    assert subject.engine.stats().rows_total == len(PROMPT) + 4 * 2


def test_each_choice_tells_its_own_end(rig: Start, stand_in: ModuleType) -> None:
    options = {"temperature": 1.2, "max_tokens": 40}
    tokens = singles(rig, stand_in, 3, **options)
    subject = rig()
    subject.arrive(A)
    subject.add(stand_in.request("r", *PROMPT, image=A, choices=3, **options))
    subject.drain()
    for index in range(3):
        chunks = subject.chunks("r", index)
        assert [token for chunk in chunks for token in chunk.token_ids] == tokens[index]
        ended = "stop" if tokens[index][-1] == stand_in.EOS else "length"
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [ended]
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == subject.chunks("r")[-1].finish


def test_one_choice_can_be_aborted(rig: Start, stand_in: ModuleType) -> None:
    options = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    subject = rig()
    subject.arrive(A)
    subject.add(stand_in.request("r", *PROMPT, image=A, choices=3, **options))
    subject.engine.abort("r", 1)
    subject.step()
    subject.step()
    subject.engine.abort("r", 1)
    subject.engine.abort("r", 1)
    subject.engine.abort("r", 7)
    subject.drain()
    tokens = singles(rig, stand_in, 3, **options)
    assert subject.tokens("r", 1) == tokens[1][:2], "nothing comes for it any more"
    assert [subject.tokens("r", i) for i in (0, 2)] == [tokens[0], tokens[2]]
    end = subject.end("r")
    assert isinstance(end, Finished) and (end.reason, end.completion_tokens) == ("length", 22)
    assert subject.holds_nothing()


def test_the_last_choice_takes_the_request_with_it(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", *PROMPT, choices=2, max_tokens=50, ignore_eos=True))
    subject.step()
    for index in range(2):
        subject.engine.abort("r", index)
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == "abort"
    assert subject.holds_nothing()


def test_an_abort_ends_all_choices(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", *PROMPT, choices=3, max_tokens=50, ignore_eos=True))
    subject.step()
    subject.engine.abort("r")
    subject.drain()
    assert isinstance(subject.end("r"), Finished)
    assert subject.holds_nothing()


def test_logits_that_are_not_finite_fail_all_choices(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.executor.poison = {63}
    subject.add(stand_in.request("r", 1, 63, choices=3))
    subject.drain()
    assert isinstance(subject.end("r"), Failed)
    assert subject.holds_nothing()


def best_by_hand(
    stand_in: ModuleType, prompt: tuple[int, ...], width: int, steps: int
) -> list[tuple[float, list[int]]]:
    """Beam search without ends, on logits that are computed from scratch."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(steps):
        grown = []
        for score, tokens in beams:
            logits = logits_after(stand_in, (*prompt, *tokens)).astype(np.float64)
            logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
            grown += [(score + logprobs[t], [*tokens, t]) for t in range(len(logprobs))]
        beams = sorted(grown, reverse=True)[:width]
    return beams


def logits_after(stand_in: ModuleType, tokens: tuple[int, ...]) -> np.ndarray:
    subject = stand_in.Rig(max_num_batched_tokens=64)
    subject.add(stand_in.request("r", *tokens, max_tokens=1))
    found: list[np.ndarray] = []
    execute = subject.executor.execute
    subject.executor.execute = lambda batch: found.append(execute(batch)) or found[-1]
    subject.drain()
    return found[-1].logits[0].numpy()


@pytest.mark.parametrize("blocks", [64, 17], ids=["roomy", "preempting"])
def test_beams_find_what_a_search_from_scratch_finds(
    rig: Start, stand_in: ModuleType, blocks: int
) -> None:
    subject = rig(num_blocks=blocks, swap_slots=4, max_model_len=64)
    asked = {"max_tokens": 5, "ignore_eos": True}
    beams = Beams(width=3, length_penalty=0.0)
    subject.add(stand_in.request("r", *PROMPT, choices=2, beams=beams, **asked))
    for i in range(3):
        subject.add(stand_in.request(f"other{i}", *PROMPT[i:], max_tokens=14, ignore_eos=True))
    subject.drain()
    expected = best_by_hand(stand_in, PROMPT, 3, 5)
    for index, (score, tokens) in enumerate(expected[:2]):
        [chunk] = subject.chunks("r", index)
        assert list(chunk.token_ids) == tokens
        assert chunk.score == pytest.approx(score, abs=1e-4)
        assert chunk.finish == "length"
    end = subject.end("r")
    assert isinstance(end, Finished) and end.completion_tokens == 10
    assert (subject.engine.stats().preemptions > 0) == (blocks == 17)
    assert subject.holds_nothing()


def test_beams_that_can_never_run_together_are_refused(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(num_blocks=10)
    wide = stand_in.request("r", *PROMPT, choices=1, beams=Beams(width=6), max_tokens=20)
    subject.add(wide)
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Failed) and end.code == "invalid_request"
    assert "6 beams" in end.message and "fewer beams" in end.message


def test_a_search_can_be_aborted(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(
        stand_in.request("r", *PROMPT, beams=Beams(width=4), max_tokens=10, ignore_eos=True)
    )
    subject.step()
    subject.step()
    subject.engine.abort("r")
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == "abort"
    assert not any(isinstance(event, Chunk) for event in subject.events)
    assert subject.holds_nothing()


def test_logits_that_are_not_finite_fail_a_search(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.executor.poison = {63}
    subject.add(stand_in.request("r", 1, 63, beams=Beams(width=2), max_tokens=4))
    subject.drain()
    assert isinstance(subject.end("r"), Failed)
    assert subject.holds_nothing()


def test_a_request_ends_for_the_reason_of_its_first_whole_choice(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig()
    subject.add(stand_in.request("r", *PROMPT, choices=2, max_tokens=5, ignore_eos=True))
    subject.step()
    subject.engine.abort("r", 0)
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished) and end.reason == "length"
