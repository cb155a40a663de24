"""The screens of tenants, for operators: the list, and one with its limits and their use.

Knows forms; refuses to know how limits are held.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request
from pydantic import ValidationError
from sqlalchemy import func, select
from starlette.responses import Response

from loraplex.platform.admin.limit_facts import FIELDS, limit_fields, numbers_of
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import go, page, pager, shell
from loraplex.platform.admin.visit import PATH, Operating, Visit
from loraplex.platform.api import quota as quota_api
from loraplex.platform.api import tenants as api
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.quota_schemas import QuotaOut, RefusalOut
from loraplex.platform.api.tenant_schemas import TenantChange, TenantIn
from loraplex.platform.db.models import Tenant, UsageRecord
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import ApiError, LimiterDown
from loraplex.platform.tenants import get_tenant
from loraplex.web.contexts.shell import Badge, Notice
from loraplex.web.contexts.tenants import TenantPage, TenantRow, TenantsPage
from loraplex.web.words import of_bytes, of_count, of_seconds

router = APIRouter(prefix=f"{PATH}/tenants", route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=64)]
PAGE = 50
ACTIVE, SUSPENDED = Badge("active", "good"), Badge("suspended", "bad")


@router.get("")
async def show_tenants(
    request: Request, ctx: Ctx, visit: Operating, query: Short = "", after: Short = ""
) -> Response:
    """The list."""
    return page(await _list(request, ctx, visit, query, after))


@router.post("")
async def create(
    request: Request, ctx: Ctx, visit: Operating, name: Annotated[str, Form(max_length=256)]
) -> Response:
    """Make a tenant without limits."""
    try:
        made = await api.create(visit.principal, ctx, visit.actor, TenantIn(name=name.strip()))
    except ApiError as error:
        context = replace(
            await _list(request, ctx, visit, "", ""), new_name=name, error=error.message
        )
        return page(context)
    return go(f"{PATH}/tenants/{made.id}", "tenant-created")


@router.get("/{tenant_id}")
async def show_tenant(request: Request, ctx: Ctx, visit: Operating, tenant_id: str) -> Response:
    """One tenant."""
    return page(await _one(request, ctx, visit, tenant_id))


@router.post("/{tenant_id}/limits")
async def save_limits(request: Request, ctx: Ctx, visit: Operating, tenant_id: str) -> Response:
    """Set the limits."""
    given = {key: str(value) for key, value in (await request.form()).items()}
    numbers, wrong = numbers_of(given)
    try:
        if not wrong:
            change = TenantChange.model_validate(numbers)
            await api.change(visit.principal, ctx, visit.actor, tenant_id, change)
            return go(f"{PATH}/tenants/{tenant_id}", "limits-saved")
    except ValidationError as error:
        wrong = {str(each["loc"][0]): each["msg"] for each in error.errors()}
    except ApiError as error:
        if error.param is None:
            raise
        wrong = {error.param: error.message}
    return page(await _one(request, ctx, visit, tenant_id, given, wrong))


@router.post("/{tenant_id}/suspend")
async def suspend(ctx: Ctx, visit: Operating, tenant_id: str) -> Response:
    """Suspend it."""
    await api.change(visit.principal, ctx, visit.actor, tenant_id, TenantChange(suspended=True))
    return go(f"{PATH}/tenants/{tenant_id}", "tenant-suspended")


@router.post("/{tenant_id}/resume")
async def resume(ctx: Ctx, visit: Operating, tenant_id: str) -> Response:
    """Resume it."""
    await api.change(visit.principal, ctx, visit.actor, tenant_id, TenantChange(suspended=False))
    return go(f"{PATH}/tenants/{tenant_id}", "tenant-resumed")


async def _list(
    request: Request, ctx: Context, visit: Visit, query: str, after: str
) -> TenantsPage:
    statement = select(Tenant)
    if query:
        statement = statement.where(Tenant.name.contains(query.lower(), autoescape=True))
    if after:
        statement = statement.where(Tenant.name > after)
    async with ctx.db.read(None) as session:
        ordered = statement.order_by(Tenant.name).limit(PAGE + 1)
        tenants = list(await session.scalars(ordered))
        shown = tenants[:PAGE]
        today = await _tokens_today(session, [each.id for each in shown])
    services = {each.tenant: each for each in ctx.engine.stats.tenants}
    there = f"{PATH}/tenants?{urlencode({'query': query})}"
    return TenantsPage(
        shell=shell(request, visit, "Tenants"),
        query=query,
        rows=tuple(
            TenantRow(
                name=each.name,
                href=f"{PATH}/tenants/{each.id}",
                state=SUSPENDED if each.suspended_at else ACTIVE,
                running=service.running if (service := services.get(each.id)) else 0,
                waiting=service.waiting if service else 0,
                tokens_today=today.get(each.id, 0),
                created_at=each.created_at,
            )
            for each in shown
        ),
        pager=pager(there, after, shown[-1].name if len(tenants) > PAGE else None),
    )


async def _tokens_today(session: Any, ids: list[str]) -> dict[str, int]:
    tokens = func.sum(UsageRecord.prompt_tokens + UsageRecord.completion_tokens)
    rows = await session.execute(
        select(UsageRecord.tenant_id, tokens)
        .where(UsageRecord.tenant_id.in_(ids), UsageRecord.day == utc_now().date())
        .group_by(UsageRecord.tenant_id)
    )
    return {tenant_id: int(total) for tenant_id, total in rows}


async def _one(
    request: Request,
    ctx: Context,
    visit: Visit,
    tenant_id: str,
    given: dict[str, str] | None = None,
    wrong: dict[str, str] | None = None,
) -> TenantPage:
    async with ctx.db.read(None) as session:
        tenant = await get_tenant(session, tenant_id)
    notice, quota = None, None
    try:
        quota = await quota_api.get_quota(visit.principal, ctx, tenant_id)
    except LimiterDown as error:
        notice = Notice("warn", f"Live use is not known now: {error.message}")
    service = next((s for s in ctx.engine.stats.tenants if s.tenant == tenant_id), None)
    return TenantPage(
        shell=shell(request, visit, "Tenants", notice),
        id=tenant.id,
        name=tenant.name,
        act=f"{PATH}/tenants/{tenant.id}",
        state=SUSPENDED if tenant.suspended_at else ACTIVE,
        suspended=tenant.suspended_at is not None,
        limits=limit_fields(tenant, quota, given or {}, wrong or {}),
        facts=(
            ("Running", of_count(service.running if service else 0)),
            ("Waiting", of_count(service.waiting if service else 0)),
            ("Cached tokens", of_count(service.cached_tokens if service else 0)),
            ("Adapters", of_count(quota.adapters.used) if quota else "–"),
            ("Stored", of_bytes(quota.storage_bytes.used) if quota else "–"),
        ),
        refusals=_refusals(quota),
        adapters=f"{PATH}/adapters?tenant_id={tenant.id}",
        keys=f"{PATH}/keys?tenant_id={tenant.id}",
        usage=f"{PATH}/usage?tenant_id={tenant.id}",
        can_write=True,
    )


def _sentence(refusal: RefusalOut) -> str:
    """Why a request was refused."""
    limit = FIELDS[refusal.name][0].lower()
    return (
        f"The {refusal.kind}'s limit of {limit}: it might have used {refusal.tokens:,} tokens, and "
        f"would have been let in {of_seconds(refusal.retry_after_s)} later."
    )


def _refusals(quota: QuotaOut | None) -> tuple[tuple[datetime, str, str], ...]:
    if quota is None:
        return ()
    return tuple(
        (datetime.fromtimestamp(each.at, UTC), each.request_id, _sentence(each))
        for each in quota.refusals[:20]
    )
