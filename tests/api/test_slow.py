"""Callers who begin a request and do not end it: each hears of it, or is hung up on."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import socket
from types import NoneType, SimpleNamespace
from typing import Any

import pytest
import uvicorn
from upload_kit import PATH, begin
from uvicorn.server import ServerState

from loraplex.platform import serve
from loraplex.platform.api import slow_body
from loraplex.platform.api.envelope import MAX_JSON_BYTES, BodyLimit
from loraplex.platform.slow_head import PromptHead

pytestmark = pytest.mark.anyio
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture
def impatient(world):
    """The world, whose server gives a body a twentieth of a second."""
    context = world.app.state.context
    settings = context.settings.model_copy(update={"body_timeout_s": 0.05})
    world.app.state.context = dataclasses.replace(context, settings=settings)
    return world


@contextlib.asynccontextmanager
async def sending(world, method, path, *headers, sent=b""):
    """A request whose head and `sent` are on their way: its reader and its writer."""
    async with world.listening() as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
        lines += [f"Authorization: Bearer {world.keys['acme']}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + sent)
        try:
            yield reader, writer
        finally:
            writer.close()


async def whole_answer(reader):
    """Status, headers and body of what comes until the server hangs up."""
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("length", ["Content-Length: 99", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/keys"])
async def test_a_body_that_never_ends_is_a_408_and_the_end(impatient, path, length):
    kind = "Content-Type: application/json"
    async with sending(impatient, "POST", path, kind, length) as (reader, _):
        status, headers, body = await whole_answer(reader)
    assert (status, headers["connection"]) == (408, "close")
    kinds = (body["error"]["type"], body["error"].get("code"))
    timed_out = ("invalid_request_error", "body_timeout")
    assert kinds == (("timeout_error", None) if path == MESSAGES else timed_out)
    assert "0.05 s" in body["error"]["message"]
    assert impatient.engine.requests == []


async def test_a_byte_now_and_then_does_not_prolong_it(impatient):
    """Bytes that cross the answer reset the connection (RFC 9112, 9.6): then nothing is read."""
    headers = ("Content-Type: application/json", "Content-Length: 100000")
    async with sending(impatient, "POST", CHAT, *headers, sent=b"{") as (reader, writer):
        answer = asyncio.create_task(whole_answer(reader))
        while not answer.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
                await writer.drain()
            await asyncio.wait({answer}, timeout=0.01)
        with contextlib.suppress(ConnectionResetError):
            assert (await answer)[0] == 408
    assert impatient.engine.requests == []


async def test_an_upload_that_stops_keeps_what_had_come(impatient):
    async with impatient.client("acme") as client:
        part = f"{PATH}/{await begin(client)}/parts/archive"
        headers = ("Upload-Offset: 0", "Content-Length: 9")
        async with sending(impatient, "PUT", part, *headers, sent=b"1234") as (reader, _):
            assert (await whole_answer(reader))[0] == 408
        assert (await client.get(part)).json()["offset"] == 4


@pytest.fixture
def deadlines(monkeypatch):
    """When each timer that a body starts would ring; the clock says 0, 1, 2 and so on."""
    started: list[float] = []
    ticks = itertools.count()

    @contextlib.asynccontextmanager
    async def timeout_at(deadline):
        started.append(deadline)
        yield

    clock = SimpleNamespace(time=lambda: next(ticks))
    fake = SimpleNamespace(timeout_at=timeout_at, get_running_loop=lambda: clock)
    monkeypatch.setattr(slow_body, "asyncio", fake)
    return started


UPLOAD = MAX_JSON_BYTES + 1


@pytest.mark.parametrize(
    ("limit", "waits", "expected"),
    [
        (MAX_JSON_BYTES, (1, 2, 3, 1), [60, 60, 60]),
        (MAX_JSON_BYTES, (0, 0, 1, 1), [60]),
        (UPLOAD, (1, 2, 3, 1), [60, 61, 62]),
        (UPLOAD, (1, 0, 1, 1), [60, 61]),
        (UPLOAD, (0, 0, 0, 1), []),
    ],
)
async def test_what_is_waited_for_has_a_timer(world, deadlines, limit, waits, expected):
    """The third message ends the body; whoever waits for a fourth is not hurried any more."""
    sent = iter(enumerate(waits, 1))

    async def receive():
        number, wait = next(sent)
        for _ in range(wait):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"%d" % number, "more_body": number < 3}

    async def app(_, receive, __):
        assert [(await receive())["body"] for _ in waits] == [b"1", b"2", b"3", b"4"]

    scope = {"type": "http", "app": world.app, "state": {"body_limit": BodyLimit(limit)}}
    await slow_body.PromptBody(app)(scope, receive, None)
    assert deadlines == expected


@pytest.mark.parametrize("swallows", [False, True])
async def test_who_waits_is_told_as_without_a_timer(world, swallows):
    """An exception gets out, a cancellation gets in, and what it turns into gets out again."""
    gone = asyncio.Event()

    async def receive():
        try:
            await gone.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            if not swallows:
                raise
            return {"type": "http.disconnect"}
        raise ConnectionError

    async def app(_, receive, __):
        assert (await receive())["type"] == "http.disconnect"

    scope = {"type": "http", "app": world.app, "state": {"body_limit": BodyLimit()}}
    asked = asyncio.create_task(slow_body.PromptBody(app)(scope, receive, None))
    await asyncio.sleep(0)
    asked.cancel()
    (outcome,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(outcome, NoneType if swallows else asyncio.CancelledError)
    asked = asyncio.create_task(slow_body.PromptBody(app)(scope, receive, None))
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(ConnectionError):
        await asked


class Loop:
    """A loop whose timers are rung by hand."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def call_later(self, seconds, ring):
        timer = SimpleNamespace(seconds=seconds, ring=ring)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def create_task(self, coroutine, **_):
        return asyncio.create_task(coroutine)


