"""Starts the whole platform, says when it is ready, and ends it in order.

Knows what comes first: what is quick to check (the data directory, the port, the base), and then
the parts, which are imported only now, since that takes seconds. Refuses to know the parts. The
engine and Redis are child processes in sessions of their own, so a Ctrl-C reaches this process
alone, which drains requests first and then ends them.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from socket import socket
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from loraplex.engine.images import BaseManifest
from loraplex.platform import boot, logs
from loraplex.platform.boot import BASE_NAME
from loraplex.platform.console import LoggedSteps, Steps
from loraplex.platform.drain import Drain
from loraplex.platform.huge_pages import use_huge_pages
from loraplex.platform.redaction import Redactor
from loraplex.platform.settings import Settings
from loraplex.platform.slow_head import PromptHead

if TYPE_CHECKING:
    from fastapi import FastAPI

    from loraplex.platform.opening import Opening

CUT_S = 5  # seconds for requests that are told that their time is over
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104 (compared with)

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

    async def _start(self) -> "tuple[FastAPI, socket, list[str]]":
        """Open every part; return the app, the socket to listen on and the lines to print."""
        settings, stack = self._settings, self._stack
        stack.enter_context(boot.claim(settings))
        self._redactor.learn(settings.pepper().decode(), settings.scope_key().decode())
        listener = stack.enter_context(boot.listen(settings.host, settings.port))
        opening = self._opening(await self._prepare())
        host = WILDCARDS.get(settings.host, settings.host)
        app, lines = await opening.open(f"http://{host}:{listener.getsockname()[1]}")
        return app, listener, lines

    async def _prepare(self) -> BaseManifest:
        model, name = boot.choose_model(self._settings, self._base_file.parent)
        with self._steps.step(f"preparing {model}") as report:
            return await boot.prepare(model, self._base_file.parent, self._name or name, report)

    def _opening(self, base: BaseManifest) -> "Opening":
        from loraplex.platform.opening import Opening

        settings, steps = self._settings, self._steps
        return Opening(
            settings, base, self._base_file, steps=steps, stack=self._stack, drain=self._drain
        )

    async def _serve(self, app: "FastAPI", listener: socket, lines: list[str]) -> None:
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
