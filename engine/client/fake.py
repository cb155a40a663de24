"""A deterministic engine in memory, for tests of the platform: no process, no model.

It repeats the prompt backwards, one token a chunk, or says what it was told to. It keeps the same
promises as a real client and remembers what it was asked. It refuses to know time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from loraplex.engine.protocol import (
    ADAPTER_BUCKETS,
    ROW_BUCKETS,
    Chunk,
    Event,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Generate,
    Ready,
    Stats,
    TokenLogprob,
)

Script = Sequence[int] | Callable[[Generate], Sequence[int]]

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


class FakeEngine:
    """An `EngineClient` whose engine is a script.

    `tokens` is what each request is answered with, or a function of it. A chunk waits for the
    event `hold` where one is set (`engine.hold = asyncio.Event()` works at any time). With `fail`
    set, requests end in `Failed` of that code. `requests` and `aborts` record what was asked.
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
        self.tokens, self.hold, self.fail = tokens, hold, fail
        self.requests: list[Generate] = []
        self.aborts: list[str] = []
        self.in_flight: set[str] = set()
        self._described = info
        self._lives = 1
        self._alive = asyncio.Event()
        self._dead = asyncio.Event()
        (self._alive if ready else self._dead).set()
        self._moved = asyncio.Event()  # replaced whenever `in_flight` changes
        self._steps = self._prompt_tokens = self._generated = 0

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
            running=len(self.in_flight),
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
        while len(self.in_flight) != count:
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

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Run a request as the script says; see `EngineClient.generate`."""
        if not self._alive.is_set():
            yield Failed(request.request_id, "engine_unavailable", "no engine is ready")
            return
        if request.request_id in self.in_flight:
            yield Failed(request.request_id, "invalid_request", "this id is in flight")
            return
        self.requests.append(request)
        self.in_flight.add(request.request_id)
        self._move()
        ended = False
        try:
            async for event in self._run(request, self._dead):
                ended = not isinstance(event, Chunk)
                yield event
        finally:
            self.in_flight.discard(request.request_id)
            self._move()
            if not ended:
                self.aborts.append(request.request_id)

    async def _run(self, request: Generate, dead: asyncio.Event) -> AsyncGenerator[Event, None]:
        name, sampling = request.request_id, request.sampling
        script = self.tokens(request) if callable(self.tokens) else self.tokens
        reason: FinishReason = "length" if len(script) >= sampling.max_tokens else "stop"
        self._prompt_tokens += len(request.token_ids)
        count = 0
        for token in script[: sampling.max_tokens]:
            await self._gate(dead)
            if self.fail or dead.is_set():
                break
            count += 1
            yield Chunk(name, (token,), _logprobs(request, token))
            self._steps += 1
            self._generated += 1
            if token in sampling.stop_token_ids:
                reason = "stop"
                break
        if dead.is_set():
            yield Failed(name, "engine_died", "the engine died")
        elif self.fail:
            yield Failed(name, self.fail, f"scripted failure: {self.fail}")
        else:
            yield Finished(name, reason, len(request.token_ids), count)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _gate(self, dead: asyncio.Event) -> None:
        """Wait for `hold`, or for the engine's death."""
        if self.hold is None:
            await asyncio.sleep(0)
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (self.hold, dead)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _logprobs(request: Generate, token: int) -> tuple[TokenLogprob, ...]:
    """Made up: -0.5 for the chosen token, then -1, -2, … for the ids after it."""
    count = request.sampling.logprobs
    if count is None:
        return ()
    top = ((token, -0.5), *((token + i, -float(i)) for i in range(1, count)))
    return (TokenLogprob(token, -0.5, top[:count]),)
