"""Who calls, and whether they may: the only place that reads a key from a request.

Every route names what it needs with `allow(...)` or `operator`; a route that names nothing is
found by a test. Knows scopes and tenants; refuses to decide on paths.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Query, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from loraplex.platform.api.context import Ctx, RequestId
from loraplex.platform.audit import Actor
from loraplex.platform.errors import BadRequest, Forbidden, NotFound
from loraplex.platform.keys import Principal, Scope
from loraplex.platform.tenants import get_tenant

_bearer = HTTPBearer(auto_error=False, description="An API key, `lpx_…`.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="The same key, bare.")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
Header = Annotated[str | None, Security(_header)]


async def authenticated(ctx: Ctx, bearer: Bearer, header: Header) -> Principal:
    """Who holds the presented key; raises `InvalidKey`, or `Forbidden` for a suspended tenant.

    Two headers with two keys are no key: neither may slip past what is checked of the other.
    """
    found = {bearer.credentials if bearer else "", header or ""} - {""}
    secret = found.pop() if len(found) == 1 else None
    return await ctx.keys.authenticate(ctx.db, secret)


Authenticated = Annotated[Principal, Depends(authenticated)]


def allow(*scopes: Scope) -> Callable[..., Coroutine[Any, Any, Principal]]:
    """A dependency: the caller, whose key must have one of `scopes`."""

    async def allowed(principal: Authenticated) -> Principal:
        if principal.scopes.isdisjoint(scopes):
            raise Forbidden(f"This key lacks the scope {' or '.join(scopes)}.")
        return principal

    return allowed


def own_tenant(principal: Principal) -> str:
    """The caller's tenant; raises `Forbidden` for an operator, who has none to charge."""
    if principal.tenant_id is None:
        raise Forbidden("An operator's key belongs to no tenant. Use a tenant's key.")
    return principal.tenant_id


async def operator(principal: Authenticated) -> Principal:
    """A dependency: the caller, who must be an operator."""
    if not principal.is_operator:
        raise Forbidden("Only an operator's key may do this.")
    return principal


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
