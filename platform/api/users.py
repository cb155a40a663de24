"""/v1/users: who signs in to the pages; all for an operator, its own tenant's for an admin."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from loraplex.platform.api.auth import Acting, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.keys import check_grant
from loraplex.platform.api.schemas import After, Listed, PageSize, listed
from loraplex.platform.api.user_schemas import (
    InvitationIn,
    InvitationOut,
    PasswordIn,
    UserChange,
    UserId,
    UserIn,
    UserOut,
)
from loraplex.platform.api.whose import administered
from loraplex.platform.errors import Forbidden
from loraplex.platform.keys import Principal
from loraplex.platform.passwords import hash_password
from loraplex.platform.sign_in import invite
from loraplex.platform.tenants import get_tenant
from loraplex.platform.users import (
    change_role,
    check_own_name,
    create_user,
    get_user,
    list_users,
    scopes_of,
    set_disabled,
    set_password,
)

router = APIRouter(prefix="/v1/users", tags=["users"])
Administering = Annotated[Principal, Depends(allow("admin"))]
OfTenant = Annotated[
    str | None, Query(max_length=64, description="For operators: users of this tenant only.")
]


@router.post("", status_code=201)
async def create(principal: Administering, actor: Acting, ctx: Ctx, body: UserIn) -> UserOut:
    """Make a user, who signs in by invitation first and has no password yet."""
    tenant_id = administered(principal, body.tenant_id)
    _check_role(principal, body.role)
    async with ctx.db.session(principal.tenant_id) as session:
        if principal.tenant_id is not None:
            check_own_name(await get_tenant(session, principal.tenant_id), body.name)
        return UserOut.of(await create_user(session, tenant_id, body.name, body.role, actor=actor))


@router.get("")
async def list_all(
    principal: Administering,
    ctx: Ctx,
    tenant_id: OfTenant = None,
    after: After = None,
    limit: PageSize = 100,
) -> Listed[UserOut]:
    """Users in the order they were made, disabled ones too."""
    wanted = administered(principal, tenant_id)
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_users(session, tenant_id=wanted, after=after, limit=limit)
    return listed(page, [UserOut.of(user) for user in page.items])


@router.get("/{user_id}")
async def get_one(principal: Administering, ctx: Ctx, user_id: UserId) -> UserOut:
    """One user; never their password."""
    async with ctx.db.read(principal.tenant_id) as session:
        return UserOut.of(await get_user(session, user_id))


@router.patch("/{user_id}")
async def change(
    principal: Administering, actor: Acting, ctx: Ctx, user_id: UserId, body: UserChange
) -> UserOut:
    """Change a user's role within its tenant, or keep it from signing in."""
    async with ctx.db.session(principal.tenant_id) as session:
        user = await get_user(session, user_id, lock=True)
        if body.role is not None:
            _check_role(principal, body.role)
            user = await change_role(session, user_id, body.role, actor=actor)
        if body.disabled is not None:
            user = await set_disabled(session, user_id, body.disabled, actor=actor)
        return UserOut.of(user)


@router.put("/{user_id}/password")
async def replace_password(
    principal: Administering, actor: Acting, ctx: Ctx, user_id: UserId, body: PasswordIn
) -> UserOut:
    """Set a user's password; invitations that are out die."""
    async with ctx.db.read(principal.tenant_id) as session:
        _check_role(principal, (await get_user(session, user_id)).role)
    hashed = await hash_password(body.password.get_secret_value())
    async with ctx.db.session(principal.tenant_id) as session:
        return UserOut.of(await set_password(session, user_id, hashed, actor=actor))


@router.post("/{user_id}/invitations", status_code=201)
async def create_invitation(
    principal: Administering, actor: Acting, ctx: Ctx, user_id: UserId, body: InvitationIn
) -> InvitationOut:
    """Make what signs a user in once. It is in this answer and nowhere else."""
    lasts = timedelta(seconds=body.lasts_s)
    async with ctx.db.session(principal.tenant_id) as session:
        _check_role(principal, (await get_user(session, user_id, lock=True)).role)
        secret, ends = await invite(session, ctx.keys.peppers, user_id, lasts, actor=actor)
    return InvitationOut(user_id=user_id, secret=secret, expires_at=ends)


def _check_role(principal: Principal, role: str) -> None:
    """Nobody makes a user, or signs in as one, who may do more than they."""
    if role == "operator" and not principal.is_operator:
        raise Forbidden("Only an operator makes operators.")
    check_grant(principal, scopes_of(role))
