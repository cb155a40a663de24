"""Ends a request whose body does not come.

A body of JSON has so many seconds in all. One that may be larger, an upload, has them anew with
each message, since how long all of it takes is the caller's line's affair. What is there at once,
as nearly every body is, starts no timer; and once a body is whole, whoever waits for the caller to
leave waits as long as it takes.
"""

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.api.envelope import MAX_JSON_BYTES, BodyLimit
from loraplex.platform.errors import BodyTimedOut

Receiving = Coroutine[Any, Any, Message]


class PromptBody:
    """Gives bodies `body_timeout_s`; inside of `BoundedBody`, whose limit tells uploads apart."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit: BodyLimit = scope["state"]["body_limit"]
        seconds: float = scope["app"].state.context.settings.body_timeout_s
        deadline: float | None = None
        whole = False

        async def receive_promptly() -> Message:
            nonlocal deadline, whole
            if whole:
                return await receive()
            receiving = cast("Receiving", receive())
            try:
                waits_for = receiving.send(None)
            except StopIteration as done:
                message: Message = done.value
            else:
                if deadline is None or limit.bytes > MAX_JSON_BYTES:
                    deadline = asyncio.get_running_loop().time() + seconds
                message = await _until(deadline, _Resumed(receiving, waits_for), seconds)
            whole = not message.get("more_body", False)
            return message

        await self._app(scope, receive_promptly, send)


class _Resumed:
    """Awaits what is left of a coroutine that has run up to its first wait, for `waits_for`."""

    def __init__(self, rest: Receiving, waits_for: Any) -> None:
        self._rest, self._waits_for = rest, waits_for

    def __await__(self) -> Generator[Any, Any, Message]:
        rest, waits_for = self._rest, self._waits_for
        while True:
            try:
                got = yield waits_for
            except BaseException as error:
                go_on = partial(rest.throw, error)
            else:
                go_on = partial(rest.send, got)
            try:
                waits_for = go_on()
            except StopIteration as done:
                return cast("Message", done.value)


async def _until(deadline: float, rest: _Resumed, seconds: float) -> Message:
    """FastAPI lets only its own exceptions out of the reading of a body; ours is the cause."""
    try:
        async with asyncio.timeout_at(deadline):
            return await rest
    except TimeoutError:
        raise HTTPException(BodyTimedOut.status) from BodyTimedOut(
            f"The body did not come in time: it has {seconds:g} s. Send the request again, with as "
            "many bytes as it announces.",
            headers={"connection": "close"},
        )
