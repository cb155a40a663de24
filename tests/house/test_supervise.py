"""The supervisor, with small Python programs as its child."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.platform.supervise import Backoff, GaveUp, State, Supervisor

pytestmark = pytest.mark.anyio
QUICK = Backoff(first=0.01, largest=0.02, healthy=60.0, early_deaths=3)
PATIENCE = 30.0

READY_THEN_WAIT = "print('loading'); print('ready', flush=True); import signal; signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\nwhile True: signal.pause()"
)


@contextlib.asynccontextmanager
async def running(program: str, lines: list[str], **options: object) -> AsyncIterator[Supervisor]:
    child = Supervisor(
        [sys.executable, "-c", program],
        lines.append,
        **{"backoff": QUICK, **options},
    )
    await child.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield child
    finally:
        await child.stop()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_it_passes_lines_on_and_says_when_the_child_is_ready() -> None:
    lines: list[str] = []
    async with running(READY_THEN_WAIT, lines) as child:
        await child.wait_ready()
        assert lines == ["loading", "ready"]
        assert child.pid is not None
        assert alive(child.pid)


async def test_a_killed_child_is_replaced() -> None:
    lines: list[str] = []
    async with running(READY_THEN_WAIT, lines) as child:
        await child.wait_ready()
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await child.wait_for(State.WAITING)
        await child.wait_ready()
        assert child.pid not in (None, first)
        assert child.restarts == 1
        assert "process ended with exit code -9; next start in 0.01 s" in lines


async def test_delays_double_to_the_largest_and_a_healthy_life_resets_them() -> None:
    program = "print('ready', flush=True)"
    for healthy, expected in ((60.0, ["0.01", "0.02", "0.02", "0.02"]), (0.0, ["0.01"] * 4)):
        lines: list[str] = []
        backoff = Backoff(first=0.01, largest=0.02, healthy=healthy)
        async with running(program, lines, backoff=backoff) as child:
            while child.restarts < 4:
                await child.wait_for(State.WAITING)
                await child.wait_for(State.STARTING)
        delays = [line.split(" in ")[1].removesuffix(" s") for line in lines if " in " in line]
        assert delays[:4] == expected


async def test_a_child_that_is_never_ready_is_given_up_with_its_last_lines() -> None:
    lines: list[str] = []
    async with running("import sys; sys.exit('no weights')", lines) as child:
        with pytest.raises(GaveUp) as caught:
            await child.wait_ready()
    assert caught.value.lines[-1] == "no weights"
    assert lines.count("no weights") == QUICK.early_deaths


async def test_a_user_error_is_not_tried_again() -> None:
    lines: list[str] = []
    program = "import sys; print('block_size must be positive'); sys.exit(2)"
    async with running(program, lines) as child:
        with pytest.raises(GaveUp):
            await child.wait_ready()
    assert lines == ["block_size must be positive"]


async def test_a_program_that_cannot_be_executed_is_given_up() -> None:
    child = Supervisor(["/nowhere/engine"], [].append, backoff=QUICK)
    await child.start()
    with pytest.raises(GaveUp, match="127"):
        await asyncio.wait_for(child.wait_ready(), PATIENCE)
    await child.stop()


async def test_stop_ends_even_a_child_that_ignores_sigterm() -> None:
    async with running(STUBBORN, [], grace=0.2) as child:
        await child.wait_ready()
        pid = child.pid
        assert pid is not None
        await child.stop()
        assert not alive(pid)
        assert child.state is State.STOPPED


async def test_stop_while_waiting_to_restart() -> None:
    slow = Backoff(first=600.0, largest=600.0)
    async with running("print('ready', flush=True)", [], backoff=slow) as child:
        await child.wait_for(State.WAITING)
        await child.stop()
        assert child.state is State.STOPPED


async def test_an_overlong_line_does_not_end_it() -> None:
    lines: list[str] = []
    program = f"print('x' * 300_000); {READY_THEN_WAIT}"
    async with running(program, lines) as child:
        await child.wait_ready()
    assert "loading" in lines
