"""One tenant's session never sees, makes or moves another tenant's rows."""

from collections.abc import Callable

import pytest
from sqlalchemy import delete, exists, func, insert, select, text, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, selectinload

from loraplex.platform import registry
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Adapter, AdapterVersion, ApiKey, ImageVariant, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.tenancy import TenancyError
from loraplex.platform.keys import KeyRing

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def adapters(db: Database, ring: KeyRing, acme: Tenant, globex: Tenant) -> None:
    """Two adapters of acme's, three of globex's, a key for each and one of an operator."""
    for tenant, names in ((acme, ("a", "b")), (globex, ("a", "x", "y"))):
        async with db.session(tenant.id) as session:
            await ring.create(session, tenant.id, "key", ["infer"], actor=SYSTEM)
            for name in names:
                await add(session, tenant.id, name)
    async with db.session(None) as session:
        await ring.create(session, None, "operator", ["admin"], actor=SYSTEM)


async def add(session: AsyncSession, tenant_id: str, name: str) -> None:
    await registry.add_version(
        session,
        tenant_id,
        name,
        digest=f"{tenant_id}-{name}",
        base="f",
        base_name="Base",
        report={"rank": 8, "bytes": 1024},
        actor=SYSTEM,
    )


def _count_of_subquery() -> object:
    inner = select(Adapter.name).subquery()
    return select(func.count()).select_from(inner)


def _count_with_cte() -> object:
    inner = select(Adapter).cte()
    return select(func.count()).select_from(inner)


def _join() -> object:
    same = AdapterVersion.adapter_id == Adapter.id
    return select(func.count(Adapter.id)).join(AdapterVersion, same)


def _outer_join_from_tenants() -> object:
    return (
        select(func.count(Adapter.id))
        .select_from(Tenant)
        .outerjoin(Adapter, Adapter.tenant_id == Tenant.id)
    )


def _scalar_subquery() -> object:
    inner = select(func.count(Adapter.id)).scalar_subquery()
    return select(inner).select_from(Tenant)


def _alias() -> object:
    other = aliased(Adapter)
    return select(func.count(other.id))


def _exists() -> object:
    other = aliased(Adapter)
    return select(func.count(Adapter.id)).where(exists().where(other.name == Adapter.name))


def _union() -> object:
    both = union_all(select(Adapter.id), select(Adapter.id).where(Adapter.name == "nothing"))
    return select(func.count()).select_from(both.subquery())


COUNTS: dict[str, Callable[[], object]] = {
    "rows": lambda: select(func.count()).select_from(Adapter),
    "column": lambda: select(func.count(Adapter.id)),
    "other table": lambda: select(func.count(AdapterVersion.id)),
    "subquery": _count_of_subquery,
    "cte": _count_with_cte,
    "join": _join,
    "outer join": _outer_join_from_tenants,
    "scalar subquery": _scalar_subquery,
    "alias": _alias,
    "exists": _exists,
    "union": _union,
}


