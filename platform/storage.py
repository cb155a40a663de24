"""How many bytes of images a tenant has in the store, and whether it may have more.

Each image that a live version or variant of a tenant's names is counted once for that tenant, and
for each tenant that has it: what others have neither makes an upload cheaper nor tells of theirs.
Knows rows and limits; refuses to know files.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Subquery, func, select, union
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import Adapter, AdapterVersion, ImageVariant, Tenant
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.errors import QuotaExceeded
from loraplex.platform.tenants import get_tenant

WHERE_TO_LOOK = "GET /v1/storage shows what is used, GET /v1/adapters what could go."


@dataclass(frozen=True)
class Stored:
    """What a tenant keeps: bytes of its `images`, each counted once, and its live `adapters`."""

    bytes: int = 0
    adapters: int = 0
    images: int = 0


async def used(session: AsyncSession, tenant_id: str) -> Stored:
    """What a tenant keeps now."""
    return (await used_by(session, [tenant_id])).get(tenant_id, Stored())


async def used_by(session: AsyncSession, tenant_ids: list[str]) -> dict[str, Stored]:
    """What each of these tenants keeps; those that keep nothing are left out."""
    images, live = _images(tenant_ids), Adapter.deleted_at.is_(None)
    held = await session.execute(
        select(images.c.tenant_id, func.sum(images.c.image_bytes), func.count()).group_by(
            images.c.tenant_id
        )
    )
    named = await session.execute(
        select(Adapter.tenant_id, func.count())
        .where(Adapter.tenant_id.in_(tenant_ids), live)
        .group_by(Adapter.tenant_id)
    )
    sizes = {tenant: (int(size), count) for tenant, size, count in held}
    adapters = dict(named.all())
    return {
        tenant: Stored(size, adapters.get(tenant, 0), count)
        for tenant in sizes.keys() | adapters.keys()
        for size, count in [sizes.get(tenant, (0, 0))]
    }


async def list_used(
    session: AsyncSession, *, only: str | None = None, after: str | None = None, limit: int = 100
) -> Page[tuple[Tenant, Stored]]:
    """Tenants, or one of them, in order of id, after the id `after`, each with what it keeps."""
    statement = select(Tenant) if only is None else select(Tenant).where(Tenant.id == only)
    page = await fetch_page(session, statement, Tenant.id, after=after, limit=limit)
    kept = await used_by(session, [tenant.id for tenant in page.items])
    rows = [(tenant, kept.get(tenant.id, Stored())) for tenant in page.items]
    return Page(rows, page.has_more)


async def charge(
    session: AsyncSession, tenant_id: str, additions: Mapping[str, int], *, new_adapter: bool
) -> Stored:
    """See that a tenant may keep `additions` (bytes by digest) too; returns what it keeps then.

    Call it before the rows are added, in their transaction: the tenant's row is locked until that
    ends, so that of two uploads at once the second counts what the first has added. Raises
    `QuotaExceeded` that names the limit, its use and what to do.
    """
    tenant = await get_tenant(session, tenant_id, lock=True)
    now = await used(session, tenant_id)
    fresh = await _not_held(session, tenant_id, additions)
    then = Stored(
        now.bytes + sum(fresh.values()), now.adapters + new_adapter, now.images + len(fresh)
    )
    _check(tenant, now, then)
    return then


def _check(tenant: Tenant, now: Stored, then: Stored) -> None:
    if tenant.storage_bytes is not None and then.bytes > max(tenant.storage_bytes, now.bytes):
        raise QuotaExceeded(
            f"The limit storage_bytes is {tenant.storage_bytes}, of which {now.bytes} are used by "
            f"{now.images} images; this upload needs {then.bytes - now.bytes} more. Delete "
            f"adapters or versions, or ask for a higher limit. {WHERE_TO_LOOK}",
            param="storage_bytes",
        )
    if tenant.max_adapters is not None and then.adapters > max(tenant.max_adapters, now.adapters):
        raise QuotaExceeded(
            f"The limit max_adapters is {tenant.max_adapters}, and {now.adapters} are there. "
            "Delete one, publish a version of one that is there, or ask for a higher limit. "
            f"{WHERE_TO_LOOK}",
            param="max_adapters",
        )


async def _not_held(
    session: AsyncSession, tenant_id: str, additions: Mapping[str, int]
) -> dict[str, int]:
    """Those of `additions` that the tenant does not keep already."""
    images = _images([tenant_id])
    held = set(await session.scalars(select(images.c.digest).where(images.c.digest.in_(additions))))
    return {digest: size for digest, size in additions.items() if digest not in held}


def _images(tenant_ids: list[str]) -> Subquery:
    """Each image of each of these tenants once: `tenant_id`, `digest`, `image_bytes`."""
    live = AdapterVersion.deleted_at.is_(None)
    versions = select(
        AdapterVersion.tenant_id, AdapterVersion.digest, AdapterVersion.image_bytes
    ).where(AdapterVersion.tenant_id.in_(tenant_ids), live)
    variants = (
        select(ImageVariant.tenant_id, ImageVariant.digest, ImageVariant.image_bytes)
        .join(AdapterVersion, AdapterVersion.id == ImageVariant.version_id)
        .where(ImageVariant.tenant_id.in_(tenant_ids), live)
    )
    return union(versions, variants).subquery()
