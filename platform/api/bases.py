"""/v1/bases: the base models that were served here, and the versions compiled for each."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from loraplex.platform.api.auth import Tenancy, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import Listed, Named, PageSize, listed, seconds
from loraplex.platform.bases import count_versions, list_bases, list_stale
from loraplex.platform.db.models import AdapterVersion, ServedBase
from loraplex.platform.keys import Principal

router = APIRouter(prefix="/v1/bases", tags=["bases"])
Reading = Annotated[Principal, Depends(allow("infer", "adapters:read", "admin"))]
Stale = Annotated[Principal, Depends(allow("adapters:read"))]
AfterBase = Annotated[
    str | None,
    Query(
        max_length=128,
        pattern="^[0-9a-f]{64}:.+$",
        description="Give what follows this id.",
        examples=[f"{'0' * 64}:bfloat16"],
    ),
]
AfterVersion = Annotated[
    str | None,
    Query(
        max_length=128,
        pattern=r"^[^@]+@[1-9][0-9]{0,8}$",
        description="Give what follows this id.",
        examples=["poet@3"],
    ),
]


class BaseOut(Named):
    """A base as it was served: one model, its weights stored one way."""

    object: Literal["base"] = "base"
    name: str = Field(examples=["SmolLM2-135M-Instruct"])
    fingerprint: str = Field(description="Of its weights; images are compiled for it alone.")
    variant: str = Field(description="How its weights are stored.", examples=["bfloat16"])
    num_layers: int
    hidden_size: int
    vocab_size: int
    serving: bool = Field(description="Whether it is what this server serves now.")
    first_served_at: int
    last_served_at: int = Field(description="The last start of a server with it.")
    versions: int = Field(description="Adapter versions compiled for it: yours, or all.")

    @classmethod
    def of(cls, row: ServedBase, serving: bool, versions: int) -> "BaseOut":
        """From a row, and how many versions there are for it."""
        return cls(
            id=f"{row.fingerprint}:{row.variant}",
            name=row.name,
            fingerprint=row.fingerprint,
            variant=row.variant,
            num_layers=row.num_layers,
            hidden_size=row.hidden_size,
            vocab_size=row.vocab_size,
            serving=serving,
            first_served_at=seconds(row.first_served_at),
            last_served_at=seconds(row.last_served_at),
            versions=versions,
        )


class StaleOut(Named):
    """A version that cannot be served, because it was compiled for another base."""

    id: str = Field(examples=["poet@3"])
    object: Literal["adapter.version.stale"] = "adapter.version.stale"
    name: str = Field(examples=["poet"])
    version: int = Field(examples=[3])
    base: str = Field(description="The fingerprint of the base it was compiled for.")

    @classmethod
    def of(cls, name: str, version: AdapterVersion) -> "StaleOut":
        """From a row."""
        return cls(
            id=f"{name}@{version.number}", name=name, version=version.number, base=version.base
        )


@router.get("")
async def list_served_bases(
    principal: Reading, ctx: Ctx, after: AfterBase = None, limit: PageSize = 100
) -> Listed[BaseOut]:
    """Bases that were served here, and how many of the caller's versions were made for each.

    An operator's are all tenants' versions.
    """
    fingerprint, _, variant = (after or "").partition(":")
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_bases(
            session, after=(fingerprint, variant) if after else None, limit=limit
        )
        prints = sorted({row.fingerprint for row in page.items})
        counts = await count_versions(session, principal.tenant_id, prints)
    now = ctx.base.fingerprint
    data = [
        BaseOut.of(row, row.fingerprint == now, counts.get(row.fingerprint, 0))
        for row in page.items
    ]
    return listed(page, data)


@router.get("/stale")
async def list_stale_versions(
    _: Stale, tenant_id: Tenancy, ctx: Ctx, after: AfterVersion = None, limit: PageSize = 100
) -> Listed[StaleOut]:
    """Versions that were compiled for another base than the one that is served now.

    Upload such an adapter again: it becomes the next version, for this base.
    """
    name, _at, number = (after or "").partition("@")
    async with ctx.db.read(tenant_id) as session:
        page = await list_stale(
            session,
            tenant_id,
            ctx.base.fingerprint,
            after=(name, int(number)) if after else None,
            limit=limit,
        )
    return listed(page, [StaleOut.of(name, version) for name, version in page.items])
