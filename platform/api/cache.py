"""/v1/cache and /v1/tenants/{id}/cache: what the prefix cache does for a tenant.

Knows what is told of it; refuses to know where the numbers come from.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from loraplex.platform.api.auth import Tenancy, allow, operator
from loraplex.platform.api.context import Ctx
from loraplex.platform.keys import Principal
from loraplex.platform.prefix_state import TenantCache
from loraplex.platform.tenants import get_tenant

router = APIRouter(tags=["cache"])
Reading = Annotated[Principal, Depends(allow("infer", "admin"))]
Operating = Annotated[Principal, Depends(operator)]


class CacheOut(BaseModel):
    """A tenant's prefix cache: what it holds now, and totals since `since`."""

    object: Literal["cache"] = "cache"
    tenant_id: str
    resident_blocks: int = Field(description="KV blocks that its next prompts may find.")
    complete: bool = Field(description="False where there may be more blocks than are counted.")
    since: int | None = Field(description="Seconds since the epoch; null before any request.")
    requests: int
    hits: int = Field(description="Requests that found a part of their prompt.")
    queried_tokens: int = Field(description="Tokens of the prompts that were looked up.")
    cached_tokens: int = Field(description="Those of them that were found.")
    hit_rate: float = Field(description="Cached tokens over queried tokens, 0 to 1.")
    evicted_blocks: int
    saved_seconds: float = Field(description="Cached tokens, at the time that one takes.")


class HoldingOut(BaseModel):
    """A tenant's blocks on one replica."""

    replica: str
    resident_blocks: int
    complete: bool


class CacheByReplica(CacheOut):
    """The same, with the replicas that it is on."""

    replicas: list[HoldingOut]


@router.get("/v1/cache")
async def get_own(_: Reading, ctx: Ctx, tenant_id: Tenancy) -> CacheOut:
    """What the prefix cache does for the caller's tenant; 503 while Redis does not answer."""
    return _shown(tenant_id, await ctx.prefixes.of(tenant_id))


@router.get("/v1/tenants/{tenant_id}/cache")
async def get_of_tenant(_: Operating, ctx: Ctx, tenant_id: str) -> CacheByReplica:
    """What the prefix cache does for a tenant, by replica; 503 while Redis does not answer."""
    async with ctx.db.read(None) as session:
        tenant = await get_tenant(session, tenant_id)
    cache = await ctx.prefixes.of(tenant.id)
    replicas = [
        HoldingOut(replica=on.replica, resident_blocks=on.blocks, complete=on.complete)
        for on in cache.holdings
    ]
    return CacheByReplica(**_shown(tenant.id, cache).model_dump(), replicas=replicas)


def _shown(tenant_id: str, cache: TenantCache) -> CacheOut:
    counts = cache.counts
    return CacheOut(
        tenant_id=tenant_id,
        resident_blocks=cache.resident_blocks,
        complete=cache.complete,
        since=cache.since,
        requests=counts.requests,
        hits=counts.hits,
        queried_tokens=counts.queried_tokens,
        cached_tokens=counts.cached_tokens,
        hit_rate=counts.hit_rate,
        evicted_blocks=counts.evicted_blocks,
        saved_seconds=counts.saved_us / 1e6,
    )
