"""Whose things a page shows: a user's own tenant's, or those of the tenant that an operator picks.

Knows visits and tenants' names; refuses to know what is shown of them.
"""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.admin.visit import Visit
from loraplex.platform.db.models import ApiKey, Tenant, User
from loraplex.platform.errors import NotFound
from loraplex.platform.tenants import get_tenant
from loraplex.web.contexts.shell import Choice

MAX_CHOICES = 1000


async def chosen_tenant(
    session: AsyncSession, visit: Visit, tenant_id: str | None
) -> Tenant | None:
    """The tenant to act for: the user's own, the one that is named, or the first there is.

    Raises `NotFound` for one that is not there, or not the user's. None where there is no tenant.
    """
    own = visit.tenant_id
    if own is not None:
        if tenant_id not in (None, "", own):
            raise NotFound("There is no such tenant.")
        return await get_tenant(session, own)
    if tenant_id:
        return await get_tenant(session, tenant_id)
    return await session.scalar(select(Tenant).order_by(Tenant.id).limit(1))


async def tenant_choices(
    session: AsyncSession, visit: Visit, chosen: Tenant | None
) -> tuple[Choice, ...]:
    """What an operator may pick from, in order of name; nothing for others."""
    if visit.tenant_id is not None:
        return ()
    rows = await session.execute(
        select(Tenant.id, Tenant.name).order_by(Tenant.name).limit(MAX_CHOICES)
    )
    here = chosen.id if chosen else None
    return tuple(Choice(each, name, each == here) for each, name in rows.all())


async def tenant_filter(session: AsyncSession, visit: Visit, tenant_id: str) -> tuple[Choice, ...]:
    """What an operator may narrow a list to: everything, or one tenant; nothing for others."""
    if visit.tenant_id is not None:
        return ()
    tenant = await get_tenant(session, tenant_id) if tenant_id else None
    return (Choice("", "all", tenant is None), *await tenant_choices(session, visit, tenant))


async def tenant_names(session: AsyncSession, ids: Iterable[str | None]) -> dict[str | None, str]:
    """Names of tenants by id."""
    wanted = {each for each in ids if each is not None}
    rows = await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(wanted)))
    return dict(rows.all())


async def actor_names(session: AsyncSession, ids: Iterable[str]) -> dict[str, str]:
    """What people call those who made changes: users by name, keys by what they are for."""
    wanted = {*ids}
    users = await session.execute(select(User.id, User.name).where(User.id.in_(wanted)))
    keys = await session.execute(select(ApiKey.id, ApiKey.name).where(ApiKey.id.in_(wanted)))
    named = {each: f"key {name}" for each, name in keys.all()}
    return {each: each for each in wanted} | named | dict(users.all())
