"""/v1/adapters/{name}/versions: an adapter's immutable versions, retired, restored and deleted."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from loraplex.platform.api.adapter_schemas import AdapterName, VersionNumber
from loraplex.platform.api.auth import Acting, Tenancy, allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.schemas import Deleted, Listed, PageSize, VersionOut, listed
from loraplex.platform.keys import Principal
from loraplex.platform.versions import delete_version, get_version, list_versions, set_retired

router = APIRouter(prefix="/v1/adapters/{name}/versions", tags=["adapters"])
Reading = Annotated[Principal, Depends(allow("adapters:read", held="by path"))]
Writing = Annotated[Principal, Depends(allow("adapters:write", held="by path"))]
AfterVersion = Annotated[
    str | None,
    Query(
        max_length=128,
        pattern=r"^(.*@)?[1-9][0-9]{0,8}$",
        description="Give the versions below this one: an id, or a number.",
        examples=["poet@3"],
    ),
]


@router.get("")
async def list_adapter_versions(
    _: Reading,
    tenant_id: Tenancy,
    ctx: Ctx,
    name: AdapterName,
    after: AfterVersion = None,
    limit: PageSize = 100,
) -> Listed[VersionOut]:
    """Versions of an adapter, the newest first, with what the upload gate said of each."""
    before = int(after.rpartition("@")[2]) if after else None
    async with ctx.db.read(tenant_id) as session:
        page = await list_versions(session, tenant_id, name, before=before, limit=limit)
    return listed(page, [VersionOut.of(name, version) for version in page.items])


@router.get("/{number}")
async def get_adapter_version(
    _: Reading, tenant_id: Tenancy, ctx: Ctx, name: AdapterName, number: VersionNumber
) -> VersionOut:
    """One version, with what the gate reported of it."""
    async with ctx.db.read(tenant_id) as session:
        return VersionOut.of(name, await get_version(session, tenant_id, name, number))


@dataclass(frozen=True)
class Change:
    """A version that a caller changes."""

    caller: Writing
    tenant_id: Tenancy
    actor: Acting
    ctx: Ctx
    name: AdapterName
    number: VersionNumber

    async def retire(self, retired: bool) -> VersionOut:
        """The version, retired or restored."""
        tenant_id, name = self.tenant_id, self.name
        async with self.ctx.db.session(tenant_id) as session:
            return VersionOut.of(
                name,
                await set_retired(session, tenant_id, name, self.number, retired, actor=self.actor),
            )


Changing = Annotated[Change, Depends()]


@router.post("/{number}/retire")
async def retire_version(change: Changing) -> VersionOut:
    """Let the adapter's bare name mean this version no more; its number and aliases go on."""
    return await change.retire(True)


@router.post("/{number}/restore")
async def restore_version(change: Changing) -> VersionOut:
    """Let the adapter's bare name mean this version again, if it is the newest."""
    return await change.retire(False)


@router.delete("/{number}")
async def delete_adapter_version(change: Changing) -> Deleted:
    """Delete one version, unless an alias is at it or it is the only one (409).

    Requests in flight finish; the number is never given again.
    """
    tenant_id, name, number = change.tenant_id, change.name, change.number
    async with change.ctx.db.session(tenant_id) as session:
        await delete_version(session, tenant_id, name, number, actor=change.actor)
    return Deleted(id=f"{name}@{number}", object="adapter.version")
