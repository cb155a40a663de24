"""How a server ends: no new work, what is in flight may finish, and what does not is told so.

Knows how many requests are in flight and which of them can be cut short; refuses to know signals,
sockets and what requests are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from loraplex.platform.errors import ServerStopping, TimedOut


class Drain:
    """Open at first; `begin` refuses what is new, `cut` ends what is still in flight."""

    def __init__(self) -> None:
        self.begun = False
        self._cut = False
        self._in_flight = 0
        self._idle = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self.begun and not self._in_flight:
                self._idle.set()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Run the block for at most so long; raises `TimedOut`, or `ServerStopping` if cut."""
        with anyio.move_on_after(seconds) as scope:
            self._scopes.add(scope)
            try:
                self.check_cut()
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            self.check_cut()
            raise TimedOut(f"The generation took longer than {seconds:g} s.")

    def check_open(self) -> None:
        """Raises `ServerStopping` once the server takes nothing new."""
        if self.begun:
            raise ServerStopping

    def check_cut(self) -> None:
        """Raises `ServerStopping` once what is in flight has had its time."""
        if self._cut:
            raise ServerStopping

    def begin(self) -> None:
        """Take nothing new from now on."""
        self.begun = True
        if not self._in_flight:
            self._idle.set()

    def cut(self) -> None:
        """End what is in flight, each with an error to its caller."""
        self.begun = self._cut = True
        for scope in self._scopes:
            scope.cancel()

    async def idle(self, seconds: float) -> bool:
        """Wait until nothing is in flight, at most so long; whether that came."""
        with anyio.move_on_after(seconds):
            await self._idle.wait()
        return self._in_flight == 0
