"""/v1/quota: every limit that holds a tenant's requests, and which of them binds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from loraplex.platform.api.auth import Tenancy, allow
from loraplex.platform.api.buckets import adapter_buckets
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.quota_schemas import (
    AmountOut,
    ExplainIn,
    ExplainOut,
    QuotaOut,
    RefusalOut,
    binding_out,
    buckets_out,
)
from loraplex.platform.db.models import ApiKey, Tenant
from loraplex.platform.errors import BadRequest, NotFound
from loraplex.platform.keys import Principal, get_key
from loraplex.platform.limit_standing import Standing, Use, cap_max_tokens, refusal
from loraplex.platform.quotas import Bucket, Limits, TenantLimits
from loraplex.platform.resolving import Resolved, resolve, view
from loraplex.platform.storage import Stored, used
from loraplex.platform.tenants import get_tenant

MAX_NAMED = 16

router = APIRouter(prefix="/v1/quota", tags=["quota"])
Reading = Annotated[Principal, Depends(allow("infer", "admin"))]
KeyId = Annotated[
    str | None,
    Query(max_length=64, description="For administrators: another key than the caller's."),
]
Adapters = Annotated[
    list[Annotated[str, Query(max_length=256)]],
    Query(max_length=MAX_NAMED, description="Adapters to tell of; repeatable."),
]


@dataclass(frozen=True)
class _Held:
    """A tenant and the buckets that a request of one of its keys is held to."""

    tenant: Tenant
    buckets: tuple[Bucket, ...]
    stored: Stored


@router.get("")
async def get_quota(
    principal: Reading,
    ctx: Ctx,
    tenant_id: Tenancy,
    key_id: KeyId = None,
    adapter: Adapters = [],  # noqa: B006 (FastAPI copies it)
) -> QuotaOut:
    """Every limit of the tenant, a key and the named adapters, as it stands this moment.

    Rates, budgets and requests at once are read from Redis, storage from the registry.
    """
    held = await _held(ctx, principal, tenant_id, key_id, adapter)
    standing = await ctx.limiter.look(tenant_id, held.buckets, whole=True)
    refusals = await ctx.limiter.refusals(tenant_id)
    limits = TenantLimits.of(held.tenant)
    return QuotaOut(
        tenant_id=tenant_id,
        buckets=buckets_out(standing),
        storage_bytes=AmountOut(used=held.stored.bytes, limit=limits.storage_bytes),
        adapters=AmountOut(used=held.stored.adapters, limit=limits.max_adapters),
        refusals=[RefusalOut.of(each, tenant_id) for each in refusals],
    )


@router.post("/explain")
async def explain(
    principal: Reading, ctx: Ctx, tenant_id: Tenancy, body: ExplainIn, key_id: KeyId = None
) -> ExplainOut:
    """Whether such a request would be let in now, and which limit binds; nothing is charged."""
    held = await _held(ctx, principal, tenant_id, key_id, [body.model])
    max_tokens, impossible = _fit(held.buckets, body, ctx.context_tokens - body.prompt_tokens)
    estimate = body.prompt_tokens + body.n * max_tokens
    standing = await ctx.limiter.look(tenant_id, held.buckets, estimate)
    refused = standing.refused_by is not None
    return ExplainOut(
        admitted=not (refused or impossible),
        explanation=impossible or _sentence(standing, estimate),
        tokens=estimate,
        max_tokens=max_tokens,
        binding=binding_out(standing.nearest),
        retry_after_s=standing.wait_s if refused and not impossible else None,
    )


@router.get("/refusals/{request_id}")
async def get_refusal(
    _: Reading,
    ctx: Ctx,
    tenant_id: Tenancy,
    request_id: Annotated[str, Path(max_length=64, examples=["req_01j"])],
) -> RefusalOut:
    """Why a request was refused: its id is in the answer's header `x-request-id`.

    The last hundred refusals of a tenant are kept for a week.
    """
    for each in await ctx.limiter.refusals(tenant_id):
        if each.request_id == request_id:
            return RefusalOut.of(each, tenant_id)
    raise NotFound(f"No limit has refused a request {request_id!r} lately.")


async def _held(
    ctx: Context, principal: Principal, tenant_id: str, key_id: str | None, models: Sequence[str]
) -> _Held:
    """Raises `NotFound` for a key, `ModelNotFound` for an adapter that is none of the caller's."""
    async with ctx.db.read(view(tenant_id, *models)) as session:
        tenant = await get_tenant(session, tenant_id)
        stored = await used(session, tenant_id)
        found = [await resolve(session, tenant_id, each, ctx.base.name) for each in models]
        key = None
        if key_id is not None and key_id != principal.key_id:
            key = await get_key(session, key_id)
    for resolved, model in zip(found, models, strict=True):
        principal.check_adapter(resolved, model)
    return _Held(tenant, _buckets(principal, tenant, key, found), stored)


def _buckets(
    principal: Principal, tenant: Tenant, key: ApiKey | None, found: Sequence[Resolved]
) -> tuple[Bucket, ...]:
    """Those of a request with this key, or the caller's own; an operator has none of its own."""
    if key is not None and ("admin" not in principal.scopes or key.tenant_id != tenant.id):
        raise NotFound(f"There is no key {key.id!r}.")
    id, limits = principal.key_id, principal.key_limits
    if key is not None:
        id, limits = key.id, Limits.of(key)
    has_key = key is not None or principal.tenant_id is not None
    return (
        Bucket("tenant", tenant.id, TenantLimits.of(tenant)),
        *([Bucket("key", id, limits)] if has_key else []),
        *adapter_buckets(found),
    )


def _fit(buckets: Sequence[Bucket], body: ExplainIn, room: int) -> tuple[int, str | None]:
    """Tokens for each choice, and why the request can never be, where it cannot."""
    try:
        room = max(room, 1)
        return cap_max_tokens(buckets, body.prompt_tokens, body.max_tokens, room, body.n), None
    except BadRequest as error:
        return body.max_tokens or 1, error.message


def _sentence(standing: Standing, estimate: int) -> str:
    if standing.refused_by is not None:
        return refusal(standing, estimate).message
    if standing.nearest is None:
        return "It would be let in: nothing limits it."
    return f"It would be let in. {_nearest(standing.nearest)}"


def _nearest(use: Use) -> str:
    name = use.name.replace("_", " ")
    return (
        f"Nearest is this {use.bucket.kind}'s limit of {use.limit} {name}, of which "
        f"{use.remaining} are left now."
    )
