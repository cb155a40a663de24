"""/v1/adapters/{name}/aliases: the names that mean one version of an adapter, and their moves.

A caller moves an alias by saying at which revision they saw it. Knows what is told of aliases;
refuses to know how they move (`loraplex.platform.aliases`).
"""

from typing import Annotated, Any, Final, Literal, cast

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field

from loraplex.platform.aliases import (
    list_aliases,
    list_moves,
    move_alias,
    remove_alias,
    roll_back,
)
from loraplex.platform.api.auth import Tenancy, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import Body, Deleted, Listed, Named, PageSize, seconds
from loraplex.platform.db.models import Alias, AliasMove
from loraplex.platform.errors import AliasMoved, ApiError, ModelNotFound
from loraplex.platform.keys import Principal

MAX_NUMBER: Final = 2**31 - 1


def _refusals(*errors: ApiError) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of errors, one a status, each shown as it is sent."""
    return {
        error.status: {
            "description": error.message,
            "content": {"application/json": {"example": error.body}},
        }
        for error in errors
    }


ABSENT: Final = _refusals(ModelNotFound("poet@prod", param="alias"))
MOVED: Final = ABSENT | _refusals(AliasMoved("poet@prod", 3, 2))

router = APIRouter(prefix="/v1/adapters/{name}/aliases", tags=["aliases"])
Reading = Annotated[Principal, Depends(allow("adapters:read"))]
Writing = Annotated[Principal, Depends(allow("adapters:write"))]
AdapterName = Annotated[str, Path(description="The adapter.", examples=["poet"])]
AliasName = Annotated[str, Path(description="The alias, without its adapter.", examples=["prod"])]

SEEN: Final = "The alias's revision as the caller knows it; 0: there is no such alias."
Seen = Annotated[int, Field(ge=0, le=MAX_NUMBER, description=SEEN, examples=[2])]
SeenInQuery = Annotated[int, Query(ge=0, le=MAX_NUMBER, description=SEEN, examples=[2])]
AfterMove = Annotated[
    int | None, Query(ge=1, le=MAX_NUMBER, description="Give the moves before this revision.")
]


class AliasIn(Body):
    """Where an alias shall be, and where the caller saw it."""

    version: Annotated[int, Field(ge=1, le=MAX_NUMBER, examples=[7])]
    revision: Seen


class RollbackIn(Body):
    """Where the caller saw the alias whose last move is taken back."""

    revision: Seen


class AliasOut(Named):
    """An alias; a request's `model` may be its `id`."""

    id: str = Field(examples=["poet@prod"])
    object: Literal["adapter.alias"] = "adapter.alias"
    name: str = Field(description="The adapter.", examples=["poet"])
    alias: str = Field(examples=["prod"])
    version: int = Field(description="What it means.", examples=[7])
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
            revision=row.revision,
            moved_at=seconds(row.moved_at),
        )


class AliasMoveOut(Named):
    """One move of an alias; its `id` is the revision that it led to."""

    id: str = Field(examples=["3"])
    object: Literal["adapter.alias.move"] = "adapter.alias.move"
    revision: int = Field(examples=[3])
    version: int | None = Field(description="Null: the alias was removed.", examples=[7])
    moved_by: str = Field(description="The id of the key.", examples=["key_01jxyz"])
    moved_at: int = Field(examples=[1767225600])

    @classmethod
    def of(cls, row: AliasMove) -> "AliasMoveOut":
        """From a row."""
        return cls(
            id=str(row.revision),
            revision=row.revision,
            version=row.number,
            moved_by=row.moved_by,
            moved_at=seconds(row.moved_at),
        )


@router.get("", responses=ABSENT)
async def list_all(_: Reading, tenant_id: Tenancy, ctx: Ctx, name: AdapterName) -> Listed[AliasOut]:
    """All aliases of an adapter in order of name."""
    async with ctx.db.read(tenant_id) as session:
        rows = await list_aliases(session, tenant_id, name)
    return Listed[AliasOut].of([AliasOut.of(name, row) for row in rows], has_more=False)


@router.put("/{alias}", responses=MOVED)
async def move(
    principal: Writing,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    alias: AliasName,
    body: AliasIn,
) -> AliasOut:
    """Make an alias (`revision` 0) or move it, unless it was moved since the caller looked (409).

    The error says at which revision it is now.
    """
    async with ctx.db.session(tenant_id) as session:
        row = await move_alias(
            session,
            tenant_id,
            name,
            alias,
            body.version,
            seen=body.revision,
            by=principal.key_id,
        )
        return AliasOut.of(name, row)


@router.post("/{alias}/rollback", responses=MOVED)
async def take_back(
    principal: Writing,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    alias: AliasName,
    body: RollbackIn,
) -> AliasOut:
    """Take an alias's last move back, as a new move: doing it twice is where it was."""
    async with ctx.db.session(tenant_id) as session:
        row = await roll_back(
            session, tenant_id, name, alias, seen=body.revision, by=principal.key_id
        )
        return AliasOut.of(name, row)


@router.get("/{alias}/history", responses=ABSENT)
async def history(
    _: Reading,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    alias: AliasName,
    after: AfterMove = None,
    limit: PageSize = 100,
) -> Listed[AliasMoveOut]:
    """An alias's moves, the newest first, also of an alias that was removed."""
    async with ctx.db.read(tenant_id) as session:
        rows = await list_moves(session, tenant_id, name, alias, before=after, limit=limit)
    has_more = bool(rows) and rows[-1].revision > 1
    return Listed[AliasMoveOut].of([AliasMoveOut.of(row) for row in rows], has_more)


@router.delete("/{alias}", responses=MOVED)
async def remove(
    principal: Writing,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    alias: AliasName,
    revision: SeenInQuery,
) -> Deleted:
    """Remove an alias, unless it was moved since the caller looked (409); its history stays."""
    async with ctx.db.session(tenant_id) as session:
        await remove_alias(session, tenant_id, name, alias, seen=revision, by=principal.key_id)
    return Deleted(id=f"{name}@{alias}", object="adapter.alias")
