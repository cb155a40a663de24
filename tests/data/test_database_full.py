"""A database whose disk is full says so, keeps what it has, and goes on once there is room."""

from types import SimpleNamespace

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import DISK_FULL, _passing_faults
from loraplex.platform.errors import StorageFull
from loraplex.platform.tenants import create_tenant

pytestmark = pytest.mark.anyio


@pytest.fixture
def kind() -> str:
    return "sqlite"  # whose file we can bound


async def _bound(db, pages: int) -> None:
    async with db.session(None) as session:
        await session.execute(text(f"PRAGMA max_page_count = {pages}"))


async def _count(db) -> int:
    async with db.read(None) as session:
        return await session.scalar(select(func.count()).select_from(Tenant)) or 0


async def test_a_full_file_is_told_and_loses_nothing(db):
    await _bound(db, 1)  # as small as it can be: what it has
    made = 0
    with pytest.raises(StorageFull) as caught:
        for made in range(10_000):
            async with db.session(None) as session:
                for number in range(20):
                    await create_tenant(session, f"t-{made}-{number}", actor=SYSTEM)
    assert (caught.value.status, caught.value.code) == (507, "storage_full")
    assert await _count(db) == made * 20
    await _bound(db, 1 << 20)
    async with db.session(None) as session:
        await create_tenant(session, "last", actor=SYSTEM)
    assert await _count(db) == made * 20 + 1


def test_a_full_server_is_told_by_its_code():
    fault = SimpleNamespace(sqlstate=DISK_FULL)
    with pytest.raises(StorageFull), _passing_faults():
        raise DBAPIError("INSERT", {}, fault)
