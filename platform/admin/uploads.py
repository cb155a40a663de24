"""The screens of uploads: the form, the parts that its script sends, and an upload being checked.

Without scripts the form sends everything at once and waits for the checks. Knows forms and what is
told of an upload; refuses to know how it is checked.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy import select

from loraplex.platform.admin.report_facts import facts_of, state_badge, steps_of, texts_of
from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import go, page, shell
from loraplex.platform.admin.visit import PATH, Visit, Visiting, Writing
from loraplex.platform.admin.whose import chosen_tenant, tenant_choices
from loraplex.platform.api import uploads as api
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.upload_schemas import UploadIn
from loraplex.platform.db.models import Adapter, Upload
from loraplex.platform.errors import ApiError, NotFound
from loraplex.platform.upload_form import receive
from loraplex.platform.upload_jobs import OPEN
from loraplex.platform.upload_parts import Part
from loraplex.web.contexts.uploads import JobLive, JobPage, Reason, UploadPage, UploadRow

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)
Short = Annotated[str, Query(max_length=64)]
Offset = Annotated[int, Header(alias="upload-offset", ge=0, le=1 << 50)]
RECENT = 8


@router.get("/upload")
async def show_form(
    request: Request, ctx: Ctx, visit: Writing, name: Short = "", tenant_id: Short = ""
) -> Response:
    """The form, and the latest uploads beside it."""
    return page(await _form(request, ctx, visit, tenant_id, name))


@router.post("/upload")
async def upload_at_once(
    request: Request, ctx: Ctx, visit: Writing, tenant_id: Short = ""
) -> Response:
    """The form without scripts: all in one body, checked before the answer."""
    limit = request.state.body_limit.bytes = ctx.gate.max_bytes
    whose = await _tenant_id(ctx, visit, tenant_id)
    draft_id = ""
    try:
        async with ctx.uploads.draft(whose, visit.actor, 0) as (draft, folder):
            draft_id = draft.id
            kind = request.headers.get("content-type", "")
            name = await receive(request.stream(), kind, folder, limit)
            await ctx.uploads.publish(draft, name, visit.actor)
    except ApiError as error:
        if not await _is_kept(ctx, draft_id):
            context = await _form(request, ctx, visit, tenant_id, "", error.message)
            return page(context)
    return go(f"{PATH}/uploads/{draft_id}")


@router.post("/uploads")
async def begin(ctx: Ctx, visit: Writing, body: UploadIn, tenant_id: Short = "") -> dict[str, str]:
    """Begin an upload in parts: where they go, and where it is seen."""
    whose = await _tenant_id(ctx, visit, tenant_id)
    made = await api.create_upload(visit.principal, whose, visit.actor, ctx, body)
    here = f"{PATH}/uploads/{made.id}"
    return {"page": here, "parts": f"{here}/parts", "finish": f"{here}/finish"}


@router.put("/uploads/{upload_id}/parts/{part}")
async def put_part(
    request: Request,
    response: Response,
    ctx: Ctx,
    visit: Writing,
    upload_id: str,
    part: Part,
    offset: Offset,
) -> dict[str, int]:
    """Append bytes to a part."""
    row = await _row(ctx, visit, upload_id)
    told = await api.put_part(
        visit.principal, row.tenant_id, ctx, row.id, part, offset, request, response
    )
    return {"offset": told.offset}


@router.post("/uploads/{upload_id}/finish")
async def finish(ctx: Ctx, visit: Writing, upload_id: str) -> dict[str, str]:
    """All parts are there."""
    row = await _row(ctx, visit, upload_id)
    return {"state": (await ctx.uploads.finish(row.tenant_id, row.id)).state}


@router.post("/uploads/{upload_id}/cancel")
async def cancel(ctx: Ctx, visit: Writing, upload_id: str) -> Response:
    """Give it up."""
    row = await _row(ctx, visit, upload_id)
    await ctx.uploads.cancel(row.tenant_id, row.id, visit.actor)
    return go(f"{PATH}/uploads/{row.id}", "upload-cancelled")


@router.get("/uploads/{upload_id}")
async def show_job(request: Request, ctx: Ctx, visit: Visiting, upload_id: str) -> Response:
    """One upload, or its changing part alone; once it has ended, the page is loaded whole."""
    row = await _row(ctx, visit, upload_id)
    live = row.state in OPEN
    if "hx-request" in request.headers and not live:
        return Response(headers={"hx-refresh": "true"})
    here = f"{PATH}/uploads/{row.id}"
    report: dict[str, Any] = row.report or {}
    form = f"{PATH}/upload?tenant_id={row.tenant_id}&name={row.name}"
    context = (JobLive if "hx-request" in request.headers else JobPage)(
        shell=shell(request, visit, "Upload" if visit.can_write else "Adapters"),
        name=row.name,
        state=state_badge(row.state),
        live=here if live else None,
        steps=steps_of(row.state, report),
        reasons=_reasons(report.get("reasons", ())),
        warnings=_reasons(report.get("warnings", ())),
        facts=facts_of(report),
        texts=texts_of(report, row.name),
        adapter=await _adapter_page(ctx, row),
        again=form,
        cancel=f"{here}/cancel" if live and visit.can_write else None,
    )
    return page(context)


async def _form(
    request: Request,
    ctx: Context,
    visit: Visit,
    tenant_id: str,
    name: str,
    error: str | None = None,
) -> UploadPage:
    async with ctx.db.read(visit.tenant_id) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
        tenants = await tenant_choices(session, visit, tenant)
        latest = select(Upload).where(Upload.name != "").order_by(Upload.id.desc()).limit(RECENT)
        if tenant is not None:
            latest = latest.where(Upload.tenant_id == tenant.id)
        rows = list(await session.scalars(latest))
    mark = f"?tenant_id={tenant.id}" if tenant and visit.tenant_id is None else ""
    return UploadPage(
        shell=shell(request, visit, "Upload"),
        name=name,
        max_bytes=ctx.gate.max_bytes,
        act=f"{PATH}/upload{mark}",
        jobs=f"{PATH}/uploads{mark}",
        recent=tuple(
            UploadRow(r.name, f"{PATH}/uploads/{r.id}", state_badge(r.state), r.created_at)
            for r in rows
        ),
        tenants=tenants,
        error=error,
    )


async def _tenant_id(ctx: Context, visit: Visit, tenant_id: str) -> str:
    async with ctx.db.read(visit.tenant_id) as session:
        tenant = await chosen_tenant(session, visit, tenant_id)
    if tenant is None:
        raise NotFound("There is no tenant yet; create one first.")
    return tenant.id


async def _row(ctx: Context, visit: Visit, upload_id: str) -> Upload:
    async with ctx.db.read(visit.tenant_id) as session:
        row = await session.get(Upload, upload_id)
    if row is None:
        raise NotFound("There is no such upload.")
    return row


async def _is_kept(ctx: Context, upload_id: str) -> bool:
    """Whether a refused upload has a page that says why."""
    async with ctx.db.read(None) as session:
        row = await session.get(Upload, upload_id)
    return row is not None and row.report is not None


async def _adapter_page(ctx: Context, row: Upload) -> str | None:
    """Where the adapter is that it became a version of."""
    if row.number is None:
        return None
    async with ctx.db.read(None) as session:
        statement = select(Adapter.id).where(
            Adapter.tenant_id == row.tenant_id, Adapter.name == row.name
        )
        found = await session.scalar(statement)
    return f"{PATH}/adapters/{found}" if found else None


def _reasons(told: Any) -> tuple[Reason, ...]:
    return tuple(Reason(each["code"], each["message"]) for each in told)
