"""What the routes of adapters take and give: adapters, their use by others, paths to them."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal, cast

from fastapi import Path
from pydantic import Field

from loraplex.platform.api.limit_schemas import LimitsIn, LimitsOut
from loraplex.platform.api.schemas import Named, seconds
from loraplex.platform.db.models import Adapter, AdapterVersion
from loraplex.platform.quotas import Limits
from loraplex.platform.sharing import MAX_DESCRIPTION, MAX_SHARES, Use, Visibility

MAX_NUMBER: Final = 2**31 - 1
AdapterName = Annotated[str, Path(max_length=128, description="The adapter.", examples=["poet"])]
VersionNumber = Annotated[
    int, Path(ge=1, le=MAX_NUMBER, description="The version's number.", examples=[3])
]
TenantName = Annotated[str, Field(min_length=1, max_length=64)]


class AdapterChange(LimitsIn):
    """What is given is changed; the rest stays. Limits hold each tenant that uses the adapter."""

    visibility: Annotated[
        Visibility,
        Field(
            description="Who may use it: `private` its owner, `shared` the tenants in "
            "`shared_with` too, `public` all. Others name it `owner/name`.",
            examples=["shared"],
        ),
    ] = "private"
    description: Annotated[
        str | None, Field(max_length=MAX_DESCRIPTION, examples=["Answers in verse."])
    ] = None
    shared_with: Annotated[
        list[TenantName] | None,
        Field(
            max_length=MAX_SHARES,
            description="All tenants, by id or name, that may use it while it is `shared`.",
            examples=[["globex"]],
        ),
    ] = None


class AdapterOut(LimitsOut, Named):
    """An adapter; what its bare name means is null where all of its versions are retired."""

    object: Literal["adapter"] = "adapter"
    name: str = Field(examples=["poet"])
    description: str | None
    visibility: Visibility
    shared_with: list[str] = Field(description="Ids of tenants.")
    version: int | None = Field(description="The newest that is not retired.", examples=[3])
    digest: str | None
    rank: int | None
    bytes: int | None
    created_at: int

    @classmethod
    def of(
        cls, adapter: Adapter, version: AdapterVersion | None, shares: Sequence[str]
    ) -> "AdapterOut":
        """From a row, what its bare name means, and the tenants that it is shared with."""
        return cls(
            id=adapter.name,
            name=adapter.name,
            description=adapter.description,
            visibility=cast("Visibility", adapter.visibility),
            shared_with=list(shares),
            version=version.number if version else None,
            digest=version.digest if version else None,
            rank=version.rank if version else None,
            bytes=version.image_bytes if version else None,
            created_at=seconds(adapter.created_at),
            **vars(Limits.of(adapter)),
        )


class AdapterUseOut(Named):
    """What one tenant's requests used of an adapter; its `id` is the tenant's."""

    object: Literal["adapter.use"] = "adapter.use"
    tenant: str = Field(description="The tenant's name.", examples=["globex"])
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, use: Use) -> "AdapterUseOut":
        """From totals of the ledger."""
        return cls(
            id=use.tenant_id,
            tenant=use.tenant,
            requests=use.requests,
            prompt_tokens=use.prompt_tokens,
            completion_tokens=use.completion_tokens,
            cached_tokens=use.cached_tokens,
            total_tokens=use.prompt_tokens + use.completion_tokens,
        )
