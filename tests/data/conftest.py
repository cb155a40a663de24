"""A migrated database for each test, on SQLite and on PostgreSQL; two tenants in it; one Redis.

PostgreSQL is a server of the tests' own, or the one that `LORAPLEX_TEST_POSTGRES_URL` names, whose
user may create databases.
"""

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest
from limit_kit import PATIENCE
from local_postgres import LocalPostgres
from redis.asyncio import Redis
from sqlalchemy import URL, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Base, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.ids import new_id
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import connect
from loraplex.platform.tenants import create_tenant

PEPPER = b"a pepper for tests"
KINDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def local_postgres() -> Iterator[LocalPostgres]:
    """A server of ours, which a test may kill if it starts it again."""
    with closing(LocalPostgres()) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> URL:
    """A server, by the URL of a database from which others can be made."""
    if url := os.environ.get("LORAPLEX_TEST_POSTGRES_URL"):
        return make_url(url)
    return request.getfixturevalue("local_postgres").url()


@contextmanager
def database_of(server: URL) -> Iterator[URL]:
    """A fresh database of that server, dropped at the end."""
    name = f"loraplex_test_{secrets.token_hex(8)}"
    anyio.run(_administer, server, f"CREATE DATABASE {name}")
    yield server.set(database=name)
    anyio.run(_administer, server, f"DROP DATABASE {name} WITH (FORCE)")


async def _administer(server: URL, statement: str) -> None:
    engine = create_async_engine(
        server.set(drivername="postgresql+asyncpg"),
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,
    )
    async with engine.connect() as connection:
        await connection.execute(text(statement))
    await engine.dispose()


async def _migrate(url: str | URL) -> None:
    db = Database(url)
    await db.migrate()
    await db.dispose()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "loraplex.db"
    anyio.run(_migrate, f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres: URL) -> Iterator[URL]:
    with database_of(postgres) as url:
        anyio.run(_migrate, url)
        yield url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the two databases a test runs on; it runs on both."""
    return request.param


@pytest.fixture
def fresh_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[URL]:
    """A database without tables."""
    if kind == "sqlite":
        yield URL.create("sqlite", database=str(tmp_path / "fresh.db"))
    else:
        with database_of(request.getfixturevalue("postgres")) as url:
            yield url


@pytest.fixture
def db_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> URL:
    """A migrated database that `db` empties: making a new one takes PostgreSQL long."""
    if kind == "postgresql":
        return request.getfixturevalue("migrated_postgres")
    path = tmp_path / "loraplex.db"
    shutil.copy(request.getfixturevalue("migrated_file"), path)
    return URL.create("sqlite", database=str(path))


@pytest.fixture
async def db(db_url: URL) -> AsyncIterator[Database]:
    database = Database(db_url)
    async with database._engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            await connection.execute(table.delete())
    yield database
    await database.dispose()


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(PEPPER)


async def _tenant(db: Database, name: str) -> Tenant:
    async with db.session(None) as session:
        return await create_tenant(session, name, actor=SYSTEM)


@pytest.fixture
async def acme(db: Database) -> Tenant:
    return await _tenant(db, "acme")


@pytest.fixture
async def globex(db: Database) -> Tenant:
    return await _tenant(db, "globex")


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder / "data", folder / "run") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """One that a test may stop or kill."""
    with EmbeddedRedis(tmp_path / "data", tmp_path / "run") as server:
        yield server


@pytest.fixture
async def client(own_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    """Of `own_redis`, and patient: what is under test is not this machine's speed."""
    client = connect(own_redis.url, timeout_s=PATIENCE)
    yield client
    await client.aclose()


@pytest.fixture
def tenant() -> str:
    """An id that nobody has."""
    return new_id("ten")


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[object]:
    """A patient client: what is under test is the limiter, not this machine's speed."""
    client = connect(redis_server.url, timeout_s=10.0)
    yield client
    await client.aclose()
