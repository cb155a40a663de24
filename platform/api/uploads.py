"""/v1/uploads: an adapter sent in parts, at one's own pace, and checked in the background.

And `POST /v1/adapters`: the same in one request. Knows HTTP's side of it; refuses to know files.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from loraplex.platform.api.auth import Acting, Authenticated, Tenancy, allow
from loraplex.platform.api.beside import while_connected
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import After, Listed, PageSize, VersionOut, listed
from loraplex.platform.api.upload_schemas import (
    BYTES,
    FORM,
    OFFSET_HEADER,
    PartOut,
    UploadIn,
    UploadOut,
    part_of,
)
from loraplex.platform.db.models import Upload
from loraplex.platform.keys import Principal
from loraplex.platform.upload_form import receive
from loraplex.platform.upload_jobs import State, list_uploads
from loraplex.platform.upload_parts import Part

router = APIRouter(prefix="/v1", tags=["uploads"])
Reading = Annotated[Principal, Depends(allow("adapters:read", held="inside"))]
Writing = Annotated[Principal, Depends(allow("adapters:write", held="inside"))]
Offset = Annotated[
    int, Header(alias="Upload-Offset", ge=0, le=1 << 50, description="Where these bytes begin.")
]
TELLS: dict[int | str, dict[str, Any]] = {200: {"headers": OFFSET_HEADER}}
PUTS: dict[int | str, dict[str, Any]] = TELLS | {
    409: {"description": "Wrong offset, or closed.", "headers": OFFSET_HEADER}
}


async def _within_reach(
    principal: Authenticated,
    tenant_id: Tenancy,
    ctx: Ctx,
    upload_id: Annotated[str, Path(max_length=64, examples=["upl_01k8r8wq3f0000000000000000"])],
) -> str:
    """A dependency: the path's upload, unless the caller's key is bound to other adapters (404)."""
    if principal.adapters is not None:
        await ctx.uploads.get(tenant_id, upload_id, principal.adapters)
    return upload_id


UploadId = Annotated[str, Depends(_within_reach)]


@router.post("/adapters", status_code=201, openapi_extra=FORM, tags=["adapters"])
async def upload_adapter(
    principal: Writing, tenant_id: Tenancy, actor: Acting, ctx: Ctx, request: Request
) -> VersionOut:
    """Publish a PEFT LoRA adapter as the next version of its name, in one request.

    Send `name`, and either the files `adapter_config` and `adapter_model` or one zip as `archive`.
    The answer comes once the adapter is checked; one that cannot be served is refused with every
    reason (422). If you hang up before, it is given up. `POST /v1/uploads` takes large ones.
    """
    limit = request.state.body_limit.bytes = ctx.gate.max_bytes
    length = _content_length(request) or 0
    async with ctx.uploads.draft(tenant_id, actor, length) as (draft, folder):
        kind = request.headers.get("content-type", "")
        name = await receive(request.stream(), kind, folder, limit)
        principal.check_own(name)
        async with while_connected(request.receive):
            version = await ctx.uploads.publish(draft, name, actor)
    return VersionOut.of(name, version)


@router.post("/uploads", status_code=201)
async def create_upload(
    principal: Writing, tenant_id: Tenancy, actor: Acting, ctx: Ctx, body: UploadIn
) -> UploadOut:
    """Begin an upload. Then PUT its parts, and POST to its `finish`.

    It waits for its parts until `expires_at`, through restarts of the server. A tenant may have
    only so many open at once, and their bytes count against its `storage_bytes`.
    """
    principal.check_own(body.name)
    row = await ctx.uploads.create(tenant_id, body.wish(), actor)
    return await _shown(ctx, row)


@router.get("/uploads")
async def list_all(
    principal: Reading,
    tenant_id: Tenancy,
    ctx: Ctx,
    state: Annotated[State | None, Query(description="Those in this state only.")] = None,
    after: After = None,
    limit: PageSize = 100,
) -> Listed[UploadOut]:
    """Uploads in the order they were begun, those of one request among them.

    Those for adapters that its key is not bound to are left out.
    """
    names = principal.adapters
    async with ctx.db.read(tenant_id) as session:
        page = await list_uploads(
            session, tenant_id, state=state, after=after, limit=limit, names=names
        )
    return listed(page, [UploadOut.of(row, ctx.uploads.bounds, {}) for row in page.items])


@router.get("/uploads/{upload_id}")
async def get_one(_: Reading, tenant_id: Tenancy, ctx: Ctx, upload_id: UploadId) -> UploadOut:
    """One upload: its parts, each check as it passes, every reason, and what it became."""
    return await _shown(ctx, await ctx.uploads.get(tenant_id, upload_id))


@router.delete("/uploads/{upload_id}")
async def cancel(
    _: Writing, tenant_id: Tenancy, actor: Acting, ctx: Ctx, upload_id: UploadId
) -> UploadOut:
    """Give an upload up, at any moment before it is published; its bytes are removed."""
    return await _shown(ctx, await ctx.uploads.cancel(tenant_id, upload_id, actor))


@router.get("/uploads/{upload_id}/parts/{part}", responses=TELLS)
async def get_part(
    _: Reading, tenant_id: Tenancy, ctx: Ctx, upload_id: UploadId, part: Part, response: Response
) -> PartOut:
    """Where a part ends, in the header `Upload-Offset` too: from there it goes on."""
    row = await ctx.uploads.get(tenant_id, upload_id)
    found = part_of(row, part, (await ctx.uploads.offsets(row)).get(part, 0))
    response.headers["upload-offset"] = str(found.offset)
    return found


@router.head("/uploads/{upload_id}/parts/{part}", responses=TELLS)
async def head_part(
    reading: Reading,
    tenant_id: Tenancy,
    ctx: Ctx,
    upload_id: UploadId,
    part: Part,
    response: Response,
) -> None:
    """The header `Upload-Offset` alone."""
    await get_part(reading, tenant_id, ctx, upload_id, part, response)


@router.put("/uploads/{upload_id}/parts/{part}", openapi_extra=BYTES, responses=PUTS)
async def put_part(
    _: Writing,
    tenant_id: Tenancy,
    ctx: Ctx,
    upload_id: UploadId,
    part: Part,
    offset: Offset,
    request: Request,
    response: Response,
) -> PartOut:
    """Append bytes to a part: the body's first byte is the one at `Upload-Offset`.

    Send parts in pieces of any size; 8 MiB are a good one. What the answer acknowledges is on the
    disk. Where a connection broke, GET tells how far it came; an offset that is not the part's end
    is a 409 whose header `Upload-Offset` is. A full disk is a 507, and nothing is lost.
    """
    request.state.body_limit.bytes = ctx.gate.max_bytes
    end = await ctx.uploads.append(
        tenant_id,
        upload_id,
        part,
        request.stream(),
        offset=offset,
        length=_content_length(request),
    )
    response.headers["upload-offset"] = str(end)
    return part_of(await ctx.uploads.get(tenant_id, upload_id), part, end)


@router.post("/uploads/{upload_id}/finish", status_code=202)
async def finish(
    _: Writing,
    tenant_id: Tenancy,
    ctx: Ctx,
    upload_id: UploadId,
    response: Response,
    wait: Annotated[bool, Query(description="Answer (200) once it is checked.")] = False,
) -> UploadOut:
    """All parts are there: have the adapter checked, and published if it can be served.

    GET the upload to see each check pass. A second call changes nothing.
    """
    row = await ctx.uploads.finish(tenant_id, upload_id)
    if wait:
        row = await ctx.uploads.wait(tenant_id, upload_id)
        response.status_code = 200
    return await _shown(ctx, row)


async def _shown(ctx: Context, row: Upload) -> UploadOut:
    return UploadOut.of(row, ctx.uploads.bounds, await ctx.uploads.offsets(row))


def _content_length(request: Request) -> int | None:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None
