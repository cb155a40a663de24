"""The usage ledger: one row a request, and its totals.

Knows counts of tokens; refuses to know prices, limits and the text of a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from typing import Final, Literal, cast

import msgspec
from sqlalchemy import Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.models import UsageRecord

Grouping = Literal["tenant", "key", "adapter", "model", "arm", "day"]
MAX_TOTALS: Final = 10_000
SERVER_DIED: Final = "server_died"
Insert = sqlite.Insert | postgresql.Insert
INSERTS: Final[dict[str, Callable[[Table], Insert]]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_COLUMNS: Final = {
    "tenant": UsageRecord.tenant_id,
    "key": UsageRecord.key_id,
    "adapter": UsageRecord.adapter,
    "model": UsageRecord.model,
    "arm": UsageRecord.arm,
    "day": UsageRecord.day,
}


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row to be, which can be kept elsewhere until the ledger takes it.

    It is first written when its request is let in; as such it says what is to be recorded if the
    server dies. `created_at` is when that was; times are milliseconds.
    """

    tenant_id: str
    request_id: str
    key_id: str
    model: str
    created_at: datetime
    adapter: str | None = None
    arm: str | None = None
    digest: str | None = None
    outcome: str = SERVER_DIED
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float | None = None
    load_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None

    def row(self) -> UsageRecord:
        """The ledger's row."""
        return UsageRecord(**msgspec.structs.asdict(self))

    def encoded(self) -> str:
        """As text that `decoded` reads."""
        return msgspec.json.encode(self).decode()


def decoded(text: str | bytes) -> Entry:
    """The entry that was `encoded`; raises `msgspec.DecodeError` for any other text."""
    return msgspec.json.decode(text, type=Entry)


@dataclass(frozen=True)
class UsageTotal:
    """Sums over one group; what was not grouped by is None, as is the adapter of the bare base."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tenant_id: str | None = None
    key_id: str | None = None
    adapter: str | None = None
    model: str | None = None
    arm: str | None = None
    day: date | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


async def record(session: AsyncSession, entry: Entry) -> UsageRecord:
    """Count a request, once however often it is recorded; its row as it is in the ledger now.

    A server that was taken for dead, and tells in the end what its request used, is believed.
    """
    existing = select(UsageRecord).where(
        UsageRecord.tenant_id == entry.tenant_id, UsageRecord.request_id == entry.request_id
    )
    row, inserted = await insert_or_find(session, entry.row(), existing)
    if not inserted and row.outcome == SERVER_DIED:
        for name, value in msgspec.structs.asdict(entry).items():
            setattr(row, name, value)
    return row


async def record_all(session: AsyncSession, entries: Sequence[Entry]) -> None:
    """Count several requests in one statement, each as `record` would.

    The session is an operator's. Raises `IntegrityError`, and counts none, where a tenant or a key
    is not there.
    """
    counting = _counting(session.get_bind().dialect.name)
    await session.execute(counting, [msgspec.structs.asdict(entry) for entry in entries])


@cache
def _counting(dialect: str) -> Insert:
    table = cast("Table", UsageRecord.__table__)
    insert = INSERTS[dialect](table)
    told = {name: insert.excluded[name] for name in Entry.__struct_fields__}
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key), set_=told, where=table.c.outcome == SERVER_DIED
    )


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
