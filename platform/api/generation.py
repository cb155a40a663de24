"""One API request's completions while they run: engine events in, deltas of text out.

Runs an engine request for each choice, at once; turns tokens into text, ends a choice at its stop
strings, and counts what was generated. Knows token ids and images; refuses to know HTTP, JSON and
whose request it is.
"""

import math
from bisect import bisect_left
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import (
    Chunk,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generate,
    TokenLogprob,
)
from loraplex.platform.errors import (
    ApiError,
    BadRequest,
    EngineRestarted,
    EngineUnavailable,
    ImageMismatch,
    ImageUnusable,
    InternalError,
    Overloaded,
)
from loraplex.platform.text import Decoder, StopStrings


@dataclass(frozen=True)
class ShownToken:
    """A generated token's log-probabilities, and where its text starts in the completion."""

    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What one event added to a choice; `finish` is set on the last one."""

    index: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish: FinishReason | None = None


@dataclass
class Choice:
    """One completion: its engine request, and what has come of it so far."""

    index: int
    request: Generate
    decoder: Decoder
    stops: StopStrings
    completion_tokens: int = 0
    finished: Finished | None = None  # the engine's last word; None where a stop string ended it
    finish: FinishReason | None = None
    _decoded: int = 0  # characters decoded
    _shown: int = 0  # of those, characters given out
    _waiting: list[ShownToken] = field(default_factory=list)

    def take(self, event: Event) -> Delta:
        """Account for an event; raises the `ApiError` that a failure means to the caller."""
        if isinstance(event, Chunk):
            return self._take_tokens(event)
        if isinstance(event, Failed):
            raise failure_of(event)
        if event.reason == "abort":
            raise EngineRestarted("The engine gave the request up. Send it again.")
        self.finished, self.finish = event, event.reason
        return self._delta(self.stops.flush())

    def _take_tokens(self, chunk: Chunk) -> Delta:
        text = ""
        for i, token in enumerate(chunk.token_ids):
            self.completion_tokens += 1
            if chunk.logprobs and not self.decoder.is_silent(token):
                self._waiting.append(ShownToken(self._decoded, chunk.logprobs[i]))
            piece = self.decoder.push(token)
            self._decoded += len(piece)
            text += self.stops.push(piece)
            if self.stops.hit is not None:
                self.finish = "stop"
                break
        return self._delta(text)

    def _delta(self, text: str) -> Delta:
        """Tokens go out with their first character; those of a trimmed stop string never do."""
        self._shown += len(text)
        all_shown = self.finish is not None and self.stops.hit is None
        limit = math.inf if all_shown else self._shown
        count = bisect_left(self._waiting, limit, key=lambda token: token.offset)
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return Delta(self.index, text, tuple(ready), self.finish)


class Generation:
    """All choices of one API request. `run` feeds a stream of deltas, or of one error."""

    def __init__(self, engine: EngineClient, choices: list[Choice], prompt_tokens: int) -> None:
        self._engine, self.choices, self.prompt_tokens = engine, choices, prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, in all choices."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def outcome(self) -> str:
        """Why it ended: the first choice's reason, "unfinished" before all are done."""
        reasons = [choice.finish for choice in self.choices]
        return reasons[0] if reasons[0] and all(reasons) else "unfinished"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine did not compute anew, where it has said so."""
        return max((c.finished.cached_tokens for c in self.choices if c.finished), default=0)

    async def run(self, sink: MemoryObjectSendStream[Delta | ApiError]) -> None:
        """Run all choices to their end. Cancelling it aborts them in the engine."""
        async with sink, anyio.create_task_group() as group:
            for choice in self.choices:
                group.start_soon(self._run_choice, choice, sink)

    async def _run_choice(
        self, choice: Choice, sink: MemoryObjectSendStream[Delta | ApiError]
    ) -> None:
        events = self._engine.generate(choice.request)
        try:
            await self._pump(events, choice, sink)
        except ApiError as error:
            await sink.send(error)
        finally:
            with anyio.CancelScope(shield=True):
                await events.aclose()

    async def _pump(
        self,
        events: AsyncGenerator[Event, None],
        choice: Choice,
        sink: MemoryObjectSendStream[Delta | ApiError],
    ) -> None:
        async for event in events:
            delta = choice.take(event)
            if delta.text or delta.tokens or delta.finish:
                await sink.send(delta)
            if delta.finish:
                return


def failure_of(event: Failed) -> ApiError:
    """What a failed engine request means to the caller."""
    match event.code:
        case "engine_died":
            return EngineRestarted(
                "The engine restarted while it ran this request. Only what was generated is "
                "charged. Send it again."
            )
        case "engine_unavailable":
            return EngineUnavailable("The engine is starting. Try again in a few seconds.")
        case "image_missing" | "image_corrupt":
            return ImageUnusable(
                "This adapter's weights are lost or damaged on the server. Upload it again.",
                code=event.code,
            )
        case "image_mismatch":
            return ImageMismatch(
                "This adapter was compiled for another base than the one served now. "
                "Upload it again to have it compiled for this base."
            )
        case "invalid_request":
            return BadRequest(f"The engine cannot run this request: {event.message}")
        case "overloaded":
            return Overloaded("The engine's queue is full. Try again in a few seconds.")
        case "internal":
            return InternalError(event.request_id)
