"""Locks that last until the transaction ends: on a row, or on a name where there is no row.

SQLite needs none: its one writer holds the whole database. PostgreSQL's are row locks that let
rows which refer to the locked one be inserted, and advisory locks.
"""

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

FOR_CHANGE: Final = {"key_share": True}  # for `with_for_update`: FOR NO KEY UPDATE
_LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")


async def lock_names(session: AsyncSession, names: Iterable[str]) -> None:
    """Hold `names` against every other transaction; all at once, so that none waits in a circle."""
    connection = await session.connection()
    for name in sorted({*names}):
        await connection.run_sync(lock_name, name)


def lock_name(connection: Connection, name: str) -> None:
    """Hold one name, on a connection that has begun a transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK, {"name": name})
