"""Starts the whole platform in order, says when it is ready, and ends it in order.

Knows which part needs which; refuses to know how any of them works. The engine and Redis are
child processes in sessions of their own, so a Ctrl-C reaches this process alone, which drains
requests first and then ends them.
"""

import asyncio
import contextlib
import gc
import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from socket import socket
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
from loraplex.platform import boot, demo, logs, parts
from loraplex.platform.app import create_app
from loraplex.platform.boot import BASE_NAME, StartError
from loraplex.platform.console import LoggedSteps, Report, Steps
from loraplex.platform.credentials import Credentials
from loraplex.platform.drain import Drain
from loraplex.platform.huge_pages import use_huge_pages
from loraplex.platform.key_cache import KeyCache
from loraplex.platform.keys import KeyRing
from loraplex.platform.redaction import Redactor
from loraplex.platform.settings import Settings
from loraplex.platform.slow_head import PromptHead
from loraplex.platform.upload_desk import Uploads

CUT_S = 5  # seconds for requests that are told that their time is over
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104 (compared with)
LOG_PREFIX = re.compile(r"^\S+Z INFO \S+ ")  # time, level and logger
REPORT = re.compile(r"^\S+Z (INFO|WARNING) engine\.report ")  # of memory, and advice

log = logging.getLogger("loraplex.serve")


def run(settings: Settings, name: str | None = None) -> None:
    """Serve until SIGINT or SIGTERM; raises `StartError` when it cannot begin.

    `name` is what the API calls the base; by default the model's own name.
    """
    live(House(settings, name))


