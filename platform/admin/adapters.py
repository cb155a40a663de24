"""The screens of adapters: the list, and one with its aliases, versions and users.

Changes go through the API's own routes, so that they are checked and audited alike. Knows forms;
refuses to know how an alias moves.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Final, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request
from starlette.responses import Response

from loraplex.platform.admin.adapter_facts import (
    VISIBLE,
    alias_views,
    find_adapters,
    get_adapter_of,
    moves_of,
    version_row,
)
from loraplex.platform.admin.examples import curl_for
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import go, page, pager, shell
from loraplex.platform.admin.visit import PATH, Visit, Visiting, Writing
from loraplex.platform.admin.whose import actor_names, tenant_filter, tenant_names
from loraplex.platform.api import adapters as api
from loraplex.platform.api import aliases as alias_api
from loraplex.platform.api import versions as version_api
from loraplex.platform.api.adapter_schemas import MAX_NUMBER, AdapterChange, VersionNumber
from loraplex.platform.api.alias_schemas import AliasIn, CanaryIn, SeenIn
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.failures import checked
from loraplex.platform.db.models import Adapter
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import ApiError
from loraplex.platform.sharing import shares_of, uses
from loraplex.platform.versions import current, list_versions
from loraplex.web.contexts.adapters import AdapterPage, AdapterRows, AdaptersPage, UseRow
from loraplex.web.contexts.shell import Choice

router = APIRouter(prefix=f"{PATH}/adapters", route_class=PageRoute, include_in_schema=False)
Text = Annotated[str, Form(max_length=500)]
Seen = Annotated[int, Form(ge=0, le=MAX_NUMBER)]
Version = Annotated[int, Form(ge=1, le=MAX_NUMBER)]
Short = Annotated[str, Query(max_length=64)]
Change = Literal["retire", "restore"]
USED_DAYS = 30


def resident(ctx: Context) -> frozenset[str]:
    """Digests of the images that are in the engine's memory."""
    return frozenset(ctx.engine.stats.resident)


@router.get("")
async def show_adapters(
    request: Request,
    ctx: Ctx,
    visit: Visiting,
    query: Short = "",
    after: Short = "",
    tenant_id: Short = "",
) -> Response:
    """The list, or its lines alone for a search while typing."""
    whose = visit.tenant_id or tenant_id or None
    async with ctx.db.read(visit.tenant_id) as session:
        found = await find_adapters(session, whose, query, after or None, resident(ctx))
        tenants = await tenant_filter(session, visit, tenant_id)
    there = f"{PATH}/adapters?{urlencode({'query': query, 'tenant_id': tenant_id})}"
    part = "hx-request" in request.headers
    context = (AdapterRows if part else AdaptersPage)(
        shell=shell(request, visit, "Adapters"),
        query=query,
        rows=found.rows,
        pager=pager(there, after, found.following),
        upload=f"{PATH}/upload?tenant_id={tenant_id}" if visit.can_write else None,
        list=f"{PATH}/adapters",
        tenants=tenants,
    )
    return page(context)


@router.get("/{adapter_id}")
async def show_adapter(request: Request, ctx: Ctx, visit: Visiting, adapter_id: str) -> Response:
    """One adapter."""
    return page(await _page(request, ctx, visit, await _adapter(ctx, visit, adapter_id)))


@router.post("/{adapter_id}")
async def save(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    adapter_id: str,
    visibility: Text,
    description: Text = "",
    shared_with: Text = "",
) -> Response:
    """Description and visibility."""
    adapter = await _adapter(ctx, visit, adapter_id)
    said = {
        "visibility": visibility,
        "description": description.strip() or None,
        "shared_with": [each.strip() for each in shared_with.split(",") if each.strip()],
    }
    try:
        change = checked(AdapterChange, said)
        await api.change_one_adapter(
            visit.principal, adapter.tenant_id, visit.actor, ctx, adapter.name, change
        )
    except ApiError as error:
        wrong = {error.param or "description": error.message}
        context = await _page(request, ctx, visit, adapter)
        return page(replace(context, wrong=wrong))
    return go(f"{PATH}/adapters/{adapter_id}", "adapter-saved")


@router.post("/{adapter_id}/delete")
async def delete(
    request: Request, ctx: Ctx, visit: Writing, adapter_id: str, confirm: Text = ""
) -> Response:
    """Delete it, if its name was typed."""
    adapter = await _adapter(ctx, visit, adapter_id)
    if confirm.strip() != adapter.name:
        context = await _page(request, ctx, visit, adapter)
        wrong = {"confirm": f"Type {adapter.name} to delete it."}
        return page(replace(context, wrong=wrong))
    await api.delete_one_adapter(visit.principal, adapter.tenant_id, visit.actor, ctx, adapter.name)
    return go(f"{PATH}/adapters", "adapter-deleted")


@router.post("/{adapter_id}/versions/{number}/{change}")
async def change_version(
    ctx: Ctx, visit: Writing, adapter_id: str, number: VersionNumber, change: Change
) -> Response:
    """Retire or restore a version."""
    adapter = await _adapter(ctx, visit, adapter_id)
    retires = change == "retire"
    act = version_api.retire_version if retires else version_api.restore_version
    await act(
        version_api.Change(
            visit.principal, adapter.tenant_id, visit.actor, ctx, adapter.name, number
        )
    )
    done = "version-retired" if retires else "version-restored"
    return go(f"{PATH}/adapters/{adapter_id}", done)


