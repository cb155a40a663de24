"""The life of versions: which a bare name means, what may be deleted, images of other dtypes."""

from collections.abc import Mapping

import pytest

from loraplex.platform import aliases, images_kept, registry, resolving, versions
from loraplex.platform.audit import SYSTEM
from loraplex.platform.canaries import Canary
from loraplex.platform.db.models import AdapterVersion, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import Conflict, ModelNotFound

pytestmark = pytest.mark.anyio
NO_VARIANTS: Mapping[str, tuple[str, int]] = {}


async def publish(
    db: Database,
    tenant: Tenant,
    digest: str,
    variants: Mapping[str, tuple[str, int]] = NO_VARIANTS,
    dtype: str = "bf16",
) -> AdapterVersion:
    async with db.session(tenant.id) as session:
        return await registry.add_version(
            session,
            tenant.id,
            "poet",
            digest=digest,
            base="f" * 64,
            base_name="Base",
            report={"rank": 8, "bytes": 1024},
            actor=SYSTEM,
            dtype=dtype,
            variants=variants,
        )


async def resolve(
    db: Database, tenant: Tenant, model: str, dtype: str | None = None
) -> tuple[str, str | None]:
    async with db.read(tenant.id) as session:
        found = await resolving.resolve(session, tenant.id, model, "Base", dtype=dtype)
    return found.model_id, found.digest


async def retire(db: Database, tenant: Tenant, number: int, retired: bool = True) -> None:
    async with db.session(tenant.id) as session:
        await versions.set_retired(session, tenant.id, "poet", number, retired, actor=SYSTEM)


async def delete(db: Database, tenant: Tenant, number: int) -> None:
    async with db.session(tenant.id) as session:
        await versions.delete_version(session, tenant.id, "poet", number, actor=SYSTEM)


async def point(
    db: Database, tenant: Tenant, number: int, canary: Canary | None = None, seen: int = 0
) -> None:
    async with db.session(tenant.id) as session:
        await aliases.move_alias(
            session, tenant.id, "poet", "prod", number, seen=seen, actor=SYSTEM, canary=canary
        )


@pytest.fixture
async def three(db: Database, acme: Tenant) -> Tenant:
    for digest in ("1", "2", "3"):
        await publish(db, acme, digest)
    return acme


async def test_a_bare_name_skips_retired_versions(db: Database, three: Tenant) -> None:
    await point(db, three, 3)
    await retire(db, three, 3)
    assert await resolve(db, three, "poet") == ("poet@2", "2")
    assert await resolve(db, three, "poet@3") == await resolve(db, three, "poet@prod")
    await retire(db, three, 2)
    await retire(db, three, 1)
    with pytest.raises(ModelNotFound):
        await resolve(db, three, "poet")
    async with db.read(three.id) as session:
        assert (await registry.list_named(session, three.id)).items == []
        adapters = (await registry.list_adapters(session, three.id)).items
        assert len(adapters) == 1
        assert await versions.current(session, adapters) == {}
    await retire(db, three, 2, retired=False)
    assert await resolve(db, three, "poet") == ("poet@2", "2")


async def test_a_deleted_versions_number_means_nothing_and_is_not_given_again(
    db: Database, three: Tenant
) -> None:
    await delete(db, three, 3)
    assert await resolve(db, three, "poet") == ("poet@2", "2")
    for call in (delete(db, three, 3), retire(db, three, 3), resolve(db, three, "poet@3")):
        with pytest.raises(ModelNotFound):
            await call
    assert (await publish(db, three, "4")).number == 4
    async with db.read(three.id) as session:
        listed = await versions.list_versions(session, three.id, "poet")
        page = await versions.list_versions(session, three.id, "poet", before=4, limit=1)
    assert [version.number for version in listed.items] == [4, 2, 1]
    assert ([version.number for version in page.items], page.has_more) == ([2], True)


async def test_a_version_that_an_alias_is_at_is_not_deleted(db: Database, three: Tenant) -> None:
    await point(db, three, 1, Canary(2, 5))
    for number in (1, 2):
        with pytest.raises(Conflict, match="poet@prod"):
            await delete(db, three, number)
    await point(db, three, 1, seen=1)
    await delete(db, three, 2)
    async with db.session(three.id) as session:
        with pytest.raises(Conflict, match="no version to go back to"):
            await aliases.roll_back(session, three.id, "poet", "prod", seen=2, actor=SYSTEM)


async def test_the_only_version_goes_with_its_adapter_alone(db: Database, three: Tenant) -> None:
    await delete(db, three, 1)
    await delete(db, three, 2)
    with pytest.raises(Conflict, match="delete the adapter"):
        await delete(db, three, 3)


async def test_an_image_of_another_dtype_is_named_or_preferred(db: Database, acme: Tenant) -> None:
    await publish(db, acme, "1")
    await publish(db, acme, "2", {"int8": ("2-int8", 512), "fp8": ("2-fp8", 512)})
    await point(db, acme, 2)
    for name in ("poet", "poet@2", "poet@prod"):
        assert await resolve(db, acme, name) == ("poet@2", "2")
        assert await resolve(db, acme, name, "bf16") == ("poet@2", "2")
        assert await resolve(db, acme, name, "int8") == ("poet@2:int8", "2-int8")
        assert await resolve(db, acme, f"{name}:fp8", "int8") == ("poet@2:fp8", "2-fp8")
        assert await resolve(db, acme, f"{name}:bf16", "int8") == ("poet@2:bf16", "2")
        with pytest.raises(ModelNotFound):
            await resolve(db, acme, f"{name}:int4")
    assert await resolve(db, acme, "poet@1", "int8") == ("poet@1", "1")
    with pytest.raises(ModelNotFound):
        await resolve(db, acme, "poet@1:int8")


@pytest.mark.parametrize(
    "model", ["poet:", "poet@2:", "poet:INT8", "poet:int8@2", "poet:int8:int8"]
)
async def test_what_names_no_dtype_means_nothing(db: Database, acme: Tenant, model: str) -> None:
    await publish(db, acme, "1", {"int8": ("1-int8", 512)})
    with pytest.raises(ModelNotFound):
        await resolve(db, acme, model)


async def test_images_of_every_dtype_are_kept_while_they_are_named(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    await publish(db, acme, "1", {"int8": ("1-int8", 512)})
    await publish(db, acme, "2", {"int8": ("2-int8", 512)})
    await publish(db, globex, "2-int8", dtype="int8")
    every = {"1", "1-int8", "2", "2-int8"}
    async with db.session(None) as session:
        assert await images_kept.unneeded(session, every) == set()
    async with db.session(acme.id) as session:
        await registry.delete_adapter(session, acme.id, "poet", actor=SYSTEM)
    async with db.session(None) as session:
        assert await images_kept.unneeded(session, every) == {"1", "1-int8", "2"}


async def test_another_tenant_neither_sees_nor_changes_them(
    db: Database, three: Tenant, globex: Tenant
) -> None:
    for view in (globex.id, three.id):
        async with db.session(globex.id) as session:
            for call in (
                versions.list_versions(session, view, "poet"),
                versions.get_version(session, view, "poet", 1),
                versions.set_retired(session, view, "poet", 1, True, actor=SYSTEM),
                versions.delete_version(session, view, "poet", 1, actor=SYSTEM),
            ):
                with pytest.raises(ModelNotFound):
                    await call
    assert await resolve(db, three, "poet") == ("poet@3", "3")
