"""Runs `loraplex …` in this process, against a test's API behind a real socket."""

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from typer.testing import CliRunner

from loraplex.platform.cli import app

Run = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def command_line(world: Any, key: str, *group: str) -> AsyncIterator[Run]:
    """Commands of a group under a key of `world`; each returns what it printed.

    JSON is decoded. `code` is the exit code that is expected, `typed` the standard input.
    """
    async with world.listening() as url:
        env = {"LORAPLEX_URL": url, "LORAPLEX_API_KEY": world.keys[key]}

        async def run(*words: str, code: int = 0, typed: str | None = None) -> Any:
            given = [*group, *words]
            invoke = functools.partial(CliRunner().invoke, app, given, env=env, input=typed)
            done = await to_thread.run_sync(invoke)
            assert done.exit_code == code, done.output
            return json.loads(done.output) if "--json" in words else done.output

        yield run