async def test_every_kind_of_select_counts_own_rows_only(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    for name, statement in COUNTS.items():
        for _ in range(2):  # the second time the compiled statement comes from a cache
            for tenant, expected in ((acme, 2), (globex, 3)):
                async with db.read(tenant.id) as session:
                    assert await session.scalar(statement()) == expected, name


async def test_an_operator_sees_all(db: Database) -> None:
    async with db.read(None) as session:
        assert await session.scalar(select(func.count(Adapter.id))) == 5
        assert await session.scalar(select(func.count(ApiKey.id))) == 3


async def test_keys_and_tenants_of_others_are_hidden(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    async with db.read(acme.id) as session:
        keys = list(await session.scalars(select(ApiKey)))
        assert [key.tenant_id for key in keys] == [acme.id]
        assert [t.id for t in await session.scalars(select(Tenant))] == [acme.id]
        assert await session.get(Tenant, globex.id) is None


async def test_a_foreign_row_is_not_got_by_its_id(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    async with db.read(globex.id) as session:
        theirs = (await session.scalars(select(Adapter))).first()
    async with db.read(acme.id) as session:
        assert await session.get(Adapter, theirs.id) is None


async def test_relationships_load_own_rows_only(db: Database, acme: Tenant, globex: Tenant) -> None:
    of_acme = select(AdapterVersion).where(AdapterVersion.tenant_id == acme.id).limit(1)
    async with db.session(None) as session:
        version = await session.scalar(of_acme)
        for tenant, dtype in ((acme, "int8"), (globex, "fp32")):
            variant = ImageVariant(version_id=version.id, dtype=dtype, digest="d", image_bytes=1)
            variant.tenant_id = tenant.id
            session.add(variant)
    for tenant_id, dtypes in ((acme.id, ["int8"]), (None, ["fp32", "int8"])):
        async with db.read(tenant_id) as session:
            loading = of_acme.options(selectinload(AdapterVersion.variants))
            found = await session.scalar(loading)
        assert [variant.dtype for variant in found.variants] == dtypes


async def test_raw_and_bulk_statements_are_refused(db: Database, acme: Tenant) -> None:
    for statement in (
        text("SELECT * FROM adapters"),
        select(Adapter.__table__),
        union_all(select(Adapter.__table__.c.id), select(ApiKey.__table__.c.id)),
        insert(Adapter).values(tenant_id="ten_other", name="z"),
        update(Adapter).values(name="z"),
        delete(Adapter),
        delete(Adapter.__table__),
    ):
        with pytest.raises(TenancyError):
            async with db.session(acme.id) as session:
                await session.execute(statement)


async def test_new_rows_get_the_sessions_tenant(db: Database, acme: Tenant) -> None:
    async with db.session(acme.id) as session:
        session.add(Adapter(name="stamped"))
    async with db.read(None) as session:
        found = await session.scalar(select(Adapter).where(Adapter.name == "stamped"))
    assert found.tenant_id == acme.id


async def test_a_row_for_another_tenant_is_refused(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    with pytest.raises(TenancyError, match="another tenant"):
        async with db.session(acme.id) as session:
            session.add(Adapter(tenant_id=globex.id, name="planted"))


async def test_a_row_cannot_be_given_away(db: Database, acme: Tenant, globex: Tenant) -> None:
    with pytest.raises(TenancyError, match="another tenant"):
        async with db.session(acme.id) as session:
            (await session.scalars(select(Adapter))).first().tenant_id = globex.id


async def test_a_foreign_row_cannot_be_brought_in_and_changed(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    async with db.session(globex.id) as session:
        theirs = (await session.scalars(select(Adapter))).first()
    with pytest.raises(TenancyError, match="another tenant"):
        async with db.session(acme.id) as session:
            session.add(theirs)
            theirs.name = "mine"
    with pytest.raises(TenancyError, match="another tenant"):
        async with db.session(acme.id) as session:
            await session.delete(theirs)


async def test_a_tenant_cannot_write_its_own_limits(db: Database, acme: Tenant) -> None:
    with pytest.raises(TenancyError, match="cannot write a Tenant"):
        async with db.session(acme.id) as session:
            (await session.get_one(Tenant, acme.id)).tokens_per_minute = None
            (await session.get_one(Tenant, acme.id)).requests_per_minute = 10**6


@pytest.mark.parametrize("of_tenant", [True, False])
async def test_a_reading_session_writes_nothing(
    db: Database, acme: Tenant, of_tenant: bool
) -> None:
    tenant_id = acme.id if of_tenant else None
    async with db.read(tenant_id) as session:
        session.add(Adapter(tenant_id=acme.id, name="z"))
        with pytest.raises(TenancyError, match="only reads"):
            await session.flush()
    async with db.read(tenant_id) as session:
        with pytest.raises(TenancyError, match="only reads"):
            await session.execute(update(Adapter).values(name="z"))


async def test_an_error_undoes_the_whole_session(db: Database, acme: Tenant) -> None:
    with pytest.raises(ZeroDivisionError):
        async with db.session(acme.id) as session:
            await add(session, acme.id, "half")
            raise ZeroDivisionError
    async with db.read(acme.id) as session:
        assert await session.scalar(select(func.count(Adapter.id))) == 2
