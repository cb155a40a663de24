"""/v1/usage: what a tenant's requests used, in groups; an operator sees all tenants."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import Response

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.moments import Day
from loraplex.platform.api.usage_schemas import UsageList, UsageOut, as_csv
from loraplex.platform.api.whose import administered
from loraplex.platform.keys import Principal
from loraplex.platform.usage import Grouping, totals

router = APIRouter(prefix="/v1/usage", tags=["usage"])
Reading = Annotated[Principal, Depends(allow("infer", "admin"))]
GroupBy = Annotated[list[Grouping], Query(max_length=6, description="Groups; repeatable.")]
Format = Annotated[
    Literal["json", "csv"] | None, Query(description="How to answer; goes before `Accept`.")
]
CSV = "text/csv"
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {CSV: {"schema": {"type": "string"}}}, "description": "Totals in order."}
}


@router.get("", responses=ANSWERS, response_model=UsageList)
async def get_usage(
    principal: Reading,
    ctx: Ctx,
    since: Day = None,
    until: Day = None,
    group_by: GroupBy = ["adapter"],  # noqa: B006 (FastAPI copies it)
    tenant_id: Annotated[
        str | None, Query(max_length=64, description="For operators: one tenant's use only.")
    ] = None,
    format: Format = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> UsageList | Response:
    """Requests and tokens per group, over the days from `since` to `until`.

    Other servers' requests are in it within a second of their end. CSV with `?format=csv` or
    `Accept: text/csv`.
    """
    wanted = administered(principal, tenant_id)
    await ctx.books.flush()
    async with ctx.db.read(principal.tenant_id) as session:
        found = await totals(session, tenant_id=wanted, since=since, until=until, group_by=group_by)
    data = [UsageOut.of(total) for total in found]
    if format == "csv" or (format is None and CSV in accept):
        return Response(as_csv(data), media_type=f"{CSV}; charset=utf-8")
    return UsageList(data=data)
