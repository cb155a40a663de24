"""Reaches an engine process on this machine over ZeroMQ, and survives it.

A life is one connection, from the engine's `Ready` to its end. The end is seen by the socket's
monitor: at once when the process dies, after `silence_s` of unanswered heartbeats when it is
frozen. An engine that says nothing for `stall_s`, far longer than any step, is given up too. Then
every request in flight fails with "engine_died" and a fresh socket waits for the next life.

Messages go past PyZMQ's futures, which took 0.2 ms of processor time a step: on a small machine
that is time taken from the engine.

This file knows messages and sockets; it refuses to know who starts an engine and what text is.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable

import zmq
import zmq.asyncio

from loraplex.engine.protocol import (
    Abort,
    CacheEvents,
    Event,
    Failed,
    FailureCode,
    Finished,
    FromEngine,
    Generate,
    Hello,
    Message,
    Ping,
    Prefetch,
    Ready,
    Stats,
    decode_from_engine,
    encode,
)

PING_S = 1.0  # between two signs of life
PAUSE_S = 0.05  # between two lives
GOODBYE_S = 0.2  # for the last messages of a client that closes

log = logging.getLogger(__name__)

_Answers = asyncio.Queue[Event]
_Line = zmq.Socket[bytes]


class _EngineGone(Exception):
    """The connection's engine is not there any more."""


