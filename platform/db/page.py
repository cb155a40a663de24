"""Lists a page at a time, by a unique column that sorts; no list is unbounded."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

MAX_PAGE = 1000
Row = TypeVar("Row")


@dataclass(frozen=True)
class Page(Generic[Row]):
    """Some rows in order, and whether more follow."""

    items: list[Row]
    has_more: bool


async def fetch_page(
    session: AsyncSession,
    statement: Select[Row],
    key: InstrumentedAttribute[Any],
    *,
    after: str | None,
    limit: int,
    descending: bool = False,
) -> Page[Row]:
    """At most `limit` (and `MAX_PAGE`) rows that follow `after`, in order of `key`."""
    limit = max(1, min(limit, MAX_PAGE))
    if after is not None:
        statement = statement.where(key < after if descending else key > after)
    order = key.desc() if descending else key
    rows = list(await session.scalars(statement.order_by(order).limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)
