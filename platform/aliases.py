"""Aliases: names such as `prod` for one version of an adapter, moved by compare-and-swap.

An alias may be split: a share of the conversations tries a canary, until it is promoted or aborted.
Who moves an alias says at which revision they saw it, and is refused if it was moved meanwhile.
Every move stays in the history, and the last one can be taken back. Knows names and numbers;
refuses to know images and requests (`resolving` says what `name@alias` means).
"""

from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.canaries import Canary
from loraplex.platform.db.models import Adapter, AdapterVersion, Alias, AliasMove
from loraplex.platform.db.page import MAX_PAGE
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import AliasMoved, BadRequest, Conflict, ModelNotFound
from loraplex.platform.model_names import ALIAS
from loraplex.platform.registry import get_adapter
from loraplex.platform.versions import live_numbers

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
    actor: Actor,
    canary: Canary | None = None,
) -> Alias:
    """Let `name@alias` mean the version `number`, and for some conversations the `canary`.

    `seen` is the alias's revision as the caller knows it; 0: there is no such alias. Raises
    `AliasMoved` when it is another by now, `BadRequest` for a bad alias, `ModelNotFound`.
    """
    _check_alias(alias)
    if canary is not None and canary.number == number:
        raise BadRequest("The canary is the version itself.", param="canary.version")
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    if not await live_numbers(session, adapter, [number]):
        raise ModelNotFound(f"{name}@{number}", param="version")
    if canary is not None and not await live_numbers(session, adapter, [canary.number]):
        raise ModelNotFound(f"{name}@{canary.number}", param="canary.version")
    row = await _seen(session, adapter, alias, seen)
    if row is None and len(await _live(session, adapter)) >= MAX_ALIASES:
        raise BadRequest(f"An adapter has at most {MAX_ALIASES} aliases.", param="alias")
    return await _move(session, adapter, alias, number, canary, actor, "alias.moved")


async def promote(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, actor: Actor
) -> Alias:
    """Let the canary be what `name@alias` means to all. Raises as `move_alias` does.

    Raises `Conflict` also when there is no canary.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    row = await _split(session, adapter, alias, seen)
    return await _move(session, adapter, alias, row.canary_number, None, actor, "canary.promoted")


async def abort(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, actor: Actor
) -> Alias:
    """Drop the canary: the version that it was tried against goes to all. Raises as `promote`."""
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    row = await _split(session, adapter, alias, seen)
    return await _move(session, adapter, alias, row.number, None, actor, "canary.aborted")


async def roll_back(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, actor: Actor
) -> Alias:
    """Take the last move back, with the canary that was there; twice is where it was.

    Raises as `move_alias` does, and `Conflict` when there is no version to go back to.
    """
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    row = await _found(session, adapter, alias, seen)
    before = await session.get(AliasMove, (adapter.id, alias, row.revision - 1))
    if before is None or not await _is_live(session, adapter, before):
        raise Conflict(f"{name}@{alias} has no version to go back to.", param="alias")
    canary = canary_of(before)
    return await _move(session, adapter, alias, before.number, canary, actor, "alias.rolled_back")


async def remove_alias(
    session: AsyncSession, tenant_id: str, name: str, alias: str, *, seen: int, actor: Actor
) -> Alias:
    """Let `name@alias` mean nothing; its history stays. Raises as `move_alias` does."""
    adapter = await get_adapter(session, tenant_id, name, lock=True)
    await _found(session, adapter, alias, seen)
    return await _move(session, adapter, alias, None, None, actor, "alias.removed")


def canary_of(row: Alias | AliasMove) -> Canary | None:
    """The canary of an alias, or of a move of it, if it is split."""
    if row.canary_number is None or row.canary_percent is None:
        return None
    return Canary(row.canary_number, row.canary_percent)


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


async def _is_live(session: AsyncSession, adapter: Adapter, move: AliasMove) -> bool:
    """Whether the versions that an alias was moved to, one or two, are there."""
    numbers = [move.number] if move.canary_number is None else [move.number, move.canary_number]
    return len(await live_numbers(session, adapter, numbers)) == len(numbers)


async def _seen(session: AsyncSession, adapter: Adapter, alias: str, seen: int) -> Alias | None:
    """The alias, None where it means nothing, if that is what the caller has seen.

    The adapter's row is locked, so nobody else moves its aliases until the transaction ends.
    """
    row = await session.get(Alias, (adapter.id, alias), populate_existing=True)
    if row is not None and not await live_numbers(session, adapter, [row.number]):
        row = None
    revision = row.revision if row else 0
    if revision != seen:
        raise AliasMoved(f"{adapter.name}@{alias}", revision, seen)
    return row


async def _found(session: AsyncSession, adapter: Adapter, alias: str, seen: int) -> Alias:
    row = await _seen(session, adapter, alias, seen)
    if row is None:
        raise ModelNotFound(f"{adapter.name}@{alias}", param="alias")
    return row


async def _split(session: AsyncSession, adapter: Adapter, alias: str, seen: int) -> Alias:
    row = await _found(session, adapter, alias, seen)
    if canary_of(row) is None:
        raise Conflict(f"{adapter.name}@{alias} has no canary.", param="alias")
    return row


async def _move(
    session: AsyncSession,
    adapter: Adapter,
    alias: str,
    number: int | None,
    canary: Canary | None,
    actor: Actor,
    action: str,
) -> Alias:
    row = await session.get(Alias, (adapter.id, alias))
    if row is None:
        row = Alias(adapter_id=adapter.id, name=alias, tenant_id=adapter.tenant_id, revision=0)
        session.add(row)
    row.number, row.revision, row.moved_at = number, row.revision + 1, utc_now()
    row.canary_number = canary.number if canary else None
    row.canary_percent = canary.percent if canary else None
    await session.flush()
    session.add(_history(row, actor))
    target, told = f"{adapter.name}@{alias}", _told(row)
    await audit.note(session, actor, action, target, tenant_id=adapter.tenant_id, **told)
    return row


def _history(row: Alias, actor: Actor) -> AliasMove:
    return AliasMove(
        adapter_id=row.adapter_id,
        alias=row.name,
        tenant_id=row.tenant_id,
        revision=row.revision,
        number=row.number,
        canary_number=row.canary_number,
        canary_percent=row.canary_percent,
        moved_by=actor.id,
        moved_at=row.moved_at,
    )


def _told(row: Alias) -> dict[str, Any]:
    """What the audit log keeps of a move."""
    canary = canary_of(row)
    split = {"version": canary.number, "percent": canary.percent} if canary else None
    return {"version": row.number, "revision": row.revision, "canary": split}
