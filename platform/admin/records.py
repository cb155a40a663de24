"""The screens of usage and of the audit log. Knows forms; refuses to change anything."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import page, pager, shell
from loraplex.platform.admin.visit import PATH, Visit, Visiting, Writing
from loraplex.platform.admin.whose import actor_names, tenant_filter, tenant_names
from loraplex.platform.api import audit as audit_api
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.usage_schemas import UsageOut, as_csv
from loraplex.platform.audit import list_entries
from loraplex.platform.db.models import AuditEntry
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import NotFound
from loraplex.platform.usage import Grouping, UsageTotal, totals
from loraplex.web.contexts.records import AuditPage, AuditRow, Span, UsagePage, UsageRow
from loraplex.web.contexts.shell import Choice
from loraplex.web.words import of_moment

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=160)]
Groups = Annotated[list[Grouping], Query(max_length=6)]
PAGE: Final = 100
SHOWN: Final = 500
CHARTED: Final = 366  # days, at most
SHORT: Final = re.compile("[0-9a-f]{64}")
HEADINGS: Final = {
    "tenant": "Tenant",
    "adapter": "Adapter",
    "day": "Day",
    "key": "Key",
    "model": "Model",
    "arm": "Arm",
}


@router.get("/usage")
async def show_usage(
    request: Request,
    ctx: Ctx,
    visit: Visiting,
    since: str = "",
    until: str = "",
    group_by: Groups = ["adapter"],  # noqa: B006
    tenant_id: Short = "",
    form: Annotated[str, Query(alias="format")] = "",
) -> Response:
    """Totals, as a page or as CSV."""
    first, last = _days(since, until)
    whose = _whose(visit, tenant_id)
    await ctx.books.flush()
    async with ctx.db.read(visit.tenant_id) as session:
        found = await totals(session, tenant_id=whose, since=first, until=last, group_by=group_by)
        daily = await _daily(session, whose, first, last) if form != "csv" else ()
        names = await tenant_names(session, (each.tenant_id for each in found))
        keys = await actor_names(session, (each.key_id for each in found if each.key_id))
        tenants = await tenant_filter(session, visit, tenant_id)
    if form == "csv":
        body = as_csv([UsageOut.of(total) for total in found])
        headers = {"content-disposition": 'attachment; filename="usage.csv"'}
        return Response(body, media_type="text/csv; charset=utf-8", headers=headers)
    kept = [*(("group_by", each) for each in group_by), ("tenant_id", tenant_id)]
    link = urlencode([("since", first), ("until", last), *kept, ("format", "csv")])
    context = UsagePage(
        shell=shell(request, visit, "Usage"),
        since=first,
        until=last,
        groups=tuple(Choice(k, v.lower(), k in group_by) for k, v in HEADINGS.items()),
        headings=tuple(HEADINGS[each] for each in group_by),
        rows=tuple(_row(each, group_by, names, keys) for each in found[:SHOWN]),
        total=_sum(found, len(group_by)),
        days=daily,
        spans=tuple(_spans(first, last, kept)),
        csv=f"{PATH}/usage?{link}",
        tenants=tenants,
    )
    return page(context)


async def _daily(
    session: AsyncSession, tenant_id: str | None, first: date, last: date
) -> tuple[tuple[date, int], ...]:
    """Tokens of every day, of those without requests too; nothing for one day, or too many."""
    count = (last - first).days + 1
    if not 1 < count <= CHARTED:
        return ()
    found = await totals(session, tenant_id=tenant_id, since=first, until=last, group_by=["day"])
    tokens = {each.day: each.prompt_tokens + each.completion_tokens for each in found}
    days = (first + timedelta(days=number) for number in range(count))
    return tuple((day, tokens.get(day, 0)) for day in days)


def _spans(first: date, last: date, kept: list[tuple[str, str]]) -> Iterator[Span]:
    """Links to the days that are asked for most, grouped as they are now."""
    today = utc_now().date()
    starts = {
        "Today": today,
        "7 days": today - timedelta(days=6),
        "30 days": today - timedelta(days=29),
        "This month": today.replace(day=1),
    }
    shown = next((each for each, since in starts.items() if (first, last) == (since, today)), "")
    for label, since in starts.items():
        link = urlencode([("since", since), ("until", today), *kept])
        yield Span(label, f"{PATH}/usage?{link}", label == shown)


def _days(since: str, until: str) -> tuple[date, date]:
    """The days asked for; the last thirty where the text is no day."""
    today = utc_now().date()
    return _day(since, today - timedelta(days=29)), _day(until, today)


def _day(text: str, default: date) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return default


def _whose(visit: Visit, tenant_id: str) -> str | None:
    if visit.tenant_id is not None and tenant_id not in ("", visit.tenant_id):
        raise NotFound("There is no such tenant.")
    return visit.tenant_id or tenant_id or None


def _row(
    total: UsageTotal, groups: list[Grouping], names: dict[str | None, str], keys: dict[str, str]
) -> UsageRow:
    words = {
        "tenant": names.get(total.tenant_id, total.tenant_id or ""),
        "adapter": total.adapter or "the base",
        "day": total.day.isoformat() if total.day else "",
        "key": keys.get(total.key_id or "", ""),
        "model": total.model or "",
        "arm": total.arm or "–",
    }
    return UsageRow(
        tuple(words[each] for each in groups),
        total.requests,
        total.prompt_tokens,
        total.completion_tokens,
        total.cached_tokens,
    )


def _sum(found: list[UsageTotal], groups: int) -> UsageRow:
    return UsageRow(
        ("All", *[""] * (groups - 1)),
        sum(each.requests for each in found),
        sum(each.prompt_tokens for each in found),
        sum(each.completion_tokens for each in found),
        sum(each.cached_tokens for each in found),
    )


@router.get("/audit")
async def show_audit(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    action: Short = "",
    target: Short = "",
    before: Short = "",
    form: Annotated[str, Query(alias="format")] = "",
) -> Response:
    """Changes, as a page or as CSV."""
    if form == "csv":
        return await _audit_csv(ctx, visit, action, target)
    async with ctx.db.read(visit.tenant_id) as session:
        found = await list_entries(
            session,
            action=action.strip() or None,
            target=target.strip() or None,
            before=before or None,
            limit=PAGE,
        )
        entries = found.items
        told = (each for entry in entries for each in (entry.actor, entry.target))
        who = await actor_names(session, told)
        names = await tenant_names(session, (entry.tenant_id for entry in entries))
    asked = {"action": action, "target": target}
    there = f"{PATH}/audit?{urlencode(asked)}"
    context = AuditPage(
        shell=shell(request, visit, "Audit"),
        action=action,
        target=target,
        rows=tuple(
            AuditRow(
                at=entry.created_at,
                who=who.get(entry.actor, entry.actor),
                action=entry.action,
                target=names.get(entry.target) or who[entry.target],
                same=f"{PATH}/audit?{urlencode({'target': entry.target})}",
                details=_told(entry.details),
                tenant=_owner(visit, entry, names),
            )
            for entry in entries
        ),
        pager=pager(there, before, entries[-1].id if found.has_more else None, "before"),
        csv=f"{PATH}/audit?{urlencode(asked | {'format': 'csv'})}",
    )
    return page(context)


def _owner(visit: Visit, entry: AuditEntry, names: dict[str | None, str]) -> str | None:
    """Whose the target is, told to an operator unless it is the tenant itself."""
    told = visit.tenant_id is None and entry.target != entry.tenant_id
    return names.get(entry.tenant_id) if told else None


async def _audit_csv(ctx: Context, visit: Visit, action: str, target: str) -> Response:
    told = await audit_api.list_audit_entries(
        visit.principal, ctx, action or None, None, target or None, limit=1000, form="csv"
    )
    assert isinstance(told, Response)  # noqa: S101 (what "csv" gives)
    told.headers["content-disposition"] = 'attachment; filename="audit.csv"'
    return told


def _told(details: dict[str, object]) -> str:
    """`version 3, revision 2`."""
    shown = {key: value for key, value in details.items() if value not in (None, [], {})}
    return ", ".join(f"{key.replace('_', ' ')} {_worded(key, each)}" for key, each in shown.items())


def _worded(key: str, value: object) -> str:
    """A detail as people read it: moments as dates, the start of a digest, lists by commas."""
    if isinstance(value, int) and key.endswith(("_at", "_until")):
        return of_moment(datetime.fromtimestamp(value, UTC))
    if isinstance(value, str):
        return f"{value[:12]}…" if SHORT.fullmatch(value) else value
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return _told(value)
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)
