"""Sign-in sessions: an opaque id in a cookie, a row in the database, gone when signed out.

Only the id's hash is stored. A session ends 12 hours after it began, and at once when its user is
disabled or its tenant suspended. Knows users and rows; refuses to know cookies and passwords.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import Tenant, User, UserSession
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now

LASTS: Final = timedelta(hours=12)


@dataclass(frozen=True)
class Signed:
    """A session that is open: whose it is, and under which hash it is stored."""

    digest: str
    user: User
    tenant: Tenant | None


async def open_session(db: Database, user_id: str) -> str:
    """Begin a session and return its id, which is stored nowhere; ended ones are swept."""
    token, now = secrets.token_urlsafe(32), utc_now()
    async with db.session(None) as session:
        await session.execute(delete(UserSession).where(UserSession.expires_at <= now))
        session.add(UserSession(digest=digest_of(token), user_id=user_id, expires_at=now + LASTS))
    return token


async def find_session(db: Database, token: str) -> Signed | None:
    """The session of this id, if it is open and its user may still be here."""
    digest = digest_of(token)
    statement = (
        select(User, Tenant)
        .join(UserSession, UserSession.user_id == User.id)
        .outerjoin(Tenant, Tenant.id == User.tenant_id)
        .where(UserSession.digest == digest, UserSession.expires_at > utc_now())
        .where(User.disabled_at.is_(None), Tenant.suspended_at.is_(None))
    )
    async with db.read(None) as session:
        found = (await session.execute(statement)).one_or_none()
    return None if found is None else Signed(digest, *found)


async def close_session(db: Database, digest: str) -> None:
    """End a session; twice is once."""
    async with db.session(None) as session:
        await session.execute(delete(UserSession).where(UserSession.digest == digest))


async def close_others(session: AsyncSession, user_id: str, digest: str) -> None:
    """End a user's sessions but this one, as when the password changes."""
    others = (UserSession.user_id == user_id) & (UserSession.digest != digest)
    await session.execute(delete(UserSession).where(others))


def digest_of(token: str) -> str:
    """What is stored of an id: it is random enough that one plain hash hides it."""
    return hashlib.sha256(token.encode()).hexdigest()
