"""Signing in and out, and choosing a password.

Knows the forms and the cookie; refuses to know why a name and password were not right.
"""

import time
from importlib.metadata import version
from math import ceil
from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from sqlalchemy import select
from starlette.responses import Response

from loraplex.platform import sign_in
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.sessions import close_others, close_session, open_session
from loraplex.platform.admin.shell import go, page
from loraplex.platform.admin.visit import PATH, Visiting, forget, keep, strangers
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.db.models import User
from loraplex.platform.errors import ApiError
from loraplex.platform.passwords import LONGEST, SHORTEST, hash_password
from loraplex.platform.users import set_password
from loraplex.web.contexts.signin import SetPassword, SignIn

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)
Name = Annotated[str, Form(max_length=63)]
Secret = Annotated[str, Form(max_length=1024)]
WRONG = "The name and the password do not go together, or this user may not sign in."


@router.get("/sign-in", dependencies=[Depends(strangers)])
async def show_sign_in(ctx: Ctx, onward: str = "") -> Response:
    """The form."""
    return page(SignIn(version("loraplex"), onward=_ours(onward), first=await _is_first(ctx)))


@router.post("/sign-in", dependencies=[Depends(strangers)])
async def sign_in_(
    request: Request, ctx: Ctx, name: Name, password: Secret, onward: Annotated[str, Form()] = ""
) -> Response:
    """Begin a session, or say that it cannot be; who fails often waits."""
    throttles, now = ctx.throttle, time.monotonic()
    whom = (f"name {name}", f"address {request.client.host if request.client else ''}")
    if wait := max(throttles.wait_s(who, now) for who in whom):
        return _refused(name, onward, f"Too many tries. Wait {ceil(wait)} s and try again.")
    for who in whom:  # counted before the check, so that tries at once are counted too
        throttles.failed(who, now)
    user = await sign_in.verify(ctx.db, name, password)
    invited = user is None and (user := await _redeem(ctx, name, password)) is not None
    if user is None:
        return _refused(name, onward, WRONG)
    for who in whom:
        throttles.succeeded(who)
    response = go("/admin/password" if invited else _ours(onward) or PATH)
    keep(response, await open_session(ctx.db, user.id), secure=request.url.scheme == "https")
    return response


@router.post("/sign-out")
async def sign_out(ctx: Ctx, visit: Visiting) -> Response:
    """End the session here and on the server."""
    await close_session(ctx.db, visit.signed.digest)
    response = go("/admin/sign-in")
    forget(response)
    return response


@router.get("/password")
async def show_password(visit: Visiting) -> Response:
    """The form for a new password."""
    return page(_password(visit.signed.user))


@router.post("/password")
async def choose_password(ctx: Ctx, visit: Visiting, password: Secret, again: Secret) -> Response:
    """Set a password; other sessions of the user end."""
    user = visit.signed.user
    if password != again:
        return page(_password(user, "The two are not the same."))
    try:
        hashed = await hash_password(password)
    except ApiError as error:
        return page(_password(user, error.message))
    async with ctx.db.session(None) as session:
        await set_password(session, user.id, hashed, actor=visit.actor)
        await close_others(session, user.id, visit.signed.digest)
    return go(PATH, "password-set")


async def _redeem(ctx: Context, name: str, code: str) -> User | None:
    """Whom a one-time code signs in, if it was made for that name."""
    user = await sign_in.redeem(ctx.db, ctx.keys.peppers, code.strip())
    return user if user is not None and user.name == name else None


async def _is_first(ctx: Context) -> bool:
    """Whether nobody has signed in yet."""
    async with ctx.db.read(None) as session:
        seen = select(User.id).where(User.signed_in_at.is_not(None)).limit(1)
        return await session.scalar(seen) is None


def _ours(onward: str) -> str:
    """A path below our pages, or nothing: nobody is sent elsewhere."""
    ours = onward == PATH or onward.startswith(f"{PATH}/")
    return onward if ours and onward.isprintable() and "\\" not in onward else ""


def _refused(name: str, onward: str, error: str) -> Response:
    return page(SignIn(version("loraplex"), name, error, onward=_ours(onward)))


def _password(user: User, error: str | None = None) -> SetPassword:
    changes = user.password is not None
    return SetPassword(version("loraplex"), user.name, SHORTEST, LONGEST, changes, error)
