"""Who looks at the pages, and whether a request truly comes from them.

A request that changes something must come from these pages themselves: the browser says so in
`Sec-Fetch-Site` or `Origin` (RFC 6454), and one that says nothing is refused. Knows the cookie, the
roles and those headers; refuses to know passwords and what the pages show.
"""

from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.responses import Response

from loraplex.platform.admin.sessions import LASTS, Signed, find_session
from loraplex.platform.api.auth import Rule
from loraplex.platform.api.context import get_context
from loraplex.platform.audit import Actor
from loraplex.platform.errors import Forbidden
from loraplex.platform.keys import Principal
from loraplex.platform.logs import note_caller
from loraplex.platform.users import Role, principal_of

COOKIE: Final = "loraplex_session"
PATH: Final = "/admin"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class SignInFirst(Forbidden):
    """Nobody is signed in; `onward` is the page to come back to, "" after a change."""

    def __init__(self, onward: str) -> None:
        super().__init__("Sign in first.")
        self.onward = onward


@dataclass(frozen=True)
class Visit:
    """A signed-in user's request."""

    signed: Signed
    principal: Principal
    actor: Actor

    @property
    def role(self) -> Role:
        """What the user may do."""
        role: Role = self.signed.user.role  # type: ignore[assignment]
        return role

    @property
    def tenant_id(self) -> str | None:
        """The user's tenant; None for an operator."""
        return self.principal.tenant_id

    @property
    def can_write(self) -> bool:
        """Whether the user may change anything."""
        return self.role != "viewer"


async def identify_visitor(request: Request) -> Visit:
    """Who is signed in; raises `SignInFirst`. The database is asked once a request."""
    known: Visit | None = getattr(request.state, "visit", None)
    if known is None:
        token, ctx = request.cookies.get(COOKIE, ""), get_context(request)
        signed = await find_session(ctx.db, token) if token else None
        if signed is None:
            raise SignInFirst(_onward(request))
        principal = principal_of(signed.user, signed.tenant)
        note_caller(principal.tenant_id, principal.key_id)
        actor = Actor(signed.user.id, request.state.request_id)
        known = request.state.visit = Visit(signed, principal, actor)
    return known


@dataclass(frozen=True)
class SignedIn(Rule):
    """Lets in users of these roles, and changes only from our own pages."""

    roles: frozenset[Role]

    async def admit(self, request: Request) -> None:
        """Raise `SignInFirst`, or `Forbidden` for another role or another site."""
        check_origin(request)
        visit = await identify_visitor(request)
        if visit.role not in self.roles:
            raise Forbidden(
                f"This page is for {' and '.join(sorted(self.roles))} users; you are signed in as "
                f"{visit.role}. Ask an operator if you need it."
            )

    async def __call__(self, request: Request) -> Visit:
        """The visit."""
        await self.admit(request)
        return await identify_visitor(request)


class Stranger(Rule):
    """Lets in who is not signed in yet, and changes only from our own pages."""

    async def admit(self, request: Request) -> None:
        """Raise `Forbidden` for a change that comes from another site."""
        check_origin(request)

    async def __call__(self) -> None:
        """Give the route nothing."""


def check_origin(request: Request) -> None:
    """Raise `Forbidden` for a change that does not come from a page of this very server."""
    if request.method in SAFE:
        return
    site = request.headers.get("sec-fetch-site")
    if site == "same-origin":
        return
    origin = request.headers.get("origin", "")
    if site is None and origin and urlsplit(origin).netloc == request.headers.get("host"):
        return
    raise Forbidden("Changes come from the admin pages only. Open the page and try again there.")


def keep(response: Response, token: str, *, secure: bool) -> None:
    """Set the session's cookie, which scripts and other sites never see."""
    response.set_cookie(
        COOKIE,
        token,
        max_age=int(LASTS.total_seconds()),
        path=PATH,
        secure=secure,
        httponly=True,
        samesite="strict",
    )


def forget(response: Response) -> None:
    """Remove the cookie."""
    response.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")


def _onward(request: Request) -> str:
    """The page to come back to: its path on this server, never another's address."""
    return request.url.path if request.method in SAFE else ""


anyone = SignedIn(frozenset({"operator", "admin", "viewer"}))
writers = SignedIn(frozenset({"operator", "admin"}))
operators = SignedIn(frozenset({"operator"}))
strangers = Stranger()
Visiting = Annotated[Visit, Depends(anyone)]
Writing = Annotated[Visit, Depends(writers)]
Operating = Annotated[Visit, Depends(operators)]
