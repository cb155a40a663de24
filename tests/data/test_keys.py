"""API keys: one identical refusal for every bad one, and no secret anywhere."""

import asyncio
import logging
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_keys import make, refusal
from sqlalchemy import select

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import ApiKey, Base, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, Forbidden, NotFound
from loraplex.platform.key_changes import list_keys, revoke_key
from loraplex.platform.key_secrets import BASE62, is_well_formed, new_secret
from loraplex.platform.keys import KeyRing, Principal, get_key
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.tenants import set_limits, set_suspended

pytestmark = pytest.mark.anyio
ALL_TENANT_SCOPES = ["infer", "adapters:read", "adapters:write", "admin"]


async def stored(db: Database) -> list[bytes]:
    """All that the database holds: SQLite's files, PostgreSQL's rows."""
    if db.is_sqlite:
        return [path.read_bytes() for path in Path(db.url.database).parent.iterdir()]
    async with db.read(None) as session:
        rows = [await session.execute(table.select()) for table in Base.metadata.sorted_tables]
    return [repr(row.all()).encode() for row in rows]


async def test_a_key_tells_who_calls(db: Database, ring: KeyRing, acme: Tenant) -> None:
    limits = TenantLimits(10, 1000, 2)
    async with db.session(None) as session:
        await set_limits(session, acme.id, limits, actor=SYSTEM)
    key, secret = await make(db, ring, acme.id, "infer", "adapters:read")
    found = await ring.authenticate(db, secret)
    assert found == Principal(key.id, acme.id, frozenset({"infer", "adapters:read"}), limits)
    assert not found.is_operator


async def test_an_operators_key_has_no_tenant_and_no_limits(db: Database, ring: KeyRing) -> None:
    _, secret = await make(db, ring, None, "admin")
    found = await ring.authenticate(db, secret)
    assert found.is_operator
    assert (found.tenant_id, found.limits) == (None, TenantLimits())


async def test_a_tenants_admin_is_no_operator(db: Database, ring: KeyRing, acme: Tenant) -> None:
    _, secret = await make(db, ring, acme.id, *ALL_TENANT_SCOPES)
    assert not (await ring.authenticate(db, secret)).is_operator


