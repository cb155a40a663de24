"""Opens the parts of a platform: each with its end on a stack, and its failure as one sentence.

Knows how each part is made from the settings; refuses to know the order.
"""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.platform import engine_process
from loraplex.platform.boot import ENGINE_SOCKET, StartError
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.console import Report
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis, RedisStartError
from loraplex.platform.engine_process import EngineProcess
from loraplex.platform.ids import new_id
from loraplex.platform.limits import connect
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.settings import Settings
from loraplex.platform.sockets import socket_path
from loraplex.platform.supervise import GaveUp
from loraplex.platform.uploads import Gate

REDIS_WATCH_S = 1.0
SHOWN_LINES = 8

log = logging.getLogger("loraplex.serve")


async def start_engine(
    settings: Settings, base_file: Path, report: Report, stack: AsyncExitStack
) -> EngineProcess:
    """Start the engine's process and wait until it takes requests.

    Raises `StartError` with the engine's last lines when it never will.
    """
    endpoint = f"ipc://{socket_path(settings.run_dir, ENGINE_SOCKET)}"
    cache = settings.cache_dir / "images"
    line = engine_process.command(base_file, endpoint, settings.image_store, cache, settings.engine)
    engine = EngineProcess(line, endpoint, report)
    stack.push_async_callback(engine.stop)
    try:
        await engine.start()
        await engine.wait_ready()
    except GaveUp as gone:
        lines = "\n".join(f"  {line}" for line in gone.lines[-SHOWN_LINES:])
        raise StartError(f"The engine cannot start: {gone}. Its last lines:\n{lines}") from gone
    except TimeoutError as error:
        raise StartError("The engine started but does not answer.") from error
    return engine


async def open_database(settings: Settings, stack: AsyncExitStack) -> Database:
    """Open the database and bring its schema to the newest revision; raises `StartError`."""
    try:
        db = Database(settings.database)
        stack.push_async_callback(db.dispose)
        await db.migrate()
    except (SQLAlchemyError, OSError, ImportError) as error:
        cause = str(error).partition("\n")[0]
        raise StartError(f"The database cannot be opened: {cause}") from error
    return db


async def open_redis(settings: Settings, stack: AsyncExitStack) -> Redis:
    """Start the embedded Redis unless another is chosen, and see it answer; raises `StartError`."""
    url = settings.redis_url or await _embedded_redis(settings, stack)
    redis = connect(url, timeout_s=settings.redis_timeout_s)
    stack.push_async_callback(redis.aclose)
    try:
        await redis.ping()
    except (RedisError, OSError) as error:
        raise StartError(
            "Redis does not answer; start it, or unset LORAPLEX_REDIS_URL to use an embedded one."
        ) from error
    return redis


def keep_prefix_state(redis: Redis, engine: EngineClient, stack: AsyncExitStack) -> PrefixState:
    """Write each tenant's prefix-cache state; this server is a replica of a name of its own."""
    prefixes = PrefixState(redis, new_id("rep"), engine)
    prefixes.start()
    stack.push_async_callback(prefixes.close)
    return prefixes


async def _embedded_redis(settings: Settings, stack: AsyncExitStack) -> str:
    redis = EmbeddedRedis(settings.redis_dir, settings.run_dir)
    try:
        redis.start()
    except RedisStartError as error:
        raise StartError(str(error)) from error
    stack.callback(redis.stop)
    watch = asyncio.create_task(_keep_running(redis))
    stack.push_async_callback(_cancel, watch)
    return redis.url


async def _keep_running(redis: EmbeddedRedis) -> None:
    """Start Redis again, on its data, whenever it is found dead."""
    while True:
        await asyncio.sleep(REDIS_WATCH_S)
        if redis.pid is None:
            log.warning("the embedded Redis ended; starting it again")
            try:
                redis.start()
            except RedisStartError as error:
                log.error("%s", error)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def make_gate(settings: Settings, base: BaseManifest, base_file: Path, db: Database) -> Gate:
    """Return the way that every adapter takes to the registry, swept of a crash's leftovers."""
    gate = Gate(
        quarantine=settings.quarantine_dir,
        max_bytes=settings.max_upload_bytes,
        compiler=AdapterCompiler(base_file, timeout_s=settings.compile_timeout_s),
        store=ImageStore(settings.image_store),
        db=db,
        base=base,
        max_rank=settings.max_adapter_rank,
    )
    gate.sweep()
    return gate
