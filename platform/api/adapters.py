"""/v1/adapters: list, show, change, share and delete a tenant's adapters."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.api.adapter_schemas import (
    AdapterChange,
    AdapterName,
    AdapterOut,
    AdapterUseOut,
)
from loraplex.platform.api.auth import Acting, Tenancy, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.moments import Day
from loraplex.platform.api.schemas import (
    After,
    Deleted,
    Listed,
    PageSize,
    listed,
)
from loraplex.platform.db.models import Adapter
from loraplex.platform.keys import Principal
from loraplex.platform.registry import delete_adapter, get_adapter, list_adapters
from loraplex.platform.sharing import change_adapter, shares_of, uses
from loraplex.platform.versions import current

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
Listing = Annotated[Principal, Depends(allow("adapters:read", held="inside"))]
Reading = Annotated[Principal, Depends(allow("adapters:read", held="by path"))]
Writing = Annotated[Principal, Depends(allow("adapters:write"))]


@router.get("")
async def list_all_adapters(
    principal: Listing, tenant_id: Tenancy, ctx: Ctx, after: After = None, limit: PageSize = 100
) -> Listed[AdapterOut]:
    """The tenant's own adapters in order of name, each with what its bare name means.

    Those that its key is not bound to are left out.
    """
    names = principal.adapters
    async with ctx.db.read(tenant_id) as session:
        page = await list_adapters(session, tenant_id, after=after, limit=limit, names=names)
        return listed(page, await _told(session, page.items))


@router.get("/{name}")
async def get_one_adapter(
    _: Reading, tenant_id: Tenancy, ctx: Ctx, name: AdapterName
) -> AdapterOut:
    """One adapter, with what its bare name means."""
    async with ctx.db.read(tenant_id) as session:
        return (await _told(session, [await get_adapter(session, tenant_id, name)]))[0]


@router.patch("/{name}")
async def change_one_adapter(
    _: Writing, tenant_id: Tenancy, actor: Acting, ctx: Ctx, name: AdapterName, body: AdapterChange
) -> AdapterOut:
    """Change who may use an adapter, its description and its limits; the next request sees it.

    Tenants that it is shared with, or all where it is public, name it `owner/name`, are charged
    for it themselves, and each is held to its limits.
    """
    changes = body.model_dump(exclude_unset=True, exclude={"shared_with"})
    async with ctx.db.session(None) as session:
        adapter = await change_adapter(
            session, tenant_id, name, changes, shared_with=body.shared_with, actor=actor
        )
        return (await _told(session, [adapter]))[0]


@router.delete("/{name}")
async def delete_one_adapter(
    _: Writing, tenant_id: Tenancy, actor: Acting, ctx: Ctx, name: AdapterName
) -> Deleted:
    """Delete an adapter with all its versions; its name is free again.

    The name means nothing from now on. Requests in flight finish, and the images leave the store
    once no request can need them.
    """
    async with ctx.db.session(tenant_id) as session:
        await delete_adapter(session, tenant_id, name, actor=actor)
    return Deleted(id=name, object="adapter")


@router.get("/{name}/usage")
async def get_adapter_usage(
    _: Reading,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    since: Day = None,
    until: Day = None,
    after: After = None,
    limit: PageSize = 100,
) -> Listed[AdapterUseOut]:
    """Who uses an adapter: requests and tokens of each calling tenant, the owner among them."""
    await ctx.books.flush()
    async with ctx.db.read(None) as session:
        page = await uses(
            session, tenant_id, name, since=since, until=until, after=after, limit=limit
        )
    return listed(page, [AdapterUseOut.of(use) for use in page.items])


async def _told(session: AsyncSession, adapters: Sequence[Adapter]) -> list[AdapterOut]:
    """Adapters as the API tells them: with what their bare names mean, and their shares."""
    newest, shares = await current(session, adapters), await shares_of(session, adapters)
    return [AdapterOut.of(each, newest.get(each.id), shares[each.id]) for each in adapters]
