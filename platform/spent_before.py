"""What a tenant's requests used before a moment, as the usage ledger has it.

Knows the ledger's rows and which adapter a name in them is; refuses to know limits, and what is
done with the sums.
"""

from collections.abc import Collection
from datetime import date, datetime
from typing import Any

from sqlalchemy import Select, case, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import Adapter, Tenant, UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.spending import Owner, Spending, by_bucket


async def spent_before(db: Database, tenant_id: str, moment: datetime) -> dict[Owner, Spending]:
    """The sums over requests let in before `moment`, in its own UTC day and month.

    A composition's row does not say of which adapters, so it counts for its tenant and key alone.
    Raises `Unavailable` while the database is away.
    """
    async with db.read(None) as session:
        rows = (await session.execute(_sums(tenant_id, moment))).all()
        ids = await _foreign_ids(session, {row.adapter for row in rows if row.id is None})
    return by_bucket(
        tenant_id,
        (
            (row.key_id, row.id or ids.get(row.adapter), Spending(int(row.today), int(row.month)))
            for row in rows
        ),
    )


def _sums(tenant_id: str, moment: datetime) -> Select[Any]:
    """By key and adapter, with the adapter's id where it is the tenant's own."""
    today: date = moment.date()
    tokens = UsageRecord.prompt_tokens + UsageRecord.completion_tokens
    sums = (
        select(
            UsageRecord.key_id,
            UsageRecord.adapter,
            func.sum(case((UsageRecord.day == today, tokens), else_=0)).label("today"),
            func.sum(tokens).label("month"),
        )
        .where(
            UsageRecord.tenant_id == tenant_id,
            UsageRecord.day.between(today.replace(day=1), today),
            UsageRecord.created_at < moment,
        )
        .group_by(UsageRecord.key_id, UsageRecord.adapter)
        .subquery()
    )
    own = (Adapter.tenant_id == tenant_id) & (Adapter.name == sums.c.adapter)
    return select(sums, Adapter.id).select_from(sums).outerjoin(Adapter, own)


async def _foreign_ids(session: AsyncSession, names: Collection[str | None]) -> dict[str, str]:
    """The ids of other tenants' adapters, by "owner/name"."""
    places = [tuple(name.split("/", 1)) for name in names if name and "/" in name]
    if not places:
        return {}
    rows = await session.execute(
        select(Tenant.name, Adapter.name, Adapter.id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(tuple_(Tenant.name, Adapter.name).in_(places))
    )
    return {f"{owner}/{name}": id for owner, name, id in rows}
