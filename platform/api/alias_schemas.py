"""What the routes of aliases take and give: where an alias is, its canary, and its moves."""

from typing import Annotated, Final, Literal, cast

from fastapi import Path, Query
from pydantic import BaseModel, Field

from loraplex.platform.aliases import canary_of
from loraplex.platform.api.adapter_schemas import MAX_NUMBER
from loraplex.platform.api.schemas import Body, Named, seconds
from loraplex.platform.canaries import Canary
from loraplex.platform.db.models import Alias, AliasMove

AliasName = Annotated[
    str,
    Path(max_length=128, description="The alias, without its adapter.", examples=["prod"]),
]
SEEN: Final = "The alias's revision as the caller knows it; 0: there is no such alias."
Seen = Annotated[int, Field(ge=0, le=MAX_NUMBER, description=SEEN, examples=[2])]
SeenInQuery = Annotated[int, Query(ge=0, le=MAX_NUMBER, description=SEEN, examples=[2])]
AfterMove = Annotated[
    int | None, Query(ge=1, le=MAX_NUMBER, description="Give the moves before this revision.")
]


class CanaryIn(Body):
    """The version that a share of the conversations shall try."""

    version: Annotated[int, Field(ge=1, le=MAX_NUMBER, examples=[8])]
    percent: Annotated[
        float,
        Field(
            gt=0,
            lt=100,
            description="Of the conversations, with at most two decimals. Each keeps its side.",
            examples=[10],
        ),
    ]

    def told(self) -> Canary:
        """As the registry takes it; raises `BadRequest` for more than two decimals."""
        return Canary(self.version, self.percent)


class AliasIn(Body):
    """Where an alias shall be, and where the caller saw it. Without `canary` it has none."""

    version: Annotated[int, Field(ge=1, le=MAX_NUMBER, examples=[7])]
    canary: Annotated[
        CanaryIn | None,
        Field(examples=[{"version": 8, "percent": 10}]),
    ] = None
    revision: Seen


class SeenIn(Body):
    """Where the caller saw the alias that is to be moved."""

    revision: Seen


class CanaryOut(BaseModel):
    """The version that a share of the conversations tries."""

    version: int = Field(examples=[8])
    percent: float = Field(examples=[10])


class AliasOut(Named):
    """An alias; a request's `model` may be its `id`."""

    id: str = Field(examples=["poet@prod"])
    object: Literal["adapter.alias"] = "adapter.alias"
    name: str = Field(description="The adapter.", examples=["poet"])
    alias: str = Field(examples=["prod"])
    version: int = Field(description="What it means.", examples=[7])
    canary: CanaryOut | None = Field(
        description="What it means to some conversations.",
        examples=[{"version": 8, "percent": 10}],
    )
    revision: int = Field(description="Counts its moves, removals among them.", examples=[3])
    moved_at: int = Field(examples=[1767225600])

    @classmethod
    def of(cls, name: str, row: Alias) -> "AliasOut":
        """From the row of an alias of the adapter `name` that is at a version."""
        return cls(
            id=f"{name}@{row.name}",
            name=name,
            alias=row.name,
            version=cast("int", row.number),
            canary=_canary(row),
            revision=row.revision,
            moved_at=seconds(row.moved_at),
        )


class AliasMoveOut(Named):
    """One move of an alias; its `id` is the revision that it led to."""

    id: str = Field(examples=["3"])
    object: Literal["adapter.alias.move"] = "adapter.alias.move"
    revision: int = Field(examples=[3])
    version: int | None = Field(description="Null: the alias was removed.", examples=[7])
    canary: CanaryOut | None = Field(examples=[{"version": 8, "percent": 10}])
    moved_by: str = Field(description="The id of the key.", examples=["key_01jxyz"])
    moved_at: int = Field(examples=[1767225600])

    @classmethod
    def of(cls, row: AliasMove) -> "AliasMoveOut":
        """From a row."""
        return cls(
            id=str(row.revision),
            revision=row.revision,
            version=row.number,
            canary=_canary(row),
            moved_by=row.moved_by,
            moved_at=seconds(row.moved_at),
        )


def _canary(row: Alias | AliasMove) -> CanaryOut | None:
    canary = canary_of(row)
    return CanaryOut(version=canary.number, percent=canary.percent) if canary else None
