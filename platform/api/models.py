"""/v1/models: the names that a tenant's requests may use, the base first.

Then come the tenant's own adapters by name, then others' that it may use, by owner and name.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Path
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import After, Listed, ModelOut, PageSize, seconds
from loraplex.platform.db.models import Adapter
from loraplex.platform.db.page import MAX_PAGE, Page
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.keys import Principal
from loraplex.platform.registry import list_named
from loraplex.platform.resolving import resolve, view
from loraplex.platform.sharing import list_foreign

router = APIRouter(prefix="/v1/models", tags=["models"])
Reading = Annotated[Principal, Depends(allow("infer", "adapters:read", "admin", held="inside"))]
Model = Annotated[
    str,
    Path(
        max_length=256,
        description="The base, or `[owner/]name[@version-or-alias][:dtype]`.",
        examples=["poet@prod"],
    ),
]


@router.get("")
async def list_models(
    principal: Reading, ctx: Ctx, after: After = None, limit: PageSize = MAX_PAGE
) -> Listed[ModelOut]:
    """The base, the tenant's adapters, and others' that are shared with it or public.

    What its key may not use is left out. An operator, who infers nothing, sees the base.
    """
    base = ctx.base.name
    data = [_base(ctx)] if after is None and principal.may_use(base) else []
    if principal.tenant_id is None:
        return Listed[ModelOut].of(data, has_more=False)
    after = None if after == base else after
    async with ctx.db.read(None) as session:
        page = await _adapters(ctx, session, principal, after, limit)
    data += page.items
    return Listed[ModelOut].of(data[:limit], page.has_more or len(data) > limit)


async def _adapters(
    ctx: Context, session: AsyncSession, principal: Principal, after: str | None, limit: int
) -> Page[ModelOut]:
    """Adapters that follow the name `after`: `limit`, or one more where others' begin."""
    found: list[ModelOut] = []
    tenant_id, names = str(principal.tenant_id), principal.adapters
    if after is None or "/" not in after:
        own = await list_named(session, tenant_id, after=after, limit=limit, names=names)
        found = [_adapter(ctx, "tenant", row.name, row) for row in own.items]
        if own.has_more:
            return Page(found, True)
        after = None
    left = max(1, limit - len(found))
    page = await list_foreign(session, tenant_id, after=after, limit=left, names=names)
    found += [_adapter(ctx, owner, f"{owner}/{row.name}", row) for owner, row in page.items]
    return Page(found, page.has_more)


@router.get("/{model:path}")
async def get_model(principal: Reading, ctx: Ctx, model: Model) -> ModelOut:
    """One name that a request's `model` may be: a version's and an alias's too."""
    if principal.tenant_id is None and model != ctx.base.name:
        raise ModelNotFound(model)
    tenant_id = principal.tenant_id or ""
    async with ctx.db.read(view(tenant_id, model)) as session:
        found = await resolve(session, tenant_id, model, ctx.base.name)
        principal.check_adapter(found, model)
        if found.adapter_id is None:
            return _base(ctx)
        adapter = await session.get_one(Adapter, found.adapter_id)
    owner = str(found.adapter).partition("/")[0] if found.owner else "tenant"
    return _adapter(ctx, owner, model, adapter)


def _base(ctx: Context) -> ModelOut:
    return ModelOut(id=ctx.base.name, created=ctx.started_at, owned_by="loraplex", parent=None)


def _adapter(ctx: Context, owner: str, name: str, row: Adapter) -> ModelOut:
    created = seconds(row.created_at)
    return ModelOut(id=name, created=created, owned_by=owner, parent=ctx.base.name)
