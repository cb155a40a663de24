"""Runs a job and sends its answer, whole or as server-sent events.

Lease, engine requests and answer live in one function's scope: however it is left (answered,
refused, disconnected, cancelled), the engine requests are aborted, what was generated is charged
and the lease is given back; and all that is sent to Redis before the last byte is to the caller,
whose next request so finds its limits free. Refuses to know how answers are shaped.
"""

import time
from collections.abc import Mapping

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loraplex.platform.api.beside import while_connected
from loraplex.platform.api.choice import Delta
from loraplex.platform.api.context import Context
from loraplex.platform.api.explain import Facts, as_headers, moments, timings, weights
from loraplex.platform.api.forms import Answered, Json, Usage
from loraplex.platform.api.generation import Generation
from loraplex.platform.api.job import Job
from loraplex.platform.api.lease import Lease, admitted, count
from loraplex.platform.api.target import Target
from loraplex.platform.errors import ApiError

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",
}


class Answer(Response):
    """The response to a generating request; nothing is admitted or run before it is called.

    What else a `Response` has, a status and headers, is known only then.
    """

    background = None

    def __init__(self, ctx: Context, job: Job) -> None:
        self._ctx, self._job = ctx, job
        self._generation = Generation(ctx.engine, job.runs)
        self._choices = sum(len(run.choices) for run in job.runs)
        self._deltas: list[list[Delta]] = [[] for _ in range(self._choices)]
        self._own_headers: dict[str, str] = {}  # beside those of the server
        self._lease: Lease | None = None
        self._started = False  # whether the response's head is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, run and answer; raises `ApiError` while nothing has been sent."""
        try:
            await self._answer(receive, send)
        finally:  # behind the last byte, which need not wait for it
            if self._lease is not None:
                count(self._ctx, self._job, self._lease.entry)

    async def _answer(self, receive: Receive, send: Send) -> None:
        try:
            async with admitted(self._ctx, self._job, self._generation) as self._lease:
                limits = self._lease.admission.headers
                self._own_headers = limits | as_headers(weights(self._target))
                async with while_connected(receive):
                    await self._run_in_time(send)
        except ApiError as error:
            if not self._started:
                raise
            await _send_body(send, self._job.form.failure(error), more=False)
            return
        if self._job.stream:
            ending = self._job.form.ending(self._usage(), self._explained())
            await _send_body(send, ending, more=False)
        else:
            await self._send_whole(send)

    @property
    def _target(self) -> Target:
        return self._job.caller.target

    async def _run_in_time(self, send: Send) -> None:
        within = self._ctx.drain.within(self._ctx.settings.request_timeout_s)
        with self._ctx.traces.step("engine") as step, within:
            await self._run(send)
            step.passed(moments(self._job.runs[0].finished))

    async def _run(self, send: Send) -> None:
        """Take deltas as they come: send them on, or keep them for the whole answer."""
        began, first = time.monotonic(), True
        async with self._generation.deltas() as deltas:
            async for delta in deltas:
                if first:
                    self._ctx.metrics.observe_first_token(time.monotonic() - began)
                    first = False
                if self._job.stream:
                    await self._pass_on(delta, send)
                else:
                    self._deltas[delta.index].append(delta)

    async def _pass_on(self, delta: Delta, send: Send) -> None:
        chunks = self._job.form.chunks(delta)
        if not self._started:
            await self._start(send, STREAM_HEADERS)
            chunks = self._job.form.opening(self._choices) + chunks
        await _send_body(send, chunks)

    async def _start(self, send: Send, headers: Mapping[str, str]) -> None:
        await _send_head(send, {**headers, **self._own_headers})
        self._started = True

    async def _send_whole(self, send: Send) -> None:
        body = msgspec.json.encode(self._whole())
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, headers | as_headers(self._timings()))
        await _send_body(send, body, more=False)

    def _whole(self) -> Json:
        answers = [
            Answered(self._deltas[choice.index], run.prompt_logprobs)
            for run in self._job.runs
            for choice in run.best(self._job.returned)
        ]
        return self._job.form.whole(answers, self._usage()) | self._explained()

    def _timings(self) -> Facts:
        return timings(self._job.runs[0].finished, self._generation.cached_tokens)

    def _explained(self) -> Json:
        """How the answer came about, if that was asked for."""
        if not self._job.explain:
            return {}
        return {"loraplex": weights(self._target) | self._timings()}

    def _usage(self) -> Usage:
        ran = self._generation
        return Usage(ran.prompt_tokens, ran.completion_tokens, ran.cached_tokens)


async def _send_head(send: Send, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await _send(send, {"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await _send(send, {"type": "http.response.body", "body": body, "more_body": more})


async def _send(send: Send, message: Message) -> None:
    """Send, and say that the caller has gone in one way, whatever the server does."""
    try:
        await send(message)
    except OSError as error:
        raise ClientDisconnect from error
