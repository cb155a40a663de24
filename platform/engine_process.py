"""The engine on this machine: its process, kept alive, and the client that talks to it.

Knows the engine's command line and its log; refuses to know what it computes.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.engine.client.local import LocalEngine
from loraplex.platform.console import Report
from loraplex.platform.supervise import Backoff, Supervisor

HANDSHAKE_S = 30.0  # between the line `ready` and the first message
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}


def command(
    base_file: Path, endpoint: str, images: str, cache: Path, knobs: Mapping[str, Any]
) -> list[str]:
    """Return the engine's command line; `knobs` are its settings by name, None for the default."""
    line = [sys.executable, "-m", "loraplex.engine", "--base", str(base_file)]
    line += ["--endpoint", endpoint, "--images", images, "--cache", str(cache)]
    return [*line, *knob_flags(knobs)]


def choice_command(base_file: Path, knobs: Mapping[str, Any]) -> list[str]:
    """Return the command that prints which executor would run a base, and why."""
    line = [sys.executable, "-m", "loraplex.engine.choice", "--base", str(base_file)]
    return [*line, *knob_flags(knobs)]


def backend_command() -> list[str]:
    """Return the command that prints which kernels a process would take, and why."""
    return [sys.executable, "-m", "loraplex.kernels.dispatch"]


def knob_flags(knobs: Mapping[str, Any]) -> list[str]:
    """Return the engine's settings as its flags."""
    flags = []
    for name, value in knobs.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


class EngineProcess:
    """A supervised engine and its client; `report` gets the lines of its log."""

    def __init__(
        self, line: list[str], endpoint: str, report: Report, backoff: Backoff | None = None
    ) -> None:
        self.client = LocalEngine(endpoint)
        self._supervisor = Supervisor(line, report, env=ENVIRONMENT, backoff=backoff)

    @property
    def pid(self) -> int | None:
        """The living engine's process id."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Start the process and look for it; returns at once."""
        await self._supervisor.start()
        await self.client.start()

    async def wait_ready(self) -> None:
        """Return once the engine takes requests; raises `GaveUp`, or `TimeoutError` if mute."""
        await self._supervisor.wait_ready()
        await self.client.wait_ready(HANDSHAKE_S)

    async def stop(self) -> None:
        """Let go of what is in flight and end the process."""
        await self.client.close()
        await self._supervisor.stop()
