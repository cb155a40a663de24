"""A key from its making to its end: changed, rotated with an overlap, hashed under new peppers."""

import asyncio
from datetime import timedelta

import pytest
from made_keys import audited, make, refusal
from pydantic import ValidationError
from sqlalchemy import URL, bindparam, text

from loraplex.platform.audit import SYSTEM, Actor
from loraplex.platform.db import schema
from loraplex.platform.db.models import ApiKey, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import UtcDateTime, utc_now
from loraplex.platform.errors import BadRequest, Conflict
from loraplex.platform.key_changes import change_key, revoke_key
from loraplex.platform.key_secrets import new_secret
from loraplex.platform.key_terms import MAX_OVERLAP
from loraplex.platform.keys import KeyRing, get_key
from loraplex.platform.quotas import Limits
from loraplex.platform.settings import Settings

pytestmark = pytest.mark.anyio


async def test_a_key_carries_its_own_limits_and_adapters(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    limits = Limits(5, 500, 1, tokens_per_day=10_000)
    adapters = ["support", "globex/poet"]
    key, secret = await make(db, ring, acme.id, "infer", adapters=adapters, limits=limits)
    found = await ring.authenticate(db, secret)
    assert found.key_limits == limits
    assert found.adapters == {"support", "globex/poet"}
    assert found.may_use("support")
    assert not found.may_use("Base")
    async with db.session(acme.id) as session:
        await change_key(session, key.id, {"adapters": None, "max_concurrency": 3}, actor=SYSTEM)
    found = await ring.authenticate(db, secret)
    assert found.key_limits == Limits(5, 500, 3, tokens_per_day=10_000)
    assert found.may_use("Base")


OLD_KEY = text(
    "INSERT INTO api_keys (id, name, digest, redacted, scopes, created_at)"
    " VALUES ('key_1', 'old', :digest, 'lpx_', '[\"admin\"]', :now)"
).bindparams(bindparam("now", type_=UtcDateTime()))


async def test_a_key_of_an_older_schema_opens_and_is_rotated(fresh_url: URL, ring: KeyRing) -> None:
    db, secret = Database(fresh_url), new_secret()
    async with db._engine.begin() as connection:
        await connection.run_sync(schema.upgrade, "0003")
        row = {"digest": ring.peppers.digest(secret), "now": utc_now()}
        await connection.execute(OLD_KEY, row)
    await db.migrate()
    found = await ring.authenticate(db, secret)
    assert (found.key_id, found.key_limits, found.adapters) == ("key_1", Limits(), None)
    async with db.session(None) as session:
        await change_key(session, "key_1", {"max_concurrency": 2}, actor=SYSTEM)
        _, successor = await ring.rotate(session, "key_1", timedelta(0), actor=SYSTEM)
    await refusal(db, ring, secret)
    assert (await ring.authenticate(db, successor)).key_limits == Limits(max_concurrency=2)
    await db.dispose()


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"expires_at": utc_now() - timedelta(seconds=1)},
        {"adapters": ["support"]},  # of a key that does more than infer
        {"tokens_per_minute": 0},
    ],
)
async def test_an_impossible_change_changes_nothing(
    db: Database, ring: KeyRing, acme: Tenant, given: dict[str, object]
) -> None:
    key, _ = await make(db, ring, acme.id, "infer", "admin")
    with pytest.raises(BadRequest):
        async with db.session(acme.id) as session:
            await change_key(session, key.id, given, actor=SYSTEM)
    async with db.read(acme.id) as session:
        same = await get_key(session, key.id)
        assert (same.name, same.expires_at, same.adapters) == ("test", None, None)
    entries = [entry for entry in await audited(db) if entry.target == key.id]
    assert [entry.action for entry in entries] == ["key.created"]


