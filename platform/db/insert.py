"""Inserts a row unless it is there already, on any database, whoever else inserts it at once."""

from typing import TypeVar

from sqlalchemy import Select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

Row = TypeVar("Row")


async def insert_or_find(
    session: AsyncSession, row: Row, existing: Select[Row]
) -> tuple[Row, bool]:
    """Insert `row`, or find what `existing` selects; and whether it was inserted.

    Raises `IntegrityError` when the insert fails for another reason than `existing`.
    """
    try:
        async with session.begin_nested():
            session.add(row)
            await session.flush()
    except IntegrityError:
        found = await session.scalar(existing)
        if found is None:
            raise
        return found, False
    return row, True
