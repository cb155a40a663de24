"""Whom an adapter's owner lets use it: nobody else, named tenants, or all; and who does.

Others name it `owner/name`, are charged for it themselves, and see nothing of it but its answers
and its name. What is taken back is gone with the next request. All of this runs in an operator's
session, because it looks across tenants; every query says whose rows it means.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any, Final, Literal

from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.candidates import foreign, is_named
from loraplex.platform.db.models import Adapter, AdapterShare, Tenant, UsageRecord
from loraplex.platform.db.page import MAX_PAGE, Page
from loraplex.platform.errors import BadRequest, NotFound
from loraplex.platform.quotas import Limits
from loraplex.platform.registry import get_adapter

Visibility = Literal["private", "shared", "public"]
MAX_SHARES: Final = 1_000
MAX_DESCRIPTION: Final = 500
_LIMITS: Final = frozenset(each.name for each in fields(Limits))


@dataclass(frozen=True)
class Use:
    """What one tenant's requests used of an adapter, in all."""

    tenant_id: str
    tenant: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


async def change_adapter(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    changes: Mapping[str, Any],
    *,
    shared_with: Collection[str] | None = None,
    actor: Actor,
) -> Adapter:
    """Change an adapter's visibility, description and limits, and who it is shared with.

    `changes` are columns by name; `shared_with` are all the tenants, by id or name, that use it
    while it is `shared`, None to leave them. Raises `ModelNotFound`, `NotFound` for an unknown
    tenant, `BadRequest` for a limit out of bounds or too many tenants.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    limits = {key: value for key, value in changes.items() if key in _LIMITS}
    replace(Limits.of(adapter), **limits).put(adapter)
    for key in changes.keys() & {"visibility", "description"}:
        setattr(adapter, key, changes[key])
    if changes:
        await audit.note(
            session, actor, "adapter.changed", name, tenant_id=tenant_id, **dict(changes)
        )
    if shared_with is not None:
        await _share(session, adapter, shared_with, actor)
    return adapter


async def shares_of(session: AsyncSession, adapters: Sequence[Adapter]) -> dict[str, list[str]]:
    """The ids of the tenants that each adapter is shared with, in order, by the adapter's id."""
    found: dict[str, list[str]] = {adapter.id: [] for adapter in adapters}
    rows = select(AdapterShare).where(AdapterShare.adapter_id.in_(found))
    for share in await session.scalars(rows.order_by(AdapterShare.with_tenant_id)):
        found[share.adapter_id].append(share.with_tenant_id)
    return found


async def list_foreign(
    session: AsyncSession,
    tenant_id: str,
    *,
    after: str | None = None,
    limit: int = 100,
    names: Collection[str] | None = None,
) -> Page[tuple[str, Adapter]]:
    """Others' adapters that the tenant may use, by owner and name, after "owner/name".

    Those with a version that is not retired, and of `names` ("owner/name") if they are given. Each
    comes with its owner's name.
    """
    place = tuple_(Tenant.name, Adapter.name)
    statement = (
        select(Tenant.name, Adapter)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(Adapter.deleted_at.is_(None), foreign(tenant_id), is_named())
    )
    if names is not None:
        statement = statement.where(place.in_([_place(each) for each in sorted(names)]))
    if after is not None:
        statement = statement.where(place > _place(after))
    limit = max(1, min(limit, MAX_PAGE))
    ordered = statement.order_by(Tenant.name, Adapter.name).limit(limit + 1)
    rows = [(owner, adapter) for owner, adapter in await session.execute(ordered)]
    return Page(rows[:limit], len(rows) > limit)


async def uses(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    *,
    since: date | None = None,
    until: date | None = None,
    after: str | None = None,
    limit: int = 100,
) -> Page[Use]:
    """Totals by calling tenant over UTC days, both included, in order of the tenant's id.

    The owner's own requests are among them. Raises `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name)
    owner = await session.get_one(Tenant, adapter.tenant_id)
    own = (UsageRecord.tenant_id == owner.id) & (UsageRecord.adapter == name)
    others = (UsageRecord.tenant_id != owner.id) & (UsageRecord.adapter == f"{owner.name}/{name}")
    statement = (
        select(
            Tenant.id,
            Tenant.name,
            func.count(),
            func.sum(UsageRecord.prompt_tokens),
            func.sum(UsageRecord.completion_tokens),
            func.sum(UsageRecord.cached_tokens),
        )
        .join(Tenant, Tenant.id == UsageRecord.tenant_id)
        .where(or_(own, others))
    )
    if since is not None:
        statement = statement.where(UsageRecord.day >= since)
    if until is not None:
        statement = statement.where(UsageRecord.day <= until)
    if after is not None:
        statement = statement.where(Tenant.id > after)
    limit = max(1, min(limit, MAX_PAGE))
    groups = statement.group_by(Tenant.id, Tenant.name).order_by(Tenant.id).limit(limit + 1)
    rows = [Use(*row) for row in await session.execute(groups)]
    return Page(rows[:limit], len(rows) > limit)


async def _share(
    session: AsyncSession, adapter: Adapter, shared_with: Collection[str], actor: Actor
) -> None:
    wanted = await _tenants(session, adapter, shared_with)
    kept = await session.scalars(select(AdapterShare).where(AdapterShare.adapter_id == adapter.id))
    rows = {share.with_tenant_id: share for share in kept}
    for tenant_id in wanted - rows.keys():
        session.add(
            AdapterShare(
                adapter_id=adapter.id, with_tenant_id=tenant_id, tenant_id=adapter.tenant_id
            )
        )
    for tenant_id in rows.keys() - wanted:
        await session.delete(rows[tenant_id])
    changed = {
        "adapter.shared": sorted(wanted - rows.keys()),
        "adapter.unshared": sorted(rows.keys() - wanted),
    }
    for action, tenants in changed.items():
        if tenants:
            owner, told = adapter.tenant_id, {"tenants": tenants}
            await audit.note(session, actor, action, adapter.name, tenant_id=owner, **told)


async def _tenants(session: AsyncSession, adapter: Adapter, given: Collection[str]) -> set[str]:
    """The ids of tenants given by id or, where there is no such id, by name."""
    if len(given) > MAX_SHARES:
        raise BadRequest(
            f"An adapter is shared with at most {MAX_SHARES} tenants; make it public instead.",
            param="shared_with",
        )
    rows = await session.execute(
        select(Tenant.id, Tenant.name).where(Tenant.id.in_(given) | Tenant.name.in_(given))
    )
    ids = {name: tenant_id for tenant_id, name in rows.all()}
    by_any = ids | {tenant_id: tenant_id for tenant_id in ids.values()}
    for each in given:
        if by_any.get(each) is None:
            raise NotFound(f"There is no tenant {each[:64]!r}.", param="shared_with")
        if by_any[each] == adapter.tenant_id:
            raise BadRequest("An adapter is not shared with its owner.", param="shared_with")
    return {by_any[each] for each in given}


def _place(name: str) -> tuple[str, str]:
    owner, _, adapter = name.partition("/")
    return owner, adapter
