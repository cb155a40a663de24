"""The usage ledger: one row a request, and its totals.

Knows counts of tokens; refuses to know prices, limits and the text of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.models import UsageRecord

Grouping = Literal["tenant", "adapter", "day"]
MAX_TOTALS = 10_000
_COLUMNS = {
    "tenant": UsageRecord.tenant_id,
    "adapter": UsageRecord.adapter,
    "day": UsageRecord.day,
}


@dataclass(frozen=True)
class UsageTotal:
    """Sums over one group; what was not grouped by is None, as is the adapter of the bare base."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tenant_id: str | None = None
    adapter: str | None = None
    day: date | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


async def record(session: AsyncSession, row: UsageRecord) -> bool:
    """Count a request, once however often it is recorded; whether this was the first time."""
    existing = select(UsageRecord).where(
        UsageRecord.tenant_id == row.tenant_id, UsageRecord.request_id == row.request_id
    )
    _, inserted = await insert_or_find(session, row, existing)
    return inserted


async def totals(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    since: date | None = None,
    until: date | None = None,
    group_by: Sequence[Grouping] = ("adapter",),
) -> list[UsageTotal]:
    """Totals per group over the UTC days from `since` to `until`, both included, in order.

    At most `MAX_TOTALS` groups. An operator's session sums over all tenants unless one is given.
    """
    groups = [_COLUMNS[name] for name in group_by]
    statement = select(
        func.count(),
        func.coalesce(func.sum(UsageRecord.prompt_tokens), 0),
        func.coalesce(func.sum(UsageRecord.completion_tokens), 0),
        func.coalesce(func.sum(UsageRecord.cached_tokens), 0),
        *groups,
    ).select_from(UsageRecord)
    if tenant_id is not None:
        statement = statement.where(UsageRecord.tenant_id == tenant_id)
    if since is not None:
        statement = statement.where(UsageRecord.day >= since)
    if until is not None:
        statement = statement.where(UsageRecord.day <= until)
    rows = await session.execute(
        statement.group_by(*groups)
        .order_by(*(column.nulls_first() for column in groups))
        .limit(MAX_TOTALS)
    )
    names = [column.key for column in groups]
    return [UsageTotal(*row[:4], **dict(zip(names, row[4:], strict=True))) for row in rows]
