"""One connection to Redis that many calls share; answers come in the order of the calls.

redis-py connects (all its URLs, TLS, passwords); from then on the bytes go straight through, which
costs a sixth of the CPU that a call through its pool does. Each call has `timeout_s` in all. After
one that passes it the connection takes no more calls, since its Redis may be gone without a word;
those that wait on it may still be answered. Calls that a connection loses are sent once more, on a
new one, within their time: so the calls that belong here are those that may run twice, as all of
the limits' scripts may.

Knows how calls find their answers; refuses to know what they ask.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as Late

_LATE: Final = "Redis does not answer in time"
_MOMENT_S: Final = 0.001
_MORE: Final = object()  # the parser's word for an answer that is not all there


class RedisLine:
    """Calls on one connection out of a client's pool, which closes it; opened when first needed."""

    def __init__(self, redis: Redis, timeout_s: float) -> None:
        self._pool, self._timeout_s = redis.connection_pool, timeout_s
        self._wire: _Wire | None = None
        self._wires: list[_Wire] = []  # this one, and those before it that are not given back
        self._opening: asyncio.Task[_Wire] | None = None

    async def call(self, *command: str | int) -> Any:
        """A command's answer. Raises `RedisError`: `ResponseError` where that is the answer."""
        return await self._call(command, self._deadline())

    async def run(self, script: "Script", keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """A script's answer; sent whole only to a Redis that does not know it. Raises the same."""
        tail, until = (len(keys), *keys, *args), self._deadline()
        try:
            return await self._call(("EVALSHA", script.sha, *tail), until)
        except NoScriptError:
            return await self._call(("EVAL", script.text, *tail), until)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _call(self, command: tuple[Any, ...], until: float) -> Any:
        packed = hiredis.pack_command(command)
        try:
            answer = await self._sent(packed, until)
        except Lost:
            answer = await self._sent(packed, until)
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    async def _sent(self, packed: bytes, until: float) -> Any:
        wire = self._wire
        if wire is None or not wire.is_open:
            wire = await self._opened(until)
        return await wire.ask(packed, until)

    async def _opened(self, until: float) -> "_Wire":
        """A new connection; all who wait for one wait for the same, each as long as it may."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_seen)
        opening, left = self._opening, until - asyncio.get_running_loop().time()
        await asyncio.wait([opening], timeout=max(0.0, left))
        if not opening.done():
            raise Late(_LATE)
        return opening.result()

    async def _open(self) -> "_Wire":
        for wire in [each for each in self._wires if each.is_over]:
            self._wires.remove(wire)
            await wire.connection.disconnect(nowait=True)
            await self._pool.release(wire.connection)
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise Lost(_LATE) from error
        self._wire = _Wire(connection)
        self._wires.append(self._wire)
        return self._wire


class Script:
    """A Lua script on a line: call it with its keys and arguments. Raises what `run` does."""

    def __init__(self, line: RedisLine, text: str) -> None:
        self._line, self.text = line, text
        self.sha: Final = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """Its answer."""
        return await self._line.run(self, keys, args)


class _Wire(asyncio.Protocol):
    """A connection that redis-py has opened, and the calls on it that have no answer yet.

    Who gives a call up leaves its place in the queue, for the answer that will come.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        if connection._writer is None:
            raise Lost("Redis closed the connection")
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._answers = hiredis.Reader(notEnoughData=_MORE, replyError=_error)
        self._transport = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self.is_over = self._transport.is_closing()
        self.is_open = not self.is_over  # for more calls

    async def ask(self, packed: bytes, until: float) -> Any:
        """A command's answer, which may be an exception. Raises `Lost`, or `Late` after `until`."""
        if not self.is_open:
            raise Lost("Redis closed the connection")
        if until <= self._loop.time():
            raise Late(_LATE)
        future = self._loop.create_future()
        self._waiting.append((until, future))
        self._transport.write(packed)
        if self._alarm is None or until < self._alarm.when():
            self._look_at(until)
        return await future

    def data_received(self, data: bytes) -> None:
        """Hand out what is answered."""
        try:
            self._answers.feed(data)
            while (answer := self._answers.gets()) is not _MORE:
                if not isinstance(answer, hiredis.PushNotification):
                    self._hand_out(answer)
        except (hiredis.ProtocolError, IndexError) as error:
            self._end(f"this is no Redis that answers: {error}")

    def _hand_out(self, answer: Any) -> None:
        _, future = self._waiting.popleft()
        if not future.done():
            future.set_result(answer)
        if not (self._waiting or self.is_open):
            self._end(_LATE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Redis, or redis-py, has closed it; redis-py's own protocol has to know, too."""
        self._end(f"Redis closed the connection: {exc or 'at its end'}")
        self._stream.connection_lost(exc)

    def _look(self, again: bool = False) -> None:
        """Tell calls that they are late, and take no more after them; look again when others are.

        It looks twice: where this process was busy for so long, their answers are in the socket.
        """
        self._alarm, now = None, self._loop.time()
        waiting = [(until, future) for until, future in self._waiting if not future.done()]
        late = [future for until, future in waiting if until <= now]
        if late and not again:
            self._alarm = self._loop.call_later(_MOMENT_S, self._look, True)
            return
        for future in late:
            self.is_open = False
            future.set_exception(Late(_LATE))
        if in_time := [until for until, _ in waiting if until > now]:
            self._look_at(min(in_time))
        elif not self.is_open:
            self._end(_LATE)

    def _look_at(self, moment: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(moment, self._look)

    def _end(self, why: str) -> None:
        """Close it; who waits may ask again."""
        if self.is_over:
            return
        self.is_open, self.is_over = False, True
        self._transport.abort()
        if self._alarm is not None:
            self._alarm.cancel()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(Lost(why))
        self._waiting.clear()


def _error(message: str) -> ResponseError:
    kind = NoScriptError if message.startswith("NOSCRIPT") else ResponseError
    return kind(message)


def _seen(opening: "asyncio.Task[_Wire]") -> None:
    """Nobody may be left who waits for it."""
    if not opening.cancelled():
        opening.exception()
