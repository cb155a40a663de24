"""What the pages of adapters show, read from the registry in a few queries whatever their number.

Knows rows and where the engine has images; refuses to know HTTP and templates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.admin.whose import tenant_names
from loraplex.platform.aliases import canary_of
from loraplex.platform.db.models import Adapter, AdapterVersion, Alias, AliasMove
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.versions import current
from loraplex.web.contexts.adapters import AdapterRow, AliasView, Move, VersionRow
from loraplex.web.contexts.shell import Badge

PAGE = 50
MAX_MOVES = 10
VISIBLE = {"private": "its tenant", "shared": "named tenants", "public": "everyone"}


@dataclass(frozen=True)
class Found:
    """A page of the list: rows, and the id after which more follow."""

    rows: tuple[AdapterRow, ...]
    following: str | None


async def find_adapters(
    session: AsyncSession,
    tenant_id: str | None,
    query: str,
    after: str | None,
    resident: frozenset[str],
) -> Found:
    """Adapters whose names hold `query`, in order of name; of all tenants where None is given."""
    statement = select(Adapter).where(Adapter.deleted_at.is_(None))
    if tenant_id is not None:
        statement = statement.where(Adapter.tenant_id == tenant_id)
    if query:
        statement = statement.where(Adapter.name.contains(query.lower(), autoescape=True))
    if after and (last := await session.get(Adapter, after)) is not None:
        place = tuple_(Adapter.name, Adapter.id)
        statement = statement.where(place > (last.name, last.id))
    ordered = statement.order_by(Adapter.name, Adapter.id).limit(PAGE + 1)
    adapters = list(await session.scalars(ordered))
    shown = adapters[:PAGE]
    rows = await _rows(session, shown, tenant_id is None, resident)
    return Found(rows, shown[-1].id if len(adapters) > PAGE else None)


async def _rows(
    session: AsyncSession, adapters: Sequence[Adapter], told_owner: bool, resident: frozenset[str]
) -> tuple[AdapterRow, ...]:
    newest = await current(session, adapters)
    aliases = await _aliases(session, [each.id for each in adapters])
    names = await tenant_names(session, (each.tenant_id for each in adapters))
    return tuple(
        AdapterRow(
            name=each.name,
            href=f"/admin/adapters/{each.id}",
            owner=names[each.tenant_id] if told_owner else None,
            version=version.number if (version := newest.get(each.id)) else None,
            rank=version.rank if version else None,
            bytes=version.image_bytes if version else None,
            aliases=tuple(alias.name for alias in aliases.get(each.id, ())),
            residency=residency(version.digest if version else None, resident),
            visibility=VISIBLE[each.visibility],
            created_at=each.created_at,
        )
        for each in adapters
    )


async def _aliases(session: AsyncSession, ids: Sequence[str]) -> dict[str, list[Alias]]:
    found: dict[str, list[Alias]] = {}
    live = select(Alias).where(Alias.adapter_id.in_(ids), Alias.number.is_not(None))
    for alias in await session.scalars(live.order_by(Alias.name)):
        found.setdefault(alias.adapter_id, []).append(alias)
    return found


async def get_adapter_of(session: AsyncSession, tenant_id: str | None, adapter_id: str) -> Adapter:
    """An adapter by its id; raises `ModelNotFound` for one that is not there, or another's."""
    adapter = await session.get(Adapter, adapter_id)
    hidden = adapter is None or adapter.deleted_at is not None
    if adapter is None or hidden or tenant_id not in (None, adapter.tenant_id):
        raise ModelNotFound(adapter_id[:64])
    return adapter


async def alias_views(
    session: AsyncSession, adapter: Adapter, who: dict[str, str]
) -> tuple[AliasView, ...]:
    """An adapter's aliases, each with its latest moves; `who` names those who made them."""
    rows = (await _aliases(session, [adapter.id])).get(adapter.id, [])
    moves = await moves_of(session, adapter)
    return tuple(_alias(row, [m for m in moves if m.alias == row.name], who) for row in rows)


async def moves_of(session: AsyncSession, adapter: Adapter) -> list[AliasMove]:
    """The latest moves of all aliases of an adapter."""
    statement = select(AliasMove).where(AliasMove.adapter_id == adapter.id)
    newest = statement.order_by(AliasMove.moved_at.desc()).limit(10 * MAX_MOVES)
    return list(await session.scalars(newest))


def _alias(row: Alias, moves: Sequence[AliasMove], who: dict[str, str]) -> AliasView:
    canary = canary_of(row)
    newest = sorted(moves, key=lambda move: -move.revision)[:MAX_MOVES]
    return AliasView(
        name=row.name,
        revision=row.revision,
        version=row.number or 0,
        canary=canary.number if canary else None,
        percent=canary.percent if canary else None,
        moves=tuple(
            Move(m.revision, _target(m), who.get(m.moved_by, m.moved_by), m.moved_at)
            for m in newest
        ),
        can_roll_back=row.revision > 1,
    )


def _target(move: AliasMove) -> str:
    if move.number is None:
        return "removed"
    canary = canary_of(move)
    return (
        f"{move.number}, and {canary.number} for {canary.percent:g}%"
        if canary
        else f"{move.number}"
    )


def version_row(
    version: AdapterVersion,
    aliases: Sequence[AliasView],
    resident: frozenset[str],
    base: str,
    newest: AdapterVersion | None,
) -> VersionRow:
    """One version; `base` is the served base's fingerprint, `newest` what the bare name means."""
    return VersionRow(
        number=version.number,
        digest=version.digest,
        rank=version.rank,
        bytes=version.image_bytes,
        dtype=", ".join([version.dtype, *(each.dtype for each in version.variants)]),
        modules=modules_of(version.report),
        aliases=tuple(
            each.name for each in aliases if version.number in (each.version, each.canary)
        ),
        state=_state(version, base),
        residency=residency(version.digest, resident),
        created_at=version.created_at,
        retired=version.retired_at is not None,
        is_current=newest is not None and newest.number == version.number,
    )


def _state(version: AdapterVersion, base: str) -> Badge:
    if version.base != base:
        return Badge("for another base", "bad")
    return Badge("retired", "warn") if version.retired_at else Badge("ready", "good")


def modules_of(report: dict[str, Any]) -> str:
    """`7 linears, 30 layers`."""
    modules = report.get("modules")
    if not isinstance(modules, dict) or not modules:
        return ""
    return f"{len(modules)} linears, up to {max(modules.values())} layers"


def residency(digest: str | None, resident: frozenset[str]) -> Badge:
    """Where an image is."""
    if digest is None:
        return Badge("retired", "warn")
    return Badge("in memory", "good") if digest in resident else Badge("stored")
