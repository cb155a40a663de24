"""Tenants and their limits: made, listed, changed, suspended and resumed, all of it audited.

Knows the `tenants` table; refuses to know keys, adapters and how limits are enforced. An
operator's session writes; a tenant's session may read its own tenant only.
"""

import re
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.audit import Actor, note
from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, NameConflict, NotFound
from loraplex.platform.quotas import TenantLimits

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


async def create_tenant(
    session: AsyncSession, name: str, limits: TenantLimits | None = None, *, actor: Actor
) -> Tenant:
    """Make a tenant; raises `BadRequest` for a bad name and `NameConflict` for a taken one."""
    if not NAME.fullmatch(name):
        raise BadRequest(
            "A tenant's name has 1 to 63 characters: lower-case letters, digits, '.', '_' and "
            "'-', and starts with a letter or digit.",
            param="name",
        )
    tenant = Tenant(name=name)
    (limits or TenantLimits()).put(tenant)
    tenant, inserted = await insert_or_find(
        session, tenant, select(Tenant).where(Tenant.name == name)
    )
    if not inserted:
        raise NameConflict(f"There is a tenant named {name!r} already.", param="name")
    given = _difference(TenantLimits(), TenantLimits.of(tenant))
    await note(
        session, actor, "tenant.created", tenant.id, tenant_id=tenant.id, name=name, limits=given
    )
    return tenant


async def get_tenant(session: AsyncSession, tenant_id: str, *, lock: bool = False) -> Tenant:
    """The tenant of this id, locked and read anew if it is to be changed; raises `NotFound`."""
    tenant = await session.get(
        Tenant,
        tenant_id,
        with_for_update=FOR_CHANGE if lock else None,
        populate_existing=lock,
    )
    if tenant is None:
        raise NotFound(f"There is no tenant {tenant_id[:64]!r}.")
    return tenant


async def find_tenant(session: AsyncSession, name: str) -> Tenant | None:
    """The tenant of this name, if there is one."""
    return await session.scalar(select(Tenant).where(Tenant.name == name))


async def list_tenants(
    session: AsyncSession, *, after: str | None = None, limit: int = 100
) -> Page[Tenant]:
    """Tenants in the order they were made, after the id `after`."""
    return await fetch_page(session, select(Tenant), Tenant.id, after=after, limit=limit)


async def set_limits(
    session: AsyncSession, tenant_id: str, limits: TenantLimits, *, actor: Actor
) -> Tenant:
    """Replace all limits of a tenant; the next request is held to the new ones."""
    tenant = await get_tenant(session, tenant_id, lock=True)
    changes = _difference(TenantLimits.of(tenant), limits)
    if changes:
        limits.put(tenant)
        await note(session, actor, "tenant.changed", tenant.id, tenant_id=tenant.id, limits=changes)
    return tenant


async def set_suspended(
    session: AsyncSession, tenant_id: str, suspended: bool, *, actor: Actor
) -> Tenant:
    """Suspend a tenant, whose keys then open nothing, or resume it; twice is once."""
    tenant = await get_tenant(session, tenant_id, lock=True)
    if suspended != (tenant.suspended_at is not None):
        tenant.suspended_at = utc_now() if suspended else None
        action = "tenant.suspended" if suspended else "tenant.resumed"
        await note(session, actor, action, tenant.id, tenant_id=tenant.id)
    return tenant


def _difference(before: TenantLimits, after: TenantLimits) -> dict[str, Any]:
    """The limits that differ, as they are after."""
    known = vars(before)
    return {name: value for name, value in vars(after).items() if value != known[name]}
