"""What tenants keep in the store, what they may, and what leaves it when nobody needs it."""

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import NoResultFound

from loraplex.engine.images import ImageStore
from loraplex.platform import images_kept, registry, storage
from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.db.models import Adapter, AdapterVersion, AuditEntry, ImageVariant, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import NotFound, QuotaExceeded
from loraplex.platform.images_kept import PUT_S, UNNAMED_S, Collected
from loraplex.platform.storage import Stored

pytestmark = pytest.mark.anyio
GRACE_S = 660.0


def image(number: int) -> tuple[str, bytes]:
    content = b"image" * (number + 1)
    return hashlib.sha256(content).hexdigest(), content


async def publish(
    db: Database,
    tenant: Tenant,
    name: str,
    number: int,
    *variants: int,
    charge: bool = False,
    shelf: "Shelf | None" = None,
) -> None:
    """Publish image `number`, with variants, as a version of `name`; they are put on the shelf."""
    digest, content = image(number)
    others = {f"d{i}": (image(n)[0], len(image(n)[1])) for i, n in enumerate(variants)}
    additions = {digest: len(content)} | dict(others.values())
    async with db.session(tenant.id) as session:
        if charge:
            await storage.charge(session, tenant.id, additions, new_adapter=True)
        await registry.add_version(
            session,
            tenant.id,
            name,
            digest=digest,
            base="f" * 64,
            base_name="base",
            report={"rank": 8, "bytes": len(content)},
            actor=SYSTEM,
            variants=others,
        )
        for each in (number, *variants) if shelf else ():
            shelf.put(each)


async def delete(db: Database, tenant: Tenant, name: str, moment: datetime | None = None) -> None:
    """Delete an adapter and its versions at a moment of our choice."""
    async with db.session(tenant.id) as session:
        adapter = (await session.scalars(select(Adapter).where(Adapter.name == name))).one()
        theirs = AdapterVersion.adapter_id == adapter.id, AdapterVersion.deleted_at.is_(None)
        versions = await session.scalars(select(AdapterVersion).where(*theirs))
        for row in (adapter, *versions):
            row.deleted_at = moment or datetime.now(UTC)


async def limit(db: Database, tenant: Tenant, **limits: int) -> None:
    async with db.session(None) as session:
        row = await session.get_one(Tenant, tenant.id)
        for name, value in limits.items():
            setattr(row, name, value)


async def used(db: Database, tenant: Tenant) -> Stored:
    async with db.read(tenant.id) as session:
        return await storage.used(session, tenant.id)


async def charge(db: Database, tenant: Tenant, *numbers: int, new_adapter: bool = False) -> Stored:
    additions = {image(number)[0]: len(image(number)[1]) for number in numbers}
    async with db.session(tenant.id) as session:
        return await storage.charge(session, tenant.id, additions, new_adapter=new_adapter)


