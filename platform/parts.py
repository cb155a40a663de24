"""Opens the parts of a platform: each with its end on a stack, and its failure as one sentence.

Knows how each part is made from the settings; refuses to know the order.
"""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from alembic.util import CommandError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.platform import engine_process, traces
from loraplex.platform.admin.sampling import keep_sampling
from loraplex.platform.api.context import Context
from loraplex.platform.bases import note_served
from loraplex.platform.bookkeeping import Books
from loraplex.platform.boot import ENGINE_SOCKET, StartError
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.console import Report
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis, RedisStartError
from loraplex.platform.engine_process import EngineProcess
from loraplex.platform.ids import new_id
from loraplex.platform.image_sweeps import ImageSweeps
from loraplex.platform.limits import Limiter, connect
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.recount import recount
from loraplex.platform.settings import Settings
from loraplex.platform.sockets import socket_path
from loraplex.platform.spent_before import spent_before
from loraplex.platform.supervise import GaveUp
from loraplex.platform.traces import Traces
from loraplex.platform.upload_desk import Uploads
from loraplex.platform.upload_sweep import Sweeper
from loraplex.platform.uploads import Gate
from loraplex.platform.usage_journal import Journal

REDIS_WATCH_S = 1.0
RECOUNT_S = 10.0
SHOWN_LINES = 8

log = logging.getLogger("loraplex.serve")


async def start_engine(
    settings: Settings, base_file: Path, report: Report, stack: AsyncExitStack
) -> EngineProcess:
    """Start the engine's process and wait until it takes requests.

    Raises `StartError` with the engine's last lines when it never will.
    """
    endpoint = f"ipc://{socket_path(settings.run_dir, ENGINE_SOCKET)}"
    line = engine_process.command(
        base_file, endpoint, settings.image_store, settings.image_cache, settings.engine
    )
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
    except CommandError as error:
        raise StartError(
            "A newer Loraplex made this database: start that version, or restore a backup."
        ) from error
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


async def note_base(
    settings: Settings, db: Database, base: BaseManifest, engine: EngineClient
) -> None:
    """Note which base is served from now on, and how its weights are stored."""
    quantized = settings.engine.get("quantization", "none")
    dtype = engine.info.dtype if engine.info else "unknown"
    async with db.session(None) as session:
        await note_served(session, base, dtype if quantized == "none" else str(quantized))


def open_limits(settings: Settings, redis: Redis, db: Database, stack: AsyncExitStack) -> Limiter:
    """Hold requests to limits, on that Redis; what it lost of budgets is in the ledger."""
    limiter = Limiter(
        redis,
        lease_s=settings.lease_s,
        replicas=settings.replicas,
        timeout_s=settings.redis_timeout_s,
        spent=partial(spent_before, db),
    )
    stack.push_async_callback(limiter.close)
    return limiter


def keep_books(
    settings: Settings, redis: Redis, db: Database, limiter: Limiter, stack: AsyncExitStack
) -> Books:
    """Write the ledger, and see to what dead servers and outages left over."""
    journal = Journal(redis, settings.journal, timeout_s=settings.redis_timeout_s)
    books = Books(db, limiter, journal)
    books.start()
    stack.push_async_callback(books.close)
    return books


def keep_prefix_state(redis: Redis, engine: EngineClient, stack: AsyncExitStack) -> PrefixState:
    """Write each tenant's prefix-cache state; this server is a replica of a name of its own."""
    prefixes = PrefixState(redis, new_id("rep"), engine)
    prefixes.start()
    stack.push_async_callback(prefixes.close)
    return prefixes


def keep_images(
    settings: Settings, redis: Redis, db: Database, gate: Gate, stack: AsyncExitStack
) -> None:
    """Remove images that nobody needs any more, from the store and from the local cache."""
    sweeps = ImageSweeps(settings, db, gate.store, redis)
    sweeps.start()
    stack.push_async_callback(sweeps.close)


def open_traces(settings: Settings, stack: AsyncExitStack) -> Traces:
    """Trace requests if that is wanted; raises `StartError` where OpenTelemetry is missing."""
    made = Traces()
    if traces.wanted(settings.otlp_endpoint):
        try:
            made.start(traces.exporter(settings.otlp_endpoint))
        except traces.TracesMissing as error:
            raise StartError(str(error)) from error
        stack.push_async_callback(asyncio.to_thread, made.stop)
    return made


def keep_history(ctx: Context, stack: AsyncExitStack) -> None:
    """Sample the server's totals for the charts of the admin pages."""
    stack.push_async_callback(_cancel, asyncio.create_task(keep_sampling(ctx)))


async def _embedded_redis(settings: Settings, stack: AsyncExitStack) -> str:
    redis = EmbeddedRedis(settings.redis_dir, settings.run_dir)
    try:
        redis.start()
    except RedisStartError as error:
        raise StartError(str(error)) from error
    stack.callback(redis.stop)
    await _recount_if_killed(redis)
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
            else:
                await _recount_if_killed(redis)


async def _recount_if_killed(embedded: EmbeddedRedis) -> None:
    if embedded.was_killed:
        try:
            async with connect(embedded.url, timeout_s=RECOUNT_S) as redis:
                await recount(redis)
            embedded.forget_kill()
        except (RedisError, OSError) as error:
            log.warning("budgets go on as the killed Redis had them, until a restart: %s", error)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def make_gate(settings: Settings, base: BaseManifest, base_file: Path, db: Database) -> Gate:
    """Return the way that every adapter takes to the registry."""
    return Gate(
        quarantine=settings.quarantine_dir,
        max_bytes=settings.max_upload_bytes,
        compiler=AdapterCompiler(base_file, timeout_s=settings.compile_timeout_s),
        store=ImageStore(settings.image_store),
        db=db,
        base=base,
        max_rank=settings.max_adapter_rank,
    )


def keep_uploads(uploads: Uploads, stack: AsyncExitStack) -> None:
    """Go on with what an earlier life left, and leave to the next what this one cannot end."""
    sweeper = Sweeper(uploads)
    stack.push_async_callback(uploads.close)
    stack.push_async_callback(sweeper.close)
    sweeper.start()
