"""Migrations: up, down, filled, equal to the models; column types; how each database is set."""

import asyncio
from datetime import UTC, datetime, timedelta, timezone

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import URL, Connection, bindparam, func, inspect, select, text
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import registry, versions
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db import schema
from loraplex.platform.db.models import AdapterVersion, Base, ImmutableVersion, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import UtcDateTime
from loraplex.platform.tenants import get_tenant

pytestmark = pytest.mark.anyio


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def _differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_server_default": True})
    return compare_metadata(context, Base.metadata)


async def test_up_gives_the_models_schema_and_down_gives_nothing(fresh_url: URL) -> None:
    db = Database(fresh_url)
    await db.migrate()
    await db.migrate()
    async with db._engine.begin() as connection:
        assert await connection.run_sync(_differences) == []
        assert await connection.run_sync(_tables) == {*Base.metadata.tables, "alembic_version"}
        await connection.run_sync(schema.downgrade, "base")
        assert await connection.run_sync(_tables) == {"alembic_version"}
        await connection.run_sync(schema.upgrade)
        assert await connection.run_sync(_differences) == []
    await db.dispose()


FOUNDATION = (
    "INSERT INTO tenants (id, name, created_at) VALUES ('ten_1', 'acme', :now)",
    "INSERT INTO api_keys (id, tenant_id, name, digest, redacted, scopes, created_at)"
    " VALUES ('key_1', 'ten_1', 'k', 'd', 'lpx_', '[\"infer\"]', :now)",
    "INSERT INTO adapters (id, tenant_id, name, last_version, created_at)"
    " VALUES ('adp_1', 'ten_1', 'poet', 1, :now)",
    "INSERT INTO adapter_versions (id, tenant_id, adapter_id, number, digest, base, rank,"
    " image_bytes, report, created_at)"
    " VALUES ('ver_1', 'ten_1', 'adp_1', 1, 'd', 'f', 8, 5000000000, '{\"rank\": 8}', :now)",
    "INSERT INTO usage_records (tenant_id, request_id, key_id, adapter, model, digest, outcome,"
    " prompt_tokens, completion_tokens, cached_tokens, created_at, day)"
    " VALUES ('ten_1', 'req_1', 'key_1', 'poet', 'poet@1', 'd', 'stop', 3, 2, 1, :now, :day)",
)


async def test_a_filled_database_goes_up_and_down_and_keeps_its_rows(fresh_url: URL) -> None:
    """Filled as the first revision had it, through every later one and back."""
    now = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    fill = [
        text(sql).bindparams(
            bindparam("now", now, type_=UtcDateTime()),
            *([bindparam("day", now.date())] if ":day" in sql else []),
        )
        for sql in FOUNDATION
    ]
    db = Database(fresh_url)
    async with db._engine.begin() as connection:
        await connection.run_sync(schema.upgrade, "0001")
        for statement in fill:
            await connection.execute(statement)
        for revision in ("head", "0001", "head"):
            move = schema.upgrade if revision == "head" else schema.downgrade
            await connection.run_sync(move, revision)
            for statement in fill:
                table = statement.text.split()[2]
                assert await connection.scalar(text(f"SELECT count(*) FROM {table}")) == 1
    async with db.session("ten_1") as session:
        adapter = await registry.get_adapter(session, "ten_1", "poet")
        version = await versions.get_version(session, "ten_1", "poet", 1)
        assert (adapter.created_at, version.image_bytes) == (now, 5_000_000_000)
        assert (version.report, version.variants) == ({"rank": 8}, [])
        assert (await _add_version(session, "ten_1")).number == 2
    await db.dispose()


async def test_a_failed_step_leaves_no_half_of_itself(db: Database, acme: Tenant) -> None:
    with pytest.raises(RuntimeError, match="changed its mind"):
        async with db._engine.begin() as connection:
            await connection.run_sync(schema.downgrade, "base")
            raise RuntimeError("changed its mind")
    async with db._engine.begin() as connection:
        assert await connection.run_sync(_differences) == []
    async with db.read(None) as session:
        assert (await session.get_one(Tenant, acme.id)).name == "acme"


