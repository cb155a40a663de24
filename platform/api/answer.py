"""Runs a job and sends its answer, whole or as server-sent events.

Lease, engine requests and answer live in one function's scope: however it is left (answered,
refused, disconnected, cancelled), the engine requests are aborted, what was generated is charged
and the lease is given back; and all that before the last byte is sent, so that a caller's next
request finds its limits free. Refuses to know how answers are shaped.
"""

import time

import anyio
import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from loraplex.engine.protocol import Finished
from loraplex.platform.api.beside import beside, while_connected
from loraplex.platform.api.choice import Delta
from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Answered, Json, Usage
from loraplex.platform.api.generation import Generation
from loraplex.platform.api.job import Job
from loraplex.platform.api.lease import admitted
from loraplex.platform.errors import ApiError, TimedOut

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",
}


class Answer(Response):
    """The response to a generating request; nothing is admitted or run before it is called."""

    def __init__(self, ctx: Context, job: Job) -> None:
        super().__init__()
        self._ctx, self._job = ctx, job
        self._generation = Generation(ctx.engine, job.runs)
        self._choices = sum(len(run.choices) for run in job.runs)
        self._deltas: list[list[Delta]] = [[] for _ in range(self._choices)]
        self._facts: dict[str, str] = {}  # headers
        self._started = False  # whether the response's head is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, run and answer; raises `ApiError` while nothing has been sent."""
        send = _telling(send)
        try:
            async with admitted(self._ctx, self._job, self._generation) as admission:
                self._facts = admission.headers | self._identity()
                async with while_connected(receive):
                    await self._run_in_time(send)
        except ApiError as error:
            if not self._started:
                raise
            await _send_body(send, _event(error.body), more=False)
            return
        if self._job.stream:
            await _send_body(send, self._ending(), more=False)
        else:
            await self._whole()(scope, receive, send)

    def _identity(self) -> dict[str, str]:
        target = self._job.caller.target
        return {
            "x-loraplex-model": target.model_id,
            "x-loraplex-digest": target.digest or "base",
        }

    async def _run_in_time(self, send: Send) -> None:
        limit = self._ctx.settings.request_timeout_s
        try:
            with anyio.fail_after(limit):
                await self._run(send)
        except TimeoutError as error:
            raise TimedOut(f"The generation took longer than {limit:g} s.") from error

    async def _run(self, send: Send) -> None:
        """Take deltas as they come: send them on, or keep them for the whole answer."""
        began, first = time.monotonic(), True
        sink, source = anyio.create_memory_object_stream[Delta | ApiError](0)
        with sink, source:
            async with beside(lambda _: self._generation.run(sink)):
                async for delta in source:
                    if isinstance(delta, ApiError):
                        raise delta
                    if first:
                        self._ctx.metrics.observe_first_token(time.monotonic() - began)
                        first = False
                    await self._take(delta, send)

    async def _take(self, delta: Delta, send: Send) -> None:
        if not self._job.stream:
            self._deltas[delta.index].append(delta)
            return
        chunks = self._job.form.chunks(delta)
        if not self._started:
            await self._start(send)
            chunks = self._job.form.opening(self._choices) + chunks
        await _send_body(send, b"".join(map(self._chunk, chunks)))

    async def _start(self, send: Send) -> None:
        headers = STREAM_HEADERS | self._facts
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        self._started = True

    def _chunk(self, chunk: Json) -> bytes:
        """One event; with usage asked for, all but the last say that it is not known yet."""
        return _event({"usage": None} | chunk if self._job.include_usage else chunk)

    def _ending(self) -> bytes:
        if not self._job.include_usage:
            return DONE
        return _event(self._job.form.usage(self._usage())) + DONE

    def _whole(self) -> Response:
        answers = [
            Answered(self._deltas[choice.index], run.prompt_logprobs)
            for run in self._job.runs
            for choice in run.best(self._job.returned)
        ]
        body = self._job.form.whole(answers, self._usage())
        return JSONResponse(body, headers=self._facts | self._timings(self._job.runs[0].finished))

    def _timings(self, finished: Finished | None) -> dict[str, str]:
        """What the engine tells of the first prompt; nothing where it died just after the end."""
        if finished is None:
            return {}
        return {
            "x-loraplex-cached-tokens": str(self._generation.cached_tokens),
            "x-loraplex-queue-ms": f"{finished.queue_s * 1000:.1f}",
            "x-loraplex-load-ms": f"{finished.load_s * 1000:.1f}",
            "x-loraplex-first-token-ms": f"{finished.first_token_s * 1000:.1f}",
        }

    def _usage(self) -> Usage:
        ran = self._generation
        return Usage(ran.prompt_tokens, ran.completion_tokens, ran.cached_tokens)


def _event(data: Json) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _telling(send: Send) -> Send:
    """A `send` that says that the caller has gone in one way, whatever the server does."""

    async def telling(message: Message) -> None:
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error

    return telling
