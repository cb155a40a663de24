"""/v1/models: the names that a tenant's requests may use, the base first."""

from typing import Annotated

from fastapi import APIRouter, Depends

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import After, Listed, ModelOut, PageSize, seconds
from loraplex.platform.db.page import MAX_PAGE
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.keys import Principal
from loraplex.platform.registry import get_adapter, list_adapters, resolve

router = APIRouter(prefix="/v1/models", tags=["models"])
Reading = Annotated[Principal, Depends(allow("infer", "adapters:read", "admin"))]


@router.get("")
async def list_models(
    principal: Reading, ctx: Ctx, after: After = None, limit: PageSize = MAX_PAGE
) -> Listed[ModelOut]:
    """The base, and each of the tenant's adapters; an operator, who has none, sees the base."""
    data = [_base(ctx)] if after is None else []
    if principal.tenant_id is None:
        return Listed[ModelOut].of(data, has_more=False)
    after = None if after == ctx.base.name else after
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_adapters(session, principal.tenant_id, after=after, limit=limit)
    data += [_adapter(ctx, row.name, seconds(row.created_at)) for row in page.items]
    return Listed[ModelOut].of(data[:limit], page.has_more or len(data) > limit)


@router.get("/{model:path}")
async def get_model(principal: Reading, ctx: Ctx, model: str) -> ModelOut:
    """One name; `name@version` too."""
    if model == ctx.base.name:
        return _base(ctx)
    if principal.tenant_id is None:
        raise ModelNotFound(model)
    async with ctx.db.read(principal.tenant_id) as session:
        found = await resolve(session, principal.tenant_id, model, ctx.base.name)
        adapter = await get_adapter(session, principal.tenant_id, str(found.adapter))
    return _adapter(ctx, model, seconds(adapter.created_at))


def _base(ctx: Context) -> ModelOut:
    return ModelOut(id=ctx.base.name, created=ctx.started_at, owned_by="loraplex", parent=None)


def _adapter(ctx: Context, name: str, created: int) -> ModelOut:
    return ModelOut(id=name, created=created, owned_by="tenant", parent=ctx.base.name)
