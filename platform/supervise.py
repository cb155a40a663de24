"""Keeps one child process alive: starts it, reads its lines, starts it again when it dies.

Knows a command line and lines of text; refuses to know what the child is for.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

KEPT_LINES = 20
USER_ERROR = 2  # the exit code of a child that cannot start as it was told to: no use to try again
NOT_STARTED = 127  # as a shell would say it


class State(StrEnum):
    """Where the child's life stands."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"  # it died; the next one starts after a delay
    FAILED = "failed"  # it never got ready and is not tried again
    STOPPED = "stopped"


@dataclass(frozen=True)
class Backoff:
    """Seconds between a death and the next start: doubled each time, reset by a healthy life."""

    first: float = 0.2
    largest: float = 10.0
    healthy: float = 60.0
    early_deaths: int = 3  # deaths before it was ever ready after which it is given up


class GaveUp(RuntimeError):
    """The child never got ready; `lines` are the last that it wrote."""

    def __init__(self, code: int, lines: Sequence[str]) -> None:
        super().__init__(f"it ended with exit code {code} before it was ready")
        self.lines = tuple(lines)


class Supervisor:
    """One child, restarted for as long as the supervisor runs.

    `on_line` gets every line that the child writes to its standard output and error; the line
    `ready_line` says that the child is ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        *,
        ready_line: str = "ready",
        env: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
        grace: float = 5.0,
    ) -> None:
        self.state = State.STOPPED
        self.restarts = 0
        self._command, self._on_line, self._ready_line = tuple(command), on_line, ready_line
        self._env = {**os.environ, **(env or {})}
        self._backoff, self._grace = backoff or Backoff(), grace
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._changed = asyncio.Condition()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ever_ready, self._exit_code = False, 0

    @property
    def pid(self) -> int | None:
        """The living child's process id."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the child and keep it running until `stop`."""
        await self._enter(State.STARTING)
        self._task = asyncio.create_task(self._keep_running(), name="supervisor")

    async def wait_ready(self) -> None:
        """Return once the child is ready; raises `GaveUp` when it will never be."""
        await self.wait_for(State.READY, State.FAILED)
        if self.state is State.FAILED:
            raise GaveUp(self._exit_code, self._lines)

    async def wait_for(self, *states: State) -> None:
        """Return once the state is one of `states`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.state in states)

    async def stop(self) -> None:
        """End the child: SIGTERM, then SIGKILL after the grace; a second call does nothing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self._enter(State.STOPPED)

    async def _keep_running(self) -> None:
        delay, deaths = self._backoff.first, 0
        while True:
            healthy_s = await self._live()
            deaths += 1
            if not self._ever_ready and self._hopeless(deaths):
                await self._enter(State.FAILED)
                return
            if healthy_s >= self._backoff.healthy:
                delay = self._backoff.first
            self._note(f"process ended with exit code {self._exit_code}; next start in {delay:g} s")
            await self._enter(State.WAITING)
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._backoff.largest)
            self.restarts += 1
            await self._enter(State.STARTING)

    def _hopeless(self, deaths: int) -> bool:
        return self._exit_code == USER_ERROR or deaths >= self._backoff.early_deaths

    async def _live(self) -> float:
        """Run one child to its end; return how many seconds it was ready."""
        try:
            process = self._process = await self._spawn()
        except OSError as error:
            self._note(str(error))
            self._exit_code = NOT_STARTED
            return 0.0
        try:
            ready_at = await self._read(cast("asyncio.StreamReader", process.stdout))
            self._exit_code = await process.wait()
        finally:
            await self._end(process)
            self._process = None
        return 0.0 if ready_at is None else time.monotonic() - ready_at

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to pass on
        )

    async def _read(self, output: asyncio.StreamReader) -> float | None:
        """Read lines to the end of the output; return when the child said that it was ready."""
        ready_at = None
        while True:
            try:
                raw = await output.readline()
            except ValueError:  # a line beyond the reader's limit; what was read of it is dropped
                continue
            if not raw:
                return ready_at
            line = raw.decode(errors="replace").rstrip()
            self._note(line)
            if line == self._ready_line:
                ready_at, self._ever_ready = time.monotonic(), True
                await self._enter(State.READY)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._grace)
                return

    def _note(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)

    async def _enter(self, state: State) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()
