"""/v1/usage: what a tenant's requests used, in groups; an operator sees all tenants."""

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import UsageList, UsageOut
from loraplex.platform.errors import NotFound
from loraplex.platform.keys import Principal
from loraplex.platform.usage import Grouping, totals

router = APIRouter(prefix="/v1/usage", tags=["usage"])
Reading = Annotated[Principal, Depends(allow("infer", "admin"))]
GroupBy = Annotated[list[Grouping], Query(max_length=3, description="Groups; repeatable.")]
Day = Annotated[date | None, Query(description="A UTC day; it is included.")]


@router.get("")
async def get_usage(
    principal: Reading,
    ctx: Ctx,
    since: Day = None,
    until: Day = None,
    group_by: GroupBy = ["adapter"],  # noqa: B006 (FastAPI copies it)
    tenant_id: Annotated[str | None, Query(max_length=64)] = None,
) -> UsageList:
    """Requests and tokens per group, over the days from `since` to `until`."""
    own = principal.tenant_id
    if own is not None and tenant_id not in (None, own):
        raise NotFound(f"There is no tenant {tenant_id!r}.")
    async with ctx.db.read(own) as session:
        found = await totals(
            session, tenant_id=own or tenant_id, since=since, until=until, group_by=group_by
        )
    return UsageList(data=[UsageOut.of(total) for total in found])