async def test_constraints_have_the_names_that_the_models_give_them(db: Database) -> None:
    def names(connection: Connection) -> set[str | None]:
        found = inspect(connection)
        return {
            constraint["name"]
            for table in Base.metadata.tables
            for constraint in (
                *found.get_unique_constraints(table),
                *found.get_foreign_keys(table),
                found.get_pk_constraint(table),
            )
        }

    tables = Base.metadata.tables.values()
    expected = {constraint.name for table in tables for constraint in table.constraints}
    async with db._engine.connect() as connection:
        assert await connection.run_sync(names) == expected


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_sqlite_runs_with_a_write_ahead_log_and_foreign_keys(db: Database) -> None:
    async with db.read(None) as session:
        found = {
            name: (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        }
    assert found == {
        "journal_mode": "wal",
        "foreign_keys": 1,
        "synchronous": 1,
        "busy_timeout": 10_000,
    }


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_postgresql_readers_see_one_moment_and_waits_end(db: Database) -> None:
    names = ("transaction_isolation", "transaction_read_only", "lock_timeout", "application_name")

    async def shown(session: AsyncSession) -> list[str]:
        return [(await session.execute(text(f"SHOW {name}"))).scalar_one() for name in names]

    async with db.read(None) as session:
        assert await shown(session) == ["repeatable read", "on", "10s", "loraplex"]
    async with db.session(None) as session:
        assert await shown(session) == ["read committed", "off", "10s", "loraplex"]


async def test_a_reader_sees_one_moment(db: Database, acme: Tenant) -> None:
    async with db.read(None) as reader:
        assert await reader.scalar(select(func.count(Tenant.id))) == 1
        async with db.session(None) as session:
            session.add(Tenant(name="later"))
        assert await reader.scalar(select(func.count(Tenant.id))) == 1
    async with db.read(None) as reader:
        assert await reader.scalar(select(func.count(Tenant.id))) == 2


async def test_readers_do_not_wait_for_writers_that_queue(db: Database, acme: Tenant) -> None:
    async def write() -> None:
        async with db.session(None) as session:
            tenant = await get_tenant(session, acme.id, lock=True)
            tenant.max_concurrency += 1

    async with asyncio.timeout(20):
        async with db.session(None) as session:
            (await get_tenant(session, acme.id, lock=True)).max_concurrency = 1
            await session.flush()
            writers = [asyncio.create_task(write()) for _ in range(40)]
            for _ in range(20):
                async with db.read(None) as reader:
                    assert (await get_tenant(reader, acme.id)).max_concurrency is None
        await asyncio.gather(*writers)
    async with db.read(None) as session:
        assert (await get_tenant(session, acme.id)).max_concurrency == 41


async def test_a_session_inside_a_session_is_refused_at_once(db: Database) -> None:
    async with db.session(None):
        with pytest.raises(RuntimeError, match="already h"):
            async with db.session(None):
                pass


async def test_moments_come_back_aware_and_in_utc(db: Database) -> None:
    east = timezone(timedelta(hours=9))
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=east)
    async with db.session(None) as session:
        session.add(Tenant(id="ten_x", name="x", suspended_at=moment))
    async with db.read(None) as session:
        found = (await session.get_one(Tenant, "ten_x")).suspended_at
    assert found == moment
    assert found.tzinfo is UTC


async def test_a_naive_moment_is_refused(db: Database) -> None:
    with pytest.raises(StatementError, match="without a timezone"):
        async with db.session(None) as session:
            session.add(Tenant(name="x", created_at=datetime(2026, 1, 1)))


async def test_a_version_cannot_be_changed(db: Database, acme: Tenant) -> None:
    async with db.session(acme.id) as session:
        version = await _add_version(session, acme.id)
    with pytest.raises(ImmutableVersion, match="digest"):
        async with db.session(acme.id) as session:
            (await session.get_one(AdapterVersion, version.id)).digest = "b" * 64


async def test_a_version_cannot_hang_on_another_tenants_adapter(
    db: Database, acme: Tenant, globex: Tenant
) -> None:
    async with db.session(acme.id) as session:
        version = await _add_version(session, acme.id)
    stolen = AdapterVersion(
        adapter_id=version.adapter_id,
        number=2,
        digest="b" * 64,
        base="f",
        rank=1,
        image_bytes=1,
        report={},
    )
    with pytest.raises(IntegrityError):
        async with db.session(globex.id) as session:
            session.add(stolen)


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("sqlite:///x.db", "sqlite+aiosqlite"),
        ("postgresql://u:p@h/x", "postgresql+asyncpg"),
        ("postgres://u:p@h/x", "postgresql+asyncpg"),
        ("postgresql+asyncpg://u:p@h/x", "postgresql+asyncpg"),
    ],
)
def test_a_url_without_a_driver_gets_ours(given: str, driver: str) -> None:
    assert Database(given).url.drivername == driver


async def _add_version(session: object, tenant_id: str) -> AdapterVersion:
    return await registry.add_version(
        session,
        tenant_id,
        "poet",
        digest="a" * 64,
        base="f",
        base_name="Base",
        report={"rank": 8, "bytes": 1024},
        actor=SYSTEM,
    )
