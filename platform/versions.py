"""The life of an adapter's versions: listed, retired, restored and deleted.

A retired version is no longer what the adapter's bare name means, but its number and its aliases
go on. Knows numbers and aliases; refuses to know images: what is deleted here leaves the store
later, once no request can need it.
"""

from collections.abc import Collection, Sequence

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.models import Adapter, AdapterVersion, Alias
from loraplex.platform.db.page import MAX_PAGE, Page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Conflict, ModelNotFound
from loraplex.platform.registry import get_adapter, live_versions


async def list_versions(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    *,
    before: int | None = None,
    limit: int = 100,
) -> Page[AdapterVersion]:
    """An adapter's versions with their `variants`, the newest first, those below the number
    `before` if it is given. Raises `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name)
    statement = _told().where(
        AdapterVersion.adapter_id == adapter.id, AdapterVersion.deleted_at.is_(None)
    )
    if before is not None:
        statement = statement.where(AdapterVersion.number < before)
    limit = max(1, min(limit, MAX_PAGE))
    newest = statement.order_by(AdapterVersion.number.desc()).limit(limit + 1)
    rows = list(await session.scalars(newest))
    return Page(rows[:limit], len(rows) > limit)


async def get_version(
    session: AsyncSession, tenant_id: str, name: str, number: int
) -> AdapterVersion:
    """One version with its `variants`; raises `ModelNotFound`."""
    adapter = await get_adapter(session, tenant_id, name)
    return await _find(session, adapter, number)


async def current(session: AsyncSession, adapters: Sequence[Adapter]) -> dict[str, AdapterVersion]:
    """The version that each adapter's bare name means, by the adapter's id.

    An adapter whose versions are all retired has none.
    """
    ids = [adapter.id for adapter in adapters]
    newest = (
        select(AdapterVersion.adapter_id, func.max(AdapterVersion.number).label("number"))
        .where(
            AdapterVersion.adapter_id.in_(ids),
            AdapterVersion.deleted_at.is_(None),
            AdapterVersion.retired_at.is_(None),
        )
        .group_by(AdapterVersion.adapter_id)
        .subquery()
    )
    same = (AdapterVersion.adapter_id == newest.c.adapter_id) & (
        AdapterVersion.number == newest.c.number
    )
    return {row.adapter_id: row for row in await session.scalars(_told().join(newest, same))}


async def live_numbers(
    session: AsyncSession, adapter: Adapter, numbers: Collection[int | None]
) -> set[int]:
    """Those of `numbers` that are versions of the adapter and not deleted."""
    wanted = [number for number in numbers if number is not None]
    rows = select(AdapterVersion.number).where(
        AdapterVersion.adapter_id == adapter.id,
        AdapterVersion.number.in_(wanted),
        AdapterVersion.deleted_at.is_(None),
    )
    return {*await session.scalars(rows)}


async def set_retired(
    session: AsyncSession, tenant_id: str, name: str, number: int, retired: bool, *, actor: Actor
) -> AdapterVersion:
    """Retire a version or restore it; twice is once, and noted once. Raises `ModelNotFound`."""
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    version = await _find(session, adapter, number)
    if retired != (version.retired_at is not None):
        version.retired_at = utc_now() if retired else None
        action = "version.retired" if retired else "version.restored"
        await audit.note(session, actor, action, f"{name}@{number}", tenant_id=tenant_id)
    return version


async def delete_version(
    session: AsyncSession, tenant_id: str, name: str, number: int, *, actor: Actor
) -> None:
    """Delete one version; its number is never given again, and requests in flight finish.

    Raises `Conflict` while an alias is at it, and for the only version; `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    version = await _find(session, adapter, number)
    await _check_unused(session, adapter, number)
    version.deleted_at = utc_now()
    await session.flush()
    target, digest = f"{name}@{number}", version.digest
    await audit.note(session, actor, "version.deleted", target, tenant_id=tenant_id, digest=digest)


async def _check_unused(session: AsyncSession, adapter: Adapter, number: int) -> None:
    at_it = (Alias.number == number) | (Alias.canary_number == number)
    names = select(Alias.name).where(Alias.adapter_id == adapter.id, at_it).order_by(Alias.name)
    if aliases := list(await session.scalars(names)):
        listed = ", ".join(f"{adapter.name}@{alias}" for alias in aliases)
        raise Conflict(f"{listed} would mean nothing; move or remove first.", param="version")
    others = live_versions(adapter.id).where(AdapterVersion.number != number).limit(1)
    if await session.scalar(others) is None:
        raise Conflict(
            f"It is the only version of {adapter.name}; delete the adapter instead.",
            param="version",
        )


async def _find(session: AsyncSession, adapter: Adapter, number: int) -> AdapterVersion:
    statement = _told().where(
        AdapterVersion.adapter_id == adapter.id,
        AdapterVersion.number == number,
        AdapterVersion.deleted_at.is_(None),
    )
    version = await session.scalar(statement.execution_options(populate_existing=True))
    if version is None:
        raise ModelNotFound(f"{adapter.name}@{number}", param="version")
    return version


def _told() -> Select[AdapterVersion]:
    return select(AdapterVersion).options(selectinload(AdapterVersion.variants))
