"""The screens of API keys: the list, a new one, and a secret that is shown this once.

Knows forms; refuses to know how a key is made or checked.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request
from sqlalchemy import select
from starlette.responses import Response

from loraplex.platform.admin.examples import curl_for
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import by_field, go, page, pager, shell
from loraplex.platform.admin.visit import PATH, Visit, Writing
from loraplex.platform.admin.whose import chosen_tenant, tenant_choices
from loraplex.platform.api import keys as api
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.failures import checked
from loraplex.platform.api.key_schemas import KeyIn, NewKeyOut, RotateIn
from loraplex.platform.db.models import Adapter, ApiKey
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import ApiError, BadRequest
from loraplex.platform.key_changes import list_keys
from loraplex.web.contexts.keys import KeyMadePage, KeyRow, KeysPage
from loraplex.web.contexts.shell import Badge, Choice

router = APIRouter(prefix=f"{PATH}/keys", route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=64)]
Text = Annotated[str, Form(max_length=2000)]
Names = Annotated[str, Query(max_length=2000)]
PAGE = 50
SCOPES: Final = {
    "infer": "call models",
    "adapters:read": "see adapters",
    "adapters:write": "upload and change adapters",
    "admin": "administer its tenant",
}
OVERLAPS: Final = {
    "0": "at once",
    "3600": "in an hour",
    "86400": "in a day",
    "604800": "in a week",
}


@router.get("")
async def show_keys(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    tenant_id: Short = "",
    after: Short = "",
    adapters: Names = "",
) -> Response:
    """The list, and the form for a new key; a link may fill in its adapters."""
    context = await _list(request, ctx, visit, tenant_id, after)
    return page(replace(context, adapters=adapters))


@router.post("")
async def create(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    name: Text,
    tenant_id: Short = "",
    adapters: Text = "",
    days: Text = "",
    scopes: Annotated[list[str], Form()] = [],  # noqa: B006
) -> Response:
    """Make a key, and show its secret."""
    try:
        body = await _body(ctx, visit, tenant_id, name, adapters, days, scopes)
        made = await api.create(visit.principal, visit.actor, ctx, body)
    except ApiError as error:
        context = replace(
            await _list(request, ctx, visit, tenant_id, ""),
            name=name,
            adapters=adapters,
            days=days,
            scopes=tuple(Choice(k, v, k in scopes) for k, v in SCOPES.items()),
            wrong=by_field(
                error,
                name="name",
                adapters="adapters",
                scopes="scopes",
                days="days",
                expires_at="days",
            ),
        )
        return page(context)
    return page(await _made(request, ctx, visit, made, tenant_id))


@router.post("/{key_id}/rotate")
async def rotate(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    key_id: str,
    overlap_s: Annotated[int, Form(ge=0, le=30 * 86_400)] = 86_400,
    tenant_id: Short = "",
) -> Response:
    """Make the key's successor, and show its secret."""
    body = RotateIn(overlap_s=overlap_s)
    made = await api.rotate(visit.principal, visit.actor, ctx, key_id, body)
    old = await api.get_one(visit.principal, ctx, key_id)
    ends = datetime.fromtimestamp(old.expires_at, UTC) if old.expires_at else None
    context = await _made(request, ctx, visit, made, tenant_id)
    return page(replace(context, old_ends_at=ends))


@router.post("/{key_id}/revoke")
async def revoke(ctx: Ctx, visit: Writing, key_id: str, tenant_id: Short = "") -> Response:
    """Make it useless."""
    await api.revoke(visit.principal, visit.actor, ctx, key_id)
    return go(f"{PATH}/keys{_mark(tenant_id)}", "key-revoked")


async def _body(
    ctx: Context,
    visit: Visit,
    tenant_id: str,
    name: str,
    adapters: str,
    days: str,
    scopes: list[str],
) -> KeyIn:
    if not scopes:
        raise BadRequest("Tick at least one thing that it may do.", param="scopes")
    async with ctx.db.read(visit.tenant_id) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
    names = [each.strip() for each in adapters.split(",") if each.strip()]
    said = {
        "name": name.strip(),
        "scopes": scopes,
        "tenant_id": tenant.id if tenant else None,
        "expires_at": _in_days(days.strip()),
        "adapters": names or None,
    }
    return checked(KeyIn, said)