class Wire(asyncio.Transport):
    """A transport that remembers whether it was closed."""

    closed = False

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def write(self, data):
        pass


@pytest.fixture
def caller():
    """A connection that has just begun, its loop, its wire, and what lets requests be answered."""
    may_answer = asyncio.Event()

    async def app(scope, receive, send):
        await may_answer.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    loop, wire, state = Loop(), Wire(), ServerState()
    config = uvicorn.Config(app, http=PromptHead, lifespan="off", log_config=None)
    protocol = PromptHead(config, state, {}, loop)
    protocol.connection_made(wire)

    async def answered():
        may_answer.set()
        await asyncio.gather(*state.tasks)
        may_answer.clear()

    return protocol, loop, wire, answered


def waits(loop):
    return [timer.seconds for timer in loop.timers]


HEAD, BYTE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"G"


async def test_a_head_that_comes_at_once_is_not_waited_for(caller):
    protocol, loop, wire, answered = caller
    assert waits(loop) == [PromptHead.head_s]
    for _ in range(2):
        protocol.data_received(HEAD)
        assert waits(loop) == []
        await answered()
        assert waits(loop) == [protocol.timeout_keep_alive]
    assert not wire.closed


@pytest.mark.parametrize("first", [b"", BYTE, b"\r\n", HEAD[:-2]])
async def test_one_that_does_not_come_ends_the_connection(caller, first):
    protocol, loop, wire, _ = caller
    for _ in range(3):
        protocol.data_received(first)
        assert waits(loop) == [PromptHead.head_s]
    loop.timers[0].ring()
    assert wire.closed
    protocol.connection_lost(None)
    assert waits(loop) == []


async def test_so_does_one_that_stops_behind_another(caller):
    protocol, loop, wire, answered = caller
    protocol.data_received(HEAD + BYTE)
    assert waits(loop) == []
    await answered()
    protocol.data_received(HEAD[1:9])
    assert waits(loop) == [PromptHead.head_s]
    protocol.data_received(HEAD[9:])
    assert waits(loop) == []
    await answered()
    assert not wire.closed


async def test_the_platform_listens_with_that_bound(world, monkeypatch):
    """By the server that `loraplex serve` makes, over a socket: half a head, then the end."""
    monkeypatch.setattr(PromptHead, "head_s", 0.05)
    monkeypatch.setattr(serve, "use_huge_pages", lambda: None)
    house = serve.House(world.settings)
    listener = socket.create_server(("127.0.0.1", 0))
    living = asyncio.create_task(house._serve(world.app, listener, []))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(HEAD[:-2])
    try:
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    finally:
        writer.close()
        house._stop()
        await living
        gc.unfreeze()
