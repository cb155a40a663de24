"""Runs an ASGI response to its end inside this process, and returns what it would have sent."""

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message


async def said_by(response: Response, request: Request) -> tuple[int, bytes]:
    """The status and the body of a response that is not sent to anyone."""
    status, body = 200, bytearray()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        body.extend(message.get("body", b""))

    await response(request.scope, request.receive, send)
    return status, bytes(body)
