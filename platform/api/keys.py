"""/v1/keys: API keys, of all tenants for an operator and of its own for a tenant's admin."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import (
    After,
    KeyIn,
    KeyOut,
    Listed,
    NewKeyOut,
    PageSize,
    listed,
)
from loraplex.platform.errors import Forbidden, NotFound
from loraplex.platform.keys import Principal, list_keys, revoke_key

router = APIRouter(prefix="/v1/keys", tags=["keys"])
Administering = Annotated[Principal, Depends(allow("admin"))]
OfTenant = Annotated[
    str | None, Query(max_length=64, description="For operators: keys of this tenant only.")
]


@router.post("", status_code=201)
async def create(principal: Administering, ctx: Ctx, body: KeyIn) -> NewKeyOut:
    """Make a key. Its secret is in this answer and nowhere else."""
    tenant_id = _tenant(principal, body.tenant_id)
    _check_grant(principal, body.scopes)
    async with ctx.db.session(principal.tenant_id) as session:
        key, secret = await ctx.keys.create(
            session, tenant_id, body.name, body.scopes, body.expires_at
        )
        return NewKeyOut(**KeyOut.fields_of(key), secret=secret)


@router.get("")
async def list_all(
    principal: Administering,
    ctx: Ctx,
    tenant_id: OfTenant = None,
    after: After = None,
    limit: PageSize = 100,
) -> Listed[KeyOut]:
    """Keys in the order they were made, revoked ones too."""
    wanted = _tenant(principal, tenant_id)
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_keys(session, tenant_id=wanted, after=after, limit=limit)
    return listed(page, [KeyOut(**KeyOut.fields_of(key)) for key in page.items])


@router.delete("/{key_id}")
async def revoke(principal: Administering, ctx: Ctx, key_id: str) -> KeyOut:
    """Revoke a key: no request is let in with it any more."""
    async with ctx.db.session(principal.tenant_id) as session:
        return KeyOut(**KeyOut.fields_of(await revoke_key(session, key_id)))


def _tenant(principal: Principal, named: str | None) -> str | None:
    """The tenant that a request is about; a tenant's admin may name its own only."""
    if principal.is_operator:
        return named
    if named not in (None, principal.tenant_id):
        raise NotFound(f"There is no tenant {named!r}.")
    return principal.tenant_id


def _check_grant(principal: Principal, scopes: list[str]) -> None:
    """Nobody gives away what they do not have; an operator administers all."""
    if not principal.is_operator and not {*scopes} <= {*principal.scopes}:
        raise Forbidden("This key cannot grant a scope that it lacks.")
