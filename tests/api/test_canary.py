"""The canary: what it measures of a real difference, and what it refuses, each with its word."""

import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from loraplex.engine.client.fake import READY, FakeEngine
from loraplex.engine.protocol import Failed, TokenLogprob
from loraplex.platform import canary
from loraplex.platform.errors import (
    AdapterRejected,
    EngineRestarted,
    EngineUnavailable,
    ImageUnusable,
    InternalError,
)
from loraplex.platform.text import Vocabulary

pytestmark = pytest.mark.anyio
DIGEST = "ab" * 32


@pytest.fixture
def vocabulary(tiny_base):
    return Vocabulary(Path(tiny_base.path))


async def tried(engine, vocabulary, invocation=()):
    return await canary.try_image(engine, vocabulary, DIGEST, invocation, base_name="tiny-base")


async def refused(engine, vocabulary) -> list[str]:
    with pytest.raises(AdapterRejected) as caught:
        await tried(engine, vocabulary)
    return [reason["code"] for reason in caught.value.reasons]


async def test_an_adapter_that_moves_the_output_passes_and_says_how_far(vocabulary):
    engine = FakeEngine()
    report = await tried(engine, vocabulary)
    assert report.max_delta == report.mean_delta == pytest.approx(0.125)
    assert report.tokens_changed == 0
    prompts = sum(len(probe) for probe in canary.PROBES)  # a token a byte
    assert report.positions == prompts + len(canary.PROBES) * (canary.TOKENS - 1)
    assert report.text == report.base_text == report.prompt[::-1][: canary.TOKENS]
    assert report.plain()["max_delta"] == report.max_delta


async def test_other_words_are_counted_and_shown(vocabulary):
    engine = FakeEngine(lambda asked: b"sunny" * 4 if asked.image else b"sunnx" * 4)
    report = await tried(engine, vocabulary)
    assert report.tokens_changed == pytest.approx(3 / 16)
    assert (report.base_text, report.text) == ("sunnxsunnxsunnxs", "sunnysunnysunnys")


async def test_it_asks_as_a_tenant_of_nobodys_and_shares_no_cache(vocabulary):
    engine = FakeEngine()
    await tried(engine, vocabulary)
    assert {asked.tenant for asked in engine.requests} == {canary.TENANT}
    assert {asked.scope for asked in engine.requests} == {canary.TENANT}
    assert [asked.image for asked in engine.requests].count(DIGEST) == len(canary.PROBES)
    assert all(asked.sampling.temperature == 0 for asked in engine.requests)
    assert engine.in_flight == set()


async def test_an_activated_adapter_is_tried_behind_its_invocation(vocabulary):
    engine = FakeEngine()
    await tried(engine, vocabulary, (256, 65))
    assert all(asked.token_ids[-2:] == (256, 65) for asked in engine.requests)


async def test_prompts_fit_the_shortest_context(vocabulary):
    engine = FakeEngine(info=replace(READY, max_model_len=20))
    await tried(engine, vocabulary, (256,))
    assert {len(asked.token_ids) for asked in engine.requests} == {4}


async def test_an_adapter_without_effect_is_refused(vocabulary):
    engine = FakeEngine()
    engine.effect = 1e-7
    assert await refused(engine, vocabulary) == ["no_effect"]


@pytest.mark.parametrize("effect", [math.nan, math.inf])
async def test_output_that_is_not_finite_is_refused(vocabulary, effect):
    engine = FakeEngine()
    engine.effect = effect
    assert await refused(engine, vocabulary) == ["output_not_finite"]


class Choosy(FakeEngine):
    """Fails the requests for an image, with this code and message."""

    def __init__(self, code, message):
        super().__init__()
        self.failure = code, message

    async def generate(self, request):
        if request.image is not None:
            yield Failed(request.request_id, *self.failure)
            return
        async for event in super().generate(request):
            yield event


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        ("image_mismatch", "it was compiled for another base", "image_mismatch"),
        ("internal", "the model's output is not finite", "output_not_finite"),
        ("internal", "the model broke", "canary_failed"),
        ("invalid_request", "it takes more than all memory", "canary_failed"),
    ],
)
async def test_what_fails_with_the_adapter_alone_refuses_it(vocabulary, code, message, reason):
    assert await refused(Choosy(code, message), vocabulary) == [reason]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("engine_died", EngineRestarted),
        ("engine_unavailable", EngineUnavailable),
        ("overloaded", EngineUnavailable),
        ("image_missing", ImageUnusable),
        ("image_corrupt", ImageUnusable),
        ("internal", InternalError),  # the base fails too: it is not the adapter's doing
    ],
)
async def test_what_is_not_the_adapters_fault_does_not_refuse_it(vocabulary, code, error):
    with pytest.raises(error):
        await tried(FakeEngine(fail=code), vocabulary)


async def test_without_an_engine_nothing_is_tried(vocabulary):
    with pytest.raises(EngineUnavailable):
        await tried(FakeEngine(ready=False), vocabulary)


LOGITS = st.lists(st.floats(-8, 8), min_size=8, max_size=8)


def softmax(logits):
    peak = math.log(sum(map(math.exp, logits)))
    return [logit - peak for logit in logits]


def told(logprobs, token):
    """The likeliest tokens, and one that need not be among them."""
    best = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[: canary.TOP]
    return TokenLogprob(token, logprobs[token], tuple((one, logprobs[one]) for one in best))


@given(LOGITS, LOGITS, st.integers(0, 7))
@example([5, 4, 3, 2, 1.01, 1, 0, -8], [5, 4, 3, 2, 1, 1.01, 0, -8], 7)  # near ties, a rare word
def test_what_is_reported_never_exceeds_the_true_difference(ours, theirs, token):
    base, adapted = softmax(ours), softmax(theirs)
    kl = sum(math.exp(p) * (p - q) for p, q in zip(base, adapted, strict=True))
    pair = told(base, token), told(adapted, token)
    assert 0 <= canary.divergence(*pair) <= kl + 1e-9
    furthest = max(abs(p - q) for p, q in zip(base, adapted, strict=True))
    assert max(canary.moves(*pair)) <= furthest + 1e-9


@given(LOGITS, st.integers(0, 7))
def test_equal_distributions_do_not_differ(logits, token):
    known = told(softmax(logits), token)
    assert canary.divergence(known, known) == pytest.approx(0, abs=1e-12)
    assert set(canary.moves(known, known)) == {0}


async def test_an_adapter_that_ends_the_engine_is_tried_twice_and_no_more(world, monkeypatch):
    deadly = Choosy("engine_died", "the engine died")
    monkeypatch.setattr(world.engine, "generate", deadly.generate)
    files = {"adapter_config": ("c", b'{"r": 8}'), "adapter_model": ("m", b"ok")}
    async with world.client(timeout=60) as client:
        answer = await client.post("/v1/adapters", data={"name": "poet"}, files=files)
    assert answer.status_code == 422
    assert [reason["code"] for reason in answer.json()["error"]["reasons"]] == ["engine_died"]
    assert list(world.gate.store.files()) == []
