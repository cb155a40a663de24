"""/v1/tenants: the operator's view of tenants, their limits and the service they have."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from loraplex.platform.api.auth import Acting, operator
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import After, Listed, PageSize, listed
from loraplex.platform.api.tenant_schemas import TenantChange, TenantDetail, TenantIn, TenantOut
from loraplex.platform.keys import Principal
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.tenants import (
    create_tenant,
    get_tenant,
    list_tenants,
    set_limits,
    set_suspended,
)

router = APIRouter(prefix="/v1/tenants", tags=["tenants"])
Operating = Annotated[Principal, Depends(operator)]
TenantId = Annotated[str, Path(max_length=64, description="A tenant's id.")]


@router.post("", status_code=201)
async def create(_: Operating, ctx: Ctx, actor: Acting, body: TenantIn) -> TenantOut:
    """Make a tenant; a limit that is not given is none."""
    limits = TenantLimits(**body.model_dump(exclude={"name"}))
    async with ctx.db.session(None) as session:
        return TenantOut.of(await create_tenant(session, body.name, limits, actor=actor))


@router.get("")
async def list_all(
    _: Operating, ctx: Ctx, after: After = None, limit: PageSize = 100
) -> Listed[TenantOut]:
    """Tenants in the order they were made."""
    async with ctx.db.read(None) as session:
        page = await list_tenants(session, after=after, limit=limit)
    return listed(page, [TenantOut.of(tenant) for tenant in page.items])


@router.get("/{tenant_id}")
async def get_one(_: Operating, ctx: Ctx, tenant_id: TenantId) -> TenantDetail:
    """One tenant, and the service that the engine gives it."""
    async with ctx.db.read(None) as session:
        tenant = await get_tenant(session, tenant_id)
    return TenantDetail.with_service(tenant, ctx.engine.stats.tenants)


@router.patch("/{tenant_id}")
async def change(
    _: Operating, ctx: Ctx, actor: Acting, tenant_id: TenantId, body: TenantChange
) -> TenantOut:
    """Change the limits that are given, and suspend or resume the tenant.

    New limits hold from the next request on, and a suspended tenant's keys open nothing.
    """
    given = body.model_dump(exclude_unset=True, exclude={"suspended"})
    async with ctx.db.session(None) as session:
        tenant = await get_tenant(session, tenant_id, lock=True)
        limits = TenantLimits(**(vars(TenantLimits.of(tenant)) | given))
        tenant = await set_limits(session, tenant_id, limits, actor=actor)
        if body.suspended is not None:
            tenant = await set_suspended(session, tenant_id, body.suspended, actor=actor)
    ctx.keys.forget()
    return TenantOut.of(tenant)
