"""`Idempotency-Key` for every POST that changes something: sent twice, it is done once.

The answer of the first is kept for 24 hours for the key's holder, unless it is a 5xx or one that
time or rights may change (400, 401, 403, 408, 429); then the request may be sent again. What counts
as the same request is the method, the path with its query, the content's type and all bytes of the
body, of a form without its boundary, which clients choose anew each time. They are kept as a hash
under the pepper, since a body may hold a password.

`Remember` is middleware that sees bodies and answers pass; `once` is the dependency that finds out
who asks. Refuses to decide on paths, and to keep an answer that is not a JSON object.
"""

import asyncio
import contextlib
import hashlib
import re
from typing import Any, Final, cast

import anyio
import msgspec
from fastapi import FastAPI, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform import idempotency
from loraplex.platform.api.auth import identify
from loraplex.platform.api.context import Context, get_context
from loraplex.platform.errors import ApiError, BadRequest, IdempotencyMismatch, Unavailable
from loraplex.platform.idempotency import LEASE_S, Claim, Kept

HEADER: Final = "idempotency-key"
REPLAYED: Final = "idempotency-replayed"
NAME: Final = re.compile(r"[\x20-\x7e]{1,255}")
PASSING: Final = frozenset({400, 401, 403, 408, 429})
MAX_ANSWER: Final = 1 << 20


class Fingerprint:
    """A digest of a request: of what it asks for, and of its body as it is read."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        kind, options = parse_options_header(headers.get("content-type", ""))
        self._cut = options.get(b"boundary", b"") if kind == b"multipart/form-data" else b""
        self._hash = hashlib.sha256()
        for said in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], kind):
            self._hash.update(len(said).to_bytes(8) + said)
        self._tail = b""
        self.is_whole = headers.get("content-length", "0") == "0" and (
            "transfer-encoding" not in headers
        )

    def see(self, message: Message) -> None:
        """Take the next piece of the body."""
        if message["type"] != "http.request":
            return
        data = self._tail + message.get("body", b"")
        if self._cut:
            data = data.replace(self._cut, b"")
        self.is_whole = not message.get("more_body", False)
        keep = 0 if self.is_whole else max(0, len(self._cut) - 1)
        at = len(data) - min(keep, len(data))
        self._hash.update(data[:at])
        self._tail = data[at:]

    @property
    def text(self) -> str:
        """In hex, once the body is whole."""
        return self._hash.hexdigest()


class Replay(Exception):
    """The request was answered before."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept


class Record:
    """One named request on its way through the app."""

    def __init__(self, scope: Scope, ctx: Context) -> None:
        self.name = Headers(scope=scope)[HEADER]
        self.claim: Claim | None = None
        self.fingerprint = Fingerprint(scope)
        self._ctx, self._renewing = ctx, anyio.Lock()
        self._renewal: asyncio.Task[None] | None = None

    def begin(self, claim: Claim) -> None:
        """The request is this one's to answer."""
        self.claim = claim
        self._renewal = asyncio.create_task(self._renew())

    async def end(self, status: int, body: bytes) -> None:
        """Keep the answer if it is one to keep, else forget the request; once."""
        async with self._renewing:
            claim, self.claim = self.claim, None
            if self._renewal is not None:
                self._renewal.cancel()
            if claim is None:
                return
            answer = self._to_keep(status, body)
            with contextlib.suppress(Unavailable):  # then the lease ends by itself
                async with self._ctx.db.session(None) as session:
                    if answer is None:
                        await idempotency.drop(session, claim)
                    else:
                        await idempotency.keep(session, claim, answer)

    def _to_keep(self, status: int, body: bytes) -> Kept | None:
        if status >= 500 or status in PASSING or not self.fingerprint.is_whole:
            return None
        try:
            said = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:
            return None
        hashed = self._ctx.keys.peppers.digest(self.fingerprint.text)
        return Kept(hashed, status, said)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            async with self._renewing:
                if self.claim is None:
                    return
                with contextlib.suppress(Unavailable):
                    async with self._ctx.db.session(None) as session:
                        self.claim = await idempotency.renew(session, self.claim)


async def once(request: Request) -> None:
    """A dependency of routes that change something; does nothing without the header.

    Raises `IdempotencyMismatch`, `StillRunning`, and `Replay` with the answer that was kept.
    """
    record: Record | None = getattr(request.state, "record", None)
    if record is None:
        return
    if not NAME.fullmatch(record.name):
        raise BadRequest(
            "An Idempotency-Key has 1 to 255 printable ASCII characters.", param="Idempotency-Key"
        )
    try:
        actor = (await identify(request)).key_id
    except ApiError:  # a route that is open to strangers remembers none
        return
    ctx = get_context(request)
    async with ctx.db.session(None) as session:
        found = await idempotency.claim(session, actor, record.name)
    if isinstance(found, Claim):
        record.begin(found)
        return
    request.state.body_limit.bytes = max(request.state.body_limit.bytes, ctx.gate.max_bytes)
    async for _ in request.stream():
        pass
    if not ctx.keys.peppers.verify(record.fingerprint.text, found.fingerprint):
        raise IdempotencyMismatch
    raise Replay(found)


class Remember:
    """Lets a `Record` see the body and the answer of each POST that has an `Idempotency-Key`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or _unnamed(scope):
            await self._app(scope, receive, send)
            return
        record = Record(scope, scope["app"].state.context)
        scope.setdefault("state", {})["record"] = record
        answer = _Answer(record, send)

        async def receive_seen() -> Message:
            message = await receive()
            record.fingerprint.see(message)
            return message

        try:
            await self._app(scope, receive_seen, answer.send)
        finally:
            with anyio.CancelScope(shield=True):
                await record.end(500, b"")


class _Answer:
    """Holds an answer back until it is kept, so that whoever has it can rely on that."""

    def __init__(self, record: Record, send: Send) -> None:
        self._record, self._send = record, send
        self._held: list[Message] = []
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Pass a message on, now or with the last one."""
        if self._record.claim is None:
            await self._send(message)
            return
        self._held.append(message)
        self._body += message.get("body", b"")
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last:
            await self._record.end(self._held[0]["status"], bytes(self._body))
        elif len(self._body) > MAX_ANSWER:
            await self._record.end(500, b"")
        else:
            return
        for held in self._held:
            await self._send(held)


def _unnamed(scope: Scope) -> bool:
    return HEADER not in Headers(scope=scope)


def install(app: FastAPI) -> None:
    """Remember answers, and give those that were given before with a header that says so."""
    app.add_middleware(Remember)
    app.add_exception_handler(Replay, _replay)


async def _replay(_: Request, error: Exception) -> Response:
    kept = cast("Replay", error).kept
    return JSONResponse(kept.body, status_code=kept.status, headers={REPLAYED: "true"})
