"""What the tests of keys share: keys made on any database, and the one refusal of bad ones."""

import pytest
from sqlalchemy import select

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import ApiKey, AuditEntry
from loraplex.platform.db.session import Database
from loraplex.platform.errors import InvalidKey
from loraplex.platform.keys import KeyRing


async def make(
    db: Database, ring: KeyRing, tenant_id: str | None, *scopes: str, **more: object
) -> tuple[ApiKey, str]:
    """A key of these scopes, or an admin's, and its secret."""
    chosen = scopes or ("admin",)
    async with db.session(tenant_id) as session:
        return await ring.create(session, tenant_id, "test", chosen, actor=SYSTEM, **more)


async def refusal(db: Database, ring: KeyRing, secret: str | None) -> tuple[object, ...]:
    """All that a caller is told who presents a bad key."""
    with pytest.raises(InvalidKey) as caught:
        await ring.authenticate(db, secret)
    error = caught.value
    return type(error), error.status, str(error), str(error.body), str(error.headers)


async def audited(db: Database) -> list[AuditEntry]:
    """The audit log, the oldest entry first."""
    async with db.read(None) as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))
