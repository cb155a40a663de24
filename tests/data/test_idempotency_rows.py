"""Named requests as rows on both databases: one answers, and a dead one is replaced."""

import asyncio
from datetime import timedelta

import pytest

from loraplex.platform import idempotency
from loraplex.platform.db.models import IdempotentRequest
from loraplex.platform.errors import StillRunning
from loraplex.platform.idempotency import LEASE_S, Claim, Kept

pytestmark = pytest.mark.anyio

ANSWER = Kept("f" * 64, 201, {"id": "key_1", "secret": "lpx_x"})


async def claim(db, actor="key_a", name="once"):
    async with db.session(None) as session:
        return await idempotency.claim(session, actor, name)


async def keep(db, mine: Claim) -> None:
    async with db.session(None) as session:
        await idempotency.keep(session, mine, ANSWER)


async def age(db, **ago: float) -> None:
    async with db.session(None) as session:
        row = await session.get(IdempotentRequest, ("key_a", "once"))
        row.created_at -= timedelta(**ago)


async def test_of_many_at_once_one_answers(db):
    found = await asyncio.gather(*(claim(db) for _ in range(8)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["Claim"] + ["StillRunning"] * 7
    assert isinstance(await claim(db, actor="key_b"), Claim)
    (mine,) = [each for each in found if isinstance(each, Claim)]
    await keep(db, mine)
    assert await claim(db) == Kept("f" * 64, 201, {"id": "key_1", "secret": None})


async def test_who_was_replaced_keeps_and_drops_nothing(db):
    slow = await claim(db)
    await age(db, seconds=LEASE_S + 1)
    new = await claim(db)
    assert isinstance(new, Claim)
    await keep(db, slow)
    async with db.session(None) as session:
        await idempotency.drop(session, slow)
        assert await idempotency.renew(session, slow) == slow
    with pytest.raises(StillRunning):
        await claim(db)
    async with db.session(None) as session:
        new = await idempotency.renew(session, new)
    await keep(db, new)
    assert isinstance(await claim(db), Kept)


async def test_who_renews_is_not_replaced(db):
    mine = await claim(db)
    await age(db, seconds=LEASE_S - 1)
    aged = Claim(mine.actor, mine.name, mine.at - timedelta(seconds=LEASE_S - 1))
    async with db.session(None) as session:
        renewed = await idempotency.renew(session, aged)
    assert renewed.at > aged.at
    await age(db, seconds=LEASE_S - 1)
    with pytest.raises(StillRunning):
        await claim(db)


async def test_a_day_later_all_is_new(db):
    await keep(db, await claim(db))
    await age(db, hours=23)
    assert isinstance(await claim(db), Kept)
    await age(db, hours=2)
    assert isinstance(await claim(db, actor="key_b"), Claim)  # whoever comes clears the old ones
    async with db.read(None) as session:
        assert await session.get(IdempotentRequest, ("key_a", "once")) is None
