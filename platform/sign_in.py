"""Signing in: by name and password, or once by an invitation.

An invitation is the user's id, the moment at which it ends, and their HMAC together with the
user's password hash and last sign-in: it is stored nowhere, and dies when it is used, when the
user signs in otherwise, and when the password changes. Knows users and peppers; refuses to know
sessions and cookies, and to say why somebody may not sign in.
"""

import re
from datetime import timedelta
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import Tenant, User
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, Conflict
from loraplex.platform.passwords import check_password, hash_password, is_outdated
from loraplex.platform.peppers import Peppers
from loraplex.platform.users import get_user

LONGEST: Final = timedelta(days=7)
_TOKEN: Final = re.compile(r"(usr_[0-9a-z]{26})\.([0-9]{1,12})\.([0-9a-f]{64})")


async def verify(db: Database, name: str, password: str) -> User | None:
    """The user who signs in with this name and password, if they are right and may.

    Takes as long for names that nobody has. A hash that was made with older parameters is made
    anew.
    """
    async with db.read(None) as session:
        found = await session.scalar(select(User).where(User.name == name))
    stored, anew = found.password if found else None, None
    if not await check_password(stored, password) or found is None:
        return None
    if stored is not None and is_outdated(stored):
        anew = await hash_password(password)
    async with db.session(None) as session:
        user = await get_user(session, found.id, lock=True)
        if user.password != stored or not await _may_sign_in(session, user):
            return None
        user.password = anew or stored
        user.signed_in_at = utc_now()
        return user


async def invite(
    session: AsyncSession, peppers: Peppers, user_id: str, lasts: timedelta, *, actor: Actor
) -> tuple[str, int]:
    """A text that signs a user in once, and the second at which it ends, 7 days on at most.

    Raises `NotFound`, `BadRequest` for another duration, and `Conflict` for a disabled user.
    """
    user = await get_user(session, user_id, lock=True)
    if not timedelta(0) < lasts <= LONGEST:
        raise BadRequest(
            f"An invitation lasts 1 to {int(LONGEST.total_seconds())} seconds.", param="lasts_s"
        )
    if user.disabled_at is not None:
        raise Conflict("The user is disabled; enable it first.")
    ends = int((utc_now() + lasts).timestamp())
    await audit.note(
        session, actor, "user.changed", user.id, tenant_id=user.tenant_id, invited_until=ends
    )
    return f"{user.id}.{ends}.{peppers.digest(_signed(user, ends))}", ends


async def redeem(db: Database, peppers: Peppers, token: str) -> User | None:
    """The user whom an invitation signs in, now for the last time; None for a dead one."""
    match = _TOKEN.fullmatch(token)
    if match is None or int(match[2]) <= utc_now().timestamp():
        return None
    async with db.session(None) as session:
        user = await session.get(User, match[1], with_for_update=FOR_CHANGE)
        if user is None or not peppers.verify(_signed(user, int(match[2])), match[3]):
            return None
        if not await _may_sign_in(session, user):
            return None
        user.signed_in_at = utc_now()
        return user


async def _may_sign_in(session: AsyncSession, user: User) -> bool:
    tenant = await session.get(Tenant, user.tenant_id) if user.tenant_id else None
    return user.disabled_at is None and (tenant is None or tenant.suspended_at is None)


def _signed(user: User, ends: int) -> str:
    last = user.signed_in_at.isoformat() if user.signed_in_at else ""
    return f"loraplex invitation\0{user.id}\0{ends}\0{user.password or ''}\0{last}"
