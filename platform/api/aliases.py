"""/v1/adapters/{name}/aliases: the names that mean one version of an adapter, and their moves.

A caller moves an alias by saying at which revision they saw it. Knows what is told of aliases;
refuses to know how they move (`loraplex.platform.aliases`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends

from loraplex.platform import aliases
from loraplex.platform.api.adapter_schemas import AdapterName
from loraplex.platform.api.alias_schemas import (
    AfterMove,
    AliasIn,
    AliasMoveOut,
    AliasName,
    AliasOut,
    SeenIn,
    SeenInQuery,
)
from loraplex.platform.api.auth import Acting, Tenancy, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import Deleted, Listed, PageSize
from loraplex.platform.db.models import Alias
from loraplex.platform.errors import AliasMoved, ApiError, ModelNotFound
from loraplex.platform.keys import Principal


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
Reading = Annotated[Principal, Depends(allow("adapters:read", held="by path"))]
Writing = Annotated[Principal, Depends(allow("adapters:write", held="by path"))]


@router.get("", responses=ABSENT)
async def list_aliases(
    _: Reading, tenant_id: Tenancy, ctx: Ctx, name: AdapterName
) -> Listed[AliasOut]:
    """All aliases of an adapter in order of name."""
    async with ctx.db.read(tenant_id) as session:
        rows = await aliases.list_aliases(session, tenant_id, name)
    return Listed[AliasOut].of([AliasOut.of(name, row) for row in rows], has_more=False)


@dataclass(frozen=True)
class Change:
    """An alias that a caller changes."""

    caller: Writing
    tenant_id: Tenancy
    actor: Acting
    ctx: Ctx
    name: AdapterName
    alias: AliasName

    async def by(self, move: Callable[..., Awaitable[Alias]], seen: int, **terms: Any) -> AliasOut:
        """The alias after a move that was meant for its revision `seen`."""
        async with self.ctx.db.session(self.tenant_id) as session:
            row = await move(
                session,
                self.tenant_id,
                self.name,
                self.alias,
                seen=seen,
                actor=self.actor,
                **terms,
            )
            return AliasOut.of(self.name, row)


Changing = Annotated[Change, Depends()]


@router.put("/{alias}", responses=MOVED)
async def move_alias(change: Changing, body: AliasIn) -> AliasOut:
    """Make an alias (`revision` 0) or move it, unless it was moved since the caller looked (409).

    With a `canary`, a share of the conversations gets another version, each of them always the
    same one; a greater `percent` only adds conversations. The error says at which revision the
    alias is now.
    """
    canary = body.canary.told() if body.canary else None
    return await change.by(aliases.move_alias, body.revision, number=body.version, canary=canary)


@router.post("/{alias}/promote", responses=MOVED)
async def promote_canary(change: Changing, body: SeenIn) -> AliasOut:
    """Let the canary be what the alias means to all (409 where there is none)."""
    return await change.by(aliases.promote, body.revision)


@router.post("/{alias}/abort", responses=MOVED)
async def abort_canary(change: Changing, body: SeenIn) -> AliasOut:
    """Drop the canary (409 where there is none): all get the version it was tried against."""
    return await change.by(aliases.abort, body.revision)


@router.post("/{alias}/rollback", responses=MOVED)
async def roll_back_alias(change: Changing, body: SeenIn) -> AliasOut:
    """Take an alias's last move back, as a new move: doing it twice is where it was.

    The canary that was there before is there again.
    """
    return await change.by(aliases.roll_back, body.revision)


@router.get("/{alias}/history", responses=ABSENT)
async def list_alias_moves(
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
        rows = await aliases.list_moves(session, tenant_id, name, alias, before=after, limit=limit)
    has_more = bool(rows) and rows[-1].revision > 1
    return Listed[AliasMoveOut].of([AliasMoveOut.of(row) for row in rows], has_more)


@router.delete("/{alias}", responses=MOVED)
async def remove_alias(change: Changing, revision: SeenInQuery) -> Deleted:
    """Remove an alias, unless it was moved since the caller looked (409); its history stays."""
    tenant_id, name, alias = change.tenant_id, change.name, change.alias
    async with change.ctx.db.session(tenant_id) as session:
        await aliases.remove_alias(
            session, tenant_id, name, alias, seen=revision, actor=change.actor
        )
    return Deleted(id=f"{name}@{alias}", object="adapter.alias")