def live(house: "House") -> None:
    """Run a house until it is told to stop; raises `StartError`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(house.live())


class Server(uvicorn.Server):
    """Uvicorn, with the signals left to us and a call once it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the house has its own handlers."""
        yield

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._on_started()


class House:
    """One life of the platform: it starts, serves and ends; what was opened last ends first."""

    def __init__(self, settings: Settings, name: str | None = None) -> None:
        self._settings, self._name = settings, name
        self._redactor = Redactor(*settings.given_secrets)
        self._base_file = boot.base_dir(settings) / BASE_NAME
        self._logged = settings.log_format == "json"
        self._steps = LoggedSteps() if self._logged else Steps(redact=self._redactor)
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._drain = Drain()
        self._draining: asyncio.Task[None] | None = None
        self._engine_report: Report = lambda line: None

    async def live(self) -> None:
        """Serve until told to stop; raises `StartError`."""
        self._starting = asyncio.current_task()
        logs.configure(self._settings.log_format, self._settings.log_level, self._redactor)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        async with self._stack:
            await self._serve(*await self._start())

    def _stop(self) -> None:
        """Leave the start, or drain the server; told again, drop what is still in flight."""
        if self._server is None:
            if self._starting is not None:
                self._starting.cancel()
                self._starting = None
        elif self._draining is None:
            self._draining = asyncio.create_task(self._end_requests(self._server))
        else:
            self._server.force_exit = self._server.should_exit = True

    async def _end_requests(self, server: Server) -> None:
        """Refuse what is new, wait for what is in flight, cut what takes too long, then close."""
        log.info("stopping: requests in flight have %g s", self._settings.drain_s)
        self._drain.begin()
        if not await self._drain.idle(self._settings.drain_s):
            log.warning("requests in flight are ended, since their time is over")
            self._drain.cut()
            await self._drain.idle(CUT_S)
        server.should_exit = True

    async def _start(self) -> tuple[FastAPI, socket, list[str]]:
        """Open every part; return the app, the socket to listen on and the lines to print."""
        settings, steps, stack = self._settings, self._steps, self._stack
        stack.enter_context(boot.claim(settings))
        self._redactor.learn(settings.pepper().decode(), settings.scope_key().decode())
        listener = stack.enter_context(boot.listen(settings.host, settings.port))
        base = await self._prepare()
        with steps.step("opening the database"):
            db = await parts.open_database(settings, stack)
        with steps.step("opening Redis"):
            redis = await parts.open_redis(settings, stack)
        limiter = parts.open_limits(settings, redis, db, stack)
        books = parts.keep_books(settings, redis, db, limiter, stack)
        engine = await self._start_engine()
        await parts.note_base(settings, db, base, engine)
        prefixes = parts.keep_prefix_state(redis, engine, stack)
        keys = KeyRing(settings.pepper(), settings.old_peppers(), KeyCache())
        gate = parts.make_gate(settings, base, self._base_file, db)
        parts.keep_images(settings, redis, db, gate, stack)
        app = make_app(
            settings,
            base=base,
            db=db,
            keys=keys,
            limiter=limiter,
            books=books,
            engine=engine,
            gate=gate,
            prefixes=prefixes,
            drain=self._drain,
            traces=parts.open_traces(settings, stack),
        )
        host = WILDCARDS.get(settings.host, settings.host)
        url = f"http://{host}:{listener.getsockname()[1]}"
        uploads = app.state.context.uploads
        parts.keep_uploads(uploads, stack)
        parts.keep_history(app.state.context, stack)
        return app, listener, await self._welcome(uploads, keys, url)

    async def _prepare(self) -> BaseManifest:
        model, name = boot.choose_model(self._settings, self._base_file.parent)
        with self._steps.step(f"preparing {model}") as report:
            return await boot.prepare(model, self._base_file.parent, self._name or name, report)

    async def _start_engine(self) -> EngineClient:
        with self._steps.step("starting the engine") as self._engine_report:
            engine = await parts.start_engine(
                self._settings, self._base_file, self._hear_engine, self._stack
            )
        self._engine_report = self._steps.say
        return engine.client

    async def _welcome(self, uploads: Uploads, keys: KeyRing, url: str) -> list[str]:
        """See that a newcomer finds keys and adapters; return the banner."""
        gate = uploads.gate
        with self._steps.step("publishing the example adapters") as report:
            found = await demo.ensure_credentials(gate.db, keys, self._base_file.parents[1], url)
            await demo.publish_examples(uploads, found.tenant_id, report)
        names = await demo.adapter_names(gate.db, found.tenant_id)
        return banner(found, names, gate.base.name, await demo.first_sign_in(gate.db, keys))

    def _hear_engine(self, line: str) -> None:
        """Show the engine's log: as it is once it runs, without its prefix while it starts.

        What the start reports of memory is to stay, where other lines are replaced by the next.
        """
        if self._logged:
            logs.relay(line)
        elif self._server is not None:
            self._engine_report(line)
        elif REPORT.match(line):
            self._steps.say(f"  {REPORT.sub('', line)}")
        else:
            self._engine_report(LOG_PREFIX.sub("", line))

    async def _serve(self, app: FastAPI, listener: socket, lines: list[str]) -> None:
        config = uvicorn.Config(
            app,
            http=PromptHead,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CUT_S,
        )
        gc.collect()
        gc.freeze()  # what a start made stays: looking through it again and again is for nothing
        use_huge_pages()
        self._server = Server(config, lambda: self._announce(lines))
        await self._server.serve([listener])

    def _announce(self, lines: list[str]) -> None:
        """Tell a newcomer how to begin; but what machines collect gets no keys."""
        if self._logged:
            log.info("serving", extra={"fields": {"url": lines[0].removeprefix("API: ")}})
        else:
            print(*lines, sep="\n", flush=True)


def make_app(settings: Settings, **collaborators: Any) -> FastAPI:
    """Make the app; raises `StartError` for a base whose tokenizer cannot be read."""
    try:
        return create_app(settings, **collaborators)
    except (OSError, ValueError) as error:
        raise StartError(f"The model cannot be served: {error}") from error


def banner(
    found: Credentials, adapters: list[str], base_name: str, code: str | None = None
) -> list[str]:
    """Return what a newcomer needs, a line each, the last one a command to paste.

    `code` signs the first operator in once.
    """
    model = adapters[0] if adapters else base_name
    body = (
        f'{{"model": "{model}", "max_tokens": 60, "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return [
        f"API: {found.url}/v1",
        f"API key: {found.api_key}",
        f"Operator key: {found.operator_key}",
        f"Adapters: {', '.join(adapters) or 'none'}",
        f"Admin: {found.url}/admin",
        *([f"First sign-in: {demo.OPERATOR}, with the one-time code {code}"] if code else []),
        f"curl {found.url}/v1/chat/completions -H 'Authorization: Bearer {found.api_key}' "
        f"-H 'Content-Type: application/json' -d '{body}'",
    ]