async def test_a_revoked_key_is_neither_changed_nor_rotated(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    key, _ = await make(db, ring, acme.id)
    async with db.session(acme.id) as session:
        await revoke_key(session, key.id, actor=SYSTEM)
    with pytest.raises(Conflict):
        async with db.session(acme.id) as session:
            await change_key(session, key.id, {"name": "x"}, actor=SYSTEM)
    with pytest.raises(Conflict):
        await rotate(db, ring, key, timedelta(0))


async def rotate(
    db: Database, ring: KeyRing, key: ApiKey, overlap: timedelta
) -> tuple[ApiKey, str]:
    async with db.session(key.tenant_id) as session:
        return await ring.rotate(session, key.id, overlap, actor=SYSTEM)


async def test_both_keys_work_during_the_overlap_and_then_the_new_one_alone(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    ends = utc_now() + timedelta(days=90)
    bound = {"adapters": ["support"], "limits": Limits(7), "expires_at": ends}
    old, old_secret = await make(db, ring, acme.id, "infer", **bound)
    new, new_secret = await rotate(db, ring, old, timedelta(hours=1))
    assert (new.rotated_from, new.id != old.id, new_secret != old_secret) == (old.id, True, True)
    before, after = [await ring.authenticate(db, secret) for secret in (old_secret, new_secret)]
    assert (after.scopes, after.key_limits) == (before.scopes, before.key_limits)
    assert (after.adapters, new.expires_at) == (before.adapters, ends)
    async with db.session(None) as session:
        row = await get_key(session, old.id)
        assert timedelta(minutes=59) < row.expires_at - utc_now() <= timedelta(hours=1)
        row.expires_at = utc_now() - timedelta(microseconds=1)  # the overlap is over
    await refusal(db, ring, old_secret)
    assert (await ring.authenticate(db, new_secret)).key_id == new.id


async def test_an_overlap_of_nothing_ends_the_old_key_at_once(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    old, old_secret = await make(db, ring, acme.id)
    _, new_secret = await rotate(db, ring, old, timedelta(0))
    await refusal(db, ring, old_secret)
    assert (await ring.authenticate(db, new_secret)).tenant_id == acme.id


async def test_no_overlap_outlives_the_keys_own_expiry(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    ends = utc_now() + timedelta(minutes=5)
    old, _ = await make(db, ring, acme.id, expires_at=ends)
    new, _ = await rotate(db, ring, old, timedelta(days=1))
    async with db.read(None) as session:
        assert (await get_key(session, old.id)).expires_at == new.expires_at == ends


async def test_a_key_is_rotated_once_and_its_successor_after_it(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    first, _ = await make(db, ring, acme.id)
    results = await asyncio.gather(
        *(rotate(db, ring, first, timedelta(hours=1)) for _ in range(4)), return_exceptions=True
    )
    (second,) = [result[0] for result in results if isinstance(result, tuple)]
    refused = [result for result in results if isinstance(result, Conflict)]
    assert len(refused) == 3
    assert all(second.id in str(error) for error in refused)
    third, secret = await rotate(db, ring, second, timedelta(hours=1))
    assert third.rotated_from == second.id
    assert (await ring.authenticate(db, secret)).key_id == third.id


@pytest.mark.parametrize("overlap", [timedelta(seconds=-1), MAX_OVERLAP + timedelta(seconds=1)])
async def test_an_overlap_has_bounds(
    db: Database, ring: KeyRing, acme: Tenant, overlap: timedelta
) -> None:
    key, _ = await make(db, ring, acme.id)
    with pytest.raises(BadRequest) as caught:
        await rotate(db, ring, key, overlap)
    assert caught.value.param == "overlap_s"


async def test_a_new_pepper_takes_over_key_by_key(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    key, secret = await make(db, ring, acme.id)
    unused, unused_secret = await make(db, ring, acme.id)
    await ring.authenticate(db, secret)  # used just now: the hash is renewed nevertheless
    newest = KeyRing(b"a newer pepper")
    both = KeyRing(b"a newer pepper", [b"an ancient one", b"a pepper for tests"])
    assert (await both.authenticate(db, secret)).key_id == key.id
    assert (await newest.authenticate(db, secret)).key_id == key.id
    await refusal(db, ring, secret)
    await refusal(db, newest, unused_secret)
    assert (await both.authenticate(db, unused_secret)).key_id == unused.id
    assert (await newest.authenticate(db, unused_secret)).key_id == unused.id


def test_old_peppers_are_settings_that_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_KEY_PEPPERS_OLD", '["an old pepper of ours", "an ancient pepper"]')
    settings = Settings()
    assert settings.old_peppers() == [b"an old pepper of ours", b"an ancient pepper"]
    assert "an old" not in repr(settings)
    assert "an old pepper of ours" in settings.given_secrets
    monkeypatch.setenv("LORAPLEX_KEY_PEPPERS_OLD", '["too short"]')
    with pytest.raises(ValidationError) as error:
        Settings()
    assert "too short" not in str(error.value)


async def test_every_change_of_a_key_is_in_the_audit_log_without_its_secret(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    actor = Actor("key_someone", "req_1")
    async with db.session(acme.id) as session:
        key, secret = await ring.create(session, acme.id, "k", ["infer"], actor=actor)
        await change_key(session, key.id, {"name": "new", "expires_at": None}, actor=actor)
        new, new_secret = await ring.rotate(session, key.id, timedelta(hours=1), actor=actor)
        for _ in range(2):
            await revoke_key(session, new.id, actor=actor)
        await change_key(session, key.id, {}, actor=actor)
    entries = [entry for entry in await audited(db) if entry.action.startswith("key.")]
    assert [(entry.action, entry.target) for entry in entries] == [
        ("key.created", key.id),
        ("key.changed", key.id),
        ("key.rotated", key.id),
        ("key.revoked", new.id),
    ]
    assert {(entry.actor, entry.request_id, entry.tenant_id) for entry in entries} == {
        ("key_someone", "req_1", acme.id)
    }
    told = "".join(str(entry.details) for entry in entries)
    assert secret[4:] not in told
    assert new_secret[4:] not in told
