"""Tenants and their limits: made, listed, changed, suspended and resumed.

Knows the `tenants` table; refuses to know keys, adapters and how limits are enforced. An
operator's session writes; a tenant's session may read its own tenant only.
"""

import re
from dataclasses import dataclass, fields
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, NameConflict, NotFound

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "requests_per_minute": (1, 1_000_000),
    "tokens_per_minute": (1, 1_000_000_000),
    "max_concurrency": (1, 1_000_000),
    "weight": (0.01, 100),
    "max_running": (1, 1_000_000),
    "kv_share": (0.001, 1),
}


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may use; None is no limit. Raises `BadRequest` for an impossible one.

    The last three are what the engine grants it. A tenant that runs nothing may always start one
    request, however many sequences and KV blocks that takes.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    weight: float = 1.0  # of its share of the service
    max_running: int | None = None  # sequences at once
    kv_share: float = 1.0  # of the KV blocks, at most

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (least, most) = getattr(self, field.name), BOUNDS[field.name]
            if value is not None and not least <= value <= most:
                unless = ", or null for no limit" if field.default is None else ""
                raise BadRequest(
                    f"{field.name} must be between {least} and {most}{unless}.", param=field.name
                )

    @classmethod
    def of(cls, tenant: Tenant) -> "TenantLimits":
        """The limits that a row holds."""
        return cls(*(getattr(tenant, field.name) for field in fields(cls)))


async def create_tenant(
    session: AsyncSession, name: str, limits: TenantLimits | None = None
) -> Tenant:
    """Make a tenant; raises `BadRequest` for a bad name and `NameConflict` for a taken one."""
    if not NAME.fullmatch(name):
        raise BadRequest(
            "A tenant's name has 1 to 63 characters: lower-case letters, digits, '.', '_' and "
            "'-', and starts with a letter or digit.",
            param="name",
        )
    tenant = Tenant(name=name)
    _set_limits(tenant, limits or TenantLimits())
    tenant, inserted = await insert_or_find(
        session, tenant, select(Tenant).where(Tenant.name == name)
    )
    if not inserted:
        raise NameConflict(f"There is a tenant named {name!r} already.", param="name")
    return tenant


async def get_tenant(session: AsyncSession, tenant_id: str, *, lock: bool = False) -> Tenant:
    """The tenant of this id, locked if it is to be changed; raises `NotFound`."""
    tenant = await session.get(Tenant, tenant_id, with_for_update=FOR_CHANGE if lock else None)
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


async def set_limits(session: AsyncSession, tenant_id: str, limits: TenantLimits) -> Tenant:
    """Replace all limits of a tenant; the next request is held to the new ones."""
    tenant = await get_tenant(session, tenant_id, lock=True)
    _set_limits(tenant, limits)
    return tenant


async def set_suspended(session: AsyncSession, tenant_id: str, suspended: bool) -> Tenant:
    """Suspend a tenant, whose keys then open nothing, or resume it; twice is once."""
    tenant = await get_tenant(session, tenant_id, lock=True)
    if not suspended:
        tenant.suspended_at = None
    elif tenant.suspended_at is None:
        tenant.suspended_at = utc_now()
    return tenant


def _set_limits(tenant: Tenant, limits: TenantLimits) -> None:
    for field in fields(limits):
        setattr(tenant, field.name, getattr(limits, field.name))
