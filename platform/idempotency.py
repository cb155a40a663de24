"""Requests that named themselves, and the answers to them, so that a second one gets the same.

A name is its sender's own: another actor's same name is another. A row without an answer belongs to
the request that wrote its `created_at` last, for as long as that is no older than the lease; a
request whose server died is so forgotten soon, and may be sent again. That server may have made
the change without having kept its answer: only then is it made twice. Knows the table; refuses to
know HTTP, and to keep a secret that an answer told.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.insert import insert_or_find
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import IdempotentRequest
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import StillRunning

KEPT: Final = timedelta(hours=24)
LEASE_S: Final = 30.0
TOLD_ONCE: Final = frozenset({"secret"})


@dataclass(frozen=True)
class Kept:
    """An answer that was given; `fingerprint` is of the request that it was given to."""

    fingerprint: str
    status: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """The right to answer a named request, since `at`."""

    actor: str
    name: str
    at: datetime


async def claim(session: AsyncSession, actor: str, name: str) -> Claim | Kept:
    """Begin a named request, or find the answer that it got; an operator's session only.

    Raises `StillRunning` while another request of this name is being answered.
    """
    now = utc_now()
    await session.execute(
        delete(IdempotentRequest).where(IdempotentRequest.created_at < now - KEPT)
    )
    fresh = IdempotentRequest(actor=actor, name=name, fingerprint="", created_at=now)
    there = select(IdempotentRequest).filter_by(actor=actor, name=name)
    row, is_new = await insert_or_find(session, fresh, there.with_for_update(key_share=True))
    if is_new:
        return Claim(actor, name, now)
    if row.status is not None:
        return Kept(row.fingerprint, row.status, row.body or {})
    if row.created_at >= now - timedelta(seconds=LEASE_S):
        raise StillRunning("A request with this Idempotency-Key is being answered. Try again soon.")
    row.created_at = now
    return Claim(actor, name, now)


async def renew(session: AsyncSession, mine: Claim) -> Claim:
    """Say that the request is still being answered."""
    row, now = await _mine(session, mine), utc_now()
    if row is None:
        return mine
    row.created_at = now
    return Claim(mine.actor, mine.name, now)


async def keep(session: AsyncSession, mine: Claim, answer: Kept) -> None:
    """Keep the answer, but for what is told once, which is null from now on."""
    row = await _mine(session, mine)
    if row is not None:
        row.fingerprint, row.status = answer.fingerprint, answer.status
        row.body = {k: None if k in TOLD_ONCE else v for k, v in answer.body.items()}


async def drop(session: AsyncSession, mine: Claim) -> None:
    """Forget the request: it may be sent again."""
    row = await _mine(session, mine)
    if row is not None:
        await session.delete(row)


async def _mine(session: AsyncSession, mine: Claim) -> IdempotentRequest | None:
    """The row of a claim, locked, unless another request has it by now."""
    row = await session.get(IdempotentRequest, (mine.actor, mine.name), with_for_update=FOR_CHANGE)
    return row if row is not None and row.status is None and row.created_at == mine.at else None
