"""Tenants and their limits."""

import asyncio
import math

import pytest
from sqlalchemy import URL, bindparam, text

from loraplex.platform import tenants
from loraplex.platform.audit import SYSTEM, Actor, list_entries
from loraplex.platform.db import schema
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import UtcDateTime, utc_now
from loraplex.platform.errors import BadRequest, NameConflict, NotFound
from loraplex.platform.quotas import BOUNDS, TenantLimits

pytestmark = pytest.mark.anyio


async def test_a_tenant_is_made_found_and_listed(db: Database) -> None:
    limits = TenantLimits(60, 1000, 4, 2.5, 16, 0.3)
    async with db.session(None) as session:
        made = [await tenants.create_tenant(session, name, limits, actor=SYSTEM) for name in "bac"]
    async with db.read(None) as session:
        found = await tenants.get_tenant(session, made[0].id)
        assert TenantLimits.of(found) == limits
        assert (await tenants.find_tenant(session, "a")).id == made[1].id
        assert await tenants.find_tenant(session, "d") is None
        page = await tenants.list_tenants(session, limit=2)
        rest = await tenants.list_tenants(session, after=page.items[-1].id)
    assert [t.id for t in (*page.items, *rest.items)] == sorted(t.id for t in made)
    assert (page.has_more, rest.has_more) == (True, False)


async def test_a_name_is_taken_once_even_at_once(db: Database) -> None:
    async def create() -> Tenant:
        async with db.session(None) as session:
            return await tenants.create_tenant(session, "same", actor=SYSTEM)

    results = await asyncio.gather(*(create() for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(result, Tenant) for result in results) == 1
    assert sum(isinstance(result, NameConflict) for result in results) == 7


@pytest.mark.parametrize("name", ["", "A", "-a", ".", "a b", "a/b", "a\n", "é", "a" * 64])
async def test_a_bad_name_is_refused(db: Database, name: str) -> None:
    with pytest.raises(BadRequest, match="lower-case"):
        async with db.session(None) as session:
            await tenants.create_tenant(session, name, actor=SYSTEM)


async def test_limits_are_replaced_and_removed(db: Database, acme: Tenant) -> None:
    for limits in (
        TenantLimits(1, 2, 3, 4, 5, 0.6),
        TenantLimits(tokens_per_minute=5, weight=0.1),
        TenantLimits(),
    ):
        async with db.session(None) as session:
            await tenants.set_limits(session, acme.id, limits, actor=SYSTEM)
        async with db.read(None) as session:
            assert TenantLimits.of(await tenants.get_tenant(session, acme.id)) == limits


@pytest.mark.parametrize("name", BOUNDS)
def test_an_impossible_limit_is_refused(name: str) -> None:
    least, most = BOUNDS[name]
    for value in (least, most):
        assert getattr(TenantLimits(**{name: value}), name) == value
    for value in (least - 1, -1, most + 1, math.inf, math.nan):
        with pytest.raises(BadRequest, match=f"between {least} and {most}") as caught:
            TenantLimits(**{name: value})
        assert caught.value.param == name
        assert ("null" in caught.value.message) == (name not in ("weight", "kv_share"))


async def test_tenants_from_before_the_policy_have_the_default_one(fresh_url: URL) -> None:
    """And it is dropped and made again without a loss of other limits."""
    add = (
        "INSERT INTO tenants (id, name, max_concurrency, created_at) VALUES ('ten_1', 'a', 7, :now)"
    )
    db = Database(fresh_url)
    async with db._engine.begin() as connection:
        await connection.run_sync(schema.upgrade, "0002")
        await connection.execute(text(add).bindparams(bindparam("now", utc_now(), UtcDateTime())))
        await connection.run_sync(schema.upgrade)
    for limits in (TenantLimits(max_concurrency=7), TenantLimits(None, None, 7, 2, 3, 0.5)):
        async with db.session(None) as session:
            await tenants.set_limits(session, "ten_1", limits, actor=SYSTEM)
        async with db._engine.begin() as connection:
            await connection.run_sync(schema.downgrade, "0002")
            await connection.run_sync(schema.upgrade)
        async with db.read(None) as session:
            tenant = await tenants.get_tenant(session, "ten_1")
            assert TenantLimits.of(tenant) == TenantLimits(max_concurrency=7)
    await db.dispose()


async def test_an_unknown_tenant_is_not_found(db: Database, acme: Tenant) -> None:
    for call in (
        lambda session: tenants.get_tenant(session, "ten_none"),
        lambda session: tenants.set_limits(session, "ten_none", TenantLimits(), actor=SYSTEM),
        lambda session: tenants.set_suspended(session, "ten_none", True, actor=SYSTEM),
    ):
        with pytest.raises(NotFound):
            async with db.session(None) as session:
                await call(session)


async def test_suspending_twice_keeps_the_first_moment(db: Database, acme: Tenant) -> None:
    moments = []
    for suspended in (True, True, False, False):
        async with db.session(None) as session:
            tenant = await tenants.set_suspended(session, acme.id, suspended, actor=SYSTEM)
            moments.append(tenant.suspended_at)
    assert moments[0] is not None
    assert moments == [moments[0], moments[0], None, None]


async def test_every_change_is_audited_and_what_changes_nothing_is_not(db: Database) -> None:
    actor = Actor("key_1", "req_1")
    tight = TenantLimits(5, tokens_per_day=9, max_adapters=3)
    async with db.session(None) as session:
        made = await tenants.create_tenant(session, "a", TenantLimits(5), actor=actor)
    for limits in (tight, tight, TenantLimits()):
        async with db.session(None) as session:
            await tenants.set_limits(session, made.id, limits, actor=actor)
    for suspended in (True, True, False, False):
        async with db.session(None) as session:
            await tenants.set_suspended(session, made.id, suspended, actor=actor)
    async with db.read(None) as session:
        entries = (await list_entries(session, tenant_id=made.id)).items[::-1]
    assert [(entry.action, entry.details) for entry in entries] == [
        ("tenant.created", {"name": "a", "limits": {"requests_per_minute": 5}}),
        ("tenant.changed", {"limits": {"tokens_per_day": 9, "max_adapters": 3}}),
        (
            "tenant.changed",
            {"limits": {"requests_per_minute": None, "tokens_per_day": None, "max_adapters": None}},
        ),
        ("tenant.suspended", {}),
        ("tenant.resumed", {}),
    ]
    assert {(e.actor, e.request_id, e.target) for e in entries} == {("key_1", "req_1", made.id)}


async def test_a_failed_change_leaves_no_entry(db: Database, acme: Tenant) -> None:
    with pytest.raises(NameConflict):
        async with db.session(None) as session:
            await tenants.create_tenant(session, "acme", actor=SYSTEM)
    async with db.read(None) as session:
        assert len((await list_entries(session)).items) == 1
