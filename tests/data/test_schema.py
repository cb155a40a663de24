"""Migrations: up, down, equal to the models; the column types; SQLite's settings."""

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.schema import CreateTable

from loraplex.platform import registry
from loraplex.platform.db import schema
from loraplex.platform.db.models import AdapterVersion, Base, ImmutableVersion, Tenant
from loraplex.platform.db.session import Database

pytestmark = pytest.mark.anyio


def _tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def _differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_server_default": True})
    return compare_metadata(context, Base.metadata)


def _url(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'fresh.db'}"


async def test_up_gives_the_models_schema_and_down_gives_nothing(tmp_path: Path) -> None:
    db = Database(_url(tmp_path))
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


async def test_readers_do_not_wait_for_writers_that_queue(db: Database, acme: Tenant) -> None:
    async def write(number: int) -> None:
        async with db.session(None) as session:
            session.add(Tenant(name=f"t{number}"))

    async with asyncio.timeout(20):
        async with db.session(None) as session:
            session.add(Tenant(name="first"))
            await session.flush()
            writers = [asyncio.create_task(write(number)) for number in range(40)]
            for _ in range(20):
                async with db.read(None) as reader:
                    names = list(await reader.scalars(select(Tenant.name)))
                assert names == ["acme"]
        await asyncio.gather(*writers)
    async with db.read(None) as session:
        assert len(list(await session.scalars(select(Tenant)))) == 42


async def test_a_session_inside_a_session_is_refused_at_once(db: Database) -> None:
    async with db.session(None):
        with pytest.raises(RuntimeError, match="already held"):
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


def test_postgresql_keeps_moments_with_their_zone() -> None:
    dialect = postgresql.dialect()
    tables = {
        name: str(CreateTable(table).compile(dialect=dialect))
        for name, table in Base.metadata.tables.items()
    }
    assert all("created_at TIMESTAMP WITH TIME ZONE NOT NULL" in sql for sql in tables.values())
    assert "image_bytes BIGINT" in tables["adapter_versions"]


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


async def _add_version(session: object, tenant_id: str) -> AdapterVersion:
    return await registry.add_version(
        session,
        tenant_id,
        "poet",
        digest="a" * 64,
        base="f",
        base_name="Base",
        report={"rank": 8, "bytes": 1024},
    )
