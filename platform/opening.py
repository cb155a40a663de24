"""Opens all parts of a platform in order, and sees that a newcomer finds keys and adapters.

Knows which part needs which; refuses to know how any of them works, how the base was prepared and
how the server ends. To import all parts takes seconds, so `serve.py` does it once what can be
checked without them is right.
"""

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
from loraplex.platform import demo, logs, parts
from loraplex.platform.app import create_app
from loraplex.platform.boot import StartError
from loraplex.platform.console import Report, Steps
from loraplex.platform.credentials import Credentials
from loraplex.platform.drain import Drain
from loraplex.platform.key_cache import KeyCache
from loraplex.platform.keys import KeyRing
from loraplex.platform.settings import Settings
from loraplex.platform.upload_desk import Uploads

LOG_PREFIX = re.compile(r"^\S+Z INFO \S+ ")  # time, level and logger
REPORT = re.compile(r"^\S+Z (INFO|WARNING) engine\.report ")  # of memory, and advice


class Opening:
    """Opens the parts of one life of the platform; each ends with `stack`, the last one first."""

    def __init__(
        self,
        settings: Settings,
        base: BaseManifest,
        base_file: Path,
        *,
        steps: Steps,
        stack: AsyncExitStack,
        drain: Drain,
    ) -> None:
        self._settings, self._base, self._base_file = settings, base, base_file
        self._steps, self._stack, self._drain = steps, stack, drain
        self._engine_report: Report = lambda line: None
        self._opened = False

    async def open(self, url: str) -> tuple[FastAPI, list[str]]:
        """Return the app, and the lines to print once it is served at `url`.

        Raises `StartError`.
        """
        settings, base, steps, stack = self._settings, self._base, self._steps, self._stack
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
        uploads = app.state.context.uploads
        parts.keep_uploads(uploads, stack)
        parts.keep_history(app.state.context, stack)
        lines = await self._welcome(uploads, keys, url)
        self._opened = True
        return app, lines

    async def _start_engine(self) -> EngineClient:
        with self._steps.step("starting the engine") as self._engine_report:
            engine = await parts.start_engine(
                self._settings, self._base_file, self._hear_engine, self._stack
            )
        self._engine_report = self._steps.say
        return engine.client

    def _hear_engine(self, line: str) -> None:
        """Show the engine's log: as it is once it runs, without its prefix while it starts.

        What the start reports of memory is to stay, where other lines are replaced by the next.
        """
        if self._settings.log_format == "json":
            logs.relay(line)
        elif self._opened:
            self._engine_report(line)
        elif REPORT.match(line):
            self._steps.say(f"  {REPORT.sub('', line)}")
        else:
            self._engine_report(LOG_PREFIX.sub("", line))

    async def _welcome(self, uploads: Uploads, keys: KeyRing, url: str) -> list[str]:
        """See that a newcomer finds keys and adapters; return the banner."""
        gate = uploads.gate
        with self._steps.step("publishing the example adapters") as report:
            found = await demo.ensure_credentials(gate.db, keys, self._base_file.parents[1], url)
            await demo.publish_examples(uploads, found.tenant_id, report)
        names = await demo.adapter_names(gate.db, found.tenant_id)
        return banner(found, names, gate.base.name, await demo.first_sign_in(gate.db, keys))


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
