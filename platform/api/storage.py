"""/v1/storage: what images take, and the removal of those that nobody needs any more."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from loraplex.platform import images_kept
from loraplex.platform.api.auth import Acting, allow, operator
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.schemas import After, Body, Listed, Named, PageSize
from loraplex.platform.api.whose import administered
from loraplex.platform.db.models import Tenant
from loraplex.platform.errors import NotFound
from loraplex.platform.keys import Principal
from loraplex.platform.storage import Stored, list_used

router = APIRouter(prefix="/v1/storage", tags=["storage"])
Reading = Annotated[Principal, Depends(allow("adapters:read", "admin"))]
Operating = Annotated[Principal, Depends(operator)]
Only = Annotated[str | None, Query(max_length=64, description="For operators: this tenant only.")]


class StoredOut(Named):
    """What a tenant keeps: each image of its live versions once, whoever else has it too."""

    id: str = Field(description="The tenant's.", examples=["ten_01jxyz"])
    object: Literal["storage"] = "storage"
    name: str = Field(description="The tenant's.", examples=["acme"])
    bytes: int = Field(examples=[9_830_400])
    images: int = Field(examples=[3])
    adapters: int = Field(examples=[2])
    storage_bytes: int | None = Field(description="The limit of `bytes`; null: none.")
    max_adapters: int | None = Field(description="The limit of `adapters`; null: none.")

    @classmethod
    def of(cls, tenant: Tenant, stored: Stored) -> "StoredOut":
        """From a tenant's row and what it keeps."""
        return cls(
            id=tenant.id,
            name=tenant.name,
            bytes=stored.bytes,
            images=stored.images,
            adapters=stored.adapters,
            storage_bytes=tenant.storage_bytes,
            max_adapters=tenant.max_adapters,
        )


class StoreOut(BaseModel):
    """The image store as a whole, in which each image lies once."""

    bytes: int = Field(examples=[19_660_800])
    images: int = Field(examples=[6])
    parts: int = Field(description="Left by copies that are under way or were cut off.")


class StorageOut(Listed[StoredOut]):
    """A page of tenants with what they keep, and for operators the store."""

    store: StoreOut | None = Field(description="For operators, on the first page.")


class CollectIn(Body):
    """Whether to remove, or only to say what would be removed."""

    dry_run: bool = Field(default=False, examples=[True])
    unnamed: bool = Field(
        default=False,
        description="Also images older than a day that this database never knew, such as those of "
        "uploads on a server that never came back. Not where another platform uses the same store.",
    )


class CollectedOut(BaseModel):
    """What was removed from the store, or would be."""

    object: Literal["storage.collected"] = "storage.collected"
    dry_run: bool
    images: int = Field(examples=[2])
    parts: int = Field(description="Left by copies that were cut off.", examples=[0])
    bytes: int = Field(examples=[6_553_600])
    digests: list[str] = Field(description="Of the images; the first thousand.")


@router.get("")
async def show_storage(
    principal: Reading,
    ctx: Ctx,
    tenant_id: Only = None,
    after: After = None,
    limit: PageSize = 100,
) -> StorageOut:
    """What a tenant's images take, and how much it may keep; for an operator, of all tenants."""
    only = administered(principal, tenant_id)
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_used(session, only=only, after=after, limit=limit)
    if only is not None and not page.items and after is None:
        raise NotFound(f"There is no tenant {only!r}.")
    rows = Listed[StoredOut].of([StoredOut.of(*row) for row in page.items], page.has_more)
    store = await _store(ctx) if principal.is_operator and after is None else None
    return StorageOut(**dict(rows), store=store)


async def _store(ctx: Context) -> StoreOut:
    held = await images_kept.total(ctx.gate.store)
    return StoreOut(bytes=held.bytes, images=held.images, parts=held.parts)


@router.post("/collect")
async def collect_images(_: Operating, actor: Acting, ctx: Ctx, body: CollectIn) -> CollectedOut:
    """Remove images that nobody needs any more; each server also does so every minute.

    An image goes when no version names it any more, no request that was begun before the last one
    was deleted can still need it, and no upload has put it there in the last two hours.
    """
    collected = await images_kept.collect(
        ctx.db,
        ctx.gate.store,
        grace_s=images_kept.grace_s(ctx.settings),
        unnamed=body.unnamed,
        actor=actor,
        dry_run=body.dry_run,
    )
    return CollectedOut(dry_run=body.dry_run, **collected.plain())
