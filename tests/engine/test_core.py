"""The engine without its process, on the base without a model: what comes out for what goes in."""

import logging
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.protocol import Chunk, Failed, Finished, Generate

Start = Callable[..., Any]
A, B, C = "a" * 64, "b" * 64, "c" * 64


def alone(rig: Start, request: Generate) -> tuple[list[int], object]:
    subject = rig()
    subject.arrive(A, B, C)
    subject.add(request)
    subject.drain()
    end = subject.end(request.request_id)
    assert isinstance(end, Finished)
    return subject.tokens(request.request_id), end.reason


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "preempting"])
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(
    rig: Start, stand_in: ModuleType, tight: bool
) -> None:
    images = [None, A, B, C]
    requests = [
        stand_in.request(
            str(i), *(1 + (i * 7 + j) % 60 for j in range(1 + i * 5 % 41)), image=images[i % 4],
            max_tokens=40, temperature=0.8 * (i % 3), top_p=0.9, seed=i, ignore_eos=i % 5 == 0,
            frequency_penalty=0.4 * (i % 2),
        )
        for i in range(14)
    ]  # fmt: skip
    subject = rig(num_blocks=33 if tight else 400)
    subject.arrive(A, B)
    for request in requests:
        subject.add(request)
        subject.step()
    subject.arrive(C)
    subject.drain()
    stats = subject.engine.stats()
    assert (stats.preemptions > 0) == tight
    assert stats.adapters_per_step_max >= 2
    for request in requests:
        tokens, reason = alone(rig, request)
        end = subject.end(request.request_id)
        assert subject.tokens(request.request_id) == tokens
        assert isinstance(end, Finished) and end.reason == reason
        assert (end.prompt_tokens, end.completion_tokens) == (len(request.token_ids), len(tokens))
    assert subject.holds_nothing()


def first_of(tokens: Iterable[int], wanted: int) -> int:
    return list(tokens).index(wanted) + 1


def test_an_end_token_ends_and_is_sent(rig: Start, stand_in: ModuleType) -> None:
    prompt = next(
        p
        for p in range(1, 60)
        if stand_in.EOS in alone(rig, stand_in.request("r", p, max_tokens=20))[0][:-1]
        or alone(rig, stand_in.request("r", p, max_tokens=20))[1] == "stop"
    )
    tokens, reason = alone(rig, stand_in.request("r", prompt, max_tokens=20))
    assert (reason, tokens[-1], tokens.count(stand_in.EOS)) == ("stop", stand_in.EOS, 1)
    ignoring = stand_in.request("r", prompt, max_tokens=20, ignore_eos=True)
    longer, reason = alone(rig, ignoring)
    assert (reason, len(longer), longer[: len(tokens)]) == ("length", 20, tokens)


def test_a_stop_token_ends_and_is_sent_even_when_eos_is_ignored(
    rig: Start, stand_in: ModuleType
) -> None:
    free, _ = alone(rig, stand_in.request("r", 5, ignore_eos=True))
    stop = free[3]
    tokens, reason = alone(rig, stand_in.request("r", 5, ignore_eos=True, stop_token_ids=(stop,)))
    assert reason == "stop"
    assert tokens == free[: first_of(free, stop)]


def test_the_model_length_ends_a_request(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(max_model_len=20)
    subject.add(stand_in.request("r", *range(1, 17), max_tokens=99, ignore_eos=True))
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens) == ("length", 4)


