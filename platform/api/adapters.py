"""/v1/adapters: upload, list, show and delete a tenant's adapters."""

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request

from loraplex.platform.api.auth import Tenancy, allow
from loraplex.platform.api.beside import while_connected
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import (
    AdapterOut,
    After,
    Deleted,
    Listed,
    PageSize,
    VersionOut,
    listed,
)
from loraplex.platform.keys import Principal
from loraplex.platform.registry import (
    delete_adapter,
    get_adapter,
    list_adapters,
    unreferenced,
)
from loraplex.platform.uploads import FILES, receive

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])
Reading = Annotated[Principal, Depends(allow("adapters:read"))]
Writing = Annotated[Principal, Depends(allow("adapters:write"))]
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}}
                    | {part: {"type": "string", "format": "binary"} for part in FILES},
                }
            }
        },
    }
}


@router.post("", status_code=201, openapi_extra=FORM)
async def upload_adapter(_: Writing, tenant_id: Tenancy, ctx: Ctx, request: Request) -> VersionOut:
    """Publish a PEFT LoRA adapter as the next version of its name.

    Send `name`, and either the files `adapter_config` and `adapter_model` or one zip as `archive`.
    An adapter that cannot be served is refused with every reason (422).
    """
    request.state.body_limit.bytes = ctx.gate.max_bytes
    async with ctx.gate.folder() as folder:
        content_type = request.headers.get("content-type", "")
        upload = await receive(request.stream(), content_type, folder)
        async with while_connected(request.receive):
            version = await ctx.gate.publish(tenant_id, upload)
    return VersionOut.of(upload.name, version)


@router.get("")
async def list_all(
    _: Reading, tenant_id: Tenancy, ctx: Ctx, after: After = None, limit: PageSize = 100
) -> Listed[AdapterOut]:
    """Adapters in order of name, each with its versions."""
    async with ctx.db.read(tenant_id) as session:
        page = await list_adapters(session, tenant_id, after=after, limit=limit)
    return listed(page, [AdapterOut.of(adapter) for adapter in page.items])


@router.get("/{name}")
async def get_one(_: Reading, tenant_id: Tenancy, ctx: Ctx, name: str) -> AdapterOut:
    """One adapter with its versions."""
    async with ctx.db.read(tenant_id) as session:
        return AdapterOut.of(await get_adapter(session, tenant_id, name))


@router.delete("/{name}")
async def delete_one(_: Writing, tenant_id: Tenancy, ctx: Ctx, name: str) -> Deleted:
    """Delete an adapter with all its versions; its name is free again."""
    async with ctx.db.session(tenant_id) as session:
        digests = await delete_adapter(session, tenant_id, name)
    await _remove_images(ctx, digests)
    return Deleted(id=name, object="adapter")


async def _remove_images(ctx: Context, digests: set[str]) -> None:
    """Remove images that nobody names any more; what the engine holds of one stays until unused."""
    async with ctx.db.session(None) as session:
        for digest in await unreferenced(session, digests):
            await to_thread.run_sync(ctx.gate.store.delete, digest)
