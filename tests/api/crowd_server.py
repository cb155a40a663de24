"""One API process of the crowd's: real database and Redis, and a fake engine that keeps a diary.

    python crowd_server.py '{"data_dir": …, "redis_url": …, "diary": …, "base": …, …}'

It prints its port once it listens. Each line of the diary is a request's start or end, with a
clock that all processes share.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import uvicorn

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.protocol import Event, Generate
from loraplex.platform import bookkeeping
from loraplex.platform.app import create_app
from loraplex.platform.bookkeeping import Books
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.db.session import Database
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import Limiter, connect
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.settings import Settings
from loraplex.platform.uploads import Gate
from loraplex.platform.usage_journal import Journal

TOKEN_S = 0.012


class Slow:
    """A `hold` that lets a token out every few milliseconds."""

    async def wait(self) -> None:
        await asyncio.sleep(TOKEN_S)


class Diarist(FakeEngine):
    """Writes down when requests start and end, in whose name."""

    def __init__(self, diary: Path) -> None:
        super().__init__(lambda _: (97,) * 2_000, hold=Slow())
        self._diary = diary.open("a", buffering=1)

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        self._write("start", request)
        events = super().generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
            self._write("end", request)

    def _write(self, what: str, request: Generate) -> None:
        id = request.request_id.rpartition("-")[0]
        self._diary.write(f"{what} {time.monotonic()} {request.tenant} {id}\n")


async def serve(given: dict) -> None:
    settings = Settings(data_dir=given["data_dir"])
    base = msgspec.convert(given["base"], BaseManifest)
    redis = connect(given["redis_url"], timeout_s=10.0)
    db, engine = Database(settings.database), Diarist(Path(given["diary"]))
    limiter = Limiter(redis, lease_s=given["lease_s"], period_s=given["period_s"])
    bookkeeping.EVERY_S = given["lease_s"] / 5
    books = Books(db, limiter, Journal(redis, settings.journal, timeout_s=10.0))
    books.start()
    gate = Gate(
        quarantine=settings.quarantine_dir,
        max_bytes=1,
        compiler=AdapterCompiler(settings.data_dir / "base.json", timeout_s=1),
        store=ImageStore(settings.image_store),
        db=db,
        base=base,
    )
    app = create_app(
        settings,
        base=base,
        db=db,
        keys=KeyRing(given["pepper"].encode()),
        limiter=limiter,
        books=books,
        engine=engine,
        gate=gate,
        prefixes=PrefixState(redis, given["diary"], engine),
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    print(listener.getsockname()[1], flush=True)
    await server.serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
