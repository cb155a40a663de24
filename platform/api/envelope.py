"""What surrounds every request and response: an id, limits on hosts and bodies, safe headers.

Plain ASGI middleware, so that a route sees a disconnect when it happens. Refuses to know routes:
nothing here decides on a path.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.api.failures import response_to
from loraplex.platform.errors import BadRequest, InternalError
from loraplex.platform.ids import new_id
from loraplex.platform.metrics import Metrics

MAX_JSON_BYTES = 4 << 20
CLIENT_GONE = 499  # as nginx counts a caller who left before the answer
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
}

log = logging.getLogger("loraplex.api")


class Envelope:
    """Names each request, counts it, adds safe headers, and answers for unknown exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; only HTTP is wrapped."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE
        started = time.monotonic()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(message, request_id)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            log.info("request %s: the caller left", request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if status == CLIENT_GONE:
                await response_to(InternalError(request_id))(scope, receive, send_named)
            else:
                raise
        finally:
            elapsed = time.monotonic() - started
            self._metrics.count_request(scope["method"], _route(scope), status, elapsed)


def _add_headers(message: Message, request_id: str) -> None:
    headers = MutableHeaders(raw=message["headers"])
    headers["x-request-id"] = request_id
    for name, value in SAFE_HEADERS.items():
        headers.setdefault(name, value)


def _route(scope: Scope) -> str:
    """The template of the route that matched, a bounded set; never the path itself."""
    return str(getattr(scope.get("route"), "path", "unmatched"))


class AllowedHosts:
    """Refuses a request whose Host is not one of ours, as when a site rebinds its name to us."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        if scope["type"] == "http" and "*" not in self._hosts:
            host = Headers(scope=scope).get("host", "")
            if _without_port(host).lower() not in self._hosts:
                refusal = BadRequest(
                    "This server does not answer to this Host. Call it by an address it listens on."
                )
                await response_to(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


@dataclass
class BodyLimit:
    """How many bytes the current request's body may have; a route may raise it before reading."""

    bytes: int = MAX_JSON_BYTES


class BoundedBody:
    """Counts the bytes of each body as they come, and ends the request when they are too many.

    The limit is the `BodyLimit` in the request's state, read when the body is.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = scope.setdefault("state", {})["body_limit"] = BodyLimit()
        received = 0

        async def receive_bounded() -> Message:
            nonlocal received
            if _announced(scope) > limit.bytes:
                raise _too_large(limit.bytes)
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit.bytes:
                raise _too_large(limit.bytes)
            return message

        await self._app(scope, receive_bounded, send)


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"The body is larger than the limit of {limit} bytes.")
