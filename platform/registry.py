"""The registry: which name and version of a tenant's adapters means which image.

Knows names, numbers and digests; refuses to know weights, files and the image store. Versions are
never changed and their numbers never used again, even when a name is deleted and taken anew, so
`name@1` never silently means other weights.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Select, false, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.locks import lock_names
from loraplex.platform.db.models import Adapter, AdapterVersion, Alias
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, ModelNotFound, NameConflict
from loraplex.platform.quotas import UNLIMITED, Limits

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ALIAS: Final = re.compile(r"[a-z][a-z0-9._-]{0,62}")
Arm = Literal["stable", "canary"]
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Resolved:
    """What a request's `model` means: the immutable id, and the image (None: the bare base).

    `adapter_id` is the id of the adapter's row and `limits` are its own; `owner` is the tenant that
    lets the caller use it, None for one of the caller's; `arm` is which side of a canary split was
    taken.
    """

    model_id: str
    digest: str | None = None
    adapter: str | None = None  # its name; "owner/name" for another tenant's
    version: int | None = None
    adapter_id: str | None = None
    limits: Limits = UNLIMITED
    owner: str | None = None
    public: bool = False
    arm: Arm | None = None


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
) -> AdapterVersion:
    """Publish an image as the next version of `name`, which is made if it is not there.

    `base` is the base's fingerprint; `report` is what the compiler said, with `rank` and `bytes`.
    Raises what `check_name` raises.
    """
    check_name(name, base_name)
    await lock_names(session, [digest])
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
    )
    session.add(version)
    await session.flush()
    return version


async def resolve(session: AsyncSession, tenant_id: str, model: str, base_name: str) -> Resolved:
    """What `model` means to this tenant.

    It is the base, `name` (its newest version), `name@number`, or `name@alias` (the version that
    the alias is at). Raises `ModelNotFound` when it means nothing, another tenant's adapter among
    the reasons.
    """
    if model == base_name:
        return Resolved(model)
    name, at, which = model.partition("@")
    if not NAME.fullmatch(name):
        raise ModelNotFound(model)
    newest = _newest(tenant_id, name)
    version = await session.scalar(_only(newest, which) if at else newest)
    if version is None:
        raise ModelNotFound(model)
    return Resolved(f"{name}@{version.number}", version.digest, name, version.number)


async def get_adapter(
    session: AsyncSession, tenant_id: str, name: str, *, lock: bool = False
) -> Adapter:
    """An adapter with its `versions`, oldest first, locked if it is to be changed.

    Raises `ModelNotFound`.
    """
    statement = _live_adapters(tenant_id).where(Adapter.name == name)
    adapter = await session.scalar(_locking(statement) if lock else statement)
    if adapter is None:
        raise ModelNotFound(name)
    return adapter


async def list_adapters(
    session: AsyncSession, tenant_id: str, *, after: str | None = None, limit: int = 100
) -> Page[Adapter]:
    """A tenant's adapters with their `versions`, in order of name, after the name `after`."""
    statement = _live_adapters(tenant_id)
    return await fetch_page(session, statement, Adapter.name, after=after, limit=limit)


async def delete_adapter(session: AsyncSession, tenant_id: str, name: str) -> set[str]:
    """Delete an adapter and its versions; the name is free again. Returns the images' digests.

    Requests in flight keep their image. Raises `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    adapter.deleted_at = utc_now()
    for version in adapter.versions:
        version.deleted_at = adapter.deleted_at
    await session.flush()
    return {version.digest for version in adapter.versions}


async def unreferenced(session: AsyncSession, digests: Collection[str]) -> set[str]:
    """Those of `digests` that no live version of any tenant names; an operator's session only.

    Until the session ends nobody publishes one of them. Remove an image in the same writing
    session as this was asked, and put an image into the store in the same writing session as
    `add_version`, after it: then no published image is ever removed.
    """
    await lock_names(session, digests)
    used = await session.scalars(
        select(AdapterVersion.digest).where(
            AdapterVersion.digest.in_(digests), AdapterVersion.deleted_at.is_(None)
        )
    )
    return {*digests} - {*used}


_LIVE: Final = AdapterVersion.deleted_at.is_(None) & Adapter.deleted_at.is_(None)


def _newest(tenant_id: str, name: str) -> Select[AdapterVersion]:
    """The newest live version of an adapter."""
    return (
        select(AdapterVersion)
        .join(AdapterVersion.adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.name == name, _LIVE)
        .order_by(AdapterVersion.number.desc())
        .limit(1)
    )


def _only(statement: Select[AdapterVersion], which: str) -> Select[AdapterVersion]:
    """Those of the versions that have the number or the alias `which`."""
    if _NUMBER.fullmatch(which):
        return statement.where(AdapterVersion.number == int(which))
    if not ALIAS.fullmatch(which):
        return statement.where(false())
    same = (Alias.adapter_id == AdapterVersion.adapter_id) & (Alias.number == AdapterVersion.number)
    return statement.join(Alias, same).where(Alias.name == which)


def _live_adapters(tenant_id: str) -> Select[Adapter]:
    return (
        select(Adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))
        .options(selectinload(Adapter.versions))
    )


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
    return adapter