def test_a_failed_step_fails_its_batch_only(
    rig: Start, stand_in: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    subject = rig(max_num_seqs=2)
    subject.add(stand_in.request("1", 1), stand_in.request("2", 1), stand_in.request("3", 1))
    subject.add(stand_in.request("4", 1, image=A))
    subject.executor.broken = RuntimeError("the device is on fire")
    with caplog.at_level(logging.ERROR):
        subject.step()
    assert "the device is on fire" in caplog.text
    subject.executor.broken = None
    for name in "12":
        end = subject.end(name)
        assert isinstance(end, Failed) and end.code == "internal"
        assert "fire" not in end.message
    subject.arrive(A)
    subject.step()
    subject.drain()
    assert isinstance(subject.end("3"), Finished)
    assert isinstance(subject.end("4"), Finished)
    assert subject.holds_nothing()


def test_logits_that_are_not_finite_fail_their_request_only(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig()
    subject.executor.poison = {63}
    subject.add(stand_in.request("bad", 63), stand_in.request("good", 1, logit_bias=((63, -99.0),)))
    subject.drain()
    end = subject.end("bad")
    assert isinstance(end, Failed) and "not finite" in end.message
    assert isinstance(subject.end("good"), Finished)
    assert subject.holds_nothing()


def test_an_image_that_fails_fails_those_who_need_it(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("a1", 1, image=A), stand_in.request("a2", 1, image=A))
    subject.add(stand_in.request("b", 1, image=B), stand_in.request("base", 1))
    subject.residency.failures[A] = ("image_missing", "no such image")
    subject.arrive(B)
    subject.drain()
    for name in ("a1", "a2"):
        assert subject.end(name) == Failed(name, "image_missing", "no such image")
    assert isinstance(subject.end("b"), Finished)
    assert isinstance(subject.end("base"), Finished)
    assert subject.holds_nothing()


@pytest.mark.parametrize("phase", ["refused", "loading", "waiting", "prefill", "decode", "ended"])
def test_abort_in_every_phase_releases_all(rig: Start, stand_in: ModuleType, phase: str) -> None:
    subject = rig(max_num_seqs=1, max_num_batched_tokens=4)
    if phase != "loading":
        subject.arrive(A)
    if phase == "waiting":
        subject.add(stand_in.request("first", 1, ignore_eos=True))
        subject.step()
    prompt = (1,) * (200 if phase == "refused" else 9 if phase == "prefill" else 3)
    subject.add(stand_in.request("r", *prompt, image=A, ignore_eos=True))
    if phase == "ended":
        subject.drain()
    elif phase != "refused":
        subject.step()
    assert bool(subject.tokens("r")) == (phase in ("decode", "ended"))
    subject.engine.abort("r")
    subject.engine.abort("r")
    subject.engine.abort("unknown")
    subject.drain()
    end = subject.end("r")
    reason = end.reason if isinstance(end, Finished) else end.code
    assert reason == {"refused": "invalid_request", "ended": "length"}.get(phase, "abort")
    if isinstance(end, Finished):
        assert end.completion_tokens == len(subject.tokens("r"))
    assert subject.holds_nothing()


def test_it_knows_when_it_has_work(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    assert not subject.engine.has_work
    assert subject.step() == []
    subject.add(stand_in.request("a", 1, image=A), stand_in.request("b", 1, image=B))
    subject.step()
    assert not subject.engine.has_work, "an image that is on its way is no work"
    subject.arrive(A)
    subject.step()
    assert subject.engine.has_work
    subject.drain()
    polls = subject.residency.polls
    subject.engine.abort("unknown")
    assert not subject.engine.has_work
    assert isinstance(subject.end("a"), Finished)
    subject.step()
    assert subject.residency.polls == polls + 1


def test_an_image_that_is_given_back_makes_room_for_those_who_wait(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig()
    subject.add(stand_in.request("a", 1, image=A, max_tokens=1))
    subject.add(stand_in.request("b", 1, image=B))
    subject.arrive(A)
    subject.step()
    assert isinstance(subject.end("a"), Finished)
    assert subject.engine.has_work, "the residency must be polled once more"


def test_fail_all(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(max_num_seqs=1)
    subject.add(*(stand_in.request(name, 1, ignore_eos=True) for name in "12"))
    subject.add(stand_in.request("3", 1, image=A))
    subject.step()
    subject.engine.fail_all("engine_died", "bye")
    subject.events += subject.engine.take_events()
    for name in "123":
        assert subject.end(name) == Failed(name, "engine_died", "bye")
    assert subject.holds_nothing()


def test_stats_count_rows_and_adapters(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.arrive(A, B)
    images = [None, A, B, A]
    for i, image in enumerate(images):
        subject.add(stand_in.request(str(i), 1, 2, 3, image=image, max_tokens=2, ignore_eos=True))
    subject.step()
    running = subject.engine.stats()
    assert (running.running, running.waiting, running.kv_blocks_used) == (4, 0, 4)
    subject.drain()
    stats = subject.engine.stats()
    assert (stats.steps, stats.rows_total) == (2, 12 + 4)
    assert (stats.prompt_tokens, stats.generated_tokens) == (12, 8)
    assert (stats.sequences_per_step_max, stats.adapters_per_step_max) == (4, 2)
    assert stats.rows_per_step == (0, 0, 1, 0, 1, *[0] * 8)  # 4 rows, then 12: at most 16
    assert stats.adapters_per_step == (0, 0, 2, *[0] * 14)
    assert (stats.running, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 0, 64)


def test_a_finish_tells_its_times_in_order(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("r", 1, image=A))
    subject.step()
    subject.arrive(A)
    subject.step()
    subject.drain()
    end = subject.end("r")
    assert isinstance(end, Finished)
    assert 0 < end.load_s <= end.queue_s <= end.first_token_s <= end.total_s


def test_logprobs_come_with_their_tokens(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.add(stand_in.request("with", 1, logprobs=3), stand_in.request("without", 1))
    subject.drain()
    for event in subject.events:
        if isinstance(event, Chunk) and event.request_id == "with":
            (logprob,) = event.logprobs
            assert event.token_ids == (logprob.token_id,)
            assert logprob.top[0] == (logprob.token_id, logprob.logprob), "greedy is the likeliest"
            assert len(logprob.top) == 3
        elif isinstance(event, Chunk):
            assert event.logprobs == ()


def test_it_says_who_it_is(rig: Start, stand_in: ModuleType) -> None:
    ready = rig(num_blocks=10).engine.describe("now")
    assert (ready.epoch, ready.base) == ("now", stand_in.MANIFEST.fingerprint)
    assert (ready.max_model_len, ready.kv_capacity_tokens) == (40, 40)


def test_who_is_outrun_by_its_own_tenant_holds_only_that_tenant_back(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig()
    subject.arrive(B)
    subject.residency.located, subject.residency.barred = {A}, {"x"}
    subject.add(stand_in.request("waits", 1, image=A, tenant="x"))
    for i in range(80):
        for tenant in "xy":
            asked = stand_in.request(f"{tenant}{i}", 1, image=B, max_tokens=1, tenant=tenant)
            subject.add(asked)
        subject.add(stand_in.request(f"base{i}", 1, max_tokens=1, tenant="x"))
        subject.step()
    served = {
        t: sum(bool(subject.tokens(f"{t}{i}")) for i in range(80)) for t in ("x", "y", "base")
    }
    assert served == {"x": 32, "y": 80, "base": 80}
    subject.engine.abort("x79")
    subject.residency.barred.clear()
    subject.arrive(A)
    subject.step()
    subject.drain()
    assert all(isinstance(subject.end(name), Finished) for name in ("waits", "x78", "x79"))
    assert subject.holds_nothing()


@pytest.mark.parametrize("located", [False, True], ids=["slow store", "no memory"])
def test_only_who_waits_for_memory_holds_others_back(
    rig: Start, stand_in: ModuleType, located: bool
) -> None:
    subject = rig()
    subject.arrive(B)
    subject.residency.lacking_bytes = 1
    subject.residency.located = {A} if located else set()
    subject.add(stand_in.request("waits", 1, image=A))
    for i in range(80):
        subject.add(stand_in.request(str(i), 1, image=B, max_tokens=1))
        subject.step()
    served = sum(bool(subject.tokens(str(i))) for i in range(80))
    assert served == (64 if located else 80)
    subject.residency.lacking_bytes = 0
    subject.arrive(A)
    subject.step()
    subject.drain()
    assert all(isinstance(subject.end(name), Finished) for name in ("waits", "79"))
    assert subject.holds_nothing()
