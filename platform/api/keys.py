"""/v1/keys: API keys, of all tenants for an operator and of its own for a tenant's admin."""

from collections.abc import Collection
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from loraplex.platform.api.auth import Acting, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.key_schemas import (
    KeyChange,
    KeyId,
    KeyIn,
    KeyOut,
    NewKeyOut,
    RotateIn,
)
from loraplex.platform.api.schemas import After, Listed, PageSize, listed
from loraplex.platform.api.whose import administered
from loraplex.platform.errors import Forbidden
from loraplex.platform.key_changes import change_key, list_keys, revoke_key
from loraplex.platform.keys import Principal, get_key
from loraplex.platform.quotas import Limits

router = APIRouter(prefix="/v1/keys", tags=["keys"])
Administering = Annotated[Principal, Depends(allow("admin"))]
OfTenant = Annotated[
    str | None, Query(max_length=64, description="For operators: keys of this tenant only.")
]


@router.post("", status_code=201)
async def create(principal: Administering, actor: Acting, ctx: Ctx, body: KeyIn) -> NewKeyOut:
    """Make a key. Its secret is in this answer and nowhere else.

    Nobody grants a scope that their own key lacks, but an operator grants any.
    """
    tenant_id = administered(principal, body.tenant_id)
    check_grant(principal, body.scopes)
    limits = Limits(**body.model_dump(include={*vars(Limits())}))
    async with ctx.db.session(principal.tenant_id) as session:
        key, secret = await ctx.keys.create(
            session,
            tenant_id,
            body.name,
            body.scopes,
            body.expires_at,
            actor=actor,
            adapters=body.adapters,
            limits=limits,
        )
        return NewKeyOut.with_secret(key, secret)


@router.get("")
async def list_all(
    principal: Administering,
    ctx: Ctx,
    tenant_id: OfTenant = None,
    after: After = None,
    limit: PageSize = 100,
) -> Listed[KeyOut]:
    """Keys, the newest first, revoked ones too."""
    wanted = administered(principal, tenant_id)
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_keys(session, tenant_id=wanted, after=after, limit=limit)
    return listed(page, [KeyOut.of(key) for key in page.items])


@router.get("/{key_id}")
async def get_one(principal: Administering, ctx: Ctx, key_id: KeyId) -> KeyOut:
    """One key, without its secret."""
    async with ctx.db.read(principal.tenant_id) as session:
        return KeyOut.of(await get_key(session, key_id))


@router.patch("/{key_id}")
async def change(
    principal: Administering, actor: Acting, ctx: Ctx, key_id: KeyId, body: KeyChange
) -> KeyOut:
    """Change a key's name, expiry, adapters and limits; every server heeds it within a second."""
    async with ctx.db.session(principal.tenant_id) as session:
        key = await change_key(session, key_id, body.given, actor=actor)
    ctx.keys.forget()
    return KeyOut.of(key)


@router.post("/{key_id}/rotate", status_code=201)
async def rotate(
    principal: Administering, actor: Acting, ctx: Ctx, key_id: KeyId, body: RotateIn
) -> NewKeyOut:
    """Replace a key by a new one that may do the same; the old one works until the overlap ends.

    The new key has its own id and expires when the old one would have. Its secret is in this answer
    and nowhere else. A key that is revoked, expired or rotated already is not rotated (409).
    """
    overlap = timedelta(seconds=body.overlap_s)
    async with ctx.db.session(principal.tenant_id) as session:
        check_grant(principal, (await get_key(session, key_id, lock=True)).scopes)
        key, secret = await ctx.keys.rotate(session, key_id, overlap, actor=actor)
    ctx.keys.forget()
    return NewKeyOut.with_secret(key, secret)


@router.delete("/{key_id}")
async def revoke(principal: Administering, actor: Acting, ctx: Ctx, key_id: KeyId) -> KeyOut:
    """Revoke a key; every server refuses it within a second. It stays in the list."""
    async with ctx.db.session(principal.tenant_id) as session:
        key = await revoke_key(session, key_id, actor=actor)
    ctx.keys.forget()
    return KeyOut.of(key)


def check_grant(principal: Principal, scopes: Collection[str]) -> None:
    """Raise `Forbidden` for a scope that the caller lacks; an operator administers all."""
    if not principal.is_operator and not {*scopes} <= {*principal.scopes}:
        raise Forbidden("This key cannot grant a scope that it lacks.")
