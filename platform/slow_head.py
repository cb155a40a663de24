"""Uvicorn's protocol, with a bound on how long a request's first line and headers may take.

Uvicorn bounds the silence between two requests, and nothing before the first or within the headers
of one: a caller who sends a byte now and then would hold a connection for ever. A request that
comes at once, as nearly all do, starts no timer. Refuses to know what is asked and answered.
"""

from asyncio import TimerHandle, Transport
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PromptHead(HttpToolsProtocol):
    """Closes a connection, without a word, on which no request begins within `head_s` seconds."""

    head_s: ClassVar[float] = 20.0
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """The first request is awaited."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, unless these bytes complete a head or belong to a body."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