@router.post("/{adapter_id}/aliases")
async def create_alias(
    request: Request, ctx: Ctx, visit: Writing, adapter_id: str, alias: Text, version: Version
) -> Response:
    """Make an alias."""
    adapter = await _adapter(ctx, visit, adapter_id)
    body = AliasIn(version=version, revision=0)
    try:
        await alias_api.move_alias(_change(ctx, visit, adapter, alias.strip()), body)
    except ApiError as error:
        context = await _page(request, ctx, visit, adapter)
        return page(replace(context, new_alias=alias, alias_error=error.message))
    return go(f"{PATH}/adapters/{adapter_id}", "alias-moved")


@router.post("/{adapter_id}/aliases/{alias}")
async def move_alias(
    request: Request,
    ctx: Ctx,
    visit: Writing,
    adapter_id: str,
    alias: str,
    seen: Seen,
    version: Version,
    canary: Annotated[int | None, Form(ge=1, le=MAX_NUMBER)] = None,
    percent: Annotated[float, Form(gt=0, lt=100)] = 10,
) -> Response:
    """Move an alias, with a canary or without."""
    adapter = await _adapter(ctx, visit, adapter_id)
    share = CanaryIn(version=canary, percent=percent) if canary else None
    body = AliasIn(version=version, canary=share, revision=seen)
    try:
        await alias_api.move_alias(_change(ctx, visit, adapter, alias), body)
    except ApiError as error:
        return await _refused(request, ctx, visit, adapter, alias, error)
    return go(f"{PATH}/adapters/{adapter_id}#alias-{alias}", "alias-moved")


Act = Literal["promote", "rollback", "remove"]
ACTS: Final = {
    "promote": (alias_api.promote_canary, "alias-promoted"),
    "rollback": (alias_api.roll_back_alias, "alias-rolled-back"),
}


@router.post("/{adapter_id}/aliases/{alias}/{act}")
async def act_on_alias(
    request: Request, ctx: Ctx, visit: Writing, adapter_id: str, alias: str, act: Act, seen: Seen
) -> Response:
    """Promote a canary, roll back, or remove an alias."""
    adapter = await _adapter(ctx, visit, adapter_id)
    change = _change(ctx, visit, adapter, alias)
    try:
        if act == "remove":
            await alias_api.remove_alias(change, seen)
            return go(f"{PATH}/adapters/{adapter_id}", "alias-removed")
        call, done = ACTS[act]
        await call(change, SeenIn(revision=seen))
    except ApiError as error:
        return await _refused(request, ctx, visit, adapter, alias, error)
    return go(f"{PATH}/adapters/{adapter_id}#alias-{alias}", done)


def _change(ctx: Context, visit: Visit, adapter: Adapter, alias: str) -> alias_api.Change:
    return alias_api.Change(
        visit.principal, adapter.tenant_id, visit.actor, ctx, adapter.name, alias
    )


async def _adapter(ctx: Context, visit: Visit, adapter_id: str) -> Adapter:
    async with ctx.db.read(visit.tenant_id) as session:
        return await get_adapter_of(session, visit.tenant_id, adapter_id)


async def _refused(
    request: Request, ctx: Context, visit: Visit, adapter: Adapter, alias: str, error: ApiError
) -> Response:
    """The page again, with the alias's card saying why."""
    context = await _page(request, ctx, visit, adapter)
    aliases = tuple(
        replace(each, error=error.message) if each.name == alias else each
        for each in context.aliases
    )
    return page(replace(context, aliases=aliases))


async def _page(request: Request, ctx: Context, visit: Visit, adapter: Adapter) -> AdapterPage:
    owner, name, base = adapter.tenant_id, adapter.name, ctx.base.fingerprint
    since = utc_now().date() - timedelta(days=USED_DAYS)
    await ctx.books.flush()
    async with ctx.db.read(None) as session:
        moves = await moves_of(session, adapter)
        who = await actor_names(session, (move.moved_by for move in moves))
        aliases = await alias_views(session, adapter, who)
        versions = (await list_versions(session, owner, name)).items
        used = (await uses(session, owner, name, since=since)).items
        shares = (await shares_of(session, [adapter]))[adapter.id]
        names = await tenant_names(session, [owner, *shares])
        newest = (await current(session, [adapter])).get(adapter.id)
    model = f"{name}@{aliases[0].name}" if aliases else name
    here = f"{PATH}/adapters/{adapter.id}"
    return AdapterPage(
        shell=shell(request, visit, "Adapters"),
        name=name,
        owner=None if visit.tenant_id else names[owner],
        act=here,
        description=adapter.description or "",
        visibility=tuple(Choice(k, v, k == adapter.visibility) for k, v in VISIBLE.items()),
        shared_with=", ".join(names[each] for each in shares),
        versions=tuple(
            version_row(each, aliases, resident(ctx), base, newest) for each in versions
        ),
        aliases=aliases,
        uses=tuple(
            UseRow(use.tenant, use.requests, use.prompt_tokens + use.completion_tokens)
            for use in used
        ),
        playground=f"{PATH}/playground?tenant_id={owner}&model={model}",
        upload=f"{PATH}/upload?tenant_id={owner}&name={name}",
        new_key=f"{PATH}/keys?tenant_id={owner}&adapters={name}",
        model=model,
        curl=curl_for(str(request.base_url).rstrip("/"), model),
        can_write=visit.can_write,
    )
