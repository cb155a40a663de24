"""Two sessions at once: one waits for the other, and then sees what it did."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from sqlalchemy import select, text

from loraplex.platform import aliases, images_kept, registry, sharing, versions
from loraplex.platform.audit import SYSTEM
from loraplex.platform.canaries import Canary
from loraplex.platform.db.models import Adapter, AdapterShare, AdapterVersion, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import Conflict, ModelNotFound
from loraplex.platform.key_changes import revoke_key
from loraplex.platform.keys import KeyRing
from loraplex.platform.tenants import set_suspended

pytestmark = pytest.mark.anyio
WAITING = text(
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def start(db: Database, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start it, and return once it waits for a lock; fail if it ends without."""
    task = asyncio.create_task(work)
    async with asyncio.timeout(20):
        while not await _is_waiting(db):
            assert not task.done(), "nothing was locked"
    return task


async def _is_waiting(db: Database) -> bool:
    if db.is_sqlite:
        await asyncio.sleep(0)
        return db._writer.statistics().tasks_waiting > 0
    async with db.read(None) as session:
        return await session.scalar(WAITING) > 0


async def publish(db: Database, tenant: Tenant, digest: str = "d") -> AdapterVersion:
    async with db.session(tenant.id) as session:
        return await _add(session, tenant, digest)


async def _add(session: Any, tenant: Tenant, digest: str) -> AdapterVersion:
    report = {"rank": 8, "bytes": 1024}
    return await registry.add_version(
        session,
        tenant.id,
        "poet",
        digest=digest,
        base="f",
        base_name="Base",
        report=report,
        actor=SYSTEM,
    )


async def unneeded(db: Database, digest: str) -> set[str]:
    async with db.session(None) as session:
        return await images_kept.unneeded(session, {digest})


async def delete(db: Database, tenant: Tenant) -> None:
    async with db.session(tenant.id) as session:
        await registry.delete_adapter(session, tenant.id, "poet", actor=SYSTEM)


async def test_a_version_published_while_its_adapter_is_deleted_is_of_the_new_one(
    db: Database, acme: Tenant
) -> None:
    await publish(db, acme, "1")
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
        publishing = await start(db, publish(db, acme, "2"))
    assert (await publishing).number == 2
    async with db.read(acme.id) as session:
        page = await versions.list_versions(session, acme.id, "poet")
    assert [version.number for version in page.items] == [2]


async def test_a_deletion_takes_the_version_that_was_being_published(
    db: Database, acme: Tenant
) -> None:
    await publish(db, acme, "1")
    async with db.session(acme.id) as session:
        await _add(session, acme, "2")
        deleting = await start(db, delete(db, acme))
    await deleting
    async with db.read(acme.id) as session:
        left = select(AdapterVersion).where(AdapterVersion.deleted_at.is_(None))
        assert list(await session.scalars(left)) == []


async def test_an_image_is_not_published_while_it_is_removed(db: Database, acme: Tenant) -> None:
    async with db.session(None) as session:
        assert await images_kept.unneeded(session, {"d", "e"}) == {"d", "e"}
        publishing = await start(db, publish(db, acme))
    await publishing
    assert await unneeded(db, "d") == set()


async def test_an_image_is_not_removed_while_it_is_published(db: Database, acme: Tenant) -> None:
    async with db.session(acme.id) as session:
        await _add(session, acme, "d")
        asking = await start(db, unneeded(db, "d"))
    assert await asking == set()


async def test_the_first_two_versions_of_a_name(db: Database, acme: Tenant) -> None:
    async with db.session(acme.id) as session:
        assert (await _add(session, acme, "1")).number == 1
        publishing = await start(db, publish(db, acme, "2"))
    assert (await publishing).number == 2


async def test_publishing_and_deleting_in_any_order(db: Database, acme: Tenant) -> None:
    works = [delete(db, acme) if n % 3 == 2 else publish(db, acme, str(n)) for n in range(24)]
    results = await asyncio.gather(*works, return_exceptions=True)
    faults = [result for result in results if isinstance(result, Exception)]
    assert all(isinstance(fault, ModelNotFound) for fault in faults), faults
    async with db.read(acme.id) as session:
        adapter = (await session.scalars(select(Adapter))).one()
        every = list(await session.scalars(select(AdapterVersion)))
    assert sorted(version.number for version in every) == list(range(1, 17))
    live = {version.number for version in every if version.deleted_at is None}
    assert bool(live) == (adapter.deleted_at is None)
    deletions = results.count(None)
    assert deletions + len(faults) == 8


async def test_a_key_is_revoked_and_a_tenant_suspended_once(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    async with db.session(acme.id) as session:
        key, _ = await ring.create(session, acme.id, "k", ["infer"], actor=SYSTEM)

    async def revoke() -> object:
        async with db.session(None) as session:
            return (await revoke_key(session, key.id, actor=SYSTEM)).revoked_at

    async def suspend() -> object:
        async with db.session(None) as session:
            return (await set_suspended(session, acme.id, True, actor=SYSTEM)).suspended_at

    for change in (revoke, suspend):
        moments = await asyncio.gather(*(change() for _ in range(8)))
        assert len({*moments}) == 1


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_keys_and_versions_are_made_while_their_tenant_is_changed(
    db: Database, acme: Tenant
) -> None:
    """A lock on a row keeps nobody from referring to it."""
    async with db.session(None) as session, asyncio.timeout(20):
        await set_suspended(session, acme.id, True, actor=SYSTEM)
        await session.flush()
        assert (await asyncio.create_task(publish(db, acme))).number == 1


async def test_a_version_is_not_deleted_while_an_alias_moves_to_it(
    db: Database, acme: Tenant
) -> None:
    await publish(db, acme, "1")
    await publish(db, acme, "2")

    async def remove() -> None:
        async with db.session(acme.id) as session:
            await versions.delete_version(session, acme.id, "poet", 1, actor=SYSTEM)

    async def move(canary: Canary | None, seen: int) -> None:
        async with db.session(acme.id) as session:
            await aliases.move_alias(
                session, acme.id, "poet", "prod", 2, seen=seen, actor=SYSTEM, canary=canary
            )

    async with db.session(acme.id) as session:
        split = Canary(1, 10)
        await aliases.move_alias(
            session, acme.id, "poet", "prod", 2, seen=0, actor=SYSTEM, canary=split
        )
        removing = await start(db, remove())
    with pytest.raises(Conflict, match="poet@prod"):
        await removing
    await move(None, 1)
    async with db.session(acme.id) as session:
        await versions.delete_version(session, acme.id, "poet", 1, actor=SYSTEM)
        moving = await start(db, move(split, 2))
    with pytest.raises(ModelNotFound):
        await moving


async def test_an_adapter_that_is_deleted_while_it_is_shared_is_shared_with_nobody(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, acme, "1")

    async def share() -> None:
        async with db.session(None) as session:
            await sharing.change_adapter(
                session, acme.id, "poet", {}, shared_with=[globex.id], actor=SYSTEM
            )

    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
        sharing_it = await start(db, share())
    with pytest.raises(ModelNotFound):
        await sharing_it
    await publish(db, acme, "2")
    await asyncio.gather(share(), delete(db, acme), return_exceptions=True)
    async with db.read(None) as session:
        deleted = select(Adapter.id).where(Adapter.deleted_at.is_not(None))
        left = select(AdapterShare).where(AdapterShare.adapter_id.in_(deleted))
        assert list(await session.scalars(left)) == []
