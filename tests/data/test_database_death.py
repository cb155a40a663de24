"""The database dies and comes back: what was committed stays, callers hear it, nobody helps."""

from collections.abc import AsyncIterator, Iterator

import anyio.lowlevel
import pytest
from local_postgres import LocalPostgres
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import Unavailable
from loraplex.platform.keys import KeyRing
from loraplex.platform.tenants import create_tenant

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(local_postgres: LocalPostgres) -> Iterator[LocalPostgres]:
    """The tests' server; it runs afterwards, whatever a test did."""
    yield local_postgres
    local_postgres.kill()
    local_postgres.start()


@pytest.fixture
async def db(server: LocalPostgres) -> AsyncIterator[Database]:
    """Its own database, which no other test uses."""
    database = Database(server.url())
    await database.migrate()
    yield database
    await database.dispose()


async def names(db: Database) -> list[str]:
    async with db.read(None) as session:
        return list(await session.scalars(select(Tenant.name).order_by(Tenant.name)))


async def test_a_server_that_crashes_and_restarts(
    server: LocalPostgres, db: Database, ring: KeyRing
) -> None:
    async with db.session(None) as session:
        await create_tenant(session, "before", actor=SYSTEM)
        _, secret = await ring.create(session, None, "operator", ["admin"], actor=SYSTEM)
    with pytest.raises(Unavailable, match="does not answer"):
        async with db.session(None) as session:
            await create_tenant(session, "half", actor=SYSTEM)
            server.kill()
    for _ in range(2):
        with pytest.raises(Unavailable):
            await names(db)
        with pytest.raises(Unavailable):
            async with db.session(None) as session:
                await create_tenant(session, "meanwhile", actor=SYSTEM)
        with pytest.raises(Unavailable):
            await ring.authenticate(db, secret)
    server.start()
    assert (await ring.authenticate(db, secret)).is_operator
    assert await names(db) == ["before"]

    # connections that idled through a restart are made anew, and no caller meets a broken one
    server.kill()
    server.start()
    for _ in range(8):
        await anyio.lowlevel.checkpoint()  # both blocked the loop, which has not read their ends
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(_create, db, f"t{number:02}")
    assert await names(db) == ["before", *(f"t{number:02}" for number in range(20))]


async def _create(db: Database, name: str) -> None:
    async with db.session(None) as session:
        await create_tenant(session, name, actor=SYSTEM)


async def test_a_server_that_is_not_there_is_no_start(server: LocalPostgres) -> None:
    for url in (server.url("none"), server.url().update_query_dict({"host": "/nowhere"})):
        db = Database(url)
        with pytest.raises((OSError, SQLAlchemyError), match=r"none|No such file"):
            await db.migrate()
        with pytest.raises(Unavailable):
            await names(db)
        await db.dispose()
