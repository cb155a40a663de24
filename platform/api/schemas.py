"""What the management routes take and give; times are whole seconds since the epoch."""

from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from loraplex.platform.db.models import Adapter, AdapterVersion, ApiKey
from loraplex.platform.db.page import MAX_PAGE, Page
from loraplex.platform.keys import Scope
from loraplex.platform.usage import UsageTotal

Item = TypeVar("Item", bound="Named")
After = Annotated[
    str | None, Query(max_length=128, description="Give what follows this id.", examples=[None])
]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE, description="At most so many.")]


class Named(BaseModel):
    """A resource: every one has an id."""

    id: str


class Listed(BaseModel, Generic[Item]):
    """A page of a list; ask for the next with `after` set to `last_id`."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Item], has_more: bool) -> "Listed[Item]":
        """A page of these items."""
        return cls(
            data=list(items),
            first_id=items[0].id if items else None,
            last_id=items[-1].id if items else None,
            has_more=has_more,
        )


class Body(BaseModel):
    """What a caller sends: no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModelOut(Named):
    """A name that a request's `model` may have."""

    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = Field(description="The base, for an adapter.")


class VersionOut(Named):
    """One immutable version of an adapter."""

    object: Literal["adapter.version"] = "adapter.version"
    name: str
    version: int
    digest: str
    base: str = Field(description="The fingerprint of the base it was compiled for.")
    rank: int
    bytes: int
    created_at: int
    report: dict[str, Any] = Field(description="What the compiler said.")

    @classmethod
    def of(cls, name: str, version: AdapterVersion) -> "VersionOut":
        """From the row of a version of the adapter `name`."""
        return cls(
            id=f"{name}@{version.number}",
            name=name,
            version=version.number,
            digest=version.digest,
            base=version.base,
            rank=version.rank,
            bytes=version.image_bytes,
            created_at=seconds(version.created_at),
            report=version.report,
        )


class AdapterOut(Named):
    """An adapter; what is not in `versions` is its newest version's."""

    object: Literal["adapter"] = "adapter"
    name: str
    version: int
    digest: str
    rank: int
    bytes: int
    created_at: int
    versions: list[VersionOut]

    @classmethod
    def of(cls, adapter: Adapter) -> "AdapterOut":
        """From a row with its versions, of which there is at least one."""
        versions = [VersionOut.of(adapter.name, version) for version in adapter.versions]
        newest = versions[-1]
        return cls(
            id=adapter.name,
            name=adapter.name,
            version=newest.version,
            digest=newest.digest,
            rank=newest.rank,
            bytes=newest.bytes,
            created_at=seconds(adapter.created_at),
            versions=versions,
        )


class Deleted(Named):
    """The answer to a deletion."""

    object: str
    deleted: Literal[True] = True


class KeyIn(Body):
    """A new key; without `tenant_id` it is of the caller's tenant, or an operator's."""

    name: Annotated[str, Field(max_length=256)]
    scopes: Annotated[list[str], Field(max_length=16)]
    tenant_id: Annotated[str | None, Field(max_length=64)] = None
    expires_at: Annotated[
        AwareDatetime | None, Field(strict=False, description="ISO 8601 with a timezone.")
    ] = None


class KeyOut(Named):
    """A key without its secret."""

    object: Literal["api_key"] = "api_key"
    name: str
    tenant_id: str | None = Field(description="Null for an operator's key.")
    scopes: list[Scope]
    redacted: str = Field(description="The first characters of the secret.")
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None

    @classmethod
    def fields_of(cls, key: ApiKey) -> dict[str, Any]:
        """What a row tells."""
        return {
            "id": key.id,
            "name": key.name,
            "tenant_id": key.tenant_id,
            "scopes": key.scopes,
            "redacted": key.redacted,
            "created_at": seconds(key.created_at),
            "expires_at": seconds_or_none(key.expires_at),
            "revoked_at": seconds_or_none(key.revoked_at),
            "last_used_at": seconds_or_none(key.last_used_at),
        }


class NewKeyOut(KeyOut):
    """A key with its secret, which is told this once."""

    secret: str


class UsageOut(BaseModel):
    """Sums over one group; what was not grouped by is null, as is the adapter of the bare base."""

    object: Literal["usage"] = "usage"
    tenant_id: str | None
    adapter: str | None
    day: date | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, total: UsageTotal) -> "UsageOut":
        """From a total of the ledger."""
        return cls(
            tenant_id=total.tenant_id,
            adapter=total.adapter,
            day=total.day,
            requests=total.requests,
            prompt_tokens=total.prompt_tokens,
            completion_tokens=total.completion_tokens,
            cached_tokens=total.cached_tokens,
            total_tokens=total.total_tokens,
        )


class UsageList(BaseModel):
    """Totals of all groups asked for."""

    object: Literal["list"] = "list"
    data: list[UsageOut]


def seconds(moment: datetime) -> int:
    """Whole seconds since the epoch."""
    return int(moment.timestamp())


def seconds_or_none(moment: datetime | None) -> int | None:
    """Whole seconds since the epoch, None for no moment."""
    return None if moment is None else seconds(moment)


def listed(page: Page[Any], items: list[Item]) -> Listed[Item]:
    """The answer for a page of rows, shaped as `items`."""
    return Listed[Item].of(items, page.has_more)
