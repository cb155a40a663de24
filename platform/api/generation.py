"""All completions of one API request while they run: engine events in, deltas of text out.

Runs an engine request for each prompt, at once, and tells its choices apart. Knows engine requests
and images; refuses to know HTTP, JSON and whose request it is.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import (
    Chunk,
    Event,
    Failed,
    Finished,
    Generate,
    PromptLogprobs,
    TokenLogprob,
)
from loraplex.platform.api.beside import beside
from loraplex.platform.api.choice import Choice, Delta, ShownToken
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


@dataclass(frozen=True)
class Echo:
    """A prompt that opens its answers: its text, and where in it each token's text starts."""

    text: str
    offsets: Sequence[int]


@dataclass
class Run:
    """One prompt's engine request, its choices in order, and what the engine said of the whole."""

    request: Generate
    choices: Sequence[Choice]
    echo: Echo | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finished: Finished | None = None

    def __post_init__(self) -> None:
        if self.echo is not None:
            for choice in self.choices:
                choice.echo(self.echo.text, ())

    def take(self, event: Event) -> Delta | None:
        """Account for an event; raises the `ApiError` that a failure means to the caller."""
        match event:
            case Chunk():
                return self.choices[event.index].take(event)
            case PromptLogprobs():
                self.prompt_logprobs = event.logprobs
                self._echo_tokens()
            case Failed() if not self._all_ended:
                raise failure_of(event, "adapters" if self.request.parts else None)
            case Finished():
                self.finished = event
                if not self._all_ended:
                    raise EngineRestarted("The engine gave the request up. Send it again.")
        return None

    def best(self, count: int) -> list[Choice]:
        """So many choices, those with the highest mean log-probability first."""
        if count == len(self.choices):
            return list(self.choices)
        return sorted(self.choices, key=lambda c: c.mean_logprob, reverse=True)[:count]

    @property
    def _all_ended(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def _echo_tokens(self) -> None:
        if self.echo is None:
            return
        known = (None, *self.prompt_logprobs)
        prompt = zip(self.echo.offsets, self.request.token_ids, known, strict=True)
        tokens = [ShownToken(*each) for each in prompt]
        for choice in self.choices:
            choice.echo(self.echo.text, tokens)


class Generation:
    """All runs of one API request. `run` feeds a stream of deltas, or of one error."""

    def __init__(self, engine: EngineClient, runs: Sequence[Run]) -> None:
        self._engine, self.runs = engine, runs
        self.prompt_tokens = sum(len(run.request.token_ids) for run in runs)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, in all choices."""
        return sum(choice.completion_tokens for choice in self._choices())

    @property
    def outcome(self) -> str:
        """Why it ended: the first choice's reason, "unfinished" before all are done."""
        reasons = [choice.finish for choice in self._choices()]
        return reasons[0] if reasons[0] and all(reasons) else "unfinished"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine did not compute anew, as far as it has said so."""
        return sum(run.finished.cached_tokens for run in self.runs if run.finished)

    def deltas(self) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """What all runs say, as it comes; leaving the block aborts in the engine what still runs.

        The iterator raises the `ApiError` of the first run that fails.
        """
        if len(self.runs) == 1:
            return aclosing(self._follow(self.runs[0]))
        return self._together()

    @asynccontextmanager
    async def _together(self) -> AsyncIterator[AsyncIterator[Delta]]:
        sink, source = anyio.create_memory_object_stream[Delta | ApiError](0)
        with sink, source:
            async with (
                beside(lambda _: self._follow_all(sink)),
                aclosing(_raising(source)) as deltas,
            ):
                yield deltas

    async def _follow_all(self, sink: MemoryObjectSendStream[Delta | ApiError]) -> None:
        async with sink, anyio.create_task_group() as group:
            for run in self.runs:
                group.start_soon(self._feed, run, sink)

    async def _feed(self, run: Run, sink: MemoryObjectSendStream[Delta | ApiError]) -> None:
        async with aclosing(self._follow(run)) as deltas:
            try:
                async for delta in deltas:
                    await sink.send(delta)
            except ApiError as error:
                await sink.send(error)

    async def _follow(self, run: Run) -> AsyncGenerator[Delta, None]:
        """One run's deltas to the engine's last word; it is told of a choice's stop string."""
        events = self._engine.generate(run.request)
        try:
            async for event in events:
                if not (delta := run.take(event)):
                    continue
                if isinstance(event, Chunk) and not event.finish and delta.finish:
                    await self._engine.abort(run.request.request_id, event.index)
                yield delta
        except BaseException:
            with anyio.CancelScope(shield=True):
                await events.aclose()
            raise

    def _choices(self) -> Iterator[Choice]:
        for run in self.runs:
            yield from run.choices


async def _raising(
    source: MemoryObjectReceiveStream[Delta | ApiError],
) -> AsyncGenerator[Delta, None]:
    async for each in source:
        if isinstance(each, ApiError):
            raise each
        yield each


def failure_of(event: Failed, param: str | None = None) -> ApiError:
    """What a failed engine request means to the caller; `param` is the field likely at fault."""
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
            reason = event.message.rstrip(".")
            return BadRequest(f"The engine cannot run this request: {reason}.", param=param)
        case "overloaded":
            return Overloaded("The engine's queue is full. Try again in a few seconds.")
        case "internal":
            return InternalError(event.request_id)
