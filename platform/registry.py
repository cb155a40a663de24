"""The registry: a tenant's adapters by name, and the immutable versions published under them.

Knows names, numbers and digests; refuses to know weights, files and the image store, and what a
request's `model` means (`resolving`). Versions are never changed and their numbers never used
again, even when a name is deleted and taken anew, so `name@1` never silently means other weights.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer
from sqlalchemy.orm.attributes import set_committed_value

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.candidates import is_named
from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.locks import lock_names
from loraplex.platform.db.models import Adapter, AdapterShare, AdapterVersion, ImageVariant
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, ModelNotFound, NameConflict
from loraplex.platform.model_names import NAME
from loraplex.platform.quotas import UNLIMITED


def check_name(name: str, base_name: str) -> str:
    """Return `name` if an adapter may have it.

    Raises `BadRequest` for a name outside the grammar, `NameConflict` for the base's own name.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(
            "An adapter's name has 1 to 63 characters: lower-case letters, digits, '.', '_' and "
            "'-', and starts with a letter or digit.",
            param="name",
        )
    if name == base_name.lower():
        raise NameConflict("That is the base model's name; choose another.", param="name")
    return name


async def add_version(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    *,
    digest: str,
    base: str,
    base_name: str,
    report: Mapping[str, Any],
    actor: Actor,
    dtype: str = "bf16",
    variants: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> AdapterVersion:
    """Publish an image as the next version of `name`, which is made if it is not there.

    `base` is the base's fingerprint; `report` is what the compiler said, with `rank` and `bytes`.
    `variants` are the same adapter's images of other dtypes: digest and bytes by dtype. Raises what
    `check_name` raises.
    """
    check_name(name, base_name)
    await lock_names(session, [digest, *(other for other, _ in variants.values())])
    adapter = await _claim(session, tenant_id, name)
    adapter.last_version += 1
    version = AdapterVersion(
        tenant_id=tenant_id,
        adapter_id=adapter.id,
        number=adapter.last_version,
        digest=digest,
        base=base,
        rank=report["rank"],
        image_bytes=report["bytes"],
        report=dict(report),
        dtype=dtype,
        created_by=actor.id,
    )
    session.add(version)
    await session.flush()
    await _add_variants(session, version, variants)
    target, details = f"{name}@{version.number}", {"digest": digest, "bytes": version.image_bytes}
    await audit.note(session, actor, "version.published", target, tenant_id=tenant_id, **details)
    return version


async def _add_variants(
    session: AsyncSession, version: AdapterVersion, variants: Mapping[str, tuple[str, int]]
) -> None:
    rows = [
        ImageVariant(
            version_id=version.id,
            dtype=dtype,
            tenant_id=version.tenant_id,
            digest=digest,
            image_bytes=size,
        )
        for dtype, (digest, size) in sorted(variants.items())
    ]
    session.add_all(rows)
    await session.flush()
    set_committed_value(version, "variants", rows)


async def get_adapter(
    session: AsyncSession, tenant_id: str, name: str, *, lock: bool = False
) -> Adapter:
    """A tenant's adapter, locked if it, its versions or its aliases are to be changed.

    Raises `ModelNotFound`.
    """
    statement = _live_adapters(tenant_id).where(Adapter.name == name)
    adapter = await session.scalar(_locking(statement) if lock else statement)
    if adapter is None:
        raise ModelNotFound(name)
    return adapter


async def list_adapters(
    session: AsyncSession,
    tenant_id: str,
    *,
    after: str | None = None,
    limit: int = 100,
    names: Collection[str] | None = None,
) -> Page[Adapter]:
    """A tenant's adapters in order of name, after the name `after`, of `names` if given."""
    statement = _live_adapters(tenant_id, names)
    return await fetch_page(session, statement, Adapter.name, after=after, limit=limit)


async def list_named(
    session: AsyncSession,
    tenant_id: str,
    *,
    after: str | None = None,
    limit: int = 100,
    names: Collection[str] | None = None,
) -> Page[Adapter]:
    """Those of a tenant's adapters whose bare name means a version, of `names` if given."""
    statement = _live_adapters(tenant_id, names).where(is_named())
    return await fetch_page(session, statement, Adapter.name, after=after, limit=limit)


async def delete_adapter(session: AsyncSession, tenant_id: str, name: str, *, actor: Actor) -> None:
    """Delete an adapter, its versions and its shares; the name is free again.

    Requests in flight keep their images. Raises `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    adapter.deleted_at = utc_now()
    for version in await session.scalars(live_versions(adapter.id)):
        version.deleted_at = adapter.deleted_at
    for share in await session.scalars(
        select(AdapterShare).where(AdapterShare.adapter_id == adapter.id)
    ):
        await session.delete(share)
    await session.flush()
    await audit.note(session, actor, "adapter.deleted", name, tenant_id=tenant_id)


def live_versions(adapter_id: str) -> Select[AdapterVersion]:
    """The versions of an adapter that are not deleted, without their reports."""
    return (
        select(AdapterVersion)
        .where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.deleted_at.is_(None))
        .options(defer(AdapterVersion.report, raiseload=True))
    )


def _live_adapters(tenant_id: str, names: Collection[str] | None = None) -> Select[Adapter]:
    live = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
    return live if names is None else live.where(Adapter.name.in_(names))


def _locking(statement: Select[Adapter]) -> Select[Adapter]:
    """The same rows, as they are once nobody else changes them."""
    return statement.with_for_update(key_share=True).execution_options(populate_existing=True)


async def _claim(session: AsyncSession, tenant_id: str, name: str) -> Adapter:
    """The row of a name, made or brought back to life, locked until the transaction ends."""
    existing = _locking(select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name))
    adapter = await session.scalar(existing)
    if adapter is None:
        fresh = Adapter(tenant_id=tenant_id, name=name)
        adapter = (await insert_or_find(session, fresh, existing))[0]
    if adapter.deleted_at is not None:
        adapter.deleted_at, adapter.created_at = None, utc_now()
        adapter.visibility, adapter.description = "private", None
        UNLIMITED.put(adapter)
    return adapter