class LocalEngine:
    """An `EngineClient` for the engine process that is, or will be, bound at `endpoint`."""

    def __init__(self, endpoint: str, *, silence_s: float = 10.0, stall_s: float = 300.0) -> None:
        self._endpoint, self._silence_s, self._stall_s = endpoint, silence_s, stall_s
        self._context = zmq.asyncio.Context()
        self._info: Ready | None = None
        self._stats = Stats()
        self._is_ready = asyncio.Event()
        self._outgoing: deque[Message] = deque()
        self._stirred = asyncio.Event()  # there may be something to say or to hear
        self._heard = 0.0  # when the engine last said something, in the loop's time
        self._answers: dict[str, _Answers | None] = {}  # None: aborted, its end not heard yet
        self._task: asyncio.Task[None] | None = None
        self.cache_listener: Callable[[CacheEvents], None] = lambda events: None

    @property
    def info(self) -> Ready | None:
        """Who the engine is; None while none is ready."""
        return self._info

    @property
    def stats(self) -> Stats:
        """The engine's last `Stats`; all zero while none is ready."""
        return self._stats

    async def start(self) -> None:
        """Begin to look for an engine; returns at once."""
        self._task = asyncio.create_task(self._live())

    async def close(self) -> None:
        """Abort what is in flight, which fails with "engine_unavailable", and let go."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await asyncio.to_thread(self._context.term)

    async def wait_ready(self, timeout: float) -> Ready:  # noqa: ASYNC109
        """Wait until an engine is ready, at most `timeout` seconds; raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            while self._info is None:
                await self._is_ready.wait()
        return self._info

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Run a request; see `EngineClient.generate`."""
        name = request.request_id
        if self._info is None:
            yield Failed(name, "engine_unavailable", "no engine is ready; try again soon")
            return
        if name in self._answers:
            yield Failed(name, "invalid_request", "a request with this id is in flight")
            return
        answers: _Answers = asyncio.Queue()
        self._answers[name] = answers
        self._say(request)
        ended = False
        try:
            while not ended:
                event = await answers.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if self._answers.get(name) is answers:
                self._answers[name] = None
                self._say(Abort(name))

    async def abort(self, request_id: str, index: int) -> None:
        """End one choice of a request; see `EngineClient.abort`."""
        self._say(Abort(request_id, index))

    async def prefetch(self, image: str) -> None:
        """Have an image brought near; see `EngineClient.prefetch`."""
        if self._info is not None:
            self._say(Prefetch(image))

    async def _live(self) -> None:
        while True:
            await self._life()
            await asyncio.sleep(PAUSE_S)

    async def _life(self) -> None:
        """One connection, until its engine is gone or this client closes."""
        socket = self._connect()
        line: _Line = zmq.Socket.shadow(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        code: FailureCode = "engine_unavailable"
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._converse(line))
                group.create_task(self._live_on())
                group.create_task(self._watch(monitor))
        except* Exception as group:
            code = "engine_died"
            self._log_end(group)
        finally:
            self._end_life(line, code)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()

    def _connect(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        socket.setsockopt(zmq.LINGER, int(GOODBYE_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(int(self._silence_s * 1000 / 4), 1))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._silence_s * 1000))
        socket.connect(self._endpoint)
        return socket

    async def _converse(self, line: _Line) -> None:
        """Say hello, and then hear what comes and say what is to be said.

        ZeroMQ's descriptor tells of news once, and any call may take it: ask for the state after.
        """
        loop, descriptor = asyncio.get_running_loop(), int(line.getsockopt(zmq.FD))
        self._outgoing.appendleft(Hello())
        loop.add_reader(descriptor, self._stirred.set)
        try:
            while True:
                self._stirred.clear()
                self._send(line)
                self._receive(line)
                state = int(line.getsockopt(zmq.EVENTS))
                if not (state & zmq.POLLIN or (self._outgoing and state & zmq.POLLOUT)):
                    await self._stirred.wait()
        finally:
            loop.remove_reader(descriptor)

    def _say(self, message: Message) -> None:
        self._outgoing.append(message)
        self._stirred.set()

    def _send(self, line: _Line) -> None:
        """Send what is outgoing, as much as the connection takes."""
        with contextlib.suppress(zmq.Again):
            while self._outgoing:
                line.send(encode(self._outgoing[0]), zmq.NOBLOCK)
                self._outgoing.popleft()

    def _receive(self, line: _Line) -> None:
        """Hear what has come."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = line.recv_multipart(zmq.NOBLOCK)
                self._heard = asyncio.get_running_loop().time()
                for frame in frames:
                    self._hear(decode_from_engine(frame))

    async def _live_on(self) -> None:
        """Give signs of life, and listen for the engine's."""
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        while loop.time() - self._heard < self._stall_s:
            await asyncio.sleep(PING_S)
            if not self._outgoing:
                self._say(Ping())
        raise _EngineGone

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        raise _EngineGone

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._info = message
            self._is_ready.set()
        elif isinstance(message, Stats):
            self._stats = message
        elif isinstance(message, CacheEvents):
            self.cache_listener(message)
        else:
            self._answer(message)

    def _answer(self, event: Event) -> None:
        answers = self._answers.get(event.request_id)
        if isinstance(event, Finished | Failed):
            self._answers.pop(event.request_id, None)
        if answers is not None:
            answers.put_nowait(event)

    def _end_life(self, line: _Line, code: FailureCode) -> None:
        """Give each request in flight its terminal event; tell a living engine to drop them."""
        living = code == "engine_unavailable" and self._info is not None
        self._outgoing.clear()
        for name, answers in self._answers.items():
            if answers is not None:
                answers.put_nowait(Failed(name, code, _REASONS[code]))
            if living:
                self._outgoing.append(Abort(name))
        self._send(line)
        self._outgoing.clear()
        self._answers.clear()
        self._info, self._stats = None, Stats()
        self._is_ready.clear()

    def _log_end(self, group: ExceptionGroup[Exception]) -> None:
        expected = all(isinstance(e, _EngineGone) for e in group.exceptions)
        if not expected:
            log.error("the engine's connection failed", exc_info=group)
        elif self._info is not None:
            log.warning("the engine is gone; %d requests end", len(self._answers))


_REASONS: dict[FailureCode, str] = {
    "engine_died": "the engine stopped while it ran this request; it is safe to try again",
    "engine_unavailable": "the connection to the engine was closed",
}
