"""Opens the database and hands out sessions; the one place where SQLite differs from others.

SQLite runs with a write-ahead log, so that readers never wait. A writing transaction takes the
write lock with its first statement (`BEGIN IMMEDIATE`): one that read first and then wrote could
fail at once with "database is locked" when another process wrote in between. The writers of one
process queue up before they take a connection, so that they leave the pool to readers. Commits
survive a crash of the process; a power failure may lose the last ones, never the file.
"""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import anyio
from sqlalchemy import URL, Connection, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from loraplex.platform.db import schema
from loraplex.platform.db.tenancy import READ_ONLY, TENANT, GuardedSession


class Database:
    """A database by its SQLAlchemy URL, whose driver must be an asynchronous one."""

    def __init__(self, url: str | URL, *, busy_timeout_s: float = 10.0) -> None:
        self.url = make_url(url)
        self._engine = create_async_engine(self.url)
        self._reader = self._engine.execution_options(**{READ_ONLY: True})
        self._writer: AbstractAsyncContextManager[None] = nullcontext()
        if self._engine.dialect.name == "sqlite":
            self._writer = anyio.Lock()
            _prepare_sqlite(self._engine, busy_timeout_s)

    async def migrate(self) -> None:
        """Bring the schema to the newest revision; processes that do so at once take turns.

        Raises `OSError` where SQLite cannot open its file, `SQLAlchemyError` for other faults.
        """
        if self._engine.dialect.name == "sqlite":
            _try_to_open(self.url.database or "")
        async with self._engine.begin() as connection:
            await connection.run_sync(schema.upgrade)

    @asynccontextmanager
    async def session(self, tenant_id: str | None) -> AsyncIterator[AsyncSession]:
        """A session that writes, committed when the block ends well and rolled back otherwise.

        It holds SQLite's only write lock: await nothing slow in it, and open no second one in it.
        None is the operator's view.
        """
        opened = self._open(self._engine, tenant_id, read_only=False)
        async with self._writer, opened as session, session.begin():
            yield session

    @asynccontextmanager
    async def read(self, tenant_id: str | None) -> AsyncIterator[AsyncSession]:
        """A session that only reads, from one snapshot, and never waits for a writer."""
        async with self._open(self._reader, tenant_id, read_only=True) as session:
            yield session

    async def dispose(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    @staticmethod
    def _open(engine: AsyncEngine, tenant_id: str | None, *, read_only: bool) -> AsyncSession:
        return AsyncSession(
            engine,
            sync_session_class=GuardedSession,
            expire_on_commit=False,
            info={TENANT: tenant_id, READ_ONLY: read_only},
        )


def _try_to_open(path: str) -> None:
    """Open and close the file: after a failure the driver's own thread would outlive the loop."""
    if path.startswith((":memory:", "file:")):
        return
    try:
        sqlite3.connect(path).close()
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error


def _prepare_sqlite(engine: AsyncEngine, busy_timeout_s: float) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: DBAPIConnection, _: object) -> None:
        connection.isolation_level = None  # the driver's own BEGINs would come too late
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        options: dict[str, Any] = dict(connection.get_execution_options())
        connection.exec_driver_sql("BEGIN" if options.get(READ_ONLY) else "BEGIN IMMEDIATE")
