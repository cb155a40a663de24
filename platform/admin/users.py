"""The screen of users: who may sign in, and invitations that are shown this once.

Knows forms; refuses to know how an invitation is made.
"""

from dataclasses import replace
from typing import Annotated, Final

from fastapi import APIRouter, Form, Query, Request
from sqlalchemy import select
from starlette.responses import Response

from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import by_field, go, page, pager, shell
from loraplex.platform.admin.visit import PATH, Visit, Writing
from loraplex.platform.admin.whose import tenant_names
from loraplex.platform.api import users as api
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.user_schemas import InvitationIn, UserChange, UserIn
from loraplex.platform.db.models import Tenant, User
from loraplex.platform.errors import ApiError, BadRequest
from loraplex.platform.users import ROLES, Role, list_users
from loraplex.web.contexts.records import UserRow, UsersPage
from loraplex.web.contexts.shell import Badge, Choice

router = APIRouter(prefix=f"{PATH}/users", route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=64)]
Text = Annotated[str, Form(max_length=256)]
PAGE = 100
ROLE_WORDS: Final = {
    "operator": "operator: everything",
    "admin": "admin: all of its tenant",
    "viewer": "viewer: looks, changes nothing",
}


@router.get("")
async def show_users(request: Request, ctx: Ctx, visit: Writing, after: Short = "") -> Response:
    """The list, and the form for a new user."""
    return page(await _list(request, ctx, visit, after))


@router.post("")
async def create(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    name: Text,
    role: Annotated[Role, Form()],
    tenant: Text = "",
) -> Response:
    """Make a user, and show the code that signs them in once."""
    try:
        whose = await _tenant_id(ctx, visit, tenant.strip())
        body = UserIn(name=name.strip(), role=role, tenant_id=whose)
        made = await api.create(visit.principal, visit.actor, ctx, body)
    except ApiError as error:
        context = await _list(request, ctx, visit, "")
        context = replace(
            context,
            name=name,
            tenant=tenant,
            roles=tuple(replace(each, chosen=each.value == role) for each in context.roles),
            wrong=by_field(error, name="name", role="role", tenant="tenant"),
        )
        return page(context)
    return await _invited(request, ctx, visit, made.id)


@router.post("/{user_id}/invite")
async def invite(request: Request, ctx: Ctx, visit: Writing, user_id: str) -> Response:
    """Show a new code."""
    return await _invited(request, ctx, visit, user_id)


@router.post("/{user_id}/disable")
async def disable(ctx: Ctx, visit: Writing, user_id: str) -> Response:
    """Keep a user from signing in."""
    await api.change(visit.principal, visit.actor, ctx, user_id, UserChange(disabled=True))
    return go(f"{PATH}/users", "user-disabled")


@router.post("/{user_id}/enable")
async def enable(ctx: Ctx, visit: Writing, user_id: str) -> Response:
    """Let a user sign in again."""
    await api.change(visit.principal, visit.actor, ctx, user_id, UserChange(disabled=False))
    return go(f"{PATH}/users", "user-enabled")


async def _invited(request: Request, ctx: Context, visit: Visit, user_id: str) -> Response:
    made = await api.create_invitation(visit.principal, visit.actor, ctx, user_id, InvitationIn())
    user = await api.get_one(visit.principal, ctx, user_id)
    context = await _list(request, ctx, visit, "")
    return page(replace(context, invitation=(user.name, made.secret or "")))


async def _tenant_id(ctx: Context, visit: Visit, name: str) -> str | None:
    if visit.tenant_id is not None or not name:
        return visit.tenant_id
    async with ctx.db.read(None) as session:
        found = await session.scalar(select(Tenant.id).where(Tenant.name == name))
    if found is None:
        raise BadRequest("There is no tenant of this name.", param="tenant")
    return found


async def _list(request: Request, ctx: Context, visit: Visit, after: str) -> UsersPage:
    async with ctx.db.read(visit.tenant_id) as session:
        found = await list_users(
            session, tenant_id=visit.tenant_id, after=after or None, limit=PAGE
        )
        names = await tenant_names(session, (user.tenant_id for user in found.items))
    roles = [role for role in ROLES if visit.tenant_id is None or role != "operator"]
    return UsersPage(
        shell=shell(request, visit, "Users"),
        rows=tuple(_row(user, names.get(user.tenant_id), visit) for user in found.items),
        roles=tuple(Choice(role, ROLE_WORDS[role], role == "viewer") for role in roles),
        url=f"{str(request.base_url).rstrip('/')}{PATH}",
        act=f"{PATH}/users",
        pager=pager(f"{PATH}/users", after, found.items[-1].id if found.has_more else None),
    )


def _row(user: User, tenant: str | None, visit: Visit) -> UserRow:
    return UserRow(
        name=user.name,
        role=user.role,
        tenant=tenant,
        state=_state(user),
        disabled=user.disabled_at is not None,
        signed_in_at=user.signed_in_at,
        act=f"{PATH}/users/{user.id}",
        is_self=user.id == visit.signed.user.id,
    )


def _state(user: User) -> Badge:
    if user.disabled_at is not None:
        return Badge("disabled", "bad")
    return Badge("active", "good") if user.password else Badge("invited", "warn")
