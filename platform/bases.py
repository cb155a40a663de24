"""The base models that this platform has served, and which images were compiled for which.

Knows fingerprints and counts; refuses to know weights. An image serves one base only, so a version
that was compiled for another than the one that is served now is stale until it is uploaded again.
"""

from collections.abc import Sequence

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.images import BaseManifest
from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.models import Adapter, AdapterVersion, ServedBase
from loraplex.platform.db.page import MAX_PAGE, Page
from loraplex.platform.db.types import utc_now


async def note_served(session: AsyncSession, base: BaseManifest, variant: str) -> ServedBase:
    """Note that `base` is served now, its weights as `variant` ("bfloat16", "int8")."""
    existing = select(ServedBase).where(
        ServedBase.fingerprint == base.fingerprint, ServedBase.variant == variant
    )
    found = await session.scalar(existing)
    if found is None:
        fresh = ServedBase(
            fingerprint=base.fingerprint,
            variant=variant,
            name=base.name,
            num_layers=base.num_layers,
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
        )
        found = (await insert_or_find(session, fresh, existing))[0]
    found.name, found.last_served_at = base.name, utc_now()
    await session.flush()
    return found


async def list_bases(
    session: AsyncSession, *, after: tuple[str, str] | None = None, limit: int = 100
) -> Page[ServedBase]:
    """Bases in order of fingerprint and variant, after those given."""
    place = tuple_(ServedBase.fingerprint, ServedBase.variant)
    statement = select(ServedBase)
    if after is not None:
        statement = statement.where(place > after)
    limit = max(1, min(limit, MAX_PAGE))
    ordered = statement.order_by(ServedBase.fingerprint, ServedBase.variant).limit(limit + 1)
    rows = list(await session.scalars(ordered))
    return Page(rows[:limit], len(rows) > limit)


async def count_versions(
    session: AsyncSession, tenant_id: str | None, fingerprints: Sequence[str]
) -> dict[str, int]:
    """How many live versions, of one tenant or of all, were compiled for each base."""
    statement = select(AdapterVersion.base, func.count()).where(
        AdapterVersion.base.in_(fingerprints), AdapterVersion.deleted_at.is_(None)
    )
    if tenant_id is not None:
        statement = statement.where(AdapterVersion.tenant_id == tenant_id)
    rows = await session.execute(statement.group_by(AdapterVersion.base))
    return dict(iter(rows))


async def list_stale(
    session: AsyncSession,
    tenant_id: str,
    fingerprint: str,
    *,
    after: tuple[str, int] | None = None,
    limit: int = 100,
) -> Page[tuple[str, AdapterVersion]]:
    """A tenant's live versions for another base than `fingerprint`, by name and number."""
    place = tuple_(Adapter.name, AdapterVersion.number)
    statement = (
        select(Adapter.name, AdapterVersion)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.base != fingerprint,
            AdapterVersion.deleted_at.is_(None),
        )
    )
    if after is not None:
        statement = statement.where(place > after)
    limit = max(1, min(limit, MAX_PAGE))
    ordered = statement.order_by(Adapter.name, AdapterVersion.number).limit(limit + 1)
    rows = [(name, version) for name, version in await session.execute(ordered)]
    return Page(rows[:limit], len(rows) > limit)