async def test_every_bad_key_is_refused_in_the_same_words(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    _, good = await make(db, ring, acme.id)
    revoked, revoked_secret = await make(db, ring, acme.id)
    expired, expired_secret = await make(
        db, ring, acme.id, expires_at=utc_now() + timedelta(hours=1)
    )
    async with db.session(acme.id) as session:
        await revoke_key(session, revoked.id, actor=SYSTEM)
        row = await session.get_one(ApiKey, expired.id)
        row.expires_at = utc_now() - timedelta(microseconds=1)
    bad = {
        "missing": None,
        "empty": "",
        "malformed": "sk-1234",
        "with a newline": good + "\n",
        "unknown": new_secret(),
        "revoked": revoked_secret,
        "expired": expired_secret,
    }
    refusals = {await refusal(db, ring, secret) for secret in bad.values()}
    assert len(refusals) == 1
    assert (await ring.authenticate(db, good)).tenant_id == acme.id


async def test_a_stolen_table_is_of_no_use_without_the_pepper(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    _, secret = await make(db, ring, acme.id)
    await refusal(db, KeyRing(b"another pepper"), secret)


async def test_a_key_that_will_expire_works_until_then(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    _, secret = await make(db, ring, acme.id, expires_at=utc_now() + timedelta(hours=1))
    assert (await ring.authenticate(db, secret)).tenant_id == acme.id


async def test_the_secret_is_stored_and_logged_nowhere(
    db: Database, ring: KeyRing, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        key, secret = await make(db, ring, acme.id)
        await ring.authenticate(db, secret)
        await db.dispose()
    body = secret.removeprefix("lpx_")
    for content in (*await stored(db), caplog.text.encode()):
        assert body.encode() not in content
        assert body[8:].encode() not in content
    assert key.redacted == f"{secret[:8]}…"
    assert body not in str(vars(key))


async def test_a_suspended_tenants_key_opens_nothing(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    _, secret = await make(db, ring, acme.id)
    async with db.session(None) as session:
        await set_suspended(session, acme.id, True, actor=SYSTEM)
    with pytest.raises(Forbidden, match="suspended"):
        await ring.authenticate(db, secret)
    async with db.session(None) as session:
        await set_suspended(session, acme.id, False, actor=SYSTEM)
    assert (await ring.authenticate(db, secret)).tenant_id == acme.id


async def test_last_use_is_noted_once_a_minute(db: Database, ring: KeyRing, acme: Tenant) -> None:
    key, secret = await make(db, ring, acme.id)
    assert key.last_used_at is None

    async def last_used() -> datetime | None:
        async with db.read(acme.id) as session:
            return (await session.get_one(ApiKey, key.id)).last_used_at

    before = utc_now()
    await ring.authenticate(db, secret)
    first = await last_used()
    assert before <= first <= utc_now()
    await asyncio.gather(*(ring.authenticate(db, secret) for _ in range(10)))
    assert await last_used() == first
    async with db.session(acme.id) as session:
        row = await session.get_one(ApiKey, key.id)
        row.last_used_at = first - timedelta(seconds=61)
    await ring.authenticate(db, secret)
    assert await last_used() > first


async def test_a_busy_database_does_not_stop_a_good_key(
    db: Database, ring: KeyRing, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    key, secret = await make(db, ring, acme.id)
    impatient = Database(db.url, busy_timeout_s=0.05)
    async with db.session(None) as session:
        await get_key(session, key.id, lock=True)
        assert (await ring.authenticate(impatient, secret)).tenant_id == acme.id
    assert f"the use of key {key.id} was not noted" in caplog.text
    await impatient.dispose()


async def test_a_foreign_key_is_not_found(
    db: Database, ring: KeyRing, acme: Tenant, globex: Tenant
) -> None:
    theirs, secret = await make(db, ring, globex.id)
    with pytest.raises(NotFound):
        async with db.session(acme.id) as session:
            await revoke_key(session, theirs.id, actor=SYSTEM)
    assert (await ring.authenticate(db, secret)).tenant_id == globex.id
    with pytest.raises(NotFound):
        async with db.session(acme.id) as session:
            await ring.create(session, globex.id, "planted", ["infer"], actor=SYSTEM)


async def test_keys_are_listed_in_pages_the_newest_first(
    db: Database, ring: KeyRing, acme: Tenant, globex: Tenant
) -> None:
    made = [(await make(db, ring, acme.id))[0].id for _ in range(5)]
    await make(db, ring, globex.id)
    async with db.read(None) as session:
        first = await list_keys(session, tenant_id=acme.id, limit=3)
        rest = await list_keys(session, tenant_id=acme.id, after=first.items[-1].id, limit=3)
        everyone = await list_keys(session)
    assert [key.id for key in (*first.items, *rest.items)] == sorted(made, reverse=True)
    assert (first.has_more, rest.has_more) == (True, False)
    assert len(everyone.items) == 6
    async with db.read(acme.id) as session:
        assert len((await list_keys(session)).items) == 5


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 64}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["infer", "root"]}, "scopes"),
        ({"scopes": ["infer"], "tenant_id": None}, "scopes"),
        ({"expires_at": datetime(2020, 1, 1)}, "expires_at"),
        ({"expires_at": utc_now() - timedelta(seconds=1)}, "expires_at"),
        ({"adapters": []}, "adapters"),
        ({"adapters": ["support@3"]}, "adapters"),
        ({"adapters": ["support:int8"]}, "adapters"),
        ({"adapters": ["a b"]}, "adapters"),
        ({"adapters": ["x" * 161]}, "adapters"),
        ({"adapters": ["support"] * 101}, "adapters"),
        ({"adapters": ["support"], "scopes": ["infer", "admin"]}, "adapters"),
        ({"adapters": ["a"], "scopes": ["adapters:write"], "tenant_id": None}, "adapters"),
    ],
)
async def test_an_impossible_key_is_refused(
    db: Database, ring: KeyRing, acme: Tenant, change: dict[str, object], param: str
) -> None:
    arguments = {"tenant_id": acme.id, "name": "k", "scopes": ["infer"]} | change
    with pytest.raises(BadRequest) as caught:
        async with db.session(None) as session:
            await ring.create(session, **arguments, actor=SYSTEM)
    assert caught.value.param == param
    async with db.read(None) as session:
        assert (await session.scalars(select(ApiKey))).first() is None


@given(st.integers(0, 37), st.sampled_from(BASE62))
def test_a_typing_error_is_seen_without_the_database(position: int, character: str) -> None:
    secret = new_secret()
    index = 4 + position
    changed = secret[:index] + character + secret[index + 1 :]
    assert is_well_formed(changed) == (changed == secret)
