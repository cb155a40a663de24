"""What surrounds every request and response: an id, a line of log, bounds, safe headers.

Plain ASGI middleware, so that a route sees a disconnect when it happens. Refuses to know routes:
nothing here decides on a path.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.api.failures import response_to
from loraplex.platform.drain import Drain
from loraplex.platform.errors import BadRequest, InternalError
from loraplex.platform.ids import new_id
from loraplex.platform.logs import Facts, access, begin_request
from loraplex.platform.metrics import Metrics
from loraplex.platform.traces import Served, Traces

MAX_JSON_BYTES = 4 << 20
CLIENT_GONE = 499  # as nginx counts a caller who left before the answer
REQUEST_IDS = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", POLICY),
)

log = logging.getLogger("loraplex.api")


class Envelope:
    """Names each request, counts and logs it, adds safe headers, answers for unknown exceptions."""

    def __init__(self, app: ASGIApp, metrics: Metrics, drain: Drain, traces: Traces) -> None:
        self._app, self._metrics = app, metrics
        self._drain, self._traces = drain, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; only HTTP is wrapped."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = Seen(scope, begin_request(new_id("req")))
        scope.setdefault("state", {})["request_id"] = seen.facts.request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                self._add_headers(message, seen)
            await send(message)

        with self._drain.request(), self._traces.request(scope["headers"]) as seen.span:
            try:
                await self._answer(scope, receive, send_named, seen)
            finally:
                self._report(seen)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, seen: "Seen") -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            log.debug("the caller left")
        except Exception:
            log.exception("request %s failed", seen.facts.request_id)
            if seen.status != CLIENT_GONE:
                raise
            await response_to(InternalError(seen.facts.request_id), scope)(scope, receive, send)

    def _add_headers(self, message: Message, seen: "Seen") -> None:
        headers: list[tuple[bytes, bytes]] = message["headers"]
        given = {name for name, _ in headers}
        request_id = seen.facts.request_id.encode()
        headers += ((name, request_id) for name in REQUEST_IDS)
        if seen.span.header:
            headers.append((b"traceresponse", seen.span.header.encode()))
        headers += ((name, value) for name, value in SAFE_HEADERS if name not in given)
        if self._drain.begun:
            headers.append((b"connection", b"close"))

    def _report(self, seen: "Seen") -> None:
        """One access line, one count and one span for each request, however it ended."""
        elapsed, route = time.monotonic() - seen.started, _route(seen.scope)
        method = seen.scope["method"]
        self._metrics.count_request(method, route, seen.status, elapsed)
        seen.span.end(method, route, seen.status, seen.facts.fields)
        level = logging.DEBUG if _is_probe(seen) else logging.INFO
        if access.isEnabledFor(level):
            milliseconds = round(elapsed * 1000, 1)
            what = {"method": method, "route": route, "status": seen.status, "ms": milliseconds}
            fields = what | seen.facts.fields
            access.log(level, "%s %s %s", method, route, seen.status, extra={"fields": fields})


@dataclass
class Seen:
    """One request from its start to its end; without an answer, its caller has gone."""

    scope: Scope
    facts: Facts
    status: int = CLIENT_GONE
    started: float = field(default_factory=time.monotonic)
    span: Served = field(default_factory=Served)


def _is_probe(seen: Seen) -> bool:
    """Whether it is a good answer to a machine that asks every few seconds, which nobody reads."""
    return seen.status == 200 and "health" in getattr(seen.scope.get("route"), "tags", ())


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
                await response_to(refusal, scope)(scope, receive, send)
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
        received, announced = 0, _announced(scope)

        async def receive_bounded() -> Message:
            nonlocal received
            if announced > limit.bytes:
                raise _too_large(limit.bytes)
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit.bytes:
                raise _too_large(limit.bytes)
            return message

        await self._app(scope, receive_bounded, send)


def _announced(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length) if length.isdigit() else 0


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"The body is larger than the limit of {limit} bytes.")
