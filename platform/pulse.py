"""Calls something now and then, until it is stopped; a timer, and a task only while it calls.

Most requests are over before the first call, and a timer costs them next to nothing. Knows a
clock; refuses to know what it calls.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Pulse:
    """Runs what `make` makes `every_s` seconds after the last run, in the running event loop."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        self._make, self._every_s = make, every_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(every_s, self._begin)

    def stop(self) -> None:
        """Call no more, and cancel the call that is running."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._beat())

    async def _beat(self) -> None:
        await self._make()
        self._timer = self._loop.call_later(self._every_s, self._begin)