def _in_days(days: str) -> datetime | None:
    """When a key ends; never, where nothing was written."""
    if not days:
        return None
    if not re.fullmatch("[0-9]{1,4}", days):
        raise BadRequest(
            "The days are a number up to 9999; leave them empty for a key that does not expire.",
            param="days",
        )
    return utc_now() + timedelta(days=int(days))


async def _list(
    request: Request, ctx: Context, visit: Visit, tenant_id: str, after: str
) -> KeysPage:
    async with ctx.db.read(visit.tenant_id) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
        tenants = await tenant_choices(session, visit, tenant)
        whose = tenant.id if tenant else None
        found = await list_keys(session, tenant_id=whose, after=after or None, limit=PAGE)
    mark = _mark(tenant_id)
    return KeysPage(
        shell=shell(request, visit, "API keys"),
        rows=tuple(_row(key, mark) for key in found.items),
        pager=pager(
            f"{PATH}/keys?tenant_id={tenant_id}",
            after,
            found.items[-1].id if found.has_more else None,
        ),
        scopes=tuple(Choice(k, v, k in ("infer", "adapters:read")) for k, v in SCOPES.items()),
        overlaps=tuple(Choice(k, v, k == "86400") for k, v in OVERLAPS.items()),
        can_write=visit.can_write,
        act=f"{PATH}/keys{mark}",
        tenants=tenants,
    )


def _row(key: ApiKey, mark: str) -> KeyRow:
    now = utc_now()
    expired = key.expires_at is not None and key.expires_at <= now
    return KeyRow(
        id=key.id,
        name=key.name,
        redacted=key.redacted,
        scopes=tuple(words for scope, words in SCOPES.items() if scope in key.scopes),
        adapters=", ".join(key.adapters) if key.adapters else "all",
        state=_state(key, expired),
        ends_at=key.expires_at,
        last_used_at=key.last_used_at,
        act=f"{PATH}/keys/{key.id}",
        mark=mark,
        is_live=key.revoked_at is None and not expired,
    )


def _state(key: ApiKey, expired: bool) -> Badge:
    if key.revoked_at is not None:
        return Badge("revoked", "bad")
    if expired:
        return Badge("expired", "bad")
    return Badge("active", "good")


async def _made(
    request: Request, ctx: Context, visit: Visit, made: NewKeyOut, tenant_id: str
) -> KeyMadePage:
    missing = await _missing(ctx, made)
    there = [name for name in made.adapters or [ctx.base.name] if name not in missing]
    model = there[0] if there and "infer" in made.scopes else None
    return KeyMadePage(
        shell=shell(request, visit, "API keys"),
        name=made.name,
        secret=made.secret or "",
        curl=curl_for(str(request.base_url).rstrip("/"), model) if model else None,
        back=f"{PATH}/keys{_mark(tenant_id)}",
        missing=missing,
        usage=f"{PATH}/usage?{urlencode({'tenant_id': tenant_id, 'group_by': 'key'})}",
    )


async def _missing(ctx: Context, made: NewKeyOut) -> tuple[str, ...]:
    """Of a key's adapters, those that its tenant does not have; others' are not looked for."""
    own = {name for name in made.adapters or () if "/" not in name and name != ctx.base.name}
    async with ctx.db.read(made.tenant_id) as session:
        there = await session.scalars(
            select(Adapter.name).where(
                Adapter.tenant_id == made.tenant_id,
                Adapter.deleted_at.is_(None),
                Adapter.name.in_(own),
            )
        )
        return tuple(sorted(own - {*there}))


def _mark(tenant_id: str) -> str:
    return f"?tenant_id={tenant_id}" if tenant_id else ""
