"""SQLite on a thread of its own, one trip there and back for each statement.

The driver, aiosqlite, makes four: for a cursor, its execution, its rows and its end. Each wakes a
thread twice, which is most of what a small statement costs. Knows the interface that SQLAlchemy
uses; refuses to know statements.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import aiosqlite

CHUNK = 64  # rows; the driver's default for cursors of its own


class OneTripCursor:
    """A cursor that brings all rows along when it executes; the rest of its life is here."""

    arraysize = 1

    def __init__(self, connection: "OneTripConnection") -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> "OneTripCursor":
        """Itself: there is nothing to open."""
        return self

    async def execute(self, statement: str, parameters: Iterable[Any] = ()) -> "OneTripCursor":
        """Run a statement and keep its rows; raises what `sqlite3` raises."""
        await self._connection.run(self._execute, statement, parameters)
        return self

    async def executemany(
        self, statement: str, parameters: Iterable[Iterable[Any]]
    ) -> "OneTripCursor":
        """Run a statement for each set of parameters; raises what `sqlite3` raises."""
        await self._connection.run(self._execute_many, statement, parameters)
        return self

    async def fetchall(self) -> Sequence[Any]:
        """The rows, once."""
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """Forget the rows."""
        self._rows = []

    def _execute(self, raw: sqlite3.Connection, statement: str, parameters: Any) -> None:
        self._take(raw.execute(statement, parameters))

    def _execute_many(self, raw: sqlite3.Connection, statement: str, parameters: Any) -> None:
        self._take(raw.executemany(statement, parameters))

    def _take(self, cursor: sqlite3.Cursor) -> None:
        self.description, self.lastrowid = cursor.description, cursor.lastrowid
        self._rows = cursor.fetchall()
        self.rowcount = cursor.rowcount
        cursor.close()


class OneTripConnection(aiosqlite.Connection):
    """The driver's connection, with such cursors."""

    def cursor(self) -> OneTripCursor:  # type: ignore[override]
        """A cursor, without a trip."""
        return OneTripCursor(self)

    async def run(self, work: Any, *arguments: Any) -> None:
        """Run `work` on the connection's thread, with SQLite's own connection first."""
        await self._execute(work, self._conn, *arguments)  # type: ignore[no-untyped-call]


async def connect(path: str, **options: Any) -> OneTripConnection:
    """Open a database; `options` are those of `sqlite3.connect`."""
    connection = OneTripConnection(lambda: sqlite3.connect(path, **options), CHUNK)
    connection._thread.daemon = True  # as SQLAlchemy makes those that it opens itself
    await connection
    return connection
