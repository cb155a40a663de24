"""vLLM's two routes for adapters, as aliases for publishing and deleting.

What controllers send to vLLM with `VLLM_ALLOW_RUNTIME_LORA_UPDATING` works here: the same bodies,
the same words on success. An adapter passes the same gate as any upload, and comes from a folder
below the operator's `adapter_dir`: a tenant's from the one with its name, an operator's from any.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Final

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy import select
from starlette.responses import PlainTextResponse

from loraplex.platform.adapter_folder import open_files
from loraplex.platform.api.auth import Acting, Tenancy, allow
from loraplex.platform.api.beside import while_connected
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import Body
from loraplex.platform.audit import Actor
from loraplex.platform.db.models import Adapter
from loraplex.platform.errors import BadRequest, ModelNotFound, NotFound
from loraplex.platform.keys import Principal
from loraplex.platform.registry import delete_adapter
from loraplex.platform.tenants import get_tenant
from loraplex.platform.upload_parts import CHUNK, FILES, Part, PartFolder

router = APIRouter(prefix="/v1", tags=["adapters"])
Publishing = Annotated[Principal, Depends(allow("adapters:write", held="inside"))]
Deleting = Annotated[Principal, Depends(allow("adapters:write"))]
PARTS: Final[dict[Part, str]] = {part: FILES[part] for part in ("adapter_config", "adapter_model")}
Name = Annotated[str, Field(min_length=1, max_length=256, examples=["poet"])]


def _said(what: str) -> dict[int | str, dict[str, Any]]:
    text = f"Success: LoRA adapter 'poet' {what} successfully."
    return {200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": text}}}}


class LoadIn(Body):
    """vLLM's body: what to call the adapter, and the folder with its two files."""

    lora_name: Name
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Absolute, or relative to the caller's folder below `adapter_dir`.",
        examples=["poet-v3"],
    )
    load_inplace: bool = Field(
        default=False, description="Publish the next version of a name that is there."
    )


class UnloadIn(Body):
    """vLLM's body; its number is ignored, as names are unique."""

    lora_name: Name
    lora_int_id: int | None = Field(default=None, ge=0, lt=1 << 31, description="Ignored.")


@router.post("/load_lora_adapter", responses=_said("added"), response_class=PlainTextResponse)
async def load_lora_adapter(
    principal: Publishing,
    tenant_id: Tenancy,
    actor: Acting,
    ctx: Ctx,
    request: Request,
    body: LoadIn,
) -> PlainTextResponse:
    """Publish an adapter from a folder of the server's, as vLLM's route of this name does.

    The answer comes once the adapter is checked, compiled and published. A name that is there
    needs `load_inplace`, and gets its next version.
    """
    principal.check_own(body.lora_name, "lora_name")
    root = await _root(ctx, principal, tenant_id)
    await _check_free(ctx, tenant_id, body)
    opened = await to_thread.run_sync(open_files, root, body.lora_path, PARTS)
    try:
        async with while_connected(request.receive):
            await _publish(ctx, tenant_id, body.lora_name, opened, actor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", responses=_said("removed"), response_class=PlainTextResponse)
async def unload_lora_adapter(
    _: Deleting, tenant_id: Tenancy, actor: Acting, ctx: Ctx, body: UnloadIn
) -> PlainTextResponse:
    """Delete an adapter with all its versions, as vLLM's route of this name does.

    Its name stops to resolve at once; requests in flight finish.
    """
    try:
        async with ctx.db.session(tenant_id) as session:
            await delete_adapter(session, tenant_id, body.lora_name, actor=actor)
    except ModelNotFound as error:
        raise NotFound(
            f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name"
        ) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _root(ctx: Context, principal: Principal, tenant_id: str) -> Path:
    """The folder below which the caller's adapters lie; raises `NotFound` where there is none."""
    root = ctx.settings.adapter_dir
    if root is None:
        raise NotFound(
            "This server publishes from no folder: its operator sets LORAPLEX_ADAPTER_DIR to allow "
            "it. POST /v1/adapters takes the files themselves."
        )
    if principal.tenant_id is None:
        return root
    async with ctx.db.read(tenant_id) as session:
        return root / (await get_tenant(session, tenant_id)).name


async def _check_free(ctx: Context, tenant_id: str, body: LoadIn) -> None:
    """Raise `BadRequest`, as vLLM does, for a name that is there, unless it may be."""
    if body.load_inplace:
        return
    live = select(Adapter.id).where(
        Adapter.tenant_id == tenant_id,
        Adapter.name == body.lora_name,
        Adapter.deleted_at.is_(None),
    )
    async with ctx.db.read(tenant_id) as session:
        if await session.scalar(live) is not None:
            raise BadRequest(
                f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load "
                "the adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )


async def _publish(
    ctx: Context, tenant_id: str, name: str, opened: dict[Part, int], actor: Actor
) -> None:
    size = sum(os.fstat(descriptor).st_size for descriptor in opened.values())
    async with ctx.uploads.draft(tenant_id, actor, size) as (row, folder):
        for part, descriptor in opened.items():
            await to_thread.run_sync(_copy, folder, part, descriptor, ctx.gate.max_bytes)
        await ctx.uploads.publish(row, name, actor)


def _copy(folder: PartFolder, part: Part, descriptor: int, limit: int) -> None:
    """Write an open file as a part; raises `TooLarge` and `StorageFull`."""
    writer = folder.open(part, 0, limit)
    try:
        while chunk := os.read(descriptor, CHUNK):
            writer.write(chunk)
    finally:
        writer.close()
