"""What the management routes take and give; times are whole seconds since the epoch."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.db.page import MAX_PAGE, Page

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


class VariantOut(BaseModel):
    """Another image of a version, of another dtype; requests name it with `:dtype`."""

    dtype: str = Field(examples=["int8"])
    digest: str
    bytes: int


class VersionOut(Named):
    """One immutable version of an adapter."""

    object: Literal["adapter.version"] = "adapter.version"
    name: str
    version: int
    digest: str
    dtype: str = Field(description="Of its own image.", examples=["bf16"])
    variants: list[VariantOut]
    base: str = Field(description="The fingerprint of the base it was compiled for.")
    rank: int
    bytes: int
    created_at: int
    created_by: str | None = Field(description="The id of the key that published it.")
    retired_at: int | None = Field(description="Since when the bare name does not mean it.")
    report: dict[str, Any] = Field(description="What the compiler said.")

    @classmethod
    def of(cls, name: str, version: AdapterVersion) -> "VersionOut":
        """From the row of a version of the adapter `name`, with its variants."""
        return cls(
            id=f"{name}@{version.number}",
            name=name,
            version=version.number,
            digest=version.digest,
            dtype=version.dtype,
            variants=[
                VariantOut(dtype=each.dtype, digest=each.digest, bytes=each.image_bytes)
                for each in version.variants
            ],
            base=version.base,
            rank=version.rank,
            bytes=version.image_bytes,
            created_at=seconds(version.created_at),
            created_by=version.created_by,
            retired_at=seconds_or_none(version.retired_at),
            report=version.report,
        )


class Deleted(Named):
    """The answer to a deletion."""

    object: str
    deleted: Literal[True] = True


def seconds(moment: datetime) -> int:
    """Whole seconds since the epoch."""
    return int(moment.timestamp())


def seconds_or_none(moment: datetime | None) -> int | None:
    """Whole seconds since the epoch, None for no moment."""
    return None if moment is None else seconds(moment)


def listed(page: Page[Any], items: list[Item]) -> Listed[Item]:
    """The answer for a page of rows, shaped as `items`."""
    return Listed[Item].of(items, page.has_more)
