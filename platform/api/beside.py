"""Runs work beside a block: pumps, and the watch for a caller who leaves.

A server tells an app of a disconnect only by the message that `receive` returns: a failed send is
silent or raises, depending on the server, and a generator that is being sent is not closed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive


@asynccontextmanager
async def beside(
    work: Callable[[anyio.CancelScope], Coroutine[Any, Any, object]],
) -> AsyncIterator[None]:
    """Run `work` for as long as the block runs; it gets the scope that cancels them both.

    An exception of the block is raised as it is, not in a group.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(work, group.cancel_scope)
        try:
            yield
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run the block, cancelled if the caller leaves; then raises `ClientDisconnect`.

    The request's body must have been read.
    """
    with anyio.CancelScope() as scope:
        listener = asyncio.create_task(_listen(receive, scope))
        try:
            yield
        finally:
            listener.cancel()
    if scope.cancelled_caught:
        raise ClientDisconnect


async def _listen(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
