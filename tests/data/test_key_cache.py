"""The cache of keys: brief, bounded, emptied by a change, and never in the way of a refusal."""

from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from made_keys import make, refusal
from sqlalchemy import URL

from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Forbidden, InvalidKey, Unavailable
from loraplex.platform.key_cache import TTL_S, KeyCache
from loraplex.platform.key_changes import change_key, revoke_key
from loraplex.platform.keys import KeyRing, get_key
from loraplex.platform.quotas import Limits
from loraplex.platform.tenants import set_suspended

PEPPER = b"a pepper for tests"
SIZE = 3
DIGESTS = st.sampled_from("abcde")


class Clock:
    """Seconds that go on when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CacheMachine(RuleBasedStateMachine):
    """Against a dict of all that was put, the latest use last."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.cache: KeyCache[int] = KeyCache(4.0, SIZE, self.clock)
        self.model: dict[str, tuple[float, int]] = {}
        self.count = 0
        self.reading = self.cache.begin()
        self.changed = False

    @rule()
    def begin_to_read(self) -> None:
        self.reading, self.changed = self.cache.begin(), False

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(digest=DIGESTS, at_most_s=st.sampled_from([None, 0.5, 9.0, 0.0, -1.0]))
    def put(self, digest: str, at_most_s: float | None) -> None:
        self.count += 1
        self.cache.put(digest, self.count, self.reading, at_most_s)
        if self.changed:
            return
        self.model.pop(digest, None)
        lasts_s = 4.0 if at_most_s is None else min(4.0, at_most_s)
        self.model[digest] = (self.reading.at + lasts_s, self.count)
        if len(self.model) > SIZE:
            self.model.pop(next(iter(self.model)))

    @rule(digest=DIGESTS)
    def get(self, digest: str) -> None:
        until, value = self.model.pop(digest, (0.0, None))
        expected = value if self.clock.now < until else None
        assert self.cache.get(digest) == expected
        if expected is not None:
            self.model[digest] = (until, expected)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()
        self.changed = True

    @invariant()
    def it_is_bounded(self) -> None:
        assert len(self.cache._kept) <= SIZE


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_cache_is_briefer_than_what_is_promised() -> None:
    assert TTL_S <= 0.5


@pytest.mark.anyio
async def test_another_server_heeds_a_change_within_a_second(
    db: Database, db_url: URL, ring: KeyRing, acme: Tenant
) -> None:
    """Two rings on one database are two servers: one makes the changes, the other has a cache."""
    clock = Clock()
    there, elsewhere = KeyRing(PEPPER, cache=KeyCache(clock=clock)), Database(db_url)
    key, secret = await make(db, ring, acme.id, "infer")

    async def seen() -> object:
        try:
            return (await there.authenticate(elsewhere, secret)).key_limits
        except (InvalidKey, Forbidden) as error:
            return type(error)

    assert await seen() == Limits()
    for change, expected in (
        (
            lambda s: change_key(s, key.id, {"max_concurrency": 1}, actor=SYSTEM),
            Limits(None, None, 1),
        ),
        (lambda s: set_suspended(s, acme.id, True, actor=SYSTEM), Forbidden),
        (lambda s: set_suspended(s, acme.id, False, actor=SYSTEM), Limits(None, None, 1)),
        (lambda s: revoke_key(s, key.id, actor=SYSTEM), InvalidKey),
    ):
        async with db.session(None) as session:
            await change(session)
        clock.now += 1.0
        assert await seen() == expected
    await elsewhere.dispose()


@pytest.mark.anyio
async def test_a_kept_key_needs_no_database_and_dies_with_its_expiry(
    db: Database, ring: KeyRing, acme: Tenant
) -> None:
    clock = Clock()
    cached = KeyRing(PEPPER, cache=KeyCache(100.0, clock=clock))
    _, secret = await make(db, ring, acme.id, expires_at=utc_now() + timedelta(seconds=90))
    known = await cached.authenticate(db, secret)
    gone = Database("sqlite:////nowhere/none.db")
    assert await cached.authenticate(gone, secret) is known
    clock.now += 90
    with pytest.raises(Unavailable):
        await cached.authenticate(gone, secret)
    await gone.dispose()


@pytest.mark.anyio
async def test_a_server_forgets_at_once_what_it_has_changed_itself(
    db: Database, acme: Tenant
) -> None:
    cached = KeyRing(PEPPER, cache=KeyCache(clock=Clock()))
    key, secret = await make(db, cached, acme.id)
    await cached.authenticate(db, secret)
    async with db.session(None) as session:
        await revoke_key(session, key.id, actor=SYSTEM)
    cached.forget()
    await refusal(db, cached, secret)


@pytest.mark.anyio
async def test_no_refusal_is_kept(db: Database, acme: Tenant) -> None:
    cached = KeyRing(PEPPER, cache=KeyCache(clock=Clock()))
    key, secret = await make(db, cached, acme.id)
    async with db.session(None) as session:
        (await get_key(session, key.id)).expires_at = utc_now() - timedelta(seconds=1)
    await refusal(db, cached, secret)
    async with db.session(None) as session:
        (await get_key(session, key.id)).expires_at = None
    assert (await cached.authenticate(db, secret)).key_id == key.id
