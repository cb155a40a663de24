"""Opens the database and hands out sessions; the one place where SQLite differs from PostgreSQL.

SQLite runs with a write-ahead log, so that readers never wait. A writing transaction takes the
write lock with its first statement (`BEGIN IMMEDIATE`): one that read first and then wrote could
fail at once with "database is locked" when another process wrote in between. Commits survive a
crash of the process; a power failure may lose the last ones, never the file.

On PostgreSQL writers run at once, READ COMMITTED: one that changes what it has read locks the row
with the SELECT. Readers run REPEATABLE READ, so that they see one moment on both databases.

The writers of one process queue up before they take a connection, so that they leave the pool to
readers: on SQLite one at a time, on PostgreSQL up to `WRITERS`.
"""

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final

import aiosqlite
import anyio
from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from loraplex.platform.db import one_trip, schema
from loraplex.platform.db.tenancy import READ_ONLY, RENAMED, TENANT, GuardedSession
from loraplex.platform.errors import StorageFull, Unavailable

log = logging.getLogger(__name__)

WRITERS: Final = 8
READERS: Final = 8
BUSY_S: Final = 0.01  # between two tries
DRIVERS: Final = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}
PASSING: Final = {  # SQLSTATE
    "40001": "serialization_failure",
    "40P01": "deadlock_detected",
    "53300": "too_many_connections",
    "55P03": "lock_not_available",
    "57P01": "admin_shutdown",
    "57P02": "crash_shutdown",
    "57P03": "cannot_connect_now",
}
DISK_FULL: Final = "53100"  # SQLSTATE


class Database:
    """A database by its SQLAlchemy URL; where it names no driver, ours is taken.

    `busy_timeout_s` is how long a statement waits for another's lock. Raises `ImportError` where
    the driver is not installed.
    """

    def __init__(self, url: str | URL, *, busy_timeout_s: float = 10.0) -> None:
        given = make_url(url)
        self.url = given.set(drivername=DRIVERS.get(given.drivername, given.drivername))
        self.renamed: list[Callable[[], None]] = []  # called when names may mean something else
        self._writer: AbstractAsyncContextManager[None]
        if self.is_sqlite:
            self._engine = _open_sqlite(self.url, busy_timeout_s)
            self._reader = self._engine.execution_options(**{READ_ONLY: True})
            self._writer = anyio.Lock()
        else:
            self._engine = _open_postgresql(self.url, busy_timeout_s)
            self._reader = self._engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
            self._writer = anyio.CapacityLimiter(WRITERS)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of ours, and no server."""
        return self.url.get_backend_name() == "sqlite"

    async def migrate(self) -> None:
        """Bring the schema to the newest revision; processes that do so at once take turns.

        Raises `OSError` where SQLite cannot open its file or no server answers, and
        `SQLAlchemyError` for other faults.
        """
        if self.is_sqlite:
            _try_to_open(self.url.database or "")
        async with self._engine.begin() as connection:
            await connection.run_sync(schema.upgrade)

    @asynccontextmanager
    async def session(self, tenant_id: str | None) -> AsyncIterator[AsyncSession]:
        """A session that writes, committed when the block ends well and rolled back otherwise.

        It holds SQLite's only write lock: await nothing slow in it, and open no second one in it.
        None is the operator's view. Raises `Unavailable` while the database is away or locked.
        """
        opened = _open(self._engine, tenant_id, read_only=False)
        with _passing_faults():
            async with self._writer, opened as session, session.begin():
                await _reach(session)
                yield session
        if opened.sync_session.info.get(RENAMED):
            for told in self.renamed:
                told()

    @asynccontextmanager
    async def read(self, tenant_id: str | None) -> AsyncIterator[AsyncSession]:
        """A session that only reads, from one snapshot, and never waits for a writer.

        Raises `Unavailable` while the database is away.
        """
        opened = _open(self._reader, tenant_id, read_only=True)
        with _passing_faults():
            async with opened as session:
                await _reach(session)
                yield session

    async def dispose(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def _open(engine: AsyncEngine, tenant_id: str | None, *, read_only: bool) -> AsyncSession:
    return AsyncSession(
        engine,
        sync_session_class=GuardedSession,
        expire_on_commit=False,
        info={TENANT: tenant_id, READ_ONLY: read_only},
    )


async def _reach(session: AsyncSession) -> None:
    """Take the connection now, so that a failure to is told from the faults of a statement."""
    try:
        await session.connection()
    except (OSError, SQLAlchemyError) as error:
        raise _unavailable(error) from error


@contextmanager
def _passing_faults() -> Iterator[None]:
    """Raise `Unavailable` for what the same statements may not meet the next time.

    Raises `StorageFull` where there is no room for what they write.
    """
    try:
        yield
    except DBAPIError as error:
        if _is_full(error.orig):
            log.error("the database's disk is full: %s", str(error).partition("\n")[0])
            raise StorageFull from error
        if error.connection_invalidated or _is_passing(error.orig):
            raise _unavailable(error) from error
        raise


def _is_passing(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return getattr(error, "sqlstate", None) in PASSING


def _is_full(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return getattr(error, "sqlstate", None) == DISK_FULL


def _unavailable(error: Exception) -> Unavailable:
    log.warning("the database is not available: %s", str(error).partition("\n")[0])
    return Unavailable("The database does not answer now. Try again soon.")


def _open_postgresql(url: URL, busy_timeout_s: float) -> AsyncEngine:
    settings = {"application_name": "loraplex", "lock_timeout": f"{round(busy_timeout_s * 1000)}"}
    try:
        engine = create_async_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_size=READERS,
            max_overflow=WRITERS,
            connect_args={"server_settings": settings, "timeout": busy_timeout_s},
        )
    except ImportError as error:
        raise ImportError(f"{error}; PostgreSQL needs `pip install loraplex[postgres]`") from error

    @event.listens_for(engine.sync_engine, "checkout")
    def checkout(_: DBAPIConnection, record: ConnectionPoolEntry, __: object) -> None:
        """Make connections anew that a restart of the server broke, without a ping for each use."""
        if record.driver_connection.is_closed():  # type: ignore[union-attr]
            raise InvalidatePoolError

    return engine


def _open_sqlite(url: URL, busy_timeout_s: float) -> AsyncEngine:
    (path,), options = url.get_dialect()().create_connect_args(url)
    engine = create_async_engine(url, async_creator=lambda: one_trip.connect(path, **options))

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: DBAPIConnection, _: object) -> None:
        connection.isolation_level = None  # the driver's own BEGINs would come too late
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        connection.run_async(lambda driver: _use_wal(driver, busy_timeout_s))
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        options: dict[str, Any] = dict(connection.get_execution_options())
        connection.exec_driver_sql("BEGIN" if options.get(READ_ONLY) else "BEGIN IMMEDIATE")

    return engine


async def _use_wal(connection: aiosqlite.Connection, seconds: float) -> None:
    """Switch to the write-ahead log, which the file remembers.

    SQLite waits for nobody in that, whatever its busy timeout, so of processes that open a new file
    at once one would fail.
    """
    until = anyio.current_time() + seconds
    while True:
        try:
            async with connection.execute("PRAGMA journal_mode = WAL"):
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or anyio.current_time() > until:
                raise
        await anyio.sleep(BUSY_S)


def _try_to_open(path: str) -> None:
    """Open and close the file: after a failure the driver's own thread would outlive the loop."""
    if path.startswith((":memory:", "file:")):
        return
    try:
        sqlite3.connect(path).close()
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error
