"""Aliases: names such as `prod` for one version of an adapter, moved by compare-and-swap.

Who moves an alias says at which revision they saw it, and is refused if it was moved meanwhile.
Every move stays in the history, and the last one can be taken back. Knows names and numbers;
refuses to know images and requests (`registry.resolve` says what `name@alias` means).
"""

from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import Adapter, AdapterVersion, Alias, AliasMove
from loraplex.platform.db.page import MAX_PAGE
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import AliasMoved, BadRequest, Conflict, ModelNotFound
from loraplex.platform.registry import ALIAS, get_adapter

RESERVED: Final = "latest"
MAX_ALIASES: Final = 100


async def move_alias(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    alias: str,
    number: int,
    *,
    seen: int,
    by: str,
) -> Alias:
    """Let `name@alias` mean the version `number`; `by` is the id of the key that asks.

    `seen` is the alias's revision as the caller knows it; 0: there is no such alias. Raises
    `AliasMoved` when it is another by now, `BadRequest` for a bad alias, `ModelNotFound`.
    """
    _check_alias(alias)
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    if number not in _numbers(adapter):
        raise ModelNotFound(f"{name}@{number}", param="version")
    row = await _seen(session, adapter, alias, seen)
    if row is None and len(await _live(session, adapter)) >= MAX_ALIASES:
        raise BadRequest(f"An adapter has at most {MAX_ALIASES} aliases.", param="alias")
    return await _move(session, adapter, alias, number, by)


async def roll_back(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, by: str
) -> Alias:
    """Take the last move back; twice is where it was. Raises as `move_alias` does.

    Raises `Conflict` also when there is no version to go back to.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    row = await _seen(session, adapter, alias, seen)
    if row is None:
        raise ModelNotFound(f"{name}@{alias}", param="alias")
    before = await session.get(AliasMove, (adapter.id, alias, row.revision - 1))
    if before is None or before.number not in _numbers(adapter):
        raise Conflict(f"{name}@{alias} has no version to go back to.", param="alias")
    return await _move(session, adapter, alias, before.number, by)


async def remove_alias(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, by: str
) -> Alias:
    """Let `name@alias` mean nothing; its history stays. Raises as `move_alias` does."""
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    if await _seen(session, adapter, alias, seen) is None:
        raise ModelNotFound(f"{name}@{alias}", param="alias")
    return await _move(session, adapter, alias, None, by)


async def list_aliases(session: AsyncSession, tenant_id: str, name: str) -> list[Alias]:
    """An adapter's aliases in order of name, at most `MAX_ALIASES`; raises `ModelNotFound`."""
    return await _live(session, await get_adapter(session, tenant_id, name))


async def list_moves(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    alias: str,
    *,
    before: int | None = None,
    limit: int = 100,
) -> list[AliasMove]:
    """An alias's moves, the newest first, those before the revision `before` if it is given.

    Moves of an alias that was removed are among them. Raises `ModelNotFound`.
    """
    adapter = await get_adapter(session, tenant_id, name)
    moves = select(AliasMove).where(AliasMove.adapter_id == adapter.id, AliasMove.alias == alias)
    if before is not None:
        moves = moves.where(AliasMove.revision < before)
    newest = moves.order_by(AliasMove.revision.desc()).limit(max(1, min(limit, MAX_PAGE)))
    return list(await session.scalars(newest))


def _check_alias(alias: str) -> None:
    if not ALIAS.fullmatch(alias) or alias == RESERVED:
        raise BadRequest(
            "An alias has 1 to 63 characters: lower-case letters, digits, '.', '_' and '-', and "
            f"starts with a letter; {RESERVED!r} is none, because a name alone means the newest.",
            param="alias",
        )


def _numbers(adapter: Adapter) -> set[int]:
    return {version.number for version in adapter.versions}


async def _live(session: AsyncSession, adapter: Adapter) -> list[Alias]:
    """The aliases that are at a version which is there."""
    same = (AdapterVersion.adapter_id == Alias.adapter_id) & (AdapterVersion.number == Alias.number)
    statement = (
        select(Alias)
        .join(AdapterVersion, same)
        .where(Alias.adapter_id == adapter.id, AdapterVersion.deleted_at.is_(None))
        .order_by(Alias.name)
        .limit(MAX_ALIASES)
    )
    return list(await session.scalars(statement))


async def _seen(session: AsyncSession, adapter: Adapter, alias: str, seen: int) -> Alias | None:
    """The alias, None where it means nothing, if that is what the caller has seen.

    The adapter's row is locked, so nobody else moves its aliases until the transaction ends.
    """
    row = await session.get(Alias, (adapter.id, alias), populate_existing=True)
    if row is not None and row.number not in _numbers(adapter):
        row = None
    revision = row.revision if row else 0
    if revision != seen:
        raise AliasMoved(f"{adapter.name}@{alias}", revision, seen)
    return row


async def _move(
    session: AsyncSession, adapter: Adapter, alias: str, number: int | None, by: str
) -> Alias:
    row = await session.get(Alias, (adapter.id, alias))
    if row is None:
        row = Alias(adapter_id=adapter.id, name=alias, tenant_id=adapter.tenant_id, revision=0)
        session.add(row)
    row.number, row.revision, row.moved_at = number, row.revision + 1, utc_now()
    await session.flush()
    session.add(
        AliasMove(
            adapter_id=adapter.id,
            alias=alias,
            tenant_id=adapter.tenant_id,
            revision=row.revision,
            number=number,
            moved_by=by,
            moved_at=row.moved_at,
        )
    )
    await session.flush()
    return row
