"""The audit log: who changed what, written in the transaction of the change itself.

Knows ids, actions and small details; refuses to hold a secret, a prompt or an upload's content.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import AuditEntry
from loraplex.platform.db.page import MAX_PAGE, Page


@dataclass(frozen=True)
class Actor:
    """Who makes a change: the id of a key or a user, and the request it came with."""

    id: str
    request_id: str | None = None


SYSTEM: Final = Actor("system")


async def note(
    session: AsyncSession,
    actor: Actor,
    action: str,
    target: str,
    *,
    tenant_id: str | None,
    **details: Any,
) -> None:
    """Add an entry to the session that makes the change: both are kept, or neither.

    `action` is `noun.verb` in the past ("alias.moved"), `target` the id or name of what changed,
    and `tenant_id` whose it is; None where it is nobody's. `details` are plain JSON values.
    """
    entry = AuditEntry(
        tenant_id=tenant_id,
        actor=actor.id,
        action=action,
        target=target,
        details=details,
        request_id=actor.request_id,
    )
    session.add(entry)
    await session.flush()


async def list_entries(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    action: str | None = None,
    actor: str | None = None,
    target: str | None = None,
    since: datetime | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Page[AuditEntry]:
    """Entries that match what is given, the newest first, those before the id `before`.

    `since` is the moment of the earliest.
    """
    wanted = {"tenant_id": tenant_id, "action": action, "actor": actor, "target": target}
    statement = select(AuditEntry).filter_by(**{k: v for k, v in wanted.items() if v is not None})
    if since is not None:
        statement = statement.where(AuditEntry.created_at >= since)
    if before is not None:
        statement = statement.where(AuditEntry.id < before)
    limit = max(1, min(limit, MAX_PAGE))
    newest = statement.order_by(AuditEntry.id.desc()).limit(limit + 1)
    rows = list(await session.scalars(newest))
    return Page(rows[:limit], len(rows) > limit)
