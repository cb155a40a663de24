"""Of several who do the same thing at once, the latest goes on, and those before it end.

Knows tasks of this process; refuses to know what they do.
"""

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from loraplex.platform.errors import StillRunning


@dataclass
class _Turn:
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class Latest:
    """Turns by name."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn] = {}

    @asynccontextmanager
    async def latest(self, name: Hashable) -> AsyncIterator[None]:
        """End who has this turn, then take it; raises `StillRunning` when a later one ends us."""
        while (before := self._turns.get(name)) is not None:
            before.scope.cancel()
            await before.ended.wait()
        mine = self._turns[name] = _Turn()
        try:
            with mine.scope:
                yield
        finally:
            del self._turns[name]
            mine.ended.set()
        if mine.scope.cancelled_caught:
            raise StillRunning("A later request goes on with this.")
