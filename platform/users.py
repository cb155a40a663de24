"""Users of the pages: made, listed, changed, and known by a password or a one-time sign-in.

An operator has no tenant; an admin and a viewer belong to one. Knows the `users` table and what
each role may do; refuses to know sessions, cookies and HTTP. Names are unique among all
tenants, since one signs in by them alone.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import Tenant, User
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, NameConflict, NotFound
from loraplex.platform.key_terms import Scope
from loraplex.platform.keys import Principal
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.tenants import get_tenant

Role = Literal["operator", "admin", "viewer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
SCOPES_OF: Final[Mapping[Role, tuple[Scope, ...]]] = {
    "operator": ("admin", "adapters:read", "adapters:write"),
    "admin": ("infer", "adapters:read", "adapters:write", "admin"),
    "viewer": ("adapters:read",),
}
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,62}")


async def create_user(
    session: AsyncSession, tenant_id: str | None, name: str, role: Role, *, actor: Actor
) -> User:
    """Make a user without a password, who signs in by invitation first.

    Raises `BadRequest` for a bad name, or a role that does not go with the tenant; `NotFound` for
    an unknown tenant, `NameConflict` for a taken name.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(
            "A user's name has 1 to 63 characters: lower-case letters, digits, '.', '_', '@', '+' "
            "and '-', and starts with a letter or digit.",
            param="name",
        )
    _check_role(tenant_id, role)
    if tenant_id is not None:
        await get_tenant(session, tenant_id)
    user = User(tenant_id=tenant_id, name=name, role=role)
    try:
        async with session.begin_nested():
            session.add(user)
            await session.flush()
    except IntegrityError as error:
        raise NameConflict(f"There is a user named {name!r} already.", param="name") from error
    await audit.note(
        session, actor, "user.created", user.id, tenant_id=tenant_id, name=name, role=role
    )
    return user


async def get_user(session: AsyncSession, user_id: str, *, lock: bool = False) -> User:
    """The user of this id, locked if it is to be changed; raises `NotFound`."""
    user = await session.get(User, user_id, with_for_update=FOR_CHANGE if lock else None)
    if user is None:
        raise NotFound(f"There is no user {user_id[:64]!r}.")
    return user


async def list_users(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> Page[User]:
    """Users in the order they were made, disabled ones too; of one tenant, if it is given."""
    statement = select(User)
    if tenant_id is not None:
        statement = statement.where(User.tenant_id == tenant_id)
    return await fetch_page(session, statement, User.id, after=after, limit=limit)


async def change_role(session: AsyncSession, user_id: str, role: Role, *, actor: Actor) -> User:
    """Give a user another role of its tenant; raises `NotFound` and `BadRequest`."""
    user = await get_user(session, user_id, lock=True)
    _check_role(user.tenant_id, role)
    if user.role != role:
        user.role = role
        await _note(session, actor, "user.changed", user, role=role)
    return user


async def set_disabled(
    session: AsyncSession, user_id: str, disabled: bool, *, actor: Actor
) -> User:
    """Keep a user from signing in, or let it again; twice is once. Raises `NotFound`."""
    user = await get_user(session, user_id, lock=True)
    if disabled and user.disabled_at is None:
        user.disabled_at = utc_now()
        await _note(session, actor, "user.disabled", user)
    elif not disabled and user.disabled_at is not None:
        user.disabled_at = None
        await _note(session, actor, "user.changed", user, disabled=False)
    return user


async def set_password(session: AsyncSession, user_id: str, hashed: str, *, actor: Actor) -> User:
    """Set what `hash_password` gave; invitations that are out end. Raises `NotFound`."""
    user = await get_user(session, user_id, lock=True)
    user.password = hashed
    await _note(session, actor, "user.changed", user, password=True)
    return user


def check_own_name(tenant: Tenant, name: str) -> None:
    """Hold names that a tenant's admin gives to the tenant's own: raises `BadRequest`.

    So a name that is taken tells an admin of no other tenant's users, and nobody takes a name that
    others may want.
    """
    if not name.endswith(f"@{tenant.name}"):
        raise BadRequest(
            f"The name has to end in '@{tenant.name}': only an operator gives others.",
            param="name",
        )


def scopes_of(role: str) -> tuple[Scope, ...]:
    """What a role may do."""
    return SCOPES_OF[cast("Role", role)]


def principal_of(user: User, tenant: Tenant | None) -> Principal:
    """What a user who has signed in may do; `tenant` is the user's."""
    return Principal(
        key_id=user.id,
        tenant_id=user.tenant_id,
        scopes=frozenset(scopes_of(user.role)),
        limits=TenantLimits() if tenant is None else TenantLimits.of(tenant),
        is_user=True,
    )


def _check_role(tenant_id: str | None, role: Role) -> None:
    if (role == "operator") != (tenant_id is None):
        raise BadRequest(
            "An operator belongs to no tenant; an admin and a viewer belong to one.", param="role"
        )


async def _note(
    session: AsyncSession, actor: Actor, action: str, user: User, **changed: object
) -> None:
    await audit.note(session, actor, action, user.id, tenant_id=user.tenant_id, **changed)
