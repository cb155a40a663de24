"""Which models a tenant may try: the base, its adapters, and those that others share with it.

Knows rows; refuses to know HTTP and templates.
"""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import Adapter, Alias
from loraplex.web.contexts.shell import Choice

SHOWN = 30


async def model_choices(
    session: AsyncSession, tenant_id: str | None, base: str, chosen: Sequence[str]
) -> tuple[Choice, ...]:
    """The base first, then the newest adapters with their aliases, then what else was chosen."""
    names = [base, *(await _adapters(session, tenant_id))]
    wanted = {*chosen} or {*names[:2]}
    shown = [*names, *(each for each in chosen if each not in names)]
    return tuple(
        Choice(each, f"{each} (the base)" if each == base else each, each in wanted)
        for each in shown
    )


async def _adapters(session: AsyncSession, tenant_id: str | None) -> list[str]:
    newest = (
        select(Adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
        .order_by(Adapter.created_at.desc())
        .limit(SHOWN)
    )
    adapters = {each.id: each.name for each in await session.scalars(newest)}
    live = select(Alias).where(Alias.adapter_id.in_(adapters), Alias.number.is_not(None))
    aliases = [f"{adapters[a.adapter_id]}@{a.name}" for a in await session.scalars(live)]
    return sorted([*adapters.values(), *aliases])
