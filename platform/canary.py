"""A trial of a new image in the live engine: is what it says finite, and not the base's own words?

The base and the adapter continue the same few prompts, greedily. What is compared are the
log-probabilities that both give to the same tokens after the same tokens, so a difference is the
adapter's doing; an adapter without any is refused, for a server that silently serves the base in
its place would look just like that (vllm#34186). Knows an engine, a digest and token ids; refuses
to know PEFT, the registry and whose adapter it is.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Final

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import (
    Chunk,
    Failed,
    Finished,
    Generate,
    Policy,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
)
from loraplex.platform.errors import (
    AdapterRejected,
    EngineRestarted,
    EngineUnavailable,
    ImageUnusable,
    InternalError,
)
from loraplex.platform.ids import new_id
from loraplex.platform.text import Vocabulary

TENANT: Final = "loraplex.canary"
PROBES: Final = (
    "The capital of France is Paris, and the capital of Japan is",
    "Question: What do bees make?\nAnswer:",
    '{"name": "Ada", "born": 1815, "known for":',
)
TOKENS: Final = 16  # of each continuation
TOP: Final = 5  # likeliest tokens that are compared at each position
LEAST_EFFECT: Final = 1e-6  # nats
POLICY: Final = Policy(weight=0.1)


@dataclass(frozen=True)
class CanaryReport:
    """How far an adapter moves the base's output; probabilities are compared in nats.

    `mean_delta` and `max_delta` are of |Δ log-probability|, over the likeliest tokens of the base
    at each of `positions`. `kl` is the mean over positions of a lower bound of KL(base ‖ adapter):
    that of the distributions over these tokens and one for all others. `tokens_changed` is the
    share of the continuations' tokens that are others. The texts continue `prompt`.
    """

    positions: int
    mean_delta: float
    max_delta: float
    kl: float
    tokens_changed: float
    load_ms: float
    first_token_ms: float  # with the image resident
    prompt: str
    base_text: str
    text: str

    def plain(self) -> dict[str, Any]:
        """The same, as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Heard:
    """What one run said of its prompt's tokens but the first, and of those it generated."""

    prompt: tuple[TokenLogprob, ...]
    said: tuple[TokenLogprob, ...]
    finished: Finished


async def try_image(
    engine: EngineClient,
    vocabulary: Vocabulary,
    digest: str,
    invocation: Sequence[int] = (),
    *,
    base_name: str,
) -> CanaryReport:
    """Run an image of the store in the engine, beside the base, as a tenant of nobody's.

    `invocation` are the tokens that activate it, if it needs any. Raises `AdapterRejected` when its
    output is not finite, is the base's own, or cannot be had; `EngineUnavailable` while no engine
    takes requests (`EngineRestarted` when it ended during the trial); `ImageUnusable` when the
    store's copy is gone or damaged.
    """
    if engine.info is None:
        raise EngineUnavailable("The engine is starting. Try again in a few seconds.")
    room = engine.info.max_model_len - TOKENS
    probes = [(*vocabulary.encode(probe, special=True), *invocation) for probe in PROBES]
    bases, adapted = await _run_all(engine, [probe[-room:] for probe in probes], digest)
    pairs = list(zip(bases, adapted, strict=True))
    deltas = [d for pair in pairs for position in aligned(*pair) for d in moves(*position)]
    if max(deltas) <= LEAST_EFFECT:
        raise AdapterRejected([("no_effect", _no_effect(base_name))])
    return _report(vocabulary, pairs, deltas)


def _no_effect(base_name: str) -> str:
    return (
        f"The adapter changes nothing: every probability is that of {base_name} alone. Its B "
        "matrices may be zero, as they are before training; save it after training and upload it "
        "again."
    )


async def _run_all(
    engine: EngineClient, prompts: Sequence[tuple[int, ...]], digest: str
) -> tuple[list[Heard], list[Heard]]:
    """All runs at once: the base's and the adapter's, in the order of `prompts`."""
    images = (None, digest)
    async with asyncio.TaskGroup() as group:
        tasks = [
            [group.create_task(_run(engine, prompt, image)) for prompt in prompts]
            for image in images
        ]
    outcomes = [[task.result() for task in row] for row in tasks]
    for image, row in zip(images, outcomes, strict=True):
        for outcome in row:
            if isinstance(outcome, Failed):
                _raise(outcome, image)
    base, adapted = ([each for each in row if isinstance(each, Heard)] for row in outcomes)
    _check_finite(adapted)
    return base, adapted


