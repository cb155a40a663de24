"""Cached KV in the engine: who finds it, who must not, and what is told of it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from loraplex.engine.protocol import Finished

Start = Callable[..., Any]
A, B = "a" * 64, "b" * 64
PROMPT = tuple(range(1, 23))  # five full blocks of four tokens, and two tokens


def ask(subject: Any, stand_in: ModuleType, name: str, **options: Any) -> int:
    """Run a request to its end; the tokens of its prompt that were cached."""
    subject.add(stand_in.request(name, *options.pop("prompt", PROMPT), **options))
    subject.drain()
    end = subject.end(name)
    assert isinstance(end, Finished)
    return end.cached_tokens


def test_a_tenant_finds_its_own_and_gets_the_same(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    assert ask(subject, stand_in, "cold", scope="s") == 0
    assert ask(subject, stand_in, "warm", scope="s") == 20
    assert subject.tokens("cold") == subject.tokens("warm")
    stats = subject.engine.stats()
    assert (stats.cache_hit_tokens, stats.kv_blocks_used) == (20, 0)
    assert stats.kv_blocks_cached > 0


def test_what_was_generated_is_found_by_the_next_turn(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    ask(subject, stand_in, "turn", scope="s", max_tokens=10, ignore_eos=True)
    longer = (*PROMPT, *subject.tokens("turn"), 7)
    assert ask(subject, stand_in, "next", scope="s", prompt=longer) == 28
    fresh = rig()
    assert ask(fresh, stand_in, "next", prompt=longer) == 0
    assert fresh.tokens("next") == subject.tokens("next")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"scope": "s"}, {"scope": "t"}),
        ({"scope": "s", "image": A}, {"scope": "t", "image": A}),
        ({"scope": "s", "image": A}, {"scope": "s", "image": B}),
        ({"scope": "s"}, {"scope": "s", "image": A}),
        ({"scope": "s" + A}, {"scope": "s", "image": A}),
        ({"tenant": "x"}, {"tenant": "y"}),
    ],
    ids=["tenants", "tenants with one image", "images", "base and image", "crafted", "no scopes"],
)
def test_what_is_another_s_is_as_good_as_not_there(
    rig: Start, stand_in: ModuleType, first: dict[str, Any], second: dict[str, Any]
) -> None:
    warm, cold = rig(), rig()
    for subject in (warm, cold):
        subject.arrive(A, B)
    ask(warm, stand_in, "first", **first)
    before = [len(batch.token_ids) for batch in warm.executor.batches]
    assert ask(warm, stand_in, "second", **second) == 0
    ask(cold, stand_in, "second", **second)
    steps = [len(batch.token_ids) for batch in warm.executor.batches][len(before) :]
    assert steps == [len(batch.token_ids) for batch in cold.executor.batches], "the same work"
    assert warm.tokens("second") == cold.tokens("second")


def test_tenants_of_one_scope_share(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    ask(subject, stand_in, "first", tenant="x", scope="public")
    assert ask(subject, stand_in, "second", tenant="y", scope="public") == 20


def test_an_activated_adapter_finds_the_base_s(rig: Start, stand_in: ModuleType) -> None:
    invocation = (50, 51)
    prompt = (*PROMPT[:12], *invocation, 3)
    subject, fresh = rig(), rig()
    for each in (subject, fresh):
        each.arrive(A)
        each.residency.invocations[A] = invocation
    ask(subject, stand_in, "base", scope="s", prompt=prompt[:13])
    assert ask(subject, stand_in, "activated", scope="s", image=A, prompt=prompt) == 12
    assert ask(fresh, stand_in, "activated", image=A, prompt=prompt) == 0
    assert fresh.tokens("activated") == subject.tokens("activated")
    [batch] = [b for b in fresh.executor.batches if len(b.token_ids) == len(prompt)]
    assert [(s.start, s.end) for s in batch.segments] == [(12, 15)]


def test_without_its_invocation_an_adapter_never_acts(rig: Start, stand_in: ModuleType) -> None:
    subject = rig()
    subject.arrive(A)
    subject.residency.invocations[A] = (50, 51)
    ask(subject, stand_in, "base", scope="s", max_tokens=9)
    assert ask(subject, stand_in, "never", scope="s", image=A, max_tokens=9) == 20
    assert subject.tokens("base") == subject.tokens("never")


def test_caching_can_be_turned_off(rig: Start, stand_in: ModuleType) -> None:
    subject = rig(enable_prefix_caching=False)
    ask(subject, stand_in, "first")
    assert ask(subject, stand_in, "second") == 0
    assert subject.engine.take_cache_events() == []
    assert subject.engine.stats().kv_blocks_cached == 0


def test_it_tells_whose_blocks_are_stored_found_and_evicted(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig(num_blocks=8)
    ask(subject, stand_in, "first", tenant="x", scope="s", max_tokens=1)
    ask(subject, stand_in, "again", tenant="x", scope="s", max_tokens=1)
    ask(subject, stand_in, "other", tenant="y", scope="t", max_tokens=1)
    events = subject.engine.take_cache_events()
    told = {
        (kind, tenant): [
            b for e in events if (e.kind, e.tenant) == (kind, tenant) for b in e.blocks
        ]
        for kind in ("stored", "hit", "evicted")
        for tenant in "xy"
    }
    assert len(told["stored", "x"]) == len(told["hit", "x"]) == 5
    assert told["hit", "x"] == told["stored", "x"]
    assert len(told["stored", "y"]) == 5 and told["hit", "y"] == []
    assert set(told["evicted", "x"]) < set(told["stored", "x"])
    assert subject.engine.take_cache_events() == []


def test_a_prompt_that_is_cached_and_wants_logprobs_is_computed(
    rig: Start, stand_in: ModuleType
) -> None:
    subject = rig()
    ask(subject, stand_in, "first", scope="s")
    assert ask(subject, stand_in, "asking", scope="s", prompt_logprobs=1) == 0
