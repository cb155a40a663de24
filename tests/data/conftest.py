"""A migrated SQLite file for each test, two tenants in it, and one real Redis for all."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import connect
from loraplex.platform.tenants import create_tenant

PEPPER = b"a pepper for tests"


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "loraplex.db"

    async def migrate() -> None:
        db = Database(f"sqlite+aiosqlite:///{path}")
        await db.migrate()
        await db.dispose()

    anyio.run(migrate)
    return path


@pytest.fixture
async def db(migrated_file: Path, tmp_path: Path) -> AsyncIterator[Database]:
    path = tmp_path / "loraplex.db"
    shutil.copy(migrated_file, path)
    database = Database(f"sqlite+aiosqlite:///{path}")
    yield database
    await database.dispose()


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(PEPPER)


async def _tenant(db: Database, name: str) -> Tenant:
    async with db.session(None) as session:
        return await create_tenant(session, name)


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
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[object]:
    """A patient client: what is under test is the limiter, not this machine's speed."""
    client = connect(redis_server.url, timeout_s=10.0)
    yield client
    await client.aclose()