async def test_each_image_of_a_tenant_counts_once_for_it_and_for_each_tenant(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    assert await used(db, acme) == Stored()
    await publish(db, acme, "poet", 1, 2)
    await publish(db, acme, "bard", 1)
    await publish(db, acme, "bard", 3, 2)
    await publish(db, globex, "poet", 1)
    assert await used(db, acme) == Stored(bytes=10 + 15 + 20, adapters=2, images=3)
    assert await used(db, globex) == Stored(bytes=10, adapters=1, images=1)
    await delete(db, acme, "poet")
    assert await used(db, acme) == Stored(bytes=10 + 15 + 20, adapters=1, images=3)
    await delete(db, acme, "bard")
    assert await used(db, acme) == Stored()


async def test_tenants_are_listed_with_what_they_keep(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, globex, "poet", 1)
    first, second = sorted((acme, globex), key=lambda tenant: tenant.id)
    kept = {acme.id: Stored(), globex.id: Stored(10, 1, 1)}
    async with db.read(None) as session:
        page = await storage.list_used(session, limit=1)
        rest = await storage.list_used(session, after=first.id)
    assert [(tenant.id, stored) for tenant, stored in page.items] == [(first.id, kept[first.id])]
    assert page.has_more
    assert [(tenant.id, stored) for tenant, stored in rest.items] == [(second.id, kept[second.id])]


async def test_a_quota_names_the_limit_its_use_and_the_fix(db: Database, acme: Tenant) -> None:
    await publish(db, acme, "poet", 1)
    await limit(db, acme, storage_bytes=24, max_adapters=1)
    with pytest.raises(QuotaExceeded) as caught:
        await charge(db, acme, 2)
    assert caught.value.param == "storage_bytes"
    assert "storage_bytes is 24, of which 10 are used" in caught.value.message
    assert "15 more" in caught.value.message
    assert "Delete" in caught.value.message
    with pytest.raises(QuotaExceeded, match="max_adapters is 1, and 1 are there"):
        await charge(db, acme, new_adapter=True)
    assert await charge(db, acme, 1) == Stored(10, 1, 1)  # what it has already costs nothing


async def test_another_tenants_copy_makes_nothing_cheaper(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, globex, "poet", 1)
    await limit(db, acme, storage_bytes=9)
    with pytest.raises(QuotaExceeded, match="needs 10 more"):
        await charge(db, acme, 1)


async def test_a_limit_that_was_lowered_hinders_only_growth(db: Database, acme: Tenant) -> None:
    await publish(db, acme, "poet", 1)
    await limit(db, acme, storage_bytes=0, max_adapters=0)
    assert await charge(db, acme, 1) == Stored(10, 1, 1)
    with pytest.raises(QuotaExceeded):
        await charge(db, acme, 0)


async def test_nobody_is_charged_for_nobody(db: Database) -> None:
    async with db.session(None) as session:
        with pytest.raises(NotFound):
            await storage.charge(session, "ten_nobody", {}, new_adapter=False)


async def test_of_uploads_at_once_only_those_that_fit_are_published(
    db: Database, acme: Tenant
) -> None:
    await limit(db, acme, storage_bytes=40, max_adapters=3)
    outcomes = await asyncio.gather(
        *(publish(db, acme, f"poet{i}", i, charge=True) for i in range(6)), return_exceptions=True
    )
    refused = [each for each in outcomes if isinstance(each, Exception)]
    assert all(isinstance(each, QuotaExceeded) for each in refused), refused
    kept = await used(db, acme)
    assert kept.images == kept.adapters == 6 - len(refused)
    assert kept.bytes <= 40
    assert kept.adapters <= 3
    sizes = [len(image(i)[1]) for i, each in enumerate(outcomes) if isinstance(each, Exception)]
    assert kept.adapters == 3 or kept.bytes + min(sizes) > 40


class Shelf:
    """The store, with files as old as is said, and a clock."""

    def __init__(self, db: Database, folder: Path) -> None:
        self.db, self.folder, self.store = db, folder, ImageStore(str(folder / "store"))
        self.now = datetime.now(UTC)

    def put(self, number: int, age_s: float = 2 * PUT_S) -> str:
        digest, content = image(number)
        source = self.folder / f"image-{number}"
        source.write_bytes(content)
        self.store.put(source, digest)
        with contextlib.suppress(FileNotFoundError):  # collected already
            self.age(self.store.fetch(digest, self.folder), age_s)
        return digest

    def age(self, path: Path, age_s: float) -> None:
        moment = self.now.timestamp() - age_s
        os.utime(path, (moment, moment))

    def __contains__(self, number: int) -> bool:
        return image(number)[0] in self.store

    async def collect(
        self, *, dry_run: bool = False, unnamed: bool = False, later_s: float = 0
    ) -> Collected:
        return await images_kept.collect(
            self.db,
            self.store,
            grace_s=GRACE_S,
            unnamed=unnamed,
            actor=Actor("key_of_an_operator"),
            dry_run=dry_run,
            now=self.now + timedelta(seconds=later_s),
        )


@pytest.fixture
def shelf(db: Database, tmp_path: Path) -> Shelf:
    return Shelf(db, tmp_path)


async def test_an_image_goes_when_the_last_that_names_it_is_long_deleted(
    db: Database, acme: Tenant, globex: Tenant, shelf: Shelf
) -> None:
    for number in (1, 2):
        shelf.put(number)
    await publish(db, acme, "poet", 1, 2)
    await publish(db, globex, "bard", 2)
    await delete(db, acme, "poet", shelf.now)
    assert await shelf.collect(later_s=GRACE_S - 1) == Collected()  # a request may still need it
    assert await shelf.collect(later_s=GRACE_S + 1) == Collected(1, 0, 10, (image(1)[0],))
    assert 1 not in shelf
    assert 2 in shelf
    await delete(db, globex, "bard", shelf.now)
    await shelf.collect(later_s=GRACE_S + 1)
    assert 2 not in shelf


async def test_what_was_put_lately_stays_for_it_may_be_about_to_be_published(
    db: Database, acme: Tenant, shelf: Shelf
) -> None:
    shelf.put(1, PUT_S - 60)
    await publish(db, acme, "poet", 1)
    await delete(db, acme, "poet", shelf.now - timedelta(days=1))
    assert await shelf.collect() == Collected()
    assert (await shelf.collect(later_s=120)).images == 1


async def test_what_the_database_never_knew_goes_when_it_is_a_day_old_and_an_operator_says_so(
    shelf: Shelf,
) -> None:
    shelf.put(1, UNNAMED_S - 60)
    assert await shelf.collect(unnamed=True) == Collected()
    assert await shelf.collect(later_s=120) == Collected()
    assert 1 in shelf
    assert (await shelf.collect(unnamed=True, later_s=120)).images == 1
    assert 1 not in shelf


async def test_what_an_interrupted_copy_left_goes_and_foreign_files_stay(
    db: Database, acme: Tenant, shelf: Shelf
) -> None:
    digest = shelf.put(1)
    await publish(db, acme, "poet", 1)
    folder = shelf.store.fetch(digest, shelf.folder).parent
    left, young, foreign = (
        folder / name
        for name in (
            f"{digest}.safetensors.{'0' * 32}",
            f"{digest}.safetensors.{'1' * 32}",
            "README.md",
        )
    )
    for path, age_s in ((left, 2 * PUT_S), (young, 1), (foreign, 2 * PUT_S)):
        path.write_text("12345")
        shelf.age(path, age_s)
    assert await shelf.collect() == Collected(parts=1, bytes=5)
    assert 1 in shelf
    assert [path.exists() for path in (left, young, foreign)] == [False, True, True]


async def test_a_remote_store_is_cleared_the_same_way(
    db: Database, acme: Tenant, shelf: Shelf
) -> None:
    shelf.store = ImageStore(f"memory://{secrets.token_hex(8)}")
    for number in (1, 2):
        (shelf.folder / "image").write_bytes(image(number)[1])
        shelf.store.put(shelf.folder / "image", image(number)[0])
    await publish(db, acme, "poet", 1)
    assert await shelf.collect(unnamed=True) == Collected()
    later = await shelf.collect(unnamed=True, later_s=UNNAMED_S + 60)
    assert later == Collected(1, 0, 15, (image(2)[0],))
    assert await images_kept.total(shelf.store) == Collected(1, 0, 10, (image(1)[0],))


async def test_a_dry_run_removes_and_notes_nothing(db: Database, shelf: Shelf) -> None:
    shelf.put(1, 2 * UNNAMED_S)
    would = await shelf.collect(unnamed=True, dry_run=True)
    assert 1 in shelf
    async with db.read(None) as session:
        assert list(await session.scalars(select(AuditEntry))) == []
    assert await shelf.collect(unnamed=True) == would
    assert await shelf.collect(unnamed=True) == Collected()
    async with db.read(None) as session:
        (entry,) = list(await session.scalars(select(AuditEntry)))
    assert (entry.action, entry.actor) == ("storage.collected", "key_of_an_operator")
    assert entry.details == {"images": 1, "parts": 0, "bytes": 10}


async def test_an_image_that_is_published_while_it_is_removed_stays(
    db: Database, acme: Tenant, shelf: Shelf
) -> None:
    """Whoever has the digest's lock first wins, and the publisher puts the image again."""
    digest = shelf.put(1)
    removing = asyncio.create_task(images_kept.discard(db, shelf.store, [digest]))
    async with db.session(acme.id) as session:
        await registry.add_version(
            session,
            acme.id,
            "poet",
            digest=digest,
            base="f" * 64,
            base_name="base",
            report={"rank": 8, "bytes": 10},
            actor=SYSTEM,
        )
        shelf.put(1)
    await removing
    assert 1 in shelf
    async with db.session(None) as session:
        assert await images_kept.unneeded(session, [digest]) == set()


async def test_a_rejected_uploads_image_goes_at_once_unless_somebody_has_it(
    db: Database, acme: Tenant, shelf: Shelf
) -> None:
    digests = [shelf.put(number, 0) for number in (1, 2, 3)]
    await publish(db, acme, "poet", 2)
    await publish(db, acme, "bard", 3)
    await delete(db, acme, "bard", shelf.now)  # requests that know it may be on their way
    await images_kept.discard(db, shelf.store, digests)
    assert 1 not in shelf
    assert 2 in shelf
    assert 3 in shelf


async def named(db: Database) -> set[str]:
    """Digests that live versions name, as the registry has it."""
    live = AdapterVersion.deleted_at.is_(None)
    async with db.read(None) as session:
        own = await session.scalars(select(AdapterVersion.digest).where(live))
        variants = await session.scalars(
            select(ImageVariant.digest)
            .join(AdapterVersion, AdapterVersion.id == ImageVariant.version_id)
            .where(live)
        )
        return {*own, *variants}


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_at_once_a_named_image_stays_and_in_the_end_no_other(
    db: Database, acme: Tenant, globex: Tenant, shelf: Shelf, seed: int
) -> None:
    """Images look old, so that nothing but rows and locks protects them."""
    draw = random.Random(seed)

    async def publishing(tenant: Tenant, name: str, numbers: list[int]) -> None:
        for number in numbers:
            shelf.put(number)
        await publish(db, tenant, name, *numbers, shelf=shelf)

    async def deleting(tenant: Tenant, name: str) -> None:
        with contextlib.suppress(NoResultFound):
            await delete(db, tenant, name, shelf.now)

    def work() -> Coroutine[object, object, object]:
        tenant, name = draw.choice((acme, globex)), draw.choice("abc")
        match draw.choice(("publish", "publish", "delete", "collect", "discard")):
            case "publish":
                return publishing(tenant, name, draw.sample(range(6), draw.randint(1, 3)))
            case "delete":
                return deleting(tenant, name)
            case "discard":
                digests = [image(number)[0] for number in range(6)]
                return images_kept.discard(db, shelf.store, digests)
            case _:
                later_s = draw.choice((0, 2 * GRACE_S, 2 * UNNAMED_S))
                return shelf.collect(unnamed=draw.random() < 0.5, later_s=later_s)

    for _ in range(12):
        await asyncio.gather(*(work() for _ in range(3)))
        assert all(digest in shelf.store for digest in await named(db))
    await shelf.collect(unnamed=True, later_s=2 * UNNAMED_S)
    assert {file.digest for file in shelf.store.files()} == await named(db)
