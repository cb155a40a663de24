"""Who calls, and whether they may: the only place that reads a key from a request.

Every route names what it needs with `allow(...)`, `operator` or `public`; one that names nothing
is open to nobody. The key is checked before a byte of the body is read, so that strangers learn
nothing from complaints about it. Knows scopes and tenants; refuses to decide on paths.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

from loraplex.platform.api.context import Ctx, RequestId, get_context
from loraplex.platform.audit import Actor
from loraplex.platform.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    ModelNotFound,
    NotFound,
)
from loraplex.platform.key_terms import Scope
from loraplex.platform.keys import Principal
from loraplex.platform.logs import note_caller
from loraplex.platform.tenants import get_tenant

_bearer = HTTPBearer(auto_error=False, description="An API key, `lpx_…`.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="The same key, bare.")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
Header = Annotated[str | None, Security(_header)]
Held = Literal["by path", "inside"]  # to the path's {name}, or by what the route itself does


async def identify(request: Request) -> Principal:
    """Who holds the presented key; raises `InvalidKey`, or `Forbidden` for a suspended tenant.

    Two headers with two keys are no key: neither may slip past what is checked of the other. A key
    in a query string is not looked at. The database is asked once a request.
    """
    known: Principal | None = getattr(request.state, "principal", None)
    if known is None:
        found, ctx = presented(request), get_context(request)
        secret = found.pop() if len(found) == 1 else None
        known = request.state.principal = await ctx.keys.authenticate(ctx.db, secret)
        note_caller(known.tenant_id, known.key_id)
    return known


def presented(request: Request) -> set[str]:
    """The keys that a request presents, in either header."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return {bearer, request.headers.get("x-api-key", "")} - {""}


async def authenticated(request: Request, _: Bearer, __: Header) -> Principal:
    """A dependency: who calls; its parameters tell OpenAPI of the two headers."""
    return await identify(request)


Authenticated = Annotated[Principal, Depends(authenticated)]


class Rule(ABC):
    """Whom a route lets in. It is one of the route's dependencies, where `guard` finds it."""

    @abstractmethod
    async def admit(self, request: Request) -> None:
        """Raise an `ApiError` for a request that may not come in."""


class Anyone(Rule):
    """Lets in who has no key."""

    async def admit(self, request: Request) -> None:
        """Raise nothing."""

    async def __call__(self) -> None:
        """Give the route nothing."""


@dataclass(frozen=True)
class Access(Rule):
    """Lets in those whose key may do what the route does; gives the route its caller.

    A key that is bound to adapters comes in with the scope infer, and with another one only where
    the route says how it is `held` to them.
    """

    scopes: frozenset[Scope]  # one of them is enough
    operators_only: bool = False
    held: Held | None = None

    def check(self, principal: Principal) -> None:
        """Raise `Forbidden` for a caller that lacks what is asked."""
        if self.operators_only and not principal.is_operator:
            raise Forbidden("Only an operator's key may do this.")
        opened_by = principal.scopes & self.scopes
        if not opened_by:
            raise Forbidden(f"This key lacks the scope {' or '.join(sorted(self.scopes))}.")
        if principal.adapters is not None and self.held is None and "infer" not in opened_by:
            raise Forbidden("A key that is bound to adapters may not do this, even to those.")

    async def admit(self, request: Request) -> None:
        """Raise what `identify` and `check` raise for a caller who may not come in.

        Raises `ModelNotFound` for an adapter that a bound key is not bound to.
        """
        principal = await identify(request)
        self.check(principal)
        if self.held == "by path" and not principal.may_use(name := request.path_params["name"]):
            raise ModelNotFound(name)

    async def __call__(self, principal: Authenticated) -> Principal:
        """The caller."""
        self.check(principal)
        return principal


def allow(*scopes: Scope, held: Held | None = None) -> Access:
    """A dependency: the caller, whose key must have one of `scopes`, and is `held` where bound."""
    return Access(frozenset(scopes), held=held)


operator = Access(frozenset({"admin"}), operators_only=True)
public = Anyone()


async def guard(request: Request) -> None:
    """A dependency of every route: refuses a caller that it does not allow.

    Raises what its `Rule`s raise, and `Forbidden` where a route names none. Who has passed for a
    route is not asked again.
    """
    route, state = request.scope["route"], request.scope.setdefault("state", {})
    if state.get("passed") is route:
        return
    rules = _rules(route)
    if not rules:
        raise Forbidden("This route does not say who may use it, so nobody may.")
    for rule in rules:
        await rule.admit(request)
    state["passed"] = route


class KeyFirst:
    """Guards a route before the first byte of its body is read: innermost middleware.

    By then the router has found the route, and FastAPI has not parsed anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        checked = scope["type"] != "http"

        async def receive_guarded() -> Message:
            nonlocal checked
            if not checked and isinstance(scope.get("route"), APIRoute):
                checked = True
                await _guard_early(Request(scope))
            return await receive()

        await self._app(scope, receive_guarded, send)


async def _guard_early(request: Request) -> None:
    """As `guard`; FastAPI lets no other exception than its own out of the reading of a body."""
    try:
        await guard(request)
    except ApiError as error:
        raise HTTPException(error.status) from error


def _rules(route: APIRoute) -> list[Rule]:
    """The rules that a route names, each once."""
    named = (call for call in _calls(route.dependant) if isinstance(call, Rule))
    return list(dict.fromkeys(named))


def _calls(dependant: Dependant) -> Iterator[Any]:
    for dependency in dependant.dependencies:
        yield dependency.call
        yield from _calls(dependency)


def own_tenant(principal: Principal) -> str:
    """The caller's tenant; raises `Forbidden` for an operator, who has none to charge."""
    if principal.tenant_id is None:
        raise Forbidden("An operator's key belongs to no tenant. Use a tenant's key.")
    return principal.tenant_id


async def acting(principal: Authenticated, request_id: RequestId) -> Actor:
    """A dependency: the caller, as the audit log names them."""
    return Actor(principal.key_id, request_id)


Acting = Annotated[Actor, Depends(acting)]


async def chosen_tenant(
    principal: Authenticated,
    ctx: Ctx,
    tenant_id: Annotated[
        str | None, Query(max_length=64, description="For operators: the tenant to act for.")
    ] = None,
) -> str:
    """The tenant a request is about: the caller's own, or the one that an operator names."""
    if principal.tenant_id is not None:
        if tenant_id not in (None, principal.tenant_id):
            raise NotFound(f"There is no tenant {tenant_id!r}.")
        return principal.tenant_id
    if tenant_id is None:
        raise BadRequest(
            "An operator's key belongs to no tenant; name one with ?tenant_id=ten_….",
            param="tenant_id",
        )
    async with ctx.db.read(None) as session:
        return (await get_tenant(session, tenant_id)).id


Tenancy = Annotated[str, Depends(chosen_tenant)]