async def _run(engine: EngineClient, prompt: tuple[int, ...], image: str | None) -> Heard | Failed:
    sampling = Sampling(TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    request = Generate(
        new_id("can"), prompt, sampling, image, tenant=TENANT, scope=TENANT, policy=POLICY
    )
    known: tuple[TokenLogprob, ...] = ()
    said: list[TokenLogprob] = []
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            match event:
                case Chunk():
                    said += event.logprobs
                case PromptLogprobs():
                    known = event.logprobs
                case Failed():
                    return event
                case Finished():
                    return Heard(known, tuple(said), event)
    return Failed(request.request_id, "engine_died", "the engine ended without a word")


def _raise(failed: Failed, image: str | None) -> None:
    """Say whose fault it is; only a failure of the adapter's own runs is a reason to refuse it."""
    match failed.code:
        case "engine_died":
            raise EngineRestarted("The engine ended while it tried the adapter.")
        case "engine_unavailable" | "overloaded":
            raise EngineUnavailable("The engine takes no requests now. Try again soon.")
        case "image_missing" | "image_corrupt":
            raise ImageUnusable(
                "The adapter's image is gone from the store or damaged there. Upload it again.",
                code=failed.code,
            )
    if image is None:
        raise InternalError(failed.request_id)
    raise AdapterRejected([_reason(failed)])


def _reason(failed: Failed) -> tuple[str, str]:
    if failed.code == "image_mismatch":
        return failed.code, (
            "The adapter was compiled for another base than the engine serves. Upload it again "
            "once the server has restarted with one base."
        )
    if "not finite" in failed.message:
        return _not_finite("the model's output")
    why = failed.message.rstrip(".")
    return "canary_failed", f"The engine cannot run the adapter: {why}."


def _not_finite(what: str) -> tuple[str, str]:
    return "output_not_finite", (
        f"With the adapter {what} is NaN or infinite: its weights are too large for the model. "
        "Train it again with a lower learning rate or lora_alpha, or with gradient clipping."
    )


def _check_finite(runs: Sequence[Heard]) -> None:
    for run in runs:
        for where, known in (("a prompt", run.prompt), ("a continuation", run.said)):
            if not all(math.isfinite(value) for each in known for value in named(each).values()):
                raise AdapterRejected([_not_finite(f"a log-probability of {where}")])


def named(known: TokenLogprob) -> dict[int, float]:
    """All log-probabilities that are known at one position, by token."""
    return {**dict(known.top), known.token_id: known.logprob}


def ceiling(known: TokenLogprob) -> float:
    """What a token that is not named has at most: as much as the last of the likeliest."""
    return min((logprob for _, logprob in known.top), default=known.logprob)


def aligned(base: Heard, adapted: Heard) -> Iterator[tuple[TokenLogprob, TokenLogprob]]:
    """What both give at each position that follows the same tokens."""
    yield from zip(base.prompt, adapted.prompt, strict=True)
    for ours, theirs in zip(base.said, adapted.said, strict=False):
        yield ours, theirs
        if ours.token_id != theirs.token_id:
            return


def moves(base: TokenLogprob, adapted: TokenLogprob) -> Iterator[float]:
    """|Δ log-probability| of each of the base's tokens; at least that, where the adapter has it
    below its likeliest."""
    theirs, most = named(adapted), ceiling(adapted)
    for token, logprob in named(base).items():
        yield abs(logprob - theirs[token]) if token in theirs else max(0.0, logprob - most)


def divergence(base: TokenLogprob, adapted: TokenLogprob) -> float:
    """A lower bound of KL(base ‖ adapter) in nats, by merging all tokens that are not named.

    Merging outcomes never raises a divergence (the data-processing inequality); where the adapter
    does not name a token, the largest probability that it may have stands for it.
    """
    ours, theirs, most = named(base), named(adapted), ceiling(adapted)
    total = sum(math.exp(p) * (p - theirs.get(token, most)) for token, p in ours.items())
    shared = sum(math.exp(theirs[token]) for token in ours if token in theirs)
    rest, others = 1 - sum(map(math.exp, ours.values())), max(1 - shared, 1e-12)
    return max(0.0, total + (rest * math.log(rest / others) if rest > 0 else 0.0))


def _report(
    vocabulary: Vocabulary, pairs: Sequence[tuple[Heard, Heard]], deltas: Sequence[float]
) -> CanaryReport:
    kls = [divergence(*position) for pair in pairs for position in aligned(*pair)]
    changed = [_changed(*pair) for pair in pairs]
    shown = changed.index(max(changed))
    finished = [adapted.finished for _, adapted in pairs]
    return CanaryReport(
        positions=len(kls),
        mean_delta=sum(deltas) / len(deltas),
        max_delta=max(deltas),
        kl=sum(kls) / len(kls),
        tokens_changed=sum(changed) / len(changed),
        load_ms=1000 * max(each.load_s for each in finished),
        first_token_ms=1000 * min(each.first_token_s - each.load_s for each in finished),
        prompt=PROBES[shown],
        base_text=_text(vocabulary, pairs[shown][0]),
        text=_text(vocabulary, pairs[shown][1]),
    )


def _changed(base: Heard, adapted: Heard) -> float:
    """The share of the continuation's tokens that are not the base's."""
    both = zip(base.said, adapted.said, strict=False)
    same = sum(ours.token_id == theirs.token_id for ours, theirs in both)
    return 1 - same / max(len(base.said), len(adapted.said), 1)


def _text(vocabulary: Vocabulary, run: Heard) -> str:
    said = b"".join(vocabulary.bytes_of(each.token_id) for each in run.said)
    return said.decode("utf-8", "replace")
