"""What the routes of quotas take and give: limits as they stand, and what a request would meet."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from loraplex.platform.errors import LimitName
from loraplex.platform.limit_scripts import Refusal
from loraplex.platform.limit_standing import Standing, Use
from loraplex.platform.quotas import BucketKind

Kind = Annotated[BucketKind, Field(description="Whose limit it is.", examples=["key"])]
BucketId = Annotated[str, Field(description="Of the tenant, key or adapter.", examples=["key_01j"])]


class UseOut(BaseModel):
    """One limit as it stands."""

    name: LimitName
    limit: int | None = Field(description="Null: no limit.", examples=[60])
    used: int = Field(
        description="Used or reserved now. Requests are counted where they are limited.",
        examples=[12],
    )
    remaining: int | None = Field(description="Null: without end.", examples=[48])
    reset_s: float = Field(
        description="Seconds until all of it is there again; 0 if it is.", examples=[12.0]
    )

    @classmethod
    def of(cls, use: Use) -> "UseOut":
        """From a limit's standing."""
        return cls(
            name=use.name,
            limit=use.limit,
            used=use.used,
            remaining=use.remaining,
            reset_s=use.reset_s,
        )


class BucketOut(BaseModel):
    """All limits of the tenant, a key or an adapter."""

    kind: Kind
    id: BucketId
    limits: list[UseOut]


class AmountOut(BaseModel):
    """What is kept of something, and how much may be."""

    used: int = Field(examples=[9_830_400])
    limit: int | None = Field(description="Null: no limit.", examples=[10_737_418_240])


class RefusalOut(BaseModel):
    """A request that a limit has refused."""

    object: Literal["quota.refusal"] = "quota.refusal"
    request_id: str = Field(examples=["req_01j"])
    at: int = Field(description="Seconds since the epoch.", examples=[1_796_040_000])
    kind: Kind
    id: BucketId
    name: LimitName
    tokens: int = Field(description="It might have used.", examples=[812])
    retry_after_s: float = Field(
        description="Seconds after which it would have been let in.", examples=[4.5]
    )

    @classmethod
    def of(cls, refusal: Refusal, tenant_id: str) -> "RefusalOut":
        """From what is kept of a refusal in this tenant's list."""
        kind, _, id = refusal.bucket.partition(":")
        return cls.model_validate(
            {
                "request_id": refusal.request_id,
                "at": refusal.at,
                "kind": kind,
                "id": id or tenant_id,
                "name": refusal.name,
                "tokens": refusal.estimate,
                "retry_after_s": refusal.wait_us / 1e6,
            }
        )


class QuotaOut(BaseModel):
    """How a tenant stands: its own limits, those of a key and of adapters, and what it keeps."""

    object: Literal["quota"] = "quota"
    tenant_id: str = Field(examples=["ten_01j"])
    buckets: list[BucketOut]
    storage_bytes: AmountOut
    adapters: AmountOut
    refusals: list[RefusalOut] = Field(description="The last ones, the newest first.")


class ExplainIn(BaseModel):
    """A request that might be sent."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"model": "support@prod", "prompt_tokens": 300, "max_tokens": 512}]
        },
    )

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    max_tokens: Annotated[
        int | None, Field(ge=1, le=10_000_000, description="Null: as many as would be allowed.")
    ] = None
    n: Annotated[int, Field(ge=1, le=128, description="Choices.")] = 1


class BindingOut(UseOut):
    """The limit that refuses a request, or else the one of which the least would be left."""

    kind: Kind
    id: BucketId


class ExplainOut(BaseModel):
    """Whether a request would be let in now, and which limit says so."""

    object: Literal["quota.explanation"] = "quota.explanation"
    admitted: bool
    explanation: str = Field(
        examples=["It would be let in. Nearest is this key's limit of 60 requests per minute."]
    )
    tokens: int = Field(description="That would be reserved.", examples=[812])
    max_tokens: int = Field(description="That each choice could have.", examples=[512])
    binding: BindingOut | None = Field(description="Null: nothing limits it.")
    retry_after_s: float | None = Field(
        description="Seconds until it would be let in; null if it is now, or never can be."
    )


def buckets_out(standing: Standing) -> list[BucketOut]:
    """Limits by the bucket that they are of."""
    found: dict[tuple[BucketKind, str], BucketOut] = {}
    for use in standing.uses:
        kind, id = use.bucket.kind, use.bucket.id
        bucket = found.setdefault((kind, id), BucketOut(kind=kind, id=id, limits=[]))
        bucket.limits.append(UseOut.of(use))
    return list(found.values())


def binding_out(use: Use | None) -> BindingOut | None:
    """The limit that binds, if there is one."""
    if use is None:
        return None
    return BindingOut(**vars(UseOut.of(use)), kind=use.bucket.kind, id=use.bucket.id)
