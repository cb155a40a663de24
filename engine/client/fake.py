"""A deterministic engine in memory, for tests of the platform: no process, no model.

It repeats the prompt backwards, one token a chunk, or says what it was told to; the choices of a
request take turns. It keeps the same promises as a real client and remembers what it was asked. It
refuses to know time, and takes no notice of a guide.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from loraplex.engine.protocol import (
    ADAPTER_BUCKETS,
    ROW_BUCKETS,
    CacheEvents,
    Chunk,
    Event,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Generate,
    PromptLogprobs,
    Ready,
    Stats,
    TokenLogprob,
)

Script = Sequence[int] | Callable[[Generate], Sequence[int]]
SEED_MASK: Final = (1 << 63) - 1

READY: Final = Ready(
    epoch="fake-1",
    base="0" * 64,
    max_model_len=2048,
    max_num_seqs=64,
    kv_capacity_tokens=65536,
    executor="fake",
    device="cpu",
    dtype="float32",
)


def backwards(request: Generate) -> list[int]:
    """The prompt from its end to its start, over and over, up to `max_tokens`."""
    prompt, count = request.token_ids[::-1], request.sampling.max_tokens
    return [prompt[i % len(prompt)] for i in range(count)] if prompt else []


@dataclass
class _Run:
    """A request in flight: what each choice is still to say, and how the first one ended."""

    request: Generate
    dead: asyncio.Event
    speaking: dict[int, list[Chunk]] = field(default_factory=dict)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    reason: FinishReason = "abort"
    said: int = 0  # tokens


class FakeEngine:
    """An `EngineClient` whose engine is a script.

    `tokens` is what each choice is answered with, or a function of the request as the choice has it
    (with its own seed). A chunk waits for the event `hold` where one is set
    (`engine.hold = asyncio.Event()` works at any time). With `fail` set, requests end in `Failed`
    of that code. `logprob` makes up a token's log-probability, from which `effect` is taken where
    an image is asked for, and `cached_tokens` is what each request is told to have found.
    `requests`, `aborts`, `aborted_choices` and `prefetched` record what was asked.
    """

    def __init__(
        self,
        tokens: Script = backwards,
        *,
        info: Ready = READY,
        hold: asyncio.Event | None = None,
        fail: FailureCode | None = None,
        ready: bool = True,
    ) -> None:
        self.tokens, self.hold, self.fail, self.cached_tokens = tokens, hold, fail, 0
        self.logprob: Callable[[int], float] = lambda token: -0.5
        self.effect = 0.125  # of every image, on every log-probability
        self.requests: list[Generate] = []
        self.aborts: list[str] = []
        self.aborted_choices: list[tuple[str, int]] = []
        self.prefetched: list[str] = []
        self.cache_listener: Callable[[CacheEvents], None] = lambda events: None
        self._runs: dict[str, _Run] = {}
        self._described = info
        self._lives = 1
        self._alive = asyncio.Event()
        self._dead = asyncio.Event()
        (self._alive if ready else self._dead).set()
        self._moved = asyncio.Event()  # replaced whenever `in_flight` changes
        self._steps = self._prompt_tokens = self._generated = 0

    @property
    def in_flight(self) -> set[str]:
        """Ids of the requests that have not ended."""
        return set(self._runs)

    @property
    def info(self) -> Ready | None:
        """Who the engine is; None while it is dead."""
        return self._described if self._alive.is_set() else None

    @property
    def stats(self) -> Stats:
        """Counts of what was run, one step a token."""
        return Stats(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            running=len(self._runs),
            rows_total=self._steps,
            rows_per_step=(self._steps,) + (0,) * len(ROW_BUCKETS),
            adapters_per_step=(self._steps,) + (0,) * (ADAPTER_BUCKETS - 1),
        )

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """End as if the engine had died."""
        self.die()

    async def wait_ready(self, timeout: float) -> Ready:  # noqa: ASYNC109
        """Wait for `revive`, at most `timeout` seconds; raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            await self._alive.wait()
        return self._described

    async def wait_in_flight(self, count: int) -> None:
        """Wait until exactly `count` requests are in flight."""
        while len(self._runs) != count:
            await self._moved.wait()

    def die(self) -> None:
        """Fail all that is in flight with "engine_died"; refuse what comes until `revive`."""
        self._alive.clear()
        self._dead.set()

    def revive(self) -> None:
        """Become ready again under a new epoch."""
        self._lives += 1
        self._described = replace(self._described, epoch=f"fake-{self._lives}")
        self._dead = asyncio.Event()
        self._alive.set()

    async def abort(self, request_id: str, index: int) -> None:
        """End one choice of a request; see `EngineClient.abort`."""
        self.aborted_choices.append((request_id, index))
        if (run := self._runs.get(request_id)) is not None:
            run.speaking.pop(index, None)
            run.stirred.set()

    async def prefetch(self, image: str) -> None:
        """Remember the hint."""
        self.prefetched.append(image)

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Run a request as the script says; see `EngineClient.generate`."""
        name = request.request_id
        if not self._alive.is_set():
            yield Failed(name, "engine_unavailable", "no engine is ready")
            return
        if name in self._runs:
            yield Failed(name, "invalid_request", "this id is in flight")
            return
        self.requests.append(request)
        run = self._runs[name] = _Run(request, self._dead)
        self._move()
        ended = False
        try:
            async for event in self._events(run):
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            del self._runs[name]
            self._move()
            if not ended:
                self.aborts.append(name)

    async def _events(self, run: _Run) -> AsyncGenerator[Event, None]:
        name, prompt = run.request.request_id, run.request.token_ids
        run.speaking = {i: self._chunks(run.request, i) for i in range(run.request.choices)}
        self._prompt_tokens += len(prompt)
        wanted = run.request.sampling.prompt_logprobs
        if wanted is not None and not self.fail:
            known = (self._logprob(run.request, token, wanted) for token in prompt[1:])
            yield PromptLogprobs(name, tuple(known))
        async for chunk in self._turns(run):
            yield chunk
        if run.dead.is_set():
            yield Failed(name, "engine_died", "the engine died")
        elif self.fail:
            yield Failed(name, self.fail, f"scripted failure: {self.fail}")
        else:
            yield Finished(name, run.reason, len(prompt), run.said, self.cached_tokens)

    async def _turns(self, run: _Run) -> AsyncGenerator[Chunk, None]:
        """A chunk of each choice in turn, until all have ended or the request must fail."""
        while run.speaking:
            for index in tuple(run.speaking):
                await self._gate(run)
                if self.fail or run.dead.is_set():
                    return
                if (rest := run.speaking.get(index)) is None:
                    continue
                chunk = rest.pop(0)
                if not rest:
                    del run.speaking[index]
                if chunk.finish and index == 0:
                    run.reason = chunk.finish
                run.said += len(chunk.token_ids)
                yield chunk
                self._steps += 1
                self._generated += len(chunk.token_ids)

    def _chunks(self, request: Generate, index: int) -> list[Chunk]:
        """All that a choice will say, a token a chunk; a beam says it in one."""
        seed = (request.sampling.seed + index) & SEED_MASK
        own = replace(request, sampling=replace(request.sampling, seed=seed))
        tokens, finish = _script(own, self.tokens(own) if callable(self.tokens) else self.tokens)
        if request.beams is not None:
            return [Chunk(request.request_id, tokens, (), index, finish, -1.0 - index)]
        chunks = list(self._one_by_one(own, tokens, index))
        chunks = chunks or [Chunk(request.request_id, (), (), index)]
        chunks[-1] = replace(chunks[-1], finish=finish)
        return chunks

    def _one_by_one(self, request: Generate, tokens: Sequence[int], index: int) -> Iterator[Chunk]:
        count = request.sampling.logprobs
        for token in tokens:
            logprobs = () if count is None else (self._logprob(request, token, count),)
            yield Chunk(request.request_id, (token,), logprobs, index)

    def _logprob(self, request: Generate, token: int, count: int) -> TokenLogprob:
        """Of the token itself, and half a unit less for each of the ids after it."""
        likeliest = self.logprob(token) - (0.0 if request.image is None else self.effect)
        top = tuple((token + i, likeliest - i / 2) for i in range(count))
        return TokenLogprob(token, likeliest, top)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _gate(self, run: _Run) -> None:
        """Wait for `hold`, for an abort of a choice, or for the engine's death."""
        if self.hold is None:
            await asyncio.sleep(0)
            return
        run.stirred.clear()
        events = (self.hold, run.dead, run.stirred)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _script(request: Generate, script: Sequence[int]) -> tuple[tuple[int, ...], FinishReason]:
    """The tokens that a choice says of a script, and why it ends after them."""
    sampling, tokens = request.sampling, tuple(script[: request.sampling.max_tokens])
    for i, token in enumerate(tokens):
        if token in sampling.stop_token_ids and i >= sampling.min_tokens:
            return tokens[: i + 1], "stop"
    return tokens, "length" if len(script) >= sampling.max_tokens else "stop"
